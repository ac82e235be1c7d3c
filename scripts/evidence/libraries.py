"""Shows that models of other libraries are planned, and that their plans are right and divide the work.

    python -m venv VENV; VENV/bin/pip install -e . -r scripts/evidence/libraries_parts/requirements.txt
    VENV/bin/python scripts/evidence/libraries.py [MODEL ...] [--tp 2,4] [--out FILE.csv] [--list]

A MODEL is LIBRARY/NAME of libraries_parts (`timm/vit`), a LIBRARY for all of its models, or a model file of one's own
(`model.py`, `model.py:BUILDER`; it may set `heads`). Each is solved for a machine whose links cost next to nothing, so
that sharding pays, and put on as many real gloo ranks, which must give the loss and every gradient of one process.
Degrees that do not divide its heads are left out; a model without attention is planned at the first.

    sharded     share of the elements of all parameters that are sharded
    FLOPs       share of the FLOPs of products, forward and backward, that tp divides: (1 - a rank's / all) / (1 - 1/tp)
    attention   the same of the products of attention in forward, of two activations (step_flops.py)
    error       the largest of any gradient and the loss, relative, in float32; what rounding makes counts as 1e-4
    CPU s       of the slowest solve, without importing

Each model runs in a process of its own. Exit code 0 if none is wrong, 95 % are solved and proven, and 90 % of those
with attention have it divided at every degree.
"""

import argparse
import ast
import csv
import functools
import importlib
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the forks: DTensor imports it when first used, and each rank would
import torch.distributed.tensor
from gloo_ranks import GRADIENT_NOISE, TOLERANCE, Outcome, on_ranks, perturbed, quiet, worst_error
from libraries_parts.case import Case, Inputs
from libraries_parts.compiled import declare_missing
from made_up_machine import GPUS_PER_NODE, machine
from parameter_shares import sharded_share
from rows import Reporter, Row, in_own_process, line, widths
from step_flops import FlopLog
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.apply.apply import apply_plan
from tpplan.apply.model_match import plan_name
from tpplan.apply.modules.dropout_rng import WithoutDropout
from tpplan.plan.plan import Plan, Precision, ProofStatus
from tpplan.search.models.user_model import load_model_file
from tpplan.search.planner import solve
from tpplan.search.points.options import Cluster
from tpplan.torch_internals import pytree
from tpplan.trace.forward_arguments import forward_inputs

sys.path.append(str(Path(__file__).resolve().parent.parent / "dev"))

from fork_server import ForkServer

PARTS = Path(__file__).with_name("libraries_parts")
#: modules of libraries_parts that are no library
OTHERS = ("__init__", "case", "compiled")
#: how many times as far from float64 ranks may be as one process is, where that is more than TOLERANCE: sums in another
#: order, of gradients that are zero but for rounding (a bias before a batch norm); and at most what of the largest
#: gradient, as float64 may also route elsewhere
ROUNDING, MOST_NOISE = 20.0, 1e-5
SHOWN_CHARACTERS = 600
#: bars: of all models, and of those with attention; what of its products counts as all
SOLVED_SHARE, ATTENTION_SHARE, DIVIDED = 0.95, 0.90, 0.99


# The models


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """Of model files of one's own: heads, and with which batch and length they are run."""

    heads: int | None
    batch: int
    seq_len: int


def libraries() -> list[str]:
    """Modules of libraries_parts."""
    return sorted(path.stem for path in PARTS.glob("*.py") if path.stem not in OTHERS)


def case_of(name: str, own: OwnFile) -> Case:
    """The model of a name: `library/name` or a model file, of which `own` says what it does not say itself."""
    if ".py" in name:
        spec = load_model_file(name)
        return Case(
            build_model=spec.build_model,
            example_inputs=spec.example_inputs,
            loss=spec.loss or _scalar,
            unused_outputs=spec.unused_outputs,
            heads=own.heads,
            batch=own.batch,
            seq_len=own.seq_len,
        )
    library, _, model = name.partition("/")
    return cases_of(library)[model]


