"""The price of a published run, as tpplan prices a plan, taken apart so that numbers can be fitted."""

from dataclasses import dataclass, replace
from functools import cache

from accuracy_parts.models import architecture, example_inputs
from accuracy_parts.read import Run
from tpplan.costs.step.cost_table import price_space
from tpplan.costs.step.formulate import Formulation
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.machine.tables import Fitted
from tpplan.plan.parts import COMPUTE, DATA_PARALLEL, OPTIMIZER, RECOMPUTATION
from tpplan.plan.plan import Precision, Recompute
from tpplan.search.planner import Priced, price_mesh
from tpplan.search.points.options import Cluster, Options

SECOND_OVER_FIRST_FLASH_ATTENTION = 2.0
KERNELS = (COMPUTE, OPTIMIZER, RECOMPUTATION)
#: bytes of an element in bfloat16
HALF = 2


@dataclass(frozen=True, slots=True)
class Kernels:
    """Seconds of kernels as benchmarks have them: matmuls, and the others."""

    matmuls: float
    others: float

    def seconds(self, matmul_slowdown: float) -> float:
        """In training."""
        return matmul_slowdown * self.matmuls + self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A run's step: its kernels, seconds of what runs beside none, and FSDP's collectives, as (seconds, kernels beside
    it, times per step)."""

    kernels: Kernels
    alone: float
    beside: tuple[tuple[float, Kernels, float], ...]
    peak_bytes: float
    #: of the peak, bytes that no plan holds: see held_beside
    beside_bytes: float = 0.0

    def seconds(self, matmul_slowdown: float, overlap_slowdown: float) -> float:
        """The step, as tpplan prices it on a profile with these two numbers."""
        fixed, slope = self.line(matmul_slowdown)
        return fixed + slope * overlap_slowdown

    def line(self, matmul_slowdown: float) -> tuple[float, float]:
        """Seconds at no overlap slowdown, and how they grow with it."""
        fixed, slope = self.kernels.seconds(matmul_slowdown) + self.alone, 0.0
        for transfer, kernels, weight in self.beside:
            exposed = max(0.0, transfer - kernels.seconds(matmul_slowdown))
            fixed, slope = fixed + weight * exposed, slope + weight * (transfer - exposed)
        return fixed, slope


@cache
def benchmark(machine: str, has_first_flash_attention: bool) -> HardwareProfile:
    """A profile without its fitted numbers, and with the attention of a run's software."""
    profile = load_profile(machine)
    rates = tuple(
        replace(
            rate,
            forward_flop_per_s=rate.forward_flop_per_s / SECOND_OVER_FIRST_FLASH_ATTENTION,
            backward_flop_per_s=rate.backward_flop_per_s / SECOND_OVER_FIRST_FLASH_ATTENTION,
        )
        for rate in profile.attention_rates
    )
    profile = replace(profile, fitted=None, overlap=None)
    return replace(profile, attention_rates=rates, attention_tables=None) if has_first_flash_attention else profile


def price(run: Run) -> Parts:
    """The run's step, and its peak with what its code holds beside a plan's."""
    if run.recomputes_every_other_matmul:
        found = halfway(*(_price(run, mode) for mode in (Recompute.SELECTIVE, Recompute.FULL)))
        found = replace(found, peak_bytes=found.peak_bytes + attention_bytes(run) / 2)
    else:
        found = _price(run, run.recompute)
    beside = held_beside(run)
    return replace(found, peak_bytes=found.peak_bytes + beside, beside_bytes=beside)


def held_beside(run: Run) -> float:
    """Bytes that a run's code holds at its peak, and no plan's does.

    The logits of the micro-batch before, where a variable of the loop has them: micro-batch * length * vocabulary in
    bfloat16, a rank's share of the vocabulary where they are not gathered. Whole gradients that wait in float32 where
    parameters rest in bfloat16: 2 bytes more for each parameter of the tp rank. And where fully_shard wraps a single
    rank, the copies of the root and of one layer that compute reads.
    """
    held, ran = 0.0, run.software
    if ran.wraps_one_rank and run.gpus == run.tp and run.precision is Precision.BF16:
        model, fewer = architecture(run.sizes, ran), replace(run.sizes, layers=run.sizes.layers - 1)
        whole, without = model.num_parameters(run.sizes), model.num_parameters(fewer)
        held += HALF * (whole - (run.sizes.layers - 1) * (whole - without)) / run.tp
    if ran.keeps_logits and run.micro_batches > 1:
        ranks = 1 if ran.gathers_logits else run.tp
        held += HALF * run.micro_batch * run.sizes.seq_len * run.sizes.vocab / ranks
    if waits_whole(run) and ran.reduces_in_float32 and run.precision is Precision.BF16:
        held += HALF * run.sizes.num_parameters / run.tp
    return held


