"""Plain PyTorch: a file of parallelize_module with torch's own styles and fully_shard, which needs no tpplan.

Modules pass plain local tensors in the planned layouts to each other. Only between a conversion to R* and the
column-parallel layers that read its result the tensor is a DTensor, so that the layers' gradients are summed once, in
the conversion. Modules that would read that DTensor beside other tensors, or whose code tpplan changes per rank, cannot
be expressed so. Such plans are written with the same cuts of weights, but with layouts that change at the cut layers
alone (tpplan.exporters._own_layers), and the file says so; where that is another model, they are refused.

Layers that are cut as a product is and are no nn.Linear, such as one whose weight has its dims in the other order, run
on DTensors: torch has no style of its own for them.
"""

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
from tpplan.exporters._own_layers import Style, at_own_layers, cut_products, owned_parameters
from tpplan.exporters._pytorch_file import Styles, file_text
from tpplan.plan.plan import ParameterPlan, Plan
from tpplan.torch_internals.modules import own_parameters

#: most layers that a file names
_SHOWN = 3


def export(laid: LaidOut) -> str:
    """Returns the text of a Python file with a function parallelize(model) that lays the model out."""
    if laid.plan.mesh.tp == 1:
        _refuse_own_code(laid.plan, {})
        return file_text(laid.plan, None)
    products = cut_products(laid)
    try:
        return file_text(laid.plan, _styles(laid, products))
    except ExportError as refused:
        try:
            return _with_whole_tensors(laid, products, _reason(refused))
        except ExportError as error:
            message = f"{_reason(refused)}; nor can a plan with whole tensors between layers be written: {error}"
            raise ExportError(message) from None


def _with_whole_tensors(laid: LaidOut, products: Mapping[str, Style], given_up: str) -> str:
    """The file with layouts that change at the cut layers alone; where code cannot read the slices of some layers
    then, these give whole outputs, and the file says that what follows them runs whole."""
    try:
        _, simpler = at_own_layers(laid, products=products)
    except ExportError:
        styles, simpler = at_own_layers(laid, gathers=True, products=products)
        gathered = [name for name, style in styles.items() if style is Style.COLUMNS_GATHERED]
        shown = ", ".join(gathered[:_SHOWN]) + (f" and {len(gathered) - _SHOWN} more" if len(gathered) > _SHOWN else "")
        given_up += f". Outputs of {shown} are gathered, and what reads them runs whole on every rank"
    return file_text(laid.plan, _styles(simpler, products), given_up=given_up)


def _reason(error: ExportError) -> str:
    return str(error).removesuffix(": use apply_plan")


def _styles(laid: LaidOut, products: Mapping[str, Style]) -> Styles:
    _refuse_own_code(laid.plan, products)
    return _StyleFinder(laid, products).styles()


def _refuse_own_code(plan: Plan, products: Mapping[str, Style]) -> None:
    """Raises ExportError for plans that need code of tpplan at run time. The code of `products` runs on DTensors."""
    if plan.untouched is not None:
        raise ExportError(
            f"parameters stay as they are ({plan.untouched}), which plain PyTorch has no style for: use apply_plan"
        )
    scalars = plan.scalars_beside_fsdp()
    if scalars:
        raise ExportError(
            f"{next(iter(scalars))}: a parameter without dims, which fully_shard cannot hold: give it one dim, or use "
            "apply_plan"
        )
    if "" in plan.recomputed_modules():
        raise ExportError(
            "the whole model is recomputed, and a wrapper around it would rename its parameters: solve with "
            "--no-recompute, or use apply_plan"
        )
    own = {
        "sizes in its code are replaced by a rank's own: write -1 there and solve again, or use apply_plan": {
            *(plan.size_plans().keys() - products.keys())
        },
        "its own forward has a cross entropy over a slice of the classes: move the loss out of the model and solve "
        "again, or use apply_plan": {*plan.sharded_losses()},
        "its own forward adds up bags of a rank's own rows of a table: use apply_plan": {*plan.row_bags()},
        "dropout runs on slices, and torch would draw the same mask on every rank: use apply_plan": {
            *plan.drawing_modules()
        },
        "it runs whole on every rank, on gathered weights: use apply_plan": {*plan.opaque_modules()},
    }
    for reason, modules in own.items() if plan.mesh.tp > 1 else ():
        if modules:
            raise ExportError(f"module {min(modules) or ROOT}: {reason}")


