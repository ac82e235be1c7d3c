"""Fills a model with values: from a state_dict, from safetensors files, or as its constructor would.

    with torch.device("meta"):
        model = build_model()                                     # no memory
    model = tpplan.apply_plan(model, "plan.json")                 # local shapes, no memory
    tpplan.init_weights(model, build_model, seed=0)               # or
    tpplan.load_safetensors(model, "llama-8b/", build_model=build_model)

Each rank allocates memory for its own shards of the parameters, and reads or computes only those. Buffers that no file
holds (rotary frequencies) get the constructor's values (tpplan.train.deferred_init). A model that has memory is filled
in place. Tensors that are missing, left over, or of another shape are named, on all ranks, before anything changes.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from tpplan.core.errors import ModelError, WeightsError
from tpplan.stages.stage_model import names_elsewhere
from tpplan.train.deferred_init import Recording, record
from tpplan.train.materialize import (
    Target,
    check_same_on_ranks,
    held_tensor,
    listed,
    local_box,
    materialize,
    others_on_meta,
    raise_together,
    targets_of,
)
from tpplan.train.weight_sources import ConstructorSource, SafetensorsFiles, StateDictSource, TensorSource

BuildModel = Callable[[], nn.Module]
#: maps a name in the model to the name in the source
Rename = Callable[[str], str]


def load_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    *,
    build_model: BuildModel | None = None,
    rename: Rename | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Fills the model from a whole state_dict, which every rank passes (`torch.load(..., mmap=True)` takes no memory).

    Values are cast to the model's dtypes. One name of a tied weight is enough. `build_model` is needed where the model
    has buffers on the meta device that the state_dict does not hold. `rename` maps a name in the model to the name in
    the state_dict; `ignore` are patterns of names that may be left over. Raises WeightsError, on all ranks, for tensors
    that are missing, left over, of another shape or kind of dtype, and for tied weights whose values differ.
    """
    fill(model, StateDictSource("the state_dict", state_dict), build_model=build_model, rename=rename, ignore=ignore)


