"""A module that has a share of its experts: rows travel to the rank that has their expert, and back.

`take_share` gives a module another class. Its forward sorts the rows by expert, sends them, runs the module's own
forward on what arrives with one expert for each row, sends the results back, and adds up each row's. Meanwhile the
module's integers that count experts count the rank's own. In a trace nothing is sent: operators of tpplan stand for the
exchange (tpplan.trace.hooks.custom_ops).
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from tpplan.core.errors import PlanMismatchError
from tpplan.experts.exchange import Counts, EpGroup, exchanged_counts, loads, send, send_back
from tpplan.plan.plan import ExpertCall, Plan
from tpplan.torch_internals.modules import own_parameters
from tpplan.trace.hooks import custom_ops
from tpplan.trace.hooks.generated_class import subclass

#: key of a module's __dict__ for its share of experts
SHARE = "_tpplan_expert_share"
#: key of a module's __dict__ for the rows that each of its experts got in the last forward
_LOAD = "_tpplan_expert_load"


@final
@dataclass(frozen=True, slots=True)
class ExpertShare:
    """One rank's share of a module's experts: those of `ep` consecutive equal parts, of which each rank of a group has
    one. `imbalance`: rows that arrive, over rows that are sent, as planned. `group` is None in a trace."""

    call: ExpertCall
    ep: int
    imbalance: float = 1.0
    group: EpGroup | None = field(default=None, compare=False)

    @property
    def own(self) -> int:
        """Number of experts of a rank."""
        return self.call.experts // self.ep


def share_of(module: nn.Module) -> ExpertShare | None:
    """The share of experts that a module has; None where it has all of them."""
    found: ExpertShare | None = module.__dict__.get(SHARE)
    return found


def take_share(module: nn.Module, share: ExpertShare) -> None:
    """Makes a module compute as one that has a share of its experts. Its weights are the caller's to cut (dim 0)."""
    module.__dict__[SHARE] = share
    module.__class__ = experts_class(type(module))  # type: ignore[arg-type]


@final
@dataclass(frozen=True, slots=True)
class Division:
    """The modules whose experts are divided among `ep` ranks, how each is called, and the imbalance planned for."""

    ep: int
    imbalance: float
    calls: tuple[tuple[str, ExpertCall], ...]

    @classmethod
    def of(cls, plan: Plan) -> "Division | None":
        """The division that a plan states; None where it divides no experts."""
        if plan.experts is None:
            return None
        return cls(plan.experts.ep, plan.experts.imbalance, tuple(plan.expert_calls().items()))


def with_shares(build_model: Callable[[], nn.Module], division: Division) -> nn.Module:
    """The model that a builder makes on the meta device, in which each divided module has one rank's experts."""
    model = build_model()
    modules = dict(model.named_modules())
    for name, call in division.calls:
        module = modules.get(name)
        if module is None or not _is_called_so(module, call) or call.experts % division.ep:
            raise PlanMismatchError(
                f"the plan divides the {call.experts} experts of module {name}, which is called with {call.rows}, "
                f"{call.index} and {call.weight}, among {division.ep} ranks, and the model has no such module: solve "
                "again for this model"
            )
        cut_on_meta(module, ExpertShare(call, division.ep, division.imbalance))
    return model


def _is_called_so(module: nn.Module, call: ExpertCall) -> bool:
    """True where the module's forward has the call's arguments, and all its weights a slice for each expert."""
    lengths = {weight.shape[:1] for weight in module.parameters()}
    return lengths == {(call.experts,)} and {call.rows, call.index, call.weight} <= (
        inspect.signature(module.forward).parameters.keys()
    )


def whole_shape(model: nn.Module, name: str, weight: Tensor) -> tuple[int, ...]:
    """The shape of a parameter with all experts, of a model whose modules may have shares of theirs."""
    share = share_of(model.get_submodule(name.rpartition(".")[0]))
    return tuple(weight.shape) if share is None else (share.call.experts, *weight.shape[1:])


def expert_load(model: nn.Module) -> dict[str, Tensor]:
    """The rows that each expert got in the last forward, on the ranks that this rank shares experts with: by module a
    tensor [ranks, experts of a rank] on the model's device. Its row sums over their mean are the imbalance of ranks.

    Every rank must call it, after a forward; it is one small all-gather a module, and waits for nothing. Empty for a
    model whose experts are not divided.
    """
    found = {}
    for name, module in model.named_modules():
        share, load = share_of(module), module.__dict__.get(_LOAD)
        if share is not None and share.group is not None and load is not None:
            found[name] = loads(load, share.group)
    return found


