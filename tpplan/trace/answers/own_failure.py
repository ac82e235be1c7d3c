"""Tells whether an exception is the model's failure, or a failure of tpplan or of torch beneath it.

A forward runs on meta tensors inside code of tpplan. An error that the model's code raises, or an op that the model's
code called, is about the model or about the plan that was applied to it. An error of tpplan's own code is about
neither, and no plan may be refused for it."""

import os
from collections.abc import Sequence
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType

import torch

from tpplan.core.errors import InternalError, TpplanError, first_line
from tpplan.core.files import PACKAGE
from tpplan.torch_internals.probes import failed_probes
from tpplan.torch_internals.versions import complaint
from tpplan.trace.answers.planned_device import is_foreign
from tpplan.trace.answers.unbacked_int import UnknownValueError
from tpplan.trace.hooks.call_rewriting import is_frame_of_own_code

_TPPLAN = str(PACKAGE) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
#: torch's files that count as code of models: layers and their functions, without the code that calls a layer
_LAYERS = tuple(
    str(Path(_TORCH, *parts)) for parts in (("nn", "modules", ""), ("nn", "functional.py"), ("nn", "utils", ""))
)
#: tpplan's files that read parameters and convert values in an applied model: an error there is never the model's
_APPLYING = tuple(
    str(Path(_TPPLAN, "apply", *parts))
    for parts in (
        ("modules", "local_modules.py"),
        ("modules", "parameter_reads.py"),
        ("collectives", "redistribute.py"),
    )
)
_CALLING_LAYERS = str(Path(_TORCH, "nn", "modules", "module.py"))
#: errors that mean wrong Python code; torch's ops raise others for wrong operands
_BREAKS = (AttributeError, NameError, ImportError, AssertionError)


def is_layer(file: str) -> bool:
    """True for a file of torch that defines layers or their functions."""
    return file.startswith(_LAYERS) and file != _CALLING_LAYERS


def own_failure(error: BaseException | None, *, has_run: bool) -> InternalError | None:
    """The error to raise where an exception is a failure of tpplan or torch; None where it is the model's.

    has_run: the model's code has run before, on other shapes, so a missing attribute in torch is no fault of the model.
    """
    if isinstance(error, InternalError):
        return error
    if error is None or isinstance(error, (TpplanError, UnknownValueError)):
        return None
    frames = _frames_of(error)
    inside = _after_model(frames)
    if any(map(_is_applying, inside)) or (isinstance(error, _BREAKS) and _is_ours(frames[-1:], has_run)):
        return as_internal(error)
    if complaint(torch.__version__) and (missing := failed_probes()):
        return InternalError(f"{complaint(torch.__version__)}. This torch lacks {'; '.join(map(str, missing))}")
    return None


def _frames_of(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in walk_tb(error.__traceback__)]


def _after_model(frames: Sequence[FrameType]) -> Sequence[FrameType]:
    """The frames inside the innermost one of the model's code; all frames where none is the model's."""
    last = max((place for place, frame in enumerate(frames) if _is_model(frame.f_code)), default=-1)
    return frames[last + 1 :]


def _is_model(code: CodeType) -> bool:
    return is_foreign(code.co_filename) or is_layer(code.co_filename)


def _is_applying(frame: FrameType) -> bool:
    return is_frame_of_own_code(frame) or frame.f_code.co_filename in _APPLYING


def _is_ours(innermost: Sequence[FrameType], has_run: bool) -> bool:
    """True where tpplan's code raised the error, or torch's while the model has run before."""
    folders = (_TPPLAN, _TORCH) if has_run else (_TPPLAN,)
    return any(frame.f_code.co_filename.startswith(folders) and not _is_model(frame.f_code) for frame in innermost)


def as_internal(error: BaseException) -> InternalError:
    """An InternalError for an exception of tpplan's own code, with the place that raised it and torch's version."""
    frames = _frames_of(error)
    own = [frame for frame in frames if frame.f_code.co_filename.startswith(_TPPLAN)]
    frame = (own or frames)[-1]
    where = f"{frame.f_code.co_filename.removeprefix(_TPPLAN)}, {frame.f_code.co_name}"
    return InternalError(
        f"tpplan's own code failed, through no fault of the model: {type(error).__name__} in {where}: "
        f"{first_line(error, 'no message')}. "
        f"torch is {torch.__version__}. Please report this with what `tpplan doctor` prints."
    )
