"""A proof is that of one plan: an edit makes the plan unproven, and proving it again mends the file."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from examples import FOLDER, eager_to_shard, example, solve_example
from gpu_scripts import gpu, make_plans

import tpplan
from tpplan.commands import main
from tpplan.core.errors import VerificationError
from tpplan.plan.plan import Plan, ProofStatus
from tpplan.plan.proof_hash import SAID, hash_of, proof_hash, why_unproven
from tpplan.plan.report import as_data, render
from tpplan.verify.prove_plan import EDITED, prove_plan

CHANGED = "it was changed after it was proven"
SOURCE = f"{FOLDER / 'mlp.py'}:build_model"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve_example("mlp", eager_to_shard(), gpus=2, tp=2, global_batch=8, micro_batch=2)


def prove(plan: Plan) -> Plan:
    module = example("mlp")
    return prove_plan(plan, module.build_model, module.example_inputs, loss=module.loss).plan


def edited(plan: Plan, change: Callable[[Any], None]) -> Plan:
    data = json.loads(plan.dumps())
    change(data)
    return Plan.from_dict(data)


def test_a_solved_plan_is_proven_and_stays_so_in_its_file(plan: Plan, tmp_path: Path) -> None:
    assert why_unproven(plan) == ""
    plan.dump(tmp_path / "plan.json")
    assert why_unproven(Plan.load(tmp_path / "plan.json")) == ""
    assert as_data(plan)["derived"]["is_proven"] is True  # type: ignore[index]


def first(data: Any) -> Any:
    return data[sorted(data)[0]]


EDITS: dict[str, Callable[[Any], None]] = {
    "a placement": lambda data: first(data["parameters"]).update(placement="R"),
    "a read": lambda data: first(data["parameters"])["reads"].clear(),
    "a frozen parameter": lambda data: first(data["parameters"]).update(trainable=False),
    "a boundary that goes": lambda data: data["boundaries"].clear(),
    "a size": lambda data: data["sizes"].update({"<root>": []}),
    "recomputation": lambda data: data["recompute"].update({"<root>": "full"}),
    "the optimizer": lambda data: data.update(optimizer="sgd"),
    "the precision": lambda data: data.update(precision="bf16"),
    "the batch": lambda data: data["batch"].update(global_batch=16, accumulation_steps=8),
    "the length": lambda data: data["batch"].update(seq_len=2),
    "a collective": lambda data: data["collectives"].pop(),
    "the graph's fingerprint": lambda data: data["fingerprints"].update(graph="sha256:0"),
    "an assumption": lambda data: data["proof"].update(assumptions=["x.py:1: if y: is True"]),
    "how it was found": lambda data: data["proof"].update(rounds=9),
    "the hash": lambda data: data["proof"].update(plan_hash="sha256:0"),
    "a module that runs whole": lambda data: data.update(
        opaque={"<root>": {"reason": "none", "seconds": 0.0, "bodies": []}}
    ),
    "untouched": lambda data: data.update(untouched="so"),
    "torch's version": lambda data: data.update(torch_version="2.0.0"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_plan_is_unproven(plan: Plan, name: str) -> None:
    changed = edited(plan, EDITS[name])
    assert changed.proof.status is ProofStatus.PROVEN
    assert why_unproven(changed) == CHANGED
    assert "proof unproven: it was changed after it was proven" in " ".join(render(changed, width=200).split())
    assert as_data(changed)["derived"]["is_proven"] is False  # type: ignore[index]


def test_every_section_but_those_that_only_say_something_is_hashed(plan: Plan) -> None:
    """A key that is added to plans is hashed unless it is listed."""
    sections = {member.name for member in dataclasses.fields(Plan)}
    data = plan.to_dict()
    another = {section: {"another": {}} for section in sections}
    same = {section for section in sections if hash_of(data | {section: another[section]}) == hash_of(data)}
    assert same == SAID


def test_what_a_plan_costs_elsewhere_leaves_it_proven(plan: Plan) -> None:
    module = example("mlp")
    other = eager_to_shard(hbm_bytes_per_s=2e9)
    priced = tpplan.price(plan, module.build_model, module.example_inputs, profile=other, loss=module.loss)
    assert priced.predicted != plan.predicted
    assert why_unproven(priced) == ""


def test_a_plan_of_before_is_unproven_and_says_how_it_is_mended(plan: Plan) -> None:
    old = edited(plan, lambda data: data["proof"].pop("plan_hash"))
    assert "no hash" in why_unproven(old)
    assert "tpplan verify" in render(old, width=200)
    assert why_unproven(prove(old)) == ""
    assert prove(old) == plan


def test_proving_mends_what_is_right_and_says_that_it_was_edited(plan: Plan) -> None:
    changed = edited(plan, lambda data: data["batch"].update(global_batch=16, accumulation_steps=8))
    mended = prove(edited(changed, lambda data: data.update(collectives=priced_collectives(changed))))
    assert why_unproven(mended) == ""
    assert mended.notes is not None
    assert EDITED in mended.notes
    assert prove(mended) == mended
    with pytest.raises(VerificationError):
        prove(edited(plan, lambda data: data["boundaries"].clear()))


def priced_collectives(plan: Plan) -> object:
    module = example("mlp")
    priced = tpplan.price(plan, module.build_model, module.example_inputs, profile=eager_to_shard(), loss=module.loss)
    return priced.to_dict()["collectives"]


def test_verify_mends_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Of fewer rows the optimizer's step would be the peak, of which torch 2.11 takes more than is predicted.
    plan = solve_example("mlp", eager_to_shard(), gpus=2, tp=2, global_batch=256, micro_batch=64)
    file = tmp_path / "plan.json"
    edited(plan, lambda data: data["proof"].pop("plan_hash")).dump(file)
    assert main(["verify", str(file), SOURCE, "--dry", "-o", str(file)]) == 0
    assert f"wrote {file}" in capsys.readouterr().err
    assert Plan.load(file).hash == plan.hash


def test_verify_leaves_a_wrong_plan_s_file_alone(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    edited(plan, EDITS["a collective"]).dump(file)
    before = file.read_text()
    assert main(["verify", str(file), SOURCE, "--dry", "-o", str(file)]) == 4
    assert file.read_text() == before


def test_an_unproven_plan_becomes_a_proven_one(plan: Plan) -> None:
    unproven = dataclasses.replace(
        plan, proof=dataclasses.replace(plan.proof, status=ProofStatus.UNPROVEN, plan_hash=None)
    )
    assert why_unproven(unproven) == "nothing was checked"
    assert prove(unproven).proof.plan_hash == plan.proof.plan_hash == proof_hash(plan)


def test_shipped_plans_are_proven() -> None:
    for case in make_plans.CASES:
        assert why_unproven(gpu.plans(gpu.FULL, [case.name])[case.name]) == ""
