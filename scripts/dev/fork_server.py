"""A process that forks others for the one which started it, and has computed nothing itself.

torch refuses to run a backward in a fork of a process that has run one ("Unable to handle autograd's threading in
combination with fork-based multiprocessing"), if it was built with CUDA. A fork server is started before that. What it
forks has imported all that was imported by then, inherits no threads, and takes 0.05 s, where a new interpreter takes
seconds to import torch.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class ForkServer(Generic[Parameters, Result]):
    """Calls a function that existed when the server was started, each time in a new process, one at a time.

    The function may fork processes of its own: they are killed with the process that it ran in, when it has returned,
    when the call is interrupted, and when the process that started the server ends.
    """

    def __init__(
        self, function: Callable[Parameters, Result], preload: Sequence[str] = (), follow: Sequence[str] = ()
    ) -> None:
        """Starts the server, which imports the modules named in preload. Of the packages named in follow it imports
        those modules that its starter has imported by the time of a call."""
        self._follow, self._followed = frozenset(follow), set[str]()
        self._socket, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _live(theirs, function, preload)
        theirs.close()

    def __enter__(self) -> "ForkServer[Parameters, Result]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """function(*args, **kwargs) in a new process; arguments and result are pickled, the function is not.

        Raises what the function raises, with its traceback as a note, and RuntimeError if the process or the server
        dies.
        """
        ours, theirs = multiprocessing.Pipe()
        with ours:
            try:
                with theirs:
                    socket.send_fds(self._socket, [b"\0"], [theirs.fileno()])
                ours.send_bytes(pickle.dumps(self._imported_since()))
                ours.send_bytes(pickle.dumps((args, kwargs)))
                has_returned, outcome = pickle.loads(ours.recv_bytes())
            except (EOFError, ConnectionError) as error:
                raise RuntimeError("a forked process died, or the server that forks: see what it wrote") from error
        if not has_returned:
            raise outcome
        result: Result = outcome
        return result

    def _imported_since(self) -> list[str]:
        """The modules to follow that this process has imported since the last call."""
        found = [m for m in sys.modules if m.partition(".")[0] in self._follow and m not in self._followed]
        self._followed.update(found)
        return found

    def close(self) -> None:
        """Ends the server."""
        self._socket.close()
        os.waitpid(self._pid, 0)


def _live(control: socket.socket, function: Callable[..., Any], preload: Sequence[str]) -> None:
    """The server's life; it never returns."""
    code = 1
    try:
        os.setsid()  # it outlives an interrupt from the terminal and a kill of its parent's group, to end its worker
        for name in preload:
            importlib.import_module(name)
        _freeze()
        _serve(control, function)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _serve(control: socket.socket, function: Callable[..., Any]) -> None:
    """Forks a worker for each connection that comes in, until there is nobody left to send one."""
    context = multiprocessing.get_context("fork")
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        with Connection(descriptors[0]) as connection:
            try:
                modules = pickle.loads(connection.recv_bytes())
                arguments = connection.recv_bytes()
            except (EOFError, OSError):  # the caller is gone
                continue
            _import(modules)
            worker = context.Process(target=_work, args=(connection, function, arguments))
            worker.start()
            wait([worker.sentinel, connection])  # nothing more is sent: the connection is ready when the caller is gone
            worker.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.join()
            worker.close()


def _import(modules: Sequence[str]) -> None:
    """Imports modules for all that is forked from now on; what cannot be imported here is left to who needs it."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if modules:
        _freeze()


def _freeze() -> None:
    """Spares a fork Python's searches for garbage, which would write to, and so copy, all that it shares."""
    gc.collect()
    gc.freeze()


def _work(connection: Connection, function: Callable[..., Any], arguments: bytes) -> None:
    """A worker's life: it sends (True, result) or (False, error)."""
    os.setpgid(0, 0)  # the server ends this process and those that it starts at once
    try:
        args, kwargs = pickle.loads(arguments)
        outcome = pickle.dumps((True, function(*args, **kwargs)))
    except BaseException as error:
        error.add_note(traceback.format_exc())
        outcome = pickle.dumps((False, _sendable(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(outcome)


def _sendable(error: BaseException) -> BaseException:
    """The error, or where it does not survive pickling a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
