"""Loads the model that the user names on the command line: `model.py`, `model.py:BUILDER`, or `hf:config.json`, where a
folder or the name of a model in the hub's local cache may stand for the config.

A model file holds plain functions:

    build_model() -> nn.Module
    example_inputs(batch, seq_len) -> dict of keyword arguments, or a tuple
    example_inputs(batch)                        instead, where samples (images, tables, graphs) have no length
    loss(outputs, inputs) -> scalar              optional; without it a scalar output of the model is the loss
    unused_outputs = ("logits",)                 optional; outputs that training does not read

Where the user's own code fails, UserCodeError carries the traceback from their file on.
"""

import contextlib
import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from tpplan.core.errors import ModelError
from tpplan.search.models.hf_model import config_file, load_hf
from tpplan.search.models.model_spec import HF_PREFIX, HF_TRUSTED_PREFIX, ModelSpec, UserCodeError, takes_batch_alone

BUILDER = "build_model"

#: lines that a file which lacks a name is told to add; {model} and {argument} are read off its classes
_SNIPPET = {
    BUILDER: "def build_model(): return {model}()",
    "example_inputs": (
        "def example_inputs(batch, seq_len): return "
        '{{name: torch.randint(1000, (batch, seq_len)) for name in ("{argument}", "targets")}}'
    ),
    "loss": 'def loss(outputs, inputs): return tpplan.cross_entropy(outputs, inputs["targets"])',
}


def load_model_file(source: str) -> ModelSpec:
    """Loads the model that `path/model.py`, `path/model.py:BUILDER` or `hf:path/config.json` names.

    Raises ModelError where the file is missing, does not parse, or lacks a function; UserCodeError where it raises.
    """
    for prefix in (HF_PREFIX, HF_TRUSTED_PREFIX):
        if source.startswith(prefix):
            path = config_file(source.removeprefix(prefix))
            return load_hf(path, source, is_trusted=prefix == HF_TRUSTED_PREFIX)
    path, builder = _split(source)
    module = import_file(path)
    functions: dict[str, Any] = {name: getattr(module, name, None) for name in (builder, "example_inputs", "loss")}
    _check_names(path, module, functions, builder)
    unused = getattr(module, "unused_outputs", ())
    if not isinstance(unused, tuple | list) or not all(isinstance(name, str) for name in unused):
        raise ModelError(f'{path}: unused_outputs: expected a tuple of names such as ("logits",), got {unused!r}')
    return ModelSpec(
        build_model=_guarded(path, builder, functions[builder]),
        example_inputs=_checked_inputs(path, functions["example_inputs"]),
        loss=functions["loss"],
        unused_outputs=tuple(unused),
        source=source,
        folder=path.resolve().parent,
        has_length=not takes_batch_alone(functions["example_inputs"]),
    )


def _split(source: str) -> tuple[Path, str]:
    """`dir/model.py:builder` as (dir/model.py, builder). Raises ModelError where no Python file is named."""
    name, _, builder = (source, "", BUILDER) if source.endswith(".py") else source.rpartition(":")
    if not name.endswith(".py") or not builder.isidentifier():
        raise ModelError(f"model {source!r}: expected model.py, model.py:BUILDER or {HF_PREFIX}path/config.json")
    return Path(name), builder


# Model files


def import_file(path: Path) -> ModuleType:
    """Runs a file as a module, with the file's folder on sys.path meanwhile."""
    code = _compile(path)
    name = f"tpplan_model_{path.stem}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module  # dataclasses and pickle look it up by name
    with _user_code(path, "importing it"):
        exec(code, module.__dict__)
    return module


