"""scripts/evidence/accuracy.py: what it reads, fits and leaves out. The published runs themselves are not here."""

import dataclasses
import functools
import math
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "evidence"))

import accuracy
from accuracy_parts.models import ARCHITECTURES, SOFTWARE, RepeatingAttention, Sizes, StepwiseNorm
from llama import Attention, Config, rotary_tables

from tpplan.machine.tables import Fitted
from tpplan.plan.plan import Recompute
from tpplan.search.planner import price_mesh
from tpplan.search.points.options import Cluster, Options

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
    found, problems = accuracy.read_runs(pd.DataFrame(rows))
    assert not problems
    return found


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
        ({"gpu": "A900"}, "gpu 'A900': expected an SXM part with a profile, of a100-sxm-40gb,"),
        ({"gpu": "H100 PCIe 80GB"}, "gpu 'H100 PCIe 80GB': expected an SXM part"),
        ({"gpu": "GH200"}, "gpu 'GH200': expected an SXM part"),
        ({"pp": 2}, "pp 2: pipeline"),
        ({"activation_checkpointing": "some"}, "'some' is not a valid Recompute"),
        ({"precision": "fp8 (bf16 elsewhere)"}, "precision 'fp8 (bf16 elsewhere)': expected 16 bits"),
        ({"micro_batch_per_gpu": math.nan}, "no micro_batch_per_gpu"),
        ({"dp_mode": "zero1"}, "dp_mode 'zero1': expected none, ddp, fsdp, hsdp, zero2 or zero3"),
        ({"compile": "reduce-overhead"}, "compile 'reduce-overhead': expected yes or no"),
        ({"layers": 2.5}, "layers 2.5: expected a whole number, 1 or more"),
    ],
)
def test_what_cannot_be_read_is_named_and_the_rest_is_read(changes: dict[str, object], message: str) -> None:
    runs, (problem,) = accuracy.read_runs(pd.DataFrame([row("one", **changes), row("two")]))
    assert [run.model for run in runs] == ["two"]
    assert problem.startswith(f"row 2: {message}")


def test_a_table_without_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="no column 'hidden'; it has date, model,"):
        accuracy.read_runs(pd.DataFrame([row("one")]).drop(columns="hidden"))


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("H100 SXM 96GB HBM2e 500W (Grand Teton)", "h100-96gb-hbm2e"),
        ("H100 SXM5", "h100-sxm"),
        ("H200 SXM 141GB (4 per node)", "h200-sxm"),
        ("B200 SXM 180GB", "b200"),
    ],
)
def test_a_gpu_has_a_profile_by_what_tables_call_it(gpu: str, machine: str) -> None:
    (run,), _ = accuracy.read_runs(pd.DataFrame([row("one", gpu=gpu)]))
    assert run.machine == machine
    assert run.gpus_per_node == (4 if "4 per node" in gpu else 8)


def test_what_a_row_leaves_open_is_what_is_usual() -> None:
    (run,), _ = accuracy.read_runs(
        pd.DataFrame([row("one", kv_heads=math.nan, dp_mode="ddp", tp=math.nan, peak_mem_gib=2.0)])
    )
    assert (run.sizes.kv_heads, run.shard, run.tp, run.peak_bytes) == (run.sizes.heads, 1, 1, 2 * 2**30)
    (fsdp,), _ = accuracy.read_runs(pd.DataFrame([row("one", fsdp_degree=math.nan, global_batch=math.nan, tp=2)]))
    assert (fsdp.shard, fsdp.global_batch) == (4, 2 * 4)


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


def test_a_head_is_tied_where_the_parameters_say_so() -> None:
    for name, architecture in ARCHITECTURES.items():
        sizes = dataclasses.replace(SIZES, num_parameters=architecture.num_parameters(SIZES))
        assert accuracy.architecture(sizes) is architecture, name
        model = architecture.build(sizes)
        shapes = [list(p.shape) for p in model.parameters()]
        assert shapes.count([SIZES.vocab, SIZES.hidden]) == (2 if name in ("Llama", "MPT, untied") else 1)
    tied = dataclasses.replace(SIZES, num_parameters=ARCHITECTURES["Llama, tied"].num_parameters(SIZES))
    titan = accuracy.architecture(tied, SOFTWARE["torchtitan"])
    assert titan.num_parameters(tied) == tied.num_parameters


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
    plain += [plain[0], *plain[1:]] * accuracy.FEWEST_RUNS
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
    pd.DataFrame([row("two", tp=3), row("two", pp=2)]).to_csv(table, index=False)
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "published", "--data", str(table), "--out", str(out)])
    assert accuracy.main() == 2
    captured = capsys.readouterr()
    assert "row 2: " in captured.err
    assert "row 3: pp 2" in captured.err
    assert captured.out == "predicted: 0 of 2 runs\n"
    assert not out.exists()
    rows = [row("one", peak_mem_gib=1.0), row("two"), row("two", micro_batch_per_gpu=1)]
    wrong, unmeasured = row("two", tp=3), row("two", tokens_per_s_per_gpu=math.nan)
    rows[-1]["n_params"] *= 0.95
    pd.DataFrame([wrong, *rows, unmeasured]).to_csv(table, index=False)
    assert accuracy.main() == 0
    captured = capsys.readouterr()
    assert "row 5: priced as a model with 5.3% more parameters" in captured.err
    assert captured.err.count("priced as a model") == 1
    found = pd.read_csv(out)
    assert found.iloc[0, -4:].isna().all()
    found = found.iloc[1:]
    assert list(found.columns[-4:]) == [
        "predicted_tokens_per_s_per_gpu",
        "predicted_tokens_per_s_error",
        "predicted_peak_mem_gib",
        "predicted_peak_mem_error",
    ]
    assert (found.iloc[:, -4:] > 0).all().all()
    shown = captured.out
    assert shown.startswith("predicted: 4 of 5 runs\n")
    assert re.search(r"^all +3 ", shown, re.MULTILINE)
    assert found.iloc[3, -4] == pytest.approx(found.iloc[1, -4])  # the same run, unmeasured
    assert "within their 90 % bar" in shown
    assert "pairs of runs of one model on one machine in the right order" in shown
