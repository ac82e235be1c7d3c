"""The layout algebra: texts, shapes, and each conversion against its meaning, rank by rank, in both directions."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpplan.core.errors import PlanError
from tpplan.core.layout import (
    COLLECTIVE_STEPS,
    R_STAR,
    ROWS,
    Conversion,
    Layout,
    LayoutKind,
    P,
    R,
    S,
    Step,
    can_convert,
    conversions_between,
    copied,
    fits,
    joint,
    layouts_of,
    local_shape,
    parse_conversion,
    parse_layout,
)

#: dims divide by 2, 3 and 4, and slices of slices still differ
SHAPE = (12, 24)
RANKS = (2, 3, 4)
LAYOUTS = (*layouts_of(SHAPE, carries_gradient=True, tp=12), S(1, 12, 12))
PAIRS = tuple(itertools.product(LAYOUTS, LAYOUTS))

#: the table of the design: (from, to) -> (forward, backward)
TABLE = {
    "R -> R*": ("none", "all_reduce"),
    "R -> S(0)": ("slice", "all_gather"),
    "R -> P": ("divide", "none"),
    "R* -> R": ("none", "divide"),
    "R* -> S(0)": ("slice", "pad"),
    "R* -> P": ("divide", "divide"),
    "S(0) -> R*": ("all_gather", "reduce_scatter"),
    "S(0) -> R": ("all_gather", "slice"),
    "S(0) -> P": ("pad", "slice"),
    "P -> R": ("all_reduce", "none"),
    "P -> R*": ("all_reduce", "all_reduce"),
    "P -> S(0)": ("reduce_scatter", "all_gather"),
    "S(0) -> S(1)": ("all_to_all", "all_to_all"),
}

Ranks = list[np.ndarray]


def summands(whole: np.ndarray, tp: int, seed: int) -> Ranks:
    """Noise that adds up to `whole`."""
    rng = np.random.default_rng(seed)
    others = [rng.normal(size=whole.shape) for _ in range(tp - 1)]
    return [*others, whole - sum(others)]


def place(whole: np.ndarray, layout: Layout, tp: int, *, partial: LayoutKind) -> Ranks:
    """What the ranks hold: `partial` is the kind that is a summand, P for values and R* for gradients."""
    if layout.kind is LayoutKind.SHARD:
        return split(whole, layout, tp)
    return summands(whole, tp, seed=7) if layout.kind is partial else [whole.copy() for _ in range(tp)]


def assert_holds(ranks: Ranks, whole: np.ndarray, layout: Layout, *, partial: LayoutKind) -> None:
    """The ranks hold `whole` as the layout says."""
    if layout.kind is partial:
        np.testing.assert_allclose(sum(ranks), whole, atol=1e-12)
        return
    for rank, expected in zip(ranks, place(whole, layout, len(ranks), partial=partial), strict=True):
        np.testing.assert_allclose(rank, expected, atol=1e-12)


def split(whole: np.ndarray, layout: Layout, tp: int) -> Ranks:
    """Each rank's slices of the parts of a dim."""
    parts = np.split(whole, np.cumsum(layout.parts)[:-1], layout.dim)
    slices = [np.split(part, tp, layout.dim) for part in parts]
    return [np.concatenate([part[rank] for part in slices], layout.dim) for rank in range(tp)]


