"""Finds modules and parameters by a plan's names, and checks that a plan can be applied to a model."""

from torch import nn

from tpplan.apply.parallel_style import module_styles
from tpplan.apply.recompute import check_recomputable
from tpplan.core.errors import PlanError, PlanMismatchError, UsageError
from tpplan.core.graph import within
from tpplan.core.name_patterns import ROOT
from tpplan.experts.expert_share import whole_shape
from tpplan.plan.model_fingerprint import check_parameters
from tpplan.plan.plan import Plan, Precision, uses_fsdp
from tpplan.torch_internals.modules import COMPILED
from tpplan.torch_internals.tensors import accumulated_hooks, gradient_hooks

#: parts that checkpoint and compile wrappers add to module names; state_dict and plans leave them out
_WRAPPER_NAMES = ("_checkpoint_wrapped_module", COMPILED)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Returns modules by their names in a plan. Where a wrapper and its module share a name, the wrapped module."""
    return {plan_name(name): module for name, module in model.named_modules(remove_duplicate=False)}


def outermost_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Returns modules by their names in a plan. Where a wrapper and its module share a name, the wrapper."""
    named = reversed(list(model.named_modules(remove_duplicate=False)))
    return {plan_name(name): module for name, module in named}


def plan_name(name: str) -> str:
    """Returns a module's or parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def module_called(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """Returns the module of that name. Raises PlanMismatchError where the model has none."""
    if name not in modules:
        raise PlanMismatchError(
            f"the plan names module {name!r}, which the model does not have: apply it to the model that it was made "
            "for, or solve again for this one"
        )
    return modules[name]


def check_model(model: nn.Module, plan: Plan) -> None:
    """Raises PlanMismatchError, PlanError or UsageError for a model that the plan cannot be applied to."""
    check_parameters(
        plan,
        {
            plan_name(name): (whole_shape(model, name, parameter), parameter.requires_grad)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        },
    )
    _check_ties(model, plan)
    if plan.untouched is not None:
        if plan.mesh.shard > 1 or plan.precision is Precision.BF16_MIXED:
            raise PlanError(
                f"parameters that stay as they are cannot be sharded or cast, and the plan is for {plan.mesh} in "
                f"{plan.precision}: solve again",
                plan_path="untouched",
            )
        return
    _check_hooks(model, plan)
    modules = modules_by_name(model)
    for name, style in module_styles(plan).items():
        style.check(module_called(modules, name))
    rewritten = *plan.size_plans(), *plan.sharded_losses(), *plan.row_bags(), *plan.drawing_modules()
    for name in (*rewritten, *plan.opaque_modules()):
        module_called(modules, name)
    wrapped = {plan_name(name) for name, _ in model.named_modules() if name.endswith(_WRAPPER_NAMES[0])}
    for name in plan.recomputed_modules():
        check_recomputable(module_called(modules, name), name)
        if name in wrapped:
            raise UsageError(
                "the module is in a checkpoint wrapper already, and the plan recomputes it: remove the wrapper",
                plan_path=f"recompute.{name or ROOT}",
            )
    for name in plan.fsdp_units():
        module_called(modules, name)


def check_filled(model: nn.Module, plan: Plan) -> None:
    """Raises UsageError for a parameter on the meta device in a model that the plan leaves as it is (`untouched`)."""
    if plan.untouched is None:
        return
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"parameter {name} is on the meta device, and filling it would replace it by another parameter, which "
                f"this plan does not allow: {plan.untouched}; build the model on its device"
            )


def _check_hooks(model: nn.Module, plan: Plan) -> None:
    """Raises PlanMismatchError for a hook on a gradient that would be lost when its parameter is replaced by a DTensor.

    A plan made for a model with such hooks lists the modules around them as running whole, which keep their hooks. On
    data-parallel ranks it is refused too, as it would see each rank's own gradient.
    """
    if plan.mesh.tp == 1 and not uses_fsdp(plan.mesh, plan.precision):
        return
    named = list(model.named_parameters(remove_duplicate=False))
    kept = {
        id(parameter)
        for name, parameter in named
        if any(within(plan_name(name), module) for module in plan.opaque_modules())
    }
    for name, parameter in named:
        is_kept = id(parameter) in kept
        kinds = {
            "its accumulated gradient": accumulated_hooks(parameter),
            "its gradient": gradient_hooks(parameter) if not is_kept else None,
        }
        if is_kept and gradient_hooks(parameter) and plan.mesh.data_parallel > 1:
            raise PlanMismatchError(
                f"parameter {name} has a hook on its gradient (register_hook), which on {plan.mesh.data_parallel} "
                "data-parallel ranks would see each rank's own gradient: call register_post_accumulate_grad_hook after "
                "apply_plan instead, or solve for the model that has the hook"
            )
        if what := next((what for what, hooks in kinds.items() if hooks), ""):
            raise PlanMismatchError(
                f"parameter {name} has a hook on {what}, which would stay behind on the old parameter: register it "
                "after apply_plan, or solve for the model that has the hook"
            )


def _check_ties(model: nn.Module, plan: Plan) -> None:
    """Raises PlanMismatchError unless the plan and the model tie the same names to one parameter."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(plan_name(name))
    found = {frozenset(group) for group in names.values()}
    planned = {frozenset((name, *parameter.aliases)) for name, parameter in plan.parameter_plans().items()}
    for groups, others, there, here in ((found, planned, "model", "plan"), (planned, found, "plan", "model")):
        for group in groups - others:
            if len(group) > 1:
                raise PlanMismatchError(
                    f"{', '.join(sorted(group))} are one parameter in the {there} and not in the {here}: tie them alike"
                )
