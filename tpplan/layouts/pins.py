"""Pins: `model.layers.*.mlp=megatron` restricts the modules of that name to a style, in the words of a plan's table.

A pattern is matched part by part with fnmatch, so `*` is one part: `layers.*.mlp` is the mlp of every layer. A style
says how parameters that are read in a module are sharded; the solver decides the rest:

| style | also written | what is fixed |
|---|---|---|
| column parallel | columns, column, colwise | each matrix is split by its output dim; every input is whole |
| row parallel | rows, row, rowwise | each matrix is split by the dim it sums over; its output is a summand |
| megatron | | columns, then rows: the module's last matrices by rows, those that lead to them by columns |
| vocabulary parallel | vocabulary, vocab | each table is split by rows; a rank looks up ids in its own rows |
| replicated | replicate | every parameter is whole, and so is its gradient |
| on slices | slices | every parameter is whole and meets slices of the input: its gradients are summands |
| sequence parallel | sequence | on slices, along the module inputs' second-to-last dim |
| split dim 0 | | each matrix is split along this dim |

A style that splits cannot be kept on one rank: meshes with tp 1 are left out.
"""

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tpplan.core.errors import UsageError
from tpplan.core.graph import Boundary, Direction, ModelGraph, Op, Source, within
from tpplan.core.layout import R_STAR, ROWS, Layout, P, R, S
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.readings import reading_name
from tpplan.layouts.rules import Strategy
from tpplan.layouts.rules.embedding import BAGS, EMBEDDING
from tpplan.plan.styles import ALIASES, KNOWN_STYLES, Style

#: True for a strategy that keeps a pin
Keeps = Callable[[Strategy], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A pattern of module names and the style of these modules; `dim` is set for `split dim` alone."""

    pattern: str
    style: Style
    dim: int | None = None

    @property
    def style_text(self) -> str:
        """The style as text that parse_pin reads."""
        return f"{self.style} {self.dim}" if self.dim is not None else str(self.style)

    def __str__(self) -> str:
        return f"{self.pattern}={self.style_text}"

    def matches(self, module: str) -> bool:
        """True where the pattern matches the module's name, part by part."""
        if self.pattern == ROOT:
            return module == ""
        parts, own = self.pattern.split("."), module.split(".")
        return len(parts) == len(own) and all(map(fnmatch.fnmatchcase, own, parts))


def parse_pin(pattern: str, style: str) -> Pin:
    """The pin for a pattern and a style. Raises UsageError for an empty pattern and for an unknown style."""
    text = " ".join(style.replace("-", " ").replace("_", " ").split()).lower()
    if not pattern:
        raise UsageError(f"pin '={style}': expected PATTERN=STYLE such as 'model.layers.*.mlp=megatron'")
    if (cut := re.fullmatch(rf"{Style.SPLIT} (\d+)", text)) is not None:
        return Pin(pattern=pattern, style=Style.SPLIT, dim=int(cut[1]))
    known = {str(own): own for own in Style if own is not Style.SPLIT} | ALIASES
    if text not in known:
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"pin '{pattern}={style}': unknown style {style!r}{hint} (known: {KNOWN_STYLES})")
    return Pin(pattern=pattern, style=known[text])


def parse_pins(pins: Mapping[str, str]) -> tuple[Pin, ...]:
    """The pins for {pattern: style}; see parse_pin."""
    return tuple(parse_pin(pattern, style) for pattern, style in pins.items())


def split_pin(text: str) -> tuple[str, str]:
    """(pattern, style) of `PATTERN=STYLE`. Raises UsageError for other text."""
    pattern, separator, style = text.rpartition("=")
    if not separator:
        raise UsageError(f"pin {text!r}: expected PATTERN=STYLE such as 'model.layers.*.mlp=megatron'")
    return pattern, style


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixOp:
    """An op that reads weight matrices; `positions` of the matrices, `inputs` of the computed tensors among its
    operands."""

    op: Op
    positions: tuple[int, ...]
    inputs: tuple[int, ...]

    def style(self, strategy: Strategy) -> Style:
        """The style of the op under a strategy."""
        result = strategy.results[0]
        if result == ROWS or (self.op.target == BAGS and result == P):
            return Style.VOCABULARY
        if any(strategy.operands[i].dim is None for i in self.positions):
            is_slice = any(strategy.operands[i].dim is not None for i in self.inputs)
            return Style.SLICES if is_slice else Style.REPLICATED
        if result == P:
            return Style.ROW
        reads_whole = all(strategy.operands[i].is_whole for i in self.inputs)
        return Style.COLUMN if reads_whole and result.dim is not None else Style.SPLIT


