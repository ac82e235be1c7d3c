"""Builds the shipped profiles of GPUs from a folder of published measurements, and reports how well those agree.

    python scripts/make_profiles.py DATA_FOLDER [--only NAME] [--output FOLDER] [--report]

DATA_FOLDER holds collectives.csv, matmul.csv, hardware.csv and sources.csv; neither it nor its path enters a profile.
The machines are data: profile_data/machines.py. What nobody measured is scaled from a like machine and marked so.
"""

import argparse
import json
from pathlib import Path

from profile_data.build import build_all
from profile_data.machines import MACHINES
from profile_data.read import Data
from profile_data.report import print_report

from tpplan.plan import write_atomically

OUTPUT = Path(__file__).resolve().parent.parent / "profiles"


def render(content: object) -> str:
    """JSON with one line per scalar and per array of numbers or ids."""

    def lines(value: object, indent: str) -> str:
        inner = indent + "  "
        if isinstance(value, dict) and value:
            members = (f"{inner}{json.dumps(key)}: {lines(member, inner)}" for key, member in value.items())
            return "{\n" + ",\n".join(members) + f"\n{indent}}}"
        if isinstance(value, list) and any(
            isinstance(element, dict | list) or len(str(element)) > 40 for element in value
        ):
            return "[\n" + ",\n".join(inner + lines(element, inner) for element in value) + f"\n{indent}]"
        return json.dumps(value)

    return lines(content, "") + "\n"


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
            write_atomically(arguments.output / f"{name}.json", render(built.profile.to_dict()))
            if arguments.report:
                print_report(built)


if __name__ == "__main__":
    main()
