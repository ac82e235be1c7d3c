"""Rules of products, solves and recurrent layers; the rule of a product is its own equation."""

import re
from collections.abc import Iterable

from tpplan.core.layout import R_STAR, S
from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import NEVER, Equation, dim_letters, einsum

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


@op_rule(
    *(f"aten.{name}.default" for name in (
        "linalg_inv", "linalg_inv_ex", "inverse", "linalg_cholesky", "linalg_cholesky_ex", "linalg_det",
        "det", "linalg_slogdet", "slogdet", "logdet", "linalg_eigh", "linalg_eigvalsh", "linalg_svd",
        "linalg_svdvals", "linalg_qr", "linalg_matrix_exp", "matrix_exp", "linalg_matrix_power", "matrix_power",
    )),
)  # fmt: skip
def decomposition(call: Call) -> Iterable[Strategy]:
    """Matrices are the last two dims, which stay whole; those before are of the batch."""
    batch = tuple(dim_letters(len(call.operands[0].shape) - 2))
    results = tuple((*batch, *(NEVER,) * (len(value.shape) - len(batch))) for value in call.results)
    return Equation(operands=((*batch, NEVER, NEVER),), results=results).strategies()


#: target -> the operand that is the matrix; the other is the right side
_SOLVES = {
    "aten.linalg_solve.default": 0, "aten.linalg_solve_triangular.default": 0, "aten.cholesky_solve.default": 1,
}  # fmt: skip


@op_rule(*_SOLVES)
def solve(call: Call) -> Iterable[Strategy]:
    """`... i i, ... i k -> ... i k`, linear in the right side; its columns k, or its rows where it is solved from the
    right, and the batch may be sharded. A right side of vectors has no k."""
    matrix = _SOLVES[call.target]
    sides = tuple(value.shape for value in call.operands)
    is_vector = len(sides[1 - matrix]) == len(sides[matrix]) - 1 and sides[1 - matrix] == sides[matrix][:-1]
    is_left = bool(call.argument(99, "left", True))
    right = "... i" if is_vector and len(sides[matrix]) > 1 else "... i k" if is_left else "... k i"
    terms = ("... i j", right) if matrix == 0 else (right, "... i j")
    return einsum(call, f"{', '.join(terms)} -> {right}", whole="i j", linear_in=(frozenset({1 - matrix}),))


@op_rule("aten.lstm_cell.default", "aten.gru_cell.default", "aten.rnn_tanh_cell.default", "aten.rnn_relu_cell.default")
def cell(call: Call) -> Iterable[Strategy]:
    """Batch alone: gates read the state of all hidden units, and the kernels refuse weights for some units of them."""
    states = len(call.results)
    return _by_batch(call, x=0, state=0, states=states, of_results=(0,) * states)


@op_rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent(call: Call) -> Iterable[Strategy]:
    """Batch alone: each step reads all hidden units of the last. Nothing where layers drop out elements."""
    if call.argument(5, "dropout", 0.0) and call.argument(6, "train", False):
        return ()
    batch = 0 if call.argument(8, "batch_first", False) else 1
    states = len(call.results) - 1
    return _by_batch(call, x=batch, state=1, states=states, of_results=(batch, *(1,) * states))


def _by_batch(call: Call, *, x: int, state: int, states: int, of_results: tuple[int, ...]) -> tuple[Strategy, ...]:
    """The strategy that shards the batch, given its dim in the input, in the states and in each result."""
    weights = (R_STAR,) * (len(call.operands) - 1 - states)
    return (Strategy((S(x), *(S(state),) * states, *weights), tuple(map(S, of_results))),)
