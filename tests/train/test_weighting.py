"""Losses over uneven padding, weighted by tokens, against one process on the whole batch."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
import torch.nn.functional as F
from one_process import TOLERANCE, assert_same, gradients, mean_over_replicas
from plans import handmade_plan
from ranks import run_ranks
from tiny_llama import Style, batch, build, data_parallel, sequence_parallel, vocabulary_parallel
from torch import Tensor, nn

import tpplan
from tpplan.apply.apply import apply_plan, no_sync
from tpplan.core.errors import UsageError
from tpplan.core.mesh import Mesh

#: targets that count in each sample of the global batch: a data rank's, and a micro-batch's, differ in number
LENGTHS = (8, 7, 1, 2, 3, 1, 0, 0)
IGNORED = -100


def padded() -> tuple[Tensor, Tensor]:
    """A global batch whose targets are padded behind their lengths."""
    ids, targets = batch(size=len(LENGTHS))
    return ids, targets.masked_fill(torch.arange(ids.shape[1]) >= torch.tensor(LENGTHS).unsqueeze(1), IGNORED)


class WithLoss(nn.Module):
    """Computes its loss in its own forward, over labels that it shifts, as Hugging Face's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.inner(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def outer_loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return tpplan.cross_entropy(model(ids), targets)


def own_loss(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return model(ids, targets)


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def counted(loss_of: Loss, targets: Tensor) -> Tensor:
    return ((targets[:, 1:] if loss_of is own_loss else targets) != IGNORED).sum()


def train_once(style: Style, mesh: Mesh, loss_of: Loss, steps: int) -> None:
    def built() -> nn.Module:
        return WithLoss(build()) if loss_of is own_loss else build()

    reference, model, plain = built(), built(), built()
    expected = loss_of(reference, *padded())
    expected.backward()
    for applied in (model, plain):
        apply_plan(applied, style(applied, mesh))
    share = tpplan.BatchShare(
        global_batch=len(LENGTHS),
        seq_len=8,
        micro_batch=len(LENGTHS) // steps // mesh.data_parallel,
        accumulation_steps=steps,
        data_parallel=mesh.data_parallel,
        data_rank=mesh.data_rank(dist.get_rank()),
    )
    ids, targets = padded()
    micro_batches = share.micro_batches({"ids": ids, "targets": targets})
    weights = tpplan.loss_weights(model, [counted(loss_of, micro["targets"]) for micro in micro_batches])
    total = torch.zeros(())
    for number, (micro, weight) in enumerate(zip(micro_batches, weights, strict=True)):
        if number < steps - 1:
            with no_sync(model):
                loss = weight * loss_of(model, micro["ids"], micro["targets"])
                loss.backward()
        else:
            loss = weight * loss_of(model, micro["ids"], micro["targets"])
            loss.backward()
        total += loss.detach().nan_to_num()
        (loss_of(plain, micro["ids"], micro["targets"]) / steps).backward()
    assert mean_over_replicas(total) == pytest.approx(expected.item(), rel=TOLERANCE)
    assert_same(gradients(model), gradients(reference))
    with pytest.raises(AssertionError, match="relative error"):  # what the weights are for
        assert_same(gradients(plain), gradients(reference), tolerance=0.05)


def own_loss_parallel(model: nn.Module, mesh: Mesh) -> object:
    return handmade_plan(model, mesh, units=("inner.layers.0", "inner.layers.1"))


@pytest.mark.parametrize(
    ("style", "mesh", "loss_of", "steps"),
    [
        (vocabulary_parallel, Mesh(tp=2), outer_loss, 4),
        pytest.param(data_parallel, Mesh(shard=2), outer_loss, 1, marks=pytest.mark.long),
        (own_loss_parallel, Mesh(shard=2), own_loss, 2),
        (sequence_parallel, Mesh(shard=2, tp=2), outer_loss, 2),
        (data_parallel, Mesh(replicate=2, shard=2), outer_loss, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_weighted_losses_equal_one_process_on_the_whole_batch(
    style: Style, mesh: Mesh, loss_of: Loss, steps: int
) -> None:
    """The last data rank's last samples have no targets at all: a mean over nothing, of weight 0."""
    run_ranks(mesh.num_gpus, train_once, style, mesh, loss_of, steps)


def test_weights_are_tokens_over_their_mean_and_even_ones_are_equal() -> None:
    model = nn.Linear(2, 2)  # one process, no plan
    torch.testing.assert_close(tpplan.loss_weights(model, [6, 6]), torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(tpplan.loss_weights(model, [1, torch.tensor(3)]), torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(tpplan.loss_weights(model, [0, 0]), torch.zeros(2))
    with pytest.raises(UsageError, match="a number of tokens for each micro-batch, got none"):
        tpplan.loss_weights(model, [])


def weigh_a_plain_model() -> None:
    with pytest.raises(UsageError, match="no plan was applied"):
        tpplan.loss_weights(nn.Linear(2, 2), [1])


def test_on_several_ranks_the_mesh_must_be_known() -> None:
    run_ranks(2, weigh_a_plain_model)
