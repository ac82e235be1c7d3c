"""torch.autocast in a trace, whose meta tensors torch's own leaves as they are: casts operands by function name.

The names are those of ATen/autocast_mode.h. Weights are cast at each use: a rank's local weights are no leaves of
autograd, which alone torch keeps casts of. A function that is in no list computes in its operands' dtypes.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpplan.torch_internals import pytree
from tpplan.torch_internals.operators import hides_sizes, seen_by
from tpplan.trace.hooks.call_rewriting import is_own_code_running

#: functions that autocast runs in its dtype
_LOWER = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu", "addmm", "addmv",
    "addr", "matmul", "__matmul__", "__rmatmul__", "einsum", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm",
    "scaled_dot_product_attention", "chain_matmul", "multi_dot", "bilinear",
})  # fmt: skip
_LOSSES = frozenset({
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss",
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "multi_margin_loss", "multilabel_margin_loss", "poisson_nll_loss", "soft_margin_loss", "triplet_margin_loss",
})  # fmt: skip
#: functions that autocast runs in float32, by device
_FULL = {
    "cuda": _LOSSES
    | frozenset({
        "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
        "sinh", "tan", "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "rms_norm", "group_norm", "norm", "dist",
        "cosine_similarity", "cdist", "pdist", "renorm", "logsumexp", "interpolate", "prod", "softmax", "log_softmax",
        "cumprod", "cumsum", "sum", "vector_norm", "matrix_norm",
    }),
    "cpu": _LOSSES - {"l1_loss", "kl_div", "binary_cross_entropy_with_logits"} | {"prod", "cdist", "renorm"},
}  # fmt: skip
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


class _Autocast(TorchFunctionMode):
    """A mode that casts operands as autocast does on a device of this type, where it is on."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_own_code_running() or not torch.is_autocast_enabled(self.device_type):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _LOWER:
            args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype(self.device_type))
        elif name in _FULL[self.device_type]:
            args, kwargs = _cast((args, kwargs), torch.float32)
        elif hides_sizes(func):
            return seen_by(self, func)(*args, **kwargs)
        return func(*args, **kwargs)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        is_other = isinstance(leaf, Tensor) and leaf.dtype in _CASTABLE and leaf.dtype is not dtype
        return leaf.to(dtype) if is_other else leaf

    return pytree.tree_map(cast, tree)


@contextlib.contextmanager
def autocast_on(device_type: str) -> Iterator[None]:
    """Runs code as under torch.autocast(device_type, torch.bfloat16), on meta tensors, and without such a device."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, torch.bfloat16)
    try:
        with _Autocast(device_type):
            yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
