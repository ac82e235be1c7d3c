"""Losses that move or cast a vocabulary-sharded output before tpplan.cross_entropy: it stays sharded."""

from collections.abc import Callable

import pytest
import torch
from examples import eager_to_shard
from one_process import relative_errors, whole
from ranks import run_ranks
from torch import Tensor, nn

import tpplan
from tpplan.core.layout import S
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.verify.collective_log import differences, listed
from tpplan.verify.fake_step import fake_step

BATCH, LENGTH, DIM, VOCAB = 4, 6, 32, 48
Inputs = dict[str, Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)).tanh())


def text(batch: int, length: int) -> Inputs:
    return {"tokens": torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))}


def shifted(outputs: Tensor, inputs: Inputs) -> Tensor:
    return tpplan.cross_entropy(outputs[:, :-1], inputs["tokens"][:, 1:])


def flat(outputs: Tensor, inputs: Inputs) -> Tensor:
    logits = outputs.float()[..., :-1, :].contiguous().view(-1, VOCAB)
    return tpplan.cross_entropy(logits, inputs["tokens"][..., 1:].reshape(-1))


def sequence_first(outputs: Tensor, inputs: Inputs) -> Tensor:
    logits, targets = outputs.transpose(0, 1)[:-1], inputs["tokens"].t()[1:]
    return tpplan.cross_entropy(logits.flatten(0, 1), targets.flatten())


def last(outputs: Tensor, inputs: Inputs) -> Tensor:
    return tpplan.cross_entropy(outputs[:, -1], inputs["tokens"][:, 0])


def twice(outputs: Tensor, inputs: Inputs) -> Tensor:
    return shifted(outputs, inputs) + 0.1 * last(outputs, inputs)


Loss = Callable[[Tensor, Inputs], Tensor]


def backward(loss: Loss, plan: Plan | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = Model(), text(BATCH, LENGTH)
    if plan is not None:
        model = tpplan.apply_plan(model, plan)
    value = loss(model(inputs["tokens"]), inputs)
    value.backward()
    return value.item(), {name: whole(own.grad) for name, own in model.named_parameters() if own.grad is not None}


def solved(loss: Loss) -> Plan:
    return tpplan.solve(
        Model,
        text,
        loss=loss,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=BATCH,
        micro_batch=BATCH,
        seq_len=LENGTH,
        precision="fp32",
        tp=2,
    )


@pytest.mark.parametrize("loss", [shifted, flat, sequence_first, last, twice])
def test_the_output_stays_sharded_and_gradients_are_those_of_one_process(loss: Loss) -> None:
    plan = solved(loss)
    assert plan.proof.status is ProofStatus.PROVEN
    assert plan.outputs == {"output": S(2)}
    expected, reference = backward(loss, None)
    for found, gradients in run_ranks(2, backward, loss, plan):
        assert found == pytest.approx(expected, rel=1e-5)
        assert gradients.keys() == reference.keys()
        assert max(relative_errors(gradients, reference).values()) < 1e-5
    assert differences(plan, listed(plan), fake_step(Model, text(BATCH, LENGTH), loss, plan).issued) == []


def along_classes(outputs: Tensor, inputs: Inputs) -> Tensor:
    """Moves the classes, of which each rank has some."""
    return tpplan.cross_entropy(outputs.transpose(1, 2)[:, : VOCAB - 1].transpose(1, 2), inputs["tokens"] % (VOCAB - 1))


def test_an_output_whose_classes_are_cut_is_whole() -> None:
    plan = solved(along_classes)
    assert plan.outputs == {}
    expected, reference = backward(along_classes, None)
    for found, gradients in run_ranks(2, backward, along_classes, plan):
        assert found == pytest.approx(expected, rel=1e-5)
        assert max(relative_errors(gradients, reference).values()) < 1e-5
