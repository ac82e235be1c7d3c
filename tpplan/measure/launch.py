"""Times the smallest kernel, and how long the CPU takes to issue a kernel of a training step."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from tpplan.costs.runs.kernels import kernels_of
from tpplan.machine.fit_tables import TIME_DIGITS, digits, relative_error
from tpplan.machine.tables import Launch
from tpplan.measure.device import MEASURED
from tpplan.measure.timer import WINDOWS_PER_POINT, Stopwatch

#: sizes of layers whose kernels do next to nothing, so that Python, modules and autograd take all the time
LAYERS, TOKENS, WIDTH, HEADS = 2, 8, 16, 2


def measure_launch(device: torch.device, budget_s: float) -> Launch:
    """Seconds of the smallest kernel (one number plus itself), and seconds to issue one kernel of an eager step.

    The latter is the time of forward and backward through torch's own layers, at sizes that cost a device nothing, over
    the number of their kernels: modules, autograd's nodes and views are in it. On a CPU, where a kernel's time includes
    its launch, the smallest kernel's time is subtracted. Every rank of the default group, if any, must call this.
    """
    number = torch.ones(1, device=device)
    stopwatch = Stopwatch(device=device, window_s=budget_s / (2 * WINDOWS_PER_POINT))
    samples = stopwatch.samples(lambda: number + number)
    launch_s = float(np.median(samples))
    step = _small_step(device)
    num_kernels = kernels_of(step)
    issued = stopwatch.step_issue_samples(step) / num_kernels - (launch_s if device.type == "cpu" else 0.0)
    issue_s = max(float(np.median(issued)), launch_s)
    return Launch(
        launch_s=digits(launch_s, TIME_DIGITS),
        issue_s=digits(issue_s, TIME_DIGITS),
        relative_error=relative_error(np.concatenate([samples / launch_s, np.maximum(issued, launch_s) / issue_s])),
        sources=MEASURED,
    )


def _small_step(device: torch.device) -> Callable[[], None]:
    """A function that runs forward and backward of small layers and drops the gradients."""
    layers = nn.Sequential(
        *(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(LAYERS)
        )
    ).to(device)
    tokens = torch.randn(1, TOKENS, WIDTH, device=device)

    def step() -> None:
        layers(tokens).sum().backward()
        layers.zero_grad()

    return step
