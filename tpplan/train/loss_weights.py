"""Weights micro-batch losses that are means over different numbers of tokens, so that they add up to one mean.

A micro-batch's loss l is a mean over its n tokens that are not padding. Summing gradients over A micro-batches and
averaging them over D data-parallel ranks, as FSDP does, gives the mean of the means, in which the tokens of a
micro-batch with fewer tokens count more. With each loss multiplied by

    w = n * D / N          N: tokens of all micro-batches of all data-parallel ranks in this optimizer step

sum and average give  sum(n * l) / N : the mean over the whole batch, in value and in gradients.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpplan.apply.modules.applied_mesh import mesh_of
from tpplan.core.errors import UsageError
from tpplan.core.mesh import Axis


@torch.no_grad()
def loss_weights(model: nn.Module, num_tokens: Sequence[int | float | Tensor]) -> Tensor:
    """Returns weights [A] for this rank's A micro-batches of one optimizer step: call (weight * loss).backward().

    num_tokens [A] has the number of tokens of each mean loss: `(targets != -100).sum()`, on any device. A model that
    shifts its labels itself, as Hugging Face's do, averages over `labels[:, 1:]`. Call it on every rank, once a step.
    It costs an all-reduce of one number over each data-parallel axis, does not synchronize with the device, and returns
    1 / A where all counts are equal. The mean of sum(weight * loss) over data-parallel ranks is the whole batch's loss.

    A micro-batch without tokens has weight 0; cross entropy over no tokens is nan with gradients of 0. Raises
    UsageError for no micro-batch, and on several ranks for a model that no plan was applied to.
    """
    if not len(num_tokens):
        raise UsageError("loss_weights: expected a number of tokens for each micro-batch, got none")
    mesh = mesh_of(model)
    if mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            "loss_weights: no plan was applied to this model, so its data-parallel ranks are unknown: pass the model "
            "that apply_plan returned"
        )
    device = mesh.device_type if mesh is not None else "cpu"
    counts = torch.stack([torch.as_tensor(count).to(device, torch.float64) for count in num_tokens])
    total, num_ranks = counts.sum(), 1
    if mesh is not None:
        for axis, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
            if axis != Axis.TP and size > 1:
                dist.all_reduce(total, group=mesh.get_group(axis))
                num_ranks *= size
    return torch.where(total > 0, counts * num_ranks / total, 0.0).float()
