"""scripts/evidence/accuracy.py: rows that are read, rows that are refused and by which word, and the baselines."""

import dataclasses
import functools
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "evidence"))
sys.path.append(str(Path(__file__).resolve().parent))

import accuracy
from accuracy_parts import predict, price, read, versions
from accuracy_parts.models import ARCHITECTURES, Software
from test_accuracy import SIZES, VERSIONS, VERSIONS_TABLE, row

from tpplan.machine.profile import load_profile
from tpplan.plan.plan import Precision, Recompute
from tpplan.search.planner import price_mesh
from tpplan.search.points.options import Cluster, Options


def reading(**changes: object) -> tuple[list[read.Run], list[str]]:
    return read.read_runs(pd.DataFrame([row("one") | changes]), VERSIONS)


REFUSED = [
    ("gpu", "A900", "gpu 'A900': expected an SXM part with a profile, of a100-sxm-40gb,"),
    ("gpu", "H100 PCIe 80GB", "gpu 'H100 PCIe 80GB': expected an SXM part"),
    ("gpu", "H100 NVL 94GB", "gpu 'H100 NVL 94GB': expected an SXM part"),
    ("gpu", "GH200", "gpu 'GH200': expected an SXM part"),
    ("gpu", "H20 96GB", "gpu 'H20 96GB': expected an SXM part"),
    ("gpu", "H800 SXM 80GB", "gpu 'H800 SXM 80GB': expected an SXM part"),
    ("gpu", "A100 SXM 40GB MIG 3g.20gb", "expected an SXM part"),
    ("gpu", "H100 95GB", "gpu 'H100 95GB': h100-sxm has 80 GB or none in its name"),
    ("gpu", "H100 SXM 64GB", "gpu 'H100 SXM 64GB': h100-sxm has 80 GB or none in its name"),
    ("gpu", "A100 SXM", "gpu 'A100 SXM': a100-sxm-80gb has 80 GB in its name"),
    ("gpu", "H200 SXM 96GB", "h200-sxm has 141 GB or none in its name"),
    ("gpu", math.nan, "no gpu"),
    ("source_id", math.nan, "no source_id"),
    ("source_id", "S99", "source_id 'S99': no version of its code is known"),
    ("pp", 2, "pp 2: not priced here"),
    ("cp", 4, "cp 4: not priced here"),
    ("ep", 8, "ep 8: not priced here"),
    (
        "activation_checkpointing",
        "some",
        "activation_checkpointing 'some': expected none, full, selective, selective op",
    ),
    ("activation_checkpointing", "selective layer", "activation_checkpointing 'selective layer': expected none"),
    ("activation_checkpointing", "selective 2", "activation_checkpointing 'selective 2': expected none"),
    ("activation_checkpointing", "full, 20 of 32 layers", "activation_checkpointing 'full, 20 of 32 layers': expected"),
    ("activation_checkpointing", math.nan, "no activation_checkpointing"),
    ("precision", "fp8 (bf16 elsewhere)", "precision 'fp8': 8-bit or narrower floats are not priced here"),
    ("precision", "bf16 + float8 linears", "precision 'float8': 8-bit or narrower floats are not priced here"),
    ("precision", "MXFP8", "precision 'MXFP8': 8-bit or narrower floats are not priced here"),
    ("precision", "tf32", "precision 'tf32': 'tf32' is not priced here; expected 16 bits"),
    ("precision", "fp32", "precision 'fp32': 'fp32' is not priced here; expected 16 bits"),
    ("precision", "bf16 with stochastic rounding", "'with' is not priced here"),
    ("precision", math.nan, "no precision"),
    ("compile", "reduce-overhead", "compile 'reduce-overhead': CUDA graphs are not priced here"),
    ("compile", "torch.compile", "compile 'torch.compile': expected yes, true"),
    ("compile", "whole model", "compile 'whole model': expected yes, true"),
    ("compile", math.nan, "no compile"),
    ("dp_mode", "zero1", "dp_mode 'zero1': 'zero1' is none of none, ddp, dp, fsdp"),
    ("dp_mode", "deepspeed zero3", "dp_mode 'deepspeed zero3': 'deepspeed' is none of"),
    ("dp_mode", "fsdp + offload", "dp_mode 'fsdp + offload': 'offload' is none of"),
    ("dp_mode", "none", "dp_mode 'none': 8 ranks with different samples need one"),
    ("dp_mode", math.nan, "no dp_mode"),
    ("fsdp_degree", 3, "fsdp_degree 3: expected a divisor of the 8 ranks"),
    ("micro_batch_per_gpu", math.nan, "no micro_batch_per_gpu"),
    ("global_batch", math.nan, "no global_batch"),
    ("global_batch", 33, "global_batch 33: expected a multiple of 2 samples on each of 8 GPUs"),
    ("tp", 3, "global_batch 32: expected a multiple of 2 samples on each of 8 GPUs in groups of tp 3"),
    ("layers", 2.5, "layers 2.5: expected a whole number, 1 or more"),
    ("layers", 0, "layers 0: expected a number above 0"),
    ("n_params", "about 7", "n_params 'about 7': expected a number"),
    ("tokens_per_s_per_gpu", -1, "tokens_per_s_per_gpu -1: expected a number above 0"),
    ("step_time_s", 1.0, "step_time_s 1: by tokens_per_s_per_gpu a step takes 0.00512 s"),
    ("optimizer", "adafactor", "optimizer 'adafactor': its source has adamw"),
    ("model", "Mixtral-8x7B", "model '8x7B': experts are not priced here"),
    ("model", "Qwen-MoE", "model 'MoE': experts are not priced here"),
]
REFUSED_NOTES = [
    ("float8 rowwise", "float8"),
    ("FP8 recipe", "FP8"),
    ("Transformer Engine", "Transformer Engine"),
    ("LoRA rank 16", "LoRA"),
    ("QLoRA", "QLoRA"),
    ("embeddings frozen", "frozen"),
    ("context parallel 4", "context parallel"),
    ("CP=8", "CP=8"),
    ("ring attention", "ring attention"),
    ("Ulysses over 4 ranks", "Ulysses"),
    ("async TP", "async TP"),
    ("asyncTP on", "asyncTP"),
    ("asynchronous tensor parallelism", "asynchronous tensor parallelism"),
    ("expert parallel", "expert parallel"),
    ("pp=4 1F1B", "pp=4"),
    ("CPU offload of the optimizer", "CPU offload"),
    ("activation offloading", "offloading"),
    ("Muon optimizer", "Muon"),
    ("8-bit Adam", "8-bit Adam"),
    ("Adafactor", "Adafactor"),
    ("FlashAttention-3", "FlashAttention-3"),
    ("sliding window of 4096", "sliding window"),
    ("FlexAttention", "FlexAttention"),
    ("packed sequences", "packed"),
    ("Liger kernels", "Liger"),
    ("CUDA graphs", "CUDA graphs"),
    ("PowerSGD", "PowerSGD"),
]


