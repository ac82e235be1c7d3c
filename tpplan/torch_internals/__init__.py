"""Every place where tpplan leans on what torch does not promise: private names, patched functions, exact behaviour.

In: torch. Out: functions, each named for what tpplan wants of torch, and for each a probe that says by name whether the
torch at hand does it (`tpplan doctor` prints what fails). No other module of tpplan uses a private name of torch, as
tests/test_torch_internals.py checks.

Imports: core.

Loading this room refuses a torch older than OLDEST and warns, once, of one newer than NEWEST.

| file          | what of torch                                                                       |
|---------------|-------------------------------------------------------------------------------------|
| versions      | releases that were tested; older ones are refused, newer ones warned of             |
| tensors       | storages, versions of writes, hooks on gradients, DTensor's parts                   |
| modules       | a module's own tables, parameters swapped for the time of a call                    |
| autograd      | the backward that runs, its end, functions with a backward of their own             |
| checkpoints   | both kinds of torch.utils.checkpoint, by the functions that they call               |
| recording     | torch.fx's tracer of dispatched ops, modes, torch.cond                              |
| operators     | schemas, kernels for meta tensors, the ops whose names tpplan knows                 |
| fakes         | fake tensors, sizes that data decides                                               |
| groups        | fake process groups, meshes without one, functional collectives                     |
| fsdp          | FSDP2's parameter groups, and the memory tracker that knows them                    |
| checkpoint_files | what distributed checkpoints name in their metadata                              |
| devices       | a GPU kept busy for a while                                                         |
| pytree        | torch's trees of containers                                                         |
| probes        | all probes, run                                                                     |
"""

import warnings

import torch

from tpplan.core.errors import TorchVersionError
from tpplan.torch_internals.versions import NEWEST, OLDEST, complaint, is_too_old

__all__ = ["NEWEST", "OLDEST"]

if problem := complaint(torch.__version__):
    if is_too_old(torch.__version__):
        raise TorchVersionError(problem)
    warnings.warn(problem, stacklevel=2)
