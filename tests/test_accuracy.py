"""scripts/accuracy.py: what it reads, fits and leaves out. The published runs themselves are not here."""

import dataclasses
import functools
import math
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

import accuracy
from accuracy_models import ARCHITECTURES, SOFTWARE, RepeatingAttention, Sizes, StepwiseNorm
from llama import Attention, Config, rotary_tables

from tpplan.options import Cluster, Options
from tpplan.plan import Recompute
from tpplan.planner import price_mesh
from tpplan.profile_tables import Fitted

SIZES = Sizes(layers=2, hidden=256, ffn=1024, heads=4, kv_heads=4, vocab=512, seq_len=128, num_parameters=1)


def row(model: str, **changes: object) -> dict[str, object]:
    layers = 2 if model == "one" else 3
    sizes = dataclasses.replace(SIZES, layers=layers)
    return {
        "date": "2024-01-06",
        "model": model,
        "n_params": ARCHITECTURES["MPT"].num_parameters(sizes),
        "layers": layers,
        "hidden": 256,
        "ffn": 1024,
        "heads": 4,
        "kv_heads": 4,
        "vocab": 512,
        "seq_len": 128,
        "micro_batch_per_gpu": 2,
        "global_batch": 32,
        "n_gpus": 8,
        "gpu": "A100 SXM 40GB",
        "interconnect": "",
        "tp": 1,
        "pp": 1,
        "dp_mode": "zero3 (FSDP FULL_SHARD)",
        "fsdp_degree": 8,
        "activation_checkpointing": "none",
        "compile": "no",
        "precision": "bf16",
        "tokens_per_s_per_gpu": 1e5,
        "step_time_s": 0.0,
        "mfu": 0.0,
        "peak_mem_gib": math.nan,
        "notes": "",
        "source_id": "S",
    } | changes


@pytest.fixture(scope="module")
def runs() -> list[accuracy.Run]:
    rows = [row("one"), row("two"), row("two", activation_checkpointing="full"), row("two", dp_mode="zero2", tp=1)]
    return accuracy.read_runs(pd.DataFrame(rows))


@pytest.fixture(scope="module")
def priced(runs: list[accuracy.Run]) -> dict[int, accuracy.Parts]:
    return {run.row: accuracy.price(run) for run in runs}


@pytest.mark.parametrize("numbers", [(1.0, 0.0), (1.4, 0.6)])
def test_a_step_taken_apart_is_the_step_that_tpplan_prices(
    runs: list[accuracy.Run], priced: dict[int, accuracy.Parts], numbers: tuple[float, float]
) -> None:
    names = zip(("matmul_slowdown", "overlap_slowdown"), numbers, strict=True)
    fitted = tuple(Fitted(name=name, value=value, residual=0.0, runs=1, what="") for name, value in names)
    for run in runs:
        profile = dataclasses.replace(accuracy.benchmark(run.machine, False), fitted=fitted)
        model = accuracy.architecture(run.sizes)
        whole = price_mesh(
            functools.partial(model.build, run.sizes),
            accuracy.example_inputs,
            cluster=Cluster(gpus=8, gpus_per_node=8, profile=profile),
            global_batch=32,
            micro_batch=2,
            seq_len=128,
            options=Options(
                loss=model.loss,
                unused_outputs=("output",),
                tp=1,
                fsdp=8,
                precision=run.precision,
                recompute=run.recompute,
                reshard_after_forward=run.reshard,
            ),
        )
        seconds = whole.formulation.problem.price(whole.choice)
        assert priced[run.row].seconds(*numbers) == pytest.approx(seconds, rel=1e-9)


def test_rows_are_read_as_they_say(runs: list[accuracy.Run]) -> None:
    assert [run.recompute for run in runs] == [Recompute.NONE, Recompute.NONE, Recompute.FULL, Recompute.NONE]
    assert [run.reshard for run in runs] == [True, True, True, False]
    assert {run.machine for run in runs} == {"a100-sxm-40gb"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "A900"}, "row 2: gpu 'A900': expected one of A100 SXM 40GB"),
        ({"pp": 2}, "row 2: pp 2: pipeline"),
        ({"activation_checkpointing": "some"}, "row 2: 'some' is not a valid Recompute"),
    ],
)
def test_what_cannot_be_read_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accuracy.read_runs(pd.DataFrame([row("one", **changes)]))


def test_a_model_with_other_parameters_than_its_sizes_give_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.000e9 parameters in the table; of these sizes: MPT 0\.0"):
        accuracy.architecture(dataclasses.replace(SIZES, num_parameters=1e9))


