"""Numbers and names of a plan as words: bytes, counts, samples, ranges of modules, and figures derived from it."""

import re
from collections.abc import Sequence
from math import prod

from tpplan.core.errors import PlanError
from tpplan.core.mesh import AXES, Axis, GroupShape, Mesh
from tpplan.core.name_patterns import format_ranges
from tpplan.core.units import DTYPE_BYTES, GIB, format_bytes
from tpplan.plan.plan import BatchPlan, Plan, Prediction

_AXES = {Axis.REPLICATE: "replicas", Axis.SHARD: "FSDP shards", Axis.TP: "tensor-parallel ranks"}


def axes_of(plan: Plan) -> tuple[Axis, ...]:
    """The axes over which a plan's ranks communicate, those of one rank included: those of the mesh, outermost first,
    and those that divided experts, or layers over shard and tp, add."""
    experts = (Axis.EP, Axis.EXPERT_SHARD) if plan.mesh.ep > 1 else ()
    return (*AXES, *experts, *((Axis.SHARD_TP,) if plan.fsdp.over_tp else ()))


def mfu(predicted: Prediction, num_gpus: int) -> float | None:
    """The model's own FLOP per second over those of `num_gpus` GPUs in the profile's fastest matmul; None where the
    plan does not say."""
    if not predicted.model_flop or not predicted.peak_flop_per_s or not predicted.step_time_s:
        return None
    return predicted.model_flop / predicted.step_time_s / (num_gpus * predicted.peak_flop_per_s)


def samples(batch: BatchPlan) -> str:
    """The global batch in words: `8 sequences of 4096 tokens`; `8 samples` where they have no length."""
    if batch.seq_len == 1:
        return plural(batch.global_batch, "sample")
    return f"{plural(batch.global_batch, 'sequence')} of {batch.seq_len} tokens"


def unit_of(batch: BatchPlan) -> str:
    """The unit of throughput: "tokens", or "samples" for a batch whose samples have no length."""
    return "tokens" if batch.seq_len > 1 else "samples"


def tokens(plan: Plan) -> int:
    """Tokens of a step on all ranks together; samples where they have no length."""
    return plan.batch.global_batch * plan.batch.seq_len


def tokens_per_s(plan: Plan) -> float | None:
    """Tokens per second; None where the predicted time is 0."""
    return tokens(plan) / plan.predicted.step_time_s if plan.predicted.step_time_s else None


def format_count(count: float) -> str:
    """A count in decimal units with three significant digits: 8.03 B, 12.7 M, 812."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count / size < 1000 else f"{count / size:.0f} {unit}"
    return f"{count:.3g}" if count < 100 else f"{count:.0f}"


def gib(num_bytes: float) -> str:
    """Bytes as text in GiB, so that parts compare; in smaller units below 0.01 GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= 0.01 * GIB else format_bytes(num_bytes)


def plural(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `2 batches`."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")


def placed(group: GroupShape) -> str:
    """Where the ranks of a group lie: `within a node`, `across 2 nodes`."""
    return "within a node" if group.nodes == 1 else f"across {group.nodes} nodes"


def mesh_sizes(mesh: Mesh) -> str:
    """The axes of a mesh that have several ranks: `2 replicas x 4 FSDP shards`; "" for one GPU."""
    return " x ".join(f"{mesh.size(axis)} {name}" for axis, name in _AXES.items() if mesh.size(axis) > 1)


def short_hash(fingerprint: str) -> str:
    """The first digits of a fingerprint, enough to tell profiles apart."""
    return fingerprint.removeprefix("sha256:")[:12]


def ranges(names: Sequence[str]) -> str:
    """Names as text; names that differ in one number share a range: layers.0-11,30."""
    numbered: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = re.split(r"(\d+)", name, maxsplit=1) if re.search(r"\d", name) else (name, "", "")
        numbered.setdefault((before, after), []).extend([int(number)] if number else [])
    return ", ".join(
        f"{before}{format_ranges(tuple(sorted(found)))}{after}" for (before, after), found in numbered.items()
    )


def model_size(plan: Plan) -> tuple[int, int]:
    """Elements and bytes of all parameters; a tied weight counts once."""
    count = num_bytes = 0
    for name, parameter in plan.parameter_plans().items():
        if parameter.dtype not in DTYPE_BYTES:
            raise PlanError(
                f"parameters.{name}.dtype: expected one of {', '.join(DTYPE_BYTES)}, got {parameter.dtype!r}"
            )
        count += prod(parameter.shape)
        num_bytes += prod(parameter.shape) * DTYPE_BYTES[parameter.dtype]
    return count, num_bytes
