"""ModelGraph: the traced model as frozen data, without torch.

A graph is a list of nodes in execution order over named values. A value that is a view names the value whose storage it
shares. Every tensor that crosses into or out of a module's forward is a Boundary node; a layout changes only at such a
node.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TypeVar, cast

from tpplan.core.layout import Layout, LayoutKind, fits
from tpplan.core.units import DTYPE_BYTES

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ref:
    """A value that is used as an argument of an op; other arguments are literals."""

    name: str


#: an argument of an op: a reference, a literal, or nested tuples of them; dtypes and devices are text
#: ("dtype:bfloat16")
Argument = Ref | None | bool | int | float | str | tuple["Argument", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor. `carries_gradient`: a gradient is computed for the tensor. `storage`: the value whose storage it
    shares, or its own name. `varying`: dims whose size depends on data and may differ at another step. `is_read`:
    whether anything that the step returns or writes is computed from the tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    carries_gradient: bool
    storage: str
    varying: tuple[int, ...] = ()
    is_read: bool = True

    def can_be(self, layout: Layout, tp: int) -> bool:
        """True where tp ranks can hold the value in this layout at every size that its varying dims may take."""
        cut = () if layout.dim is None else range(layout.dim, layout.dim + (layout.kind is LayoutKind.JOINT) + 1)
        return fits(self.shape, layout, tp) and not any(dim in cut for dim in self.varying)

    def of_shape(self, shape: tuple[int, ...]) -> "Value":
        """The tensor with another shape; dataclasses.replace would take three times as long."""
        return Value(
            name=self.name,
            shape=shape,
            dtype=self.dtype,
            carries_gradient=self.carries_gradient,
            storage=self.storage,
            varying=self.varying,
            is_read=self.is_read,
        )

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole value."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole value."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


#: the module name of ops that the user's loss function runs
LOSS_SCOPE = "<loss>"
#: the module name of ops that an applied plan adds
OWN_SCOPE = "<tpplan>"
#: prefix of an output's path where forward stores the tensor outside instead of returning it (tpplan.trace.left_behind)
LEFT_AT = "left at "
#: separates the paths of arguments that are one tensor
SAME_TENSOR = " = "
#: op that marks the reading of a parameter that is passed to a module, or out of one
ALIAS = "aten.alias.default"


class SourceKind(StrEnum):
    """The kinds of values that no op computes."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"


#: the answer to a question of code that runs whole about values which training alone has
AS_IF_EVEN = "decided in training, and planned as if each were chosen as often"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An input, parameter, buffer or constant. `label` is the parameter's name or the input's path. A tied weight or a
    shared buffer is one source, whose other names are `aliases`. `ep` is the number of ranks among which the experts of
    a weight are divided along dim 0 (tpplan.experts); the value's shape is then that of one rank's experts."""

    kind: SourceKind
    result: str
    label: str
    aliases: tuple[str, ...] = ()
    trainable: bool = False
    ep: int = 1


@dataclass(frozen=True, kw_only=True)
class Op:
    """A call of an operator, such as `aten.linear.default`, in the forward of `module` ("" for the root).

    `is_pointwise`: torch says that an element of a result depends on the operands' elements at its own place alone.
    """

    name: str
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    results: tuple[str, ...]
    module: str
    is_pointwise: bool = False

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensors that the op reads, in argument order; a tensor that is read twice is listed twice."""
        found: list[str] = []
        for argument in (*self.args, *(value for _, value in self.kwargs)):
            if isinstance(argument, Ref):
                found.append(argument.name)
            elif isinstance(argument, tuple):
                found += references(argument)
        return tuple(found)


