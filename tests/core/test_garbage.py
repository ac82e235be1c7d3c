"""Searches for garbage are rarer within, and as they were afterwards."""

import gc
import subprocess
import sys

import pytest

from tpplan.core.gc_pause import RARELY, rarely_collected


def test_searches_are_rare_within_and_as_before_after_an_error() -> None:
    before = gc.get_threshold()

    @rarely_collected()
    def fail() -> None:
        assert gc.get_threshold() == (RARELY, *before[1:])
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_threshold() == before


@pytest.mark.parametrize("own", [0, 2 * RARELY])
def test_a_process_that_searches_more_rarely_is_left_alone(own: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(own, *before[1:])
    try:
        with rarely_collected():
            assert gc.get_threshold()[0] == own
    finally:
        gc.set_threshold(*before)


def test_what_an_import_makes_counts_as_old_and_the_collector_goes_on_after() -> None:
    """In a process of its own, as objects of this one may be frozen."""
    code = """
import gc
import subprocess
import sys
from tpplan.core.gc_pause import imported_for_good

with imported_for_good():
    made = [[number] for number in range(1000)]
    assert not gc.isenabled()
young = {id(own) for own in gc.get_objects(generation=0)}
assert gc.isenabled() and gc.get_freeze_count() == 0 and not any(id(own) in young for own in made)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
