"""Compares a plan with what it does: on real ranks, beside one process, or on a fake group of the plan's real size.

    report = verify_plan("plan.json", "model.py", ranks=4)       # report.checks, report.is_right
    report = verify_plan("plan.json", "model.py", dry=True)      # 512 ranks on a laptop: all checks but those of values

    check        what is compared
    proof        the plan with the model's ops (tpplan.verify.prove_plan)
    parameters   full parameters after the plan is applied, bit by bit; before, all ranks but the first hold garbage
    loss         the mean over all micro-batches, with one process
    gradients    full gradients of every parameter, with one process
    collectives  those of a step, one by one, with the plan's list
    shapes       every parameter's local shape on a rank, with its placement (dry)
    memory       the peak of a step on fake tensors, by torch's tracker, with the plan's prediction

A plan of stages is compared in the same way (tpplan.verify.verify_stages).

Values are compared in float32, whatever the plan's precision, as bfloat16 would hide errors below its rounding.
Collectives are counted in a step of the plan's own precision.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from tpplan.core.errors import RankFailedError, TpplanError, UsageError, VerificationError
from tpplan.plan.pipeline_plan import PipelinePlan, load_plan
from tpplan.plan.plan import Plan
from tpplan.search.models.user_model import load_model_file
from tpplan.trace.trace import quiet
from tpplan.verify.checks import (
    Check,
    Outcome,
    Report,
    collective_check,
    compare,
    memory_check,
    shape_check,
    telling,
)
from tpplan.verify.prove_plan import prove_plan
from tpplan.verify.rank_task import Subject, Task, check_on_fake_rank, check_on_rank, reference_step
from tpplan.verify.shrink import dropped_layers, on_mesh, smaller_mesh, with_layers
from tpplan.verify.spawn_ranks import on_ranks
from tpplan.verify.verify_stages import verify_stages

#: ranks that are started by default, or fewer where the plan has fewer
DEFAULT_RANKS = 4
TIMEOUT_S = 600.0


def verify_plan(
    plan: Plan | PipelinePlan | str | os.PathLike[str],
    model: str,
    *,
    ranks: int | None = None,
    layers: int | None = None,
    dry: bool = False,
    mend: bool = False,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Verifies a plan for the model that `model` names (model.py, model.py:BUILDER, hf:config.json).

    ranks: real ranks to run on, 4 by default or as many as the plan has, on a mesh with the plan's degrees as far as
        they go. A plan of stages needs as many as it has parts.
    layers: how many layers of each repeated block to keep, all by default; not of a plan of stages.
    dry: whether to run one rank of the plan's own mesh on fake tensors, in place of real ranks.
    mend: whether to prove the whole plan, also where a smaller one runs, and put it with that proof into the report.
    progress: hears of each stage ("prove", "ranks", "fakes") as it begins and ends, with 0 or 1 of 1 done; of a plan
        of stages, of the number that are proven.

    Raises PlanError, ModelError, UsageError for what cannot be run at all; wrong results are in the report.
    """
    loaded = plan if isinstance(plan, Plan | PipelinePlan) else load_plan(plan)
    if isinstance(loaded, PipelinePlan):
        loaded.check("the plan")
        if layers is not None:
            raise UsageError(
                "--layers: each stage of the plan has layers of its own, which it receives tensors for: verify all of "
                "them, by --dry where they are too many"
            )
        spec = load_model_file(model)
        return verify_stages(loaded, spec, ranks=ranks, dry=dry, mend=mend, timeout_s=timeout_s, progress=progress)
    spec = load_model_file(model)
    shrunk = _shrunk(loaded, None if dry else ranks or DEFAULT_RANKS, layers)
    subject = Subject(spec=spec, dropped=dropped_layers(loaded, layers) if layers is not None else frozenset())
    ran = _what_ran(loaded, shrunk, dry=dry, layers=layers)
    try:
        with quiet(), telling(progress, "prove"), spec.locating():
            is_whole = shrunk is loaded
            proven = prove_plan(shrunk, subject.build, spec.example_inputs, loss=spec.loss, is_as_solved=is_whole)
            whole = proven
            if mend and not is_whole:
                whole = prove_plan(loaded, spec.build_model, spec.example_inputs, loss=spec.loss)
    except VerificationError as error:
        failed = Check(name="proof", outcome=Outcome.FAIL, detail="the plan is not proven", differences=(str(error),))
        return Report(ran=ran, checks=(failed, Check(name="all else", outcome=Outcome.SKIPPED, detail="not run")))
    shrunk = proven.plan
    detail = f"{len(proven.traced.graph.values)} values typed; the applied model's ops are the model's"
    checks = [Check(name="proof", outcome=Outcome.PASS, detail=detail)]
    task = Task(plan=shrunk.dumps(), source=spec.source, dropped=subject.dropped)
    if not dry:
        with telling(progress, "ranks"):
            checks += _on_real_ranks(task, shrunk, subject, timeout_s)
    with telling(progress, "fakes"):
        checks += _on_fakes(task, shrunk, timeout_s, is_alone=dry)
    return Report(ran=ran, checks=tuple(checks), mended=whole.plan if mend else None)


