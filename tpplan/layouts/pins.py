"""Pins: `model.layers.*.mlp=megatron` holds the modules of that name to a style, in the words in which a plan shows it.

A pattern is matched part by part, each as by fnmatch, so that `*` is one part: `layers.*.mlp` is every layer's own.
A style says how the parameters that run in a module are laid out; what it leaves open the solver decides:

| style | also written | what is held |
|---|---|---|
| column parallel | columns, column, colwise | each matrix is cut so that its output is: every input is read whole |
| row parallel | rows, row, rowwise | each matrix is cut where it is summed over: its output is a summand on a rank |
| megatron | | columns, then rows: rows are the module's last matrices, columns what leads to them |
| vocabulary parallel | vocabulary, vocab | each table is cut by rows, a rank looks up those that it has |
| replicated | replicate | every parameter is whole, and so is its gradient |
| on slices | slices | every parameter is whole, and meets slices of its input: its gradients are summands |
| sequence parallel | sequence | on slices, of the dim of the module's inputs before their last |
| split dim 0 | | each matrix is cut along this dim |

A style that cuts has nothing to cut on one rank: meshes with tp 1 do not keep it.
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
from tpplan.layouts.decision_space import EMBEDDING, reading_name
from tpplan.layouts.rules import Strategy
from tpplan.plan.styles import ALIASES, KNOWN_STYLES, Style

#: whether a strategy keeps a pin
Keeps = Callable[[Strategy], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Modules by pattern, and the style they are held to; `dim` is that of `split dim`."""

    pattern: str
    style: Style
    dim: int | None = None

    @property
    def style_text(self) -> str:
        """The style in words that parse_pin reads."""
        return f"{self.style} {self.dim}" if self.dim is not None else str(self.style)

    def __str__(self) -> str:
        return f"{self.pattern}={self.style_text}"

    def matches(self, module: str) -> bool:
        """True for a module of that name, part by part."""
        if self.pattern == ROOT:
            return module == ""
        parts, own = self.pattern.split("."), module.split(".")
        return len(parts) == len(own) and all(map(fnmatch.fnmatchcase, own, parts))


def parse_pin(pattern: str, style: str) -> Pin:
    """A pin from its two sides. Raises UsageError for an empty pattern and for an unknown style, with those known."""
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
    """Pins from {pattern: style}, as parse_pin reads them."""
    return tuple(parse_pin(pattern, style) for pattern, style in pins.items())


def split_pin(text: str) -> tuple[str, str]:
    """`PATTERN=STYLE` in two. Raises UsageError for anything else."""
    pattern, separator, style = text.rpartition("=")
    if not separator:
        raise UsageError(f"pin {text!r}: expected PATTERN=STYLE such as 'model.layers.*.mlp=megatron'")
    return pattern, style


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixOp:
    """An op that reads matrices: `positions` are theirs among its operands, `inputs` those of computed values."""

    op: Op
    positions: tuple[int, ...]
    inputs: tuple[int, ...]

    def style(self, strategy: Strategy) -> Style:
        """What a strategy makes of it: whole, by columns, by rows, by vocabulary, on slices, or split elsewise."""
        result = strategy.results[0]
        if result == ROWS:
            return Style.VOCABULARY
        if any(strategy.operands[i].dim is None for i in self.positions):
            is_slice = any(strategy.operands[i].dim is not None for i in self.inputs)
            return Style.SLICES if is_slice else Style.REPLICATED
        if result == P:
            return Style.ROW
        reads_whole = all(strategy.operands[i].is_whole for i in self.inputs)
        return Style.COLUMN if reads_whole and result.dim is not None else Style.SPLIT


