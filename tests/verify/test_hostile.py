"""Ranks that fail, die or differ: within a minute all have ended with one message, which names the rank and why."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from forks import in_fork
from plans import handmade_plan
from ranks import join_group
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import RankFailedError, TpplanError
from tpplan.core.mesh import Mesh
from tpplan.plan.plan import Plan
from tpplan.train.guard import PATIENCE_S, Cause, FailureReport, verdict_of

NUM_RANKS, CULPRIT = 3, 1
#: what the issue allows; silence_s below makes it less
SOON_S = 60.0
WIDTH = 12
MARKER = "tpplan: error: "


class Model(nn.Module):
    """Two layers, the second of which fails on one rank if told to."""

    def __init__(self, fail: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fail = fail
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fail is not None and self.calls > 1:
            self.fail()
        return self.second(self.first(x)).square().mean()


class Other(Model):
    """The same parameters and another function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()


def plan() -> Plan:
    return handmade_plan(Model(), Mesh(shard=NUM_RANKS), units=("first", "second"))


@dataclass(frozen=True, slots=True)
class End:
    """How a rank ended: its exit code, and what it said last."""

    exit_code: int | None
    said: str


def ends(function: Callable[[], None], silence_s: float = 4.0) -> list[End]:
    """How each rank of a group ends that runs a function under the guard; none may be there after SOON_S."""
    return in_fork(ends_here, function, silence_s)


def ends_here(function: Callable[[], None], silence_s: float) -> list[End]:
    """The ends of ranks that are forked from this process."""
    context = multiprocessing.get_context("fork")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            context.Process(target=live, args=(rank, folder, function, silence_s), daemon=True)
            for rank in range(NUM_RANKS)
        ]
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(max(0.0, started + SOON_S - time.monotonic()))
            codes = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        said = [(folder / f"stderr-{rank}").read_text() for rank in range(NUM_RANKS)]
    return [End(code, text.rpartition(MARKER)[2].strip()) for code, text in zip(codes, said, strict=True)]


def live(rank: int, folder: Path, function: Callable[[], None], silence_s: float) -> None:
    sys.stderr = (folder / f"stderr-{rank}").open("w", buffering=1)
    join_group(rank, NUM_RANKS, folder / "store", 120.0)
    try:
        with tpplan.guard(silence_s=silence_s):
            function()
    except TpplanError as error:
        sys.stderr.write(f"{MARKER}{error}\n")
        os._exit(error.exit_code)
    os._exit(0)


def assert_one_message(found: list[End], *parts: str, dead: int | None = None) -> None:
    """All ended by themselves, saying the same; a rank that was killed says nothing."""
    alive = [end for rank, end in enumerate(found) if rank != dead]
    assert {end.exit_code for end in alive} == {RankFailedError.exit_code}, found
    assert len({end.said for end in alive}) == 1, found
    assert all(part in alive[0].said for part in parts), alive[0].said


def train(model: nn.Module, own: Plan) -> None:
    applied = tpplan.apply_plan(model, own)
    for _ in range(3):
        applied(torch.ones(2, WIDTH)).backward()


def on_culprit(action: Callable[[], None]) -> Callable[[], None]:
    return lambda: action() if dist.get_rank() == CULPRIT else None


def raise_planted() -> None:
    raise ValueError("planted")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_raises_in_forward_ends_all() -> None:
    found = ends(lambda: train(Model(on_culprit(raise_planted)), plan()))
    assert_one_message(found, f"rank {CULPRIT} on ", "ValueError: planted", "test_hostile.py")


@pytest.mark.parametrize("dying", [CULPRIT, 0])
def test_a_rank_that_is_killed_in_a_step_ends_all(dying: int) -> None:
    found = ends(lambda: train(Model(lambda: kill_self() if dist.get_rank() == dying else None), plan()))
    assert found[dying].exit_code == -signal.SIGKILL
    assert_one_message(found, f"rank {dying}: died", "no sign of life", dead=dying)


@pytest.mark.long
def test_a_rank_that_stands_still_outside_of_collectives_is_waited_for() -> None:
    """Its thread shows that it lives."""
    found = ends(lambda: train(Model(on_culprit(lambda: time.sleep(9.0))), plan()), silence_s=6.0)
    assert found == [End(0, "")] * NUM_RANKS


def test_a_rank_with_another_plan_ends_all() -> None:
    def run() -> None:
        own = plan()
        train(Model(), replace(own, optimizer="sgd") if dist.get_rank() == CULPRIT else own)

    assert_one_message(ends(run), "different plans", f"rank {CULPRIT} has sha256:", "1 of 3 differ")


def test_a_rank_with_another_model_ends_all() -> None:
    def run() -> None:
        train(Other() if dist.get_rank() == CULPRIT else Model(), plan())

    assert_one_message(ends(run), "different models", "<root>: Model(", f"rank {CULPRIT} <root>: Other(")


def test_a_rank_with_another_width_ends_all() -> None:
    def run() -> None:
        model = Model()
        if dist.get_rank() == CULPRIT:
            model.second = nn.Linear(WIDTH, 2 * WIDTH)
        train(model, plan())

    assert_one_message(
        ends(run), f"rank {CULPRIT}: the plan was made for another model", "second.bias", "[24] in the model"
    )


def test_a_rank_with_another_torch_ends_all() -> None:
    def run() -> None:
        if dist.get_rank() == CULPRIT:
            torch.__version__ = "2.11.0"
        train(Model(), plan())

    own = str(torch.__version__)
    assert_one_message(ends(run), "different versions of torch", f"rank 0 has {own}, rank {CULPRIT} has 2.11.0")


def test_nothing_is_sharded_where_ranks_differ() -> None:
    def run() -> None:
        model = Model()
        own = plan()
        try:
            tpplan.apply_plan(model, replace(own, optimizer="sgd") if dist.get_rank() == CULPRIT else own)
        except TpplanError:
            assert type(model) is Model
            assert all(type(parameter) is nn.Parameter for parameter in model.parameters())

    assert ends(run) == [End(0, "")] * NUM_RANKS


# ---- the verdict


def report(rank: int, cause: Cause) -> FailureReport:
    return FailureReport(rank=rank, host="node", cause=cause, text=f"{cause} of {rank}")


def test_an_error_of_its_own_is_the_cause_whatever_came_before() -> None:
    lost, silent, own = report(0, Cause.LOST), report(2, Cause.SILENT), report(1, Cause.OWN)
    assert verdict_of([lost, silent, own], waited_s=0.0) == "rank 1 on node: own of 1"
    assert verdict_of([lost, silent], waited_s=0.0) == "rank 2 on node: silent of 2"
    assert verdict_of([lost], waited_s=0.0) is None
    assert verdict_of([lost], waited_s=PATIENCE_S + 1) == "rank 0 on node: lost of 0"
    assert verdict_of([], waited_s=PATIENCE_S + 1) is None
