"""Records a model's constructor on the meta device, and replays it later to make the values of one tensor at a time.

    recording = record(build_model, seed=0)          # runs it once; its tensors stay on the meta device
    recording.value(recording.model.head.weight)     # the whole weight, on the CPU

Every op of the constructor that makes or changes a tensor is recorded, in order: torch.empty, uniform_ in
reset_parameters, normal_ in a function passed to `apply`, the powers and outer products of rotary frequencies. A value
is made by replaying the ops that it depends on, so weights are as the constructor leaves them, wherever it sets them,
and only the tensors of one replay are in memory. The k-th random op draws from a generator seeded by (seed, k), so a
value depends neither on which others are made nor on the mesh. It has the same distribution as in a plain run of the
constructor, but is another draw. A torch.Generator that the constructor passes to an op is used as it is.

Where the constructor asks for values (`.item()`), or combines recorded tensors with data, the values are computed.
Recorded tensors claim to be on the CPU, because torch.nn.init skips tensors on the meta device.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpplan.core.errors import ModelError
from tpplan.torch_internals.operators import argument_names, written_by
from tpplan.torch_internals.pytree import tree_leaves, tree_map_only
from tpplan.torch_internals.recording import TorchDispatchMode
from tpplan.torch_internals.tensors import plain_calls, storage_key, without_modes

_META, _HOST = torch.device("meta"), torch.device("cpu")
#: ops that make a tensor without setting its values
_UNINITIALIZED = frozenset({
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
})  # fmt: skip
#: ops that replace all values of the tensor that they write to
_OVERWRITING = frozenset({"aten::uniform_", "aten::normal_", "aten::zero_", "aten::fill_", "aten::copy_"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageView:
    """A recorded tensor: its dtype, size (elements per dim), stride and offset in a storage, given by its key."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOp:
    """A call that made or changed storages. Tensors among its arguments are StorageViews, or have data."""

    function: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    #: the returned tensors; None for one that existed before
    made: tuple[StorageView | None, ...]
    #: keys of storages
    reads: frozenset[int]
    writes: frozenset[int]
    #: the written storages whose earlier values the op replaces completely
    overwrites: frozenset[int]
    #: number of this op among the random ones; None for an op that is not random
    draw: int | None
    #: state of the generator that the constructor passed, before the call
    generator_state: Tensor | None


@final
@dataclass(slots=True, kw_only=True)
class Tape:
    """The recorded ops in order."""

    seed: int
    ops: list[RecordedOp] = field(default_factory=list)
    #: by storage: positions of the ops that write to it; the first one made it
    writers: dict[int, list[int]] = field(default_factory=dict)
    #: all recorded storages by key; held, because the key is an address that must not be reused
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    num_draws: int = 0

    def knows(self, tensor: Tensor) -> bool:
        """True for a tensor that was made while recording."""
        return storage_key(tensor) in self.storages

    def add(self, op: RecordedOp, made: Iterable[Tensor]) -> None:
        """Appends an op; `made` are the new tensors that it returned."""
        for tensor in made:
            storage = tensor.untyped_storage()
            self.storages[storage_key(tensor)] = storage
        for written in op.writes:
            self.writers.setdefault(written, []).append(len(self.ops))
        self.ops.append(op)
        self.num_draws += op.draw is not None

    def history(self, storages: Iterable[int]) -> list[RecordedOp]:
        """Returns the ops on which the values in the storages depend, in order."""
        chosen: set[int] = set()
        looked: dict[int, int] = {}
        wanted = [(storage, len(self.ops)) for storage in storages]
        while wanted:
            storage, before = wanted.pop()
            if looked.get(storage, 0) >= before:
                continue
            looked[storage] = before
            for position in self._relevant(storage, before):
                if position not in chosen:
                    chosen.add(position)
                    wanted += [(read, position) for read in self.ops[position].reads]
        return [self.ops[position] for position in sorted(chosen)]

    def _relevant(self, storage: int, before: int) -> list[int]:
        """Returns positions, below `before`, of the op that made the storage and of the last full overwrite onwards."""
        writers = [position for position in self.writers[storage] if position < before]
        fresh = (number for number, position in enumerate(writers) if storage in self.ops[position].overwrites)
        last = max(fresh, default=0)
        return writers if last == 0 else [writers[0], *writers[last:]]

    def compute(self, views: Sequence[StorageView]) -> list[Tensor]:
        """Replays the ops that the views depend on, and returns their values on the CPU."""
        storages: dict[int, torch.UntypedStorage] = {}
        for op in self.history(view.storage for view in views):
            self._repeat(op, storages)
        return [_tensor(view, storages) for view in views]

    def _repeat(self, op: RecordedOp, storages: dict[int, torch.UntypedStorage]) -> None:
        arguments, options = tree_map_only(
            StorageView, lambda view: _tensor(view, storages), (op.arguments, {**op.options})
        )
        with torch.no_grad(), _generator(self.seed, op, options):
            results = op.function(*arguments, **options)
        for view, result in zip(op.made, _tensors(results), strict=True):
            if view is not None:
                storages[view.storage] = _laid_out(result, view).untyped_storage()


