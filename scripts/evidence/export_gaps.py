"""Shows what torch.export traces and tpplan does not prove: constructs (export_gaps_parts) and Hugging Face models.

    python scripts/evidence/export_gaps.py [NAME ...] [--types TYPE[:TASK] ...] [--numerics] [--budget SECONDS]
                                           [--out FILE.csv]

For each, in a process of its own: does a step run at all; does torch.export.export(strict=False) trace the model in
training mode; what does tpplan.solve give on two tensor-parallel ranks of a machine where sharding pays; with
--numerics, how far loss and gradients on two gloo ranks are from one process. Below a row stands why something failed.
A model whose float32 is noise (batch norms over few elements) is compared in float64, marked "in 64 bits".

Exit code 1 where torch.export traces a model and there is no proven plan, or where one is wrong.
"""

import argparse
import contextlib
import csv
import functools
import io
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export_gaps_parts.constructs import BATCH, Construct, constructs
from gloo_ranks import TOLERANCE, Error, Outcome, on_ranks, quiet, worst_error
from made_up_machine import machine
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tpplan.apply.apply import apply_plan
from tpplan.apply.model_match import plan_name
from tpplan.plan.plan import Plan
from tpplan.search.planner import solve
from tpplan.search.points.options import Cluster

sys.path.append(str(Path(__file__).resolve().parent.parent / "dev"))

from fork_server import ForkServer

SHOWN_CHARACTERS = 150
TP = 2
#: of what computes in 16 bits
IN_HALF = ("half parameter", "half", "autocast")
HALF_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is known of a construct; "" is not known yet, and an outcome is "yes" or why not."""

    name: str
    runs: str = ""
    exports: str = ""
    proven: str = ""
    whole: str = ""
    sharded: float | None = None
    error: float | None = None
    worst: str = ""
    in_double: bool = False
    tolerance: float = TOLERANCE
    seconds: float = 0.0

    @property
    def is_gap(self) -> bool:
        """torch.export traces it, and there is no proven plan."""
        return self.exports == "yes" and self.proven != "yes"

    @property
    def is_wrong(self) -> bool:
        """What was applied does not compute the same, or does not run."""
        return self.error is not None and not self.error <= self.tolerance


def loss_of(outputs: Any) -> Tensor:
    """The first scalar with a gradient."""
    fields_of = vars(outputs) if type(outputs).__name__ in ("Result",) else outputs
    leaves = [leaf for leaf in pytree.tree_leaves(fields_of) if isinstance(leaf, Tensor)]
    return next(leaf for leaf in leaves if leaf.dim() == 0 and leaf.requires_grad)


def built(construct: Construct) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    return construct.build().train()


def in_double(construct: Construct) -> Construct:
    """The same in float64."""

    def widened(value: object) -> object:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return replace(
        construct,
        build=lambda: construct.build().double(),
        inputs=lambda: pytree.tree_map(widened, construct.inputs()),
    )


def step(model: nn.Module, construct: Construct) -> Outcome:
    """Loss and gradients of one step; chance is the same in each."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    loss = loss_of(model(**construct.inputs()))
    loss.backward()
    gradients = {plan_name(name): _whole(weight.grad) for name, weight in model.named_parameters()}
    return Outcome(loss.item(), gradients)


def _whole(gradient: Tensor | None) -> Tensor | None:
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def plan_of(construct: Construct) -> Plan:
    """A plan on two tensor-parallel ranks."""
    return solve(
        construct.build,
        lambda batch, seq_len: construct.inputs(),
        cluster=Cluster(gpus=TP, gpus_per_node=TP, profile=machine()),
        global_batch=BATCH,
        micro_batch=BATCH,
        seq_len=1,
        tp=TP,
        precision="fp32",
    )


def errors_on_ranks(construct: Construct, plan: Plan, reference: Outcome, *, is_wide: bool = False) -> Error:
    """The worst error of all ranks, in float64 if is_wide. For processes that have run no backward: see fork_server."""
    subject = in_double(construct) if is_wide else construct

    def rank() -> Error:
        return worst_error(step(apply_plan(built(subject), plan), subject), reference)

    return max(on_ranks(plan.mesh.num_gpus, rank))


def examine(construct: Construct, numerics: bool, connection: Connection) -> None:
    """A child's life: the row, sent after each thing that is found."""
    os.setsid()
    quiet()
    logging.disable(logging.CRITICAL)
    with ForkServer(functools.partial(errors_on_ranks, construct)) as on_real_ranks:  # before anything is computed
        for row in examined(construct, numerics, on_real_ranks):
            connection.send(row)


def examined(construct: Construct, numerics: bool, on_real_ranks: Callable[..., Error]) -> Iterator[Row]:
    """The row after each thing that is found."""
    row = Row(name=construct.name, tolerance=HALF_TOLERANCE if construct.name in IN_HALF else TOLERANCE)
    references: list[Outcome] = []
    plans: list[Plan] = []

    def run() -> None:
        references.append(step(built(construct), construct))

    def export() -> None:
        model = built(construct)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # it prints graphs
            torch.export.export(model, (), construct.inputs(), strict=False)

    def prove() -> None:
        plans.append(plan_of(construct))

    attempts: tuple[tuple[str, Callable[[], None]], ...] = (("runs", run), ("exports", export), ("proven", prove))
    for name, attempt in attempts:
        row = replace(row, **{name: _outcome(attempt)})
        yield row
    if plans:
        row = replace(row, whole=" ".join(plans[0].opaque or ()), sharded=share_sharded(plans[0]))
    if plans and references and numerics:
        row = compared(row, lambda: on_real_ranks(plans[0], references[0]))
        if row.is_wrong and construct.name not in IN_HALF:
            yield row
            wide = in_double(construct)
            reference = step(built(wide), wide)
            found = compared(row, lambda: on_real_ranks(plans[0], reference, is_wide=True))
            row = row if found.is_wrong else replace(found, in_double=True)
    yield row


