"""Recomputation: a generated subclass whose forward runs again in backward, keeping its inputs and little else.

That is torch.utils.checkpoint around the class's own forward, conversions included; a wrapper module would put its name
into those of parameters.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tpplan.errors import PlanMismatchError, UsageError
from tpplan.patterns import ROOT
from tpplan.plan import Recompute
from tpplan.run_again import RunAgain
from tpplan.subclass import subclass

#: ops whose results selective recomputation keeps: they cost more to do again than their results take to keep
KEPT = frozenset({
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_mm",
    "aten::convolution", "aten::_convolution", "aten::mkldnn_linear", "mkldnn::_linear_pointwise",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward",
    "_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_to_all_single",
})  # fmt: skip

#: views that torch does not know for views: it would not see that a kept result is written to
_UNSAFE = ("aten::unsafe_chunk", "aten::unsafe_split")


def check_recomputable(module: nn.Module, name: str) -> None:
    """Raises PlanMismatchError for a module without a forward."""
    if type(module).forward is nn.Module.forward:
        kind = type(module).__name__
        raise PlanMismatchError(f"recompute.{name or ROOT}: {kind} has no forward of its own that could run again")


def recompute(module: nn.Module, mode: Recompute) -> None:
    """From now on the module's forward runs again in backward, wherever it is called with gradients on."""
    module.__class__ = recomputed_class(type(module), mode)  # type: ignore[arg-type]


@functools.cache
def recomputed_class(cls: type[nn.Module], mode: Recompute) -> type[nn.Module]:
    """The subclass of cls whose forward is recomputed. It bears cls's own name."""
    contexts: dict[str, Any] = {}
    if mode is Recompute.SELECTIVE:
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        run: Callable[..., Any] = functools.partial(cls.forward, self)
        if not torch.compiler.is_compiling():  # which runs what it compiles once, and keeps what it draws elsewhere
            run = RunAgain(self, run)
        return checkpoint(run, *args, use_reentrant=False, **contexts, **kwargs)

    return subclass(cls, {"forward": forward}, recomputed_class, (mode,))


def _policy(_context: object, op: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    if op.name().startswith(_UNSAFE):
        raise UsageError(
            f"{op.name()} runs in a module that is recomputed selectively: what is written to its results would be "
            "written to products that are kept; recompute that module fully"
        )
    return CheckpointPolicy.MUST_SAVE if op.name().partition(".")[0] in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
