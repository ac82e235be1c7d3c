"""Hugging Face models by their configuration: `hf:config.json`, a folder with one, or a name in the hub's local cache.

transformers builds the model, with random weights. Code that a configuration names runs only where the user says so.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpplan.core.errors import ModelError, UsageError
from tpplan.core.gc_pause import imported_for_good
from tpplan.core.strict_json import read_json
from tpplan.search.models.model_spec import HF_PREFIX, HF_TRUSTED_PREFIX, TRUST_FLAG, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HOW_TO_TRUST = f"it is not run; if you have read it and trust it, give {TRUST_FLAG}"


def trusted(source: str) -> str:
    """The source with the prefix that lets the configuration's own code run. Raises UsageError for a model file."""
    if not source.startswith((HF_PREFIX, HF_TRUSTED_PREFIX)):
        raise UsageError(f"{TRUST_FLAG} goes with {HF_PREFIX}path/config.json alone, got {source!r}")
    return source if source.startswith(HF_TRUSTED_PREFIX) else HF_TRUSTED_PREFIX + source.removeprefix(HF_PREFIX)


def config_file(name: str) -> Path:
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


def check_there(path: Path) -> None:
    """Raises ModelError where there is no file that config_file gave."""
    if not path.exists():
        raise ModelError(
            f"{path}: no such config.json, folder, or model in the local cache of the hub; save one with "
            "`config.save_pretrained(folder)`, or download it first"
        )


@imported_for_good()
def load_hf(path: Path, source: str, *, is_trusted: bool) -> ModelSpec:
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


def _config(path: Path) -> dict[str, Any]:
    """The configuration in a file. Raises ModelError where the file is missing or no JSON object."""
    check_there(path)
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
