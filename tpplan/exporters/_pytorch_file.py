"""Writes the text of an exported PyTorch file: its docstring, imports, helpers, and parallelize(model)."""

import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from math import prod
from typing import Any

from tpplan.apply.kept_results import KEPT_OPS
from tpplan.core.graph import within
from tpplan.core.mesh import AXES
from tpplan.core.name_patterns import parse_ranges
from tpplan.exporters._pytorch_styles import Entering, Leaving, OnDTensors, keep_results, sum_gradients
from tpplan.plan.plan import Plan, Precision, uses_fsdp


@dataclass(frozen=True, slots=True, kw_only=True)
class Styles:
    """Styles as Python text by module name, "" for the root; they are applied in the order of these fields.

    `ties` are pairs of names of one parameter.
    """

    entering: Mapping[str, str]
    layers: Mapping[str, str]
    leaving: Mapping[str, str]
    ties: tuple[tuple[str, str], ...]


#: by field of Styles: the comment above it in the file
_SECTIONS = {
    "entering": "conversions of inputs",
    "layers": "layers and their weights",
    "leaving": "conversions of outputs",
}

_HEAD = """\
\"\"\"The model of {parameters} parameters on {num_gpus} GPUs ({mesh}), in PyTorch alone. Under torchrun:

{usage}

Written by tpplan {version} from the plan {hash}, for torch {torch}.
Ranks of a tp group read the same batch, and draw from the same random state; other ranks have their own. A step is
{steps} x {micro_batch} {samples}.
The plan's predictions hold for tpplan.apply_plan; torch's styles may use other collectives inside a layer.
{given_up}\"\"\"
"""
_USAGE = """\
    torch.distributed.init_process_group()
    torch.manual_seed(0)                                # every rank starts from the same weights
    model = parallelize(build_model().cuda())
    optimizer = torch.optim.AdamW(model.parameters())"""
_LOSS_PARALLEL = """
    with torch.distributed.tensor.parallel.loss_parallel():    # the output is a DTensor, split by classes
        loss(model(**batch)).backward()                        # F.cross_entropy, on the output as it is"""


def file_text(plan: Plan, styles: Styles | None, given_up: str | None = None) -> str:
    """Returns the text of the file. `styles` is None for plans with one tensor-parallel rank.

    given_up: why torch's styles cannot follow the plan between layers, where `styles` have whole tensors there.
    """
    body = [*_mesh_lines(plan)]
    if styles is not None:
        body += _style_lines(plan, styles)
    body += _recompute_lines(plan)
    body += _fsdp_lines(plan)
    helpers = [helper for name, helper in _HELPERS.items() if re.search(rf"\b{name}\b", "\n".join(body))]
    sources = (re.sub(" +# type: .*", "", inspect.getsource(helper)).rstrip() for helper in helpers)
    code = "\n\n\n".join([*sources, "\n".join(_function_lines(body))])
    return "\n".join([_docstring(plan, given_up).rstrip(), *_import_lines(code), "", "", code, ""])


_HELPERS: dict[str, Callable[..., Any]] = {
    "Entering": Entering,
    "Leaving": Leaving,
    "OnDTensors": OnDTensors,
    "sum_gradients": sum_gradients,
    "keep_results": keep_results,
}


def _docstring(plan: Plan, given_up: str | None) -> str:
    is_split = given_up is None and any(layout.dim is not None for layout in plan.outputs.values())
    kept = f"Weights are cut as planned, and tensors between the cut layers are whole: {given_up}."
    return _HEAD.format(
        parameters=f"{sum(prod(p.shape) for p in plan.parameter_plans().values()):,}",
        num_gpus=plan.mesh.num_gpus,
        mesh=plan.mesh,
        usage=_USAGE + (_LOSS_PARALLEL if is_split else ""),
        version=_escaped(plan.tpplan_version),
        hash=plan.hash.partition(":")[2][:12],
        torch=_escaped(plan.torch_version),
        micro_batch=plan.batch.micro_batch,
        samples=f"sequences of length {plan.batch.seq_len}" if plan.batch.seq_len > 1 else "samples",
        steps=plan.batch.accumulation_steps,
        given_up=_escaped("\n".join(textwrap.wrap(kept, 118)) + "\n").replace("\\n", "\n") if given_up else "",
    )


def _function_lines(body: Sequence[str]) -> Iterator[str]:
    yield 'def parallelize(model: nn.Module, device_type: str = "cuda") -> nn.Module:'
    yield '    """Lays the model out in place; make the optimizer afterwards."""'
    yield from (f"    {line}" if line else "" for line in body)
    yield "    return model"


