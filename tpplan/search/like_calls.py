"""Finds calls that may look, at another batch or length, like one in which a plan replaces a number.

A plan knows a call by its kind, the place of the number, the number, and the sizes of the tensor's sharded dims
(tpplan.apply.modules.local_sizes). At the planned shapes that tells the calls of a module's code apart, for the proof
ran them. At others a size that grows with batch or length may become that number, say a length inside the model the
number of heads, and would be replaced too: in `zeros(b, n)` or `expand(b, n, t, d)` without any sign.

Two graphs at two shapes show which sizes grow; one that does not, such as every third of 8 or of 7 tokens, may do so
farther away. Some of these cannot be mistaken at runtime: a batch or length of the
inputs, and the tensor's own size in that place, which ranks refuse where they are such a number
(tpplan.apply.modules.input_shapes, local_sizes), and a size that cannot be the number where the tensor has the dims
that the plan knows.

So may a dim that grows become the size of which code is told that of one process (tpplan.prove.whole_shapes).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpplan.apply.modules.input_shapes import stands_for_any_size
from tpplan.apply.modules.local_sizes import dim_of
from tpplan.core.graph import ModelGraph, Op
from tpplan.core.layout import Layout, local_shape
from tpplan.core.name_patterns import ROOT
from tpplan.layouts.rules import Call, Strategy, num_sizes, size_literals
from tpplan.layouts.rules.size_literals import CALLS
from tpplan.plan.plan import SHAPE, Plan, SizePlan
from tpplan.prove.whole_shapes import values_seen

#: a size at the planned shapes, and at the others
Sizes = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LikeCalls:
    """The calls of a model at the planned shapes and at others, on one rank of a plan, with the strategies of their
    ops at each. `inputs` are the batch and the length at both shapes, where they differ."""

    plan: Plan
    planned: ModelGraph
    other: ModelGraph
    planned_strategies: Mapping[str, Strategy]
    other_strategies: Mapping[str, Strategy]
    inputs: tuple[Sizes, ...]

    def mistakable(self) -> str:
        """The first call that may be taken for another one, in words; "" without one."""
        words = (_words(op, size) for op, size, grows in self._alike() if grows)
        return next(words, next((_told_words(module, size) for module, size, grows in self._told() if grows), ""))

    def has_unknown(self) -> bool:
        """True where a call of another number, or another tensor that code may ask for its shape, looks alike and has
        not grown from the planned shapes to the others."""
        return any(not grows for _, _, grows in (*self._alike(), *self._told()))

    def _told(self) -> Iterator[tuple[str, SizePlan, bool]]:
        """Yields (module, size of which its code is told another, whether it grows) for other values that the code
        sees, which may have that size at another batch or length, and are not told apart at runtime."""
        for module, sizes in self.plan.size_plans().items():
            told = [size for size in sizes if size.call == SHAPE]
            seen = tuple(self._seen(module)) if told else ()
            for size in told:
                dims = {own[size.position] for own in seen if len(own) == size.count}
                yield from ((module, size, here != there) for here, there in dims if self._may_be(here, there, size))

    def _may_be(self, here: int | None, there: int, size: SizePlan) -> bool:
        """True for a dim of these sizes that may become the size of which code is told another, with no refusal."""
        if here is None:
            return True  # other code runs at the planned shapes
        scaled = {(here * times, there * times) for times in (1, self.plan.mesh.tp)}
        return here != size.local and scaled.isdisjoint(self.inputs)

    def _seen(self, module: str) -> Iterator[tuple[tuple[int | None, int], ...]]:
        """Yields the local dims of each value that a module's code sees: at the planned shapes, None where the code
        does not see it there, and at the others."""
        here = self._local_shapes(self.planned, self.planned_strategies, module)
        for place, shape in self._local_shapes(self.other, self.other_strategies, module).items():
            known = here.get(place, ())
            sizes: tuple[int | None, ...] = known if len(known) == len(shape) else (None,) * len(shape)
            yield tuple(zip(sizes, shape, strict=True))

    def _local_shapes(
        self, graph: ModelGraph, strategies: Mapping[str, Strategy], module: str
    ) -> dict[tuple[str, Layout], tuple[int, ...]]:
        """The local shape of each value that a module's code sees, by its name and its layout there."""
        seen = values_seen(graph, strategies, module)
        return {own: local_shape(graph.values[own[0]].shape, own[1], self.plan.mesh.tp) for own in seen}

    def _alike(self) -> Iterator[tuple[Op, SizePlan, bool]]:
        """Yields calls that look like the one of a planned number but for the number in its place, and are not told
        apart at runtime, and whether that grows."""
        numbers = self.plan.size_plans()
        for op in self.other.ops:
            for size in numbers.get(op.module, ()):
                if size.dims is None and CALLS.get(op.target) == size.call:
                    grows = self._grows(op, size)
                    if grows is not None:
                        yield op, size, grows

    def _grows(self, op: Op, size: SizePlan) -> bool | None:
        """Whether the size of a call in the place of a planned number grows; None where the call looks another, or is
        the number's."""
        there, here = Call.of(self.other, op), self._planned_call(op)
        grown = size_literals(there).get(size.position)
        if num_sizes(there) != size.count or type(grown) is not int or grown in (size.written, -1):
            return None
        if here is None:
            return True  # other code runs at the planned shapes
        written = size_literals(here).get(size.position)
        dims = tuple(self._dims(op, here, there)) if size.of else ()
        if type(written) is not int or len(dims) != len(size.of):
            return None
        literal, known = (written, grown), [pair for pair in zip(dims, size.of, strict=True) if pair[1]]
        if any(own == literal and wanted != size.written for own, wanted in known):
            return None
        is_another = any(own[0] == own[1] != wanted for own, wanted in known)
        return None if is_another or self._is_refused(literal, dims, size) else written != grown

    def _is_refused(self, literal: Sizes, dims: tuple[Sizes, ...], size: SizePlan) -> bool:
        """True where ranks refuse every shape at which a call's size is the planned number."""
        if not stands_for_any_size(size):
            return False
        dim, tp = dim_of(size), self.plan.mesh.tp
        scaled = {(literal[0] * times, literal[1] * times) for times in (1, tp)}
        return (dim is not None and dims[dim] == literal) or not scaled.isdisjoint(self.inputs)

    def _planned_call(self, op: Op) -> Call | None:
        """The call at the planned shapes; None where other code runs there."""
        ops = self.planned.once(LikeCalls, lambda: {op.name: op for op in self.planned.ops})
        known = ops.get(op.name)
        if known is None or (known.target, known.module) != (op.target, op.module):
            return None
        call = Call.of(self.planned, known)
        return call if num_sizes(call) == num_sizes(Call.of(self.other, op)) else None

    def _dims(self, op: Op, here: Call, there: Call) -> Iterator[Sizes]:
        """The local dims of the call's tensor at both shapes."""
        both = (here, self.planned_strategies[op.name]), (there, self.other_strategies[op.name])
        shapes = (local_shape(call.operands[0].shape, own.operands[0], self.plan.mesh.tp) for call, own in both)
        yield from zip(*shapes, strict=True)


def _words(op: Op, size: SizePlan) -> str:
    """Why a planned number in the code of an op may be mistaken."""
    return (
        f"{op.module or ROOT} gives {size.written} in {size.call}, which is {size.local} on a rank, and a size that "
        f"grows with the inputs in another {size.call}: where that is {size.written}, the two look alike"
    )


def _told_words(module: str, size: SizePlan) -> str:
    """Why a planned size that the code of a module is told may be mistaken."""
    return (
        f"the code of {module or ROOT} is told {size.written} of a tensor of {size.count} dims whose dim "
        f"{size.position} is {size.local}, and has another tensor where that dim grows with the inputs: where it is "
        f"{size.local}, the two look alike"
    )
