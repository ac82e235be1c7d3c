"""Whether a model is the one that a plan was made for, judged by its parameters: names, shapes and requires_grad."""

import hashlib
import json
from collections.abc import Mapping

from tpplan.core.errors import PlanMismatchError
from tpplan.plan.plan import Plan


def parameters_fingerprint(rows: Mapping[str, tuple[tuple[int, ...], bool]]) -> str:
    """sha256 of the sorted (name, shape, trainable) of all parameters."""
    text = json.dumps([[name, list(shape), trainable] for name, (shape, trainable) in sorted(rows.items())])
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def check_parameters(plan: Plan, rows: Mapping[str, tuple[tuple[int, ...], bool]]) -> None:
    """Compares the plan's parameters with a model's: {name: (shape, trainable)}, aliases included.

    Raises PlanMismatchError that lists missing and unknown names and differing shapes.
    """
    expected = {
        name: (parameter.shape, parameter.trainable)
        for canonical, parameter in plan.parameter_plans().items()
        for name in (canonical, *parameter.aliases)
    }
    differences = [f"{name}: in the plan, not in the model" for name in sorted(expected.keys() - rows.keys())]
    differences += [f"{name}: in the model, not in the plan" for name in sorted(rows.keys() - expected.keys())]
    for name in sorted(expected.keys() & rows.keys()):
        if expected[name][0] != tuple(rows[name][0]):
            differences.append(
                f"{name}: shape {list(expected[name][0])} in the plan, {list(rows[name][0])} in the model"
            )
        elif expected[name][1] != rows[name][1]:
            differences.append(f"{name}: trainable {expected[name][1]} in the plan, {rows[name][1]} in the model")
    if differences:
        shown = "\n  ".join(differences[:8]) + (f"\n  and {len(differences) - 8} more" if len(differences) > 8 else "")
        raise PlanMismatchError(
            f"the plan was made for another model; {len(differences)} parameters differ (solve again for this model, "
            f"or build the model that was planned):\n  {shown}"
        )
