"""Layouts of the tensors that cross between stages of a pipeline: what a stage receives as slices enters it as slices,
and what it sends as slices leaves it so."""

from tpplan.core.graph import ModelGraph, SourceKind
from tpplan.core.layout import Layout, P, R
from tpplan.plan.sections.ranks import RECEIVED, StagePlan


def crossing_layouts(graph: ModelGraph, stage: StagePlan | None) -> dict[str, Layout]:
    """Layouts other than R of the tensors that a stage receives and sends, by value; none for a whole model.

    The loss of a stage that sends slices is P: a stand-in for the loss adds up what is sent, and each rank its slices.
    """
    if stage is None:
        return {}
    received = {f"{RECEIVED}.{i}": one.layout for i, one in enumerate(stage.receives)}
    sent = {f"output.{i}": one.layout for i, one in enumerate(stage.sends)}
    found = {
        source.result: received[source.label]
        for source in graph.sources
        if source.kind is SourceKind.INPUT and source.label in received
    }
    found |= {own.result: sent[own.path] for own in graph.boundaries if own.leaves_model and own.path in sent}
    if graph.loss is not None and any(layout != R for layout in sent.values()):
        found[graph.loss] = P
    return {value: layout for value, layout in found.items() if layout != R}
