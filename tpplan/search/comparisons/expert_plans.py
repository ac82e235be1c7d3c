"""Plans as an expert writes them by hand, found as the best plan under the pins that make them: what is left free (the
micro-batch, recomputation, the tensor-parallel degree within a node) is chosen as well as it can be.

| name | mesh | layers |
|---|---|---|
| ddp | replicas alone | whole |
| fsdp | FSDP over all GPUs, resharded after forward | whole |
| megatron | tp within a node, replicas | columns then rows; norms whole; token table and head by vocabulary |
| megatron+sp | the same | norms on slices of the sequence |
| torchtitan | tp within a node, FSDP over the rest | as megatron+sp |
| hf | tp within a node, FSDP over the rest | as the model's own `tp_plan` says; the rest whole |

Pins come from the model's structure: its repeated blocks, its matrices, its largest table.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tpplan.core.errors import UsageError
from tpplan.core.graph import ModelGraph
from tpplan.core.mesh import tp_degrees
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.pins import Pinned, matrix_ops, parse_pin
from tpplan.layouts.rules.embedding import EMBEDDING
from tpplan.plan.compress_names import pattern_of
from tpplan.plan.plan import Plan
from tpplan.plan.styles import Style
from tpplan.search.comparisons.alternatives import NO_CHANGED_PLAN, NO_PLAN, Alternative, Problem

#: the style of a module under each word of a model's own `tp_plan` that a pin can say
_WORDS = {
    "colwise": Style.COLUMN,
    "colwise_rep": Style.COLUMN,
    "colwise_gather_output": Style.COLUMN,
    "packed_colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "rowwise_rep": Style.ROW,
    "rowwise_split_input": Style.ROW,
    "packed_rowwise": Style.ROW,
    "embedding_rowwise": Style.VOCABULARY,
    "sequence_parallel": Style.SEQUENCE,
    "replicate": Style.REPLICATED,
    "replicated_with_grad_allreduce": Style.REPLICATED,
}
#: pins of a model's graph on a number of tp ranks
PinsOf = Callable[[ModelGraph, nn.Module, int], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A kind of plan: its pins where it uses tp (None: it does not), and what the other GPUs are: FSDP shards, or
    replicas. `reshards` is as solve's reshard_after_forward."""

    pins: PinsOf | None
    is_sharded: bool
    reshards: bool | None = None


def expert_plan(problem: Problem, name: str, reference: Plan, *, prove: bool) -> Alternative:
    """The best plan of a recipe in RECIPES on all GPUs of the problem's cluster, or why there is none. `reference` is a
    plan of the problem, whose trace is used. Raises UsageError for an unknown name."""
    if name not in RECIPES:
        raise UsageError(f"unknown plan {name!r}; known: {', '.join(RECIPES)}")
    recipe, cluster = RECIPES[name], problem.cluster
    traced = problem.traced(reference)
    degrees = tp_degrees(cluster.gpus, cluster.gpus_per_node, across_nodes=False)
    found: list[tuple[Plan, dict[str, Any]]] = []
    problems: list[str] = []
    for tp in [degree for degree in degrees if (degree > 1) == (recipe.pins is not None)]:
        try:
            own = _options(recipe, problem, traced.graph, traced.model, tp)
            found.append((problem.solve(prove=False, **own), own))
        except NO_CHANGED_PLAN as error:
            problems.append(str(error))
    if not found:
        alone = f"it divides weights among GPUs of a node, and a node has {cluster.gpus_per_node}"
        return Alternative(name=name, plan=None, problem=problems[0] if problems else alone)
    best, options = min(found, key=lambda row: row[0].predicted.step_time_s)
    try:
        return Alternative(name=name, plan=problem.solve(**options) if prove else best)
    except NO_PLAN as error:
        return Alternative(name=name, plan=None, problem=str(error))


def _options(recipe: Recipe, problem: Problem, graph: ModelGraph, model: nn.Module, tp: int) -> dict[str, Any]:
    """Arguments of solve that make plans of a recipe on tp ranks."""
    options: dict[str, Any] = {
        "tp": tp,
        "fsdp": problem.cluster.gpus // tp if recipe.is_sharded else 1,
        "ep": 1,
        "all_gpus": True,
        "fsdp_over_tp": False,
    }
    if recipe.reshards is not None:
        options["reshard_after_forward"] = recipe.reshards
    if recipe.pins is not None:
        options["pins"] = dict(recipe.pins(graph, model, tp))
    return options


