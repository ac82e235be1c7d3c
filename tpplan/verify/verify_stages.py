"""Compares a plan of stages with what it does: on real ranks, beside one process, or part by part on a
fake group of its real size.

The checks are those of a plan of one stage (tpplan.verify.verify), for all stages together, and two more:

    check        what is compared
    evaluation   the mean loss of a run without a backward, with one process
    sends        number and bytes of what ranks send to other stages in a step, gradients of tied weights and the loss
                 among it, with the plan; where no ranks run (dry), the tensors that each stage gives
"""

import functools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from tpplan.core.errors import RankFailedError, TpplanError, UsageError, VerificationError
from tpplan.core.graph import enclosing
from tpplan.core.layout import R, local_shape
from tpplan.core.mesh import Axis, divisors
from tpplan.core.name_patterns import ROOT, parse_ranges
from tpplan.core.units import DTYPE_BYTES
from tpplan.machine.profile import Collective
from tpplan.plan.compress_names import pattern_in
from tpplan.plan.pipeline_plan import PipelinePlan
from tpplan.plan.plan import Pass, Plan, uses_fsdp
from tpplan.plan.sections.ranks import TensorPlan
from tpplan.plan.step_anatomy import StageWork
from tpplan.search.models.model_spec import ModelSpec
from tpplan.stages.schedule import orders
from tpplan.trace.trace import quiet
from tpplan.verify.checks import (
    LOSS_TOLERANCE,
    Check,
    Outcome,
    Report,
    check,
    collective_check,
    gradient_check,
    loss_checks,
    memory_check,
    parameter_check,
    shape_check,
    telling,
)
from tpplan.verify.collective_log import Issued, listed
from tpplan.verify.prove_stages import prove_stages
from tpplan.verify.rank_task import GRADIENT_NOISE, Reference, Subject, Task, reference_step
from tpplan.verify.shrink import on_mesh, smaller_mesh
from tpplan.verify.spawn_ranks import on_ranks
from tpplan.verify.stage_steps import FakePart, StageFindings, check_parts_on_fake_rank, check_stages_on_rank

#: ranks that are started by default, or fewer where the plan has fewer
DEFAULT_RANKS = 4
#: a message that a rank sends to one of another stage: the kind of operation, dtype and bytes
Message = tuple[str, str, int]
#: axes over which FSDP gathers
_FSDP_AXES = frozenset({Axis.SHARD, Axis.SHARD_TP, Axis.EXPERT_SHARD})


def verify_stages(
    plan: PipelinePlan,
    spec: ModelSpec,
    *,
    ranks: int | None,
    dry: bool,
    mend: bool,
    timeout_s: float,
    progress: Callable[[str, int, int], None],
) -> Report:
    """Verifies a plan of stages; the arguments are those of tpplan.verify.verify.verify_plan."""
    shrunk = plan if dry else on_fewer_ranks(plan, ranks)
    subject = Subject(spec=spec, dropped=frozenset())
    ran = _what_ran(plan, shrunk, dry=dry)
    try:
        with quiet(), spec.locating():

            def told(done: int, total: int) -> None:
                progress("prove", done, total)

            is_whole = shrunk is plan
            made = prove_stages(
                shrunk, subject.build, spec.example_inputs, loss=spec.loss, is_as_solved=is_whole, progress=told
            )
            whole = made
            if mend and not is_whole:
                whole = prove_stages(plan, spec.build_model, spec.example_inputs, loss=spec.loss)
    except VerificationError as error:
        failed = Check(name="proof", outcome=Outcome.FAIL, detail="the plan is not proven", differences=(str(error),))
        return Report(ran=ran, checks=(failed, Check(name="all else", outcome=Outcome.SKIPPED, detail="not run")))
    values = sum(len(one.traced.graph.values) for one in made.stages)
    detail = f"{values} values typed in {len(made.stages)} stages; each applied stage's ops are its part of the model's"
    checks = [Check(name="proof", outcome=Outcome.PASS, detail=detail)]
    task = Task(plan=made.plan.dumps(), source=spec.source, dropped=frozenset())
    if not dry:
        with telling(progress, "ranks"):
            checks += _on_real_ranks(task, made.plan, subject, timeout_s)
    with telling(progress, "fakes"):
        checks += _on_fakes(task, made.plan, timeout_s, is_alone=dry)
    return Report(ran=ran, checks=tuple(checks), mended=whole.plan if mend else None)


