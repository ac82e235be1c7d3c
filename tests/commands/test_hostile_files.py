"""Files and numbers made to hang, to fill the memory or to crash: each ends soon with an error in one line."""

import ast
import copy
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from examples import FOLDER
from gpu_scripts import gpu

from tpplan.commands import main
from tpplan.core.errors import PlanError
from tpplan.core.files import write_atomically
from tpplan.exporters._pytorch_file import Styles, file_text, quoted
from tpplan.machine.profile import load_profile
from tpplan.plan.plan import Plan
from tpplan.plan.plan_problems import MAX_NAMES
from tpplan.plan.proof_hash import why_unproven
from tpplan.plan.report import render

#: a guard, not a bar: what hangs ends the test
GUARD_S = 120
MEMORY_BYTES = 4 * 2**30
MODEL = f"{FOLDER / 'mlp.py'}"
SOLVE = ("--gpus", "2", "--profile", "h100-sxm", "--global-batch", "4", "--seq-len", "8")

SHIPPED = gpu.plans(gpu.FULL, ["tp4-sp"])["tp4-sp"].to_dict()
PROFILE = load_profile("h100-sxm").to_dict()


@dataclass(frozen=True)
class Input:
    """A file's content, the command that reads it, and what its error says."""

    content: Callable[[], str | bytes]
    command: Callable[[Path], list[str]]
    says: str
    suffix: str = ".json"


def show(path: Path) -> list[str]:
    return ["show", str(path)]


def check(path: Path) -> list[str]:
    return ["profile", "check", str(path)]


def solve_on(path: Path) -> list[str]:
    return ["solve", MODEL, *SOLVE, "--profile", str(path)]


def pins(path: Path) -> list[str]:
    return ["solve", MODEL, *SOLVE, "--pins", str(path)]


def config(path: Path) -> list[str]:
    return ["solve", f"hf:{path}", *SOLVE]


def edited(data: dict[str, Any], change: Callable[[Any], object]) -> Callable[[], str]:
    def make() -> str:
        own = copy.deepcopy(data)
        change(own)
        return json.dumps(own)

    return make


def plan_with(says: str, change: Callable[[Any], object]) -> Input:
    return Input(edited(SHIPPED, change), show, says)


def profile_with(says: str, change: Callable[[Any], object], command: Callable[[Path], list[str]] = check) -> Input:
    return Input(edited(PROFILE, change), command, says)


def many_patterns(data: Any) -> None:
    """A line each for 400 parameters of 10,000 layers."""
    data["blocks"] = {"layers.*": "0-9999"}
    entry = data["parameters"]["layers.*.attention.o_proj.weight"]
    data["parameters"] |= {f"layers.*.w{i}": entry for i in range(400)}


def many_blocks(data: Any) -> None:
    data["blocks"] = {f"layers{i}.*": "0-9999" for i in range(2_000)}


def many_reads(data: Any) -> None:
    data["blocks"] = {"layers.*": "0-9999"}
    entry = data["parameters"]["layers.*.attention.o_proj.weight"]
    entry["reads"] = {f"layers.*.r{i}": "R" for i in range(400)}


def recomputed_pairs(data: Any) -> None:
    """Each of 10,000 layers against every other."""
    data["blocks"] = {"layers.*": "0-4999"}
    data["boundaries"] = {}
    data["recompute"] = {"layers.*": "full", "layers.77.attention": "full"}


def digits(number: int) -> str:
    return "1" + "0" * number


def deep(opening: str, closing: str, depth: int = 10_000) -> str:
    return opening * depth + closing * depth


def set_at(*path: str | int, value: object) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


