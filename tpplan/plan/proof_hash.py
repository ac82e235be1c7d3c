"""The hash that ties a proof to its plan: a plan that is edited afterwards counts as unproven.

The hash covers all that applying or proving a plan reads: versions, mesh, batch, precision, optimizer, layouts, sizes,
recomputation, FSDP units, collectives, fingerprints, and the proof's assumptions. It leaves out the sections in SAID
and the seconds of modules that run whole, so a plan priced for another machine stays proven. The hash shows that proof
and plan belong together, not who made them: anyone who edits a plan can hash it again, and `tpplan verify` trusts no
hash.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from tpplan.core.files import format_json
from tpplan.plan.plan import Plan, ProofReport, ProofStatus

#: sections that describe costs and the search, and that neither applying nor proving a plan reads
SAID = frozenset({"cluster", "predicted", "solver", "unruled_ops", "tp_shares", "notes", "request"})
#: what to do about a plan that was proven and is unproven now
MEND = "`tpplan verify plan.json model.py -o plan.json` (tpplan.prove_plan in Python) proves it and writes it anew"


def proof_hash(plan: Plan) -> str:
    """sha256 of all sections of the plan that its proof depends on, as canonical JSON."""
    return hash_of(plan.to_dict())


def hash_of(data: Mapping[str, object]) -> str:
    """The proof hash of a plan given as JSON data."""
    kept = {name: member for name, member in data.items() if name not in SAID}
    kept["proof"] = _without(data["proof"], "plan_hash")
    opaque = data.get("opaque")
    if isinstance(opaque, dict):
        kept["opaque"] = {name: _without(whole, "seconds") for name, whole in opaque.items()}
    return "sha256:" + hashlib.sha256(format_json(kept).encode()).hexdigest()


def as_proven(plan: Plan, *, assumptions: tuple[str, ...] | None = None) -> Plan:
    """The plan marked as proven under these assumptions, with its proof hash. None keeps the plan's own assumptions."""
    known = plan.proof.assumptions if assumptions is None else assumptions
    report = replace(plan.proof, status=ProofStatus.PROVEN, assumptions=known, plan_hash=None)
    checked = replace(plan, proof=report)
    return replace(checked, proof=replace(report, plan_hash=proof_hash(checked)))


def why_unproven(plan: Plan) -> str:
    """The reason why the plan counts as unproven; "" for a plan that is proven and unchanged since."""
    report: ProofReport = plan.proof
    if report.status is ProofStatus.UNPROVEN:
        return "nothing was checked"
    if report.plan_hash is None:
        return "its proof carries no hash of the plan (an older tpplan wrote it)"
    if report.plan_hash != proof_hash(plan):
        return "it was changed after it was proven"
    return ""


def _without(data: object, key: str) -> dict[str, object]:
    assert isinstance(data, dict)
    return {name: member for name, member in data.items() if name != key}
