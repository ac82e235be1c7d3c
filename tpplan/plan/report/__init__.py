"""A plan for people (`render`) and for programs (`as_data`): the same text after solving and when shown later.

In: a plan. Out: a report that opens with the answer; sentences on modules; a glossary. The text depends on the plan
alone and not on the order of its mappings. It is ASCII, so that logs, pull requests and terminals show it alike. Needs
no torch.

Imports: core; plan.
"""

import io
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from tpplan.core.escapes import escaped_data
from tpplan.plan.plan import Plan
from tpplan.plan.proof_hash import why_unproven
from tpplan.plan.report.answer import answer, warnings
from tpplan.plan.report.details import collective_rows, facts, memory_parts, provenance, setting, time_parts
from tpplan.plan.report.layer_table import layer_lines
from tpplan.plan.report.words import gib as gib
from tpplan.plan.report.words import mfu, model_size, tokens, tokens_per_s

#: columns of a report that is not printed to a terminal
DEFAULT_WIDTH = 100
_INDENT = 2


def render(plan: Plan, *, width: int = DEFAULT_WIDTH, color: bool = False) -> str:
    """The report as text of at most `width` columns that ends with a newline; with terminal colours where asked.

    Raises PlanError for a dtype of unknown size.
    """
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="auto" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as capture:
        console.print(_report(escaped_data(plan), width, why_unproven(plan)))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def as_data(plan: Plan) -> dict[str, object]:
    """The plan's JSON data, with numbers that the report computes under "derived"."""
    num_parameters, num_bytes = model_size(plan)
    speed = tokens_per_s(plan)
    return plan.to_dict() | {
        "derived": {
            "hash": plan.hash,
            "is_proven": not why_unproven(plan),
            "num_parameters": num_parameters,
            "parameter_bytes": num_bytes,
            "num_gpus": plan.mesh.num_gpus,
            "tokens_per_step": tokens(plan),
            "tokens_per_s": speed,
            "tokens_per_s_per_gpu": speed / plan.mesh.num_gpus if speed is not None else None,
            "mfu": mfu(plan.predicted, plan.mesh.num_gpus),
        }
    }


def _report(plan: Plan, width: int, unproven: str) -> RenderableType:
    known = list(warnings(plan, unproven))
    return Group(
        *_section("Plan", facts(answer(plan))),
        *(_section("Before you train", facts(known)) if known else ()),
        *_section("Layers", *layer_lines(plan, width - _INDENT)),
        *_section("Setting", facts(setting(plan))),
        *_section("Predicted step by part", time_parts(plan)),
        *_section("Predicted peak memory per GPU by part", *memory_parts(plan)),
        *_section("Collectives of a step on one rank", *collective_rows(plan.collectives)),
        *_section("How it was found", facts(provenance(plan, unproven))),
        Text("`tpplan show --glossary` explains the words.", style="dim"),
    )


def _section(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
    yield Text(title, style="bold")
    yield Padding(Group(*parts), (0, 0, 1, _INDENT))
