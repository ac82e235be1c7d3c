"""`tpplan size` leaves out counts that the batch or a pinned degree does not divide, and says which."""

from pathlib import Path

import pytest

from tpplan.commands import main

MLP = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "mlp.py"
OPTIONS = ("--profile", "h100-sxm", "--global-batch", "8", "--seq-len", "16", "--tp", "1", "--fsdp")


def rows(lines: list[str]) -> list[str]:
    """The second cell of each row of the table: GPUs."""
    found = lines[2 : next(i for i, line in enumerate(lines) if line.startswith(("Of the", "None of")))]
    return [line.removeprefix(">").split()[0] for line in found]


def test_counts_that_do_not_divide_are_named_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["size", str(MLP), "--gpus", "2,3,4", *OPTIONS, "2", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert all(f"<td>{gpus} x h100-sxm</td>" in text for gpus in (2, 3, 4))
    assert "h100-sxm: Of the counts tried, 2 GPUs are the fewest on which the training fits" in text
    lines = capsys.readouterr().out.splitlines()
    assert rows(lines) == ["2", "4"]
    (left_out,) = (line for line in lines if line.startswith("Left out"))
    assert left_out.startswith("Left out: 3 GPUs, which the batch or a pinned degree does not divide")
