"""torch's optimizer for a name in tpplan.plan.optimizers, with which tpplan measures and verifies."""

from collections.abc import Iterable

import torch
from torch import nn

from tpplan.core.errors import UsageError
from tpplan.plan.optimizers import OPTIMIZERS, optimizer_named


def torch_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's optimizer of a name over some parameters, with torch's defaults for all that the name does not say.
    Raises UsageError where torch has none of that name."""
    optimizer = optimizer_named(name)
    if not optimizer.torch_class:
        raise UsageError(f"torch has no optimizer that tpplan knows as {name!r}; known: {', '.join(OPTIMIZERS)}")
    found = getattr(torch.optim, optimizer.torch_class)(parameters, **dict(optimizer.options))
    assert isinstance(found, torch.optim.Optimizer)
    return found
