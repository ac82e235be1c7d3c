"""Shows that experts divided over ranks compute what one process does, for many types of models.

    python scripts/evidence/experts.py [TYPE ...] [--forms grouped_mm batched_mm eager] [--ranks 2,4,8] [--no-training]

Each type of transformers is a tiny twin (hugging_face.py) of odd length, each form one of its implementations of
experts; `loop` is a model written here, whose layers walk a ModuleList of experts. Every form is planned for each
division of its ranks, with the number of ranks that divide experts (ep), that shard (FSDP) and that are tensor-parallel
(tp) pinned, in several accumulated micro-batches. Real gloo ranks then take a step, which must give the loss and every
gradient of one process; under the last division of 4 ranks also 20 steps of AdamW, whose losses must be those of one
process. transformers' eager form loops over the experts that some row has, and asks a tensor for their numbers: it
runs whole, and is not tried by default. `experts` says how the plan has them: divided, as far as the module's code
gave the same numbers whole and divided, or whole, and why.

Each form runs in a process of its own. Exit code 4 where anything is wrong, 1 where a type fails or is left whole that
is not expected to be.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch._dynamo  # before the forks: DTensor imports it when first used, and each rank would
import torch.distributed as dist
from gloo_ranks import TOLERANCE, Error, Outcome, on_ranks, perturbed, quiet, worst_error
from hugging_face import TINY_SEQ_LEN, UNUSED_OUTPUTS, VOCABULARY, Model, model_of
from made_up_machine import GPUS_PER_NODE, machine
from rows import Reporter, Row, in_own_process, line, widths
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.apply.apply import apply_plan
from tpplan.apply.clip_gradients import clip_grad_norm_
from tpplan.apply.model_match import plan_name
from tpplan.core.errors import UsageError
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.plan.plan import Plan
from tpplan.search.planner import solve
from tpplan.search.points.options import Cluster

sys.path.append(str(Path(__file__).resolve().parent.parent / "dev"))

from fork_server import ForkServer

NAMED = ("qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama4_text", "olmoe")
OTHERS = (
    *("granitemoe", "phimoe", "glm4_moe", "hunyuan_v1_moe", "ernie4_5_moe", "minimax", "flex_olmo", "jamba", "dots1"),
    *("minimax_m2", "qwen3_next", "deepseek_v2"),
)
#: the model written here
LOOP = "loop"
#: types whose experts no module is given rows and an index for: they stay whole
WHOLE = frozenset({LOOP, "llama4_text"})
#: the implementations of experts that transformers has for any of its modules of experts
FORMS = ("grouped_mm", "batched_mm", "eager")
#: sequences of a step, and how many tokens a sequence has: no number of ranks divides it
BATCH, LENGTH = 8, 13
STEPS, LEARNING_RATE, MOST_NORM = 20, 1e-3, 0.5
#: relative difference of a loss after steps of AdamW, which magnifies the rounding of small gradients
LOSS_TOLERANCE = 1e-3
BUDGET_S = 400.0
SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True, order=True)
class Division:
    """Ranks: `ep` of the `shard` ranks of FSDP divide experts; `per_node` of them are a node."""

    ranks: int
    ep: int
    shard: int
    tp: int
    per_node: int = GPUS_PER_NODE

    def __str__(self) -> str:
        across = f", {self.per_node} a node" if self.per_node < self.ranks else ""
        return f"ep {self.ep} fsdp {self.shard} tp {self.tp}{across}"


DIVISIONS = (
    Division(2, 2, 2, 1),
    Division(4, 2, 4, 1),
    Division(4, 2, 2, 2),
    Division(4, 4, 4, 1, per_node=2),
    Division(8, 4, 4, 2),
    Division(8, 2, 4, 2),
)
#: divisions of the forms after the first
FEW = (DIVISIONS[0], DIVISIONS[2])
#: under which AdamW steps
TRAINED = DIVISIONS[1]


# The models


class Loop(nn.Module):
    """A router, and experts in a list; x [B, T, D]. Each expert computes the rows that have it among their two."""

    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 96), nn.SiLU(), nn.Linear(96, dim)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weight, index = self.router(rows).softmax(-1).topk(2)
        found = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(index == number)
            found = found.index_add(0, token, expert(rows[token]) * weight[token, place].unsqueeze(1))
        return x + found.view_as(x)


class LoopMoe(nn.Module):
    """A language model of layers that walk lists of experts; its output is a dict with the loss, as transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
        self.layers = nn.ModuleList(Loop(4, 64) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def _text(batch: int, seq_len: int) -> "dict[str, Tensor | bool]":
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCABULARY, (batch, seq_len), generator=generator) for name in ("input_ids", "labels")}


