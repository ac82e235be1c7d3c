"""A configuration from Hugging Face names code: nobody is asked, and nothing runs without --trust-remote-code."""

import builtins
import json
from pathlib import Path

import pytest

from tpplan.commands import main
from tpplan.core.errors import ModelError, UsageError
from tpplan.search.models.hf_model import trusted
from tpplan.search.models.user_model import load_model_file

pytest.importorskip("transformers")

CODE = """\
from pathlib import Path
Path({mark!r}).touch()
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"
    vocab_size = 8

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(2, 2)
        self.post_init()
"""
MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
LLAMA = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, object]] = {
    "a type of its own": {"model_type": "own", "auto_map": MAP},
    "no type": {"auto_map": MAP},
    "code in another repository": {"model_type": "own", "auto_map": {"AutoConfig": "someone/else--own.OwnConfig"}},
    "a type that is known": {"model_type": "llama", "auto_map": MAP, **LLAMA},
    "a known type, its model alone": {
        "model_type": "llama", "auto_map": {"AutoModelForCausalLM": "own.OwnModel"}, **LLAMA,
    },
    "an architecture of its own": {
        "model_type": "llama", "architectures": ["OwnModel"], "auto_map": {"AutoModelForCausalLM": "own.OwnModel"},
        **LLAMA,
    },
    "a type without a language model": {
        "model_type": "vit", "auto_map": {"AutoModelForCausalLM": "own.OwnModel"},
    },
    "kernels from elsewhere": {"model_type": "llama", "_attn_implementation": "someone/kernels", **LLAMA},
    "kernels, in a part": {
        "model_type": "llava", "text_config": {"model_type": "llama", "attn_implementation": "someone/kernels@main"},
    },
    "an architecture that is a function": {"model_type": "llama", "architectures": ["pipeline"], **LLAMA},
    "an architecture that is a module": {"model_type": "llama", "architectures": ["os", "__dict__"], **LLAMA},
    "a map that is text": {"model_type": "own", "auto_map": "own.OwnConfig"},
}  # fmt: skip


def write(folder: Path, config: dict[str, object]) -> str:
    (folder / "own.py").write_text(CODE.format(mark=str(folder / "ran")))
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder / 'config.json'}"


@pytest.mark.parametrize("name", CONFIGS)
def test_no_code_runs_and_nobody_is_asked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_arguments: object) -> str:
        raise AssertionError("someone was asked")

    monkeypatch.setattr(builtins, "input", asked)
    source = write(tmp_path, CONFIGS[name])
    message = None
    try:
        load_model_file(source).build_model()
    except ModelError as error:
        message = str(error)
    if message is not None:
        assert ("--trust-remote-code" in message) == ("auto_map" in CONFIGS[name] or "kernels" in name)
        assert str(tmp_path) in message
    assert not (tmp_path / "ran").exists()


def test_with_the_flag_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    source = write(tmp_path, CONFIGS["a type of its own"])
    model = load_model_file(trusted(source)).build_model()
    assert type(model).__name__ == "OwnModel"
    assert (tmp_path / "ran").exists()


def test_the_flag_is_for_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--trust-remote-code"):
        trusted("model.py")
    options = ("--gpus", "1", "--profile", "h100-sxm", "--global-batch", "1", "--seq-len", "8")
    assert main(["solve", "model.py", *options, "--trust-remote-code"]) == 2
    assert "--trust-remote-code goes with hf:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", ["calibrate", "compare", "explain", "export", "report", "size", "solve", "try", "verify"]
)
def test_every_verb_that_reads_a_model_takes_the_flag(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert "--trust-remote-code" in capsys.readouterr().out
