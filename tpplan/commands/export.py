"""`tpplan export plan.json model.py -o parallelize.py`: writes a plan in another form, such as code that needs only
PyTorch, as far as the form can express it. The plan is proven for the model first."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.commands.solve import check_output
from tpplan.commands.terminal.output import write, wrote
from tpplan.core.files import write_atomically
from tpplan.plan.plan import Plan
from tpplan.search.models.user_model import load_model_file

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser(
        "export", help="write a plan in another form", description=__doc__, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    parser.add_argument("plan", metavar="plan.json", help="a plan that `tpplan solve -o` wrote")
    parser.add_argument("model", metavar="model.py", help="the plan's model, as given to `tpplan solve`")
    parser.add_argument(
        "--to", default="pytorch", metavar="FORM", help="the form (default: pytorch; an unknown one lists all)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write it (default: stdout)")


def run(args: argparse.Namespace) -> int:
    """Writes the text to the file or stdout."""
    from tpplan.exporters import export

    check_output(args.output)
    plan, spec = Plan.load(args.plan), load_model_file(args.model)
    with spec.locating():
        text = export(plan, spec.build_model, spec.example_inputs, loss=spec.loss, to=args.to)
    if args.output is None:
        write(text)
    else:
        write_atomically(args.output, text)
        wrote(args.output)
    return 0
