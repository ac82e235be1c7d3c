"""A table of published runs, row by row: each row is read as it says, or refused by the column and the word.

Nothing is guessed: a blank cell is refused unless one value alone can be meant (heads of keys and values are heads, tp
and pp are 1, FSDP shards over all ranks of a replica). What the code of a run does comes from the table of versions
(accuracy_parts.versions), by source_id. Notes are searched for what is not priced, alone: a word of REFUSED_NOTES
refuses the row, unless "no", "not", "without" or "vs" stands before it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from accuracy_parts.models import Sizes, Software
from tpplan.core.units import GIB
from tpplan.plan.plan import Precision, Recompute

#: what a table's name of a GPU has in it -> the profile, and the GB that the name may say, None: it may leave them out
MACHINES: tuple[tuple[str, str, tuple[int | None, ...]], ...] = (
    (r"\bA100.*\b40 ?GI?B", "a100-sxm-40gb", (40,)),
    (r"\bA100\b", "a100-sxm-80gb", (80,)),
    (r"\bH100.*\b96 ?GI?B", "h100-96gb-hbm2e", (96,)),
    (r"\bH100\b", "h100-sxm", (80, None)),
    (r"\bH200\b", "h200-sxm", (141, None)),
    (r"\bB200\b", "b200", (180, 192, None)),
)
OTHER_PARTS = r"\b(PCIE|NVL\d*|CNX|MIG|MAX-?Q)\b"
#: dense bfloat16 FLOP/s that published MFU is relative to
PEAK_FLOP_PER_S = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12}
#: torchtitan's "selective op" keeps every second matmul, and attention [torchtitan, models/llama/parallelize_llama.py]
EVERY_OTHER_MATMUL = "selective op"
RECOMPUTED = {mode.value: mode for mode in Recompute} | {EVERY_OTHER_MATMUL: Recompute.SELECTIVE}
YES, NO = ("yes", "true", "1", "1.0"), ("no", "false", "0", "0.0")
REPLICATED, SHARDED = ("none", "ddp", "dp"), ("fsdp", "fsdp1", "fsdp2", "hsdp", "zero2", "zero3")
DATA_WORDS = frozenset((*REPLICATED, *SHARDED, "full", "shard", "grad", "op", "hybrid"))
HALVES = ("bf16", "bfloat16", "fp16", "float16")
PRECISION_WORDS = frozenset(
    (*HALVES, "amp", "mixed", "default", "pure", "compute", "params", "states", "reduce", "buffers", "grad", "fp32")
)
#: columns of degrees that are not priced here
OTHER_DEGREES = ("pp", "ep", "cp", "etp", "vpp")
#: what is not priced -> how notes, precision and model names write it
REFUSED_NOTES: Mapping[str, str] = {
    "8-bit or narrower floats": r"\b(float8|fp8|e4m3|e5m2|mxfp\d|nvfp4|fp4|float4|int8|int4|nf4|transformer engine)\b",
    "adapters": r"\b(q?lora|dora|peft|adapters?|frozen|freezes?|prefix tuning)\b",
    "context parallelism": r"\b(context[- ]parallel\w*|cp ?[=:]? ?([2-9]|\d\d+)|ring attention|ulysses)\b",
    "asynchronous tensor parallelism": r"\b(async(hronous)?[- _]?(tp|tensor[- ]parallel\w*)|symmetric memory)\b",
    "experts": r"\b(moe|mixture of experts|expert[- ]parallel\w*|\d+x\d+b)\b",
    "pipelines": r"\b(pipeline[- ]parallel\w*|pp ?[=:] ?([2-9]|\d\d+)|1f1b|zero[- ]bubble)\b",
    "offloading": r"\b(cpu[- ]?off-?load\w*|off-?load\w*|zero-infinity)\b",
    "another optimizer": r"\b(adafactor|lion|muon|shampoo|soap|sophia|lamb|adagrad|rmsprop|galore|apollo|sgd"
    r"|8-?bit adamw?|adam-mini|adam8bit)\b",
    "attention of another cost": r"\b(sliding[- ]window|flex ?attention|document mask\w*|flash ?attention[- ]?3|fa3"
    r"|alibi|linear attention|block[- ]sparse)\b",
    "packed or uneven sequences": r"\b(packed|sequence packing|variable[- ]length|padding-free)\b",
    "fused or chunked losses": r"\b(liger|chunked (loss|cross[- ]entropy)|fused linear cross[- ]entropy)\b",
    "CUDA graphs": r"\b(cuda[- ]?graphs?|reduce-overhead|max-autotune)\b",
    "compressed gradients": r"\b(powersgd|gradient compression|int8 reduce|quantized (all-?gather|reduce\w*))\b",
}
#: seconds and tokens per second of a row that differ by more than this part contradict each other
SAME_STEP = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run. tokens_per_s is per GPU; it, and peak_bytes, are None where nobody says."""

    row: int
    source: str
    model: str
    machine: str
    gpus: int
    gpus_per_node: int
    sizes: Sizes
    micro_batch: int
    global_batch: int
    tp: int
    shard: int
    reshard: bool
    recompute: Recompute
    is_compiled: bool
    precision: Precision
    software: Software
    recomputes_every_other_matmul: bool
    tokens_per_s: float | None
    peak_bytes: float | None

    @property
    def step_tokens(self) -> float:
        """Tokens of a step on each GPU."""
        return self.global_batch * self.sizes.seq_len / self.gpus

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each rank."""
        return self.global_batch * self.tp // (self.micro_batch * self.gpus)

    @property
    def flop_per_token(self) -> float:
        """6 N + 12 L H T, as MFU is counted."""
        return 6 * self.sizes.num_parameters + 12 * self.sizes.layers * self.sizes.hidden * self.sizes.seq_len

    @property
    def peak_flop_per_s(self) -> float:
        """Of the tensor cores, in dense bfloat16."""
        return PEAK_FLOP_PER_S[self.machine[:4]]

    @property
    def measured_s(self) -> float:
        """Of a step, where tokens per second are said."""
        assert self.tokens_per_s is not None
        return self.step_tokens / self.tokens_per_s

    @property
    def mfu(self) -> float:
        """Of the tensor cores' peak, where tokens per second are said."""
        return self.step_tokens / self.measured_s * self.flop_per_token / self.peak_flop_per_s


