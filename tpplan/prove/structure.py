"""The structure half of the proof: the applied model runs the model's own ops, and nothing else but conversions.

The plan is applied as on the first and on the last rank of the tp axis, and the applied model is traced on meta tensors
as the model was; tpplan.prove.compare says how the two graphs must agree. Where a plan is made, layers that are like
earlier ones, under equal parts of the plan, are left out at first (tpplan.prove.fewer_layers), so that a counterexample
is found soon; a plan that holds is then compared whole as on the first rank, from which the last differs in the slices
that it has.

That finds sizes baked into code (`view(B, T, self.n_heads, hd)`) and positions or masks built from a sharded length.
Such sizes, and those that code takes from a tensor in another layout, are replaced by what the layouts imply
(tpplan.apply.modules.local_sizes), else attributes of the module that hold them (tpplan.prove.local_attributes); else
code that asks for shapes is told those of one process (tpplan.prove.whole_shapes). Then the result is compared again.
The rules themselves are validated by brute force; the other half of the proof is tpplan.layouts.typecheck.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from tpplan.core.graph import LOSS_SCOPE, ModelGraph, Op, within
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.readings import Reading
from tpplan.layouts.rules import Call, Strategy, quotients, written_sizes
from tpplan.layouts.size_dims import sizes_by_dims
from tpplan.plan.compress_names import by_pattern
from tpplan.plan.plan import ATTRIBUTE, Plan, SizePlan
from tpplan.prove.counterexample import Counterexample
from tpplan.prove.fewer_layers import FewerLayers
from tpplan.prove.local_attributes import Written, with_attributes_of
from tpplan.prove.module_alone import ModuleAlone
from tpplan.prove.module_scope import code_of, given_nodes
from tpplan.prove.original import Original, digest_of


def check_structure(
    original: Original, plan: Plan, *, trial_on: int | None = None, until: str | None = None
) -> Plan | Counterexample:
    """The plan with the sizes that it must replace so that its applied model runs the original's ops; else the first
    difference that no size accounts for. A trial is on one rank alone, and layers that may be left out are; with
    `until` it ends with that module's first call, and sees fewer differences: of ops, their literals and shapes."""
    ranks, fewer = _ranks(plan), FewerLayers.of(original.assignment.graph, digest_of(plan))
    if trial_on is not None:
        ranks = tuple(rank for rank in ranks if rank == trial_on)
    if not (ranks and fewer.standing):
        return _checked(original, original, plan, ranks, until)
    short = original.without(fewer)
    checked = _checked(original, short, plan, ranks, until)
    if isinstance(checked, Plan):
        return checked if trial_on is not None else _checked(original, original, checked, ranks[:1])
    # Whatever the plan: found once for these layers.
    key = Original.is_faithful, frozenset(fewer.standing.items())
    is_faithful = original.assignment.graph.once(key, lambda: short.is_faithful)
    return checked if is_faithful else _checked(original, original, plan, ranks, until)


def _checked(
    original: Original, compared: Original, plan: Plan, ranks: Sequence[int], until: str | None = None
) -> Plan | Counterexample:
    """The plan with the sizes that some ranks must replace, of a model of which all layers are compared, or fewer."""
    known = KnownSizes.of(original.assignment)
    started = known.of_modules(original.assignment)
    written = {**plan.size_plans(), **started}
    for rank in ranks:
        attempts = _Attempts(original, compared, plan, rank, until, started)
        found = attempts.found(written)
        if isinstance(found, Counterexample):
            return found
        written, started = found, attempts.started
    known.note(original.assignment, written, (name for name in written if until is None or within(name, until)))
    return with_sizes(plan, original.assignment.graph, written)


#: how often a module's own code is seen to differ before it is run alone
PATIENCE = 3