def load_safetensors(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    build_model: BuildModel | None = None,
    rename: Rename | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Fills the model from one safetensors file, or from a folder as Hugging Face saves it (several have an index).

    A rank reads only its own part of each tensor. Arguments and errors are those of load_state_dict. Needs the package
    safetensors.
    """
    source: TensorSource | None = None
    error: Exception | None = None
    try:
        source = SafetensorsFiles.open(Path(path))
    except Exception as found:
        error = found
    raise_together(error)
    assert source is not None
    fill(model, source, build_model=build_model, rename=rename, ignore=ignore)


def init_weights(model: nn.Module, build_model: BuildModel, *, seed: int = 0) -> None:
    """Fills the model with the values that build_model gives it: by reset_parameters, by `apply`, or otherwise.

    The values depend on seed alone, and are equal on every mesh and in one process. Each parameter is computed whole on
    the CPU, one at a time, and a rank keeps its part: every rank draws all random numbers of the model, and needs
    memory for one parameter and the tensors that it is computed from. Raises WeightsError where build_model makes
    another model or ranks pass different seeds, and ModelError where build_model leaves a parameter unset.
    """
    made: ConstructorSource | None = None
    error: Exception | None = None
    try:
        made = ConstructorSource(record(build_model, seed=seed))
    except Exception as found:
        error = found
    raise_together(error)
    assert made is not None
    check_same_on_ranks("seeds or constructors", f"seed {seed} with {made.recording.tape.num_draws} random ops")
    fill(model, made, recording=made.recording)


def fill(
    model: nn.Module,
    source: TensorSource,
    *,
    build_model: BuildModel | None = None,
    recording: Recording | None = None,
    rename: Rename | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Gives the model memory where it has none, and the source's values. Raises the error of any rank on all ranks."""
    wanted: dict[str, Target] = {}
    error: Exception | None = None
    try:
        elsewhere = frozenset(map(rename or str, names_elsewhere(model)))
        wanted = _matched(targets_of(model), source, rename or str, ignore, elsewhere)
        recording = prepare_buffers(model, recording, build_model)
    except Exception as found:
        error = found
    raise_together(error)
    check_same_on_ranks(f"tensors in {source.origin}", _digest(source.shapes()))
    make_memory(model, recording)
    try:
        _copy(source, wanted)
    except Exception as found:
        error = found
    raise_together(error)


def prepare_buffers(model: nn.Module, recording: Recording | None, build_model: BuildModel | None) -> Recording | None:
    """Returns a recording that makes the buffers on the meta device which no state_dict holds; changes nothing.

    The recording is the given one, or one of build_model, or None where no such buffers exist and none was given.
    Raises ModelError where there is neither recording nor build_model, where build_model makes another shape, and where
    the constructor draws a buffer at random and no recording says from which seed, so that its values are lost.
    """
    held = set().union(*(target.names for target in targets_of(model)))
    missing = {name: tensor for name, tensor in others_on_meta(model).items() if name not in held}
    if not missing:
        return recording
    made = recording
    if made is None and build_model is not None:
        made = record(build_model, seed=0)
    if made is None:
        raise ModelError(
            f"buffers without memory, which no state_dict holds: {listed(sorted(missing))}; pass build_model=, the "
            "function that builds the model, to make them again"
        )
    for name, tensor in missing.items():
        anew = held_tensor(made.model, name)
        if anew.shape != tensor.shape:
            raise ModelError(
                f"build_model makes {name} of shape {list(anew.shape)}, and the model has {list(tensor.shape)}: pass "
                "the build_model that made this model"
            )
        if recording is None and made.is_drawn(anew):
            raise ModelError(
                f"{name} is drawn at random by the constructor and saved nowhere, so that its values are lost: "
                "register it as a persistent buffer, or draw it from a generator of its own with a fixed seed"
            )
    return made


def make_memory(model: nn.Module, recording: Recording | None) -> None:
    """Gives memory to every tensor of the model; buffers and attributes without memory get the constructor's values."""
    others = others_on_meta(model)
    materialize(model)
    if recording is None:
        return
    values: dict[int, Tensor] = {}
    for name, tensor in others.items():
        if id(tensor) not in values:
            values[id(tensor)] = recording.value(held_tensor(recording.model, name))
            tensor.copy_(values[id(tensor)])


def _matched(
    targets: list[Target], source: TensorSource, rename: Rename, ignore: Sequence[str], elsewhere: Collection[str]
) -> dict[str, Target]:
    """Returns the target that each tensor of the source fills. Raises WeightsError with all names that do not match;
    those `elsewhere` are of other stages, and are left out."""
    shapes = source.shapes()
    found: dict[str, Target] = {}
    missing, misshapen = [], []
    for target in targets:
        present = [renamed for name in target.names if (renamed := rename(name)) in shapes]
        if not present:
            missing.append(target.names[0])
        misshapen += [
            f"{name} is {list(shapes[name])} there and {list(target.tensor.shape)} in the model"
            for name in present
            if shapes[name] != tuple(target.tensor.shape)
        ]
        found |= dict.fromkeys(present, target)
    unmatched = [name for name in shapes if name not in found and name not in elsewhere]
    left = [name for name in unmatched if not any(fnmatchcase(name, known) for known in ignore)]
    problems = [
        f"{what}: {listed(names)}"
        for what, names in (("missing there", missing), ("not in the model", left), ("of another shape", misshapen))
        if names
    ]
    if problems:
        hint = "; `ignore` takes patterns of names to leave out, `rename` translates names" if missing or left else ""
        raise WeightsError(f"{source.origin} does not fit the model: {'; '.join(problems)}{hint}")
    return found


@torch.no_grad()
def _copy(source: TensorSource, wanted: Mapping[str, Target]) -> None:
    boxes = {name: local_box(target.tensor) for name, target in wanted.items()}
    mine = {name: box for name, box in boxes.items() if all(part.stop > part.start for part in box)}
    filled: dict[int, str] = {}
    for name, part in source.parts(mine):
        local = wanted[name].local
        if part.dtype.is_floating_point != local.dtype.is_floating_point:
            raise WeightsError(
                f"{source.origin}: {name} is {part.dtype} there and {local.dtype} in the model: cast it before loading"
            )
        first = filled.setdefault(id(wanted[name]), name)
        if first == name:
            local.copy_(part)
        elif not torch.equal(local, part.to(local)):
            raise WeightsError(
                f"{source.origin}: {first} and {name} are tied in the model, and differ there: untie them in the "
                "model, or leave one out"
            )
    if lost := sorted({id(wanted[name]) for name in mine} - filled.keys()):
        raise AssertionError(f"{source.origin} gave nothing for {len(lost)} tensors")


def _digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    text = json.dumps(sorted((name, list(shape)) for name, shape in shapes.items()))
    return f"{len(shapes)} tensors, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"
