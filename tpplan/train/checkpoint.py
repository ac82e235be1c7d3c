"""Saves checkpoints under one plan and loads them under any other, through torch.distributed.checkpoint.

    tpplan.save_checkpoint("checkpoints", model, optimizer, step=100, extras={"samples": 51200}, keep=2)
    loaded = tpplan.load_checkpoint("checkpoints", model, optimizer)          # the latest; loaded.step, loaded.extras

A checkpoint is a folder with torch's files and `state.pt`. In torch's files each rank writes its shards of parameters
and optimizer states with their offsets in the whole tensors. `state.pt` has the step, the optimizer's groups and
scalars, and the extras. Names are those of state_dict. A fused weight is stored in its own order on every mesh
(tpplan.apply.modules.parameter_reads). A killed writer leaves no broken checkpoint (tpplan.train.checkpoint_folder).

    saving = tpplan.save_checkpoint_async("checkpoints", model, optimizer, step=100)     # copies, and writes meanwhile
    ...                                                                                  # steps
    path = saving.wait()
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
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
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from tpplan.apply.model_match import plan_name
from tpplan.apply.rank_agreement import all_ranks
from tpplan.core.errors import UsageError, WeightsError
from tpplan.stages.stage_model import names_elsewhere
from tpplan.train.checkpoint_folder import (
    atomic_write,
    begin_checkpoint,
    begin_saving,
    commit_checkpoint,
    end_saving,
    keep_last,
    latest_checkpoint,
)
from tpplan.train.checkpoint_metadata import (
    MODEL_PREFIX,
    CheckpointReader,
    check_model,
    check_optimizer,
    read_metadata,
    tensors_in,
)
from tpplan.train.load_weights import BuildModel, make_memory, prepare_buffers
from tpplan.train.materialize import raise_together, targets_of
from tpplan.train.optimizer_state import (
    empty_states,
    leave_out,
    load_optimizer,
    of_all_stages,
    parameter_names,
    saved_optimizer,
    state_key,
)

_FORMAT = 1
_STATE = "state.pt"


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
    place, tensors, blob = _begun("save_checkpoint", folder, model, optimizer, step, extras, keep)
    _write(place, tensors)
    return Path(_from_first(lambda: _finish(place, blob, keep)))


def save_checkpoint_async(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    extras: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> "SavingCheckpoint":
    """Copies what save_checkpoint saves to the CPU, and writes it while training goes on (torch's dcp.async_save).

    Call it on all ranks. Each rank needs memory for its shards once more. The checkpoint is complete as soon as all
    ranks have written it; wait() says so, and is to be called on all ranks before the next checkpoint in this folder,
    and before the process group is destroyed. Raises the errors of save_checkpoint, and UsageError where the last one
    was not waited for.
    """
    place, tensors, blob = _begun("save_checkpoint_async", folder, model, optimizer, step, extras, keep)
    # Of its own: the writing thread's collectives must not mix with those of training.
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    written = _write_meanwhile(place, tensors, group)
    finished: Future[str] = Future()
    if not dist.is_initialized() or dist.get_rank() == 0:
        written.add_done_callback(lambda _: _settle(written, finished, lambda: _finish(place, blob, keep)))
    saving = SavingCheckpoint(place=place, written=written, finished=finished, group=group)
    _from_first(lambda: begin_saving(place.parent))
    return saving


@dataclass(slots=True, kw_only=True)
class SavingCheckpoint:
    """A checkpoint that is being written, at first into the folder `place`. `finished` is rank 0's alone."""

    place: Path
    written: "Future[Any]"
    finished: "Future[str]"
    group: dist.ProcessGroup | None
    path: Path | None = None

    def is_done(self) -> bool:
        """True where wait() of this rank would not wait for the disk."""
        return self.written.done()

    def wait(self) -> Path:
        """Waits on all ranks until the checkpoint is complete; its path. Raises WeightsError where the disk refused, on
        all ranks."""
        if self.path is None:
            error = self.written.exception()
            try:
                raise_together(None if error is None else WeightsError(f"{self.place}: {error}"))
                self.path = Path(_from_first(self.finished.result))
            finally:
                _from_first(lambda: end_saving(self.place.parent))
                if self.group is not None:
                    dist.destroy_process_group(self.group)
                    self.group = None
        return self.path


def _settle(written: "Future[Any]", finished: "Future[str]", finish: Callable[[], str]) -> None:
    """Finishes what is written; for what is not, wait() raises the error of writing."""
    try:
        finished.set_result("" if written.exception() else finish())
    except Exception as error:
        finished.set_exception(error)


def _begun(
    verb: str,
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    step: int,
    extras: Mapping[str, Any] | None,
    keep: int | None,
) -> tuple[Path, dict[str, Tensor], bytes]:
    """The folder to write into, which all ranks see, and what _gathered returns; `verb` is named in errors."""
    tensors: dict[str, Tensor] = {}
    error: Exception | None = None
    blob = b""
    try:
        if step < 0 or (keep is not None and keep < 1):
            raise UsageError(f"{verb}: expected step >= 0 and keep >= 1 or None, got step={step}, keep={keep}")
        tensors, blob = _gathered(model, optimizer, step, extras or {})
    except Exception as found:
        error = found
    raise_together(error)
    place = Path(_from_first(lambda: str(begin_checkpoint(Path(folder), step))))
    unseen = f"{place}: rank 0 made this folder, and this rank does not see it: pass a folder that all ranks share"
    raise_together(None if place.is_dir() else WeightsError(unseen))
    return place, tensors, blob


def _gathered(
    model: nn.Module, optimizer: Optimizer | None, step: int, extras: Mapping[str, Any]
) -> tuple[dict[str, Tensor], bytes]:
    """Returns the tensors whose shards each rank writes, by name, and the content of rank 0's `state.pt`."""
    tensors = {MODEL_PREFIX + name: tensor for name, tensor in _model_tensors(model).items()}
    state: dict[str, Any] = {"format": _FORMAT, "step": step, "extras": dict(extras), "optimizer": None}
    if optimizer is not None:
        saved = saved_optimizer(_names(model), optimizer)
        tensors |= saved.tensors
        state["optimizer"] = of_all_stages(model, {"groups": saved.groups, "scalars": saved.scalars})
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
        leave_out(names_elsewhere(model), state, metadata)
        _check(place, model, optimizer, state, metadata)
        recording = prepare_buffers(model, None, build_model)
    except Exception as found:
        error = found
    raise_together(error)
    make_memory(model, recording)
    tensors = {MODEL_PREFIX + name: tensor for name, tensor in _model_tensors(model).items()}
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
        raise WeightsError(f"{place / _STATE}: cannot be read: {error}; pass the path of another checkpoint") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise WeightsError(
            f"{place}: this tpplan reads checkpoints of format {_FORMAT}, this one has format {found!r:.80}: load it "
            "with the version of tpplan that saved it"
        )
    if problem := _malformed(state):
        raise WeightsError(f"{place / _STATE}: {problem}: no save_checkpoint writes this; pass another checkpoint")
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


def _write_meanwhile(place: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> "Future[Any]":
    """Copies the tensors, and writes the copies in a thread whose collectives are those of `group`."""
    writer = FileSystemWriter(place, sync_files=True)
    with _torch_checkpoint(place):
        written = async_save(
            dict(tensors), storage_writer=writer, process_group=group, async_stager=BlockingAsyncStager()
        )
    assert isinstance(written, Future)
    return written


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
        raise WeightsError(
            f"{path}: no checkpoint there, and none in a folder in it: pass a checkpoint, or the folder that was given "
            "to save_checkpoint"
        )
    return latest


def _check(
    place: Path, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any], metadata: Metadata
) -> None:
    """Raises WeightsError for a checkpoint of another model or optimizer, with the names that differ."""
    stored = {name: tuple(found.size) for name, found in tensors_in(metadata).items()}
    own = {MODEL_PREFIX + name: tuple(tensor.shape) for name, tensor in _model_tensors(model).items()}
    check_model(place, own, stored)
    if optimizer is None:
        return
    if state["optimizer"] is None:
        raise WeightsError(f"{place} was saved without an optimizer: load it without one")
    check_optimizer(place, parameter_names(_names(model), optimizer), state["optimizer"], own, stored)


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