def model_with(name: str, form: str) -> Model:
    """The tiny model of a type with a form of experts."""
    if name == LOOP:
        return Model(build_model=LoopMoe, example_inputs=_text, batch=1, seq_len=LENGTH, precision=None)
    twin = model_of(name, tiny=True)
    length = LENGTH if twin.seq_len == TINY_SEQ_LEN else twin.seq_len

    def build_model() -> nn.Module:
        model = twin.build_model()
        for part in (vars(module).get("config") for module in model.modules()):
            for noise in ("router_jitter_noise", "input_jitter_noise"):
                if hasattr(part, noise):
                    setattr(part, noise, 0.0)
        for module in model.modules():  # a router may have copied the noise when it was made
            vars(module).update({key: 0.0 for key in vars(module) if key.endswith("jitter_noise")})
        if form in FORMS:
            model.set_experts_implementation(form)  # type: ignore[operator]
        return model

    return replace(twin, build_model=build_model, seq_len=length)


def forms_of(name: str) -> tuple[str, ...]:
    """The forms of experts that a type has; "own" alone where transformers' implementations do not apply to it."""
    if name == LOOP:
        return ("list",)
    try:
        with torch.device("meta"):
            model = model_of(name, tiny=True).build_model()
    except Exception:  # the row of the type will say which
        return ("own",)
    return FORMS if type(model)._can_set_experts_implementation() else ("own",)  # type: ignore[attr-defined]


def built(model: Model) -> nn.Module:
    """The same weights at every call, none of them at a round value."""
    torch.manual_seed(0)
    return perturbed(model.build_model())


# The steps


def backwards(module: nn.Module, inputs: dict[str, Tensor], plan: Plan | None) -> float:
    """The loss of a batch, the mean over ranks, after the backwards of the plan's micro-batches."""
    steps, total = 1, torch.zeros(())
    if plan is not None:
        inputs = _part(inputs, plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)
        steps = plan.batch.accumulation_steps
    for number in range(steps):
        loss = module(**_part(inputs, number, steps))["loss"] / steps
        loss.backward()
        total += loss.detach()
    if plan is not None:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def _part(inputs: dict[str, Tensor], number: int, parts: int) -> dict[str, Tensor]:
    return {name: value.chunk(parts)[number] for name, value in inputs.items()}


def step(model: Model, plan: Plan | None = None) -> Outcome:
    """A forward and backward of one process, or of this rank under a plan."""
    module = built(model)
    if plan is not None:
        module = apply_plan(module, plan)
    loss = backwards(module, model.example_inputs(BATCH, model.seq_len), plan)  # type: ignore[arg-type]
    found = {plan_name(name): _whole(parameter.grad) for name, parameter in module.named_parameters()}
    return Outcome(loss, found)