TIMES = ("collectives", 0, "time_s")
INPUTS: dict[str, Input] = {
    "ranges on every line": plan_with("stand for", many_patterns),
    "ranges in every block": plan_with("stand for", many_blocks),
    "readers of every name": plan_with("stand for", many_reads),
    "regions in regions": plan_with("recomputed too", recomputed_pairs),
    "units again and again": plan_with(
        "stand for", lambda d: (d.update(blocks={"layers.*": "0-9999"}), d["fsdp"].update(units=["layers.*"] * 500))
    ),
    "a range of a million": plan_with("blocks.layers.*", set_at("blocks", "layers.*", value="0-999999")),
    "ranges of megabytes": plan_with("blocks.layers.*", set_at("blocks", "layers.*", value="0-1," * 10**6)),
    "a mesh of 10^18": plan_with("mesh_degrees", set_at("mesh_degrees", "tp", value=10**18)),
    "a cluster of 10^18": plan_with("cluster.gpus", set_at("cluster", "gpus", value=10**18)),
    "an integer of 400 digits": plan_with("batch.seq_len", set_at("batch", "seq_len", value=10**400)),
    "an integer of 5000 digits": Input(
        lambda: json.dumps(SHIPPED).replace('"seq_len": 4096', f'"seq_len": {digits(5000)}'), show, "batch.seq_len"
    ),
    "an integer of a million digits": Input(
        lambda: json.dumps(SHIPPED).replace('"seq_len": 4096', f'"seq_len": {digits(10**6)}'), show, "batch.seq_len"
    ),
    "parts of 5000 digits": plan_with(
        "parameters.lm_head.weight.placement",
        set_at("parameters", "lm_head.weight", "placement", value=f"S(0; {digits(5000)}, 4)"),
    ),
    "a shape beyond any tensor": plan_with(
        "parameters.lm_head.weight.shape", set_at("parameters", "lm_head.weight", "shape", value=[2**40, 2**40])
    ),
    "a shape of 10^5 dims": plan_with(
        "parameters.lm_head.weight.shape", set_at("parameters", "lm_head.weight", "shape", value=[2**60] * 10**5)
    ),
    "a time of 1e308": plan_with("predicted.step_time_s", set_at("predicted", "step_time_s", value=1e308)),
    "a limit of 5e-324": plan_with(
        "predicted.memory_limit_bytes", set_at("predicted", "memory_limit_bytes", value=5e-324)
    ),
    "a key of a million letters": plan_with("a key of 1000000", lambda d: d["boundaries"].update({"a" * 10**6: {}})),
    "a name of a million dots": plan_with("a key of 1000000", lambda d: d["recompute"].update({"." * 10**6: "full"})),
    "half a surrogate pair": plan_with("expected Unicode text", set_at("torch_version", value="\ud800")),
    "a plan 10,000 deep": Input(lambda: deep("[", "]"), show, "too deep"),
    "objects 10,000 deep": Input(lambda: deep('{"a":', "}").replace(":}", ":1}", 1), show, "too deep"),
    "a plan 10^6 deep": Input(lambda: deep("[", "]", 10**6), show, "too deep"),
    "NaN": Input(lambda: json.dumps(SHIPPED).replace('"step_time_s": 0', '"step_time_s": NaN, "x": 0', 1), show, "NaN"),
    "no text": Input(lambda: b"\xff\xfe\x00", show, "cannot be read"),
    "nothing": Input(lambda: "", show, "not valid JSON"),
    "more than a plan": Input(lambda: b" " * (2**26 + 1), show, "more than 64 MiB"),
    "a profile 10,000 deep": Input(lambda: deep("[", "]"), check, "too deep"),
    "a rate of 1e308": profile_with("bandwidth", set_at("bandwidth", "hbm_bytes_per_s", value=1e308), solve_on),
    "a rate of 5e-324": profile_with("bandwidth", set_at("bandwidth", "hbm_bytes_per_s", value=5e-324), solve_on),
    "a launch of 5e-324 s": profile_with("launch.launch_s", set_at("launch", "launch_s", value=5e-324), solve_on),
    "a collective of 1e308 s": profile_with("collectives[0].time_s", set_at(*TIMES, value=[1e308] * 2), solve_on),
    "memory of 10^400 bytes": profile_with("memory.memory_bytes", set_at("memory", "memory_bytes", value=10**400)),
    "a node of 10^400 GPUs": profile_with("gpus_per_node", set_at("gpus_per_node", value=10**400)),
    "a configuration 10,000 deep": Input(lambda: deep("[", "]"), config, "too deep"),
    "a configuration's object 10,000 deep": Input(
        lambda: deep('{"a":', "}").replace(":}", ":1}", 1), config, "too deep"
    ),
    "a configuration that is a number": Input(lambda: digits(5000), config, "expected an object"),
    "arrays 10,000 deep in TOML": Input(lambda: "a = " + deep("[", "]"), pins, "too deep", ".toml"),
    "tables 10,000 deep in TOML": Input(lambda: "a = " + deep("{a=", "}"), pins, "TOML", ".toml"),
    "5000 digits in TOML": Input(lambda: f"tp = {digits(5000)}", pins, "TOML", ".toml"),
    "400 digits in TOML": Input(lambda: f"tp = {digits(400)}", pins, "below 2^63", ".toml"),
    "pins 10,000 deep": Input(lambda: deep("[", "]"), pins, "too deep"),
}  # fmt: skip

