"""named mesh axes per parameter as JSON, as GSPMD's, JAX's and TensorFlow DTensor's shardings take them

    {"mesh": {"replicate": 1, "shard": 2, "tp": 2},
     "inputs": [["replicate", "shard"]],
     "parameters": {"layers.0.up.weight": [["tp", "shard"], []]}}

`mesh` has the axes in the order of ranks, the last one innermost. A list has, for each dim of the tensor, the axes that
cut it, the outermost cut first: jax.sharding.PartitionSpec(*(tuple(axes) or None for axes in dims)). `inputs` are the
first dims of every input, its samples. The layouts say how weights rest; a compiler derives those of activations.
"""

import json
from math import prod

from tpplan.core.errors import ExportError
from tpplan.core.mesh import AXES, Axis
from tpplan.exporters import LaidOut
from tpplan.plan.plan import ParameterPlan, Plan, uses_fsdp


def export(laid: LaidOut) -> str:
    """Returns the axes of every parameter as JSON. Raises ExportError for a parameter that does not divide evenly."""
    return json.dumps(specs_of(laid.plan), indent=2) + "\n"


def specs_of(plan: Plan) -> dict[str, object]:
    """Returns the axes by which a plan cuts its parameters, axes of one rank included."""
    parameters = {
        label: _dims(plan, label, parameter)
        for name, parameter in plan.parameter_plans().items()
        for label in (name, *parameter.aliases)
    }
    mesh = {str(axis): plan.mesh.size(axis) for axis in AXES}
    return {"mesh": mesh, "inputs": [[str(Axis.REPLICATE), str(Axis.SHARD)]], "parameters": parameters}


def _dims(plan: Plan, name: str, parameter: ParameterPlan) -> list[list[str]]:
    """Returns the axes that cut each dim: tp where the plan says, then FSDP2's axis on dim 0 of what tp left."""
    dims: list[list[str]] = [[] for _ in parameter.shape]
    placement = parameter.placement
    if not placement.is_plain:
        raise ExportError(f"parameter {name} rests as {placement}, which named axes cannot say: use apply_plan")
    if placement.dim is not None:
        dims[placement.dim].append(str(Axis.TP))
    if dims and plan.untouched is None and uses_fsdp(plan.mesh, plan.precision):
        dims[0].append(str(Axis.SHARD))
    for dim, (axes, size) in enumerate(zip(dims, parameter.shape, strict=True)):
        ranks = prod(plan.mesh.size(Axis(axis)) for axis in axes)
        if size % ranks:
            raise ExportError(
                f"parameter {name}: dim {dim} of {size} does not divide by {ranks} ranks ({' x '.join(axes)}), and "
                "compilers cut evenly: pad it, or solve with other degrees"
            )
    return dims
