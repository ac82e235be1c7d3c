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
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from tpplan.core.errors import ModelError, UsageError
from tpplan.core.files import PACKAGE
from tpplan.core.strict_json import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tpplan.trace.forward_arguments import Inputs

HF_PREFIX = "hf:"
#: the prefix for a configuration whose own code may run; --trust-remote-code turns the plain prefix into this one
HF_TRUSTED_PREFIX = "hf+remote-code:"
TRUST_FLAG = "--trust-remote-code"
BUILDER = "build_model"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD

#: lines that a file which lacks a name is told to add; {model} and {argument} are read off its classes
_SNIPPET = {
    BUILDER: "def build_model(): return {model}()",
    "example_inputs": (
        "def example_inputs(batch, seq_len): return "
        '{{name: torch.randint(1000, (batch, seq_len)) for name in ("{argument}", "targets")}}'
    ),
    "loss": 'def loss(outputs, inputs): return tpplan.cross_entropy(outputs, inputs["targets"])',
}


class UserCodeError(ModelError):
    """The user's code raised an error; `user_traceback` starts at the user's file."""

    def __init__(self, message: str, user_traceback: str) -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The arguments of tpplan.solve for a model. `source` is what the user wrote on the command line.

    `example_inputs` takes a batch and a length; without `has_length` it ignores the length. `folder` is the folder of
    the user's code; None for a model that transformers builds.
    """

    build_model: "Callable[[], nn.Module]"
    example_inputs: "Callable[[int, int], Inputs]"
    loss: "Callable[[Any, Any], Tensor] | None"
    unused_outputs: tuple[str, ...]
    source: str
    folder: Path | None
    has_length: bool = True

    def length_of(self, asked: int | None) -> int:
        """The sequence length to plan for (length_of)."""
        return length_of(asked, has_length=self.has_length, source=self.source, option="--seq-len")

    def locate(self, error: ModelError) -> ModelError:
        """The error as a UserCodeError with the frames of its cause in the user's folder; unchanged if none is."""
        cause = error.__cause__
        if self.folder is None or cause is None or isinstance(error, UserCodeError):
            return error
        frames = [
            frame for frame in traceback.extract_tb(cause.__traceback__) if _is_below(frame.filename, self.folder)
        ]
        shown = "".join(["In your files:\n", *traceback.format_list(frames)]).rstrip()
        return UserCodeError(str(error), shown) if frames else error


def _is_below(filename: str, folder: Path) -> bool:
    """True for a file of the user's own: not of a package installed below their folder, nor of tpplan."""
    path = Path(filename)
    own = path.is_relative_to(folder) and "site-packages" not in path.parts
    return own and not path.is_relative_to(PACKAGE)


def load_model_file(source: str) -> ModelSpec:
    """Loads the model that `path/model.py`, `path/model.py:BUILDER` or `hf:path/config.json` names.

    Raises ModelError where the file is missing, does not parse, or lacks a function; UserCodeError where it raises.
    """
    for prefix in (HF_PREFIX, HF_TRUSTED_PREFIX):
        if source.startswith(prefix):
            path = _config_file(source.removeprefix(prefix))
            return _load_hf(path, source, is_trusted=prefix == HF_TRUSTED_PREFIX)
    path, builder = _split(source)
    module = _import_file(path)
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
    name, builder = (
        (source, BUILDER) if source.endswith(".py") else (source.rpartition(":")[0], source.rpartition(":")[2])
    )
    if not name.endswith(".py") or not builder.isidentifier():
        raise ModelError(f"model {source!r}: expected model.py, model.py:BUILDER or {HF_PREFIX}path/config.json")
    return Path(name), builder


# Model files


def _import_file(path: Path) -> ModuleType:
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


def length_of(asked: int | None, *, has_length: bool, source: str, option: str) -> int:
    """The sequence length to plan for, 1 where samples have none. Raises UsageError where a length is asked for that
    samples do not have, or where none is and they have one. `source` and `option` name these to the user."""
    if asked is None and has_length:
        raise UsageError(
            f"{source}: expected {option}, the length that example_inputs takes; where samples have none, define "
            "example_inputs(batch)"
        )
    if asked is not None and not has_length:
        raise UsageError(f"{option} {asked}: example_inputs(batch) of {source} takes no length: leave it out")
    return 1 if asked is None else asked


def takes_batch_alone(example_inputs: Callable[..., object]) -> bool:
    """True for a function of one positional argument: samples that have no length."""
    kinds = [parameter.kind for parameter in inspect.signature(example_inputs).parameters.values()]
    num_positional = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, _POSITIONAL) for kind in kinds)
    return num_positional == 1 and inspect.Parameter.VAR_POSITIONAL not in kinds


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


# Hugging Face configurations


