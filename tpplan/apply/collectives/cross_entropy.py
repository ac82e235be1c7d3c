"""Cross entropy on logits whose vocabulary is sharded, without gathering them.

    from tpplan import cross_entropy
    def loss(outputs, inputs):
        return cross_entropy(outputs, inputs["targets"])

On plain logits it is torch's own cross entropy in one operator (`tpplan::cross_entropy`), so that the planner sees a
loss whose classes may be sharded. F.cross_entropy in a model's own forward becomes the same operator; the plan says
which modules see slices of how many classes. An applied model with sharded logits returns them as a DTensor. Then, with
z [N, V/t] a rank's logits, t the ranks and y the target of a row,

    m = max over ranks of max z,  s = sum over ranks of sum exp(z - m),  loss_n = log s - (z_y - m)

takes two all-reduces, of N and of 2 N elements, instead of a gather of N V. The gradient, (softmax - onehot) / N, needs
no communication. What is computed in float32 is never there for more than an eighth of many rows at once.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpplan.apply.collectives.redistribute import TpGroup, all_reduce
from tpplan.core.errors import UsageError
from tpplan.torch_internals.operators import check_within
from tpplan.torch_internals.recording import is_recording
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.call_rewriting import own_code, running_rewriters

#: the target that F.cross_entropy leaves out by default
IGNORE_INDEX = -100
#: parts in which rows are taken one after another, from this many rows on: below, a kernel's launch is what it costs
_PARTS, _LEAST_ROWS = 8, 4096


@dataclass(frozen=True, slots=True)
class ShardedClasses:
    """A rewriter of calls that computes cross entropy on a rank's num_classes / t classes over all num_classes."""

    num_classes: int
    group: TpGroup

    def holds(self, logits: Tensor) -> bool:
        """True where the logits are a rank's slice of num_classes."""
        return logits.shape[-1] * self.group.size == self.num_classes

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        plain = custom_ops.plain_cross_entropy(func, args, kwargs)
        if plain is None or not self.holds(plain[0]):
            return NotImplemented
        return vocabulary_parallel(*plain, self.group)


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Returns the mean loss over targets that are not ignore_index; nan when all are. logits [..., V], targets [...].

    The result is a plain scalar, equal on every rank, in the dtype that F.cross_entropy would return. Raises UsageError
    for shapes that do not match, and for logits in any layout but replicated or sharded in V.
    """
    if logits.dim() < 1 or logits.shape[:-1] != targets.shape:
        raise UsageError(
            f"cross_entropy: expected logits [..., V] and targets [...], got {list(logits.shape)} and "
            f"{list(targets.shape)}"
        )
    if isinstance(targets, DTensor):
        targets = targets.full_tensor()
    if isinstance(logits, DTensor):
        return _of_dtensor(logits, targets, ignore_index)
    for rewriter in running_rewriters():
        if isinstance(rewriter, ShardedClasses) and rewriter.holds(logits):
            return vocabulary_parallel(logits, targets, ignore_index, rewriter.group)
    return _of_whole(logits, targets, ignore_index)


def _of_whole(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    loss: Tensor = custom_ops.cross_entropy(logits, targets, ignore_index)
    if is_recording() or torch.compiler.is_compiling():
        return loss
    plain: Tensor = _PlainGradient.apply(loss)  # type: ignore[no-untyped-call]
    return plain


class _PlainGradient(torch.autograd.Function):
    """Identity, whose gradient may be a DTensor: that of a loss to which one is added, such as a sum over weights."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()  # code may write to it, as in `loss += penalty`

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@own_code
def _of_dtensor(logits: DTensor, targets: Tensor, ignore_index: int) -> Tensor:
    placements = logits.placements
    if len(placements) == 1 and placements[0] == Shard(logits.dim() - 1):
        group = TpGroup.of(logits.device_mesh.get_group())
        return vocabulary_parallel(logits.to_local(), targets, ignore_index, group)
    if all(placement == Replicate() for placement in placements):
        return _of_whole(logits.to_local(), targets, ignore_index)
    raise UsageError(
        f"cross_entropy: logits of shape {list(logits.shape)} are laid out as {placements}; expected the last dim "
        "sharded on one mesh axis, or replicated. logits.full_tensor() gathers them."
    )


@own_code
def vocabulary_parallel(logits: Tensor, targets: Tensor, ignore_index: int, group: TpGroup) -> Tensor:
    """Returns the sharded cross entropy of the module docstring, a scalar equal on every rank.

    logits [..., V/t], targets [...] with classes numbered from 0 to V - 1.
    """
    local = logits.flatten(0, -2)
    loss: Tensor = _VocabularyParallel.apply(local, targets.flatten(), ignore_index, group)  # type: ignore[no-untyped-call]
    return loss.to(_result_dtype(local))


