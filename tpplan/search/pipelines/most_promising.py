"""The fastest step of several shapes of pipelines: their degrees are looked at best first, each no further than needed.

What is known of degrees is first a bound, then an estimate (tpplan.search.pipelines.estimates): by a linear relaxation
without a memory limit, which several shapes share, by one with it, and by an ILP. Each takes longer than the one before
it, and solving stages far longer than all. The degrees that promise the shortest step are looked at next; their stages
are solved where the ILP's estimate still is the shortest. Degrees are left out where a bound is no less than the best
step found, or an estimate longer than is `worth` it. FSDP gathers weights and reduces gradients once a step, which
takes least; to do so for every micro-batch is a candidate of its own where memory makes that once a step slower.
"""

import heapq
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import count

from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.search.pipelines.estimates import NO_ESTIMATE, Estimate, Estimator, WholeModel, worth
from tpplan.search.pipelines.shape_search import LEFT_OUT, Search
from tpplan.search.pipelines.stage_solver import Degrees
from tpplan.search.points.options import Progress

logger = logging.getLogger(__name__)

#: how much slower the memory limit makes a step that gathers weights once, for other ways to be worth a look
_SLOWER = 1.001


class _Known(IntEnum):
    """The closest look that the search has taken at some degrees: at a bound of their step, or at an estimate of it, by
    a relaxation without a memory limit, by one with it, or by an ILP."""

    BOUND = 0
    UNLIMITED = 1
    RELAXED = 2
    ILP = 3


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """Degrees of a shape, with the seconds that they promise; of equal ones those of the lesser bound come first."""

    seconds: float
    bound_s: float
    order: int
    known: _Known = field(compare=False)
    search: Search = field(compare=False)
    degrees: Degrees = field(compare=False)
    estimate: Estimate = field(compare=False, default=NO_ESTIMATE)

    def is_left_out(self, least: float) -> bool:
        """True where the degrees are not worth another look, with a step of `least` seconds at hand."""
        if least == math.inf:
            return False
        return self.bound_s >= least or (
            self.known is not _Known.BOUND and self.seconds >= worth(self.search.shape) * least
        )

    def looked_at(self, whole: WholeModel, least: float) -> "Iterator[_Candidate]":
        """Yields the candidate with the next estimate, and one that opens up. Where nothing seems to fit there is no
        estimate by an ILP."""
        most_s = worth(self.search.shape) * least
        estimator = Estimator(whole=whole, shape=self.search.shape, degrees=self.degrees, most_s=most_s)
        match self.known:
            case _Known.BOUND:
                found, known = estimator.unlimited(), _Known.UNLIMITED
            case _Known.UNLIMITED:
                found, known = estimator.relaxed(), _Known.RELAXED
                if self.degrees.once and found.seconds > _SLOWER * self.seconds and False in self.search.ways_to_reduce:
                    yield replace(self, known=_Known.BOUND, degrees=replace(self.degrees, once=False))
            case _:
                found, known = estimator.of_ilp(self.estimate), _Known.ILP
        known = known if found.seconds < math.inf else _Known.ILP
        yield replace(self, seconds=max(self.seconds, found.seconds), known=known, estimate=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The seconds of a step, the search of its shape, and its degrees."""

    seconds: float
    search: Search
    degrees: Degrees


def fastest(searches: Sequence[Search], least: float = math.inf, *, progress: Progress | None = None) -> Best | None:
    """The fastest step that takes less than `least`; None where there is none. All searches have one solver.

    Raises InfeasibleError where nothing fits at any degrees, or pins leave no layout, and UsageError where a model has
    too few places to be cut.
    """
    if not searches:
        return None
    whole, waiting = WholeModel(solver=searches[0].solver), list(_candidates(searches, least))
    heapq.heapify(waiting)
    best: Best | None = None
    unfit, done, is_any_left_out = list[Search](), 0, False
    while waiting:
        candidate = heapq.heappop(waiting)
        is_open, search = not candidate.is_left_out(least), candidate.search
        if is_open and candidate.known is not _Known.ILP:
            for other in candidate.looked_at(whole, least):
                heapq.heappush(waiting, other)
            continue
        done += 1
        if progress is not None:
            progress("solve", done, done + len(waiting))
        seconds, degrees = search.fastest_way(candidate.degrees, least) if is_open else LEFT_OUT
        if degrees is None:
            is_any_left_out = True
        elif seconds == math.inf:
            unfit.append(search)
        else:
            least, best = seconds, Best(seconds=seconds, search=search, degrees=degrees)
    if unfit and best is None and not is_any_left_out:
        raise min(unfit, key=lambda search: search.shape).unfit()
    return best


def _candidates(searches: Sequence[Search], least: float) -> Iterator[_Candidate]:
    """Yields the degrees of all shapes, with their bounds."""
    order = count()
    for search in searches:
        for degrees, bound_s in search.floors(least).items():
            own = replace(degrees, once=True)
            yield _Candidate(bound_s, bound_s, next(order), known=_Known.BOUND, search=search, degrees=own)


def plan_of(best: Best, *, prove: bool, progress: Progress | None = None) -> PipelinePlan:
    """The plan of the best step; where the code does not have the graphs by which stages were compared, of the best by
    graphs that are all traced. Raises what `solve_stages` raises."""
    search = replace(best.search, progress=progress)
    plan = search.found(prove=prove, degrees=best.degrees)
    if plan is not None:
        return plan
    logger.info("%s: stages were compared by graphs that the code does not have: once more", search.shape.option)
    search = replace(search, solver=search.solver.tracing_all())
    again = fastest([search])
    assert again is not None, "no step is slower than infinitely many seconds"
    found = search.found(prove=prove, degrees=again.degrees)
    assert found is not None, "no graph is grown"
    return found
