"""Builds profiles/h100-sxm.json from a folder of published measurements, and reports how well they agree.

    python scripts/make_profiles.py DATA_FOLDER [--output profiles/h100-sxm.json] [--report]

DATA_FOLDER holds collectives.csv, matmul.csv, hardware.csv and sources.csv; neither it nor its path enters the result.

Collectives: rows of H100 in their default configuration. Several rows of one source at one size (in place and out of
place) -> their median; several sources -> the median of these; then the nearest non-decreasing sequence in the sense
of least absolute log deviation (S01 scatters by 2-3 x at small sizes, which medians ignore).
S01 at its smallest size is left out: it is its first, cold, shot, up to 7 x its second.
Sizes: for all_to_all the CSV's size is nccl-tests' per-rank buffer n/p, here it is n; for the others it is n already.
That S01 counts alike is visible where it meets nccl-tests: all_to_all of 2 GiB on 4 ranks takes 4.58 against 4.60 ms.

Matmuls: the nearest table, in largest log deviation, that does not decrease in batch, m, n or k.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from tpplan.fit import (
    beyond_error,
    digits,
    group_extrapolation,
    interpolation_error,
    isotonic_grid,
    isotonic_median,
    leave_one_group_out,
    neighbour_errors,
    rms,
)
from tpplan.profile import Collective, HardwareProfile
from tpplan.strict import encode

OUTPUT = Path(__file__).resolve().parent.parent / "profiles" / "h100-sxm.json"
JsonObject = dict[str, object]
Array = np.ndarray
#: kind, ranks, ranks per node
GroupKey = tuple[Collective, int, int]

NOT_BUNDLED = "not checked: cite, do not bundle"
NCCL_SOURCES = ["S03", *(f"S{i:02d}" for i in range(5, 11)), *(f"S{i:02d}" for i in range(15, 26))]
LONE_SOURCE = "S01"  # XLA's table, alone in measuring pairs of GPUs
COLLECTIVE_SOURCES = [LONE_SOURCE, *NCCL_SOURCES]
MATMUL_SOURCE = "S26"
BANDWIDTH_SOURCE = "S03"  # the same guide and commit that hardware.csv names for BabelStream
DEVICE = "H100 SXM 80GB"
MATMUL_DEVICE = "H100 (XLA key sm_90; SKU not stated)"

#: smaller messages cost what this one costs
SMALLEST_BYTES = 1024
#: a table that starts above this tells nothing about latency on its own
LATENCY_VISIBLE_BYTES = 1024**2
#: one that starts above this does not even show it in an affine fit
LATENCY_FITTED_BYTES = 1024**3
#: messages whose time is bandwidth
LARGE_BYTES = 16 * 1024**2

CITED_SOURCES: list[JsonObject] = [
    {
        "id": "FA3",
        "licence": "two medians of published figures; nothing bundled",
        "source": "FlashAttention-3, arXiv:2407.08608, figures 5 and 6: the baseline FlashAttention-2, H100 80GB SXM5"
        " (bar labels as third parties transcribed the figures; the paper itself was not at hand)",
    },
    {
        "id": "FA2",
        "licence": "one published figure, as a check; nothing bundled",
        "source": "FlashAttention-2, arXiv:2307.08691: up to 335 TFLOP/s forward + backward on H100 (not looked up)",
    },
    {
        "id": "nvidia-smi",
        "licence": "a fact; nothing bundled",
        "source": "nvidia-smi on an H100 80GB HBM3: 81559 MiB",
    },
]

#: TFLOP/s of FlashAttention-2 in the figures of FA3 as transcribed, sequences of 1k, 2k, 4k, 8k, by head dim.
FA2_FORWARD_TFLOPS = {
    "64": (306, 318, 321, 322),
    "64 causal": (229, 262, 284, 295),
    "128": (350, 362, 368, 370),
    "128 causal": (260, 298, 319, 333),
    "256": (313, 321, 323, 324),
    "256 causal": (251, 278, 293, 297),
}
FA2_BACKWARD_TFLOPS = {"64": (238, 264, 279, 287), "128": (260, 291, 310, 318)}


# --- collectives ---------------------------------------------------------------------------------------------------


def read_collectives(folder: Path) -> pd.DataFrame:
    """H100 rows with columns kind, ranks, ranks_per_node, n (bytes of the whole value), time_s, source_id.

    Raises ValueError where time, size and bus bandwidth of a row contradict nccl-tests' definitions.
    """
    rows = pd.read_csv(folder / "collectives.csv")
    rows = rows[rows.hardware.str.contains("H100") & rows.source_id.isin(COLLECTIVE_SOURCES)]
    rows = rows[rows.collective.isin([str(kind) for kind in Collective]) & (rows.size_bytes >= SMALLEST_BYTES)]
    rows = rows[(rows.source_id != LONE_SOURCE) | (rows.size_bytes > SMALLEST_BYTES)]
    p = rows.ngpus
    factor = (p - 1) / p * np.where(rows.collective == Collective.ALL_REDUCE, 2, 1)
    implied = rows.size_bytes * factor / (rows.time_us * 1e-6) / 1e9
    wrong = rows[(implied / rows.busbw_GBps - 1).abs() > 0.1 + 0.005 / rows.busbw_GBps]
    if len(wrong):
        raise ValueError(f"time, size and busbw contradict each other:\n{wrong.head()}")
    return pd.DataFrame(
        {
            "kind": rows.collective,
            "ranks": p,
            "ranks_per_node": rows.gpus_per_node,
            "n": rows.size_bytes * np.where(rows.collective == Collective.ALL_TO_ALL, p, 1),
            "time_s": rows.time_us * 1e-6,
            "source_id": rows.source_id,
        }
    )


def groups(rows: pd.DataFrame) -> Iterator[tuple[GroupKey, pd.DataFrame]]:
    """Rows by (kind, ranks, ranks per node): kinds in their own order, groups by ranks per node, then ranks."""
    keyed = {
        (Collective(str(kind)), int(str(ranks)), int(str(per_node))): group
        for (kind, ranks, per_node), group in rows.groupby(["kind", "ranks", "ranks_per_node"])
    }
    kinds = list(Collective)
    for key in sorted(keyed, key=lambda key: (kinds.index(key[0]), key[2], key[1])):
        yield key, keyed[key]


def lone_source_error(rows: pd.DataFrame, kind: Collective) -> float:
    """How far S01 is from the median of the others where both measured this kind: median |ln| from 16 MiB on."""
    same = rows[(rows.kind == kind) & (rows.n >= LARGE_BYTES)]
    place = ["ranks", "ranks_per_node", "n"]
    xla = same[same.source_id == LONE_SOURCE].groupby(place).time_s.median()
    others = same[same.source_id != LONE_SOURCE].groupby(place).time_s.median()
    ratio = (xla / others).dropna()
    return float(np.median(np.abs(np.log(ratio.to_numpy()))))


def affine_latency(sizes: Array, times: Array) -> float:
    """L of T = L + n/B, least squares of the relative error, between 0 and the shortest time measured."""
    design = np.stack([np.ones_like(times), sizes], axis=1) / times[:, None]
    latency = np.linalg.lstsq(design, np.ones_like(times), rcond=None)[0][0]
    return float(np.clip(latency, 0.0, times[0]))


def latencies(measured: Mapping[GroupKey, tuple[Array, Array]]) -> dict[GroupKey, tuple[float, str | None]]:
    """Latency of each group and how it was inferred: measured, else fitted, else from a group that was fitted."""
    found: dict[GroupKey, tuple[float, str | None]] = {}
    blind: list[GroupKey] = []
    for key, (sizes, times) in measured.items():
        smallest = sizes[0] / (key[1] if key[0] is Collective.ALL_TO_ALL else 1)
        if smallest <= LATENCY_VISIBLE_BYTES:
            found[key] = float(times[0]), None
        elif smallest <= LATENCY_FITTED_BYTES:
            found[key] = affine_latency(sizes, times), "latency_s: affine fit T = L + n/B of the points above"
        else:
            blind.append(key)
    for key in blind:
        kind, ranks, per_node = key
        donor = next(other for other in found if other[0] is kind and other[2] == per_node and other[1] > per_node)
        latency = found[donor][0] * (ranks - 1) / (donor[1] - 1)
        how = f"latency_s: that of {donor[1]} ranks, {per_node} per node, by ring steps"
        found[key] = min(latency, float(measured[key][1][0])), how
    return found


def collective_tables(rows: pd.DataFrame) -> list[JsonObject]:
    """One table per measured group, by kind, ranks per node and ranks."""
    measured: dict[GroupKey, tuple[Array, Array]] = {}
    for key, group in groups(rows):
        merged = group.groupby(["n", "source_id"]).time_s.median().groupby("n").median()
        measured[key] = merged.index.to_numpy(dtype=np.int64), isotonic_median(merged.to_numpy())
    latency = latencies(measured)
    tables: list[JsonObject] = []
    for key, group in groups(rows):
        sizes, times = measured[key]
        seconds, how = latency[key]
        cited = sorted(group.source_id.unique().tolist())
        errors = neighbour_errors(sizes, times, group.n.to_numpy(), group.time_s.to_numpy())
        if cited == [LONE_SOURCE]:
            # It scatters little around itself, and lies up to a fifth above what others measured.
            bias = lone_source_error(rows, key[0])
            errors = [digits(math.hypot(error, bias), 2) for error in errors]
        table: JsonObject = {
            "kind": str(key[0]),
            "ranks": key[1],
            "ranks_per_node": key[2],
            "latency_s": digits(seconds, 4),
            "bytes": sizes.tolist(),
            "time_s": [digits(time, 4) for time in times],
            "relative_error": errors,
            "sources": cited,
        }
        tables.append(table | ({"inferred": how} if how else {}))
    return tables


# --- matmuls and attention -----------------------------------------------------------------------------------------


def matmul_grid(folder: Path, dtype: str) -> tuple[list[list[int]], Array]:
    """Axes (batch, m, n, k) and times in seconds of XLA's table."""
    rows = pd.read_csv(folder / "matmul.csv")
    rows = rows[(rows.hardware == MATMUL_DEVICE) & (rows.dtype == dtype) & (rows.source_id == MATMUL_SOURCE)]
    rows = rows.sort_values(["batch", "M", "N", "K"])
    axes = [sorted(int(size) for size in rows[name].unique()) for name in ("batch", "M", "N", "K")]
    flop = 2.0 * rows.batch * rows.M * rows.N * rows.K
    times = (flop / (rows.tflops * 1e12)).to_numpy()
    return axes, times.reshape([len(axis) for axis in axes])


