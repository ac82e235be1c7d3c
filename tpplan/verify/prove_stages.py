"""Proves a plan of stages, from a file, for the model that it is to be applied to.

    proven = prove_stages(plan, build_model, example_inputs, loss=loss)   # VerificationError: stages[i] and a JSON path

What a stage has of the model, receives and sends follows from the layers after which the model is cut, and each stage's
plan must say it. Then each is proven as a model of its own (tpplan.verify.prove_plan), and the stages' graphs are
compared with the whole model's (tpplan.stages.cut_proof): together they run it on the same values.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tpplan.core.errors import VerificationError
from tpplan.core.graph import ModelGraph
from tpplan.costs.prediction.deferred_gradients import deferred_bytes
from tpplan.costs.prediction.memory_replay import bytes_between
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Plan
from tpplan.plan.sections.ranks import StagePlan
from tpplan.search.models.cut_errors import cut_errors, loss_of_sent
from tpplan.search.models.subject import BuildModel, ExampleInputs, Subject
from tpplan.search.models.trace_cache import Reuse, TraceCache
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.rank_memory import Held, held, with_held
from tpplan.stages.cuts import Cut, cut_after, stages_of
from tpplan.trace.trace import Loss
from tpplan.verify.prove_plan import Proven, prove_plan

#: what a stage's section says that follows from the cuts, in the order in which it is compared
_IMPLIED = ("received", "absent", "blank", "receives", "sends", "micro_batch", "tied")
#: names that an error lists
_MOST_LISTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenStages:
    """A proven plan of stages, and what follows from each stage's plan."""

    plan: PipelinePlan
    stages: tuple[Proven, ...]


