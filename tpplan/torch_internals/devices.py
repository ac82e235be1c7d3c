"""GPUs: keeping one busy while the host queues kernels to be timed."""

import torch

from tpplan.torch_internals.probes import Probe


def busy_gpu(cycles: int) -> None:
    """Queues a kernel on the current GPU that runs for this many clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


PROBES = (
    Probe(
        name="a GPU kept busy",
        uses="torch.cuda._sleep",
        needed_for="`tpplan profile` on a GPU",
        works=lambda: callable(getattr(torch.cuda, "_sleep", None)),
    ),
)
