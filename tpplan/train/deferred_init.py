"""What a model's constructor does to its tensors, recorded without memory and done again for one tensor at a time.

    recording = record(build_model, seed=0)          # runs it once; what it makes stays on the meta device
    recording.value(recording.model.head.weight)     # that one, whole, on the host

Every op of the constructor that makes or changes a tensor is kept, in order: torch.empty, uniform_ in reset_parameters,
normal_ in a function that `apply` takes to every module, the powers and outer products of rotary frequencies. A value
is made by doing again those ops that it comes from, so that weights are as the constructor leaves them, wherever it set
them, and only what one of them needs is in memory. The k-th random op draws from a generator seeded by (seed, k): a
value depends neither on which others are made nor on the mesh. It is thus another draw than that of the same
constructor run from one generator, of the same distribution. A generator that the constructor brings along is heeded.

Where the constructor asks for values (`.item()`), or mixes in tensors with data, those are computed. Tensors say that
they are on the CPU meanwhile: torch.nn.init leaves those on the meta device alone.
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
from tpplan.torch_internals.recording import TorchDispatchMode, without_modes
from tpplan.torch_internals.tensors import plain_calls, storage_key

_META, _HOST = torch.device("meta"), torch.device("cpu")
#: ops that make a tensor of whatever lies in memory
_UNINITIALIZED = frozenset({
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
})  # fmt: skip
#: ops after which nothing is left of what was there
_OVERWRITING = frozenset({"aten::uniform_", "aten::normal_", "aten::zero_", "aten::fill_", "aten::copy_"})


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A recorded tensor: its part of a storage, which is known by a number."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A call that made or changed storages. Tensors among its arguments are views, or constants.

    `draw` numbers the random ones; `generator_state` is that of a generator which the constructor brought along.
    """

    function: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    #: each tensor that it returned, None for one that was there already
    made: tuple[View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    #: of those, the storages whose earlier content is gone
    overwrites: frozenset[int]
    draw: int | None
    generator_state: Tensor | None


@final
@dataclass(slots=True, kw_only=True)
class Tape:
    """The ops in order, and by storage the positions of those that write it, its maker's first."""

    seed: int
    ops: list[Op] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)
    #: a storage is known by its address, which must not be given to another
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    num_draws: int = 0

    def knows(self, tensor: Tensor) -> bool:
        """It was made while recording."""
        return storage_key(tensor) in self.storages

    def add(self, op: Op, made: Iterable[Tensor]) -> None:
        """A further op, and the new tensors that it returned."""
        for tensor in made:
            storage = tensor.untyped_storage()
            self.storages[storage_key(tensor)] = storage
        for written in op.writes:
            self.writers.setdefault(written, []).append(len(self.ops))
        self.ops.append(op)
        self.num_draws += op.draw is not None

    def history(self, storages: Iterable[int]) -> list[Op]:
        """The ops that the storages' content comes from, in order."""
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
        """Its maker, and the writers from the last one on that left nothing of what was there."""
        writers = [position for position in self.writers[storage] if position < before]
        fresh = (number for number, position in enumerate(writers) if storage in self.ops[position].overwrites)
        last = max(fresh, default=0)
        return writers if last == 0 else [writers[0], *writers[last:]]

    def compute(self, views: Sequence[View]) -> list[Tensor]:
        """What the views hold now, on the host."""
        storages: dict[int, torch.UntypedStorage] = {}
        for op in self.history(view.storage for view in views):
            self._repeat(op, storages)
        return [_tensor(view, storages) for view in views]

    def _repeat(self, op: Op, storages: dict[int, torch.UntypedStorage]) -> None:
        arguments, options = tree_map_only(View, lambda view: _tensor(view, storages), (op.arguments, {**op.options}))
        with torch.no_grad(), _generator(self.seed, op, options):
            results = op.function(*arguments, **options)
        for view, result in zip(op.made, _tensors(results), strict=True):
            if view is not None:
                storages[view.storage] = _laid_out(result, view).untyped_storage()