def prove_stages(
    plan: PipelinePlan,
    build_model: BuildModel,
    example_inputs: ExampleInputs,
    *,
    loss: Loss | None = None,
    is_as_solved: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ProvenStages:
    """Proves a plan of stages for a model. No profile is asked.

    is_as_solved: as `prove_plan` takes it. What a rank holds beside each of its stages is made anew with the rest.
    progress: hears of the number of stages that are proven, and of all.

    Raises VerificationError with the stage and the JSON path of a mistake in the plan, ModelError where the model
    cannot be traced.
    """
    reuse, count, micro_batch = Reuse(), len(plan.stages), plan.batch.micro_batch
    subject = replace(Subject.of_plan(plan.stages[0], build_model, example_inputs, loss), stage=None, experts=None)
    whole = TraceCache(subject, reuse)
    sections = _sections(plan)
    _refuse(_section_problems(whole.really_traced(micro_batch).graph, plan, sections))
    proven: list[Proven] = []
    for index, own in enumerate(plan.stages):
        progress(index, count)
        of_stage = loss if sections[index].last is None else loss_of_sent
        try:
            made = prove_plan(own, build_model, example_inputs, loss=of_stage, is_as_solved=is_as_solved, reuse=reuse)
        except VerificationError as error:
            raise VerificationError(f"stages[{index}].{error}") from error
        proven.append(made)
    _refuse(f"stages[{one.index}].stage: {why}" for one, why in cut_errors(whole, sections, plan.parts, micro_batch))
    progress(count, count)
    if is_as_solved:
        _refuse(_in_flight_problems(plan, sections))
    else:
        proven = _with_what_ranks_hold(plan, proven, reuse)
    return ProvenStages(plan=replace(plan, stages=tuple(one.plan for one in proven)), stages=tuple(proven))


def _refuse(problems: Iterator[str]) -> None:
    """Raises VerificationError for the first problem, if there is one."""
    for problem in problems:
        raise VerificationError(problem)


# ---- what follows from the cuts


def _sections(plan: PipelinePlan) -> list[StagePlan]:
    """The stages as their plans describe them. Raises VerificationError for a plan of no stage, and for one that does
    not say after which layer it ends."""
    found: list[StagePlan] = []
    for index, own in enumerate(plan.stages):
        is_last = index + 1 == len(plan.stages)
        if own.stage is None or (own.stage.index, own.stage.count) != (index, len(plan.stages)):
            raise VerificationError(f"stages[{index}].stage: expected stage {index} of {len(plan.stages)}")
        if (own.stage.last is None) != is_last:
            wanted = "none, as its outputs are the model's" if is_last else "the layer after which the model is cut"
            raise VerificationError(f"stages[{index}].stage.last: expected {wanted}, got {own.stage.last}")
        found.append(own.stage)
    return found


def _section_problems(graph: ModelGraph, plan: PipelinePlan, sections: Sequence[StagePlan]) -> Iterator[str]:
    """Yields what stages say otherwise than follows from the layers after which the whole model's graph is cut."""
    cuts: list[Cut] = []
    for index, stage in enumerate(sections[:-1]):
        assert stage.last is not None
        path = f"stages[{index}].stage.last"
        if stage.last not in graph.nodes_by_module:
            yield f"{path}: the model runs no module {stage.last!r}"
        cut = cut_after(graph, stage.last)
        if cut.why_not:
            yield f"{path}: stages cannot meet after {stage.last}: {cut.why_not}"
        if cuts and cut.position <= cuts[-1].position:
            yield f"{path}: {stage.last} ends no later than {cuts[-1].unit}, after which stage {index - 1} ends"
        cuts.append(cut)
    implied = stages_of(graph, cuts, [1] * len(sections), plan.batch.micro_batch)
    for stage, own in zip(implied, (section.bare for section in sections), strict=True):
        for key in _IMPLIED:
            planned, found = getattr(own, key), getattr(stage, key)
            if planned != found:
                yield f"stages[{stage.index}].stage.{key}: {_difference(planned, found)}"


def _difference(planned: object, implied: object) -> str:
    """The difference of what a plan says and what follows from the cuts, in words; of names those that only one of the
    two has."""
    if not isinstance(planned, tuple) or not isinstance(implied, tuple):
        return f"the plan says {planned}, and the cuts imply {implied}"
    left_out, added = ([one for one in a if one not in b] for a, b in ((implied, planned), (planned, implied)))
    found = [f"{what} {_listed(names)}" for what, names in (("lacks", left_out), ("has besides", added)) if names]
    return f"beside what the cuts imply it {' and '.join(found) or 'has another order'}"


def _listed(values: Sequence[object]) -> str:
    rest = len(values) - _MOST_LISTED
    return ", ".join(map(str, values[:_MOST_LISTED])) + (f" and {rest} more" if rest > 0 else "")


# ---- what ranks hold


def _held(plan: PipelinePlan, sections: Sequence[StagePlan]) -> list[Held]:
    """The bytes and micro-batches that the rank of each stage holds while it runs, by the plan's schedule."""
    return held(sections, PipelineShape.of(plan), plan.batch.accumulation_steps, plan.stages[0].mesh.tp)


def _in_flight_problems(plan: PipelinePlan, sections: Sequence[StagePlan]) -> Iterator[str]:
    """Yields numbers of micro-batches in flight that are not those of the schedule."""
    for stage, now in zip(sections, _held(plan, sections), strict=True):
        if stage.in_flight != now.in_flight:
            path = f"stages[{stage.index}].stage.in_flight"
            yield f"{path}: the plan says {stage.in_flight}, and the schedule {plan.schedule} keeps {now.in_flight}"


def _with_what_ranks_hold(plan: PipelinePlan, proven: Sequence[Proven], reuse: Reuse) -> list[Proven]:
    """The stages with the bytes that their ranks hold of each and beside it."""
    plans: list[Plan] = []
    for one in proven:
        assert one.plan.stage is not None
        kept, resting = bytes_between(one.assignment, reuse.executor)
        deferred = one.plan.stage.deferred
        if one.plan.stage.index:
            read, largest = deferred_bytes(one.assignment)
            deferred = replace(deferred, kept_bytes=read, largest_bytes=largest)
        stage = replace(one.plan.stage, kept_bytes=kept, resting_bytes=resting, deferred=deferred)
        plans.append(replace(one.plan, stage=stage))
    beside = _held(plan, [own.stage for own in plans if own.stage is not None])
    return [replace(one, plan=with_held(own, now)) for one, own, now in zip(proven, plans, beside, strict=True)]