def waits_whole(run: Run) -> bool:
    """True where FSDP keeps whole gradients for a reduction at the end of a step, over one rank at least."""
    is_sharded = run.gpus > run.tp or run.software.wraps_one_rank
    return run.software.whole_gradients and run.micro_batches > 1 and is_sharded


def attention_bytes(run: Run) -> float:
    """Bytes of the results of attention on a rank, which are kept although full recomputation, half of what is priced,
    keeps none: layers * micro-batch * length * width in bfloat16."""
    sizes = run.sizes
    return HALF * sizes.layers * run.micro_batch * sizes.seq_len * sizes.hidden / run.tp


def halfway(selective: Parts, full: Parts) -> Parts:
    """Half of the matmuls that full recomputation repeats, and of the memory that it saves."""

    def between(one: Kernels, other: Kernels) -> Kernels:
        return Kernels((one.matmuls + other.matmuls) / 2, one.others)

    return Parts(
        kernels=between(selective.kernels, full.kernels),
        alone=selective.alone,
        beside=tuple(
            (transfer, between(kernels, other), weight)
            for (transfer, kernels, weight), (_, other, _) in zip(selective.beside, full.beside, strict=True)
        ),
        peak_bytes=(selective.peak_bytes + full.peak_bytes) / 2,
    )


def _price(run: Run, recompute: Recompute) -> Parts:
    """With Megatron's layouts and sequence parallelism on the tp axis, as all of these runs have it."""
    model, has_whole_logits = architecture(run.sizes, run.software), run.tp == 1 or run.software.gathers_logits
    priced = price_mesh(
        lambda: model.build(run.sizes),
        example_inputs,
        cluster=Cluster(
            gpus=run.gpus,
            gpus_per_node=run.gpus_per_node,
            profile=benchmark(run.machine, run.software.has_first_flash_attention),
        ),
        global_batch=run.global_batch,
        micro_batch=run.micro_batch,
        seq_len=run.sizes.seq_len,
        options=Options(
            loss=model.loss if has_whole_logits else model.sharded_loss,
            unused_outputs=() if has_whole_logits else ("output",),
            tp=run.tp,
            fsdp=run.shard,
            precision=run.precision,
            recompute=recompute,
            reshard_after_forward=run.reshard,
            whole_gradients=run.software.whole_gradients,
            optimizer=run.software.optimizer,
            compile=run.is_compiled,
            pins=model.pins if run.tp > 1 else {},
        ),
    )
    return parts(priced)


def parts(priced: Priced) -> Parts:
    """What of a priced step is matmuls, other kernels, collectives: a price is linear in the matmuls' slowdown."""
    plain, slow = (_at(priced.formulation, slowdown) for slowdown in (1.0, 2.0))
    choice = priced.choice
    beside, alone = [], sum(t.value(choice) for t in plain.problem.objective if t.name not in (*KERNELS, DATA_PARALLEL))
    if plain.mesh.data_parallel > 1:
        for overlap, slower in zip(*(f.objective.fsdp_communication.collectives() for f in (plain, slow)), strict=True):
            transfer = overlap.transfer.value(choice)
            if overlap.compute is None or slower.compute is None:
                alone += transfer * overlap.weight * overlap.count.constant
            else:
                one, two = overlap.compute.value(choice), slower.compute.value(choice)
                beside.append((transfer, Kernels(two - one, 2 * one - two), overlap.weight * overlap.count.constant))
    one, two = (sum(t.value(choice) for t in f.problem.objective if t.name in KERNELS) for f in (plain, slow))
    return Parts(
        kernels=Kernels(two - one, 2 * one - two), alone=alone, beside=tuple(beside), peak_bytes=priced.peak_bytes
    )


def _at(formulation: Formulation, matmul_slowdown: float) -> Formulation:
    """The same on a machine whose matmuls are slower, with the same choices to make."""
    setting, priced = formulation.setting, formulation.priced
    number = Fitted(name="matmul_slowdown", value=matmul_slowdown, residual=0.0, runs=1, what="tried")
    profile = replace(setting.profile, fitted=(number,))
    again = price_space(priced.space, profile, setting.gpus_per_node, priced.executor, is_compiled=priced.is_compiled)
    return replace(formulation, priced=again, setting=replace(setting, profile=profile))
