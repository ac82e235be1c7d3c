"""A model under a plan, with made-up weights and data, of which steps are timed on every rank."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpplan.apply.apply import apply_plan, no_sync
from tpplan.apply.autocast import autocast_of
from tpplan.plan.plan import Compile, Plan
from tpplan.search.models.model_spec import ModelSpec
from tpplan.search.models.subject import in_precision
from tpplan.torch_internals import pytree
from tpplan.trace.forward_arguments import Inputs, called_on
from tpplan.train.deferred_init import Recording, record
from tpplan.train.load_weights import fill
from tpplan.train.materialize import Box, targets_of
from tpplan.train.torch_optimizer import torch_optimizer
from tpplan.verify.rank_task import Subject

#: standard deviation of made-up weights
SPREAD = 0.02


@final
class MadeUpWeights:
    """A source of random parameters of which a rank makes its own part alone, in no time; what is no parameter has the
    constructor's values."""

    def __init__(self, recording: Recording) -> None:
        self.origin = "made-up weights"
        self.recording = recording
        self.tensors = {name: target.tensor for target in targets_of(recording.model) for name in target.names}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all tensors by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def parts(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, Tensor]]:
        """Yields the part of each tensor: the same one on all ranks that hold it, for every name of a tied weight."""
        for name, box in boxes.items():
            tensor = self.tensors[name]
            if not (isinstance(tensor, nn.Parameter) and tensor.is_floating_point()):
                yield name, self.recording.value(tensor)[box]
                continue
            text = f"{min(own for own, other in self.tensors.items() if other is tensor)} {box}"
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
            size = [part.stop - part.start for part in box]
            made = torch.empty(size).normal_(0.0, SPREAD, generator=torch.Generator().manual_seed(seed))
            yield name, made.to(tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """A model under a plan on this rank's device, its optimizer and this rank's micro-batches of one global batch."""

    subject: Subject
    plan: Plan
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    micro_batches: tuple[Inputs, ...]

    @classmethod
    def of(cls, plan: Plan, spec: ModelSpec, device: torch.device) -> "Trainee":
        """Applies a plan to the model without memory, and fills it. Every rank must call this. Raises what apply_plan
        and the model's own code raise."""
        subject = Subject(spec=spec, dropped=frozenset())
        is_compiled = plan.compile is Compile.BLOCKS
        if plan.untouched is not None:  # its code may hold weights that it does not name, and must be built with memory
            model = apply_plan(subject.build(), plan, compile=is_compiled)
        else:
            recording = record(spec.build_model, seed=0)
            with torch.device("meta"):
                model = apply_plan(subject.build(), plan, compile=is_compiled)
            fill(model, MadeUpWeights(recording), recording=recording)
        optimizer = torch_optimizer(plan.optimizer, model.parameters())
        rank = dist.get_rank() if dist.is_initialized() else 0
        steps, first = plan.batch.accumulation_steps, plan.mesh.data_rank(rank) * plan.batch.accumulation_steps
        batches = tuple(_micro_batch(plan, spec, first + i, device) for i in range(steps))
        return cls(subject=subject, plan=plan, device=device, model=model, optimizer=optimizer, micro_batches=batches)

    def step(self) -> None:
        """One step: forwards and backwards of all micro-batches, then the optimizer."""
        count = len(self.micro_batches)
        for i, inputs in enumerate(self.micro_batches):
            with contextlib.nullcontext() if i + 1 == count else no_sync(self.model):
                with autocast_of(self.plan, self.device.type):
                    outputs = called_on(self.model, inputs)
                    loss = self.subject.loss(outputs, inputs) / count
                del outputs
                loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


def _micro_batch(plan: Plan, spec: ModelSpec, number: int, device: torch.device) -> Inputs:
    """Micro-batch `number` of the global batch, the same on all ranks that read it."""
    torch.manual_seed(number)
    made = in_precision(spec.example_inputs(plan.batch.micro_batch, plan.batch.seq_len), plan.precision)
    found: Inputs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), made)
    return found


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call on this rank, from a start that all ranks share to the end of its kernels."""
    synchronize(device)
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Waits for the kernels of all streams of a GPU, FSDP's among them; returns at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
