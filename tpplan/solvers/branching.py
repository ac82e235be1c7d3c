"""Branch and bound on linear relaxations, each of which HiGHS solves from the basis of the one before it.

HiGHS's own search prepares itself with cuts and smaller searches, which take seconds where memory is tight; without
them some 30 to 200 nodes of 10 ms are enough there. A node is a set of bounds of columns. The node of the least
relaxation comes first, and from each the search dives, to the nearer whole number of a column, until nothing is left
below. The column is the one whose relaxations are expected to rise most on both sides, by what they rose when it was
branched on before: pseudocosts with the product rule [Achterberg, Koch and Martin, "Branching rules revisited", 2005].
"""

import heapq
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import highspy
import numpy as np

from tpplan.solvers import milp
from tpplan.solvers.matrix import Floats, Mask, Program

#: nodes after which HiGHS's own search, which learns more from a node, is the better one
MOST_NODES = 400
#: the least that counts of what a relaxation rises by, so that a product tells columns apart
_LEAST_RISE = 1e-9
#: the least that counts of how far a column moves
_LEAST_MOVE = 1e-6

DOWN, UP = 0, 1


def execute(highs: highspy.Highs) -> None:
    """Runs HiGHS. Its threads are shared by the process; an error may mean that another user started another number of
    them, so the scheduler is reset and the run repeated."""
    if highs.run() == highspy.HighsStatus.kError:
        highspy.Highs.resetGlobalScheduler(True)
        highs.run()


@dataclass(slots=True)
class Incumbent:
    """The best whole solution that is known: its objective, or a cutoff, and its values where there is a solution."""

    objective: float
    values: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """The last branching above a node: a column by its place among whole ones, the side, how far the column was from
    its new bound, and the relaxation before."""

    place: int
    side: int
    distance: float
    objective: float


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    """Bounds of columns, below which nothing costs less than `bound`; of equal ones the older comes first."""

    bound: float
    order: int
    columns: Mapping[int, tuple[float, float]] = field(compare=False)
    branch: _Branch | None = field(compare=False, default=None)
    basis: highspy.HighsBasis | None = field(compare=False, default=None)


class _PseudoCosts:
    """By whole column and side what a relaxation rose by for each unit that the column moved."""

    def __init__(self, columns: int) -> None:
        self.sums, self.numbers = np.zeros((2, columns)), np.zeros((2, columns))

    def note(self, branch: _Branch, objective: float) -> None:
        """Keeps what a relaxation rose by, where that is known."""
        if objective == math.inf:
            return
        self.sums[branch.side, branch.place] += max(0.0, objective - branch.objective) / branch.distance
        self.numbers[branch.side, branch.place] += 1

    def column(self, fractions: Floats, is_open: Mask) -> int:
        """The place of the open column to branch on; of columns that were never branched on, the mean counts."""
        rises = []
        for side, distances in ((DOWN, fractions), (UP, 1 - fractions)):
            numbers, sums = self.numbers[side], self.sums[side]
            mean = sums.sum() / max(1.0, numbers.sum()) or 1.0
            rises.append(np.where(numbers > 0, sums / np.maximum(numbers, 1), mean) * distances)
        scores = np.maximum(rises[DOWN], _LEAST_RISE) * np.maximum(rises[UP], _LEAST_RISE)
        return int(np.argmax(np.where(is_open, scores, -1.0)))


@dataclass(kw_only=True)
class Branching:
    """The search for the best whole solution of a program that `highs` has loaded without its integrality, until a
    deadline by the monotonic clock; `known` is what solutions must be better than."""

    highs: highspy.Highs
    program: Program
    known: Incumbent
    deadline: float = math.inf
    _waiting: list[_Node] = field(default_factory=list)
    #: columns whose bounds HiGHS now has
    _bounded: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def search(self) -> bool:
        """Looks at nodes until none may be better than the incumbent, which is then the optimum up to the solver's
        tolerance; False where MOST_NODES or the time are used up, or a relaxation was not solved."""
        self._whole = np.flatnonzero(self.program.is_integer)
        self._costs = _PseudoCosts(len(self._whole))
        self._waiting = [_Node(-math.inf, 0, {})]
        looked_at = 0
        while self._waiting:
            node: _Node | None = heapq.heappop(self._waiting)
            while node is not None and node.bound < self._ceiling:
                if looked_at == MOST_NODES or time.monotonic() > self.deadline:
                    return False
                looked_at += 1
                objective = self._relaxed(node)
                if objective is None:
                    return False
                if node.branch is not None:
                    self._costs.note(node.branch, min(objective, self.known.objective))
                node = self._below(node, objective, looked_at) if objective < self._ceiling else None
        return True

    @property
    def _ceiling(self) -> float:
        """The objective from which on a solution is no better than the incumbent."""
        return self.known.objective - milp.SOLVER_TOLERANCE

    def _relaxed(self, node: _Node) -> float | None:
        """The optimum of a node's relaxation, infinite where it has none below the incumbent; None for a failure."""
        program = self.program
        if node.basis is not None:
            self.highs.setBasis(node.basis)
        for column in self._bounded:
            if column not in node.columns:
                self.highs.changeColBounds(column, program.lower[column], program.upper[column])
        for column, bounds in node.columns.items():
            if self._bounded.get(column) != bounds:
                self.highs.changeColBounds(column, *bounds)
        self._bounded = node.columns
        self.highs.setOptionValue("objective_bound", self.known.objective)
        execute(self.highs)
        match self.highs.getModelStatus():
            case highspy.HighsModelStatus.kOptimal:
                return float(self.highs.getInfo().objective_function_value)
            case highspy.HighsModelStatus.kInfeasible | highspy.HighsModelStatus.kObjectiveBound:
                return math.inf
        return None

    def _below(self, node: _Node, objective: float, order: int) -> _Node | None:
        """The nearer of the two nodes below one whose relaxation HiGHS has just solved, the other of which waits; None
        where the relaxation is whole, and the new incumbent."""
        values = np.array(self.highs.getSolution().col_value)
        own = values[self._whole]
        lower = np.floor(own + milp.SOLVER_TOLERANCE)
        fractions = own - lower
        is_open = fractions > milp.SOLVER_TOLERANCE
        if not is_open.any():
            self.known.objective, self.known.values = objective, values
            return None
        place = self._costs.column(fractions, is_open)
        near, far = self._sides(node, place, float(lower[place]), float(fractions[place]), objective, order)
        heapq.heappush(self._waiting, far)
        return near

    def _sides(
        self, node: _Node, place: int, lower: float, fraction: float, objective: float, order: int
    ) -> Iterator[_Node]:
        """Yields the two nodes below one, the nearer first; the other starts from the present basis."""
        column = int(self._whole[place])
        least, most = node.columns.get(column, (self.program.lower[column], self.program.upper[column]))
        bounds = {DOWN: (least, lower), UP: (lower + 1, most)}
        distances = {DOWN: max(fraction, _LEAST_MOVE), UP: max(1 - fraction, _LEAST_MOVE)}
        for side in sorted(distances, key=distances.__getitem__):
            branch = _Branch(place=place, side=side, distance=distances[side], objective=objective)
            columns = {**node.columns, column: bounds[side]}
            yield _Node(objective, order, columns, branch, self.highs.getBasis())
