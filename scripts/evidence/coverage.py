"""Shows that Hugging Face models are planned, and that their plans are right and shard enough.

    python scripts/evidence/coverage.py [TYPE ...] [--tp 2,4,8] [--numeric-tp 2,4] [--no-numerics] [--tiny]
                                        [--out FILE.csv]

A type's default configuration, with few layers, is solved and proven on the meta device for a machine whose links cost
next to nothing, so that sharding pays. A tiny twin then takes the same choices, by parameter and module name, on real
gloo ranks, which must give the loss and every gradient of one process; sizes in them become those that the twin has by
the same names. Where the choices do not fit the twin, its own plan is run. What is sharded is compared with the plan
that transformers ships for the type. See hugging_face.py for the widths.

A TYPE is any of transformers' (`opt`), for a task if it has several (`bert:CAUSAL_LM`); '*:CAUSAL_LM' is every one of a
task. With --tiny the twin itself is planned: faster, and enough to find what cannot be.

Each type runs in a process of its own. Exit code 0 if all are proven, right, and sharded as much as the shipped plan.
"""

import argparse
import csv
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch._dynamo  # before the forks: DTensor imports it when first used, and each rank would
from gloo_ranks import GRADIENT_NOISE, TOLERANCE, Error, Outcome, on_ranks, perturbed, quiet, worst_error
from hugging_face import (
    LANGUAGE_TYPES,
    OTHER_TYPES,
    UNUSED_OUTPUTS,
    Correspondence,
    Model,
    model_of,
    types_of,
)
from made_up_machine import GPUS_PER_NODE, machine
from parameter_shares import names_by_parameter, sharded_names
from rows import Reporter, Row, in_own_process, line, widths
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.apply.apply import apply_plan
from tpplan.apply.model_match import plan_name
from tpplan.core.graph import ModelGraph, enclosing
from tpplan.core.layout import Conversion, Layout, S, fits
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.typecheck import typecheck
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.plan.plan import BoundaryPlan, CrossingPlan, MeshPlan, ParameterPlan, Plan, Precision, ProofStatus, SizePlan
from tpplan.prove.apply_as_rank import copied
from tpplan.search.planner import solve
from tpplan.search.points.options import Cluster
from tpplan.trace.retrace_opaque import trace_marking

sys.path.append(str(Path(__file__).resolve().parent.parent / "dev"))

from fork_server import ForkServer

#: of the elements of all parameters: less than this, a few biases, is not counted as sharded less
SHARE_RESOLUTION = 1e-3
#: of the FLOPs of attention or MLPs: from this share on they count as divided
DIVIDED = 0.9
#: of a problem in the table; the CSV has all
SHOWN_CHARACTERS = 200

#: styles of transformers that shard a weight, by how their names begin, and those of them that leave a bias whole
SHARDING_STYLES = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "embedding_rowwise", "embedding_colwise")
ROW_STYLES = ("rowwise", "packed_rowwise")