def _whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def losses(model: Model, plan: Plan | None = None) -> list[float]:
    """The losses of steps of AdamW with clipping, each on another batch."""
    module = built(model)
    if plan is not None:
        module = apply_plan(module, plan)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    found = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(4, VOCABULARY, (BATCH, model.seq_len), generator=generator)
        found.append(backwards(module, {"input_ids": ids, "labels": ids.clone()}, plan))
        clip_grad_norm_(module.parameters(), MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return found


def error_on_ranks(name: str, form: str, plan: Plan, is_trained: bool) -> Error:
    """The worst relative error of ranks under the plan against one process, and whose it is.

    For processes that have run no backward: see fork_server.
    """
    model = model_with(name, form)
    if is_trained:
        both = (
            on_ranks(1, functools.partial(losses, model))[0],
            on_ranks(plan.mesh.num_gpus, functools.partial(losses, model, plan)),
        )
        pairs = [(abs(own - one) / abs(one), f"loss of step {n}") for found in both[1] for n, (one, own) in
                 enumerate(zip(both[0], found, strict=True))]  # fmt: skip
        return max(pairs)
    reference = on_ranks(1, functools.partial(step, model))[0]
    return max(on_ranks(plan.mesh.num_gpus, lambda: worst_error(step(model, plan), reference)))


# One form of a type


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRow(Row):
    """What is known of a form of a type: by division the worst error, and how the plan has the experts; `training` is
    the worst error of a loss of STEPS steps."""

    form: str
    errors: dict[Division, Error] = field(default_factory=dict)
    experts: dict[Division, str] = field(default_factory=dict)
    training: Error | None = None

    @property
    def is_wrong(self) -> bool:
        """Ranks gave something else than one process."""
        is_off = any(error > TOLERANCE for error, _ in self.errors.values())
        return is_off or (self.training is not None and self.training[0] > LOSS_TOLERANCE)

    @property
    def is_as_expected(self) -> bool:
        """All divisions were tried, and experts are divided that can be."""
        is_whole = any(how.startswith("whole") for how in self.experts.values())
        return not self.failed and (not is_whole or self.model in WHOLE)


def across_nodes() -> HardwareProfile:
    """A machine whose profile has collectives across nodes, as one of CPUs."""
    return replace(load_profile("h100-sxm"), device_type="cpu")


def planned(model: Model, division: Division) -> tuple[Plan, str]:
    """The plan under a division, and how it has the experts; with whole experts where they cannot be divided."""
    is_across = division.per_node < division.ranks

    def solved(ep: int) -> Plan:
        return solve(
            model.build_model,
            model.example_inputs,
            cluster=Cluster(
                gpus=division.ranks,
                gpus_per_node=division.per_node,
                profile=across_nodes() if is_across else machine(device_type="cpu"),
            ),
            global_batch=BATCH,
            seq_len=model.seq_len,
            micro_batch=1,
            unused_outputs=UNUSED_OUTPUTS,
            tp=division.tp,
            fsdp=division.shard,
            ep=ep,
            all_gpus=True,
            precision="fp32",
        )

    try:
        plan = solved(division.ep)
    except UsageError as error:
        return solved(1), f"whole: {error}"
    assert plan.experts is not None
    assert plan.mesh.ep == division.ep
    return plan, "divided, checked on numbers"


def cover(row: ExpertsRow, divisions: Sequence[Division], is_trained: bool, reporter: Reporter[ExpertsRow]) -> None:
    """Every division of a form, reported step by step."""
    name, form = row.model, row.form
    with reporter.reported("build"):
        model = model_with(name, form)
    if reporter.row.failed:
        return
    with ForkServer(functools.partial(error_on_ranks, name, form)) as on_real_ranks:  # before anything is computed
        for division in divisions:
            with reporter.reported("plan", f" {division}"):
                plan, how = planned(model, division)
                found = reporter.row
                reporter.put(replace(found, experts={**found.experts, division: how}))
                reporter.at("ranks")
                error = on_real_ranks(plan, False)
                found = reporter.row
                reporter.put(replace(found, errors={**found.errors, division: error}))
                if is_trained and division == TRAINED:
                    reporter.at("training")
                    reporter.put(replace(reporter.row, training=on_real_ranks(plan, True)))


def run(name: str, form: str, divisions: Sequence[Division], is_trained: bool) -> ExpertsRow:
    """The row of a form, from a process of its own that is ended when its budget is spent."""
    row = ExpertsRow(model=name, form=form)
    return in_own_process(row, functools.partial(cover, row, divisions, is_trained), BUDGET_S)


# The table


HEADER = ("type", "form", "division", "error", "experts")


def lines(row: ExpertsRow) -> list[tuple[str, ...]]:
    """Rows of the table, of HEADER's columns."""
    found = []
    for division, (error, name) in row.errors.items():
        wrong = f" WRONG in {name}" if error > TOLERANCE else ""
        how = row.experts[division][:SHOWN_CHARACTERS] + wrong
        found.append((row.model, row.form, str(division), f"{error:.0e}", how))
    if row.training is not None:
        error, name = row.training
        wrong = f"WRONG in {name}" if error > LOSS_TOLERANCE else "losses of one process"
        found.append((row.model, row.form, f"{STEPS} steps, {TRAINED}", f"{error:.0e}", wrong))
    found += [(row.model, row.form, "", "", problem[:SHOWN_CHARACTERS]) for problem in row.problems]
    return found


def summary(rows: Sequence[ExpertsRow]) -> str:
    """How many forms are right, and how many are divided."""
    compared = [(error, how) for row in rows for error, how in
                ((row.errors[d][0], row.experts[d]) for d in row.errors)]  # fmt: skip
    right = sum(error <= TOLERANCE for error, _ in compared)
    divided = sum(how.startswith("divided") for _, how in compared)
    worst = max((error for error, _ in compared), default=0.0)
    return (
        f"{right} of {len(compared)} cases right (errors <= {TOLERANCE:g}, the worst {worst:.0e}), {divided} of them "
        f"with divided experts; {sum(bool(row.failed) for row in rows)} forms of {len(rows)} failed"
    )


def numbers(text: str) -> tuple[int, ...]:
    """2,8 -> (2, 8)"""
    return tuple(int(part) for part in text.split(","))


def main() -> int:
    """Prints the rows of each form as they are found, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=[*NAMED, *OTHERS, LOOP], metavar="TYPE")
    parser.add_argument(
        "--forms", nargs="+", default=FORMS[:2], help="of those that a type has (default: all but eager)"
    )
    parser.add_argument("--ranks", type=numbers, default=(2, 4, 8), help="divisions of these numbers of ranks alone")
    parser.add_argument("--no-training", action="store_true")
    arguments = parser.parse_args()
    quiet()
    column_widths = widths(HEADER, {"type": 14, "form": 10, "division": 30, "error": 5})
    print(line(HEADER, column_widths), flush=True)
    rows = []
    for name in arguments.types:
        forms = [form for form in forms_of(name) if form in arguments.forms or form not in FORMS]
        for number, form in enumerate(forms):
            divisions = [d for d in (FEW if number else DIVISIONS) if d.ranks in arguments.ranks]
            rows.append(run(name, form, divisions, not number and not arguments.no_training))
            for texts in lines(rows[-1]):
                print(line(texts, column_widths), flush=True)
    print("", summary(rows), sep="\n")
    if any(row.is_wrong for row in rows):
        return 4
    return 0 if all(row.is_as_expected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
