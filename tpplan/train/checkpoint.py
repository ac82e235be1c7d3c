"""Checkpoints: saved under one plan, loaded under any other, through torch.distributed.checkpoint.

    tpplan.save_checkpoint("checkpoints", model, optimizer, step=100, extras={"samples": 51200}, keep=2)
    loaded = tpplan.load_checkpoint("checkpoints", model, optimizer)          # the latest; loaded.step, loaded.extras

A checkpoint is a folder with torch's files, in which each rank has written its parts of the parameters and of the
optimizer's states by the places that they have in the whole tensors, and `state.pt`: the step, the optimizer's groups
and scalars, and the extras. Names are those of state_dict. A fused weight rests in its own order on every mesh
(tpplan.apply.modules.parameter_reads), and so is saved in it. tpplan.train.checkpoint_folder says what a killed writer
leaves behind: nothing.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tpplan.apply.model_match import plan_name
from tpplan.core.errors import UsageError, WeightsError
from tpplan.train.checkpoint_folder import begin, commit, keep_last, latest_checkpoint, written
from tpplan.train.checkpoint_metadata import CheckpointReader, read_metadata, tensors_in
from tpplan.train.load_weights import BuildModel, make_memory, prepare_buffers
from tpplan.train.materialize import all_ranks, listed, raise_together, targets_of

_FORMAT = 1
_STATE = "state.pt"
_MODEL, _OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was loaded besides model and optimizer."""

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

    All ranks call it, after optimizer.step(). `extras` are rank 0's: numbers, strings, tensors, and dicts and lists of
    those (the position in the data, a scheduler's state_dict). With `keep` only the last so many checkpoints stay.
    Until all is on the disk, the one before is the latest. Raises UsageError for extras or optimizer states that cannot
    be saved, WeightsError where the disk refuses, on all ranks.
    """
    tensors: dict[str, Tensor] = {}
    error: Exception | None = None
    blob = b""
    try:
        if step < 0 or (keep is not None and keep < 1):
            raise UsageError(f"save_checkpoint: step {step} must be at least 0, keep {keep} at least 1")
        tensors, blob = _gathered(model, optimizer, step, extras or {})
    except Exception as found:
        error = found
    raise_together(error)
    place = Path(_from_first(lambda: str(begin(Path(folder), step))))
    is_here = place.is_dir()
    raise_together(None if is_here else WeightsError(f"{place}: rank 0 made it, and it is not here: share the folder"))
    _write(place, tensors)
    return Path(_from_first(lambda: _finish(place, blob, keep)))


def _gathered(
    model: nn.Module, optimizer: Optimizer | None, step: int, extras: Mapping[str, Any]
) -> tuple[dict[str, Tensor], bytes]:
    """What each rank writes its parts of, and what rank 0 writes."""
    tensors = {_MODEL + name: tensor for name, tensor in _model_tensors(model).items()}
    state: dict[str, Any] = {"format": _FORMAT, "step": step, "extras": dict(extras), "optimizer": None}
    if optimizer is not None:
        saved = _saved_optimizer(_names(model), optimizer)
        tensors |= saved.tensors
        state["optimizer"] = {"groups": saved.groups, "scalars": saved.scalars}
    return tensors, _serialized(state)


def _finish(place: Path, blob: bytes, keep: int | None) -> str:
    try:
        with written(place / _STATE) as path:
            path.write_bytes(blob)
        complete = commit(place)
        if keep is not None:
            keep_last(complete.parent, keep)
    except OSError as error:
        raise WeightsError(f"{place}: the checkpoint cannot be finished: {error}") from error
    return str(complete)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    build_model: BuildModel | None = None,
) -> Checkpoint:
    """Fills model and optimizer from a checkpoint, or from the latest in a folder of them.

    All ranks call it. A model on the meta device gets memory for its local parts first; `build_model` makes the buffers
    that nobody saved, as in load_state_dict. Options of the optimizer's groups (the learning rate) are the saved ones,
    as with torch's load_state_dict. Raises WeightsError, on all ranks and before anything is changed, where there is no
    checkpoint, or one of another model or optimizer.
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
    states = _empty_states(metadata, _names(model), optimizer) if optimizer is not None else {}
    tensors |= {_state_key(name, key): value for name, entry in states.items() for key, value in entry.items()}
    _read(place, tensors, metadata)
    if optimizer is not None:
        _load_optimizer(optimizer, _names(model), states, state["optimizer"])
    return Checkpoint(path=place, step=state["step"], extras=state["extras"])


# ---- names and tensors


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {target.names[0]: target.tensor.detach() for target in targets_of(model)}


def _names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its id."""
    return {id(parameter): plan_name(name) for name, parameter in model.named_parameters()}


def _state_key(name: str, key: str) -> str:
    return f"{_OPTIMIZER}{name}/{key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedOptimizer:
    """An optimizer's state: what is laid out as its parameters, and the rest."""

    tensors: dict[str, Tensor]
    scalars: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


def _parameter_names(names: Mapping[int, str], optimizer: Optimizer) -> list[list[str]]:
    """By group, the names of the optimizer's parameters."""
    unknown = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if unknown:
        raise UsageError(
            f"the optimizer holds {len(unknown)} parameters that are not the model's, one of shape "
            f"{list(unknown[0].shape)}: make it from model.parameters(), after apply_plan"
        )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _saved_optimizer(names: Mapping[int, str], optimizer: Optimizer) -> _SavedOptimizer:
    of_groups = _parameter_names(names, optimizer)
    state = optimizer.state_dict()
    flat = [name for group in of_groups for name in group]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = [tuple(parameter.shape) for parameter in parameters]
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, entry in state["state"].items():
        if not isinstance(number, int):
            raise UsageError(f"the optimizer has state of no parameter ({number!r}), which no checkpoint can hold")
        for key, value in entry.items():
            if isinstance(value, Tensor) and _is_like_parameter(key, tuple(value.shape), shapes[number]):
                tensors[_state_key(flat[number], key)] = value
            elif isinstance(value, DTensor):
                raise UsageError(
                    f"the optimizer's {key} of {flat[number]} is sharded, and its shape {list(value.shape)} is not its "
                    f"parameter's, {list(shapes[number])}: such a state cannot be saved"
                )
            elif isinstance(value, Tensor) and value.dim() and _is_cut(parameters[number]):
                raise UsageError(
                    f"the optimizer's {key} of {flat[number]}, of shape {list(value.shape)}, is each rank's own, and "
                    "the parameter is sharded: only rank 0's would be saved; such a state cannot be"
                )
            else:
                scalars.setdefault(flat[number], {})[key] = value.cpu() if isinstance(value, Tensor) else value
    groups = [
        {option: value for option, value in group.items() if option != "params"} | {"params": group_names}
        for group, group_names in zip(state["param_groups"], of_groups, strict=True)
    ]
    return _SavedOptimizer(tensors=tensors, scalars=scalars, groups=groups)


def _is_cut(parameter: Tensor) -> bool:
    """Ranks hold different parts of it."""
    return isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)


