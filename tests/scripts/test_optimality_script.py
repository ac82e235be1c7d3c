"""scripts/evidence/optimality.py finds a proven plan below a bound that is too high, none below one that is right."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import eager_to_shard
from test_optimal import DIM, ODD, CountedModel, columns_only, solve_counted

import tpplan

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "evidence"))

import optimality
from optimality_parts.models import Subject


def subject() -> Subject:
    return Subject(
        name="counted",
        build_model=CountedModel,
        example_inputs=lambda batch, length: {"x": torch.randn(batch, length, DIM)},
        loss=None,
        cluster=tpplan.Cluster(gpus=2, gpus_per_node=2, profile=eager_to_shard()),
        options={
            "global_batch": 1,
            "micro_batch": 1,
            "seq_len": ODD,
            "tp": 2,
            "precision": "fp32",
            "allows": columns_only,
            "all_gpus": True,
        },
    )


def test_nothing_proven_is_below_a_right_bound() -> None:
    """What solve cut was below it, and is not proven here either."""
    row = optimality.sampled(subject(), samples=6, seed=0)
    assert row.status == "optimal"
    assert row.objective_s == pytest.approx(solve_counted().solver.objective_s)
    assert row.put_to_proof > 0
    assert row.unproven_s < row.bound_s * (1 - optimality.TOLERANCE)
    assert row.excess <= optimality.TOLERANCE


def test_a_bound_that_is_too_high_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 4, and the rows are kept."""
    solve = optimality.tpplan.solve

    def without_columns(*args: Any, **options: Any) -> Any:
        """Calls the optimum of what is whole the optimum."""
        none = lambda graph: lambda name, strategy: all(x.dim is None for x in strategy.results)  # noqa: E731
        plan = solve(*args, **options | {"allows": none})
        assert plan.solver.gap == 0
        return plan

    monkeypatch.setattr(optimality.tpplan, "solve", without_columns)
    monkeypatch.setattr(optimality, "SUBJECTS", {"counted": subject})
    results = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["optimality.py", "--samples", "6", "--results", str(results)])
    assert optimality.main() == optimality.FASTER_FOUND
    monkeypatch.setattr(optimality, "sampled", None)  # nothing is sampled again
    assert optimality.main() == optimality.FASTER_FOUND
    row = optimality.Row(**json.loads(results.read_text())[0])
    assert row.proven > 0
    assert replace(row, best_proven_s=row.bound_s).excess == 0
