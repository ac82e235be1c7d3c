"""The releases of torch that tpplan is tested with, as data that scripts read without importing torch.

`scripts/dev/torch_versions.py` runs the suite, the demo and the example plans on each of TESTED.
"""

import re

OLDEST = "2.11.0"
NEWEST = "2.14.1"
TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")


def is_too_old(version: str) -> bool:
    """True for a release before OLDEST; a nightly build counts as the release that it precedes."""
    return _release(version) < _release(OLDEST)


def complaint(version: str) -> str:
    """The warning for a user of this version of torch; "" for one from OLDEST to NEWEST."""
    if is_too_old(version):
        return f"torch {version} is too old: tpplan needs {OLDEST} or newer, and is tested up to {NEWEST}"
    if _release(version) > _release(NEWEST):
        return (
            f"torch {version} is newer than any that tpplan is tested with ({OLDEST} to {NEWEST}): "
            "`tpplan doctor` says what works with it"
        )
    return ""


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 14, 1) for "2.14.1+cu130"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
