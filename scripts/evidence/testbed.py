"""Predicted against measured on a cluster of two nodes that stands on one machine.

    sudo python scripts/evidence/testbed.py                              all models at 0.2, 1 and 5 Gbit/s, half an hour
    sudo python scripts/evidence/testbed.py --bandwidths 1 --models wide --folder kept   later more into the same folder

Two network namespaces are the nodes, a shaped link between them the network, and gloo ranks of one thread each run on
either, each on a processor that is as fast whatever the others do: a core, or a fixed part of one. The more ranks share
a core, the more the times in a profile spread: take a larger --profile-budget, or --ranks-per-node 1.

At each bandwidth the cluster is profiled; for each model tpplan solves for it, and the plan it chose and those that
practitioners would write (DDP, FSDP, Megatron's tensor parallelism with and without sequence parallelism, tensor
parallelism inside nodes with data parallelism across, pipeline stages) train in turns. Printed are predicted and
measured time of a step, and the regret: measured time of the chosen plan over that of the fastest. A machine that is
busier with other work than while it was profiled is told by how much: then the errors are not the predictions'.

Exit codes: 0 the bars are met, 4 they are not, 1 a failure, 77 skipped (no root, no iproute2, no namespaces).
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed_parts.models import WORKLOADS, Nodes, Workload, rivals, workload_named
from testbed_parts.network import Network, NotPermittedError, RanksError, run_on_nodes, shape, two_nodes
from testbed_parts.ranks import FEWEST_STEPS, REFERENCE_BYTES, REFERENCE_SIZE

from tpplan.core.errors import IndivisibleError, TpplanError, UsageError
from tpplan.core.files import write_atomically
from tpplan.core.mesh import AXES, GroupShape
from tpplan.core.strict_json import decode, encode, read_json
from tpplan.machine.profile import Collective, HardwareProfile, load_profile
from tpplan.plan.pipeline_plan import PipelinePlan, PipelinePrediction
from tpplan.plan.plan import Plan

OK, FAILED, BAR_MISSED, SKIPPED = 0, 1, 4, 77
NUM_NODES = 2
BANDWIDTHS_GBIT_PER_S = (0.2, 1.0, 5.0)
CHOSEN = "chosen"
#: bars: of the median absolute relative error of a step's predicted time, and of the regret
ERROR_BAR, REGRET_BAR = 0.12, 1.05
PORT = 29_533
#: for torchrun and its ranks to start, build their models and end
START_S = 90.0
#: how many times as long as planned a job may take before it is ended
PATIENCE = 4.0
RANKS_SCRIPT = str(Path(__file__).resolve().parent / "testbed_parts" / "ranks.py")
SAME_LOSS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan of a case: under which names it stands, what was predicted and what was measured, in seconds a step."""

    names: tuple[str, ...]
    mesh: str
    micro_batch: int
    predicted_s: float
    predicted_error_s: float
    predicted_parts_s: Mapping[str, float]
    #: by round, the median of its steps
    round_s: tuple[float, ...]
    measured_parts_s: Mapping[str, float]

    @property
    def measured_s(self) -> float:
        """The median over rounds."""
        return statistics.median(self.round_s)

    @property
    def spread(self) -> float:
        """Between the quartiles of the rounds, relative to the median."""
        if len(self.round_s) < 2:
            return 0.0
        quartiles = statistics.quantiles(self.round_s, n=4, method="inclusive")
        return (quartiles[2] - quartiles[0]) / self.measured_s

    @property
    def error(self) -> float:
        """By how much the prediction is off, relative to what was measured; negative where it is too fast."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model at a bandwidth, with a row for each different plan."""

    workload: str
    gbit_per_s: float
    rows: tuple[Row, ...]
    #: how many times as long as in the profile these took while the plans trained: the machine was so much busier
    drift: Mapping[str, float]

    @property
    def chosen(self) -> Row:
        """The row of tpplan's own plan."""
        return next(row for row in self.rows if CHOSEN in row.names)

    @property
    def best(self) -> Row:
        """The fastest row, as measured."""
        return min(self.rows, key=lambda row: row.measured_s)

    @property
    def regret(self) -> float:
        """Measured time of the chosen plan over that of the fastest."""
        return self.chosen.measured_s / self.best.measured_s

    @property
    def allowed_regret(self) -> float:
        """The bar, or what the two plans' own measurements spread over where that is more."""
        return max(REGRET_BAR, 1 + max(self.chosen.spread, self.best.spread))


