"""Seconds of a step of a pipeline of stages under 1F1B, plain or interleaved.

A step takes as long as the slowest stage's micro-batches, and, while the pipeline fills and drains, one micro-batch of
each other stage, or one of its chunks where a rank has several [Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1
and 2.2.2]:

    T = M t_max + (sum of t - t_max) / v + sends

M micro-batches, t seconds of a micro-batch's forward and backward on a stage, v chunks of layers on each rank, c
seconds of a link. With a chunk a rank, what is waited for what is sent is tpplan's own sum (`sent_s`). With several, a
rank exchanges with both neighbours at once after each chunk, and the pipeline fills and drains over all links:
(M v - 1) c_max + 2 (sum of c). Sends that run beside the next chunk's compute are waited for while the pipeline fills
and drains alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tpplan.search.pipelines.step_seconds import sent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTime:
    """Seconds of a step: of the slowest stage's work, of waiting while the pipeline fills and drains, of sends."""

    work_s: float
    bubble_s: float
    send_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.work_s + self.bubble_s + self.send_s


def schedule_time(
    stage_s: Sequence[float], link_s: Sequence[float], micro_batches: int, chunks: int = 1, *, hides_sends: bool = False
) -> ScheduleTime:
    """The time of a step, by the formula above. `stage_s` are seconds of a micro-batch by stage, `link_s` of a tensor
    between neighbours, one fewer."""
    assert len(link_s) == len(stage_s) - 1, f"{len(stage_s)} stages have {len(stage_s) - 1} links, got {len(link_s)}"
    slowest, send = max(stage_s), 2 * sum(link_s)
    if chunks == 1 and not hides_sends:
        send = sent_s([*link_s, 0.0], micro_batches)
    elif not hides_sends:
        send += (micro_batches * chunks - 1) * max(link_s, default=0.0)
    return ScheduleTime(work_s=micro_batches * slowest, bubble_s=(sum(stage_s) - slowest) / chunks, send_s=send)
