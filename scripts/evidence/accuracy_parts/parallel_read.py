"""A table of published runs with pipelines and experts, row by row: each is read as it says, or refused by name.

Nothing is guessed. A blank cell is refused unless one value alone can be meant, or the table of code
(parallel_code.csv) has it for the row's source, with where it was read. What a plan cannot express and no arithmetic
here covers is refused: a row is never priced as another one. What is neglected stands in a run's `caveats`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from accuracy_parts.parallel_code import Code
from accuracy_parts.parallel_models import Shape
from accuracy_parts.read import REFUSED_NOTES, machine_of
from tpplan.plan.plan import Recompute

Known = TypeVar("Known")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family's layers are made: a gated feed-forward with RMSNorm or GELU with LayerNorm, with biases of products
    (but of experts') or not, with experts or not."""

    is_gated: bool = True
    has_biases: bool = False
    has_experts: bool = False


FAMILIES: Mapping[str, Family] = {
    "gpt": Family(is_gated=False, has_biases=True),
    "gpt (alibi not stated)": Family(is_gated=False, has_biases=True),
    "llama": Family(),
    "mixtral-moe": Family(has_experts=True),
    "qwen3-moe": Family(has_experts=True),
    "gpt-oss-moe": Family(has_experts=True, has_biases=True),
}
#: recomputation as the table writes it, and as tpplan does: what is recomputed of "selective" is norms and activations
RECOMPUTED = {
    "none": Recompute.NONE,
    "full": Recompute.FULL,
    "selective: norm, act": Recompute.SELECTIVE,
    "selective: layernorm, moe_act": Recompute.SELECTIVE,
}
ZERO = {
    "ddp": 0,
    "zero1": 1,
    "distributed optimizer (zero1)": 1,
    "zero3": 3,
    "zero3 (fsdp)": 3,
    "fsdp on": 3,
}
#: notes and flags of a row that are priced here although the table without pipelines refuses them
PRICED_NOTES = frozenset({"experts", "pipelines", "attention of another cost", "context parallelism"})
#: flags that change a step and are not priced
REFUSED_FLAGS = {
    "exchange beside another micro-batch's compute": r"\bep_overlap=on|\b1f1b overlap",
}
#: ways to exchange rows: whether each row goes to a rank or node once, however many of its experts are there
DISPATCHERS = {"": False, "a2a": False, "alltoall": False, "deepep": True, "hybridep": True}
#: seconds and tokens per second of a row that differ by more than this part contradict each other, and of a model's
#: parameters the part that those of its sizes may be apart
SAME_STEP, CLOSE = 0.05, 0.1


class RefusalError(ValueError):
    """A row is not priced: `reason` without the row's numbers, `detail` with them."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRun:
    """A published run in its layout. Times are of a step."""

    row_id: str
    source: str
    model: str
    machine: str
    gpus: int
    gpus_per_node: int
    shape: Shape
    dp: int
    tp: int
    pp: int
    vpp: int
    ep: int
    zero: int
    sequence_parallel: bool
    micro_batch: int
    micro_batches: int
    recompute: Recompute
    sends_rows_once: bool
    code: Code
    measured_s: float
    plan_group: str
    caveats: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The group of the report."""
        if self.shape.experts:
            return "MoE"
        return "dense pp" if self.pp > 1 else "dense no pp"

    @property
    def step_tokens(self) -> int:
        """Tokens of a step on all GPUs."""
        return self.micro_batch * self.micro_batches * self.dp * self.shape.seq_len


def read_parallel(
    rows: Sequence[Mapping[str, str]], codes: Sequence[tuple[str, str, str, Code]]
) -> tuple[list[ParallelRun], list[tuple[str, RefusalError]]]:
    """The runs in the rows of a table, and why others are refused, each with its row_id. Raises KeyError for a missing
    column."""
    runs, refused = [], []
    for row in rows:
        try:
            runs.append(_run(row, codes))
        except RefusalError as error:
            refused.append((row["row_id"], error))
    return runs, refused


