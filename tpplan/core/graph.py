"""ModelGraph: what the tracer saw, as frozen data without torch.

A graph is a list of nodes in execution order over named values. Values that share storage name the value whose storage
they are views of. Every crossing of a tensor into or out of a module's forward is a Boundary node: the only places
where a layout may change.
"""

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, TypeVar, cast

from tpplan.core.layout import Layout, LayoutKind, fits
from tpplan.core.units import DTYPE_BYTES

if TYPE_CHECKING:
    import networkx as nx

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ref:
    """A value used as an argument, among literals."""

    name: str


#: what an op is called with: references, literals, and nests of them. dtypes and devices are "dtype:bfloat16".
Argument = Ref | None | bool | int | float | str | tuple["Argument", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor. `carries_gradient`: backward reaches it. `storage`: the value it is a view of, itself if none.
    `varying`: dims whose size data decides, which is another on the day."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    carries_gradient: bool
    storage: str
    varying: tuple[int, ...] = ()

    def can_be(self, layout: Layout, tp: int) -> bool:
        """True when tp ranks can hold it so, whatever sizes data decides."""
        cut = () if layout.dim is None else range(layout.dim, layout.dim + (layout.kind is LayoutKind.JOINT) + 1)
        return fits(self.shape, layout, tp) and not any(dim in cut for dim in self.varying)

    @property
    def num_elements(self) -> int:
        """Elements of the whole value."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole value."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


#: the module that the loss's own ops stand in
LOSS_SCOPE = "<loss>"
#: the module that tpplan's own ops stand in, once a plan is applied
OWN_SCOPE = "<tpplan>"
#: how the path begins of an output that the forward leaves behind, and does not return (tpplan.trace.left_behind)
LEFT_AT = "left at "


class SourceKind(StrEnum):
    """Where a value that no op computes comes from."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An input, parameter, buffer or constant. `label` is the parameter's name or the input's path; a weight that
    stands under several names is one source with the others in `aliases`."""

    kind: SourceKind
    result: str
    label: str
    aliases: tuple[str, ...] = ()
    trainable: bool = False


@dataclass(frozen=True, kw_only=True)
class Op:
    """A call of an operator, e.g. `aten.linear.default`, in the forward of `module` (its name, "" for the root)."""

    name: str
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    results: tuple[str, ...]
    module: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensors it reads, in argument order, one entry per reading."""
        return tuple(references((self.args, tuple(value for _, value in self.kwargs))))


class Direction(StrEnum):
    """Into a module's forward, or out of it."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A tensor crosses into or out of `module`; `path` is the argument's or output's place ("0", "mask", "1.0")."""

    name: str
    module: str
    direction: Direction
    path: str
    operand: str
    result: str

    @property
    def operands(self) -> tuple[str, ...]:
        """The value that crosses."""
        return (self.operand,)

    @property
    def results(self) -> tuple[str, ...]:
        """The value on the other side."""
        return (self.result,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBlock:
    """Sibling modules with the same structure, shapes and order: `prefix` + index for each of `indices`."""

    prefix: str
    indices: tuple[int, ...]

    @property
    def pattern(self) -> str:
        """How the siblings are written in a plan: `layers.*`."""
        return f"{self.prefix}.*" if self.prefix else "*"

    @property
    def names(self) -> tuple[str, ...]:
        """The siblings' module names in order."""
        return tuple(f"{self.prefix}.{index}" if self.prefix else str(index) for index in self.indices)


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """A traced model: sources, nodes in order, outputs, and the repeated blocks found in it.

    `outputs` are (path, value name); `loss` is the scalar from which backward starts, if there is one.
    `questions` are the lines of code that asked for values of inputs, what they were told, and if it was yes or no.
    """

    values: dict[str, Value] = field(hash=False)
    sources: tuple[Source, ...]
    nodes: tuple[Op | Boundary, ...]
    outputs: tuple[tuple[str, str], ...]
    loss: str | None
    blocks: tuple[RepeatedBlock, ...] = ()
    questions: tuple[tuple[str, str, bool], ...] = ()
    #: digests of what each module's forwards called (tpplan.trace.noted_calls)
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False, compare=False)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The op nodes in order."""
        return tuple(node for node in self.nodes if isinstance(node, Op))

    @cached_property
    def boundaries(self) -> tuple[Boundary, ...]:
        """The boundary nodes in order."""
        return tuple(node for node in self.nodes if isinstance(node, Boundary))

    @cached_property
    def parameters(self) -> tuple[Source, ...]:
        """The parameters, each once however many names it has."""
        return tuple(source for source in self.sources if source.kind is SourceKind.PARAMETER)

    @cached_property
    def nodes_by_module(self) -> dict[str, tuple[Op | Boundary, ...]]:
        """The nodes of each module and of what stands inside it, in order; all under ""."""
        found: dict[str, list[Op | Boundary]] = {}
        for node in self.nodes:
            for module in enclosing(node.module):
                found.setdefault(module, []).append(node)
        return {module: tuple(nodes) for module, nodes in found.items()}

    @cached_property
    def consumers(self) -> dict[str, tuple[Op | Boundary, ...]]:
        """Nodes that read a value, in order; a node that reads it twice stands once."""
        found: dict[str, dict[str, Op | Boundary]] = {}
        for node in self.nodes:
            for operand in node.operands:
                found.setdefault(operand, {})[node.name] = node
        return {name: tuple(nodes.values()) for name, nodes in found.items()}

    @cached_property
    def _memo(self) -> dict[Hashable, object]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is worked out of this graph alone, for the first who asks under this key; a changed graph has its
        own."""
        if key not in self._memo:
            self._memo[key] = make()
        return cast(T, self._memo[key])

    @cached_property
    def producers(self) -> dict[str, Op | Boundary]:
        """The node that computes a value; sources have none."""
        return {result: node for node in self.nodes for result in node.results}

    def to_networkx(self) -> "nx.MultiDiGraph[str]":
        """Nodes are sources and nodes by name (attribute `node`), edges carry the value that flows (`value`)."""
        import networkx as nx  # here, for nothing else needs it, and it takes 0.2 s

        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        origin: dict[str, str] = {}
        for source in self.sources:
            graph.add_node(source.result, node=source)
            origin[source.result] = source.result
        for node in self.nodes:
            graph.add_node(node.name, node=node)
            for position, operand in enumerate(node.operands):
                graph.add_edge(origin[operand], node.name, value=operand, position=position)
            origin.update(dict.fromkeys(node.results, node.name))
        return graph

    def to_json(self) -> str:
        """The graph as JSON with sorted keys, without the questions."""
        return json.dumps(replace(self, questions=()), sort_keys=True, default=_as_data)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of what is computed of what: changes with any op, shape, literal, module or input.

        It does not with the order of ops that do not depend on each other, nor with the names that follow from it: code
        that iterates over a set of strings has another order in each process.
        """
        seen = _Digests(self)
        computed = [sorted(map(seen.source, self.sources)), sorted([seen.node(node) for node in self.nodes])]
        given = [(path, seen.read(value)) for path, value in self.outputs]
        loss = seen.read(self.loss) if self.loss is not None else None
        return "sha256:" + _digest(
            (computed, given, loss, sorted((block.prefix, block.indices) for block in self.blocks))
        )


class _Digests:
    """What nodes compute, from sources on; nodes come in order. What an op may write to is another value after it."""

    def __init__(self, graph: ModelGraph) -> None:
        self.values = graph.values
        self.of_value: dict[str, str] = {}
        self.of_writes: dict[str, str] = {}

    def source(self, source: Source) -> str:
        """Of a source, by what it is called."""
        found = _digest((source.kind, source.label, source.aliases, source.trainable, self._described(source.result)))
        self.of_value[source.result] = found
        return found

    def node(self, node: Op | Boundary) -> str:
        """Of a node, by what it reads."""
        results = [self._described(result) for result in node.results]
        if isinstance(node, Boundary):
            found = _digest((node.module, node.direction, node.path, self.read(node.operand), results))
        else:
            kwargs = [(name, self._argument(value)) for name, value in node.kwargs]
            found = _digest((node.target, node.module, self._argument(node.args), kwargs, results))
        self.of_value.update((result, f"{found}.{i}") for i, result in enumerate(node.results))
        if isinstance(node, Op) and _may_write(node):
            self.of_writes.update((self.values[operand].storage, found) for operand in node.operands)
        return found

    def read(self, name: str) -> tuple[str, str]:
        """A value as it is now; by its name where nothing has computed it."""
        return self.of_value.get(name, name), self.of_writes.get(self.values[name].storage, "")

    def _described(self, name: str) -> object:
        value = self.values[name]
        storage = self.of_value.get(value.storage, value.storage) if value.storage != name else ""
        return value.shape, value.dtype, value.carries_gradient, value.varying, storage

    def _argument(self, argument: Argument) -> object:
        if isinstance(argument, Ref):
            return {"value": self.read(argument.name)}
        return [self._argument(item) for item in argument] if isinstance(argument, tuple) else argument


def _may_write(op: Op) -> bool:
    """True for what writes to an operand, as torch names it (`add_`, `add.out`), and for what gives nothing."""
    name, _, overload = op.target.rpartition(".")
    return name.endswith("_") or "out" in overload or not op.results


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _as_data(value: object) -> object:
    """What JSON does not know: a dataclass as a dict of its fields, anything else as it is written."""
    names = getattr(type(value), "__dataclass_fields__", ())  # what dataclasses.fields looks up, and takes longer
    return {name: getattr(value, name) for name in names} if names else str(value)


def references(argument: object) -> Iterator[str]:
    """Names of the values inside an argument, left to right."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def enclosing(name: str) -> tuple[str, ...]:
    """The modules that a name is within, itself first and the root last: `a.b` -> ("a.b", "a", "")."""
    parts = name.split(".") if name else []
    return tuple(".".join(parts[:length]) for length in range(len(parts), -1, -1))


def within(name: str, module: str) -> bool:
    """True when the module called `name` is `module` or stands inside it."""
    return not module or name == module or name.startswith(module + ".")