def _scalar(outputs: Any, inputs: Any) -> Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    found = next((leaf for leaf in leaves if leaf.dim() == 0 and leaf.requires_grad), None)
    if found is None:
        raise ValueError("the model gives no loss: define loss(outputs, inputs) in its file")
    return found


def cases_of(library: str) -> Mapping[str, Case]:
    """The models of a library."""
    cases: Mapping[str, Case] = importlib.import_module(f"libraries_parts.{library}").MODELS
    return cases


def names_of(argument: str) -> list[str]:
    """The names of models that an argument stands for. Raises KeyError for one that is unknown."""
    if ".py" in argument:
        return [argument]
    library, _, model = argument.partition("/")
    if library not in libraries():
        raise KeyError(f"{library}: expected one of {', '.join(libraries())}, or a file that ends in .py")
    models = models_of(library)
    if model and model not in models:
        raise KeyError(f"{argument}: expected one of {', '.join(models)}")
    return [f"{library}/{name}" for name in ([model] if model else models)]


def models_of(library: str) -> list[str]:
    """The keys of its `MODELS`, read off its text: libraries change each other, and none is imported here."""
    tree = ast.parse((PARTS / f"{library}.py").read_text(encoding="utf-8"))
    tables = (node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict))
    return [ast.literal_eval(key) for key in next(reversed(list(tables))).keys if key is not None]


# What is found


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryRow(Row):
    """What is known of a model; tables by tp degree, of `degrees`. Shares as the head of this file says."""

    degrees: tuple[int, ...] = ()
    heads: int | None = None
    tolerance: float = TOLERANCE
    proven: Mapping[int, bool] = field(default_factory=dict)
    sharded: Mapping[int, float] = field(default_factory=dict)
    errors: Mapping[int, float] = field(default_factory=dict)
    flops: Mapping[int, float] = field(default_factory=dict)
    attention: Mapping[int, float] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    unruled: tuple[str, ...] = ()
    solve_s: float = 0.0

    @property
    def is_solved(self) -> bool:
        """A proven plan at every degree."""
        return bool(self.degrees) and all(self.proven.get(tp, False) for tp in self.degrees)

    @property
    def is_wrong(self) -> bool:
        """Ranks gave something else than one process."""
        return any(error > self.tolerance for error in self.errors.values())

    @property
    def is_right(self) -> bool:
        """Compared at every degree, and right."""
        return bool(self.degrees) and not self.is_wrong and all(tp in self.errors for tp in self.degrees)

    @property
    def is_attention_divided(self) -> bool:
        """All of its products, at every degree."""
        return self.is_right and all(self.attention.get(tp, 0.0) >= DIVIDED for tp in self.degrees)

    @property
    def status(self) -> str:
        """right, wrong, unproven, or the stage that failed."""
        if self.is_wrong:
            return "wrong"
        return self.failed or ("right" if self.is_solved and self.is_right else "unproven")


@dataclass(frozen=True, slots=True)
class Step:
    """What a step gives, and the FLOPs it takes: all, and each of attention's products."""

    outcome: Outcome
    flops: int
    products: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """A step in one process, and by gradient how far rounding may take it: ROUNDING times as far as this one is from
    the same step in float64, if the model runs in it."""

    step: Step
    noise: Mapping[str, float]

    @classmethod
    def of(cls, case: Case) -> "Reference":
        """Runs both steps. Raises ValueError where the loss or a gradient is no finite number."""
        found = step(built(case), case)
        gradients = (gradient for gradient in found.outcome.gradients.values() if gradient is not None)
        if not math.isfinite(found.outcome.loss) or not all(bool(own.isfinite().all()) for own in gradients):
            raise ValueError(f"the loss is {found.outcome.loss}, or a gradient is not finite: nothing to compare with")
        try:
            exact = step(built(case).double(), replace(case, example_inputs=in_float64(case.example_inputs)))
        except (RuntimeError, TypeError, ValueError):  # it has dtypes of its own
            return cls(found, {})
        return cls(found, rounding(found.outcome.gradients, exact.outcome.gradients))