#: the module that each name in an exported file is imported from; "" where the name is a module itself
_IMPORTS = {
    "inspect": "",
    "torch": "",
    "partial": "functools",
    "Any": "typing",
    "nn": "torch",
    "DeviceMesh": "torch.distributed.device_mesh",
    "init_device_mesh": "torch.distributed.device_mesh",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "fully_shard": "torch.distributed.fsdp",
    "DTensor": "torch.distributed.tensor",
    "Partial": "torch.distributed.tensor",
    "Placement": "torch.distributed.tensor",
    "Replicate": "torch.distributed.tensor",
    "Shard": "torch.distributed.tensor",
    "distribute_tensor": "torch.distributed.tensor",
    "ColwiseParallel": "torch.distributed.tensor.parallel",
    "ParallelStyle": "torch.distributed.tensor.parallel",
    "RowwiseParallel": "torch.distributed.tensor.parallel",
    "SequenceParallel": "torch.distributed.tensor.parallel",
    "parallelize_module": "torch.distributed.tensor.parallel",
    "checkpoint_wrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "tree_map_only": "torch.utils._pytree",
    "CheckpointPolicy": "torch.utils.checkpoint",
    "create_selective_checkpoint_contexts": "torch.utils.checkpoint",
}
_STANDARD = ("functools", "typing", "inspect")


def _import_lines(code: str) -> Iterator[str]:
    """Yields the import lines for the names of _IMPORTS that the code uses: the standard library's, then torch's."""
    used = {name: home for name, home in _IMPORTS.items() if re.search(rf"(?<![\w.]){name}\b", code)}
    homes: dict[str, list[str]] = defaultdict(list)
    for name, home in used.items():
        homes[home or name].append(name if home else "")
    for is_standard in (True, False):
        group = sorted(home for home in homes if (home in _STANDARD) is is_standard)
        plain = [f"import {home}" for home in group if "" in homes[home]]
        lines = [f"from {home} import {', '.join(filter(None, homes[home]))}" for home in group if any(homes[home])]
        if group:
            yield ""
            yield from (*plain, *lines)


def _mesh_lines(plan: Plan) -> Iterator[str]:
    degrees = ", ".join(str(plan.mesh.size(axis)) for axis in AXES)
    names = ", ".join(f'"{axis}"' for axis in AXES)
    yield f"mesh = init_device_mesh(device_type, ({degrees}), mesh_dim_names=({names}))"
    if plan.precision is Precision.BF16:
        yield "for parameter in model.parameters():"
        yield "    parameter.data = parameter.data.to(torch.bfloat16)  # buffers stay as they are"
    if plan.precision is Precision.BF16_AUTOCAST:
        yield "# Training code runs forward and loss under torch.autocast(device_type, dtype=torch.bfloat16)."


def _style_lines(plan: Plan, styles: Styles) -> Iterator[str]:
    has_frozen = not all(parameter.trainable for parameter in plan.parameters.values())
    if has_frozen:
        yield "frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]"
    for section, what in _SECTIONS.items():
        found = dict(getattr(styles, section))
        root = found.pop("", None)
        if found:
            yield from ("", f"# {what}", f"{section} = {{}}", *_dict_lines(plan, section, found))
            yield f'parallelize_module(model, mesh["tp"], {section})'
        if root is not None:
            yield f'parallelize_module(model, mesh["tp"], {root})'
    if has_frozen:
        yield from ("for name in frozen:", "    model.get_parameter(name).requires_grad_(False)")
    for name, alias in styles.ties:
        owner, _, attribute = alias.rpartition(".")
        module, value = f"model.get_submodule({quoted(owner)})", f"model.get_parameter({quoted(name)})"
        is_plain = attribute.isascii() and attribute.isidentifier() and not iskeyword(attribute)
        yield f"{module}.{attribute} = {value}" if is_plain else f"setattr({module}, {quoted(attribute)}, {value})"
    is_summed = any(style.startswith("SequenceParallel") for style in styles.layers.values())
    if is_summed and not uses_fsdp(plan.mesh, plan.precision):  # FSDP2 sums them itself
        yield "sum_gradients(model)"


