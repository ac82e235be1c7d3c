"""Proves a plan for other batches and lengths than the planned ones.

A plan may depend on the planned length unnoticed: a table that is cut at `x.shape[1]` rows looks like a fused weight of
two parts, and a size in code like a number of heads. So a proven plan is proven again, unchanged, at another batch and
length: the model is traced there, the layouts are typed, and the applied model is compared. Unusual sizes show
coincidences: b + 1 and t - 1 first; where something is sharded along either, multiples of tp times a number coprime to
the planned one. Ranks refuse batches and lengths that are not proven (tpplan.apply.modules.input_shapes), and the plan
says why.

The model's own trace runs every layer at the other shapes too. Of the applied model, layers that are like an earlier
one there, and under the same part of the plan, are left out (tpplan.prove.fewer_layers): at the planned shapes each was
compared. Where the applied model then has another graph, all of it is compared.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from tpplan.core.errors import TpplanError, first_line
from tpplan.core.graph import ModelGraph
from tpplan.layouts.assignment import Assignment, assignment_of
from tpplan.layouts.rules import Strategy
from tpplan.layouts.typecheck import Mistyped, implied_strategies
from tpplan.plan.plan import Multiples, OtherShapes, Plan
from tpplan.plan.sections.input_dims import BATCH, BOTH, LENGTH, Dim, dim_through
from tpplan.prove.fewer_layers import FewerLayers
from tpplan.prove.original import Original, digest_of
from tpplan.prove.structure import find_difference
from tpplan.search.like_calls import LikeCalls
from tpplan.search.models.trace_cache import TraceCache, Traced
from tpplan.torch_internals import pytree
from tpplan.trace.forward_arguments import Inputs, path_of
from tpplan.trace.whole.opaque import Opaques

logger = logging.getLogger(__name__)

#: least size to try: smaller ones are likely to equal another size, or to be broadcast
LEAST = 3
#: (batch, length) far from the planned ones, as multiples of them, which differ: what grows with one is seen to
FAR = ((3.5, 5.5), (0.6, 0.3))


def other_shapes(traces: TraceCache, plan: Plan, traced: Traced, assignment: Assignment) -> OtherShapes | None:
    """The other batches and lengths that a proven plan holds for; None where every rank has the whole model."""
    if plan.mesh.tp == 1 or plan.untouched is not None:
        return None
    batch, length = plan.batch.micro_batch, plan.batch.seq_len
    other = next(_coprime_above(batch, plan.mesh.tp)), next(_coprime_below(length, plan.mesh.tp))
    dims, reason = _dims(traces, traced, (batch, length), other)
    return _Search(traces=traces, plan=plan, traced=traced, assignment=assignment, dims=dims, reason=reason).found()


def with_other_shapes(traces: TraceCache, plan: Plan, traced: Traced, assignment: Assignment) -> Plan:
    """The proven plan with its other batches and lengths in its proof."""
    return replace(plan, proof=replace(plan.proof, other_shapes=other_shapes(traces, plan, traced, assignment)))


def _coprime_above(size: int, tp: int) -> Iterator[int]:
    """Yields sizes above the planned one that are coprime to it and to tp."""
    number = max(size, LEAST - 1)
    while True:
        number += 1
        if math.gcd(number, size * tp) == 1:
            yield number


def _coprime_below(size: int, tp: int) -> Iterator[int]:
    """Yields coprime sizes below the planned one, where a table of positions may end, then above it."""
    yield from (number for number in range(size - 1, LEAST - 1, -1) if math.gcd(number, size * tp) == 1)
    yield from _coprime_above(size, tp)


def _dims(
    traces: TraceCache, traced: Traced, planned: tuple[int, int], other: tuple[int, int]
) -> tuple[dict[str, tuple[Dim, ...]], str]:
    """Each input's dims, and why they are not known to grow where example_inputs makes no other shapes ("" else)."""
    try:
        others = [
            traces.subject.made_inputs(other[0], planned[1]),
            traces.subject.made_inputs(planned[0], other[1]),
        ]
    except Exception as error:  # the user's code
        reason = f"example_inputs does not make other shapes: {type(error).__name__}: {first_line(error)}"
        return {path: tuple(map(Dim, shape)) for path, shape in _shapes(traced.inputs).items()}, reason
    first, at_batch, at_length = map(_shapes, (traced.inputs, *others))
    found: dict[str, tuple[Dim, ...]] = {}
    for path, shape in first.items():
        shapes = (shape, at_batch.get(path, ()), at_length.get(path, ()))
        if len(set(map(len, shapes))) > 1:
            found[path] = tuple(map(Dim, shape))
            continue
        batches, lengths = (planned[0], other[0]), (planned[1], other[1])
        found[path] = tuple(dim_through(sizes, batches, lengths) for sizes in zip(*shapes, strict=True))
    return found, ""