def read_runs(table: pd.DataFrame, versions: Mapping[str, Software]) -> tuple[list[Run], list[str]]:
    """The runs in the rows of a table, and why other rows are refused. Raises ValueError where a column is missing."""
    runs, problems = [], []
    for row, entry in table.iterrows():
        try:
            runs.append(_run(int(str(row)), entry, versions))
        except KeyError as error:
            raise ValueError(f"no column {error}; it has {', '.join(map(str, table.columns))}") from error
        except ValueError as error:
            problems.append(f"row {int(str(row)) + 2}: {error}")
    return runs, problems


def machine_of(gpu: str) -> str:
    """The profile of a GPU as a table names it. Raises ValueError for one that has none, or other memory than its."""
    stated = [int(number) for number in re.findall(r"\b(\d+) ?GI?B\b", gpu, re.IGNORECASE)]
    for pattern, name, sizes in MACHINES:
        if re.search(pattern, gpu, re.IGNORECASE) and not re.search(OTHER_PARTS, gpu, re.IGNORECASE):
            if any(own not in sizes for own in stated or [None]):
                expected = " or ".join("none" if own is None else f"{own} GB" for own in sizes)
                raise ValueError(f"gpu {gpu!r}: {name} has {expected} in its name; another card is not priced as it")
            return name
    known = ", ".join(name for _, name, _ in MACHINES)
    raise ValueError(f"gpu {gpu!r}: expected an SXM part with a profile, of {known}")