def _dict_lines(plan: Plan, table: str, found: Mapping[str, str]) -> Iterator[str]:
    """Yields lines that fill the dict `table`: a loop over layers of a block with the same text, else one by one."""
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    alone: dict[str, str] = {}
    for name, style in found.items():
        key, index = _in_block(plan, name)
        if index is None:
            alone[name] = style
        else:
            rows[key, style].append(index)
    loops: dict[tuple[int, ...], dict[str, str]] = defaultdict(dict)
    for (key, style), like in rows.items():
        loops[tuple(sorted(like))][key] = style
    for indices, styles in loops.items():
        yield f"for i in {_range_text(indices)}:"
        for key, style in styles.items():
            yield f"    {table}[f{_with_index(key)}] = {style}"
    for name, style in alone.items():
        yield f"{table}[{quoted(name)}] = {style}"


def _in_block(plan: Plan, name: str) -> tuple[str, int | None]:
    """Returns the name with `*` for its index in a repeated block, and the index; (name, None) outside of blocks."""
    parts = name.split(".")
    for pattern, ranges in plan.blocks.items():
        depth = len(pattern.split(".")) - 1
        if len(parts) > depth and parts[depth].isdigit():
            index, key = int(parts[depth]), ".".join([*parts[:depth], "*", *parts[depth + 1 :]])
            if within(key, pattern) and index in parse_ranges(ranges):
                return key, index
    return name, None


def _with_index(key: str) -> str:
    """Returns the quoted text of an f-string in which {i} stands for the `*` of the pattern."""
    parts = [part.replace("{", "{{").replace("}", "}}") for part in key.split(".")]
    parts[parts.index("*")] = "{i}"
    return quoted(".".join(parts))


def quoted(text: str) -> str:
    """Returns a string as an ASCII Python literal in double quotes, whatever characters it contains."""
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    """Returns text escaped for a Python literal in one or three double quotes."""
    return text.encode("unicode_escape").decode("ascii").replace('"', '\\"')


def _range_text(indices: tuple[int, ...]) -> str:
    first, last = indices[0], indices[-1]
    if indices != tuple(range(first, last + 1)):
        return f"({', '.join(map(str, indices))},)"
    return f"range({first}, {last + 1})" if first else f"range({last + 1})"


def _recompute_lines(plan: Plan) -> Iterator[str]:
    modes = plan.recomputed_modules()
    if not modes:
        return
    yield ""
    yield "# recomputation: these modules run again in backward"
    words = dict.fromkeys(modes.values(), "{}")
    for mode in sorted(filter(lambda mode: mode.is_selective, words)):
        name = mode.name.lower()
        if plan.mesh.tp > 1:
            yield "# products are kept beside their sums over ranks, of which tpplan.apply_plan keeps the sums alone:"
            yield "# more activations than predicted"
        yield from f"{name}_kept = {_set_text(KEPT_OPS[mode])}".splitlines()
        yield f"{name} = partial(create_selective_checkpoint_contexts, partial(keep_results, {name}_kept))"
        words[mode] = f'{{"context_fn": {name}}}'
    yield "regions = {}"
    yield from _dict_lines(plan, "regions", {name: words[mode] for name, mode in modes.items()})
    yield "for name, options in regions.items():"
    yield "    wrapped = checkpoint_wrapper(model.get_submodule(name), preserve_rng_state=True, **options)"
    yield "    model.set_submodule(name, wrapped)"


def _fsdp_lines(plan: Plan) -> Iterator[str]:
    if not uses_fsdp(plan.mesh, plan.precision):
        return
    axes = '"shard"' if plan.mesh.replicate == 1 else '"replicate", "shard"'
    policy = "param_dtype=torch.bfloat16, reduce_dtype=torch.float32" if plan.precision is Precision.BF16_MIXED else ""
    yield ""
    yield "# data parallelism: FSDP2 averages gradients over ranks with different samples"
    yield f"policy = MixedPrecisionPolicy({policy})"
    yield f'options = {{"mesh": mesh[{axes}], "mp_policy": policy}}'
    resharded = {name: str(reshard) for name, reshard in plan.resharded_units().items()}
    if resharded:
        yield "units = {}  # whether each is resharded after its forward"
        yield from _dict_lines(plan, "units", resharded)
        yield "for name, reshard in units.items():"
        yield "    fully_shard(model.get_submodule(name), reshard_after_forward=reshard, **options)"
    yield "fully_shard(model, reshard_after_forward=False, **options)"


def _set_text(names: frozenset[str]) -> str:
    lines = textwrap.wrap(", ".join(f'"{name}"' for name in sorted(names)), 110)
    return "\n".join(["frozenset({", *(f"    {line}" for line in lines), "})"])