@dataclass(slots=True)
class KnownSizes:
    """Remembers what checks of plans for one graph and one number of tp ranks have found.

    `found` has sizes by module and by the strategies that its code saw when it ran as it must; `refuted`, by what
    decides a check, the sizes with which a refuted model came furthest, and how it differed; `unlike` are the classes
    of modules that showed something else alone than in the model.
    """

    found: dict[str, dict[Hashable, tuple[SizePlan, ...]]] = field(default_factory=lambda: defaultdict(dict))
    refuted: dict[Hashable, tuple[Written, Counterexample]] = field(default_factory=dict)
    unlike: set[type[nn.Module]] = field(default_factory=set)

    @classmethod
    def of(cls, assignment: Assignment) -> "KnownSizes":
        """The sizes known for the graph and the tp ranks of an assignment."""
        return assignment.graph.once((cls, assignment.tp), cls)

    def of_modules(self, assignment: Assignment) -> Written:
        """The sizes of modules whose code sees what it saw when it ran as it must."""
        pairs = ((module, own.get(_seen_by(assignment, module))) for module, own in self.found.items())
        return {module: sizes for module, sizes in pairs if sizes}

    def note(self, assignment: Assignment, written: Written, ran: Iterable[str]) -> None:
        """Notes the sizes `written` of modules that ran as they must."""
        for module in ran:
            if sizes := written.get(module):
                self.found[module][_seen_by(assignment, module)] = sizes


def _seen_by(assignment: Assignment, module: str) -> Hashable:
    """The strategies of all decisions on values that a module's own code sees."""
    graph = assignment.graph
    decisions = graph.once(_decisions, lambda: _decisions(assignment))
    return tuple(map(assignment.strategy, decisions[module]))


def _decisions(assignment: Assignment) -> Mapping[str, Sequence[str]]:
    """By module, the decisions on values that its own code sees."""
    graph, found = assignment.graph, defaultdict[str, list[str]](list)
    for module in {node.module for node in graph.nodes}:
        found[module] += (node.name for node in given_nodes(graph, module))
    for name, decider in assignment.deciders.items():
        if isinstance(decider, Reading):
            found[decider.module].append(name)
    return found


