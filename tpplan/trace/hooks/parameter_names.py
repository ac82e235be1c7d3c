"""Which tensors are parameters of a model that is planned, wherever its code comes by them.

Applying a plan puts another tensor in the place of each parameter. Code that has kept the first one, in a closure or a
list, would go on with it; so in the copies that are traced other tensors stand already, and the first ones bear names.
"""

from torch import Tensor, nn

from tpplan.torch_internals.modules import own_parameters

#: where a parameter keeps its name in the model
_NAME = "_tpplan_name"


def register_names(model: nn.Module) -> None:
    """From now on each parameter knows its name."""
    for name, parameter in model.named_parameters():
        parameter.__dict__[_NAME] = name


def registered_name(tensor: Tensor) -> str | None:
    """The name that a tensor was registered by in a model where another stands in its place, or which was copied."""
    name: str | None = tensor.__dict__.get(_NAME)
    return name


def put_others(model: nn.Module) -> None:
    """Puts another in the place of each parameter, ties kept; those that were there are registered."""
    register_names(model)
    others: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parameters = own_parameters(module)
        for name, parameter in parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in others:
                other = others[id(parameter)] = type(parameter)(parameter.data, parameter.requires_grad)
                other.__dict__.update(parameter.__dict__)
                del other.__dict__[_NAME]
            parameters[name] = others[id(parameter)]
