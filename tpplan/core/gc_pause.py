"""Runs Python's cyclic garbage collector less often while many long-lived objects are built.

Reference counting still frees everything outside cycles at once. By default the collector scans young containers after
every 700 new ones, and sometimes all containers, which takes a fifth of the time of importing torch and solving.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: new containers between two collections: more than a solve makes for a model of 61 layers with experts on 2,048 GPUs,
#: which two collections would take a twentieth of the time of
RARELY = 30_000_000

_is_frozen_by_others = False


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Context manager or decorator: within it, Python's garbage collector starts after RARELY new containers.

    Objects that are left at its end count as long-lived: the next young collection does not go through them, the next
    full one does. The threshold holds for all threads of the process. Does nothing where collections are already rarer,
    or off.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < RARELY:
        yield
        return
    gc.set_threshold(RARELY, *before[1:])
    try:
        yield
    finally:
        _count_as_old()
        gc.set_threshold(*before)


@contextmanager
def imported_for_good() -> Iterator[None]:
    """Context manager for imports: within it Python's garbage collector is off, and objects left at its end count as
    long-lived.

    Otherwise the collector would go through the half a million objects of torch's modules twice as the context ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _count_as_old()
        if was_enabled:
            gc.enable()


def _count_as_old() -> None:
    """Makes all objects long-lived ones, without going through them, unless others have frozen objects, which are to
    stay so."""
    global _is_frozen_by_others
    _is_frozen_by_others = _is_frozen_by_others or gc.get_freeze_count() > 0  # which goes through all that are frozen
    if not _is_frozen_by_others:
        gc.freeze()
        gc.unfreeze()


def uncollected_at_exit() -> None:
    """Spares the process its last garbage collection, which after a solve takes a second to go through all objects that
    are left, and frees memory that the system takes back anyway."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
