"""A module run alone stands for the model that calls it, or is not used: plans are the same without it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples import eager_to_shard
from test_planner import formulate
from test_prove import DIM, HEADS, LENGTH, Attention, Model, equals_one_process, open_sizes, original_of, solve
from torch import Tensor, nn

from tpplan import solvers
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.prove import structure
from tpplan.prove.counterexample import Counterexample
from tpplan.prove.module_alone import ModuleAlone
from tpplan.prove.original import Original
from tpplan.trace.trace import trace


class ManyNumbers(Attention):
    """Its number of heads stands in one of several containers, where others have the same number for something else."""

    def __init__(self) -> None:
        super().__init__(open_sizes)
        self.groups, self.scales, self.heads = {"n": HEADS}, [HEADS], {"kv": {"heads": HEADS}}

    def split_in_heads(self, x: Tensor) -> Tensor:
        heads = self.heads["kv"]["heads"]
        return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.unflatten(2, (self.groups["n"], -1)) * (1 / self.scales[0])).flatten(2)
        q, k, v = (self.split_in_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Refusing(ManyNumbers):
    """Compares what no rank's part can be."""

    def forward(self, x: Tensor) -> Tensor:
        if self.q_proj(x).shape[-1] != DIM:
            raise ValueError("wrong width")
        return super().forward(x)


class Shared(nn.Module):
    """Two of one class, with a module that both call; the second is given a number that the first computes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = ManyNumbers(), Handed()
        self.right.act = self.left.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.left.act(self.left(x))
        return self.right(y, self.left.q_proj(x).shape[-1] // HEADS)


class Handed(ManyNumbers):
    """Is handed the size of a head, which it would not compute alone."""

    def forward(self, x: Tensor, size: int) -> Tensor:  # type: ignore[override]
        q, k, v = (p(x).unflatten(2, (-1, size)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.act(self.o_proj(y))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "many numbers": lambda: Model(ManyNumbers()),
    "refusing": lambda: Model(Refusing()),
    "shared": lambda: Model(Shared()),
}


def looks_of(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The modules run alone, None for the whole model, of each look at an applied model."""
    looks: list[str | None] = []
    own = Original.difference

    def difference(
        self: Original, rank: int, plan: Plan, until: str | None = None, alone: ModuleAlone | None = None
    ) -> Counterexample | None:
        looks.append(None if alone is None else alone.module)
        return own(self, rank, plan, until, alone)

    monkeypatch.setattr(Original, "difference", difference)
    return looks


def answer_of(plan: Plan) -> Any:
    return dataclasses.replace(plan, tpplan_version="").to_dict()


@pytest.mark.parametrize("name", MODELS)
def test_plans_are_those_of_whole_models_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = MODELS[name]
    looks = looks_of(monkeypatch)
    plan = solve(build)
    assert plan.proof.status is ProofStatus.PROVEN
    with_modules = looks.count(None)
    looks.clear()
    monkeypatch.setattr(Original, "alone", lambda *_: None)
    monkeypatch.setattr(structure.KnownSizes, "of_modules", lambda *_: {})
    assert answer_of(solve(build)) == answer_of(plan)
    assert with_modules < looks.count(None)
    equals_one_process(build, plan)


class Leaving(nn.Module):
    """Leaves a scale on its first module; calls the second twice, the third with an object, the fourth without a
    gradient, and the last as any."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.twice, self.told, self.frozen, self.plain = (Scaled(DIM, DIM) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        self.scaled.scale = x.mean()
        x = self.told(self.twice(self.twice(self.scaled(x))), {"of": Told(x)})
        with torch.no_grad():
            y = self.frozen(x)
        return self.plain(x + y).square().mean()


@dataclasses.dataclass
class Told:
    x: Tensor


class Scaled(nn.Linear):
    scale: Tensor | float = 1.0

    def forward(self, x: Tensor, told: object = None) -> Tensor:
        return super().forward(x) * self.scale


def test_a_module_runs_alone_where_that_shows_what_it_does_in_the_model() -> None:
    inputs = {"x": torch.zeros(1, LENGTH, DIM)}
    with torch.device("meta"):
        model = Leaving()
    formulation = formulate(trace(model, inputs), eager_to_shard(), Mesh(tp=2))
    choice = solvers.solve(formulation.problem).choice
    assert choice is not None
    original = original_of(model, inputs, formulation.assignment(choice))
    assert [name for name, _ in model.named_children() if original.alone(name) is not None] == ["plain"]
