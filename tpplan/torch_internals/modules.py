"""Modules: their own tables of parameters, buffers and hooks, a context that replaces parameters for a while, and the
group of parameters that FSDP2 gathers for one.

nn.Module's public functions give copies (named_parameters) or run checks of their own (register_parameter);
torch.func.functional_call makes the call itself, where tpplan needs a context around one.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import stateless

from tpplan.torch_internals.groups import fake_group
from tpplan.torch_internals.probes import Probe

__all__ = [
    "COMPILED",
    "PROBES",
    "FSDPParamGroup",
    "end_of_backwards",
    "follows_statistics",
    "gathered",
    "group_of",
    "has_backward_hooks",
    "has_forward_hooks",
    "hooks_of",
    "is_compiled",
    "is_persistent",
    "own_buffers",
    "own_children",
    "own_parameters",
    "share_parameters",
    "tensors_in_place",
    "unit_name",
]


#: the name that the wrapper of torch.compile gives the module in it
COMPILED = "_orig_mod"


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own table of parameters, by attribute name; writing to the table replaces parameters."""
    found: dict[str, nn.Parameter | None] = module.__dict__["_parameters"]
    return found


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own table of buffers, by attribute name; writing to the table replaces buffers."""
    found: dict[str, Tensor | None] = module.__dict__["_buffers"]
    return found


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own table of submodules, by attribute name, in order; deleting an entry removes a submodule."""
    found: dict[str, nn.Module | None] = module.__dict__["_modules"]
    return found


def share_parameters(module: nn.Module, other: nn.Module) -> None:
    """Makes a module's own table of parameters that of another: what is put into one is in both."""
    module.__dict__["_parameters"] = own_parameters(other)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """True for a buffer that state_dict holds."""
    return buffer not in module._non_persistent_buffers_set


def follows_statistics(module: nn.Module) -> bool:
    """True for batch and instance norms, whose kernels write to running statistics without raising their version."""
    return isinstance(module, _NormBase)


def has_forward_hooks(module: nn.Module) -> bool:
    """True where hooks run before or after the module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """True where hooks see gradients of the module's inputs or outputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yields the hooks that see the module's arguments, outputs or their gradients."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
        yield from hooks.values()


def is_compiled(module: nn.Module) -> bool:
    """True after module.compile()."""
    return module._compiled_call_impl is not None


