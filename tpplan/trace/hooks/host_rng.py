"""Chance outside torch: the generators of NumPy and of Python, from which a model's forward may draw, too."""

import contextlib
import pickle
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: of one run on meta tensors; what is drawn there is no more than an example
_SEED = 0


def states_outside_torch() -> Mapping[str, bytes]:
    """The state of each generator by its name."""
    return {"NumPy": pickle.dumps(np.random.get_state()), "Python": pickle.dumps(random.getstate())}


def states_of_generators() -> tuple[Any, ...]:
    """For `restored`."""
    return np.random.get_state(), random.getstate()


@contextlib.contextmanager
def restored(states: tuple[Any, ...]) -> Iterator[None]:
    """What is drawn inside is what was drawn from these states on; the generators are left as they were found."""
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
    """Each time, what is drawn inside is the same; the generators are left as they were found."""
    now = states_of_generators()
    np.random.seed(_SEED)
    random.seed(_SEED)
    try:
        yield
    finally:
        _set_states(now)
