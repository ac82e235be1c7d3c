"""FLOPs of a step as it runs: all products, and those of attention, by the formulas of torch.utils.flop_counter.

A product of attention is scaled_dot_product_attention, or a batched matmul of two values that both depend on the
model's inputs: queries with keys, probabilities with values.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tpplan.torch_internals import pytree

aten = torch.ops.aten

FUSED = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def convolution_backward(out_grad: Any, x: Any, weight: Any, *args: Any, out_val: Any) -> int:
    """For each gradient that is asked for, of input and weight, the products of forward. (The registry's formula counts
    those of the weight once for each pair of groups.)"""
    *_, is_transposed, _, _, mask = args
    spatial = (x if is_transposed else out_grad).shape[2:]
    return 2 * x.shape[0] * prod(spatial) * weight.numel() * sum(mask[:2])


FORMULAS = {
    **flop_registry,
    **{fused: flop_registry[known] for fused, known in FUSED.items()},
    aten.convolution_backward: convolution_backward,
}
BATCHED = (aten.bmm, aten.baddbmm)


class FlopLog(TorchDispatchMode):
    """Notes what runs. `products` are FLOPs of attention's products in forward, in order; `total` is all of the step's.

    `inputs` are the model's; `is_forward` is to be set to False when backward begins.
    """

    def __init__(self, inputs: Iterable[Any]) -> None:
        super().__init__()
        self.total = 0
        self.products: list[int] = []
        self.is_forward = True
        #: storages that depend on the inputs, which are kept, so that none is another's later
        self._data: dict[int, Tensor] = {}
        for leaf in inputs:
            self._keep(leaf)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if (formula := FORMULAS.get(packet)) is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
            self.total += flops
            operands = [leaf for leaf in args if isinstance(leaf, Tensor)][-2:]
            if self.is_forward and (_is_fused(packet) or (packet in BATCHED and all(map(self._is_data, operands)))):
                self.products.append(flops)
        if self.is_forward and any(map(self._is_data, pytree.tree_leaves((args, kwargs)))):
            for leaf in pytree.tree_leaves(out):
                self._keep(leaf)
        return out

    def _is_data(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self._data

    def _keep(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            self._data.setdefault(leaf.untyped_storage()._cdata, leaf)


def _is_fused(packet: Any) -> bool:
    return "scaled_dot_product" in str(packet)
