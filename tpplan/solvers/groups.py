"""Nodes and edges alone, before anything is priced: which strategies agree, and which nodes are one decision.

- A strategy for which some edge has no partner is gone.
- Edges between the same two nodes are one link, on which both ends must have equal labels.
- Two linked nodes are merged into a *group* where that makes no more *columns*: a column of a group is a choice for all
  of its nodes that agree. A node whose layouts follow from its neighbour's vanishes so.

All of it holds for every price: it is done once for the problems that share their nodes and edges.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpplan.solvers.problem import Edge, Node

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node is decided: the columns of its group are start:stop, and what each of them chooses."""

    start: int
    stop: int
    strategies: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Two groups whose labels must be equal: a label below num_labels for each column."""

    source: int
    target: int
    source_labels: Ints
    target_labels: Ints
    num_labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """Groups by number; those of group g have the columns starts[g]:starts[g + 1]. Two columns of a group with the same
    kind have equal labels on all links."""

    starts: Ints
    places: Mapping[str, Place]
    links: tuple[Link, ...]
    kinds: Ints

    @property
    def num_columns(self) -> int:
        """Columns of all groups."""
        return int(self.starts[-1])

    def prune(self, alive: Mask) -> bool:
        """Clears columns without a partner along some link, until none is left; False where a group has none."""
        waiting = dict.fromkeys(range(len(self.links)))
        while waiting:
            number = next(iter(waiting))
            del waiting[number]
            link = self.links[number]
            for group in self._pruned(link, alive):
                waiting.update(dict.fromkeys(self._links_of(group)))
        return bool(np.all(np.logical_or.reduceat(alive, self.starts[:-1]))) if self.num_columns else True

    def _pruned(self, link: Link, alive: Mask) -> Iterable[int]:
        """Keeps what agrees along one link; the groups that lost columns."""
        source = alive[self.starts[link.source] : self.starts[link.source + 1]]
        target = alive[self.starts[link.target] : self.starts[link.target + 1]]
        offered, accepted = np.zeros(link.num_labels, bool), np.zeros(link.num_labels, bool)
        offered[link.source_labels[source]] = True
        accepted[link.target_labels[target]] = True
        common = offered & accepted
        lost = []
        for group, columns, labels in (
            (link.source, source, link.source_labels),
            (link.target, target, link.target_labels),
        ):
            kept = columns & common[labels]
            if np.count_nonzero(kept) < np.count_nonzero(columns):
                columns[:] = kept
                lost.append(group)
        return lost

    def _links_of(self, group: int) -> Iterable[int]:
        return (i for i, link in enumerate(self.links) if group in (link.source, link.target))


def skeleton_of(nodes: Sequence[Node], edges: Sequence[Edge]) -> Skeleton | None:
    """The skeleton of a problem; None where no choice agrees along all edges, as far as pairs of nodes tell."""
    merger = _Merger(nodes, edges)
    if not merger.prune(merger.links):
        return None
    while (pair := merger.best_pair()) is not None:
        if not merger.merge(*pair):
            return None
    return merger.skeleton()


#: labels of two groups' columns, by the groups' numbers in ascending order
Labels = tuple[Ints, Ints]


class _Merger:
    """Groups that are merged as long as that makes no more columns."""

    def __init__(self, nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
        numbers = {node.name: i for i, node in enumerate(nodes)}
        #: what each column of a group chooses, by group and node
        self.picks: dict[int, dict[str, Ints]] = {
            i: {node.name: np.arange(len(node.strategies))} for i, node in enumerate(nodes)
        }
        self.sizes = {i: len(node.strategies) for i, node in enumerate(nodes)}
        self.links: dict[tuple[int, int], Labels] = {}
        self._gains: dict[tuple[int, int], int] = {}
        own: dict[int, Mask] = {}
        for edge in edges:
            source, target = numbers[edge.source], numbers[edge.target]
            labels = _numbered(edge.source_layouts, edge.target_layouts)
            if source == target:
                own[source] = own.get(source, np.ones(self.sizes[source], bool)) & (labels[0] == labels[1])
            elif source < target:
                self._link((source, target), labels)
            else:
                self._link((target, source), (labels[1], labels[0]))
        for group, kept in own.items():
            self._keep(group, kept)

    def _link(self, pair: tuple[int, int], labels: Labels) -> None:
        """A link beside that which there is: labels are then pairs of labels."""
        known = self.links.get(pair)
        if known is not None:
            width = 1 + max(int(side.max(initial=-1)) for side in labels)
            labels = _compact(known[0] * width + labels[0], known[1] * width + labels[1])
        self.links[pair] = labels
        self._gains.pop(pair, None)

    def _keep(self, group: int, kept: Mask) -> None:
        """Drops a group's other columns."""
        self.sizes[group] = int(np.count_nonzero(kept))
        self.picks[group] = {name: picks[kept] for name, picks in self.picks[group].items()}
        for pair, (first, second) in self.links.items():
            if group in pair:
                self.links[pair] = (first[kept], second) if pair[0] == group else (first, second[kept])
                self._gains.pop(pair, None)

    def prune(self, pairs: Iterable[tuple[int, int]]) -> bool:
        """Drops columns without a partner, from these links on; False where a group has none left."""
        waiting = dict.fromkeys(pairs)
        while waiting:
            pair = next(iter(waiting))
            del waiting[pair]
            width = 1 + max(int(side.max(initial=-1)) for side in self.links[pair])
            offered, accepted = np.zeros(width, bool), np.zeros(width, bool)
            offered[self.links[pair][0]], accepted[self.links[pair][1]] = True, True
            common = offered & accepted
            for group, labels in zip(pair, self.links[pair], strict=True):
                kept = common[labels]
                if not kept.all():
                    self._keep(group, kept)
                    waiting.update(dict.fromkeys(other for other in self.links if group in other))
        return all(self.sizes.values())

    def best_pair(self) -> tuple[int, int] | None:
        """The link along which merging saves most columns, the first of equals; None where each would make more."""
        for pair, labels in self.links.items():
            if pair not in self._gains:
                width = 1 + max(int(side.max(initial=-1)) for side in labels)
                first, second = (np.bincount(side, minlength=width) for side in labels)
                self._gains[pair] = self.sizes[pair[0]] + self.sizes[pair[1]] - int(first @ second)
        best = max(self.links, key=lambda pair: self._gains[pair], default=None)
        return best if best is not None and self._gains[best] >= 0 else None

    def merge(self, left: int, right: int) -> bool:
        """Puts the right group into the left one; False where then nothing agrees."""
        first, second = self.links.pop((left, right))
        self._gains.pop((left, right), None)
        ours, theirs = np.nonzero(first[:, None] == second[None, :])
        picks = {name: chosen[ours] for name, chosen in self.picks[left].items()}
        picks |= {name: chosen[theirs] for name, chosen in self.picks.pop(right).items()}
        self.picks[left], self.sizes[left] = picks, len(ours)
        del self.sizes[right]
        for group, columns in ((left, ours), (right, theirs)):
            for pair in [pair for pair in self.links if group in pair]:
                labels = self.links.pop(pair)
                self._gains.pop(pair, None)
                other, mine = (pair[1], labels[0]) if pair[0] == group else (pair[0], labels[1])
                beyond = labels[1] if pair[0] == group else labels[0]
                moved = (mine[columns], beyond)
                self._link(*(((left, other), moved) if left < other else ((other, left), moved[::-1])))
        return self.prune([pair for pair in self.links if left in pair])

    def skeleton(self) -> Skeleton:
        """What is left, numbered anew."""
        numbers = {group: i for i, group in enumerate(self.picks)}
        starts = np.concatenate(([0], np.cumsum([self.sizes[group] for group in self.picks]))).astype(np.int64)
        places = {
            name: Place(start=int(starts[i]), stop=int(starts[i + 1]), strategies=strategies)
            for group, i in numbers.items()
            for name, strategies in self.picks[group].items()
        }
        links = []
        labels_of: dict[int, list[Ints]] = {i: [] for i in numbers.values()}
        for (left, right), labels in self.links.items():
            first, second = _compact(*labels)
            num_labels = 1 + max(int(first.max(initial=-1)), int(second.max(initial=-1)))
            if num_labels < 2:
                continue
            source, target = numbers[left], numbers[right]
            labels_of[source].append(first)
            labels_of[target].append(second)
            links.append(
                Link(source=source, target=target, source_labels=first, target_labels=second, num_labels=num_labels)
            )
        kinds = np.zeros(int(starts[-1]), np.int64)
        for i, rows in labels_of.items():
            if rows:
                kinds[starts[i] : starts[i + 1]] = np.unique(np.stack(rows), axis=1, return_inverse=True)[1].reshape(-1)
        return Skeleton(starts=starts, places=places, links=tuple(links), kinds=kinds)


def _numbered(source: Sequence[str], target: Sequence[str]) -> Labels:
    """Layouts of an edge as numbers."""
    numbers = {layout: i for i, layout in enumerate(dict.fromkeys((*source, *target)))}
    first = np.array([numbers[layout] for layout in source], np.int64)
    return first, np.array([numbers[layout] for layout in target], np.int64)


def _compact(first: Ints, second: Ints) -> Labels:
    """Labels renumbered without gaps."""
    numbers = np.unique(np.concatenate((first, second)), return_inverse=True)[1].reshape(-1)
    return numbers[: len(first)], numbers[len(first) :]
