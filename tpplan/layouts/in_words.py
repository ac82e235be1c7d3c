"""Decisions in the words of messages: the op, tensor or parameter, its module, and the line of the model's code."""

from typing import assert_never

from tpplan.core.graph import Boundary, ModelGraph, Op
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.decision_space import Decider
from tpplan.layouts.readings import Reading
from tpplan.layouts.rules.attention import FLEX_ATTENTION
from tpplan.plan.compress_names import pattern_of


def in_words(graph: ModelGraph, decider: Decider) -> str:
    """A decision in words: `output of layers.*.attention.q`, `parameter head.weight`, `aten.view.default in head`."""
    match decider:
        case Op():
            return f"{decider.target} in {_module(graph, decider.module)}{_of_functions(decider)}"
        case Boundary():
            path = "" if decider.path == "output" else f" {decider.path}"
            return f"{decider.direction}{path} of {_module(graph, decider.module)}"
        case Reading():
            return f"parameter {pattern_of(graph, decider.source.label)}"
        case _:
            assert_never(decider)


def placed(graph: ModelGraph, decider: Decider) -> str:
    """A decision in words, with the shapes that it reads and, of an op, the line of code that called it, if known:
    `aten.view.default in layers.*.mlp (of [4, 16, 64]), at model.py:12: x.view(-1, 64)`."""
    names = (decider.source.result,) if isinstance(decider, Reading) else decider.operands
    shapes = ", ".join(str(list(graph.values[name].shape)) for name in names)
    line = graph.lines.get(decider.name)
    return in_words(graph, decider) + (f" (of {shapes})" if shapes else "") + (f", at {line}" if line else "")


def _of_functions(op: Op) -> str:
    """Says which positions (batch, head) the functions or mask of a flex_attention read, and so keep whole."""
    if op.target != FLEX_ATTENTION:
        return ""
    named = [name for name, is_cut in zip(("the batch", "the head"), op.args[5:7], strict=True) if not is_cut]
    return f", whose functions or mask name {' and '.join(named)}" if named else ""


def _module(graph: ModelGraph, module: str) -> str:
    return pattern_of(graph, module) or ROOT
