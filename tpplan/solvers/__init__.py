"""Solvers by name. A solver is a module with an entry below and a function

    solve(problem, *, time_limit_s, cutoff, is_relaxed) -> Solution

The module and its library are imported at first use.

In: a `Problem`: nodes with strategies, edges on which strategies must agree, expressions to minimize and to keep below
limits. Out: a `Solution` with its bound. Nothing in this room depends on models. Needs no torch.

Imports: core.
"""

import difflib
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

from tpplan.core.errors import SolverError, UsageError
from tpplan.solvers.problem import Problem, Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A solver's module and the libraries it needs; only `automatic` solvers are chosen without being named."""

    name: str
    module: str
    requires: tuple[str, ...]
    automatic: bool


#: all solvers, in order of preference
SOLVERS = (
    Entry(name="highs", module="tpplan.solvers.highs", requires=("highspy",), automatic=True),
    Entry(name="cbc", module="tpplan.solvers.cbc", requires=("pulp",), automatic=True),
    Entry(name="brute-force", module="tpplan.solvers.brute_force", requires=(), automatic=False),
)


def available() -> tuple[str, ...]:
    """Names of the solvers whose libraries are installed, in order of preference."""
    return tuple(entry.name for entry in SOLVERS if not _missing(entry))


def solve(
    problem: Problem,
    *,
    solver: str | None = None,
    time_limit_s: float | None = None,
    cutoff: float = math.inf,
    is_relaxed: bool = False,
) -> Solution:
    """The cheapest feasible choice, found by the named solver or else by the first installed one.

    `time_limit_s` limits the solver's time; when it expires, the status is FEASIBLE and the bound tells how far off the
    choice may be. A resource may exceed its limit by a relative 1e-9. Where every choice costs more than `cutoff`, or
    none is feasible, the status may be BOUNDED with a bound above it. With is_relaxed, a BOUNDED solution of the linear
    relaxation is enough.

    Raises UsageError for an unknown solver or a time limit that is not positive, SolverError where no solver is
    installed or no feasible choice was found in time.
    """
    if time_limit_s is not None and not time_limit_s > 0:
        raise UsageError(f"time limit: expected more than 0 s, got {time_limit_s}")
    entry = _first_installed() if solver is None else _named(solver)
    return _load(entry)(problem, time_limit_s=time_limit_s, cutoff=cutoff, is_relaxed=is_relaxed)


def _named(name: str) -> Entry:
    """The entry of that name. Raises UsageError where there is none, SolverError where its library is not installed."""
    by_name = {entry.name: entry for entry in SOLVERS}
    if name not in by_name:
        nearest = difflib.get_close_matches(name, by_name, n=1, cutoff=0.0)[0]
        raise UsageError(f"unknown solver {name!r}: expected one of {', '.join(by_name)}. Did you mean {nearest!r}?")
    if missing := _missing(by_name[name]):
        raise SolverError(f"solver {name!r} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    return by_name[name]


def _first_installed() -> Entry:
    """The first automatic solver whose libraries are installed. Raises SolverError without one."""
    for entry in SOLVERS:
        if entry.automatic and not _missing(entry):
            return entry
    raise SolverError(f"no solver is installed: pip install {' '.join(SOLVERS[0].requires)}")


def _missing(entry: Entry) -> tuple[str, ...]:
    """The libraries that the solver needs and that are not installed; imports nothing."""
    return tuple(library for library in entry.requires if find_spec(library) is None)


def _load(entry: Entry) -> Callable[..., Solution]:
    """Imports the solver's module and returns its `solve`."""
    return cast(Callable[..., Solution], importlib.import_module(entry.module).solve)
