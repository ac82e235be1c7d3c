"""The steps that tpplan.verify.verify runs: in one process, on each real rank, and as one rank of a fake group.

Parameters are moved off their initial values, so that no 0 or 1 hides an error. Dropout is off, as on slices it would
drop other elements than in one process.
"""

import contextlib
import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpplan.apply.apply import apply_plan, no_sync
from tpplan.apply.autocast import autocast_of
from tpplan.apply.model_match import plan_name
from tpplan.apply.modules.dropout_rng import WithoutDropout
from tpplan.core.errors import ModelError, UsageError
from tpplan.core.mesh import Axis
from tpplan.plan.plan import Pass, Plan, Precision
from tpplan.search.models.model_spec import ModelSpec
from tpplan.search.models.subject import in_precision
from tpplan.search.models.user_model import load_model_file
from tpplan.torch_internals import pytree
from tpplan.torch_internals.modules import own_children
from tpplan.trace.forward_arguments import Inputs, called_on
from tpplan.trace.trace import quiet, why_untouched
from tpplan.verify.collective_log import CollectiveLog, Issued
from tpplan.verify.fake_step import fake_step, mesh_of
from tpplan.verify.shrink import in_float32

#: share of the model's largest gradient below which differences count as rounding
GRADIENT_NOISE = 1e-3
#: standard deviation of the noise that is added to parameters
PERTURBATION = 0.02