def _shrunk(plan: Plan, ranks: int | None, layers: int | None) -> Plan:
    """The plan for at most this many ranks, and so many layers of each block; itself where nothing is left out."""
    if layers is not None and (layers < 1 or not plan.blocks):
        raise UsageError(
            f"layers: expected 1 or more layers of each repeated block, got {layers}; the plan has "
            f"{len(plan.blocks)} repeated blocks"
        )
    shrunk = plan if layers is None else with_layers(plan, layers)
    mesh = plan.mesh if ranks is None else smaller_mesh(plan.mesh, ranks)
    return shrunk if mesh == plan.mesh else on_mesh(shrunk, mesh)


def _what_ran(plan: Plan, shrunk: Plan, *, dry: bool, layers: int | None) -> str:
    """Describes the run: mesh, precision, batches, and what is smaller than in the plan."""
    batch = shrunk.batch
    parts = [
        f"{shrunk.mesh}, {shrunk.precision}, {batch.accumulation_steps} x micro-batch {batch.micro_batch}"
        + (f" x {batch.seq_len}" if batch.seq_len > 1 else "")
    ]
    if shrunk.mesh != plan.mesh:
        parts.append(f"the plan's choices, which were made for {plan.mesh}")
    if layers is not None:
        parts.append(f"the first {layers} layers of {', '.join(plan.blocks)}")
    parts.append("one rank on fake tensors" if dry else f"{shrunk.mesh.num_gpus} real ranks")
    return "; ".join(parts)


# ---- real ranks


def _on_real_ranks(task: Task, plan: Plan, subject: Subject, timeout_s: float) -> Iterator[Check]:
    """The checks of real ranks, on GPUs where there are enough, else on the CPU."""
    num_ranks = plan.mesh.num_gpus
    device_type = "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"
    reference = reference_step(subject, plan)
    with tempfile.TemporaryDirectory(prefix="tpplan-verify-") as folder:
        path = Path(folder) / "reference.pt"
        reference.save(path)
        given = replace(task, reference=str(path), device_type=device_type)
        try:
            found = on_ranks(num_ranks, check_on_rank, given, device_type=device_type, timeout_s=timeout_s)
        except RankFailedError as error:
            yield Check(name="ranks", outcome=Outcome.FAIL, detail="a rank failed", differences=(str(error),))
            return
    yield from compare(plan, reference, found)


# ---- a fake group


def _on_fakes(task: Task, plan: Plan, timeout_s: float, *, is_alone: bool) -> Iterator[Check]:
    """The memory check on a fake group; with is_alone, where no real ranks run, also those of collectives and
    shapes."""
    try:
        (found,) = on_ranks(1, check_on_fake_rank, task, timeout_s=timeout_s)
    except TpplanError as error:
        yield Check(
            name="fake group", outcome=Outcome.FAIL, detail="a step on fake tensors fails", differences=(str(error),)
        )
        return
    if is_alone:
        yield shape_check([("", plan, found.shapes)])
        yield collective_check([("", plan, found.issued, 0)])
    yield memory_check([("", plan, found.peak_bytes)])
