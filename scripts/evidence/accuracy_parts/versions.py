"""The code of published runs, from a table with a row per source: framework, versions, and what they do.

A table of versions has the columns of versions.csv beside this file; its last column says where each row was read. A
word that is none of those known here is refused, with its row and column.
"""

import csv
from collections.abc import Mapping
from pathlib import Path

from accuracy_parts.models import LLAMAS, Software
from tpplan.plan.optimizers import OPTIMIZERS

VERSIONS = Path(__file__).with_name("versions.csv")
#: the words of each column that says what code does; the other columns are for the reader
WORDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("flash1", "flash2"),
    "llama": tuple(LLAMAS),
    "logits": ("sharded", "gathered"),
    "logits_kept": ("no", "yes"),
    "gradients": ("each micro-batch", "whole"),
    "reduce": ("as made", "fp32"),
    "fsdp_of_one": ("no", "yes"),
    "loss": ("fp32", "as made"),
    "optimizer": tuple(OPTIMIZERS),
}
COLUMNS = ("source_id", "framework", "version", "torch", *WORDS, "source")


def read_versions(path: Path = VERSIONS) -> Mapping[str, Software]:
    """The software of each source, by its id. Raises ValueError for a missing column or an unknown word, for an id that
    stands twice, and for a row that does not say where it was read."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, Software] = {}
    for number, row in enumerate(rows, start=2):
        name = row.get("source_id") or ""
        for column in COLUMNS:
            word = row.get(column)
            if not word:
                raise ValueError(f"{path}: row {number}: no {column}")
            if column in WORDS and word not in WORDS[column]:
                raise ValueError(f"{path}: row {number}: {column} {word!r}: expected {', '.join(WORDS[column])}")
        if name in found:
            raise ValueError(f"{path}: row {number}: source_id {name!r} stands twice")
        found[name] = Software(
            llama=LLAMAS[row["llama"]],
            has_first_flash_attention=row["attention"] == "flash1",
            gathers_logits=row["logits"] == "gathered",
            keeps_logits=row["logits_kept"] == "yes",
            whole_gradients=row["gradients"] == "whole",
            reduces_in_float32=row["reduce"] == "fp32",
            wraps_one_rank=row["fsdp_of_one"] == "yes",
            loss_as_made=row["loss"] == "as made",
            optimizer=row["optimizer"],
        )
    return found
