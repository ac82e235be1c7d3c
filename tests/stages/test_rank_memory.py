"""What one of a rank's like stages is solved for, against what the rank then holds."""

from dataclasses import replace

import pytest
from stage_models import LENGTH, Deep, loss, text

import tpplan
from profiles import synthetic_profile
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan, Precision
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.rank_memory import excess_bytes, held, with_held
from tpplan.search.pipelines.stage_plans import AllStages
from tpplan.search.pipelines.stage_solver import Degrees, StageSolver
from tpplan.search.points.options import Batch, Options

MACHINE = HardwareProfile.from_dict(synthetic_profile(), origin="synthetic")
SHAPE = PipelineShape(parts=2, virtual_stages=4)
DEGREES = Degrees(tp=1, micro_batch=1, fsdp=2)


def num_kept_gathered(plan: Plan) -> int:
    return sum(not is_resharded for is_resharded in plan.resharded_units().values())


@pytest.mark.parametrize("once", [False, True])
def test_a_stage_is_solved_for_as_many_gathered_layers_as_its_rank_keeps(once: bool) -> None:
    """A plan of a middle stage fits where all stages of its rank have it, however many layers it keeps gathered."""
    seen = set()
    for limit in (0.66e6, 0.75e6, 0.78e6, 0.9e6, 1.2e6):
        options = Options(
            loss=loss, precision=Precision.FP32, memory_limit_bytes=limit, all_gpus=True, ep=1, recompute="full"
        )
        solver = StageSolver(
            build_model=Deep,
            example_inputs=text,
            cluster=tpplan.Cluster(gpus=4, gpus_per_node=4, profile=MACHINE),
            batch=Batch(16, 1, LENGTH),
            options=options,
        )
        degrees = replace(DEGREES, once=once)
        every = AllStages.of(solver, SHAPE, SHAPE.even(8), degrees)
        middle = every.stages[1]
        plan = solver.tried(degrees, SHAPE, middle, every.beside[every.kind(middle)])
        if plan is None:
            continue
        assert plan.stage is not None
        alike = [
            replace(stage, kept_bytes=plan.stage.kept_bytes, resting_bytes=plan.stage.resting_bytes)
            for stage in every.stages
        ]
        together = held(alike, SHAPE, plan.batch.accumulation_steps, degrees.tp)
        assert excess_bytes(with_held(plan, together[1])) <= 0
        seen.add(num_kept_gathered(plan))
    assert len(seen) > 1, "no limit decides how many layers are kept gathered"
