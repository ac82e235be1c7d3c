"""Starts, before any test computes anything, the server that ranks are forked from (forks.py)."""

import os

# The tests are for the CPU, also where there is a GPU, which tpplan would use. One that needs the GPU is run alone,
# with CUDA_VISIBLE_DEVICES set.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import hypothesis
import torch
from forks import fork_server

torch.set_num_threads(1)  # tests run on every core at once
hypothesis.settings.register_profile("untimed", deadline=None)  # a loaded machine is no error
hypothesis.settings.load_profile("untimed")
fork_server()
