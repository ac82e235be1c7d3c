"""The autocast that a plan's precision asks of training code."""

import torch

from tpplan.plan.plan import Plan, Precision


def autocast_of(plan: Plan | None, device_type: str) -> torch.autocast:
    """The context in which forward and loss of a plan's model run: torch.autocast in bfloat16 for a plan in
    bf16-autocast, which does nothing for other plans and for None. Backward runs outside of it."""
    is_on = plan is not None and plan.precision is Precision.BF16_AUTOCAST
    return torch.autocast(device_type, dtype=torch.bfloat16, enabled=is_on)
