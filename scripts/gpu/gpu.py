"""Holds predictions against one GPU: measures a profile, runs one rank's share of six plans, compares time and memory.

    python scripts/gpu/gpu.py --out results                                   under 8 minutes, no solver needed
    python scripts/gpu/gpu.py --out results --profile results/profile.json    without measuring again
    python scripts/gpu/gpu.py --out results --toy                             on a CPU, to see that it runs

The plans (scripts/gpu/plans/, made by scripts/gpu/make_plans.py) are of four layers of Llama 3 8B in full width. Each
is priced on the profile just measured (tpplan.price), applied on a fake process group in which this process is rank 0,
and run forward and backward over its micro-batches, without an optimizer: what remains in memory is parameters,
gradients and activations.

Collectives of a fake group send nothing. What they do take (a result to allocate, a copy) is measured first and put in
place of the profile's own, so both sides count the same work. Profile, plans and results are written as JSON.
"""

import argparse
import dataclasses
import gc
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import llama
from results import Measured, Row, Summary, table

import tpplan
from tpplan.core.errors import TpplanError, UsageError
from tpplan.core.files import write_atomically
from tpplan.core.units import KIB
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.machine.tables import Source
from tpplan.measure.collectives import measure_collectives
from tpplan.measure.compute import make_profile, measure_compute
from tpplan.measure.grid import default_grid
from tpplan.plan.model_fingerprint import parameters_fingerprint
from tpplan.plan.plan import BoundaryPlan, CrossingPlan, Fingerprints, Plan, Precision, ProofReport, ProofStatus
from tpplan.torch_internals.groups import fake_group
from tpplan.trace.hooks.live_storages import Storages

PLANS = Path(__file__).resolve().parent / "plans"
#: groups that the plans have, on one node
GROUP_SIZES = (2, 4, 8)
GPUS_PER_NODE = 8
FAKE_GROUP = Source(
    id="fake-group", licence="own measurement", source="scripts/gpu/gpu.py, collectives of a fake group"
)
WEIGHT_DEVIATION = 0.02
TABLE_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is run, in which dtype, and how much is measured; messages are those of the activations converted."""

    config: llama.Config
    seq_len: int
    dtype: str
    precision: Precision
    compute_budget_s: float
    collectives_budget_s: float
    message_bytes: tuple[int, ...]
    warm_up_steps: int
    timed_steps: int

    def build_model(self) -> nn.Module:
        """The model; where, the caller says with torch.device."""
        return llama.Llama(self.config)


#: the width of Llama 3 8B [Grattafiori et al. 2024, table 3]
FULL = Size(
    config=llama.Config(
        num_layers=4,
        model_dim=4096,
        hidden_dim=14336,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128_256,
        max_seq_len=8192,
        rope_theta=500_000.0,
    ),
    seq_len=4096,
    dtype="bfloat16",
    precision=Precision.BF16,
    compute_budget_s=240.0,
    collectives_budget_s=10.0,
    message_bytes=tuple(KIB * 4**i for i in range(9)),
    warm_up_steps=3,
    timed_steps=10,
)
TOY = Size(
    config=llama.Config(num_layers=4, model_dim=64, hidden_dim=192, num_heads=8, num_kv_heads=8, vocab_size=256),
    seq_len=64,
    dtype="float32",
    precision=Precision.FP32,
    compute_budget_s=0.5,
    collectives_budget_s=0.2,
    message_bytes=(KIB, 16 * KIB),
    warm_up_steps=1,
    timed_steps=3,
)


# --- the profile ---------------------------------------------------------------------------------------------------


def measure_profile(size: Size, device: torch.device, budget_s: float) -> HardwareProfile:
    """What the device does alone, in the dtype that the plans compute in."""
    grid = default_grid(device.type)
    if size is TOY:
        grid = dataclasses.replace(grid, matmul_batches=(1,), matmul_sizes=(16, 64, 128), attention=grid.attention[:1])
    compute = measure_compute(device, dtypes=[size.dtype], budget_s=budget_s, grid=grid, progress=announce)
    return make_profile(
        name=f"gpu-script-{device.type}",
        device=device,
        compute=compute,
        collectives=(),
        gpus_per_node=1,
        notes=[f"by scripts/gpu/gpu.py in about {budget_s:.0f} s, {size.dtype} alone"],
    )


def with_fake_collectives(profile: HardwareProfile, size: Size, device: torch.device) -> HardwareProfile:
    """The profile on a node of GPUs whose collectives take what those of a fake group take here."""
    with fake_group(max(GROUP_SIZES)):
        tables = measure_collectives(
            GROUP_SIZES,
            size.message_bytes,
            device=device,
            ranks_per_node=GPUS_PER_NODE,
            budget_s=size.collectives_budget_s,
            progress=announce,
        )
    return dataclasses.replace(
        profile,
        name=f"{profile.name}, fake collectives",
        gpus_per_node=GPUS_PER_NODE,
        collectives=tuple(dataclasses.replace(table, sources=(FAKE_GROUP.id,)) for table in tables),
        sources=(*profile.sources, FAKE_GROUP),
    )


def announce(section: str, done: int, total: int) -> None:
    """One line on stderr as a section ends."""
    if done == total:
        print(f"gpu: measured {section}", file=sys.stderr)


# --- one rank's share ----------------------------------------------------------------------------------------------


def run(plan: Plan, size: Size, device: torch.device) -> Measured:
    """Applies the plan as rank 0 and times its steps, in a group of its own."""
    bytes_before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with fake_group(plan.mesh.num_gpus), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the plan is unproven")  # toys are
        with device:
            model = size.build_model()
        model = tpplan.apply_plan(model, plan)
        fill_weights(model)
        inputs = batch(size, plan, device)
        step = step_of(model, plan, inputs)
        for _ in range(size.warm_up_steps):
            step()
        peak_bytes = (
            cuda_peak(step, device)
            if device.type == "cuda"
            else tracked_peak(step, (*held_by(model), *inputs.values()))
        )
        steps_s = [elapsed(step, device) for _ in range(size.timed_steps)]
        kernels = kernels_of(step) if device.type == "cuda" else {}
    return Measured(steps_s=tuple(steps_s), kernels=kernels, peak_bytes=peak_bytes - bytes_before)


def fill_weights(model: nn.Module) -> None:
    """A fake group scatters nothing: what the shards hold until then is whatever was in memory."""
    generator = {}
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter).detach()
        own = generator.setdefault(local.device, torch.Generator(local.device).manual_seed(0))
        local.normal_(std=WEIGHT_DEVIATION, generator=own)


def batch(size: Size, plan: Plan, device: torch.device) -> dict[str, Tensor]:
    """Tokens and targets [B, T] over the whole vocabulary."""
    shape = (plan.batch.micro_batch, size.seq_len)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(size.config.vocab_size, shape, generator=generator).to(device)
        for name in ("tokens", "targets")
    }


def step_of(model: nn.Module, plan: Plan, inputs: dict[str, Tensor]) -> Callable[[], None]:
    """Forward and backward of a step's micro-batches, and the gradients dropped."""
    count = plan.batch.accumulation_steps

    def step() -> None:
        for i in range(count):
            with nullcontext() if i == count - 1 else tpplan.no_sync(model):
                (llama.loss(model(inputs["tokens"]), inputs) / count).backward()
        model.zero_grad(set_to_none=True)

    return step