class Direction(StrEnum):
    """The direction in which a tensor crosses a module's boundary."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A tensor that crosses into or out of `module`; `path` is its argument or output ("0", "mask", "1.0").

    A tensor that one call is given as several arguments crosses once; `path` then joins theirs ("query = key").
    """

    name: str
    module: str
    direction: Direction
    path: str
    operand: str
    result: str

    @property
    def operands(self) -> tuple[str, ...]:
        """The value before the crossing."""
        return (self.operand,)

    @property
    def results(self) -> tuple[str, ...]:
        """The value after the crossing."""
        return (self.result,)

    @property
    def places(self) -> tuple[tuple[str, Direction, str], ...]:
        """(module, direction, path) of each argument or output that is this tensor."""
        return tuple((self.module, self.direction, path) for path in self.path.split(SAME_TENSOR))

    @property
    def leaves_model(self) -> bool:
        """True for an output of the root module."""
        return self.module == "" and self.direction is Direction.OUTPUT

    @property
    def output_path(self) -> str:
        """The path of an output of the root module among its outputs: `logits`, `caches.0.1`; "" for the only one."""
        return self.path.removeprefix("output").removeprefix(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBlock:
    """Sibling modules `prefix.index`, for each index of `indices`, with equal structure, shapes and order of ops."""

    prefix: str
    indices: tuple[int, ...]

    @property
    def pattern(self) -> str:
        """The pattern that stands for all siblings in a plan, such as `layers.*`."""
        return f"{self.prefix}.*" if self.prefix else "*"

    @property
    def names(self) -> tuple[str, ...]:
        """The module names of the siblings, in order."""
        return tuple(f"{self.prefix}.{index}" if self.prefix else str(index) for index in self.indices)


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """A traced model: sources, nodes in execution order, outputs and repeated blocks.

    `outputs` are (path, value name). `loss` is the scalar that backward starts from, if any. `questions` are the reads
    of input values in Python code: (line of code, answer given, whether the answer was a bool). `read_by_stubs` are the
    values that modules of other stages are given, of which no node is left (tpplan.stages.stub).
    """

    values: dict[str, Value] = field(hash=False)
    sources: tuple[Source, ...]
    nodes: tuple[Op | Boundary, ...]
    outputs: tuple[tuple[str, str], ...]
    loss: str | None
    blocks: tuple[RepeatedBlock, ...] = ()
    questions: tuple[tuple[str, str, bool], ...] = ()
    read_by_stubs: frozenset[str] = frozenset()
    #: op name -> the line of the model's code that called it, as `file:line: text`; absent where none is known
    lines: dict[str, str] = field(default_factory=dict, hash=False, compare=False)
    #: first name of a module, by which the graph knows it -> its other names; absent where it has none
    other_names: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False, compare=False)
    #: digests of the calls in each module's forward (tpplan.trace.noted_calls)
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False, compare=False)
    #: (module, a module around it by its name) where the former was called while the latter did not run
    apart: frozenset[tuple[str, str]] = field(default=frozenset(), hash=False, compare=False)
    #: constant's value name -> where the model holds the tensor, which is neither a parameter nor a buffer; absent for
    #: a constant that forward makes
    held: dict[str, str] = field(default_factory=dict, hash=False, compare=False)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The op nodes in order."""
        return tuple(node for node in self.nodes if isinstance(node, Op))

    @cached_property
    def boundaries(self) -> tuple[Boundary, ...]:
        """The boundary nodes in order."""
        return tuple(node for node in self.nodes if isinstance(node, Boundary))

    @cached_property
    def parameters(self) -> tuple[Source, ...]:
        """The parameters; a tied parameter is listed once."""
        return tuple(source for source in self.sources if source.kind is SourceKind.PARAMETER)

    @cached_property
    def ep(self) -> int:
        """The number of ranks among which experts are divided; 1 where none are."""
        return max((source.ep for source in self.sources), default=1)

    @cached_property
    def is_uneven(self) -> bool:
        """True where data decides what runs: on how many elements, or which code."""
        return any(value.varying for value in self.values.values()) or any(
            answer == AS_IF_EVEN for _, answer, _ in self.questions
        )

    def whole_shape(self, source: Source) -> tuple[int, ...]:
        """The shape of a parameter with the experts of all ranks."""
        shape = self.values[source.result].shape
        return (shape[0] * source.ep, *shape[1:]) if source.ep > 1 else shape

    def holders(self, source: Source) -> tuple[frozenset[str], ...]:
        """For each name of a parameter or buffer, the first names of the modules that have it by that name."""
        modules = (name.rpartition(".")[0] for name in (source.label, *source.aliases))
        return tuple(frozenset(self.first_names.get(own, own) for own in enclosing(module)) for module in modules)

    @cached_property
    def times_called(self) -> dict[str, int]:
        """Name of a module that tensors leave -> how often it is called."""
        leaving = Counter((own.module, own.path) for own in self.boundaries if own.direction is Direction.OUTPUT)
        found: dict[str, int] = {}
        for (module, _), count in leaving.items():
            found[module] = max(count, found.get(module, 0))
        return found

    @cached_property
    def returned(self) -> dict[str, str]:
        """Path -> value of each output of the root module that no node reads; the loss function's ops are nodes."""
        leaving = (boundary for boundary in self.boundaries if boundary.leaves_model)
        return {own.output_path: own.result for own in leaving if not self.consumers.get(own.result)}

    @property
    def returned_in_passing(self) -> dict[str, str]:
        """The outputs among `returned` that stand inside a container (a cache of keys and values, hidden states), in a
        model with a loss: training can do without them, so they may stay divided."""
        if self.loss is None:
            return {}
        return {path: value for path, value in self.returned.items() if "." in path and value != self.loss}

    @cached_property
    def nodes_by_module(self) -> dict[str, tuple[Op | Boundary, ...]]:
        """Module name -> its nodes and those of its submodules, in order; "" has all nodes."""
        found: dict[str, list[Op | Boundary]] = {}
        around: dict[str, list[list[Op | Boundary]]] = {}
        for node in self.nodes:
            if node.module not in around:
                around[node.module] = [found.setdefault(module, []) for module in enclosing(node.module)]
            for nodes in around[node.module]:
                nodes.append(node)
        return {module: tuple(nodes) for module, nodes in found.items()}

    @cached_property
    def consumers(self) -> dict[str, tuple[Op | Boundary, ...]]:
        """Value name -> the nodes that read it, in order; a node that reads it twice is listed once."""
        found: dict[str, dict[str, Op | Boundary]] = {}
        for node in self.nodes:
            for operand in node.operands:
                found.setdefault(operand, {})[node.name] = node
        return {name: tuple(nodes.values()) for name, nodes in found.items()}

    @cached_property
    def first_names(self) -> dict[str, str]:
        """Other name of a module -> its first name."""
        return {other: first for first, others in self.other_names.items() for other in others}

    @cached_property
    def _memo(self) -> dict[Hashable, object]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `make()`, cached on this graph under `key`; a changed copy of the graph has a new cache."""
        if key not in self._memo:
            self._memo[key] = make()
        return cast(T, self._memo[key])

    @cached_property
    def is_grown(self) -> bool:
        """True where `resized` made the graph; False for a traced graph and for a changed copy."""
        return False

    @cached_property
    def _outline(self) -> dict[Hashable, object]:
        return {}

    def once_for_all_sizes(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `make()`, cached under `key` for all graphs that share this graph's outline: a traced graph, the
        graphs that `resized` made of it, and the graphs to which `share_outline` gave its outline.

        The value must follow from what such graphs share: names, modules, and which node reads and makes which values;
        not from the number of ranks that divide experts.
        """
        if key not in self._outline:
            self._outline[key] = make()
        return cast(T, self._outline[key])

    def resized(self, values: Mapping[str, Value], nodes: Mapping[int, Op]) -> "ModelGraph":
        """The graph with other shapes and literals: `values` in place of those of the same names, and `nodes`, by their
        positions, in place of the ops there. Nothing but sizes may differ."""
        own = list(self.nodes)
        for position, op in nodes.items():
            own[position] = op
        other = replace(self, values={**self.values, **values}, nodes=tuple(own))
        other.__dict__.update(_outline=self._outline, is_grown=True)  # where cached_property keeps them
        return other

    def share_outline(self, other: "ModelGraph") -> None:
        """Gives this graph the outline of `other`, from which it differs in sizes alone: from now on both have the same
        values of `once_for_all_sizes`."""
        self.__dict__["_outline"] = other._outline  # where cached_property keeps it

    def is_resized_of(self, other: "ModelGraph") -> bool:
        """True where the two graphs share an outline, and so differ in sizes alone."""
        return self._outline is other._outline

    @cached_property
    def producers(self) -> dict[str, Op | Boundary]:
        """Value name -> the node that computes it; values of sources have none."""
        return {result: node for node in self.nodes for result in node.results}


