"""Reads an optimizer's state by parameter name for a checkpoint, and loads it back.

States in the shape and layout of their parameter are tensors of their own, of which each rank saves its shards. All
other states and the options of the parameter groups are the same on all ranks of a stage and are saved by rank 0, those
of all stages together; a stage loads what it has.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tpplan.apply.pipeline import group_of_stages
from tpplan.core.errors import UsageError
from tpplan.train.checkpoint_metadata import MODEL_PREFIX, STATE_PREFIX, name_in, tensors_in


def state_key(name: str, key: str) -> str:
    """The key in a checkpoint of a parameter's optimizer state `key`."""
    return f"{STATE_PREFIX}{name}/{key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptimizer:
    """An optimizer's state, in the parts in which it is saved."""

    #: states in their parameters' shape and layout, by key in the checkpoint
    tensors: dict[str, Tensor]
    #: all other states, by parameter name and the optimizer's key
    scalars: dict[str, dict[str, Any]]
    #: options of the parameter groups; `params` are names
    groups: list[dict[str, Any]]


def parameter_names(names: Mapping[int, str], optimizer: Optimizer) -> list[list[str]]:
    """Returns the names of the optimizer's parameters, by group. Raises UsageError for one that is not the model's."""
    unknown = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if unknown:
        raise UsageError(
            f"the optimizer holds {len(unknown)} parameters that are not the model's, one of shape "
            f"{list(unknown[0].shape)}: make it from model.parameters(), after apply_plan"
        )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def saved_optimizer(names: Mapping[int, str], optimizer: Optimizer) -> SavedOptimizer:
    """Returns an optimizer's state by parameter name; `names` are the model's, by the parameter's id.

    Raises UsageError for a parameter that is not the model's, and for a state that a checkpoint cannot hold.
    """
    of_groups = parameter_names(names, optimizer)
    state = optimizer.state_dict()
    flat = [name for group in of_groups for name in group]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = [tuple(parameter.shape) for parameter in parameters]
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, entry in state["state"].items():
        if not isinstance(number, int):
            raise UsageError(
                f"the optimizer has state that belongs to no parameter ({number!r}), which a checkpoint cannot hold: "
                "save it in `extras`, and save the checkpoint without it"
            )
        for key, value in entry.items():
            if isinstance(value, Tensor) and _is_like_parameter(key, tuple(value.shape), shapes[number]):
                tensors[state_key(flat[number], key)] = value
            elif isinstance(value, DTensor):
                raise UsageError(
                    f"the optimizer's {key} of {flat[number]} is sharded, and its shape {list(value.shape)} is not its "
                    f"parameter's, {list(shapes[number])}: such a state cannot be saved; save without the optimizer"
                )
            elif isinstance(value, Tensor) and value.dim() and _is_cut(parameters[number]):
                raise UsageError(
                    f"the optimizer's {key} of {flat[number]}, of shape {list(value.shape)}, is each rank's own, as "
                    "the parameter is sharded, and only rank 0's would be saved: save without the optimizer"
                )
            else:
                scalars.setdefault(flat[number], {})[key] = value.cpu() if isinstance(value, Tensor) else value
    groups = [
        {option: value for option, value in group.items() if option != "params"} | {"params": group_names}
        for group, group_names in zip(state["param_groups"], of_groups, strict=True)
    ]
    return SavedOptimizer(tensors=tensors, scalars=scalars, groups=groups)


def _is_cut(parameter: Tensor) -> bool:
    """True where ranks hold different parts of the parameter."""
    return isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)


def _is_like_parameter(key: str, shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """True for a state that is laid out as its parameter; "step" is a count, also where the parameter has no dims."""
    return shape == parameter and key != "step"


def empty_states(metadata: Metadata, names: Mapping[int, str], optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Returns uninitialized tensors for the saved states laid out as their parameters, by parameter name and key."""
    by_name = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    states: dict[str, dict[str, Tensor]] = {}
    for full, stored in tensors_in(metadata).items():
        if full.startswith(STATE_PREFIX):
            name = name_in(full)
            room = torch.empty_like(by_name[name].detach(), dtype=stored.properties.dtype)
            states.setdefault(name, {})[full.rpartition("/")[2]] = room
    return states


def load_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    states: Mapping[str, Mapping[str, Tensor]],
    saved: Mapping[str, Any],
) -> None:
    """Loads into an optimizer the `states` that empty_states made and torch filled, and the `saved` scalars and groups,
    which check_optimizer has compared with the optimizer's own."""
    of_groups = parameter_names(names, optimizer)
    numbers = {name: number for number, name in enumerate(chain.from_iterable(of_groups))}
    entries: dict[int, dict[str, Any]] = {}
    for source in (saved["scalars"], states):
        for name, entry in source.items():
            entries.setdefault(numbers[name], {}).update(entry)
    in_order = zip(saved["groups"], of_groups, strict=True)
    groups = [group | {"params": [numbers[name] for name in own]} for group, own in in_order]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


# ---- of stages


def of_all_stages(model: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """The groups and scalars of the optimizers of all stages together; every rank must call it. Raises UsageError where
    stages have other numbers of groups."""
    group = group_of_stages(model)
    if group is None:
        return saved
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, saved, group=group)
    if len({len(own["groups"]) for own in every}) > 1:
        raise UsageError("the optimizers of stages have different numbers of groups: give each the same groups")
    together = zip(*(own["groups"] for own in every), strict=True)
    # A parameter that several stages have is in each of their groups.
    groups = [{**own[0], "params": list(dict.fromkeys(n for one in own for n in one["params"]))} for own in together]
    return {"groups": groups, "scalars": {name: entry for own in every for name, entry in own["scalars"].items()}}


def leave_out(elsewhere: Collection[str], state: dict[str, Any], metadata: Metadata) -> None:
    """Takes what other stages have out of a checkpoint's contents."""
    if not elsewhere:
        return
    for full in list(metadata.state_dict_metadata):
        own = full.removeprefix(MODEL_PREFIX)
        if own in elsewhere or (full.startswith(STATE_PREFIX) and name_in(full) in elsewhere):
            del metadata.state_dict_metadata[full]
    if state["optimizer"] is not None:
        for group in state["optimizer"]["groups"]:
            group["params"] = [name for name in group["params"] if name not in elsewhere]
        scalars = state["optimizer"]["scalars"]
        state["optimizer"]["scalars"] = {name: own for name, own in scalars.items() if name not in elsewhere}