def trusted(source: str) -> str:
    """The source with the prefix that lets the configuration's own code run. Raises UsageError for a model file."""
    if not source.startswith((HF_PREFIX, HF_TRUSTED_PREFIX)):
        raise UsageError(f"{TRUST_FLAG} goes with {HF_PREFIX}path/config.json alone, got {source!r}")
    return source if source.startswith(HF_TRUSTED_PREFIX) else HF_TRUSTED_PREFIX + source.removeprefix(HF_PREFIX)


def _config_file(name: str) -> Path:
    """The config.json that a path, its folder, or a name on the hub with a local copy stands for. Nothing is loaded
    from the network."""
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    if path.exists() or path.suffix == ".json" or not _HUB_NAME.fullmatch(name):
        return path
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return path
    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else path


def _load_hf(path: Path, source: str, *, is_trusted: bool) -> ModelSpec:
    """A Hugging Face model from a local config.json, with random weights in float32.

    Code that the configuration names (auto_map, kernels from elsewhere) runs only where `is_trusted`. Raises ModelError
    where the file cannot be used.
    """
    data = _config(path)
    if not is_trusted and (kernels := _kernels_of_others(data)):
        raise ModelError(f"{path}: attn_implementation {kernels!r:.80} names code from elsewhere: {_HOW_TO_TRUST}")
    config = _hf_config(path, source, data, is_trusted=is_trusted)
    config.use_cache = False
    text_config = config.get_text_config()
    text_config.use_cache = False

    def example_inputs(batch: int, seq_len: int) -> "dict[str, Tensor]":
        import torch

        tokens = torch.randint(text_config.vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(0))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return ModelSpec(
        build_model=_hf_builder(path, data, config, is_trusted=is_trusted),
        example_inputs=example_inputs,
        loss=None,
        unused_outputs=("logits",),
        source=source,
        folder=None,
    )


def _hf_config(path: Path, source: str, data: Mapping[str, Any], *, is_trusted: bool) -> Any:
    """transformers' configuration of a config.json, `data` its content. Raises ModelError where transformers is missing
    or cannot read the file."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"{source}: needs the extra `hf`: pip install 'tpplan[hf]' ({error})") from None
    try:
        # The configuration's own code is in files beside config.json.
        where = str(path.parent if is_trusted and path.name == "config.json" else path)
        return transformers.AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=is_trusted)
    except Exception as error:
        if "auto_map" in data and not is_trusted:
            raise ModelError(f"{path}: its auto_map names code of its own: {_HOW_TO_TRUST}") from error
        raise ModelError(f"{path}: transformers cannot read it: {type(error).__name__}: {error}") from error


def _hf_builder(path: Path, data: Mapping[str, Any], config: Any, *, is_trusted: bool) -> "Callable[[], nn.Module]":
    """A function that builds a configuration's model with random weights in float32. It raises ModelError where
    transformers fails."""
    import transformers

    architectures = [name for name in data.get("architectures") or () if isinstance(name, str)]
    classes = [getattr(transformers, name, None) for name in architectures]
    model_class = next((found for found in classes if hasattr(found, "_from_config")), None)

    def build_model() -> "nn.Module":
        import torch

        # transformers chooses the attention: scaled_dot_product_attention where the model supports it.
        options = {"dtype": torch.float32}
        try:
            if model_class is not None:
                model: nn.Module = model_class._from_config(config, **options)
            else:
                from_config: Callable[..., nn.Module] = transformers.AutoModelForCausalLM.from_config
                model = from_config(config, trust_remote_code=is_trusted, **options)
        except Exception as error:
            if "auto_map" in data and not is_trusted:
                raise ModelError(f"{path}: its auto_map names code of its own: {_HOW_TO_TRUST}") from error
            raise ModelError(
                f"{path}: {type(error).__name__} while building {architectures or 'it'}: {error}"
            ) from error
        return model

    return build_model


_HOW_TO_TRUST = f"it is not run; if you have read it and trust it, give {TRUST_FLAG}"


def _config(path: Path) -> dict[str, Any]:
    """The configuration in a file. Raises ModelError where the file is missing or no JSON object."""
    if not path.exists():
        raise ModelError(
            f"{path}: no such config.json, folder, or model in the local cache of the hub; save one with "
            "`config.save_pretrained(folder)`, or download it first"
        )
    data = read_json(path, origin=str(path), error=ModelError)
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected an object, as `config.save_pretrained(folder)` writes it")
    return data


def _kernels_of_others(value: object) -> str:
    """The first repository of attention kernels that a configuration or a part of it names; "" where none."""
    members = list(value.items()) if isinstance(value, dict) else []
    for key, member in members:
        if str(key).endswith("attn_implementation"):
            named = member.values() if isinstance(member, dict) else (member,)
            if found := next((name for name in named if isinstance(name, str) and "/" in name), ""):
                return found
        if found := _kernels_of_others(member):
            return found
    return ""
