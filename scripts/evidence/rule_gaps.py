"""Lists what the sharding rules leave out: strategies that brute force finds right and no rule offers.

Leaving one out costs speed at most, so this is a table to read and not a test:
    python scripts/evidence/rule_gaps.py [--tp 2] [--op linear]
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from rule_samples import SAMPLES
from validate import missing_strategies

#: combinations of layouts tried per sample; attention with a mask that learns has the most
LIMIT = 20_000


def main() -> None:
    """Prints one row per sample with gaps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    parser.add_argument("--op", default="", help="only targets that contain this")
    args = parser.parse_args()
    table = Table("call", "right, not offered", show_lines=True)
    per_op: Counter[str] = Counter()
    samples = [sample for sample in SAMPLES if args.op in sample.target]
    for sample in track(samples, console=Console(stderr=True)):
        missing = missing_strategies(sample, args.tp, limit=LIMIT)
        if missing:
            per_op[sample.target] += len(missing)
            table.add_row(str(sample), "\n".join(map(str, missing)))
    console = Console()
    console.print(table)
    console.print(f"{sum(per_op.values())} strategies of {len(per_op)} ops; {len(samples)} calls tried")


if __name__ == "__main__":
    main()