def unread_values(graph: ModelGraph) -> frozenset[str]:
    """Names of the computed values from which the step computes nothing that it returns or writes to an operand."""
    read = {value for _, value in graph.outputs} | ({graph.loss} if graph.loss is not None else set())
    read |= {boundary.result for boundary in graph.boundaries if boundary.leaves_model}
    unread: set[str] = set()
    for node in reversed(graph.nodes):
        if (isinstance(node, Op) and may_write(node)) or not read.isdisjoint(node.results):
            read.update(node.operands)
        else:
            unread.update(node.results)
    return frozenset(unread)


def read_outside(graph: ModelGraph) -> frozenset[str]:
    """Names of the modules that hold a parameter of which something is read while they do not run, as one that modules
    share is."""
    readers: dict[str, set[str]] = {}
    for node in graph.nodes:
        for name in node.operands:
            readers.setdefault(graph.values[name].storage, set()).add(node.module)
    found: set[str] = set()
    for source in graph.parameters:
        around = frozenset().union(*graph.holders(source))
        for reader in readers.get(graph.values[source.result].storage, ()):
            found |= {name for name in around if not within(reader, name) or (reader, name) in graph.apart}
    return frozenset(found)


def may_write(op: Op) -> bool:
    """True where the op may write to an operand: its name says so (`add_`, `add.out`), or it has no results."""
    name, _, overload = op.target.rpartition(".")
    words = overload.split("_")  # `to.dtype_layout` writes nothing
    return name.endswith(("_", "_inplace")) or "out" in words or words[0].startswith("Out") or not op.results


def references(argument: object) -> Iterator[str]:
    """Names of the values inside an argument, left to right."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def enclosing(name: str) -> tuple[str, ...]:
    """The module and all modules around it, innermost first: `a.b` -> ("a.b", "a", "")."""
    parts = name.split(".") if name else []
    return tuple(".".join(parts[:length]) for length in range(len(parts), -1, -1))


def joined_name(module: str, name: str) -> str:
    """The name `module.name` of what a module holds; `name` alone in the root, ""."""
    return f"{module}.{name}" if module else name


def within(name: str, module: str) -> bool:
    """True where the module `name` is `module` or one of its submodules."""
    return not module or name == module or name.startswith(module + ".")
