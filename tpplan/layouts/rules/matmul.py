"""Rules of products: linear layers, matrix products, einsum; the rule is the product's own equation."""

import re
from collections.abc import Iterable

from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import einsum

_BIAS = frozenset({2})


@op_rule("aten.linear.default")
def linear(call: Call) -> Iterable[Strategy]:
    """Sharding n is column parallel, k is row parallel (the bias read as a summand), `...` is batch or sequence."""
    n = "n" if len(call.operands[1].shape) == 2 else ""
    if len(call.operands) == 3:
        return einsum(call, f"... k, {n} k, {n} -> ... {n}", multilinear=True, added=_BIAS)
    return einsum(call, f"... k, {n} k -> ... {n}", multilinear=True)


@op_rule("aten.mm.default")
def mm(call: Call) -> Iterable[Strategy]:
    """Matrix times matrix."""
    return einsum(call, "i k, k j -> i j", multilinear=True)


@op_rule("aten.mv.default")
def mv(call: Call) -> Iterable[Strategy]:
    """Matrix times vector."""
    return einsum(call, "i k, k -> i", multilinear=True)


@op_rule("aten.dot.default")
def dot(call: Call) -> Iterable[Strategy]:
    """Vector times vector."""
    return einsum(call, "k, k -> ", multilinear=True)


@op_rule("aten.outer.default")
def outer(call: Call) -> Iterable[Strategy]:
    """Every product of two vectors' elements."""
    return einsum(call, "i, j -> i j", multilinear=True)


@op_rule("aten.bmm.default")
def bmm(call: Call) -> Iterable[Strategy]:
    """Batched matrix product."""
    return einsum(call, "b i k, b k j -> b i j", multilinear=True)


@op_rule("aten.addmm.default")
def addmm(call: Call) -> Iterable[Strategy]:
    """The added term is the first operand and may broadcast."""
    return einsum(call, f"{_trailing(call, 'i j')}, i k, k j -> i j", multilinear=True, added=frozenset({0}))


@op_rule("aten.baddbmm.default")
def baddbmm(call: Call) -> Iterable[Strategy]:
    """Batched addmm."""
    return einsum(call, f"{_trailing(call, 'b i j')}, b i k, b k j -> b i j", multilinear=True, added=frozenset({0}))


#: products of rows with their expert's matrix: torch's kernel, and the loop by which transformers replaces it
GROUPED_PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


@op_rule(*GROUPED_PRODUCTS)
def grouped_mm(call: Call) -> Iterable[Strategy]:
    """n rows sorted by expert, e experts with k x j matrices; n and e stay whole, since offsets count all rows."""
    ranks = tuple(len(value.shape) for value in call.operands)
    if ranks != (2, 3, 1):
        return ()
    return einsum(call, "n k, e k j, e -> n j", multilinear=True, whole="n e")


def _trailing(call: Call, letters: str) -> str:
    """The last letters, as many as the first operand has dims."""
    names = letters.split()
    return " ".join(names[len(names) - len(call.operands[0].shape) :])


@op_rule("aten.matmul.default")
def matmul(call: Call) -> Iterable[Strategy]:
    """Leading dims broadcast; a vector on the left has no row, one on the right no column."""
    left, right = (len(value.shape) for value in call.operands)
    row = "i" if left > 1 else ""
    column = "j" if right > 1 else ""
    lead = ("..." if left > 2 else "", "..." if right > 2 else "")
    result = "..." if any(lead) else ""
    return einsum(call, f"{lead[0]} {row} k, {lead[1]} k {column} -> {result} {row} {column}", multilinear=True)


@op_rule("aten.einsum.default")
def torch_einsum(call: Call) -> Iterable[Strategy]:
    """The equation in the call is the rule, where no term repeats a letter.

    Without an explicit result, the result has the letters that occur once, sorted. [torch.einsum]
    """
    equation = str(call.argument(0, "equation"))
    left, arrow, right = equation.partition("->")
    terms = [re.findall(r"\.\.\.|[A-Za-z]", term) for term in left.split(",")]
    if any(len(set(term)) < len(term) for term in terms):
        return ()
    result = re.findall(r"\.\.\.|[A-Za-z]", right)
    if not arrow:
        letters = [letter for term in terms for letter in term]
        once = sorted(letter for letter in letters if letter != "..." and letters.count(letter) == 1)
        result = ["..."] * ("..." in letters) + once
    return einsum(call, f"{', '.join(map(' '.join, terms))} -> {' '.join(result)}", multilinear=True)