@pytest.mark.parametrize(("column", "value", "message"), REFUSED)
def test_a_row_is_refused_by_column_and_word(column: str, value: object, message: str) -> None:
    runs, (problem,) = reading(**{column: value})
    assert not runs
    assert problem.startswith("row 2: ")
    assert message in problem


@pytest.mark.parametrize(("notes", "word"), REFUSED_NOTES)
def test_notes_refuse_what_is_not_priced(notes: str, word: str) -> None:
    runs, (problem,) = reading(notes=f"grad accum 2; {notes}")
    assert not runs
    assert problem.startswith(f"row 2: notes {word!r}: ")
    assert problem.endswith(" are not priced here")


@pytest.mark.parametrize(
    "notes", ["no LoRA", "vanilla TP, not async TP", "without CUDA graphs", "fused AdamW", math.nan]
)
def test_notes_without_it_do_not(notes: object) -> None:
    (run,), problems = reading(notes=notes)
    assert not problems
    assert run.software is VERSIONS["S"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"reshard": True, "shard": 8, "recompute": Recompute.NONE, "precision": Precision.BF16_MIXED}),
        ({"activation_checkpointing": "full"}, {"recompute": Recompute.FULL}),
        ({"activation_checkpointing": "selective op"}, {"recomputes_every_other_matmul": True}),
        ({"dp_mode": "zero2 (FSDP SHARD_GRAD_OP)"}, {"reshard": False}),
        ({"dp_mode": "ddp", "fsdp_degree": math.nan}, {"shard": 1}),
        ({"dp_mode": "hsdp", "fsdp_degree": 4}, {"shard": 4}),
        ({"fsdp_degree": math.nan, "tp": 2}, {"shard": 4, "tp": 2}),
        ({"tp": 8, "dp_mode": math.nan}, {"shard": 1, "tp": 8}),
        ({"tp": math.nan, "kv_heads": math.nan, "pp": math.nan}, {"tp": 1}),
        ({"precision": "bf16 (PURE: bf16 params+reduce)"}, {"precision": Precision.BF16}),
        ({"precision": "bf16 params+states, fp32 grad reduce"}, {"precision": Precision.BF16}),
        ({"precision": "amp_bf16 (DEFAULT: bf16 compute, fp32 reduce/buffers)"}, {"precision": Precision.BF16_MIXED}),
        ({"compile": "yes"}, {"is_compiled": True}),
        ({"step_time_s": 32 * 128 / 8 / 1e5}, {"tokens_per_s": 1e5}),
        ({"peak_mem_gib": 2.0}, {"peak_bytes": 2 * 2**30}),
        ({"gpu": "A100-SXM4-40GB"}, {"machine": "a100-sxm-40gb", "gpus_per_node": 8}),
        ({"gpu": "NVIDIA A100-SXM4-80GB"}, {"machine": "a100-sxm-80gb"}),
        ({"gpu": "H100 SXM 96GB HBM2e 500W (Grand Teton)"}, {"machine": "h100-96gb-hbm2e"}),
        ({"gpu": "H100 SXM5"}, {"machine": "h100-sxm"}),
        ({"gpu": "H200 SXM 141GB (4 per node)"}, {"machine": "h200-sxm", "gpus_per_node": 4}),
        ({"gpu": "B200 SXM 180GB"}, {"machine": "b200"}),
    ],
    ids=str,
)
def test_a_row_is_read_as_it_says(changes: dict[str, object], expected: dict[str, object]) -> None:
    (run,), _ = reading(**changes)
    assert {name: getattr(run, name) for name in expected} == expected
    assert run.sizes.kv_heads == run.sizes.heads
    assert run.micro_batches == 32 * run.tp // (2 * 8)