#: ops by which autocast reads a weight in another dtype
_CASTS = frozenset({"aten.to.dtype", "aten._to_copy.default"})


def matrix_ops(graph: ModelGraph) -> dict[str, MatrixOp]:
    """Op name -> the op, for ops that read a parameter with at least two dims longer than 1, or a cast of one."""
    shapes = {source.result: graph.values[source.result].shape for source in graph.parameters}
    found = {}
    for op in graph.ops:
        if op.target in _CASTS and op.operands[0] in shapes:
            shapes[op.results[0]] = shapes[op.operands[0]]
            continue
        positions = tuple(i for i, name in enumerate(op.operands) if sum(n > 1 for n in shapes.get(name, ())) > 1)
        if positions and op.results:
            inputs = tuple(i for i, name in enumerate(op.operands) if name not in shapes)
            found[op.name] = MatrixOp(op=op, positions=positions, inputs=inputs)
    return found


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """Pins on a graph: tells whether a decision may choose a strategy. Raises UsageError for a pin without effect, but
    on one of several stages (`is_stage`), where it may be of another's modules."""

    graph: ModelGraph
    pins: tuple[Pin, ...]
    is_stage: bool = False

    def __post_init__(self) -> None:
        assert self.held is not None  # computing it checks every pin

    def __call__(self, decision: str, strategy: Strategy) -> bool:
        return all(keeps(strategy) for _, keeps in self.held.get(decision, ()))

    def pins_of(self, decision: str) -> tuple[Pin, ...]:
        """The pins that restrict a decision."""
        return tuple(pin for pin, _ in self.held.get(decision, ()))

    def pins_within(self, module: str) -> tuple[Pin, ...]:
        """The pins that restrict something in a module. Repeated blocks with different pins do not share decisions."""
        return tuple(pin for pin in self.pins if any(within(own, module) for own in self._modules_of(pin)))

    def _modules_of(self, pin: Pin) -> tuple[str, ...]:
        return tuple(module for module in self.modules if pin.matches(module))

    @cached_property
    def held(self) -> Mapping[str, tuple[tuple[Pin, Keeps], ...]]:
        """Decision -> its pins, each with the test that a strategy must pass."""
        found: dict[str, list[tuple[Pin, Keeps]]] = {}
        for pin in self.pins:
            modules = self._modules_of(pin)
            if not modules and not self.is_stage:
                raise UsageError(f"pin '{pin}': no module of that name runs in the model's forward{self._near(pin)}")
            rows = [row for module in modules for row in self._restrictions(pin, module)]
            if not rows and not self.is_stage:
                raise UsageError(f"pin '{pin}': {_WITHOUT_EFFECT[pin.style].format(modules[0] or ROOT)}")
            for decision, keeps in rows:
                found.setdefault(decision, []).append((pin, keeps))
        return {decision: tuple(rows) for decision, rows in found.items()}

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Names of all modules that run or own a parameter that is read, and of the modules around them, in order."""
        running = {node.module: None for node in self.graph.nodes}
        for source in self.graph.parameters:
            running |= {name.rpartition(".")[0]: None for name in (source.label, *source.aliases)}
        found: dict[str, None] = {"": None}
        for name in running:
            parts = name.split(".")
            found |= {".".join(parts[: i + 1]): None for i in range(len(parts))}
        return tuple(found)

    def _near(self, pin: Pin) -> str:
        """Module patterns that are spelled like the pin's, as text for an error message."""
        starred = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", module) for module in self.modules if module)
        near = difflib.get_close_matches(pin.pattern, starred, n=3, cutoff=0.5)
        return f"; did you mean {' or '.join(near)}?" if near else ""

    @cached_property
    def matrices(self) -> Mapping[str, MatrixOp]:
        """Op name -> the op, for ops that read weight matrices."""
        return matrix_ops(self.graph)

    @cached_property
    def sources(self) -> Mapping[str, Source]:
        """Value name -> the parameter that gives it."""
        return {source.result: source for source in self.graph.parameters}

    def _restrictions(self, pin: Pin, module: str) -> Iterator[tuple[str, Keeps]]:
        """Yields (decision, test that its strategy must pass) of one pin in one module."""
        matrices = [matrix for matrix in self.matrices.values() if self._runs_in(matrix.op, module)]
        match pin.style:
            case Style.COLUMN | Style.ROW | Style.VOCABULARY:
                tables = [matrix for matrix in matrices if matrix.op.target in (BAGS, EMBEDDING)]
                for matrix in tables if pin.style is Style.VOCABULARY else matrices:
                    yield matrix.op.name, _is_style(matrix, pin.style)
            case Style.MEGATRON:
                for matrix, style in self._megatron_styles(module, matrices):
                    yield matrix.op.name, _is_style(matrix, style)
            case Style.SPLIT:
                for matrix in matrices:
                    for i in matrix.positions:
                        yield self._reading_of(matrix.op, i), lambda s: s.operands[0].dim == pin.dim
            case Style.REPLICATED:
                yield from ((name, _reads_as(R)) for name, _ in self._readings(module))
            case Style.SLICES | Style.SEQUENCE:
                readings = dict(self._readings(module))
                yield from ((name, _reads_as(R_STAR if s.trainable else R)) for name, s in readings.items())
                if readings and pin.style is Style.SEQUENCE:
                    yield from self._sliced_inputs(module)

    def _runs_in(self, op: Op, module: str) -> bool:
        """True where the op runs in the module, or around it on its parameter: `F.linear(x, self.head.weight)`."""
        if within(op.module, module):
            return True
        labels = [self.sources[name].label for name in op.operands if name in self.sources]
        return any(within(label, module) and within(module, op.module) for label in labels)

    def _reading_of(self, op: Op, position: int) -> str:
        """The decision that reads the weight which the op has as its operand, or has a cast of."""
        cast = self.graph.producers.get(op.operands[position])
        return reading_name(cast, 0) if isinstance(cast, Op) else reading_name(op, position)

    def _readings(self, module: str) -> Iterator[tuple[str, Source]]:
        for op in self.graph.ops:
            for i, name in enumerate(op.operands):
                source = self.sources.get(name)
                if source is not None and (
                    within(op.module, module) or (within(source.label, module) and within(module, op.module))
                ):
                    yield reading_name(op, i), source

    def _sliced_inputs(self, module: str) -> Iterator[tuple[str, Keeps]]:
        """Yields the tests that shard the module's inputs with a gradient along their second-to-last dim."""
        for boundary in self.graph.boundaries:
            value = self.graph.values[boundary.operand]
            enters = boundary.module == module and boundary.direction is Direction.INPUT
            if enters and value.carries_gradient and len(value.shape) > 1:
                yield boundary.name, _reads_as(S(len(value.shape) - 2))

    def _megatron_styles(self, module: str, matrices: Iterable[MatrixOp]) -> Iterator[tuple[MatrixOp, Style]]:
        """Yields (matrix, row or column) for the megatron style.

        Row parallel: matrices that follow another matrix and from which some path leaves the module without meeting a
        further matrix. Column parallel: matrices with a path to a row-parallel one without another between. All others
        are left open.
        """
        by_name = {matrix.op.name: matrix for matrix in matrices}
        after = {name: self._next_matrices(by_name[name].op, by_name, module) for name in by_name}
        followers = {follower for nexts in after.values() for follower in nexts if follower is not None}
        rows = {name for name, nexts in after.items() if None in nexts and name in followers}
        for name, matrix in by_name.items():
            if name in rows:
                yield matrix, Style.ROW
            elif after[name] & rows:
                yield matrix, Style.COLUMN

    def _next_matrices(self, op: Op, matrices: Mapping[str, MatrixOp], module: str) -> set[str | None]:
        """Names of the matrices that an op's results reach with no other between; None for leaving the module."""
        found: set[str | None] = set()
        seen: set[str] = set()
        waiting = list(op.results)
        while waiting:
            value = waiting.pop()
            if value in seen or not self.graph.values[value].carries_gradient:
                continue
            seen.add(value)
            for node in self.graph.consumers.get(value, ()):
                if node.name in matrices:
                    found.add(node.name)
                elif not within(node.module, module) or _leaves(node, module):
                    found.add(None)
                else:
                    waiting += node.results
        return found


def _leaves(node: Op | Boundary, module: str) -> bool:
    return isinstance(node, Boundary) and node.module == module and node.direction is Direction.OUTPUT


def _reads_as(layout: Layout) -> Keeps:
    return lambda strategy: strategy.results[0] == layout


def _is_style(matrix: MatrixOp, style: Style) -> Keeps:
    return lambda strategy: matrix.style(strategy) is style


_NO_MATRIX = "{} reads no matrix"
#: why a style has no effect on a module
_WITHOUT_EFFECT = {
    Style.COLUMN: _NO_MATRIX,
    Style.ROW: _NO_MATRIX,
    Style.SPLIT: _NO_MATRIX,
    Style.MEGATRON: "{} has no two matrices in a row: megatron needs one by columns, then one by rows",
    Style.VOCABULARY: "{} has no embedding lookup; pin an output head with 'columns' to split its vocabulary",
    Style.REPLICATED: "{} reads no parameter",
    Style.SLICES: "{} reads no parameter",
    Style.SEQUENCE: "{} reads no parameter",
}
