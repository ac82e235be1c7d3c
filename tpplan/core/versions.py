"""Versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str, otherwise: str) -> str:
    """The version of an installed package; `otherwise` where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise


def tpplan_version() -> str:
    """The version of the installed tpplan, "0+checkout" where it is not installed."""
    return version_of("tpplan", "0+checkout")
