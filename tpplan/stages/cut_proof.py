"""Whether the stages of a model together run the model: each its own part of the graph, on the same values."""

from collections.abc import Hashable, Mapping

from tpplan.core.graph import Argument, Boundary, ModelGraph, Op, Ref
from tpplan.plan.sections import StagePlan
from tpplan.stages.cuts import given_by


def difference(whole: ModelGraph, stage: ModelGraph, plan: StagePlan, own: range) -> str:
    """The first way in which a stage's graph does not run the nodes `own` of the whole model's on the same values; ""
    where it does, and gives what the whole gives there.

    Values are matched from the sources, and from what is received, on: a node of the stage runs what one of the whole
    does where operator, module and literals are the same, and it reads the matching values. What the stage runs
    besides, on stubs, matches nothing.
    """
    labelled = {(source.kind, source.label): source.result for source in stage.sources}
    matched = {s.result: labelled[s.kind, s.label] for s in whole.sources if (s.kind, s.label) in labelled}
    if plan.received is not None:
        matched.update(zip(given_by(whole, plan.received), given_by(stage, plan.received), strict=True))
    left: dict[Hashable, list[Op | Boundary]] = {}
    for node in reversed(stage.nodes):
        left.setdefault(_done(node, {name: name for name in node.operands}), []).append(node)
    for position, node in enumerate(whole.nodes):
        alike = left.get(_done(node, matched)) if all(name in matched for name in node.operands) else None
        if alike:
            other = alike.pop()
            matched.update((a, b) for a, b in zip(node.results, other.results, strict=True) if a not in matched)
        elif position in own:
            return f"{node.name} of {node.module or 'the root'} does not run on the same values in stage {plan.index}"
    if plan.last is None:
        ends = [value for _, value in whole.outputs], [value for _, value in stage.outputs]
    else:
        ends = list(given_by(whole, plan.last)), list(given_by(stage, plan.last))
    return "" if [matched.get(name) for name in ends[0]] == ends[1] else f"stage {plan.index} gives other values"


def _done(node: Op | Boundary, named: Mapping[str, str]) -> Hashable:
    """What a node does, to values under other names."""
    if isinstance(node, Boundary):
        return node.module, node.direction, node.path, named[node.operand]

    def renamed(argument: Argument) -> Argument:
        if isinstance(argument, Ref):
            return Ref(named[argument.name])
        return tuple(map(renamed, argument)) if isinstance(argument, tuple) else argument

    return node.target, node.module, renamed(node.args), tuple((key, renamed(value)) for key, value in node.kwargs)
