"""The file that exporters/pytorch.py writes: its docstring, imports, helpers, and parallelize(model)."""

import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from math import prod
from typing import Any

from tpplan.apply.recompute import KEPT
from tpplan.core.graph import within
from tpplan.core.mesh import Axis
from tpplan.core.name_patterns import parse_ranges
from tpplan.exporters._pytorch_styles import Entering, Leaving, OnWhole, keep_products, sum_gradients
from tpplan.plan.plan import Plan, Precision, Recompute, uses_fsdp


@dataclass(frozen=True, slots=True, kw_only=True)
class Styles:
    """A style for each module that needs one, as Python, by module; "" is the model itself. They are applied in this
    order. `ties` are a parameter's name, and another one that it has."""

    entering: Mapping[str, str]
    layers: Mapping[str, str]
    leaving: Mapping[str, str]
    ties: tuple[tuple[str, str], ...]


#: by field of Styles: what stands above it
_SECTIONS = {
    "entering": "what is converted on its way into a module",
    "layers": "layers and their weights",
    "leaving": "what is converted on its way out of a module",
}

_HEAD = """\
\"\"\"The model of {parameters} parameters on {num_gpus} GPUs ({mesh}), in PyTorch alone. Under torchrun:

{usage}

Written by tpplan {version} from the plan {hash}, for torch {torch}.
Ranks of a tp group read the same batch, and draw from the same random state; the others have their own. A step is
{steps} x {micro_batch} sequences of {seq_len}.
How torch moves tensors inside a layer is its own; what the plan predicts, it predicts of tpplan.apply_plan.
\"\"\"
"""
_USAGE = """\
    torch.distributed.init_process_group()
    torch.manual_seed(0)                                # every rank starts from the same weights
    model = parallelize(build_model().cuda())
    optimizer = torch.optim.AdamW(model.parameters())"""
_LOSS_PARALLEL = """
    with torch.distributed.tensor.parallel.loss_parallel():    # the output is a DTensor, split by classes
        loss(model(**batch)).backward()                        # F.cross_entropy, on the output as it is"""


def file_text(plan: Plan, styles: Styles | None) -> str:
    """The file; without styles, for plans that have one tensor-parallel rank."""
    body = [*_mesh_lines(plan)]
    if styles is not None:
        body += _style_lines(plan, styles)
    body += _recompute_lines(plan)
    body += _fsdp_lines(plan)
    helpers = [helper for name, helper in _HELPERS.items() if re.search(rf"\b{name}\b", "\n".join(body))]
    sources = (re.sub(" +# type: .*", "", inspect.getsource(helper)).rstrip() for helper in helpers)
    code = "\n\n\n".join([*sources, "\n".join(_function_lines(body))])
    if keep_products in helpers:
        code = f"KEPT = {_set_text(KEPT)}\n\n\n{code}"
    return "\n".join([_docstring(plan).rstrip(), *_import_lines(code), "", "", code, ""])


_HELPERS: dict[str, Callable[..., Any]] = {
    "Entering": Entering,
    "Leaving": Leaving,
    "OnWhole": OnWhole,
    "sum_gradients": sum_gradients,
    "keep_products": keep_products,
}


def _docstring(plan: Plan) -> str:
    is_split = any(layout.dim is not None for layout in plan.outputs.values())
    return _HEAD.format(
        parameters=f"{sum(prod(p.shape) for p in plan.parameter_plans().values()):,}",
        num_gpus=plan.mesh.num_gpus,
        mesh=plan.mesh,
        usage=_USAGE + (_LOSS_PARALLEL if is_split else ""),
        version=_escaped(plan.tpplan_version),
        hash=plan.hash.partition(":")[2][:12],
        torch=_escaped(plan.torch_version),
        micro_batch=plan.batch.micro_batch,
        seq_len=plan.batch.seq_len,
        steps=plan.batch.accumulation_steps,
    )


def _function_lines(body: Sequence[str]) -> Iterator[str]:
    yield 'def parallelize(model: nn.Module, device_type: str = "cuda") -> nn.Module:'
    yield '    """Lays the model out in place; make the optimizer afterwards."""'
    yield from (f"    {line}" if line else "" for line in body)
    yield "    return model"


#: what each name in a generated file is imported from; "" is the module itself
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
    """Of all names above those that the code has."""
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
    degrees = ", ".join(str(plan.mesh.size(axis)) for axis in Axis)
    names = ", ".join(f'"{axis}"' for axis in Axis)
    yield f"mesh = init_device_mesh(device_type, ({degrees}), mesh_dim_names=({names}))"
    if plan.precision is Precision.BF16:
        yield "for parameter in model.parameters():"
        yield "    parameter.data = parameter.data.to(torch.bfloat16)  # buffers stay as they are"


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
    if is_summed and not uses_fsdp(plan.mesh, plan.precision):  # FSDP2 does it
        yield "sum_gradients(model)"


def _dict_lines(plan: Plan, table: str, found: Mapping[str, str]) -> Iterator[str]:
    """Like modules of a block in a loop, the others one by one."""
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
    """The name with `*` for its index in a repeated block, and the index."""
    parts = name.split(".")
    for pattern, ranges in plan.blocks.items():
        depth = len(pattern.split(".")) - 1
        if len(parts) > depth and parts[depth].isdigit():
            index, key = int(parts[depth]), ".".join([*parts[:depth], "*", *parts[depth + 1 :]])
            if within(key, pattern) and index in parse_ranges(ranges):
                return key, index
    return name, None


def _with_index(key: str) -> str:
    """A pattern as what stands behind the f of an f-string of the index i."""
    parts = [part.replace("{", "{{").replace("}", "}}") for part in key.split(".")]
    parts[parts.index("*")] = "{i}"
    return quoted(".".join(parts))


def quoted(text: str) -> str:
    """A string as Python in double quotes, whatever it holds: a file is ASCII, and a name ends where it should."""
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    """Text between double quotes, three of them too."""
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
    yield "# what runs again in backward"
    words = {Recompute.FULL: "{}", Recompute.SELECTIVE: '{"context_fn": recomputed}'}
    if Recompute.SELECTIVE in modes.values():
        yield "recomputed = partial(create_selective_checkpoint_contexts, keep_products)"
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
    yield "# data parallelism; it averages gradients over the ranks that read other samples"
    yield f"policy = MixedPrecisionPolicy({policy})"
    yield f'options = {{"mesh": mesh[{axes}], "mp_policy": policy}}'
    resharded = {name: str(reshard) for name, reshard in plan.resharded_units().items()}
    if resharded:
        yield "units = {}  # is it resharded after its forward?"
        yield from _dict_lines(plan, "units", resharded)
        yield "for name, reshard in units.items():"
        yield "    fully_shard(model.get_submodule(name), reshard_after_forward=reshard, **options)"
    yield "fully_shard(model, reshard_after_forward=False, **options)"


def _set_text(names: frozenset[str]) -> str:
    lines = textwrap.wrap(", ".join(f'"{name}"' for name in sorted(names)), 110)
    return "\n".join(["frozenset({", *(f"    {line}" for line in lines), "})"])