def test_a_table_without_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="no column 'hidden'; it has date, model,"):
        read.read_runs(pd.DataFrame([row("one")]).drop(columns="hidden"), VERSIONS)


def test_versions_that_ship_are_read(tmp_path: Path) -> None:
    found = versions.read_versions()
    assert set(found) == {"S27", "S28", "S29", "S30", "S31"}
    assert [name for name, own in found.items() if own.whole_gradients] == ["S30"]
    file = tmp_path / "versions.csv"
    file.write_text(VERSIONS_TABLE)
    assert versions.read_versions(file) == {"S": Software()}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("each micro-batch", "sometimes", "row 2: gradients 'sometimes': expected each micro-batch, whole"),
        (",here", ",", "row 2: no source"),
        ("flash2", "flash9", "row 2: attention 'flash9': expected flash1, flash2"),
        (",adamw,", ",lion,", "row 2: optimizer 'lion': expected "),
        ("loss,optimizer", "optimizer", "row 2: no loss"),
    ],
)
def test_a_word_of_versions_that_is_unknown_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "versions.csv"
    file.write_text(VERSIONS_TABLE.replace(old, new))
    with pytest.raises(ValueError, match=message):
        versions.read_versions(file)


def test_a_source_that_stands_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "versions.csv"
    file.write_text(VERSIONS_TABLE + VERSIONS_TABLE.splitlines()[1] + "\n")
    with pytest.raises(ValueError, match="source_id 'S' stands twice"):
        versions.read_versions(file)


