"""The sections on ranks: the cluster, the mesh, the batch, the experts and the stage of a pipeline that ranks share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from tpplan.core.layout import Layout, R, S, local_shape
from tpplan.core.strict_json import Amount, AtLeast, Count, Size

#: name of the argument by which a stage is given the tensors of the one before
RECEIVED = "received"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The cluster for which the plan was solved."""

    gpus: Count
    gpus_per_node: Count
    profile: str
    profile_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """Degrees of the mesh; ranks are numbered with tp innermost."""

    replicate: Count
    shard: Count
    tp: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """global_batch = micro_batch * accumulation_steps * data-parallel ranks, in samples of seq_len tokens; seq_len is 1
    where samples have no length (images, tables, graphs)."""

    global_batch: Count
    micro_batch: Count
    accumulation_steps: Count
    seq_len: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """How a module of `experts` experts is called: the names of its arguments rows [T, D], index [T, K] into the
    experts, and weight [T, K]. It returns [T, D']."""

    experts: Count
    rows: str
    index: str
    weight: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPlan:
    """The modules whose experts are divided among `ep` ranks of a shard group, each with experts / ep of them, and the
    `imbalance` planned for: rows that the busiest rank gets, over those that it would get of an even routing. `check`
    says how it is known that the modules compute row by row. `rows` are those that a rank gets for a call, as planned;
    `seconds_of_rows` are the seconds of a step that grow with them, of kernels and exchanges."""

    ep: Count
    imbalance: Annotated[float, AtLeast(1)]
    modules: Mapping[str, ExpertCall]
    check: str
    rows: Size
    seconds_of_rows: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """The shape and dtype of a tensor that one stage sends to the next, for one micro-batch. Each tp rank sends the
    same rank of the next stage its slice of dim `sliced`; absent where each sends the whole."""

    shape: tuple[Size, ...]
    dtype: str
    sliced: Size | None = None

    def __str__(self) -> str:
        slices = f" in slices of dim {self.sliced}" if self.sliced is not None else ""
        return f"{self.dtype}{list(self.shape)}{slices}"

    @property
    def layout(self) -> Layout:
        """The layout in which the tensor crosses."""
        return R if self.sliced is None else S(self.sliced)

    def on_a_rank(self, tp: int) -> "TensorPlan":
        """The tensor that one of `tp` ranks sends."""
        return TensorPlan(shape=local_shape(self.shape, self.layout, tp), dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedPlan:
    """A parameter that several `stages` read: each has it, and adds the others' gradients to its own once a step."""

    name: str
    stages: tuple[Size, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredPlan:
    """The weights' gradients of a micro-batch that a stage can compute apart from the backward: their seconds, the
    bytes that are kept for them from the backward on, and the bytes of the largest of them. `exposed_s` are the seconds
    of a step's reductions that a backward hides, and these products alone do not."""

    seconds: Amount = 0.0
    kept_bytes: Amount = 0.0
    largest_bytes: Amount = 0.0
    exposed_s: Amount = 0.0


NOTHING_DEFERRED = DeferredPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Stage `index` of `count` (from 0) of a model. Modules in `absent` are those of other stages; `blank` are
    parameters that only other stages read, `tied` those that others read too. The tensors that layer `received` gives
    on the stage before come in (`receives`); those that layer `last` gives go out. A stage keeps the activations of up
    to `in_flight` micro-batches at once, of `kept_bytes` each, while its ranks hold `beside_bytes` of their other
    stages and of received and sent tensors. Parameters, gradients, states, and what stays gathered of a stage that does
    not run are `resting_bytes`. `deferred` is what a zero-bubble schedule would defer, or does: nothing in
    the first stage, for whose backward no other waits. `micro_batch` is the
    batch that these shapes are for."""

    index: Size
    count: Count
    absent: tuple[str, ...]
    blank: tuple[str, ...]
    received: str | None
    last: str | None
    receives: tuple[TensorPlan, ...]
    sends: tuple[TensorPlan, ...]
    in_flight: Count
    micro_batch: Count
    beside_bytes: Amount = 0.0
    kept_bytes: Amount = 0.0
    resting_bytes: Amount = 0.0
    tied: tuple[TiedPlan, ...] | None = None
    deferred: DeferredPlan = NOTHING_DEFERRED

    @property
    def ties(self) -> tuple[TiedPlan, ...]:
        """The parameters that other stages read too."""
        return self.tied or ()

    @property
    def bare(self) -> "StagePlan":
        """The stage without what a rank holds, and of whole tensors: what it runs."""
        stage = self.with_slices(None)
        nothing = dict.fromkeys(("beside_bytes", "kept_bytes", "resting_bytes"), 0.0)
        return replace(stage, in_flight=1, deferred=NOTHING_DEFERRED, **nothing)  # type: ignore[arg-type]

    @property
    def outline(self) -> "StagePlan":
        """The bare stage without shapes: equal for the same stage at every micro-batch."""
        stage = self.bare
        receives, sends = (
            tuple(replace(one, shape=()) for one in tensors) for tensors in (stage.receives, stage.sends)
        )
        return replace(stage, receives=receives, sends=sends, micro_batch=1)

    def why_not_sliced(self, tp: int) -> str:
        """Why `tp` ranks cannot send slices as the stage says; "" where they can, or send all whole."""
        for one in self.sends:
            if one.sliced is None:
                continue
            if len(self.sends) > 1:
                return f"slices of one of {len(self.sends)} tensors: a stage that sends one alone may send slices of it"
            if one.sliced >= len(one.shape):
                return f"slices of dim {one.sliced} of {list(one.shape)}: expected 0 to {len(one.shape) - 1}"
            if one.shape[one.sliced] % tp:
                return f"dim {one.sliced} of {list(one.shape)} does not divide among {tp} tensor-parallel ranks"
        return ""

    def with_slices(self, dim: int | None) -> "StagePlan":
        """The stage in which all that is received and sent crosses as slices of a dim, or whole."""
        receives, sends = (
            tuple(replace(one, sliced=dim) for one in tensors) for tensors in (self.receives, self.sends)
        )
        return replace(self, receives=receives, sends=sends)