# --- measuring


def profile_cluster(
    network: Network, gbit_per_s: float, ranks_per_node: int, folder: Path, budget_s: float
) -> HardwareProfile:
    """The cluster's profile, measured inside it by `tpplan profile` where the folder holds none."""
    output = folder / f"profile-{gbit_per_s:g}.json"
    if not output.exists():
        script = [
            "-m",
            "tpplan",
            "profile",
            "-o",
            str(output),
            "--name",
            f"testbed-{gbit_per_s:g}",
            "--device",
            "cpu",
            "--budget",
            str(budget_s),
        ]
        _run(network, ranks_per_node, script, output, PATIENCE * budget_s)
    return load_profile(output)


def _run(network: Network, ranks_per_node: int, script: Sequence[str], output: Path, longest_s: float) -> None:
    run_on_nodes(
        network,
        script,
        port=PORT,
        ranks_per_node=ranks_per_node,
        log=output.with_suffix(".log"),
        timeout_s=START_S + longest_s,
    )


def plans_of(workload: Workload, nodes: Nodes) -> dict[tuple[str, ...], Plan | PipelinePlan]:
    """The chosen plan and the alternatives; those that are the same plan once, under all their names. Without stages
    that the model or the batch has too few of."""
    named = {CHOSEN: nodes.chosen_plan(workload)}
    for rival in rivals(nodes.num_nodes, nodes.ranks_per_node):
        with contextlib.suppress(IndivisibleError, UsageError):
            named[rival.name] = nodes.rival_plan(workload, rival)
    names: dict[str, list[str]] = {}
    for name, plan in named.items():
        names.setdefault(what_is_run(plan), []).append(name)
    return {tuple(group): named[group[0]] for group in names.values()}


def what_is_run(plan: Plan | PipelinePlan) -> str:
    """A plan without how it was found and what it was predicted to take: equal texts train alike."""
    if isinstance(plan, PipelinePlan):
        return json.dumps([plan.schedule, *map(what_is_run, plan.stages)])
    content = plan.to_dict()
    return json.dumps({key: content[key] for key in content.keys() - {"solver", "proof", "predicted"}}, sort_keys=True)


def measure_case(
    network: Network, workload: Workload, gbit_per_s: float, nodes: Nodes, folder: Path, budget_s: float
) -> Case:
    """Solves, trains under every plan in turn, and pairs what was predicted with what was measured.

    A folder in which it was measured already gives that.
    """
    stem = f"{workload.name}-{gbit_per_s:g}"
    kept = folder / f"{stem}-case.json"
    if kept.exists():
        return decode(Case, read_json(kept, origin=str(kept), error=UsageError), origin=str(kept), error=UsageError)
    plans = plans_of(workload, nodes)
    files = [folder / f"{stem}-plan{i}.json" for i in range(len(plans))]
    for file, plan in zip(files, plans.values(), strict=True):
        plan.dump(file)
    output = folder / f"{stem}-steps.json"
    script = [RANKS_SCRIPT, str(output), "--workload", workload.name, "--budget", str(budget_s)]
    least_s = FEWEST_STEPS * sum(plan.predicted.step_time_s for plan in plans.values())
    script += ["--plans", *map(str, files)]
    _run(network, nodes.ranks_per_node, script, output, PATIENCE * max(budget_s, least_s))
    measured = json.loads(output.read_text(encoding="utf-8"))
    steps = measured["steps"]
    check_same_function([found["first_loss"] for found in steps], list(plans))
    case = Case(
        workload=workload.name,
        gbit_per_s=gbit_per_s,
        rows=tuple(row_of(*pair, found) for pair, found in zip(plans.items(), steps, strict=True)),
        drift=drift_of(measured["references"], nodes),
    )
    write_atomically(kept, json.dumps(encode(case), indent=1) + "\n")
    return case


