"""Chance outside torch: the generators of NumPy and of Python, from which a model's forward may draw, too."""

import contextlib
import pickle
import random
from collections.abc import Iterator, Mapping

import numpy as np

#: of one run on meta tensors; what is drawn there is no more than an example
_SEED = 0


def states_outside_torch() -> Mapping[str, bytes]:
    """The state of each generator by its name."""
    return {"NumPy": pickle.dumps(np.random.get_state()), "Python": pickle.dumps(random.getstate())}


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Each time, what is drawn inside is the same; the generators are left as they were found."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    np.random.seed(_SEED)
    random.seed(_SEED)
    try:
        yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
