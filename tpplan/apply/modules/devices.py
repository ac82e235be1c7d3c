"""Dtype and device of a model's tensors before they are laid out."""

import torch
from torch import nn

from tpplan.torch_internals.modules import own_buffers


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters. Buffers keep their dtype: rotary frequencies in bfloat16 would be wrong."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def move(model: nn.Module, device_type: str, *, with_parameters: bool) -> None:
    """Moves buffers, and with_parameters also parameters, to the mesh's device. Meta tensors stay.

    With tp > 1 parameters move when they are distributed, one by one.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type in (device_type, "meta") else tensor.to(device_type)

    for module in model.modules():
        buffers = own_buffers(module)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = moved(buffer)
    if with_parameters:
        for parameter in model.parameters():
            parameter.data = moved(parameter.data)
