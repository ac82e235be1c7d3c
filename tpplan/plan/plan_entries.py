"""What a plan says, keyed by names of modules and parameters, and what its keys stand for.

A key with `*` stands for every member of a repeated block (`layers.*.attention` with the block `layers.*`); a key
without `*` overrides the pattern.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from tpplan.core.errors import PlanError
from tpplan.core.mesh import Mesh
from tpplan.core.name_patterns import block_of, is_pattern, module_name, parse_ranges, substitute
from tpplan.core.strict_json import Amount, Count
from tpplan.plan.sections.modes import Compile, Precision, Recompute, uses_fsdp
from tpplan.plan.sections.prediction import CollectivePlan, Prediction
from tpplan.plan.sections.provenance import (
    Fingerprints,
    ProofReport,
    RequestPlan,
    SolverReport,
)
from tpplan.plan.sections.ranks import BatchPlan, ClusterPlan, ExpertCall, ExpertsPlan, MeshPlan, StagePlan
from tpplan.plan.sections.sharding import (
    BoundaryPlan,
    BufferPlan,
    FsdpPlan,
    LayoutText,
    OpaquePlan,
    ParameterPlan,
    SizePlan,
    unit_of,
    why_not_over_tp,
)
from tpplan.plan.tp_shares import TpShares

#: most names that an error lists
_MOST_LISTED = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntries:
    """A complete plan. `blocks` gives the indices of each repeated block as ranges: {"layers.*": "0-31"}.

    `sizes` are numbers to replace while a module's forward runs. `losses` are modules whose forward computes a cross
    entropy on a slice of that many classes; `draws` are modules whose dropout runs on slices. `recompute` are modules
    whose forward runs again in backward, each as one region. `compile` is what the predicted times assume; applying the
    plan compiles nothing. `unruled_ops` are ops without a rule, which run whole, with their seconds per step; `opaque`
    are modules that run whole. `outputs` are the model's outputs that are returned sharded, by path. `untouched` is the
    reason why parameters must stay plain tensors: each rank then has all of them, and gradients are averaged over
    data-parallel ranks. `experts` says how experts are divided over ranks, where they are. `tp_shares` say what tensor
    parallelism divides; absent where tp is 1. `notes` tell the reader how the plan was made: changes to the request,
    and costs that are guesses. `request` is what was asked for. `stage` says which stage of a pipeline the plan is for,
    where it is for one (tpplan.plan.pipeline_plan). `buffers` are those that a module reads as a slice. `bags` are
    modules whose forward adds up a rank's own rows of tables of that many rows in all.
    """

    schema_version: Count
    tpplan_version: str
    torch_version: str
    cluster: ClusterPlan
    mesh_degrees: MeshPlan
    batch: BatchPlan
    precision: Precision
    optimizer: str
    blocks: Mapping[str, str]
    parameters: Mapping[str, ParameterPlan]
    boundaries: Mapping[str, BoundaryPlan]
    outputs: Mapping[str, LayoutText]
    sizes: Mapping[str, tuple[SizePlan, ...]]
    losses: Mapping[str, Count]
    draws: tuple[str, ...]
    recompute: Mapping[str, Recompute]
    compile: Compile
    fsdp: FsdpPlan
    collectives: tuple[CollectivePlan, ...]
    predicted: Prediction
    solver: SolverReport
    fingerprints: Fingerprints
    proof: ProofReport
    unruled_ops: Mapping[str, Amount]
    opaque: Mapping[str, OpaquePlan] | None = None
    untouched: str | None = None
    tp_shares: TpShares | None = None
    notes: tuple[str, ...] | None = None
    request: RequestPlan | None = None
    experts: ExpertsPlan | None = None
    stage: StagePlan | None = None
    buffers: Mapping[str, BufferPlan] | None = None
    bags: Mapping[str, tuple[Count, ...]] | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh on which the plan runs."""
        degrees, ep = self.mesh_degrees, self.experts.ep if self.experts is not None else 1
        return Mesh(replicate=degrees.replicate, shard=degrees.shard, tp=degrees.tp, ep=ep)

    def parameter_plans(self) -> dict[str, ParameterPlan]:
        """Parameter name -> its plan, with patterns expanded."""
        return {
            name: replace(
                plan,
                reads={substitute(reader, index): layout for reader, layout in plan.reads.items()},
                aliases=tuple(substitute(alias, index) for alias in plan.aliases),
            )
            for name, (plan, index) in self._expanded(self.parameters).items()
        }

    def buffer_plans(self) -> dict[str, BufferPlan]:
        """Buffer name -> its plan, with patterns expanded; only buffers that a module reads as a slice."""
        return {
            name: replace(plan, reads={substitute(reader, index): layout for reader, layout in plan.reads.items()})
            for name, (plan, index) in self._expanded(self.buffers or {}).items()
        }

    def boundary_plans(self) -> dict[str, BoundaryPlan]:
        """Module name -> its conversions, with patterns expanded."""
        return {name: plan for name, (plan, _) in self._expanded(self.boundaries).items()}

    def size_plans(self) -> dict[str, tuple[SizePlan, ...]]:
        """Module name ("" for the root) -> sizes to replace, with patterns expanded."""
        return {name: sizes for name, sizes in self._by_module(self.sizes).items() if sizes}

    def called(self) -> dict[str, tuple[str, ...]]:
        """Module name -> digests of its calls, with patterns expanded."""
        return {name: digests for name, (digests, _) in self._expanded(self.proof.calls or {}).items()}

    def sharded_losses(self) -> dict[str, int]:
        """Module name ("" for the root) -> number of classes of its sharded cross entropy, with patterns expanded."""
        return self._by_module(self.losses)

    def row_bags(self) -> dict[str, tuple[int, ...]]:
        """Module name ("" for the root) -> numbers of rows of the tables of which its forward adds up a rank's own in
        bags, with patterns expanded."""
        return self._by_module(self.bags or {})

    def drawing_modules(self) -> tuple[str, ...]:
        """Names of modules ("" for the root) whose dropout runs on slices, with patterns expanded."""
        return tuple(dict.fromkeys(self.modules(self.draws)))

    def opaque_modules(self) -> tuple[str, ...]:
        """Names of modules ("" for the root) that run whole, with patterns expanded."""
        return tuple(self._by_module(self.opaque or {}))

    def expert_calls(self) -> dict[str, ExpertCall]:
        """Module name -> how it is called, of modules whose experts are divided over ranks, with patterns expanded."""
        found = self._expanded(self.experts.modules) if self.experts is not None else {}
        return {name: call for name, (call, _) in found.items()}

    def scalars_beside_fsdp(self) -> dict[str, ParameterPlan]:
        """Name -> plan of parameters without dims, which FSDP2 cannot hold; empty where FSDP2 is not used."""
        if not uses_fsdp(self.mesh, self.precision) or self.untouched is not None:
            return {}
        return {name: parameter for name, parameter in self.parameter_plans().items() if not parameter.shape}

    def recomputed_modules(self) -> dict[str, Recompute]:
        """Module name ("" for the root) -> how it is recomputed, with patterns expanded, without those that are not."""
        return {name: mode for name, mode in self._by_module(self.recompute).items() if mode is not Recompute.NONE}

    def fsdp_units(self) -> tuple[str, ...]:
        """Names of modules ("" for the root) that fully_shard wraps, with patterns expanded."""
        return tuple(self.modules(self.fsdp.units))

    def layers(self) -> tuple[str, ...]:
        """Names of the repeated layers: FSDP units without the root, else members of blocks, else the root, ""."""
        return tuple(filter(None, self.fsdp_units())) or tuple(self.modules(self.blocks)) or ("",)

    def resharded_units(self) -> dict[str, bool]:
        """Name of each FSDP unit except the root -> whether it reshards after forward, with patterns expanded."""
        found = {name: self.fsdp.reshard_after_forward for name in self.fsdp_units() if name}
        return found | dict.fromkeys(self.modules(self.fsdp.exceptions), not self.fsdp.reshard_after_forward)

    def units_over_tp(self) -> frozenset[str]:
        """Names of FSDP units that are sharded over the shard and tp axes together, with patterns expanded."""
        return frozenset(self.modules(self.fsdp.over_tp or ()))

    def parameters_over_tp(self) -> frozenset[str]:
        """Names of the parameters of these units, all of which tp replicates."""
        units, over_tp = {*self.fsdp_units(), ""}, self.units_over_tp()
        return frozenset(name for name in self.parameter_plans() if unit_of(name, units) in over_tp)

    def may_have_units_over_tp(self) -> bool:
        """True where some FSDP unit, but the root, could be sharded over the shard and tp axes together."""
        units = set(self.fsdp_units()) - {""}
        if not units or 1 in (self.mesh.shard, self.mesh.tp):
            return False
        wrong = {unit for unit, _ in why_not_over_tp(units, self.parameter_plans(), self.expert_calls())}
        return not units.issubset(wrong)

    def expand(self, key: str) -> Iterator[tuple[str, int | None]]:
        """Yields (name, index) for each name that a key stands for. Raises PlanError for a `*` that is in no block."""
        if not is_pattern(key):
            yield key, None
            return
        pattern = block_of(key)
        if pattern not in self.blocks or is_pattern(substitute(key, 0)):
            raise PlanError(f"{key!r} matches none of the blocks {sorted(self.blocks)[:_MOST_LISTED]}")
        for index in parse_ranges(self.blocks[pattern]):
            yield substitute(key, index), index

    def _expanded(self, table: Mapping[str, T]) -> dict[str, tuple[T, int | None]]:
        found: dict[str, tuple[T, int | None]] = {}
        for key in sorted(table, key=is_pattern, reverse=True):
            for name, index in self.expand(key):
                found[name] = (table[key], index)
        return found

    def _by_module(self, table: Mapping[str, T]) -> dict[str, T]:
        """Module name ("" for the root) -> its entry in a table, with patterns expanded."""
        return {module_name(name): entry for name, (entry, _) in self._expanded(table).items()}

    def modules(self, keys: Iterable[str]) -> Iterator[str]:
        """Yields the names of modules ("" for the root) that each key stands for."""
        return (module_name(name) for key in keys for name, _ in self.expand(key))
