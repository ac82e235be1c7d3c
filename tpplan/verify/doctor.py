"""Finds out which parts of this installation work: tries each part that tpplan needs, and gives a line for it.

The last part is a whole round: a small model is planned for two ranks, and the plan is proven, run on two real ranks,
and compared with one process.
"""

import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist

from tpplan import solvers
from tpplan.apply.kept_results import KEPT_OPS
from tpplan.core.errors import first_line
from tpplan.core.files import version_of
from tpplan.core.mesh import Axis
from tpplan.layouts import rules
from tpplan.search.models.user_model import load_model_file
from tpplan.search.planner import solve
from tpplan.search.points.options import Cluster
from tpplan.solvers.problem import Expression, Node, Problem, Term
from tpplan.torch_internals.operators import missing_ops
from tpplan.torch_internals.probes import failed_probes, probes
from tpplan.torch_internals.versions import NEWEST, OLDEST, complaint
from tpplan.verify.checks import Outcome
from tpplan.verify.spawn_ranks import on_ranks
from tpplan.verify.verify import verify_plan

#: seconds for two ranks to start and add up a number, and for a whole round
RANKS_TIMEOUT_S, ROUND_TIMEOUT_S = 60.0, 120.0
#: namespaces of torch's own operators
_TORCHS_OWN = ("aten", "prims", "_c10d_functional", "mkldnn")
#: libraries that are used where they are installed
_OPTIONAL = ("transformers", "safetensors")
#: an embedding, an MLP, a head and a loss: a small model whose plan has every conversion of Megatron's pair
_MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(512, 128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)
        self.head = nn.Linear(128, 512)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))))

def build_model():
    return Model()

def example_inputs(batch, seq_len):
    tokens = torch.arange(batch * seq_len).view(batch, seq_len) % 512
    return {"tokens": tokens, "targets": tokens}

def loss(outputs, inputs):
    return nn.functional.cross_entropy(outputs.flatten(0, 1).float(), inputs["targets"].flatten())
"""


class State(StrEnum):
    """Whether a part works; one that is absent is not needed."""

    WORKS = "ok"
    FAILS = "FAILS"
    ABSENT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of the installation, in one line; `details` say what fails."""

    name: str
    state: State
    said: str
    details: tuple[str, ...] = ()


def examine() -> Iterator[Finding]:
    """Yields a finding for each part as it is tried. A failure is a finding, not an error."""
    yield Finding(name="tpplan", state=State.WORKS, said=_own_versions())
    yield from map(tried, _PARTS)


def tried(name: str) -> Finding:
    """The finding for the named part."""
    try:
        return _PARTS[name](name)
    except Exception as error:  # any failure is a finding
        return Finding(name=name, state=State.FAILS, said=f"{type(error).__name__}: {first_line(error, 'no message')}")


def _own_versions() -> str:
    return f"{version_of('tpplan', '')}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"


def _torch(name: str) -> Finding:
    state = State.FAILS if complaint(torch.__version__) else State.WORKS
    return Finding(name=name, state=state, said=f"{torch.__version__}; tested are {OLDEST} to {NEWEST}")


def _cuda(name: str) -> Finding:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
    count = torch.cuda.device_count()
    if not count:
        return Finding(name=name, state=State.ABSENT, said=f"{built}, no GPU: ranks run on the CPU, with gloo")
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    total = float(torch.ones(4, device="cuda").sum())
    return Finding(name=name, state=State.WORKS if total == 4 else State.FAILS, said=f"{built}, {count} x {names}")


def _nccl(name: str) -> Finding:
    if not dist.is_nccl_available():
        return Finding(name=name, state=State.ABSENT, said="this torch was built without NCCL")
    found = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    ranks = min(2, torch.cuda.device_count())
    if not ranks:
        return Finding(name=name, state=State.ABSENT, said=f"{found}, no GPU to run it on")
    return _summed(name, f"{found}, ", ranks, "cuda")


def _gloo(name: str) -> Finding:
    return _summed(name, "", 2, "cpu")


