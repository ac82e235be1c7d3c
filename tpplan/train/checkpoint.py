"""Saves checkpoints under one plan and loads them under any other, through torch.distributed.checkpoint.

    tpplan.save_checkpoint("checkpoints", model, optimizer, step=100, extras={"samples": 51200}, keep=2)
    loaded = tpplan.load_checkpoint("checkpoints", model, optimizer)          # the latest; loaded.step, loaded.extras

A checkpoint is a folder with torch's files and `state.pt`. In torch's files each rank writes its shards of parameters
and optimizer states with their offsets in the whole tensors. `state.pt` has the step, the optimizer's groups and
scalars, and the extras. Names are those of state_dict. A fused weight is stored in its own order on every mesh
(tpplan.apply.modules.parameter_reads). A killed writer leaves no broken checkpoint (tpplan.train.checkpoint_folder).
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from tpplan.apply.model_match import plan_name
from tpplan.core.errors import UsageError, WeightsError
from tpplan.train.checkpoint_folder import (
    atomic_write,
    begin_checkpoint,
    commit_checkpoint,
    keep_last,
    latest_checkpoint,
)
from tpplan.train.checkpoint_metadata import CheckpointReader, read_metadata, tensors_in
from tpplan.train.load_weights import BuildModel, make_memory, prepare_buffers
from tpplan.train.materialize import all_ranks, listed, raise_together, targets_of
from tpplan.train.optimizer_state import (
    STATE_PREFIX,
    empty_states,
    load_optimizer,
    parameter_names,
    saved_optimizer,
    state_key,
)

_FORMAT = 1
_STATE = "state.pt"
#: prefix of parameters and buffers among the tensors of a checkpoint
_MODEL = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The path, step and extras of a loaded checkpoint."""

    path: Path
    step: int
    extras: Mapping[str, Any]


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    extras: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Saves model, optimizer, step and extras as a folder inside `folder`, which all ranks see; returns its path.

    Call it on all ranks, after optimizer.step(). `extras` are rank 0's: numbers, strings, tensors, and dicts and lists
    of these (the position in the data, a scheduler's state_dict). `keep` is the number of checkpoints to keep. Until
    all is on the disk, the previous checkpoint is the latest. Raises UsageError for extras or optimizer states that
    cannot be saved, and WeightsError where the disk refuses, on all ranks.
    """
    tensors: dict[str, Tensor] = {}
    error: Exception | None = None
    blob = b""
    try:
        if step < 0 or (keep is not None and keep < 1):
            raise UsageError(f"save_checkpoint: expected step >= 0 and keep >= 1 or None, got step={step}, keep={keep}")
        tensors, blob = _gathered(model, optimizer, step, extras or {})
    except Exception as found:
        error = found
    raise_together(error)
    place = Path(_from_first(lambda: str(begin_checkpoint(Path(folder), step))))
    is_here = place.is_dir()
    raise_together(
        None
        if is_here
        else WeightsError(
            f"{place}: rank 0 made this folder, and this rank does not see it: pass a "
            "folder on a file system that all ranks share"
        )
    )
    _write(place, tensors)
    return Path(_from_first(lambda: _finish(place, blob, keep)))


def _gathered(
    model: nn.Module, optimizer: Optimizer | None, step: int, extras: Mapping[str, Any]
) -> tuple[dict[str, Tensor], bytes]:
    """Returns the tensors whose shards each rank writes, by name, and the content of rank 0's `state.pt`."""
    tensors = {_MODEL + name: tensor for name, tensor in _model_tensors(model).items()}
    state: dict[str, Any] = {"format": _FORMAT, "step": step, "extras": dict(extras), "optimizer": None}
    if optimizer is not None:
        saved = saved_optimizer(_names(model), optimizer)
        tensors |= saved.tensors
        state["optimizer"] = {"groups": saved.groups, "scalars": saved.scalars}
    return tensors, _serialized(state)


def _finish(place: Path, blob: bytes, keep: int | None) -> str:
    try:
        with atomic_write(place / _STATE) as path:
            path.write_bytes(blob)
        complete = commit_checkpoint(place)
        if keep is not None:
            keep_last(complete.parent, keep)
    except OSError as error:
        raise WeightsError(
            f"{place}: the checkpoint cannot be finished: {error}; check space and permissions, and save again"
        ) from error
    return str(complete)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    build_model: BuildModel | None = None,
) -> Checkpoint:
    """Fills model and optimizer from a checkpoint, or from the latest one in a folder of checkpoints.

    Call it on all ranks. A model on the meta device gets memory for its local parts first; `build_model` makes the
    buffers that state_dict leaves out, as in load_state_dict. Options of the optimizer's groups (the learning rate) are
    the saved ones, as with torch's load_state_dict. Raises WeightsError, on all ranks and before anything changes,
    where there is no checkpoint, or the checkpoint is of another model or optimizer.
    """
    place = Path(_from_first(lambda: str(_found(Path(path)))))
    state: dict[str, Any] = {}
    error: Exception | None = None
    recording = None
    metadata = Metadata(state_dict_metadata={})
    try:
        state, metadata = _read_state(place), read_metadata(place)
        _check(place, model, optimizer, state, metadata)
        recording = prepare_buffers(model, None, build_model)
    except Exception as found:
        error = found
    raise_together(error)
    make_memory(model, recording)
    tensors = {_MODEL + name: tensor for name, tensor in _model_tensors(model).items()}
    states = empty_states(metadata, _names(model), optimizer) if optimizer is not None else {}
    tensors |= {state_key(name, key): value for name, entry in states.items() for key, value in entry.items()}
    _read(place, tensors, metadata)
    if optimizer is not None:
        load_optimizer(optimizer, _names(model), states, state["optimizer"])
    return Checkpoint(path=place, step=state["step"], extras=state["extras"])


