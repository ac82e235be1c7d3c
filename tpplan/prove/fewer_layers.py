"""Leaves repeated layers out of a proof: a graph, its model and its plan with two of each kind of layer.

Layers of a repeated block have equal nodes. Of those under equal parts of a plan the first two stay, so that a layer
still follows another. What reads the output of a layer that is left out reads that layer's input instead, as code does
that calls one layer after the other. A model whose code does something else with fewer layers has another graph than
this, and is to be compared as a whole.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard, TypeVar

from torch import nn

from tpplan.core.graph import AS_IF_EVEN, Argument, Boundary, Direction, ModelGraph, Op, Ref, RepeatedBlock, enclosing
from tpplan.core.name_patterns import format_ranges, parse_ranges, substitute
from tpplan.core.repeated_blocks import members
from tpplan.plan.plan import Plan
from tpplan.torch_internals.modules import own_children
from tpplan.trace.whole.opaque import Opaques

#: layers of a kind that stay
KEPT = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerLayers:
    """The layers that are left out, each with the layer that stands for it; by default none."""

    standing: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: ModelGraph, digest: Callable[[str], Hashable]) -> "FewerLayers":
        """The layers that may be left out of a graph; none where its questions about inputs, or weights under several
        names, may depend on one, or other code reads a weight of one. `digest` gives all that a plan does in one."""
        standing: dict[str, str] = {}
        is_asked = any(answer != AS_IF_EVEN for _, answer, _ in graph.questions)
        for block in graph.blocks if not is_asked else ():
            kept: dict[Hashable, list[str]] = {}
            for name in block.names:
                own = kept.setdefault(digest(name), [])
                if len(own) < KEPT:
                    own.append(name)
                else:
                    standing[name] = own[-1]
        found = cls(standing=standing)
        names = ((source.label, *source.aliases) for source in graph.sources if source.aliases)
        is_shared = any(any(map(found.is_left_out, own)) for own in names)
        return cls() if is_shared or found._are_read_elsewhere(graph) else found

    def is_left_out(self, name: str) -> bool:
        """True for a layer that is left out, and for what is inside it."""
        return any(module in self.standing for module in enclosing(name))

    def _are_read_elsewhere(self, graph: ModelGraph) -> bool:
        """True where a node outside of the layers reads one of their parameters or buffers, or it is an output."""
        sources = self._sources(graph)
        read = (value for node in graph.nodes if not self.is_left_out(node.module) for value in node.operands)
        return not sources.isdisjoint(read) or not sources.isdisjoint(value for _, value in graph.outputs)

    def _sources(self, graph: ModelGraph) -> frozenset[str]:
        return frozenset(source.result for source in graph.sources if self.is_left_out(source.label))

    def graph(self, graph: ModelGraph) -> ModelGraph:
        """The graph without the layers."""
        if not self.standing:
            return graph
        images = self._images(graph)
        nodes = {node.name: node for name in self.standing for node in members(graph, name)}
        values = self._sources(graph).union(*(node.results for node in nodes.values()))
        return ModelGraph(
            values={
                name: replace(value, storage=images[value.storage]) if value.storage in images else value
                for name, value in graph.values.items()
                if name not in values
            },
            sources=tuple(source for source in graph.sources if source.result not in values),
            nodes=tuple(_reading(node, images) for node in graph.nodes if node.name not in nodes),
            outputs=tuple((path, images.get(value, value)) for path, value in graph.outputs),
            loss=images.get(graph.loss, graph.loss) if graph.loss is not None else None,
            blocks=tuple(self._block(block) for block in graph.blocks),
            questions=graph.questions,
            read_by_stubs=frozenset(images.get(name, name) for name in graph.read_by_stubs),
            lines=graph.lines,
            other_names=graph.other_names,
            held={name: path for name, path in graph.held.items() if name not in values},
        )

    def _images(self, graph: ModelGraph) -> dict[str, str]:
        """The value that is read in place of each value of a layer: for an output the layer's first input of its shape
        and dtype, else the value at its place in the layer that stays."""
        images: dict[str, str] = {}
        for name, other in self.standing.items():
            for own, like in zip(members(graph, name), members(graph, other), strict=True):
                images.update(zip(own.results, like.results, strict=True))
        for node in graph.nodes:
            if isinstance(node, Boundary) and node.module in self.standing and node.direction is Direction.OUTPUT:
                entering = (own.operand for own in members(graph, node.module) if _enters(own, node.module))
                passed = next((value for value in entering if _are_alike(graph, value, node.result)), None)
                if passed is not None:
                    made, given = graph.values[node.result].storage, graph.values[passed].storage
                    images[made], images[node.result] = images.get(given, given), images.get(passed, passed)
        return images

    def _block(self, block: RepeatedBlock) -> RepeatedBlock:
        kept = (i for i, name in zip(block.indices, block.names, strict=True) if name not in self.standing)
        return replace(block, indices=tuple(kept))

    def plan(self, plan: Plan) -> Plan:
        """The plan without what it says of the layers."""

        def kept(table: Mapping[str, T]) -> dict[str, T]:
            return {name: entry for name, entry in table.items() if not self.is_left_out(name)}

        def names(keys: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(key for key in keys if not self.is_left_out(key))

        parameters = {name: replace(own, reads=kept(own.reads)) for name, own in kept(plan.parameters).items()}
        buffers = {name: replace(own, reads=kept(own.reads)) for name, own in kept(plan.buffers or {}).items()}
        experts = plan.experts
        return replace(
            plan,
            blocks={pattern: self._ranges(pattern, ranges) for pattern, ranges in plan.blocks.items()},
            parameters=parameters,
            buffers=buffers or None,
            boundaries=kept(plan.boundaries),
            sizes=kept(plan.sizes),
            losses=kept(plan.losses),
            draws=names(plan.draws),
            recompute=kept(plan.recompute),
            opaque=kept(plan.opaque) if plan.opaque is not None else None,
            experts=replace(experts, modules=kept(experts.modules)) if experts is not None else None,
            fsdp=replace(
                plan.fsdp,
                units=names(plan.fsdp.units),
                exceptions=names(plan.fsdp.exceptions),
                over_tp=names(plan.fsdp.over_tp or ()) or None,
            ),
        )

    def _ranges(self, pattern: str, ranges: str) -> str:
        kept = (index for index in parse_ranges(ranges) if substitute(pattern, index) not in self.standing)
        return format_ranges(tuple(kept))

    def opaques(self, opaques: Opaques) -> Opaques:
        """The modules that run whole, without those in the layers."""
        names = [name for name in opaques.reasons if not self.is_left_out(name)]
        return replace(
            opaques,
            reasons={name: opaques.reasons[name] for name in names},
            kinds={name: opaques.kinds[name] for name in names},
        )

    @contextlib.contextmanager
    def left_out(self, model: nn.Module) -> Iterator[None]:
        """A context in which the model's containers do not hold the layers."""
        holders = {name.rpartition(".")[0] for name in self.standing}
        before = [(holder, dict(own_children(holder))) for holder in map(model.get_submodule, sorted(holders))]
        try:
            for name in self.standing:
                holder_name, _, own = name.rpartition(".")
                del own_children(model.get_submodule(holder_name))[own]
            yield
        finally:
            for holder, modules in before:
                own_children(holder).clear()
                own_children(holder).update(modules)


def _enters(node: Op | Boundary, module: str) -> TypeGuard[Boundary]:
    return isinstance(node, Boundary) and node.module == module and node.direction is Direction.INPUT


def _are_alike(graph: ModelGraph, first: str, second: str) -> bool:
    one, other = graph.values[first], graph.values[second]
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _reading(node: Op | Boundary, images: Mapping[str, str]) -> Op | Boundary:
    """The node with other values among its operands."""
    if images.keys().isdisjoint(node.operands):
        return node
    if isinstance(node, Boundary):
        return replace(node, operand=images[node.operand])

    def of(argument: Argument) -> Argument:
        if isinstance(argument, Ref):
            return Ref(images.get(argument.name, argument.name))
        return tuple(map(of, argument)) if isinstance(argument, tuple) else argument

    return replace(node, args=tuple(map(of, node.args)), kwargs=tuple((name, of(value)) for name, value in node.kwargs))
