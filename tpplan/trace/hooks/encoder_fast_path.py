"""Runs torch's own encoder layers without their fused inference kernels, for models whose weights are sharded.

Without gradients, nn.TransformerEncoderLayer and nn.MultiheadAttention hand all their weights to one fused kernel. The
kernel calls none of the modules inside, so no conversion at their boundaries runs: on sharded weights the results would
be partial sums. torch has a switch for this fast path; off, such a module runs as in training.
"""

import functools
from typing import Any

import torch
from torch import nn

from tpplan.trace.hooks.generated_class import subclass

_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def leave_fast_path(model: nn.Module) -> None:
    """From now on no module of the model uses the fused inference kernels."""
    for module in [module for module in model.modules() if isinstance(module, _FUSED)]:
        cls: Any = type(module)
        module.__class__ = _stepwise_class(cls)  # type: ignore[assignment]


@functools.cache
def _stepwise_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of cls, under the name of cls, that calls its submodules instead of a fused kernel."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        was_enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(was_enabled)

    return subclass(cls, {"forward": forward}, _stepwise_class)