def join(ranks: Ranks, layout: Layout) -> np.ndarray:
    """The inverse."""
    tp = len(ranks)
    cuts = np.cumsum([part // tp for part in layout.parts])[:-1]
    slices = [np.split(rank, cuts, layout.dim) for rank in ranks]
    return np.concatenate([s for part in zip(*slices, strict=True) for s in part], layout.dim)


def take(step: Step, ranks: Ranks, source: Layout, target: Layout) -> Ranks:
    """One step of a change from source to target, as the group of ranks sees it."""
    tp = len(ranks)
    match step:
        case Step.ALL_REDUCE:
            return [sum(ranks)] * tp
        case Step.ALL_GATHER:
            return [join(ranks, source)] * tp
        case Step.REDUCE_SCATTER:
            return split(sum(ranks), target, tp)
        case Step.ALL_TO_ALL:
            return split(join(ranks, source), target, tp)
        case Step.SLICE:
            return [split(tensor, target, tp)[rank] for rank, tensor in enumerate(ranks)]
        case Step.PAD:
            zeros = [np.zeros_like(tensor) for tensor in ranks]
            return [join([*zeros[:r], ranks[r], *zeros[r + 1 :]], source) for r in range(tp)]
        case Step.DIVIDE:
            return [tensor / tp for tensor in ranks]
        case _:
            raise AssertionError(f"{step} is not a step between these layouts")


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda layout: str(layout))
def test_forward_steps_keep_the_value(source, target, tp):
    whole = np.random.default_rng(0).normal(size=SHAPE)
    ranks = place(whole, source, tp, partial=LayoutKind.PARTIAL)
    for step in Conversion(source, target).forward:
        ranks = take(step, ranks, source, target)
    assert_holds(ranks, whole, target, partial=LayoutKind.PARTIAL)


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda layout: str(layout))
def test_backward_steps_keep_the_gradient(source, target, tp):
    whole = np.random.default_rng(1).normal(size=SHAPE)
    ranks = place(whole, target, tp, partial=LayoutKind.REPLICATE_PARTIAL_GRADIENT)
    for step in Conversion(source, target).backward:
        ranks = take(step, ranks, target, source)
    assert_holds(ranks, whole, source, partial=LayoutKind.REPLICATE_PARTIAL_GRADIENT)


@pytest.mark.parametrize("text", TABLE)
def test_conversions_are_those_of_the_table(text):
    conversion = parse_conversion(text)
    steps = tuple(tuple(step for step in (name,) if step != "none") for name in TABLE[text])
    assert (conversion.forward, conversion.backward) == steps


def test_the_table_covers_every_pair():
    kinds = {tuple(parse_layout(side).kind for side in text.split(" -> ")) for text in TABLE}
    every = {(a.kind, b.kind) for a, b in PAIRS if a != b}
    assert kinds == every
    assert {(c.source, c.target) for c in conversions_between(LAYOUTS, LAYOUTS, carries_gradient=True)} == set(PAIRS)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda layout: str(layout))
def test_no_conversion_has_fewer_collectives(source, target):
    """A collective is needed exactly where some rank lacks a part of what it must hold."""

    def needs(held: Layout, wanted: Layout, partial: LayoutKind) -> bool:
        if held == wanted or (held.kind is not LayoutKind.SHARD and held.kind is not partial):
            return False
        return wanted.kind is not partial

    value, gradient = LayoutKind.PARTIAL, LayoutKind.REPLICATE_PARTIAL_GRADIENT
    conversion = Conversion(source, target)
    assert bool(COLLECTIVE_STEPS & set(conversion.forward)) == needs(source, target, value)
    assert bool(COLLECTIVE_STEPS & set(conversion.backward)) == needs(target, source, gradient)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_identity_takes_no_steps(layout):
    conversion = Conversion(layout, layout)
    assert conversion.is_identity
    assert conversion.forward == conversion.backward == ()


