"""Sizes that stand inside attributes, which modules may share: read as a rank's in the module that asks alone."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from one_process import gradients, relative_errors
from ranks import RankError, run_ranks
from test_attention import DIM, HEADS, LENGTH, VOCAB, around, by_heads, loss, losses_and_gradients, text
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpplan
from tpplan.core.errors import VerificationError
from tpplan.plan.plan import Plan, Recompute, SizePlan
from tpplan.trace.hooks.nested_integers import parse_path, path_text


@dataclass(frozen=True, slots=True)
class Sizes:
    heads: int = HEADS
    layers: tuple[int, ...] = (HEADS, HEADS)


class Pair(NamedTuple):
    name: str
    size: int


@dataclass
class Config:
    num_heads: int = HEADS
    seen: list[object] = field(default_factory=list)
    calls: int = 0


class Attention(nn.Module):
    """Attention that computes the size of a head of a slice and the number of heads."""

    def __init__(self, sizes: object = None) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.sizes = sizes

    def heads(self) -> int:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.to_q(x), self.to_k(x), self.to_v(x)
        heads = self.heads()
        size = key.shape[-1] // heads
        query, key, value = (t.view(len(x), -1, heads, size).transpose(1, 2) for t in (query, key, value))
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.to_out(attended.transpose(1, 2).reshape(len(x), -1, heads * size))


class InTuple(Attention):
    def __init__(self) -> None:
        super().__init__((Pair("h", HEADS), Pair("x", 1)))

    def heads(self) -> int:
        return self.sizes[0].size


class InDict(Attention):
    def __init__(self) -> None:
        super().__init__({"of": [{"h": HEADS}], ("other",): HEADS})

    def heads(self) -> int:
        return self.sizes["of"][0]["h"]


class InDataclass(Attention):
    def __init__(self) -> None:
        super().__init__(Sizes())

    def heads(self) -> int:
        return self.sizes.layers[1]


class BesideAnother(Attention):
    """As many heads as another attribute has dims, at the same depth."""

    def __init__(self) -> None:
        super().__init__((("h", HEADS),))
        self.recipe = (("dims", HEADS),)

    def heads(self) -> int:
        if self.recipe[0][1] != HEADS:
            raise ValueError(f"expected {HEADS} dims, got {self.recipe[0][1]}")
        return self.sizes[0][1]


class InNamespace(Attention):
    def __init__(self) -> None:
        super().__init__(SimpleNamespace(h=HEADS))

    def heads(self) -> int:
        return self.sizes.h


class InConfig(Attention):
    def heads(self) -> int:
        return self.sizes.num_heads


class Checkpointed(InConfig):
    """Runs again in backward, and reads the size then."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Sharing(nn.Module):
    """Two layers with one configuration, which the model also reads itself."""

    def __init__(self, attention: type[Attention] = InConfig) -> None:
        super().__init__()
        self.config = Config()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(attention(self.config) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x) / self.config.num_heads
        return self.head(x) * self.config.num_heads


def calls_of(plan: Plan) -> set[str]:
    return {size.call for sizes in plan.sizes.values() for size in sizes}


def assert_right(build: Callable[[], nn.Module], plan: Plan, module: str) -> None:
    read = {name: layout for name, p in plan.parameter_plans().items() for layout in p.reads.values()}
    assert str(read[f"{module}.to_q.weight"]) == "S(0)"
    assert str(read[f"{module}.to_out.weight"]) == "S(1)"
    for batch in (1, 3):
        trained, evaluated, expected = losses_and_gradients(build, None, batch)
        for found in run_ranks(2, losses_and_gradients, build, plan, batch):
            assert found[:2] == pytest.approx((trained, evaluated), rel=1e-5)
            assert max(relative_errors(found[2], expected).values()) < 1e-4


@pytest.mark.parametrize(
    ("attention", "call"),
    [
        (InTuple, "self.sizes[0][1]"),
        (InDict, 'self.sizes["of"][0]["h"]'),
        (InDataclass, "self.sizes.layers[1]"),
        (InNamespace, "self.sizes.h"),
        (BesideAnother, "self.sizes[0][1]"),
    ],
)
def test_sizes_inside_attributes_are_a_ranks(attention: type[Attention], call: str) -> None:
    plan = by_heads(around(attention), 2)
    assert call in calls_of(plan)
    assert_right(around(attention), plan, "1")


@pytest.mark.parametrize("attention", [InConfig, Checkpointed])
def test_a_shared_configuration_is_a_ranks_in_the_layers_that_ask_alone(attention: type[Attention]) -> None:
    def build() -> nn.Module:
        return Sharing(attention)

    plan = by_heads(build, 2)
    assert calls_of(plan) == {"self.sizes.num_heads"}
    assert_right(build, plan, "layers.0")
    if attention is InConfig:
        again = by_heads(build, 2, recompute="full")
        assert set(again.recomputed_modules().values()) == {Recompute.FULL}
        assert_right(build, again, "layers.0")


class Counts(InConfig):
    def forward(self, x: Tensor) -> Tensor:
        self.sizes.calls += 1
        return super().forward(x) * (1.0 if self.sizes.calls < 3 else 2.0)


class CountsElsewhere(InConfig):
    """Changes the object that it shares, not what it reads."""

    def __init__(self, sizes: object) -> None:
        super().__init__(sizes)
        self.found = lambda: sizes

    def forward(self, x: Tensor) -> Tensor:
        self.found().calls += self.sizes.num_heads
        return super().forward(x)


