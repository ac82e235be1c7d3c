"""Values of options on the command line, as types for argparse, which raise ArgumentTypeError."""

import argparse
import re

from tpplan.core.errors import UsageError
from tpplan.core.mesh import MAX_COUNT, MAX_GPUS
from tpplan.core.strict_json import MOST
from tpplan.core.units import GIB, KIB, MIB
from tpplan.plan.optimizers import optimizer_named

#: digits of a number that are parsed; a longer one is too large anyway
_MOST_DIGITS = 100
_SIZE_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def imbalance(text: str) -> float:
    """A number from 1 to 1000."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 1000:
        raise argparse.ArgumentTypeError(f"expected a number from 1, the even routing, to 1000, got {text!r:.80}")
    return number


def count(text: str) -> int:
    """A whole number from 1 to MAX_COUNT."""
    if not text.isdecimal() or (number := int(text[:_MOST_DIGITS])) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r:.80}")
    if number > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_COUNT}, got {text!r:.80}")
    return number


def gpu_count(text: str) -> int:
    """A whole number from 1 to MAX_GPUS."""
    if count(text) > MAX_GPUS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_GPUS} GPUs, got {text!r:.80}")
    return count(text)


def count_or_auto(text: str) -> int | str:
    """A whole number from 1, or auto."""
    return text if text == "auto" else count(text)


def optimizer(text: str) -> str:
    """The name of a known optimizer. Raises argparse.ArgumentTypeError for another."""
    try:
        optimizer_named(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def seconds(text: str) -> float:
    """A number of seconds above 0."""
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not 0 < float(text) <= MOST:
        raise argparse.ArgumentTypeError(f"expected seconds greater than 0, got {text!r:.80}")
    return float(text)


def num_bytes(text: str) -> float:
    """Bytes of a size with its unit, such as 70GiB, 80 GB or 512MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    units = {unit.lower(): size for unit, size in _SIZE_UNITS.items()}
    if match is None or match[2].lower() not in units or not 0 < float(match[1]) <= MOST:
        shown = ", ".join(_SIZE_UNITS)
        raise argparse.ArgumentTypeError(f"expected a size with its unit ({shown}) such as 70GiB, got {text!r:.80}")
    return float(match[1]) * units[match[2].lower()]