def _is_like_parameter(key: str, shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """It lies as the parameter does. torch's optimizers count steps in a tensor without dims."""
    return shape == parameter and key != "step"


def _empty_states(metadata: Metadata, names: Mapping[int, str], optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Room for the saved states that lie as their parameters do, by parameter and key."""
    by_name = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    states: dict[str, dict[str, Tensor]] = {}
    for full, stored in tensors_in(metadata).items():
        if full.startswith(_OPTIMIZER):
            name, _, key = full.removeprefix(_OPTIMIZER).rpartition("/")
            room = torch.empty_like(by_name[name].detach(), dtype=stored.properties.dtype)
            states.setdefault(name, {})[key] = room
    return states


def _load_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    states: Mapping[str, Mapping[str, Tensor]],
    saved: Mapping[str, Any],
) -> None:
    of_groups = _parameter_names(names, optimizer)
    numbers = {name: number for number, name in enumerate(chain.from_iterable(of_groups))}
    entries: dict[int, dict[str, Any]] = {}
    for source in (saved["scalars"], states):
        for name, entry in source.items():
            entries.setdefault(numbers[name], {}).update(entry)
    in_order = zip(saved["groups"], of_groups, strict=True)
    groups = [group | {"params": [numbers[name] for name in own]} for group, own in in_order]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


# ---- files


def _serialized(state: Mapping[str, Any]) -> bytes:
    """The file's content. Raises UsageError for what could not be read again without running code."""
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
        raise WeightsError(f"{place}: this tpplan reads checkpoints of format {_FORMAT}, this one has {found!r:.80}")
    if problem := _malformed(state):
        raise WeightsError(f"{place / _STATE}: {problem}")
    return state


def _malformed(state: Mapping[str, Any]) -> str:
    """What save_checkpoint would not have written; "" where nothing is."""
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
    """torch's error, which names all ranks, is ours; one process needs no warning that it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise WeightsError(f"{place}: {error}") from error


def _found(path: Path) -> Path:
    """The checkpoint at a path, or the latest below it."""
    if (path / _STATE).is_file():
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        raise WeightsError(f"{path}: no checkpoint there, and none in a folder in it")
    return latest


def _check(
    place: Path, model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any], metadata: Metadata
) -> None:
    """Raises WeightsError for a checkpoint of another model or optimizer, with the names."""
    stored = {name: tuple(found.size) for name, found in tensors_in(metadata).items()}
    own = {_MODEL + name: tuple(tensor.shape) for name, tensor in _model_tensors(model).items()}
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
    if optimizer is None:
        return
    saved = state["optimizer"]
    if saved is None:
        raise WeightsError(f"{place} was saved without an optimizer: load it without one")
    groups = [sorted(group["params"]) for group in saved["groups"]]
    own_groups = [sorted(group) for group in _parameter_names(_names(model), optimizer)]
    if len(groups) != len(own_groups):
        raise WeightsError(
            f"{place}: the optimizer had {len(groups)} groups of parameters, this one has {len(own_groups)}"
        )
    for number, (theirs, ours) in enumerate(zip(groups, own_groups, strict=True)):
        if theirs != ours:
            differing = sorted({*theirs} ^ {*ours})
            raise WeightsError(f"{place}: the optimizer's group {number} held other parameters: {listed(differing)}")
    shapes = {name: own[_MODEL + name] for group in own_groups for name in group if _MODEL + name in own}
    states = {full: full.removeprefix(_OPTIMIZER).rpartition("/")[0] for full in stored if full.startswith(_OPTIMIZER)}
    others = [full for full, name in states.items() if stored[full] != shapes.get(name)]
    others += [str(name) for name in saved["scalars"] if name not in shapes]
    if others:
        raise WeightsError(f"{place}: optimizer states that are none of this optimizer's parameters: {listed(others)}")


def _from_first(function: Callable[[], str]) -> str:
    """What rank 0 finds, on all ranks; its error is raised on all."""
    found, error = "", None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found = function()
        except Exception as raised:
            error = raised
    raise_together(error)
    return all_ranks(found)[0]
