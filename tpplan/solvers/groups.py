"""Reduces nodes and edges before pricing: drops strategies that agree with none, and merges nodes into groups.

- A strategy that no strategy at the other end of an edge agrees with is dropped.
- Edges between the same two nodes become one link, on which both ends must have equal labels.
- Two linked nodes are merged into a *group* where that makes no more *columns*; a column is a choice of strategies for
  all nodes of the group on which their edges agree. A node whose layouts follow from a neighbour's disappears.

The result holds for any prices; problems with the same nodes and edges share it.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from tpplan.solvers.matrix import Floats, Ints, Mask
from tpplan.solvers.problem import Edge, Node

#: nodes and edges whose skeletons are kept
MOST_KNOWN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeColumns:
    """The group of a node, as its columns start:stop, and the node's strategy in each of them."""

    start: int
    stop: int
    strategies: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Two groups whose chosen columns must have equal labels; each column has a label below num_labels."""

    source: int
    target: int
    source_labels: Ints
    target_labels: Ints
    num_labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnds:
    """All links as arrays: their two `groups` and where their labels start and end; and, for each column at an end of a
    link, its label, numbered over all links, the link, and a sign, 1 at the source and -1 at the target."""

    groups: Ints
    label_starts: Ints
    label_ends: Ints
    columns: Ints
    labels: Ints
    links: Ints
    signs: Floats

    @property
    def num_labels(self) -> int:
        """Number of labels of all links."""
        return int(self.label_ends[-1]) if len(self.label_ends) else 0


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """Groups by number; group g has the columns starts[g]:starts[g + 1]. `kinds`: two columns of a group with the same
    kind have equal labels on all links."""

    starts: Ints
    places: Mapping[str, NodeColumns]
    links: tuple[Link, ...]
    kinds: Ints

    @property
    def num_columns(self) -> int:
        """Number of columns of all groups."""
        return int(self.starts[-1])

    def prune(self, alive: Mask, groups: Iterable[int]) -> bool:
        """Clears columns of `alive` that agree with none along some link, after columns of `groups` were cleared; False
        where a group is left empty."""
        links_of = self._links_of
        waiting = dict.fromkeys(link for group in groups for link in links_of.get(group, ()))
        while waiting:
            number, _ = waiting.popitem()
            link = self.links[number]
            for group in self._pruned(link, alive):
                waiting.update(dict.fromkeys(links_of[group]))
        return bool(np.all(np.logical_or.reduceat(alive, self.starts[:-1]))) if self.num_columns else True

    def _pruned(self, link: Link, alive: Mask) -> Iterable[int]:
        """Clears columns that agree with none along one link; returns the groups that lost columns."""
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

    @cached_property
    def ends(self) -> "LinkEnds":
        """Both ends of all links."""
        sizes = np.array([link.num_labels for link in self.links], np.int64)
        starts = np.cumsum(sizes) - sizes
        sides = [
            (np.arange(self.starts[group], self.starts[group + 1]), labels + first, np.full(len(labels), i), sign)
            for i, (link, first) in enumerate(zip(self.links, starts, strict=True))
            for group, labels, sign in ((link.source, link.source_labels, 1.0), (link.target, link.target_labels, -1.0))
        ]
        none: Ints = np.zeros(0, np.int64)
        return LinkEnds(
            groups=np.array([(link.source, link.target) for link in self.links], np.int64).reshape(-1, 2),
            label_starts=starts,
            label_ends=starts + sizes,
            columns=np.concatenate([none, *(columns for columns, _, _, _ in sides)]),
            labels=np.concatenate([none, *(labels for _, labels, _, _ in sides)]),
            links=np.concatenate([none, *(links for _, _, links, _ in sides)]),
            signs=np.concatenate([np.zeros(0), *(np.full(len(columns), sign) for columns, _, _, sign in sides)]),
        )

    @cached_property
    def _links_of(self) -> dict[int, list[int]]:
        """The positions of each group's links."""
        found: dict[int, list[int]] = {}
        for i, link in enumerate(self.links):
            found.setdefault(link.source, []).append(i)
            found.setdefault(link.target, []).append(i)
        return found


