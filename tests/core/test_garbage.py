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


def test_garbage_is_left_to_the_next_full_collection() -> None:
    """In a process of its own, as objects of this one may be frozen. A young collection after it finds none of the
    garbage made within, a full one all of it."""
    code = """
import gc
from tpplan.core.gc_pause import rarely_collected

class Cycle:
    def __init__(self):
        self.own = self

with rarely_collected():
    for _ in range(5000):
        Cycle()
assert gc.get_freeze_count() == 0
assert gc.collect(0) < 5000
assert gc.collect() >= 5000
"""
    subprocess.run([sys.executable, "-c", code], check=True)


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

import pytest
from tpplan.core.gc_pause import imported_for_good

with imported_for_good():
    made = [[number] for number in range(1000)]
    assert not gc.isenabled()
young = {id(own) for own in gc.get_objects(generation=0)}
assert gc.isenabled() and gc.get_freeze_count() == 0 and not any(id(own) in young for own in made)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("is_spared", [True, False])
def test_a_process_may_end_without_going_through_what_is_left(is_spared: bool) -> None:
    """A cycle that nothing refers to any more is found by the collection as the interpreter ends, or by none."""
    code = """
import gc, sys
from tpplan.core.gc_pause import uncollected_at_exit

class Cycle:
    def __init__(self):
        self.own = self

gc.set_threshold(0)
for _ in range(1000):
    Cycle()
def show(phase, info):
    if phase == "stop" and info["collected"] >= 1000:
        print("went through them")
gc.callbacks.append(show)
if len(sys.argv) > 1:
    uncollected_at_exit()
"""
    arguments = ["spared"] if is_spared else []
    ended = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    assert ("went through them" in ended.stdout) != is_spared