def drift_of(references: Mapping[str, float], nodes: Nodes) -> dict[str, float]:
    """What was measured beside the training over what the profile says of it."""
    size, profile = REFERENCE_SIZE, nodes.profile
    group = GroupShape(ranks=nodes.cluster.gpus, ranks_per_node=nodes.ranks_per_node)
    profiled = {
        "matmul": profile.matmul(m=size, n=size, k=size, dtype="float32").seconds,
        "all_reduce": profile.collective(Collective.ALL_REDUCE, group, REFERENCE_BYTES).seconds,
    }
    return {name: references[name] / seconds for name, seconds in profiled.items()}


def check_same_function(losses: Sequence[float], names: Sequence[tuple[str, ...]]) -> None:
    """The first loss is the same under every plan: they train one model. Raises RanksError where it is not."""
    middle = statistics.median([loss for loss in losses if math.isfinite(loss)] or [math.nan])
    for loss, group in zip(losses, names, strict=True):
        if not abs(loss - middle) <= SAME_LOSS * abs(middle):
            raise RanksError(f"{group[0]}: first loss {loss:.5f}, under the other plans {middle:.5f}")


def row_of(names: tuple[str, ...], plan: Plan | PipelinePlan, steps: dict[str, object]) -> Row:
    """A plan beside its steps. The error of a plan of stages is that of its stage with the largest."""
    stages = plan.stages if isinstance(plan, PipelinePlan) else (plan,)
    parts = [f"pp {plan.parts}"] if isinstance(plan, PipelinePlan) else []
    mesh, predicted = stages[0].mesh, plan.predicted
    if isinstance(predicted, PipelinePrediction):
        seconds = {"stage": predicted.stage_s, "bubble": predicted.bubble_s, "sending": predicted.send_s}
    else:
        seconds = dict(predicted.time_s)
    return Row(
        names=names,
        mesh=" x ".join([*parts, *(f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1)]),
        micro_batch=plan.batch.micro_batch,
        predicted_s=predicted.step_time_s,
        predicted_error_s=max(own.predicted.step_time_error_s for own in stages),
        predicted_parts_s=seconds,
        round_s=tuple(statistics.median(round_s) for round_s in steps["rounds"]),
        measured_parts_s=steps["parts"],
    )


# --- reporting


def case_table(case: Case) -> str:
    """A case for reading: a line per plan, times in milliseconds, and the regret."""
    lines = [
        f"{case.workload} at {case.gbit_per_s:g} Gbit/s",
        f"  {'plan':28}{'mesh':22}{'micro':>5}{'predicted':>16}{'measured':>10}{'spread':>8}{'error':>8}",
    ]
    for row in sorted(case.rows, key=lambda row: row.measured_s):
        predicted = f"{row.predicted_s * 1e3:.0f} +- {row.predicted_error_s * 1e3:.0f}"
        lines.append(
            f"  {', '.join(row.names):28}{row.mesh:22}{row.micro_batch:5}{predicted:>16}{row.measured_s * 1e3:10.0f}"
            f"{row.spread:8.0%}{row.error:+8.0%}"
        )
    drift = ", ".join(f"{name} {factor:.2f}" for name, factor in case.drift.items())
    lines.append(f"  regret {case.regret:.3f}, allowed {case.allowed_regret:.3f}; times as long as profiled: {drift}")
    return "\n".join(lines)


def parts_table(case: Case) -> str:
    """Where a step's time was predicted to go, and where it went, in milliseconds."""
    lines = []
    for row in case.rows:
        predicted = ", ".join(f"{part} {seconds * 1e3:.0f}" for part, seconds in row.predicted_parts_s.items())
        measured = ", ".join(f"{part} {seconds * 1e3:.0f}" for part, seconds in row.measured_parts_s.items())
        lines.append(f"  {row.names[0]}: predicted {predicted}; measured {measured}")
    return "\n".join(lines)


def median_error(cases: Sequence[Case]) -> float:
    """Median absolute relative error over all plans of all cases."""
    return statistics.median(abs(row.error) for case in cases for row in case.rows)


def summary(cases: Sequence[Case]) -> str:
    """The two bars."""
    num_plans = sum(len(case.rows) for case in cases)
    beyond = [f"{case.workload} at {case.gbit_per_s:g} Gbit/s" for case in cases if case.regret > case.allowed_regret]
    worst = max(case.regret for case in cases)
    return (
        f"median error {median_error(cases):.1%} over {num_plans} plans (bar {ERROR_BAR:.0%}); regret at most "
        f"{worst:.3f} over {len(cases)} cases (bar {REGRET_BAR} or the spread), beyond it: "
        f"{', '.join(beyond) or 'none'}"
    )