class _Attempts:
    """Attempts at the sizes that a rank must replace.

    Modules whose code sees what it saw in an earlier check start with the sizes `started` found there, as long as they
    run as they must with these. Where a module's own code has differed PATIENCE times, it is run alone from then on, if
    that shows what the whole model shows, until it runs as it must.
    """

    def __init__(
        self, original: Original, compared: Original, plan: Plan, rank: int, until: str | None, started: Written
    ) -> None:
        self.original, self.compared, self.plan, self.rank, self.until = original, compared, plan, rank, until
        self.started = started
        self.assignment = original.assignment
        self.known = KnownSizes.of(original.assignment)
        #: how often the whole model differed first in a module's own code
        self.times: Counter[str] = Counter()
        #: the module that is run alone now, and the sizes with which that began
        self.alone = self._alone(until) if until is not None else None
        self.begun: Written = {}
        #: whether a module alone showed the last difference, in place of the model
        self.is_part = False

    def found(self, written: Written) -> Written | Counterexample:
        """The sizes with which the rank runs as it must, from those `written` on. Where no sizes will do, the
        difference of those with which it came furthest: what is before it can be mended."""
        key = self._key()
        if key in self.known.refuted and (problem := self._again(*self.known.refuted[key])) is not None:
            return problem
        furthest: dict[bool, tuple[Written, Counterexample]] = {}  # seen in a module that ran alone, or in the model
        while problem := self._difference(written):
            if problem.culprit is not None:
                return problem
            if wrong := self.started.keys() & self._modules_of(problem):
                self.started, written = ({m: own[m] for m in own.keys() - wrong} for own in (self.started, written))
                continue
            before = furthest.get(self.is_part)
            if before is None or self._place_of(problem) > self._place_of(before[1]):
                furthest[self.is_part] = written, problem
            if (more := self._next(problem, written)) != written:
                written = more
            elif (shown := self._shown_by_all(furthest)) is None:
                written = self.begun
            else:
                self.known.refuted[key] = shown
                self.known.note(self.assignment, shown[0], self.compared.ran_before(shown[1]))
                return shown[1]
        return written

    def _again(self, written: Written, before: Counterexample) -> Counterexample | None:
        """The difference of a model that was refuted with these sizes, which may be run less far than it was then."""
        problem = self._difference(written)
        is_other = problem is None or problem.node != before.node
        if self.alone is not None and self._is_all(self.alone) and is_other:
            self._run_whole(self.alone)
            problem = self._difference(written)
        return problem

    def _key(self) -> Hashable:
        """A key of all that decides the outcome of the attempts: the rank, the layers left out, the strategies."""
        return self.rank, tuple(self.compared.fewer.standing), frozenset(self.assignment.strategies.items())

    def _modules_of(self, problem: Counterexample) -> set[str]:
        """The module of the node that differs, and the one whose code runs or calls it."""
        node = problem.node
        return set() if node is None else {node.module, code_of(self.assignment.graph, node)}

    def _next(self, problem: Counterexample, written: Written) -> Written:
        """The sizes to try after those `written`, which give a problem; these where none is left."""
        assignment, model = self.assignment, self.original.model
        done = self.compared.ran_before(problem) | self.started.keys()
        differing = _Differing(assignment, model, problem, done=done)
        more = differing.with_sizes(written)
        if more == written and not problem.strange:
            more = differing.with_sizes(written, is_given=lambda size: True)
        if more == written:
            more = differing.with_quotients(written)
        if more == written:
            more = with_attributes_of(assignment, model, problem, written, self.original.growing, done=done)
        return more

    def _difference(self, written: Written) -> Counterexample | None:
        """The first difference with these sizes, of the module that is run alone while it has one, else of the model;
        which module is run alone from now on is decided here."""
        self.is_part = False
        if self.alone is not None:
            found = self._seen(written, self.alone)
            self.is_part = not self._is_all(self.alone)
            if not self.is_part or (found is not None and found.culprit is None):
                return found
            self.alone, self.is_part = None, False
        found = self._seen(written)
        if found is None or found.node is None or found.culprit is not None:
            return found
        module = code_of(self.assignment.graph, found.node)
        self.times[module] += 1
        if self.times[module] >= PATIENCE and (alone := self._alone(module)) is not None:
            own = self._seen(written, alone)
            if own is not None and own.node == found.node:
                self.alone, self.begun = alone, written
            else:
                self._run_whole(alone)
        return found

    def _shown_by_all(
        self, furthest: dict[bool, tuple[Written, Counterexample]]
    ) -> tuple[Written, Counterexample] | None:
        """The furthest difference and its sizes, of those that a module alone and the model have shown. None where the
        model does not show what a module did that is still run alone: it is not any more."""
        seen_alone = furthest.pop(True, None)
        if seen_alone is None or self._place_of(seen_alone[1]) <= self._place_of(furthest[False][1]):
            return furthest[False]
        found = self._seen(seen_alone[0])
        if found is not None and found.node == seen_alone[1].node:
            return seen_alone
        if self.alone is None:
            return furthest[False]
        self._run_whole(self.alone)
        return None

    def _place_of(self, problem: Counterexample) -> int:
        return self.original.place_of(problem)

    def _is_all(self, alone: ModuleAlone) -> bool:
        """True where a trial is of that module and nothing else."""
        return alone.module == self.until

    def _run_whole(self, alone: ModuleAlone) -> None:
        """Runs modules of a class alone no more, here and in later checks: that shows something else than the model."""
        self.known.unlike.add(self._class_of(alone.module))
        self.alone = None

    def _class_of(self, module: str) -> type[nn.Module]:
        return type(self.original.model.get_submodule(module))

    def _alone(self, module: str) -> ModuleAlone | None:
        """The module as it is run alone, found once for a graph; None where it cannot be."""
        if module == LOSS_SCOPE or self._class_of(module) in self.known.unlike:
            return None
        return self.assignment.graph.once((ModuleAlone, module), lambda: self.compared.alone(module))

    def _seen(self, written: Written, alone: ModuleAlone | None = None) -> Counterexample | None:
        """The first difference with these sizes, of the model or of a module alone."""
        plan = with_sizes(self.plan, self.assignment.graph, written)
        until = self.until if alone is None else alone.module
        found = self.compared.difference(self.rank, plan, until, alone)
        own = self.original.nodes_by_name[found.node.name] if found is not None and found.node is not None else None
        return replace(found, node=own, rank=self.rank) if found is not None else None


