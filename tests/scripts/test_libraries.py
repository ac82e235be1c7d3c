"""scripts/evidence/libraries.py: its shares are what is divided, and what is wrong is called so."""

import functools
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from forks import in_fork
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "scripts" / "evidence"
EXAMPLES = ROOT / "scripts" / "examples"
TP = 2
#: of vit.py
HEADS, WIDTH, PATCHES, LAYERS = 4, 64, 16, 2


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EVIDENCE))
    import libraries

    return libraries


def row_of(name: str, heads: int | None) -> object:
    """The row of a model file, from a process that has run no backward."""
    import libraries

    libraries.quiet()
    own = libraries.OwnFile(heads=heads, batch=1, seq_len=PATCHES)
    return libraries.run(name, own, (TP,), 120.0)


def test_a_model_file_is_planned_right_and_divided(script: ModuleType) -> None:
    row = in_fork(row_of, str(EXAMPLES / "vit.py"), HEADS)
    assert (row.status, row.problems) == ("right", ())
    assert row.is_solved
    assert row.is_attention_divided
    assert row.flops[TP] > 0.9  # all but what patches and classes take
    assert row.sharded[TP] > 0.9
    counts = script.Counts.of([row])
    assert counts.are_bars_met
    assert "1 of 1 with attention" in "\n".join(counts.lines())


DRAWING = """
import random
import torch
from torch import nn

class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        random.getrandbits(8)
        return self.inner(x).square().mean()

def build_model(): return Drawing()
def example_inputs(batch, seq_len): return {"x": torch.arange(8.0 * batch * seq_len).view(batch, seq_len, 8).sin()}
"""


def test_a_forward_may_draw_from_python(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "drawing.py"
    path.write_text(DRAWING)
    row = in_fork(row_of, str(path), None)
    assert (row.status, row.problems) == ("right", ())


def test_degrees_that_do_not_divide_heads_are_left_out(script: ModuleType) -> None:
    assert script.degrees_of(4, (2, 4, 8)) == (2, 4)
    assert script.degrees_of(None, (2, 4)) == (2,)


@pytest.mark.parametrize(
    ("changes", "status", "is_met"),
    [
        ({}, "right", True),
        ({"errors": {2: 0.1}}, "wrong", False),
        ({"errors": {2: 5e-3}}, "wrong", False),
        ({"errors": {2: 5e-3}, "tolerance": 2**-7}, "right", True),
        ({"proven": {2: False}}, "unproven", False),
        ({"errors": {}, "failed": "ranks"}, "ranks", False),
        ({"attention": {2: 0.5}}, "right", False),
        ({"attention": {2: 0.5}, "heads": None}, "right", True),
    ],
)
def test_bars(script: ModuleType, changes: dict[str, object], status: str, is_met: bool) -> None:
    found = {"degrees": (2,), "heads": 4, "proven": {2: True}, "errors": {2: 1e-7}, "attention": {2: 1.0}}
    row = script.LibraryRow(model="m", **found | changes)
    assert row.status == status
    assert script.Counts.of([row]).are_bars_met == is_met


def test_the_share_of_work_divided(script: ModuleType) -> None:
    assert script.divided(100, 100, 2) == 0.0
    assert script.divided(50, 100, 2) == 1.0
    assert script.divided(25, 100, 4) == 1.0


def test_names_are_read_without_importing(script: ModuleType) -> None:
    assert "vit" in script.models_of("timm")
    assert script.names_of("timm/vit") == ["timm/vit"]
    assert script.names_of("model.py:big") == ["model.py:big"]
    with pytest.raises(KeyError, match="expected one of"):
        script.names_of("timm/no_such")
    assert len({library for library in script.libraries() for _ in script.models_of(library)}) >= 12


class Attention(nn.Module):
    """One head, by batched products or fused."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.weight = nn.Parameter(torch.ones(1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight  # no product of two activations
        if self.fused:
            return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        return torch.bmm(torch.bmm(x, x.transpose(1, 2)).softmax(-1), x)


@pytest.mark.parametrize("fused", [False, True])
def test_flops_of_attention_are_those_of_products_of_activations(script: ModuleType, fused: bool) -> None:
    from step_flops import FlopLog

    x = torch.randn(1, 5, 8)
    with FlopLog([x]) as log:
        loss = Attention(fused)(x).sum()
        forward = log.total
        log.is_forward = False
        loss.backward()
    one = 2 * 5 * 5 * 8
    assert sum(log.products) == 2 * one
    assert forward == 2 * one + 2 * 5 * 8 * 8
    assert log.total > 2 * forward  # two products for each in backward, but one for the input


def test_an_error_is_a_line_under_its_stage(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def build_model(): raise ValueError('no')\ndef example_inputs(batch, seq_len): return {}\n")
    row = in_fork(functools.partial(row_of, str(path), None))
    assert row.status == "one process"
    assert "ValueError while calling build_model()" in row.problems[0]


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_convolution_in_groups_takes_thrice_its_products(
    script: ModuleType, groups: int, is_transposed: bool
) -> None:
    from step_flops import FlopLog

    kind = nn.ConvTranspose1d if is_transposed else nn.Conv1d
    x = torch.randn(2, 8, 5, requires_grad=True)
    layer = kind(8, 8, 3, padding=1, groups=groups)
    with FlopLog([x]) as log:
        layer(x).sum().backward()
    assert log.total == 3 * 2 * x.shape[0] * 5 * 8 * (8 // groups) * 3


def test_what_is_zero_but_for_rounding_is_no_error_and_what_is_more_is_one(script: ModuleType) -> None:
    reference = {"bias": torch.tensor([3e-7]), "weight": torch.tensor([1.0])}
    noise = script.rounding(reference, {"bias": torch.zeros(1).double(), "weight": torch.tensor([1.5]).double()})
    assert noise["weight"] == script.MOST_NOISE  # float64 took another way
    for bias, is_wrong in ((-3e-7, False), (3e-5, True)):
        found = script.Outcome(1.0, reference | {"bias": torch.tensor([bias])})
        error, name = script.worst_error(found, script.Outcome(1.0, reference), noise)
        assert (error > script.TOLERANCE) == is_wrong
        assert not is_wrong or name == "bias"