@dataclass(frozen=True, slots=True)
class Compared:
    """The worst error of any rank and whose it is; the most FLOPs of a rank, and of its products of attention."""

    error: float
    name: str
    flops: int
    products: tuple[int, ...]


# One model


def built(case: Case) -> nn.Module:
    """The same weights at every call, none of them at a round value."""
    torch.manual_seed(0)
    random.seed(0)
    return perturbed(case.build_model().train())


def step(module: nn.Module, case: Case) -> Step:
    """Forward and backward of the example inputs, without dropout."""
    inputs = case.example_inputs(case.batch, case.seq_len)
    accepted = forward_inputs(module, inputs)
    with WithoutDropout(), FlopLog(pytree.tree_leaves(accepted)) as log:
        torch.manual_seed(0)
        random.seed(0)  # code may draw without using it: type checks of a random element
        outputs = module(**accepted) if isinstance(accepted, Mapping) else module(*accepted)
        loss = case.loss(outputs, inputs)
        log.is_forward = False
        loss.backward()
    gradients = {plan_name(name): _whole(parameter.grad) for name, parameter in module.named_parameters()}
    return Step(Outcome(loss.item(), gradients), log.total, tuple(log.products))


def _whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def rounding(found: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None]) -> dict[str, float]:
    """By gradient, ROUNDING times its distance from the exact one, but no more than MOST_NOISE of the largest."""
    pairs = {name: (gradient, exact[name]) for name, gradient in found.items()}
    present = {
        name: (ours, theirs) for name, (ours, theirs) in pairs.items() if ours is not None and theirs is not None
    }
    most = MOST_NOISE * max((ours.abs().max().item() for ours, _ in present.values()), default=0.0)
    return {name: min(most, ROUNDING * (ours - theirs).abs().max().item()) for name, (ours, theirs) in present.items()}


