"""`tpplan solve model.py --gpus 16 --profile h100-sxm ...`: finds the fastest plan, as predicted, that fits."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpplan.commands.terminal.kinds import kind_lines, print_kinds_as_data
from tpplan.commands.terminal.output import print_any, print_lines, print_plan, write, wrote
from tpplan.commands.terminal.pins import add_pins, pins_of
from tpplan.commands.terminal.progress import Report, bars
from tpplan.commands.terminal.values import count, count_or_auto, gpu_count, imbalance, num_bytes, optimizer, seconds
from tpplan.commands.terminal.verbs import add_verb
from tpplan.core.errors import PlanError, UsageError
from tpplan.core.files import unwritable
from tpplan.core.mesh import meshes
from tpplan.machine.lint import why_invalid
from tpplan.machine.profile import HardwareProfile, load_profile
from tpplan.plan.optimizers import OPTIMIZERS
from tpplan.plan.pipeline_plan import PipelinePlan, Schedule
from tpplan.plan.plan import Plan, Precision, Recompute, RequestPlan
from tpplan.search.models.model_spec import ModelSpec
from tpplan.search.models.user_model import load_model_file
from tpplan.solvers import SOLVERS

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from tpplan.search.comparisons.alternatives import PlanKind, Problem

#: columns of the longest name of a stage of planning
STAGE_COLUMNS = 6

_EPILOG = """\
model.py defines build_model() and example_inputs(batch, seq_len), or example_inputs(batch) where samples have no
length, and may define loss(outputs, inputs) and unused_outputs = ("logits",). model.py:NAME picks another builder;
hf:path/config.json a Hugging Face model.
"""


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = add_verb(subparsers, "solve", "find a plan", __doc__, _EPILOG, run=run)
    parser.add_argument("model", metavar="model.py", help="model.py, model.py:BUILDER or hf:path/config.json")
    add_machine(parser.add_argument_group("machine"))
    add_training(parser.add_argument_group("training"))
    search = parser.add_argument_group("search")
    add_search(search)
    search.add_argument(
        "--pp",
        type=count_or_auto,
        default=1,
        metavar="N",
        help="cut the model into N pipeline stages (default: 1, none; auto: decided, with the stages on each GPU, "
        "which takes minutes for large models)",
    )
    search.add_argument(
        "--virtual-stages",
        type=count,
        default=1,
        metavar="V",
        help="with --pp: give each of its N parts V stages, whose schedule is interleaved: less waiting, more sending, "
        "more memory (default: 1, whose schedule is 1F1B)",
    )
    search.add_argument(
        "--schedule",
        choices=[str(schedule) for schedule in Schedule],
        help="with --pp N: the schedule that joins the stages (default: 1f1b, or interleaved with --virtual-stages, "
        "unless zero-bubble is faster)",
    )
    search.add_argument(
        "--top", type=count, default=1, metavar="N", help="also print the best plans of other kinds, N in all"
    )
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", type=Path, metavar="plan.json", help="write the plan here")
    output.add_argument("--top-dir", type=Path, metavar="DIR", help="write the others of --top to DIR/plan-2.json, ...")
    output.add_argument("--json", action="store_true", help="print the plan and what follows from it as JSON")


def add_machine(group: "argparse._ArgumentGroup") -> None:
    """Adds the options on the cluster and its machine."""
    group.add_argument(
        "--gpus",
        type=gpu_count,
        required=True,
        metavar="N",
        help="GPUs to plan for; a plan may use fewer where that is faster",
    )
    group.add_argument("--all-gpus", action="store_true", help="use all GPUs")
    group.add_argument("--gpus-per-node", type=gpu_count, metavar="N", help="default: the profile's, at most --gpus")
    group.add_argument("--profile", required=True, metavar="NAME", help="a shipped profile, or the path of one")
    group.add_argument("--memory-limit", type=num_bytes, metavar="SIZE", help="per GPU, such as 70GiB")


def add_training(group: "argparse._ArgumentGroup") -> None:
    """Adds the options on how the model is trained."""
    group.add_argument("--global-batch", type=count, required=True, metavar="N", help="samples per optimizer step")
    group.add_argument(
        "--seq-len", type=count, metavar="N", help="tokens per sample, unless example_inputs takes a batch alone"
    )
    group.add_argument(
        "--micro-batch",
        type=count_or_auto,
        default="auto",
        metavar="N",
        help="samples at once on a rank (default: auto, which the solver decides)",
    )
    group.add_argument(
        "--precision", choices=[str(p) for p in Precision], help="default: bf16-mixed on GPUs, else fp32"
    )
    group.add_argument(
        "--recompute",
        choices=[*Recompute],
        help="what each repeated layer recomputes in backward (default: decided for each layer)",
    )
    group.add_argument(
        "--no-recompute",
        dest="recompute",
        action="store_const",
        const=Recompute.NONE,
        help="short for --recompute none",
    )
    group.add_argument(
        "--zero",
        type=int,
        choices=(2, 3),
        help="all FSDP layers resharded after forward (3) or kept gathered (2) (default: decided for each layer)",
    )
    group.add_argument(
        "--fsdp-over-tp",
        choices=("yes", "no"),
        help="FSDP layers sharded over shard and tp together, wherever tp can replicate their weights, or over shard "
        "alone (default: decided where the fastest plan over shard alone has such layers, or none fits)",
    )
    group.add_argument(
        "--whole-gradients",
        action="store_true",
        help="keep FSDP's gradients whole between micro-batches and reduce them once a step: fewer collectives, more "
        "memory (default: each micro-batch's are reduced; decided in stages, where units are then gathered once too)",
    )
    group.add_argument("--compile", action="store_true", help="price elementwise ops as fused by torch.compile")
    group.add_argument(
        "--expert-imbalance",
        type=imbalance,
        default=1.0,
        metavar="X",
        help="where experts are divided: rows that the busiest rank gets over those of an even routing (default: 1)",
    )
    group.add_argument(
        "--optimizer",
        type=optimizer,
        default="adamw",
        metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)}, or bytes:N for N bytes of states per parameter (default: adamw)",
    )


def add_search(group: "argparse._ArgumentGroup") -> None:
    """Adds the options on the search: pinned degrees and styles, the solver, the proof."""
    group.add_argument("--tp", type=count, metavar="N", help="pin the tensor-parallel degree")
    group.add_argument("--fsdp", type=count, metavar="N", help="pin the degree that FSDP shards over")
    group.add_argument(
        "--ep", type=count, metavar="N", help="pin the number of ranks that divide experts among them (1: none do)"
    )
    add_pins(group)
    group.add_argument("--solver", choices=[entry.name for entry in SOLVERS], help="default: the first one installed")
    group.add_argument("--time-limit", type=seconds, metavar="S", help="seconds for each ILP; the gap is reported")
    group.add_argument("--no-prove", dest="prove", action="store_false", help="skip the check of the applied model")


def run(args: argparse.Namespace) -> int:
    """Solves, writes and prints. Checks everything that needs no model before torch is imported."""
    check_output(args.output)
    if args.top_dir is not None and args.top == 1:
        raise UsageError("--top-dir: expected --top N with N above 1, whose plans it keeps")
    check_output(args.top_dir / "plan-2.json" if args.top_dir is not None else None)
    profile = machine_of(args)
    model = load_model_file(args.model)
    for option, value in (("--virtual-stages", args.virtual_stages > 1), ("--schedule", args.schedule)):
        if value and args.pp in (1, "auto"):
            raise UsageError(f"{option} with --pp {args.pp}: expected --pp N with N above 1")
    if args.pp != 1:
        return _run_stages(args, model, profile)
    with model.locating():
        plan, kinds = _solve(args, model, profile)
    written = dict(_files(args, plan, kinds))
    for path, own in written.items():
        own.dump(path)
    if args.json and args.top > 1:
        print_kinds_as_data(plan, kinds)
    else:
        print_plan(plan, as_json=args.json)
    if args.top > 1 and not args.json:
        print_lines(lambda width: ["", *kind_lines(kinds, width)])
    for path in written:
        wrote(path)
    return 0


def _run_stages(args: argparse.Namespace, model: ModelSpec, profile: HardwareProfile) -> int:
    """Solves for a model in stages, writes and prints."""
    from tpplan.search.pipelines.any_pipeline import solve_any
    from tpplan.search.pipelines.solve_stages import solve_stages
    from tpplan.search.points.options import Cluster, Options

    if args.top > 1:
        raise UsageError("--pp: --top is for models in one stage; leave it out")
    batch = ("global_batch", "seq_len", "micro_batch")
    training = training_options(args, model)
    with model.locating(), bars(STAGE_COLUMNS) as progress:
        schedule = Schedule(args.schedule) if args.schedule else None
        in_parts = partial(solve_stages, stages=args.pp, virtual_stages=args.virtual_stages, schedule=schedule)
        solve: Callable[..., Plan | PipelinePlan] = solve_any if args.pp == "auto" else in_parts
        plan = solve(
            model.build_model,
            model.example_inputs,
            cluster=Cluster(gpus=args.gpus, gpus_per_node=args.gpus_per_node, profile=profile),
            global_batch=args.global_batch,
            seq_len=training["seq_len"],
            micro_batch=None if args.micro_batch == "auto" else args.micro_batch,
            options=Options(
                loss=model.loss,
                unused_outputs=tuple(model.unused_outputs),
                tp=args.tp,
                fsdp=args.fsdp,
                ep=args.ep,
                memory_limit_bytes=args.memory_limit,
                solver=args.solver,
                time_limit_s=args.time_limit,
                pins=pins_of(args),
                **{name: value for name, value in training.items() if name not in batch},
            ),
            prove=args.prove,
            progress=progress,
        )
    plan = replace(plan, request=_request_of(args))
    if args.output is not None:
        plan.dump(args.output)
    print_any(plan, as_json=args.json)
    if args.output is not None:
        wrote(args.output)
    return 0


def _files(args: argparse.Namespace, plan: Plan, kinds: "Sequence[PlanKind]") -> Iterator[tuple[Path, Plan]]:
    """Yields (path, plan) for the best plan and for those of the other kinds by their number."""
    if args.output is not None:
        yield args.output, plan
    if args.top_dir is not None:
        yield from ((args.top_dir / f"plan-{i}.json", kind.plan) for i, kind in enumerate(kinds[1:], start=2))


def _solve(args: argparse.Namespace, model: ModelSpec, profile: HardwareProfile) -> "tuple[Plan, list[PlanKind]]":
    """The best plan, and with --top the best plans of each kind, the best plan first."""
    from tpplan.search.comparisons.alternatives import top

    with bars(STAGE_COLUMNS) as progress:
        problem = problem_of(args, model, profile, progress)
        plan = _with_request(problem.solve(prove=args.prove), args)
        kinds = top(problem, args.top, prove=args.prove) if args.top > 1 else []
        return plan, [replace(kind, plan=_with_request(kind.plan, args)) for kind in kinds]


def problem_of(args: argparse.Namespace, model: ModelSpec, profile: HardwareProfile, progress: Report) -> "Problem":
    """The problem that the options of add_machine, add_training and add_search pose."""
    from tpplan.search.comparisons.alternatives import Problem
    from tpplan.search.models.trace_cache import Reuse
    from tpplan.search.points.options import Cluster

    return Problem(
        build_model=model.build_model,
        example_inputs=model.example_inputs,
        cluster=Cluster(gpus=args.gpus, gpus_per_node=args.gpus_per_node, profile=profile),
        options={
            "loss": model.loss,
            "unused_outputs": model.unused_outputs,
            "tp": args.tp,
            "fsdp": args.fsdp,
            "ep": args.ep,
            "all_gpus": args.all_gpus,
            "memory_limit_bytes": args.memory_limit,
            "solver": args.solver,
            "time_limit_s": args.time_limit,
            "pins": pins_of(args),
            "progress": progress,
            **training_options(args, model),
        },
        reuse=Reuse(),
    )


def _with_request(plan: Plan, args: argparse.Namespace) -> Plan:
    return replace(plan, request=_request_of(args))


def _request_of(args: argparse.Namespace) -> RequestPlan:
    """The model and the command that a plan comes from."""
    return RequestPlan(pins=pins_of(args), model=args.model, command=args.command)


def training_options(args: argparse.Namespace, model: ModelSpec) -> dict[str, Any]:
    """The options of add_training as arguments of solve. Raises UsageError for a length that samples do not have."""
    return {
        "global_batch": args.global_batch,
        "seq_len": model.length_of(args.seq_len),
        "micro_batch": args.micro_batch,
        "precision": args.precision,
        "optimizer": args.optimizer,
        "recompute": args.recompute,
        "reshard_after_forward": None if args.zero is None else args.zero == 3,
        "fsdp_over_tp": None if args.fsdp_over_tp is None else args.fsdp_over_tp == "yes",
        "whole_gradients": args.whole_gradients,
        "compile": args.compile,
        "expert_imbalance": args.expert_imbalance,
    }


# Checks that need no model


def check_output(path: Path | None) -> None:
    """Raises PlanError where the file cannot be written, before minutes are spent on solving."""
    if path is not None and (problem := unwritable(path)):
        raise PlanError(f"{path}: cannot be written: {problem}")


def machine_of(args: argparse.Namespace) -> HardwareProfile:
    """The profile that the options of add_machine name, of which it warns where that is mostly noise; fills in GPUs
    per node. Raises UsageError for unknown pins, and for degrees that leave no mesh, before minutes are spent."""
    profile = load_profile(args.profile)
    if problem := why_invalid(profile):
        write(f"tpplan: warning: profile {profile.name}: {problem}\n", to_stderr=True)
    args.gpus_per_node = args.gpus_per_node or min(args.gpus, profile.gpus_per_node)
    _check_degrees(args)
    pins_of(args)
    return profile


def _check_degrees(args: argparse.Namespace) -> None:
    """Raises UsageError where the pinned degrees leave no mesh, or the batch does not divide."""
    if not any(True for _ in meshes(args.gpus, args.gpus_per_node, tp=args.tp, fsdp=args.fsdp)):
        raise UsageError(
            f"no mesh of {args.gpus} GPUs has --tp {args.tp or 'free'} and --fsdp {args.fsdp or 'free'}: "
            "pin other degrees, or one of them alone"
        )
    if args.micro_batch != "auto" and args.global_batch % args.micro_batch:
        raise UsageError(f"--global-batch {args.global_batch} is no multiple of --micro-batch {args.micro_batch}")