def _summed(name: str, said: str, num_ranks: int, device_type: str) -> Finding:
    sums = on_ranks(num_ranks, add_up, device_type, device_type=device_type, timeout_s=RANKS_TIMEOUT_S)
    is_right = sums == [num_ranks * (num_ranks + 1) / 2] * num_ranks
    said += f"{num_ranks} rank{'s' * (num_ranks > 1)} on this machine added up a number"
    return Finding(name=name, state=State.WORKS if is_right else State.FAILS, said=f"{said}: {sums[0]:g}")


def add_up(device_type: str) -> float:
    """Runs on each rank: the sum over ranks of rank + 1."""
    number = torch.tensor(float(dist.get_rank() + 1), device=device_type)
    dist.all_reduce(number)
    return float(number)


def _solvers(name: str) -> Finding:
    term = Term(name="time", expressions=(Expression(terms=(("layer", (2.0, 1.0)),)),))
    problem = Problem(nodes=(Node(name="layer", strategies=("slow", "fast")),), edges=(), objective=(term,))
    right: list[str] = []
    wrong: list[str] = []
    for entry in solvers.SOLVERS:
        if entry.automatic and entry.name in solvers.available():
            found = solvers.solve(problem, solver=entry.name)
            library = entry.requires[0]
            (right if found.objective == 1.0 else wrong).append(f"{entry.name} ({library} {version_of(library, '')})")
    said = ", ".join((*right, *(f"{one}: wrong" for one in wrong))) or "none is installed: pip install highspy"
    return Finding(name=name, state=State.WORKS if right and not wrong else State.FAILS, said=said)


def _internals(name: str) -> Finding:
    missing, total = failed_probes(), len(list(probes()))
    return Finding(
        name=name,
        state=State.FAILS if missing else State.WORKS,
        said=f"{total - len(missing)} of {total} internals of torch that tpplan needs work",
        details=tuple(map(str, missing)),
    )


def _operators(name: str) -> Finding:
    rules.has_rule("")
    known = frozenset(rules.registered_rules()).union(*KEPT_OPS.values())
    named = sorted(op for op in known if op.startswith(_TORCHS_OWN))
    missing = missing_ops(named)
    return Finding(
        name=name,
        state=State.FAILS if missing else State.WORKS,
        said=f"{len(named) - len(missing)} of {len(named)} that tpplan knows by name exist",
        details=tuple(f"{op} is not in this torch: modules that call what replaced it run whole" for op in missing),
    )


def _optional(name: str) -> Finding:
    there = [f"{package} {found}" for package in _OPTIONAL if (found := version_of(package, ""))]
    absent = [f"no {package}" for package in _OPTIONAL if not version_of(package, "")]
    return Finding(name=name, state=State.WORKS if there else State.ABSENT, said=", ".join((*there, *absent)))


def _round(name: str) -> Finding:
    with tempfile.TemporaryDirectory(prefix="tpplan-doctor-") as folder:
        path = Path(folder) / "model.py"
        path.write_text(_MODEL, encoding="utf-8")
        spec = load_model_file(str(path))
        plan = solve(
            spec.build_model,
            spec.example_inputs,
            loss=spec.loss,
            cluster=Cluster(gpus=2, gpus_per_node=2, profile="cpu-gloo"),
            global_batch=4,
            seq_len=64,
            tp=2,
        )
        report = verify_plan(plan, str(path), ranks=2, timeout_s=ROUND_TIMEOUT_S)
    failed = [f"{check.name}: {check.detail}" for check in report.checks if check.outcome is Outcome.FAIL]
    said = f"a small model planned on {Axis.TP} 2, {plan.proof.status}, run and compared with one process"
    return Finding(name=name, state=State.FAILS if failed else State.WORKS, said=said, details=tuple(failed))


_PARTS: dict[str, Callable[[str], Finding]] = {
    "torch": _torch,
    "CUDA": _cuda,
    "NCCL": _nccl,
    "gloo": _gloo,
    "solvers": _solvers,
    "internals": _internals,
    "operators": _operators,
    "optional": _optional,
    "round": _round,
}