def _run(row: int, entry: "pd.Series[object]", versions: Mapping[str, Software]) -> Run:
    source = _text(entry, "source_id")
    if source not in versions:
        raise ValueError(f"source_id {source!r}: no version of its code is known; add a row to the table of versions")
    for column in OTHER_DEGREES:
        if column in entry and not pd.isna(entry[column]) and _whole(entry, column) != 1:
            raise ValueError(f"{column} {entry[column]}: not priced here")
    for column in ("notes", "model", "precision", "compile"):
        _refuse_words(column, "" if pd.isna(entry[column]) else str(entry[column]))
    gpu, gpus, tp = _text(entry, "gpu"), _whole(entry, "n_gpus"), _whole(entry, "tp", 1)
    sizes = {name: _whole(entry, name) for name in ("layers", "hidden", "ffn", "heads", "vocab", "seq_len")}
    micro_batch, global_batch = _whole(entry, "micro_batch_per_gpu"), _whole(entry, "global_batch")
    if gpus % tp or global_batch * tp % (micro_batch * gpus):
        raise ValueError(
            f"global_batch {global_batch}: expected a multiple of {micro_batch} samples on each of "
            f"{gpus} GPUs in groups of tp {tp}"
        )
    recomputed, software = _word(entry, "activation_checkpointing", RECOMPUTED), _optimizer(entry, versions[source])
    shard, reshard = _sharding(entry, gpus // tp)
    run = Run(
        row=row,
        source=source,
        model=_text(entry, "model"),
        machine=machine_of(gpu),
        gpus=gpus,
        gpus_per_node=min(gpus, _per_node(gpu)),
        sizes=Sizes(
            **sizes,
            kv_heads=_whole(entry, "kv_heads", sizes["heads"]),
            num_parameters=_positive(entry, "n_params"),
        ),
        micro_batch=micro_batch,
        global_batch=global_batch,
        tp=tp,
        shard=shard,
        reshard=reshard,
        recompute=RECOMPUTED[recomputed],
        is_compiled=_word(entry, "compile", (*YES, *NO)) in YES,
        precision=_precision(_text(entry, "precision")),
        software=software,
        recomputes_every_other_matmul=recomputed == EVERY_OTHER_MATMUL,
        tokens_per_s=_measured(entry, "tokens_per_s_per_gpu"),
        peak_bytes=None if (peak_gib := _measured(entry, "peak_mem_gib")) is None else peak_gib * GIB,
    )
    _check_step(entry, run)
    return run


def _text(entry: "pd.Series[object]", name: str) -> str:
    value = entry[name]
    if pd.isna(value) or not str(value).strip():
        raise ValueError(f"no {name}")
    return str(value).strip()


def _word(entry: "pd.Series[object]", name: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    """A cell that is one of the known words. Raises ValueError for any other, and where there is none."""
    text = _text(entry, name).lower()
    if text not in known:
        raise ValueError(f"{name} {entry[name]!r}: expected {', '.join(known)}")
    return text


def _positive(entry: "pd.Series[object]", name: str) -> float:
    try:
        number = float(_text(entry, name))
    except ValueError as error:
        raise ValueError(f"{name} {entry[name]!r}: expected a number" if "no " not in str(error) else error) from error
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} {entry[name]}: expected a number above 0")
    return number


def _whole(entry: "pd.Series[object]", name: str, default: int | None = None) -> int:
    """A whole number of a row. Raises ValueError where there is none and nothing stands for it."""
    if default is not None and pd.isna(entry[name]):
        return default
    number = _positive(entry, name)
    if number != int(number):
        raise ValueError(f"{name} {entry[name]}: expected a whole number, 1 or more")
    return int(number)


def _measured(entry: "pd.Series[object]", name: str) -> float | None:
    """A number of a row; None where it, or its column, is not there."""
    return None if pd.isna(entry.get(name)) else _positive(entry, name)


def _refuse_words(column: str, text: str) -> None:
    for what, pattern in REFUSED_NOTES.items():
        for found in re.finditer(pattern, text, re.IGNORECASE):
            if not re.search(r"\b(no|not|without|vs\.?) $", text[: found.start()], re.IGNORECASE):
                raise ValueError(f"{column} {found.group()!r}: {what} are not priced here")


def _per_node(gpu: str) -> int:
    stated = re.search(r"\b(\d+) per node\b", gpu)
    return int(stated.group(1)) if stated else 8


def _sharding(entry: "pd.Series[object]", ranks: int) -> tuple[int, bool]:
    """The ranks that shard parameters, and whether they are resharded after forward (ZeRO-3)."""
    if pd.isna(entry["dp_mode"]) and ranks == 1:
        return 1, True
    mode = _text(entry, "dp_mode").lower()
    words = re.findall(r"[a-z0-9]+", mode)
    others = [word for word in words if word not in DATA_WORDS]
    if others or words[0] not in (*REPLICATED, *SHARDED):
        expected = ", ".join((*REPLICATED, *SHARDED))
        raise ValueError(f"dp_mode {entry['dp_mode']!r}: {(others or words)[0]!r} is none of {expected}")
    if words[0] in REPLICATED:
        if ranks > 1 and words[0] == "none":
            raise ValueError(f"dp_mode {entry['dp_mode']!r}: {ranks} ranks with different samples need one")
        return 1, True
    is_hybrid = "hsdp" in words or "hybrid" in words
    shard = _whole(entry, "fsdp_degree", None if is_hybrid else ranks)
    if ranks % shard:
        raise ValueError(f"fsdp_degree {shard}: expected a divisor of the {ranks} ranks with different samples")
    return shard, "zero2" not in words and words.count("grad") == 0


def _precision(text: str) -> Precision:
    words = re.findall(r"[a-z0-9]+", text.lower())
    others = [word for word in words if word not in PRECISION_WORDS]
    if others or not any(word in HALVES for word in words):
        raise ValueError(f"precision {text!r}: {(others or words)[0]!r} is not priced here; expected 16 bits")
    is_pure = "pure" in words or {"params", "states"} <= set(words)
    return Precision.BF16 if is_pure else Precision.BF16_MIXED


def _optimizer(entry: "pd.Series[object]", software: Software) -> Software:
    """The software, whose optimizer a column of that name must not contradict."""
    if "optimizer" in entry and not pd.isna(entry["optimizer"]):
        word = _text(entry, "optimizer").lower()
        if word != software.optimizer:
            raise ValueError(f"optimizer {entry['optimizer']!r}: its source has {software.optimizer}")
    return software


def _check_step(entry: "pd.Series[object]", run: Run) -> None:
    """Raises ValueError where a row's seconds of a step and its tokens per second contradict each other."""
    step_s = _measured(entry, "step_time_s")
    if step_s is None or run.tokens_per_s is None:
        return
    off = run.measured_s / step_s - 1
    if abs(off) > SAME_STEP:
        raise ValueError(
            f"step_time_s {step_s:g}: by tokens_per_s_per_gpu a step takes {run.measured_s:.4g} s ({off:+.0%})"
        )
