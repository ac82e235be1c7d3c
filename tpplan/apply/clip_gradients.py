"""Gradient clipping for models whose parameters lie on several meshes: divided experts and stages have their own."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tpplan.apply.collectives.tied_weights import COPY
from tpplan.apply.pipeline import OF_STAGES


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ over parameters on any number of meshes; returns the norm of all gradients, whole.

    The norm of norms is taken over meshes, and over stages. Every rank must call it. Raises RuntimeError for a norm
    that is not finite where error_if_nonfinite.
    """
    own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    groups: dict[object, list[Tensor]] = {}
    for parameter in own:
        if parameter.grad is not None:
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    norms = []
    for group in groups.values():
        counted = (parameter for parameter in group if COPY not in parameter.__dict__)  # an earlier stage counts it
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        if not gradients:
            continue
        norm = get_total_norm(gradients, norm_type, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    stages = next((parameter.__dict__[OF_STAGES] for parameter in own if OF_STAGES in parameter.__dict__), None)
    if not norms and stages is None:
        return torch.tensor(0.0)
    norms = norms or [torch.zeros((), device=own[0].device)]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if stages is not None:
        of_stages = [torch.empty_like(total) for _ in range(stages.size())]
        dist.all_gather(of_stages, total, group=stages)
        total = torch.linalg.vector_norm(torch.stack(of_stages), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients is {total.item()}, and cannot be clipped: look for "
            "its cause in the loss, or scale by it all the same with error_if_nonfinite=False"
        )
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total, foreach)
    return total
