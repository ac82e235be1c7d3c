"""Every use of what torch does not promise: private names, patched functions, exact behaviour.

In: torch. Out: functions, each named for what tpplan needs of torch, and for each a probe: a check of whether the
installed torch still does it (`tpplan doctor` prints the probes that fail). No other module of tpplan uses a private
name of torch, as tests/torch_internals/test_torch_internals.py checks.

Imports: core.

Importing this room raises TorchVersionError for a torch older than OLDEST, and warns once for one newer than NEWEST.

| file             | part of torch                                                                    |
|------------------|----------------------------------------------------------------------------------|
| versions         | tested releases; older ones are refused, newer ones warned of                    |
| tensors          | storages, counts of writes, hooks on gradients, parts of a DTensor, modes off    |
| modules          | a module's own tables, parameters swapped during a call, FSDP2's groups of them  |
| autograd         | the running backward, its end, torch.autograd.Function                           |
| checkpoints      | both kinds of torch.utils.checkpoint, by the functions that they call            |
| recording        | torch.fx's tracer of dispatched ops, modes                                       |
| operators        | schemas, meta kernels, ops known by name, what functions hide, a busy GPU         |
| fakes            | fake tensors, sizes that data decides, torch.cond and flex_attention uncompiled  |
| groups           | fake process groups, meshes without a process group                              |
| parallel         | torch's memory tracker for FSDP2, pipeline schedules                             |
| checkpoint_files | classes and functions that the metadata of distributed checkpoints names         |
| pytree           | torch's trees of containers                                                      |
| probes           | runs all probes                                                                  |
"""

import warnings

import torch

from tpplan.core.errors import TorchVersionError
from tpplan.torch_internals.versions import complaint, is_too_old

if problem := complaint(torch.__version__):
    if is_too_old(torch.__version__):
        raise TorchVersionError(problem)
    warnings.warn(problem, stacklevel=2)
