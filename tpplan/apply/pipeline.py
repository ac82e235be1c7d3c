"""Training and evaluating a model in stages: micro-batches go through the stages by a schedule of torch's.

model = tpplan.apply_plan(build_model(), "plan.json")       # this rank's stages, with their parameters alone
share = plan.batch_for(rank)
loss = model.step(share.micro_batches(batch), loss_function)        # forward and backward of all micro-batches
optimizer.step(); optimizer.zero_grad()
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tpplan.apply.collectives.tied_weights import TiedWeight, tied_weights
from tpplan.apply.data_parallel import accumulate_whole_gradients, last_of_a_step, reduce_gradients
from tpplan.apply.modules.backward_prefetch import noting_order
from tpplan.apply.modules.deferred_gradients import Deferral, deferring
from tpplan.apply.modules.first_step_check import checksum
from tpplan.apply.rank_agreement import all_ranks
from tpplan.core.errors import PlanMismatchError, UsageError
from tpplan.core.mesh import AXES
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.plan.plan import Pass
from tpplan.plan.sections.ranks import RECEIVED, StagePlan, TensorPlan
from tpplan.plan.step_anatomy import StageWork
from tpplan.stages.schedule import Action, orders
from tpplan.stages.stage_model import without_values
from tpplan.torch_internals import pytree
from tpplan.trace.forward_arguments import Inputs, forward_inputs, path_of
from tpplan.trace.hooks.checkpoint_context import leave_reentry

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B

    from tpplan.torch_internals.parallel import FrugalStage, LoopedSchedule, LoopedStage

AnyStage = TypeVar("AnyStage", bound="FrugalStage")

#: the name of the mesh axis of stages
STAGES = "stage"
#: key of a parameter's __dict__ for the group of ranks that hold the other stages' parameters
OF_STAGES = "_tpplan_stages"
#: key of a model's __dict__ for its Pipeline
_PIPELINE = "_tpplan_pipeline"
#: what the last stage gives: the schedule joins what micro-batches give along dim 0
_LOSS = TensorPlan(shape=(1,), dtype="float32")
#: a loss of a micro-batch: of the model's outputs and all inputs
Loss = Callable[[Any, Any], Tensor]


def mesh_of_stages(plan: PipelinePlan, device_type: str) -> DeviceMesh:
    """The mesh of all stages: the axis of stages outermost, then those of a stage's mesh."""
    sizes = (plan.parts, *(plan.stages[0].mesh.size(axis) for axis in AXES))
    return init_device_mesh(device_type, sizes, mesh_dim_names=(STAGES, *map(str, AXES)))


def run_in_stages(model: nn.Module, parts: Sequence[nn.Module], plan: PipelinePlan, mesh: DeviceMesh) -> None:
    """Gives a model its methods `step` and `evaluate`. `parts` are this rank's applied stages, `mesh` is that of all
    stages. A reentrant checkpoint around a stage's last layer would cut what it sends off its gradient: checkpoints are
    non-reentrant from now on."""
    for part in parts:
        leave_reentry(part)
    pipeline = Pipeline(parts, plan, mesh)
    model.__dict__["step"], model.__dict__["evaluate"] = pipeline.step, pipeline.evaluate
    model.__dict__[_PIPELINE] = pipeline
    for parameter in model.parameters():
        parameter.__dict__[OF_STAGES] = pipeline.group


def pipeline_of(model: nn.Module) -> "Pipeline":
    """How a model trains to which a plan of stages was applied."""
    found: Pipeline = model.__dict__[_PIPELINE]
    return found


