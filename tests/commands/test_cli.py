"""The command line: what it prints where, its exit codes, and what each mistake is told; nothing is left behind."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from test_report import make_plan

from tpplan.commands import main
from tpplan.commands.terminal.progress import bars
from tpplan.commands.terminal.values import num_bytes, optimizer
from tpplan.core.errors import ModelError, TpplanError, UsageError
from tpplan.plan.plan import Plan
from tpplan.search.models.model_spec import UserCodeError
from tpplan.search.models.user_model import load_model_file
from tpplan.search.points.options import Cluster

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "scripts" / "examples" / "llama.py"
MACHINE = ("--gpus", "4", "--gpus-per-node", "4", "--profile", "h100-sxm")
TRAINING = ("--global-batch", "16", "--micro-batch", "1", "--seq-len", "64")

FP32 = ("--tp", "2", "--precision", "fp32")

CLASS = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.head = nn.Linear(64, 1000)

    def forward(self, ids):
        return self.head(self.embedding(ids))
"""
INPUTS = """
def example_inputs(batch, seq_len):
    return {"ids": torch.zeros(batch, seq_len, dtype=torch.long)}
"""

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of that name and text, and returns its path."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def run_cli(*arguments: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "tpplan", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)


def failing(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Exit code and stderr of a command that is expected to fail: stdout stays empty, and no traceback is ours."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stopped:  # argparse
        code = int(stopped.code or 0)
    out, err = capsys.readouterr()
    assert code != 0
    assert out == ""
    assert str(ROOT / "tpplan") not in err
    return code, err


def solve_arguments(model: str | Path, plan: Path, *more: str) -> Sequence[str | Path]:
    return "solve", model, *MACHINE, *TRAINING, "-o", plan, *more


# What is right


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The small Llama, planned with tp 2, written and printed."""
    path = tmp_path_factory.mktemp("solved") / "plan.json"
    return path, run_cli(*solve_arguments(EXAMPLE, path, *FP32), timeout_s=280)


def test_solve_writes_a_plan_and_prints_results_to_stdout_alone(
    solved: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    path, ran = solved
    assert ran.returncode == 0, ran.stderr
    plan = Plan.load(path)
    assert (plan.mesh.tp, plan.batch.global_batch, plan.precision) == (2, 16, "fp32")
    assert ran.stdout.startswith("Plan\n  mesh")
    assert ran.stdout.isascii()
    *progress, last = ran.stderr.splitlines()
    assert last == f"wrote {path}"
    assert all(re.fullmatch(r"tpplan: \w+ \d+ of \d+, \d+ s", line) for line in progress)


def test_show_prints_what_solve_printed(solved: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    path, ran = solved
    assert run_cli("show", path).stdout == ran.stdout


def test_a_plan_says_what_was_asked_for(solved: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    path, ran = solved
    request = Plan.load(path).request
    assert request is not None
    assert request.model == str(EXAMPLE)
    assert request.command == shlex.join(["tpplan", *map(str, solve_arguments(EXAMPLE, path, *FP32))])
    assert "command " in ran.stdout


def test_sentences_need_no_model(
    solved: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(solved[0]), "layers.3.feed_forward"]) == 0
    assert "each of 2 GPUs" in capsys.readouterr().out


def test_words_and_versions_are_told_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--glossary"]) == 0
    assert "MFU\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.match(r"tpplan \S+, torch \d+\.\d+", capsys.readouterr().out)
    assert failing(capsys, "show")[0] == UsageError.exit_code


def test_init_writes_a_file_that_loads(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("net.py", CLASS)
    config = write("config.json", json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}))
    made = tmp_path / "made.py"
    assert main(["init", str(made), "--of", f"{tmp_path / 'net.py'}:Tiny"]) == 0
    spec = load_model_file(str(made))
    assert type(spec.build_model()).__name__ == "Tiny"
    inputs = spec.example_inputs(2, 3)
    assert isinstance(inputs, dict)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {"ids": (2, 3), "targets": (2, 3)}
    assert spec.loss is not None
    assert "not overwritten" in failing(capsys, "init", made, "--of", f"{tmp_path / 'net.py'}:Tiny")[1]
    said = failing(capsys, "init", tmp_path / "b.py", "--of", f"{tmp_path / 'net.py'}:Other")[1]
    assert "no class 'Other' with a forward; it defines Tiny" in said
    pytest.importorskip("transformers")
    assert main(["init", str(tmp_path / "hf.py"), "--of", f"hf:{config}"]) == 0
    assert load_model_file(str(tmp_path / "hf.py")).build_model().config.n_embd == 8


def test_a_cluster_has_the_nodes_of_its_profile() -> None:
    assert Cluster(gpus=16, profile="h100-sxm").gpus_per_node == 8
    assert Cluster(gpus=4, profile="h100-sxm").gpus_per_node == 4
    assert Cluster(gpus=16, gpus_per_node=2, profile="h100-sxm").gpus_per_node == 2
    with pytest.raises(UsageError, match="at least 1 GPU"):
        Cluster(gpus=1, gpus_per_node=0, profile="h100-sxm")


def test_progress_off_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lines or more of a stage that reports once: the last report stands in each."""
    monkeypatch.setattr("tpplan.commands.terminal.progress.LINE_EVERY_S", 0.02)
    said = ""
    with bars(6) as report:
        report("solve", 1, 3)
        deadline = time.monotonic() + 30
        while said.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
            said += capsys.readouterr().err
    assert set(re.sub(r"\d+ s", "N s", said).splitlines()) == {"tpplan: solve 1 of 3, N s"}
    assert said.count("\n") >= 2


def test_diff_names_the_settings_and_modules_that_differ(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    first, text = write("a.json", make_plan().dumps()), make_plan().dumps().replace('"adamw"', '"sgd"')
    assert main(["diff", str(first), str(write("b.json", text))]) == 0
    shown = capsys.readouterr().out
    assert "- adamw" in shown
    assert "+ sgd" in shown
    assert "Modules: the same" in shown


def test_show_json_is_the_plan_and_tokens_per_second(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan()
    path = write("plan.json", plan.dumps())
    assert main(["show", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data.pop("derived")["tokens_per_s"] == 128 * 4096 / 0.5
    assert Plan.from_dict(data) == plan


IMAGES = """
import torch
def build_model(): return torch.nn.Linear(4, 4)
def example_inputs(batch): return (torch.zeros(batch, 4),)
"""


def test_a_length_is_asked_for_where_samples_have_one(write: Write) -> None:
    images, text = write("images.py", IMAGES), write("text.py", IMAGES.replace("(batch):", "(batch, seq_len):"))
    assert load_model_file(str(images)).length_of(None) == 1
    assert load_model_file(str(images)).example_inputs(3, 1)[0].shape == (3, 4)
    assert load_model_file(str(text)).length_of(64) == 64
    with pytest.raises(UsageError, match=r"--seq-len 64: example_inputs\(batch\) of .*images.py takes no length"):
        load_model_file(str(images)).length_of(64)
    with pytest.raises(UsageError, match=r"text.py: expected --seq-len, the length"):
        load_model_file(str(text)).length_of(None)


def test_show_and_help_do_not_load_torch(write: Write) -> None:
    path = write("plan.json", make_plan().dumps())
    code = f"""
import sys
from tpplan.commands import main
assert main(["show", {str(path)!r}]) == 0
try:
    main(["solve", "--help"])
except SystemExit as stopped:
    assert stopped.code == 0
assert "torch" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_reader_that_leaves_early_gets_no_traceback(write: Write) -> None:
    path = write("plan.json", make_plan().dumps())
    command = f"{sys.executable} -m tpplan show {path} | true; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.stdout in ("0\n", "141\n")  # 0 where the pipe took all of it before its reader left
    assert ran.stderr == ""


def test_columns_set_the_width_where_there_is_no_terminal(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("plan.json", make_plan().dumps())
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["show", str(path)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd", "bytes:6", "bytes:0.5"])
def test_optimizers_are_taken_by_name_or_by_bytes(name: str) -> None:
    assert optimizer(name) == name


@pytest.mark.parametrize("name", ["adam", "bytes", "bytes:-1", "bytes:6GiB"])
def test_another_optimizer_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"{name}.*adamw-fused.*bytes:N"):
        optimizer(name)


@pytest.mark.parametrize(("text", "size"), [("70GiB", 70 * 2**30), ("80 GB", 80e9), ("1.5gib", 1.5 * 2**30)])
def test_sizes_have_units(text: str, size: float) -> None:
    assert num_bytes(text) == size


# Mistakes in the model


@pytest.mark.parametrize(
    ("name", "text", "messages"),
    [
        ("syntax.py", "x = 1\ndef build_model(:\n", ["syntax.py:2: ", "def build_model(:"]),
        ("bytes.py", "x = '\0'\n", ["null bytes"]),
        (
            "names.py",
            CLASS,
            [
                "names.py: does not define build_model or example_inputs",
                "  def build_model(): return Tiny()\n",
                'for name in ("ids", "targets")}\n',
                "  def loss(outputs, inputs): return tpplan.cross_entropy(outputs, inputs",
            ],
        ),
        ("inputs.py", CLASS + "build_model = Tiny\n", ["does not define example_inputs", "def example_inputs(batch"]),
        ("loss.py", CLASS + INPUTS + "build_model = Tiny\nloss = 3\n", ["loss: expected a function of (outputs"]),
        (
            "unused.py",
            CLASS + INPUTS + 'build_model = Tiny\nunused_outputs = "logits"\n',
            ["unused_outputs: expected a tuple of names such as (\"logits\",), got 'logits'"],
        ),
        ("exits.py", "import sys\nsys.exit(3)\n", ["SystemExit while importing it", "__main__"]),
    ],
)
def test_bad_model_files_are_told_what_they_lack(
    name: str, text: str, messages: list[str], write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, err = failing(capsys, *solve_arguments(write(name, text), tmp_path / "plan.json"))
    assert code == ModelError.exit_code
    for message in messages:
        assert message in err
    assert not (tmp_path / "plan.json").exists()


def test_the_snippet_shown_makes_the_file_load(write: Write) -> None:
    with pytest.raises(ModelError) as raised:
        load_model_file(str(write("names.py", CLASS)))
    lines = [line.removeprefix("  ") for line in str(raised.value).splitlines()[1:]]
    spec = load_model_file(str(write("pasted.py", "\n".join([CLASS, *lines]))))
    inputs = spec.example_inputs(2, 8)
    assert isinstance(inputs, dict)
    loss = spec.loss
    assert loss is not None
    assert loss(spec.build_model()(inputs["ids"]), inputs).shape == ()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("modle.py", "modle.py: no such model file; did you mean"),
        ("model.py:tinny", "no function 'tinny'; did you mean 'tiny'?"),
        ("model.pt", "expected model.py, model.py:BUILDER or hf:path/config.json"),
        ("model.py:", "expected model.py, model.py:BUILDER or hf:path/config.json"),
        ("folder.py", "folder.py: cannot be read: Is a directory"),
        ("hf:nothing.json", "nothing.json: no such config.json"),
        ("hf:model.py", "model.py: not valid JSON"),
    ],
)
def test_sources_that_name_no_model(
    source: str,
    message: str,
    write: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("model.py", CLASS + INPUTS + "def tiny(): return Tiny()\n")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    code, err = failing(capsys, *solve_arguments(source, tmp_path / "plan.json"))
    assert code == ModelError.exit_code
    assert message in err
    assert not (tmp_path / "plan.json").exists()


def test_a_builder_that_raises_shows_the_user_s_frames_then_one_line(
    write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write("sibling_sizes.py", "def width():\n    raise ValueError('no such size')\n")
    build = "def build_model():\n    import sibling_sizes\n    return nn.Linear(sibling_sizes.width(), 1)\n"
    model = write("model.py", CLASS + INPUTS + build)
    code, err = failing(capsys, *solve_arguments(model, tmp_path / "plan.json"))
    assert code == ModelError.exit_code
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    files = [line.split('"')[1] for line in lines if line.startswith('  File "')]
    assert files == [str(model), str(tmp_path / "sibling_sizes.py")]
    assert lines[-2:] == [
        "ValueError: no such size",
        f"tpplan: error: {model}: ValueError while calling build_model()",
    ]
    assert not (tmp_path / "plan.json").exists()


def test_a_forward_that_cannot_be_traced_shows_the_user_s_line(
    write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write(
        "model.py", CLASS.replace("self.embedding(ids)", "self.embeding(ids)") + INPUTS + "build_model = Tiny\n"
    )
    code, err = failing(capsys, *solve_arguments(model, tmp_path / "plan.json"))
    assert code == ModelError.exit_code
    assert f'In your files:\n  File "{model}", line 12, in forward\n' in err
    assert "tpplan: error: the model could not be traced" in err


def test_inputs_of_the_wrong_kind_are_refused(write: Write) -> None:
    text = CLASS + "build_model = Tiny\ndef example_inputs(batch, seq_len): return torch.zeros(batch)\n"
    spec = load_model_file(str(write("model.py", text)))
    with pytest.raises(ModelError, match=r"example_inputs\(1, 8\) returned Tensor, expected a dict"):
        spec.example_inputs(1, 8)


def test_a_model_file_imports_its_siblings_and_leaves_the_path_as_it_was(write: Write) -> None:
    write("sibling_of_model.py", CLASS)
    text = "import torch\nfrom sibling_of_model import Tiny\ndef other(): return Tiny()\nunused_outputs = ['hidden']\n"
    before = list(sys.path)
    spec = load_model_file(f"{write('model.py', text + INPUTS)}:other")
    assert type(spec.build_model()).__name__ == "Tiny"
    assert (spec.loss, spec.unused_outputs) == (None, ("hidden",))
    assert sys.path == before


def test_an_import_that_fails_shows_the_user_s_line(write: Write) -> None:
    path = write("model.py", "\nimport tpplan_no_such_module\n")
    with pytest.raises(UserCodeError, match="ModuleNotFoundError while importing it") as raised:
        load_model_file(str(path))
    assert f'File "{path}", line 2' in raised.value.user_traceback
    assert raised.value.user_traceback.count("File ") == 1


# Hugging Face


def test_without_transformers_the_extra_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'tpplan\[hf\]'"):
        load_model_file(f"hf:{write('config.json', '{}')}")


def test_hugging_face_configurations_load(write: Write) -> None:
    pytest.importorskip("transformers")
    import torch

    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "dtype": "bfloat16",
    }  # fmt: skip
    spec = load_model_file(f"hf:{write('config.json', json.dumps(config))}")
    with torch.device("meta"):
        model = spec.build_model()
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float32)}
    inputs = spec.example_inputs(2, 16)
    assert isinstance(inputs, dict)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {"input_ids": (2, 16), "labels": (2, 16)}
    output = spec.build_model()(**inputs)
    assert output.loss.shape == ()
    assert "past_key_values" not in output
    assert spec.unused_outputs == ("logits",)


def test_a_folder_or_a_name_in_the_hub_s_cache_stands_for_its_configuration(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    text = json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11})
    path = write("config.json", text)
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "try_to_load_from_cache", _cached(path))
    for name in (tmp_path, path, "me/mine"):
        assert load_model_file(f"hf:{name}").build_model().config.n_embd == 8
    with pytest.raises(ModelError, match="folder, or model in the local cache"):
        load_model_file("hf:me/other")


def _cached(path: Path) -> Callable[[str, str], str | None]:
    return lambda name, file: str(path) if (name, file) == ("me/mine", "config.json") else None


def test_a_hugging_face_configuration_of_no_known_model(write: Write) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match="transformers cannot read it"):
        load_model_file(f"hf:{write('config.json', json.dumps({'model_type': 'no-such-model'}))}")


# Mistakes in the request


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (("--profile", "h100-sx"), 6, "unknown profile 'h100-sx'; did you mean 'h100-sxm'? (shipped: "),
        (("--profile", "no/such.json"), 6, "no/such.json: cannot be read"),
        (("--tp", "3"), 2, "tp = 3 does not divide 4 GPUs; degrees that do: 1, 2, 4"),
        (("--tp", "4", "--fsdp", "2"), 2, "tp * fsdp = 8 does not divide 4 GPUs"),
        (("--micro-batch", "3"), 2, "--global-batch 16 is no multiple of --micro-batch 3"),
        (("--gpus", "0"), 2, "argument --gpus: expected a whole number from 1, got '0'"),
        (
            ("--memory-limit", "70"),
            2,
            "expected a size with its unit (KiB, MiB, GiB, KB, MB, GB) such as 70GiB, got '70'",
        ),
        (("--memory-limit", "0GiB"), 2, "expected a size with its unit"),
        (("--time-limit", "-1"), 2, "--time-limit"),
        (("--solver", "cplex"), 2, "invalid choice: 'cplex'"),
        (("--precision", "fp8"), 2, "invalid choice: 'fp8'"),
        (("--optimizer", "lion"), 2, "unknown optimizer 'lion'"),
        (("--colour",), 2, "unrecognized arguments: --colour"),
    ],
)
def test_contradictory_requests_are_refused_before_the_model_is_read(
    more: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    assert failing(capsys, *solve_arguments(tmp_path / "unread.py", plan, *more))[0] == code
    main_error = failing(capsys, *solve_arguments(tmp_path / "unread.py", plan, *more))[1]
    assert message in main_error
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_fits_nowhere_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = solve_arguments(EXAMPLE, tmp_path / "plan.json", "--memory-limit", "1KiB", "--no-prove")
    code, err = failing(capsys, *arguments)
    assert code == 3
    assert "no plan fits 1.00 KiB per GPU on 4 GPUs" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("nowhere/plan.json", "nowhere is not a folder"),
        ("file/plan.json", "file is not a folder"),
        (".", "it is a folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_solving(
    output: str, message: str, write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write("file", "")
    code, err = failing(capsys, *solve_arguments(EXAMPLE, tmp_path / output))
    assert code == 7
    assert "cannot be written: " in err
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# Mistakes in a plan


def changed(change: Callable[[dict[str, object]], object]) -> str:
    data = make_plan().to_dict()
    change(data)
    return json.dumps(data)


def at(data: dict[str, object], key: str) -> dict[str, object]:
    member = data[key]
    assert isinstance(member, dict)
    return member


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", "plan.json: not valid JSON"),
        ("[]", "plan.json: expected an object, got an array"),
        (
            changed(lambda d: d.update(schema_version=99)),
            "schema_version: this tpplan reads version 1, the file has 99",
        ),
        (changed(lambda d: at(d, "batch").pop("seq_len")), "plan.json: batch.seq_len: missing key"),
        (changed(lambda d: at(d, "batch").update(seq_lem=1)), "batch.seq_lem: unknown key; did you mean 'seq_len'?"),
        (changed(lambda d: at(d, "batch").update(seq_len="8")), "batch.seq_len: expected an integer, got text '8'"),
        (
            changed(lambda d: at(d, "batch").update(micro_batch=7)),
            "plan.json: batch.global_batch: expected micro_batch 7",
        ),
    ],
)
def test_malformed_plans_are_refused_with_the_path_of_the_key(
    text: str, message: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = failing(capsys, "show", write("plan.json", text))
    assert code == 7
    assert message in err
    assert err.startswith("tpplan: error: ")
    assert err.count("\n") == 1


def test_a_plan_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, err = failing(capsys, "show", tmp_path / "none.json")
    assert (code, "cannot be read" in err) == (7, True)


# What is nobody's mistake


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "tpplan: interrupted\n"),
        (ZeroDivisionError("division by zero"), 1, "tpplan: this is a bug in tpplan: please report it"),
        (TpplanError("of some kind"), 1, "tpplan: error: of some kind\n"),
    ],
)
def test_interruptions_and_bugs_have_their_own_exit_codes(
    raised: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> Plan:
        raise raised

    monkeypatch.setattr("tpplan.commands.show.load_plan", fail)
    assert main(["show", "plan.json"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert ("Traceback" in err) == (code == 1 and not isinstance(raised, TpplanError))


def test_no_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = failing(capsys)
    assert (code, "usage: tpplan" in err) == (2, True)