# Pins


def _megatron(norms: Style) -> PinsOf:
    """Pins of Megatron's layouts, with norms in a style."""

    def pins(graph: ModelGraph, model: nn.Module, tp: int) -> Mapping[str, str]:
        blocks = {block.pattern: str(Style.MEGATRON) for block in graph.blocks}
        found = {**blocks, **dict.fromkeys(_norms(graph), str(norms)), **_vocabulary(graph, tp)}
        return {pattern: style for pattern, style in found.items() if _has_effect(graph, pattern, style)}

    return pins


def _norms(graph: ModelGraph) -> Iterator[str]:
    """Yields patterns of modules whose own parameters are all vectors, and that are no part of a product's module."""
    ranks: dict[str, int] = {}
    for source in graph.parameters:
        module = source.label.rpartition(".")[0]
        ranks[module] = max(ranks.get(module, 0), len(graph.values[source.result].shape))
    yield from dict.fromkeys(pattern_of(graph, module) or ROOT for module, rank in ranks.items() if rank == 1)


def _vocabulary(graph: ModelGraph, tp: int) -> dict[str, str]:
    """Styles of the table with the most rows, and of the product that gives as many outputs, where tp divides them."""
    shapes = {source.result: graph.values[source.result].shape for source in graph.parameters}
    matrices = list(matrix_ops(graph).values())
    tables = [(shapes[m.op.operands[m.positions[0]]][0], m) for m in matrices if m.op.target == EMBEDDING]
    if not tables or max(rows for rows, _ in tables) % tp:
        return {}
    rows, table = max(tables, key=lambda found: found[0])
    heads = [m for m in matrices if m.op.target != EMBEDDING and rows in shapes[m.op.operands[m.positions[0]]]]
    named = {table.op.module: Style.VOCABULARY} | {head.op.module: Style.COLUMN for head in heads}
    return {pattern_of(graph, module) or ROOT: str(style) for module, style in named.items()}


def _own_plan(graph: ModelGraph, model: nn.Module, tp: int) -> Mapping[str, str]:
    """Pins of the model's own `tp_plan`, {pattern of modules: word}, and whole weights in modules that it does not
    name. Raises UsageError for a model without one."""
    words = getattr(model, "tp_plan", None)
    if not isinstance(words, Mapping) or not words:
        raise UsageError("the model has no tp_plan of its own, a dict {pattern of modules: style}")
    named = {pattern: str(_WORDS[word]) for pattern, word in words.items() if word in _WORDS}
    kept = {pattern: style for pattern, style in named.items() if _has_effect(graph, pattern, style)}
    said = [parse_pin(pattern, style) for pattern, style in kept.items()]
    owners = dict.fromkeys(source.label.rpartition(".")[0] for source in graph.parameters)
    others = [owner for owner in owners if not any(pin.matches(owner) for pin in said)]
    whole = dict.fromkeys((pattern_of(graph, owner) or ROOT for owner in others), str(Style.REPLICATED))
    return kept | {pattern: style for pattern, style in whole.items() if _has_effect(graph, pattern, style)}


def _has_effect(graph: ModelGraph, pattern: str, style: str) -> bool:
    """True where some decision of the graph is held by the pin."""
    try:
        return bool(Pinned(graph=graph, pins=(parse_pin(pattern, style),)).held)
    except UsageError:
        return False


_SEQUENCE = _megatron(Style.SEQUENCE)
RECIPES = {
    "ddp": Recipe(pins=None, is_sharded=False),
    "fsdp": Recipe(pins=None, is_sharded=True, reshards=True),
    "megatron": Recipe(pins=_megatron(Style.REPLICATED), is_sharded=False),
    "megatron+sp": Recipe(pins=_SEQUENCE, is_sharded=False),
    "torchtitan": Recipe(pins=_SEQUENCE, is_sharded=True, reshards=True),
    "hf": Recipe(pins=_own_plan, is_sharded=True, reshards=True),
}
