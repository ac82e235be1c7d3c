"""What ranks found against what one process found: losses and gradients, and each rank's share of a batch."""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.apply.model_match import plan_name

#: largest relative error of a gradient in float32: sums are ordered differently, nothing else differs
TOLERANCE = 1e-5
#: of the model's largest gradient: below that a gradient is noise (a key's bias has none: softmax ignores shifts)
NOISE = 1e-3


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {plan_name(name): whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < tolerance, f"{worst}: relative error {errors[worst]:.1e}"


def relative_errors(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Per parameter the largest difference over its largest reference entry."""
    floor = NOISE * max(gradient.abs().max().item() for gradient in reference.values())
    return {
        key: (gradients[key] - expected).abs().max().item() / max(expected.abs().max().item(), floor)
        for key, expected in reference.items()
    }


def part(inputs: dict[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
    """The index-th of equal parts of a batch."""
    return {key: value.chunk(parts)[index] for key, value in inputs.items()}


def mean_over_replicas(loss: Tensor) -> float:
    losses = loss.detach().clone()
    dist.all_reduce(losses)
    return losses.item() / dist.get_world_size()