def bars_met(cases: Sequence[Case]) -> bool:
    """True where both bars are."""
    return median_error(cases) <= ERROR_BAR and all(case.regret <= case.allowed_regret for case in cases)


def as_data(cases: Sequence[Case], seconds: float) -> str:
    """Everything that was found, as JSON."""
    rows = [
        {
            "workload": case.workload,
            "gbit_per_s": case.gbit_per_s,
            "plan": list(row.names),
            "mesh": row.mesh,
            "micro_batch": row.micro_batch,
            "predicted_s": row.predicted_s,
            "predicted_error_s": row.predicted_error_s,
            "predicted_parts_s": row.predicted_parts_s,
            "measured_s": row.measured_s,
            "round_s": list(row.round_s),
            "measured_parts_s": row.measured_parts_s,
            "regret": case.regret,
            "drift": case.drift,
        }
        for case in cases
        for row in case.rows
    ]
    return json.dumps({"took_s": round(seconds), "median_error": median_error(cases), "rows": rows}, indent=1) + "\n"


# --- the command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidths", type=float, nargs="+", default=BANDWIDTHS_GBIT_PER_S, metavar="GBIT_PER_S")
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--models", nargs="+", default=names, help=f"of {', '.join(names)}; tiny is for tests")
    parser.add_argument("--ranks-per-node", type=int, default=2, metavar="N", help="ranks on each node (%(default)s)")
    parser.add_argument("--profile-budget", type=float, default=120.0, help="seconds for each profile (%(default)s)")
    parser.add_argument("--case-budget", type=float, default=40.0, help="seconds of steps for each case (%(default)s)")
    parser.add_argument("--parts", action="store_true", help="also print where the time of each step goes")
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep profiles, plans, steps and logs here; what is there already is not measured again",
    )
    parser.add_argument("-o", "--output", type=Path, help="write everything as JSON")
    options = parser.parse_args(arguments)
    if min(*options.bandwidths, options.ranks_per_node, options.profile_budget, options.case_budget) <= 0:
        parser.error("bandwidths, ranks and budgets: expected numbers above 0")
    try:
        options.models = [workload_named(name) for name in options.models]
    except KeyError as error:
        parser.error(f"unknown model {error}; known: {', '.join(names)}")
    return options


def measure_all(network: Network, options: argparse.Namespace, folder: Path) -> tuple[list[Case], int]:
    """Every case, each printed as soon as it is there, and how many failed: the others go on."""
    cases, failed = [], 0
    for gbit_per_s in options.bandwidths:
        shape(network, gbit_per_s)
        profile = profile_cluster(network, gbit_per_s, options.ranks_per_node, folder, options.profile_budget)
        nodes = Nodes(num_nodes=NUM_NODES, ranks_per_node=options.ranks_per_node, profile=profile)
        for workload in options.models:
            try:
                case = measure_case(network, workload, gbit_per_s, nodes, folder, options.case_budget)
            except RanksError as error:
                print(f"testbed: {workload.name} at {gbit_per_s:g} Gbit/s: {error}", file=sys.stderr)
                failed += 1
                continue
            cases.append(case)
            print(case_table(case), flush=True)
            if options.parts:
                print(parts_table(case), flush=True)
    return cases, failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Sets the cluster up, measures, removes it, reports."""
    options = parse(arguments)
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="testbed-") as temporary, two_nodes() as network:
            folder = options.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            cases, failed = measure_all(network, options, folder)
    except NotPermittedError as error:
        print(f"skipped: no cluster can be made here: {error}", file=sys.stderr)
        return SKIPPED
    except (RanksError, TpplanError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return FAILED
    if not cases:
        return FAILED
    print(summary(cases))
    if options.output:
        options.output.write_text(as_data(cases, time.perf_counter() - start), encoding="utf-8")
    if failed:
        return FAILED
    return OK if bars_met(cases) else BAR_MISSED


if __name__ == "__main__":
    sys.exit(main())
