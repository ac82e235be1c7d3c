"""Every sharding rule against brute force over ranks, both directions; and the brute force against planted mistakes."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rule_samples import SAMPLES, const, ids, positive, x
from torch.nn.attention.flex_attention import flex_attention as torchs_flex_attention
from validate import (
    STAND_INS,
    Sample,
    WrongStrategyError,
    check_gradient,
    check_value,
    flex_attention,
    missing_strategies,
    violation,
)

from tpplan.core.graph import Ref, Value
from tpplan.core.layout import R_STAR, ROWS, Layout, P, R, S, copied, joint
from tpplan.layouts import rules
from tpplan.layouts.rules import Call, Strategy, call_strategies
from tpplan.layouts.rules.call import base_target
from tpplan.torch_internals.operators import is_pointwise

RANKS = (2, 3, 4)

#: rules for ops that communicate, which one process cannot run
VALIDATED_WITH_REAL_RANKS = {"tpplan.cross_entropy.default": "tests/apply/test_cross_entropy.py"}

#: reductions of every dim: ruled, and nothing to shard
WHOLE_ALONE = {"aten.max.default", "aten.min.default", "aten.any.default", "aten.all.default"}

rules.has_rule("")  # loads the families
TARGETS = sorted(rules.registered_rules().keys() - VALIDATED_WITH_REAL_RANKS.keys())


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The tensors are tiny; threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fused(call: Call, tp: int) -> Call:
    """The call where every dim may consist of parts, two unequal ones and as many equal ones as there can be, or be cut
    into fewer slices than ranks."""
    sizes = {size for value in (*call.operands, *call.results) for size in value.shape if size % tp == 0}
    parts = {(tp, size - tp) for size in sizes} | {(size // n,) * n for size in sizes for n in range(2, size // tp + 1)}
    slices = frozenset(m for m in range(2, tp) if tp % m == 0)
    return replace(call, parts=frozenset(p for p in parts if min(p) > 0 and sum(p) in sizes), slices=slices)


def is_drawn_by_rank(call: Call, strategy: Strategy) -> bool:
    """True for dropout on slices, which no single process computes: tests/apply/test_draws.py sees what it drops."""
    return rules.draws(call) and any(layout.dim is not None for layout in strategy.operands)


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_rule_allows_is_right(target):
    samples = [sample for sample in SAMPLES if base_target(sample.target) == target]
    assert samples, f"tests/rule_samples.py has no call of {target}"
    wrong = [
        problem
        for sample in samples
        for tp in RANKS
        for strategy in call_strategies(fused(sample.call, tp), tp)
        if not is_drawn_by_rank(sample.call, strategy)
        if (problem := violation(sample, strategy, tp))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("target", TARGETS)
def test_samples_make_a_rule_offer_more_than_whole_operands(target):
    offered = {
        layout
        for sample in SAMPLES
        if base_target(sample.target) == target
        for tp in RANKS
        for strategy in call_strategies(sample.call, tp)
        for layout in (*strategy.operands, *strategy.results)
    }
    assert bool(offered - {R, R_STAR}) == (target not in WHOLE_ALONE)


def pointwise_ops() -> Iterator[Any]:
    """Operators without a rule that torch tags as pointwise."""
    for schema in torch._C._dispatch_get_all_op_names():
        namespace, _, name = schema.partition("::")
        if namespace == "aten":
            name, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            if is_pointwise(op) and not rules.has_rule(str(op)):
                yield op


def samples_of(op: Any) -> Iterator[Sample]:
    """Calls of an op on operands of one shape, and on such that broadcast; of those kinds that it takes and can
    differentiate."""
    given = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    numbers = {argument.name: 2 for argument in given if argument.kwarg_only}
    for make in (x, positive, lambda *shape: const(*shape).sigmoid(), lambda *shape: ids(3, *shape)):
        for shapes in (((6, 4),) * 3, ((6, 4), (4,), (6, 1))):
            shape = iter(shapes)
            args = [make(*next(shape)) if str(a.type) == "Tensor" else 2 for a in given if not a.kwarg_only]
            sample = Sample(target=str(op), args=tuple(args), kwargs=numbers)
            with contextlib.suppress(RuntimeError):
                violation(sample, call_strategies(sample.call, 2)[0], 2)
                yield sample


def test_what_torch_tags_as_pointwise_is():
    ops, wrong, untried = list(pointwise_ops()), [], []
    assert len(ops) > 100
    for op in ops:
        samples = list(samples_of(op))
        untried += [str(op)] * (not samples)
        for sample in samples:
            offered = call_strategies(fused(sample.call, 2), 2)
            wrong += [problem for strategy in offered if (problem := violation(sample, strategy, 2))]
            assert any(strategy.results[0].dim is not None for strategy in offered)
    assert not wrong, "\n".join(wrong)
    assert not untried


def test_the_tags_of_others_are_not_believed():
    """An operator whose author calls it pointwise, and which is a softmax."""
    softmax = torch.library.custom_op(
        "tpplan_tests::softmax", lambda x: x.softmax(-1), mutates_args=(), schema="(Tensor x) -> Tensor",
        tags=(torch.Tag.pointwise,),
    )  # fmt: skip
    assert torch.Tag.pointwise in softmax._opoverload.tags
    assert not is_pointwise(softmax._opoverload)


def test_rules_validated_elsewhere_are():
    for target, place in VALIDATED_WITH_REAL_RANKS.items():
        assert target.split(".")[1] in (Path(__file__).parents[2] / place).read_text()


def test_stand_ins_are_what_they_stand_for():
    rows, experts, ends = torch.randn(8, 16), torch.randn(3, 16, 8), torch.tensor([2, 2, 8], dtype=torch.int32)
    for target, stand_in in STAND_INS.items():
        namespace, name, overload = target.split(".")
        if name.endswith("empty") or namespace == "tpplan":
            continue
        if namespace == "transformers":
            pytest.importorskip("transformers.integrations.moe")
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        torch.testing.assert_close(op(rows, experts, ends), stand_in(rows, experts, ends))


def test_the_stand_in_of_flex_attention_is_torchs():
    shapes, bias = ((2, 6, 3, 4), (2, 2, 5, 4), (2, 2, 5, 2)), torch.randn(3, 5)
    given = [torch.randn(shape) for shape in shapes]
    found = torchs_flex_attention(*given, lambda s, b, h, i, j: s + bias[i, j], scale=1.0, enable_gqa=True)
    torch.testing.assert_close(found, flex_attention(*given, [bias])[0])


def test_samples_are_of_ruled_ops():
    assert {base_target(sample.target) for sample in SAMPLES} <= rules.registered_rules().keys()


def call(target: str, *args: object, **kwargs: object) -> Sample:
    return Sample(target=target, args=args, kwargs=kwargs)


ATTENTION = "aten.scaled_dot_product_attention.default"
WRONG = {
    "softmax over a sharded dim": (call("aten.softmax.int", x(6, 6), -1), "S(1) => S(1)"),
    "mean over a sharded dim as partial": (call("aten.mean.dim", x(6, 6), [0]), "S(0) => P"),
    "layer norm over a sharded dim": (call("aten.layer_norm.default", x(6, 6), [6]), "S(1) => S(1)"),
    "a norm's weight R under a sharded batch": (
        call("aten.layer_norm.default", x(6, 6), [6], x(6)), "S(0), R => S(0)"),
    "bias R in row-parallel": (call("aten.linear.default", x(6, 6), x(4, 6), x(4)), "S(1), S(1), R => P"),
    "bias R* in row-parallel": (call("aten.linear.default", x(6, 6), x(4, 6), x(4)), "S(1), S(1), R* => P"),
    "input R in column-parallel": (call("aten.linear.default", x(6, 6), x(6, 6)), "R, S(0) => S(1)"),
    "row-parallel that is not reduced": (call("aten.linear.default", x(6, 6), x(4, 6)), "S(1), S(1) => R"),
    "x + 1 with P": (call("aten.add.Tensor", x(6, 6), 1.0), "P => P"),
    "a partial and a whole added": (call("aten.add.Tensor", x(6, 6), x(6, 6)), "P, R => P"),
    "mul of two P": (call("aten.mul.Tensor", x(6, 6), x(6, 6)), "P, P => P"),
    "R and R* mixed": (call("aten.add.Tensor", x(6, 6), x(6, 6)), "R, R* => R"),
    "R and R* mixed, R* out": (call("aten.mul.Tensor", x(6, 6), x(6, 6)), "R, R* => R*"),
    "relu of P": (call("aten.relu.default", x(6, 6)), "P => P"),
    "gradient of a broadcast operand R": (call("aten.add.Tensor", x(6, 6), x(6)), "S(0), R => S(0)"),
    "causal attention with sharded queries": (
        call(ATTENTION, x(2, 2, 6, 4), x(2, 2, 6, 4), x(2, 2, 6, 4), None, 0.0, True), "S(2), R*, R* => S(2)"),
    "attention with sharded keys": (
        call(ATTENTION, x(2, 2, 6, 4), x(2, 2, 6, 4), x(2, 2, 6, 4)), "R*, S(2), S(2) => P"),
    "query heads sharded, key heads whole": (
        call(ATTENTION, x(2, 4, 6, 4), x(2, 2, 6, 4), x(2, 2, 6, 4), enable_gqa=True), "S(1), R*, R* => S(1)"),
    "cumsum over a sharded dim": (call("aten.cumsum.default", x(6, 6), 0), "S(0) => S(0)"),
    "cat along the sharded dim": (call("aten.cat.default", [x(6, 6), x(6, 6)], 0), "S(0), S(0) => S(0)"),
    "contiguous fused parts split": (call("aten.chunk.default", x(6, 12), 2, 1), "S(1) => S(1), S(1)"),
    "topk over a sharded dim": (call("aten.topk.default", x(6, 6), 2), "S(1) => S(1), R"),
    "roll over a sharded dim": (call("aten.roll.default", x(6, 6), [1], [0]), "S(0) => S(0)"),
    "group norm of cut groups": (call("aten.group_norm.default", x(6, 6, 6), 3), "S(1) => S(1)"),
    "group norm of one group": (call("aten.group_norm.default", x(6, 4, 6), 1), "S(1) => S(1)"),
    "the inner dim of a flattened pair": (call("aten.view.default", x(2, 6, 4), [12, 4]), "S(1) => S(0)"),
    "amax taken as partial": (call("aten.amax.default", x(6, 6), [0]), "S(0) => P"),
    "rows of a table with a padding id": (
        call("aten.embedding.default", x(6, 4), torch.arange(6), 1), "S(0), rows => rows"),
    "table R with sharded ids": (call("aten.embedding.default", x(6, 4), ids(6, 6)), "R, S(0) => S(0)"),
    "a mean loss over a sharded batch": (
        call("aten.cross_entropy_loss.default", x(6, 4), ids(4, 6)), "S(0), S(0) => P"),
    "a literal that counts heads": (call("aten.select.int", x(6, 4), 0, 4), "S(0) => R"),
    "booleans as summands": (call("aten.clone.default", const(6, 4) > 0), "P => P"),
    "a sum of truncated summands": (call("aten.to.dtype", x(6, 4), torch.int64), "P => P"),
    "a value changed twice": (call("aten.mul_.Tensor", x(6, 4), x(6, 4)), "P, P => P"),
}  # fmt: skip


def parse_strategy(text: str) -> Strategy:
    """`S(1), R => P` -> the strategy."""
    letters = {"R": R, "R*": R_STAR, "P": P, "rows": ROWS} | {
        str(layout): layout for dim in range(4) for layout in (S(dim), copied(dim, 2), copied(dim, 3), joint(dim))
    }

    def layouts(side: str) -> tuple[Layout, ...]:
        return tuple(letters[word] for word in re.split(r", (?![0-9])", side))

    operands, results = text.split(" => ")
    return Strategy(layouts(operands), layouts(results))


@pytest.mark.parametrize("name", WRONG)
def test_planted_mistake_is_caught_and_not_offered(name):
    sample, text = WRONG[name]
    strategy = parse_strategy(text)
    problem = violation(sample, strategy, 2)
    assert problem is not None
    assert sample.target in problem
    assert text in problem
    assert "rank" in problem
    assert strategy not in call_strategies(sample.call, 2)


def heads(num_heads: int) -> torch.Tensor:
    return x(2, num_heads, 6, 4)


#: heads of keys and values that ranks share: the call, the ranks, the strategy
SHARED = {
    "attention": (call(ATTENTION, heads(8), heads(2), heads(2), enable_gqa=True), 4, "S(1), S(1)/2, S(1)/2 => S(1)"),
    "attention of three heads": (
        call(ATTENTION, heads(12), heads(3), heads(3), enable_gqa=True), 6, "S(1), S(1)/3, S(1)/3 => S(1)"),
    "attention with a mask for each head": (
        call(ATTENTION, heads(8), heads(2), heads(2), const(8, 6, 6), enable_gqa=True), 8,
        "S(1), S(1)/2, S(1)/2, S(0) => S(1)"),
    "attention of one head": (
        call(ATTENTION, heads(8), heads(1), heads(1), enable_gqa=True), 4, "S(1), R*, R* => S(1)"),
    "one head stretched": (call("aten.expand.default", x(2, 1, 1, 6), [2, 1, 8, 6]), 4, "R* => S(2)"),
    "heads stretched": (call("aten.expand.default", x(2, 2, 1, 6), [2, 2, 4, 6]), 4, "S(1)/2 => S(1, 2)"),
    "stretched heads joined": (call("aten.reshape.default", x(2, 2, 4, 6), [2, 8, 6]), 4, "S(1, 2) => S(1)"),
    "heads repeated": (call("aten.repeat_interleave.self_int", heads(2), 4, 1), 4, "S(1)/2 => S(1)"),
    "one head repeated": (call("aten.repeat_interleave.self_int", heads(1), 8, 1), 4, "R* => S(1)"),
}  # fmt: skip
WRONG_SHARED = {
    "two key heads on a rank": (
        call(ATTENTION, heads(8), heads(4), heads(4), enable_gqa=True), "S(1), S(1)/2, S(1)/2 => S(1)"),
    "a key head for each query": (
        call(ATTENTION, heads(4), heads(4), heads(4)), "S(1), S(1)/2, S(1)/2 => S(1)"),
    "two heads on a rank repeated": (call("aten.repeat_interleave.self_int", heads(4), 4, 1), "S(1)/2 => S(1)"),
    "two heads on a rank stretched": (
        call("aten.expand.default", x(2, 4, 1, 6), [2, 4, 4, 6]), "S(1)/2 => S(2)"),
    "stretched heads joined into few slices": (
        call("aten.reshape.default", x(2, 2, 4, 6), [2, 8, 6]), "S(1, 2) => S(1)/2"),
    "slices and shared slices added": (call("aten.add.Tensor", x(4, 4), x(4, 4)), "S(0), S(0)/2 => S(0)"),
    "keys shared, values not": (
        call(ATTENTION, heads(8), heads(2), heads(2), enable_gqa=True), "S(1), S(1)/2, R* => S(1)"),
    "input R of shared columns": (call("aten.linear.default", x(6, 4), x(4, 4)), "R, S(0)/2 => S(1)/2"),
    "a norm's weight R beside shared heads": (
        call("aten.layer_norm.default", x(6, 4, 6), [6], x(6)), "S(1)/2, R => S(1)/2"),
    "shared columns whose gradient is taken whole": (
        call("aten.linear.default", x(6, 4), x(4, 4)), "R*, S(0)/2 => S(1)"),
    "a sum over shared slices": (call("aten.sum.dim_IntList", x(4, 6), [0]), "S(0)/2 => P"),
    "row-parallel on shared slices": (call("aten.linear.default", x(6, 4), x(4, 4)), "S(1)/2, S(1)/2 => P"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_heads_that_ranks_share_are_offered_and_right(name):
    sample, tp, text = SHARED[name]
    strategy = parse_strategy(text)
    assert strategy in call_strategies(sample.call, tp)
    assert violation(sample, strategy, tp) is None


@pytest.mark.parametrize("name", WRONG_SHARED)
def test_planted_mistake_in_sharing_is_caught_and_not_offered(name):
    sample, text = WRONG_SHARED[name]
    strategy = parse_strategy(text)
    assert text in (violation(sample, strategy, 4) or "")
    assert strategy not in call_strategies(fused(sample.call, 4), 4)


def test_validator_names_the_half_and_the_rank():
    norm, text = WRONG["a norm's weight R under a sharded batch"]
    assert "rank 0: gradient of operand 1 differs" in str(violation(norm, parse_strategy(text), 2))
    softmax, text = WRONG["softmax over a sharded dim"]
    assert "rank 0: value of result 0 differs" in str(violation(softmax, parse_strategy(text), 2))
    chosen, text = WRONG["a literal that counts heads"]
    assert "rank 0: the op fails" in str(violation(chosen, parse_strategy(text), 2))


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_validator_looks_at_every_rank(wrong_rank):
    ranks = [torch.ones(3), torch.ones(3)]
    ranks[wrong_rank] = torch.zeros(3)
    with pytest.raises(WrongStrategyError, match=f"rank {wrong_rank}"):
        check_value(ranks, torch.ones(3), R, "value")
    with pytest.raises(WrongStrategyError, match=f"rank {wrong_rank}"):
        check_gradient(ranks, torch.ones(3), P, "gradient")
    with pytest.raises(WrongStrategyError, match="all ranks together"):
        check_gradient(ranks, torch.zeros(3), R_STAR, "gradient")


def test_missing_strategies_are_found():
    linear = call("aten.linear.default", x(6, 4), x(4, 4))
    assert missing_strategies(linear, 2, limit=1000) == []
    unruled = call("aten.diagonal.default", x(4, 4, 2))
    assert parse_strategy("S(2) => S(0)") in missing_strategies(unruled, 2, limit=1000)


def test_megatron_pair_is_offered():
    """Column then row parallel: f is R -> R*, g is P -> R. [Shoeybi et al. 2019]"""
    column = call("aten.linear.default", x(2, 6, 4), x(12, 4), x(12))
    assert parse_strategy("R*, S(0), S(0) => S(2)") in call_strategies(column.call, 2)
    row = call("aten.linear.default", x(2, 6, 12), x(4, 12), x(4))
    assert parse_strategy("S(2), S(1), P => P") in call_strategies(row.call, 2)


def test_a_call_without_names_keeps_all_else_of_its_values():
    known = {field.name: object() for field in fields(Value)} | {"name": "a", "storage": "b"}
    call = Call(target="", args=(Ref("a"),), kwargs=(("out", Ref("c")),), operands=(Value(**known),), results=())
    like = call.anonymous()
    assert like.operands == (replace(call.operands[0], name="0", storage="1"),)
    assert (like.args, like.kwargs) == ((Ref("0"),), (("out", Ref("2")),))


def test_an_op_without_a_rule_runs_on_whole_operands_alone():
    unknown = call("aten.diagonal.default", x(4, 4))
    assert call_strategies(unknown.call, 2) == (parse_strategy("R => R"), parse_strategy("R* => R*"))
    assert not rules.has_rule(unknown.target)
