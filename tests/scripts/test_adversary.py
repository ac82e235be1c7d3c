"""scripts/evidence/adversary.py: it finds what is wrong, tells it from what is right; a few of each kind are right."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forks import in_fork
from torch import Tensor, nn

EVIDENCE = Path(__file__).resolve().parents[2] / "scripts" / "evidence"
#: of seed 0: small ones that are proven and shard
MODELS, PLANS, TRAPS = (2,), (0, 1, 2), ("x.numel()",)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EVIDENCE))
    import adversary

    return adversary


@pytest.fixture
def steps(script: ModuleType) -> ModuleType:
    from adversary_parts import steps

    return steps


def verdicts() -> dict[str, str]:
    """In a process that has run no backward, which forks a solver and ranks."""
    import adversary

    rows: dict[str, str] = {}
    asked = ["--jobs", "1", "--only", *map(str, MODELS), "--only-plan", *map(str, PLANS), "--only-trap", *TRAPS]
    arguments = adversary.parsed(asked)
    adversary.run(list(adversary.cases_of(arguments)), arguments, lambda row: rows.update({row.name: row.verdict}))
    return rows


def test_a_few_models_mutants_and_traps_are_right(script: ModuleType) -> None:
    found = in_fork(verdicts)
    assert len(found) == len(MODELS) + len(PLANS) + len(TRAPS)
    assert set(found.values()) <= {"right", "whole", "same", "refused"}
    assert found["model 2"] == "right"


def of_wrong_ranks() -> list[tuple[str, str]]:
    """Verdicts of the plan of a right model, held against what another model gives, and where one rank raises."""
    import adversary

    keeper = adversary.Keeper(0, 60.0, 60.0)
    key = adversary.Key(kind="model", number=MODELS[0])
    solved = keeper.ask_solver("solve", key)
    outcome, shape = solved.expected[0], (key.subject().batch, key.subject().seq_len)
    turned = {name: None if g is None else -g for name, g in outcome.gradients.items()}
    wrong = adversary.Outcome(outcome.loss, turned)
    try:
        return keeper.at_shapes(key, solved.plan, [(shape, outcome), (shape, wrong)], in_double=False)
    finally:
        keeper.end()


def test_other_gradients_are_wrong(script: ModuleType) -> None:
    (right, _), (wrong, detail) = in_fork(of_wrong_ranks)
    assert (right, wrong) == ("right", "WRONG")
    assert "error 2.0e+00" in detail


def test_an_error_on_one_rank_alone_is_wrong(steps: ModuleType) -> None:
    ran, raised = steps.AtShape(error=0.0, worst="loss"), steps.AtShape(raised="PlanError: no", is_own=True)
    assert steps.judged([ran, ran])[0] == "right"
    assert steps.judged([raised, raised])[0] == "refused"
    assert steps.judged([raised, ran])[0] == "WRONG"
    assert steps.judged([raised, None])[0] == "WRONG"
    assert steps.judged([steps.AtShape(error=float("inf"), worst="loss"), ran])[0] == "WRONG"


def test_a_model_is_the_same_by_its_number_and_seed(script: ModuleType, steps: ModuleType) -> None:
    assert str(script.draw(3, 17)) == str(script.draw(3, 17)) != str(script.draw(4, 17))
    subject = script.subject_of(script.draw(0, MODELS[0]))
    shape = (subject.batch, subject.seq_len)
    found = [steps.step(subject.build(), subject, shape, in_double=False) for _ in range(2)]
    assert steps.worst_error(*found)[0] == 0.0


def test_most_numbers_give_models_that_run(script: ModuleType, steps: ModuleType) -> None:
    for number in range(12):
        subject = script.subject_of(script.draw(0, number))
        outcome = steps.step(subject.build(), subject, (subject.batch, subject.seq_len), in_double=False)
        assert any(gradient is not None for gradient in outcome.gradients.values())


def test_a_missing_gradient_is_infinitely_wrong(steps: ModuleType) -> None:
    model = nn.Linear(2, 2)
    gradients: dict[str, Tensor | None] = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    whole, less = steps.Outcome(1.0, gradients), steps.Outcome(1.0, {**gradients, "bias": None})
    assert steps.worst_error(less, whole) == (float("inf"), "bias")
    assert steps.worst_error(whole, whole)[0] == 0.0


def test_exit_codes(script: ModuleType) -> None:
    row: Callable[..., object] = script.Row
    assert script.exit_code([row(name="a", verdict="right"), row(name="b", verdict="refused")]) == 0
    assert script.exit_code([row(name="a", verdict="crash")]) == 1
    assert script.exit_code([row(name="a", verdict="crash"), row(name="b", verdict="WRONG")]) == 4
    assert script.exit_code([row(name="b", verdict="hang")]) == 4
