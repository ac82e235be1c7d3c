"""`tpplan verify` holds divided experts against one process: proof, shards, gradients, collectives, memory."""

from dataclasses import replace

import moe_models
import pytest
from moe_models import OwnMoe, text
from test_expert_parallel import loss, solved

import tpplan
from tpplan.core.errors import TpplanError
from tpplan.plan.plan import Plan
from tpplan.verify.verify import verify_plan


@pytest.mark.parametrize(("fsdp", "recompute"), [(4, "none"), (2, "none"), (4, "selective")])
@pytest.mark.parametrize("dry", [False, True])
def test_every_check_passes(fsdp: int, recompute: str, dry: bool) -> None:
    """Rows that a selectively recomputed layer exchanges travel again in backward."""
    plan = solved(OwnMoe, gpus=4, ep=2, fsdp=fsdp, recompute=recompute)
    report = verify_plan(plan, moe_models.__file__, dry=dry)
    assert {check.outcome for check in report.checks} == {"pass"}, report
    assert "collectives" in {check.name for check in report.checks}


def mutated(plan: Plan, **changes: object) -> Plan:
    assert plan.experts is not None
    return replace(plan, experts=replace(plan.experts, **changes))


def test_an_edited_division_is_not_proven() -> None:
    plan = solved(OwnMoe, gpus=4, ep=2, fsdp=4)
    assert plan.experts is not None
    (name, call), *_ = plan.experts.modules.items()
    swapped = {name: replace(call, index=call.weight, weight=call.index)}
    unknown = {"layers.*.router": call}
    more = {name: replace(call, experts=8)}
    for changed in (
        mutated(plan, ep=4),
        mutated(plan, modules=swapped),
        mutated(plan, modules=unknown),
        mutated(plan, modules=more),
        replace(plan, experts=None),
    ):
        with pytest.raises(TpplanError):
            tpplan.prove_plan(changed, OwnMoe, text, loss=loss)
