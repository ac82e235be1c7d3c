"""One call of solve: the model as traced, and what has been computed of each tp degree."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from tpplan import solvers
from tpplan.bystander import copied
from tpplan.costs.regions import Regions
from tpplan.errors import IndivisibleError, ModelError
from tpplan.formulate import Formulation, PricedSpace, Setting, price_space
from tpplan.graph import Direction, ModelGraph
from tpplan.marking import trace_marking
from tpplan.mesh import Mesh, meshes
from tpplan.opaque import Opaques
from tpplan.options import Allows, Batch, BuildModel, Cluster, ExampleInputs, Progress
from tpplan.pins import Pin, Pinned
from tpplan.plan import Precision, Recompute, uses_fsdp
from tpplan.problem import Solution
from tpplan.profile import HardwareProfile
from tpplan.program import on_meta_like
from tpplan.reuse import Reuse, Traced
from tpplan.rules import Strategy
from tpplan.space import build_space
from tpplan.trace import Inputs, Loss, assumptions, check_gradient_hooks, repeated_children


@dataclass
class Candidate:
    """A mesh, its formulation and its solution; solved again when a cut removes what it chose."""

    formulation: Formulation
    solution: Solution


@dataclass
class Job:
    """One call of solve: inputs, what has been computed of each tp degree, and the cuts found."""

    build_model: BuildModel
    example_inputs: ExampleInputs
    loss: Loss | None
    unused_outputs: frozenset[str]
    cluster: Cluster
    profile: HardwareProfile
    batch: Batch
    precision: Precision
    optimizer: str
    recompute: Recompute
    reshard_after_forward: bool
    is_compiled: bool
    wishes: Callable[[ModelGraph], Allows] | None
    limit: float
    solver: str | None
    time_limit_s: float | None
    report: Progress
    pins: tuple[Pin, ...] = ()
    reuse: Reuse = field(default_factory=Reuse)
    spaces: dict[int, PricedSpace] = field(default_factory=dict)
    cuts: dict[tuple[int, str], set[Strategy]] = field(default_factory=dict)
    cut_messages: list[str] = field(default_factory=list)
    #: by tp and the class of the module whose code differed
    counterexamples: Counter[tuple[int, type[nn.Module]]] = field(default_factory=Counter)
    model: nn.Module = field(init=False)
    inputs: Inputs = field(init=False)
    units: tuple[str, ...] = field(init=False)
    graph: ModelGraph = field(init=False)
    opaques: Opaques = field(init=False)
    pinned: Pinned = field(init=False)
    assumptions: tuple[str, ...] = ()

    def candidates(self, *, tp: int | None, fsdp: int | None) -> list[Mesh]:
        """Meshes whose data-parallel ranks divide the global batch. Raises IndivisibleError where none does."""
        every = list(meshes(self.cluster.gpus, self.cluster.gpus_per_node, tp=tp, fsdp=fsdp))
        dividing = [mesh for mesh in every if self.batch.accumulation_steps(mesh) is not None]
        if not dividing:
            degrees = sorted({mesh.data_parallel for mesh in every})
            raise IndivisibleError(
                f"global batch {self.batch.global_batch} does not divide into micro-batches of "
                f"{self.batch.micro_batch} on {' or '.join(map(str, degrees))} data-parallel ranks of "
                f"{self.cluster.gpus} GPUs; "
                f"change --global-batch, --micro-batch or --tp"
            )
        return dividing

    def applicable(self, candidates: list[Mesh]) -> list[Mesh]:
        """Those on which FSDP2 can hold the traced model: it takes no scalar parameters. All of them, and a warning,
        where there is none: the plan holds for the model with such a parameter of shape (1,)."""
        scalars = [name for name, parameter in self.model.named_parameters() if parameter.dim() == 0]
        if not scalars:
            return candidates
        without = [mesh for mesh in candidates if not uses_fsdp(mesh, self.precision)]
        problem = f"FSDP2 cannot hold a parameter without dims: {', '.join(scalars)}; give it the shape (1,)"
        if not without:
            instead = "or plan without FSDP: one data-parallel rank (--fsdp 1), and fp32 or bf16"
            warnings.warn(f"{problem}, {instead}: apply_plan refuses the plan as it is", stacklevel=2)
            return candidates
        if len(without) < len(candidates):
            warnings.warn(f"{problem}: until then only meshes without data parallelism are tried", stacklevel=2)
        return without

    # Trace

    @property
    def trace_key(self) -> Hashable:
        """What a trace depends on."""
        functions = map(_hashable, (self.build_model, self.example_inputs, self.loss))
        return *functions, self.batch.micro_batch, self.batch.seq_len, self.precision

    def trace_model(self) -> None:
        """Builds the model on the meta device and traces it at the micro-batch's shapes, once for all that share it.

        Raises UsageError for a pin that holds nothing of it.
        """
        self.report("trace", 0, 1)
        known = self.reuse.traces.get(self.trace_key)
        if known is None:
            self._trace_model()
            self.reuse.traces[self.trace_key] = Traced(
                micro_batch=self.batch.micro_batch,
                model=self.model,
                inputs=self.inputs,
                units=self.units,
                graph=self.graph,
                assumptions=self.assumptions,
                opaques=self.opaques,
            )
        else:
            self.model, self.inputs, self.units = known.model, known.inputs, known.units
            self.graph, self.assumptions, self.opaques = known.graph, known.assumptions, known.opaques
        self.reuse.executor.observe(self.opaques.by_key())
        self.pinned = Pinned(graph=self.graph, pins=self.pins)
        self.report("trace", 1, 1)

    def _trace_model(self) -> None:
        with torch.device("meta"):
            self.model = self.build_model()
        if not isinstance(self.model, nn.Module):
            raise ModelError(f"the builder returned {type(self.model).__name__}, expected a torch.nn.Module")
        if next(self.model.parameters(), None) is None:
            raise ModelError(f"{type(self.model).__name__} has no parameters: there is nothing to train or to shard")
        for name, parameter in self.model.named_parameters():
            if is_lazy(parameter):
                raise ModelError(f"parameter {name} has no shape before the first call: call the model in the builder")
        _put_on_meta(self.model)
        self.units = repeated_children(self.model)
        if self.precision is not Precision.FP32:
            for parameter in self.model.parameters():
                if parameter.dtype == torch.float32:
                    parameter.data = parameter.data.to(torch.bfloat16)
        self.inputs = self.example_inputs(self.batch.micro_batch, self.batch.seq_len)
        if self.precision is Precision.BF16:
            self.inputs = pytree.tree_map(_to_bfloat16, self.inputs)
        check_gradient_hooks(self.model)
        # A forward may leave tensors of the trace on its module; the proof copies a model that has none.
        self.graph, self.opaques = trace_marking(
            self.model, lambda: copied(self.model), self.inputs, loss=self.loss, cast=self.cast
        )
        self.units = tuple(unit for unit in self.units if not self.opaques.hides(unit))
        if self.graph.questions:
            self.assumptions = assumptions(
                self.graph, copied(self.model), self.inputs, loss=self.loss, cast=self.cast, opaques=self.opaques
            )

    def cast(self, tensor: torch.Tensor, module: str, direction: Direction, path: str) -> torch.Tensor:
        """FSDP's mixed precision casts what enters the root and each unit; so does the trace."""
        enters_unit = direction is Direction.INPUT and (module == "" or module in self.units)
        casts = enters_unit and self.precision is Precision.BF16_MIXED
        return _to_bfloat16(tensor) if casts else tensor

    # Solve

    def priced(self, tp: int) -> PricedSpace:
        """Decisions and their costs on tp ranks, under the cuts so far."""
        if tp not in self.spaces:
            key = self._space_key(tp)
            if key not in self.reuse.spaces:
                self.reuse.spaces[key] = self._price(tp)
            self.spaces[tp] = self.reuse.spaces[key]
        return self.spaces[tp]

    def _space_key(self, tp: int) -> Hashable:
        """What decisions and their costs depend on."""
        cuts = frozenset((name, strategy) for (own, name), cut in self.cuts.items() if own == tp for strategy in cut)
        machine = self.profile.fingerprint, self.cluster.gpus_per_node
        ways = self.recompute, self.is_compiled, self.unused_outputs, _hashable(self.wishes), self.pins
        return self.trace_key, tp, machine, ways, cuts

    def _price(self, tp: int) -> PricedSpace:
        space = build_space(
            self.graph, tp, unused_outputs=self.unused_outputs, cut=self.is_cut(tp), apart=self.pinned.pins_within
        )
        return price_space(
            space,
            self.profile,
            self.cluster.gpus_per_node,
            self.reuse.executor,
            self.regions,
            is_compiled=self.is_compiled,
        )

    @property
    def regions(self) -> Regions:
        """The repeated layers, if they are recomputed."""
        return Regions(self.units, self.recompute)

    def is_cut(self, tp: int) -> Callable[[str, Strategy], bool]:
        """Says of decisions on tp ranks which strategies they may not choose."""
        allows = self.wishes(self.graph) if self.wishes is not None else lambda name, strategy: True

        def is_cut(name: str, strategy: Strategy) -> bool:
            is_wrong = strategy in self.cuts.get((tp, name), ())
            return is_wrong or not (allows(name, strategy) and self.pinned(name, strategy))

        return is_cut

    def formulate(self, mesh: Mesh, *, limit: float | None = None) -> Formulation:
        """The problem of one mesh."""
        return Formulation(
            priced=self.priced(mesh.tp),
            mesh=mesh,
            setting=Setting(
                profile=self.profile,
                gpus_per_node=self.cluster.gpus_per_node,
                precision=self.precision,
                optimizer=self.optimizer,
                memory_limit_bytes=self.limit if limit is None else limit,
                accumulation_steps=self.batch.accumulation_steps(mesh) or 1,
                units=self.units,
                recompute=self.recompute,
                reshard_after_forward=self.reshard_after_forward,
            ),
        )

    def solve_mesh(self, mesh: Mesh) -> Candidate:
        """The optimum of one mesh."""
        formulation = self.formulate(mesh)
        solution = solvers.solve(formulation.problem, solver=self.solver, time_limit_s=self.time_limit_s)
        return Candidate(formulation, solution)


def _put_on_meta(model: nn.Module) -> None:
    """What code made on another device than it was told to (torch.normal heeds none), ties kept."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and not tensor.is_meta:
                    _, table[name] = moved.setdefault(id(tensor), (tensor, on_meta_like(tensor)))


def _hashable(function: object) -> Hashable:
    """The function; a method of what has no hash is like no other."""
    try:
        hash(function)
    except TypeError:
        return object()
    return function


def _to_bfloat16(leaf: Any) -> Any:
    is_float32 = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32
    return leaf.to(torch.bfloat16) if is_float32 else leaf