def with_sizes(plan: Plan, graph: ModelGraph, written: Mapping[str, tuple[SizePlan, ...]]) -> Plan:
    """The plan with these sizes to replace, by module name."""
    named = {module or ROOT: sizes for module, sizes in written.items()}
    return replace(plan, sizes=by_pattern(graph, named, lambda sizes, rename: sizes, ()))


def find_difference(original: Original, plan: Plan) -> Counterexample | None:
    """The first difference of the applied model, without adding sizes; None where it runs the original's ops."""
    found = (original.difference(rank, plan) for rank in _ranks(plan))
    return next((difference for difference in found if difference is not None), None)


def _ranks(plan: Plan) -> tuple[int, ...]:
    """The tp ranks that are compared: the first and the last."""
    return (0, plan.mesh.tp - 1) if plan.mesh.tp > 1 else ()


@dataclass(frozen=True, slots=True)
class _Differing:
    """The code that differs on a rank: that of the differing op, and of the same ops in modules of its class, but for
    modules that are `done`, which ran as they must: one retrace for all keeps proofs of many convolutions short."""

    assignment: Assignment
    model: nn.Module
    problem: Counterexample
    done: frozenset[str]

    def with_sizes(
        self, written: Mapping[str, tuple[SizePlan, ...]], *, is_given: Callable[[int], bool] | None = None
    ) -> dict[str, tuple[SizePlan, ...]]:
        """The sizes `written` so far plus those of the ops, where their code gives a size of another layout.

        `is_given` says which sizes of a slice the code may give for the whole's; by default those that were seen.
        """
        assignment, found, seen = self.assignment, dict(written), self.problem.strange.__contains__
        calls: dict[str, list[tuple[Call, Strategy]]] = defaultdict(list)
        for op in assignment.graph.ops:
            calls[op.module].append((Call.of(assignment.graph, op), assignment.strategy(op.name)))
        for op in self._ops():
            own = found.get(op.module, ())
            placed = Call.of(assignment.graph, op), assignment.strategy(op.name)
            sizes = _sizes_of(placed, calls[op.module], assignment.tp, is_given or seen)
            found[op.module] = (*own, *(size for size in sizes if size not in own))
        return {module: sizes for module, sizes in found.items() if sizes}

    def with_quotients(self, written: Mapping[str, tuple[SizePlan, ...]]) -> dict[str, tuple[SizePlan, ...]]:
        """The sizes `written` so far plus the quotients of the ops where an attribute that they may be computed with is
        a rank's."""
        assignment, found = self.assignment, dict(written)
        for op in self._ops():
            own = found.get(op.module, ())
            if any(size.call.startswith(ATTRIBUTE) for size in own):
                more = quotients(Call.of(assignment.graph, op), assignment.strategy(op.name), assignment.tp)
                found[op.module] = (*own, *(size for size in more if size not in own))
        return found

    def _ops(self) -> Iterator[Op]:
        """Ops with the differing op's target in the own code of modules of its class; none in the loss."""
        node = self.problem.node
        if not isinstance(node, Op) or node.module == LOSS_SCOPE:
            return iter(())
        cls, graph = type(self.model.get_submodule(node.module)), self.assignment.graph
        alike = (op for op in graph.ops if op.target == node.target and op.module not in self.done)
        others = (op for op in alike if op.module != LOSS_SCOPE)
        return (op for op in others if type(self.model.get_submodule(op.module)) is cls)


def _sizes_of(
    placed: tuple[Call, Strategy], calls: list[tuple[Call, Strategy]], tp: int, is_given: Callable[[int], bool]
) -> Iterator[SizePlan]:
    """Yields the sizes of a call that its code may take from another layout: as dims of its tensor where they are dims,
    which leaves batch and length free, else as numbers."""
    by_dims = {size.position: size for size in sizes_by_dims(calls, placed, tp, is_given)}
    yield from by_dims.values()
    yield from (size for size in written_sizes(*placed, tp) if size.position not in by_dims)