def skeleton_of(nodes: Sequence[Node], edges: Sequence[Edge]) -> Skeleton | None:
    """The skeleton of nodes and edges; None where pruning shows that no choice agrees on all edges."""
    numbers = {node.name: i for i, node in enumerate(nodes)}
    found = _skeleton(
        tuple(len(node.strategies) for node in nodes),
        tuple((numbers[own.source], numbers[own.target], own.source_layouts, own.target_layouts) for own in edges),
    )
    if found is None:
        return None
    starts, columns, links, kinds = found
    places = {nodes[number].name: own for number, own in columns.items()}
    return Skeleton(starts=starts, places=places, links=links, kinds=kinds)


#: an edge: numbers of its two nodes, and the layouts at both
NumberedEdge = tuple[int, int, tuple[str, ...], tuple[str, ...]]


@lru_cache(maxsize=MOST_KNOWN)
def _skeleton(
    sizes: tuple[int, ...], edges: tuple[NumberedEdge, ...]
) -> tuple[Ints, Mapping[int, NodeColumns], tuple[Link, ...], Ints] | None:
    """The fields of the skeleton of nodes with so many strategies each, with nodes by number; computed once for
    problems that differ in names alone."""
    merger = _Merger(sizes, edges)
    if not all(merger.sizes.values()) or not merger.prune(merger.links):
        return None
    while (pair := merger.best_pair()) is not None:
        if not merger.merge(*pair):
            return None
    return merger.skeleton()


#: two groups, the one with the smaller number first
Pair = tuple[int, int]
#: labels of the columns of two groups, the group with the smaller number first
Labels = tuple[Ints, Ints]


