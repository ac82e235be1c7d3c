"""Starts, before any test computes anything, the server that ranks are forked from (forks.py)."""

import gc
import os

# The tests are for the CPU, also where there is a GPU, which tpplan would use. One that needs the GPU is run alone,
# with CUDA_VISIBLE_DEVICES set.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import hypothesis
import torch
from forks import fork_server

#: new containers between two of Python's searches for garbage, where 700 are usual: a tenth of what tests took
GC_THRESHOLD = 20_000


def one_thread() -> None:
    """Tests run on every core at once: each computes with one thread.

    A fork says so again before it has threads. torch makes its thread pool anew in a fork, in whichever threads use it
    first; where two do at once, one may find none ("Invalid thread pool!"), which ends a thread of autograd's, and with
    it the process. So the first thread makes it, alone.
    """
    torch.set_num_threads(1)


one_thread()
os.register_at_fork(after_in_child=one_thread)
hypothesis.settings.register_profile("untimed", deadline=None)  # a loaded machine is no error
hypothesis.settings.load_profile("untimed")
gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])  # before the server is forked: its ranks have it too
fork_server()


def pytest_collection_finish() -> None:
    """Takes what torch and the test modules consist of, a million objects, out of Python's searches for garbage."""
    gc.collect()
    gc.freeze()
