"""The graph as data: fingerprint, references, edges, JSON."""

from dataclasses import replace

import pytest

from tpplan.core.graph import (
    Boundary,
    Direction,
    ModelGraph,
    Op,
    Ref,
    RepeatedBlock,
    Source,
    SourceKind,
    Value,
    may_write,
    references,
    within,
)
from tpplan.core.graph_fingerprint import graph_fingerprint


def value(name: str, *shape: int, **changes: object) -> Value:
    plain = Value(name=name, shape=shape, dtype="float32", carries_gradient=True, storage=name)
    return replace(plain, **changes)


#: y = sum(linear(x entered in `up`, w)); x is read twice by add
GRAPH = ModelGraph(
    values={
        "x": value("x", 2, 3, carries_gradient=False),
        "w": value("w", 4, 3),
        "entered": value("entered", 2, 3, storage="x"),
        "linear": value("linear", 2, 4),
        "add": value("add", 2, 4),
        "chunk.0": value("chunk.0", 2, 2, storage="add"),
        "chunk.1": value("chunk.1", 2, 2, storage="add"),
        "sum": value("sum"),
    },
    sources=(
        Source(kind=SourceKind.INPUT, result="x", label="x"),
        Source(kind=SourceKind.PARAMETER, result="w", label="up.weight", aliases=("tied.weight",), trainable=True),
    ),
    nodes=(
        Boundary(name="entered", module="up", direction=Direction.INPUT, path="input", operand="x", result="entered"),
        Op(
            name="linear",
            target="aten.linear.default",
            args=(Ref("entered"), Ref("w")),
            kwargs=(),
            results=("linear",),
            module="up",
        ),
        Op(
            name="add",
            target="aten.add.Tensor",
            args=(Ref("linear"), Ref("linear")),
            kwargs=(("alpha", 1),),
            results=("add",),
            module="",
        ),
        Op(
            name="chunk",
            target="aten.chunk.default",
            args=(Ref("add"), 2, -1),
            kwargs=(),
            results=("chunk.0", "chunk.1"),
            module="",
        ),
        Op(
            name="sum",
            target="aten.sum.default",
            args=(Ref("chunk.1"),),
            kwargs=(),
            results=("sum",),
            module="<loss>",
        ),
    ),
    outputs=(("output", "sum"),),
    loss="sum",
    blocks=(RepeatedBlock(prefix="layers", indices=(0, 1)),),
)


def with_node(position: int, **changes: object) -> ModelGraph:
    nodes = list(GRAPH.nodes)
    nodes[position] = replace(nodes[position], **changes)
    return replace(GRAPH, nodes=tuple(nodes))


