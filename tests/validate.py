"""Brute force for sharding rules: an op on the slices of every rank, compared with the whole op, in both directions.

A strategy is right when (1) values placed as its operand layouts say give, rank by rank, results placed as its result
layouts say, and (2) result gradients placed as the layouts' gradient halves say give operand gradients placed as
theirs say. Summands are noise that adds up: nothing but a sum of them is right. One process loops over the ranks.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tpplan.apply.collectives.redistribute import TpGroup
from tpplan.apply.collectives.row_bags import of_own_rows
from tpplan.core.graph import Argument, Ref, Value
from tpplan.core.layout import ROWS, Layout, LayoutKind, P, R, S, layouts_of
from tpplan.core.units import FLOATING_DTYPES
from tpplan.layouts.rules import Call, Strategy, call_strategies, localized_arguments
from tpplan.layouts.rules.embedding import BAGS
from tpplan.layouts.rules.size_literals import CREATIONS
from tpplan.torch_internals.operators import is_pointwise
from tpplan.trace.hooks.custom_ops import Bags

#: largest error allowed, relative to the largest element; everything here is float64
TOLERANCE = 1e-10

#: what stands where a tensor stands in an op's arguments
Literal = object
#: literals of one rank, by the argument's position
Literals = Mapping[int, Argument]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A call of an op on small tensors; a tensor carries a gradient when it requires one.

    `is_written_later`: a gradient reaches the result from what is written to it later.
    """

    target: str
    args: tuple[Literal, ...]
    kwargs: dict[str, Literal] = field(default_factory=dict)
    is_written_later: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The operands in argument order."""
        return tuple(_tensors((self.args, tuple(self.kwargs.values()))))

    @cached_property
    def call(self) -> Call:
        """What the rules see."""
        counter = itertools.count()

        def as_argument(value: Literal) -> Argument:
            if isinstance(value, Tensor):
                return Ref(f"x{next(counter)}")
            if isinstance(value, torch.dtype):
                return f"dtype:{str(value).removeprefix('torch.')}"
            if isinstance(value, torch.device):
                return f"device:{value}"
            return tuple(map(as_argument, value)) if isinstance(value, list | tuple) else value  # type: ignore[return-value]

        operands = self.tensors
        results = run(self, operands, {})
        carries = self.is_written_later or (
            any(tensor.requires_grad for tensor in operands)
            and self.target != "aten.detach.default"
            and self.target not in CREATIONS
        )
        return Call(
            target=self.target,
            args=tuple(map(as_argument, self.args)),
            kwargs=tuple((key, as_argument(value)) for key, value in self.kwargs.items()),
            operands=tuple(_value(f"x{i}", t, carries=t.requires_grad) for i, t in enumerate(operands)),
            results=tuple(_value(f"y{i}", t, carries=carries) for i, t in enumerate(results)),
            is_pointwise=is_pointwise(operator_of(self.target)),
        )

    def __str__(self) -> str:
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self.tensors)
        literals = [value for value in self.args if not list(_tensors(value))]
        return f"{self.target}({shapes}; {literals} {dict(self.kwargs) if self.kwargs else ''})"


def operator_of(target: str) -> Any:
    """The operator of torch, or what stands in for it."""
    namespace, name, overload = target.split(".")
    return STAND_INS.get(target) or getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _tensors(value: Literal) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _value(name: str, tensor: Tensor, *, carries: bool) -> Value:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Value(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype,
        carries_gradient=carries and dtype in FLOATING_DTYPES,
        storage=name,
    )


def grouped_products(rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each end times that expert's matrix."""
    starts = [0, *ends.tolist()[:-1]]
    pairs = zip(starts, ends.tolist(), experts.unbind(), strict=True)
    return torch.cat([rows[start:end] @ expert for start, end, expert in pairs])


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, others: list[Tensor], *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of grouped heads whose scores are the products plus the first of `others`."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query @ key.mT + (others[0] if others else 0.0)
    return scores.softmax(-1) @ value, scores.logsumexp(-1), scores.amax(-1)


