"""Storages that are kept under a mode of recomputation, and the forms that they share: storages of one form have equal
bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpplan.costs.saved_tensors import SavedStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A storage that is kept under a mode of recomputation."""

    segment: SavedStorage
    #: the boundaries behind which an op saves the storage
    wanted: tuple[str, ...]
    #: the layer that owns the storage
    owner: str | None
    #: True where the storage is kept from forward to backward, False where it is remade
    is_there: bool
    #: True where any op saves the storage
    is_needed: bool
    #: True where the storage enters its owner from outside
    is_given: bool
    #: the layer inside of which a boundary makes the storage
    crossed_in: str | None
    #: the boundaries that alone read the storage, of a product that is not kept where all of them give a sum; else ()
    summed_by: tuple[str, ...]
    #: position of the node that makes the storage
    made: int
    #: position of the earliest node, over all modes, after whose backward the storage is freed
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A key that storages of equal bytes share: the classes of the decisions that make the storage and, of a part, of
    those that read it, whether it may be a sum over ranks, and the classes of those that may sum it."""

    maker: str
    position: int
    readers: tuple[str, ...] | None
    may_be_sum: bool
    summed_by: tuple[str, ...]

    @classmethod
    def of(cls, held: Holding, classes: Mapping[str, str]) -> "Form":
        """The form of a holding."""
        segment = held.segment
        return cls(
            maker=classes[segment.maker],
            position=segment.position,
            readers=None if segment.is_kept else tuple(classes[name] for name in held.wanted),
            may_be_sum=held.crossed_in is not None and not held.is_given,
            summed_by=tuple(classes[name] for name in held.summed_by),
        )


def forms_of(
    classes: Mapping[str, str], holdings: Sequence[Holding]
) -> tuple[list[tuple[Form, SavedStorage]], list[int]]:
    """Returns the forms of holdings in order, each with its first storage, and the number of each holding's form;
    `classes` has the class of each decision."""
    known: dict[Form, int] = {}
    forms, numbers = list[tuple[Form, SavedStorage]](), list[int]()
    for held in holdings:
        form = Form.of(held, classes)
        if form not in known:
            known[form] = len(forms)
            forms.append((form, held.segment))
        numbers.append(known[form])
    return forms, numbers
