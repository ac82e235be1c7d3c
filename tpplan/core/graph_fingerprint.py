"""The fingerprint of a traced model: equal for two graphs that compute the same."""

import hashlib
import json

from tpplan.core.graph import Argument, Boundary, ModelGraph, Op, Ref, Source, may_write


def graph_fingerprint(graph: ModelGraph) -> str:
    """sha256 of the computation: changes with any op, shape, literal, module or input.

    Does not change with the order of independent ops, nor with value names, which follow from that order: a model that
    iterates over a set of strings runs such ops in another order in each process.
    """
    return graph.once("fingerprint", lambda: _fingerprint(graph))


def _fingerprint(graph: ModelGraph) -> str:
    seen = _Digests(graph)
    computed = [sorted(map(seen.source, graph.sources)), sorted(map(seen.node, graph.nodes))]
    given = [(path, seen.read(value)) for path, value in graph.outputs]
    loss = seen.read(graph.loss) if graph.loss is not None else None
    return "sha256:" + _digest((computed, given, loss, sorted((block.prefix, block.indices) for block in graph.blocks)))


class _Digests:
    """Digests of values, each made of the digests of what it is computed from; nodes must be added in execution order.

    An op that may write to an operand changes the digest of all values in that operand's storage.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.values = graph.values
        self.of_value: dict[str, str] = {}
        self.of_writes: dict[str, str] = {}

    def source(self, source: Source) -> str:
        """Adds a source and returns its digest, made of its kind and label."""
        found = _digest((source.kind, source.label, source.aliases, source.trainable, self._described(source.result)))
        self.of_value[source.result] = found
        return found

    def node(self, node: Op | Boundary) -> str:
        """Adds a node and returns its digest, made of its arguments' digests."""
        results = [self._described(result) for result in node.results]
        if isinstance(node, Boundary):
            found = _digest((node.module, node.direction, node.path, self.read(node.operand), results))
        else:
            kwargs = [(name, self._argument(value)) for name, value in node.kwargs]
            found = _digest((node.target, node.module, self._argument(node.args), kwargs, results))
        self.of_value.update((result, f"{found}.{i}") for i, result in enumerate(node.results))
        if isinstance(node, Op) and may_write(node):
            self.of_writes.update((self.values[operand].storage, found) for operand in node.operands)
        return found

    def read(self, name: str) -> tuple[str, str]:
        """Digests of a value (its name where nothing computes it) and of the last write to its storage, "" for none."""
        return self.of_value.get(name, name), self.of_writes.get(self.values[name].storage, "")

    def _described(self, name: str) -> object:
        value = self.values[name]
        storage = self.of_value.get(value.storage, value.storage) if value.storage != name else ""
        return value.shape, value.dtype, value.carries_gradient, value.varying, storage

    def _argument(self, argument: Argument) -> object:
        if isinstance(argument, Ref):
            return {"value": self.read(argument.name)}
        return [self._argument(item) for item in argument] if isinstance(argument, tuple) else argument


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()
