"""The memory that FSDP2 holds for each unit in a step, as torch 2.13 runs it (fsdp/_fully_shard/_fsdp_param_group.py).

Forward: a unit's shards are cast and gathered into a flat buffer, and copied from there into its parameters. The buffer
lives until the next unit has been copied out of its own (a variable of wait_for_unshard holds it); the parameters are
freed after the unit's forward, unless they are kept (ZeRO-2). The root's parameters live throughout.
Backward: a unit is gathered in the same way, and the unit before it is prefetched; a buffer is freed when it has been
copied out. After a unit's backward its parameters are freed, and its gradients are copied into a flat buffer, which
lives until the next unit has one, and reduced into shards. The last gradient lives until then, for a loop's variable
holds it (foreach_reduce in fsdp/_fully_shard/_fsdp_collectives.py). Divided experts are reduced by themselves; here
they count with the rest of their unit, and of the two last gradients the larger one.
Where gradients are kept whole between micro-batches (set_requires_gradient_sync), a unit's backward casts them, one by
one, to the dtype that they are reduced in, and adds them in place to those of earlier micro-batches. The last backward
adds its own, and reduces and frees them (accumulate_unsharded_grad_if_needed and to_accumulated_grad_if_needed in
fsdp/_fully_shard/_fsdp_param.py). Where units are gathered once a step (set_reshard_after_backward), those that are
kept after forward, and the root, are freed in the last backward alone.
A unit on one rank of its axis is not gathered, but copied and cast, parameter by parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpplan.core.graph import LOSS_SCOPE, ModelGraph, Source, enclosing
from tpplan.costs.prediction.memory_ledger import Ledger, Piece
from tpplan.costs.prediction.weights import Weights
from tpplan.layouts.assignment import Assignment
from tpplan.plan.parts import BUFFERS, GRADIENTS, UNSHARDED_GRADIENTS, UNSHARDED_PARAMETERS

ROOT_UNIT = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Bytes of a unit on a rank: gathered, its cast shard, its largest parameter (0 for these two without a cast),
    and its gradients as they are reduced, whole and sharded.

    `labels` are its parameters, in order; `reduced_together` those of them that are reduced at once, over more than one
    rank; `wider` has the bytes of each whole gradient that is reduced in a wider dtype than backward makes it in.
    """

    labels: tuple[str, ...]
    reduced_together: tuple[tuple[str, ...], ...]
    gathered: float
    cast: float
    largest: float
    reduced: float
    sharded_gradients: float
    wider: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class Shards:
    """The units of a plan, the positions of nodes where each begins and ends, and the memory that each holds now."""

    ledger: Ledger
    ranks: int
    #: units whose parameters are freed after forward
    resharded: frozenset[str]
    units: Mapping[str, UnitBytes]
    unit_of: Mapping[str, str]
    starts: Mapping[int, str]
    ends: Mapping[int, str]
    order: tuple[str, ...]
    #: position of the model's last node; the loss's nodes follow
    last: int
    buffers: dict[str, Piece] = field(default_factory=dict)
    parameters: dict[str, Piece] = field(default_factory=dict)
    gradients: dict[str, dict[str, Piece]] = field(default_factory=dict)
    sharded: dict[str, Piece] = field(default_factory=dict)
    #: whole gradients of earlier micro-batches, by parameter
    whole: dict[str, Piece] = field(default_factory=dict)
    #: False in a micro-batch whose gradients are kept whole
    reduces: bool = True
    #: True in a micro-batch after which units that are not resharded stay gathered
    keeps: bool = False
    deferred: Piece | None = None
    reducing: Piece | None = None

    @classmethod
    def of(cls, assignment: Assignment, ledger: Ledger) -> "Shards":
        """The units of an assignment that uses FSDP; none is gathered yet."""
        weights = Weights(assignment=assignment)
        units = {unit.name: _unit_bytes(weights, unit.parameters) for unit in assignment.units}
        owners = {source.label: unit.name for unit in assignment.units for source in unit.parameters}
        starts, ends = _spans(assignment.graph, units)
        treatments = assignment.treatments
        return cls(
            ledger=ledger,
            ranks=assignment.mesh.shard,
            resharded=frozenset(name for name, treatment in treatments.items() if treatment.reshard),
            units=units,
            unit_of=owners,
            starts=starts,
            ends=ends,
            order=tuple(dict.fromkeys(starts[position] for position in sorted(starts))),
            last=max((i for i, node in enumerate(assignment.graph.nodes) if node.module != LOSS_SCOPE), default=0),
        )

    # Forward

    def before_forward(self, position: int) -> None:
        """Gathers the unit that begins at a node; the root before the first node."""
        if position == 0 and ROOT_UNIT in self.units:
            self._unshard(ROOT_UNIT, is_forward=True)
        if position in self.starts:
            self._unshard(self.starts[position], is_forward=True)

    def after_forward(self, position: int) -> None:
        """Frees the parameters of a resharded unit after its last node."""
        if self.ends.get(position) in self.resharded:
            self._reshard(self.ends[position])

    # Backward

    def before_backward(self, position: int) -> None:
        """Gathers the unit whose backward begins at a node, and prefetches the one before it."""
        self._free_deferred()
        if position == self.last and self.order:
            self._gather(self.order[-1])
        if position not in self.ends:
            return
        name = self.ends[position]
        self._unshard(name, is_forward=False)
        earlier = self.order.index(name) - 1
        if earlier >= 0:
            self._gather(self.order[earlier])

    def after_backward(self, position: int) -> None:
        """Reduces the gradients of the unit whose backward ends at a node."""
        if position in self.starts:
            self._reduce(self.starts[position])

    def finish(self) -> None:
        """Ends a backward: reduces the root, and units that backward did not reach, and frees all buffers."""
        for name in list(self.units):
            if name in self.parameters or name in self.gradients:
                self._reduce(name)
        self.ledger.drop(self.reducing)
        self.reducing = None
        for name in list(self.buffers):
            self.ledger.drop(self.buffers.pop(name))

    def add_gradient(self, source: Source, gradient: Piece) -> None:
        """Holds the first gradient of a parameter; later ones are added to it in place, also to whole ones of earlier
        micro-batches, where these have its dtype."""
        name = self.unit_of[source.label]
        if source.label in self.whole and source.label not in self.units[name].wider:
            self.gradients.setdefault(name, {})
            return
        of_unit = self.gradients.setdefault(name, {})
        if source.label not in of_unit:
            of_unit[source.label] = self.ledger.hold(gradient)
            self.ledger.rename(gradient, UNSHARDED_GRADIENTS)

    # One unit

    def _gather(self, name: str) -> None:
        if name in self.parameters or name in self.buffers or self.ranks == 1:
            return
        unit = self.units[name]
        self.buffers[name] = self.ledger.hold(Piece(BUFFERS, unit.gathered))
        self.ledger.pass_by(BUFFERS, unit.cast)

    def _unshard(self, name: str, *, is_forward: bool) -> None:
        if name in self.parameters:
            return
        unit = self.units[name]
        self._gather(name)
        self.parameters[name] = self.ledger.hold(Piece(UNSHARDED_PARAMETERS, unit.gathered))
        if is_forward:
            self._free_deferred()
        if self.ranks == 1:
            self.ledger.pass_by(BUFFERS, unit.largest)
            return
        buffer = self.buffers.pop(name)
        if is_forward:
            self.deferred = buffer
        else:
            self.ledger.drop(buffer)

    def _free_deferred(self) -> None:
        self.ledger.drop(self.deferred)
        self.deferred = None

    def _reshard(self, name: str) -> None:
        self.ledger.drop(self.parameters.pop(name, None))

    def _reshard_after_backward(self, name: str) -> None:
        if name in self.resharded or not self.keeps:
            self._reshard(name)

    def _keep(self, name: str) -> None:
        """Keeps a unit's gradients whole: it adds them to earlier ones, or casts them where they are new."""
        self._reshard_after_backward(name)
        unit = self.units[name]
        gradients = self.gradients.pop(name, {})
        for label in unit.labels:
            gradient = gradients.get(label)
            if gradient is not None and label in self.whole:
                self.ledger.drop(gradient)
            elif gradient is not None and label in unit.wider:
                self.whole[label] = self.ledger.hold(Piece(GRADIENTS, unit.wider[label]))
                self.ledger.drop(gradient)
            elif gradient is not None:
                self.whole[label] = gradient
                self.ledger.rename(gradient, GRADIENTS)

    def _reduce(self, name: str) -> None:
        if not self.reduces:
            self._keep(name)
            return
        self._reshard_after_backward(name)
        self.ledger.drop(self.reducing)
        self.reducing = None
        unit = self.units[name]
        gradients = self.gradients.pop(name, {})
        for label in unit.labels:
            if label in self.whole:  # what this backward made is added to it
                self.ledger.drop(gradients.get(label))
                gradients[label] = self.whole.pop(label)
        if not gradients:
            return
        self.reducing = self.ledger.hold(Piece(BUFFERS, unit.reduced))
        lasts = [next((gradients[own] for own in reversed(g) if own in gradients), None) for g in unit.reduced_together]
        held = max((own for own in lasts if own is not None), key=lambda own: own.num_bytes, default=None)
        last = self.ledger.hold(held) if held is not None else None
        for gradient in gradients.values():
            self.ledger.drop(gradient)
        reduced = self.ledger.hold(Piece(GRADIENTS, unit.sharded_gradients))
        self.ledger.drop(last)
        if self.ranks == 1:
            self.ledger.pass_by()
        if name in self.sharded:
            self.ledger.drop(reduced)
        else:
            self.sharded[name] = reduced


