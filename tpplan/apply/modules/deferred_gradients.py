"""Defers weights' gradients: a backward computes the gradients of inputs, and those of weights follow when asked for.

    deferral = Deferral()
    with deferral.deferring():
        deferral.begin(key)
        loss = ...                          # a forward
        loss.backward()                     # gradients of all but the weights of linear layers
        deferral.weight_gradients(key)      # and those of these weights

The backward of y = x W^T + b makes two products, dx = dy W and dW = dy^T x, and no other op waits for the second: a
stage of a pipeline sends dx back first, and makes dW where it would wait [Qi et al., "Zero Bubble Pipeline
Parallelism", 2023, arXiv:2401.10241, section 2]. Until then x and dy are kept.

Deferred are products by torch.nn.functional.linear whose weight is a parameter, or a rank's part of one. Whatever else
a model computes with parameters, such as norms, lookups and biases, has its gradients in the backward; so has a weight
with hooks of the user's on its gradient, which see that of a backward as a whole.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from tpplan.torch_internals.autograd import leaf_only_copied
from tpplan.torch_internals.fakes import FakeTensor
from tpplan.torch_internals.tensors import accumulated_hooks, gradient_hooks, is_of_functorch

_linear = functional.linear
#: types of tensors of which products are deferred, those of a verified step without memory among them
_PLAIN = {Tensor, nn.Parameter, FakeTensor}


class Product(NamedTuple):
    """The product dy^T x that gives a weight's gradient: x [..., in], the gradient of y [..., out], and the weight as
    it was read."""

    x: Tensor
    gradient: Tensor
    weight: Tensor

    @property
    def parameter(self) -> Tensor:
        """The parameter that was read."""
        found = leaf_only_copied(self.weight)
        assert found is not None
        return found

    def accumulate(self) -> None:
        """Makes the weight's gradient, and adds it to the parameter's."""
        with torch.no_grad():
            x, gradient = (own.reshape(-1, own.shape[-1]) for own in (self.x, self.gradient))
            own = gradient.T @ x
        self.weight.backward(own)  # type: ignore[no-untyped-call]


@final
@dataclass(slots=True, eq=False)
class Deferral:
    """The products of weights' gradients that are deferred, by key of the forward whose they are, in the order of
    backward."""

    products: dict[Hashable, deque[Product]] = field(default_factory=dict)
    #: key of the forward or backward that runs; None for one that defers nothing
    running: Hashable = None

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """A step runs inside: linear layers defer their weights' gradients, in forwards and in what backwards run
        again. All that is deferred has to be computed inside; what a step that failed has left is dropped."""
        self.products.clear()

        @functools.wraps(_linear)
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            found: Tensor
            if has_torch_function((x, weight, bias)):  # a mode sees the model's own call, and none inside
                given = tuple(tensor for tensor in (x, weight, bias) if tensor is not None)
                found = handle_torch_function(linear, given, x, weight, bias)
            else:
                found = self._linear(x, weight, bias)
            return found

        with patch.object(functional, "linear", linear):
            yield
        assert not self.products, f"weights' gradients were deferred and never computed: {list(self.products)}"

    def begin(self, key: Hashable) -> None:
        """Names the forward that runs next, or whose backward does, which may run it again. With None nothing is
        deferred."""
        self.running = key

    def parameters(self, key: Hashable) -> list[Tensor]:
        """The parameter of each product that a forward deferred, in the order in which they are made."""
        return [product.parameter for product in self.products.get(key, ())]

    def weight_gradients(self, key: Hashable) -> Iterator[Tensor]:
        """Makes the products of a forward whose backward has ended, one by one, and accumulates them. Yields the
        parameter of each when it is made."""
        products = self.products.get(key, deque())
        while products:
            product = products.popleft()
            parameter = product.parameter
            product.accumulate()
            del product  # and what it keeps
            yield parameter
        self.products.pop(key, None)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_plain = {type(x), type(weight)} <= _PLAIN and not is_of_functorch(x)
        is_asked = self.running is not None and not torch.compiler.is_compiling()
        if not is_asked or not is_plain or not (torch.is_grad_enabled() and x.requires_grad):
            return _linear(x, weight, bias)
        parameter = leaf_only_copied(weight) if weight.requires_grad else None
        if not isinstance(parameter, nn.Parameter) or _is_watched(parameter):
            return _linear(x, weight, bias)
        found: Tensor = _Linear.apply(x, weight.detach(), bias, _Target(self, self.running, weight))  # type: ignore[no-untyped-call]
        return found


def _is_watched(parameter: nn.Parameter) -> bool:
    """True where others than tpplan have hooks on a parameter's gradient."""
    hooks = (*gradient_hooks(parameter).values(), *accumulated_hooks(parameter).values())
    return any(not type(hook).__module__.startswith("tpplan.") for hook in hooks)


def deferring(deferral: Deferral | None) -> contextlib.AbstractContextManager[object]:
    """The context of a step that defers weights' gradients, or that defers none."""
    return deferral.deferring() if deferral is not None else contextlib.nullcontext()


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Where a product is deferred to. Autograd does not look inside: to it the weight needs no gradient."""

    deferral: Deferral
    key: Hashable
    weight: Tensor

    def defer(self, x: Tensor, gradient: Tensor) -> None:
        self.deferral.products.setdefault(self.key, deque()).append(Product(x, gradient, self.weight))


class _Linear(torch.autograd.Function):
    """x [..., in] times weight [out, in], plus bias [out]: with the gradients of x and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: _Target) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.target = target
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.target.defer(x, gradient)
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None