def tensors_in_place(module: nn.Module, tensors: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[object]:
    """A context in which the tensors replace the module's parameters and buffers of these names, and others tied to
    them."""
    # A module under several names gets its tensors once for each name; stack_weights restores them last in, first out.
    found: contextlib.AbstractContextManager[object] = stateless._reparametrize_module(
        module, dict(tensors), tie_weights=True, stack_weights=True
    )
    return found


# ---- FSDP2


def group_of(module: FSDPModule) -> FSDPParamGroup | None:
    """The parameter group that FSDP2 gathers for the module; None where the module has none of its own."""
    found: FSDPParamGroup | None = module._get_fsdp_state()._fsdp_param_group
    return found


def gathered(parameter: Any) -> nn.Parameter | None:
    """One of a group's parameters as FSDP2 gathers it; None where it has gathered none yet."""
    return parameter.unsharded_param if hasattr(parameter, "_unsharded_param") else None


def end_of_backwards(root: FSDPModule) -> None:
    """Lets FSDP2 end the running backward as one that reduces all that has accumulated, wherever it was computed."""
    root._get_fsdp_state()._register_root_post_backward_final_callback()  # type: ignore[no-untyped-call]


def forwards_remembered(root: FSDPModule) -> list[FSDPParamGroup]:
    """The groups of FSDP2's units whose forwards have ended, in order, since the last backward of a model has."""
    return [*getattr(root._get_fsdp_state()._comm_ctx, "post_forward_order", ())]  # there from the first forward on


def unit_of_group(group: FSDPParamGroup) -> FSDPModule:
    """The module that FSDP2 gathers the group for."""
    found: FSDPModule = group.modules[0]  # type: ignore[assignment]
    return found


def unit_name(group: FSDPParamGroup) -> str:
    """Name of the module that the group is gathered for; "" for the root."""
    return group._module_fqn or ""


# ---- probes


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)
        self.other.weight = self.one.weight
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("left", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.other(self.one(x))
        return found


def _tables() -> bool:
    module = _Tied()
    replaced = nn.Parameter(torch.ones(2, 2))
    share_parameters(module.other, module.one)
    own_parameters(module.one)["weight"] = replaced
    return (
        module.one.weight is module.other.weight is replaced
        and list(own_buffers(module)) == ["kept", "left"]
        and list(own_children(module)) == ["one", "other"]
        and is_persistent(module, "kept")
        and not is_persistent(module, "left")
        and follows_statistics(nn.BatchNorm1d(2))
    )


def _hooks() -> bool:
    module = _Tied()
    before = has_forward_hooks(module) or has_backward_hooks(module) or is_compiled(module)
    module.register_forward_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    return not before and has_forward_hooks(module) and has_backward_hooks(module) and len([*hooks_of(module)]) == 2


def _in_place() -> bool:
    module, other = _Tied(), torch.ones(2, 2, requires_grad=True)
    module.again = module.other  # a module under two names
    before = module.one.weight
    with tensors_in_place(module, {"one.weight": other}):
        during = module.one.weight is other and module.other.weight is other
    return during and module.one.weight is before and module.other.weight is before


def _class_changed() -> bool:
    """A module may change its class to a subclass made at run time, with a property in place of a parameter."""
    read: Callable[[Any], Any] = lambda self: 2 * self.__dict__["_parameters"]["weight"]  # noqa: E731
    make: Any = type(nn.Linear)
    generated: Any = make("Linear", (nn.Linear,), {"weight": property(read)})
    module = nn.Linear(2, 2, bias=False)
    x, names = torch.ones(1, 2), list(module.state_dict())
    expected = 2 * module(x)
    module.__class__ = generated
    return torch.equal(module(x), expected) and [name for name, _ in module.named_parameters()] == names


def _groups() -> bool:
    if torch.distributed.is_initialized():  # a rank of a real job, which cannot have a fake group
        return callable(FSDPModule._get_fsdp_state)
    with fake_group(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
        unit: Any = model[0]
        group = group_of(unit)
        return (
            isinstance(group, FSDPParamGroup)
            and len(group.fsdp_params) == 2
            and all(hasattr(parameter, "sharded_param") for parameter in group.fsdp_params)
            and isinstance(unit_name(group), str)
        )


def _remembered() -> bool:
    """Forwards are remembered in order until a backward ends."""
    if torch.distributed.is_initialized():
        return callable(FSDPModule._get_fsdp_state)
    with fake_group(2):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for unit in (*model, model):
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
        found = model(torch.ones(1, 4))
        units = [unit_of_group(group) for group in forwards_remembered(model)]
        found.sum().backward()
        return units == [*model] and not forwards_remembered(model)


def _ends() -> bool:
    """A gradient that came apart from a backward is reduced at the end of one that computes nothing."""
    if torch.distributed.is_initialized():
        return callable(FSDPModule._get_fsdp_state)
    with fake_group(2):
        model: Any = nn.Sequential(nn.Linear(4, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()
        weight = model[0].weight
        before = weight.grad
        model.set_requires_gradient_sync(True)
        nothing = torch.zeros(1, requires_grad=True)
        nothing.register_hook(lambda _: end_of_backwards(model))  # type: ignore[no-untyped-call]
        (2 * nothing).backward()  # type: ignore[no-untyped-call]
        return before is None and model[0].weight.grad is not None


PROBES = (
    Probe(
        name="tables of modules",
        uses="nn.Module._parameters, ._buffers, ._modules, ._non_persistent_buffers_set, batchnorm._NormBase",
        needed_for="laying parameters out and loading them",
        works=_tables,
    ),
    Probe(
        name="hooks of modules",
        uses="nn.Module._forward_hooks, ._backward_hooks, ._backward_pre_hooks, ._compiled_call_impl",
        needed_for="running modules whole whose hooks see arguments, outputs or gradients",
        works=_hooks,
    ),
    Probe(
        name="replaced tensors in a module",
        uses="torch.nn.utils.stateless._reparametrize_module",
        needed_for="tracing on tensors without memory, modules that run whole",
        works=_in_place,
    ),
    Probe(
        name="generated classes of modules",
        uses="assignment to module.__class__, properties in place of parameters",
        needed_for="plain local tensors inside a forward",
        works=_class_changed,
    ),
    Probe(
        name="FSDP2's memory of forwards",
        uses="FSDPState._comm_ctx, FSDPCommContext.post_forward_order, FSDPParamGroup.modules",
        needed_for="gathering ahead in the backwards of stages",
        works=_remembered,
    ),
    Probe(
        name="the end of FSDP2's backwards",
        uses="FSDPState._register_root_post_backward_final_callback",
        needed_for="zero-bubble schedules",
        works=_ends,
    ),
    Probe(
        name="FSDP2's groups of parameters",
        uses="FSDPModule._get_fsdp_state, FSDPState._fsdp_param_group, FSDPParamGroup._module_fqn",
        needed_for="`tpplan verify`, which says whose collective is which",
        works=_groups,
    ),
)