def _result_dtype(logits: Tensor) -> torch.dtype:
    """Returns the dtype of F.cross_entropy on these logits: theirs, or autocast's where it is enabled."""
    device = logits.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return logits.dtype
    return F.cross_entropy(logits.new_zeros(1, 1), torch.zeros(1, dtype=torch.long, device=logits.device)).dtype


class _VocabularyParallel(torch.autograd.Function):
    """Sharded cross entropy. Saves a rank's logits in their dtype and one number per row, not their fp32 softmax.

    Rows are independent of each other, so that taking them part by part changes no result.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, group: TpGroup) -> Tensor:
        num_classes = logits.shape[1]
        ignored = targets == ignore_index
        _check_targets(targets, ignored, num_classes * group.size)
        local_targets = targets - group.rank * num_classes
        elsewhere = ignored | (local_targets < 0) | (local_targets >= num_classes)
        local_targets = local_targets.masked_fill_(elsewhere, 0)

        maximum = all_reduce(logits.amax(1).to(_compute_dtype(logits)), "max", group)
        parts = [_sums(*part) for part in _in_parts(logits, maximum, local_targets, elsewhere)]
        total, target_logit = all_reduce(torch.cat(parts, 1), "sum", group).unbind()
        log_total = total.log()

        num_counted = ignored.logical_not().sum()
        ctx.save_for_backward(logits, maximum + log_total, local_targets, elsewhere, ignored, num_counted)
        return (log_total - target_logit).masked_fill_(ignored, 0).sum() / num_counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_total, local_targets, elsewhere, ignored, num_counted = ctx.saved_tensors
        if isinstance(gradient, DTensor):  # the loss was added to a DTensor, such as a sum over weights
            gradient = gradient.full_tensor()
        weights = (gradient / num_counted).masked_fill(ignored, 0)
        parts = _in_parts(logits, log_total, local_targets, elsewhere, weights)
        if len(parts) == 1:
            return _gradient(*parts[0]).to(logits.dtype), None, None, None
        found = torch.empty_like(logits)
        for of_part, part in zip(_in_parts(found), parts, strict=True):
            of_part[0].copy_(_gradient(*part))
        return found, None, None, None


def _in_parts(*of_rows: Tensor) -> list[tuple[Tensor, ...]]:
    """Returns the rows of some tensors [N, ...] in parts, as views: an eighth of many rows each, or all."""
    num_rows = len(of_rows[0])
    size = -(-num_rows // _PARTS) if num_rows >= _LEAST_ROWS else max(num_rows, 1)
    return list(zip(*(torch.split(tensor, size) for tensor in of_rows), strict=True))


def _sums(logits: Tensor, maximum: Tensor, local_targets: Tensor, elsewhere: Tensor) -> Tensor:
    """Returns a rank's summands of s and of z_y - m [2, N].

    A target is numbered among the rank's classes; `elsewhere` is true where it is another rank's, or counts nowhere.
    """
    shifted = logits - maximum.unsqueeze(1)  # promoted to the wider dtype without a copy of the logits
    target_logit = shifted.gather(1, local_targets.unsqueeze(1)).squeeze(1).masked_fill_(elsewhere, 0)
    return torch.stack((shifted.exp_().sum(1), target_logit))


def _gradient(logits: Tensor, log_total: Tensor, local_targets: Tensor, elsewhere: Tensor, weights: Tensor) -> Tensor:
    """Returns (softmax - onehot) * weights [N, V/t], in the dtype of log_total."""
    softmax = (logits - log_total.unsqueeze(1)).exp_()
    here = elsewhere.logical_not().to(softmax.dtype)
    softmax.scatter_add_(1, local_targets.unsqueeze(1), -here.unsqueeze(1))
    return softmax.mul_(weights.unsqueeze(1))


def _compute_dtype(logits: Tensor) -> torch.dtype:
    """Returns float64 for float64 logits, float32 for all others."""
    return torch.promote_types(logits.dtype, torch.float32)


def _check_targets(targets: Tensor, ignored: Tensor, num_classes: int) -> None:
    """Raises IndexError for a target that is no class; on a GPU it fails a device assertion, without synchronizing."""
    message = f"cross_entropy: a target is out of bounds for {num_classes} classes"
    check_within(targets.masked_fill(ignored, 0), num_classes, message)
