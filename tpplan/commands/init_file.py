"""`tpplan init model.py --of net.py:Net`: writes a commented model file for a class, or for a Hugging Face config."""

import argparse
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.commands.solve import check_output
from tpplan.commands.terminal.output import wrote
from tpplan.core.errors import ModelError, UsageError
from tpplan.core.files import write_atomically
from tpplan.search.models.hf_model import check_there, config_file
from tpplan.search.models.model_spec import HF_PREFIX
from tpplan.search.models.user_model import import_file

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_CLASS = '''\
"""The model for tpplan: tpplan solve {file} --gpus 8 --profile h100-sxm --global-batch 64 --seq-len 2048"""

import torch
import tpplan
from {module} import {name}


def build_model():
    # Called under torch.device("meta"): no weights are made. Give the sizes that you train with.
    return {name}({needed})


def example_inputs(batch, seq_len):  # example_inputs(batch) where samples have no length; then leave out --seq-len
    # What forward takes, by name; shapes and dtypes count, values rarely do. Other names go to the loss alone.
    ids = torch.randint(1000, (batch, seq_len))
    return {{{inputs}"targets": ids}}


def loss(outputs, inputs):  # leave it out where the model returns its loss
    return tpplan.cross_entropy(outputs, inputs["targets"])  # as F.cross_entropy, and on a sharded vocabulary


# unused_outputs = ("logits",)  # outputs that training does not read: they need not be gathered
'''
_CONFIG = '''\
"""The model for tpplan: tpplan solve {file} --gpus 8 --profile h100-sxm --global-batch 64 --seq-len 2048"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

CONFIG = AutoConfig.from_pretrained({path!r}, local_files_only=True)
CONFIG.use_cache = False  # a cache is an output: it would be whole on every rank, and attention with it


def build_model():
    # Called under torch.device("meta"): no weights are made. Another AutoModel class does as well.
    return AutoModelForCausalLM.from_config(CONFIG)


def example_inputs(batch, seq_len):
    # What forward takes, by name; shapes and dtypes count, values rarely do.
    ids = torch.randint(CONFIG.get_text_config().vocab_size, (batch, seq_len))
    return {{"input_ids": ids, "labels": ids}}  # with labels the model returns its loss: no loss() is needed


unused_outputs = ("logits",)  # outputs that training does not read: they need not be gathered
'''


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("init", help="write a model file", description=__doc__, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("output", type=Path, metavar="model.py", help="the file to write; it must not exist")
    parser.add_argument("--of", required=True, metavar="MODEL", help="net.py:CLASS beside it, or hf:config")


def run(args: argparse.Namespace) -> int:
    """Writes the file."""
    if args.output.exists():
        raise UsageError(f"{args.output}: it is there already, and is not overwritten: name another file")
    check_output(args.output)
    write_atomically(args.output, _text(args.of, args.output))
    wrote(args.output, ": read it, then `tpplan solve` it")
    return 0


def _text(model: str, output: Path) -> str:
    """The text of a model file. Raises ModelError for a model that is not there."""
    if model.startswith(HF_PREFIX):
        path = config_file(model.removeprefix(HF_PREFIX))
        check_there(path)
        return _CONFIG.format(file=output.name, path=str(path.resolve()))
    file, _, name = model.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"--of {model!r}: expected net.py:CLASS or {HF_PREFIX}config")
    if Path(file).resolve().parent != output.resolve().parent:
        raise UsageError(f"--of {model!r}: {output} imports it by name: write it into the same folder")
    module = import_file(Path(file))
    found = getattr(module, name, None)
    forward = getattr(found, "forward", None)
    if not isinstance(found, type) or not callable(forward):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        models = [key for key in own if callable(getattr(getattr(module, key), "forward", None))]
        raise ModelError(f"{file}: no class {name!r} with a forward; it defines {', '.join(models) or 'none'}")
    inputs = "".join(f'"{argument}": ids, ' for argument in _required(forward))
    needed = ", ".join(f"{argument}=..." for argument in _required(found.__init__))  # type: ignore[misc]
    return _CLASS.format(file=output.name, module=Path(file).stem, name=name, needed=needed, inputs=inputs)


def _required(function: object) -> list[str]:
    """Names of the arguments of a method, beside self, that have no default."""
    assert callable(function)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [own.name for own in parameters if own.default is own.empty and own.kind in kinds]
