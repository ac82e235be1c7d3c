"""scripts/gpu.py and what stands beside it, as modules."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.append(str(SCRIPTS))

import gpu as gpu  # noqa: E402
import gpu_results as gpu_results  # noqa: E402
import make_gpu_plans as make_gpu_plans  # noqa: E402