CHANGES = {
    "a shape": replace(GRAPH, values=GRAPH.values | {"x": value("x", 2, 4, carries_gradient=False)}),
    "a dtype": replace(GRAPH, values=GRAPH.values | {"sum": value("sum", dtype="bfloat16")}),
    "a gradient": replace(GRAPH, values=GRAPH.values | {"x": value("x", 2, 3)}),
    "a storage": replace(GRAPH, values=GRAPH.values | {"add": value("add", 2, 4, storage="linear")}),
    "an op": with_node(2, target="aten.mul.Tensor"),
    "a literal": with_node(3, args=(Ref("add"), 2, 0)),
    "a literal's type": with_node(3, args=(Ref("add"), 2.0, -1)),
    "a keyword": with_node(2, kwargs=(("alpha", 2),)),
    "a module": with_node(1, module="down"),
    "a path": with_node(0, path="other"),
    "a direction": with_node(0, direction=Direction.OUTPUT),
    "an order": replace(GRAPH, nodes=(*GRAPH.nodes[:3], GRAPH.nodes[4], GRAPH.nodes[3])),
    "a parameter's name": replace(GRAPH, sources=(GRAPH.sources[0], replace(GRAPH.sources[1], label="w"))),
    "an alias": replace(GRAPH, sources=(GRAPH.sources[0], replace(GRAPH.sources[1], aliases=()))),
    "a frozen parameter": replace(GRAPH, sources=(GRAPH.sources[0], replace(GRAPH.sources[1], trainable=False))),
    "an output": replace(GRAPH, outputs=(("loss", "sum"),)),
    "a loss": replace(GRAPH, loss=None),
    "a block": replace(GRAPH, blocks=()),
    "a reference against its name": with_node(3, args=("add", 2, -1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_changes_with(change):
    assert graph_fingerprint(CHANGES[change]) != graph_fingerprint(GRAPH)


def test_fingerprint_is_that_of_the_content():
    again = replace(GRAPH, values=dict(reversed(GRAPH.values.items())))
    assert graph_fingerprint(again) == graph_fingerprint(GRAPH)
    assert graph_fingerprint(GRAPH).startswith("sha256:")
    assert len({graph_fingerprint(graph) for graph in CHANGES.values()}) == len(CHANGES)


def called(name: str, target: str, *operands: str) -> Op:
    return Op(name=name, target=target, args=tuple(map(Ref, operands)), kwargs=(), results=(name,), module="")


def test_the_fingerprint_is_that_of_any_order_in_which_the_same_is_computed():
    """As a set of strings gives it; names follow from the order."""
    names = ("x", "w", "a", "b", "c")
    values = {name: value(name, 2, 3, storage="a" if name == "c" else name) for name in names}
    cos, sin, add = (
        called("a", "aten.cos", "x"),
        called("b", "aten.sin", "x"),
        called("c", "aten.add_.Tensor", "a", "b"),
    )
    graph = replace(GRAPH, values=values, nodes=(cos, sin, add), outputs=(("output", "c"),), loss=None)
    renamed = (called("a", "aten.sin", "x"), called("b", "aten.cos", "x"), called("c", "aten.add_.Tensor", "b", "a"))
    written = values | {"c": value("c", 2, 3, storage="b")}
    assert graph_fingerprint(replace(graph, nodes=(sin, cos, add))) == graph_fingerprint(graph)
    assert graph_fingerprint(replace(graph, values=written, nodes=renamed)) == graph_fingerprint(graph)
    assert graph_fingerprint(replace(graph, values=written, nodes=(*renamed[:2], add))) != graph_fingerprint(graph)
    other = replace(graph, nodes=(sin, cos, replace(add, target="aten.sub_.Tensor")))
    assert graph_fingerprint(other) != graph_fingerprint(graph)


def test_the_fingerprint_tells_what_is_read_before_a_write_from_what_is_read_after():
    values = {name: value(name, 2, 3, storage="x" if name == "a" else name) for name in ("x", "w", "a", "b")}
    write, read = called("a", "aten.add_.Tensor", "x", "w"), called("b", "aten.cos", "x")
    graph = replace(GRAPH, values=values, nodes=(write, read), outputs=(("output", "b"),), loss=None)
    assert graph_fingerprint(replace(graph, nodes=(read, write))) != graph_fingerprint(graph)


def test_references_stand_in_argument_order():
    nested = ((Ref("a"), 1, (Ref("b"), None)), "c", (Ref("a"),))
    assert list(references(nested)) == ["a", "b", "a"]
    op = Op(
        name="index",
        target="aten.index.Tensor",
        args=(Ref("x"), (None, Ref("i"))),
        kwargs=(("mask", Ref("m")),),
        results=(),
        module="",
    )
    assert op.operands == ("x", "i", "m")


def test_who_reads_and_who_computes():
    assert [node.name for node in GRAPH.consumers["linear"]] == ["add"]
    assert "sum" not in GRAPH.consumers
    assert GRAPH.producers["chunk.0"] is GRAPH.nodes[3]
    assert "w" not in GRAPH.producers
    assert [op.name for op in GRAPH.ops] == ["linear", "add", "chunk", "sum"]
    assert [boundary.name for boundary in GRAPH.boundaries] == ["entered"]
    assert [parameter.label for parameter in GRAPH.parameters] == ["up.weight"]


def test_sizes():
    assert GRAPH.values["w"].num_bytes == 4 * 3 * 4
    assert GRAPH.values["sum"].num_elements == 1


def test_names_of_blocks_and_modules():
    block = RepeatedBlock(prefix="model.layers", indices=(0, 2))
    assert (block.pattern, block.names) == ("model.layers.*", ("model.layers.0", "model.layers.2"))
    root = RepeatedBlock(prefix="", indices=(1, 2))
    assert (root.pattern, root.names) == ("*", ("1", "2"))
    assert within("layers.1.up", "layers.1")
    assert within("layers.1", "layers.1")
    assert within("anything", "")
    assert not within("layers.10", "layers.1")


def test_an_op_writes_where_its_schema_in_torch_says_so() -> None:
    """Ops in place and with `out` do; others that give a result do not, such as `to.dtype_layout`."""
    import torch

    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::") and "__" not in s.name]
    for schema in schemas:
        writes = [own for own in schema.arguments if own.alias_info is not None and own.alias_info.is_write]
        target = f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
        op = Op(name="op", target=target, args=(), kwargs=(), results=("y",) * len(schema.returns), module="")
        if not writes and schema.returns and not schema.name.endswith("_"):
            assert not may_write(op), target
        elif [own.name for own in writes] == ["out"] or (writes and schema.name.endswith("_")):
            assert may_write(op), target
    assert len(schemas) > 1000