@pytest.mark.parametrize("target", LAYOUTS, ids=str)
@pytest.mark.parametrize("tp", RANKS)
def test_looked_up_rows_are_masked_and_then_partial(target, tp):
    """V = 12 rows, 24 columns, a slice of rows per rank; ids of other ranks' rows give garbage."""
    rng = np.random.default_rng(2)
    table, ids = rng.normal(size=SHAPE), rng.integers(12, size=12)
    rows = 12 // tp
    is_local = [(ids >= rank * rows) & (ids < (rank + 1) * rows) for rank in range(tp)]
    assert Conversion(R, ROWS).forward == (Step.LOCAL_ROWS,)
    local = [np.clip(ids - rank * rows, 0, rows - 1) for rank in range(tp)]
    found = [np.split(table, tp)[rank][local[rank]] for rank in range(tp)]

    conversion = Conversion(ROWS, target)
    assert conversion.forward[0] == conversion.backward[-1] == Step.MASK
    ranks = [values * mask[:, None] for values, mask in zip(found, is_local, strict=True)]
    for step in conversion.forward[1:]:
        ranks = take(step, ranks, P, target)
    assert_holds(ranks, table[ids], target, partial=LayoutKind.PARTIAL)

    gradient = rng.normal(size=(12, 24))
    ranks = place(gradient, target, tp, partial=LayoutKind.REPLICATE_PARTIAL_GRADIENT)
    for step in conversion.backward[:-1]:
        ranks = take(step, ranks, target, P)
    slices = [np.zeros((rows, 24)) for _ in range(tp)]
    for rank in range(tp):
        np.add.at(slices[rank], local[rank], ranks[rank] * is_local[rank][:, None])
    expected = np.zeros_like(table)
    np.add.at(expected, ids, gradient)
    assert_holds(slices, expected, S(0), partial=LayoutKind.REPLICATE_PARTIAL_GRADIENT)


@pytest.mark.parametrize("source", [R_STAR, P, S(0)], ids=str)
def test_rows_come_from_whole_ids_alone(source):
    with pytest.raises(ValueError, match="no conversion"):
        Conversion(source, ROWS)


def test_without_a_gradient_nothing_happens_backward_and_nothing_is_partial():
    layouts = layouts_of(SHAPE, carries_gradient=False, tp=2)
    assert layouts == (R, S(0), S(1))
    found = conversions_between((*layouts, P), (*layouts, P), carries_gradient=False)
    assert {(c.source, c.target) for c in found} == set(itertools.product(layouts, layouts))


layouts = (
    st.sampled_from([R, R_STAR, P, ROWS])
    | st.integers(0, 99).map(S)
    | st.builds(copied, st.integers(0, 99), st.integers(2, 99))
)


@given(layouts)
def test_layout_text_round_trip(layout):
    assert parse_layout(str(layout)) == layout


@given(layouts, layouts)
def test_conversion_text_round_trip(source, target):
    try:
        conversion = Conversion(source, target)
    except ValueError:
        with pytest.raises(PlanError):
            parse_conversion(f"{source} -> {target}")
    else:
        assert parse_conversion(str(conversion)) == conversion


NO_LAYOUTS = [
    *("", "S", "S()", "S(-1)", "S(1) ", "S(01)", "S(٣)", "r", "R**", "S(100)"),
    *("S(0)/", "S(0)/1", "S(0)/0", "S(0)/02", "S(0) / 2", "S(0)/2/2", "S(0; 2, 2)/2", "R/2", "S(0, 1)"),
]


@given(st.text(max_size=8) | st.sampled_from(NO_LAYOUTS))
def test_other_text_is_no_layout(text):
    if text in {"R", "R*", "P", "rows", *(f"S({dim})" for dim in range(100))} or re.fullmatch(
        r"S\([0-9]\)/[2-9]", text
    ):
        return
    with pytest.raises(PlanError, match="expected a layout"):
        parse_layout(text)


@pytest.mark.parametrize("text", ["", "R", "R->P", "R -> ", " -> R", "R -> P -> R", "P -> rows", "R  -> P", "R -> p"])
def test_other_text_is_no_conversion(text):
    with pytest.raises(PlanError):
        parse_conversion(text)


def test_shared_slices_are_cut_and_padded_without_a_collective():
    conversion = Conversion(R_STAR, copied(0, 2))
    assert (conversion.forward, conversion.backward) == ((Step.SLICE,), (Step.PAD,))


