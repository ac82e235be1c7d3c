"""Processes forked by a server: results, errors, and nothing left behind, however the caller ends."""

import importlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.dev.fork_server import ForkServer

#: far above what ending a process takes
SOON_S = 20.0


class StoppedError(BaseException):
    """What a signal handler raises in the middle of a call."""


class UnpicklableError(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text} {number}")


def apply(function: Callable[..., object], *args: object) -> object:
    return function(*args)


def fail(error: type[Exception], *args: object) -> None:
    raise error(*args)


def hold(fifo: Path) -> None:
    """Keeps a pipe open in this process and in a fork of it, says so, and stays."""
    descriptor = os.open(fifo, os.O_WRONLY)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600.0,)).start()
    os.write(descriptor, b"x")
    time.sleep(600.0)


@pytest.fixture
def server() -> Iterator[ForkServer[..., object]]:
    with ForkServer(apply) as started:
        yield started


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def assert_all_end(reader: int) -> None:
    """Nobody has the pipe open any more, soon."""
    assert select.select([reader], [], [], SOON_S)[0], "a process is left"
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_each_call_runs_in_a_process_of_its_own(server: ForkServer[..., object]) -> None:
    pids = {server(os.getpid) for _ in range(3)}
    assert len(pids | {os.getpid()}) == 4


def imported(name: str) -> bool:
    return name in sys.modules


def test_a_module_imported_since_is_imported_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "followed.py").write_text("import os\npid = os.getpid()\n")
    (tmp_path / "left.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ForkServer(apply, follow=("followed", "gone")) as server:
        assert not server(imported, "followed")
        importlib.import_module("followed")
        importlib.import_module("left")
        monkeypatch.setitem(sys.modules, "gone", sys)  # as a module that its starter alone can import
        assert server(imported, "followed")
        assert server(own_pid_of, "followed") == server(own_pid_of, "followed") != os.getpid()
        assert not server(imported, "left")
    monkeypatch.delitem(sys.modules, "followed")
    monkeypatch.delitem(sys.modules, "left")


def own_pid_of(name: str) -> int:
    pid: int = sys.modules[name].pid
    return pid


def test_an_error_is_raised_with_where_it_came_from(server: ForkServer[..., object]) -> None:
    with pytest.raises(ValueError, match="planted") as caught:
        server(fail, ValueError, "planted")
    assert "in fail" in "".join(caught.value.__notes__)


def test_an_error_that_cannot_be_pickled_comes_as_text(server: ForkServer[..., object]) -> None:
    with pytest.raises(RuntimeError, match="UnpicklableError: planted 7"):
        server(fail, UnpicklableError, 7, "planted")


def test_a_result_that_cannot_be_pickled_is_an_error(server: ForkServer[..., object]) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        server(threading.Lock)


def test_a_dying_process_is_an_error_and_the_next_call_is_served(server: ForkServer[..., object]) -> None:
    with pytest.raises(RuntimeError, match="died"):
        server(os._exit, 3)
    assert server(int, "7") == 7


def test_a_server_that_cannot_start_is_an_error() -> None:
    with ForkServer(apply, preload=("no_such_module",)) as server, pytest.raises(RuntimeError, match="server"):
        server(os.getpid)


def test_an_interrupted_call_leaves_no_process(server: ForkServer[..., object], fifo: Path) -> None:
    readers: list[int] = []

    def interrupt() -> None:
        readers.append(os.open(fifo, os.O_RDONLY))
        assert os.read(readers[0], 1) == b"x"
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def stop(number: int, frame: object) -> None:
        raise StoppedError

    before = signal.signal(signal.SIGUSR2, stop)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(StoppedError):
            server(hold, fifo)
    finally:
        signal.signal(signal.SIGUSR2, before)
    thread.join()
    assert_all_end(readers[0])
    assert server(int, "7") == 7


def test_nothing_outlives_a_caller_that_is_killed(fifo: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from test_fork_server import ForkServer, apply, hold\n"
        "ForkServer(apply)(hold, Path(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, fifo], env=environment) as caller:
        reader = os.open(fifo, os.O_RDONLY)
        assert os.read(reader, 1) == b"x"
        caller.kill()
    assert_all_end(reader)
