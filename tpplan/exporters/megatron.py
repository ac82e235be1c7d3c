"""flags of Megatron-LM for the same training, and comments on what these cannot say

    torchrun ... pretrain_gpt.py $(grep -v '^#' flags.txt) ...

Megatron-LM has its own models: sizes of the model are its flags, too, and are left to the reader. In each of its layers
it splits by columns the matrices that lead to others, and those by rows, and it splits the vocabulary of the embedding
and of the output layer [Shoeybi et al., "Megatron-LM", 2019]; with --sequence-parallel what stands between is on slices
of the sequence [Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022]. Where the
plan does something else, a comment says so, and Megatron-LM's step is another one than the plan's.
"""

from collections import Counter
from collections.abc import Iterator

from tpplan.core.errors import UsageError
from tpplan.core.graph import Direction, ModelGraph, within
from tpplan.core.layout import ROWS, P, S
from tpplan.core.name_patterns import ROOT
from tpplan.exporters import LaidOut
from tpplan.layouts.pins import Keeps, Pin, Pinned, matrix_ops
from tpplan.plan.plan import Plan, Precision, Recompute, uses_fsdp
from tpplan.plan.styles import Style
from tpplan.trace.trace import repeated_children

#: flags of Megatron-FSDP where parameters, gradients and optimizer states are sharded [Megatron Core, user guide]
_FSDP = ("--use-megatron-fsdp", "--use-distributed-optimizer", "--no-gradient-accumulation-fusion")
_OPTIMIZERS = {"adamw": "adam", "adamw-foreach": "adam", "adamw-fused": "adam", "sgd": "sgd", "sgd-momentum": "sgd"}
#: modules that a comment names at most
_MOST_NAMED = 4


def export(laid: LaidOut) -> str:
    """Returns the flags, one a line, and after them a comment for each part of the plan that they cannot say."""
    plan, flags, unsaid = laid.plan, list[str](), list[str]()
    for flag, comment in (*_of_batch(plan), *_of_data_parallel(plan), *_of_recompute(plan), *_of_tp(laid)):
        flags += [flag] if flag else []
        unsaid += [f"# not said: {' '.join(comment.split())}"] if comment else []
    return "\n".join([*flags, *unsaid]) + "\n"


