"""Replays a plan's step node by node, as torch runs it, to find its peak memory, of what parts and in which module.

Forward runs the graph's nodes in order, backward the same nodes in reverse: autograd runs the node made last first. It
frees what a node saved as soon as that node's backward has run, and adds up the gradients of a value that several read.
A recomputed module runs its forward again when backward reaches its end. FSDP2's own memory is counted in
tpplan.costs.prediction.fsdp_memory. At the end of a step the optimizer's temporaries are beside parameters, gradients
and states.
"""

from tpplan.apply.collectives.gradient_buckets import BUCKET_BYTES
from tpplan.core.graph import Boundary, Op, Source, SourceKind
from tpplan.core.layout import R
from tpplan.costs.conversion_memory import backward_move, forward_move
from tpplan.costs.prediction.activation_lifetimes import Lifetimes, Run, Storage
from tpplan.costs.prediction.fsdp_memory import Shards
from tpplan.costs.prediction.memory_ledger import Course, Ledger, Peak, Piece
from tpplan.costs.prediction.weights import Weights
from tpplan.costs.runs.execute import Executor
from tpplan.costs.runs.execution import local_bytes
from tpplan.layouts.assignment import Assignment
from tpplan.layouts.readings import reading_name
from tpplan.plan.parts import (
    BESIDE,
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    SAVED,
    SOURCES,
    STATES,
    TRANSIENTS,
    UNSHARDED_PARAMETERS,
)
from tpplan.plan.plan import Pass


def memory(lifetimes: Lifetimes) -> Peak:
    """The peak of a step's memory on one rank, in bytes by part, and where it is."""
    return _Replay(lifetimes).peak()


def course(assignment: Assignment, executor: Executor) -> tuple[Peak, ...]:
    """The most that a rank holds in bytes while each module runs, from the first node of a step to its end; of several
    micro-batches, those that the peak is looked for in. The largest of them is that of `memory`."""
    ledger = Course()
    _Replay(Lifetimes(assignment, executor), ledger).peak()
    return tuple(ledger.moments)


def kept_bytes(assignment: Assignment, executor: Executor) -> float:
    """Bytes of activations that a rank holds between a micro-batch's forward and its backward."""
    replay = _Replay(Lifetimes(assignment, executor))
    replay.forward(range(len(replay.nodes)), None)
    return replay.ledger.live[SAVED]


def bytes_between(assignment: Assignment, executor: Executor) -> tuple[float, float]:
    """Bytes that a rank holds of a model that does not run: of the activations of each micro-batch between its forward
    and its backward, and of parameters, gradients, states and what FSDP leaves gathered; gradients that it reduces once
    a step are whole."""
    replay = _Replay(Lifetimes(assignment, executor))
    replay.forward(range(len(replay.nodes)), None)
    weights, live = replay.weights, replay.ledger.live
    gradients = weights.resting(weights.master_width, weights.trainable)
    if assignment.whole_gradients and assignment.uses_fsdp:
        gradients = float(sum(weights.master_width(own) * weights.elements(own) for own in weights.trainable))
    resting = weights.resting(weights.master_width) + gradients + weights.states()
    return live[SAVED], resting + live[UNSHARDED_PARAMETERS]


