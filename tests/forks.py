"""Functions called in processes that have run no backward, for tests: such a process may fork ranks (ranks.py).

They are forked from a server (scripts/dev/fork_server.py) that conftest.py starts before any test: what a test has
changed in its own process, such as a patched function or a seed, is not so in them.
"""

import functools
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import cloudpickle

from scripts.dev.fork_server import ForkServer

Result = TypeVar("Result")

#: what ranks use and each would import; DTensor imports torch._dynamo when it is first used
PRELOADED = (
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.testing", "tpplan", "tpplan.verify.verify"),
)

#: packages whose modules take seconds to import, in each rank anew, once a test has imported them
FOLLOWED = ("transformers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a test may have changed that its ranks are to see: environment variables, working directory, sys.path."""

    environment: dict[str, str]
    folder: str
    path: list[str]

    @classmethod
    def here(cls) -> "Surroundings":
        return cls(environment=dict(os.environ), folder=os.getcwd(), path=sys.path)

    def enter(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path


@functools.cache
def fork_server() -> ForkServer[[Surroundings, bytes], object]:
    """The server of this process, started at the first call, which must come before any backward."""
    return ForkServer(called, preload=PRELOADED, follow=FOLLOWED)


def in_fork(function: Callable[..., Result], *args: object) -> Result:
    """function(*args) in a process that has run no backward. All is pickled: function and args by cloudpickle."""
    result: Result = fork_server()(Surroundings.here(), cloudpickle.dumps((function, args)))
    return result


def called(surroundings: Surroundings, call: bytes) -> object:
    """The forked process's side of in_fork."""
    surroundings.enter()
    function, args = pickle.loads(call)
    return function(*args)