#: in float64, what has no such kernel; and what an empty tensor may hold
STAND_INS = {
    "aten.empty.memory_format": torch.ops.aten.zeros.default,
    "aten.new_empty.default": torch.ops.aten.new_zeros.default,
    "aten._grouped_mm.default": grouped_products,
    "transformers.grouped_mm_fallback.default": grouped_products,
    "tpplan.flex_attention.default": flex_attention,
}


def run(sample: Sample, operands: tuple[Tensor, ...], literals: Literals) -> tuple[Tensor, ...]:
    """The op on other operands; `literals` replace some, by position. Every run draws the same random numbers."""
    name, op = sample.target.split(".")[1], operator_of(sample.target)
    remaining = iter(operands)

    def place(value: Literal) -> Literal:
        if isinstance(value, Tensor):
            return next(remaining)
        return [place(item) for item in value] if isinstance(value, list | tuple) else value

    args = [place(value) for value in sample.args]
    kwargs = {key: place(value) for key, value in sample.kwargs.items()}
    for position, literal in literals.items():
        args[position] = list(literal) if isinstance(literal, tuple) else literal
    if name.endswith("_") and not name.endswith("__"):
        args[0] = args[0].clone()  # type: ignore[attr-defined]
    torch.default_generator.manual_seed(0)  # torch.manual_seed also queues work for absent devices
    results = op(*args, **kwargs)
    return tuple(results) if isinstance(results, list | tuple) else (results,)


class WrongStrategyError(Exception):
    """A strategy that does not compute the op."""


def violation(sample: Sample, strategy: Strategy, tp: int) -> str | None:
    """What is wrong with a strategy on tp ranks: op, strategy, rank and half; None where it is right."""
    try:
        _check(sample, strategy, tp)
    except WrongStrategyError as wrong:
        return f"{sample}: {strategy} on {tp} ranks: {wrong}"
    return None


def _check(sample: Sample, strategy: Strategy, tp: int) -> None:
    call = sample.call
    noise = torch.Generator().manual_seed(1)
    whole = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in sample.tensors)
    expected = run(sample, whole, {})
    gradients = tuple(
        torch.randn(y.shape, generator=noise, dtype=y.dtype if y.dtype.is_complex else torch.float64) for y in expected
    )
    placed = [place_value(x, layout, tp, noise) for x, layout in zip(whole, strategy.operands, strict=True)]
    changed = zip(call.args, localized_arguments(call, strategy, tp), strict=True)
    literals = {i: after for i, (before, after) in enumerate(changed) if before != after}

    leaves, results = [], []
    for rank in range(tp):
        own = _local_operands(whole, [ranks[rank] for ranks in placed], strategy, rank)
        leaves.append(own)
        results.append(_run_locally(sample, own, whole, strategy, rank, literals))
    for i, layout in enumerate(strategy.results):
        check_value([ranks[i] for ranks in results], expected[i], layout, f"value of result {i}")
    if not any(value.carries_gradient for value in call.results):
        return

    expected_gradients = _backward(expected, gradients, whole, call)
    out = [place_gradient(g, layout, tp, noise) for g, layout in zip(gradients, strategy.results, strict=True)]
    found = [_backward(results[r], tuple(ranks[r] for ranks in out), leaves[r], call) for r in range(tp)]
    for i, layout in enumerate(strategy.operands):
        if call.operands[i].carries_gradient:
            check_gradient([ranks[i] for ranks in found], expected_gradients[i], layout, f"gradient of operand {i}")


def _local_operands(
    whole: tuple[Tensor, ...], placed: list[Tensor], strategy: Strategy, rank: int
) -> tuple[Tensor, ...]:
    """A rank's leaves; ids of looked-up rows become local ids, those of other ranks' rows any local id."""
    own = []
    for tensor, x, layout in zip(placed, whole, strategy.operands, strict=True):
        local = tensor
        if layout == ROWS:
            rows = placed[0].shape[0]
            local = (tensor - rank * rows).clamp(0, rows - 1)
        own.append(local.detach().clone().requires_grad_(x.requires_grad))
    return tuple(own)