def elapsed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of a step, on the device's own clock where it has one."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start_event.record()
    step()
    end_event.record()
    torch.cuda.synchronize(device)
    return start_event.elapsed_time(end_event) * 1e-3


def cuda_peak(step: Callable[[], None], device: torch.device) -> int:
    """Most bytes allocated at once during a step."""
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def tracked_peak(step: Callable[[], None], held: Iterable[Tensor]) -> int:
    """The same where the allocator does not say: bytes of what is held throughout and of all that operators make."""
    tracker = Tracker()
    for tensor in held:
        tracker.add(tensor)
    with tracker:
        step()
    return tracker.made.peak_bytes


def held_by(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


class Tracker(TorchDispatchMode):
    """Adds up the storages that operators make, each until it is freed. torch's MemTracker takes one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Storages()

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor's storage; of a DTensor, the rank's part."""
        self.made.add(getattr(tensor, "_local_tensor", tensor))

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.add, result)
        return result


def kernels_of(step: Callable[[], None]) -> dict[str, tuple[int, float]]:
    """Launches and seconds in all of each kernel of a step, the longest first. Their sum is less than the step where
    the CPU cannot issue them in time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    ran = [event for event in profiler.key_averages() if event.self_device_time_total]
    ran.sort(key=lambda event: -event.self_device_time_total)
    return {event.key: (event.count, event.self_device_time_total * 1e-6) for event in ran}


# --- the plans -----------------------------------------------------------------------------------------------------


def plans(size: Size, names: Sequence[str] = ()) -> dict[str, Plan]:
    """The plans of these names, or all, in the order of their degrees; at toy size with the toy's shapes."""
    files = {path.stem: path for path in sorted(PLANS.glob("*.json"), key=lambda path: path.stem)}
    if unknown := sorted(set(names) - set(files)):
        raise UsageError(f"no plan {unknown[0]!r}: {PLANS} has {', '.join(files)}")
    loaded = {name: Plan.load(files[name]) for name in names or files}
    ordered = dict(sorted(loaded.items(), key=lambda item: (item[1].mesh.tp, item[0])))
    return ordered if size is FULL else {name: resized(plan, size) for name, plan in ordered.items()}


