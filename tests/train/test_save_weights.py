"""Weights written from shards as Hugging Face's files: whole, in one process's order, and refused where they cannot."""

import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_model import build_model, plan_for
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import tpplan
from tpplan.apply.apply import apply_plan
from tpplan.core.errors import UsageError, WeightsError
from tpplan.core.mesh import Mesh
from tpplan.train import save_weights

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def reference() -> nn.Module:
    torch.manual_seed(11)
    return build_model()


def sharded(mesh: Mesh) -> nn.Module:
    with torch.device("meta"):
        model = build_model()
    apply_plan(model, plan_for(model, mesh))
    tpplan.load_state_dict(model, reference().state_dict(), build_model=build_model)
    return model


def saved_on_ranks(mesh: Mesh, folder: Path) -> int:
    """Saves in one file, in several, and in bfloat16; the most whole tensors that were alive at once."""
    model = sharded(mesh)
    own = save_weights._Entry.whole
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def counted(entry: Any) -> Tensor:
        nonlocal most
        gc.collect()
        most = max(most, len(alive) + 1)
        made = own(entry).clone()
        alive.add(made)
        return made

    save_weights._Entry.whole = counted
    tpplan.save_safetensors(model, folder / "one")
    tpplan.save_safetensors(model, folder / "several", max_file_bytes=1_000)
    tpplan.save_safetensors(model, folder / "half", dtype=torch.bfloat16)
    with pytest.raises(WeightsError, match=r"has model.safetensors already: pass another folder"):
        tpplan.save_safetensors(model, folder / "one")
    again = sharded(mesh)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    tpplan.load_safetensors(again, folder / "several", build_model=build_model)
    for name, parameter in model.named_parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        assert torch.equal(local, getattr(again.get_parameter(name), "_local_tensor", again.get_parameter(name)))
    return most


def test_files_hold_the_whole_weights_whatever_the_mesh(tmp_path: Path) -> None:
    most = max(run_ranks(4, saved_on_ranks, Mesh(shard=2, tp=2), tmp_path))
    assert most <= 2  # the one that is written, and the one that is gathered next
    expected = reference().state_dict()
    found = load_file(tmp_path / "one" / "model.safetensors")
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert len(found) == len({value.data_ptr() for value in expected.values()})
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 4
    assert index["metadata"]["total_size"] == sum(value.numel() * value.element_size() for value in found.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "several" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert torch.equal(opened.get_tensor(name), expected[name])
    half = load_file(tmp_path / "half" / "model.safetensors")
    for name, value in half.items():
        dtype = torch.bfloat16 if expected[name].is_floating_point() else expected[name].dtype
        assert torch.equal(value, expected[name].to(dtype)), name


def failed_on_ranks(folder: Path) -> str:
    """Rank 0 cannot write its file; this rank's error."""
    model = sharded(Mesh(tp=2))
    (folder / "blocked" / ".model.safetensors.unfinished").mkdir(parents=True, exist_ok=True)
    with pytest.raises(WeightsError) as caught:
        tpplan.save_safetensors(model, folder / "blocked")
    return str(caught.value)


def test_a_disk_that_refuses_is_an_error_on_all_ranks_and_leaves_no_file(tmp_path: Path) -> None:
    for message in run_ranks(2, failed_on_ranks, tmp_path):
        assert "model.safetensors: cannot be written" in message
    assert not list((tmp_path / "blocked").glob("model*"))


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(WeightsError, match="weight has no memory yet"):
        tpplan.save_safetensors(empty, tmp_path)
    with pytest.raises(WeightsError, match=r"torch\.complex64, which safetensors files cannot hold"):
        tpplan.save_safetensors(nn.Linear(2, 2, dtype=torch.complex64), tmp_path)
    with pytest.raises(UsageError, match="max_file_bytes >= 1, got 0"):
        tpplan.save_safetensors(nn.Linear(2, 2), tmp_path, max_file_bytes=0)


def test_one_process_may_save_scalars_and_empty_tensors(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("none", torch.empty(0, 4))
    tpplan.save_safetensors(model, tmp_path / "new")
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