def _run_locally(
    sample: Sample,
    own: tuple[Tensor, ...],
    whole: tuple[Tensor, ...],
    strategy: Strategy,
    rank: int,
    literals: Literals,
) -> tuple[Tensor, ...]:
    """A rank's results; looked-up rows of other ranks are masked, as `rows -> ...` does first, and bags by rows are
    tpplan's."""
    if sample.target == BAGS and strategy.operands[0] == S(0):
        remaining = iter(own)
        bags = Bags(*(next(remaining) if isinstance(given, Tensor) else given for given in sample.args))
        return (of_own_rows(bags, TpGroup(name="", size=whole[0].shape[0] // own[0].shape[0], rank=rank)),)
    try:
        results = run(sample, own, literals)
    except (RuntimeError, IndexError, ValueError) as error:
        raise WrongStrategyError(f"rank {rank}: the op fails: {str(error).splitlines()[0]}") from error
    if ROWS not in strategy.results:
        return results
    ids, rows = whole[strategy.operands.index(ROWS)], own[0].shape[0]
    is_local = (ids >= rank * rows) & (ids < (rank + 1) * rows)
    return tuple(y * is_local.unsqueeze(-1) for y in results)


def _backward(
    results: tuple[Tensor, ...], gradients: tuple[Tensor, ...], leaves: tuple[Tensor, ...], call: Call
) -> list[Tensor]:
    """Gradients of the leaves, zeros where none flows."""
    pairs = [(y, g) for y, g, v in zip(results, gradients, call.results, strict=True) if v.carries_gradient]
    flowing = [(y, g) for y, g in pairs if y.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not flowing or not wanted:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = iter(torch.autograd.grad([y for y, _ in flowing], wanted, [g for _, g in flowing], allow_unused=True))
    every = [next(found) if leaf.requires_grad else None for leaf in leaves]
    return [torch.zeros_like(x) if g is None else g for g, x in zip(every, leaves, strict=True)]


def summands(tensor: Tensor, tp: int, noise: torch.Generator) -> list[Tensor]:
    """Random tensors that add up to `tensor`."""
    if tensor.dtype is torch.bool:
        raise WrongStrategyError("booleans do not add up")
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        others = [torch.randint(-5, 6, tensor.shape, generator=noise, dtype=tensor.dtype) for _ in range(tp - 1)]
    else:
        others = [torch.randn(tensor.shape, generator=noise, dtype=tensor.dtype) for _ in range(tp - 1)]
    return [*others, tensor - sum(others)]


def slices(tensor: Tensor, layout: Layout, tp: int) -> list[Tensor]:
    """Each rank's slice of a dim, of each of its parts, or of two dims as one; those of neighbours are copies."""
    assert layout.dim is not None
    dim = layout.dim
    if layout.kind is LayoutKind.COPIED:
        assert layout.slices is not None
        return [own for own in tensor.chunk(layout.slices, dim) for _ in range(tp // layout.slices)]
    if layout.kind is LayoutKind.JOINT:
        return [own.unsqueeze(dim) for own in tensor.flatten(dim, dim + 1).chunk(tp, dim)]
    parts = tensor.split(list(layout.parts or (tensor.shape[dim],)), dim)
    return [torch.cat(pieces, dim) for pieces in zip(*(part.chunk(tp, dim) for part in parts), strict=True)]


def place_value(tensor: Tensor, layout: Layout, tp: int, noise: torch.Generator) -> list[Tensor]:
    """What each rank holds of a value."""
    if layout.dim is not None:
        return slices(tensor, layout, tp)
    return summands(tensor, tp, noise) if layout == P else [tensor] * tp


def place_gradient(gradient: Tensor, layout: Layout, tp: int, noise: torch.Generator) -> list[Tensor]:
    """What each rank holds of the gradient of a value."""
    if layout.kind is LayoutKind.COPIED:
        assert layout.slices is not None
        assert layout.dim is not None
        copies = tp // layout.slices
        return [part for own in gradient.chunk(layout.slices, layout.dim) for part in summands(own, copies, noise)]
    if layout.dim is not None:
        return slices(gradient, layout, tp)
    partial = layout.kind is LayoutKind.REPLICATE_PARTIAL_GRADIENT
    return summands(gradient, tp, noise) if partial else [gradient] * tp


def check_value(ranks: list[Tensor], whole: Tensor, layout: Layout, what: str) -> None:
    """Raises where the ranks do not hold the value as the layout says."""
    if layout in (P, ROWS):
        _equal([_total(ranks, what)], [whole], what)
    else:
        _equal(ranks, place_value(whole, layout, len(ranks), torch.Generator()), what)


def check_gradient(ranks: list[Tensor], whole: Tensor, layout: Layout, what: str) -> None:
    """Raises where the ranks do not hold the gradient as the layout says."""
    if layout.kind is LayoutKind.REPLICATE_PARTIAL_GRADIENT:
        _equal([_total(ranks, what)], [whole], what)
    elif layout.kind is LayoutKind.COPIED:
        assert layout.slices is not None
        assert layout.dim is not None
        copies = len(ranks) // layout.slices
        owners = [ranks[first : first + copies] for first in range(0, len(ranks), copies)]
        _equal([_total(own, what) for own in owners], list(whole.chunk(layout.slices, layout.dim)), what)
    else:
        _equal(ranks, place_gradient(whole, layout, len(ranks), torch.Generator()), what)


def _total(ranks: list[Tensor], what: str) -> Tensor:
    if ranks[0].dtype is torch.bool or len({tuple(local.shape) for local in ranks}) > 1:
        raise WrongStrategyError(f"{what}: cannot be added up over the ranks")
    return torch.stack(ranks).sum(0, dtype=ranks[0].dtype)


def _equal(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        where = f"rank {rank}: {what}" if len(found) > 1 else f"all ranks together: {what}"
        if one.shape != other.shape or one.dtype != other.dtype:
            raise WrongStrategyError(
                f"{where}: {one.dtype}{list(one.shape)}, expected {other.dtype}{list(other.shape)}"
            )
        one, other = _as_doubles(one), _as_doubles(other)
        scale = other.nan_to_num(0, 0, 0).abs().max().clamp_min(1.0) if other.numel() else 1.0
        if not torch.allclose(one, other, rtol=0, atol=TOLERANCE * float(scale), equal_nan=True):
            raise WrongStrategyError(f"{where} differs by {(one - other).abs().max():.3g}")


def _as_doubles(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor).detach().double()


def possible_strategies(call: Call, tp: int) -> Iterator[Strategy]:
    """Every combination of layouts of operands and results, right or wrong; `rows` aside."""

    def choices(values: tuple[Value, ...]) -> Iterator[tuple[Layout, ...]]:
        return itertools.product(
            *(layouts_of(value.shape, carries_gradient=value.carries_gradient, tp=tp) for value in values)
        )

    for operands in choices(call.operands):
        for results in choices(call.results):
            yield Strategy(operands, results)


def missing_strategies(sample: Sample, tp: int, *, limit: int) -> list[Strategy]:
    """Strategies that are right and not offered; raises ValueError where there are more than `limit` to try.

    R where every operand and result that carries a gradient is R* is the same strategy and not listed.
    """
    call = sample.call
    candidates = list(itertools.islice(possible_strategies(call, tp), limit + 1))
    if len(candidates) > limit:
        raise ValueError(f"{sample}: more than {limit} combinations of layouts")
    offered = set(call_strategies(call, tp))
    in_place = call.is_in_place
    return [
        strategy
        for strategy in candidates
        if strategy not in offered
        and (not in_place or strategy.results[0] == strategy.operands[0])
        and strategy.operands.count(R) < len(strategy.operands) + (strategy.results.count(R) < len(strategy.results))
        and violation(sample, strategy, tp) is None
    ]