def _run(row: Mapping[str, str], codes: Sequence[tuple[str, str, str, Code]]) -> ParallelRun:
    _refuse_what_is_not_priced(row)
    machine = _machine(row["gpu"])
    for column in ("seq_len", "micro_batch", "global_batch", "heads"):
        _whole(row, column)
    code = _code(row, codes)
    shape = _shape(row, code)
    gpus, dp, tp, pp = (_whole(row, name) for name in ("gpus", "dp", "tp", "pp"))
    if dp * tp * pp != gpus:
        raise RefusalError("degrees that are not the GPUs", f"{dp} x {tp} x {pp} is not {gpus}")
    micro_batch, global_batch = _whole(row, "micro_batch"), _whole(row, "global_batch")
    if global_batch % (micro_batch * dp):
        raise RefusalError("a global batch that does not divide", f"{global_batch} by {micro_batch} on {dp} ranks")
    ep, micro_batches = _ep(row, gpus, pp), global_batch // (micro_batch * dp)
    vpp, neglected = _vpp(row, pp, micro_batches, code)
    zero = _known(_stated(row, "fsdp_zero", code.zero).lower().split(" (fsdp=0")[0], ZERO, "fsdp_zero")
    run = ParallelRun(
        row_id=row["row_id"],
        source=row["source_id"],
        model=row["model"],
        machine=machine,
        gpus=gpus,
        gpus_per_node=min(_whole(row, "gpus_per_node"), gpus),
        shape=shape,
        dp=dp,
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=ep,
        zero=1 if zero == 0 and code.zero == "zero1" else zero,
        sequence_parallel=_stated(row, "sequence_parallel", code.sequence_parallel) == "yes" and tp > 1,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        recompute=_known(_stated(row, "recompute", code.recompute).lower(), RECOMPUTED, "recompute"),
        sends_rows_once=_dispatcher(row),
        code=code,
        measured_s=_number(row, "step_time_s"),
        plan_group=row["plan_group"],
        caveats=(*_caveats(row, code), *neglected),
    )
    _check(run, row)
    return run


def _refuse_what_is_not_priced(row: Mapping[str, str]) -> None:
    if row["trust"] not in ("A", "B"):
        raise RefusalError("trust", f"{row['trust'] or 'blank'}: A or B are priced")
    if row["task"] != "pretrain":
        raise RefusalError("another task than pretraining", row["task"])
    if row["precision_class"] not in ("bf16", "fp16"):
        raise RefusalError("no profile has the precision", row["precision_class"] or "blank")
    if _whole(row, "cp") > 1:
        raise RefusalError("context parallelism", f"cp {row['cp']}")
    for column in ("notes", "flags", "framework"):
        for what, pattern in REFUSED_NOTES.items():
            if what not in PRICED_NOTES and what != "CUDA graphs" and re.search(pattern, row[column], re.IGNORECASE):
                raise RefusalError(what, f"{column} {row[column]!r}")
        for what, pattern in REFUSED_FLAGS.items():
            if re.search(pattern, row[column], re.IGNORECASE):
                raise RefusalError(what, f"{column} {row[column]!r}")
    if row["family"].lower() not in FAMILIES:
        raise RefusalError("no model of the family can be built of the columns", row["family"])


def _machine(gpu: str) -> str:
    try:
        return machine_of(gpu)
    except ValueError as error:
        raise RefusalError("a GPU without a profile", gpu) from error


def _code(row: Mapping[str, str], codes: Sequence[tuple[str, str, str, Code]]) -> Code:
    own = (row["source_id"], row["model"], row["global_batch"])
    for *keys, code in codes:
        if all(key in ("*", value) for key, value in zip(keys, own, strict=True)):
            return code
    raise RefusalError("nothing is known of the code of these runs", " ".join(own))


