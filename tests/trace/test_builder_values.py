"""Builders that ask small tensors for values, which are known: they are neither weights nor random.

A forward may not ask buffers: what they hold when training runs is not known, a count of calls for example.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from examples import eager_to_shard
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import ModelError
from tpplan.plan.plan import Plan
from tpplan.search.models.meta_model import built_on_meta
from tpplan.search.models.user_model import load_model_file

DIM, VOCAB = 16, 32


class Rates(nn.Module):
    """Rates and sizes that the constructor computes with tensors; `fails` asks a weight."""

    def __init__(self, *, asks_weight: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)] + torch.linspace(0, 1, 2).tolist()
        self.register_buffer("levels", torch.tensor([8, 5, 5]), persistent=False)
        self.register_buffer("noise", torch.rand(3))
        self.num_codes = int(torch.prod(self.levels))
        self.is_asked = asks_weight and bool(self.head.weight.sum() > 0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens) + self.rates[1])


class AsksBuffer(Rates):
    """Counts its calls in a buffer, and takes another path after two."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        found = x.softmax(-1) if self.levels.sum().item() > 20 else x
        self.levels = self.levels + 1
        return found


class IndexesByValue(Rates):
    """Picks a row by a number that it asks an activation for, as a loop over the experts that are hit does."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return x + x[0][x.sum((0, 2)).argmax().item()]


def text(batch: int, seq_len: int) -> dict[str, Tensor]:
    return {name: torch.zeros(batch, seq_len, dtype=torch.int64) for name in ("tokens", "targets")}


def solved(model: type[nn.Module]) -> Plan:
    return tpplan.solve(
        model,
        text,
        loss=lambda logits, inputs: tpplan.cross_entropy(logits, inputs["targets"]),
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=1,
        seq_len=7,
        tp=2,
        precision="fp32",
    )


def test_a_builder_that_asks_small_tensors_runs_on_the_meta_device() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = built_on_meta(Rates, is_half=False)
    assert not built.notes
    assert (built.model.rates, built.model.num_codes) == ([0.0, 0.25, 0.5, 0.0, 1.0], 200)
    assert all(tensor.is_meta for tensor in (*built.model.parameters(), *built.model.buffers()))


def test_a_builder_that_asks_a_weight_runs_on_the_cpu() -> None:
    with pytest.warns(UserWarning, match="the builder fails on the meta device"):
        assert built_on_meta(lambda: Rates(asks_weight=True), is_half=False).notes


def test_a_builder_in_a_file_that_asks_a_weight_runs_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "turned.py").write_text(
        "import torch\n"
        "def build_model():\n"
        "    return torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(4, 4))\n"
        "def example_inputs(batch):\n"
        "    return (torch.ones(batch, 4),)\n"
        "def loss(outputs, inputs):\n"
        "    return outputs.sum()\n"
    )
    with pytest.warns(UserWarning, match="the builder fails on the meta device"):
        assert built_on_meta(load_model_file(str(tmp_path / "turned.py")).build_model, is_half=False).notes


def test_a_model_whose_builder_asked_is_planned() -> None:
    assert solved(Rates).parameters["head.weight"].placement.dim is not None


def test_a_forward_may_not_ask_a_buffer_which_may_change() -> None:
    with pytest.raises(ModelError, match="asks a tensor for its values"):
        solved(AsksBuffer)


def test_an_index_made_of_an_activation_is_named_as_such() -> None:
    with pytest.raises(ModelError, match=r"asks a tensor for its values(.|\n)*test_builder_values"):
        solved(IndexesByValue)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def compiled_blocks() -> nn.Module:
    return nn.Sequential(*(torch.compile(Block(), backend="eager") for _ in range(2)))


def compiled_whole() -> nn.Module:
    return torch.compile(nn.Sequential(Block(), Block()), backend="eager")


@pytest.mark.parametrize("build", [compiled_blocks, compiled_whole])
def test_what_is_compiled_is_planned_under_its_own_names(build: Callable[[], nn.Module]) -> None:
    assert [name for name, _ in built_on_meta(build, is_half=False).model.named_children()] == ["0", "1"]
    plan = tpplan.solve(
        build,
        lambda batch: {"input": torch.zeros(batch, 4, 32)},
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=4,
        loss=lambda y, _: y.square().mean(),
        tp=2,
    )
    owners = {name.rpartition(".")[0] for name in plan.parameter_plans()}
    assert owners == {f"{block}.{name}" for block in range(2) for name in ("up", "down")}


class AsksAWeight(nn.Module):
    """Has no forward of its class, and asks what no plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.forward = self.run

    def run(self, x: Tensor) -> Tensor:
        return self.linear(x + 1 if self.linear.weight.sum() > 0 else x).sum()


def test_a_root_that_cannot_run_whole_is_refused_and_not_tried_forever() -> None:
    with pytest.raises(ModelError, match="asks a tensor for its values, which depend on weights"):
        tpplan.solve(
            AsksAWeight,
            lambda batch: {"x": torch.zeros(batch, 8)},
            cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
            global_batch=4,
        )