def in_float64(example_inputs: Callable[[int, int], Inputs]) -> Callable[[int, int], Inputs]:
    """The inputs with their floating tensors in float64."""

    def widened(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return lambda batch, seq_len: pytree.tree_map(widened, example_inputs(batch, seq_len))


def compared_on_ranks(case: Case, plan: Plan, reference: Outcome, noise: Mapping[str, float]) -> Compared:
    """The plan on real ranks against one process. For processes that have run no backward: see fork_server."""

    def rank() -> Compared:
        found = step(apply_plan(built(case), plan), case)
        return Compared(*worst_error(found.outcome, reference, noise), found.flops, found.products)

    ranks = on_ranks(plan.mesh.num_gpus, rank)
    worst = max(ranks, key=lambda found: found.error)
    busiest = max(ranks, key=lambda found: sum(found.products))
    return replace(worst, flops=max(found.flops for found in ranks), products=busiest.products)


def planned(case: Case, tp: int, reporter: Reporter[LibraryRow]) -> Plan:
    """A proven plan on tp ranks of a machine."""
    return solve(
        case.build_model,
        case.example_inputs,
        cluster=Cluster(gpus=tp, gpus_per_node=GPUS_PER_NODE, profile=machine(device_type="cpu")),
        global_batch=case.batch,
        micro_batch=case.batch,
        seq_len=case.seq_len,
        loss=case.loss,
        tp=tp,
        precision=Precision.FP32,
        unused_outputs=case.unused_outputs,
        progress=reporter.progress,
    )


def cover(name: str, own: OwnFile, degrees: Sequence[int], reporter: Reporter[LibraryRow]) -> None:
    """Everything about a model, reported step by step."""
    with reporter.reported("import"):
        case = case_of(name, own)
        wanted = degrees_of(case.heads, degrees)
        reporter.put(replace(reporter.row, degrees=wanted, heads=case.heads, tolerance=case.tolerance or TOLERANCE))
        with ForkServer(functools.partial(compared_on_ranks, case)) as on_real_ranks:  # before anything is computed
            with reporter.reported("one process"):
                reference = Reference.of(case)
            if not reporter.row.failed:
                for tp in wanted:
                    solve_and_compare(case, tp, reference, reporter, on_real_ranks)


def degrees_of(heads: int | None, degrees: Sequence[int]) -> tuple[int, ...]:
    """Those that divide the heads; the first, where there are none."""
    return tuple(tp for tp in degrees if heads % tp == 0) if heads else tuple(degrees[:1])


def solve_and_compare(
    case: Case,
    tp: int,
    reference: Reference,
    reporter: Reporter[LibraryRow],
    on_real_ranks: Callable[[Plan, Outcome, Mapping[str, float]], Compared],
) -> None:
    """One degree."""
    with reporter.reported("build", f" tp {tp}"):
        before_s = time.process_time()
        try:
            plan = planned(case, tp, reporter)
        finally:
            slowest_s = max(reporter.row.solve_s, time.process_time() - before_s)
            reporter.put(replace(reporter.row, solve_s=slowest_s))
        share = sharded_share(case.build_model(), plan)  # tiny; and constructors may compute with what they make
        row = reporter.row
        row = replace(
            row,
            proven={**row.proven, tp: plan.proof.status is not ProofStatus.UNPROVEN},
            sharded={**row.sharded, tp: share},
            whole=tuple(sorted({*row.whole, *(f"{at}: {found.reason}" for at, found in (plan.opaque or {}).items())})),
            unruled=tuple(sorted({*row.unruled, *plan.unruled_ops})),
        )
        reporter.put(row)
        with reporter.reported("ranks", f" tp {tp}"):
            found = on_real_ranks(plan, reference.step.outcome, reference.noise)
            _note(found, tp, reference.step, reporter)


def _note(found: Compared, tp: int, reference: Step, reporter: Reporter[LibraryRow]) -> None:
    row = reporter.row
    row = replace(row, errors={**row.errors, tp: found.error})
    if reference.flops:
        row = replace(row, flops={**row.flops, tp: divided(found.flops, reference.flops, tp)})
    if reference.products and len(found.products) == len(reference.products):
        share = divided(sum(found.products), sum(reference.products), tp)
        row = replace(row, attention={**row.attention, tp: share})
    reporter.put(row)
    if found.error > row.tolerance:
        reporter.note(f"ranks tp {tp}: {found.error:.1e} in {found.name}")


def divided(rank: int, all_ranks: int, tp: int) -> float:
    """The share of the work that is divided, of a rank's work and all: 0 where it does everything, 1 at a tp-th."""
    return (1 - rank / all_ranks) / (1 - 1 / tp)


# The table

HEADER = (
    "model",
    "status",
    "tp",
    "sharded",
    "FLOPs",
    "attention",
    "error",
    "CPU s",
    "runs whole, and ops without a rule",
)


def cells(row: LibraryRow) -> list[str]:
    """A row of the table."""

    def each(table: Mapping[int, float], form: str) -> str:
        return " ".join(format(table[tp], form) if tp in table else "-" for tp in row.degrees)

    whole = [f"{len(row.whole)} modules"] if row.whole else []
    return [
        *(row.model, row.status, " ".join(map(str, row.degrees)) or "-"),
        *(each(row.sharded, ".0%"), each(row.flops, ".0%"), each(row.attention, ".0%") if row.heads else "none"),
        *(each(row.errors, ".0e"), f"{row.solve_s:.1f}", " ".join((*whole, *row.unruled)) or "-"),
    ]


def notes(row: LibraryRow) -> Iterator[str]:
    """What is to be said of a row, below it."""
    for problem in (*row.problems, *row.whole):
        yield problem if len(problem) <= SHOWN_CHARACTERS else problem[:SHOWN_CHARACTERS] + " .."


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many rows there are, and how many meet each bar."""

    rows: int
    wrong: int
    solved: int
    right: int
    with_attention: int
    divided: int

    @classmethod
    def of(cls, rows: Sequence[LibraryRow]) -> "Counts":
        """Of a table."""
        attending = [row for row in rows if row.heads]
        return cls(
            rows=len(rows),
            wrong=sum(row.is_wrong for row in rows),
            solved=sum(row.is_solved for row in rows),
            right=sum(row.is_right for row in rows),
            with_attention=len(attending),
            divided=sum(row.is_attention_divided for row in attending),
        )

    @property
    def are_bars_met(self) -> bool:
        """None wrong, and enough solved and divided."""
        enough_divided = self.divided >= ATTENTION_SHARE * self.with_attention
        return not self.wrong and self.solved >= SOLVED_SHARE * self.rows and enough_divided

    def lines(self) -> Iterator[str]:
        """In words."""
        yield f"{self.wrong} wrong, {self.right} right on ranks, of {self.rows}"
        yield f"right: every error <= {TOLERANCE:g}, or what the code itself rounds"
        yield f"{self.solved} of {self.rows} solved and proven at every degree (bar {SOLVED_SHARE:.0%})"
        yield (
            f"{self.divided} of {self.with_attention} with attention have it divided at every degree "
            f"(bar {ATTENTION_SHARE:.0%})"
        )
        yield f"error: max |a - b| / max(max |b|, {GRADIENT_NOISE:g} x the model's largest gradient), float32"


def write_csv(path: Path, rows: Sequence[LibraryRow]) -> None:
    """The table with all its notes."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*HEADER, "problems", "whole"])
        for row in rows:
            writer.writerow([*cells(row), "\n".join(row.problems), "\n".join(row.whole)])


# The command


def run(name: str, own: OwnFile, degrees: Sequence[int], budget_s: float) -> LibraryRow:
    """The row of a model, from a process of its own that is ended when its budget is spent."""

    def live(reporter: Reporter[LibraryRow]) -> None:
        cover(name, own, degrees, reporter)

    return in_own_process(LibraryRow(model=name), live, budget_s)


def main() -> int:
    """Prints a row per model as it is found, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=libraries(), metavar="MODEL")
    parser.add_argument("--tp", type=lambda text: tuple(map(int, text.split(","))), default=(2, 4), help="degrees")
    parser.add_argument("--heads", type=int, help="of model files: the least number of heads; none without attention")
    parser.add_argument("--batch", type=int, default=1, help="of model files")
    parser.add_argument("--seq-len", type=int, default=16, help="of model files")
    parser.add_argument("--budget", type=float, default=300.0, metavar="CPU_SECONDS", help="for each model")
    parser.add_argument("--list", action="store_true", help="only print their names")
    parser.add_argument("--out", type=Path, metavar="FILE.csv")
    arguments = parser.parse_args()
    own = OwnFile(heads=arguments.heads, batch=arguments.batch, seq_len=arguments.seq_len)
    quiet()
    _operators = declare_missing()
    try:
        names = [name for argument in arguments.models for name in names_of(argument)]
    except KeyError as error:
        parser.error(str(error.args[0]))
    if arguments.list:
        print(*names, sep="\n")
        return 0
    column_widths = widths(HEADER, {"model": max(map(len, names)), "status": 11, "sharded": 9, "error": 11})
    print(line(HEADER, column_widths), flush=True)
    rows = []
    for name in names:
        rows.append(run(name, own, arguments.tp, arguments.budget))
        print(line(cells(rows[-1]), column_widths), *notes(rows[-1]), sep="\n    ", flush=True)
        if arguments.out:
            write_csv(arguments.out, rows)  # whole each time: who ends this early has what was found
    counts = Counts.of(rows)
    print("", *counts.lines(), sep="\n")
    return 0 if counts.are_bars_met else 1


if __name__ == "__main__":
    sys.exit(main())