COMMANDS: dict[str, tuple[list[str], str]] = {
    "10^9 GPUs": (["solve", MODEL, *SOLVE, "--gpus", digits(9)], "at most"),
    "1e9 GPUs": (["solve", MODEL, *SOLVE, "--gpus", "1e9"], "expected a whole number"),
    "GPUs of 400 digits": (["solve", MODEL, *SOLVE, "--gpus", digits(400)], "at most"),
    "GPUs of 5000 digits": (["solve", MODEL, *SOLVE, "--gpus", digits(5000)], "at most"),
    "10^12 a node": (["solve", MODEL, *SOLVE, "--gpus-per-node", digits(12)], "at most"),
    "tp of 400 digits": (["solve", MODEL, *SOLVE, "--tp", digits(400)], "at most"),
    "tp of 10^9": (["solve", MODEL, *SOLVE, "--tp", digits(9)], "does not divide"),
    "a batch of 400 digits": (["solve", MODEL, *SOLVE, "--global-batch", digits(400)], "at most"),
    "a length of 10^18": (["solve", MODEL, *SOLVE, "--seq-len", digits(18)], "at most"),
    "memory of 400 digits": (["solve", MODEL, *SOLVE, "--memory-limit", f"{digits(400)}GiB"], "expected a size"),
    "seconds of 400 digits": (["solve", MODEL, *SOLVE, "--time-limit", digits(400)], "expected seconds"),
    "sizes up to 10^9": (["size", MODEL, *SOLVE[2:], "--max-gpus", digits(9)], "at most"),
    "tokens of 1e308": (["size", MODEL, *SOLVE[2:], "--target-tokens-per-day", "1e308"], "expected a number"),
    "a plan that never ends": (["show", "/dev/zero"], "more than 64 MiB"),
    "a profile that never ends": (["profile", "check", "/dev/../dev/zero"], "more than 64 MiB"),
    "a plan with a zero byte": (["show", "a\0b"], "cannot be read"),
}


#: runs each command in a fork of a process that has loaded what commands load; writes [exit code or -signal, error]
RUNNER = """
import contextlib, io, json, os, signal, sys, traceback
from tpplan.commands import main

def told(command):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(command)
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, said.getvalue()

found = []
for command in json.load(sys.stdin):
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(sys.argv[1]))
        with open(theirs, "w") as pipe:
            json.dump(told(command), pipe)
        os._exit(0)
    os.close(theirs)
    with open(ours) as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found.append(json.loads(answer) if code == 0 else (code, f"the process ended with {code}"))
print(json.dumps(found))
"""


