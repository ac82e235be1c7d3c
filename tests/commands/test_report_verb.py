"""`tpplan report` with a model draws the step, of a plan of stages that of one of them; with --what-if the curves;
without a model it needs neither."""

from pathlib import Path

import pytest
from examples import solve_example

from tpplan.commands import main
from tpplan.machine.profile import load_profile

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"
MLP, GPT = EXAMPLES / "mlp.py", EXAMPLES / "gpt.py"


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


@pytest.fixture(scope="module", params=["1f1b", "zero-bubble"])
def stages_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stages") / "plan.json"
    words = ["--gpus", "4", "--profile", "h100-sxm", "--global-batch", "8", "--seq-len", "16", "--pp", "2", "--tp", "2"]
    words += ["--micro-batch", "2", "--schedule", request.param, "--recompute", "full", "--no-prove", "-o", str(path)]
    assert main(["solve", str(GPT), *words]) == 0
    return path


@pytest.mark.parametrize("stage", ["0", "1"])
def test_a_stage_is_drawn_as_its_plan_says(stages_file: Path, stage: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(stages_file), str(GPT), "--stage", stage, "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert f"stage {stage}" in text
    assert "Not drawn" not in text
    assert "in the plan: the plan was made by" not in text
    assert "The peak, at the upright line, is" in text


def test_a_plan_of_stages_with_its_model_needs_a_stage(
    stages_file: Path, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = str(tmp_path / "page.html")
    for words, said in (
        ([str(stages_file), str(GPT)], "give --stage N"),
        ([str(stages_file), "--stage", "2"], "has stages 0 to 1"),
        ([str(plan_file), "--stage", "0"], "without stages"),
        ([str(stages_file), str(GPT), "--stage", "0", "--what-if"], "without --what-if"),
    ):
        assert main(["report", *words, "-o", page]) == 2
        assert said in capsys.readouterr().err
    assert main(["report", str(stages_file), "--stage", "0", "-o", page]) == 0