def _shape(row: Mapping[str, str], code: Code) -> Shape:
    family = FAMILIES[row["family"].lower()]
    heads, hidden = _whole(row, "heads"), _whole(row, "hidden")
    if not row["head_dim"] and hidden % heads:
        raise RefusalError("no head_dim", f"{heads} heads do not divide {hidden}")
    head_dim = _whole(row, "head_dim") if row["head_dim"] else hidden // heads
    vocab_multiple = code.vocab_multiple * _whole(row, "tp")
    if family.has_experts and _whole(row, "dense_layers", least=0):
        raise RefusalError("dense layers between those with experts", row["dense_layers"])
    if family.has_experts and _whole(row, "shared_expert_ffn", least=0):
        raise RefusalError("shared experts", row["shared_expert_ffn"])
    return Shape(
        layers=_whole(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(row, "kv_heads"),
        head_dim=head_dim,
        vocab=ceil(_whole(row, "vocab") / vocab_multiple) * vocab_multiple,
        seq_len=_whole(row, "seq_len"),
        ffn=0 if family.has_experts else _whole(row, "ffn"),
        is_gated=family.is_gated,
        has_biases=family.has_biases,
        experts=_whole(row, "experts") if family.has_experts else 0,
        top_k=_whole(row, "top_k") if family.has_experts else 0,
        moe_ffn=_whole(row, "moe_ffn") if family.has_experts else 0,
        window=code.window,
        has_flash_attention=code.has_flash_attention,
    )


def _ep(row: Mapping[str, str], gpus: int, pp: int) -> int:
    """Ranks that divide experts. Only experts that are not cut themselves are priced (etp 1)."""
    ep = _whole(row, "ep")
    etp = _whole(row, "etp") if row["etp"] else _whole(row, "tp")
    if ep > 1 and etp > 1:
        raise RefusalError("experts that are cut themselves", f"etp {etp}, tp where it is blank")
    if gpus // pp % ep:
        raise RefusalError("degrees that are not the GPUs", f"ep {ep} does not divide {gpus // pp} of a stage")
    return ep


def _vpp(row: Mapping[str, str], pp: int, micro_batches: int, code: Code) -> tuple[int, list[str]]:
    """Chunks of layers on a rank, and what is neglected. Where nobody says, 1 is priced if any other number would make
    the step at most by SAME_STEP shorter: by less than the bubble's share, (pp - 1) / micro-batches."""
    if pp == 1 or row["vpp"] or code.vpp != "stated":
        return 1 if pp == 1 else _whole(row, "vpp") if row["vpp"] else int(code.vpp), []
    if (pp - 1) / micro_batches > SAME_STEP or "interleaved" in row["pp_schedule"]:
        raise RefusalError("no vpp", f"it could change the step by {(pp - 1) / micro_batches:.0%}")
    return 1, [f"vpp is not stated; priced as 1 (another would make the step shorter by less than {SAME_STEP:.0%})"]


def _dispatcher(row: Mapping[str, str]) -> bool:
    stated = re.search(r"dispatcher=(\w+)", row["flags"])
    return _known(stated.group(1).lower() if stated else "", DISPATCHERS, "dispatcher")


def _caveats(row: Mapping[str, str], code: Code) -> list[str]:
    found = []
    if re.search(r"CUDA_LAUNCH_BLOCKING=1", row["flags"]):
        found.append("kernels were launched one at a time (CUDA_LAUNCH_BLOCKING=1); priced as if not")
    if re.search(r"cuda[_ ]?graphs?=", row["flags"], re.IGNORECASE):
        found.append("parts of a layer ran as CUDA graphs; priced as if not")
    if "alibi not stated" in row["family"].lower() and "alibi" not in code.further:
        found.append("ALiBi is not stated; priced without")
    return found


def layers_of_stages(run: ParallelRun) -> list[int]:
    """Layers of each stage. Raises RefusalError where they cannot be divided as the run's code does."""
    layers, pp, ends = run.shape.layers, run.pp, int(run.code.split == "even with ends")
    if pp == 1:
        return [layers]
    if run.code.split == "last takes the rest":
        most = -(-layers // pp)
        counts = [most] * (pp - 1) + [layers - most * (pp - 1)]
    elif (layers + 2 * ends) % (pp * run.vpp):
        raise RefusalError("layers that do not divide", f"{layers} in {pp} stages of {run.vpp} chunks")
    else:
        counts = [(layers + 2 * ends) // pp] * pp
        counts[0], counts[-1] = counts[0] - ends, counts[-1] - ends
    if min(counts) < 1:
        raise RefusalError("a stage without a layer", f"{layers} layers in {pp} stages")
    return counts


def _check(run: ParallelRun, row: Mapping[str, str]) -> None:
    layers_of_stages(run)
    counted, stated = parameters(run.shape), 1e9 * _number(row, "params_b")
    if min(abs(number / stated - 1) for number in counted) > CLOSE:
        shown = " or ".join(f"{number / 1e9:.3g}" for number in counted)
        raise RefusalError("parameters that its sizes do not have", f"{shown}e9 for {row['params_b']}e9")
    if row["tokens_per_s_per_gpu"]:
        stated = run.step_tokens / run.gpus / _number(row, "tokens_per_s_per_gpu")
        if abs(stated / run.measured_s - 1) > SAME_STEP:
            raise RefusalError("seconds and tokens per second that differ", f"{run.measured_s} s and {stated:.4g} s")


def parameters(shape: Shape) -> tuple[int, int]:
    """Parameters of a model of these sizes, without norms and biases: with a head that is the embedding, and not."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    matrices = 3 if shape.is_gated else 2
    rest = (
        shape.experts * (matrices * shape.hidden * shape.moe_ffn + shape.hidden) + matrices * shape.hidden * shape.ffn
    )
    table = shape.vocab * shape.hidden
    return shape.layers * (attention + rest) + table, shape.layers * (attention + rest) + 2 * table


def _stated(row: Mapping[str, str], column: str, otherwise: str) -> str:
    """A cell, or where it is blank the table of code's word. Raises RefusalError where that says "stated"."""
    if not row[column] and otherwise == "stated":
        raise RefusalError(f"no {column}")
    return row[column] or otherwise


def _known(word: str, known: Mapping[str, Known], column: str) -> Known:
    if word not in known:
        raise RefusalError(f"{column} that is not priced", word or "blank")
    return known[word]


def _number(row: Mapping[str, str], column: str) -> float:
    if not row[column]:
        raise RefusalError(f"no {column}")
    try:
        found = float(row[column])
    except ValueError as error:
        raise RefusalError(f"{column} that is no number", row[column]) from error
    if found < 0:
        raise RefusalError(f"{column} below 0", row[column])
    return found


def _whole(row: Mapping[str, str], column: str, *, least: int = 1) -> int:
    found = _number(row, column)
    if found != int(found) or found < least:
        raise RefusalError(f"{column} that is no whole number from {least} on", row[column])
    return int(found)
