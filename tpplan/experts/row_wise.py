"""Whether a module of experts computes row by row: seen by running its own code on real values, whole and divided.

A rank with a share of the experts runs the module on other rows than one process does: on rows of several ranks, each
with one expert. The module allows that where its result for a token is the sum, over the token's experts, of what it
gives for the token and that expert alone, by that expert's weights alone. Both are computed here on random numbers, in
a copy of the module whose weights are small: results and all gradients must agree, also where some experts, and some
ranks, get no rows, and where one expert gets thousands. Modules that draw random numbers, have buffers, or keep a
number of experts are refused.
"""

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.core.errors import TpplanError, first_line
from tpplan.core.graph import ModelGraph
from tpplan.experts.closed_module import why_not_closed
from tpplan.experts.expert_share import SHARE, counted
from tpplan.plan.plan import ExpertCall
from tpplan.torch_internals.modules import own_parameters
from tpplan.torch_internals.operators import one_thread

#: the check of a plan's experts, in the plan's words
ROW_WISE = "the modules' own code ran on random numbers, whole and divided: equal results and gradients"
#: relative difference of results and gradients in float32 that rounding explains
TOLERANCE = 1e-4
#: largest number of elements of a copy's weights
MOST_ELEMENTS = 2**22
#: elements of the shortest row of the copy's weights, where the weights' own divide by it
_ROW = 16
#: rows that the module is run on, for each expert
_ROWS_PER_EXPERT = 2
#: many rows, of which code that has a capacity drops some; and most rows times experts
_MOST_ROWS, _MOST_PAIRS = 4096, 2**20


def why_not_divided(model: nn.Module, graph: ModelGraph, calls: Mapping[str, ExpertCall], ep: int) -> str:
    """Why modules of experts cannot be divided among ep ranks, "" where they can; like modules are run once. `graph` is
    a trace of the model, whose modules may have shares of their experts already."""
    ran: dict[object, str] = {}
    for name, call in calls.items():
        module = model.get_submodule(name)
        shapes = {b.path: graph.values[b.result].shape for b in graph.boundaries if b.module == name}
        if missing := {call.rows, call.index, call.weight} - shapes.keys():
            return f"module {name}: no tensor enters it as {min(missing)!r}"
        if why := why_not_closed(graph, name):
            return f"module {name}: {why}"
        top_k, width = shapes[call.index][-1], shapes[call.rows][-1]
        key = type(module), call, top_k, width, tuple(weight.shape for weight in module.parameters())
        if key not in ran:
            ran[key] = why_not_row_wise(module, call, top_k, width, ep)
        if ran[key]:
            return f"module {name}: {ran[key]}"
    return ""