def _shapes(inputs: Any) -> dict[str, tuple[int, ...]]:
    leaves = pytree.tree_flatten_with_path(inputs)[0]
    return {path_of(path): tuple(leaf.shape) for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """A proof at a batch and a length: what fails ("" if nothing), and those of BATCH and LENGTH that are sharded."""

    batch: int
    length: int
    problem: str
    sharded: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Proofs of one plan at other shapes; `assignment` is its own at the planned ones. `reason` says why there can be
    none, "" where there can."""

    traces: TraceCache
    plan: Plan
    traced: Traced
    assignment: Assignment
    dims: dict[str, tuple[Dim, ...]]
    reason: str
    #: by batch: a graph that was not traced, and what the plan implies for it
    grown: dict[int, tuple[ModelGraph | None, Mapping[str, Strategy] | Mistyped]] = field(default_factory=dict)

    @property
    def planned(self) -> tuple[int, int]:
        """The planned batch and length."""
        return self.plan.batch.micro_batch, self.plan.batch.seq_len

    @cached_property
    def grows_with(self) -> frozenset[str]:
        """The sizes, of BATCH and LENGTH, with which any dim of the inputs grows."""
        found = {dim.grows_with for dims in self.dims.values() for dim in dims} - {""}
        return frozenset(found - {BOTH} | {BATCH, LENGTH} if BOTH in found else found)

    def found(self) -> OtherShapes:
        """The other shapes of the plan: batch and length proven together, else one of them alone, else none."""
        batch, length = self.planned
        joint = self.first_proven(self.batches, self.lengths)
        if not joint.problem or len(self.grows_with) < len((BATCH, LENGTH)):
            return self.report(joint, joint.problem)
        for batches, lengths in ((self.batches, (length,)), ((batch,), self.lengths)):
            alone = self.first_proven(batches, lengths)
            if not alone.problem:
                return self.report(alone, joint.problem)
        return self.report(joint, joint.problem)

    def first_proven(self, batches: tuple[int, ...], lengths: tuple[int, ...]) -> _Attempt:
        """The first attempt that proves the plan, else the last: first the least demanding sizes, then sizes that tp
        divides where something is sharded along them."""
        first = attempt = self.foreseen(batches[0], lengths[0]) or self.attempt(batches[0], lengths[0])
        rest = [(batch, length) for length in lengths for batch in batches][1:]
        for batch, length in sorted(rest, key=lambda pair: pair[0] != batches[0] and BATCH not in first.sharded):
            divides = {BATCH: batch % self.plan.mesh.tp == 0, LENGTH: length % self.plan.mesh.tp == 0}
            if attempt.problem and all(divides[kind] for kind in first.sharded):
                attempt = self.mistaken(batch, length) or self.attempt(batch, length)
        return attempt

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Batches to try, the least demanding first."""
        own, tp = self.planned[0], self.plan.mesh.tp
        if BATCH not in self.grows_with:
            return (own,)
        return next(_coprime_above(own, tp)), tp * next(
            n for n in _coprime_above(max(own // tp, 1), 1) if math.gcd(n, own) == 1
        )

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths to try, the least demanding first; last half the planned one, for code that takes no odd ones."""
        own, tp = self.planned[1], self.plan.mesh.tp
        if LENGTH not in self.grows_with:
            return (own,)
        sliced = tp * next(n for n in _coprime_below(max(own // tp, 1), 1) if math.gcd(n, own) == 1)
        halves = (own // 2,) if own % (2 * tp) == 0 else ()
        return tuple(dict.fromkeys((next(_coprime_below(own, tp)), sliced, *halves)))

    def report(self, proven: _Attempt, reason: str) -> OtherShapes:
        """The report of an attempt; `reason` says why batch and length were not proven together."""
        found = []
        for kind, here, there in zip((BATCH, LENGTH), self.planned, (proven.batch, proven.length), strict=True):
            if not proven.problem and here != there:
                found.append(Multiples(multiple=math.gcd(here, there)))
            else:
                found.append(Multiples(reason=self.reason or (reason if kind in self.grows_with else None) or None))
        return OtherShapes(inputs=self.dims, batch=found[0], length=found[1])

    def foreseen(self, batch: int, length: int) -> _Attempt | None:
        """The attempt at a batch and a length where it fails at the planned length already, for the batch alone, which
        a graph that is grown from smaller batches shows without a trace; else None."""
        graph, implied = self.implied(batch)
        if graph is None or not isinstance(implied, Mistyped):
            return None
        sharded = self.sharded(graph, batch, self.planned[1])
        return self.failed(batch, length, implied.message, sharded) if BATCH in sharded else None

    def mistaken(self, batch: int, length: int) -> _Attempt | None:
        """The attempt at a batch and a length, which is not the first, where a call may be taken for another one for
        the batch alone, as `foreseen`; else None."""
        graph, implied = self.implied(batch)
        if graph is None or isinstance(implied, Mistyped):
            return None
        found = self.like_calls(graph, implied, (batch, self.planned[1])).mistakable()
        return self.failed(batch, length, found) if found else None

    def implied(self, batch: int) -> tuple[ModelGraph | None, Mapping[str, Strategy] | Mistyped]:
        """The graph at another batch and the planned length as far as it is known without a trace, and what the plan
        implies for it; found once for a batch. None where no graph is known."""
        if batch not in self.grown:
            graph = self.traces.foreseen(batch) if batch != self.planned[0] else None
            self.grown[batch] = graph, {} if graph is None else implied_strategies(graph, self.plan)
        return self.grown[batch]

    def failed(self, batch: int, length: int, message: str, sharded: frozenset[str] = frozenset()) -> _Attempt:
        """The attempt that the grown graph at the planned length shows to fail."""
        logger.info("at batch %d, by the grown graph: %s", batch, message)
        problem = f"at batch {batch}, length {self.planned[1]}: {message}"
        return _Attempt(batch=batch, length=length, problem=problem, sharded=sharded)

    def attempt(self, batch: int, length: int) -> _Attempt:
        """Tries to prove the plan at a batch and a length."""
        if (batch, length) == self.planned:
            return _Attempt(batch=batch, length=length, problem="the inputs have no other shapes")
        graph: ModelGraph | None = None
        try:
            there = self.traces.elsewhere(self.traced.model, batch, length)
            graph = there.graph
            with self.traces.subject.planning():
                problem = self.difference(graph, there.inputs, there.opaques, (batch, length))
        except TpplanError as error:
            problem = first_line(error)
        logger.info("at batch %d, length %d: %s", batch, length, problem or "proven")
        return _Attempt(
            batch=batch,
            length=length,
            problem=problem and f"at batch {batch}, length {length}: {problem}",
            sharded=self.sharded(graph, batch, length) if graph is not None and problem else frozenset(),
        )

    def difference(self, graph: ModelGraph, inputs: Inputs, opaques: Opaques, other: tuple[int, int]) -> str:
        """The first problem of the proof at inputs of an `other` batch and length; "" where the plan is proven."""
        fewer = FewerLayers.of(graph, digest_of(self.plan))
        if fewer.standing:
            found, is_of_all = self.difference_without(fewer, graph, inputs, opaques, other)
            if not found or is_of_all:
                return found
            logger.info("all layers are compared: %s", found)
        return self.difference_without(FewerLayers(), graph, inputs, opaques, other)[0]

    def difference_without(
        self, fewer: FewerLayers, graph: ModelGraph, inputs: Inputs, opaques: Opaques, other: tuple[int, int]
    ) -> tuple[str, bool]:
        """The first problem of the proof of a graph and a model without some layers, of types, of calls that look
        alike, or of what runs; and whether the whole model is known to have it too. Without all layers, one that only
        shapes farther away would show counts as well."""
        plan, units = fewer.plan(self.plan), tuple(unit for unit in self.traced.units if not fewer.is_left_out(unit))
        assignment = assignment_of(fewer.graph(graph), plan, layers=units)
        if isinstance(assignment, Mistyped):
            return assignment.message, False
        near = self.like_calls(assignment.graph, assignment.strategies, other)
        if mistakable := near.mistakable():
            return mistakable, True
        if near.has_unknown() and (farther := "a size may grow" if fewer.standing else self.mistakable_farther(other)):
            return farther, False
        original = Original(
            model=self.traced.model,
            inputs=inputs,
            assignment=assignment,
            loss=self.traces.subject.loss,
            cast=self.traces.subject.cast(units),
            opaques=fewer.opaques(opaques),
            fewer=fewer,
        )
        found = find_difference(original, plan)
        if found is None:
            return "", False
        return found.message, bool(fewer.standing) and original.is_faithful

    def mistakable_farther(self, other: tuple[int, int]) -> str:
        """The first call that may be taken for another one where the plan replaces a number, at shapes far above and
        below, which show how a call's size grows where an `other` shape does not; "" without one. One of them must
        run."""
        problems = []
        for farther in self.far_from(other):
            try:
                far = self.traces.elsewhere(self.traced.model, *farther).graph
            except TpplanError as error:
                problems.append(first_line(error))
                continue
            typed = assignment_of(far, self.plan, layers=self.traced.units)
            if isinstance(typed, Mistyped):
                problems.append(typed.message)
            elif found := self.like_calls(far, typed.strategies, farther).mistakable():
                return found
        return problems[0] if len(problems) == len(FAR) else ""

    def far_from(self, other: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Yields shapes far above and below the planned ones along what differs in an `other` shape, in steps in which
        that differs from the planned one, so that what divides there divides here."""

        def far(multiple: float, planned: int, there: int) -> int:
            step = math.gcd(planned, there)
            return planned if planned == there else max(1, round(multiple * planned / step)) * step

        for batch, length in FAR:
            yield far(batch, self.planned[0], other[0]), far(length, self.planned[1], other[1])

    def like_calls(self, graph: ModelGraph, strategies: Mapping[str, Strategy], other: tuple[int, int]) -> LikeCalls:
        """The calls at the planned shapes beside those of the graph at an `other` batch and length, with its
        strategies."""
        return LikeCalls(
            plan=self.plan,
            planned=self.traced.graph,
            other=graph,
            planned_strategies=self.assignment.strategies,
            other_strategies=strategies,
            inputs=tuple(pair for pair in zip(self.planned, other, strict=True) if pair[0] != pair[1]),
        )

    def sharded(self, graph: ModelGraph, batch: int, length: int) -> frozenset[str]:
        """The sizes, of BATCH and LENGTH, with which any dim grows that the plan shards at its own shapes."""
        if graph.values.keys() != self.traced.graph.values.keys():
            return frozenset()
        ratios = {BATCH: (batch, self.planned[0]), LENGTH: (length, self.planned[1])}
        found: set[str] = set()
        for node in self.traced.graph.nodes:
            for name, layout in zip(node.results, self.assignment.strategies[node.name].results, strict=True):
                if layout.dim is not None:
                    here, there = self.traced.graph.values[name].shape[layout.dim], graph.values[name].shape[layout.dim]
                    found.update(
                        kind for kind, (new, old) in ratios.items() if here != there and there * old == here * new
                    )
        return frozenset(found)