def matmul_table(folder: Path, csv_dtype: str, dtype: str, launch_s: float, inferred: str | None) -> JsonObject:
    """One dtype's table; inferred says why the dtype is not what was measured, and widens the residual."""
    axes, measured = matmul_grid(folder, csv_dtype)
    times = isotonic_grid(measured)
    smoothed = rms(np.log(measured / times))
    interpolated = interpolation_error(axes, times)
    widening = 0.1 if inferred else 0.0
    table: JsonObject = dict(zip(("batch", "m", "n", "k"), axes, strict=True)) | {
        "dtype": dtype,
        "time_s": [digits(time, 4) for time in times.ravel()],
        "relative_error": digits(math.hypot(smoothed, interpolated, widening), 2),
        "extrapolation_relative_error": digits(beyond_error(axes, times, launch_s), 2),
        "sources": [MATMUL_SOURCE],
    }
    return table | ({"inferred": inferred} if inferred else {})


def matmul_tables(folder: Path, launch_s: float) -> list[JsonObject]:
    """bfloat16 as measured; float16 and float32 as far as they follow from the table."""
    half = "the tensor cores run float16 at the rate of bfloat16 (vendor's data sheet); bfloat16 was measured"
    full = (
        "the table says f32 and reaches 0.5 x bfloat16, far above what float32 units can: taken as TF32,"
        " torch.set_float32_matmul_precision('high')"
    )
    return [
        matmul_table(folder, "bf16", "bfloat16", launch_s, None),
        matmul_table(folder, "bf16", "float16", launch_s, half),
        matmul_table(folder, "f32(tf32?)", "float32", launch_s, full),
    ]