def _compile(path: Path) -> Any:
    try:
        text = importlib.util.decode_source(path.read_bytes())
        return compile(text, str(path.resolve()), "exec", dont_inherit=True)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1, cutoff=0.75)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise ModelError(f"{path}: no such model file{hint}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SyntaxError as error:
        where = f"{path}:{error.lineno}" if error.lineno else f"{path}"
        line = (error.text or "").rstrip()
        caret = "\n  " + " " * max((error.offset or 1) - 1, 0) + "^" if error.offset and line else ""
        raise ModelError(f"{where}: {error.msg}" + (f"\n  {line}{caret}" if line else "")) from None
    except ValueError as error:
        raise ModelError(f"{path}: not Python text: {error}") from None


def _check_names(path: Path, module: ModuleType, functions: Mapping[str, Any], builder: str) -> None:
    """Raises ModelError, with lines to paste, where the file lacks a function. `loss` alone may be absent."""
    if functions["loss"] is not None and not callable(functions["loss"]):
        raise ModelError(f"{path}: loss: expected a function of (outputs, inputs), got {functions['loss']!r}")
    missing = [name for name in (builder, "example_inputs") if not callable(functions[name])]
    if not missing:
        return
    if builder != BUILDER and builder in missing:
        own = [name for name, value in vars(module).items() if callable(value) and value.__module__ == module.__name__]
        near = difflib.get_close_matches(builder, own, n=1)
        raise ModelError(
            f"{path}: no function {builder!r}"
            + (f"; did you mean {near[0]!r}?" if near else f"; it defines {', '.join(own) or 'none'}")
        )
    wanted = [name for name in _SNIPPET if functions.get(name) is None and (name != "loss" or len(missing) > 1)]
    model, argument = _last_model(module)
    lines = ["import torch, tpplan", *(_SNIPPET[name].format(model=model, argument=argument) for name in wanted)]
    raise ModelError(f"{path}: does not define {' or '.join(missing)}; add\n\n  " + "\n  ".join(lines) + "\n")


def _last_model(module: ModuleType) -> tuple[str, str]:
    """Names of the file's last class with a forward and of that forward's first argument, for the lines to paste."""
    found = "MyModel", "tokens"
    for name, value in vars(module).items():
        code = getattr(vars(value).get("forward"), "__code__", None) if isinstance(value, type) else None
        if code is not None and value.__module__ == module.__name__ and code.co_argcount > 1:
            found = name, code.co_varnames[1]
    return found


def _guarded(path: Path, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function, its errors turned into UserCodeError; it may import files beside its own."""

    def call(*arguments: object) -> Any:
        with _user_code(path, f"calling {name}({', '.join(map(repr, arguments))})"):
            return function(*arguments)

    return call


def _checked_inputs(path: Path, function: Callable[..., Any]) -> Callable[[int, int], Any]:
    """The user's example_inputs as a function of batch and length, with a ModelError where it returns neither a mapping
    nor a tuple."""
    guarded, is_alone = _guarded(path, "example_inputs", function), takes_batch_alone(function)

    def call(batch: int, seq_len: int) -> Any:
        inputs = guarded(batch) if is_alone else guarded(batch, seq_len)
        if not isinstance(inputs, Mapping | tuple):
            raise ModelError(
                f"{path}: example_inputs({batch}, {seq_len}) returned {type(inputs).__name__}, expected a dict of "
                "forward's keyword arguments or a tuple of its arguments"
            )
        return inputs

    return call


@contextlib.contextmanager
def _user_code(path: Path, doing: str) -> Iterator[None]:
    """Runs the user's code with their folder importable. Turns its errors, sys.exit included, into UserCodeError."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    except (Exception, SystemExit) as error:
        hint = (
            ": put code that is for running the file as a script under `if __name__ == '__main__':`"
            if isinstance(error, SystemExit)
            else ""
        )
        raise UserCodeError(
            f"{path}: {type(error).__name__} while {doing}{hint}", _traceback_from(path, error)
        ) from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _traceback_from(path: Path, error: BaseException) -> str:
    """The error's traceback from the first frame of the user's file on; causes keep their whole tracebacks."""
    file = str(path.resolve())
    start: TracebackType | None = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename != file:
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__)).rstrip()