def resized(plan: Plan, size: Size) -> Plan:
    """The layouts of a plan on the same model in another size. Nothing proves it there."""
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in size.build_model().named_parameters()}

    def crossing(planned: CrossingPlan) -> CrossingPlan:
        return dataclasses.replace(planned, dtype=size.dtype if planned.dtype == FULL.dtype else planned.dtype)

    return dataclasses.replace(
        plan,
        precision=size.precision,
        batch=dataclasses.replace(plan.batch, seq_len=size.seq_len),
        parameters={
            key: dataclasses.replace(parameter, shape=shapes[next(plan.expand(key))[0]], dtype=size.dtype)
            for key, parameter in plan.parameters.items()
        },
        boundaries={
            module: BoundaryPlan(
                inputs={path: crossing(planned) for path, planned in boundary.inputs.items()},
                outputs={path: crossing(planned) for path, planned in boundary.outputs.items()},
            )
            for module, boundary in plan.boundaries.items()
        },
        fingerprints=Fingerprints(
            parameters=parameters_fingerprint({name: (shape, True) for name, shape in shapes.items()}),
            graph="not traced",
            inputs={},
        ),
        proof=ProofReport(status=ProofStatus.UNPROVEN, rounds=0, cuts=(), assumptions=()),
    )


# --- the command ---------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where profile, plans and results go")
    parser.add_argument("--profile", help="a profile's name or file instead of measuring one")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="for measuring the profile's compute (default: 240)"
    )
    parser.add_argument("--plans", nargs="+", default=(), metavar="NAME", help="some of the plans (default: all)")
    parser.add_argument("--toy", action="store_true", help="small, on the CPU")
    return parser.parse_args()


def main() -> int:
    """Measure, price, run, compare, write."""
    arguments = parse()
    size, device = (TOY, torch.device("cpu")) if arguments.toy else (FULL, torch.device("cuda", 0))
    budget_s = arguments.budget or size.compute_budget_s
    try:
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError("no GPU in sight: --toy runs the same at toy size on the CPU")
        chosen = plans(size, arguments.plans)
        compare(arguments.out, arguments.profile, chosen, size, device, budget_s)
    except TpplanError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def compare(
    out: Path, profile_name: str | None, chosen: Mapping[str, Plan], size: Size, device: torch.device, budget_s: float
) -> None:
    """All of it, with the files written as soon as they are known."""
    start = time.perf_counter()
    (out / "plans").mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    profile = load_profile(profile_name) if profile_name else measure_profile(size, device, budget_s)
    write_json(out / "profile.json", profile.to_dict())
    machine = with_fake_collectives(profile, size, device)
    make_workspaces(size, device)
    rows = []
    for name, plan in chosen.items():
        priced = tpplan.price(plan, size.build_model, llama.example_inputs, profile=machine, loss=llama.loss)
        priced.dump(out / "plans" / f"{name}.json")
        rows.append(Row(name=name, plan=priced, measured=run(priced, size, device)))
        release(device)
        print(f"gpu: ran {name}", file=sys.stderr)
    summary, judges = Summary.of(rows), size is FULL
    found = {
        "device": profile.device if device.type == "cpu" else torch.cuda.get_device_name(device),
        "versions": versions(),
        "size": "full" if size is FULL else "toy",
        "profile": {"name": profile.name, "fingerprint": profile.fingerprint},
        "wall_s": time.perf_counter() - start,
        "plans": [row.to_dict() for row in rows],
        "summary": summary.to_dict(judges=judges),
    }
    write_json(out / "results.json", found)
    Console(width=max(TABLE_WIDTH, Console().width)).print(table(rows))
    print(summary.lines(judges=judges))


def versions() -> dict[str, str | None]:
    """Of what ran."""
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}


def make_workspaces(size: Size, device: torch.device) -> None:
    """What matmul libraries allocate once for forward's thread and for backward's is no model's."""
    matrix = torch.ones(64, 64, dtype=getattr(torch, size.dtype), device=device, requires_grad=True)
    (matrix @ matrix).sum().backward()


def release(device: torch.device) -> None:
    """Gives back what a model held, before the next one is built."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def write_json(path: Path, content: object) -> None:
    """One key a line; the file appears whole or not at all."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
