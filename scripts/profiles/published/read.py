"""The data folder's tables, checked on the way in: collectives, matmul grids, hardware, sources."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd

from published.machines import CITED_SOURCES, XLA_COLLECTIVES, CollectiveRows
from tpplan.machine.tables import Collective, Source

Array = np.ndarray

NOT_BUNDLED = "not checked: cite, do not bundle"
#: smaller messages cost what this one costs
SMALLEST_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The tables as they are in the folder."""

    collectives: pd.DataFrame
    matmuls: pd.DataFrame
    hardware: pd.DataFrame
    sources: pd.DataFrame

    @classmethod
    def read(cls, folder: Path) -> "Data":
        """The four files of a folder."""
        return cls(
            collectives=pd.read_csv(folder / "collectives.csv"),
            matmuls=pd.read_csv(folder / "matmul.csv"),
            hardware=pd.read_csv(folder / "hardware.csv").set_index("hardware"),
            sources=pd.read_csv(folder / "sources.csv"),
        )

    def figure(self, hardware: str, column: str) -> float:
        """A number of hardware.csv. Raises ValueError where it is not filled."""
        value = float(cast(float, self.hardware.loc[hardware, column]))
        if not np.isfinite(value):
            raise ValueError(f"hardware.csv: {hardware}: no {column}")
        return value


def collective_rows(data: Data, which: CollectiveRows) -> pd.DataFrame:
    """Rows with columns kind, ranks, ranks_per_node, n (bytes of the whole value), time_s, busbw_GBps, source_id.

    XLA's table at its smallest size is left out: it is its first, cold, shot, up to 7 x its second. For all_to_all the
    file's size is nccl-tests' per-rank buffer n/p, here it is n; for the others it is n already. That XLA's table
    counts alike is visible where it meets nccl-tests: all_to_all of 2 GiB on 4 H100 takes 4.58 against 4.60 ms.
    Raises ValueError where time, size and bus bandwidth of a row contradict nccl-tests' definitions.
    """
    rows = data.collectives
    rows = rows[rows.hardware.isin(which.hardware) & rows.source_id.isin(which.sources)]
    rows = rows[rows.interconnect.isin(which.interconnects)]
    rows = rows[rows.collective.isin([str(kind) for kind in Collective]) & (rows.size_bytes >= SMALLEST_BYTES)]
    rows = rows[(rows.source_id != XLA_COLLECTIVES) | (rows.size_bytes > SMALLEST_BYTES)]
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
            "busbw_GBps": rows.busbw_GBps,
            "source_id": rows.source_id,
        }
    )


def unnamed_interconnects(data: Data, which: Sequence[CollectiveRows]) -> set[str]:
    """Interconnects that the sources of a machine measured on its hardware and that no entry of it names."""
    rows = data.collectives
    own = rows[
        rows.hardware.isin([name for part in which for name in part.hardware])
        & rows.source_id.isin([id_ for part in which for id_ in part.sources])
    ]
    return set(own.interconnect) - {name for part in which for name in part.interconnects}


def matmul_grid(data: Data, hardware: str, source: str, dtype: str) -> tuple[list[list[int]], Array]:
    """Axes (batch, m, n, k) and times in seconds of a full grid."""
    rows = data.matmuls
    rows = rows[(rows.hardware == hardware) & (rows.dtype == dtype) & (rows.source_id == source)]
    rows = rows.sort_values(["batch", "M", "N", "K"])
    axes = [sorted(int(size) for size in rows[name].unique()) for name in ("batch", "M", "N", "K")]
    flop = 2.0 * rows.batch * rows.M * rows.N * rows.K
    times = (flop / (rows.tflops * 1e12)).to_numpy()
    return axes, times.reshape([len(axis) for axis in axes])


def matmul_rows(data: Data, hardware: str, dtype: str) -> dict[tuple[int, int, int], float]:
    """Seconds by (m, n, k) of rows that are no grid."""
    rows = data.matmuls
    rows = rows[(rows.hardware == hardware) & (rows.dtype == dtype) & (rows.batch == 1)]
    return {
        (int(row.M), int(row.N), int(row.K)): 2.0 * row.M * row.N * row.K / (row.tflops * 1e12)
        for row in rows.itertuples()
    }


def described_sources(table: pd.DataFrame, used: Iterable[str], own: Sequence[Source]) -> list[Source]:
    """What the ids stand for: the data's sources first, then those that machines.py cites, then the machine's own.

    Raises ValueError for a source of the data that must not be bundled, and for an id that nobody knows.
    """
    ids = set(used)
    rows = table[table.source_id.isin(ids)]
    if (rows.licence == NOT_BUNDLED).any():
        raise ValueError(f"not to be bundled: {rows[rows.licence == NOT_BUNDLED].source_id.tolist()}")
    found = [
        Source(id=str(id_), licence=str(licence), source=str(source))
        for id_, licence, source in zip(rows.source_id, rows.licence, rows.source, strict=True)
    ]
    found += [source for source in (*CITED_SOURCES, *own) if source.id in ids]
    unknown = ids - {source.id for source in found}
    if unknown:
        raise ValueError(f"unknown sources: {', '.join(sorted(unknown))}")
    return found
