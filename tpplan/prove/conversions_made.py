"""The conversions that tpplan's own code makes in an applied model, held against those of the plan."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from tpplan.core.graph import OWN_SCOPE, Boundary, Direction, ModelGraph, Op
from tpplan.core.layout import COLLECTIVE_STEPS, S, Step
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.readings import reading_conversion, sources_read
from tpplan.layouts.rules.embedding import BAGS
from tpplan.layouts.rules.loss import CROSS_ENTROPY
from tpplan.prove.counterexample import Counterexample, blame

#: ops that tpplan's own code may compute on a rank, in some layouts
_REPLACED = frozenset({CROSS_ENTROPY, BAGS})
CONTIGUOUS = "aten.contiguous.default"
#: ops that return their operand itself where there is nothing to do, and else a new tensor
_GIVE_BACK = frozenset({CONTIGUOUS, "aten.to.dtype", "aten.to.device", "aten.to.dtype_layout"})
#: ops of conversions besides collectives: they move elements
_MOVES = frozenset({"view", "view_as", "clone", "contiguous", "chunk", "cat", "detach", "narrow", "movedim", "permute",
                    "new_zeros", "copy_", "wait_tensor"})  # fmt: skip
#: further ops of a step
_ALSO = {
    Step.DIVIDE: frozenset({"div"}),
    # _assert_async checks ids against the whole table's rows: it gives no value that another op could read
    Step.LOCAL_ROWS: frozenset({"sub", "lt", "ge", "__or__", "masked_fill_", "aminmax", "__and__", "_assert_async"}),
    Step.MASK: frozenset({"masked_fill"}),
}
#: the step of each collective op
_COLLECTIVES = {
    "_c10d_functional.all_reduce.default": Step.ALL_REDUCE,
    "_c10d_functional.all_gather_into_tensor.default": Step.ALL_GATHER,
    "_c10d_functional.reduce_scatter_tensor.default": Step.REDUCE_SCATTER,
    "_c10d_functional.all_to_all_single.default": Step.ALL_TO_ALL,
}


def _gives_back(graph: ModelGraph, op: Op) -> bool:
    """True where an op returns its operand itself, as a conversion to the dtype that it has."""
    given, result = graph.values[op.operands[0]], graph.values[op.results[0]]
    return (given.shape, given.dtype, given.storage) == (result.shape, result.dtype, result.storage)


class Converted:
    """The conversions that tpplan's own code in an applied model makes of the model's values."""

    def __init__(self, applied: ModelGraph) -> None:
        self.own = frozenset(op.name for op in applied.ops if op.module == OWN_SCOPE)
        #: number of ops by name, by the value that they convert
        self.ops: dict[str, Counter[str]] = defaultdict(Counter)
        self._order = {name: place for place, name in enumerate(applied.values)}
        self._given_back = {
            op.results[0]: op for op in applied.ops if op.target in _GIVE_BACK and _gives_back(applied, op)
        }
        self._origin: dict[str, str] = {}
        #: the operands of copies that a rank alone makes, by their results
        self._copied: dict[str, str] = {}
        for op in applied.ops:
            if op.name in self.own and op.operands:
                origin = self.latest(map(self.origin, op.operands))
                self._origin.update(dict.fromkeys(op.results, origin))
                self.ops[origin][op.target] += 1

    def origin(self, value: str) -> str:
        """The model's value that a value is converted or copied from; the value itself where it is neither."""
        value = self._origin.get(value, value)
        while value in self._copied:
            value = self._copied[value]
            value = self._origin.get(value, value)
        return value

    def join(self, copy: Op | Boundary) -> None:
        """Takes the result of a copy, and its conversions, for its operand."""
        self._copied[copy.results[0]] = copy.operands[0]
        self.ops[self.origin(copy.operands[0])] += self.ops.pop(copy.results[0], Counter())

    def core(self, value: str, module: str) -> str:
        """The origin of a value before any ops of the module's own code that returned their operand itself.

        A trace takes later reads of that operand for reads of the op's result, except reads of a parameter.
        """
        value = self.origin(value)
        while (op := self._given_back.get(value)) is not None and op.module == module:
            value = self.origin(op.operands[0])
        return value

    def latest(self, values: Iterable[str]) -> str:
        """The value that was made last: the looked-up rows, for example, and not the mask of the ids."""
        return max(values, key=lambda value: self._order[value])


def computed_by_own_code(assignment: Assignment) -> frozenset[str]:
    """Names of cross entropies over sharded classes, and of bags by rows, which tpplan's own code computes."""
    taken = {op.name: assignment.strategy(op.name).operands[0] for op in assignment.graph.ops if op.target in _REPLACED}
    return frozenset(
        op.name
        for op in assignment.graph.ops
        if (op.target == CROSS_ENTROPY and taken[op.name].dim is not None)
        or (op.target == BAGS and taken[op.name] == S(0))
    )


def other_conversions(
    assignment: Assignment, converted: Converted, images: Mapping[str, str], computed: frozenset[str]
) -> Counterexample | None:
    """The first value that is converted by other steps than its conversions take, as far as ops tell steps apart.

    Each read of a parameter or buffer by a module's code converts it, so that its steps may occur several times.
    """
    graph = assignment.graph
    steps: dict[str, list[Step]] = defaultdict(list)
    for boundary, conversion in assignment.conversions():
        value = boundary.result if boundary.direction is Direction.INPUT else boundary.operand
        steps[images[value]] += conversion.forward or (Step.NONE,)
    reads: dict[str, set[Step]] = {}
    for source in sources_read(graph).values():
        readings = assignment.readings.get(source.label, ())
        found = (reading_conversion(assignment.strategy(reading.name)).forward for reading in readings)
        reads[images[source.result]] = {step for taken in found for step in taken}
    for loss in graph.ops:
        if loss.name in computed and loss.target == CROSS_ENTROPY:
            # It all-reduces the maximum logit, and sums that need the targets.
            operands = [images[value] for value in loss.operands]
            steps[operands[0]].append(Step.ALL_REDUCE)
            steps[converted.latest(operands)].append(Step.ALL_REDUCE)
    read_there = {images[value] for op in graph.ops if op.name in computed for value in op.operands}
    for value in dict.fromkeys((*steps, *reads, *converted.ops)):
        wanted, found_ops = steps[value], converted.ops.get(value, Counter())
        collectives = Counter({step: found_ops[op] for op, step in _COLLECTIVES.items() if found_ops[op]})
        also = frozenset().union(*(_ALSO.get(step, ()) for step in (*wanted, *reads.get(value, ()))))
        names = {op.split(".")[1] for op in found_ops if op not in _COLLECTIVES}
        is_same = (
            set(collectives) == reads[value] & COLLECTIVE_STEPS
            if value in reads
            else collectives == Counter(step for step in wanted if step in COLLECTIVE_STEPS)
        )
        is_left_out = bool(wanted) and not found_ops
        if not is_same or is_left_out or (value not in read_there and not names <= _MOVES | also):
            origin = next(name for name, image in images.items() if image == value)
            shown = ", ".join(f"{op.split('.')[1]} x{count}" for op, count in found_ops.items()) or "nothing"
            planned = ", ".join(dict.fromkeys(map(str, (*wanted, *sorted(reads.get(value, ())))))) or "no step"
            message = f"{origin} is converted by {shown}, and the plan's conversions take {planned}"
            return blame(assignment, graph.producers.get(origin), message)
    return None
