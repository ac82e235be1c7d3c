"""The mesh on its nodes: for each axis, a grid of GPUs in which the group of rank 0 is filled.

A node is a row of its GPUs in the order of their ranks. Clusters larger than MOST_NODES nodes are drawn up to there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tpplan.core.mesh import Axis
from tpplan.core.units import format_bytes
from tpplan.plan.plan import Plan
from tpplan.plan.report.words import axes_of, placed, plural

MOST_NODES = 8
#: GPUs of a node that are drawn
MOST_GPUS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A GPU: its rank, whether the mesh uses it, and whether it is in the group of rank 0."""

    rank: int
    is_used: bool
    is_in_group: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisDrawing:
    """An axis of more than one rank: where its groups lie, what they send per step, and the GPUs node by node.

    `left_out` says what is not drawn; "" where all is.
    """

    axis: Axis
    ranks: int
    place: str
    sent: str
    nodes: tuple[tuple[Cell, ...], ...]
    left_out: str


def drawings(plan: Plan) -> tuple[AxisDrawing, ...]:
    """A drawing of each axis of the plan's mesh that has more than one rank, outermost first."""
    return tuple(_drawing(plan, axis) for axis in axes_of(plan) if plan.mesh.size(axis) > 1)


def group_of_first(plan: Plan, axis: Axis) -> range:
    """The ranks of rank 0's group along an axis; tp is innermost."""
    mesh = plan.mesh
    stride = mesh.stride(axis)
    return range(0, stride * mesh.size(axis), stride)


def _drawing(plan: Plan, axis: Axis) -> AxisDrawing:
    shape = plan.mesh.group(axis, plan.cluster.gpus_per_node)
    return AxisDrawing(
        axis=axis,
        ranks=shape.ranks,
        place=placed(shape),
        sent=_sent(plan, axis),
        nodes=tuple(_nodes(plan, group_of_first(plan, axis))),
        left_out=_left_out(plan),
    )


def _sent(plan: Plan, axis: Axis) -> str:
    entries = [entry for entry in plan.collectives if entry.axis is axis]
    count = sum(entry.count for entry in entries)
    num_bytes = sum(entry.count * entry.num_bytes for entry in entries)
    return f"{plural(count, 'collective')} of {format_bytes(num_bytes)} in all" if count else "no collectives"


def _nodes(plan: Plan, group: range) -> Iterator[tuple[Cell, ...]]:
    gpus, per_node = plan.cluster.gpus, plan.cluster.gpus_per_node
    for first in range(0, min(gpus, MOST_NODES * per_node), per_node):
        last = min(gpus, first + min(per_node, MOST_GPUS))
        yield tuple(
            Cell(rank=rank, is_used=rank < plan.mesh.num_gpus, is_in_group=rank in group) for rank in range(first, last)
        )


def _left_out(plan: Plan) -> str:
    gpus, per_node = plan.cluster.gpus, plan.cluster.gpus_per_node
    num_nodes = -(-gpus // per_node)
    wide = f"{MOST_GPUS} of {per_node} GPUs of each node" if min(gpus, per_node) > MOST_GPUS else ""
    many = f"{MOST_NODES} of {num_nodes} nodes" if num_nodes > MOST_NODES else ""
    return "drawn: " + ", ".join(filter(None, (many, wide))) if wide or many else ""
