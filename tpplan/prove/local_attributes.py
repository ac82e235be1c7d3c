"""Integers of a module that its code takes for sizes: `self.heads` where a rank has a part of the heads.

Replacing numbers in calls is not enough where code computes with them: in `x.view(b, -1, self.heads, x.shape[-1] //
self.heads)` of a slice the last size is wrong too. Then the attribute itself is replaced. Which attributes are sizes is
guessed from their values, and the proof tells whether the guess was right.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from tpplan.core.graph import LOSS_SCOPE, Direction
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.rules import takes_sizes
from tpplan.plan.plan import ATTRIBUTE, SizePlan
from tpplan.prove.compare import Counterexample

#: module name -> sizes to replace in the module's forward
Written = Mapping[str, tuple[SizePlan, ...]]


def with_attributes_of(assignment: Assignment, model: nn.Module, problem: Counterexample, written: Written) -> Written:
    """The sizes `written` so far, with attributes in place of all else for modules of the class whose code differs.

    First those that are sizes of sharded dims that views make; if these do not suffice, also those of any sharded dim
    that the code sees. Unchanged where there are none, or none are left.
    """
    node = problem.node
    if node is None or node.module == LOSS_SCOPE:
        return written
    names = {own.module for own in assignment.graph.ops} - {LOSS_SCOPE}
    cls = type(model.get_submodule(node.module))
    found = dict(written)
    for name in (name for name in names if type(model.get_submodule(name)) is cls):
        known = frozenset(size for size in written.get(name, ()) if size.call.startswith(ATTRIBUTE))
        of_views, of_all = (frozenset(_attributes(assignment, model, name, all_dims)) for all_dims in (False, True))
        chosen = next((own for own in (of_views, of_all) if known < own), known)
        if chosen != known:
            found[name] = tuple(sorted(chosen, key=lambda size: size.call))
    return found


def _attributes(assignment: Assignment, model: nn.Module, module: str, all_dims: bool) -> Iterator[SizePlan]:
    """Yields the module's integers that are the whole size of a dim which is sharded in its code."""
    sizes = set(_sharded_sizes(assignment, module, all_dims))
    for attribute, value in vars(model.get_submodule(module)).items():
        if type(value) is int and value in sizes and value % assignment.tp == 0:
            yield SizePlan(
                call=ATTRIBUTE + attribute, of=(), count=1, position=0, written=value, local=value // assignment.tp
            )


def _sharded_sizes(assignment: Assignment, module: str, all_dims: bool) -> Iterator[int]:
    """Yields whole sizes of the sharded dims that views in a module's code make; with `all_dims` of all in its code."""
    graph = assignment.graph
    ops = (op for op in graph.ops if op.module == module and (all_dims or takes_sizes(op.target)))
    entries = (b for b in graph.boundaries if all_dims and (b.module, b.direction) == (module, Direction.INPUT))
    for node in (*ops, *entries):
        strategy = assignment.strategy(node.name)
        pairs = [*zip(node.results, strategy.results, strict=True)]
        pairs += zip(node.operands, strategy.operands, strict=True) if all_dims else ()
        yield from (graph.values[name].shape[layout.dim] for name, layout in pairs if layout.dim is not None)
