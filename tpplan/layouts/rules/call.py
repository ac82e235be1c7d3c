"""What a rule sees (Call) and what it gives (Strategy), and the registry it enters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tpplan.core.graph import Argument, ModelGraph, Op, Ref, Value, references
from tpplan.core.layout import R_STAR, ROWS, Layout, P, R, S, copied
from tpplan.core.part_intervals import Parts

#: a module's own code, whose backward may be anything: all of it is whole, and so are the gradients
OPAQUE = "tpplan.opaque.default"
#: layouts that not every value of a shape may have, by value
Extra = Mapping[str, frozenset[Layout]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator with its arguments. `operands` are the tensors in argument order, one entry per reading.

    `parts` are those that dims of the graph may be made of: a dim of their sum may be sharded part by part. `slices`
    are numbers of slices, fewer than ranks, into which dims of the graph may be cut.
    """

    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    parts: frozenset[Parts] = frozenset()
    slices: frozenset[int] = frozenset()

    @classmethod
    def of(cls, graph: ModelGraph, op: Op, layouts: Iterable[Layout] = ()) -> "Call":
        """The call an op of a graph makes, with parts and slices as some of `layouts` have them."""
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
        )

    def anonymous(self) -> "Call":
        """The same with its values called by the order in which they come: equal for like calls."""
        numbers: dict[str, str] = {}

        def number(name: str) -> str:
            return numbers.setdefault(name, str(len(numbers)))

        def unnamed(value: Value) -> Value:
            return replace(value, name=number(value.name), storage=number(value.storage))

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
        """True when the result is the first operand, written to."""
        return base_target(self.target) != self.target

    def argument(self, position: int, name: str, default: Argument = None) -> Argument:
        """The argument at a position or under its schema name."""
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
        """A list of integers, one integer as a list of one, or None where it is not given."""
        value = self.argument(position, name)
        if value is None:
            return None
        items = value if isinstance(value, tuple) else (value,)
        return tuple(item for item in items if isinstance(item, int))

    def operand_index(self, position: int, name: str) -> int | None:
        """Where among `operands` the tensor at an argument position stands; None when it is not a tensor."""
        argument = self.argument(position, name)
        if not isinstance(argument, Ref):
            return None
        if position < len(self.args):
            return len(tuple(references(self.args[:position])))
        names = [key for key, _ in self.kwargs]
        before = tuple(value for _, value in self.kwargs[: names.index(name)])
        return len(tuple(references((self.args, before))))


@dataclass(frozen=True, slots=True)
class Strategy:
    """One consistent choice: a layout per operand and per result."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    def fits(self, call: Call, tp: int) -> bool:
        """True when every shard divides by tp, and what is partial carries a gradient (booleans do not add up)."""
        pairs = (*zip(call.operands, self.operands, strict=True), *zip(call.results, self.results, strict=True))
        return all(value.can_be(layout, tp) and (layout != P or value.carries_gradient) for value, layout in pairs)

    def without_idle_gradients(self, call: Call) -> tuple["Strategy", ...]:
        """R* written as R where no gradient flows; where no result carries one, operands may be R or R* alike."""
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
        """The same with every sharded dim sharded part by part, where all of them have one size and so one order.

        Right wherever positions along the dim do not matter to the op, as they do not where slices of it may be taken.
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
        """The same on fewer slices than ranks, each of which neighbours share.

        Backward is linear: from summands of one slice's gradient it makes summands of another's, and of the whole's.
        So this is right where every gradient is a slice or a summand, and none is the whole.
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


#: gives the strategies of a call beyond the replicated ones
Rule = Callable[[Call], Iterable[Strategy]]

_RULES: dict[str, Rule] = {}


def op_rule(*targets: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operators, named as in the graph: `aten.linear.default`."""

    def register(rule: Rule) -> Rule:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"two rules for {target}")
            _RULES[target] = rule
        return rule

    return register


def registered_rules() -> dict[str, Rule]:
    """Rules by target."""
    return dict(_RULES)


def written_operands(op: Op) -> tuple[str, ...]:
    """Operands that an op writes to, as far as its name says: `add_`, `__iand__`, `out=`. Of a module that runs whole,
    the weights that it was seen to write to: their places among its weights stand last."""
    if op.target == OPAQUE:
        weights = tuple(references(op.args[1]))
        return tuple(weights[place] for place in _integers(op.args[3]))
    is_in_place = base_target(op.target) != op.target or op.target.startswith("aten.__i")
    return (*(op.operands[:1] if is_in_place else ()), *references(dict(op.kwargs).get("out")))


def _integers(argument: Argument) -> tuple[int, ...]:
    return tuple(place for place in argument if isinstance(place, int)) if isinstance(argument, tuple) else ()


def crossings_before_writes(graph: ModelGraph) -> frozenset[str]:
    """Boundaries, by name, through which a value goes whose storage an op writes to later: of a copy, the other side
    would not see it."""
    return graph.once(crossings_before_writes, lambda: _crossings_before_writes(graph))


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
    """`aten.add_.Tensor` -> `aten.add.Tensor`: an in-place form obeys the rule of the plain one."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    return f"{namespace}.{name[:-1]}.{overload}" if name.endswith("_") and not name.endswith("__") else target