def _unit_bytes(weights: Weights, parameters: tuple[Source, ...]) -> UnitBytes:
    trained = [source for source in parameters if source.trainable]
    widths = {source.label: weights.compute_width(source) for source in parameters}
    is_cast = any(weights.master_width(source) != widths[source.label] for source in parameters)
    filled = [widths[source.label] * weights.padded_elements(source) for source in parameters]
    gathered = sum(filled)
    return UnitBytes(
        labels=tuple(source.label for source in parameters),
        reduced_together=tuple(
            tuple(source.label for source in parameters if (source.ep > 1) is is_divided)
            for is_divided, ranks in {source.ep > 1: weights.fsdp_ranks(source) for source in parameters}.items()
            if ranks > 1
        ),
        gathered=float(gathered),
        cast=sum(own / weights.fsdp_ranks(source) for source, own in zip(parameters, filled, strict=True)) * is_cast,
        largest=float(max(widths[s.label] * weights.elements(s) for s in parameters)) if is_cast else 0.0,
        reduced=float(sum(weights.master_width(source) * weights.padded_elements(source) for source in trained)),
        sharded_gradients=weights.resting(weights.master_width, trained),
        wider={
            source.label: float(weights.master_width(source) * weights.elements(source))
            for source in trained
            if weights.master_width(source) != widths[source.label]
        },
    )


def _spans(graph: ModelGraph, units: Mapping[str, UnitBytes]) -> tuple[dict[int, str], dict[int, str]]:
    """The unit that begins, and the one that ends, by position; a unit called several times has several of each."""
    nodes = graph.nodes
    starts: dict[int, str] = {}
    ends: dict[int, str] = {}
    before = ROOT_UNIT
    for position, node in enumerate(nodes):
        now = _owner(node.module, units)
        if now != before:
            if before:
                ends[position - 1] = before
            if now:
                starts[position] = now
        before = now
    if before:
        ends[len(nodes) - 1] = before
    return starts, ends


def _owner(module: str, units: Mapping[str, UnitBytes]) -> str:
    """The innermost unit around a module; "" for the root."""
    return next((name for name in enclosing(module) if name in units), ROOT_UNIT)
