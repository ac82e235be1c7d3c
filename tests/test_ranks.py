"""The harness of real ranks: results, failures, timeouts, and nothing left behind."""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks

#: far below the timeouts used here, far above what ending a rank takes
SOON_S = 20.0


def sum_of_ranks(offset: int) -> tuple[int, int]:
    value = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


def fail_on_rank_1(directory: Path) -> None:
    record_pid(directory)
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


def record_pid(directory: Path) -> None:
    (directory / str(os.getpid())).touch()


def gone(pid: int) -> bool:
    """True when there is no such process, not even a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def failure_of(function: Callable[..., object], *args: object, timeout_s: float = 60.0) -> RankError:
    """The error of a run on 3 ranks, which must come soon after it is due."""
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(3, function, *args, timeout_s=timeout_s)
    assert time.monotonic() - started < SOON_S
    return caught.value


def test_results_arrive_in_rank_order() -> None:
    assert run_ranks(4, sum_of_ranks, 10) == [(rank, 0 + 1 + 2 + 3 + 4 * 10) for rank in range(4)]


def test_closures_need_no_pickling() -> None:
    captured = torch.arange(3)
    results = run_ranks(2, lambda: captured + dist.get_rank())
    assert [result.tolist() for result in results] == [[0, 1, 2], [1, 2, 3]]


def test_large_results_do_not_deadlock() -> None:
    num_elements = 8 * 1024**2  # 32 MiB a rank; a pipe buffers 64 KiB
    results = run_ranks(2, lambda: torch.full((num_elements,), float(dist.get_rank()), requires_grad=True))
    assert [(len(result), result[0].item(), result[-1].item()) for result in results] == [
        (num_elements, rank, rank) for rank in range(2)
    ]


def test_a_failing_rank_is_reported_and_its_blocked_peers_are_ended(tmp_path: Path) -> None:
    error = failure_of(fail_on_rank_1, tmp_path)
    assert error.rank == 1
    assert 'raise ValueError("planted")' in error.traceback
    assert "in fail_on_rank_1" in str(error)
    assert all(gone(int(path.name)) for path in tmp_path.iterdir())


def test_a_timeout_ends_the_ranks_and_says_where_they_stood(tmp_path: Path) -> None:
    def barrier_without_rank_0() -> None:
        record_pid(tmp_path)
        if dist.get_rank() != 0:
            dist.barrier()

    error = failure_of(barrier_without_rank_0, timeout_s=2.0)
    assert "unfinished: 1, 2" in str(error)
    assert "in barrier_without_rank_0" in error.traceback
    assert all(gone(int(path.name)) for path in tmp_path.iterdir())


def test_a_rank_that_dies_is_reported_with_its_exit_code() -> None:
    def die_on_rank_2() -> None:
        if dist.get_rank() == 2:
            os.abort()
        dist.barrier()

    error = failure_of(die_on_rank_2)
    assert error.rank == 2
    assert "exit code -6" in str(error)
    assert "in die_on_rank_2" in error.traceback


def test_ranks_run_again_where_a_thread_without_python_ended_one(tmp_path: Path) -> None:
    def abort_once() -> int:
        if dist.get_rank() == 1 and not (tmp_path / "aborted").exists():
            (tmp_path / "aborted").touch()
            libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
            libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
            time.sleep(SOON_S)
        dist.barrier()
        return dist.get_rank()

    with pytest.warns(UserWarning, match=r"rank 1 died with exit code -6[^$]*in abort_once"):
        assert run_ranks(2, abort_once) == [0, 1]


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    assert "pickle" in failure_of(lambda: (_ for _ in ())).traceback


def test_a_skip_inside_a_rank_is_a_failure() -> None:
    assert "not here" in failure_of(lambda: pytest.skip("not here")).traceback


def test_a_run_leaves_no_process(tmp_path: Path) -> None:
    run_ranks(2, record_pid, tmp_path)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_a_rank_computes_forward_and_backward_after_the_parent_did() -> None:
    def gradient() -> float:
        weight = torch.ones(256, 256, requires_grad=True)
        (weight @ weight).sum().backward()
        return weight.grad.sum().item()

    expected = gradient()  # d/dW of sum(W W) at ones is 2 * 256 everywhere
    assert expected == 2 * 256 * 256**2
    assert run_ranks(2, gradient) == [expected, expected]
