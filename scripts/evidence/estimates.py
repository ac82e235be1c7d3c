"""How near the steps of pipelines are to the estimates by which most of their degrees are left out unsolved.

    python scripts/evidence/estimates.py [toy 8b 8b-slow 8b-tight] [--most 40]

For each case the degrees of some shapes are estimated from the whole model's ILP (tpplan.search.pipelines.estimates),
and the stages of up to `--most` of them by each kind of schedule are solved whatever their estimate: by 1F1B or
interleaved, and by zero-bubble schedules. Printed are both, and of steps within 10 % of the fastest by how much they
differ: above 0 % the step takes longer than its estimate. "left out" is how much slower than the fastest of these steps
is the one that the search finds among them, which solves those with an estimate up to `worth` times the best step. Exit
code 1 where that is more than 0.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median

import tpplan
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.search.models.user_model import load_model_file
from tpplan.search.pipelines.estimates import Estimate, Estimator, WholeModel, worth
from tpplan.search.pipelines.pipeline_shape import PipelineShape
from tpplan.search.pipelines.shape_search import Search
from tpplan.search.pipelines.solve_stages import deferring
from tpplan.search.pipelines.stage_solver import Degrees, StageSolver
from tpplan.search.points.options import Batch, Options

LLAMA = Path(__file__).resolve().parent.parent / "examples" / "llama.py"
#: of the fastest step, up to which estimates matter
NEAR = 1.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model by its builder, the GPUs and batch it is planned for, what links between nodes are slower by, the memory
    of a GPU in GiB (0: all it has), and the shapes: parts and stages of each."""

    builder: str
    gpus: int
    global_batch: int
    seq_len: int = 4096
    slower: float = 1.0
    memory_gib: float = 0.0
    shapes: tuple[tuple[int, int], ...] = ((2, 1), (2, 2), (2, 8), (4, 1), (4, 4), (8, 2))


CASES = {
    "toy": Case(builder="build_model", gpus=4, global_batch=16, seq_len=64, shapes=((2, 1), (2, 2))),
    "8b": Case(builder="llama3_8b", gpus=64, global_batch=512),
    "8b-slow": Case(builder="llama3_8b", gpus=64, global_batch=128, slower=8.0),
    "8b-tight": Case(builder="llama3_8b", gpus=64, global_batch=512, memory_gib=32.0),
}
#: the cases that are run where none is named
USUAL = ("8b", "8b-slow", "8b-tight")


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """An estimate, the step that was found (infinite where nothing fits), and of what."""

    estimate_s: float
    step_s: float
    shape: PipelineShape
    degrees: Degrees

    @property
    def words(self) -> str:
        """The degrees, in words."""
        how = "once a step" if self.degrees.once else "for each micro-batch"
        return f"{self.shape.option:<24} tp {self.degrees.tp} micro-batch {self.degrees.micro_batch:<3} {how}"


def searches_of(case: Case) -> list[Search]:
    """The searches of a case's shapes by both kinds of schedules, with one solver."""
    spec = load_model_file(f"{LLAMA}:{case.builder}")
    solver = StageSolver(
        build_model=spec.build_model,
        example_inputs=spec.example_inputs,
        cluster=tpplan.Cluster(gpus=case.gpus, gpus_per_node=min(8, case.gpus), profile=slowed(case.slower)),
        batch=Batch(case.global_batch, None, case.seq_len),
        options=Options(
            loss=spec.loss,
            unused_outputs=tuple(spec.unused_outputs),
            all_gpus=True,
            memory_limit_bytes=case.memory_gib * 2**30 or None,
        ),
    )
    shapes = (PipelineShape(parts=parts, virtual_stages=virtual) for parts, virtual in case.shapes)
    own = [Search(solver=solver, shape=shape, progress=None) for shape in shapes]
    return [*own, *(other for search in own for other in deferring(search))]


def slowed(factor: float) -> HardwareProfile:
    """The profile of 8 H100 a node, whose collectives between nodes take longer by a factor."""
    profile = load_profile("h100-sxm")
    if factor == 1:
        return profile
    raw = profile.to_dict()
    for one in raw["collectives"]:
        if one["ranks"] > one["ranks_per_node"]:
            if "latency_s" in one:
                one["latency_s"] *= factor
            one["time_s"] = [factor * seconds for seconds in one["time_s"]]
    return HardwareProfile.from_dict(raw, origin="h100-sxm with slower links")


def estimated(searches: list[Search]) -> Iterator[tuple[Estimate, Estimator, Search]]:
    """Yields the estimates of all degrees by relaxations, with what makes them and the search of their shape."""
    whole = WholeModel(solver=searches[0].solver)
    for search in searches:
        for degrees in search.floors(math.inf):
            for is_once in search.ways_to_reduce:
                estimator = Estimator(whole=whole, shape=search.shape, degrees=replace(degrees, once=is_once))
                if (found := estimator.relaxed()).seconds < math.inf:
                    yield found, estimator, search


def rows_of(case: Case, most: int) -> list[Row]:
    """The rows of a case, of the degrees whose relaxations are the shortest by each kind of schedule."""
    every = sorted(estimated(searches_of(case)), key=lambda one: one[0])
    kinds = ([one for one in every if one[2].shape.is_zero_bubble == kind] for kind in (False, True))
    found = []
    for relaxed, estimator, search in chain.from_iterable(own[:most] for own in kinds):
        seconds = estimator.of_ilp(relaxed).seconds
        step_s, _ = search.fastest_way(estimator.degrees, math.inf)
        found.append(Row(seconds, step_s, search.shape, estimator.degrees))
        print(f"{seconds:9.3f} s {step_s:9.3f} s  {found[-1].words}", flush=True)
    return found


def judged(name: str, rows: list[Row]) -> bool:
    """Prints what the rows of a case show; True where the search finds the fastest step."""
    fastest, least = min(row.step_s for row in rows), math.inf
    for row in sorted(rows):  # as the search does: the shortest estimate first
        if row.estimate_s < worth(row.shape) * least:
            least = min(least, row.step_s)
    for schedule in dict.fromkeys(row.shape.is_zero_bubble for row in rows):
        own = [row for row in rows if row.shape.is_zero_bubble is schedule]
        near = sorted(row.step_s / row.estimate_s - 1 for row in own if row.step_s <= NEAR * fastest)
        shown = f"{near[0]:+.1%} to {near[-1]:+.1%}, median {median(near):+.1%}" if near else "none"
        kind = "zero-bubble" if schedule else "1f1b and interleaved"
        print(f"{name}, {kind}: {len(own)} solved, {len(near)} within {NEAR - 1:.0%} of the fastest: {shown}")
    print(f"{name}: left out {least / fastest - 1:.2%}")
    return least <= fastest


def main(words: list[str] | None = None) -> int:
    """Prints the table of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=USUAL, metavar="case", help=f"of {', '.join(CASES)}")
    parser.add_argument("--most", type=int, default=40, help="degrees of each kind of schedule that are solved")
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}: take some of {', '.join(CASES)}")
    found = [judged(name, rows_of(CASES[name], arguments.most)) for name in arguments.cases]
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
