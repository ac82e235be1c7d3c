"""Trains a model file on one process, or on the ranks of a plan.

    python scripts/train.py scripts/examples/llama.py --steps 20
    torchrun --nproc-per-node 4 scripts/train.py scripts/examples/llama.py --plan plan.json --steps 20

The global batch of a step is a function of the step alone, and data-parallel ranks read consecutive slices of it: both
commands see the same samples and print the same losses up to rounding. A model file defines

    build_model()                           the model; `model.py:other_builder` names another builder
    example_inputs(batch, seq_len, seed=0)  a dict of tensors, batch first; forward takes those it names
    loss(outputs, inputs)                   the scalar to minimize, given that dict

Where the inputs are `tokens` and `targets`, the bytes of Python's own documentation and library replace the examples.
"""

import argparse
import importlib.util
import inspect
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan

Inputs = dict[str, Tensor]

#: English and code, under the standard library's directory
TEXT_FILES = ("pydoc_data/topics.py", "argparse.py", "inspect.py", "subprocess.py", "typing.py")
#: the part of the text that is trained on; the rest is left for evaluation
TRAIN_FRACTION = 0.9
DEFAULT_BATCH = 16
DEFAULT_SEQ_LEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """What a model file defines."""

    build_model: Callable[[], nn.Module]
    example_inputs: Callable[..., Inputs]
    loss: Callable[[Tensor, Inputs], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """What this rank reads of each global batch: slice `data_rank` of `data_parallel`, in micro-batches.

    Raises ValueError where data_parallel * accumulation_steps * micro_batch is not the global batch.
    """

    global_batch: int
    seq_len: int
    micro_batch: int
    accumulation_steps: int = 1
    data_parallel: int = 1
    data_rank: int = 0

    def __post_init__(self) -> None:
        if self.data_parallel * self.accumulation_steps * self.micro_batch != self.global_batch:
            raise ValueError(
                f"global batch {self.global_batch} is not {self.data_parallel} data-parallel ranks x "
                f"{self.accumulation_steps} accumulation steps x micro-batch {self.micro_batch}"
            )

    def micro_batches(self, inputs: Inputs) -> list[Inputs]:
        """This rank's micro-batches of a global batch, in order."""
        first = self.data_rank * self.accumulation_steps
        starts = [(first + step) * self.micro_batch for step in range(self.accumulation_steps)]
        return [{name: value[start : start + self.micro_batch] for name, value in inputs.items()} for start in starts]


@dataclass(slots=True, kw_only=True)
class History:
    """What a run has seen so far; the gradient norms are those of the first step, before clipping."""

    losses: list[float]
    step_s: list[float]
    first_gradient_norm: float
    first_gradient_norms: dict[str, float]


def load_model_file(spec: str) -> ModelFile:
    """The model file at `path.py` or `path.py:builder`. Raises SystemExit where a name is missing."""
    path, _, builder = spec.partition(".py")
    path, builder = path + ".py", builder.removeprefix(":") or "build_model"
    module_spec = importlib.util.spec_from_file_location("model_file", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules["model_file"] = module  # dataclasses and pickle look their module up
    module_spec.loader.exec_module(module)
    missing = [name for name in (builder, "example_inputs", "loss") if not hasattr(module, name)]
    if missing:
        raise SystemExit(f"{path} does not define {', '.join(missing)}")
    return ModelFile(build_model=getattr(module, builder), example_inputs=module.example_inputs, loss=module.loss)


def forward_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """Those of the inputs that the model's forward names; the others are for the loss."""
    parameters = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in parameters}


def train_text() -> Tensor:
    """The training part of the text, as bytes [N] in 0..255."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join((library / name).read_bytes() for name in TEXT_FILES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: int(len(text) * TRAIN_FRACTION)]


def text_batch(text: Tensor, batch: int, seq_len: int, seed: int) -> Inputs:
    """Tokens [B, T] at random places of the text, and as targets [B, T] the byte after each."""
    starts = torch.randint(len(text) - seq_len, (batch, 1), generator=torch.Generator().manual_seed(seed))
    windows = text[starts + torch.arange(seq_len + 1)].long()
    return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def global_batches(model_file: ModelFile, share: BatchShare) -> Iterator[Inputs]:
    """The global batch of step 0, 1, ...: text for a model of tokens and targets, else its example inputs."""
    batch_of = model_file.example_inputs
    if batch_of(share.global_batch, share.seq_len).keys() == {"tokens", "targets"}:
        batch_of = partial(text_batch, train_text())
    for step in count():
        yield batch_of(share.global_batch, share.seq_len, seed=step)


def accumulate_gradients(model: nn.Module, model_file: ModelFile, micro_batches: Sequence[Inputs]) -> Tensor:
    """Backward of the mean loss over the micro-batches; gradients are exchanged in the last alone. Returns the mean."""
    losses = []
    for index, inputs in enumerate(micro_batches):
        is_last = index + 1 == len(micro_batches)
        with nullcontext() if is_last else tpplan.no_sync(model):
            loss = model_file.loss(model(**forward_inputs(model, inputs)), inputs)
            (loss / len(micro_batches)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def mean_over_ranks(value: Tensor) -> float:
    """The mean over data-parallel ranks; tensor-parallel peers hold the same value, so all ranks may take part."""
    if not dist.is_initialized():
        return value.item()
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """The 2-norm of each parameter's whole gradient, by name. A collective where parameters are sharded."""
    norms = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        norm = torch.linalg.vector_norm(parameter.grad)
        norms[name] = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    return norms


def train(
    model: nn.Module,
    model_file: ModelFile,
    share: BatchShare,
    *,
    steps: int,
    lr: float,
    clip: float | None,
    device: torch.device,
    report: Callable[[str], None] = print,
) -> History:
    """AdamW for some steps; a line each through `report`. The history is the same on every rank, its times apart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    history = History(losses=[], step_s=[], first_gradient_norm=0.0, first_gradient_norms={})
    for step, batch in zip(range(steps), global_batches(model_file, share), strict=False):
        micro_batches = [
            {name: value.to(device) for name, value in inputs.items()} for inputs in share.micro_batches(batch)
        ]
        started = time.perf_counter()
        loss = mean_over_ranks(accumulate_gradients(model, model_file, micro_batches))
        if step == 0:
            history.first_gradient_norms = gradient_norms(model)
            history.first_gradient_norm = math.hypot(*history.first_gradient_norms.values())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        history.step_s.append(time.perf_counter() - started)
        history.losses.append(loss)
        report(f"step {step} loss {loss:.4f}")
    return history


def choose_device(name: str) -> torch.device:
    """The device of this rank: `auto` is a GPU of its own where every rank of the node has one, else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if name == "auto":
        name = "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
    if name != "cuda":
        return torch.device(name)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """torchrun's ranks as the default process group, while inside: NCCL between GPUs, gloo between CPUs."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def plan_share(plan: tpplan.Plan, rank: int) -> BatchShare:
    """What a rank reads under a plan."""
    return BatchShare(
        global_batch=plan.batch.global_batch,
        seq_len=plan.batch.seq_len,
        micro_batch=plan.batch.micro_batch,
        accumulation_steps=plan.batch.accumulation_steps,
        data_parallel=plan.mesh.data_parallel,
        data_rank=plan.mesh.data_rank(rank),
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked. Exits with 2 where it contradicts itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model.py or model.py:builder")
    parser.add_argument("--plan", type=Path, help="plan.json; needs torchrun")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help=f"global batch; a plan sets it, else {DEFAULT_BATCH}")
    parser.add_argument("--seq-len", type=int, help=f"tokens of a sample; a plan sets it, else {DEFAULT_SEQ_LEN}")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate (default: %(default)s)")
    parser.add_argument("--clip", type=float, help="clip the gradient's 2-norm to this")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses, step times, first gradient norms")
    options = parser.parse_args(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", "0"))
    if options.plan and not world_size:
        parser.error("--plan needs one process per GPU: torchrun --nproc-per-node N scripts/train.py ...")
    if not options.plan and world_size > 1:
        parser.error(f"{world_size} ranks but no --plan: without one this trains on one process")
    return options


def share_of(options: argparse.Namespace, plan: tpplan.Plan | None) -> BatchShare:
    """What this rank reads. Raises SystemExit where the options contradict the plan."""
    if plan is None:
        batch = options.batch or DEFAULT_BATCH
        return BatchShare(global_batch=batch, seq_len=options.seq_len or DEFAULT_SEQ_LEN, micro_batch=batch)
    share = plan_share(plan, dist.get_rank())
    for name, asked, planned in (
        ("--batch", options.batch, share.global_batch),
        ("--seq-len", options.seq_len, share.seq_len),
    ):
        if asked not in (None, planned):
            raise SystemExit(f"{name} {asked}, but {options.plan} was made for {planned}")
    return share


def run(options: argparse.Namespace, device: torch.device) -> History:
    """Builds, applies the plan if there is one, trains, reports from rank 0."""
    model_file = load_model_file(options.model)
    plan = tpplan.Plan.load(options.plan) if options.plan else None
    share = share_of(options, plan)
    is_reporter = not dist.is_initialized() or dist.get_rank() == 0
    torch.manual_seed(options.seed)
    model = model_file.build_model().to(device)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    history = train(
        model,
        model_file,
        share,
        steps=options.steps,
        lr=options.lr,
        clip=options.clip,
        device=device,
        report=partial(print, flush=True) if is_reporter else lambda _: None,
    )
    if options.json and is_reporter:
        options.json.write_text(json.dumps(asdict(history), indent=2, sort_keys=True) + "\n")
    return history


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parse(arguments)
    device = choose_device(options.device)
    with process_group(device) if options.plan else nullcontext():
        run(options, device)


if __name__ == "__main__":
    main()
