"""Seconds of a step by part, from traces written by hand: each microsecond belongs to one part."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tpplan.core.errors import UsageError
from tpplan.plan.parts import COMPUTE, DATA_PARALLEL, FSDP_COPIES, OPTIMIZER, TENSOR_PARALLEL
from tpplan.trial.chrome_trace import Trace

MAIN, OTHER = 1, 2


def event(name: str, start: float, end: float, category: str = "cpu_op", thread: object = MAIN, **args: Any) -> Any:
    arguments = {name.replace("_", " "): value for name, value in args.items()}
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start, "pid": 1, "tid": thread,
            "args": arguments}  # fmt: skip


def written(tmp_path: Path, events: Sequence[Any], *, is_zipped: bool = False) -> Trace:
    groups = [{"pg_name": "3", "pg_desc": "mesh_tp"}, {"pg_name": "2", "pg_desc": "mesh_shard"}]
    text = json.dumps({"traceEvents": list(events), "distributedInfo": {"pg_config": groups}}).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(text) if is_zipped else text)
    return Trace.load(path)


def microseconds(trace: Trace, *, is_tp: bool = True) -> dict[str, float]:
    return {part: round(seconds * 1e6, 6) for part, seconds in trace.parts(is_tp=is_tp).items() if seconds}


ON_CPU = [
    event("aten::linear", 0, 100),
    event("aten::mm", 10, 90),
    event("FSDP::pre_forward", 110, 200, "user_annotation"),
    event("FSDP::all_gather", 120, 190, "user_annotation"),
    event("fsdp::all_gather_copy_in", 125, 135),
    event("c10d::_allgather_base_", 140, 150),
    event("gloo:all_gather", 0, 900, "user_annotation", OTHER),
    event("_c10d_functional::all_reduce", 210, 240),
    event("c10d::allreduce_", 215, 235),
    event("_c10d_functional::wait_tensor", 250, 300),
    event("Optimizer.step#AdamW.step", 400, 500, "user_annotation"),
    event("_c10d_functional::wait_tensor", 450, 460),
]


@pytest.mark.parametrize("is_zipped", [False, True])
def test_each_moment_of_the_main_thread_belongs_to_one_part(tmp_path: Path, is_zipped: bool) -> None:
    found = microseconds(written(tmp_path, ON_CPU, is_zipped=is_zipped))
    # 0-110 and 200-210, 240-250, 300-400 compute; FSDP's range but for the copy; the optimizer waits inside its own
    assert found == {COMPUTE: 230, DATA_PARALLEL: 80, FSDP_COPIES: 10, TENSOR_PARALLEL: 80, OPTIMIZER: 100}


def test_without_tensor_parallelism_functional_collectives_are_of_the_data_axes(tmp_path: Path) -> None:
    found = microseconds(written(tmp_path, ON_CPU), is_tp=False)
    assert found == {COMPUTE: 230, DATA_PARALLEL: 160, FSDP_COPIES: 10, OPTIMIZER: 100}


def test_two_steps_are_averaged_and_the_profilers_own_steps_bound_them(tmp_path: Path) -> None:
    later = [{**one, "ts": one["ts"] + 600} for one in ON_CPU]
    steps = [event("ProfilerStep#4", 0, 550, "user_annotation"), event("ProfilerStep#5", 550, 1150, "user_annotation")]
    trace = written(tmp_path, [event("aten::rand", -300, -10), *ON_CPU, *later, *steps])
    assert trace.steps == 2
    assert sum(microseconds(trace).values()) == pytest.approx(1150 / 2)


def test_on_a_gpu_only_what_kernels_do_not_hide_is_a_collectives(tmp_path: Path) -> None:
    def kernel(name: str, start: float, end: float, stream: int = 7, **args: Any) -> Any:
        return event(name, start, end, "kernel", stream, **args)

    trace = written(
        tmp_path,
        [
            event("Optimizer.step#AdamW.step", 900, 950, "user_annotation"),
            kernel("gemm", 0, 100),
            kernel("ncclDevKernel_AllGather", 50, 160, 20, Process_Group_Name="2"),
            kernel("ncclDevKernel_AllReduce", 150, 200, 21, Process_Group_Description="mesh_tp"),
            kernel("gemm", 220, 300),
            event("FSDP::all_gather_copy_out", 300, 330, "gpu_user_annotation", 7),
            kernel("split_with_sizes_copy", 301, 329),
            event("Optimizer.step#AdamW.step", 340, 400, "gpu_user_annotation", 7),
            kernel("multi_tensor_apply", 340, 400),
        ],
    )
    found = microseconds(trace)
    assert trace.is_of_gpu
    # tp 150-200, of which the gather's 150-160 is a part; the gather alone 100-150; gaps belong to compute
    assert found == {TENSOR_PARALLEL: 50, DATA_PARALLEL: 50, FSDP_COPIES: 28, OPTIMIZER: 60, COMPUTE: 212}
    assert sum(found.values()) == 400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "expected a trace"),
        ("[]", "expected a trace"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1}]}', "no step of an optimizer"),
    ],
)
def test_what_is_no_trace_of_a_step_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        Trace.load(path)
