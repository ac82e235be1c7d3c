"""The formula of a pipeline's step (accuracy_parts.schedule), against a simulation of the schedule."""

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "evidence"))

from accuracy_parts.schedule import schedule_time

#: (is backward, micro-batch, chunk)
Task = tuple[bool, int, int]


def tasks_of(rank: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Task]:
    """The order in which a rank of Megatron's (interleaved) 1F1B runs its chunks: forwards to fill the pipeline, one
    forward and one backward in turns, the rest of the backwards. Micro-batches go through chunks in groups as large as
    the pipeline is long [Narayanan et al. 2021, arXiv:2104.04473, figure 4]."""

    def task(number: int, is_backward: bool) -> Task:
        group, inside = divmod(number, stages * chunks)
        chunk = inside // stages
        return is_backward, group * stages + inside % stages, chunks - 1 - chunk if is_backward else chunk

    total = micro_batches * chunks
    ahead = stages - rank - 1 if chunks == 1 else 2 * (stages - rank - 1) + (chunks - 1) * stages
    ahead = min(ahead, total)
    for number in range(ahead):
        yield task(number, False)
    for number in range(total - ahead):
        yield task(ahead + number, False)
        yield task(number, True)
    for number in range(total - ahead, total):
        yield task(number, True)


def needs(task: Task, rank: int, stages: int, chunks: int) -> tuple[Task, int] | None:
    """What must be done before a task, and on which rank."""
    is_backward, micro_batch, chunk = task
    if not is_backward:
        if rank:
            return task, rank - 1
        return ((False, micro_batch, chunk - 1), stages - 1) if chunk else None
    if rank < stages - 1:
        return task, rank + 1
    return ((False, micro_batch, chunk), rank) if chunk == chunks - 1 else ((True, micro_batch, chunk + 1), 0)


def simulated(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int, chunks: int) -> float:
    """Seconds until every rank has done all of its tasks, each as soon as it can, in its order."""
    stages = len(forward_s)
    queues = [list(tasks_of(rank, stages, micro_batches, chunks)) for rank in range(stages)]
    done: dict[tuple[Task, int], float] = {}
    free = [0.0] * stages
    while any(queues):
        before = len(done)
        for rank, queue in enumerate(queues):
            while queue:
                needed = needs(queue[0], rank, stages, chunks)
                if needed is not None and needed not in done:
                    break
                task = queue.pop(0)
                takes = (backward_s if task[0] else forward_s)[rank] / chunks
                free[rank] = max(free[rank], done[needed] if needed is not None else 0.0) + takes
                done[task, rank] = free[rank]
        assert len(done) > before, "the schedule waits for itself"
    return max(free)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (4, 8), (4, 32), (8, 16)])
def test_equal_stages_take_what_the_simulation_does(stages: int, micro_batches: int, chunks: int) -> None:
    found = schedule_time([3.0] * stages, [0.0] * (stages - 1), micro_batches, chunks)
    assert found.step_s == pytest.approx(simulated([1.0] * stages, [2.0] * stages, micro_batches, chunks))


def test_unequal_stages_take_nearly_what_the_simulation_does() -> None:
    generator = random.Random(0)
    for _ in range(50):
        stages = generator.choice([2, 3, 4, 8])
        seconds = [generator.uniform(0.7, 1.3) for _ in range(stages)]
        real = simulated(seconds, [2 * own for own in seconds], 4 * stages, 1)
        found = schedule_time([3 * own for own in seconds], [0.0] * (stages - 1), 4 * stages)
        assert real <= found.step_s * (1 + 1e-9)
        assert real >= 0.95 * found.step_s  # the slowest stage need not be the one that waits longest
