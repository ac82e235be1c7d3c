"""Why a trace stopped, as an error that says where, and what to change in the model's code."""

import difflib
import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tpplan.core.errors import ModelError, first_line
from tpplan.torch_internals.tensors import storage_key
from tpplan.trace.answers.concrete_values import raising_line
from tpplan.trace.answers.one_dtype import MixedDtypesError
from tpplan.trace.answers.planned_device import planned_precision
from tpplan.trace.answers.unbacked_int import UnknownValueError
from tpplan.trace.forward_arguments import Inputs, forward_inputs
from tpplan.trace.record_fx import StoppedError


class TraceError(ModelError):
    """The trace stopped: `reason` says on what error and where, `line` is the line of code that raised it ("" where
    none is the model's), `ran` the graph of the ops until then, `module` the innermost module that was running ("" for
    the root, None outside the model)."""

    def __init__(self, reason: str, line: str, advice: str, *, ran: torch.fx.Graph, module: str | None) -> None:
        at = f"\nat {line}" if line else ""
        super().__init__(f"the model could not be traced: {reason}{at}{advice}")
        self.reason = reason
        self.line = line
        self.ran = ran
        self.module = module


class ReplacedError(ModelError):
    """A forward replaced a submodule, a parameter or a parameter's data of `module`."""

    def __init__(self, message: str, *, module: str) -> None:
        super().__init__(message)
        self.module = module


def explained(
    stopped: StoppedError, model: nn.Module, inputs: Inputs, running: Sequence[str], *, has_loss: bool
) -> ModelError:
    """The error to raise for a forward that raised while `running` modules ran, the innermost last.

    A ModelError where forward does not take the example inputs, otherwise a TraceError.
    """
    error = stopped.__cause__
    assert error is not None
    if isinstance(error, TypeError) and (problem := _argument_mismatch(model, inputs)):
        return ModelError(problem)
    where = _place(running, has_loss=has_loss)
    reason = first_line(error, "no message")
    return TraceError(
        f"{type(error).__name__} {where}: {reason}",
        raising_line(error),
        _advice(error, reason),
        ran=stopped.ran,
        module=running[-1] if running else None,
    )


def _advice(error: BaseException, reason: str) -> str:
    """A line with the next thing to try; "" where the error says it itself."""
    precision = planned_precision()
    match error:
        case MixedDtypesError():
            return _cast_one(precision)
        case ModelError():
            return ""
        case UnknownValueError():
            return (
                "\nKeep it a tensor, choose with torch.where or torch.cond, or decide it by the configuration or by "
                "the example inputs, whose values are known."
            )
        case _ if "Meta" in reason or "fake impl" in reason:
            return (
                "\ntorch does not know the shapes of this op's results: register the op and its backward with "
                "torch.library.register_fake."
            )
        case _ if "out of meta tensor" in reason or "numpy" in reason:
            return "\nTensors have no values while a model is planned: compute this with torch ops."
        case RuntimeError() if "dtype" in reason or "scalar type" in reason:
            return _cast_one(precision)
    return (
        "\nRun one forward on the example inputs without tpplan: where that fails too, the model or its example inputs "
        "are to be mended first."
    )


def _cast_one(precision: str) -> str:
    """A line that says what has which dtype, and what to do where two meet."""
    under = f"--precision {precision}" if precision else "--precision"
    others = " or ".join(other for other in ("bf16-autocast", "fp32") if other != precision)
    return (
        f"\nTwo dtypes meet here: parameters and floating inputs have that of {under}, and what the code makes or "
        f"keeps in buffers has its own. Cast it to the other's (x.to(y.dtype)), or plan with --precision {others}."
    )


def _place(running: Sequence[str], *, has_loss: bool) -> str:
    """The place where a trace stopped, in words."""
    if running and running[-1]:
        return f"in module {running[-1]!r}"
    if running:
        return "in the model's forward"
    return "in the loss" if has_loss else "where the model is called"


def _argument_mismatch(model: nn.Module, inputs: Inputs) -> str:
    """Why forward cannot be called with the example inputs, and what to give instead; "" where it can."""
    signature, given = inspect.signature(model.forward), forward_inputs(model, inputs)
    try:
        signature.bind(**given) if isinstance(given, Mapping) else signature.bind(*given)
    except TypeError as error:
        takes = f"{type(model).__name__}.forward takes {signature}"
        if not isinstance(inputs, Mapping):
            return (
                f"{takes}, and example_inputs gives {len(inputs)} values: {error}. Every value of a tuple goes to "
                "forward; where the loss needs more, return a dict: the loss sees all of it"
            )
        left = [name for name in inputs if name not in signature.parameters]
        missing = [name for name in signature.parameters if name not in inputs]
        near = [(name, found) for name in left for found in difflib.get_close_matches(name, missing, n=1)]
        hint = f" Did you mean {near[0][1]!r} by {near[0][0]!r}?" if near else ""
        return (
            f"{takes}, and example_inputs gives {', '.join(map(repr, inputs))}: {error}.{hint} Entries of a dict that "
            "are named like an argument go to forward, the others to the loss alone"
        )
    return ""


def check_modules(
    model: nn.Module, modules: Mapping[str, nn.Module], parameters: Mapping[str, tuple[nn.Parameter, int]]
) -> None:
    """Raises ReplacedError where a forward put a new module, parameter or parameter's data in the place of an old one:
    a plan would not reach it. `parameters` are (parameter, storage key) before the forward, by name."""
    for name, module in model.named_modules():
        if modules.get(name) is not module:
            raise ReplacedError(
                f"the forward puts a new {type(module).__name__} at {name!r}: a plan is for the modules that the "
                "builder returns. Call the model once there, or configure it so that it stays as it is",
                module=name.rpartition(".")[0],
            )
    for name, parameter in model.named_parameters():
        own, storage = parameters.get(name, (None, 0))
        if own is not parameter or storage_key(parameter) != storage:
            what = "a new parameter" if own is not parameter else "new data"
            raise ReplacedError(
                f"the forward puts {what} at {name!r}: a plan is for the parameters that the builder returns. Write "
                "to the parameter under torch.no_grad() (copy_)",
                module=name.rpartition(".")[0],
            )
