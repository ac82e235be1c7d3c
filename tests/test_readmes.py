"""The READMEs: what they show runs, prints what they say, and names files that exist.

Blocks of a README run in order in one folder, on the CPU. By default its commands run in forks of a process that has
imported torch; with -m long the very text is given to a shell.
"""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from examples import FOLDER, eager_to_shard, solve_example
from forks import in_fork
from readme_blocks import MARK, READMES, ROOT, Block, blocks_of, links, named_definitions, named_files, unmarked
from test_layering import ROOMS
from validate import Sample, violation

from tpplan import exporters
from tpplan.commands import main
from tpplan.layouts.rules import call_strategies, reduction

#: lines of README.md: three screens
MOST_LINES = 150
#: for one command, in forks and by a shell
TIMEOUT_S, LONG_TIMEOUT_S = 100, 900
FAILED = 1


def text_of(readme: str) -> str:
    return (ROOT / readme).read_text(encoding="utf-8")


def test_the_front_door_fits_on_three_screens() -> None:
    assert len(text_of("README.md").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("readme", READMES)
def test_every_block_says_who_runs_it(readme: str) -> None:
    assert not unmarked(text_of(readme))


@pytest.mark.parametrize("readme", READMES)
def test_marks_are_spelled_right(readme: str) -> None:
    comments = re.findall(r"^<!--.*-->$", text_of(readme), flags=re.MULTILINE)
    used = [block for block in blocks_of(text_of(readme)) if block.mark is not None]
    assert all(MARK.fullmatch(comment) for comment in comments)
    assert len(used) == len(comments), "a mark that no block follows"
    assert all(bool(block.value) == (block.mark in ("file", "output of", "long output of", "tested")) for block in used)


@pytest.mark.parametrize("readme", READMES)
def test_links_lead_somewhere(readme: str) -> None:
    missing = [link for link in links(text_of(readme)) if not ((ROOT / readme).parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("readme", READMES)
def test_named_files_exist(readme: str) -> None:
    missing = [path for path in named_files(text_of(readme)) if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- run -->\n```sh\ntpplan show x\n```\n", None),
        ("```sh\ntpplan show x\n```\n", "line 1: no mark before ```sh"),
        ("\n```python\nx = 1\n```\n", "line 2: no mark before ```python"),
        ("```text\nany\n```\n", None),
        ("see\n\n    tpplan show x\n", "line 3: tpplan show x"),
    ],
)
def test_a_block_without_a_mark_is_found(text: str, complaint: str | None) -> None:
    assert unmarked(text) == ([] if complaint is None else [complaint])


# --- in forks --------------------------------------------------------------------------------------------------------


def printed_to(log: Path) -> None:
    """What this process prints from now on, below Python too, goes to a file; it ends when its time is over."""
    signal.alarm(TIMEOUT_S)
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def ran_script(words: list[str]) -> int:
    """The exit code of a script, run as `python SCRIPT ...`."""
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else FAILED * (end.code is not None)
    return 0


def ran_ranks(num_ranks: int, words: list[str]) -> int:
    """Exit code 0 where all ranks of a script end well, with the environment that torchrun gives each."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # how torch knows that torchrun has started it
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            signal.alarm(TIMEOUT_S)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            code = FAILED
            with suppress(Exception):
                code = main(words[2:]) if words[:2] == ["-m", "tpplan"] else ran_script(words)
            sys.stdout.flush()
            os._exit(code)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children)


def called(words: list[str], folder: str, log: str) -> int:
    """The exit code of a command, in a process that has no other use."""
    os.chdir(folder)
    printed_to(Path(log))
    match words:
        case ["tpplan", *arguments]:
            return main(arguments)
        case ["python", *script]:
            return ran_script(script)
        case ["torchrun", "--nproc-per-node", num_ranks, *script]:
            return ran_ranks(int(num_ranks), script)
        case _:
            raise AssertionError(f"{words[0]}: test_readmes.py cannot run it in a fork")


def run_command(words: list[str], folder: Path) -> str:
    """What a command prints. Raises AssertionError where it fails."""
    log = folder / f".log-{time.monotonic_ns()}"
    log.touch()
    try:
        code = in_fork(called, words, str(folder), str(log))
    except BaseException as error:
        raise AssertionError(f"{' '.join(words)}: {error}\n{log.read_text(encoding='utf-8')}") from error
    output = log.read_text(encoding="utf-8")
    log.unlink()
    assert code == 0, f"{' '.join(words)}: exit code {code}\n{output}"
    return output


def run_block(block: Block, folder: Path, printed: dict[str, str]) -> None:
    """What a block's mark says. `printed` is what commands have printed so far."""
    match block.mark:
        case "file":
            (folder / block.value).write_text(block.text, encoding="utf-8")
        case "run" if block.language == "python":
            (folder / "block.py").write_text(block.text, encoding="utf-8")
            run_command(["python", "block.py"], folder)
        case "run":
            for words in block.commands():
                printed[" ".join(words)] = run_command(words, folder)
        case "output of":
            if block.value not in printed:
                printed[block.value] = run_command(block.value.split(), folder)
            assert_shown(block, printed[block.value])


def assert_shown(block: Block, output: str) -> None:
    """The output holds the block's lines next to each other, those about each "..." apart. Times are any number."""
    lines, place = [general(line) for line in output.splitlines()], 0
    for part in re.split(r"^\.\.\.\n", block.text, flags=re.MULTILINE):
        wanted = [general(line) for line in part.splitlines()]
        places = range(place, len(lines) - len(wanted) + 1)
        found = next((i for i in places if lines[i : i + len(wanted)] == wanted), None)
        assert found is not None, f"line {block.line}: {block.value} does not print\n{part}\nbut\n{output}"
        place = found + len(wanted)


def general(line: str) -> str:
    """A line without what no two runs have alike: trailing spaces, measured seconds and errors of rounding."""
    return re.sub(r"\d+(?:\.\d+)?e-\d+", "E", line.rstrip())


def furnished(folder: Path) -> Path:
    """A folder from which commands find the checkout's scripts, profiles and package."""
    for name in ("scripts", "profiles", "tpplan", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("readme", READMES)
def test_what_is_shown_runs(readme: str, tmp_path: Path) -> None:
    folder, printed = furnished(tmp_path), dict[str, str]()
    for block in blocks_of(text_of(readme)):
        run_block(block, folder, printed)


# --- what tpplan/README.md says of the house ------------------------------------------------------------------------


@pytest.mark.parametrize("readme", READMES)
def test_named_functions_are_where_it_says(readme: str) -> None:
    definitions = named_definitions(text_of(readme))
    assert len(definitions) > 20 or readme != "tpplan/README.md"
    missing = [
        f"{name} in {path}"
        for name, path in definitions
        if not re.search(
            rf"^(?:def|class) {name}\b|^{name}(?:: .+)? = ",
            ((ROOT / readme).parent / path).read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    ]
    assert not missing


def test_every_room_is_in_the_table() -> None:
    found = set(re.findall(r"\[([a-z_/]+)\]\(\1\)", text_of("tpplan/README.md")))
    assert found == set(ROOMS)


def shown_with(words: str) -> str:
    """The one block of tpplan/README.md that holds these words."""
    (found,) = [block.text for block in blocks_of(text_of("tpplan/README.md")) if words in block.text]
    return found


def problems_of_rule(code: str, target: str) -> list[str]:
    """What brute force finds wrong with a rule that is added to those for reductions."""
    exec(code, vars(reduction))  # the rules' own names are its imports
    sample = Sample(target=target, args=(torch.rand(6, 4, dtype=torch.float64).requires_grad_(), 1), kwargs={})
    found = [(strategy, tp) for tp in (2, 3) for strategy in call_strategies(sample.call, tp)]
    assert any(layout.dim is not None for strategy, _ in found for layout in strategy.operands), "only whole operands"
    return [problem for strategy, tp in found if (problem := violation(sample, strategy, tp))]


def test_the_rule_that_is_shown_is_right() -> None:
    code, target = shown_with("@op_rule"), "aten.cumprod.default"
    assert target in code
    assert in_fork(problems_of_rule, code, target) == []
    assert in_fork(problems_of_rule, code.replace("call.integer(1", "-1 - call.integer(1"), target) != []


def exported(folder: str, plan: str) -> str:
    """What the command line prints where an exporter's module lies in a folder."""
    exporters.__path__.append(folder)
    assert main(["export", plan, str(FOLDER / "mlp.py"), "--to", "layout_list", "-o", f"{folder}/out"]) == 0
    return (Path(folder) / "out").read_text(encoding="utf-8")


def test_the_exporter_that_is_shown_works(tmp_path: Path) -> None:
    plan = solve_example("mlp", eager_to_shard(), gpus=2, tp=2)
    plan.dump(tmp_path / "plan.json")
    (tmp_path / "layout_list.py").write_text(shown_with("def export"), encoding="utf-8")
    lines = in_fork(exported, str(tmp_path), str(tmp_path / "plan.json")).splitlines()
    cut = {name: own.placement for name, own in plan.parameter_plans().items() if own.placement.dim is not None}
    assert cut
    assert sorted(lines) == sorted(f"{name} {placement}" for name, placement in cut.items())


#: CPU seconds that the first plan and its page may take
MOST_CPU_S = 60.0
TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64}
TINY |= {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_three_commands_lead_to_a_page(tmp_path: Path) -> None:
    """The first installs; the others run as they stand, in a folder with a config alone."""
    pytest.importorskip("transformers")
    (shown,) = [block.text for block in blocks_of(text_of("README.md")) if "pip install" in block.text]
    install, *commands = shown.splitlines()
    assert install == "pip install '.[hf]'"
    assert len(commands) == 2
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    environment, before = put_on_path(tmp_path), os.times()
    for command in commands:
        shell(["bash", "-euc", command], tmp_path, environment)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < MOST_CPU_S
    assert "Where the time goes" in (tmp_path / "report.html").read_text(encoding="utf-8")


# --- by a shell ------------------------------------------------------------------------------------------------------


def put_on_path(folder: Path) -> dict[str, str]:
    """An environment in which `tpplan`, `python` and `torchrun` are those of this checkout and interpreter."""
    tools = folder / ".bin"
    tools.mkdir()
    modules = {"tpplan": "-m tpplan", "python": "", "torchrun": "-m torch.distributed.run"}
    for name, arguments in modules.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n', encoding="utf-8")
        (tools / name).chmod(0o755)
    paths = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return os.environ | paths | {"OMP_NUM_THREADS": "1"}


def shell(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONG_TIMEOUT_S, check=False
    )
    assert ran.returncode == 0, f"{command[-1]}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("readme", READMES)
def test_a_shell_runs_it_as_it_stands(readme: str, tmp_path: Path) -> None:
    folder = furnished(tmp_path)
    environment = put_on_path(folder)
    for block in blocks_of(text_of(readme)):
        match block.mark:
            case "file":
                (folder / block.value).write_text(block.text, encoding="utf-8")
            case "run" | "long" if block.language == "python":
                shell([sys.executable, "-c", block.text], folder, environment)
            case "run" | "long":
                shell(["bash", "-euc", block.text], folder, environment)
            case "output of" | "long output of":
                assert_shown(block, shell(["bash", "-euc", block.value], folder, environment))
