"""Nodes of like blocks are looked at once, and what is said of each is what is said of it alone."""

from dataclasses import replace

from examples import eager_to_shard, example

from tpplan.core.graph import Op
from tpplan.core.layout import R
from tpplan.core.repeated_blocks import like_ops
from tpplan.layouts.rules import Strategy
from tpplan.prove.local_nodes import LocalNodes
from tpplan.search.planner import prepare
from tpplan.search.points.options import Batch, Cluster, Options
from tpplan.search.points.request import Request


def test_like_nodes_are_as_each_is_alone_where_their_layers_are_laid_out_apart() -> None:
    """A plan that is written by hand may shard one layer and leave another whole."""
    module = example("llama")
    options = Options(loss=module.loss, tp=2)
    cluster = Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard())
    request = Request.of(module.build_model, module.example_inputs, cluster, Batch(8, 2, 64), options, None)
    solver, points, _ = prepare(request, options)
    found = solver.solve_point(points[0])
    assert found.solution.choice is not None
    alike = found.formulation.assignment(found.solution.choice)
    block = alike.graph.blocks[0]
    whole = {
        node.name: Strategy((R,) * len(node.operands), (R,) * len(node.results))
        for node in alike.graph.nodes_by_module[block.names[0]]
    }
    apart = replace(alike, strategies={**alike.strategies, **whole})
    like, nodes = like_ops(alike.graph), LocalNodes(apart)
    for node in apart.graph.nodes:
        assert nodes.of(node) == LocalNodes(apart).of(node)
    differing = [
        node
        for node in apart.graph.nodes
        if isinstance(node, Op) and like[node.name] != node.name
        if nodes.of(node) != nodes.of(next(own for own in apart.graph.ops if own.name == like[node.name]))
    ]
    assert differing
