"""Two network namespaces, joined by a shaped link: two nodes of a cluster on one machine. Linux, as root.

Both ends of the link stand inside the namespaces, which no route leaves: the machine's own network is not touched, and
nothing beyond the two is reached. tbf shapes each end on its way out. On loopback, ranks of one node are not shaped.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed_parts import processors
from testbed_parts.processors import NoProcessorsError, Processors

PREFIX = "tpplan-testbed"
#: the two nodes' own network, out of what is free for private use [RFC 1918]
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PREFIX_LENGTH = 30
INTERFACE = "link0"
#: what may leave at once; one segment that the kernel hands over whole (64 KiB), so that little escapes the limit
BURST_BYTES = 65_536
#: what may wait; more than TCP keeps in a queue below it, so that nothing is dropped
QUEUE_BYTES = 16 * 2**20
COMMAND_TIMEOUT_S = 20.0
#: One thread per rank. glibc keeps freed memory, as a GPU's caching allocator does: else every large tensor costs page
#: faults, which are not what is tested here. One arena, for large blocks are only kept in the main one.
RANK_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
}
#: for processes to end when they are asked to
GRACE_S = 5.0
POLL_S = 0.05


class NotPermittedError(Exception):
    """This machine or this user cannot make network namespaces, or processors for the ranks."""


class RanksError(Exception):
    """Ranks failed, died or took too long; the message ends with what they wrote last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Names of the two namespaces; `owner` is the process that made them."""

    owner: int

    @property
    def nodes(self) -> tuple[str, str]:
        """The namespaces' names, the first the one where ranks meet."""
        return f"{PREFIX}-{self.owner}-0", f"{PREFIX}-{self.owner}-1"

    @property
    def processors(self) -> str:
        """The name of its ranks' control groups."""
        return f"{PREFIX}-{self.owner}"


def setup_commands(network: Network) -> list[list[str]]:
    """What makes the namespaces, the link between them, and their addresses."""
    first, second = network.nodes
    link = ["ip", "-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second]
    commands = [["ip", "netns", "add", first], ["ip", "netns", "add", second], link]
    for node, address in zip(network.nodes, ADDRESSES, strict=True):
        commands.append(["ip", "-n", node, "address", "add", f"{address}/{PREFIX_LENGTH}", "dev", INTERFACE])
        commands += [["ip", "-n", node, "link", "set", device, "up"] for device in ("lo", INTERFACE)]
    return commands


def shape_commands(network: Network, gbit_per_s: float) -> list[list[str]]:
    """What limits the link, each way."""
    rate = ["rate", f"{round(gbit_per_s * 1e9)}bit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
    return [["tc", "-n", node, "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *rate] for node in network.nodes]


def teardown_commands(network: Network) -> list[list[str]]:
    """What removes the namespaces; the link goes with them."""
    return [["ip", "netns", "delete", node] for node in network.nodes]


def stale_networks(listing: str, alive: frozenset[int]) -> list[Network]:
    """Networks in the output of `ip netns list` whose process is gone."""
    owners = {int(owner) for owner in re.findall(rf"^{PREFIX}-(\d+)-[01]\b", listing, re.MULTILINE)}
    return [Network(owner=owner) for owner in sorted(owners - alive)]


@contextlib.contextmanager
def two_nodes() -> Iterator[Network]:
    """The network, removed again whatever happens inside, with every process in it.

    Raises NotPermittedError where it cannot be made.
    """
    network = Network(owner=os.getpid())
    _check_permitted()
    for stale in stale_networks(_run(["ip", "netns", "list"]), _living()):
        remove(stale)
    with _signals_raise():
        try:
            for command in setup_commands(network):
                _run(command)
            _run(shape_commands(network, 1.0)[0])  # is there tbf?
            yield network
        finally:
            remove(network)


def shape(network: Network, gbit_per_s: float) -> None:
    """Limits the link to this many Gbit/s each way."""
    for command in shape_commands(network, gbit_per_s):
        _run(command)


def remove(network: Network) -> None:
    """Ends the processes inside, then removes the namespaces and control groups. Harmless where there are none."""
    for node in network.nodes:
        for send in (signal.SIGTERM, signal.SIGKILL):
            inside = _inside(node)
            for process in inside:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, send)
            deadline = time.monotonic() + (GRACE_S if inside else 0.0)
            while time.monotonic() < deadline and _inside(node):
                time.sleep(POLL_S)
    for command in teardown_commands(network):
        subprocess.run(command, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
    processors.remove(network.processors)


def rank_environment(rank: int, nodes: int, ranks_per_node: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank, and how it computes and sends here."""
    told = {
        "TORCHELASTIC_RUN_ID": PREFIX,
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": port,
        "RANK": rank,
        "WORLD_SIZE": nodes * ranks_per_node,
        "LOCAL_RANK": rank % ranks_per_node,
        "LOCAL_WORLD_SIZE": ranks_per_node,
        "GROUP_RANK": rank // ranks_per_node,
    }
    return RANK_ENVIRONMENT | {name: str(value) for name, value in told.items()}


def run_on_nodes(
    network: Network, script: Sequence[str], *, port: int, ranks_per_node: int, log: Path, timeout_s: float
) -> None:
    """The script and its arguments on every rank of both nodes, one thread on a processor of its own each, without a
    torchrun that would take time from them; what they write goes to the log.

    Raises RanksError where a rank fails, or is still running after timeout_s, NotPermittedError where there are no
    processors for them.
    """
    nodes = len(network.nodes)
    cores = Processors(cores=tuple(sorted(os.sched_getaffinity(0))), ranks=nodes * ranks_per_node)
    try:
        processors.make(network.processors, cores)
    except NoProcessorsError as error:
        raise NotPermittedError(f"processors for {cores.ranks} ranks on {len(cores.cores)} cores: {error}") from None
    started: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout_s
    with log.open("wb") as output:
        try:
            for rank in range(cores.ranks):
                command = ["ip", "netns", "exec", network.nodes[rank // ranks_per_node], sys.executable, *script]
                started.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=os.environ | rank_environment(rank, nodes, ranks_per_node, port),
                        preexec_fn=processors.entering(network.processors, cores, rank),
                    )
                )
            while any(process.poll() is None for process in started) and not any(p.returncode for p in started):
                if time.monotonic() > deadline:
                    raise RanksError(f"{' '.join(script)}: not done in {timeout_s:.0f} s\n{_last_lines(log)}")
                time.sleep(POLL_S)
        finally:
            _end(started)
    if any(process.returncode for process in started):
        raise RanksError(f"{' '.join(script)}: a rank failed\n{_last_lines(log)}")


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.poll() is None:
            process.terminate()
    for process in started:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_lines(log: Path, count: int = 40) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def _check_permitted() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NotPermittedError(f"{' and '.join(missing)} not found (iproute2, on Linux)")
    if os.geteuid() != 0:
        raise NotPermittedError("network namespaces are for root alone; run as root")


def _run(command: Sequence[str]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if ran.returncode:
        raise NotPermittedError(f"{' '.join(command)}: {ran.stderr.strip() or f'exit code {ran.returncode}'}")
    return ran.stdout


def _inside(node: str) -> list[int]:
    ran = subprocess.run(
        ["ip", "netns", "pids", node], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    return [int(process) for process in ran.stdout.split()]


def _living() -> frozenset[int]:
    return frozenset(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """A request to end, and a closed terminal, unwind as Ctrl-C does: what was made is removed."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
