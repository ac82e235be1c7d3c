"""The steps that tpplan.verify.verify_stages runs: on each real rank of a plan of stages; and alone, on fake tensors,
as a rank of one part of the pipeline.

That rank runs its stages in the schedule's order (tpplan.stages.schedule), and keeps what torch's schedules keep. It
sends nothing; what it would receive is made where it would arrive.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpplan.apply.apply import apply_plan, lay_out_stages
from tpplan.apply.expert_parallel import experts_mesh
from tpplan.apply.fsdp_over_tp import mesh_for
from tpplan.apply.model_match import plan_name
from tpplan.apply.modules.applied_mesh import mesh_of
from tpplan.apply.modules.deferred_gradients import Deferral, deferring
from tpplan.apply.modules.dropout_rng import WithoutDropout
from tpplan.apply.modules.input_shapes import OnMismatch
from tpplan.apply.modules.stale_references import Originals
from tpplan.apply.pipeline import Runner, pipeline_of
from tpplan.costs.runs.kernels import dtype_name
from tpplan.plan.optimizers import optimizer_named
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.plan.plan import Plan, Precision
from tpplan.plan.sections.ranks import RECEIVED, TensorPlan
from tpplan.plan.step_anatomy import StageWork
from tpplan.search.models.cut_errors import loss_of_sent
from tpplan.search.models.subject import in_precision
from tpplan.search.models.user_model import load_model_file
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.stages.schedule import Action
from tpplan.stages.stage_model import as_stage, without_values
from tpplan.stages.stub import is_stand_in, without_memory
from tpplan.torch_internals import pytree
from tpplan.torch_internals.fakes import FakeTensorMode
from tpplan.torch_internals.groups import fake_group
from tpplan.torch_internals.modules import own_buffers, own_parameters
from tpplan.torch_internals.parallel import StagesTracker
from tpplan.torch_internals.tensors import local_part
from tpplan.trace.forward_arguments import Inputs
from tpplan.trace.record_fx import given_on_meta
from tpplan.trace.trace import quiet, repeated_children
from tpplan.train.torch_optimizer import torch_optimizer
from tpplan.verify.collective_log import Issued, StagesLog
from tpplan.verify.fake_step import gpu_kernels, guessing_where_asked, local_shape_of, tensors_of
from tpplan.verify.fake_step import mesh_of as mesh_for_plan
from tpplan.verify.fake_values import Answers, answered, answers_of
from tpplan.verify.rank_task import Findings, Reference, Subject, Task, built, gradient_errors, is_same, on_device
from tpplan.verify.shrink import in_float32


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFindings:
    """A real rank's results: those of its stages together, the names of the parameters that it holds, the loss of a run
    without a backward; and of a step in the plan's own precision the collectives of each stage, and what was sent
    between stages."""

    values: Findings
    held: tuple[str, ...]
    evaluated: float
    issued: tuple[tuple[Issued, ...], ...]
    between: tuple[Issued, ...]


def check_stages_on_rank(task: Task) -> StageFindings:
    """Runs on each real rank, in a process group of the plan's size: applies the plan and compares with one process."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with quiet():
        plan = PipelinePlan.from_dict(json.loads(task.plan))
        subject = Subject(spec=load_model_file(task.source), dropped=task.dropped)
        reference = Reference.load(task.reference)
        model = applied_stages(subject, stages_in_float32(plan), task.device_type)
        return examine_stages(model, subject, plan, task.device_type, reference)


def stages_in_float32(plan: PipelinePlan) -> PipelinePlan:
    """The plan of stages in float32, as what they send each other."""
    return replace(plan, stages=tuple(map(in_float32, plan.stages)))


def applied_stages(subject: Subject, plan: PipelinePlan, device_type: str) -> nn.Module:
    """The model as this rank's stages; before that, it holds garbage in all parameters but those that other ranks take
    over from it."""
    model = built(subject)
    given = set(_given(plan, dist.get_rank()))
    kept = {id(own) for name, own in model.named_parameters(remove_duplicate=False) if name in given}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in kept:
                parameter.fill_(float("nan") if parameter.is_floating_point() else -1)
    is_elsewhere = (plan.stages[0].proof.device or "").partition(" ")[0] != device_type
    return apply_plan(model.to(device_type), plan, check="warn" if is_elsewhere else True)


