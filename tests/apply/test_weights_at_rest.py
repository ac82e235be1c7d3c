"""What training code finds in a model between forwards: the weights to train, in files that torch reads; and hooks."""

import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import eager_to_shard
from one_process import part, whole
from ranks import RankError, run_ranks
from torch import Tensor, nn
from torch.func import functional_call

import tpplan
from tpplan.plan.plan import Plan

BATCH, LENGTH, DIM, VOCAB = 4, 6, 32, 48
MESHES = [{"tp": 2, "fsdp": 1}, {"tp": 1, "fsdp": 2}, {"tp": 1, "fsdp": 2, "reshard_after_forward": True}]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def text(batch: int, length: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (batch, length), generator=numbers) for name in ("tokens", "targets")}


def loss(outputs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return tpplan.cross_entropy(outputs, inputs["targets"])


def solved(options: dict[str, Any]) -> Plan:
    return tpplan.solve(
        Model,
        text,
        loss=loss,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        global_batch=BATCH,
        micro_batch=BATCH // options["fsdp"],
        seq_len=LENGTH,
        precision="fp32",
        all_gpus=True,
        **options,
    )


def applied(plan: Plan | None) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    if plan is None:
        return Model(), text(BATCH, LENGTH)
    model = tpplan.apply_plan(Model(), plan)
    return model, part(text(BATCH, LENGTH), plan.mesh.data_rank(dist.get_rank()), plan.mesh.data_parallel)


def weights(model: nn.Module) -> list[float]:
    return [whole(own.detach()).double().norm().item() for own in model.state_dict().values()]


def changed_and_trained_after_evaluation(plan: Plan | None) -> tuple[bool, list[float]]:
    """Whether parameters are the same objects after an evaluation, and the weights once they are halved and trained."""
    model, inputs = applied(plan)
    before = [*model.parameters()]
    with torch.no_grad():
        model.eval()(inputs["tokens"])
        model.train()
        for own in model.parameters():
            own.mul_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    is_same = all(a is b for a, b in zip(before, model.parameters(), strict=True))
    loss(model(inputs["tokens"]), inputs).backward()
    optimizer.step()
    return is_same, weights(model)


@pytest.mark.parametrize("options", MESHES)
def test_after_an_evaluation_parameters_are_the_ones_to_train(options: dict[str, Any]) -> None:
    _, expected = changed_and_trained_after_evaluation(None)
    for is_same, found in run_ranks(2, changed_and_trained_after_evaluation, solved(options)):
        assert is_same
        assert found == pytest.approx(expected, rel=1e-5)


def with_other_weights(plan: Plan, *, with_gradient: bool) -> float:
    model, inputs = applied(plan)
    with torch.set_grad_enabled(with_gradient):
        model(inputs["tokens"])
        halved = {name: own * 0.5 for name, own in model.named_parameters()}
        return loss(functional_call(model, halved, (inputs["tokens"],)), inputs).item()


@pytest.mark.parametrize(("options", "with_gradient"), [(MESHES[0], True), (MESHES[1], True), (MESHES[1], False)])
def test_other_tensors_in_their_places_are_refused(options: dict[str, Any], with_gradient: bool) -> None:
    plan = solved(options)
    with pytest.raises(RankError, match=r"another tensor is in place of parameter .*functional_call"):
        run_ranks(2, lambda: with_other_weights(plan, with_gradient=with_gradient))


def test_without_gradients_tensor_parallel_ranks_read_them() -> None:
    model, inputs = applied(None)
    halved = {name: own * 0.5 for name, own in model.named_parameters()}
    expected = loss(functional_call(model, halved, (inputs["tokens"],)), inputs).item()
    plan = solved(MESHES[0])
    assert run_ranks(2, lambda: with_other_weights(plan, with_gradient=False)) == [pytest.approx(expected)] * 2


def penalized(plan: Plan | None, is_tensor_parallel: bool) -> list[float]:
    """Norms of gradients, in state_dict's order, of a loss with a penalty on weights, and under tp one on logits."""
    model, inputs = applied(plan)
    weighed = 1e-2 * sum(own.square().sum() for own in model.parameters())
    outputs = model(inputs["tokens"])
    total = loss(outputs, inputs)
    total *= 1.5  # in place
    total = total + weighed
    if is_tensor_parallel:
        total = total + 1e-2 * outputs.logsumexp(-1).square().mean()
    total.backward()
    return [whole(own.grad).double().norm().item() for own in model.parameters() if own.grad is not None]


@pytest.mark.parametrize("options", MESHES[:2])
def test_weights_and_sharded_logits_may_stand_in_a_loss(options: dict[str, Any]) -> None:
    is_tensor_parallel = options["tp"] > 1
    plan, expected = solved(options), penalized(None, is_tensor_parallel)
    for found in run_ranks(2, penalized, plan, is_tensor_parallel):
        assert found == pytest.approx(expected, rel=1e-4)


def read_again(plan: Plan) -> bool:
    model, _ = applied(plan)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found = torch.load(file)  # by default of weights alone
    return all(torch.equal(whole(found[name]), whole(own)) for name, own in model.state_dict().items())


@pytest.mark.parametrize("options", MESHES[:2])
def test_torch_reads_what_it_saved(options: dict[str, Any]) -> None:
    assert run_ranks(2, read_again, solved(options)) == [True, True]


def warned_of(plan: Plan, name: str | None) -> list[str]:
    model, inputs = applied(plan)
    if name is not None:
        model.get_submodule(name).register_forward_hook(lambda _module, _args, output: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss(model(inputs["tokens"]), inputs).backward()
    return [str(own.message) for own in caught if "registered after apply_plan" in str(own.message)]


def test_hooks_on_modules_are_warned_of_once_where_they_see_slices() -> None:
    plan = solved(MESHES[0])
    for found in run_ranks(2, warned_of, plan, "layers.1.up"):
        assert [message.split(" has a hook")[0] for message in found] == ["module layers.1.up"]
    assert run_ranks(2, warned_of, plan, None) == [[], []]
    assert run_ranks(2, warned_of, solved(MESHES[1]), "layers.1.up") == [[], []]
