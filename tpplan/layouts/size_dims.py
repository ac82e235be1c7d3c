"""Sizes among a call's arguments that are dims of its tensor, such as the length in `view(b, t, heads, d)`.

Code may read such a size from another tensor, for example `hidden_states.shape[:-1]` of a slice in a view of a gathered
tensor. On a rank the size is then too small or too large by a factor of tp, at every batch and length.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod

from tpplan.core.layout import LayoutKind, local_shape
from tpplan.layouts.rules.call import Call, Strategy
from tpplan.layouts.rules.size_literals import CALLS, SIZES
from tpplan.layouts.rules.views import groups
from tpplan.plan.plan import SizePlan

_VIEWS = ("view",)
_EXPANDS = ("expand",)

#: a call in a module's own code, and its strategy
ShardedCall = tuple[Call, Strategy]


def dims_of_sizes(call: Call) -> Mapping[int, tuple[int, ...]]:
    """Position among the sizes -> dims of the first operand whose product is that size.

    For a view: dims of a group with equal products (tpplan.layouts.rules.views) that become one dim. For an expand:
    dims that are not stretched. Sizes of 1 and -1 are left out.
    """
    kind = CALLS.get(call.target)
    if kind not in (*_VIEWS, *_EXPANDS):
        return {}
    written, shape, result = _sizes(call), call.operands[0].shape, call.results[0].shape
    if len(written) != len(result):
        return {}
    if kind in _VIEWS:
        found = {others[0]: tuple(own) for own, others in groups(shape, result) if len(others) == 1}
    else:
        first = len(result) - len(shape)
        found = {first + dim: (dim,) for dim, size in enumerate(shape) if size == result[first + dim] > 1}
    return {position: dims for position, dims in found.items() if written[position] != -1}


def sizes_by_dims(
    calls: Iterable[ShardedCall], own: ShardedCall, tp: int, is_given: Callable[[int], bool]
) -> Iterator[SizePlan]:
    """Yields sizes of a call that code may give in another layout: the whole's size for a slice, or a slice's size for
    the whole where `is_given` says that code gives that number.

    `calls` are all calls of the module's own code. A size is left out where it could be confused with another size of a
    call that looks the same.
    """
    call, strategy = own
    named = dims_of_sizes(call)
    if not call.operands or strategy.operands[0].kind in (LayoutKind.JOINT, LayoutKind.ROWS):
        return
    yield from _stacked_size(call, strategy, tp)
    given = local_shape(call.operands[0].shape, strategy.operands[0], tp)
    made = local_shape(call.results[0].shape, strategy.results[0], tp)
    for position, dims in named.items():
        local, whole = made[position], call.results[0].shape[position]
        written = whole if local != whole else whole // tp
        is_off = local != whole or (whole % tp == 0 and is_given(written))
        if not is_off or prod(given[dim] for dim in dims) != local:
            continue
        size = SizePlan(
            call=CALLS[call.target],
            of=_shape_of(call, strategy, tp, dims),
            count=len(made),
            position=position,
            written=written,
            local=local,
            dims=dims,
        )
        if all(_is_unambiguous(size, *other, tp) for other in calls):
            yield size


def _stacked_size(call: Call, strategy: Strategy, tp: int) -> Iterator[SizePlan]:
    """Yields the size of a view's sharded dim that joins whole dims with the outer part of a sharded one, such as
    `b * h` in `view(t, b * h, d)` of x [t, b, h * d]: a rank has h / tp times the size of dim b."""
    own, made = strategy.operands[0].dim, strategy.results[0].dim
    if CALLS.get(call.target) not in _VIEWS or own is None or made is None or not made < own:
        return
    shape, result = call.operands[0].shape, call.results[0].shape
    stacked = prod(shape[made:own])
    if shape[:made] != result[:made] or result[made] % (stacked * tp) or _sizes(call)[made] == -1:
        return
    yield SizePlan(
        call=CALLS[call.target],
        of=_shape_of(call, strategy, tp, ()),
        count=len(result),
        position=made,
        written=result[made],
        local=result[made] // tp,
        dims=tuple(range(made, own)),
        times=result[made] // (stacked * tp),
    )


def _sizes(call: Call) -> tuple[object, ...]:
    argument = call.argument(SIZES[call.target], "size")
    return argument if isinstance(argument, tuple) else (argument,)


def _shape_of(call: Call, strategy: Strategy, tp: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Local sizes of the first operand's sharded dims, except for `dims`; 0 for all other dims."""
    layout = strategy.operands[0]
    local = local_shape(call.operands[0].shape, layout, tp)
    return tuple(size if dim == layout.dim and dim not in dims else 0 for dim, size in enumerate(local))


def _is_unambiguous(size: SizePlan, call: Call, strategy: Strategy, tp: int) -> bool:
    """False where a call would be taken for the one of `size` although another size stands at that position."""
    if CALLS.get(call.target) != size.call or not call.operands or not call.results:
        return True
    written = _sizes(call)
    shape = local_shape(call.operands[0].shape, strategy.operands[0], tp)
    is_like = len(shape) == len(size.of) and all(wanted in (0, own) for own, wanted in zip(shape, size.of, strict=True))
    if len(written) != size.count or not is_like or written[size.position] == -1:
        return True
    return dims_of_sizes(call).get(size.position) == size.dims