class Keeps(InConfig):
    def forward(self, x: Tensor) -> Tensor:
        self.sizes.seen.append(self.sizes)
        return super().forward(x)


@pytest.mark.parametrize("attention", [Counts, CountsElsewhere, Keeps])
def test_what_a_forward_changes_or_keeps_has_no_sizes(attention: type[Attention]) -> None:
    plan = by_heads(lambda: Sharing(attention), 2)
    assert not {call for call in calls_of(plan) if call.startswith("self.")}


@functools.cache
def shared_plan() -> Plan:
    return by_heads(Sharing, 2)


def steps(build: Callable[[], nn.Module], plan: Plan, change: Callable[[nn.Module], None]) -> None:
    model, inputs = tpplan.apply_plan(build(), plan), text(1, LENGTH)
    model(**tpplan.forward_inputs(model, inputs))
    assert model.config.num_heads == HEADS
    change(model)
    model(**tpplan.forward_inputs(model, inputs))


def twice_the_heads(model: nn.Module) -> None:
    model.config.num_heads = 2 * HEADS


def another_config(model: nn.Module) -> None:
    model.layers[1].sizes = Config(num_heads=1)


def no_config(model: nn.Module) -> None:
    model.layers[1].sizes = None


def counting(model: nn.Module) -> None:
    model.layers[1].heads = lambda: setattr(model.layers[1].sizes, "calls", 5) or HEADS // 2


def keeping(model: nn.Module) -> None:
    own = model.layers[1]
    own.heads = lambda: setattr(own, "kept", own.sizes) or own.sizes.num_heads


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (twice_the_heads, r"InConfig\.sizes\.num_heads is 8, and was 4 when the plan was made"),
        (another_config, r"InConfig\.sizes\.num_heads is 1, and was 4"),
        (no_config, r"InConfig\.sizes\.num_heads is None, and was 4"),
        (counting, r"InConfig\.sizes is changed by its forward"),
        (keeping, r"InConfig\.sizes is kept by its forward"),
    ],
)
def test_sizes_that_do_not_stay_raise(change: Callable[[nn.Module], None], message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(2, steps, Sharing, shared_plan(), change)


def failing(plan: Plan) -> tuple[int, float, float]:
    """Heads after a forward that raised, and losses before and after."""
    torch.manual_seed(0)
    model, inputs = tpplan.apply_plan(Sharing(), plan), text(1, LENGTH)
    before = model(**tpplan.forward_inputs(model, inputs)).sum().item()
    own = model.layers[0].to_out
    hook = own.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("planted")))
    with pytest.raises(RuntimeError, match="planted"):
        model(**tpplan.forward_inputs(model, inputs))
    hook.remove()
    return model.config.num_heads, before, model(**tpplan.forward_inputs(model, inputs)).sum().item()


def test_a_forward_that_raises_leaves_the_configuration_as_it_is() -> None:
    for heads, before, after in run_ranks(2, failing, shared_plan()):
        assert heads == HEADS
        assert before == after


def test_a_plan_refuses_a_model_with_another_size_inside() -> None:
    plan = by_heads(around(InTuple), 2)
    other = around(InTuple)()
    other[1].sizes = (Pair("h", 2), Pair("x", 1))
    with pytest.raises(RankError, match=r"was made for self\.sizes\[0\]\[1\] = 4, and here it is 2"):
        run_ranks(2, lambda: tpplan.apply_plan(other, plan))


def test_a_size_that_is_too_many_is_a_counterexample() -> None:
    """A plan edited to give the model itself, which reads the same object, a rank's size is refused."""
    plan = shared_plan()
    size = SizePlan(call="self.config.num_heads", of=(), count=1, position=0, written=HEADS, local=HEADS // 2)
    wrong = replace(plan, sizes={**plan.sizes, "<root>": (size,)})
    with pytest.raises(VerificationError):
        tpplan.prove_plan(wrong, Sharing, text, loss=loss)


def compiled_step(plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = Sharing(), text(1, LENGTH)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
        model.layers[1].compile(backend="eager")
    found = loss(model(**tpplan.forward_inputs(model, inputs)), inputs)
    found.backward()
    return found.item(), gradients(model)


@pytest.mark.long
def test_a_layer_that_its_user_compiles_runs_uncompiled() -> None:
    value, expected = compiled_step(None)
    for found, applied in run_ranks(2, compiled_step, shared_plan(), timeout_s=300):
        assert found == pytest.approx(value, rel=1e-5)
        assert max(relative_errors(applied, expected).values()) < 1e-4


def test_compiled_layers_refuse_sizes_inside_attributes() -> None:
    with pytest.raises(RankError, match=r"module layers\.0 reads self\.sizes\.num_heads .* without compile=True"):
        run_ranks(2, lambda: tpplan.apply_plan(Sharing(), shared_plan(), compile=True))


@pytest.mark.parametrize("text", ["heads", "a.b[0][-1]", 'a["b c"].d', "a[3]"])
def test_paths_are_read_as_they_are_written(text: str) -> None:
    assert path_text(parse_path(text)) == text


@pytest.mark.parametrize("text", ["", "a.", "a[", 'a["b', "a b", "a..b"])
def test_what_is_no_path_is_none(text: str) -> None:
    assert parse_path(text) == ()
