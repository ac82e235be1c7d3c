"""Types of rules (a rule takes a Call and gives Strategies), the registry of rules, and which operands ops write to."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tpplan.core.graph import Argument, ModelGraph, Op, Ref, Value, references
from tpplan.core.layout import R_STAR, ROWS, Layout, P, R, S, copied
from tpplan.core.part_intervals import Parts

#: a module that runs by its own code, traced as one op: its operands, results and gradients are whole
OPAQUE = "tpplan.opaque.default"
#: value name -> layouts that only some values may have
Extra = Mapping[str, frozenset[Layout]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an operator. `operands` are its tensors in argument order, one entry per reading.

    `parts` are the sizes of parts in the graph: a dim whose size is their sum may be sharded part by part. `slices` are
    numbers of slices, fewer than ranks, into which a dim may be cut. `is_pointwise` as for an Op, `is_grown` as for a
    graph.
    """

    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    parts: frozenset[Parts] = frozenset()
    slices: frozenset[int] = frozenset()
    is_pointwise: bool = False
    is_grown: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, graph: ModelGraph, op: Op, layouts: Iterable[Layout] = ()) -> "Call":
        """The call of an op in a graph, with the parts and slices that occur in `layouts`."""
        layouts = tuple(layouts)
        if layouts:
            return cls._made(graph, op, layouts)
        known, call = graph.once((Call, op.name), lambda: (op, cls._made(graph, op, ())))
        return call if known is op else cls._made(graph, op, ())

    @classmethod
    def _made(cls, graph: ModelGraph, op: Op, layouts: tuple[Layout, ...]) -> "Call":
        return cls(
            target=op.target,
            args=op.args,
            kwargs=op.kwargs,
            operands=tuple(graph.values[name] for name in op.operands),
            results=tuple(graph.values[name] for name in op.results),
            parts=frozenset(layout.parts for layout in layouts if layout.parts),
            slices=frozenset(layout.slices for layout in layouts if layout.slices is not None),
            is_pointwise=op.is_pointwise,
            is_grown=graph.is_grown,
        )

    def anonymous(self) -> "Call":
        """A copy whose values are named by their order of appearance, so that calls with equal arguments are equal."""
        numbers: dict[str, str] = {}

        def number(name: str) -> str:
            return numbers.setdefault(name, str(len(numbers)))

        def unnamed(value: Value) -> Value:
            # Every field by name: dataclasses.replace takes three times as long.
            return Value(
                name=number(value.name),
                shape=value.shape,
                dtype=value.dtype,
                carries_gradient=value.carries_gradient,
                storage=number(value.storage),
                varying=value.varying,
                is_read=value.is_read,
            )

        def argument(given: Argument) -> Argument:
            if isinstance(given, Ref):
                return Ref(number(given.name))
            return tuple(map(argument, given)) if isinstance(given, tuple) else given

        return replace(
            self,
            operands=tuple(map(unnamed, self.operands)),
            results=tuple(map(unnamed, self.results)),
            args=tuple(map(argument, self.args)),
            kwargs=tuple((name, argument(given)) for name, given in self.kwargs),
        )

    @property
    def is_in_place(self) -> bool:
        """True where the op writes its result to the first operand."""
        return base_target(self.target) != self.target

    def argument(self, position: int, name: str, default: Argument = None) -> Argument:
        """The argument at a position or under its schema name, else `default`."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def integer(self, position: int, name: str, default: int | None = None) -> int:
        """An integer argument. Raises TypeError for anything else."""
        value = self.argument(position, name, default)
        if not isinstance(value, int):
            raise TypeError(f"{self.target}: argument {name} is {value!r}, expected an integer")
        return value

    def integers(self, position: int, name: str) -> tuple[int, ...] | None:
        """An argument that is a list of integers or one integer, as a tuple; None where it is not given."""
        value = self.argument(position, name)
        if value is None:
            return None
        items = value if isinstance(value, tuple) else (value,)
        return tuple(item for item in items if isinstance(item, int))

    def operand_index(self, position: int, name: str) -> int | None:
        """Index among `operands` of the tensor argument at a position; None where the argument is not a tensor."""
        argument = self.argument(position, name)
        if not isinstance(argument, Ref):
            return None
        if position < len(self.args):
            return len(tuple(references(self.args[:position])))
        names = [key for key, _ in self.kwargs]
        before = tuple(value for _, value in self.kwargs[: names.index(name)])
        return len(tuple(references((self.args, before))))

    def every_layout(self, value: Value) -> Iterator[Layout]:
        """Yields the layouts of an operand that is read for its dtype and device alone."""
        yield from (R, R_STAR, P)
        for dim, size in enumerate(value.shape):
            yield S(dim)
            yield from (S(dim, *parts) for parts in sorted(self.parts) if sum(parts) == size)
            yield from (copied(dim, slices) for slices in sorted(self.slices))


@dataclass(frozen=True, slots=True)
class Strategy:
    """A layout for each operand and each result of a call, consistent with each other."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    def fits(self, call: Call, tp: int) -> bool:
        """True where every shard divides by tp and every partial value carries a gradient (ids do not add up)."""
        pairs = (*zip(call.operands, self.operands, strict=True), *zip(call.results, self.results, strict=True))
        return all(value.can_be(layout, tp) and (layout != P or value.carries_gradient) for value, layout in pairs)

    def without_idle_gradients(self, call: Call) -> tuple["Strategy", ...]:
        """The strategy with R in place of R* where a value carries no gradient. Where no result carries a gradient,
        whole operands may be R or R*: one strategy for each."""
        operands = tuple(
            R if layout == R_STAR and not value.carries_gradient else layout
            for value, layout in zip(call.operands, self.operands, strict=True)
        )
        results = tuple(
            R if layout == R_STAR and not value.carries_gradient else layout
            for value, layout in zip(call.results, self.results, strict=True)
        )
        if any(value.carries_gradient for value in call.results):
            return (Strategy(operands, results),)
        either = {
            tuple(
                whole if layout.is_whole and value.carries_gradient else layout
                for value, layout in zip(call.operands, operands, strict=True)
            ): None
            for whole in (R, R_STAR)
        }
        return tuple(Strategy(variant, results) for variant in either)

    def part_by_part(self, call: Call) -> Iterator["Strategy"]:
        """Yields copies whose sharded dims are sharded part by part, where all sharded dims have one size.

        This is right for ops that ignore the position along the dim; ops for which slices of the dim are allowed do.
        """
        layouts = (*self.operands, *self.results)
        values = (*call.operands, *call.results)
        sizes = {
            value.shape[layout.dim] for value, layout in zip(values, layouts, strict=True) if layout.dim is not None
        }
        is_plain = all(layout.dim is None or layout.is_plain for layout in layouts)
        if len(sizes) != 1 or ROWS in layouts or not is_plain:
            return
        for parts in sorted(call.parts):
            if {sum(parts)} == sizes:
                sides = (
                    tuple(layout if layout.dim is None else S(layout.dim, *parts) for layout in side)
                    for side in (self.operands, self.results)
                )
                yield Strategy(*sides)

    def with_copies(self, call: Call) -> Iterator["Strategy"]:
        """Yields copies with fewer slices than ranks, each held by several neighbouring ranks.

        Backward is linear in the gradient: summands of one slice's gradient give summands of another's, and of the
        whole's. So this is right where every gradient is a slice or a summand, and none is whole.
        """
        layouts = (*self.operands, *self.results)
        values = (*call.operands, *call.results)
        whole = [v.carries_gradient for v, layout in zip(values, layouts, strict=True) if layout == R]
        is_plain = all(layout == R_STAR or layout.is_plain for layout in layouts)
        if not is_plain or any(whole) or all(layout.is_whole for layout in layouts):
            return
        for slices in sorted(call.slices):
            sides = (
                tuple(layout if layout.dim is None else copied(layout.dim, slices) for layout in side)
                for side in (self.operands, self.results)
            )
            yield Strategy(*sides)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} => {', '.join(map(str, self.results))}"


