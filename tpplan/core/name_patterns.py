"""Name patterns in plans: `layers.*.mlp` stands for the modules of a repeated block that are planned alike."""

import re

#: the root module in plans and messages, where an empty name would be unclear
ROOT = "<root>"
#: largest index of a block; a larger range is a mistake and would not fit in memory
MAX_BLOCK_INDEX = 9_999


def module_name(written: str) -> str:
    """A module's name in torch, "" for the root, of its name as a plan writes it, where the root is ROOT."""
    return "" if written == ROOT else written


def is_pattern(key: str) -> bool:
    """True for a name with a part that is `*`."""
    return "*" in key.split(".")


def block_of(key: str) -> str:
    """The block that a name with a `*` belongs to: `layers.*.mlp` -> `layers.*`; "" for a name without `*`."""
    parts = key.split(".")
    return ".".join(parts[: parts.index("*") + 1]) if "*" in parts else ""


def substitute(key: str, index: int | None) -> str:
    """The key with `index` in place of its first `*`; the key unchanged where it has no `*` or index is None."""
    if index is None:
        return key
    parts = key.split(".")
    if "*" in parts:
        parts[parts.index("*")] = str(index)
    return ".".join(parts)


def parse_ranges(text: str) -> tuple[int, ...]:
    """`0-2,5` -> (0, 1, 2, 5). Raises ValueError unless indices ascend and are at most MAX_BLOCK_INDEX."""
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
    """The text of ascending indices; the inverse of parse_ranges: (0, 1, 2, 5) -> `0-2,5`."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