def matrix_ops(graph: ModelGraph) -> dict[str, MatrixOp]:
    """By name, the ops that read a parameter of two dims or more that are longer than 1."""
    shapes = {source.result: graph.values[source.result].shape for source in graph.parameters}
    found = {}
    for op in graph.ops:
        positions = tuple(i for i, name in enumerate(op.operands) if sum(n > 1 for n in shapes.get(name, ())) > 1)
        if positions and op.results:
            inputs = tuple(i for i, name in enumerate(op.operands) if name not in shapes)
            found[op.name] = MatrixOp(op=op, positions=positions, inputs=inputs)
    return found


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """Pins on a graph: whether a decision may choose a strategy. Raises UsageError for a pin that holds nothing."""

    graph: ModelGraph
    pins: tuple[Pin, ...]

    def __post_init__(self) -> None:
        assert self.held is not None  # checks every pin

    def __call__(self, decision: str, strategy: Strategy) -> bool:
        return all(keeps(strategy) for _, keeps in self.held.get(decision, ()))

    def pins_of(self, decision: str) -> tuple[Pin, ...]:
        """The pins that a decision is held to."""
        return tuple(pin for pin, _ in self.held.get(decision, ()))

    def pins_within(self, module: str) -> tuple[Pin, ...]:
        """The pins that hold something in a module: like modules under unlike pins do not decide as one."""
        return tuple(pin for pin in self.pins if any(within(own, module) for own in self._modules_of(pin)))

    def _modules_of(self, pin: Pin) -> tuple[str, ...]:
        return tuple(module for module in self.modules if pin.matches(module))

    @cached_property
    def held(self) -> Mapping[str, tuple[tuple[Pin, Keeps], ...]]:
        """What each decision is held to, by pin."""
        found: dict[str, list[tuple[Pin, Keeps]]] = {}
        for pin in self.pins:
            modules = self._modules_of(pin)
            if not modules:
                raise UsageError(f"pin '{pin}': no module of that name runs{self._near(pin)}")
            rows = [row for module in modules for row in self._rows(pin, module)]
            if not rows:
                raise UsageError(f"pin '{pin}': {_WANTS[pin.style].format(modules[0] or ROOT)}")
            for decision, keeps in rows:
                found.setdefault(decision, []).append((pin, keeps))
        return {decision: tuple(rows) for decision, rows in found.items()}

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Every module that runs or owns a parameter that is read, and those around it, in order."""
        running = {node.module: None for node in self.graph.nodes}
        for source in self.graph.parameters:
            running |= {name.rpartition(".")[0]: None for name in (source.label, *source.aliases)}
        found: dict[str, None] = {"": None}
        for name in running:
            parts = name.split(".")
            found |= {".".join(parts[: i + 1]): None for i in range(len(parts))}
        return tuple(found)

    def _near(self, pin: Pin) -> str:
        """A pattern that is one of the names with numbers for `*`, or the like."""
        starred = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", module) for module in self.modules if module)
        near = difflib.get_close_matches(pin.pattern, starred, n=3, cutoff=0.5)
        return f"; near it: {', '.join(near)}" if near else ""

    @cached_property
    def matrices(self) -> Mapping[str, MatrixOp]:
        """The ops that read matrices, by name."""
        return matrix_ops(self.graph)

    @cached_property
    def sources(self) -> Mapping[str, Source]:
        """Parameters by the value they give."""
        return {source.result: source for source in self.graph.parameters}

    def _rows(self, pin: Pin, module: str) -> Iterator[tuple[str, Keeps]]:
        """(decision, what it is held to) of one pin in one module."""
        matrices = [matrix for matrix in self.matrices.values() if self._runs_in(matrix.op, module)]
        match pin.style:
            case Style.COLUMN | Style.ROW | Style.VOCABULARY:
                tables = [matrix for matrix in matrices if (matrix.op.target == EMBEDDING)]
                for matrix in tables if pin.style is Style.VOCABULARY else matrices:
                    yield matrix.op.name, _is_style(matrix, pin.style)
            case Style.MEGATRON:
                for matrix, style in self._pairs(module, matrices):
                    yield matrix.op.name, _is_style(matrix, style)
            case Style.SPLIT:
                for matrix in matrices:
                    for i in matrix.positions:
                        yield reading_name(matrix.op, i), lambda s: s.operands[0].dim == pin.dim
            case Style.REPLICATED:
                yield from ((name, _arrives_as(R)) for name, _ in self._readings(module))
            case Style.SLICES | Style.SEQUENCE:
                readings = dict(self._readings(module))
                yield from ((name, _arrives_as(R_STAR if s.trainable else R)) for name, s in readings.items())
                if readings and pin.style is Style.SEQUENCE:
                    yield from self._sliced_inputs(module)

    def _runs_in(self, op: Op, module: str) -> bool:
        """The op stands in the module, or around it and reads a parameter of it: `F.linear(x, self.head.weight)`."""
        if within(op.module, module):
            return True
        labels = [self.sources[name].label for name in op.operands if name in self.sources]
        return any(within(label, module) and within(module, op.module) for label in labels)

    def _readings(self, module: str) -> Iterator[tuple[str, Source]]:
        for op in self.graph.ops:
            for i, name in enumerate(op.operands):
                source = self.sources.get(name)
                if source is not None and (
                    within(op.module, module) or (within(source.label, module) and within(module, op.module))
                ):
                    yield reading_name(op, i), source

    def _sliced_inputs(self, module: str) -> Iterator[tuple[str, Keeps]]:
        """The module's inputs that carry a gradient and have a dim before their last: on slices of it."""
        for boundary in self.graph.boundaries:
            value = self.graph.values[boundary.operand]
            enters = boundary.module == module and boundary.direction is Direction.INPUT
            if enters and value.carries_gradient and len(value.shape) > 1:
                yield boundary.name, _arrives_as(S(len(value.shape) - 2))

    def _pairs(self, module: str, matrices: Iterable[MatrixOp]) -> Iterator[tuple[MatrixOp, Style]]:
        """Rows are the matrices past another one whose output leaves the module, on some way, with no further one;
        columns those from which some way leads straight to rows. What is further up, or beside, is left open."""
        by_name = {matrix.op.name: matrix for matrix in matrices}
        after = {name: self._next(by_name[name].op, by_name, module) for name in by_name}
        followers = {follower for nexts in after.values() for follower in nexts if follower is not None}
        rows = {name for name, nexts in after.items() if None in nexts and name in followers}
        for name, matrix in by_name.items():
            if name in rows:
                yield matrix, Style.ROW
            elif after[name] & rows:
                yield matrix, Style.COLUMN

    def _next(self, op: Op, matrices: Mapping[str, MatrixOp], module: str) -> set[str | None]:
        """The matrices that an op's results reach with no other between; None where they leave the module."""
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


def _arrives_as(layout: Layout) -> Keeps:
    return lambda strategy: strategy.results[0] == layout


def _is_style(matrix: MatrixOp, style: Style) -> Keeps:
    return lambda strategy: matrix.style(strategy) is style


_NO_MATRIX = "{} reads no matrix"
#: what a style finds nothing to hold for want of
_WANTS = {
    Style.COLUMN: _NO_MATRIX,
    Style.ROW: _NO_MATRIX,
    Style.SPLIT: _NO_MATRIX,
    Style.MEGATRON: "{} has no matrix whose output leads to another one before it leaves: no columns, then rows",
    Style.VOCABULARY: "{} looks nothing up in a table; a head's vocabulary is cut by 'columns'",
    Style.REPLICATED: "{} reads no parameter",
    Style.SLICES: "{} reads no parameter",
    Style.SEQUENCE: "{} reads no parameter",
}
