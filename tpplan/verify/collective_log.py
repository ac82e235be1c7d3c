"""Logs the collectives that a step issues on a rank, one by one, to compare with those that its plan lists.

A dispatch mode sees both kinds: functional ones (`_c10d_functional`, of tpplan's conversions and of DTensor) and those
that FSDP2 asks a process group for (`c10d`). A collective belongs to the code that is running: to a conversion at a
module's boundary or at the read of a parameter; to an FSDP unit; to the reduction at the end of a backward; else to the
module whose forward runs, or to the loss.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tpplan.apply.collectives.dp_gradients import Averager
from tpplan.apply.collectives.redistribute import Converter
from tpplan.apply.collectives.tp_gradients import Reducer
from tpplan.apply.collectives.uneven_reads import UnevenReads
from tpplan.apply.modules.applied_mesh import REPLICATE, SHARD_TP, mesh_of_experts, mesh_over_tp
from tpplan.apply.modules.local_modules import ModuleBinding
from tpplan.core.graph import LOSS_SCOPE
from tpplan.core.mesh import AXES, Axis
from tpplan.core.name_patterns import ROOT
from tpplan.costs.runs.kernels import dtype_name
from tpplan.experts.exchange import Counts
from tpplan.machine.profile import Collective
from tpplan.plan.compress_names import pattern_in
from tpplan.plan.plan import Pass, Plan
from tpplan.torch_internals import pytree
from tpplan.torch_internals.modules import FSDPParamGroup, unit_name
from tpplan.torch_internals.recording import TorchDispatchMode
from tpplan.trace.hooks.generated_class import BINDING
from tpplan.trace.noted_calls import naming_modules

#: namespaces of ops that communicate
_NAMESPACES = ("_c10d_functional", "c10d", "_dtensor")
#: ops in these namespaces that only wait for a collective, or wrap its result
_NO_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
#: ops that take what another rank sends
_RECEIVING = frozenset({"recv_", "recv_any_source_"})
_KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_reduce_": Collective.ALL_REDUCE,
    "allreduce_": Collective.ALL_REDUCE,
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "_allgather_base_": Collective.ALL_GATHER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "all_to_all_single": Collective.ALL_TO_ALL,
    "shard_dim_alltoall": Collective.ALL_TO_ALL,
}
#: ops whose only tensor is one rank's part of the value
_LOCAL = frozenset({"all_gather_into_tensor", "all_to_all_single", "shard_dim_alltoall"})


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Issued:
    """One collective as a plan describes it. `where` is the module, "<root>" or "<loss>" that it belongs to; `axis` is
    the group's name where that is no axis of the mesh; `num_bytes` are the bytes of the whole value."""

    where: str
    kind: str
    axis: str
    during: Pass
    dtype: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} of {self.num_bytes} bytes ({self.dtype}) over {self.axis}, {self.during}"


class CollectiveLog(TorchDispatchMode):
    """A mode that logs collectives in `issued`; the code that runs the step says which pass begins."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.issued: list[Issued] = []
        self._during = Pass.FORWARD
        self._running: list[str] = []
        self._model = model
        self._groups = _groups(mesh, AXES)
        #: of the axes of experts, whose groups may be those of other axes too
        self._of_experts: dict[str, tuple[str, int]] = {}
        if (of_experts := mesh_of_experts(model)) is not None:
            self._of_experts = _groups(of_experts, (Axis.EP, Axis.EXPERT_SHARD))
            self._groups = self._of_experts | self._groups
        if (over_tp := mesh_over_tp(model)) is not None:
            for axis, name in ((Axis.REPLICATE, REPLICATE), (Axis.SHARD_TP, SHARD_TP)):
                group = over_tp.get_group(name)
                self._groups.setdefault(str(group.group_name), (str(axis), group.size()))
        self._modules = dict(_converters(model))
        #: (counts, module) of exchanges of experts' rows, by the counts' id, which backward has too
        self._exchanges: dict[int, tuple[Counts, str]] = {}

    def begin(self, during: Pass) -> None:
        """Begins a pass. Forgets modules whose forward recomputation stopped early."""
        self._during = during
        self._running.clear()

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Keeps track of the modules that run inside."""
        with naming_modules(self._model, self._running):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name := _collective(func):
            self.issued.append(self.described(name, args))
        return func(*args, **(kwargs or {}))

    def described(self, name: str, args: tuple[Any, ...]) -> Issued:
        """The collective that an operator of some name issues with these arguments."""
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        owner, kind = _owner(), _KINDS.get(name)
        # Rows of experts are exchanged, and FSDP exchanges nothing, whose group may be the same.
        axis, ranks = self._group(args, self._of_experts if kind is Collective.ALL_TO_ALL else {})
        whole = max((tensor.nbytes for tensor in tensors), default=0)
        return Issued(
            where=self._where(owner),
            kind=str(kind) if kind is not None else name,
            axis=axis,
            during=Pass.STEP if isinstance(owner, Reducer | Averager | UnevenReads) else self._during,
            dtype=dtype_name(tensors[0].dtype) if tensors else "none",
            num_bytes=whole * ranks if name in _LOCAL else whole,
        )

    def _group(self, args: tuple[Any, ...], first: Mapping[str, tuple[str, int]]) -> tuple[str, int]:
        """The name and number of ranks of the mesh axis whose group a collective is given, of the groups in `first`
        before all others."""
        known = {**self._groups, **first}
        for argument in args:
            if isinstance(argument, str) and argument in known:
                return known[argument]
            if isinstance(argument, torch.ScriptObject):
                with contextlib.suppress(RuntimeError, TypeError):  # a ScriptObject of something else: an operation
                    group = ProcessGroup.unbox(argument)
                    return known.get(group.group_name, (group.group_name, group.size()))
        return "unknown", 1

    def _where(self, owner: object) -> str:
        match owner:
            case Converter():
                return self._modules[id(owner)] or ROOT
            case FSDPParamGroup():
                return unit_name(owner) or ROOT
            case Reducer() | Averager() | UnevenReads():
                return ROOT
            case Counts():
                return self._exchanges.setdefault(id(owner), (owner, self._running_module()))[1]
            case _:
                return self._running_module()

    def _running_module(self) -> str:
        return (self._running[-1] or ROOT) if self._running else LOSS_SCOPE