# What is found


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRow(Row):
    """What is known of a model type; tables by tp degree."""

    #: shares of the elements of all parameters
    sharded: Mapping[int, float] = field(default_factory=dict)
    #: what tp divides of a step's FLOPs
    flops: Mapping[int, "FlopShares"] = field(default_factory=dict)
    expert: float | None = None
    #: pattern -> share of the elements of all parameters, of what the shipped plan shards and ours does not
    whole: Mapping[str, float] = field(default_factory=dict)
    proven: Mapping[int, bool] = field(default_factory=dict)
    rounds: Mapping[int, int] = field(default_factory=dict)
    cuts: tuple[str, ...] = ()
    unruled: tuple[str, ...] = ()
    errors: Mapping[int, float] = field(default_factory=dict)
    choices: Mapping[int, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """proven, unproven, wrong, or the stage that failed."""
        if self.failed:
            return self.failed
        if any(error > TOLERANCE for error in self.errors.values()):
            return "wrong"
        return "proven" if all(self.proven.values()) else "unproven"

    @property
    def is_proven(self) -> bool:
        """Every degree that was asked for was solved and proven."""
        return self.failed in ("", "numerics") and bool(self.proven) and all(self.proven.values())

    @property
    def is_right(self) -> bool:
        """Every comparison that was asked for was made and holds."""
        return not self.failed and all(error <= TOLERANCE for error in self.errors.values())

    @property
    def is_sharded_enough(self) -> bool:
        """At least what the shipped plan shards, on every degree."""
        return self.expert is None or min(self.sharded.values(), default=0.0) >= self.expert - SHARE_RESOLUTION

    @property
    def is_right_and_sharded(self) -> bool:
        """All bars hold."""
        return self.is_proven and self.is_right and self.is_sharded_enough


# What is divided


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopShares:
    """The share that tp divides of the FLOPs of a step, of attention, and of MLPs: None where there are none.

    Attention is what runs in modules of classes named so; MLPs are all else that runs in repeated blocks.
    """

    whole: float
    attention: float | None
    mlp: float | None

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> "FlopShares":
        """What a plan divides of a model."""
        assert plan.tp_shares is not None, "the plan has one tensor-parallel rank"
        flops: dict[str, list[float]] = {"attention": [0.0, 0.0], "mlp": [0.0, 0.0], "": [0.0, 0.0]}
        for pattern, own in plan.tp_shares.modules.items():
            kind = flops[kind_of(model, plan, pattern)]
            kind[0] += own.divided_flops_share
            kind[1] += own.flops_share
        found = {kind: divided / total if total else None for kind, (divided, total) in flops.items()}
        return cls(whole=plan.tp_shares.flops_share, attention=found["attention"], mlp=found["mlp"])

    def __str__(self) -> str:
        return " ".join("-" if share is None else f"{share:.0%}" for share in (self.whole, self.attention, self.mlp))


def kind_of(model: nn.Module, plan: Plan, pattern: str) -> str:
    """Whether a plan's module is in attention, in an MLP of a repeated block, or neither ("")."""
    name = next(own for own, _ in plan.expand(pattern))
    modules = dict(model.named_modules(remove_duplicate=False))
    around = [modules[part] for part in enclosing("" if name == ROOT else name) if part in modules]
    if any("attention" in type(module).__name__.lower() for module in around[:-1]):
        return "attention"
    return "mlp" if any(part.isdecimal() or part == "*" for part in pattern.split(".")) else ""


# What is sharded


def expert_shards(plan: Mapping[str, str], name: str, num_dims: int) -> bool:
    """Whether a plan of transformers ({pattern: style}) shards a parameter, by its name or by its module's."""
    for pattern, style in plan.items():
        owner = re.escape(pattern).replace(r"\*", r"\d+")
        if re.fullmatch(rf"{owner}(\.[^.]+)?", name) and style.startswith(SHARDING_STYLES):
            return num_dims > 1 or not style.startswith(ROW_STYLES)
    return False


def pattern_of(name: str) -> str:
    """layers.3.mlp.weight -> layers.*.mlp.weight"""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the elements of all parameters: what ours shards, what the shipped plan does, and it alone, by pattern."""

    ours: float
    expert: float | None
    expert_alone: Mapping[str, float]


def shares(model: nn.Module, plan: Plan | None) -> Shares:
    """What is sharded of a model by a plan of ours and by that which transformers ships, if it does."""
    shipped: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    sharded = sharded_names(plan) if plan is not None else {}
    total = sum(parameter.numel() for parameter in model.parameters())
    ours = expert = 0
    alone: dict[str, float] = {}
    for parameter, names in names_by_parameter(model):
        is_ours = any(name in sharded for name in names)
        is_expert = any(expert_shards(shipped, name, parameter.dim()) for name in names)
        ours += parameter.numel() * is_ours
        expert += parameter.numel() * is_expert
        if is_expert and not is_ours:
            alone[pattern_of(names[0])] = alone.get(pattern_of(names[0]), 0.0) + parameter.numel() / total
    return Shares(ours=ours / total, expert=expert / total if shipped else None, expert_alone=alone)


# Plans


def planned(model: Model, tp: int, profile: HardwareProfile, precision: str, reporter: Reporter[TypeRow]) -> Plan:
    """A proven plan on tp ranks of a machine."""
    return solve(
        model.build_model,
        model.example_inputs,
        cluster=Cluster(gpus=tp, gpus_per_node=GPUS_PER_NODE, profile=profile),
        global_batch=model.batch,
        micro_batch=model.batch,
        seq_len=model.seq_len,
        tp=tp,
        precision=precision,
        unused_outputs=UNUSED_OUTPUTS,
        progress=reporter.progress,
    )


def transferred(plan: Plan, numbers: Correspondence, tp: int) -> Plan:
    """The plan's choices for a twin with other sizes, on tp ranks in float32. Raises ValueError where they do not fit.

    Parameters and modules are found by their names, so the twin must have the same; what is sharded must divide, and
    every size that the plan names must have a counterpart.
    """
    shapes = {name: tuple(found.shape) for name, found in numbers.twin.named_parameters(remove_duplicate=False)}
    parameters, boundaries = plan.parameter_plans(), plan.boundary_plans()
    names = {label for name, parameter in parameters.items() for label in (name, *parameter.aliases)}
    if names != shapes.keys():
        raise ValueError(f"{min(names ^ shapes.keys())} is not a parameter of both")
    resized = {name: _resized(parameter, shapes[name], numbers) for name, parameter in parameters.items()}
    for name, parameter in resized.items():
        for layout in (parameter.placement, *parameter.reads.values()):
            if not fits(shapes[name], layout, tp):
                raise ValueError(f"{name}: {list(shapes[name])} does not divide as {layout} by {tp}")
    crossed = {name: _in_float32(boundary, _module(name), numbers) for name, boundary in boundaries.items()}
    laid_out = zip(_layouts(parameters, boundaries), _layouts(resized, crossed), strict=True)
    parts = {(module, wide.parts, ours.parts) for (module, wide), (_, ours) in laid_out if wide.parts}
    with_parts = replace(numbers, parts=tuple(parts))
    return replace(
        plan,
        cluster=replace(plan.cluster, gpus=tp),
        mesh_degrees=MeshPlan(replicate=1, shard=1, tp=tp),
        batch=replace(plan.batch, seq_len=numbers.twin_seq_len),
        precision=Precision.FP32,
        parameters=resized,
        boundaries=crossed,
        sizes={
            module or ROOT: tuple(_local_size(size, module, with_parts, plan.mesh.tp, tp) for size in sizes)
            for module, sizes in plan.size_plans().items()
        },
        losses={module or ROOT: numbers.in_twin(module, count) for module, count in plan.sharded_losses().items()},
        bags={
            module or ROOT: tuple(numbers.in_twin(module, count) for count in counts)
            for module, counts in plan.row_bags().items()
        }
        or None,
    )


def _module(name: str) -> str:
    """As torch names it."""
    return "" if name == ROOT else name


def _local_size(size: SizePlan, module: str, numbers: Correspondence, wide_tp: int, tp: int) -> SizePlan:
    """Of the twin's number, the rank's share is tp / wide_tp times as large as the wide one's. Any shape will do."""
    if size.dims is not None:  # a proportion, whatever the length
        is_whole = size.written < size.local
        return replace(size, of=(0,) * len(size.of), written=1 if is_whole else tp, local=tp if is_whole else 1)
    written = numbers.in_twin(module, size.written)
    local, rest = divmod(written * size.local * wide_tp, size.written * tp)
    if rest:
        raise ValueError(f"{size.written} in {module or ROOT} is {written} in the twin, which {tp} does not divide")
    return replace(size, of=(0,) * len(size.of), written=written, local=local)


def _layouts(
    parameters: Mapping[str, ParameterPlan], boundaries: Mapping[str, BoundaryPlan]
) -> Iterator[tuple[str, Layout]]:
    """Layouts by the modules in which something has them."""
    for parameter in parameters.values():
        yield from parameter.reads.items()
    for name, boundary in boundaries.items():
        for crossing in (*boundary.inputs.values(), *boundary.outputs.values()):
            yield _module(name), crossing.conversion.source
            yield _module(name), crossing.conversion.target


def _resized(parameter: ParameterPlan, shape: tuple[int, ...], numbers: Correspondence) -> ParameterPlan:
    reads = {
        reader: _with_parts_of(layout, reader, numbers, shape[layout.dim] if layout.parts else 0)
        for reader, layout in parameter.reads.items()
    }
    return replace(parameter, reads=reads, shape=shape, dtype="float32")


def _with_parts_of(layout: Layout, module: str, numbers: Correspondence, size: int = 0) -> Layout:
    """The layout with the twin's parts of a dim that has this size in the twin. Equal parts stay equal."""
    if layout.each is not None:
        return replace(layout, each=numbers.in_twin(module, layout.each))
    if layout.dim is None or not layout.parts:
        return layout
    try:
        size = size or numbers.in_twin(module, sum(layout.parts))
        if len(set(layout.parts)) > 1:
            parts = [numbers.in_twin(module, part) for part in layout.parts]
        else:
            parts = [size // len(layout.parts)] * len(layout.parts)
    except ValueError as error:
        raise ValueError(f"parts of {layout}: {error}") from None
    if sum(parts) != size:
        raise ValueError(f"parts of {layout} in {module or ROOT} are {parts} in the twin, of a dim of {size}")
    return S(layout.dim, *parts)


def _in_float32(boundary: BoundaryPlan, module: str, numbers: Correspondence) -> BoundaryPlan:
    def crossings(table: Mapping[str, CrossingPlan]) -> dict[str, CrossingPlan]:
        return {
            path: CrossingPlan(
                Conversion(
                    _with_parts_of(crossing.conversion.source, module, numbers),
                    _with_parts_of(crossing.conversion.target, module, numbers),
                ),
                "float32" if crossing.dtype == "bfloat16" else crossing.dtype,
            )
            for path, crossing in table.items()
        }

    return BoundaryPlan(inputs=crossings(boundary.inputs), outputs=crossings(boundary.outputs))


def agreement(plan: Plan, other: Plan) -> float:
    """Of the parameters that a plan shards, the share (by names) that another plan places alike."""
    wanted, found = sharded_names(plan), sharded_names(other)
    return sum(found.get(name) == placement for name, placement in wanted.items()) / max(1, len(wanted))


# Numerics


#: what a plan's worst error is against the outcome of one process
Compared = Callable[[Plan, Outcome], Error]


def built(model: Model) -> nn.Module:
    """The same weights at every call, none of them at a round value."""
    torch.manual_seed(0)
    return perturbed(model.build_model())


def step(module: nn.Module, model: Model) -> Outcome:
    """Forward and backward of the example inputs."""
    loss = module(**model.example_inputs(model.batch, model.seq_len)).loss
    loss.backward()
    gradients = {plan_name(name): _whole(parameter.grad) for name, parameter in module.named_parameters()}
    return Outcome(loss.item(), gradients)


def _whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A tiny model, what its sizes are in the wide one, its graph, and what it gives on one process."""

    model: Model
    numbers: Correspondence
    graph: ModelGraph
    reference: Outcome

    @classmethod
    def of(cls, model_type: str, *, is_wide_tiny: bool = False) -> "Twin":
        """The twin of a model type; the wide model may be one itself."""
        wide, model = (model_of(model_type, tiny=tiny) for tiny in (is_wide_tiny, True))
        with torch.device("meta"):
            modules = wide.build_model(), model.build_model()
        return cls(
            model=model,
            numbers=Correspondence(
                wide=modules[0], twin=modules[1], wide_seq_len=wide.seq_len, twin_seq_len=model.seq_len
            ),
            graph=trace_marking(
                modules[1], lambda: copied(modules[1]), model.example_inputs(model.batch, model.seq_len)
            )[0],
            reference=step(built(model), model),
        )

    def carried(self, wide: Plan, tp: int) -> Plan:
        """The wide plan's choices. Raises ValueError where they do not fit or are not typed."""
        plan = transferred(wide, self.numbers, tp)
        if (problem := typecheck(self.graph, plan)) is not None:
            raise ValueError(problem.message)
        return plan


def errors_on_ranks(model_type: str, plan: Plan, reference: Outcome) -> Error:
    """The plan applied to the twin on real ranks against one process: the worst of all, whose replicas may differ.

    For processes that have run no backward: see fork_server.
    """
    model = model_of(model_type, tiny=True)

    def rank() -> Error:
        # choices made for other sizes, dtypes and devices: what comes out is compared, not what is called
        return worst_error(step(apply_plan(built(model), plan, check=False), model), reference)

    return max(on_ranks(plan.mesh.num_gpus, rank))


# One model type


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to do for each model type."""

    degrees: tuple[int, ...]
    numeric_degrees: tuple[int, ...]
    profile: HardwareProfile
    precision: str
    budget_s: float
    tiny: bool = False


def cover(model_type: str, options: Options, reporter: Reporter[TypeRow]) -> None:
    """Everything about a model type, reported step by step."""
    plans: dict[int, Plan] = {}
    with ForkServer(functools.partial(errors_on_ranks, model_type)) as on_real_ranks:  # before anything is computed
        with reporter.reported("build"):
            plans = solve_wide(model_type, options, reporter)
        with reporter.reported("numerics"):
            if plans and options.numeric_degrees:
                compare(model_type, plans, options, reporter, on_real_ranks)


def solve_wide(model_type: str, options: Options, reporter: Reporter[TypeRow]) -> dict[int, Plan]:
    """Plans of the published width by degree, of those that are found."""
    model = model_of(model_type, tiny=options.tiny)
    with torch.device("meta"):
        module = model.build_model()
    reporter.put(replace(reporter.row, expert=shares(module, None).expert))
    if model.precision not in (None, options.precision):
        reporter.note(f"planned in {model.precision}")
    plans: dict[int, Plan] = {}
    for tp in options.degrees:
        with reporter.reported("build", f" tp {tp}"):
            plans[tp] = plan = planned(model, tp, options.profile, model.precision or options.precision, reporter)
            row, found = reporter.row, shares(module, plan)
            changed = replace(
                row,
                sharded={**row.sharded, tp: found.ours},
                flops={**row.flops, tp: FlopShares.of(module, plan)},
                whole={**found.expert_alone, **row.whole},
                proven={**row.proven, tp: plan.proof.status is not ProofStatus.UNPROVEN},
                rounds={**row.rounds, tp: plan.proof.rounds},
                cuts=(*row.cuts, *(f"tp {tp}: {cut}" for cut in plan.proof.cuts)),
                unruled=tuple(sorted({*row.unruled, *plan.unruled_ops})),
            )
            reporter.put(changed)
    return plans


def compare(
    model_type: str, plans: Mapping[int, Plan], options: Options, reporter: Reporter[TypeRow], on_real_ranks: Compared
) -> None:
    """The twin under the wide model's choices, on real ranks."""
    twin = Twin.of(model_type, is_wide_tiny=options.tiny)
    for tp in options.numeric_degrees:
        # The choices of the smallest degree that is not below: what divides by it divides by tp.
        wide = plans[min((degree for degree in plans if degree >= tp), default=max(plans))]
        with reporter.reported("numerics", f" tp {tp}"):
            (error, name), choices = errors_of_choices(twin, wide, tp, options, reporter, on_real_ranks)
            row = reporter.row
            reporter.put(replace(row, errors={**row.errors, tp: error}, choices={**row.choices, tp: choices}))
            if error > TOLERANCE:
                reporter.note(f"numerics tp {tp}, {choices}: {error:.1e} in {name}")


def errors_of_choices(
    twin: Twin, wide: Plan, tp: int, options: Options, reporter: Reporter[TypeRow], on_real_ranks: Compared
) -> tuple[Error, str]:
    """Under the wide plan's choices ("same"), else under the twin's own plan ("own" and how much of it agrees)."""
    try:
        return on_real_ranks(twin.carried(wide, tp), twin.reference), "same"
    except (ValueError, RuntimeError) as error:
        reporter.note(f"tp {tp}: the choices do not fit the twin: {str(error).splitlines()[0]}")
    own = planned(twin.model, tp, options.profile, Precision.FP32, reporter)
    reporter.at("numerics")
    return on_real_ranks(own, twin.reference), f"own {agreement(wide, own):.0%}"


def run(model_type: str, options: Options) -> TypeRow:
    """The row of a model type, from a process of its own that is ended when its budget is spent."""

    def live(reporter: Reporter[TypeRow]) -> None:
        cover(model_type, options, reporter)

    return in_own_process(TypeRow(model=model_type), live, options.budget_s)


# The table


def header(options: Options) -> list[str]:
    """Names of the columns."""
    return [
        *("model", "status"),
        *(f"sharded tp {tp}" for tp in options.degrees),
        *(f"FLOPs tp {tp}" for tp in options.degrees),
        *("shipped", "rounds"),
        *(f"error tp {tp}" for tp in options.numeric_degrees),
        *("choices", "CPU s", "ops without a rule"),
    ]


def cells(row: TypeRow, options: Options) -> list[str]:
    """A row of the table."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    errors = [f"{row.errors[tp]:.0e}" if tp in row.errors else "-" for tp in options.numeric_degrees]
    return [
        *(row.model, row.status),
        *(share(row.sharded.get(tp)) for tp in options.degrees),
        *(str(row.flops.get(tp, "-")) for tp in options.degrees),
        *(share(row.expert), " ".join(str(row.rounds.get(tp, "-")) for tp in options.degrees)),
        *errors,
        *(", ".join(dict.fromkeys(row.choices.values())) or "-", f"{row.cpu_s:.0f}", " ".join(row.unruled) or "-"),
    ]


def notes(row: TypeRow) -> Iterator[str]:
    """What is wrong with a row, below it."""
    for problem in row.problems:
        yield problem if len(problem) <= SHOWN_CHARACTERS else problem[:SHOWN_CHARACTERS] + " .."
    if not row.is_sharded_enough and row.whole:
        largest = sorted(row.whole.items(), key=lambda item: -item[1])[:6]
        yield "whole, though shipped sharded: " + ", ".join(f"{name} {share:.1%}" for name, share in largest)


def summary(rows: Sequence[TypeRow], options: Options) -> list[str]:
    """How many rows meet each bar, and what the columns mean."""
    with_expert = [row for row in rows if row.expert is not None]
    enough = sum(row.is_proven and row.is_sharded_enough for row in with_expert)
    lines = [f"{sum(row.is_proven for row in rows)} of {len(rows)} proven"]
    if options.numeric_degrees:
        compared = [row for row in rows if row.is_right and row.errors]
        lines.append(f"{len(compared)} of {len(rows)} numerically right: every error <= {TOLERANCE:g}")
    lines.append(f"{enough} of {len(with_expert)} with a shipped plan sharded at least as much")
    lines.append("FLOPs: shares of those of a step that tp divides: all, attention, MLPs")
    lines += [f"tp {tp}: attention and MLPs divided in {divided(rows, tp)}" for tp in options.degrees]
    lines.append(f"sharded, shipped: shares of the elements of all parameters, compared to {SHARE_RESOLUTION:.1%}")
    lines.append(
        f"error: max |a - b| / max(max |b|, {GRADIENT_NOISE:g} x the model's largest gradient), float32, the worst of "
        "the loss and all gradients"
    )
    return lines


def divided(rows: Sequence[TypeRow], tp: int) -> str:
    """How many of the models with attention or MLPs have both divided, by DIVIDED of their FLOPs."""
    found = [row.flops[tp] for row in rows if tp in row.flops]
    shares = [[share for share in (own.attention, own.mlp) if share is not None] for own in found]
    known = [own for own in shares if own]
    return f"{sum(min(own) >= DIVIDED for own in known)} of {len(known)}"


def write_csv(path: Path, rows: Sequence[TypeRow], options: Options) -> None:
    """The table with all its notes."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*header(options), "problems", "whole though shipped sharded", "cuts"])
        for row in rows:
            whole = " ".join(f"{name}={share:.4f}" for name, share in row.whole.items())
            writer.writerow([*cells(row, options), "\n".join(row.problems), whole, "\n".join(row.cuts)])


# The command


def degrees(text: str) -> tuple[int, ...]:
    """2,8 -> (2, 8)"""
    return tuple(int(part) for part in text.split(","))


def main() -> int:
    """Prints a row per model type as it is found, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=[*LANGUAGE_TYPES, *OTHER_TYPES], metavar="TYPE")
    parser.add_argument("--tp", type=degrees, default=(2, 4, 8), help="degrees at the published width")
    parser.add_argument("--numeric-tp", type=degrees, default=(2, 4), help="degrees on real ranks")
    parser.add_argument("--no-numerics", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="plan the tiny twin, not the published width")
    parser.add_argument("--profile", metavar="NAME", help="instead of the made-up machine where sharding pays")
    parser.add_argument("--precision", choices=list(Precision), default=Precision.BF16_MIXED)
    parser.add_argument("--budget", type=float, default=300.0, metavar="CPU_SECONDS", help="for each model type")
    parser.add_argument("--out", type=Path, metavar="FILE.csv")
    arguments = parser.parse_args()
    options = Options(
        degrees=arguments.tp,
        numeric_degrees=() if arguments.no_numerics else arguments.numeric_tp,
        profile=load_profile(arguments.profile) if arguments.profile else machine(),
        precision=arguments.precision,
        budget_s=arguments.budget,
        tiny=arguments.tiny,
    )
    quiet()
    model_types = [model_type for name in arguments.types for model_type in types_of(name)]
    least = {"model": max(map(len, model_types)), "status": 8, "choices": 12, "rounds": 6}
    flops = len(str(FlopShares(whole=1.0, attention=1.0, mlp=1.0)))
    column_widths = widths(
        header(options), least | {name: flops for name in header(options) if name.startswith("FLOPs")}
    )
    print(line(header(options), column_widths), flush=True)
    rows = []
    for model_type in model_types:
        rows.append(run(model_type, options))
        print(line(cells(rows[-1], options), column_widths), *notes(rows[-1]), sep="\n    ", flush=True)
    print("", *summary(rows, options), sep="\n")
    if arguments.out:
        write_csv(arguments.out, rows, options)
    return 0 if all(row.is_right_and_sharded for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