def attention_rates(folder: Path) -> list[JsonObject]:
    """FlashAttention-2 as its successor's paper measured it: the median bar, and the farthest bar as the error."""
    forward, backward = (
        np.concatenate([np.array(row) for row in table.values()]) * 1e12
        for table in (FA2_FORWARD_TFLOPS, FA2_BACKWARD_TFLOPS)
    )
    spread = max(float(np.abs(np.log(bars / np.median(bars))).max()) for bars in (forward, backward))
    large = np.s_[:, -2:, -2:, -2:]
    bf16, f32 = (matmul_grid(folder, dtype)[1][large] for dtype in ("bf16", "f32(tf32?)"))
    slower = float(np.median(bf16 / f32))
    how = (
        "not in the data: median of published FlashAttention-2 in float16, head dims 64-256, sequences 1k-8k, causal"
        " and not; relative_error is the farthest of them"
    )
    float32 = how + f"; times {slower:.2f}, float32 against bfloat16 in large matmuls, with twice the error"

    def entry(dtype: str, factor: float, error: float, inferred: str) -> JsonObject:
        return {
            "dtype": dtype,
            "forward_flop_per_s": digits(float(np.median(forward)) * factor, 3),
            "backward_flop_per_s": digits(float(np.median(backward)) * factor, 3),
            "relative_error": digits(error, 2),
            "sources": ["FA2", "FA3"],
            "inferred": inferred,
        }

    return [
        entry("bfloat16", 1.0, spread, how),
        entry("float16", 1.0, spread, how),
        entry("float32", slower, 2 * spread, float32),
    ]


