"""Modules that return containers of libraries: registered without keys, dataclasses, and one in the other."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest
import torch.nn.functional as F
from examples import eager_to_shard
from one_process import gradients, relative_errors
from ranks import run_ranks
from torch import Tensor, manual_seed, nn, randint
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree  # where libraries register their outputs

import tpplan
from tpplan.plan.plan import Plan

DIM, VOCAB, LENGTH = 32, 64, 7


class Output(OrderedDict):
    """An output whose fields are items, too, registered without a function for its keys."""

    def __init__(self, **items: object) -> None:
        super().__init__(**items)
        vars(self).update(items)


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: Output(**dict(zip(names, values, strict=True))),
)


@dataclass(frozen=True)
class Hidden:
    state: Tensor
    length: int
    inner: "Hidden | None" = None


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, hidden: Hidden) -> Hidden:
        assert hidden.length == LENGTH
        state = hidden.state + self.down(F.gelu(self.up(hidden.state)))
        return Hidden(state, hidden.length, hidden)


class Returning(nn.Module):
    def __init__(self, make: Callable[..., object]) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(VOCAB, DIM), Layers(), nn.Linear(DIM, VOCAB)
        self.make = make

    def forward(self, tokens: Tensor) -> object:
        hidden = self.layers(Hidden(self.embedding(tokens), tokens.shape[1]))
        return self.make(logits=self.head(hidden.state), hidden=hidden)


@dataclass
class Outputs:
    logits: Tensor
    hidden: Hidden


def text(batch: int, seq_len: int) -> dict[str, Tensor]:
    manual_seed(1)
    return {name: randint(VOCAB, (batch, seq_len)) for name in ("tokens", "targets")}


def loss(outputs: Outputs, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs.logits, inputs["targets"])


@pytest.mark.parametrize("make", [Output, Outputs])
def test_an_output_of_any_type_is_converted_and_returned_as_its_type(make: Callable[..., object]) -> None:
    plan = tpplan.solve(
        lambda: Returning(make),
        text,
        loss=loss,
        unused_outputs=("hidden.state", "hidden.inner.state"),
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=1,
        seq_len=LENGTH,
        tp=2,
        precision="fp32",
    )

    def run_once(on: Plan | None) -> tuple[float, bool, dict[str, Tensor]]:
        manual_seed(0)
        model = Returning(make) if on is None else tpplan.apply_plan(Returning(make), on)
        inputs = text(1, LENGTH)
        outputs = model(inputs["tokens"])
        assert type(outputs) is make
        assert [field.name for field in fields(outputs.hidden)] == ["state", "length", "inner"]
        value = loss(outputs, inputs)
        value.backward()
        return value.item(), isinstance(outputs.logits, DTensor), gradients(model)

    assert {"layers.up.weight", "layers.down.weight", "head.weight"} <= {
        name for name, p in plan.parameters.items() if p.placement.dim is not None
    }
    value, _, expected = run_once(None)
    for found, is_sharded, applied in run_ranks(2, run_once, plan):
        assert is_sharded
        assert found == pytest.approx(value, rel=1e-5)
        assert max(relative_errors(applied, expected).values()) < 1e-4
