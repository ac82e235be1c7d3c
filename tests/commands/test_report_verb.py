"""`tpplan report` with a model draws the step; with --what-if the curves; without a model it needs neither."""

from pathlib import Path

import pytest
from examples import solve_example

from tpplan.commands import main
from tpplan.machine.profile import load_profile

MLP = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "mlp.py"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    solve_example("mlp", load_profile("h100-sxm"), gpus=2, gpus_per_node=2, tp=2, prove=False).dump(path)
    return path


def test_with_the_model_the_step_is_drawn(plan_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(plan_file), str(MLP), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "Not drawn" not in text
    assert "Kernels run for" in text
    assert "The peak, at the upright line, is" in text
    assert "What would change the plan" not in text


def test_what_if_draws_curves(plan_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(plan_file), str(MLP), "--what-if", "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "What would change the plan" in text
    assert text.count('<div class="curve">') == 5


def test_what_needs_the_model_says_so(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(plan_file), "--what-if", "-o", str(tmp_path / "page.html")]) == 2
    assert "need model.py" in capsys.readouterr().err