# --- the profile ---------------------------------------------------------------------------------------------------


def sources(folder: Path) -> list[JsonObject]:
    """The data's sources that were used, and those only cited. Raises ValueError for one that must not be bundled."""
    table = pd.read_csv(folder / "sources.csv")
    used = table[table.source_id.isin([*COLLECTIVE_SOURCES, MATMUL_SOURCE])]
    if (used.licence == NOT_BUNDLED).any():
        raise ValueError(f"not to be bundled: {used[used.licence == NOT_BUNDLED].source_id.tolist()}")
    rows = zip(used.source_id, used.licence, used.source, strict=True)
    return [{"id": id_, "licence": licence, "source": source} for id_, licence, source in rows] + CITED_SOURCES


def hardware(folder: Path) -> Mapping[str, object]:
    """The row of hardware.csv."""
    table = pd.read_csv(folder / "hardware.csv").set_index("hardware")
    return {str(key): value for key, value in table.loc[DEVICE].items()}


def notes(folder: Path) -> list[str]:
    """What a reader of the file must know; the check against an independent source included."""
    axes, times = matmul_grid(folder, "bf16")
    best = float((2 * np.prod(np.meshgrid(*axes, indexing="ij"), axis=0) / times).max()) / 1e12
    achieved = float(str(hardware(folder)["best_achieved_bf16_tflops"]))
    return [
        "bytes: the whole value over all ranks of a group; for all_to_all ranks x nccl-tests' size, else its size",
        f"matmuls: the best of the bfloat16 table is {best:.1f} TFLOP/s, {best / achieved:.3f} x the {achieved} TFLOP/s"
        " that a search over shapes reached elsewhere (stas00/ml-engineering, mamf-finder; a check, not bundled)",
        "matmuls: S26 states sm_90 and no SKU; taken as the SXM part, as the rate above shows",
        "collectives: groups across nodes come from different clusters (S15: EFA; S18-S25: RDMA, 400 Gb/s per GPU"
        " inferred), one GPU per network port",
        "collectives: pairs in a node come from S01 alone, which is slower than nccl-tests where both measured (large"
        " all_reduce, reduce_scatter); their relative_error includes that",
    ]


