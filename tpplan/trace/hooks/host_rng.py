"""Random states outside torch: the global generators of NumPy and Python, from which a model's forward may draw."""

import contextlib
import pickle
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: the seed for a run on meta tensors, whose draws are only examples
_SEED = 0


def states_outside_torch() -> Mapping[str, bytes]:
    """The pickled state of each generator, by the generator's name."""
    return {"NumPy": pickle.dumps(np.random.get_state()), "Python": pickle.dumps(random.getstate())}


def states_of_generators() -> tuple[Any, ...]:
    """The states of all generators, for `restored`."""
    return np.random.get_state(), random.getstate()


@contextlib.contextmanager
def restored(states: tuple[Any, ...]) -> Iterator[None]:
    """Draws inside start from these states; at the end the generators are as they were before."""
    now = states_of_generators()
    _set_states(states)
    try:
        yield
    finally:
        _set_states(now)


def _set_states(states: tuple[Any, ...]) -> None:
    of_numpy, of_python = states
    np.random.set_state(of_numpy)
    random.setstate(of_python)


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Draws inside are the same each time; at the end the generators are as they were before."""
    now = states_of_generators()
    np.random.seed(_SEED)
    random.seed(_SEED)
    try:
        yield
    finally:
        _set_states(now)
