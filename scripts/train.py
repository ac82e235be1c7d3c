"""Trains a model file on one process, or on the ranks of a plan.

    python scripts/train.py scripts/examples/llama.py --record alone.pt
    torchrun --nproc-per-node 4 scripts/train.py scripts/examples/llama.py --plan plan.json --against alone.pt

The global batch of a step is a function of the step alone, and data-parallel ranks read consecutive slices of it: both
commands see the same samples, and their losses and gradients are the same up to rounding. The second prints both, and
fails where a loss differs by more than 1e-4 or a gradient of the first step by more than 1e-5.

    torchrun --nproc-per-node 4 scripts/train.py MODEL --plan four.json --steps 10 --checkpoints ckpt --save-every 5
    torchrun --nproc-per-node 2 scripts/train.py MODEL --plan two.json --steps 20 --checkpoints ckpt --resume

The second goes on at step 10 under another plan, with the losses that one run of 20 steps has. A model file defines

    build_model()                           the model; `model.py:other_builder` names another builder
    example_inputs(batch, seq_len, seed=0)  a dict of tensors, batch first; forward takes those it names
    loss(outputs, inputs)                   the scalar to minimize, given that dict

Where the inputs are `tokens` and `targets`, the bytes of Python's own documentation and library replace the examples.
`hf:path/config.json` names a Hugging Face model, as for `tpplan solve`: it minimizes its own loss on those bytes, or on
random tokens where it has fewer than 256.
"""

import argparse
import importlib.util
import json
import logging
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.core.units import format_seconds
from tpplan.plan.batch_share import BatchShare
from tpplan.plan.pipeline_plan import load_plan
from tpplan.plan.plan import Precision
from tpplan.search.models.model_spec import HF_PREFIX, HF_TRUSTED_PREFIX
from tpplan.search.models.user_model import load_model_file as load_model

Inputs = dict[str, Tensor]

#: English and code, under the standard library's directory
TEXT_FILES = ("pydoc_data/topics.py", "argparse.py", "inspect.py", "subprocess.py", "typing.py")
#: the part of the text that is trained on; the rest is left for evaluation
TRAIN_FRACTION = 0.9
NUM_BYTES = 256
DEFAULT_BATCH = 16
DEFAULT_SEQ_LEN = 64

#: what two runs may differ by: float32 sums in another order
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-5
#: of the model's largest gradient: smaller ones are rounding noise, and what they differ by is relative to this
GRADIENT_NOISE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """What a model file defines, and the autocast under which its forward and loss run."""

    build_model: Callable[[], nn.Module]
    example_inputs: Callable[..., Inputs]
    loss: Callable[[Tensor, Inputs], Tensor]
    casting: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """A folder of them, after how many steps there is another, besides after the last, and whether the latest is
    loaded before the first step."""

    folder: Path
    every: int
    resume: bool


@dataclass(slots=True, kw_only=True)
class History:
    """What a run has seen so far. `first_gradients`: those of step 0, whole and before clipping, by name.

    `first_step` is above 0 where it went on from a checkpoint.
    """

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    first_step: int = 0


#: called with a step and its loss
Report = Callable[[int, float], None]


def load_model_file(spec: str) -> ModelFile:
    """The model at `path.py`, `path.py:builder` or `hf:path/config.json`. Raises SystemExit where a name is missing."""
    if spec.startswith((HF_PREFIX, HF_TRUSTED_PREFIX)):
        return load_hugging_face(spec)
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


