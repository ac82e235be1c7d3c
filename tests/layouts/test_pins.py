"""Pins: what they match, what they hold, and that a plan under pins is the best of those that keep them."""

import argparse
from pathlib import Path

import pytest
import torch
from examples import eager_to_shard, example, solve_example
from torch import Tensor, nn

import tpplan
from tpplan import commands
from tpplan.commands.terminal.pins import pins_of, with_files
from tpplan.core.errors import InfeasibleError, UsageError
from tpplan.core.graph import ModelGraph
from tpplan.core.layout import R_STAR, P, R, S
from tpplan.layouts.pins import Pinned, matrix_ops, parse_pin, parse_pins
from tpplan.layouts.rules import Strategy
from tpplan.plan.report import render
from tpplan.plan.styles import KNOWN_STYLES, Style
from tpplan.search.models.trace_cache import Reuse
from tpplan.trace.trace import trace

GPT_MODULES = ("layers.*.attention", "layers.*.feed_forward")


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    """The small GPT."""
    gpt = example("gpt")
    with torch.device("meta"):
        model = gpt.build_model()
    return trace(model, gpt.example_inputs(1, 32), loss=gpt.loss)


@pytest.fixture(scope="module")
def reuse() -> Reuse:
    return Reuse()


def solve_gpt(reuse: Reuse, **options: object) -> tpplan.Plan:
    defaults = {"gpus": 4, "global_batch": 1, "micro_batch": 1, "prove": False}
    return solve_example("gpt", eager_to_shard(), reuse=reuse, **{**defaults, **options})


# What they match


@pytest.mark.parametrize(
    ("pattern", "module", "is_match"),
    [
        ("layers.*.mlp", "layers.3.mlp", True),
        ("layers.*.mlp", "layers.3.mlp.up", False),
        ("layers.*", "layers.3.mlp", False),
        ("layers.[01].mlp", "layers.1.mlp", True),
        ("layers.[01].mlp", "layers.2.mlp", False),
        ("*.*.*_proj", "layers.2.up_proj", True),
        ("<root>", "", True),
        ("<root>", "layers", False),
    ],
)
def test_a_star_is_one_part_of_a_name(pattern: str, module: str, is_match: bool) -> None:
    assert parse_pin(pattern, "columns").matches(module) is is_match


def test_what_the_table_of_a_plan_says_pins_too() -> None:
    """Every style but the shorthand, and each in other words."""
    for style in Style:
        text = f"{style} 1" if style is Style.SPLIT else str(style)
        assert parse_pin("m", text).style is style
        assert str(parse_pin("m", text)) == f"m={text}"
    for text in ("column", "Colwise", "column-parallel", "columns"):
        assert parse_pin("m", text).style is Style.COLUMN
    for text in KNOWN_STYLES.replace("N", "0").split(", "):
        parse_pin("m", text)