def _of_batch(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields (flag, or "", what is not said, or "") for degrees, batch, dtype and optimizer."""
    batch = plan.batch
    yield f"--tensor-model-parallel-size {plan.mesh.tp}", ""
    yield "--pipeline-model-parallel-size 1", ""
    if plan.mesh.ep > 1:
        yield f"--expert-model-parallel-size {plan.mesh.ep}", ""
    yield f"--micro-batch-size {batch.micro_batch}", ""
    yield f"--global-batch-size {batch.global_batch}", ""
    yield f"--seq-length {batch.seq_len}", ""
    match plan.precision:
        case Precision.BF16_MIXED:
            yield "--bf16", ""
        case Precision.BF16 | Precision.BF16_AUTOCAST:
            yield "--bf16", f"precision {plan.precision}: --bf16 keeps float32 copies of bfloat16 parameters"
    name = _OPTIMIZERS.get(plan.optimizer)
    yield f"--optimizer {name}" if name else "", "" if name else f"optimizer {plan.optimizer}"


def _of_data_parallel(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields (flag, what is not said) for the data-parallel axes."""
    mesh = plan.mesh
    if plan.untouched is not None or not uses_fsdp(mesh, plan.precision) or mesh.shard == 1:
        return  # whole parameters, averaged gradients: Megatron-LM's own data parallelism
    kept = [name for name, reshards in plan.resharded_units().items() if not reshards]
    strategy = "optim_grads" if kept and len(kept) == len(plan.resharded_units()) else "optim_grads_params"
    yield from ((flag, "") for flag in _FSDP)
    yield f"--data-parallel-sharding-strategy {strategy}", ""
    if kept and strategy == "optim_grads_params":
        yield "", f"{_named(kept)}: parameters stay gathered from forward to backward"
    if mesh.replicate > 1:
        yield f"--num-distributed-optimizer-instances {mesh.replicate}", ""


def _of_recompute(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields (flag, what is not said) for recomputation."""
    modes, layers = plan.recomputed_modules(), plan.layers()
    whole = [name for name in layers if modes.get(name) is Recompute.FULL]
    if whole:
        is_all = len(whole) == len(layers)
        yield "--recompute-granularity full", ""
        yield f"--recompute-method {'uniform' if is_all else 'block'}", ""
        comment = "" if is_all or whole == list(layers[: len(whole)]) else "the first layers are recomputed, not "
        yield f"--recompute-num-layers {1 if is_all else len(whole)}", comment and comment + _named(whole)
    others = [name for name in modes if name not in whole]
    if others:
        yield "", f"{_named(others)}: recomputed but for its matrix products (selective)"


def _of_tp(laid: LaidOut) -> Iterator[tuple[str, str]]:
    """Yields (flag, what is not said) for the layouts on the tensor-parallel axis."""
    if laid.plan.mesh.tp == 1:
        return
    layers = list(repeated_children(laid.model))
    yield from _between_layers(laid, layers)
    yield from _conversions(laid, layers)
    if opaque := laid.plan.opaque_modules():
        yield "", f"{_named(list(opaque))}: runs whole on every rank"
    held = {decision: keeps for layer in layers for decision, keeps in _as_megatron(laid.graph, layer)}
    differing: dict[str, list[str]] = {}
    for name, matrix in matrix_ops(laid.graph).items():
        strategy, op = laid.strategies[name], matrix.op
        style = matrix.style(strategy)
        if any(within(op.module, layer) for layer in layers):
            is_kept = held[name](strategy) if name in held else style is Style.REPLICATED
        else:
            is_kept = style in (Style.VOCABULARY, Style.COLUMN)
        if not is_kept:
            differing.setdefault(str(style), []).append(op.module)
    for own, modules in differing.items():
        yield "", f"{_named(modules)}: {own}"


def _as_megatron(graph: ModelGraph, layer: str) -> Iterator[tuple[str, Keeps]]:
    """Yields (decision, test of its strategy) of the matrices that Megatron-LM splits; none of a layer in which no
    matrix leads to another."""
    try:
        pinned = Pinned(graph=graph, pins=(Pin(pattern=layer, style=Style.MEGATRON),)).held
    except UsageError:
        return
    yield from ((decision, keeps) for decision, pins in pinned.items() for _, keeps in pins)


def _conversions(laid: LaidOut, layers: list[str]) -> Iterator[tuple[str, str]]:
    """Yields what is not said of conversions in layers: all but those from and to summands, whole values and slices of
    the sequence, on which Megatron-LM's matrices and norms meet."""
    found: dict[str, list[str]] = {}
    for boundary in laid.graph.boundaries:
        value, strategy = laid.graph.values[boundary.operand], laid.strategies[boundary.name]
        ends = (strategy.operands[0], strategy.results[0])
        sequence = S(len(value.shape) - 2) if len(value.shape) > 1 else None
        is_known = all(own in (P, ROWS, sequence) or own.is_whole for own in ends)
        if ends[0] != ends[1] and not is_known and any(within(boundary.module, layer) for layer in layers):
            found.setdefault(f"{ends[0]} -> {ends[1]}", []).append(boundary.module)
    for own, modules in found.items():
        yield "", f"{_named(modules)}: converted {own}"


def _between_layers(laid: LaidOut, layers: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the flag of sequence parallelism where every layer is given slices of the sequence; what is not said where
    they are given slices of anything else."""
    found: Counter[str] = Counter()
    for boundary in laid.graph.boundaries:
        value = laid.graph.values[boundary.operand]
        enters = boundary.module in layers and boundary.direction is Direction.INPUT
        if enters and value.carries_gradient and len(value.shape) > 1:
            given = laid.strategies[boundary.name].results[0]
            is_sequence = given.is_plain and given.dim == len(value.shape) - 2
            found["" if given.is_whole else "the sequence" if is_sequence else str(given)] += 1
    if set(found) == {"the sequence"}:
        yield "--sequence-parallel", ""
    elif set(found) - {""}:
        shown = ", ".join(f"{count} {kind or 'whole'}" for kind, count in sorted(found.items()))
        yield "", f"layers are given slices of different kinds: {shown}"


def _named(modules: list[str]) -> str:
    """Returns the names of the first modules, and how many more there are."""
    names = list(dict.fromkeys(modules))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(name or ROOT for name in names[:_MOST_NAMED]) + more
