"""What lets tests fork ranks (ranks.py) from a process that has used torch."""

import os

# A fork inherits thread pools without their threads: one CPU thread starts none, and without a GPU in sight autograd
# starts none either. A test that needs the GPU is run alone, with CUDA_VISIBLE_DEVICES set.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("untimed", deadline=None)  # a loaded machine is no error
hypothesis.settings.load_profile("untimed")
