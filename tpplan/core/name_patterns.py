"""Names of modules and parameters as a plan writes them: `layers.*.mlp` for what agrees over a repeated block."""

import re
from collections.abc import Iterator

#: how the root module is written where an empty key would be unclear
ROOT = "<root>"


#: indices a block may have; a range beyond it is a mistake, and would not fit in memory
MAX_BLOCK_INDEX = 9_999


def is_pattern(key: str) -> bool:
    """True for a name with a part that is `*`."""
    return "*" in key.split(".")


def block_of(key: str) -> str:
    """The block that a name with a `*` belongs to: `layers.*.mlp` -> `layers.*`; "" for a name without one."""
    parts = key.split(".")
    return ".".join(parts[: parts.index("*") + 1]) if "*" in parts else ""


def holders(name: str) -> Iterator[str]:
    """The modules around one, from the inside out; the root, "", is the last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def substitute(key: str, index: int | None) -> str:
    """The name with the index for its first `*`; itself where there is none."""
    if index is None:
        return key
    parts = key.split(".")
    if "*" in parts:
        parts[parts.index("*")] = str(index)
    return ".".join(parts)


def parse_ranges(text: str) -> tuple[int, ...]:
    """`0-2,5` -> (0, 1, 2, 5). Raises ValueError for anything that is not ascending or beyond MAX_BLOCK_INDEX."""
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
        if match is None:
            raise ValueError(f"expected ranges up to {MAX_BLOCK_INDEX} such as '0-31' or '0-2,5', got {text!r:.80}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (indices and first <= indices[-1]):
            raise ValueError(f"expected ascending ranges, got {text!r:.80}")
        indices += range(first, last + 1)
    return tuple(indices)


def format_ranges(indices: tuple[int, ...]) -> str:
    """The inverse of parse_ranges."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
