"""Exporters: write a plan in another form. An exporter is a module in this folder with a function

    export(laid: LaidOut) -> str

The first line of the module's docstring says what it writes. The written text must compute the same as the plan; where
its form cannot express a part of the plan, export raises ExportError with the module's name.

In: a plan and the model it is for. Out: text, such as a PyTorch file that needs no tpplan.

Imports: apply, core, layouts, plan, search, torch_internals, trace, verify.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType

from torch import nn

from tpplan.core.errors import ExportError, UsageError
from tpplan.core.graph import Boundary, Direction, ModelGraph
from tpplan.core.layout import Layout
from tpplan.layouts.rules import Strategy
from tpplan.plan.plan import Plan
from tpplan.search.models.subject import BuildModel, ExampleInputs
from tpplan.search.models.trace_cache import Reuse
from tpplan.trace.trace import Loss
from tpplan.verify.prove_plan import prove_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A tensor that enters or leaves a module: its layout before (`source`) and after (`target`) the boundary."""

    path: str
    source: Layout
    target: Layout
    carries_gradient: bool

    @property
    def is_conversion(self) -> bool:
        """True where the layout changes."""
        return self.source != self.target


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A proven plan, its model on the meta device, the traced graph, and the graph's strategies by name.

    `prove` proves another plan for the same model, such as the one that a form carries out, or raises
    VerificationError.
    """

    plan: Plan
    model: nn.Module
    graph: ModelGraph
    strategies: Mapping[str, Strategy]
    prove: Callable[[Plan], object]

    @cached_property
    def crossings(self) -> dict[tuple[str, Direction], tuple[Crossing, ...]]:
        """The crossings by module and direction, in order; equal ones of several calls are listed once."""
        found: dict[tuple[str, Direction], dict[Crossing, None]] = {}
        for boundary in self.graph.boundaries:
            own = found.setdefault((boundary.module, boundary.direction), {})
            own.update((self.crossing(boundary, path), None) for _, _, path in boundary.places)
        return {place: tuple(crossings) for place, crossings in found.items()}

    def crossing(self, boundary: Boundary, path: str) -> Crossing:
        """Returns the layouts of the tensor before and after a boundary, as the argument or output at `path`."""
        strategy = self.strategies[boundary.name]
        return Crossing(
            path=path,
            source=strategy.operands[0],
            target=strategy.results[0],
            carries_gradient=self.graph.values[boundary.result].carries_gradient,
        )


def exporters() -> dict[str, str]:
    """Returns what each exporter writes, by the exporter's name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return {name: (_module(name).__doc__ or "").partition("\n")[0] for name in names}


def export(
    plan: Plan, build_model: BuildModel, example_inputs: ExampleInputs, *, loss: Loss | None = None, to: str = "pytorch"
) -> str:
    """Proves the plan for this model, and returns it in the form of the exporter `to`, as text.

    Raises UsageError for an unknown exporter, VerificationError for a plan that is wrong, and ExportError for a plan
    that the form cannot express.
    """
    form = to.replace("-", "_")
    if form not in exporters():
        raise UsageError(f"export to {to!r}: expected one of {', '.join(exporters())}")
    proves = partial(prove_plan, build_model=build_model, example_inputs=example_inputs, loss=loss, reuse=Reuse())
    proven = proves(plan)
    traced = proven.traced
    laid = LaidOut(
        plan=plan,
        model=traced.model,
        graph=traced.graph,
        strategies=proven.assignment.strategies,
        prove=partial(proves, is_as_solved=False),
    )
    if plan.buffers:
        raise ExportError(
            f"buffer {min(plan.buffer_plans())}: a module reads this rank's slice of it, which no other form than "
            "tpplan's own says: use apply_plan"
        )
    if plan.fsdp.over_tp:
        raise ExportError(
            f"FSDP unit {plan.fsdp.over_tp[0]}: it is sharded over the shard and tp axes together, which no other form "
            "than tpplan's own says: use apply_plan, or solve with --fsdp-over-tp no"
        )
    text: str = _module(form).export(laid)
    return text


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