def build(folder: Path) -> JsonObject:
    """The content of profiles/h100-sxm.json."""
    launch_s = digits(float(matmul_grid(folder, "bf16")[1].min()), 3)
    content: JsonObject = {
        "schema_version": 1,
        "name": "h100-sxm",
        "device": "NVIDIA H100 SXM 80GB",
        "device_type": "cuda",
        "gpus_per_node": 8,
        "notes": notes(folder),
        "sources": sources(folder),
        "memory": {
            "memory_bytes": 81559 * 1024**2,
            "reserved_bytes": 2 * 1024**3,
            "sources": ["nvidia-smi"],
            "inferred": "reserved_bytes: assumed, for CUDA context, NCCL buffers and allocator slack",
        },
        "bandwidth": {
            "hbm_bytes_per_s": float(str(hardware(folder)["hbm_achieved_TBps"])) * 1e12,
            "relative_error": 0.1,
            "sources": [BANDWIDTH_SOURCE],
            "inferred": "relative_error: BabelStream's other kernels (triad 2.97, dot 3.18 TB/s) against copy, 2.90",
        },
        "launch": {
            "launch_s": launch_s,
            "relative_error": 0.5,
            "sources": [MATMUL_SOURCE],
            "inferred": "no measurement of launches: the shortest matmul of the table; relative_error is assumed",
        },
        "matmuls": matmul_tables(folder, launch_s),
        "attention_rates": attention_rates(folder),
        "group_extrapolation": {"in_node_relative_error": 0.0, "across_nodes_relative_error": 0.0},
        "collectives": collective_tables(read_collectives(folder)),
    }
    residual = group_extrapolation(HardwareProfile.from_dict(content, "candidate"))
    return content | {"group_extrapolation": encode(residual)}


def render(content: JsonObject) -> str:
    """JSON with one line per scalar and per array of numbers or ids."""

    def lines(value: object, indent: str) -> str:
        inner = indent + "  "
        if isinstance(value, dict) and value:
            members = (f"{inner}{json.dumps(key)}: {lines(member, inner)}" for key, member in value.items())
            return "{\n" + ",\n".join(members) + f"\n{indent}}}"
        if isinstance(value, list) and any(
            isinstance(element, dict | list) or len(str(element)) > 40 for element in value
        ):
            return "[\n" + ",\n".join(inner + lines(element, inner) for element in value) + f"\n{indent}]"
        return json.dumps(value)

    return lines(content, "") + "\n"


def report(folder: Path, content: JsonObject) -> None:
    """Print how far sources disagree, what smoothing changed, and how well left-out groups are predicted."""
    rows = read_collectives(folder)
    print("sources per group: median and largest |ln(source / stored)| below and from 16 MiB")
    profile = HardwareProfile.from_dict(content, "candidate")
    for table in profile.collectives:
        same = (rows.kind == table.kind) & (rows.ranks == table.ranks) & (rows.ranks_per_node == table.ranks_per_node)
        for source, group in rows[same].groupby("source_id"):
            stored = np.array([table.time(n).seconds for n in group.n])
            signed = np.log(group.time_s.to_numpy() / stored)
            small, large = (signed[mask] for mask in (group.n < LARGE_BYTES, group.n >= LARGE_BYTES))
            shown = "  ".join(
                f"{np.median(part):+7.1%} {np.abs(part).max():6.1%}" if len(part) else " " * 15
                for part in (small, large)
            )
            print(f"  {table.kind:15}{table.ranks:3} x {table.ranks_per_node}  {source}  {shown}")
    for kind in Collective:
        print(f"  {LONE_SOURCE} against the others, large {kind}: {lone_source_error(rows, kind):.1%}")
    print("leave one group out: ln(predicted / measured), RMS, median, below and from 256 MiB")
    for table, error in leave_one_group_out(profile):
        large = np.array(table.bytes) >= 256 * 1024**2
        small_rms = f"{rms(error[~large]):6.2f}" if (~large).any() else "      "
        print(
            f"  {table.kind:15}{table.ranks:3} x {table.ranks_per_node}  rms {rms(error):5.2f}  median"
            f" {np.median(error):+5.2f}  small {small_rms}  large {rms(error[large]):5.2f}"
        )
    for matmul in profile.matmuls:
        print(f"  matmul {matmul.dtype}: {matmul.relative_error:.3f}, beyond {matmul.extrapolation_relative_error:.3f}")
    print(profile.group_extrapolation, *profile.notes, sep="\n")


def main() -> None:
    """Parse, build, check by loading, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with collectives.csv, matmul.csv, hardware.csv, sources.csv")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--report", action="store_true", help="print disagreements and residuals")
    arguments = parser.parse_args()
    content = build(arguments.data)
    HardwareProfile.from_dict(content, str(arguments.output))
    arguments.output.write_text(render(content), encoding="utf-8")
    if arguments.report:
        report(arguments.data, content)


if __name__ == "__main__":
    main()
