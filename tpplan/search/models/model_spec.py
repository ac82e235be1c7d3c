"""A model as the command line names it: what solve is given of it, and what its source looks like."""

import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpplan.core.errors import ModelError, UsageError
from tpplan.core.files import PACKAGE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tpplan.trace.forward_arguments import Inputs

HF_PREFIX = "hf:"
#: the prefix for a configuration whose own code may run; --trust-remote-code turns the plain prefix into this one
HF_TRUSTED_PREFIX = "hf+remote-code:"
TRUST_FLAG = "--trust-remote-code"
_FILE = re.compile(r"\.py(:\w+)?$")
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def is_model(word: str) -> bool:
    """True for a word of the command line that names a model: `model.py`, `model.py:BUILDER`, `hf:config.json`."""
    return _FILE.search(word) is not None or word.startswith((HF_PREFIX, HF_TRUSTED_PREFIX))


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

    @contextlib.contextmanager
    def locating(self) -> Iterator[None]:
        """A context from which a ModelError comes out with the frames of its cause in the user's folder (locate)."""
        try:
            yield
        except ModelError as error:
            located = self.locate(error)
            if located is error:
                raise
            raise located from error

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
