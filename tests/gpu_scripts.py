"""scripts/gpu/gpu.py and what stands beside it, as modules."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts" / "gpu"
sys.path.append(str(SCRIPTS))

import gpu as gpu  # noqa: E402
import kernels as kernels  # noqa: E402
import make_plans as make_plans  # noqa: E402
import results as results  # noqa: E402