def test_shared_slices_and_pairs_of_dims_are_converted_from_whole_summands_alone():
    special = (copied(0, 2), copied(0, 3), copied(1, 2), joint(0))
    every = (*LAYOUTS, ROWS, *special)
    possible = {(a, b) for a in every for b in every if {a, b} & set(special) and a != b and can_convert(a, b)}
    assert possible == {(R_STAR, layout) for layout in special[:3]}
    for layout in special:
        assert not layout.is_plain
        assert not layout.is_whole
        with pytest.raises(ValueError, match="no conversion"):
            Conversion(ROWS, layout)


@pytest.mark.parametrize(
    "layout",
    [
        {"kind": LayoutKind.COPIED, "dim": 0},
        {"kind": LayoutKind.COPIED, "slices": 2},
        {"kind": LayoutKind.COPIED, "dim": 0, "slices": 1},
        {"kind": LayoutKind.COPIED, "dim": 0, "slices": 2, "parts": (2, 2)},
        {"kind": LayoutKind.SHARD, "dim": 0, "slices": 2},
        {"kind": LayoutKind.JOINT},
        {"kind": LayoutKind.JOINT, "dim": 0, "parts": (2, 2)},
    ],
    ids=str,
)
def test_slices_belong_to_shared_ones_alone(layout):
    with pytest.raises(ValueError, match="layout"):
        Layout(**layout)


def test_local_shapes_of_what_is_shared():
    assert local_shape((6, 4), copied(1, 2), 4) == (6, 2)
    assert local_shape((6, 4), copied(0, 3), 6) == (2, 4)
    assert local_shape((2, 8, 5), joint(0), 4) == (1, 4, 5)
    assert (str(copied(0, 8)), str(joint(1))) == ("S(0)/8", "S(1, 2)")
    for shape, layout, tp in (
        ((6, 4), copied(1, 4), 4),  # as many slices as ranks are S(d)
        ((6, 4), copied(1, 2), 3),  # ranks must share alike
        ((6, 5), copied(1, 2), 4),
        ((6,), copied(1, 2), 4),
        ((4, 8), joint(0), 4),  # S(0)
        ((1, 8), joint(0), 4),  # S(1)
        ((3, 8), joint(0), 4),
        ((2, 3), joint(0), 4),
        ((4, 2), joint(1), 8),
    ):
        assert not fits(shape, layout, tp), layout
        with pytest.raises(ValueError, match="on"):
            local_shape(shape, layout, tp)


@pytest.mark.parametrize("layout", [(LayoutKind.SHARD, None), (LayoutKind.SHARD, -1), (LayoutKind.PARTIAL, 0)])
def test_a_dim_belongs_to_shards_alone(layout):
    with pytest.raises(ValueError, match="layout"):
        Layout(*layout)


def test_local_shapes():
    assert local_shape((6, 4), S(0), 3) == (2, 4)
    assert local_shape((6, 4), S(1), 2) == (6, 2)
    assert local_shape((6, 12), S(1, 4, 8), 2) == (6, 6)
    assert not fits((6, 12), S(1, 3, 9), 2)  # each part divides, or none is sharded
    assert not fits((6, 12), S(1, 4, 4), 2)
    for layout in (R, R_STAR, P, ROWS):
        assert local_shape((6, 5), layout, 4) == (6, 5)
    for shape in ((6, 4), (), (3,)):
        assert not fits(shape, S(0), 4)
        with pytest.raises(ValueError, match="on 4 ranks"):
            local_shape(shape, S(0), 4)


def test_layouts_of_a_value():
    assert layouts_of((6, 5, 0), carries_gradient=True, tp=2) == (R, R_STAR, P, S(0))
    assert layouts_of((), carries_gradient=True, tp=2) == (R, R_STAR, P)
    assert [layout.is_whole for layout in (R, R_STAR, P, S(0), ROWS)] == [True, True, False, False, False]
