"""Builds the shipped profiles of GPUs from a folder of published measurements, and reports how well those agree.

    python scripts/profiles/make_profiles.py DATA_FOLDER [--only NAME] [--output FOLDER] [--report]

DATA_FOLDER holds collectives.csv, matmul.csv, hardware.csv and sources.csv; neither it nor its path enters a profile.
The machines are data: published/machines.py. What nobody measured is scaled from a like machine and marked so.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from published.build import build_all
from published.machines import MACHINES
from published.read import Data
from published.report import print_report

from tpplan.core.files import write_atomically
from tpplan.machine.profile import load_profile

OUTPUT = Path(__file__).resolve().parents[2] / "profiles"


def main() -> None:
    """Parse, build, check by loading, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with collectives.csv, matmul.csv, hardware.csv, sources.csv")
    parser.add_argument("--only", choices=[machine.name for machine in MACHINES], help="one machine (default: all)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the profiles (default: profiles/)")
    parser.add_argument("--report", action="store_true", help="print what was measured, residuals and checks")
    arguments = parser.parse_args()
    for name, built in build_all(Data.read(arguments.data)).items():
        if arguments.only in (None, name):
            path = arguments.output / f"{name}.json"
            # What scripts/evidence/accuracy.py fitted stays.
            fitted = load_profile(path).fitted if path.exists() else None
            write_atomically(path, replace(built.profile, fitted=fitted).dumps())
            if arguments.report:
                print_report(built)


if __name__ == "__main__":
    main()
