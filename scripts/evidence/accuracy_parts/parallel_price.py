"""The price of a published run with pipelines and experts in its layout: blocks by tpplan's pricer, and sums over them.

tpplan prices small models of three and four layers with pinned layouts; their difference is a layer, that of a model
with a head and one without it is the head. Attention is priced on tensor-parallel ranks, experts on the ranks that
divide them, where each has a tensor-parallel slice of the tokens. From these:

- A stage is its layers and the embedding or the head; the schedule is accuracy_parts.schedule's.
- Full recomputation runs the whole forward of a layer again, as Megatron's and DeepSpeed's checkpoints do (torch's stop
  where the last saved tensor is made, and tpplan prices that).
- ZeRO-1 is no plan of tpplan's: it is priced as a reduce-scatter of a stage's gradients and an all-gather of its
  parameters a step, from the profile's collectives, and an optimizer step on a rank's share in mixed precision. Where
  they overlap, they hide behind the last backward and the first forward of a micro-batch.
- ZeRO-3 gathers a layer's parameters beside its forward and again beside its backward, and reduces its gradients there
  too, in each micro-batch, by the same collectives on flat buffers. (FSDP2, which tpplan plans, pads the first
  dimension of a weight to the ranks: 16 experts on 32 ranks to twice their bytes. None of these runs is FSDP2's.)
- Where a source's nodes have less bandwidth between them than the profile's, what crosses nodes takes longer by as
  much.
- What a run's code launches beside kernels that a compiler would fuse is added to its layers
  (accuracy_parts.parallel_kernels).
- An exchange that sends a row once to each rank (inside a node) or node (across) moves the expected number of different
  ones among top_k even draws: n (1 - (1 - 1 / n)^k), where an all-to-all moves k.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from megatron_pins import megatron_pins
from torch import Tensor

import tpplan
from accuracy_parts.models import example_inputs
from accuracy_parts.parallel_kernels import further_seconds
from accuracy_parts.parallel_models import Kind, Layer, Shape, Small
from accuracy_parts.parallel_read import ParallelRun, layers_of_stages
from accuracy_parts.schedule import schedule_time
from tpplan.apply.collectives.gradient_buckets import BUCKET_BYTES
from tpplan.core.graph import Op, within
from tpplan.core.mesh import GroupShape
from tpplan.costs.step.formulate import Formulation
from tpplan.layouts.decision_space import Reading
from tpplan.layouts.rules.indexing import COUNTED, EXCHANGES
from tpplan.machine.profile import Collective, HardwareProfile, load_profile
from tpplan.plan.parts import (
    ACCUMULATION,
    COMPUTE,
    DATA_PARALLEL,
    EXPERT_PARALLEL,
    ISSUE,
    OPTIMIZER,
    RECOMPUTATION,
    TENSOR_PARALLEL,
)
from tpplan.plan.plan import Precision, Recompute
from tpplan.search.expert_degrees import every_degree
from tpplan.search.planner import prepare
from tpplan.search.points.options import Batch, Cluster, Options
from tpplan.search.points.point_solver import Candidate
from tpplan.search.points.request import Request

#: micro-batches that small models are priced with: parts that happen once a step are told from those of each
STEPS = 2
#: bytes of a parameter in 16 bits, and those that a mixed-precision AdamW moves of one: parameter, gradient and two
#: states in float32, all but the gradient written too
HALF, OPTIMIZER_BYTES = 2, 28
#: layers of the smaller model of a pair: of three, the middle one has layers on both sides, as most layers have
FEW = 3
#: bytes of a message whose time is its bytes' alone
BIG_BYTES = 2.0**32
ZERO_3 = 3
#: parts of a small model's step that each micro-batch has
EACH = (COMPUTE, TENSOR_PARALLEL, EXPERT_PARALLEL, RECOMPUTATION, ISSUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that a small model is priced on."""

    machine: str
    gpus: int
    gpus_per_node: int
    tp: int = 1
    fsdp: int = 1
    ep: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Seconds of a micro-batch on a rank: of forward alone, and by part of forward, backward and what runs again."""

    forward_s: float
    time_s: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Of a micro-batch."""
        return sum(self.time_s.values())

    def plus(self, other: "Block", weight: float = 1.0) -> "Block":
        """The sum with another, times a weight."""
        parts = {name: self.time_s.get(name, 0.0) for name in {**self.time_s, **other.time_s}}
        return Block(
            forward_s=self.forward_s + weight * other.forward_s,
            time_s={name: own + weight * other.time_s.get(name, 0.0) for name, own in parts.items()},
        )


