"""The hash that ties a proof to the plan it was made for: a plan edited afterwards is as unproven as one never checked.

Hashed is all that applying a plan or proving it reads: versions, mesh, batch, precision, optimizer, layouts, sizes,
recomputation, FSDP's units, collectives, fingerprints, and what the proof assumed. Left out is what only says what a
machine takes and how the plan was found (SAID, and the seconds of modules that run whole): a plan priced for another
machine is proven still. The hash says that a proof and a plan belong together, not who made them: who edits a plan can
hash it again, and `tpplan verify` believes no hash.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from tpplan.core.files import format_json
from tpplan.plan.plan import Plan, ProofReport, ProofStatus

#: sections that neither applying a plan nor proving it reads
SAID = frozenset({"cluster", "predicted", "solver", "unruled_ops", "notes"})
MEND = "`tpplan verify plan.json model.py -o plan.json` (tpplan.prove_plan in Python) proves it and writes it anew"


def proof_hash(plan: Plan) -> str:
    """sha256 of what a proof of the plan holds for, as canonical JSON."""
    return hash_of(plan.to_dict())


def hash_of(data: Mapping[str, object]) -> str:
    """The proof's hash of a plan's JSON data."""
    kept = {name: member for name, member in data.items() if name not in SAID}
    kept["proof"] = _without(data["proof"], "plan_hash")
    opaque = data.get("opaque")
    if isinstance(opaque, dict):
        kept["opaque"] = {name: _without(whole, "seconds") for name, whole in opaque.items()}
    return "sha256:" + hashlib.sha256(format_json(kept).encode()).hexdigest()


def as_proven(plan: Plan, *, assumptions: tuple[str, ...] | None = None) -> Plan:
    """The plan with the proof that was just made of it, under these assumptions (None: those that it names)."""
    known = plan.proof.assumptions if assumptions is None else assumptions
    report = replace(plan.proof, status=ProofStatus.PROVEN, assumptions=known, plan_hash=None)
    checked = replace(plan, proof=report)
    return replace(checked, proof=replace(report, plan_hash=proof_hash(checked)))


def why_unproven(plan: Plan) -> str:
    """Why the plan counts as unproven; "" for one that is proven, and is as it was then."""
    report: ProofReport = plan.proof
    if report.status is ProofStatus.UNPROVEN:
        return "nothing was checked"
    if report.plan_hash is None:
        return "its proof carries no hash of the plan it was made for (it was written before there was one)"
    if report.plan_hash != proof_hash(plan):
        return "it was changed after it was proven"
    return ""


def _without(data: object, key: str) -> dict[str, object]:
    assert isinstance(data, dict)
    return {name: member for name, member in data.items() if name != key}
