"""Checkpoints that move from mesh to mesh, and that no kill can break."""

import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.tensor
from fused_model import batch, build_model, loss_of, plan_for
from ranks import RankError, run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

import tpplan
from tpplan.apply.apply import apply_plan
from tpplan.core.errors import UsageError, WeightsError
from tpplan.core.mesh import Mesh
from tpplan.train.checkpoint_folder import complete_checkpoints, latest_checkpoint

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

#: the meshes that a run goes through, from one to the next: eight pairs
JOURNEY = (
    Mesh(tp=2), Mesh(shard=2), Mesh(shard=2, tp=2), Mesh(shard=4), Mesh(tp=4), Mesh(replicate=2, tp=2), Mesh(shard=3),
    Mesh(replicate=2, shard=2), Mesh(shard=2, tp=2),
)  # fmt: skip
#: float32 sums in another order
TOLERANCE = 1e-5

Whole = dict[str, Tensor]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> Whole:
    """Every parameter, buffer and optimizer state, whole, by name."""
    found = {name: whole(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = whole(value)
    return found


def assert_equal(found: Whole, expected: Whole) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, parts: int = 1, part: int = 0) -> float:
    """One step on a part of the batch; the mean loss of all."""
    loss = loss_of(model, *(tensor.chunk(parts)[part] for tensor in batch(step)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    if parts > 1:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, of which one has a learning rate of its own."""
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": others}, {"params": biases, "lr": 3e-3}], lr=1e-2)


def leg(mesh: Mesh, folder: Path, step: int) -> tuple[Whole, float, Whole]:
    """Loads step `step` (0: begins), takes it, saves the next. What was loaded, the loss, what was saved."""
    with torch.device("meta"):
        model = build_model()
    apply_plan(model, plan_for(model, mesh))
    if step == 0:
        tpplan.init_weights(model, build_model, seed=1)
    optimizer = make_optimizer(model)
    if step > 0:
        for group in optimizer.param_groups:
            group["lr"] = 1.0  # the checkpoint says better
        loaded = tpplan.load_checkpoint(folder, model, optimizer, build_model=build_model)
        assert (loaded.step, loaded.extras) == (step, {"samples": [12 * step], "seed": torch.tensor(step)})
    before = contents(model, optimizer)
    with torch.no_grad():  # FSDP2 leaves the root's parameters gathered
        loss_of(model, *batch(0))
    tpplan.save_checkpoint(folder / "evaluated", model, step=step, keep=1)
    loss = step_of(model, optimizer, step, mesh.data_parallel, mesh.data_rank(dist.get_rank()))
    extras = {"samples": [12 * (step + 1)], "seed": torch.tensor(step + 1)}
    tpplan.save_checkpoint(folder, model, optimizer, step=step + 1, extras=extras, keep=2)
    return before, loss, contents(model, optimizer)


@pytest.mark.parametrize(
    "journey",
    [
        pytest.param((Mesh(shard=2, tp=2), Mesh(tp=2), Mesh(shard=3)), marks=pytest.mark.slow, id="two pairs"),
        pytest.param(JOURNEY, marks=pytest.mark.long, id="eight pairs"),
    ],
)
def test_training_goes_on_under_every_other_mesh(journey: tuple[Mesh, ...], tmp_path: Path) -> None:
    model = build_model()
    tpplan.init_weights(model, build_model, seed=1)
    optimizer = make_optimizer(model)
    saved = contents(model, optimizer)
    for step, mesh in enumerate(journey):
        parameters = {name: tensor for name, tensor in saved.items() if "/" not in name}
        expected = step_of(model, optimizer, step)
        results = run_ranks(mesh.num_gpus, leg, mesh, tmp_path, step)
        for before, loss, _ in results:
            assert_equal(before, saved)
            assert loss == pytest.approx(expected, abs=TOLERANCE), mesh
        tpplan.load_checkpoint(tmp_path / "evaluated", evaluated := build_model())
        assert_equal(contents(evaluated, torch.optim.AdamW(evaluated.parameters())), parameters)
        saved = results[0][2]
        assert saved.keys() == contents(model, optimizer).keys()
        names = [path.name for path in complete_checkpoints(tmp_path)]
        assert names == [f"step-{number:08}" for number in range(max(1, step), step + 2)]
    alone = build_model()
    tpplan.load_checkpoint(tmp_path, alone, alone_optimizer := make_optimizer(alone))
    assert_equal(contents(alone, alone_optimizer), saved)
    step = len(journey)
    expected = step_of(model, optimizer, step)
    assert step_of(alone, alone_optimizer, step) == pytest.approx(expected, abs=TOLERANCE)


def in_canonical_order(folder: Path) -> None:
    mesh = Mesh(shard=2, tp=2)
    model = build_model()
    expected = torch.arange(model.layers[0].attention.qkv.weight.numel(), dtype=torch.float32)
    with torch.no_grad():
        model.layers[0].attention.qkv.weight.view(-1).copy_(expected)
    apply_plan(model, plan_for(model, mesh))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    qkv = model.layers[0].attention.qkv._parameters["weight"]
    optimizer.state[qkv]["momentum_buffer"] = qkv.detach().clone()
    tpplan.save_checkpoint(folder, model, optimizer, step=0)
    optimizer.state[qkv]["row"] = qkv.detach()[:, :1]  # as factored optimizers have
    with pytest.raises(
        UsageError, match=r"row of layers\.0\.attention\.qkv\.weight is sharded, and its shape \[64, 1\]"
    ):
        tpplan.save_checkpoint(folder, model, optimizer, step=1)
    optimizer.state[qkv]["row"] = qkv._local_tensor[:, 0].detach()
    with pytest.raises(UsageError, match=r"qkv\.weight, of shape \[\d+\], is each rank's own"):
        tpplan.save_checkpoint(folder, model, optimizer, step=1)


def test_fused_weights_and_their_states_are_saved_in_their_own_order(tmp_path: Path) -> None:
    run_ranks(4, in_canonical_order, tmp_path)
    reader = torch.distributed.checkpoint.FileSystemReader(tmp_path / "step-00000000")
    name = "layers.0.attention.qkv.weight"
    model = build_model()
    shape = model.get_parameter(name).shape
    raw = {f"model.{name}": torch.empty(shape), f"optimizer.{name}/momentum_buffer": torch.empty(shape)}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        torch.distributed.checkpoint.load(raw, storage_reader=reader)
    for tensor in raw.values():
        assert torch.equal(tensor.view(-1), torch.arange(tensor.numel(), dtype=torch.float32))


# ---- writers that are killed


class Fuse:
    """Kills this process by a signal at the n-th call that puts something on the disk, moves or removes it."""

    def __init__(self, calls: int) -> None:
        self.left = calls
        for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
            setattr(os, name, self.burning(getattr(os, name)))

    def burning(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model()
    tpplan.init_weights(model, build_model, seed=seed)
    optimizer = make_optimizer(model)
    step_of(model, optimizer, seed)
    return model, optimizer


def save_with_a_fuse(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, calls: int, rank: int) -> None:
    if dist.get_world_size() > 1:
        apply_plan(model, plan_for(model, Mesh(shard=dist.get_world_size())))
        optimizer = make_optimizer(model)
    if dist.get_rank() == rank:
        Fuse(calls)
    tpplan.save_checkpoint(folder, model, optimizer, step=2, keep=1)


def loaded(folder: Path) -> tuple[int, Whole]:
    model = build_model()
    optimizer = make_optimizer(model)
    checkpoint = tpplan.load_checkpoint(folder, model, optimizer)
    return checkpoint.step, contents(model, optimizer)


def is_saved(folder: Path, trained: tuple[nn.Module, torch.optim.Optimizer], calls: int) -> bool:
    """False where the writer was killed first. Raises RankError for any other end."""
    try:
        run_ranks(1, save_with_a_fuse, folder, *trained, calls, 0)
    except RankError as error:
        if "exit code -9" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_writer_killed_anywhere_leaves_a_whole_checkpoint(every: int, tmp_path: Path) -> None:
    """At every such call; every third is once among what is written and removed, whatever their number."""
    before, after, steps = trained(1), trained(2), []
    expected = {1: contents(*before), 2: contents(*after)}
    for calls in itertools.count(1, every):
        folder = tmp_path / str(calls)
        tpplan.save_checkpoint(folder, *before, step=1)
        if is_saved(folder, after, calls):
            break
        step, found = loaded(folder)
        assert_equal(found, expected[step])
        steps.append(step)
        tpplan.save_checkpoint(folder, *before, step=3, keep=1)  # and what was left behind is removed
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000003"]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000002"]
    assert steps == sorted(steps)
    assert (
        steps.count(1) >= 9 // every
    )  # among the tensors, their metadata, state.pt, the folder's name and the pointer
    assert steps.count(2) >= 5 // every  # while the one before is removed


def test_a_rank_killed_while_it_writes_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    before = trained(1)
    tpplan.save_checkpoint(tmp_path, *before, step=1)
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(2, save_with_a_fuse, tmp_path, *trained(2), 1, 1)
    assert [path.name for path in tmp_path.glob("*.incomplete")] == ["step-00000002.incomplete"]
    step, found = loaded(tmp_path)
    assert step == 1
    assert_equal(found, contents(*before))


# ---- folders


def test_the_latest_is_the_last_saved_and_whole(tmp_path: Path) -> None:
    model = build_model()
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (20, 10, 10):  # training went back to an earlier one
        path = tpplan.save_checkpoint(tmp_path, model, step=step)
        assert latest_checkpoint(tmp_path) == path
    assert path.name == "step-00000010-2"
    (tmp_path / "step-00000030.incomplete").mkdir()  # a killed writer's, until the next save
    assert tpplan.load_checkpoint(tmp_path, model).step == 10
    assert tpplan.load_checkpoint(tmp_path / "step-00000020", model).step == 20
    for pointer in ("step-00000040", "step-00000030.incomplete", "../elsewhere", ""):
        (tmp_path / "latest").write_text(pointer)
        assert latest_checkpoint(tmp_path) == tmp_path / "step-00000020"
    (tmp_path / "latest").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000020"
    tpplan.save_checkpoint(tmp_path, model, step=11, keep=2)  # the step says nothing of age
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010-2", "step-00000011"]


# ---- saves while training goes on


def hold_writers() -> threading.Event:
    """Makes this process's writers wait until the event that is returned is set."""
    write, may_write = FileSystemWriter.write_data, threading.Event()

    def held(*arguments: Any, **options: Any) -> Any:
        assert may_write.wait(timeout=60)
        return write(*arguments, **options)

    FileSystemWriter.write_data = held
    return may_write


def save_while_training(folder: Path, mesh: Mesh) -> tuple[Whole, Whole]:
    """Two steps while a checkpoint is written: what there was to save, and what there is after them."""
    model = build_model()
    tpplan.init_weights(model, build_model, seed=1)
    apply_plan(model, plan_for(model, mesh))
    optimizer = make_optimizer(model)
    parts = mesh.data_parallel, mesh.data_rank(dist.get_rank())
    step_of(model, optimizer, 0, *parts)
    first = tpplan.save_checkpoint(folder, model, optimizer, step=1)
    step_of(model, optimizer, 1, *parts)
    before, may_write = contents(model, optimizer), hold_writers()
    saving = tpplan.save_checkpoint_async(folder, model, optimizer, step=2, extras={"samples": 24}, keep=1)
    for step in (2, 3):
        step_of(model, optimizer, step, *parts)
    assert not saving.is_done()
    assert latest_checkpoint(folder) == first
    for save in (tpplan.save_checkpoint, tpplan.save_checkpoint_async):
        with pytest.raises((UsageError, WeightsError), match=r"still being saved there: wait\(\) for it first"):
            save(folder, model, optimizer, step=4)
    dist.barrier()
    may_write.set()
    assert saving.wait() == saving.wait() == latest_checkpoint(folder)
    assert saving.is_done()
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000002"]
    return before, contents(model, optimizer)


@pytest.mark.parametrize("mesh", [Mesh(shard=2, tp=2), Mesh(shard=3)])
def test_a_save_in_flight_is_of_the_step_at_which_it_began(mesh: Mesh, tmp_path: Path) -> None:
    before, after = run_ranks(mesh.num_gpus, save_while_training, tmp_path, mesh)[0]
    step, found = loaded(tmp_path)
    assert step == 2
    assert_equal(found, before)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def save_where_a_disk_refuses(folder: Path) -> list[str]:
    model = build_model()
    apply_plan(model, plan_for(model, Mesh(shard=2)))
    if dist.get_rank() == 1:
        write = FileSystemWriter.write_data

        def refuse(*_: Any, **__: Any) -> Any:
            raise OSError("no space left")

        FileSystemWriter.write_data = refuse
    saving = tpplan.save_checkpoint_async(folder, model, step=1)
    with pytest.raises(WeightsError, match="no space left"):
        saving.wait()
    assert latest_checkpoint(folder) is None
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = write
    tpplan.save_checkpoint_async(folder, model, step=2).wait()
    return sorted(path.name for path in folder.iterdir())


def test_where_a_disk_refuses_all_ranks_hear_of_it_and_may_save_again(tmp_path: Path) -> None:
    for names in run_ranks(2, save_where_a_disk_refuses, tmp_path):
        assert names == ["latest", "step-00000002"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_saves_while_it_trains(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    before = contents(model, optimizer)
    saving = tpplan.save_checkpoint_async(tmp_path, model, optimizer, step=1)
    step_of(model, optimizer, 2)
    assert saving.wait().name == "step-00000001"
    assert_equal(loaded(tmp_path)[1], before)


# ---- optimizers


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), fused=True, amsgrad=True),
        lambda parameters: torch.optim.Adafactor(parameters),
    ],
    ids=["sgd", "momentum", "fused", "adafactor"],
)
def test_optimizers_and_frozen_parameters_go_on_where_they_were(make: Callable[..., Any], tmp_path: Path) -> None:
    def trained_part() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build_model()
        model.layers[0].requires_grad_(False)
        return model, make([parameter for parameter in model.parameters() if parameter.requires_grad])

    model, optimizer = trained_part()
    for step in range(2):
        step_of(model, optimizer, step)
    tpplan.save_checkpoint(tmp_path, model, optimizer, step=2)
    again, again_optimizer = trained_part()
    step_of(again, again_optimizer, 0)  # it has states of its own, which must go
    tpplan.load_checkpoint(tmp_path, again, again_optimizer)
    assert_equal(contents(again, again_optimizer), contents(model, optimizer))
    assert step_of(again, again_optimizer, 3) == step_of(model, optimizer, 3)
    assert_equal(contents(again, again_optimizer), contents(model, optimizer))


# ---- refusals


def test_another_model_or_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    model = build_model()
    tpplan.save_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()), step=1)
    other = build_model()
    other.layers[0].norm = nn.RMSNorm(10)
    other.layers[1].mlp.down.bias = nn.Parameter(torch.ones(3))
    other.scale = nn.Parameter(torch.ones(1))
    message = (
        r"is of another model: missing there: scale; not in the model: layers\.0\.norm\.bias; of another shape: "
        r"layers\.1\.mlp\.down\.bias"
    )
    with pytest.raises(WeightsError, match=message):
        tpplan.load_checkpoint(tmp_path, other)
    with pytest.raises(WeightsError, match="the optimizer had 1 groups of parameters, this one has 2"):
        tpplan.load_checkpoint(tmp_path, model, make_optimizer(model))
    uneven = [{"params": [*model.parameters()][:3]}]
    with pytest.raises(WeightsError, match=r"the optimizer's group 0 held other parameters: layers\.0\.attention"):
        tpplan.load_checkpoint(tmp_path, model, torch.optim.AdamW(uneven))
    with pytest.raises(UsageError, match=r"holds \d+ parameters that are not the model's"):
        tpplan.load_checkpoint(tmp_path, model, torch.optim.AdamW(other.parameters()))
    tpplan.save_checkpoint(tmp_path, model, step=2)
    with pytest.raises(WeightsError, match="was saved without an optimizer"):
        tpplan.load_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(WeightsError, match="nowhere: no checkpoint there"):
        tpplan.load_checkpoint(tmp_path / "nowhere", model)
    (tmp_path / "step-00000002" / "state.pt").write_bytes(b"0")
    with pytest.raises(WeightsError, match=r"state\.pt: cannot be read"):
        tpplan.load_checkpoint(tmp_path, model)


def test_extras_that_would_run_code_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the extras or the optimizer's options cannot be saved"):
        tpplan.save_checkpoint(tmp_path, build_model(), step=1, extras={"where": tmp_path})
    assert not list(tmp_path.iterdir())