def group_of_stages(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold the other parts of a model in stages, at this rank's place in them; None for a whole
    model."""
    found = (own.__dict__[OF_STAGES] for own in model.parameters() if OF_STAGES in own.__dict__)
    group: dist.ProcessGroup | None = next(found, None)
    return group


def check_stages(model: nn.Module, plan: PipelinePlan) -> None:
    """Raises PlanMismatchError unless each parameter of the model is in some stage, with the planned shape."""
    every = [(name, own) for stage in plan.stages for name, own in stage.parameter_plans().items()]
    planned = {label: own for name, own in every for label in (name, *own.aliases)}
    named = dict(model.named_parameters(remove_duplicate=False))
    if missing := sorted(planned.keys() ^ named.keys()):
        where = "model" if missing[0] in planned else "plan"
        raise PlanMismatchError(f"parameter {missing[0]} is not in the {where}: solve again for this model")
    for name, parameter in named.items():
        if tuple(parameter.shape) != planned[name].shape:
            raise PlanMismatchError(
                f"parameter {name} has shape {list(parameter.shape)}, the plan {list(planned[name].shape)}: solve again"
            )


def _share(tied: Sequence[TiedWeight]) -> None:
    """Gives parameters that several stages have the values of the first of them. Raises PlanMismatchError on all ranks
    where one has values of a parameter that is on the meta device on another."""
    seen: dict[str, tuple[int, bool]] = {}
    for rank, own in enumerate(all_ranks([(weight.name, weight.has_values) for weight in tied])):
        for name, has_values in own:
            first, has_first = seen.setdefault(name, (rank, has_values))
            if has_first != has_values:
                with_values, without = (first, rank) if has_first else (rank, first)
                raise PlanMismatchError(
                    f"parameter {name}, which several stages have, has values on rank {with_values}, and is on the "
                    f"meta device on rank {without}: build the model in the same way on every rank"
                )
    for weight in tied:
        weight.share()


@final
class Pipeline:
    """This rank's stages with the schedule that all ranks run."""

    def __init__(self, parts: Sequence[nn.Module], plan: PipelinePlan, mesh: DeviceMesh) -> None:
        self.plan = plan
        self.group = mesh.get_group(STAGES)
        self.device = torch.device(mesh.device_type)
        if mesh.device_type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.steps = plan.batch.accumulation_steps
        stages = [own.stage for own in plan.stages_of(dist.get_rank()) if own.stage is not None]
        #: where weights' gradients are deferred
        self.deferral = Deferral() if plan.schedule is Schedule.ZERO_BUBBLE else None
        self.runners = [
            Runner(part, stage, self.steps, self.deferral) for part, stage in zip(parts, stages, strict=True)
        ]
        self.shapes = plan.stages[0].fingerprints.inputs
        self.is_compared = False
        self.tied = tied_weights(parts, stages, plan.parts, self.group)
        _share(self.tied)
        self.schedule: Schedule1F1B | LoopedSchedule | None = None
        self.looped: list[LoopedStage] = []

    @property
    def is_last(self) -> bool:
        """True on the ranks that compute the loss."""
        return self.runners[-1].stage.last is None

    def step(self, micro_batches: Iterable[Inputs], loss: Loss) -> Tensor:
        """Forward and backward of a step's micro-batches. Gradients are those of the mean of their losses, which is
        returned on every rank, for the micro-batches of its replica.

        micro_batches: this rank's, as many as planned, the same on all stages (PipelinePlan.batch_for). loss(outputs,
        inputs) runs on the last stage. Raises UsageError, before anything runs, for a loss that cannot be called, for
        another number of micro-batches or other shapes than planned, and in the first step on all stages where theirs
        differ.
        """
        given = self._checked(micro_batches)
        _check_loss(loss)
        for runner in self.runners:
            runner.begin(given, loss)
        schedule = self._schedule()
        index = torch.arange(self.steps)
        losses: list[Tensor] = []
        earlier = [weight.set_aside() for weight in self.tied]
        # What the last stage gives is its losses: outputs would be kept with their graphs.
        with deferring(self.deferral):
            if self.is_last:
                schedule.step(index=index, target=index, losses=losses, return_outputs=False)
            else:
                schedule.step(index=index, return_outputs=False)
        for stage in self.looped:
            stage.finish()
        for weight, before in zip(self.tied, earlier, strict=True):
            weight.add_up(before)
        for runner in self.runners:
            runner.micro_batches = []
        return self._everywhere(losses)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[Inputs], loss: Loss) -> Tensor:
        """The mean loss of micro-batches of the planned shapes, without a backward; on every rank. Any number of them,
        the same on all stages."""
        given = self._checked(micro_batches)
        _check_loss(loss)
        total = torch.zeros((), device=self.device)
        for micro_batch in given:
            for runner in self.runners:
                outputs = self._through(runner, micro_batch)
                if runner.stage.last is None:
                    total += loss(outputs, micro_batch)
        for module in (module for runner in self.runners for module in runner.model.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward does
        return self._everywhere([total / max(1, len(given))])

    def _through(self, runner: "Runner", micro_batch: Inputs) -> Any:
        """Receives what a stage reads, runs it, sends what it gives to the next stage, and returns it."""
        rank, stage = dist.get_rank(self.group), runner.stage
        received = tuple(self._buffer(one.on_a_rank(self.plan.stages[0].mesh.tp)) for one in stage.receives)
        for tensor in received:
            dist.recv(tensor, group=self.group, group_src=(rank - 1) % self.plan.parts)
        outputs = runner.run(micro_batch, received)
        if stage.last is not None:
            for tensor in outputs:
                dist.send(tensor.contiguous(), group=self.group, group_dst=(rank + 1) % self.plan.parts)
        return outputs

    def _checked(self, micro_batches: Iterable[Inputs]) -> list[Inputs]:
        """The micro-batches. Raises UsageError for other shapes than planned, and at the first call where those of the
        other stages are not the same."""
        given = list(micro_batches)
        for micro_batch in given:
            found = {path_of(path): leaf for path, leaf in pytree.tree_flatten_with_path(micro_batch)[0]}
            for path, planned in self.shapes.items():
                leaf = found.get(path)
                if isinstance(leaf, Tensor) and str(list(leaf.shape)) != planned[planned.index("[") :]:
                    raise UsageError(
                        f"a micro-batch has {path} of shape {list(leaf.shape)}, and the stages are planned for "
                        f"{planned}: give those of plan.batch_for(rank), or solve for this batch and length"
                    )
        if not self.is_compared:
            self.is_compared = True
            own = [checksum(leaf) for one in given for leaf in pytree.tree_leaves(one) if isinstance(leaf, Tensor)]
            everyone: list[Any] = [None] * self.group.size()
            dist.all_gather_object(everyone, own, group=self.group)
            if other := next((index for index, one in enumerate(everyone) if one != everyone[0]), 0):
                raise UsageError(
                    f"stages 0 and {other} were given other micro-batches, and all must read the same rows: give those "
                    "of plan.batch_for(rank) on each, in one order"
                )
        return given

    def _buffer(self, one: TensorPlan) -> Tensor:
        return torch.empty(one.shape, dtype=getattr(torch, one.dtype), device=self.device)

    def _schedule(self) -> "Schedule1F1B | LoopedSchedule":
        if self.schedule is None:
            # Loads torch's compiler, which takes half a second: only a model in stages is worth it.
            from torch.distributed.pipelining import (
                Schedule1F1B,
                ScheduleInterleaved1F1B,
                ScheduleInterleavedZeroBubble,
            )

            from tpplan.torch_internals.parallel import FrugalStage, LoopedStage, orders_of

            def total(found: Tensor, _index: Tensor) -> Tensor:
                return found.sum()

            # The loss is divided by the number of micro-batches where it is computed.
            if self.plan.schedule is Schedule.ONE_F_ONE_B:
                own = self._stage(FrugalStage, self.runners[0])
                self.schedule = Schedule1F1B(own, self.steps, loss_fn=total, scale_grads=False)
                return self.schedule
            self.looped = [self._stage(LoopedStage, runner) for runner in self.runners]
            kind = ScheduleInterleavedZeroBubble if self.deferral is not None else ScheduleInterleaved1F1B
            self.schedule = kind([*self.looped], self.steps, loss_fn=total, scale_grads=False)
            found = tuple(
                tuple(Action(stage, StageWork(work), index) for stage, work, index in order)
                for order in orders_of(self.schedule)
            )
            if found != orders(self.plan.schedule, self.plan.parts, self.plan.virtual_stages, self.steps):
                raise PlanMismatchError(
                    f"torch {torch.__version__} runs a schedule ({self.plan.schedule}) in another order than the plan "
                    "counts with: solve with one stage a rank (--virtual-stages 1 --schedule 1f1b), or take another "
                    "torch"
                )
        return self.schedule

    def _stage(self, kind: "type[AnyStage]", runner: "Runner") -> "AnyStage":
        """A runner as a stage of torch's."""
        stage, tp = runner.stage, self.plan.stages[0].mesh.tp
        return kind(
            runner,
            stage.index,
            stage.count,
            self.device,
            input_args=without_values(one.on_a_rank(tp) for one in stage.receives),
            output_args=without_values(one.on_a_rank(tp) for one in stage.sends or (_LOSS,)),
            group=self.group,
            dw_builder=runner.weight_gradients if self.deferral is not None else None,
            before_backward=runner.begin_backward,
        )

    def _everywhere(self, losses: list[Tensor]) -> Tensor:
        """The sum of the last stage's losses, on the ranks of all stages."""
        total = torch.zeros((), device=self.device)
        for value in losses if self.is_last else ():
            total += value.detach().float()
        dist.broadcast(total, group=self.group, group_src=self.plan.parts - 1)
        return total


def _check_loss(loss: object) -> None:
    if not callable(loss):
        raise UsageError(
            f"the loss of a step must be a function of (outputs, inputs), and is {loss!r}; where the model returns its "
            'own, it is lambda outputs, inputs: outputs["loss"], say'
        )


@final
class Runner(nn.Module):
    """A stage as torch's schedules call it: of what it received and the number of the micro-batch, to what it sends, or
    to the loss over the number of micro-batches. With a deferral the backwards of all stages but the first, for which
    no other waits, leave out the weights' gradients that it defers."""

    def __init__(self, model: nn.Module, stage: StagePlan, steps: int, deferral: Deferral | None) -> None:
        super().__init__()
        self.model = model
        self.stage = stage
        self.steps = steps
        self.deferral = deferral
        self.defers = deferral is not None and stage.index > 0
        self.micro_batches: list[Inputs] = []
        self.loss: Loss | None = None
        #: the micro-batch whose backward began last, and the number of those whose backward is complete
        self.in_backward = self.done = 0
        self.is_order_noted = False
        #: hears of each pass that begins
        self.hears: Callable[[Pass], None] = lambda _: None

    def begin(self, micro_batches: list[Inputs], loss: Loss) -> None:
        """Takes the micro-batches and the loss of a step. Raises UsageError for another number of them."""
        self.micro_batches, self.loss, self.done = micro_batches, loss, 0
        if len(self.micro_batches) != self.steps:
            raise UsageError(
                f"a step of this plan has {self.steps} micro-batches, and {len(self.micro_batches)} are given: give "
                "those of plan.batch_for(rank)"
            )

    def begin_backward(self) -> None:
        """Tells that the backward of a micro-batch begins."""
        self.hears(Pass.BACKWARD)

    def forward(self, *received: Tensor, index: Tensor | int) -> Any:
        self.hears(Pass.FORWARD)
        micro_batch = self.micro_batches[int(index)]
        given = _Received.apply(*received) if received else ()  # type: ignore[no-untyped-call]
        self._begin(int(index))
        found = self.run(micro_batch, given)
        if self.stage.last is None:
            assert self.loss is not None
            found = (self.loss(found, micro_batch).float() / self.steps).reshape(1)
        else:
            found = tuple(tensor.contiguous() for tensor in found)
        # A gradient arrives as the backward begins.
        for tensor in (found,) if isinstance(found, Tensor) else found:
            tensor.register_hook(functools.partial(self._reduce, int(index)))
        return found

    def run(self, micro_batch: Inputs, received: tuple[Tensor, ...]) -> Any:
        """The stage's outputs for a micro-batch."""
        with contextlib.nullcontext() if self.is_order_noted else noting_order(self.model):
            outputs = self.model(**_named(self.model, micro_batch, received))
        self.is_order_noted = True
        return outputs

    def _reduce(self, index: int, _gradient: Tensor) -> None:
        """The last backward reduces what has accumulated, unless weights' gradients are still to come."""
        self.in_backward = index
        self._begin(index)
        reduce_gradients(self.model, index == self.steps - 1 and not self.defers)

    def _begin(self, index: int) -> None:
        if self.deferral is not None:
            self.deferral.begin((self.stage.index, index) if self.defers else None)

    def weight_gradients(self) -> Callable[[], None]:
        """Returns a function that computes the gradients which the last backward deferred; the last one of a step
        reduces what has accumulated."""
        return functools.partial(self._complete, self.in_backward)

    def _complete(self, index: int) -> None:
        if self.deferral is None or not self.defers:
            return
        self.hears(Pass.BACKWARD)
        self.done += 1
        key = self.stage.index, index
        if self.done == self.steps:
            last_of_a_step(self.model, self.deferral, key)
            return
        for _ in self.deferral.weight_gradients(key):
            pass
        accumulate_whole_gradients(self.model)


class _Received(torch.autograd.Function):
    """Hands received tensors to a stage. Their gradients, which are sent back, are contiguous, and zeros where nothing
    reads a tensor."""

    @staticmethod
    def forward(_ctx: Any, *received: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in received)  # no views of leaves, to which code may not write

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.contiguous() for gradient in gradients)


def _named(model: nn.Module, micro_batch: Inputs, received: tuple[Tensor, ...]) -> dict[str, Any]:
    """A stage's arguments. Raises UsageError for inputs without names."""
    if not isinstance(micro_batch, Mapping):
        raise UsageError("a model in stages takes its inputs by name: give each micro-batch as a dict")
    given = dict(forward_inputs(model, micro_batch))
    return given | ({RECEIVED: received} if received else {})
