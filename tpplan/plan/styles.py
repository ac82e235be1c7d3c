"""Styles: one phrase for how a module is sharded, shown in a plan's table and accepted by pins."""

from enum import StrEnum


class Style(StrEnum):
    """How a module is sharded, as a plan's table says it."""

    COLUMN = "column parallel"
    ROW = "row parallel"
    MEGATRON = "megatron"
    VOCABULARY = "vocabulary parallel"
    REPLICATED = "replicated"
    SLICES = "on slices"
    SEQUENCE = "sequence parallel"
    SPLIT = "split dim"


#: other spellings that pins accept
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
#: styles as error messages and the help list them
KNOWN_STYLES = "megatron, columns, rows, vocabulary, replicated, slices, sequence, split dim N"