def why_not_row_wise(module: nn.Module, call: ExpertCall, top_k: int, width: int, ep: int) -> str:
    """Why a module cannot be divided among ep ranks, "" where it can. `width` is that of its rows, `top_k` the number
    of experts of each. The module may be on the meta device."""
    if call.experts % ep:
        return f"{call.experts} experts do not divide among {ep} ranks"
    if buffer := next((name for name, _ in module.named_buffers()), ""):
        return f"it has a buffer, {buffer}, and only parameters are divided by experts: make it none of its own"
    factor = _shrinking(module, call, width)
    elements = sum(weight.numel() for weight in module.parameters()) // factor**2
    if elements > MOST_ELEMENTS:
        return f"its weights cannot be made small enough to run it: {elements:,} elements of at most {MOST_ELEMENTS:,}"
    try:
        with torch.random.fork_rng(devices=[]), one_thread():
            torch.manual_seed(0)
            return _difference(_small(module, call, factor), call, top_k, width // factor, ep)
    except TpplanError:
        raise
    except Exception as error:  # the module's own code on other sizes than it was written for may raise anything
        return f"its code fails on fewer experts or rows: {first_line(error)}"


def _shrinking(module: nn.Module, call: ExpertCall, width: int) -> int:
    """A number by which all dims but the experts' can be divided, so that their proportions stay, and rows that kernels
    take (grouped products want multiples of 16 bytes)."""
    sizes = {size for weight in module.parameters() for size in weight.shape[1:]} | {width}
    common = math.gcd(*sizes)
    return 1 if call.experts in sizes else common // math.gcd(common, _ROW)


def _small(module: nn.Module, call: ExpertCall, factor: int) -> nn.Module:
    """A copy of the module on the CPU, with random weights, whose dims but the experts' are divided by a factor, and so
    are its integers that are such dims."""
    sizes = {size for weight in module.parameters() for size in weight.shape[1:]}
    replaced: dict[int, Any] = {}
    for weight in module.parameters():
        shape = (call.experts, *(size // factor for size in weight.shape[1:]))
        small = torch.randn(shape, device="cpu") / math.sqrt(max(shape[1:]))
        replaced[id(weight)] = nn.Parameter(small, requires_grad=weight.requires_grad)
    found = copy.deepcopy(module, replaced)
    vars(found).pop(SHARE, None)
    for name, value in vars(found).items():
        if type(value) is int and value in sizes and value != call.experts:
            vars(found)[name] = value // factor
    return found


def _difference(module: nn.Module, call: ExpertCall, top_k: int, width: int, ep: int) -> str:
    """Where results or gradients of the module divided among ep ranks differ from the whole module's; "" if nowhere."""
    for index in _routings(call.experts, top_k):
        rows = torch.randn(index.shape[0], width, device="cpu").requires_grad_()
        weight = torch.rand(index.shape, device="cpu").requires_grad_()
        state, numbers = torch.get_rng_state(), counted(module, call.experts)
        whole = _called(module, call, rows, index, weight)
        if left := counted(module, call.experts).keys() - numbers.keys():
            return f"its forward keeps the number of experts at self.{min(left)}, where a rank's own would stay"
        if not torch.equal(torch.get_rng_state(), state):
            return "it draws random numbers (dropout?), and a rank draws others for the same row: apply dropout outside"
        given = torch.randn_like(whole)
        expected = _gradients(whole, given, module, rows, weight)
        parts = _divided(module, call, rows, index, weight, ep)
        found = _gradients(parts, given, module, rows, weight)
        compared = [("results", whole, parts), *((name, expected[name], found[name]) for name in expected)]
        for name, one, other in compared:
            scale = max(float(one.detach().abs().max()), 1e-6)
            if not float((one - other).detach().abs().max()) <= TOLERANCE * scale:
                return f"divided by experts, its {name} differ: it does not compute row by row"
    return ""


def _routings(experts: int, top_k: int) -> Iterator[Tensor]:
    """Yields indices [T, K] of experts: at random, at random with one expert a row, all rows to the same experts (the
    others, and ranks that have no more, get none), and all rows to the last expert alone; of few rows and of many."""
    for tokens in (_ROWS_PER_EXPERT * experts, min(_MOST_ROWS, _MOST_PAIRS // experts)):
        drawn = torch.rand(tokens, experts, device="cpu").topk(top_k).indices
        yield drawn
        yield drawn[:, :1]
        yield torch.arange(top_k, device="cpu").repeat(tokens, 1)
        yield torch.full((tokens, 1), experts - 1, device="cpu")


def _gradients(results: Tensor, given: Tensor, module: nn.Module, rows: Tensor, weight: Tensor) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {f"gradients of {name}": p for name, p in module.named_parameters() if p.requires_grad}
    named |= {"gradients of rows": rows, "gradients of weights of rows": weight}
    found = torch.autograd.grad(results, list(named.values()), given, allow_unused=True)
    return {
        name: torch.zeros_like(own) if gradient is None else gradient
        for (name, own), gradient in zip(named.items(), found, strict=True)
    }


def _divided(module: nn.Module, call: ExpertCall, rows: Tensor, index: Tensor, weight: Tensor, ep: int) -> Tensor:
    """The result that ep ranks compute together from the tokens of all of them."""
    own = call.experts // ep
    top_k = index.shape[1]
    flat, weights = index.reshape(-1), weight.reshape(-1)
    total: Tensor | None = None
    for rank in range(ep):
        picked = (flat // own == rank).nonzero().squeeze(1).flip(0)  # no order is promised
        token = picked // top_k
        given = rows[token], (flat[picked] - rank * own).unsqueeze(1), weights[picked].unsqueeze(1)
        part = _with_own(module, call, slice(rank * own, (rank + 1) * own), given)
        place = torch.zeros(rows.shape[0], part.shape[1], device="cpu", dtype=part.dtype).index_add(0, token, part)
        total = place if total is None else total + place
    assert total is not None
    return total


def _called(module: nn.Module, call: ExpertCall, rows: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """The module's result. Arguments are given by position: what a forward calls may name them otherwise."""
    named = {call.rows: rows, call.index: index, call.weight: weight}
    given = inspect.signature(module.forward).bind(**named)
    found: Tensor = module(*given.args, **given.kwargs)
    return found


def _with_own(module: nn.Module, call: ExpertCall, own: slice, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The module's result with some of its experts."""
    parameters = own_parameters(module)
    before, numbers = dict(parameters), counted(module, call.experts)
    try:
        for name, weight in before.items():
            if weight is not None:
                del parameters[name]
                vars(module)[name] = weight[own]
        vars(module).update(dict.fromkeys(numbers, own.stop - own.start))
        return _called(module, call, *given)
    finally:
        for name in before:
            vars(module).pop(name, None)
        parameters.update(before)
        vars(module).update(numbers)
