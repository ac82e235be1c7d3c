"""a tp_plan dict as JSON, style by module name, which transformers, DeepSpeed's AutoTP and vLLM read

The dict says how tensor parallelism cuts each layer. Degrees of data parallelism, precision and recomputation are the
training script's. Layouts change at the cut layers alone (tpplan.exporters._own_layers).
"""

import json
import re
from collections.abc import Mapping

from tpplan.core.errors import ExportError
from tpplan.exporters import LaidOut
from tpplan.exporters._own_layers import Style, at_own_layers


def export(laid: LaidOut) -> str:
    """Returns the dict as JSON. Raises ExportError for a plan that it cannot say."""
    if laid.plan.mesh.tp == 1:
        raise ExportError("the plan has one tensor-parallel rank, and a tp_plan would say nothing: solve with --tp N")
    styles, _ = at_own_layers(laid)
    return json.dumps(by_pattern(styles), indent=2) + "\n"


def by_pattern(styles: Mapping[str, Style]) -> dict[str, str]:
    """Returns the style by name with `*` for every layer number. Raises ExportError where like layers differ."""
    found: dict[str, tuple[str, Style]] = {}
    for name, style in styles.items():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        first, same = found.setdefault(pattern, (name, style))
        if same is not style:
            raise ExportError(
                f"{first} is {same} and {name} is {style}: a tp_plan has one style for all of {pattern}; pin them "
                "alike and solve again, or use apply_plan"
            )
    return {pattern: str(style) for pattern, (_, style) in found.items()}