def compared(row: Row, comparison: Callable[[], Error]) -> Row:
    """The row with the error on ranks."""
    try:
        error, worst = comparison()
    except Exception as failure:
        error, worst = float("inf"), _described(failure)
    return replace(row, error=error, worst=worst)


def share_sharded(plan: Plan) -> float:
    """Of the elements of all parameters, those that rest sharded over the tensor-parallel ranks."""
    sizes = [(torch.Size(p.shape).numel(), p.placement.dim is not None) for p in plan.parameter_plans().values()]
    return sum(size for size, is_sharded in sizes if is_sharded) / max(1, sum(size for size, _ in sizes))


def _outcome(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except Exception as error:
        return _described(error)
    return "yes"


def _described(error: BaseException) -> str:
    text = (str(error).strip() or "-").splitlines()
    return f"{type(error).__name__}: {' / '.join(line.strip() for line in text[:4])}"


def rows_of(chosen: Sequence[Construct], numerics: bool, budget_s: float) -> Iterator[Row]:
    """Row by row, each from a process that is ended when its budget is spent."""
    context = multiprocessing.get_context("fork")
    for construct in chosen:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=examine, args=(construct, numerics, theirs))
        start = time.monotonic()
        process.start()
        theirs.close()
        try:
            row = _last(Row(name=construct.name), ours, start + budget_s)
        finally:
            process.kill()
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.join()
        yield replace(row, seconds=time.monotonic() - start)


def _last(row: Row, connection: Connection, deadline: float) -> Row:
    while True:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            return _unfinished(row, "not done in time")
        try:
            row = connection.recv()
        except EOFError:
            return _unfinished(row, "the process died")


def _unfinished(row: Row, why: str) -> Row:
    """The row with the first thing that is not known as what was not done; as it is where all is known."""
    missing = next((field.name for field in fields(Row)[1:4] if getattr(row, field.name) == ""), None)
    return row if missing is None else replace(row, **{missing: why})


def line(row: Row) -> str:
    """A row of the table."""

    def short(outcome: str) -> str:
        return {"yes": "yes", "": "-"}.get(outcome, "no")

    share = "-" if row.sharded is None else f"{row.sharded:.0%}"
    error = "-" if row.error is None else f"{row.error:.0e}"
    mark = "GAP" if row.is_gap else "WRONG" if row.is_wrong else ""
    cells = (row.name.ljust(42), short(row.runs).ljust(4), short(row.exports).ljust(7), short(row.proven).ljust(7))
    notes_of = f"{row.whole} in 64 bits".strip() if row.in_double else row.whole
    numbers = (share.rjust(4), error.ljust(6), f"{row.seconds:3.0f}")
    return "  ".join((*cells, *numbers, mark.ljust(5), notes_of)).rstrip()


def notes(row: Row) -> Iterator[str]:
    """Why something failed."""
    for title, outcome in (("run", row.runs), ("export", row.exports), ("tpplan", row.proven)):
        if outcome not in ("", "yes"):
            yield f"    {title}: {outcome[:SHOWN_CHARACTERS]}"
    if row.is_wrong:
        yield f"    ranks: {row.worst[:SHOWN_CHARACTERS]}"


def of_types(names: Sequence[str]) -> Iterator[Construct]:
    """Tiny twins of Hugging Face models."""
    if not names:
        return
    from hugging_face import model_of

    for name in names:
        model = model_of(name, tiny=True)
        yield Construct(
            name=name, build=model.build_model, inputs=lambda m=model: dict(m.example_inputs(m.batch, m.seq_len))
        )


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="constructs whose names hold this; all by default")
    parser.add_argument("--types", nargs="*", default=[], metavar="TYPE", help="of transformers' models, instead")
    parser.add_argument("--numerics", action="store_true")
    parser.add_argument("--budget", type=float, default=120.0, metavar="SECONDS", help="for each")
    parser.add_argument("--out", type=Path, metavar="FILE.csv")
    arguments = parser.parse_args()
    quiet()
    chosen = list(of_types(arguments.types)) or [
        c for c in constructs() if not arguments.names or any(name in c.name for name in arguments.names)
    ]
    print("construct".ljust(42), "runs", "exports", "proven ", "shrd", "error ", "  s", "", "runs whole", sep="  ")
    rows = []
    for row in rows_of(chosen, arguments.numerics, arguments.budget):
        rows.append(row)
        print(line(row), *notes(row), sep="\n", flush=True)
    running = [row for row in rows if row.runs == "yes"]
    exported = [row for row in running if row.exports == "yes"]
    print(
        f"\n{len(running)} of {len(rows)} run; torch.export traces {len(exported)}, of which "
        f"{sum(row.proven == 'yes' for row in exported)} are proven; of the others "
        f"{sum(row.proven == 'yes' for row in running if row.exports != 'yes')} are."
    )
    if arguments.out:
        with arguments.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Row)])
            writer.writerows([getattr(row, field.name) for field in fields(Row)] for row in rows)
    return 1 if any(row.is_gap or row.is_wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
