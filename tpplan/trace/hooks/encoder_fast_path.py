"""torch's own encoder layers without their fused inference kernels, for models whose weights lie in slices.

Evaluated without gradients, nn.TransformerEncoderLayer and nn.MultiheadAttention hand all their weights to one kernel.
It calls none of the modules inside, so no conversion at their boundaries runs: on slices it would give summands for
sums. With the switch that torch has for it off while such a module runs, it goes the way it went in training.
"""

import functools
from typing import Any

import torch
from torch import nn

from tpplan.trace.hooks.generated_class import subclass

_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def leave_fast_path(model: nn.Module) -> None:
    """From now on no module of the model takes it."""
    for module in [module for module in model.modules() if isinstance(module, _FUSED)]:
        cls: Any = type(module)
        module.__class__ = _stepwise_class(cls)  # type: ignore[assignment]


@functools.cache
def _stepwise_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of cls that calls what it is made of. It bears cls's own name."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        was_enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(was_enabled)

    return subclass(cls, {"forward": forward}, _stepwise_class)
