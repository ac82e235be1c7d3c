"""torch's memory tracker for FSDP2, and torch's pipelines: the order of a schedule's actions, and stages that hold no
more than the schedule needs. Importing this module takes 0.7 s, as both import torch's compiler.

torch's PipelineStage makes a buffer for each micro-batch's received tensors before the first step and keeps all of
them; its schedules keep each loss with its graph, and the looped ones each sent tensor, until the step ends. A
`FrugalStage` makes a buffer when it is received into, and drops it and the loss's graph after the micro-batch's
backward; a `LoopedStage` also drops what has been sent.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType, _FSDPState
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import _batch_p2p, _ComputationType, _wait_batch_p2p

from tpplan.torch_internals.modules import group_of
from tpplan.torch_internals.probes import Probe

__all__ = [
    "PROBES",
    "FSDPMemTracker",
    "FrugalStage",
    "LoopedSchedule",
    "LoopedStage",
    "MemTracker",
    "StagesTracker",
    "Tracker",
    "orders_of",
]


class Tracker(FSDPMemTracker):  # type: ignore[no-untyped-call]
    """FSDPMemTracker with a correction: torch's wrapper of post-backward keeps the last unsharded gradient alive while
    gradients are reduced, so that the peak reads too high; this one holds none."""

    def _fsdp_param_group_post_backward(self, fsdp_mod: Any, orig_fsdp_param_group_post_backward: Any) -> Any:
        def post_backward(*args: Any, **kwargs: Any) -> None:
            self._label(fsdp_mod, "_unsharded_param", _FSDPRefType.UNSHARDED_GRAD)
            self._fsdp_state = _FSDPState.POST_BW
            orig_fsdp_param_group_post_backward(*args, **kwargs)
            self._label(fsdp_mod, "sharded_param", _FSDPRefType.SHARDED_GRAD)

        return post_backward

    def _label(self, fsdp_mod: Any, attribute: str, part: _FSDPRefType) -> None:
        group = group_of(fsdp_mod)
        for parameter in group.fsdp_params if group is not None else ():
            gradient = getattr(getattr(parameter, attribute, None), "grad", None)
            if gradient is not None:
                self._update_and_maybe_create_winfos(gradient, part)


class StagesTracker(MemTracker):  # type: ignore[no-untyped-call]
    """MemTracker without statistics of modules: these take no module that runs forward several times before its
    backward, as those of a stage do, and their hooks keep what a module was given until the step ends."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _NoModules()  # type: ignore[no-untyped-call]


class _NoModules(ModTracker):
    """A ModTracker that tracks no modules."""

    def __enter__(self) -> "_NoModules":
        return self

    def __exit__(self, *_: object) -> None: ...


# ---- pipelines

#: schedules of stages that send on their own (LoopedStage)
LoopedSchedule = ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble


def orders_of(schedule: LoopedSchedule) -> list[list[tuple[int, str, int]]]:
    """The actions of each rank under a schedule, in order: (stage, what it does, micro-batch). What it does is
    "forward", "backward" (with or without weights' gradients) or "weight gradients"."""
    kinds = {
        _ComputationType.FORWARD: "forward",
        _ComputationType.FULL_BACKWARD: "backward",
        _ComputationType.BACKWARD_INPUT: "backward",
        _ComputationType.BACKWARD_WEIGHT: "weight gradients",
    }
    return [
        [
            (action.stage_index, kinds[action.computation_type], int(action.microbatch_index or 0))
            for action in order
            if action is not None
        ]
        for _, order in sorted(schedule.pipeline_order.items())
    ]


class FrugalStage(PipelineStage):
    """A PipelineStage whose buffers for received tensors live from receiving to the end of the backward.
    `before_backward` is called as the backward of a micro-batch begins."""

    def __init__(self, *args: Any, before_backward: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before_backward = before_backward

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_memory(super()._prepare_forward_infra, *args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_memory(super()._prepare_backward_infra, *args, **kwargs)

    def _without_memory(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        device, self.device = self.device, torch.device("meta")
        try:
            return prepare(*args, **kwargs)
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make(self.args_recv_info[fwd_chunk_id], requires_grad=bool(self.has_backward))
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._make(self.grad_recv_info[bwd_chunk_id], requires_grad=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *args: Any, **kwargs: Any) -> None:
        self._before_backward()
        super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if loss is not None:
            loss.detach_()  # the schedule keeps it until the step ends, and its graph holds what was received
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in _with_buffers(infos.get(bwd_chunk_id, ())):
                info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)

    def _make(self, infos: Any, *, requires_grad: bool) -> None:
        for info in _with_buffers(infos):
            info.buffer = torch.empty_like(info.buffer, device=self.device, requires_grad=requires_grad)


class LoopedStage(FrugalStage):
    """A FrugalStage that sends on its own, for a schedule that would keep what it sends until the step ends. What the
    next stage has sent a gradient for has arrived there; a gradient is kept until its send is seen to be completed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: forward's sends by micro-batch, and backward's, the first first
        self._forwards: dict[int, list[dist.Work]] = {}
        self._backwards: list[list[dist.Work]] = []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends, and leaves nothing for the schedule to send."""
        if operations := super().get_fwd_send_ops(fwd_chunk_id):
            self._forwards[fwd_chunk_id] = _batch_p2p(operations)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends, and leaves nothing for the schedule to send."""
        while self._backwards and all(work.is_completed() for work in self._backwards[0]):
            _wait_batch_p2p(self._backwards.pop(0))
        if operations := super().get_bwd_send_ops(bwd_chunk_id):
            self._backwards.append(_batch_p2p(operations))
        return []

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        _wait_batch_p2p(self._forwards.pop(bwd_chunk_id, []))
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def finish(self) -> None:
        """Waits for what is still being sent; to be called after each step."""
        for works in (*self._forwards.values(), *self._backwards):
            _wait_batch_p2p(works)
        self._forwards.clear()
        self._backwards.clear()


def _with_buffers(infos: Any) -> Iterator[Any]:
    """The descriptions of received tensors among those of a stage's inputs."""
    return (info for info in infos if isinstance(getattr(info, "buffer", None), torch.Tensor))


# ---- probes


def _tracker() -> bool:
    names = ("_fsdp_param_group_post_backward", "_update_and_maybe_create_winfos", "track_inputs", "reset_mod_stats")
    return issubclass(Tracker, MemTracker) and all(callable(getattr(FSDPMemTracker, name, None)) for name in names)


def _stages() -> bool:
    names = ("_prepare_forward_infra", "_prepare_backward_infra", "get_fwd_recv_ops", "get_bwd_recv_ops")
    more = ("get_fwd_send_ops", "get_bwd_send_ops", "backward_one_chunk")
    return all(callable(getattr(PipelineStage, name, None)) for name in (*names, *more)) and _batch_p2p([]) == []


PROBES = (
    Probe(
        name="FSDP2's memory tracker",
        uses="torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker and its parts",
        needed_for="the memory check of `tpplan verify`",
        works=_tracker,
    ),
    Probe(
        name="what a pipeline's stages hold, and what its schedules run",
        uses="PipelineStage.args_recv_info and grad_recv_info, _batch_p2p, ScheduleInterleaved1F1B.pipeline_order",
        needed_for="training a model in stages",
        works=_stages,
    ),
)