def test_the_code_of_a_run_is_told_by_its_notes() -> None:
    sizes = dataclasses.replace(SIZES, kv_heads=2)
    llama = dataclasses.replace(sizes, num_parameters=ARCHITECTURES["Llama"].num_parameters(sizes))
    told = {words: accuracy.software(f"a run of {words}, 2024") for words in SOFTWARE}
    assert all(told[words] is SOFTWARE[words] for words in SOFTWARE)
    assert accuracy.architecture(llama) is ARCHITECTURES["Llama"]
    titan = accuracy.architecture(llama, told["torchtitan"])
    assert titan.num_parameters(llama) == ARCHITECTURES["Llama"].num_parameters(llama)
    mpt = dataclasses.replace(SIZES, num_parameters=ARCHITECTURES["MPT"].num_parameters(SIZES))
    assert accuracy.architecture(mpt, told["torchtitan"]) is ARCHITECTURES["MPT"]


def test_torchtitans_layers_are_llamas() -> None:
    """The norm is torch's; rotating neighbours is the example's rotation of halves, with channels in another order."""
    torch.manual_seed(0)
    x, config = torch.randn(2, 6, 32), Config(model_dim=32, num_heads=4, num_kv_heads=2)
    assert torch.allclose(StepwiseNorm(32, 1e-5)(x), F.rms_norm(x, (32,), eps=1e-5), atol=1e-6)
    ours, theirs = RepeatingAttention(config), Attention(config)
    order = torch.arange(8).view(4, 2).T.flatten()  # halves, of neighbours
    for name, part in ours.named_parameters():
        rows = part.unflatten(0, (-1, 8))[:, order].flatten(0, 1) if name[0] in "qk" else part
        theirs.get_parameter(name).data = rows.detach()
    cos, sin = rotary_tables(8, 6, 10_000.0)
    assert torch.allclose(ours(x, cos, sin), theirs(x, cos, sin), atol=1e-6)


def slowed(
    runs: list[accuracy.Run], priced: dict[int, accuracy.Parts], numbers: tuple[float, float]
) -> list[accuracy.Run]:
    """Runs as fast as the numbers say."""
    return [dataclasses.replace(run, tokens_per_s=run.step_tokens / priced[run.row].seconds(*numbers)) for run in runs]


def test_planted_numbers_are_found_again(runs: list[accuracy.Run], priced: dict[int, accuracy.Parts]) -> None:
    numbers = (1.3, 0.7)
    found, residual = accuracy.fit(slowed(runs, priced, numbers), priced)
    seconds = [(priced[run.row].seconds(*found), priced[run.row].seconds(*numbers)) for run in runs]
    assert all(one == pytest.approx(other, rel=0.01) for one, other in seconds)
    assert residual < 0.01


def test_a_model_has_no_part_in_its_own_prediction(runs: list[accuracy.Run], priced: dict[int, accuracy.Parts]) -> None:
    plain = slowed(runs, priced, (1.2, 0.5))
    odd = [dataclasses.replace(run, tokens_per_s=run.tokens_per_s / 3) if run.model == "one" else run for run in plain]
    assert accuracy.predict(plain[0], plain, priced) == accuracy.predict(odd[0], odd, priced)
    assert accuracy.predict(plain[1], [*plain, plain[0]], priced) != accuracy.predict(odd[1], [*odd, odd[0]], priced)


def test_the_lookup_is_the_median_of_the_others(runs: list[accuracy.Run]) -> None:
    looked = accuracy.lookup(runs[0], runs)
    others = sorted(run.mfu for run in runs[1:] if run.recompute is Recompute.NONE)
    assert looked == pytest.approx(sum(others) / 2 * 312e12 / runs[0].flop_per_token)
    assert accuracy.lookup(runs[2], runs) is None


def test_the_command_writes_the_table_with_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = tmp_path / "runs.csv", tmp_path / "out.csv"
    pd.DataFrame([row("one", peak_mem_gib=1.0), row("two"), row("two", tp=3)]).to_csv(table, index=False)
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "published", "--data", str(table), "--out", str(out)])
    assert accuracy.main() == 2
    assert "row 4: " in capsys.readouterr().err
    assert not out.exists()
    rows = [row("one", peak_mem_gib=1.0), row("two"), row("two", micro_batch_per_gpu=1)]
    pd.DataFrame(rows).to_csv(table, index=False)
    assert accuracy.main() == 0
    found = pd.read_csv(out)
    assert list(found.columns[-4:]) == [
        "predicted_tokens_per_s_per_gpu",
        "predicted_tokens_per_s_error",
        "predicted_peak_mem_gib",
        "predicted_peak_mem_error",
    ]
    assert (found.iloc[:, -4:] > 0).all().all()
    shown = capsys.readouterr().out
    assert "within their 90 % bar" in shown
    assert "pairs of runs of one model on one machine in the right order" in shown