#: yields the strategies of a call, except the replicated ones
Rule = Callable[[Call], Iterable[Strategy]]

_RULES: dict[str, Rule] = {}


def op_rule(*targets: str) -> Callable[[Rule], Rule]:
    """Decorator that registers a rule for operators, named as in the graph: `aten.linear.default`."""

    def register(rule: Rule) -> Rule:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"op_rule: {target} already has a rule")
            _RULES[target] = rule
        return rule

    return register


def registered_rules() -> dict[str, Rule]:
    """Target -> its rule."""
    return dict(_RULES)


def written_operands(op: Op) -> tuple[str, ...]:
    """Names of the operands that an op writes to, as its name tells: `add_`, `_foreach_add_`, `__iand__`, `out=`.

    An op that gives nothing may write to all of them. A module that runs whole lists the positions, among its weights,
    of those it was seen to write to as its last argument.
    """
    if op.target == OPAQUE:
        weights = tuple(references(op.args[1]))
        return tuple(weights[place] for place in _integers(op.args[3]))
    is_in_place = base_target(op.target) != op.target or op.target.startswith("aten.__i")
    if not (is_in_place or op.results):
        return op.operands
    first = tuple(references(op.args[:1])) or op.operands[:1]
    return (*(first if is_in_place else ()), *references(dict(op.kwargs).get("out")))


def _integers(argument: Argument) -> tuple[int, ...]:
    return tuple(place for place in argument if isinstance(place, int)) if isinstance(argument, tuple) else ()


def crossings_before_writes(graph: ModelGraph) -> frozenset[str]:
    """Names of the boundaries through which a value goes whose storage an op writes to later.

    A conversion there would make a copy, and code on the other side would not see the write.
    """
    return graph.once_for_all_sizes(crossings_before_writes, lambda: _crossings_before_writes(graph))


def _crossings_before_writes(graph: ModelGraph) -> frozenset[str]:
    written: set[str] = set()
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if isinstance(node, Op):
            written.update(graph.values[name].storage for name in written_operands(node))
        elif graph.values[node.operand].storage in written:
            found.add(node.name)
    return frozenset(found)


def base_target(target: str) -> str:
    """The target of an in-place op's plain form: `aten.add_.Tensor` -> `aten.add.Tensor`; other targets unchanged."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    return f"{namespace}.{name[:-1]}.{overload}" if name.endswith("_") and not name.endswith("__") else target
