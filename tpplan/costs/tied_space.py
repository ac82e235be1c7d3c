"""The decision space of an assignment in which like decisions are one, so that a price looks at one of each."""

from collections.abc import Mapping
from dataclasses import replace

from tpplan.core.repeated_blocks import like_ops
from tpplan.costs.gradient_sums import additions_behind
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.decision_space import Space, classes_of, members_of


def tied_space(assignment: Assignment) -> Space:
    """Returns the space in which an assignment is the only choice. Decisions at one place of like blocks are one where
    they have the same strategy, as many additions of gradients behind them, and results that are views alike: then they
    cost the same."""
    classes, members = classes_of(assignment.graph)
    own = _split(classes, assignment)
    if own != classes:
        classes, members = own, members_of(own)
    # Where nothing is split, the space has the very classes of the graph, of which much is known already.
    return replace(assignment.space, classes=classes, members=members)


def _split(classes: Mapping[str, str], assignment: Assignment) -> dict[str, str]:
    """Decision -> the first decision of its class that costs the same."""
    graph, strategies = assignment.graph, assignment.strategies
    added, like, found = additions_behind(graph), like_ops(graph), dict[object, str]()
    return {
        name: found.setdefault((representative, like.get(name), strategies[name], added[name]), name)
        for name, representative in classes.items()
    }