# ---- what a run's code holds beside a plan


def with_code(**code: object) -> read.Run:
    (run,), _ = read.read_runs(pd.DataFrame([row("one")]), {"S": dataclasses.replace(Software(), **code)})
    return dataclasses.replace(run, precision=Precision.BF16)


def test_what_code_holds_beside_a_plan_is_counted() -> None:
    """Two micro-batches of 2 x 128 tokens and 512 words; bfloat16 gradients that wait as float32."""
    logits, extra = 2 * 2 * 128 * 512, 2 * with_code().sizes.num_parameters
    assert price.held_beside(with_code()) == 0
    assert price.held_beside(with_code(keeps_logits=True)) == logits
    assert price.held_beside(with_code(whole_gradients=True)) == 0  # the plan's
    assert price.held_beside(with_code(whole_gradients=True, reduces_in_float32=True)) == extra
    assert price.held_beside(with_code(reduces_in_float32=True)) == 0
    run = with_code(whole_gradients=True, reduces_in_float32=True, keeps_logits=True, wraps_one_rank=True)
    one_step = dataclasses.replace(run, global_batch=16)
    assert price.held_beside(one_step) == 0
    alone = dataclasses.replace(run, gpus=1, shard=1)
    copies = price.held_beside(alone) - extra - logits
    assert 0 < copies < extra


def test_a_run_with_whole_gradients_is_priced_so() -> None:
    whole, sharded = (with_code(whole_gradients=own) for own in (True, False))
    more = price.price(whole).peak_bytes - price.price(sharded).peak_bytes
    assert 0 < more <= 2 * whole.sizes.num_parameters


# ---- baselines


def many(count: int) -> list[read.Run]:
    """Runs whose MFU is a product of powers of their length and layers."""
    runs = []
    for number in range(count):
        (run,), _ = reading(model=f"m{number % 7}", seq_len=128 * (1 + number % 5), layers=2 + number % 3)
        flop = run.flop_per_token / run.peak_flop_per_s
        mfu = 0.3 * (run.sizes.seq_len / 128) ** 0.2 * run.sizes.layers**-0.1
        runs.append(dataclasses.replace(run, tokens_per_s=mfu / flop, row=number))
    return runs


def test_ridge_finds_powers_and_never_sees_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = many(40)
    assert len(predict.columns(runs[0])) == 17
    monkeypatch.setattr(predict, "RIDGE", 1e-6)
    assert predict.ridge(runs[0], runs) == pytest.approx(runs[0].tokens_per_s, rel=1e-3)
    odd = [dataclasses.replace(r, tokens_per_s=r.tokens_per_s / 9) if r.model == "m0" else r for r in runs]
    assert predict.ridge(runs[0], runs) == predict.ridge(odd[0], odd)
    assert predict.ridge(runs[1], runs) != predict.ridge(odd[1], odd)
    assert predict.ridge(runs[0], runs, predict.KEYS["source"]) is None  # all are of one source


def test_ridge_is_the_minimum_of_what_it_says() -> None:
    runs = many(20)
    x = np.array([predict.columns(run) for run in runs if run.model != runs[0].model])
    y = np.log([run.mfu for run in runs if run.model != runs[0].model])
    varies = x.std(axis=0) > 1e-9
    z = ((x - x.mean(axis=0)) / np.where(varies, x.std(axis=0), 1))[:, varies]
    stacked = np.vstack([np.hstack([z, np.ones((len(z), 1))]), np.eye(z.shape[1], z.shape[1] + 1)])
    solution, *_ = np.linalg.lstsq(stacked, np.concatenate([y, np.zeros(z.shape[1])]), rcond=None)
    own = ((np.array(predict.columns(runs[0])) - x.mean(axis=0)) / np.where(varies, x.std(axis=0), 1))[varies]
    log_mfu = own @ solution[:-1] + solution[-1]
    expected = math.exp(log_mfu) * runs[0].peak_flop_per_s / runs[0].flop_per_token
    assert predict.ridge(runs[0], runs) == pytest.approx(expected, rel=1e-9)


