"""Lets FSDP's units gather ahead in every backward of a step, each the unit that ran before it.

FSDP2 remembers in which order units ran until the next backward has ended, and in a backward prefetches by what it
remembers last. A schedule of stages runs several forwards in a row and several backwards in a row: of the former, the
first unit of one would gather the last unit of the one before, whose backward is far; in the latter, there is nothing
left to remember, and no gather would be hidden. The order is the same in all micro-batches, so it is noted once.
"""

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from tpplan.torch_internals.modules import forwards_remembered, unit_of_group


@contextlib.contextmanager
def noting_order(model: nn.Module) -> Iterator[None]:
    """Around a forward of the model: sets what each of its FSDP units prefetches in backwards from then on.

    A unit that runs twice has no one unit before it: then FSDP prefetches as it does by itself.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    earlier = len(forwards_remembered(model))
    yield
    order = [unit_of_group(group) for group in forwards_remembered(model)[earlier:]]
    if len(set(map(id, order))) == len(order):
        for before, unit in zip([*order[:1], *order], order, strict=False):
            unit.set_modules_to_backward_prefetch([before])  # the first has itself: nothing