def cut_on_meta(module: nn.Module, share: ExpertShare) -> None:
    """take_share for a module on the meta device, whose weights are cut too."""
    parameters = own_parameters(module)
    for name, weight in parameters.items():
        if weight is not None:
            cut = torch.empty((share.own, *weight.shape[1:]), dtype=weight.dtype, device="meta")
            parameters[name] = nn.Parameter(cut, requires_grad=weight.requires_grad)
    take_share(module, share)


@functools.cache
def experts_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of cls, under its name, whose forward exchanges rows."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        share = share_of(self)
        if share is None:
            return cls.forward(self, *args, **kwargs)
        return _exchanging(self, share, functools.partial(cls.forward, self), args, kwargs)

    return subclass(cls, {"forward": torch.compiler.disable(forward)}, experts_class)  # type: ignore[no-untyped-call]


def _exchanging(
    module: nn.Module, share: ExpertShare, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of the module's own forward, run on the ranks that have the rows' experts."""
    given = inspect.signature(forward).bind(*args, **kwargs)
    named = given.arguments
    call = share.call
    rows, index = named[call.rows], named[call.index]
    sent = _dispatch(rows, index, named[call.weight], share, type(module).__name__)
    named[call.rows], named[call.index], named[call.weight] = sent.rows, sent.arrived.unsqueeze(1), sent.weight
    if sent.counts is not None:
        module.__dict__[_LOAD] = sent.counts.load
    before = counted(module, call.experts)
    vars(module).update(dict.fromkeys(before, share.own))
    try:
        results = forward(*given.args, **given.kwargs)
    finally:
        vars(module).update(before)
    return _combine(results, sent, index, share)


def counted(module: nn.Module, experts: int) -> dict[str, int]:
    """The module's own integers that are the number of experts."""
    return {name: value for name, value in vars(module).items() if type(value) is int and value == experts}


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """Rows [n, D] that arrived with their experts [n] and weights [n, 1]; `order` [T K] of the rows that were sent,
    their experts `chosen` [T K], and counts by rank (None in a trace)."""

    rows: Tensor
    arrived: Tensor
    weight: Tensor
    order: Tensor
    chosen: Tensor
    counts: Counts | None


def _dispatch(rows: Tensor, index: Tensor, weight: Tensor, share: ExpertShare, kind: str) -> _Sent:
    """Sends the rows of a module, whose class is named `kind`, to the ranks that have their experts.

    Raises PlanMismatchError for tensors of other shapes or dtypes than experts are called with.
    """
    if index.is_floating_point() or index.dtype is torch.bool:
        raise PlanMismatchError(
            f"{kind}: its experts are divided for an index of integers, and it is called with {index.dtype}: solve "
            "again, or plan with --ep 1"
        )
    if index.dim() != 2 or rows.dim() != 2 or index.shape != weight.shape or index.shape[0] != rows.shape[0]:
        raise PlanMismatchError(
            f"{kind}: its experts are divided for rows [T, D], index [T, K] and weight [T, K], and it is called with "
            f"{list(rows.shape)}, {list(index.shape)} and {list(weight.shape)}: solve again, or plan with --ep 1"
        )
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    chosen = flat.index_select(0, order)
    each = rows.index_select(0, order // index.shape[1])
    weights = weight.reshape(-1).index_select(0, order).unsqueeze(1)
    if share.group is None:
        arrived = custom_ops.arriving(chosen, share.own, share.ep, share.imbalance)
        found = custom_ops.send_rows(each, arrived, share.ep), custom_ops.send_rows(weights, arrived, share.ep)
        return _Sent(found[0], arrived, found[1], order, chosen, None)
    arrived, counts = exchanged_counts(chosen, share.call.experts, share.group)
    return _Sent(send(each, counts), arrived, send(weights, counts), order, chosen, counts)


def _combine(results: Tensor, sent: _Sent, index: Tensor, share: ExpertShare) -> Tensor:
    """Sends computed rows back, and adds up the K rows of each token of `index` [T, K]."""
    if sent.counts is None:
        back = custom_ops.return_rows(results, sent.chosen, share.ep)
    else:
        back = send_back(results, sent.counts)
    # In the order of the tokens, K rows for each; a sum over them is as exact as one process's.
    placed = back.index_select(0, sent.order.argsort())
    return placed.view(*index.shape, placed.shape[-1]).sum(1)
