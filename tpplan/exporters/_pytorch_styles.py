"""Helpers that exporters/pytorch.py copies, as source text, into the files that need them."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy


class Entering(ParallelStyle):
    """Converts arguments of a module, by name: (placement before, placement after, whether they stay DTensors)."""

    def __init__(self, **arguments: tuple[Placement, Placement, bool]) -> None:
        super().__init__()
        self.arguments = arguments

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        signature = inspect.signature(module.forward)

        def convert(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            for name, (source, target, is_kept) in self.arguments.items():
                x = DTensor.from_local(bound.arguments[name], device_mesh, [source], run_check=False)
                x = x.redistribute(placements=[target])
                bound.arguments[name] = x if is_kept else x.to_local()
            return bound.args, bound.kwargs

        module.register_forward_pre_hook(convert, with_kwargs=True)
        return module


class Leaving(ParallelStyle):
    """Converts the output of a module from one placement to another; is_kept leaves it a DTensor."""

    def __init__(self, source: Placement, target: Placement, is_kept: bool) -> None:
        super().__init__()
        self.source, self.target, self.is_kept = source, target, is_kept

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def convert(_module: nn.Module, _args: Any, output: Any) -> Any:
            y = DTensor.from_local(output, device_mesh, [self.source], run_check=False)
            y = y.redistribute(placements=[self.target])
            return y if self.is_kept else y.to_local()

        module.register_forward_hook(convert)
        return module


class OnDTensors(ParallelStyle):
    """Runs a module on DTensors: inputs go from the first placement to the second, outputs to the third; all are whole
    where none is given. Weights are placed by name, others are whole."""

    def __init__(self, *placements: Placement, **weights: Placement) -> None:
        super().__init__()
        self.source, self.target, self.output = placements or (Replicate(), Replicate(), Replicate())
        self.weights = weights

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), device_mesh, [self.weights.get(name, Replicate())])
            module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))

        def entering(x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [self.source], run_check=False)
            return x.redistribute(placements=[self.target])

        def leaving(y: DTensor) -> torch.Tensor:
            return y.redistribute(placements=[self.output]).to_local()

        def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            return tree_map_only(torch.Tensor, entering, args), tree_map_only(torch.Tensor, entering, kwargs)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(lambda _module, _args, output: tree_map_only(DTensor, leaving, output))
        return module


def sum_gradients(model: nn.Module) -> None:
    """Sums the gradients of replicated weights that each rank read with a part of the tokens, after each backward."""

    def add_up(parameter: torch.Tensor) -> None:
        if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(add_up)  # type: ignore[no-untyped-call]


def keep_results(kept: frozenset[str], _context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keeps the results of the ops with these names; all others run again in backward."""
    is_kept = op.name().partition(".")[0] in kept
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
