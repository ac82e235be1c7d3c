"""The code of published runs with pipelines and experts, from a table with a row per source, model and global batch.

A table has the columns of parallel_code.csv beside this file; "*" stands for all models or batches, and "stated" for
what a row of the runs must say itself. Its last column says where each row was read.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

CODE = Path(__file__).with_name("parallel_code.csv")
#: the words of columns that have no others
WORDS = {
    "attention": ("flash", "unfused"),
    "overlap": ("overlapped", "exposed"),
    "reduce": ("as made", "fp32"),
    "sends": ("whole", "slices", "gathered slices"),
    "sequence_parallel": ("yes", "no", "stated"),
    "split": ("even", "last takes the rest", "even with ends"),
}
#: what accuracy_parts.parallel_kernels has beside a fused layer
FURTHER = ("attention dropout", "hidden dropout", "alibi", "fused rotation", "rotation", "query and key norms",
           "clamped gates", "expert biases")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What is known of the code of a source's runs."""

    has_flash_attention: bool
    overlaps: bool
    reduce_bytes: int
    #: bytes per second between a node and the others, both ways each; 0: as the profile's machine
    node_bytes_per_s: float
    #: chunks of layers on a rank where the table does not say: a number, or "stated", where no number is known
    vpp: str
    #: what a tensor-parallel rank sends between stages: all, its slice, or its slice that the receivers gather
    sends: str
    sequence_parallel: str
    #: how layers are divided among stages: evenly, as many as on the fullest but for the last, or evenly with the
    #: embedding and the head as layers
    split: str
    window: int
    #: rows of the embedding are padded to multiples of so many on each tensor-parallel rank
    vocab_multiple: int
    recompute: str
    zero: str
    #: kernels beside those of a fused layer
    further: tuple[str, ...] = ()


def read_code(path: Path = CODE) -> list[tuple[str, str, str, Code]]:
    """(source, models, global batches, what is known) of each row of a table of code; "*" stands for all. Raises
    ValueError for an unknown word or a missing source."""
    found = []
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            for column, known in WORDS.items():
                if row.get(column) not in known:
                    raise ValueError(f"{path}: row {number}: {column} {row.get(column)!r}: expected {', '.join(known)}")
            further = tuple(filter(None, (row.get("further") or "").split("; ")))
            for word in further:
                if word not in FURTHER:
                    raise ValueError(f"{path}: row {number}: further {word!r}: expected {', '.join(FURTHER)}")
            if not row.get("source"):
                raise ValueError(f"{path}: row {number}: no source, where this was read")
            code = Code(
                has_flash_attention=row["attention"] == "flash",
                overlaps=row["overlap"] == "overlapped",
                reduce_bytes=4 if row["reduce"] == "fp32" else 2,
                node_bytes_per_s=float(row["node_bytes_per_s"]),
                vpp=row["vpp"],
                sends=row["sends"],
                sequence_parallel=row["sequence_parallel"],
                split=row["split"],
                window=int(row["window"]),
                vocab_multiple=int(row["vocab_multiple"]),
                recompute=row["recompute"],
                zero=row["zero"],
                further=further,
            )
            found.append((row["source_id"], row["models"], row["global_batches"], code))
    return found
