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
from accuracy_parts import predict, price, read
from accuracy_parts.models import ARCHITECTURES, LLAMAS, RepeatingAttention, Sizes, Software, StepwiseNorm
from llama import Attention, Config, rotary_tables

from tpplan.machine.tables import Fitted
from tpplan.plan.plan import Recompute
from tpplan.search.planner import price_mesh
from tpplan.search.points.options import Cluster, Options

#: what the one source of these rows does
VERSIONS = {"S": Software()}
VERSIONS_TABLE = """\
source_id,framework,version,torch,attention,llama,logits,logits_kept,gradients,reduce,fsdp_of_one,loss,optimizer,source
S,mine,1,2.13,flash2,plain,sharded,no,each micro-batch,as made,no,fp32,adamw,here
"""
TITLES = [
    "numbers fitted without the runs of the same model",
    "numbers fitted without the runs of the same source",
    "the numbers that ship; baselines without the runs of the same model",
]
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
        "step_time_s": math.nan,
        "mfu": 0.0,
        "peak_mem_gib": math.nan,
        "notes": "",
        "source_id": "S",
    } | changes


@pytest.fixture(scope="module")
def runs() -> list[read.Run]:
    rows = [row("one"), row("two"), row("two", activation_checkpointing="full"), row("two", dp_mode="zero2", tp=1)]
    found, problems = read.read_runs(pd.DataFrame(rows), VERSIONS)
    assert not problems
    return found


@pytest.fixture(scope="module")
def priced(runs: list[read.Run]) -> dict[int, price.Parts]:
    return {run.row: price.price(run) for run in runs}


@pytest.mark.parametrize("numbers", [(1.0, 0.0), (1.4, 0.6)])
def test_a_step_taken_apart_is_the_step_that_tpplan_prices(
    runs: list[read.Run], priced: dict[int, price.Parts], numbers: tuple[float, float]
) -> None:
    names = zip(("matmul_slowdown", "overlap_slowdown"), numbers, strict=True)
    fitted = tuple(Fitted(name=name, value=value, residual=0.0, runs=1, what="") for name, value in names)
    for run in runs:
        profile = dataclasses.replace(price.benchmark(run.machine, False), fitted=fitted)
        model = accuracy.architecture(run.sizes)
        whole = price_mesh(
            functools.partial(model.build, run.sizes),
            price.example_inputs,
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


def test_a_model_with_other_parameters_than_its_sizes_give_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.000e9 parameters in the table; of these sizes: MPT 0\.0"):
        accuracy.architecture(dataclasses.replace(SIZES, num_parameters=1e9))


def test_the_code_of_a_run_is_that_of_its_source() -> None:
    sizes = dataclasses.replace(SIZES, kv_heads=2)
    llama = dataclasses.replace(sizes, num_parameters=ARCHITECTURES["Llama"].num_parameters(sizes))
    assert accuracy.architecture(llama) is ARCHITECTURES["Llama"]
    torchtitan = Software(llama=LLAMAS["torchtitan"])
    titan = accuracy.architecture(llama, torchtitan)
    assert titan is LLAMAS["torchtitan"]
    assert titan.num_parameters(llama) == ARCHITECTURES["Llama"].num_parameters(llama)
    mpt = dataclasses.replace(SIZES, num_parameters=ARCHITECTURES["MPT"].num_parameters(SIZES))
    assert accuracy.architecture(mpt, torchtitan) is ARCHITECTURES["MPT"]


def test_a_head_is_tied_where_the_parameters_say_so() -> None:
    for name, architecture in ARCHITECTURES.items():
        sizes = dataclasses.replace(SIZES, num_parameters=architecture.num_parameters(SIZES))
        assert accuracy.architecture(sizes) is architecture, name
        model = architecture.build(sizes)
        shapes = [list(p.shape) for p in model.parameters()]
        assert shapes.count([SIZES.vocab, SIZES.hidden]) == (2 if name in ("Llama", "MPT, untied") else 1)
    tied = dataclasses.replace(SIZES, num_parameters=ARCHITECTURES["Llama, tied"].num_parameters(SIZES))
    titan = accuracy.architecture(tied, Software(llama=LLAMAS["torchtitan"]))
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


def slowed(runs: list[read.Run], priced: dict[int, price.Parts], numbers: tuple[float, float]) -> list[read.Run]:
    """Runs as fast as the numbers say."""
    return [dataclasses.replace(run, tokens_per_s=run.step_tokens / priced[run.row].seconds(*numbers)) for run in runs]


def test_planted_numbers_are_found_again(runs: list[read.Run], priced: dict[int, price.Parts]) -> None:
    numbers = (1.3, 0.7)
    found, residual = predict.fit(slowed(runs, priced, numbers), priced)
    seconds = [(priced[run.row].seconds(*found), priced[run.row].seconds(*numbers)) for run in runs]
    assert all(one == pytest.approx(other, rel=0.01) for one, other in seconds)
    assert residual < 0.01


def test_a_model_has_no_part_in_its_own_prediction(runs: list[read.Run], priced: dict[int, price.Parts]) -> None:
    plain = slowed(runs, priced, (1.2, 0.5))
    plain += [plain[0], *plain[1:]] * predict.FEWEST_RUNS
    odd = [dataclasses.replace(run, tokens_per_s=run.tokens_per_s / 3) if run.model == "one" else run for run in plain]
    assert predict.predict(plain[0], plain, priced) == predict.predict(odd[0], odd, priced)
    assert predict.predict(plain[1], [*plain, plain[0]], priced) != predict.predict(odd[1], [*odd, odd[0]], priced)


def test_the_lookup_is_the_median_of_the_others(runs: list[read.Run]) -> None:
    looked = predict.lookup(runs[0], runs)
    others = sorted(run.mfu for run in runs[1:] if run.recompute is Recompute.NONE)
    assert looked == pytest.approx(sum(others) / 2 * 312e12 / runs[0].flop_per_token)
    assert predict.lookup(runs[2], runs) is None


def test_the_command_writes_the_table_with_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out, versions = (tmp_path / name for name in ("runs.csv", "out.csv", "versions.csv"))
    pd.DataFrame([row("two", n_params=1e9), row("two", pp=2)]).to_csv(table, index=False)
    versions.write_text(VERSIONS_TABLE)
    arguments = ["published", "--data", str(table), "--out", str(out), "--versions", str(versions)]
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *arguments])
    assert accuracy.main() == 2
    captured = capsys.readouterr()
    assert "row 2: " in captured.err
    assert "row 3: pp 2" in captured.err
    assert captured.out == "predicted: 0 of 2 runs\n"
    assert not out.exists()
    rows = [row("one", peak_mem_gib=1.0), row("two"), row("two", micro_batch_per_gpu=1)]
    wrong, unmeasured = row("two", n_params=1e9), row("two", tokens_per_s_per_gpu=math.nan)
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
    assert len(re.findall(r"^all +3 ", shown, re.MULTILINE)) == len(TITLES)
    assert [line for line in shown.splitlines() if line.startswith(("numbers fitted", "the numbers"))] == TITLES
    assert found.iloc[3, -4] == pytest.approx(found.iloc[1, -4])  # the same run, unmeasured
    assert "in 90 % bar" in shown
    assert "pairs of runs of one model on one machine in the right order" in shown