def on_fewer_ranks(plan: PipelinePlan, ranks: int | None) -> PipelinePlan:
    """The plan of stages for at most this many ranks, itself where it needs no more. By default as many as it has
    parts, or the fewest that its tensor parallelism can do with, and at least DEFAULT_RANKS.

    Raises UsageError for fewer ranks than the stages need.
    """
    mesh = plan.stages[0].mesh.without_experts
    least = plan.parts * (divisors(mesh.tp)[1] if mesh.tp > 1 else 1)
    given = ranks if ranks is not None else max(DEFAULT_RANKS, least)
    if given < least:
        tp = f", each of which has tp = {mesh.tp}," if mesh.tp > 1 else ""
        raise UsageError(
            f"the plan has {plan.parts} parts of a pipeline{tp} and --ranks {given} are fewer than the {least} that "
            "they need: give as many, or --dry, which starts none"
        )
    smaller = smaller_mesh(mesh, given // plan.parts)
    if smaller == mesh:
        return plan
    if smaller.shard % plan.ep:
        raise UsageError(
            f"the plan divides experts over {plan.ep} ranks, and {given} ranks leave {smaller} for each of "
            f"{plan.parts} parts: give {plan.num_gpus} ranks, or --dry, which starts none"
        )
    return replace(plan, stages=tuple(on_mesh(own, replace(smaller, ep=own.mesh.ep)) for own in plan.stages))


def _what_ran(plan: PipelinePlan, shrunk: PipelinePlan, *, dry: bool) -> str:
    """Describes the run: stages, mesh, precision, batches, and what is smaller than in the plan."""
    batch, mesh = shrunk.batch, shrunk.stages[0].mesh
    parts = [
        f"{len(plan.stages)} stages on {plan.parts} parts of {mesh}, {plan.schedule}, {plan.stages[0].precision}, "
        f"{batch.accumulation_steps} x micro-batch {batch.micro_batch}"
        + (f" x {batch.seq_len}" if batch.seq_len > 1 else "")
    ]
    if shrunk is not plan:
        parts.append(f"the plan's choices, which were made for {plan.stages[0].mesh}")
    parts.append("one rank of each part on fake tensors" if dry else f"{shrunk.num_gpus} real ranks")
    return "; ".join(parts)


# ---- real ranks


def _on_real_ranks(task: Task, plan: PipelinePlan, subject: Subject, timeout_s: float) -> Iterator[Check]:
    """The checks of real ranks, on GPUs where there are enough, else on the CPU."""
    device_type = "cuda" if torch.cuda.device_count() >= plan.num_gpus else "cpu"
    reference = reference_step(subject, plan.stages[0])
    with tempfile.TemporaryDirectory(prefix="tpplan-verify-") as folder:
        path = Path(folder) / "reference.pt"
        reference.save(path)
        given = replace(task, reference=str(path), device_type=device_type)
        try:
            found = on_ranks(plan.num_gpus, check_stages_on_rank, given, device_type=device_type, timeout_s=timeout_s)
        except RankFailedError as error:
            yield Check(name="ranks", outcome=Outcome.FAIL, detail="a rank failed", differences=(str(error),))
            return
    yield from compare_stages(plan, reference, found)


def compare_stages(plan: PipelinePlan, reference: Reference, found: Sequence[StageFindings]) -> Iterator[Check]:
    """The checks of what real ranks found against one process and the plan."""
    values = [one.values for one in found]
    yield _held_everywhere(reference, found, parameter_check(reference, values))
    yield from loss_checks(plan.stages[0], reference, values)
    yield _evaluation_check(plan, reference, found)
    yield gradient_check(reference, values)
    yield collective_check(
        [
            (f"rank {rank}, stage {_index(own)}: ", own, issued, one.values.shard_rank)
            for rank, one in enumerate(found)
            for own, issued in zip(plan.stages_of(rank), one.issued, strict=True)
        ],
        functools.partial(scheduled, plan),
    )
    yield _send_check(plan, found)


def scheduled(plan: PipelinePlan, own: Plan) -> Counter[Issued]:
    """How often a stage's plan lists each collective, in the passes in which the schedule has it.

    A list counts gathers of what FSDP keeps from forward to backward as if these came in turns. Of several forwards in
    a row only the first gathers; the backward after them frees it, and the backwards that follow gather it again.
    """
    found, steps = listed(own), plan.batch.accumulation_steps
    order = orders(plan.schedule, plan.parts, plan.virtual_stages, steps)[_index(own) % plan.parts]
    own_works = [action.work for action in order if action.stage == _index(own)]
    forwards = [work is StageWork.FORWARD for work in own_works if work is not StageWork.WEIGHTS]
    moved = steps - sum(one and not before for before, one in pairwise([False, *forwards]))
    resharded = own.resharded_units()
    kept = [name for name in ("", *own.fsdp_units(), *own.expert_calls()) if not _is_resharded(name, resharded)]
    units = Counter(pattern_in(own, name or ROOT) for name in dict.fromkeys(kept))
    for one in list(found):
        is_once = own.fsdp.gathered_once and one.axis != Axis.EXPERT_SHARD
        is_gather = one.kind == Collective.ALL_GATHER and one.axis in _FSDP_AXES and one.during is Pass.FORWARD
        if is_gather and not is_once:
            found[one] -= moved * units[one.where]
            found[replace(one, during=Pass.BACKWARD)] += moved * units[one.where]
    return +found


def _is_resharded(module: str, resharded: Mapping[str, bool]) -> bool:
    """Whether FSDP frees a module's parameters after its forward: by the innermost unit around it, never the root's."""
    unit = next((name for name in sorted(enclosing(module), key=len, reverse=True) if name in resharded), "")
    return resharded.get(unit, False)


def _index(own: Plan) -> int:
    assert own.stage is not None
    return own.stage.index


def _held_everywhere(reference: Reference, found: Sequence[StageFindings], compared: Check) -> Check:
    """The check of parameters, which also fails where no stage has one."""
    held = {name for one in found for name in one.held}
    missing = [f"{name} is in no stage" for name in reference.parameters if name not in held]
    if not missing:
        return compared
    total = len(reference.parameters)
    return check("parameters", [*missing, *compared.differences], "", f"{len(missing)} of {total} are in no stage")


def _evaluation_check(plan: PipelinePlan, reference: Reference, found: Sequence[StageFindings]) -> Check:
    """Compares the mean loss without a backward with one process, and losses of a rank with those of other parts."""
    each, tp, expected = plan.ranks_per_stage, plan.stages[0].mesh.tp, reference.loss
    loss = sum(one.evaluated for one in found[::tp]) / len(found[::tp])
    error = abs(loss - expected) / max(abs(expected), GRADIENT_NOISE)
    said = f"{loss:.6g}, in one process {expected:.6g}: relative error {error:.1e}, allowed {LOSS_TOLERANCE:.0e}"
    lines = [] if error <= LOSS_TOLERANCE else ["the ranks compute a different loss without a backward"]
    for rank, one in enumerate(found):
        other = found[rank % each]
        if (one.values.loss, one.evaluated) != (other.values.loss, other.evaluated):
            lines.append(f"rank {rank} is told another loss than rank {rank % each}, at its place in the first part")
    return check("evaluation", lines, said, said)


# ---- what stages send


def _send_check(plan: PipelinePlan, found: Sequence[StageFindings]) -> Check:
    """Compares what each rank sends to other stages in a step with what the plan says."""
    lines: list[str] = []
    total, size = 0, 0
    for rank, one in enumerate(found):
        planned, sent = messages(plan, rank), Counter(map(_message, one.between))
        total, size = total + sum(planned.values()), size + sum(n * key[2] for key, n in planned.items())
        for key in sorted({*planned, *sent}):
            if planned[key] != sent[key]:
                kind, dtype, num_bytes = key
                where = f"rank {rank}: {kind} of {num_bytes} bytes ({dtype}) to another stage"
                lines.append(f"{where}: planned {planned[key]}, issued {sent[key]}")
    said = f"{total} a step between stages, of {size} bytes, as planned"
    return check("sends", lines, said, f"{len(lines)} kinds and sizes between stages are not as planned")


def _message(one: Issued) -> Message:
    return one.kind, one.dtype, one.num_bytes


def messages(plan: PipelinePlan, rank: int) -> Counter[Message]:
    """How often a rank sends what to ranks of other stages in a step: activations to the next stage and gradients to
    the one before, for each micro-batch; gradients of tied weights to the others that have them; and the loss, which
    the last part tells all others by a broadcast."""
    steps, found = plan.batch.accumulation_steps, Counter[Message]()
    for own in plan.stages_of(rank):
        assert own.stage is not None
        for one in (*own.stage.sends, *own.stage.receives):
            tensor = one.on_a_rank(own.mesh.tp)
            found["send", tensor.dtype, _num_bytes(tensor.shape, tensor.dtype)] += steps
        for tied in own.stage.ties:
            parameter = own.parameter_plans()[tied.name]
            num_bytes = _num_bytes(_own_shape(own, tied.name, rank % plan.ranks_per_stage), parameter.dtype)
            if parameter.trainable and num_bytes:
                found["send", parameter.dtype, num_bytes] += len(tied.stages) - 1
    found["broadcast_", "float32", DTYPE_BYTES["float32"]] += 1
    return found


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * DTYPE_BYTES[dtype]


def _own_shape(plan: Plan, name: str, place: int) -> tuple[int, ...]:
    """The local shape of a parameter on the rank at some place of a stage's mesh: cut over tp as placed, then along dim
    0 by FSDP, whose last shards may be smaller."""
    mesh, parameter = plan.mesh, plan.parameter_plans()[name]
    shape = local_shape(parameter.shape, parameter.placement if mesh.tp > 1 else R, mesh.tp)
    if not uses_fsdp(mesh, plan.precision):
        return shape
    is_over_tp = name in plan.parameters_over_tp()
    ranks = mesh.size(Axis.SHARD_TP) if is_over_tp else mesh.shard
    index = (place if is_over_tp else place // mesh.tp) % ranks
    each = -(-shape[0] // ranks)
    return max(0, min(each, shape[0] - index * each)), *shape[1:]


# ---- fake groups


def _on_fakes(task: Task, plan: PipelinePlan, timeout_s: float, *, is_alone: bool) -> Iterator[Check]:
    """The memory check on fake groups, of one part of each kind; with is_alone, where no real ranks run, also those of
    collectives, shapes, and tensors that stages give."""
    parts = distinct_parts(plan)
    try:
        (found,) = on_ranks(1, check_parts_on_fake_rank, task, parts, timeout_s=timeout_s)
    except TpplanError as error:
        yield Check(
            name="fake group", outcome=Outcome.FAIL, detail="a step on fake tensors fails", differences=(str(error),)
        )
        return
    yield from compare_parts(plan, parts, found, is_alone=is_alone)


def compare_parts(
    plan: PipelinePlan, parts: Sequence[int], found: Sequence[FakePart], *, is_alone: bool = True
) -> Iterator[Check]:
    """The checks of what a rank of some parts found on fake tensors."""
    stages = [
        (f"stage {_index(own)}: ", own, one, place)
        for part, one in zip(parts, found, strict=True)
        for place, own in enumerate(plan.stages[part :: plan.parts])
    ]
    if is_alone:
        yield shape_check([(who, own, one.shapes[place]) for who, own, one, place in stages])
        logs = [(who, own, one.issued[place], 0) for who, own, one, place in stages]
        yield collective_check(logs, functools.partial(scheduled, plan))
        yield _given_check([(who, own, one.sends[place]) for who, own, one, place in stages])
    peaks = []
    for part, one in zip(parts, found, strict=True):
        fullest = max(plan.stages[part :: plan.parts], key=lambda own: own.predicted.peak_memory_bytes)
        peaks.append((f"part {part}: ", fullest, one.peak_bytes))
    yield memory_check(peaks)


def _given_check(found: Sequence[tuple[str, Plan, Sequence[TensorPlan]]]) -> Check:
    """Compares the tensors that stages give with those that they are planned to send."""
    lines, total = [], 0
    for who, own, given in found:
        assert own.stage is not None
        planned = tuple(one.on_a_rank(own.mesh.tp) for one in own.stage.sends)
        total += len(planned)
        if planned != tuple(given):
            said = " and ".join(", ".join(map(str, tensors)) or "nothing" for tensors in (given, planned))
            lines.append(f"{who}what it gives and what it is planned to send: {said}")
    right = f"{total} tensors that stages give have the planned shapes and dtypes; none is sent"
    return check("sends", lines, right, f"{len(lines)} stages give other tensors than planned")


def distinct_parts(plan: PipelinePlan) -> list[int]:
    """The first part of each kind, whose stages have the most micro-batches in flight; those of others of its kind have
    the same plans at other layers."""
    found: dict[Hashable, int] = {}
    for part in range(plan.parts):
        kind = tuple(_kind(own, plan.stages[0]) for own in plan.stages[part :: plan.parts])
        found.setdefault(kind, part)
    return list(found.values())


def _kind(own: Plan, first: Plan) -> Hashable:
    """Equal for stages whose plans apply the same but for the numbers of their layers, which patterns name. What does
    not matter for that is replaced by what the first stage has."""
    stage = own.stage
    assert stage is not None
    counts = tuple((pattern, len(parse_ranges(ranges))) for pattern, ranges in sorted(own.blocks.items()))
    alike = replace(
        own,
        blocks={},
        stage=None,
        notes=None,
        request=None,
        tp_shares=None,
        proof=first.proof,
        solver=first.solver,
        predicted=first.predicted,
        fingerprints=first.fingerprints,
    )
    return alike.dumps(), counts, stage.receives, stage.sends, stage.ties, stage.received is None, stage.last is None