@final
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, makes tensors on the meta device and records every op on them; ops on data alone run as usual."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape(seed=seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain_calls():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        tensors = _tensors((args, options))
        takes = argument_names(func)
        if not any(self.tape.knows(tensor) for tensor in tensors) and (tensors or "device" not in takes):
            return func(*args, **options)  # all tensors have data
        if "device" in takes:
            options |= {"device": _HOST}
        written = list(written_by(func, args, options))
        if not all(self.tape.knows(tensor) for tensor in written):
            return self._with_data(func, args, options)
        generator: torch.Generator | None = options.get("generator")
        without = options | {name: None for name in ("generator", "pin_memory") if name in takes}
        try:
            result = self._without_data(func, args, without)
        except (NotImplementedError, RuntimeError):
            if written:
                raise
            return self._with_data(func, args, options)
        state = _state_before(generator, func, args, without) if generator is not None else None
        self._record(func, args, without, written, _tensors(result), state)
        return result

    def _without_data(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Runs an op on the meta device."""
        args, options = tree_map_only(
            Tensor, lambda tensor: tensor if self.tape.knows(tensor) else tensor.to(_META), (args, options)
        )
        return func(*args, **options | ({"device": _META} if "device" in options else {}))

    def _with_data(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Runs an op on the values of its recorded arguments."""
        known = [tensor for tensor in _tensors((args, options)) if self.tape.knows(tensor)]
        values = self.tape.compute([_view(tensor) for tensor in known])
        data = {id(tensor): value for tensor, value in zip(known, values, strict=True)}
        args, options = tree_map_only(Tensor, lambda tensor: data.get(id(tensor), tensor), (args, options))
        return func(*args, **options)

    def _record(
        self,
        func: Any,
        args: Any,
        options: dict[str, Any],
        written: Sequence[Tensor],
        results: Sequence[Tensor],
        generator_state: Tensor | None,
    ) -> None:
        is_new = [not self.tape.knows(result) for result in results]
        if not written and not any(is_new):
            return  # the op returned views only
        draws = torch.Tag.nondeterministic_seeded in func.tags
        overwrites = frozenset(
            storage_key(tensor)
            for tensor in written
            if func.name().partition(".")[0] in _OVERWRITING and _is_whole(tensor)
        )
        reads = {storage_key(tensor) for tensor in _tensors((args, options)) if self.tape.knows(tensor)}
        arguments, kept = tree_map_only(
            Tensor,
            lambda tensor: _view(tensor) if self.tape.knows(tensor) else tensor.detach().clone(),
            (args, options),
        )
        new = [result for result, is_new_one in zip(results, is_new, strict=True) if is_new_one]
        op = RecordedOp(
            function=func,
            arguments=arguments,
            options=kept,
            made=tuple(_view(result) if new_one else None for result, new_one in zip(results, is_new, strict=True)),
            reads=frozenset(reads - overwrites),
            writes=frozenset(storage_key(tensor) for tensor in (*written, *new)),
            overwrites=overwrites,
            draw=self.tape.num_draws if draws else None,
            generator_state=generator_state,
        )
        self.tape.add(op, new)


@final
class CpuDisguise(TorchFunctionMode):
    """While entered, recorded tensors claim to be on the CPU, and give their values to Python and numpy."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERS and self.tape.knows(args[0]):
            if _ANSWERS[func] is not None:
                return _ANSWERS[func]
            with without_modes():  # the replay must not be recorded
                return func(*self.tape.compute([_view(args[0])]), *args[1:], **kwargs or {})
        return func(*args, **kwargs or {})


_PLACE = {"device": _HOST, "is_meta": False, "is_cpu": True}
#: answers to what code may ask of a tensor besides running ops; None where the answer depends on its values
_ANSWERS: dict[Any, object] = {
    **{getattr(Tensor, name).__get__: answer for name, answer in _PLACE.items()},
    **dict.fromkeys((Tensor.tolist, Tensor.numpy, Tensor.__array__)),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A model on the meta device, and the recorded ops that make its tensors. Tensors made from data have data."""

    model: nn.Module
    tape: Tape

    def value(self, tensor: Tensor) -> Tensor:
        """Returns the whole values of a tensor of the model, as the constructor leaves it, on the CPU.

        Raises ModelError for a tensor on the meta device that the constructor did not make.
        """
        if not tensor.is_meta:
            return tensor.detach()
        if not self.tape.knows(tensor):
            raise ModelError(
                f"build_model uses a tensor {list(tensor.shape)} on the meta device that it did not make: make it "
                "inside build_model"
            )
        return self.tape.compute([_view(tensor)])[0]

    def is_set(self, tensor: Tensor) -> bool:
        """False where the constructor leaves the tensor uninitialized."""
        return any(op.function.name().partition(".")[0] not in _UNINITIALIZED for op in self._history(tensor))

    def is_drawn(self, tensor: Tensor) -> bool:
        """True where the value depends on the seed."""
        return any(op.draw is not None and op.generator_state is None for op in self._history(tensor))

    def _history(self, tensor: Tensor) -> list[RecordedOp]:
        return self.tape.history([storage_key(tensor)]) if self.tape.knows(tensor) else []


def record(build_model: Callable[[], nn.Module], *, seed: int) -> Recording:
    """Runs a constructor without memory for its weights, and returns the recording. Adds a note to its errors."""
    recorder = Recorder(seed)
    try:
        with recorder, CpuDisguise(recorder.tape):
            model = build_model()
    except Exception as error:
        error.add_note("(while build_model ran on the meta device, to learn how its weights and buffers are made)")
        raise
    return Recording(model=model, tape=recorder.tape)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _view(tensor: Tensor) -> StorageView:
    return StorageView(
        storage=storage_key(tensor),
        dtype=tensor.dtype,
        size=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
    )


def _tensor(view: StorageView, storages: Mapping[int, torch.UntypedStorage]) -> Tensor:
    """Returns the tensor of a StorageView on storages with data."""
    empty = torch.empty(0, dtype=view.dtype, device=_HOST)
    return empty.set_(storages[view.storage], view.offset, view.size, view.stride)


def _laid_out(result: Tensor, view: StorageView) -> Tensor:
    """Returns a replayed result in the strides that it had on the meta device, which recorded views of it assume."""
    assert result.dtype == view.dtype, (result.dtype, view)
    if (tuple(result.shape), tuple(result.stride()), result.storage_offset()) == (view.size, view.stride, view.offset):
        return result
    assert tuple(result.shape) == view.size, (result.shape, view)
    assert view.offset == 0, view
    return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=_HOST).copy_(result)


def _is_whole(tensor: Tensor) -> bool:
    """True for a tensor that covers its storage, each element once."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _state_before(generator: torch.Generator, func: Any, args: Any, options: Mapping[str, Any]) -> Tensor:
    """Returns the state of a generator that the constructor passed, and advances the generator as the call would."""
    state = generator.get_state()
    args, options = tree_map_only(
        Tensor,
        lambda tensor: (
            torch.empty(tensor.shape, dtype=tensor.dtype, device=_HOST) if tensor.is_meta else tensor.clone()
        ),
        (args, dict(options)),
    )
    with torch.no_grad():
        func(*args, **{**options, "generator": generator})
    return state


@contextmanager
def _generator(seed: int, op: RecordedOp, options: dict[str, Any]) -> Iterator[None]:
    """Sets the random state that a replayed op draws from, and restores the CPU's own state afterwards."""
    if op.draw is None:
        yield
        return
    if op.generator_state is not None:
        options["generator"] = torch.Generator(device=_HOST)
        options["generator"].set_state(op.generator_state)
        yield
        return
    before = torch.default_generator.get_state()
    digest = hashlib.sha256(f"{seed} {op.draw}".encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8]) >> 1)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