# ---- names and tensors


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {target.names[0]: target.tensor.detach() for target in targets_of(model)}


def _names(model: nn.Module) -> dict[int, str]:
    """Returns the name of each parameter of the model, by the parameter's id."""
    return {id(parameter): plan_name(name) for name, parameter in model.named_parameters()}


# ---- files


def _serialized(state: Mapping[str, Any]) -> bytes:
    """Returns the content of `state.pt`. Raises UsageError for a state that torch.load(weights_only=True) rejects."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise UsageError(
            "the extras or the optimizer's options cannot be saved: only numbers, strings, tensors, and dicts, lists "
            f"and tuples of those: {error}"
        ) from error
    return buffer.getvalue()


def _read_state(place: Path) -> dict[str, Any]:
    try:
        state = torch.load(place / _STATE, map_location="cpu", weights_only=True)
    except Exception as error:
        raise WeightsError(f"{place / _STATE}: cannot be read: {error}") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise WeightsError(
            f"{place}: this tpplan reads checkpoints of format {_FORMAT}, this one has format {found!r:.80}: load it "
            "with the version of tpplan that saved it"
        )
    if problem := _malformed(state):
        raise WeightsError(f"{place / _STATE}: {problem}")
    return state


def _malformed(state: Mapping[str, Any]) -> str:
    """Returns what in a loaded `state.pt` save_checkpoint never writes; "" where it is well-formed."""
    if type(state.get("step")) is not int or not isinstance(state.get("extras"), dict):
        return "expected a step and extras"
    saved = state.get("optimizer")
    if saved is None:
        return ""
    groups, scalars = (saved.get("groups"), saved.get("scalars")) if isinstance(saved, dict) else (None, None)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return "optimizer: expected groups"
    if not isinstance(scalars, dict) or not all(isinstance(entry, dict) for entry in scalars.values()):
        return "optimizer: expected scalars by parameter"
    params = [group.get("params") for group in groups]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in params):
        return "optimizer: expected names of parameters in each group"
    return ""


def _write(place: Path, tensors: Mapping[str, Tensor]) -> None:
    with _torch_checkpoint(place):
        save(dict(tensors), storage_writer=FileSystemWriter(place, sync_files=True))


def _read(place: Path, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
    with _torch_checkpoint(place), torch.no_grad():
        load(dict(tensors), storage_reader=CheckpointReader(place, metadata))


@contextmanager
def _torch_checkpoint(place: Path) -> Iterator[None]:
    """Turns torch's CheckpointException into WeightsError, and hides its warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise WeightsError(f"{place}: {error}") from error