def _given(plan: PipelinePlan, rank: int) -> Iterator[str]:
    """Yields names of the parameters whose values come from a rank: from the first rank of a part those of its stages
    that no earlier stage has."""
    if rank % plan.ranks_per_stage:
        return
    for own in plan.stages_of(rank):
        assert own.stage is not None
        copies = {one.name for one in own.stage.ties if one.stages[0] != own.stage.index}
        for name, parameter in own.parameter_plans().items():
            if copies.isdisjoint((name, *parameter.aliases)):
                yield from (name, *parameter.aliases)


def examine_stages(
    model: nn.Module, subject: Subject, plan: PipelinePlan, device_type: str, reference: Reference
) -> StageFindings:
    """Runs a model to which the plan of stages was applied in float32, and then once more in the plan's own
    precision."""
    mesh, steps = plan.stages[0].mesh, plan.batch.accumulation_steps
    data_rank = mesh.data_rank(dist.get_rank() % plan.ranks_per_stage)
    every = subject.micro_batches(plan.stages[0])[data_rank * steps : (data_rank + 1) * steps]
    own = [on_device(inputs, device_type) for inputs in every]
    named = {plan_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    named = {name: parameter for name, parameter in named.items() if name in reference.parameters}
    differing = tuple(name for name, value in named.items() if not is_same(value, reference.parameters[name]))
    loss = _step(model, subject, own)
    gradients = gradient_errors(named, reference.gradients)
    with WithoutDropout():
        evaluated = float(pipeline_of(model).evaluate(own, subject.loss))
    precision = plan.stages[0].precision
    if precision is not Precision.FP32:
        own = [in_precision(inputs, precision) for inputs in own]
        model = applied_stages(subject, plan, device_type)
    # A first step before the log is on: ranks compare inputs and seeds once, which is no part of a step.
    own_loss = _step(model, subject, own)
    for parameter in model.parameters():
        parameter.grad = None
    log = _logged_step(model, subject, own)
    everything = tuple(one for stage in log.logs for one in stage.issued)
    return StageFindings(
        values=Findings(
            shard_rank=dist.get_rank() // mesh.tp % mesh.shard,
            parameters=differing,
            loss=loss,
            gradients=gradients,
            issued=everything,
            own_loss=own_loss,
        ),
        held=tuple(named),
        evaluated=evaluated,
        issued=tuple(tuple(stage.issued) for stage in log.logs),
        between=tuple(log.between),
    )


def _step(model: nn.Module, subject: Subject, micro_batches: Sequence[Inputs]) -> float:
    """Runs forward and backward of a step's micro-batches. Returns the mean loss."""
    with WithoutDropout():
        return float(pipeline_of(model).step(micro_batches, subject.loss))


def _logged_step(model: nn.Module, subject: Subject, micro_batches: Sequence[Inputs]) -> StagesLog:
    """Runs a step, and logs what it issues."""
    pipeline = pipeline_of(model)
    mesh = mesh_of(model)
    assert mesh is not None
    log = StagesLog([runner.model for runner in pipeline.runners], mesh, pipeline.group)
    with _hearing(pipeline.runners, log), log.naming(), log:
        _step(model, subject, micro_batches)
    return log


@contextlib.contextmanager
def _hearing(runners: Sequence[Runner], log: StagesLog) -> Iterator[None]:
    """A context in which a log hears of each pass of a rank's stages."""
    before = [runner.hears for runner in runners]
    for index, runner in enumerate(runners):
        runner.hears = functools.partial(log.begin, index)
    try:
        yield
    finally:
        for runner, hears in zip(runners, before, strict=True):
            runner.hears = hears


# ---- a rank of one part on fake tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class FakePart:
    """The results of a rank of one part on fake tensors: of each of its stages the collectives of a step, local shapes
    of parameters and the tensors that it sends; and the rank's tracked peak in bytes, None where the optimizer cannot
    be tracked."""

    issued: tuple[tuple[Issued, ...], ...]
    shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    sends: tuple[tuple[TensorPlan, ...], ...]
    peak_bytes: int | None


def check_parts_on_fake_rank(task: Task, parts: Sequence[int]) -> list[FakePart]:
    """Runs a step of each of some parts on fake tensors, in fake process groups of a stage's ranks that replace the
    process's own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with quiet():
        plan = PipelinePlan.from_dict(json.loads(task.plan))
        subject = Subject(spec=load_model_file(task.source), dropped=task.dropped)
        return [fake_part(subject, plan, part) for part in parts]


def fake_part(subject: Subject, plan: PipelinePlan, part: int) -> FakePart:
    """A step of the first rank of a part, with all micro-batches, then the optimizer. Collectives are those of a first
    step, memory that of a second one (tpplan.verify.fake_step.fake_step)."""
    return guessing_where_asked(subject.build, functools.partial(_fake_part, subject, plan, part))


def _fake_part(
    subject: Subject, plan: PipelinePlan, part: int, guessing: contextlib.AbstractContextManager[None]
) -> FakePart:
    plans, batch = plan.stages[part :: plan.parts], plan.batch
    inputs = subject.spec.example_inputs(batch.micro_batch, batch.seq_len)
    answers = [_answers(subject, own, inputs) for own in plans]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_group(plan.ranks_per_stage), gpu_kernels():
        modules, mesh = _laid_out(subject, plans)
        log = StagesLog(modules, mesh)
        with mode:
            _fill(modules)
            faked = pytree.tree_map_only(Tensor, mode.from_tensor, in_precision(inputs, plans[0].precision))
            rank = _FakeRank(plan=plan, part=part, modules=modules, inputs=faked, answers=answers)
            can_be_tracked = optimizer_named(plans[0].optimizer).is_tracked
            weights = list(dict.fromkeys(weight for module in modules for weight in module.parameters()))
            optimizer = torch_optimizer(plans[0].optimizer if can_be_tracked else "sgd", weights)
            with guessing:
                with _hearing(rank.runners, log), log.naming():
                    rank.step(subject, optimizer, log)
                return FakePart(
                    issued=tuple(tuple(own.issued) for own in log.logs),
                    shapes=tuple(map(_shapes, modules)),
                    sends=tuple(rank.sent.get(runner.stage.index, ()) for runner in rank.runners),
                    peak_bytes=_peak(rank, subject, optimizer) if can_be_tracked else None,
                )


def _answers(subject: Subject, plan: Plan, inputs: Inputs) -> Answers | None:
    """The answers that the code of a stage gets on meta tensors (tpplan.verify.fake_values)."""
    assert plan.stage is not None
    with torch.device("meta"):
        model = subject.build()
    model = as_stage(model, plan.stage, plan.precision, repeated_children(model), given_on_meta)
    received = {RECEIVED: without_values(plan.stage.receives)} if plan.stage.receives else {}
    return answers_of(model, {**dict(inputs), **received}, subject.loss if plan.stage.last is None else loss_of_sent)


def _laid_out(subject: Subject, plans: Sequence[Plan]) -> tuple[list[nn.Module], DeviceMesh]:
    """The stages of a rank on the meta device, laid out on a mesh of the default process group."""
    with torch.device("meta"):
        model = subject.build()
    mesh = mesh_for_plan(plans[0], "cpu")
    modules = lay_out_stages(
        model,
        plans,
        mesh,
        Originals(model),
        experts_mesh(plans, "cpu"),
        compile=False,
        check=OnMismatch.RAISE,
        over_tp=next(filter(None, (mesh_for(plan, mesh) for plan in plans)), None),
    )
    return modules, mesh


def _fill(modules: Sequence[nn.Module]) -> None:
    """Gives modules on the meta device memory. Tensors that they share stay shared, those without memory stay so."""
    inside = [module for root in modules for module in root.modules()]
    parameters = [(own_parameters(module), name) for module in inside for name in own_parameters(module)]
    buffers = [(own_buffers(module), name) for module in inside for name in own_buffers(module)]
    weights, others = ([table[name] for table, name in places] for places in (parameters, buffers))
    for root in modules:
        root.to_empty(device="cpu")
    tied: dict[int, nn.Parameter] = {}
    for (own, name), weight in zip(parameters, weights, strict=True):
        if weight is not None and (filled := own[name]) is not None:
            own[name] = tied.setdefault(id(weight), filled)
    shared: dict[int, Tensor] = {}
    for (table, name), buffer in zip(buffers, others, strict=True):
        if buffer is not None and (found := table[name]) is not None:
            new = without_memory(found, found.shape, found.dtype) if is_stand_in(buffer) else found
            table[name] = shared.setdefault(id(buffer), new)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {plan_name(name): local_shape_of(weight) for name, weight in module.named_parameters()}


def _peak(rank: "_FakeRank", subject: Subject, optimizer: torch.optim.Optimizer) -> int:
    """The peak of a step's memory in bytes."""
    tracker = StagesTracker()
    tracker.track_external(*rank.modules, optimizer, *tensors_of(rank.inputs))
    with tracker:
        rank.step(subject, optimizer)
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return int(snapshot["Total"])


@final
class _FakeRank:
    """A rank of one part: its stages, which run a micro-batch's inputs again and again."""

    def __init__(
        self,
        *,
        plan: PipelinePlan,
        part: int,
        modules: Sequence[nn.Module],
        inputs: Inputs,
        answers: Sequence[Answers | None],
    ) -> None:
        self.parts, self.tp = plan.parts, plan.stages[0].mesh.tp
        steps = plan.batch.accumulation_steps
        stages = [own.stage for own in plan.stages[part :: plan.parts] if own.stage is not None]
        self.modules, self.inputs, self.answers = modules, inputs, answers
        self.deferral = Deferral() if plan.schedule is Schedule.ZERO_BUBBLE else None
        self.runners = [Runner(own, stage, steps, self.deferral) for own, stage in zip(modules, stages, strict=True)]
        self.micro_batches = [inputs] * steps
        self.order = list(zip(*PipelineShape.of(plan).received(steps)[part], strict=True))
        #: the tensors that each stage gives another, by its index
        self.sent: dict[int, tuple[TensorPlan, ...]] = {}

    def step(self, subject: Subject, optimizer: torch.optim.Optimizer, log: StagesLog | None = None) -> None:
        """Runs the rank's actions in order, and then the optimizer; twice in the first step of all, which is logged, as
        it makes its states."""
        for runner in self.runners:
            runner.begin(self.micro_batches, subject.loss)
        with log or contextlib.nullcontext(), deferring(self.deferral):
            self._run()
        self._add_up()
        for _ in range(1 if log is None else 2):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _run(self) -> None:
        arrived: dict[Action, tuple[Tensor, ...]] = {}
        kept: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        sent_back: list[Tensor | None] = []  # until the next backward, as torch's schedule keeps it
        deferred: dict[tuple[int, int], Callable[[], None]] = {}
        for action, early in self.order:
            if action.work is StageWork.WEIGHTS:
                deferred.pop((action.stage, action.micro_batch))()
                continue
            for one in (*early, action):
                if one not in arrived:
                    arrived[one] = self._arriving(one)
            place = action.stage // self.parts
            given, key = arrived.pop(action), (action.stage, action.micro_batch)
            with answered(self.answers[place]):
                if action.work is StageWork.FORWARD:
                    kept[key] = given, self._forward(self.runners[place], given, action.micro_batch)
                    continue
                received, outputs = kept.pop(key)
                sent_back.clear()
                self.runners[place].begin_backward()
                torch.autograd.backward(outputs, given or None)
                deferred[key] = self.runners[place].weight_gradients()
                sent_back += [tensor.grad for tensor in received]
                del received, outputs, given

    def _forward(self, runner: Runner, given: tuple[Tensor, ...], index: int) -> tuple[Tensor, ...]:
        found = runner(*given, index=index)
        outputs = (found,) if isinstance(found, Tensor) else tuple(found)
        if runner.stage.last is not None:
            self.sent[runner.stage.index] = tuple(
                TensorPlan(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype)) for tensor in outputs
            )
        return outputs

    def _arriving(self, action: Action) -> tuple[Tensor, ...]:
        """The tensors that a rank receives for an action."""
        stage, is_forward = self.runners[action.stage // self.parts].stage, action.work is StageWork.FORWARD
        planned = stage.receives if is_forward else stage.sends
        return tuple(
            torch.empty(one.on_a_rank(self.tp).shape, dtype=getattr(torch, one.dtype), requires_grad=is_forward)
            for one in planned
        )

    @torch.no_grad()
    def _add_up(self) -> None:
        """Holds for a moment what the exchange of gradients that several stages have holds (TiedWeight.add_up)."""
        for runner in self.runners:
            for one in runner.stage.ties:
                gradient = runner.model.get_parameter(one.name).grad
                if gradient is not None:
                    local = local_part(gradient) if isinstance(gradient, DTensor) else gradient
                    held = [torch.empty_like(local) for _ in one.stages]
                    del held