NOTHING = Block(forward_s=0.0, time_s={})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPrice:
    """Predicted seconds of a run's step by part."""

    time_s: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return sum(self.time_s.values())


def _loss(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(logits.float(), inputs["targets"])


def _sum(output: Tensor, _inputs: Mapping[str, Tensor]) -> Tensor:
    return output.sum()


def _pins(ranks: Ranks, kind: Kind, *, has_head: bool) -> dict[str, str]:
    if ranks.tp == 1:
        return {}
    norms = "sequence" if ranks.sequence_parallel else "replicate"
    pins = {"tok_embeddings": "vocabulary", "layers.*.attention": "megatron", "layers.*.attention_norm": norms}
    if kind is Kind.GPT:
        pins = {**megatron_pins(norms), "tok_embeddings": "vocabulary"}
        del pins["norm"]
    return pins | ({"norm": norms, "lm_head": "columns"} if has_head else {})


@cache
def small(
    shape: Shape, kind: Kind, ranks: Ranks, micro_batch: int, recompute: Recompute, *, layers: int, has_head: bool
) -> Block:
    """The price of a small model in its pinned layout, on a profile as it ships, without its parameters."""
    options = Options(
        loss=_loss if has_head else _sum,
        unused_outputs=("output",),
        tp=ranks.tp,
        fsdp=ranks.fsdp,
        ep=ranks.ep,
        precision=Precision.BF16,
        recompute=Recompute.NONE if recompute is Recompute.FULL else recompute,
        reshard_after_forward=True,
        compile=True,
        memory_limit_bytes=float("inf"),
        all_gpus=True,
        pins=_pins(ranks, kind, has_head=has_head),
    )
    request = Request.of(
        lambda: Small(shape, kind, layers=layers, has_head=has_head),
        example_inputs,
        Cluster(gpus=ranks.gpus, gpus_per_node=min(ranks.gpus, ranks.gpus_per_node), profile=ranks.machine),
        Batch(STEPS * micro_batch * ranks.gpus // ranks.tp, micro_batch, shape.seq_len),
        options,
        None,
    )
    solvers, points, _ = every_degree(*prepare(request, options), options)
    return _block(solvers.of(points[-1]).solve_point(points[-1]), recompute)


def _block(found: Candidate, recompute: Recompute) -> Block:
    formulation, choice = found.formulation, found.solution.choice
    assert choice is not None, "without a memory limit there is a choice"
    time: Counter[str] = Counter()
    for term in formulation.problem.objective:
        time[term.name] += term.value(choice)  # type: ignore[assignment]
    each = {name: float(time[name]) / STEPS for name in EACH}
    forward = _forward_of_layers(formulation, choice)
    if recompute is Recompute.FULL:
        each[RECOMPUTATION] = forward[COMPUTE]
        for name in (TENSOR_PARALLEL, EXPERT_PARALLEL):
            each[name] += forward[name]
    each[ACCUMULATION] = float(time[ACCUMULATION]) / (STEPS - 1)
    return Block(forward_s=sum(forward.values()), time_s=each)


def _forward_of_layers(formulation: Formulation, choice: Mapping[str, int]) -> dict[str, float]:
    """Seconds of the forward of all layers, by part: as often the middle one's as there are layers, for what enters the
    first may be summed in it or before it."""
    units = formulation.setting.units
    middle, found = units[len(units) // 2], dict.fromkeys((COMPUTE, TENSOR_PARALLEL, EXPERT_PARALLEL), 0.0)
    for name, members in formulation.space.members.items():
        time = formulation.table[name][choice[name]]
        for decider in (formulation.space.deciders[member] for member in members):
            if within(decider.op.module if isinstance(decider, Reading) else decider.module, middle):
                is_exchange = isinstance(decider, Op) and decider.target in (COUNTED, *EXCHANGES)
                found[COMPUTE] += time.forward.seconds
                found[EXPERT_PARALLEL if is_exchange else TENSOR_PARALLEL] += time.forward_collectives.seconds
    return {part: len(units) * seconds for part, seconds in found.items()}


def layer_parameters(shape: Shape, kind: Kind) -> tuple[int, int]:
    """Parameters of a layer that tensor parallelism cuts, and of its experts."""
    with torch.device("meta"):
        layer = Layer(shape, kind)
    experts = sum(weight.numel() for weight in layer.parameters() if weight.dim() > 2)
    return sum(weight.numel() for weight in layer.parameters()) - experts, experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A run's layer, embedding and head, and parameters on a tensor-parallel and expert-parallel rank: of a layer's
    tensors that tensor parallelism cuts, of its experts, and of the embedding, or the head."""

    layer: Block
    embedding: Block
    head: Block
    cut: float
    experts: float
    table: float


def pieces(run: ParallelRun) -> Pieces:
    """The blocks of a run, each priced on the ranks that it runs on."""
    shape = run.shape
    ranks = Ranks(
        machine=run.machine,
        gpus=run.tp,
        gpus_per_node=run.gpus_per_node,
        tp=run.tp,
        sequence_parallel=run.sequence_parallel,
    )
    first = Kind.ATTENTION if shape.experts else Kind.GPT

    def priced(kind: Kind, layers: int, *, has_head: bool = False, on: Ranks = ranks, of: Shape = shape) -> Block:
        return small(of, kind, on, run.micro_batch, run.recompute, layers=layers, has_head=has_head)

    few = priced(first, FEW)
    layer = priced(first, FEW + 1).plus(few, -1.0)
    embedding = few.plus(layer, -FEW)
    head = priced(first, FEW, has_head=True).plus(few, -1.0)
    cut, experts = layer_parameters(shape, first)[0] / run.tp, 0.0
    if shape.window:
        other = priced(Kind.WINDOWED, FEW + 1).plus(priced(Kind.WINDOWED, FEW), -1.0)
        layer = NOTHING.plus(layer, 0.5).plus(other, 0.5)
    if shape.experts:
        on = replace(ranks, gpus=run.ep, tp=1, fsdp=run.ep, ep=run.ep, sequence_parallel=False)
        of = replace(shape, seq_len=shape.seq_len // run.tp if run.sequence_parallel else shape.seq_len)
        rest = priced(Kind.EXPERTS, FEW + 1, on=on, of=of).plus(priced(Kind.EXPERTS, FEW, on=on, of=of), -1.0)
        layer = layer.plus(_sent_once(rest, run))
        router, whole = layer_parameters(shape, Kind.EXPERTS)
        cut, experts = cut + router, whole / run.ep
    layer = layer.plus(_further(run))
    table = shape.vocab * shape.hidden / run.tp
    return Pieces(layer=layer, embedding=embedding, head=head, cut=cut, experts=experts, table=table)


def _further(run: ParallelRun) -> Block:
    """What the run's code launches in a layer beside the kernels of the small models."""
    forward, backward, again = further_seconds(run, load_profile(run.machine))
    return Block(forward_s=forward, time_s={COMPUTE: forward + backward, RECOMPUTATION: again})


def _sent_once(block: Block, run: ParallelRun) -> Block:
    """The block with an exchange that sends a row once to each rank of a node, or to each node, if the run's does."""
    if not run.sends_rows_once:
        return block
    nodes = -(-run.ep // run.gpus_per_node)
    share = different_share(nodes if nodes > 1 else run.ep, run.shape.top_k)
    return replace(block, time_s={**block.time_s, EXPERT_PARALLEL: share * block.time_s[EXPERT_PARALLEL]})


def different_share(places: int, draws: int) -> float:
    """Different places among even independent draws, over draws: n (1 - (1 - 1 / n)^k) / k."""
    return places * (1 - (1 - 1 / places) ** draws) / draws


def price_parallel(run: ParallelRun) -> ParallelPrice:
    """The predicted step of a run by part: those of the slowest stage, the bubble, sends, what is done once."""
    own, profile = pieces(run), load_profile(run.machine)
    counts = layers_of_stages(run)
    blocks = [NOTHING.plus(own.layer, count) for count in counts]
    blocks[0] = blocks[0].plus(own.embedding)
    blocks[-1] = blocks[-1].plus(own.head)
    slowest = max(blocks, key=lambda block: block.seconds)
    network = _Network(run=run, profile=profile)
    links = [network.link_s(stage) for stage in range(run.pp - 1)]
    schedule = schedule_time(
        [block.seconds for block in blocks],
        links,
        run.micro_batches,
        run.vpp,
        hides_sends=run.code.overlaps and run.vpp > 1,
    )
    parts = {name: run.micro_batches * seconds for name, seconds in slowest.time_s.items()}
    parts |= {"bubble": schedule.bubble_s, "sends between stages": schedule.send_s}
    once = max((_once(network, own, stage, count, slowest) for stage, count in enumerate(counts)), key=_total)
    return ParallelPrice(time_s=Counter(parts) + Counter(once))


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Network:
    """Collectives of a run between nodes and inside of them."""

    run: ParallelRun
    profile: HardwareProfile

    def seconds(self, kind: Collective, group: GroupShape, num_bytes: float) -> float:
        """Of a collective, as the profile has it; across nodes longer by as much as the run's nodes have less bandwidth
        than eight of the profile's GPUs that each gather on a network port of their own."""
        found = self.profile.collective(kind, group, num_bytes).seconds
        stated = self.run.code.node_bytes_per_s
        if group.nodes == 1 or not stated:
            return found
        pair = GroupShape(ranks=2, ranks_per_node=1)
        port = BIG_BYTES / 2 / self.profile.collective(Collective.ALL_GATHER, pair, BIG_BYTES).seconds
        return found * max(1.0, port * self.profile.gpus_per_node / stated)

    def link_s(self, stage: int) -> float:
        """Seconds of sending a micro-batch's activations to the next stage, of two ranks that gather as much from each
        other, as tpplan.search.pipelines.step_seconds has it; with an all-gather inside the receiving node where slices
        are."""
        run = self.run
        crosses = (stage + 1) * run.dp * run.tp % run.gpus_per_node == 0
        pair = GroupShape(ranks=2, ranks_per_node=1 if crosses else 2)
        num_bytes = HALF * run.micro_batch * run.shape.seq_len * run.shape.hidden
        slices = run.tp if run.sequence_parallel or run.code.sends == "gathered slices" else 1
        found = self.seconds(Collective.ALL_GATHER, pair, 2.0 * num_bytes / slices)
        if run.code.sends == "gathered slices" and not run.sequence_parallel:
            found += self.seconds(Collective.ALL_GATHER, GroupShape(ranks=run.tp, ranks_per_node=run.tp), num_bytes)
        return found

    def moved(self, cut: float, experts: float) -> tuple[float, float]:
        """Seconds of reducing gradients over data-parallel ranks and of gathering parameters, of so many parameters
        that each of a stage's tensor-parallel ranks has, and experts that each expert-parallel rank has."""
        run, reduced, gathered = self.run, 0.0, 0.0
        for number, ranks, inner in ((cut, run.dp, run.tp), (experts, run.dp * run.tp // run.ep, run.ep)):
            if ranks > 1 and number:
                group = GroupShape(ranks=ranks, ranks_per_node=max(1, min(ranks, run.gpus_per_node // inner)))
                kind = Collective.REDUCE_SCATTER if run.zero else Collective.ALL_REDUCE
                reduced += self.seconds(kind, group, number * run.code.reduce_bytes)
                gathered += self.seconds(Collective.ALL_GATHER, group, number * HALF) if run.zero else 0.0
        return reduced, gathered

    def beside(self, seconds: float, compute: float) -> float:
        """Seconds that collectives add beside compute, as tpplan prices FSDP's: what is not hidden, and by how much
        what is hidden slows the compute; all where a run's code hides nothing."""
        hidden = min(seconds, compute) if self.run.code.overlaps else 0.0
        return seconds - hidden + self.profile.overlap_slowdown * hidden


def _once(network: _Network, own: Pieces, stage: int, count: int, block: Block) -> dict[str, float]:
    """Seconds of what a rank of a stage does once a step: the optimizer, and what data parallelism exposes, which with
    ZeRO-3 is that of all micro-batches."""
    run = network.run
    tables = ((stage == 0) + (stage == run.pp - 1)) * own.table
    cut, experts = count * own.cut + tables, count * own.experts
    each = (cut / run.dp + experts * run.ep / (run.dp * run.tp)) if run.zero else cut + experts
    rate = network.profile.memory_bound(num_bytes=BUCKET_BYTES).seconds / BUCKET_BYTES
    if run.zero < ZERO_3:
        reduced, gathered = network.moved(cut, experts)
        exposed = network.beside(reduced, block.seconds - block.forward_s) + network.beside(gathered, block.forward_s)
    else:
        layer, ends = network.moved(own.cut, own.experts), network.moved(tables, 0.0)
        backward = own.layer.seconds - own.layer.forward_s
        per_layer = network.beside(layer[1], own.layer.forward_s) + network.beside(sum(layer), backward)
        exposed = run.micro_batches * (count * per_layer + ends[0] + 2 * ends[1])
    return {OPTIMIZER: rate * OPTIMIZER_BYTES * each, DATA_PARALLEL: exposed}
