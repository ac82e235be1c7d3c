"""What training code of one's own does with gradients and parameters: as in one process, or refused by name."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from one_process import assert_same, gradients, whole
from plans import handmade_plan
from ranks import run_ranks
from tiny_llama import batch, build, data_parallel, loss_of, my_part, sequence_parallel
from torch import Tensor, nn

from tpplan.apply.apply import apply_plan, no_sync
from tpplan.core.errors import PlanMismatchError, UsageError
from tpplan.core.mesh import Mesh

TP, BOTH, FSDP = Mesh(tp=2), Mesh(shard=2, tp=2), Mesh(shard=2)


def penalty(model: nn.Module) -> Tensor:
    """Of all weights, read outside of any forward; alike on all ranks."""
    return 0.1 * torch.stack([whole(p.square().sum()) for p in model.parameters()]).sum()


def pair(mesh: Mesh) -> tuple[nn.Module, nn.Module]:
    """One process's, and the same under a plan in which norms see a part of the tokens."""
    model = build()
    return build(), apply_plan(model, sequence_parallel(model, mesh))


def penalize(mesh: Mesh) -> None:
    """With the loss and apart from it, onto gradients that are sums, and onto some that still wait for theirs."""
    reference, model = pair(mesh)
    for each, read in ((reference, batch), (model, lambda step: my_part(mesh, step))):
        penalty(each).backward()
        (loss_of(each, *read(0)) + penalty(each)).backward()
        with no_sync(each):
            loss_of(each, *read(1)).backward()
            penalty(each).backward()
        loss_of(each, *read(2)).backward()
    assert_same(gradients(model), gradients(reference))


@pytest.mark.parametrize("mesh", [TP, BOTH], ids=str)
def test_what_weights_add_to_a_loss_counts_once(mesh: Mesh) -> None:
    run_ranks(mesh.num_gpus, penalize, mesh)


def step_in_backward(model: nn.Module) -> None:
    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad.sign(), alpha=1e-3)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def hook_and_ask(mesh: Mesh) -> None:
    reference, model = pair(mesh)
    if mesh.data_parallel == 1:
        both = (reference, batch()), (model, my_part(mesh))
        of_one, of_ranks = ([*torch.autograd.grad(loss_of(m, *given), [*m.parameters()])] for m, given in both)
        names = [name for name, _ in reference.named_parameters()]
        assert_same(dict(zip(names, map(whole, of_ranks), strict=True)), dict(zip(names, of_one, strict=True)))
        twin = copy.deepcopy(model)
        for each, given in ((twin, my_part(mesh)), (reference, batch())):
            for parameter in each.parameters():
                parameter.register_hook(lambda gradient: gradient.square())
            loss_of(each, *given).backward()
        assert_same(gradients(twin), gradients(reference))
        reference = build()
    for step in range(2):
        for each, given in ((reference, batch(step)), (model, my_part(mesh, step))):
            if step == 0:
                step_in_backward(each)
            loss_of(each, *given).backward()
    found, expected = ({name: whole(p.detach()) for name, p in m.named_parameters()} for m in (model, reference))
    assert_same(found, expected, tolerance=1e-4)


@pytest.mark.parametrize("mesh", [TP, BOTH], ids=str)
def test_hooks_and_autograd_grad_see_sums(mesh: Mesh) -> None:
    run_ranks(mesh.num_gpus, hook_and_ask, mesh)


def cast_across_micro_batches() -> None:
    """FSDP2 alone loses gradients of the second backward: casts of the first one's weights are used again."""
    reference, model = build(), build()
    apply_plan(model, data_parallel(model, FSDP))
    for each, read in ((reference, batch), (model, lambda step: my_part(FSDP, step))):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for step in range(2):
                loss_of(each, *read(step)).backward()
    assert_same(gradients(model), gradients(reference), tolerance=2e-2)


@pytest.mark.filterwarnings("ignore:.*crosses, and the plan was priced for:UserWarning")
def test_one_autocast_may_hold_several_backwards() -> None:
    run_ranks(2, cast_across_micro_batches)


# ---- refused by name


def optimizer_too_early(mesh: Mesh) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_plan(model, sequence_parallel(model, mesh) if mesh.tp > 1 else data_parallel(model, mesh))
    loss_of(model, *my_part(mesh)).backward()
    with pytest.raises(UsageError, match=r"SGD was made before apply_plan and holds parameter embedding\.weight"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def hook_too_early(mesh: Mesh) -> None:
    for register, what in (
        (lambda p: p.register_hook(lambda gradient: gradient), "its gradient"),
        (lambda p: p.register_post_accumulate_grad_hook(lambda p: None), "its accumulated gradient"),
    ):
        model = build()
        register(model.norm.weight)
        with pytest.raises(PlanMismatchError, match=f"norm.weight has a hook on {what}, which would stay behind"):
            apply_plan(model, data_parallel(model, mesh))


def hook_never_called(mesh: Mesh) -> None:
    model = build()
    apply_plan(model, data_parallel(model, mesh))
    model.norm.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UsageError, match=r"norm\.weight has a hook on its gradient .*, which FSDP2 never calls"):
        loss_of(model, *my_part(mesh))


def trained_after_all(mesh: Mesh) -> None:
    model = build()
    model.embedding.requires_grad_(False)
    apply_plan(model, handmade_plan(model, mesh))
    loss_of(model, *my_part(mesh)).backward()
    model.requires_grad_(True)
    with pytest.raises(UsageError, match=r"embedding\.weight trains, and was frozen when the plan was made"):
        loss_of(model, *my_part(mesh))


def differentiated_twice(mesh: Mesh) -> None:
    model = build()
    apply_plan(model, handmade_plan(model, mesh))
    with pytest.raises(UsageError, match="to be differentiated again"):
        torch.autograd.grad(model(batch()[0]).sum(), [model.head.weight], create_graph=True)


def refuse(cases: Sequence[tuple[Callable[[Mesh], None], Mesh]]) -> None:
    for case, mesh in cases:
        case(mesh)
        dist.barrier()


def test_what_would_go_wrong_without_a_sign_is_refused() -> None:
    run_ranks(
        2,
        refuse,
        [
            (optimizer_too_early, TP),
            (optimizer_too_early, FSDP),
            (hook_too_early, FSDP),
            (hook_never_called, FSDP),
            (trained_after_all, TP),
            (differentiated_twice, TP),
        ],
    )