class _Replay:
    """The live memory of a step that is replayed: activations by storage, gradients by value."""

    def __init__(self, lifetimes: Lifetimes, ledger: Ledger | None = None) -> None:
        self.assignment = assignment = lifetimes.assignment
        self.lifetimes = lifetimes
        self.graph = assignment.graph
        self.nodes = self.graph.nodes
        self.ledger = ledger or Ledger()
        self.weights = Weights(assignment=assignment)
        self.parameters = {source.result: source for source in self.graph.parameters}
        self.is_averaged = assignment.num_averages is not None
        uses_fsdp = assignment.uses_fsdp and not self.is_averaged
        self.shards = Shards.of(assignment, self.ledger) if uses_fsdp else None
        self.uses = {storage: lifetimes.uses(storage) for made in lifetimes.made.values() for storage in made}
        self.pieces: dict[Storage, Piece] = {}
        #: saved storages, by the position whose backward reads them last
        self.released: dict[int, list[Storage]] = {}
        self.gradients: dict[str, Piece] = {}
        self.of_parameters: dict[str, Piece] = {}
        #: parameters with a gradient of this micro-batch, and of an earlier one
        self.read: set[str] = set()
        self.of_earlier: frozenset[str] = frozenset()

    def peak(self) -> Peak:
        """The peak over up to two micro-batches: the backward of the second meets the gradients of the first. Whole
        gradients are replayed over up to three: the first makes them, others add to them, the last reduces them."""
        self._hold_throughout()
        replayed = min(self.assignment.accumulation_steps, 3 if self.assignment.whole_gradients else 2)
        for index in range(replayed):
            if self.shards is not None:
                self.shards.reduces = index == replayed - 1 or not self.assignment.whole_gradients
                self.shards.keeps = index < replayed - 1 and self.assignment.gathered_once
            self._micro_batch()
        self.ledger.during, self.ledger.module = Pass.STEP, ""
        if self.is_averaged:
            self._average()
        self.ledger.pass_by(TRANSIENTS, self.weights.step_temporaries())
        assert self.ledger.peak is not None
        return self.ledger.peak

    def _hold_throughout(self) -> None:
        weights = self.weights
        names = [source.result for source in self.graph.sources if source.kind is not SourceKind.PARAMETER]
        layouts, tp = self.assignment.crossing, self.assignment.tp
        for part, num_bytes in (
            (PARAMETERS, weights.resting(weights.master_width)),
            (STATES, weights.states()),
            (SOURCES, sum(local_bytes(self.graph.values[x], layouts.get(x, R), tp) for x in names)),
        ):
            self.ledger.hold(Piece(part, float(num_bytes)))
        if self.assignment.beside_bytes:
            self.ledger.hold(Piece(BESIDE, self.assignment.beside_bytes))
        if others := self.assignment.in_flight - 1:
            self.ledger.hold(Piece(SAVED, others * kept_bytes(self.assignment, self.lifetimes.executor)))

    def _micro_batch(self) -> None:
        everything = range(len(self.nodes))
        self.read, self.of_earlier = set(), frozenset(self.of_parameters)
        self.ledger.during = Pass.FORWARD
        self.forward(everything, None)
        self.ledger.during = Pass.BACKWARD
        if self.graph.loss is not None:
            loss = self.graph.values[self.graph.loss]
            self._add_gradient(loss.name, Piece(TRANSIENTS, float(loss.num_bytes)))
        for position in reversed(everything):
            run = self.lifetimes.run_at.get(position)
            if self.shards is not None:
                self.shards.before_backward(position)
            if run is not None and position == run.positions[-1]:
                self.forward(range(run.positions.start, self.lifetimes.stop(run) + 1), run)
            self._backward(position)
            if self.shards is not None:
                self.shards.after_backward(position)
        if self.shards is not None:
            self.shards.finish()
        self._reduce_summands()
        for name in list(self.gradients):
            self.ledger.drop(self.gradients.pop(name))

    # Forward

    def forward(self, positions: range, run: Run | None) -> None:
        """Runs the forward of nodes; `run` is the call that runs again in backward, None in the first forward."""
        dying: dict[int, list[Storage]] = {}
        for position in positions:
            node = self.nodes[position]
            self.ledger.module = node.module
            if run is None and self.shards is not None:
                self.shards.before_forward(position)
            is_held = run is not None and self.lifetimes.is_held(position)
            for storage in self.lifetimes.made[position]:
                # A product that its mode lets go of is there again, without its values, unless the replay ends with it.
                if not is_held or (position < positions[-1] and self.lifetimes.is_let_go(storage)):
                    self._make(storage, run)
                    dying.setdefault(min(storage.last_reader, positions[-1]), []).append(storage)
            if not is_held:
                self._hold_while_running(node, position)
            for storage in dying.pop(position, ()):
                self._unmake(storage)
            if run is None and self.shards is not None:
                self.shards.after_forward(position)

    def _hold_while_running(self, node: Op | Boundary, position: int) -> None:
        if isinstance(node, Op):
            self.ledger.pass_by(TRANSIENTS, float(self.lifetimes.executions[position].forward_bytes))
            return
        value = self.graph.values[node.operand]
        move = forward_move(self.lifetimes.conversion(node), value.shape, value.dtype, self.assignment.mesh.tp)
        self.ledger.pass_by(BUFFERS, float(move.held_bytes - move.result_bytes))

    def _make(self, storage: Storage, run: Run | None) -> None:
        """Makes a storage live while nodes read it, and while a backward that follows needs it."""
        if storage in self.pieces:  # saved in the first forward
            self.ledger.hold(self.pieces[storage])
            return
        wanted = self.uses[storage] if run is None else storage.keepers.intersection(run.positions)
        piece = Piece(SAVED if wanted else TRANSIENTS, storage.num_bytes)
        self.pieces[storage] = self.ledger.hold(piece)
        if wanted:
            self.ledger.hold(piece)
            self.released.setdefault(min(wanted), []).append(storage)

    def _unmake(self, storage: Storage) -> None:
        self.ledger.drop(self.pieces[storage])
        if not self.pieces[storage].holders:
            del self.pieces[storage]

    # Backward

    def _backward(self, position: int) -> None:
        node = self.nodes[position]
        self.ledger.module = node.module
        arrived = [self.gradients.pop(name, None) for name in node.results]
        if any(piece is not None for piece in arrived):
            if isinstance(node, Op):
                self._backward_of_op(node, position, arrived)
            else:
                self._backward_of_boundary(node, arrived[0])
        for piece in arrived:
            self.ledger.drop(piece)
        for storage in self.released.pop(position, ()):
            self._unmake(storage)

    def _backward_of_op(self, op: Op, position: int, arrived: list[Piece | None]) -> None:
        execution = self.lifetimes.executions[position]
        strategy = self.lifetimes.strategy(op.name)
        tp = self.assignment.mesh.tp
        given = sum(
            local_bytes(self.graph.values[name], layout, tp)
            for name, layout in zip(op.results, strategy.results, strict=True)
            if self.graph.values[name].carries_gradient
        )
        self.ledger.pass_by(TRANSIENTS, float(max(0, execution.backward_bytes - given)))
        passed_on = next((piece for piece in arrived if piece is not None), None)
        for index, gradient in enumerate(execution.gradients):
            if gradient is None:
                continue
            name = op.operands[index]
            piece = passed_on if gradient.is_view and passed_on else Piece(TRANSIENTS, float(gradient.num_bytes))
            if name in self.parameters:
                self._add_to_parameter(self.parameters[name], op, index, piece)
            else:
                self._add_gradient(name, piece)

    def _backward_of_boundary(self, boundary: Boundary, arrived: Piece | None) -> None:
        assert arrived is not None
        value = self.graph.values[boundary.operand]
        if not value.carries_gradient:
            return
        conversion = self.lifetimes.conversion(boundary)
        move = backward_move(conversion, value.shape, value.dtype, self.assignment.mesh.tp)
        self.ledger.pass_by(BUFFERS, float(move.held_bytes))
        piece = Piece(TRANSIENTS, float(move.result_bytes)) if move.held_bytes else arrived
        if boundary.operand in self.parameters:
            self._add_to_parameter(self.parameters[boundary.operand], boundary, 0, piece)
        else:
            self._add_gradient(boundary.operand, piece)

    def _add_gradient(self, name: str, piece: Piece) -> None:
        """Adds a gradient to a value's others: in place, or in a new tensor where something else holds their sum."""
        earlier = self.gradients.pop(name, None)
        if earlier is None:
            self.gradients[name] = self.ledger.hold(piece)
            return
        self.ledger.hold(piece)
        if earlier.holders > 1:
            total = self.ledger.hold(Piece(TRANSIENTS, max(piece.num_bytes, earlier.num_bytes)))
            self.ledger.drop(earlier)
        else:
            total = earlier
        self.ledger.drop(piece)
        self.gradients[name] = total

    # Gradients of parameters

    def _add_to_parameter(self, source: Source, reader: Op | Boundary, index: int, piece: Piece) -> None:
        """Converts a gradient from the layout of reading to that at rest, and adds it to the parameter's."""
        if not source.trainable:
            return
        self.ledger.hold(piece)
        at_rest = self._converted_back(source, reader, index, piece)
        if source.label in self.read:
            # Of several readings the gradients, which are DTensors, add up in a new tensor, before any earlier ones.
            self.ledger.pass_by(TRANSIENTS, at_rest.num_bytes * (1 + (source.label in self.of_earlier)))
        self.read.add(source.label)
        if self.shards is not None:
            self.shards.add_gradient(source, at_rest)
        elif source.label not in self.of_parameters:
            self.of_parameters[source.label] = self.ledger.hold(at_rest)
            self.ledger.rename(at_rest, GRADIENTS)
        self.ledger.drop(at_rest)

    def _converted_back(self, source: Source, reader: Op | Boundary, index: int, piece: Piece) -> Piece:
        value = self.graph.values[source.result]
        conversion = self.weights.reading(reading_name(reader, index)) if isinstance(reader, Op) else None
        if source.label in self.weights.multiplied:
            multiple = self.ledger.hold(Piece(TRANSIENTS, piece.num_bytes))
            self.ledger.drop(piece)
            return multiple
        if conversion is None:
            return piece
        move = backward_move(conversion, value.shape, value.dtype, self.assignment.mesh.tp)
        if not move.held_bytes:
            return piece
        self.ledger.pass_by(BUFFERS, float(move.held_bytes))
        converted = self.ledger.hold(Piece(TRANSIENTS, float(move.result_bytes)))
        self.ledger.drop(piece)
        return converted

    def _reduce_summands(self) -> None:
        """Copies gradients that are summed over tp into buckets."""
        total = self.weights.resting(self.weights.master_width, self.weights.summands)
        self.ledger.pass_by(BUFFERS, min(total, float(BUCKET_BYTES)))

    def _average(self) -> None:
        """Copies all gradients into buckets, also those that no traced op gives."""
        unseen = [source for source in self.weights.trainable if source.label not in self.of_parameters]
        self.ledger.hold(Piece(GRADIENTS, self.weights.resting(self.weights.master_width, unseen)))
        total = self.weights.resting(self.weights.master_width, self.weights.trainable)
        if self.assignment.mesh.replicate > 1:
            self.ledger.pass_by(BUFFERS, min(total, float(BUCKET_BYTES)))
