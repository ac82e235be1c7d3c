"""Describes the machine that this process runs on: device, memory, software."""

import os
import platform
import re
import resource
from pathlib import Path

import torch

from tpplan.core.errors import UsageError
from tpplan.core.units import KIB
from tpplan.machine.tables import Memory

#: ids of sources (tables.Source) in measured tables
MEASURED = ("measured",)
#: dtypes that torch has random numbers, matrix products and attention of
MEASURED_DTYPES = ("bfloat16", "float16", "float32", "float64")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def device_name(device: torch.device) -> str:
    """The vendor's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def software(device: torch.device) -> dict[str, str]:
    """Versions of the software that times depend on, by name: torch, python; on a GPU cuda, nccl, and driver if
    known."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        versions["cuda"] = torch.version.cuda or torch.version.hip or "unknown"
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        driver = _driver_version()
        versions |= {"driver": driver} if driver else {}
    return versions


def _driver_version() -> str | None:
    """The version of the NVIDIA kernel module, from the file in which it describes itself; None where there is none."""
    if not _DRIVER_FILE.exists():
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _DRIVER_FILE.read_text(encoding="utf-8"))
    return found[1] if found else None


def memory(device: torch.device, ranks_per_machine: int) -> Memory:
    """A GPU's memory, or a rank's part of the machine's; reserved_bytes are taken before there is a model."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = total - free - torch.cuda.memory_reserved(device)
        how = "reserved_bytes: context and communicators after the measurement; no allocator slack"
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_per_machine
        reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        how = "memory_bytes: the machine's, divided by its ranks; reserved_bytes: this process at its largest"
    return Memory(memory_bytes=total, reserved_bytes=reserved, sources=MEASURED, inferred=how)


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of this name. Raises UsageError for a dtype that cannot be measured."""
    if name not in MEASURED_DTYPES:
        raise UsageError(f"dtype {name!r} cannot be measured; expected one of {', '.join(MEASURED_DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
