"""A caller's request to solve, with every default filled in; it does not change during the search."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tpplan.core.graph import ModelGraph
from tpplan.layouts.pins import Pin, parse_pins
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Precision, Recompute, StagePlan
from tpplan.search.models.subject import BuildModel, ExampleInputs, Subject
from tpplan.search.points.options import Allows, Batch, Cluster, Options, Progress, parse_precision, parse_recompute
from tpplan.trace.answers.planned_device import PlannedDevice


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model, a cluster, a batch, and pinned options; an option that is None is decided by the search.

    `limit` is the memory of a GPU in bytes; `wishes`, given the graph, says which strategies a decision may choose;
    `report` is called with the progress of the search. `stage` says which stage of a pipeline the model is, and what a
    rank holds beside it; `sharded_beside_bytes` are divided by the FSDP degree; `like_stages` of a rank, itself among
    them, keep as many layers gathered as it does. With `is_explained` the plan says why modules stay whole, or the
    error what would help where none fits, which may take longer than the search. With `is_checked` the answer's graph
    is traced where it was grown, and compared. No plan that takes longer than `cutoff_s` is looked for.
    """

    subject: Subject
    unused_outputs: frozenset[str]
    cluster: Cluster
    profile: HardwareProfile
    batch: Batch
    optimizer: str
    recompute: Recompute | None
    reshard_after_forward: bool | None
    fsdp_over_tp: bool | None
    whole_gradients: bool
    gathered_once: bool
    is_compiled: bool
    wishes: Callable[[ModelGraph], Allows] | None
    limit: float
    all_gpus: bool
    solver: str | None
    time_limit_s: float | None
    report: Progress
    pins: tuple[Pin, ...] = ()
    stage: StagePlan | None = None
    sharded_beside_bytes: float = 0.0
    like_stages: int = 1
    is_explained: bool = True
    is_checked: bool = True
    cutoff_s: float = math.inf

    @property
    def precision(self) -> Precision:
        """The precision that the model is trained in."""
        return self.subject.precision

    @classmethod
    def of(
        cls,
        build_model: BuildModel,
        example_inputs: ExampleInputs,
        cluster: Cluster,
        batch: Batch,
        options: Options,
        progress: Progress | None,
    ) -> "Request":
        """The request of a call of solve. Raises UsageError for an unknown name, ProfileError for a bad profile."""
        profile, precision, limit = cluster.load_profile(), options.precision, options.memory_limit_bytes
        if precision is None:
            precision = Precision.BF16_MIXED if profile.device_type == "cuda" else Precision.FP32
        subject = Subject(
            build_model=build_model,
            example_inputs=example_inputs,
            loss=options.loss,
            seq_len=batch.seq_len,
            precision=parse_precision(precision),
            device=PlannedDevice.of(profile),
            stage=options.stage.bare if options.stage is not None else None,
        )
        return cls(
            subject=subject,
            unused_outputs=frozenset(options.unused_outputs),
            cluster=cluster,
            profile=profile,
            batch=batch,
            optimizer=options.optimizer,
            recompute=parse_recompute(options.recompute),
            reshard_after_forward=options.reshard_after_forward,
            fsdp_over_tp=options.fsdp_over_tp,
            whole_gradients=options.whole_gradients,
            gathered_once=options.gathered_once,
            is_compiled=options.compile,
            wishes=options.allows,
            limit=profile.memory_bytes if limit is None else limit,
            all_gpus=options.all_gpus,
            solver=options.solver,
            time_limit_s=options.time_limit_s,
            report=progress or (lambda stage, done, total: None),
            pins=parse_pins(options.pins),
            stage=options.stage,
            sharded_beside_bytes=options.sharded_beside_bytes,
            like_stages=options.like_stages,
        )
