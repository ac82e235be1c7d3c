"""What a given plan costs: its choices put back onto the graph, priced under any profile. Nothing is solved.

The checker of tpplan.layouts.typecheck derives the strategy of every op from the plan; with those as the only choice,
the formulation that a solver would have minimized is a sum of constants.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpplan.core.errors import PlanMismatchError
from tpplan.core.graph import ModelGraph, within
from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import ROOT, parse_ranges, substitute
from tpplan.costs.execute import Executor
from tpplan.costs.step.cost_table import PricedSpace, price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.costs.step.recompute_cost import Rerun, rerun
from tpplan.costs.step.solved_step import Expanded
from tpplan.costs.step.train_config import Setting
from tpplan.layouts.decision_space import Reading, build_space
from tpplan.layouts.layer_treatments import Treatment
from tpplan.layouts.rules import Strategy
from tpplan.layouts.typecheck import Mistyped, implied_strategies
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.parts import ISSUE, RECOMPUTATION, TENSOR_PARALLEL
from tpplan.plan.plan import CollectivePlan, Compile, Pass, Plan, Prediction, Recompute
from tpplan.trace.opaque import Opaques


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The sections of a plan that a profile decides."""

    predicted: Prediction
    collectives: tuple[CollectivePlan, ...]
    unruled_ops: Mapping[str, float]
    opaque_seconds: Mapping[str, float]
    guesses: tuple[str, ...]


def price_plan(
    graph: ModelGraph,
    plan: Plan,
    profile: HardwareProfile,
    gpus_per_node: int,
    executor: Executor | None = None,
    opaques: Opaques | None = None,
) -> Priced:
    """Prices a plan that types on the graph. Raises PlanMismatchError for another, with what does not fit, and
    ProfileError for what the profile does not cover. `executor` and `opaques` know the modules that run whole."""
    implied = implied_strategies(graph, plan)
    if isinstance(implied, Mistyped):
        raise PlanMismatchError(f"the plan does not fit the model: {implied.message}")
    found = expanded_as(graph, plan, implied, profile, gpus_per_node, executor or Executor(), opaques or Opaques())
    return priced_as(found, plan)


def priced_as(expanded: Expanded, plan: Plan) -> Priced:
    """Prices the formulation of a plan."""
    modes = plan.recomputed_modules()
    priced = Priced(
        predicted=expanded.prediction(modes),
        collectives=expanded.collectives(),
        unruled_ops=expanded.unruled_ops(),
        opaque_seconds=expanded.opaque_seconds(),
        guesses=expanded.guesses(),
    )
    return _with_reruns(priced, rerun(expanded.formulation, modes), plan) if modes else priced


def expanded_as(
    graph: ModelGraph,
    plan: Plan,
    implied: Mapping[str, Strategy],
    profile: HardwareProfile,
    gpus_per_node: int,
    executor: Executor,
    opaques: Opaques,
) -> Expanded:
    """The formulation in which every decision has the strategy that the plan implies, and no other."""
    unpriced = unpriced_as(graph, plan, implied, profile, gpus_per_node, executor, opaques)
    formulation = unpriced.formulation
    before, num_gpus = formulation.priced, plan.mesh.num_gpus
    priced = price_space(
        before.space, profile, gpus_per_node, executor, is_compiled=before.is_compiled, num_gpus=num_gpus
    )
    formulation = replace(formulation, priced=priced)
    everything = dict.fromkeys(formulation.space.deciders, 0)
    assert formulation.problem.is_consistent(everything), "what the checker derived disagrees along an edge"
    return replace(unpriced, formulation=formulation)


def unpriced_as(
    graph: ModelGraph,
    plan: Plan,
    implied: Mapping[str, Strategy],
    profile: HardwareProfile,
    gpus_per_node: int,
    executor: Executor,
    opaques: Opaques,
) -> Expanded:
    """expanded_as without times: enough for a proof, which asks for none."""
    parameters = plan.parameter_plans()
    space = build_space(graph, plan.mesh.tp)

    def strategy(name: str) -> Strategy:
        decider = space.deciders[name]
        if not isinstance(decider, Reading):
            return implied[name]
        parameter = parameters[decider.parameter.label]
        return Strategy((parameter.placement,), (parameter.reads[decider.op.module],))

    fixed = replace(
        space,
        strategies={name: (strategy(name),) for name in space.deciders},
        classes={name: name for name in space.deciders},
    )
    setting = Setting(
        profile=profile,
        gpus_per_node=gpus_per_node,
        precision=plan.precision,
        optimizer=plan.optimizer,
        memory_limit_bytes=profile.memory_bytes,
        slack_bytes=profile.slack_bytes,
        accumulation_steps=plan.batch.accumulation_steps,
        units=tuple(unit for unit in plan.fsdp_units() if unit),
        treatments={
            name: Treatment(recompute=Recompute.NONE, reshard=reshard)
            for name, reshard in plan.resharded_units().items()
        },
    )
    unpriced = PricedSpace(space=fixed, times={}, executor=executor, is_compiled=plan.compile is Compile.BLOCKS)
    formulation = Formulation(priced=unpriced, mesh=plan.mesh, setting=setting)
    return Expanded(formulation=formulation, num_averages=opaques.num_averages(setting.accumulation_steps))


def _with_reruns(priced: Priced, again: Rerun, plan: Plan) -> Priced:
    """The prices with what recomputation adds. What runs again is as uncertain as what ran."""
    steps, before = plan.batch.accumulation_steps, priced.predicted
    time_s = dict(before.time_s)
    time_s[RECOMPUTATION] = steps * again.compute.seconds
    time_s[TENSOR_PARALLEL] = time_s.get(TENSOR_PARALLEL, 0.0) + steps * again.collectives.seconds
    if again.waited_s:
        time_s[ISSUE] = time_s.get(ISSUE, 0.0) + steps * again.waited_s
    step_time_s = sum(time_s.values())
    predicted = replace(
        before,
        step_time_s=step_time_s,
        step_time_error_s=before.step_time_error_s * step_time_s / before.step_time_s,
        is_extrapolated=before.is_extrapolated or again.compute.extrapolated or again.collectives.extrapolated,
        time_s=time_s,
    )
    return replace(priced, predicted=predicted, collectives=with_repeats(priced.collectives, again, plan))


def with_repeats(collectives: tuple[CollectivePlan, ...], again: Rerun, plan: Plan) -> tuple[CollectivePlan, ...]:
    """A step's collectives with those that run again, which do so in backward."""
    counts = Counter({replace(collective, count=1): collective.count for collective in collectives})
    for module, transfer in again.transfers:
        where = pattern_of(plan, module) or ROOT
        collective = CollectivePlan(
            where=where,
            kind=str(transfer.kind),
            axis=Axis.TP,
            during=Pass.BACKWARD,
            dtype=transfer.dtype,
            num_bytes=transfer.num_bytes,
            count=1,
        )
        counts[collective] += plan.batch.accumulation_steps
    found = (replace(collective, count=count) for collective, count in counts.items())
    return tuple(sorted(found, key=lambda c: (c.where, c.kind, c.axis, c.during, c.dtype, c.num_bytes)))


def pattern_of(plan: Plan, module: str) -> str:
    """A module's name as the plan's blocks write it."""
    for pattern, ranges in plan.blocks.items():
        for index in parse_ranges(ranges):
            if within(module, own := substitute(pattern, index)):
                return pattern + module.removeprefix(own)
    return module