def _found(path: Path) -> Path:
    """Returns the checkpoint at a path, or the latest in that folder. Raises WeightsError where there is none."""
    if (path / _STATE).is_file():
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        raise WeightsError(f"{path}: no checkpoint there, and none in a folder in it")
    return latest


def _check(
    place: Path, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any], metadata: Metadata
) -> None:
    """Raises WeightsError for a checkpoint of another model or optimizer, with the names that differ."""
    stored = {name: tuple(found.size) for name, found in tensors_in(metadata).items()}
    own = {_MODEL + name: tuple(tensor.shape) for name, tensor in _model_tensors(model).items()}
    _check_model(place, own, stored)
    if optimizer is None:
        return
    if state["optimizer"] is None:
        raise WeightsError(f"{place} was saved without an optimizer: load it without one")
    _check_optimizer(place, parameter_names(_names(model), optimizer), state["optimizer"], own, stored)


def _check_model(place: Path, own: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightsError where the model's names and shapes (`own`) are not the checkpoint's (`stored`)."""
    there = {name: shape for name, shape in stored.items() if name.startswith(_MODEL)}
    problems = [
        f"{what}: {listed([name.removeprefix(_MODEL) for name in names])}"
        for what, names in (
            ("missing there", sorted(own.keys() - there.keys())),
            ("not in the model", sorted(there.keys() - own.keys())),
            ("of another shape", [name for name in sorted(own.keys() & there.keys()) if own[name] != there[name]]),
        )
        if names
    ]
    if problems:
        raise WeightsError(f"{place} is of another model: {'; '.join(problems)}")


def _check_optimizer(
    place: Path,
    of_groups: list[list[str]],
    saved: Mapping[str, Any],
    own: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises WeightsError where the optimizer's parameter groups (`of_groups`, names) or states are not the saved ones.

    `own` and `stored` are shapes by name, of the model's and of the checkpoint's tensors.
    """
    groups = [sorted(group["params"]) for group in saved["groups"]]
    own_groups = [sorted(group) for group in of_groups]
    if len(groups) != len(own_groups):
        raise WeightsError(
            f"{place}: the optimizer had {len(groups)} groups of parameters, this one has {len(own_groups)}: make it "
            "with the same groups"
        )
    for number, (theirs, ours) in enumerate(zip(groups, own_groups, strict=True)):
        if theirs != ours:
            differing = sorted({*theirs} ^ {*ours})
            raise WeightsError(
                f"{place}: the optimizer's group {number} held other parameters: {listed(differing)}: make it with the "
                "same groups"
            )
    shapes = {name: own[_MODEL + name] for group in own_groups for name in group if _MODEL + name in own}
    states = {
        full: full.removeprefix(STATE_PREFIX).rpartition("/")[0] for full in stored if full.startswith(STATE_PREFIX)
    }
    others = [full for full, name in states.items() if stored[full] != shapes.get(name)]
    others += [str(name) for name in saved["scalars"] if name not in shapes]
    if others:
        raise WeightsError(
            f"{place}: the checkpoint has states of parameters that this optimizer does not hold, or in another shape: "
            f"{listed(others)}"
        )


def _from_first(function: Callable[[], str]) -> str:
    """Calls the function on rank 0, and returns its result, or raises its error, on all ranks."""
    found, error = "", None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found = function()
        except Exception as raised:
            error = raised
    raise_together(error)
    return all_ranks(found)[0]
