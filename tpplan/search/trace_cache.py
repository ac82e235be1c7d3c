"""What several calls of solve for one model share: its trace, what its ops were seen to do, and what layouts cost.

    reuse = Reuse()
    plans = [tpplan.solve(build_model, ..., cluster=cluster, reuse=reuse) for cluster in clusters]

A trace depends on the model and its inputs alone, an executed op on its shapes, a price on the machine and the degree.
The plans are those that calls on their own give.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from tpplan.core.graph import ModelGraph
from tpplan.costs.execute import Executor
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.trace.forward_arguments import Inputs
from tpplan.trace.opaque import Opaques


@dataclass(frozen=True, slots=True)
class Built:
    """A model on the meta device, the dtypes that its parameters were built in, by name, and how it came there if not
    by its builder alone."""

    model: nn.Module
    dtypes: Mapping[str, torch.dtype]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model on the meta device, what it was run on (so many sequences), and what was seen. `notes` are on how it was
    built."""

    micro_batch: int
    model: nn.Module
    inputs: Inputs
    units: tuple[str, ...]
    graph: ModelGraph
    assumptions: tuple[str, ...]
    opaques: Opaques
    notes: tuple[str, ...]


@dataclass(slots=True)
class Reuse:
    """What was computed so far, by all that it depends on; it grows with every call that is given it."""

    models: dict[Hashable, Built] = field(default_factory=dict)
    traces: dict[Hashable, Traced] = field(default_factory=dict)
    #: on graphs that were not traced but grown (tpplan.search.grown_graph)
    grown: dict[Hashable, Traced] = field(default_factory=dict)
    #: models, as their traces are called, of which a graph was not what it grew to
    ungrowing: set[Hashable] = field(default_factory=set)
    spaces: dict[Hashable, PricedSpace] = field(default_factory=dict)
    #: GPU seconds of a sequence at least (tpplan.costs.best_rates)
    paces: dict[Hashable, float] = field(default_factory=dict)
    #: modules that proofs have found to be run whole, and why, by model
    whole: dict[Hashable, list[tuple[str, str]]] = field(default_factory=dict)
    executor: Executor = field(default_factory=Executor)
