"""Python's search for garbage in cycles, made rarer while much is built that stays.

What is let go goes at once, as ever, unless it is part of a cycle. For cycles Python goes through the young containers
after 700 new ones, and from time to time through all: a fifth of what importing torch and solving take.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: new containers between two searches: some 100 MB
RARELY = 1_000_000


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Within, or in a function that this decorates, a search begins after RARELY new containers; then as before.

    The process's other threads wait as long for theirs. Where searches are rarer already, or off, nothing changes.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < RARELY:
        yield
        return
    gc.set_threshold(RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
