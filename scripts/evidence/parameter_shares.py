"""Which parameters a plan shards, and what share of all elements that is."""

from torch import Tensor, nn

from tpplan.core.layout import LayoutKind
from tpplan.plan.plan import Plan


def names_by_parameter(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Each parameter once, with all its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return list(found.values())


def sharded_names(plan: Plan) -> dict[str, tuple[int | None, int]]:
    """Which dim of a parameter the plan shards, and in how many parts, by every name of those it shards: at rest, or as
    they are read where ranks share slices."""
    return {
        label: (layout.dim, len(layout.parts))
        for name, parameter in plan.parameter_plans().items()
        for layout in (parameter.placement, *(x for x in parameter.reads.values() if x.kind is LayoutKind.COPIED))
        if layout.dim is not None
        for label in (name, *parameter.aliases)
    }


def sharded_share(model: nn.Module, plan: Plan) -> float:
    """Of the elements of all parameters, what the plan shards."""
    sharded = sharded_names(plan)
    found = names_by_parameter(model)
    total = sum(parameter.numel() for parameter, _ in found)
    ours = sum(parameter.numel() for parameter, names in found if any(name in sharded for name in names))
    return ours / max(1, total)
