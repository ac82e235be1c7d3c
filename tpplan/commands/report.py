"""`tpplan report plan.json model.py -o report.html`: writes a plan as one HTML page that loads nothing.

Several plans, without a model, are compared on one page: `tpplan report a.json b.json -o report.html`. So are the
stages of a plan of stages, whose step is drawn stage by stage.

With the plan's model the page also draws the step, stream by stream, and its memory from start to end; --what-if solves
for other numbers of GPUs, batches, lengths, memory limits and bandwidths, some 24 times, and draws what that gives. Of
a plan of stages --stage N gives one stage such a page, as it runs alone.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.commands.show import stage_of
from tpplan.commands.solve import STAGE_COLUMNS, check_output
from tpplan.commands.terminal.output import wrote
from tpplan.commands.terminal.progress import bars
from tpplan.commands.terminal.verbs import add_verb
from tpplan.core.errors import ProfileError, UsageError
from tpplan.core.files import write_atomically
from tpplan.machine.profile import load_profile
from tpplan.plan.pipeline_plan import PipelinePlan, load_plan
from tpplan.plan.plan import Plan
from tpplan.plan.report.stages import stage_facts, stage_name
from tpplan.plan.step_anatomy import Anatomy
from tpplan.search.models.model_spec import is_model
from tpplan.search.models.user_model import load_model_file

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tpplan.page.step_drawing import StepDrawing

_OF_STAGES = "Each row below is one stage, as it runs alone, without waiting for others."
_EPILOG = """\
model.py (or model.py:BUILDER, hf:path/config.json) is the plan's model. The profile is the plan's, by name, unless
--profile names another.
"""


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = add_verb(subparsers, "report", "write a plan as an HTML page", __doc__, _EPILOG, run=run)
    parser.add_argument("plan", metavar="plan.json", help="a plan that `tpplan solve -o` wrote")
    parser.add_argument("words", metavar="model.py|plan.json", nargs="*", help="the plan's model, or more plans")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help="where to write the page")
    parser.add_argument("--stage", type=int, metavar="N", help="the page of stage N of a plan of stages")
    parser.add_argument("--what-if", action="store_true", help="draw curves of what would change the plan (it solves)")
    parser.add_argument("--profile", metavar="NAME", help="default: the plan's, by its name")


def run(args: argparse.Namespace) -> int:
    """Writes the page."""
    from tpplan.page.plans_page import Row, plans_page

    check_output(args.output)
    models = [word for word in args.words if is_model(word)]
    if len(models) > 1 or (models and len(args.words) > 1):
        raise UsageError(f"report: expected one plan and its model, or plans alone, got {' '.join(args.words)}")
    if not models and (args.what_if or args.profile):
        raise UsageError("report: --what-if and --profile need model.py, because they price the plan's model")
    if args.stage is not None and (args.what_if or (args.words and not models)):
        raise UsageError("report --stage: expected one plan of stages, or it and its model, without --what-if")
    if args.words and not models:
        paths = [args.plan, *args.words]
        text = plans_page([Row(name=path, plan=Plan.load(path)) for path in paths], title=f"{len(paths)} plans")
    else:
        text = _page(args, models[0] if models else None)
    write_atomically(args.output, text)
    wrote(args.output)
    return 0


def _page(args: argparse.Namespace, model_name: str | None) -> str:
    """The page of one plan, or of one of its stages. Raises UsageError for a model beside a plan of stages."""
    from tpplan.page.plan_page import plan_page
    from tpplan.page.plans_page import Row, plans_page

    plan, title = load_plan(args.plan), Path(args.plan).name
    if args.stage is not None:
        plan, title = stage_of(plan, args.stage, "report", args.plan), f"{title}, stage {args.stage}"
    if isinstance(plan, Plan):
        return plan_page(plan, title=title, anatomy=_anatomy(args, plan, model_name) if model_name else None)
    if model_name is not None:
        raise UsageError(
            f"report: {args.plan} is a plan of stages, each of which has a step of its own: leave {model_name} out, or "
            "give --stage N"
        )
    rows = [Row(name=stage_name(own), plan=own) for own in plan.stages]
    drawn, facts = _stages_over_time(plan), stage_facts(plan)
    return plans_page(rows, title=title, facts=facts, sentences=[_OF_STAGES], timeline=drawn)


def _stages_over_time(plan: PipelinePlan) -> "StepDrawing":
    """The drawing of a step of stages, with what they send where the plan's profile is known."""
    from tpplan.anatomy.stage_timeline import stage_timeline
    from tpplan.page.stage_drawing import stage_drawing

    try:
        profile = load_profile(plan.stages[0].cluster.profile)
    except ProfileError:
        profile = None
    return stage_drawing(stage_timeline(plan, profile), plan)


def _anatomy(args: argparse.Namespace, plan: Plan, model_name: str) -> Anatomy:
    """The plan's step pulled apart, with curves where they are asked for."""
    profile, model = load_profile(args.profile or plan.cluster.profile), load_model_file(model_name)
    from tpplan.anatomy.anatomy import anatomy
    from tpplan.anatomy.what_if import curves
    from tpplan.search.comparisons.alternatives import Problem
    from tpplan.search.models.cut_errors import loss_of_sent
    from tpplan.search.models.trace_cache import Reuse

    reuse = Reuse()
    loss = model.loss if plan.stage is None or plan.stage.last is None else loss_of_sent
    with model.locating():
        found = anatomy(plan, model.build_model, model.example_inputs, profile=profile, loss=loss, reuse=reuse)
        if not args.what_if:
            return found
        problem = Problem.of_plan(plan, model, profile, reuse)
        with bars(STAGE_COLUMNS) as progress:
            return replace(found, curves=tuple(curves(problem, plan, progress)))
