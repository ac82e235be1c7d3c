"""Plain PyTorch: a file of parallelize_module with torch's own styles and fully_shard, which needs no tpplan.

What torch's styles take and give is a plain tensor, laid out as the plan says. Between a conversion to R* and the
column-parallel layers that read it a DTensor goes, so that their gradients are summed once, in the conversion. What
else would meet that DTensor, or would need a rank's own code, has no words there and is refused.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from keyword import iskeyword

from torch import nn

from tpplan.core.errors import ExportError
from tpplan.core.graph import LEFT_AT, Boundary, Direction
from tpplan.core.layout import R_STAR, ROWS, Layout, LayoutKind, P, R, S
from tpplan.core.name_patterns import ROOT
from tpplan.exporters import Crossing, LaidOut
from tpplan.exporters._pytorch_file import Styles, file_text
from tpplan.plan.plan import ParameterPlan, Plan
from tpplan.torch_internals.modules import own_parameters


def export(laid: LaidOut) -> str:
    """The text of a Python file whose parallelize(model) lays the model out."""
    _refuse_own_code(laid.plan)
    return file_text(laid.plan, _Finder(laid).styles() if laid.plan.mesh.tp > 1 else None)


def _refuse_own_code(plan: Plan) -> None:
    """What tpplan runs in a module's place, and torch's styles do not."""
    if plan.untouched is not None:
        raise ExportError(f"parameters stay as they are ({plan.untouched}): there is nothing to write")
    scalars = plan.scalars_beside_fsdp()
    if scalars:
        raise ExportError(f"{next(iter(scalars))}: a parameter without dims, which fully_shard cannot hold")
    if "" in plan.recomputed_modules():
        raise ExportError("the whole model is recomputed: a wrapper around it would rename its parameters")
    own = {
        "sizes in its code are another layout's and are replaced: write -1 there, and solve again": {
            *plan.size_plans()
        },
        "its own forward has a cross entropy over a slice of the classes: take the loss out of it": {
            *plan.sharded_losses()
        },
        "dropout falls on slices, and torch would draw the same mask on every rank": {*plan.drawing_modules()},
        "it runs whole": {*plan.opaque_modules()},
    }
    for reason, modules in own.items() if plan.mesh.tp > 1 else ():
        if modules:
            raise ExportError(f"module {min(modules) or ROOT}: {reason}")


@dataclass
class _Finder:
    """Finds the styles of a plan's modules."""

    laid: LaidOut
    entering: dict[str, str] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    #: modules whose own conversions are in their style
    with_inputs: set[str] = field(default_factory=set)
    with_outputs: set[str] = field(default_factory=set)
    #: column-parallel layers, and those to which something else than a DTensor comes
    columns: set[str] = field(default_factory=set)
    reading_plain: set[str] = field(default_factory=set)

    def styles(self) -> Styles:
        """A style for each module that needs one. Raises ExportError for what torch has none."""
        self.columns = {name for name, module in self._owners() if self._is_column(name, module)}
        self._follow_kept()
        for name, module in self._owners():
            self.layers[name] = self._style(name, module)
        for (name, direction), crossings in self.laid.crossings.items():
            if direction is Direction.INPUT and name not in self.with_inputs:
                self._enter(name, crossings)
            elif direction is Direction.OUTPUT and name not in self.with_outputs:
                self._leave(name, crossings)
        plans = self.laid.plan.parameter_plans()
        ties = tuple((name, alias) for name, parameter in plans.items() for alias in parameter.aliases)
        return Styles(entering=self.entering, layers=self.layers, leaving=self.leaving, ties=ties)

    # Layers

    def _owners(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.laid.model.named_modules(remove_duplicate=False):
            if own_parameters(module):
                yield name, module

    @cached_property
    def _owned(self) -> dict[str, dict[str, ParameterPlan]]:
        """Parameters by the module that has them, and by attribute."""
        found: dict[str, dict[str, ParameterPlan]] = defaultdict(dict)
        for canonical, parameter in self.laid.plan.parameter_plans().items():
            for label in (canonical, *parameter.aliases):
                owner, _, attribute = label.rpartition(".")
                found[owner][attribute] = parameter
        return found

    def _is_column(self, name: str, module: nn.Module) -> bool:
        weight = self._owned[name].get("weight")
        return type(module) is nn.Linear and weight is not None and weight.placement == S(0)

    def _style(self, name: str, module: nn.Module) -> str:
        parameters = self._owned[name]
        for attribute, parameter in parameters.items():
            others = parameter.reads.keys() - {name, *_owners_of(parameter)}
            if others:
                raise ExportError(f"parameter {name}.{attribute}: module {min(others) or ROOT} reads it, too")
        if next(module.children(), None) is not None:
            raise ExportError(f"module {name or ROOT}: it has parameters of its own beside other modules")
        if all(parameter.placement == R for parameter in parameters.values()):
            return self._of_whole_weights(name, parameters)
        if type(module) is nn.Linear:
            return self._column(name) if name in self.columns else self._row(name, parameters)
        if type(module) is nn.Embedding:
            return self._embedding(name, parameters["weight"].placement)
        raise ExportError(
            f"module {name or ROOT}: {type(module).__name__} with weights that are split: torch has a style for "
            "nn.Linear and nn.Embedding alone"
        )

    def _of_whole_weights(self, name: str, parameters: Mapping[str, ParameterPlan]) -> str:
        reads = {layout for parameter in parameters.values() for layout in parameter.reads.values()}
        entering = [crossing.target for crossing in self._inputs(name)]
        layouts = {*entering, *(crossing.source for crossing in self._outputs(name))}
        if reads <= {R} and layouts <= {R}:
            return "OnWhole()"
        is_summed = reads == {R_STAR} or not any(parameter.trainable for parameter in parameters.values())
        if is_summed and len(entering) == len(layouts) == 1 and (dim := entering[0].dim) is not None:
            return f"SequenceParallel(sequence_dim={dim}, use_local_output=True)"
        met = ", ".join(map(str, layouts)) or "nothing"
        raise ExportError(
            f"module {name or ROOT}: {_words(parameters)} meet {met}; torch has a style for weights on the whole, and "
            "on slices of the one dim of the input and the output"
        )

    def _column(self, name: str) -> str:
        (crossing,) = self._single(name, self._inputs(name))
        self.with_inputs.add(name)
        if not crossing.carries_gradient and crossing.target != R:
            raise self._no_words(name, crossing)
        if crossing.carries_gradient:
            if crossing.target != R_STAR:
                raise self._no_words(name, crossing)
            if not crossing.is_conversion and name in self.reading_plain:
                raise ExportError(f"module {name}: it reads copies whose gradient is a summand, out of no conversion")
        return _call("ColwiseParallel", crossing if crossing.is_conversion else None, self._output(name))

    def _row(self, name: str, parameters: Mapping[str, ParameterPlan]) -> str:
        (crossing,) = self._single(name, self._inputs(name))
        self.with_inputs.add(name)
        bias = parameters.get("bias")
        is_row = parameters["weight"].placement == S(1) and (bias is None or {*bias.reads.values()} == {P})
        if not is_row or crossing.target.kind is not LayoutKind.SHARD or crossing.target.parts:
            raise self._no_words(name, crossing)
        return _call("RowwiseParallel", crossing if crossing.is_conversion else None, self._output(name))

    def _embedding(self, name: str, placement: Layout) -> str:
        (crossing,) = self._single(name, self._inputs(name))
        self.with_inputs.add(name)
        if placement == S(0) and crossing.target == ROWS:
            (leaving,) = self._single(name, self._outputs(name))
            if leaving.target not in (R, *_shards(leaving.target)):
                raise self._no_words(name, leaving)
            self.with_outputs.add(name)
            return _call("RowwiseParallel", crossing, leaving.target)
        if placement == S(1) and crossing.source == crossing.target == R:
            return _call("ColwiseParallel", None, self._output(name))
        raise self._no_words(name, crossing)

    def _output(self, name: str) -> Layout:
        """Where a layer's output goes: the style converts it."""
        (crossing,) = self._single(name, self._outputs(name))
        self.with_outputs.add(name)
        if crossing.is_conversion and crossing.target not in (R, R_STAR, *_shards(crossing.target)):
            raise self._no_words(name, crossing)
        return crossing.target

    # Conversions

    def _enter(self, name: str, crossings: tuple[Crossing, ...]) -> None:
        changed = {crossing.path: crossing for crossing in crossings if crossing.is_conversion}
        if not changed:
            return
        if len(changed) < sum(crossing.path in changed for crossing in crossings):
            raise ExportError(f"module {name or ROOT}: its calls are laid out in different ways")
        words = []
        for path, crossing in changed.items():
            if not path.isidentifier() or iskeyword(path) or crossing.source == R_STAR or crossing.target in (P, ROWS):
                raise self._no_words(name, crossing)
            is_kept = crossing.target == R_STAR
            layouts = f"{_word(crossing.source)}, {_word(R if is_kept else crossing.target)}"
            words.append(f"{path}=({layouts}, {is_kept})")
        self.entering[name] = f"Entering({', '.join(words)})"

    def _leave(self, name: str, crossings: tuple[Crossing, ...]) -> None:
        kept = self.laid.plan.outputs.get("output") if name == "" else None
        returned = [path for path in self.laid.plan.outputs if not path.startswith(LEFT_AT)]
        if not name and set(returned) - {"output"}:
            raise ExportError(f"outputs {', '.join(returned)} leave the model sharded: one can")
        if kept is None and not any(crossing.is_conversion for crossing in crossings):
            return
        (crossing,) = self._single(name, crossings)
        if crossing.path != "output" or crossing.source == R_STAR or crossing.target in (P, R_STAR, ROWS):
            raise self._no_words(name, crossing)
        layouts = f"{_word(crossing.source)}, {_word(crossing.target)}"
        self.leaving[name] = f"Leaving({layouts}, {kept is not None and kept != R})"

    def _follow_kept(self) -> None:
        """Follows what is a DTensor where it is read: from conversions to R* on, through what reads nothing else, into
        column-parallel layers. Raises ExportError where another reader would mix it with plain tensors."""
        kept: set[str] = set()
        for node in self.laid.graph.nodes:
            if not isinstance(node, Boundary):
                if kept.isdisjoint(node.operands):
                    continue
                if not kept.issuperset(node.operands):
                    raise ExportError(
                        f"module {node.module or ROOT}: {node.target} reads copies whose gradient is a summand beside "
                        "other tensors; torch's styles keep these as DTensors, and those are none"
                    )
                kept.update(node.results)
            elif node.module in self.columns and node.direction is Direction.INPUT:
                if node.operand not in kept:
                    self.reading_plain.add(node.module)
            elif (crossing := self.laid.crossing(node)).is_conversion and crossing.target == R_STAR:
                kept.add(node.result)
            elif node.operand in kept:
                if crossing.is_conversion or not node.module:
                    raise self._no_words(node.module, crossing)
                kept.add(node.result)

    # Small parts

    def _inputs(self, name: str) -> tuple[Crossing, ...]:
        return self.laid.crossings.get((name, Direction.INPUT), ())

    def _outputs(self, name: str) -> tuple[Crossing, ...]:
        return self.laid.crossings.get((name, Direction.OUTPUT), ())

    def _single(self, name: str, crossings: tuple[Crossing, ...]) -> tuple[Crossing, ...]:
        if len(crossings) != 1:
            how = "several tensors cross, or differently in its calls" if crossings else "it is not called"
            raise ExportError(f"module {name or ROOT}: {how}")
        return crossings

    def _no_words(self, name: str, crossing: Crossing) -> ExportError:
        how = f"{crossing.source} -> {crossing.target}" if crossing.is_conversion else str(crossing.source)
        return ExportError(f"module {name or ROOT}, {crossing.path}: torch's styles have no words for {how} there")


def _owners_of(parameter: ParameterPlan) -> set[str]:
    """Modules that have it under another name."""
    return (
        {alias.rpartition(".")[0] for alias in parameter.aliases} | {*parameter.reads} if parameter.aliases else set()
    )


def _shards(layout: Layout) -> tuple[Layout, ...]:
    """Itself where it is a slice that torch can say."""
    return (layout,) if layout.is_plain else ()


def _words(parameters: Mapping[str, ParameterPlan]) -> str:
    return ", ".join(
        f"{attribute} as {' and '.join(map(str, parameter.reads.values()))}"
        for attribute, parameter in parameters.items()
    )


def _word(layout: Layout) -> str:
    """torch's word for where a value is."""
    match layout.kind:
        case LayoutKind.SHARD if layout.is_plain:
            return f"Shard({layout.dim})"
        case LayoutKind.PARTIAL:
            return "Partial()"
        case LayoutKind.REPLICATE:
            return "Replicate()"
        case _:
            raise ExportError(f"torch has no placement for {layout}")


def _call(style: str, entering: Crossing | None, leaving: Layout) -> str:
    """A style of torch; by its default the input comes as the layer takes it, and what ColwiseParallel gives, or what
    RowwiseParallel sums, leaves as it is."""
    words = [f"input_layouts={_word(entering.source)}"] if entering else []
    words += (
        ["output_layouts=Replicate()", "use_local_output=False"]
        if leaving == R_STAR
        else [f"output_layouts={_word(leaving)}"]
    )
    return f"{style}({', '.join(words)})"
