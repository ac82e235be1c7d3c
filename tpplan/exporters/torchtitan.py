"""a parallelize function for torchtitan's model spec, of torchtitan 0.3

    spec = dataclasses.replace(spec, parallelize_fn=parallelize_for_torchtitan)

The file is that of `--to pytorch`, with a function behind it that torchtitan calls. It refuses a run whose settings are
not the plan's: degrees, precision, and what the plan decides itself. torchtitan divides the loss by the tokens of all
ranks, and so has gradients summed where FSDP2 would average them; the function tells FSDP2 so.

torchtitan gives the model memory after this function, and makes new parameters then. What does not outlive that is
refused: tied parameters, and hooks on parameters.
"""

import re

from tpplan.core.errors import ExportError
from tpplan.exporters import LaidOut, pytorch
from tpplan.plan.plan import Precision

#: what torchtitan's training.mixed_precision_param is to say
_PRECISIONS = {Precision.FP32: "float32", Precision.BF16_MIXED: "bfloat16"}

_FUNCTION = '''

def parallelize_for_torchtitan(
    model: nn.Module, *, parallel_dims, training, parallelism, compile_config, ac_config, dump_folder
) -> nn.Module:
    """Lays the model out as planned. Raises ValueError where the run is not the one that was planned."""
    degrees = {degrees}
    found = {{name: getattr(parallel_dims, name) for name in degrees}}
    if found != degrees:
        raise ValueError(f"this plan is for {{degrees}}, the run has {{found}}: set these degrees")
    if training.mixed_precision_param != "{precision}":
        raise ValueError('this plan was priced and proven with training.mixed_precision_param "{precision}"')
    if ac_config is not None:
        raise ValueError("the plan says what is recomputed: leave activation_checkpoint out")
    if compile_config.enable and "model" in compile_config.components:
        raise ValueError("this function compiles nothing: leave the model out of compile.components")
    if training.enable_cpu_offload:
        raise ValueError("this plan keeps everything on the GPU: leave training.enable_cpu_offload out")
    device_type = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    model = parallelize(model, device_type)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all ranks
            module.set_force_sum_reduction_for_comms(device_type != "cuda")  # others cannot scale while they reduce
    return model
'''


def export(laid: LaidOut) -> str:
    """Returns the text of a Python file with a function parallelize_for_torchtitan. Raises ExportError for a plan that
    plain PyTorch has no styles for, or that torchtitan would not train as planned."""
    plan = laid.plan
    if plan.precision not in _PRECISIONS:
        raise ExportError(f"precision {plan.precision}: torchtitan's own is fp32 or bf16-mixed: use apply_plan")
    aliases = {name: own.aliases[0] for name, own in plan.parameter_plans().items() if own.aliases}
    for name, alias in aliases.items():
        raise ExportError(
            f"{name} is also {alias}: torchtitan gives the model memory after it is laid out, which unties them: use "
            "apply_plan"
        )
    text = pytorch.export(laid)
    if re.search(r"^    sum_gradients\(", text, re.MULTILINE):
        raise ExportError(
            "norms run on slices of the sequence without FSDP, and torchtitan would drop the hooks that sum their "
            "gradients: pin them replicated and solve again, or use apply_plan"
        )
    if "loss_parallel()" in text:
        raise ExportError(
            "the model's output is split by classes, and torchtitan's losses take it whole: pin the head as replicated "
            "and solve again, or use apply_plan"
        )
    return _with_imports(text) + _FUNCTION.format(degrees=_degrees(laid), precision=_PRECISIONS[plan.precision])


def _degrees(laid: LaidOut) -> str:
    mesh = laid.plan.mesh
    wanted = {"dp_replicate": mesh.replicate, "dp_shard": mesh.shard, "tp": mesh.tp, "cp": 1, "pp": 1, "ep": 1}
    return repr(wanted).replace("'", '"')


def _with_imports(text: str) -> str:
    """Returns the text with imports of torch and FSDPModule where they were missing."""
    name = "from torch.distributed.fsdp import FSDPModule"
    lines = text.split("\n")
    first = next(i for i, line in enumerate(lines) if re.match(r"(import|from) ", line))
    missing = [line for line in ("import torch", name) if line not in lines]
    return "\n".join([*lines[:first], *missing, *lines[first:]])