class StagesLog(TorchDispatchMode):
    """A mode that logs the collectives of a rank's stages, in `logs` by stage, and in `between` what the rank sends to
    the ranks that hold the other stages, whose group is `others`. The code that runs the step says which pass of which
    stage begins."""

    def __init__(self, parts: Sequence[nn.Module], mesh: DeviceMesh, others: ProcessGroup | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.logs = [CollectiveLog(part, mesh) for part in parts]
        self.between: list[Issued] = []
        self._others = others.group_name if others is not None else None
        self._running = self.logs[0]

    def begin(self, index: int, during: Pass) -> None:
        """Begins a pass of one of the stages."""
        self._running = self.logs[index]
        self._running.begin(during)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Keeps track of the modules that run inside."""
        with contextlib.ExitStack() as stack:
            for log in self.logs:
                stack.enter_context(log.naming())
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name := _collective(func):
            issued = self._running.described(name, args)
            if issued.axis != self._others:
                self._running.issued.append(issued)
            elif name not in _RECEIVING:
                self.between.append(issued)
        return func(*args, **(kwargs or {}))


def _collective(func: Any) -> str:
    """The name of an operator that communicates; "" for any other."""
    namespace, name, _ = str(func).split(".", 2)
    return name if namespace in _NAMESPACES and name not in _NO_COLLECTIVES else ""


def _groups(mesh: DeviceMesh, axes: Iterable[Axis]) -> dict[str, tuple[str, int]]:
    """(axis, number of ranks) by the name of this rank's group along the axis."""
    return {str(mesh.get_group(str(axis)).group_name): (str(axis), mesh[str(axis)].size()) for axis in axes}


def _owner() -> object:
    """The innermost conversion, FSDP unit, reducer or exchange whose code is running; None where there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        for name in ("self", "ctx"):
            held = frame.f_locals.get(name)
            found = getattr(held, "converter", getattr(held, "counts", held)) if name == "ctx" else held
            if isinstance(found, Converter | FSDPParamGroup | Reducer | Averager | UnevenReads | Counts):
                return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _converters(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Yields (id of the conversion, name of its module) for every conversion in an applied model."""
    for module in model.modules():
        site: ModuleBinding | None = module.__dict__.get(BINDING)
        if site is None:
            continue
        crossings = [c for argument in site.arguments for c in argument.crossings.values()]
        for crossing in (*crossings, *site.outputs.values()):
            yield id(crossing.converter), site.names[0]
        for reads in (*site.reads.values(), *(site.whole or {}).values()):
            for reader, converter in reads.converters.items():
                yield id(converter), reader


# ---- compared with the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A collective that a step issues more or less often than planned."""

    collective: Issued
    planned: int
    issued: int

    def __str__(self) -> str:
        return f"{self.collective}: planned {self.planned}, issued {self.issued}"


def listed(plan: Plan) -> Counter[Issued]:
    """How often the plan lists each collective for a step, modules by pattern."""
    found: Counter[Issued] = Counter()
    for row in plan.collectives:
        key = Issued(
            where=pattern_in(plan, row.where),
            kind=row.kind,
            axis=str(row.axis),
            during=row.during,
            dtype=row.dtype,
            num_bytes=row.num_bytes,
        )
        found[key] += row.count
    return found


def _of_any_routing(one: Issued) -> Issued:
    """A collective without the bytes that the routing of rows to experts decides."""
    return replace(one, num_bytes=0) if one.axis == Axis.EP else one


def differences(plan: Plan, planned: Mapping[Issued, int], issued: Sequence[Issued]) -> list[Difference]:
    """The collectives whose number is not as planned, modules by pattern, sorted, those of "<root>" and "<loss>"
    last."""
    found = Counter(_of_any_routing(replace(one, where=pattern_in(plan, one.where))) for one in issued)
    wanted: Counter[Issued] = Counter()
    for one, number in planned.items():
        wanted[_of_any_routing(one)] += number
    return [
        Difference(collective=one, planned=wanted[one], issued=found[one])
        for one in sorted({*wanted, *found}, key=lambda one: (one.where.startswith("<"), one))
        if wanted[one] != found[one]
    ]


def first_member(plan: Plan, difference: Difference, issued: Sequence[Issued]) -> str:
    """The first module of a difference's pattern that issued another number than its equal share of the planned ones;
    the pattern itself where the planned number does not divide by its modules."""
    where = difference.collective.where
    members = [name for name, _ in plan.expand(where)]
    found = Counter(one.where for one in issued if replace(one, where=where) == difference.collective)
    share, rest = divmod(difference.planned, len(members))
    if rest:
        return where
    return next((name for name in members if found[name] != share), members[0])
