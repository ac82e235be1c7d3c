"""Recognizes parameters of a planned model that its code has kept elsewhere, in a closure or a list.

Applying a plan replaces each parameter by another tensor, but such code would go on with the old one. So in the copies
that are traced parameters are replaced too, and the old ones know the name they had.
"""

from torch import Tensor, nn

from tpplan.torch_internals.modules import own_parameters

#: the attribute in which a parameter keeps its name
_NAME = "_tpplan_name"


def register_names(model: nn.Module) -> None:
    """Writes each parameter's name in the model to the parameter."""
    for name, parameter in model.named_parameters():
        parameter.__dict__[_NAME] = name


def registered_name(tensor: Tensor) -> str | None:
    """The name of a parameter that was replaced or whose model was copied; None for any other tensor."""
    name: str | None = tensor.__dict__.get(_NAME)
    return name


def put_others(model: nn.Module) -> None:
    """Replaces each parameter by a new one on the same data, ties kept; the old ones get their names."""
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