def run_all(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Exit codes and errors of commands, each in a process that ends at a guard and has a limit of memory."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 * MEMORY_BYTES, 4 * MEMORY_BYTES))

    run = subprocess.run(
        [sys.executable, "-c", RUNNER, str(GUARD_S)],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=2 * GUARD_S,
        preexec_fn=limited,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: list[tuple[int, str]] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and error for every hostile file and command."""
    folder = tmp_path_factory.mktemp("hostile")
    commands = {name: command for name, (command, _) in COMMANDS.items()}
    for i, (name, hostile) in enumerate(INPUTS.items()):
        path = folder / f"hostile-{i}{hostile.suffix}"
        content = hostile.content()
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        commands[name] = hostile.command(path)
    assert len(commands) == len(INPUTS) + len(COMMANDS)
    return dict(zip(commands, run_all(list(commands.values())), strict=True))


def assert_told(code: int, said: str, says: str) -> None:
    error = said[said.index("error: ") :] if "error: " in said else said
    assert code not in (0, 1), said[-2000:]
    assert "Traceback" not in said
    assert len(error.splitlines()) == 1, error[:2000]
    assert len(error) < 2_000
    assert says in error


@pytest.mark.parametrize("name", INPUTS)
def test_a_hostile_file_is_refused_in_a_line(name: str, answers: dict[str, tuple[int, str]]) -> None:
    assert_told(*answers[name], INPUTS[name].says)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_hostile_command_is_refused_in_a_line(name: str, answers: dict[str, tuple[int, str]]) -> None:
    assert_told(*answers[name], COMMANDS[name][1])


def test_the_largest_plan_that_is_read_is_shown() -> None:
    entry = copy.deepcopy(SHIPPED["parameters"]["layers.*.attention.o_proj.weight"])  # type: ignore[index]
    data = copy.deepcopy(SHIPPED)
    data["blocks"] = {"layers.*": "0-4999"}
    data["parameters"] = {f"layers.*.w{i}": {**entry, "reads": {}} for i in range(20)}
    plan = Plan.from_dict(data)
    assert len(plan.parameter_plans()) == 100_000 < MAX_NAMES
    assert render(plan)


# ---- what is written


def test_devices_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    fifo, got = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()), daemon=True)
    reader.start()
    while not got and reader.is_alive():
        try:
            write_atomically(fifo, "text")
            break
        except PlanError:  # the reader is not there yet
            continue
    reader.join(timeout=GUARD_S)
    assert got == ["text"]
    assert fifo.is_fifo()
    write_atomically(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_a_fifo_that_nobody_reads_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PlanError, match="no process reads from the pipe"):
        write_atomically(tmp_path / "fifo", "text")


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "plan.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    (tmp_path / "second").symlink_to("link.json")
    write_atomically(tmp_path / "second", "newer")
    assert target.read_text() == "newer"
    (tmp_path / "new").symlink_to(tmp_path / "there" / "fresh.json")
    write_atomically(tmp_path / "new", "text")
    assert (tmp_path / "there" / "fresh.json").read_text() == "text"
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]


def refused_places(folder: Path) -> list[Path]:
    (folder / "folder").mkdir()
    (folder / "file").write_text("")
    (folder / "circle").symlink_to("circle")
    (folder / "to-folder").symlink_to("folder")
    (folder / "nowhere").symlink_to("absent/plan.json")
    names = ("folder", "circle", "to-folder", "nowhere", "file/plan.json", "absent/plan.json", "n" * 300, "a\0b")
    return [folder / name for name in names]


def test_what_cannot_be_written_is_an_error_and_stays(tmp_path: Path) -> None:
    places = refused_places(tmp_path)
    before = sorted(tmp_path.iterdir())
    for place in places:
        with pytest.raises(PlanError, match="cannot be written"):
            write_atomically(place, "text")
    assert sorted(tmp_path.iterdir()) == before


def test_every_output_may_be_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    null = Path("/dev/null")
    assert main(["profile", "show", "h100-sxm", "--html", str(null)]) == 0
    Plan.from_dict(SHIPPED).dump(tmp_path / "plan.json")
    Plan.from_dict(SHIPPED).dump(null)
    assert null.is_char_device()
    assert not Path("/dev/null.partial").exists()
    capsys.readouterr()


# ---- what is printed

ESCAPES = {
    "clear the screen": "\x1b[2J", "a title": "\x1b]0;owned\x07", "colours": "\x1b[8m", "C1": "\x9b2J",
    "backspace": "proven\x08", "return": "x\rproof  proven", "line": "x\nproof  proven", "DEL": "\x7f",
    "right to left": "\u202eneverp", "isolate": "\u2067x", "a line separator": "\u2028x", "no width": "pro\u200bven",
    "a tag": "\U000e0041", "markup": "[bold red]x[/bold red]", "an open tag": "[/x]",
}  # fmt: skip
UNSAFE = {
    chr(code) for code in (*range(9), *range(11, 32), 127, *range(128, 160), 0x202E, 0x2067, 0x2028, 0x200B, 0xE0041)
}


def with_text(text: str) -> dict[str, Any]:
    """A plan that holds a text in many places."""
    data = copy.deepcopy(SHIPPED)
    data["notes"] = [text]
    data["torch_version"] = data["cluster"]["profile"] = data["solver"]["name"] = text
    data["proof"]["cuts"] = data["proof"]["assumptions"] = [text]
    data["predicted"]["peak_module"] = text
    data["unruled_ops"] = {text: 1.0}
    data["collectives"][0]["kind"] = text
    data["parameters"][f"a{text}.w"] = data["parameters"]["lm_head.weight"]
    data["boundaries"][f"a{text}"] = data["boundaries"]["lm_head"]
    data["untouched"] = text
    return data


@pytest.mark.parametrize("name", ESCAPES)
def test_no_escape_of_a_plan_reaches_the_terminal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(with_text(ESCAPES[name])))
    assert main(["show", str(path)]) == 0
    assert main(["show", str(path), "--json"]) == 0
    main(["explain", str(path), "a*"])
    broken = json.loads(path.read_text())
    broken[ESCAPES[name]] = broken["precision"] = ESCAPES[name]
    path.write_text(json.dumps(broken))
    assert main(["show", str(path)]) == 7
    del broken[ESCAPES[name]]
    path.write_text(json.dumps(broken))
    assert main(["show", str(path)]) == 7
    said = capsys.readouterr()
    assert not UNSAFE & {*said.out, *said.err}
    assert "\nproof  proven" not in said.out + said.err


def test_no_escape_of_a_profile_reaches_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    for text in ESCAPES.values():
        data = copy.deepcopy(PROFILE)
        data["name"] = data["device"] = text
        data["notes"] = [text]
        path.write_text(json.dumps(data))
        assert main(["profile", "show", str(path)]) == 0
        assert main(["profile", "check", str(path)]) == 0
    said = capsys.readouterr()
    assert not UNSAFE & {*said.out, *said.err}


def test_colours_are_ours_alone() -> None:
    plan = Plan.from_dict(with_text("\x1b[8mhidden"))
    text = render(plan, color=True)
    assert "\x1b[8m" not in text
    assert "\\x1b[8mhidden" in text
    assert why_unproven(plan)


def test_commands_print_in_one_place() -> None:
    for path in (Path(__file__).resolve().parents[2] / "tpplan" / "commands").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "sys.stdout.write", "sys.stderr.write", "traceback.print_exc"), path


# ---- what is written as code

NAMES = (
    'a"b', "a'b", 'a"""b', "a\nb", "a\\", "a{b}", "a}b{", "a#b", "é", "\u202e",
    '"] = __import__("os").abort()  #', "i}", "\r",
    '\\" + x', "\ud800",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_written_file_is_a_name(name: str) -> None:
    assert ast.literal_eval(quoted(name)) == name
    plan = Plan.from_dict(SHIPPED)
    text = '"""\n__import__("os").abort()\n"""' + name
    changed = replace(plan, tpplan_version=text, torch_version=text, blocks={"layers.*": "0-2"})
    styles = {f"layers.{i}.{name}": "Style()" for i in range(3)} | {f"{name}.alone": "Style()"}
    ties = ((f"x.{name}", f"y.{name}"),)
    written = file_text(changed, Styles(entering={}, layers=styles, leaving={}, ties=ties))
    written.encode("ascii")
    tree = ast.parse(written)
    plain = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Expr | ast.Assign | ast.ClassDef
    assert all(isinstance(node, plain) for node in tree.body)
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {f"{name}.alone", f"x.{name}"} <= constants
    in_loops = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    assert f"layers.1.{name}" in {eval(compile(ast.Expression(node), "", "eval"), {"i": 1}) for node in in_loops}