def load_hugging_face(source: str) -> ModelFile:
    """The model of a Hugging Face configuration, with text for its inputs where its tokens are at least the bytes."""
    spec = load_model(source)
    with torch.device("meta"):
        num_tokens = spec.build_model().get_input_embeddings().num_embeddings
    text = train_text() if num_tokens >= NUM_BYTES else None

    def example_inputs(batch: int, seq_len: int, seed: int = 0) -> Inputs:
        if text is not None:
            tokens = text_batch(text, batch, seq_len, seed)["tokens"]
        else:
            tokens = torch.randint(num_tokens, (batch, seq_len), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return ModelFile(
        build_model=spec.build_model, example_inputs=example_inputs, loss=lambda outputs, _inputs: outputs.loss
    )


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


def global_batches(model_file: ModelFile, share: BatchShare, first_step: int = 0) -> Iterator[Inputs]:
    """The global batches from a step on: text for a model of tokens and targets, else its example inputs."""
    batch_of = model_file.example_inputs
    if batch_of(share.global_batch, share.seq_len).keys() == {"tokens", "targets"}:
        batch_of = partial(text_batch, train_text())
    for step in count(first_step):
        yield batch_of(share.global_batch, share.seq_len, seed=step)


def accumulate_gradients(model: nn.Module, model_file: ModelFile, micro_batches: Sequence[Inputs]) -> Tensor:
    """Backward of the mean loss over the micro-batches; gradients are exchanged in the last alone. Returns the mean.
    A model in stages runs them by its schedule."""
    step = getattr(model, "step", None)
    if step is not None:
        return step(micro_batches, model_file.loss)
    losses = []
    for index, inputs in enumerate(micro_batches):
        is_last = index + 1 == len(micro_batches)
        with nullcontext() if is_last else tpplan.no_sync(model):
            with model_file.casting():
                loss = model_file.loss(model(**tpplan.forward_inputs(model, inputs)), inputs)
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


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter's whole gradient on the CPU, by name, of all stages. A collective of all ranks."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
    own = {name: grad.to("cpu", copy=True) for name, grad in whole.items()}
    if not hasattr(model, "step"):
        return own
    every: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {name: grad for found in every for name, grad in found.items()}


def train(
    model: nn.Module,
    model_file: ModelFile,
    share: BatchShare,
    *,
    steps: int,
    lr: float,
    device: torch.device,
    report: Report,
    clip: float | None = None,
    keep_gradients: bool = False,
    checkpoints: Checkpoints | None = None,
) -> History:
    """AdamW up to some step. The history is the same on every rank, its times apart; gradients are kept if told."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    history = History()
    if checkpoints is not None and checkpoints.resume:
        history.first_step = resume(checkpoints, model, optimizer, share, steps)
    numbers = range(history.first_step, steps)
    for step, batch in zip(numbers, global_batches(model_file, share, history.first_step), strict=False):
        micro_batches = [
            {name: value.to(device) for name, value in inputs.items()} for inputs in share.micro_batches(batch)
        ]
        started = time.perf_counter()
        loss = mean_over_ranks(accumulate_gradients(model, model_file, micro_batches))
        if step == 0 and keep_gradients:
            history.first_gradients = whole_gradients(model)
        if clip is not None:
            tpplan.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        history.step_s.append(time.perf_counter() - started)
        history.losses.append(loss)
        report(step, loss)
        if checkpoints is not None and ((step + 1) % checkpoints.every == 0 or step + 1 == steps):
            save(checkpoints, model, optimizer, share, step + 1)
    return history


#: complete ones that stay in the folder
NUM_CHECKPOINTS = 2


def save(
    checkpoints: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer, share: BatchShare, step: int
) -> None:
    """A checkpoint after so many steps. Which data comes next follows from the step and the global batch."""
    extras = {"global_batch": share.global_batch, "seq_len": share.seq_len}
    tpplan.save_checkpoint(checkpoints.folder, model, optimizer, step=step, extras=extras, keep=NUM_CHECKPOINTS)


def resume(
    checkpoints: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer, share: BatchShare, steps: int
) -> int:
    """Fills model and optimizer from the latest checkpoint; returns the step to go on at. SystemExit for other data."""
    loaded = tpplan.load_checkpoint(checkpoints.folder, model, optimizer)
    data = {"global_batch": share.global_batch, "seq_len": share.seq_len}
    if loaded.extras != data:
        raise SystemExit(
            f"{loaded.path} was trained on {loaded.extras}, this run reads {data}: give both the same batch"
        )
    if loaded.step >= steps:
        raise SystemExit(f"{loaded.path} is at step {loaded.step}: nothing is left to do up to --steps {steps}")
    return loaded.step


def relative_errors(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """By name the largest difference of an entry, relative to the largest entry expected."""
    noise = GRADIENT_NOISE * max(gradient.abs().max().item() for gradient in expected.values())
    return {
        name: (gradients[name] - gradient).abs().max().item() / max(gradient.abs().max().item(), noise)
        for name, gradient in expected.items()
    }


def compare(history: History, reference: History) -> None:
    """Prints by how much two runs differ. Raises SystemExit where it is more than rounding, or not a number."""
    first = history.first_step
    pairs = zip(history.losses, reference.losses[first:], strict=True)
    loss_errors = {f"step {step}": abs(loss - expected) for step, (loss, expected) in enumerate(pairs, first)}
    compared = [("losses", loss_errors, LOSS_TOLERANCE)]
    if first == 0:
        if differing := sorted(history.first_gradients.keys() ^ reference.first_gradients.keys()):
            raise SystemExit(f"the runs differ: only one of them has gradients of {', '.join(differing)}")
        gradient_errors = relative_errors(history.first_gradients, reference.first_gradients)
        compared.append(("gradients of step 0, relative", gradient_errors, GRADIENT_TOLERANCE))
    for what, errors, tolerance in compared:
        beyond = [place for place, error in errors.items() if not error <= tolerance]  # nan is beyond as well
        if beyond:
            raise SystemExit(
                f"the runs differ: {what}: {errors[beyond[0]]:.1e} at {beyond[0]}, allowed {tolerance:.0e}"
            )
        worst = max(errors, key=lambda place: errors[place])
        print(f"{what}: largest difference {errors[worst]:.1e} ({worst}), allowed {tolerance:.0e}")


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked. Exits with 2 where it contradicts itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model.py, model.py:builder or hf:path/config.json")
    parser.add_argument("--plan", type=Path, help="plan.json; needs torchrun")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help=f"global batch; a plan sets it, else {DEFAULT_BATCH}")
    parser.add_argument("--seq-len", type=int, help=f"tokens of a sample; a plan sets it, else {DEFAULT_SEQ_LEN}")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate (default: %(default)s)")
    parser.add_argument("--clip", type=float, help="clip the gradient's 2-norm to this")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses and step times")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write losses and the first step's gradients")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with a recorded run (a plan in fp32)")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save there after the last step")
    parser.add_argument("--save-every", type=int, metavar="N", help="and after every N steps")
    parser.add_argument("--resume", action="store_true", help="go on from the latest of --checkpoints, up to --steps")
    options = parser.parse_args(arguments)
    if not options.checkpoints and (options.resume or options.save_every):
        parser.error("--resume and --save-every need --checkpoints FOLDER")
    if options.save_every is not None and options.save_every < 1:
        parser.error(f"--save-every {options.save_every}: expected at least 1")
    if options.resume and options.record:
        parser.error("--record writes a whole run, and --resume makes the rest of one")
    world_size = int(os.environ.get("WORLD_SIZE", "0"))
    if options.plan and not world_size:
        parser.error("--plan needs one process per GPU: torchrun --nproc-per-node N scripts/train.py ...")
    if not options.plan and world_size > 1:
        parser.error(f"{world_size} ranks but no --plan: without one this trains on one process")
    return options


def share_of(options: argparse.Namespace, plan: tpplan.Plan | tpplan.PipelinePlan | None) -> BatchShare:
    """What this rank reads. Raises SystemExit where the options contradict the plan."""
    if plan is None:
        batch = options.batch or DEFAULT_BATCH
        return BatchShare(global_batch=batch, seq_len=options.seq_len or DEFAULT_SEQ_LEN, micro_batch=batch)
    share = plan.batch_for(dist.get_rank())
    for name, asked, planned in (
        ("--batch", options.batch, share.global_batch),
        ("--seq-len", options.seq_len, share.seq_len),
    ):
        if asked not in (None, planned):
            raise SystemExit(f"{name} {asked}, but {options.plan} was made for {planned}")
    return share


def reporter(reference: History | None) -> Report:
    """Prints a line for each step, beside that of the reference if there is one."""
    if reference is None:
        return lambda step, loss: print(f"step {step:3}  loss {loss:.5f}", flush=True)
    expected = reference.losses

    def report(step: int, loss: float) -> None:
        difference = abs(loss - expected[step])
        print(f"step {step:3}  loss {loss:.5f}  recorded {expected[step]:.5f}  difference {difference:.1e}", flush=True)

    return report


def prediction(plan: tpplan.Plan | tpplan.PipelinePlan | None) -> str:
    """What the plan says of a step's time, to stand behind what was measured."""
    if plan is None:
        return ""
    step_time = format_seconds(plan.predicted.step_time_s)
    if isinstance(plan, tpplan.PipelinePlan):
        predicted = f"; the plan predicted {step_time} on {plan.stages[0].cluster.profile}"
    else:
        error = format_seconds(plan.predicted.step_time_error_s)
        predicted = f"; the plan predicted {step_time} +/- {error} on {plan.cluster.profile}"
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), os.cpu_count() or 1
    if dist.get_backend() == "gloo" and ranks > cores:
        predicted += f" (where {ranks} ranks share {cores} cores, one waits for another to be scheduled: not predicted)"
    return predicted