def test_an_unknown_style_is_named_with_those_known() -> None:
    with pytest.raises(
        UsageError, match=r"pin 'm=megatorn': unknown style 'megatorn'; did you mean 'megatron'\? .*rows"
    ):
        parse_pin("m", "megatorn")
    with pytest.raises(UsageError, match="split dim N"):
        parse_pin("m", "split dim")


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (
            ("layers.*.ffn", "rows"),
            r"pin 'layers.\*.ffn=row parallel': no module of that name runs .*; did you mean .*ffn_norm",
        ),
        (("layers.*.ffn_norm", "rows"), "layers.0.ffn_norm reads no matrix"),
        (("lm_head", "megatron"), "lm_head has no two matrices in a row"),
        (("lm_head", "vocab"), "pin an output head with 'columns'"),
        (("dropout", "replicate"), "dropout reads no parameter"),
    ],
)
def test_a_pin_that_holds_nothing_is_named(graph: ModelGraph, pin: tuple[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Pinned(graph=graph, pins=(parse_pin(*pin),))


# What they hold


def roles(graph: ModelGraph, module: str) -> dict[str, Style]:
    """What `megatron` makes of the matrices of a module, by the parameter's name."""
    pinned = Pinned(graph=graph, pins=parse_pins({module: "megatron"}))
    labels = {source.result: source.label for source in graph.parameters}
    matrices = {op: labels[m.op.operands[m.positions[0]]] for op, m in matrix_ops(graph).items()}
    found = {}
    for name, (_, matrix) in zip(matrices.values(), matrix_ops(graph).items(), strict=True):
        styles = {s: pinned(matrix.op.name, strategy) for s, strategy in SAMPLES.items()}
        if not all(styles.values()):
            (found[name],) = (style for style, is_allowed in styles.items() if is_allowed)
    return found


#: a linear's strategies with a bias
SAMPLES = {
    Style.COLUMN: Strategy((R_STAR, S(0), S(0)), (S(2),)),
    Style.ROW: Strategy((S(2), S(1), P), (P,)),
    Style.REPLICATED: Strategy((R, R, R), (R,)),
}


class Gated(nn.Module):
    """A router beside two experts' worth of gate, up and down, and a low rank in front of up."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.gate = nn.Linear(8, 8), nn.Linear(8, 16)
        self.low, self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, D] -> [B, D]."""
        return self.down(self.gate(x).sigmoid() * self.up(self.low(x))) * self.router(x).softmax(-1)


class Around(nn.Module):
    """A module that has a residual around two pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, D] -> [B, D]."""
        x = x + self.b(self.a(x).relu())
        return x + self.d(self.c(x).relu())


class Inside(nn.Module):
    """`body` with a loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """x [B, D] -> scalar."""
        return self.body(x).square().mean()


def traced(body: type[nn.Module]) -> ModelGraph:
    with torch.device("meta"):
        return trace(Inside(body()), {"x": torch.zeros(2, 8)})


def test_megatron_is_columns_then_rows_in_the_order_of_the_data() -> None:
    """Last matrices are rows, what leads to them columns; a router and what is further up are left open."""
    column, row = Style.COLUMN, Style.ROW
    assert roles(traced(Gated), "body") == {
        "body.gate.weight": column,
        "body.up.weight": column,
        "body.down.weight": row,
    }
    pairs = {"body.a.weight": column, "body.b.weight": row, "body.c.weight": column, "body.d.weight": row}
    assert roles(traced(Around), "body") == pairs


@pytest.mark.long
def test_megatron_with_sequence_parallelism_is_what_practitioners_write(reuse: Reuse) -> None:
    pins = dict.fromkeys(GPT_MODULES, "megatron")
    pins |= dict.fromkeys(("layers.*.attention_norm", "layers.*.ffn_norm", "norm"), "sequence")
    pins |= {"tok_embeddings": "vocab", "lm_head": "columns"}
    plan = solve_gpt(reuse, tp=4, pins=pins)
    placements = {name: parameter.placement for name, parameter in plan.parameters.items()}
    for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "feed_forward.up_proj"):
        assert placements[f"layers.*.{name}.weight"] == S(0)
    for name in ("attention.o_proj", "feed_forward.down_proj"):
        assert placements[f"layers.*.{name}.weight"] == S(1)
    assert plan.parameters["norm.weight"].reads == {"norm": R_STAR}
    assert (placements["tok_embeddings.weight"], placements["lm_head.weight"]) == (S(0), S(0))
    shown = " ".join(render(plan, width=120).split())
    for row in ("attention.q_proj column S(0)", "feed_forward.down_proj row S(1)", "ffn_norm on slices R as R*"):
        assert row in shown
    assert "tok_embeddings vocabulary" in shown


@pytest.mark.long
def test_a_plan_under_its_own_styles_is_that_plan_and_under_others_costs_more(reuse: Reuse) -> None:
    """Of all that one module may be, the free plan has the cheapest."""
    free = solve_gpt(reuse)
    prices = {}
    for style in ("columns", "rows", "replicate", "slices", "megatron", "split dim 0", "split dim 1"):
        plan = solve_gpt(reuse, pins={"layers.*.feed_forward": style}, tp=free.mesh.tp)
        prices[style] = plan.predicted.step_time_s
        assert prices[style] >= free.predicted.step_time_s * (1 - 1e-9), style
    assert min(prices.values()) == pytest.approx(free.predicted.step_time_s, rel=1e-9)
    assert len({round(price, 9) for price in prices.values()}) > 3


@pytest.mark.long
def test_one_of_like_layers_may_be_pinned(reuse: Reuse) -> None:
    plan = solve_gpt(reuse, tp=4, pins={"layers.0": "megatron", "layers.1.feed_forward": "replicate"})
    placements = {name: parameter.placement for name, parameter in plan.parameter_plans().items()}
    assert placements["layers.0.feed_forward.up_proj.weight"] == S(0)
    assert placements["layers.1.feed_forward.up_proj.weight"] == R


@pytest.mark.long
def test_a_pinned_plan_is_proven(reuse: Reuse) -> None:
    plan = solve_gpt(reuse, tp=2, gpus=2, pins={"layers.*.feed_forward": "replicate"}, prove=True)
    assert plan.proof.status == "proven"


# What none keeps


def test_one_rank_has_nothing_to_cut(reuse: Reuse) -> None:
    with pytest.raises(InfeasibleError, match=r"tp 1: 'layers.\*.feed_forward=column parallel' leaves .* One rank has"):
        solve_gpt(reuse, gpus=1, pins={"layers.*.feed_forward": "columns"})
    assert solve_gpt(reuse, gpus=2, pins={"layers.*.feed_forward": "columns"}).mesh.tp == 2


@pytest.mark.long
def test_pins_that_contradict_each_other_are_named(reuse: Reuse) -> None:
    pins = {"layers.*.attention": "sequence", "layers.*.attention.q_proj": "columns", "norm": "replicate"}
    with pytest.raises(InfeasibleError, match=r"one does where any of these is left out: [^:]*$") as caught:
        solve_gpt(reuse, tp=4, pins=pins)
    assert "q_proj=column parallel" in str(caught.value)
    assert "norm=replicated" not in str(caught.value)


@pytest.mark.long
def test_a_pin_that_does_not_fit_the_memory_is_named(reuse: Reuse) -> None:
    options = {"tp": 4, "optimizer": "adamw"}
    free = solve_gpt(reuse, **options)
    limit = 2.5 * free.predicted.peak_memory_bytes  # what is held to it lies above the peak
    pins = {"layers.*": "replicate", "lm_head": "columns"}
    with pytest.raises(InfeasibleError, match=r"left out: 'layers.\*=replicated'\."):
        solve_gpt(reuse, **options, memory_limit_bytes=limit, pins=pins)
    with pytest.raises(InfeasibleError, match="no plan fits"):  # no pin's fault
        solve_gpt(reuse, **options, memory_limit_bytes=limit / 50, pins={"lm_head": "columns"})


# Sharing


@pytest.mark.long
def test_plans_with_shared_state_are_those_without(reuse: Reuse) -> None:
    """Byte for byte, whatever was solved before."""
    options = {"gpus": 4, "global_batch": 1, "micro_batch": 1}
    alone = solve_example("gpt", eager_to_shard(), **options)
    assert solve_gpt(reuse, prove=True).dumps() == alone.dumps()


def test_a_model_is_built_once_and_traced_once_a_shape_for_all_that_share_it() -> None:
    built, seen = [], []

    def build_model() -> nn.Module:
        built.append(1)
        model = example("mlp").build_model()
        model.register_forward_pre_hook(lambda _module, args, kwargs: seen.append(1), with_kwargs=True)
        return model

    def solved(**options: object) -> int:
        """How often forward ran for it."""
        before = len(seen)
        solve_example("mlp", eager_to_shard(), builder=build_model, reuse=shared, prove=False, **options)
        return len(seen) - before

    shared = Reuse()
    assert solved(gpus=1) > 0
    assert solved(gpus=2) == 0
    assert solved(gpus=2, micro_batch=2) > 0
    assert len(built) == 1


# On the command line


def solved_with(*more: str) -> tuple[dict[str, str], argparse.Namespace]:
    """What `tpplan solve` makes of its arguments."""
    args = commands._parser().parse_args(with_files(["solve", "m.py", *MACHINE, *more]))
    return pins_of(args), args


MACHINE = ("--gpus", "8", "--profile", "h100-sxm", "--global-batch", "8", "--micro-batch", "1", "--seq-len", "64")


def test_a_file_stands_for_options_and_the_command_line_wins(tmp_path: Path) -> None:
    toml, data = tmp_path / "pins.toml", tmp_path / "pins.json"
    toml.write_text('tp = 4\nmemory-limit = "70GiB"\ncompile = true\n[pins]\n"a.*" = "megatron"\nb = "rows"\n')
    data.write_text('{"tp": 4, "memory-limit": "70GiB", "compile": true, "pins": {"a.*": "megatron", "b": "rows"}}')
    for file in (toml, data):
        pins, args = solved_with("--pins", str(file), "--pin", "b=columns")
        assert pins == {"a.*": "megatron", "b": "columns"}
        assert (args.tp, args.memory_limit, args.compile) == (4, 70 * 2**30, True)
        assert solved_with("--tp", "2", f"--pins={file}")[1].tp == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pin", "a"), "expected PATTERN=STYLE"),
        (("--pin", "a=megatorn"), "did you mean 'megatron'"),
        (("--pins", "nowhere.toml"), "nowhere.toml: cannot be read"),
        (("--pins", "broken.toml"), "broken.toml: not valid TOML"),
        (("--pins", "list.json"), "list.json: expected an object"),
        (("--pins", "number.toml"), r"number.toml: pins.a: expected the name of a style, got 3"),
        (("--pins", "unknown.toml"), "unrecognized arguments: --tq=3"),
    ],
)
def test_mistakes_in_pins_are_told(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"broken.toml": "tp = ", "list.json": "[]", "number.toml": "[pins]\na = 3", "unknown.toml": "tq = 3"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    try:
        code = commands.main(["solve", "m.py", *MACHINE, *arguments])
    except SystemExit as stopped:  # argparse
        code = int(stopped.code or 0)
    assert code == UsageError.exit_code
    assert message in capsys.readouterr().err