@final
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, what is made without data is made on the meta device, and every op on it is put on the tape."""

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
            return func(*args, **options)  # on data alone
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
        args, options = tree_map_only(
            Tensor, lambda tensor: tensor if self.tape.knows(tensor) else tensor.to(_META), (args, options)
        )
        return func(*args, **options | ({"device": _META} if "device" in options else {}))

    def _with_data(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
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
            return  # a view
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
        op = Op(
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
class Disguise(TorchFunctionMode):
    """What is on the tape says that it is on the CPU, and gives its values to Python and numpy."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKING and self.tape.knows(args[0]):
            if _ASKING[func] is not None:
                return _ASKING[func]
            with without_modes():  # the recorder among them
                return func(*self.tape.compute([_view(args[0])]), *args[1:], **kwargs or {})
        return func(*args, **kwargs or {})


_PLACE = {"device": _HOST, "is_meta": False, "is_cpu": True}
#: what may be asked of a tensor besides ops, with the answer; None where that depends on its values
_ASKING: dict[Any, object] = {
    **{getattr(Tensor, name).__get__: answer for name, answer in _PLACE.items()},
    **dict.fromkeys((Tensor.tolist, Tensor.numpy, Tensor.__array__)),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A model whose tensors are on the meta device, but for those that were made from data, and how each is made."""

    model: nn.Module
    tape: Tape

    def value(self, tensor: Tensor) -> Tensor:
        """A tensor of the model as the constructor leaves it, whole, on the host.

        Raises ModelError for one that was on the meta device before.
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
        """False where the constructor leaves what it found in memory."""
        return any(op.function.name().partition(".")[0] not in _UNINITIALIZED for op in self._history(tensor))

    def is_drawn(self, tensor: Tensor) -> bool:
        """True where the value depends on the seed."""
        return any(op.draw is not None and op.generator_state is None for op in self._history(tensor))

    def _history(self, tensor: Tensor) -> list[Op]:
        return self.tape.history([storage_key(tensor)]) if self.tape.knows(tensor) else []


def record(build_model: Callable[[], nn.Module], *, seed: int) -> Recording:
    """Runs a constructor without making its weights. Its own errors come through, with a note."""
    recorder = Recorder(seed)
    try:
        with recorder, Disguise(recorder.tape):
            model = build_model()
    except Exception as error:
        error.add_note("(while build_model ran on the meta device, to learn how its weights and buffers are made)")
        raise
    return Recording(model=model, tape=recorder.tape)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _view(tensor: Tensor) -> View:
    return View(
        storage=storage_key(tensor),
        dtype=tensor.dtype,
        size=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
    )


def _tensor(view: View, storages: Mapping[int, torch.UntypedStorage]) -> Tensor:
    """The tensor with data that a view stands for."""
    empty = torch.empty(0, dtype=view.dtype, device=_HOST)
    return empty.set_(storages[view.storage], view.offset, view.size, view.stride)


def _laid_out(result: Tensor, view: View) -> Tensor:
    """A result in the strides that it had on the meta device: later views count on them."""
    assert result.dtype == view.dtype, (result.dtype, view)
    if (tuple(result.shape), tuple(result.stride()), result.storage_offset()) == (view.size, view.stride, view.offset):
        return result
    assert tuple(result.shape) == view.size, (result.shape, view)
    assert view.offset == 0, view
    return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=_HOST).copy_(result)


def _is_whole(tensor: Tensor) -> bool:
    """It is all of its storage, each element once."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _state_before(generator: torch.Generator, func: Any, args: Any, options: Mapping[str, Any]) -> Tensor:
    """The state of a generator of the constructor's own, which is then moved on as the call would."""
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
def _generator(seed: int, op: Op, options: dict[str, Any]) -> Iterator[None]:
    """The random state that an op draws from; the host's own is as before afterwards."""
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