# ---- the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model to verify, with its loss and inputs, without the layers in `dropped`."""

    spec: ModelSpec
    dropped: frozenset[str]

    def build(self) -> nn.Module:
        """The model on the current device, in training mode. Raises UsageError where layers cannot be left out."""
        model = self.spec.build_model()
        drop_layers(model, self.dropped)
        return model.train()

    def loss(self, outputs: Any, inputs: Any) -> Tensor:
        """The spec's loss, or the first scalar with a gradient that the model returns. Raises ModelError where there is
        neither."""
        if self.spec.loss is not None:
            return self.spec.loss(outputs, inputs)
        is_training = torch.is_grad_enabled()
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        scalars = (leaf for leaf in leaves if leaf.dim() == 0 and leaf.is_floating_point())
        found = next((leaf for leaf in scalars if leaf.requires_grad or not is_training), None)
        if found is None:
            raise ModelError(
                f"{self.spec.source}: there is no loss to train with: define loss(outputs, inputs), or let the model "
                "return a scalar"
            )
        return found

    def micro_batches(self, plan: Plan) -> list[Inputs]:
        """The micro-batches of the global batch, in the order of data ranks. Raises ModelError where inputs do not
        divide."""
        batch = plan.batch
        whole = self.spec.example_inputs(batch.global_batch, batch.seq_len)
        one = self.spec.example_inputs(batch.micro_batch, batch.seq_len)
        return split(whole, one, batch.global_batch // batch.micro_batch)


def drop_layers(model: nn.Module, dropped: frozenset[str]) -> None:
    """Removes layers from the ends of their containers, in place. Raises UsageError where they are not at the end."""
    containers: dict[str, set[str]] = {}
    for name in dropped:
        prefix, _, index = name.rpartition(".")
        containers.setdefault(prefix, set()).add(index)
    for prefix, indices in containers.items():
        members = own_children(model.get_submodule(prefix))
        last = list(members)[len(members) - len(indices) :]
        if set(last) != indices:
            raise UsageError(
                f"--layers: {prefix} holds {last[-1]} after its repeated layers, so all must stay: verify without it"
            )
        for index in last:
            del members[index]


def split(whole: Inputs, one: Inputs, count: int) -> list[Inputs]:
    """`count` parts of the inputs; a tensor is cut along the dim in which it is `count` times as large as in `one`."""
    leaves, spec = pytree.tree_flatten(whole)
    parts = [_parts(leaf, example, count) for leaf, example in zip(leaves, pytree.tree_leaves(one), strict=True)]
    return [pytree.tree_unflatten(list(own), spec) for own in zip(*parts, strict=True)]


def _parts(leaf: Any, example: Any, count: int) -> Sequence[Any]:
    if not isinstance(leaf, Tensor) or count == 1:
        return [leaf] * count
    dims = [dim for dim, (size, other) in enumerate(zip(leaf.shape, example.shape, strict=True)) if size != other]
    if not dims:
        return [leaf] * count
    if len(dims) > 1 or leaf.shape[dims[0]] != count * example.shape[dims[0]]:
        raise ModelError(
            f"example_inputs gives a tensor of shape {list(example.shape)} for one micro-batch and {list(leaf.shape)} "
            f"for {count}: expected one dim, {count} times as large"
        )
    return leaf.chunk(count, dims[0])


def perturb(model: nn.Module) -> None:
    """Adds normal noise to every floating parameter, in place, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_(noise.to(parameter.device, parameter.dtype), alpha=PERTURBATION)


# ---- one process


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A step in one process: the mean loss, parameters before the step, and gradients."""

    loss: float
    parameters: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    def save(self, path: Path) -> None:
        """Writes the file that ranks load."""
        torch.save({"loss": self.loss, "parameters": self.parameters, "gradients": self.gradients}, path)

    @classmethod
    def load(cls, path: str) -> "Reference":
        """Reads what save wrote; tensors stay in the file until they are used."""
        return cls(**torch.load(path, weights_only=True, mmap=True))


def reference_step(subject: Subject, plan: Plan) -> Reference:
    """Runs all micro-batches in one process, in float32: the mean loss and its gradients."""
    model = built(subject)
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    micro_batches = subject.micro_batches(plan)
    # A hook on an accumulated gradient sees the mean over data-parallel ranks of each backward.
    num_backwards = plan.batch.accumulation_steps if why_untouched(model) else 0
    loss = (
        _joint_backwards(model, subject, micro_batches, num_backwards)
        if num_backwards
        else train_step(model, subject, micro_batches)
    )
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return Reference(loss=loss, parameters=parameters, gradients=gradients)


def built(subject: Subject) -> nn.Module:
    """The model with parameters that are equal in every process."""
    torch.manual_seed(0)
    model = subject.build()
    perturb(model)
    return model


def _joint_backwards(model: nn.Module, subject: Subject, micro_batches: Sequence[Inputs], num_backwards: int) -> float:
    """Runs the micro-batches with num_backwards backwards, each over those that data-parallel ranks run at one time.
    Returns the mean loss."""
    total = 0.0
    with WithoutDropout():
        for index in range(num_backwards):
            losses = [_loss(model, subject, inputs) for inputs in micro_batches[index::num_backwards]]
            mean = torch.stack(losses).sum() / len(micro_batches)
            mean.backward()  # type: ignore[no-untyped-call]
            total += float(mean.detach())
    return total


def _loss(model: nn.Module, subject: Subject, inputs: Inputs) -> Tensor:
    return subject.loss(called_on(model, inputs), inputs)


def train_step(
    model: nn.Module,
    subject: Subject,
    micro_batches: Sequence[Inputs],
    log: CollectiveLog | None = None,
    casting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> float:
    """Runs forward, under casting(), and backward of each micro-batch, gradients reduced in the last one only. Returns
    the mean loss."""
    total = 0.0
    for index, inputs in enumerate(micro_batches):
        is_last = index + 1 == len(micro_batches)
        with _watched(model, log, is_last=is_last):
            with casting():
                loss = _loss(model, subject, inputs)
            if log is not None:
                log.begin(Pass.BACKWARD)
            (loss / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total / len(micro_batches)


@contextlib.contextmanager
def _watched(model: nn.Module, log: CollectiveLog | None, *, is_last: bool) -> Iterator[None]:
    """The context of one micro-batch: without dropout, gradients reduced only if it is the last, collectives logged."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(WithoutDropout())
        if not is_last:
            stack.enter_context(no_sync(model))
        if log is not None:
            log.begin(Pass.FORWARD)
            stack.enter_context(log.naming())
            stack.enter_context(log)
        yield


# ---- a real rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The work of a rank: the plan as JSON, the source of the model, and the path of the Reference's file."""

    plan: str
    source: str
    dropped: frozenset[str]
    reference: str = ""
    device_type: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """A real rank's results: names of parameters that differ after the plan is applied, the mean loss of its
    micro-batches, relative errors of gradients by parameter; and in the plan's own precision the collectives and loss
    of a step."""

    shard_rank: int
    parameters: tuple[str, ...]
    loss: float
    gradients: Mapping[str, float]
    issued: tuple[Issued, ...]
    own_loss: float


def check_on_rank(task: Task) -> Findings:
    """Runs on each real rank, in a process group of the plan's size: applies the plan and compares with one process."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with quiet():
        plan = Plan.from_dict(json.loads(task.plan))
        subject = Subject(spec=load_model_file(task.source), dropped=task.dropped)
        mesh = mesh_of(plan, task.device_type)
        reference = Reference.load(task.reference)
        model = applied(subject, in_float32(plan), mesh)
        return examine_model(model, subject, plan, mesh, reference)


def applied(subject: Subject, plan: Plan, mesh: DeviceMesh) -> nn.Module:
    """The model with the plan applied; before that, all ranks but 0 hold garbage in their parameters."""
    model = built(subject)
    if dist.get_rank() != 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan") if parameter.is_floating_point() else -1)
    # On another device type than planned for, the code may take other branches: the results are compared, all the same.
    is_elsewhere = (plan.proof.device or "").partition(" ")[0] != mesh.device_type
    return apply_plan(model.to(mesh.device_type), plan, mesh=mesh, check="warn" if is_elsewhere else True)


def examine_model(model: nn.Module, subject: Subject, plan: Plan, mesh: DeviceMesh, reference: Reference) -> Findings:
    """Runs a model to which the plan was applied in float32, and then once more in the plan's own precision."""
    data_rank, steps = plan.mesh.data_rank(dist.get_rank()), plan.batch.accumulation_steps
    every = subject.micro_batches(plan)[data_rank * steps : (data_rank + 1) * steps]
    own = [on_device(inputs, mesh.device_type) for inputs in every]
    named = {plan_name(name): parameter for name, parameter in model.named_parameters()}
    parameters = tuple(name for name, value in named.items() if not is_same(value, reference.parameters[name]))
    loss = train_step(model, subject, own)
    gradients = gradient_errors(named, reference.gradients)
    if plan.precision is not Precision.FP32:
        own = [in_precision(inputs, plan.precision) for inputs in own]
        model = applied(subject, plan, mesh)
    # A first step before the log is on: ranks compare inputs and seeds once, which is no part of a step.
    casting = functools.partial(autocast_of, plan, mesh.device_type)
    own_loss = train_step(model, subject, own, casting=casting)
    for parameter in model.parameters():
        parameter.grad = None
    log = CollectiveLog(model, mesh)
    train_step(model, subject, own, log, casting)
    return Findings(
        shard_rank=mesh.get_local_rank(Axis.SHARD),
        parameters=parameters,
        loss=loss,
        gradients=gradients,
        issued=tuple(log.issued),
        own_loss=own_loss,
    )


def on_device(inputs: Inputs, device_type: str) -> Inputs:
    """The inputs with their tensors on a device."""
    found: Inputs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device_type), inputs)
    return found


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def is_same(parameter: Tensor, expected: Tensor) -> bool:
    """True where a parameter, whole, is as expected, bit by bit."""
    return torch.equal(_whole(parameter), expected)


def gradient_errors(parameters: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """max |g - e| / max(max |e|, noise) by parameter: g its gradient, e the expected one, noise GRADIENT_NOISE of the
    model's largest. Infinite where only one of the two exists, or the difference is not finite."""
    noise = GRADIENT_NOISE * max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    errors: dict[str, float] = {}
    for name, parameter in parameters.items():
        if parameter.grad is None or name not in expected:
            if (parameter.grad is None) != (name not in expected):
                errors[name] = math.inf
            continue
        error = float((_whole(parameter.grad) - expected[name]).abs().max())
        errors[name] = error / max(float(expected[name].abs().max()), noise) if math.isfinite(error) else math.inf
    return errors


# ---- one rank of a fake group


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeFindings:
    """The results of one rank of a fake group: collectives, local shapes of parameters, and the tracked peak in
    bytes."""

    issued: tuple[Issued, ...]
    shapes: Mapping[str, tuple[int, ...]]
    peak_bytes: int | None


def check_on_fake_rank(task: Task) -> FakeFindings:
    """Runs a step of the plan on fake tensors, in a fake process group that replaces the process's own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with quiet():
        plan = Plan.from_dict(json.loads(task.plan))
        subject = Subject(spec=load_model_file(task.source), dropped=task.dropped)
        inputs = subject.spec.example_inputs(plan.batch.micro_batch, plan.batch.seq_len)
        step = fake_step(subject.build, inputs, subject.loss, plan)
    return FakeFindings(
        issued=step.issued,
        shapes=step.shapes,
        peak_bytes=step.tracked.peak_bytes if step.tracked is not None else None,
    )