@pytest.fixture(scope="module")
def parts() -> price.Parts:
    return price.price(many(1)[0])


def test_without_a_refit_the_numbers_are_those_that_ship(parts: price.Parts) -> None:
    runs = many(30)
    priced = dict.fromkeys(range(30), parts)
    found = predict.predict(runs[0], runs, priced, refit=False)
    profile = load_profile("a100-sxm-40gb")
    seconds = parts.seconds(profile.matmul_slowdown, profile.overlap_slowdown)
    assert found.tokens_per_s == pytest.approx(runs[0].step_tokens / seconds)
    assert found.bar == pytest.approx(predict.WITHIN_90_PERCENT * predict.of_profile("a100-sxm-40gb")[1])
    assert predict.predict(runs[0], runs, priced).tokens_per_s != pytest.approx(found.tokens_per_s)


def test_a_source_has_no_part_in_its_own_prediction(parts: price.Parts) -> None:
    runs = [dataclasses.replace(run, source="AB"[number % 2]) for number, run in enumerate(many(40))]
    priced = dict.fromkeys(range(40), parts)
    odd = [dataclasses.replace(r, tokens_per_s=r.tokens_per_s / 3) if r.source == "A" else r for r in runs]
    by_source = predict.KEYS["source"]
    assert predict.predict(runs[0], runs, priced, key=by_source) == predict.predict(odd[0], odd, priced, key=by_source)
    assert predict.predict(runs[0], runs, priced) != predict.predict(odd[0], odd, priced)


def test_ties_are_neither_right_nor_wrong_and_are_said(parts: price.Parts) -> None:
    first, second = many(2)
    second = dataclasses.replace(first, row=1, tokens_per_s=first.tokens_per_s * 1.5)
    third = dataclasses.replace(first, row=2, tokens_per_s=first.tokens_per_s * 1.001)
    table = pd.DataFrame({"predicted_tokens_per_s_per_gpu": [7.0, 7.0, 8.0]})
    assert accuracy._ordered(table, [first, second, third]) == (0, 1, 2)


def test_a_peak_above_the_card_is_listed(parts: price.Parts) -> None:
    (run,) = many(1)
    measured = dataclasses.replace(run, peak_bytes=parts.peak_bytes / 2)
    shown = list(accuracy.memory_report([measured], {0: parts}))
    assert shown[0].endswith("(+100%), with slack " + shown[0].rpartition(" ")[2])
    assert shown[1] == "peaks: median |error| 100.0%; below the measured with slack: 0 of 1"
    assert len(shown) == 2
    above = dataclasses.replace(parts, peak_bytes=41 * 2.0**30)
    assert "41.0 GiB are predicted of 40.0" in next(iter(accuracy.memory_report([run], {0: above})))


def test_attention_of_a_fused_projection_is_divided_by_tp() -> None:
    """Each rank runs its heads alone: a packed slice of the projection of queries, keys and values."""
    model = ARCHITECTURES["MPT"]
    sizes = dataclasses.replace(SIZES, hidden=1024, heads=16, kv_heads=16, ffn=4096, seq_len=1024)
    seconds = {}
    for tp in (1, 4):
        priced = price_mesh(
            functools.partial(model.build, sizes),
            price.example_inputs,
            cluster=Cluster(gpus=4, gpus_per_node=4, profile="h100-sxm"),
            global_batch=8,
            micro_batch=2,
            seq_len=1024,
            options=Options(
                loss=model.sharded_loss,
                unused_outputs=("output",),
                tp=tp,
                fsdp=4 // tp,
                pins=model.pins if tp > 1 else {},
            ),
        )
        formulation, choice = priced.formulation, priced.choice
        names = [op.name for op in formulation.space.graph.ops if "attention" in op.target]
        assert len(names) == sizes.layers
        classes = [formulation.space.classes[name] for name in names]
        times = [formulation.table[name][choice.get(name, 0)] for name in classes]
        seconds[tp] = sum(time.forward.seconds + time.backward.seconds for time in times)
    assert seconds[4] == pytest.approx(seconds[1] / 4, rel=0.2)
