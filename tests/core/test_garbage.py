"""Searches for garbage are rarer within, and as they were afterwards."""

import gc

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
