"""Predicts the bytes that remain when a compiler fuses neighbouring memory-bound ops into one kernel.

torch.compile's inductor fuses elementwise ops, norms and reductions that read each other's results. A value that stays
inside a fused kernel is neither written nor read, so only bytes that cross the kernel's border count. Views cost
nothing. Products, attention and lookups end a kernel, and so does the border of a repeated layer: each layer is
compiled on its own, because FSDP's hooks there, which gather and free, break a compiled graph. Ops on complex numbers
run as torch's own kernels [torch 2.13, _inductor/lowering.py: "does not support code generation for complex
operators"].
"""

from collections.abc import Mapping

import torch

from tpplan.core.graph import Boundary, ModelGraph, Op
from tpplan.core.repeated_blocks import members
from tpplan.layouts.rules import base_target

#: reductions and copies that fuse with elementwise ops
_REDUCTIONS = frozenset({"layer_norm", "rms_norm", "softmax", "log_softmax", "sum", "mean", "amax", "var", "var_mean",
                         "dropout", "native_dropout", "_to_copy", "to", "cat", "clone", "contiguous"})  # fmt: skip


def moved_shares(graph: ModelGraph) -> dict[str, float]:
    """Returns by op the share of its unfused bytes that remains when neighbours are fused; 1 outside fused kernels."""
    kernels = _kernels(graph)
    shares = dict.fromkeys((op.name for op in graph.ops), 1.0)
    for op in graph.ops:
        if op.name in kernels:
            own = kernels[op.name]
            read = (v for v in op.operands if (maker := _maker(graph, v)) is None or kernels.get(maker.name) != own)
            written = (v for v in op.results if _is_read_elsewhere(graph, v, kernels, own))
            whole = sum(graph.values[v].num_bytes for v in (*op.operands, *op.results))
            shares[op.name] = sum(graph.values[v].num_bytes for v in (*read, *written)) / whole if whole else 1.0
    return _alike(graph, shares)


def _alike(graph: ModelGraph, shares: Mapping[str, float]) -> dict[str, float]:
    """Gives all like ops of a repeated block the share of the middle layer's op.

    The first and the last layer have other neighbours, which is neglected so that like layers cost alike.
    """
    found = dict(shares)
    for block in graph.blocks:
        for alike in zip(*(members(graph, name) for name in block.names), strict=True):
            share = shares.get(alike[len(alike) // 2].name, 1.0)
            found.update(dict.fromkeys((node.name for node in alike if node.name in shares), share))
    return found


def _kernels(graph: ModelGraph) -> dict[str, int]:
    """Returns for each fusible op a number that is equal for ops of one kernel: its depth.

    The depth is the largest number of non-fusible ops and layer borders on a path to the op: an op that waits for a
    product cannot be in a kernel that the product waits for.
    """
    layers = {name for block in graph.blocks for name in block.names}
    before: dict[str, int] = {}
    found: dict[str, int] = {}
    for node in graph.nodes:
        depth = max((before.get(operand, 0) for operand in node.operands), default=0)
        depth += isinstance(node, Boundary) and node.module in layers
        is_transparent = isinstance(node, Boundary) or _is_view(graph, node)
        if not is_transparent and isinstance(node, Op) and _is_fusible(node) and not _is_complex(graph, node):
            found[node.name] = depth
        elif not is_transparent:
            depth += 1
        before.update(dict.fromkeys(node.results, depth))
    return found


def _is_fusible(op: Op) -> bool:
    namespace, name, overload = base_target(op.target).split(".")
    if name in _REDUCTIONS:
        return True
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    return operator is not None and torch.Tag.pointwise in operator.tags


def _is_complex(graph: ModelGraph, op: Op) -> bool:
    return any(graph.values[name].dtype.startswith("complex") for name in (*op.operands, *op.results))


def _is_view(graph: ModelGraph, op: Op) -> bool:
    return bool(op.results) and graph.values[op.results[0]].storage != op.results[0] and not _is_fusible(op)


def _maker(graph: ModelGraph, value: str) -> Op | None:
    """Returns the op that computed a value's elements, behind views and boundaries; None for an input or parameter."""
    producer = graph.producers.get(value)
    while producer is not None and (isinstance(producer, Boundary) or _is_view(graph, producer)):
        producer = graph.producers.get(producer.operands[0])
    return producer


def _is_read_elsewhere(graph: ModelGraph, value: str, kernels: Mapping[str, int], own: int) -> bool:
    """True where a value leaves its kernel: an op outside the kernel reads it, or no op does (it is an output)."""

    def leaves(reader: Op | Boundary) -> bool:
        if isinstance(reader, Boundary) or _is_view(graph, reader):
            return any(_is_read_elsewhere(graph, result, kernels, own) for result in reader.results)
        return kernels.get(reader.name) != own

    readers = graph.consumers.get(value, ())
    return not readers or any(map(leaves, readers))
