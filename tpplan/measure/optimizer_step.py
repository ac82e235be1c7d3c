"""Times how long the CPU takes to issue an optimizer's step, per parameter, sharded (DTensor) and plain.

Most optimizers issue some ops for each parameter, and an op on a DTensor goes through Python first: a step over many
parameters may take longer to issue than to run.
"""

from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tpplan.machine.fit_tables import TIME_DIGITS, digits, relative_error
from tpplan.machine.tables import OptimizerIssue
from tpplan.measure.device import MEASURED
from tpplan.measure.timer import WINDOWS_PER_POINT, Stopwatch
from tpplan.plan.optimizers import OPTIMIZERS
from tpplan.torch_internals.groups import fake_group
from tpplan.train.torch_optimizer import torch_optimizer

#: number of parameters, and their size along each of two dims: so small that only issuing takes time
PARAMETERS, WIDTH = 16, 8


def measure_optimizers(device: torch.device, budget_s: float) -> tuple[OptimizerIssue, ...]:
    """Times every optimizer that tpplan.plan.optimizers names, with torch's defaults.

    On a CPU, where a kernel is issued and run in one, the times include those of tiny kernels. Every rank of the
    default group, if any, must call this."""
    stopwatch = Stopwatch(device=device, window_s=budget_s / (2 * len(OPTIMIZERS) * WINDOWS_PER_POINT))
    return tuple(_issue(name, stopwatch) for name in OPTIMIZERS)


def _issue(name: str, stopwatch: Stopwatch) -> OptimizerIssue:
    sharded, plain = (
        stopwatch.step_issue_samples(torch_optimizer(name, parameters).step) / PARAMETERS
        for parameters in (_sharded(stopwatch.device), _plain(stopwatch.device))
    )
    sharded_s, plain_s = float(np.median(sharded)), float(np.median(plain))
    return OptimizerIssue(
        optimizer=name,
        sharded_s=digits(sharded_s, TIME_DIGITS),
        plain_s=digits(plain_s, TIME_DIGITS),
        relative_error=relative_error(np.concatenate([sharded / sharded_s, plain / plain_s])),
        sources=MEASURED,
    )


def _plain(device: torch.device) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(WIDTH, WIDTH, device=device)) for _ in range(PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def _sharded(device: torch.device) -> list[nn.Parameter]:
    """DTensors over all ranks, or on a mesh of this rank alone; an optimizer's step issues no collective."""
    with nullcontext() if dist.is_initialized() else fake_group(1):
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        parameters = []
        for _ in range(PARAMETERS):
            local = torch.ones(WIDTH, WIDTH, device=device)
            parameter = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
            parameter.grad = torch.ones_like(parameter)
            parameters.append(parameter)
    return parameters
