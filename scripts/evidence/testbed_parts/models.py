"""What the testbed trains: four models of the example GPT, and the plans that practitioners would write for them."""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tpplan
from tpplan.core.errors import UsageError
from tpplan.core.mesh import divisors
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.plan.plan import Plan
from tpplan.search.pipelines.any_pipeline import solve_any
from tpplan.search.points.options import Options

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import gpt
from megatron_pins import megatron_pins

#: one op for all parameters: AdamW's default goes through Python for each
OPTIMIZER = "adamw-fused"
#: options of plans of stages
STAGES: dict[str, Any] = {"loss": gpt.loss, "optimizer": OPTIMIZER, "recompute": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and a batch: `global_batch` samples of `seq_len` tokens a step."""

    name: str
    config: gpt.Config
    global_batch: int
    seq_len: int

    def build_model(self) -> gpt.GPT:
        """The model; seed torch before where the weights matter."""
        return gpt.GPT(self.config)


WORKLOADS = (
    Workload(
        name="wide",
        config=gpt.Config(num_layers=2, model_dim=512, hidden_dim=2048, num_heads=8, vocab_size=512),
        global_batch=4,
        seq_len=64,
    ),
    Workload(
        name="narrow",
        config=gpt.Config(num_layers=2, model_dim=256, hidden_dim=1024, num_heads=4, vocab_size=512),
        global_batch=4,
        seq_len=512,
    ),
    Workload(
        name="vocabulary",
        config=gpt.Config(num_layers=2, model_dim=256, hidden_dim=1024, num_heads=4, vocab_size=8192),
        global_batch=4,
        seq_len=128,
    ),
    Workload(
        name="deep",
        config=gpt.Config(num_layers=6, model_dim=384, hidden_dim=1536, num_heads=6, vocab_size=512),
        global_batch=16,
        seq_len=64,
    ),
)


def workload_named(name: str) -> Workload:
    """A workload of this name, the tests' own among them. Raises KeyError."""
    return {workload.name: workload for workload in (*WORKLOADS, TINY)}[name]


#: for tests
TINY = Workload(name="tiny", config=gpt.Config(num_layers=2), global_batch=4, seq_len=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """What a practitioner would write without a planner: degrees, and for Megatron's plans where norms run; for stages
    how many, and their schedule."""

    name: str
    tp: int
    fsdp: int
    #: how norms run, where projections are Megatron's; None leaves layouts to the solver
    norms: str | None = None
    stages: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B


def rivals(num_nodes: int, ranks_per_node: int) -> tuple[Rival, ...]:
    """The alternatives on a cluster."""
    ranks = num_nodes * ranks_per_node
    return (
        Rival(name="DDP", tp=1, fsdp=1),
        Rival(name="FSDP", tp=1, fsdp=ranks),
        Rival(name="TP", tp=ranks, fsdp=1, norms="replicate"),
        Rival(name="TP+SP", tp=ranks, fsdp=1, norms="sequence"),
        Rival(name="TP in, DP across", tp=ranks_per_node, fsdp=1),
        Rival(name="stages across, TP in", tp=ranks_per_node, fsdp=1, stages=num_nodes),
        Rival(name="stages across, DP in", tp=1, fsdp=1, stages=num_nodes),
        Rival(name="a stage a rank", tp=1, fsdp=1, stages=ranks),
        Rival(name="the same, zero bubble", tp=1, fsdp=1, stages=ranks, schedule=Schedule.ZERO_BUBBLE),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """A cluster as it was measured."""

    num_nodes: int
    ranks_per_node: int
    profile: HardwareProfile

    @property
    def cluster(self) -> tpplan.Cluster:
        """For tpplan.solve."""
        ranks = self.num_nodes * self.ranks_per_node
        return tpplan.Cluster(gpus=ranks, gpus_per_node=self.ranks_per_node, profile=self.profile)

    def solve(self, workload: Workload, **options: Any) -> Plan:
        """tpplan.solve for a workload, on all ranks, ZeRO-3 without recomputation: what is measured is sharding."""
        return tpplan.solve(
            workload.build_model,
            gpt.example_inputs,
            loss=gpt.loss,
            cluster=self.cluster,
            global_batch=workload.global_batch,
            seq_len=workload.seq_len,
            optimizer=OPTIMIZER,
            **{"all_gpus": True, "recompute": "none", "reshard_after_forward": True, **options},
        )

    def rival_plan(self, workload: Workload, rival: Rival, *, prove: bool = True) -> Plan | PipelinePlan:
        """An alternative, with as large a micro-batch as its ranks have samples for; of stages the best one."""
        if rival.stages > 1:
            return tpplan.solve_stages(
                workload.build_model,
                gpt.example_inputs,
                stages=rival.stages,
                schedule=rival.schedule,
                cluster=self.cluster,
                global_batch=workload.global_batch,
                seq_len=workload.seq_len,
                options=Options(tp=rival.tp, fsdp=rival.fsdp, **STAGES),
                prove=prove,
            )
        data_parallel = self.cluster.gpus // rival.tp
        micro_batch = workload.global_batch // data_parallel
        pins = megatron_pins(rival.norms) if rival.norms is not None else {}
        return self.solve(workload, tp=rival.tp, fsdp=rival.fsdp, micro_batch=micro_batch, prove=prove, pins=pins)

    def chosen_plan(self, workload: Workload) -> Plan | PipelinePlan:
        """The plan of least predicted time: in stages, or over micro-batches with tensor parallelism inside nodes or
        over all ranks."""
        stages = solve_any(
            workload.build_model,
            gpt.example_inputs,
            cluster=self.cluster,
            global_batch=workload.global_batch,
            seq_len=workload.seq_len,
            options=Options(all_gpus=True, **STAGES),
        )
        found: list[tuple[float, dict[str, Any]]] = []
        for micro_batch in divisors(workload.global_batch):
            for tp in (None, self.cluster.gpus):
                options = {"tp": tp, "micro_batch": micro_batch}
                with contextlib.suppress(UsageError):  # the batch does not divide among the ranks
                    found.append((self.solve(workload, prove=False, **options).predicted.step_time_s, options))
        seconds, options = min(found, key=lambda row: row[0])
        return stages if stages.predicted.step_time_s < seconds else self.solve(workload, **options)
