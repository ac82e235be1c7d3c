"""Styles: how a module is laid out in one word, as the table of a plan says it and a pin asks for it."""

from enum import StrEnum


class Style(StrEnum):
    """How a module is laid out, as the table of a plan says it."""

    COLUMN = "column parallel"
    ROW = "row parallel"
    MEGATRON = "megatron"
    VOCABULARY = "vocabulary parallel"
    REPLICATED = "replicated"
    SLICES = "on slices"
    SEQUENCE = "sequence parallel"
    SPLIT = "split dim"


#: other words for the same
ALIASES = {
    "columns": Style.COLUMN,
    "column": Style.COLUMN,
    "colwise": Style.COLUMN,
    "rows": Style.ROW,
    "row": Style.ROW,
    "rowwise": Style.ROW,
    "vocabulary": Style.VOCABULARY,
    "vocab": Style.VOCABULARY,
    "replicate": Style.REPLICATED,
    "slices": Style.SLICES,
    "sequence": Style.SEQUENCE,
}
#: what a refusal and the help name
KNOWN_STYLES = "megatron, columns, rows, vocabulary, replicated, slices, sequence, split dim N"