def write(history: History, options: argparse.Namespace) -> None:
    """The files that were asked for."""
    if options.json:
        text = json.dumps({"losses": history.losses, "step_s": history.step_s}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    if options.record:
        torch.save({"losses": history.losses, "first_gradients": history.first_gradients}, options.record)


def load_reference(path: Path, steps: int) -> History:
    """A run that --record wrote. Raises SystemExit where it has another number of steps."""
    reference = History(**torch.load(path, weights_only=True))
    if len(reference.losses) != steps:
        raise SystemExit(f"{path} has {len(reference.losses)} steps, this run {steps}: give both the same --steps")
    return reference


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Builds, applies the plan if there is one, trains; rank 0 reports, writes and compares."""
    model_file = load_model_file(options.model)
    plan = load_plan(options.plan) if options.plan else None
    if isinstance(plan, tpplan.PipelinePlan) and plan.stages[0].precision is Precision.BF16_AUTOCAST:
        raise SystemExit(f"{options.plan}: a schedule of stages runs backwards too, which autocast must not reach")
    whole = None if isinstance(plan, tpplan.PipelinePlan) else plan
    model_file = replace(model_file, casting=partial(tpplan.autocast_of, whole, device.type))
    share = share_of(options, plan)
    reference = load_reference(options.against, options.steps) if options.against else None
    is_reporter = not dist.is_initialized() or dist.get_rank() == 0
    torch.manual_seed(options.seed)
    model = model_file.build_model().to(device)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    checkpoints = None
    if options.checkpoints:
        every = options.save_every or options.steps
        checkpoints = Checkpoints(folder=options.checkpoints, every=every, resume=options.resume)
    history = train(
        model,
        model_file,
        share,
        steps=options.steps,
        lr=options.lr,
        clip=options.clip,
        device=device,
        report=reporter(reference) if is_reporter else lambda _step, _loss: None,
        keep_gradients=bool(options.record or reference),
        checkpoints=checkpoints,
    )
    if is_reporter:
        print(f"median step {format_seconds(statistics.median(history.step_s))}" + prediction(plan))
        write(history, options)
        if reference is not None:
            compare(history, reference)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parse(arguments)
    # It warns of every gradient that is gathered over two axes, which happens once, to compare.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    device = choose_device(options.device)
    with process_group(device) if options.plan else nullcontext(), tpplan.guard():
        run(options, device)


if __name__ == "__main__":
    main()
