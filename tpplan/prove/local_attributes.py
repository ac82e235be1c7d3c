"""Integers of a module that its code takes for sizes: `self.heads` where a rank has a part of the heads.

Replacing numbers in calls is not enough where code computes with them: in `x.view(b, -1, self.heads, x.shape[-1] //
self.heads)` of a slice the last size is wrong too. Then the attribute itself is replaced. Which attributes are sizes is
guessed from their values, and the proof tells whether the guess was right. They may stand inside an attribute
(`self.config.heads`, `self.axes[0][1]`), whose other integers are none.

Where no attribute will do, the code may have the size elsewhere, in a closure or from a tensor's own shape, and compute
with it or take another path for it. Then it is told the shapes of one process where it asks
(tpplan.prove.whole_shapes).
"""

from collections.abc import Container, Iterable, Iterator

from torch import nn

from tpplan.core.graph import LOSS_SCOPE, Boundary, Direction, Op
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import takes_sizes
from tpplan.plan.plan import ATTRIBUTE, SHAPE, SizePlan
from tpplan.prove.counterexample import Counterexample
from tpplan.prove.whole_shapes import whole_shapes
from tpplan.trace.hooks.nested_integers import integers_within, parse_path, path_text

#: steps inside an attribute at which sizes are looked for
MOST_DEEP = 3
#: attributes that every module has
_OF_TORCH = frozenset(vars(nn.Module()))
#: module name -> sizes to replace in the module's forward
Written = dict[str, tuple[SizePlan, ...]]


def with_attributes_of(
    assignment: Assignment,
    model: nn.Module,
    problem: Counterexample,
    written: Written,
    growing: Container[tuple[str, int]] | None,
    *,
    done: Container[str],
) -> Written:
    """The sizes `written` so far, with attributes, or shapes that are told, in place of all else for modules of the
    class whose code differs, but for those that are `done`, which ran as they must.

    They are the next choice of _choices after those that `written` has; `written` is returned as it is where no choice
    is left. `growing` has the dims that grow with batch or length, if these are known.
    """
    node = problem.node
    if node is None or node.module == LOSS_SCOPE:
        return written
    names = {own.module for own in assignment.graph.ops} - {LOSS_SCOPE}
    cls = type(model.get_submodule(node.module))
    found = dict(written)
    for name in (name for name in names if name not in done and type(model.get_submodule(name)) is cls):
        known = frozenset(s for s in written.get(name, ()) if s.call.startswith(ATTRIBUTE) or s.call == SHAPE)
        chosen = _next_after(known, _choices(assignment, model.get_submodule(name), name, growing))
        if chosen != known:
            found[name] = tuple(sorted(chosen, key=lambda size: (size.call, size.count, size.position, size.local)))
    return found


def _choices(
    assignment: Assignment, module: nn.Module, name: str, growing: Container[tuple[str, int]] | None
) -> Iterator[frozenset[SizePlan]]:
    """Yields the sets of sizes to try, in this order: attributes that are sizes of dims that views make; those of any
    dim; those of views with integers inside attributes, ever deeper; those inside one attribute alone, where another
    has the same number for something else; those of one size that views make; shapes."""
    of_views, of_all = (frozenset(_sharded_sizes(assignment, name, all_dims)) for all_dims in (False, True))
    for sizes, depth in ((of_views, 0), (of_all, 0), *((of_views, depth) for depth in range(1, MOST_DEEP + 1))):
        yield frozenset(_attributes(module, sizes, depth, assignment.tp))
    inside = frozenset(_attributes(module, of_views, MOST_DEEP, assignment.tp))
    for attribute in vars(module):
        yield frozenset(size for size in inside if _attribute_of(size) == attribute)
    for size in sorted(of_views):
        yield frozenset(_attributes(module, frozenset({size}), 0, assignment.tp))
    if growing is not None:
        yield frozenset(whole_shapes(assignment, name, growing))


def _next_after(known: frozenset[SizePlan], choices: Iterable[frozenset[SizePlan]]) -> frozenset[SizePlan]:
    """The choice after `known` among the different ones that are not empty: the first where `known` is none of them,
    `known` itself where it is the last."""
    nonempty = filter(None, choices)
    if not known:
        return next(nonempty, known)
    different = [*dict.fromkeys(nonempty)]
    place = different.index(known) + 1 if known in different else 0
    return different[place] if place < len(different) else known


def _attributes(module: nn.Module, sizes: frozenset[int], depth: int, tp: int) -> Iterator[SizePlan]:
    """Yields the module's integers, in attributes or at most `depth` steps inside them, that are such a size."""
    for attribute, value in vars(module).items():
        for path, number in () if attribute in _OF_TORCH else integers_within(value, ((attribute, False),), depth):
            if number in sizes and number % tp == 0:
                call = ATTRIBUTE + path_text(path)
                yield SizePlan(call=call, of=(), count=1, position=0, written=number, local=number // tp)


def _attribute_of(size: SizePlan) -> str | int:
    """The name of the module's attribute that has a size, in itself or inside it."""
    (name, _), *_ = parse_path(size.call.removeprefix(ATTRIBUTE))
    return name


def _sharded_sizes(assignment: Assignment, module: str, all_dims: bool) -> Iterator[int]:
    """Yields whole sizes of the sharded dims that views in a module's code make; with `all_dims` of all in its code."""
    graph = assignment.graph
    ops = (op for op in graph.ops if op.module == module and (all_dims or takes_sizes(op.target)))
    entries = (b for b in graph.boundaries if all_dims and (b.module, b.direction) == (module, Direction.INPUT))
    nodes: tuple[Op | Boundary, ...] = (*ops, *entries)
    for node in nodes:
        strategy = assignment.strategy(node.name)
        pairs = [*zip(node.results, strategy.results, strict=True)]
        pairs += zip(node.operands, strategy.operands, strict=True) if all_dims else ()
        yield from (graph.values[name].shape[layout.dim] for name, layout in pairs if layout.dim is not None)
