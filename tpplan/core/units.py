"""Units: bytes, seconds and FLOP inside the program; converted only where they are printed."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3

#: bytes per element, by the name torch gives a dtype
DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

#: dtypes that can carry gradients
FLOATING_DTYPES = frozenset(name for name in DTYPE_BYTES if name.startswith(("float", "bfloat", "complex")))


def format_bytes(num_bytes: float) -> str:
    """Bytes as text in binary units with two or three significant digits: 80.0 GiB, 1.50 MiB."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.{1 if abs(num_bytes) / size >= 10 else 2}f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds as text in decimal units with three significant digits: 1.23 s, 45.6 ms, 7.89 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}" if abs(seconds) / size < 1000 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def format_count(count: float) -> str:
    """A count in decimal units with three significant digits: 8.03 B, 12.7 M, 812."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count / size < 1000 else f"{count / size:.0f} {unit}"
    return f"{count:.3g}" if count < 100 else f"{count:.0f}"