class _Merger:
    """Groups and links, merged greedily as long as the number of columns does not grow."""

    def __init__(self, sizes: Sequence[int], edges: Iterable[NumberedEdge]) -> None:
        #: group -> node -> the node's strategy in each column
        self.picks: dict[int, dict[int, Ints]] = {i: {i: np.arange(size)} for i, size in enumerate(sizes)}
        self.sizes = dict(enumerate(sizes))
        self.links: dict[Pair, Labels] = {}
        #: the links of each group, each with its place in the order in which links were added
        self.links_of: dict[int, dict[Pair, int]] = {i: {} for i in self.sizes}
        self._num_added = 0
        #: link -> number of columns that merging its two groups saves
        self._gains: dict[Pair, int] = {}
        #: a heap of (-gain, place of the link, link); entries whose gain or place is outdated are skipped
        self._best: list[tuple[int, int, Pair]] = []
        #: links whose gain is to be counted
        self._unknown: set[Pair] = set()
        own: dict[int, Mask] = {}
        for source, target, source_layouts, target_layouts in edges:
            labels = _numbered(source_layouts, target_layouts)
            if source == target:
                own[source] = own.get(source, np.ones(self.sizes[source], bool)) & (labels[0] == labels[1])
            elif source < target:
                self._link((source, target), labels)
            else:
                self._link((target, source), (labels[1], labels[0]))
        for group, kept in own.items():
            self._keep(group, kept)

    def _link(self, pair: Pair, labels: Labels) -> None:
        """Adds a link; beside an existing link, labels become pairs of labels."""
        known = self.links.get(pair)
        if known is not None:
            width = _num_labels(labels)
            labels = _compact(known[0] * width + labels[0], known[1] * width + labels[1])
        else:
            self._num_added += 1
            for group in pair:
                self.links_of[group][pair] = self._num_added
        self._set(pair, labels)

    def _set(self, pair: Pair, labels: Labels) -> None:
        """Gives a link its labels, and marks the gain of its merge as unknown."""
        self.links[pair] = labels
        self._gains.pop(pair, None)
        self._unknown.add(pair)

    def _unlink(self, pair: Pair) -> Labels:
        """Removes a link; returns its labels."""
        for group in pair:
            del self.links_of[group][pair]
        self._gains.pop(pair, None)
        self._unknown.discard(pair)
        return self.links.pop(pair)

    def _keep(self, group: int, kept: Mask) -> None:
        """Drops a group's columns where `kept` is false."""
        self.sizes[group] = int(np.count_nonzero(kept))
        self.picks[group] = {node: picks[kept] for node, picks in self.picks[group].items()}
        for pair in self.links_of[group]:
            first, second = self.links[pair]
            self._set(pair, (first[kept], second) if pair[0] == group else (first, second[kept]))

    def prune(self, pairs: Iterable[Pair]) -> bool:
        """Drops columns that agree with none, starting from the given links; False where a group is empty."""
        waiting = dict.fromkeys(pairs)
        while waiting:
            pair, _ = waiting.popitem()
            width = _num_labels(self.links[pair])
            offered, accepted = np.zeros(width, bool), np.zeros(width, bool)
            offered[self.links[pair][0]], accepted[self.links[pair][1]] = True, True
            common = offered & accepted
            for group, labels in zip(pair, self.links[pair], strict=True):
                kept = common[labels]
                if not kept.all():
                    self._keep(group, kept)
                    if not self.sizes[group]:
                        return False
                    waiting.update(dict.fromkeys(self.links_of[group]))
        return True

    def best_pair(self) -> Pair | None:
        """The link whose merge saves the most columns, the first of equals; None where every merge adds columns."""
        for pair in self._unknown:
            width = _num_labels(self.links[pair])
            first, second = (np.bincount(side, minlength=width) for side in self.links[pair])
            self._gains[pair] = gain = self.sizes[pair[0]] + self.sizes[pair[1]] - int(first @ second)
            if gain >= 0:
                heapq.heappush(self._best, (-gain, self.links_of[pair[0]][pair], pair))
        self._unknown.clear()
        while self._best:
            loss, place, pair = self._best[0]
            if self._gains.get(pair) == -loss and self.links_of[pair[0]][pair] == place:
                return pair
            heapq.heappop(self._best)
        return None

    def merge(self, left: int, right: int) -> bool:
        """Merges the right group into the left one; False where no column agrees."""
        first, second = self._unlink((left, right))
        ours, theirs = np.nonzero(first[:, None] == second[None, :])
        picks = {node: chosen[ours] for node, chosen in self.picks[left].items()}
        picks |= {node: chosen[theirs] for node, chosen in self.picks.pop(right).items()}
        self.picks[left], self.sizes[left] = picks, len(ours)
        del self.sizes[right]
        if not len(ours):
            return False
        for group, columns in ((left, ours), (right, theirs)):
            for pair in sorted(self.links_of[group], key=self.links_of[group].__getitem__):
                labels = self._unlink(pair)
                other, mine = (pair[1], labels[0]) if pair[0] == group else (pair[0], labels[1])
                beyond = labels[1] if pair[0] == group else labels[0]
                moved = (mine[columns], beyond)
                self._link(*(((left, other), moved) if left < other else ((other, left), moved[::-1])))
        return self.prune(self.links_of[left])

    def skeleton(self) -> tuple[Ints, Mapping[int, NodeColumns], tuple[Link, ...], Ints]:
        """The remaining groups and links, numbered anew: what a Skeleton holds, with nodes by number."""
        numbers = {group: i for i, group in enumerate(self.picks)}
        starts = np.concatenate(([0], np.cumsum([self.sizes[group] for group in self.picks]))).astype(np.int64)
        places = {
            node: NodeColumns(start=int(starts[i]), stop=int(starts[i + 1]), strategies=strategies)
            for group, i in numbers.items()
            for node, strategies in self.picks[group].items()
        }
        links = []
        labels_of: dict[int, list[Ints]] = {i: [] for i in numbers.values()}
        for (left, right), labels in self.links.items():
            first, second = _compact(*labels)
            num_labels = _num_labels((first, second))
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
        return starts, places, tuple(links), kinds


def _numbered(source: Sequence[str], target: Sequence[str]) -> Labels:
    """The layouts at both ends of an edge as numbers."""
    numbers = {layout: i for i, layout in enumerate(dict.fromkeys((*source, *target)))}
    first = np.array([numbers[layout] for layout in source], np.int64)
    return first, np.array([numbers[layout] for layout in target], np.int64)


def _num_labels(labels: Labels) -> int:
    """One more than the largest label at either end of a link; 0 without labels."""
    return 1 + max(int(side.max(initial=-1)) for side in labels)


def _compact(first: Ints, second: Ints) -> Labels:
    """Labels renumbered from 0 without gaps."""
    numbers = np.unique(np.concatenate((first, second)), return_inverse=True)[1].reshape(-1)
    return numbers[: len(first)], numbers[len(first) :]