@dataclass
class _StyleFinder:
    """Finds the styles of a plan's modules, as Python text."""

    laid: LaidOut
    #: layers besides nn.Linear that are cut by columns or rows
    products: Mapping[str, Style]
    #: styles by module name
    entering: dict[str, str] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    #: modules whose layer style already converts their inputs, or their outputs
    with_inputs: set[str] = field(default_factory=set)
    with_outputs: set[str] = field(default_factory=set)
    #: column-parallel layers, and those of them whose input is a plain tensor
    columns: set[str] = field(default_factory=set)
    reading_plain: set[str] = field(default_factory=set)

    def styles(self) -> Styles:
        """Returns a style for each module that needs one. Raises ExportError where torch has no style."""
        self.columns = {name for name, module in self._owners() if self._is_column(name, module)}
        self._follow_dtensors()
        for name, module in self._owners():
            if not self._is_by_name_alone(name):
                self.layers[name] = self._style(name, module)
        for (name, direction), crossings in self.laid.crossings.items():
            if direction is Direction.INPUT and name not in self.with_inputs:
                self._enter(name, crossings)
            elif direction is Direction.OUTPUT and name not in self.with_outputs:
                self._leave(name, crossings)
        return Styles(entering=self.entering, layers=self.layers, leaving=self.leaving, ties=tuple(self._ties()))

    def _ties(self) -> Iterator[tuple[str, str]]:
        """Yields (name, other name) of parameters with several names; the first is one that a style lays out."""
        for canonical, parameter in self.laid.plan.parameter_plans().items():
            names = (canonical, *parameter.aliases)
            first = next((name for name in names if name.rpartition(".")[0] in self.layers), canonical)
            yield from ((first, name) for name in names if name != first)

    # Layers

    def _owners(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.laid.model.named_modules(remove_duplicate=False):
            if own_parameters(module):
                yield name, module

    @cached_property
    def _owned(self) -> dict[str, dict[str, ParameterPlan]]:
        """Parameters by owning module and attribute."""
        return owned_parameters(self.laid.plan)

    def _is_by_name_alone(self, name: str) -> bool:
        """True where another module has the same parameters and reads them, and this one does not."""
        return all(
            parameter.aliases and parameter.reads and name not in parameter.reads
            for parameter in self._owned[name].values()
        )

    def _is_column(self, name: str, module: nn.Module) -> bool:
        weight = self._owned[name].get("weight")
        is_linear = type(module) is nn.Linear and weight is not None and weight.placement == S(0)
        return is_linear or self.products.get(name) is Style.COLUMNS

    def _style(self, name: str, module: nn.Module) -> str:
        parameters = self._owned[name]
        for attribute, parameter in parameters.items():
            others = parameter.reads.keys() - {name, *_owners_of(parameter)}
            if others:
                raise ExportError(
                    f"parameter {name}.{attribute}: module {min(others) or ROOT} reads it too, and torch's styles "
                    "convert a weight for its own module only: use apply_plan"
                )
        if next(module.children(), None) is not None:
            raise ExportError(
                f"module {name or ROOT}: it has parameters of its own beside other modules, which torch's styles do "
                "not lay out: move them into a module, or use apply_plan"
            )
        if all(parameter.placement == R for parameter in parameters.values()):
            return self._replicated_style(name, parameters)
        if type(module) is nn.Linear or name in self.products:
            return self._column(name) if name in self.columns else self._row(name, parameters)
        if type(module) is nn.Embedding:
            return self._embedding(name, parameters["weight"].placement)
        raise ExportError(
            f"module {name or ROOT}: {type(module).__name__} with weights that are split: torch has styles for "
            "products with one weight and nn.Embedding only: use apply_plan"
        )

    def _replicated_style(self, name: str, parameters: Mapping[str, ParameterPlan]) -> str:
        reads = {layout for parameter in parameters.values() for layout in parameter.reads.values()}
        entering = [crossing.target for crossing in self._inputs(name)]
        layouts = {*entering, *(crossing.source for crossing in self._outputs(name))}
        if reads <= {R} and layouts <= {R}:
            return "OnDTensors()"
        is_summed = reads == {R_STAR} or not any(parameter.trainable for parameter in parameters.values())
        if is_summed and len(entering) == len(layouts) == 1 and (dim := entering[0].dim) is not None:
            return f"SequenceParallel(sequence_dim={dim}, use_local_output=True)"
        met = ", ".join(map(str, layouts)) or "nothing"
        raise ExportError(
            f"module {name or ROOT}: {_words(parameters)} meet {met}; torch's styles for replicated weights take whole "
            "inputs, or inputs and outputs that are slices of one dim: use apply_plan"
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
                raise ExportError(
                    f"module {name}: it reads an input in layout R* that no conversion makes, and torch's style would "
                    "not sum its gradient: use apply_plan"
                )
        if name in self.products:
            return self._on_dtensors(name, crossing.source, R)
        return _call("ColwiseParallel", crossing if crossing.is_conversion else None, self._output(name))

    def _row(self, name: str, parameters: Mapping[str, ParameterPlan]) -> str:
        (crossing,) = self._single(name, self._inputs(name))
        self.with_inputs.add(name)
        bias = parameters.get("bias")
        is_row = name in self.products or parameters["weight"].placement == S(1)
        is_row &= bias is None or {*bias.reads.values()} == {P}
        if not is_row or crossing.target.kind is not LayoutKind.SHARD or crossing.target.parts:
            raise self._no_words(name, crossing)
        if name in self.products:
            return self._on_dtensors(name, crossing.source, crossing.target)
        return _call("RowwiseParallel", crossing if crossing.is_conversion else None, self._output(name))

    def _on_dtensors(self, name: str, source: Layout, target: Layout) -> str:
        output = self._output(name)
        if output == R_STAR:
            raise self._no_words(name, self._outputs(name)[0])
        placed = {attribute: parameter.placement for attribute, parameter in self._owned[name].items()}
        weights = [f"{attribute}={_word(layout)}" for attribute, layout in placed.items() if layout != R]
        return f"OnDTensors({', '.join([*map(_word, (source, target, output)), *weights])})"

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
        """Returns the layout to which the layer's style converts its output."""
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
            raise ExportError(
                f"module {name or ROOT}: its calls convert inputs differently, and a style has one conversion: use "
                "apply_plan"
            )
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
            raise ExportError(
                f"outputs {', '.join(returned)} leave the model sharded: this form supports one output: use apply_plan"
            )
        if kept is None and not any(crossing.is_conversion for crossing in crossings):
            return
        (crossing,) = self._single(name, crossings)
        if crossing.path != "output" or crossing.source == R_STAR or crossing.target in (P, R_STAR, ROWS):
            raise self._no_words(name, crossing)
        layouts = f"{_word(crossing.source)}, {_word(crossing.target)}"
        self.leaving[name] = f"Leaving({layouts}, {kept is not None and kept != R})"

    def _follow_dtensors(self) -> None:
        """Follows the DTensors from conversions to R* through ops into column-parallel layers.

        Fills `reading_plain`. Raises ExportError for an op that would read such a DTensor beside plain tensors.
        """
        kept: set[str] = set()
        for node in self.laid.graph.nodes:
            if not isinstance(node, Boundary):
                if kept.isdisjoint(node.operands):
                    continue
                if not kept.issuperset(node.operands):
                    raise ExportError(
                        f"module {node.module or ROOT}: {node.target} reads a tensor in layout R* beside others; "
                        "torch's styles make it a DTensor, which cannot be mixed with plain tensors: use apply_plan"
                    )
                kept.update(node.results)
            elif node.module in self.columns and node.direction is Direction.INPUT:
                if node.operand not in kept:
                    self.reading_plain.add(node.module)
            elif (crossing := self.laid.crossing(node, node.path)).is_conversion and crossing.target == R_STAR:
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
            how = "several tensors enter or leave it, or its calls differ" if crossings else "it is not called"
            raise ExportError(f"module {name or ROOT}: {how}, and a style converts one tensor: use apply_plan")
        return crossings

    def _no_words(self, name: str, crossing: Crossing) -> ExportError:
        how = f"{crossing.source} -> {crossing.target}" if crossing.is_conversion else str(crossing.source)
        return ExportError(
            f"module {name or ROOT}, {crossing.path}: torch's styles have no words for {how} there: use apply_plan"
        )


def _owners_of(parameter: ParameterPlan) -> set[str]:
    """Returns the modules that own or read a parameter with several names; none for a parameter with one name."""
    return (
        {alias.rpartition(".")[0] for alias in parameter.aliases} | {*parameter.reads} if parameter.aliases else set()
    )


def _shards(layout: Layout) -> tuple[Layout, ...]:
    """Returns (layout,) where torch has a placement for it as a plain slice, else ()."""
    return (layout,) if layout.is_plain else ()


def _words(parameters: Mapping[str, ParameterPlan]) -> str:
    return ", ".join(
        f"{attribute} as {' and '.join(map(str, parameter.reads.values()))}"
        for attribute, parameter in parameters.items()
    )


def _word(layout: Layout) -> str:
    """Returns torch's placement for a layout, as Python text. Raises ExportError where torch has none."""
    match layout.kind:
        case LayoutKind.SHARD if layout.is_plain:
            return f"Shard({layout.dim})"
        case LayoutKind.PARTIAL:
            return "Partial()"
        case LayoutKind.REPLICATE:
            return "Replicate()"
        case _:
            raise ExportError(f"torch has no placement for {layout}: use apply_plan")


def _call(style: str, entering: Crossing | None, leaving: Layout) -> str:
    """Returns the call of a torch style, as Python text.

    `entering` is the conversion of the input, None where it arrives in the layout that the style takes by default.
    `leaving` is the layout of the output; for R* the output stays a DTensor.
    """
    words = [f"input_layouts={_word(entering.source)}"] if entering else []
    words += (
        ["output_layouts=Replicate()", "use_local_output=False"]
        if leaving == R_STAR
        else [f"output_layouts={_word(leaving)}"]
    )
    return f"{style}({', '.join(words)})"
