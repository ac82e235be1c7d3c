"""scripts/evidence/accuracy.py parallel: rows that are read, rows that are refused and why, and stages. The published
runs themselves are not here."""

import csv
import dataclasses
import itertools
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "evidence"))

from accuracy_parts.parallel_code import CODE as TABLE
from accuracy_parts.parallel_code import Code, read_code
from accuracy_parts.parallel_read import (
    ParallelRun,
    RefusalError,
    layers_of_stages,
    parameters,
    read_parallel,
)

from tpplan.plan.plan import Recompute

CODE = Code(
    has_flash_attention=True,
    overlaps=False,
    reduce_bytes=4,
    node_bytes_per_s=0.0,
    vpp="stated",
    sends="whole",
    sequence_parallel="stated",
    split="even",
    window=0,
    vocab_multiple=128,
    recompute="stated",
    zero="stated",
)
CODES = [("S1", "*", "*", CODE)]
#: an invented run: 4 layers on 2 stages of 2 tensor-parallel ranks, 4 replicas
ROW = {
    "row_id": "S1-1", "source_id": "S1", "framework": "mine", "task": "pretrain", "model": "invented",
    "family": "llama",
    "params_b": "0.104", "layers": "4", "hidden": "1024", "ffn": "4096", "heads": "8", "kv_heads": "8", "head_dim": "",
    "vocab": "17920", "experts": "", "top_k": "", "moe_ffn": "", "shared_expert_ffn": "", "dense_layers": "",
    "gpu": "A100 80GB", "gpus": "16", "gpus_per_node": "8", "dp": "4", "tp": "2", "pp": "2", "vpp": "1",
    "pp_schedule": "", "cp": "1", "ep": "1", "etp": "", "fsdp_zero": "zero1", "sequence_parallel": "no",
    "global_batch": "64", "micro_batch": "2", "seq_len": "512", "precision_class": "bf16", "recompute": "full",
    "flags": "", "tokens_per_s_per_gpu": "2048", "step_time_s": "1.0", "trust": "A", "notes": "", "plan_group": "G1",
}  # fmt: skip
EXPERTS = {
    "family": "mixtral-moe", "params_b": "0.456", "ffn": "", "experts": "8", "top_k": "2", "moe_ffn": "4096",
    "shared_expert_ffn": "0", "dense_layers": "0", "ep": "4", "etp": "1",
}  # fmt: skip


def read(code: Code = CODE, **changes: str) -> ParallelRun:
    runs, refused = read_parallel([ROW | changes], [("S1", "*", "*", code)])
    assert not refused, str(refused[0][1])
    return runs[0]


def why_not(code: Code = CODE, **changes: str) -> str:
    runs, refused = read_parallel([ROW | changes], [("S1", "*", "*", code)])
    assert not runs
    assert refused[0][0] == "S1-1"
    return str(refused[0][1])


def test_a_row_is_read_as_it_says() -> None:
    run = read()
    assert (run.dp, run.tp, run.pp, run.vpp, run.ep, run.zero) == (4, 2, 2, 1, 1, 1)
    assert (run.micro_batch, run.micro_batches, run.step_tokens) == (2, 64 // (2 * 4), 64 * 512)
    assert (run.machine, run.recompute, run.sequence_parallel) == ("a100-sxm-80gb", Recompute.FULL, False)
    assert (run.shape.head_dim, run.group, run.plan_group) == (1024 // 8, "dense pp", "G1")
    assert run.caveats == ()


def test_a_vocabulary_is_padded_to_a_multiple_of_what_ranks_divide() -> None:
    assert read(vocab="17921").shape.vocab == 18176
    assert read(vocab="17921", tp="1", dp="8", micro_batch="1").shape.vocab == 18048
    assert read(vocab="17920").shape.vocab == 17920


def test_a_row_with_experts_is_read_as_it_says() -> None:
    run = read(**EXPERTS, flags="dispatcher=deepep")
    assert (run.group, run.ep, run.shape.experts, run.shape.ffn, run.sends_rows_once) == ("MoE", 4, 8, 0, True)


REFUSED = [
    ({"trust": "C"}, "trust: C: A or B are priced"),
    ({"task": "LoRA"}, "another task than pretraining: LoRA"),
    ({"precision_class": "fp8"}, "no profile has the precision: fp8"),
    ({"precision_class": ""}, "no profile has the precision: blank"),
    ({"cp": "2"}, "context parallelism: cp 2"),
    ({"gpu": "GB200"}, "a GPU without a profile: GB200"),
    ({"gpu": "A100 PCIe 80GB"}, "a GPU without a profile: A100 PCIe 80GB"),
    ({"source_id": "S2"}, "nothing is known of the code of these runs: S2 invented 64"),
    ({"family": "deepseek-moe-mla"}, "no model of the family can be built of the columns: deepseek-moe-mla"),
    ({"micro_batch": ""}, "no micro_batch"),
    ({"heads": ""}, "no heads"),
    ({"seq_len": ""}, "no seq_len"),
    ({"step_time_s": ""}, "no step_time_s"),
    ({"recompute": ""}, "no recompute"),
    ({"recompute": "selective: core_attn"}, "recompute that is not priced: selective: core_attn"),
    ({"fsdp_zero": ""}, "no fsdp_zero"),
    ({"fsdp_zero": "zero2"}, "fsdp_zero that is not priced: zero2"),
    ({"sequence_parallel": ""}, "no sequence_parallel"),
    ({"dp": "8"}, "degrees that are not the GPUs: 8 x 2 x 2 is not 16"),
    ({"global_batch": "63"}, "a global batch that does not divide: 63 by 2 on 4 ranks"),
    ({"layers": "2.5"}, "layers that is no whole number from 1 on: 2.5"),
    ({"layers": "five"}, "layers that is no number: five"),
    ({"layers": "5", "params_b": "0.12"}, "layers that do not divide: 5 in 2 stages of 1 chunks"),
    ({"vpp": "3"}, "layers that do not divide: 4 in 2 stages of 3 chunks"),
    ({"vpp": ""}, "no vpp: it could change the step by 12%"),
    ({"vpp": "", "pp_schedule": "interleaved 1f1b", "global_batch": "4096"}, "no vpp: it could"),
    ({"params_b": "0.3"}, "parameters that its sizes do not have: 0.0855 or 0.104e9 for 0.3e9"),
    ({"tokens_per_s_per_gpu": "4096"}, "seconds and tokens per second that differ: 1.0 s and 0.5 s"),
    ({"notes": "with LoRA adapters"}, "adapters: notes 'with LoRA adapters'"),
    ({"flags": "ep_overlap=on"}, "exchange beside another micro-batch's compute: flags 'ep_overlap=on'"),
    (EXPERTS | {"etp": ""}, "experts that are cut themselves: etp 2, tp where it is blank"),
    (EXPERTS | {"ep": "3"}, "degrees that are not the GPUs: ep 3 does not divide 8 of a stage"),
    (EXPERTS | {"dense_layers": "1"}, "dense layers between those with experts: 1"),
    (EXPERTS | {"shared_expert_ffn": "64"}, "shared experts: 64"),
    (EXPERTS | {"flags": "dispatcher=magic"}, "dispatcher that is not priced: magic"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_a_row_is_refused_by_name(changes: dict[str, str], why: str) -> None:
    assert why_not(**changes).startswith(why)


def test_the_table_of_code_fills_blanks() -> None:
    code = dataclasses.replace(CODE, recompute="none", zero="ddp", sequence_parallel="yes", vpp="1")
    run = read(code, recompute="", fsdp_zero="", sequence_parallel="", vpp="")
    assert (run.recompute, run.zero, run.sequence_parallel, run.vpp) == (Recompute.NONE, 0, True, 1)


def test_a_row_says_more_than_the_table_of_code() -> None:
    code = dataclasses.replace(CODE, recompute="none", zero="ddp", sequence_parallel="yes", vpp="2")
    run = read(code)
    assert (run.recompute, run.zero, run.sequence_parallel, run.vpp) == (Recompute.FULL, 1, False, 1)


def test_a_vpp_that_hardly_matters_is_neglected_and_said() -> None:
    run = read(vpp="", global_batch="256", step_time_s="4.0")  # a bubble of (2 - 1) / 32
    assert run.vpp == 1
    assert run.caveats == ("vpp is not stated; priced as 1 (another would make the step shorter by less than 5%)",)


def test_what_is_neglected_is_said() -> None:
    run = read(flags="CUDA_LAUNCH_BLOCKING=1", family="gpt (ALiBi not stated)", params_b="0.0688", ffn="4096")
    assert [caveat.split(";")[0] for caveat in run.caveats] == [
        "kernels were launched one at a time (CUDA_LAUNCH_BLOCKING=1)",
        "ALiBi is not stated",
    ]


def test_a_bias_that_the_code_has_is_not_neglected() -> None:
    code = dataclasses.replace(CODE, further=("alibi",))
    assert read(code, family="gpt (ALiBi not stated)", params_b="0.0688", ffn="4096").caveats == ()


@pytest.mark.parametrize(
    ("split", "layers", "stages"),
    [("even", 8, [4, 4]), ("last takes the rest", 7, [4, 3]), ("even with ends", 6, [3, 3])],
)
def test_layers_of_stages(split: str, layers: int, stages: list[int]) -> None:
    run = read()
    run = dataclasses.replace(
        run, code=dataclasses.replace(CODE, split=split), shape=dataclasses.replace(run.shape, layers=layers)
    )
    assert layers_of_stages(run) == stages


def test_ends_count_as_layers_of_the_first_and_the_last_stage() -> None:
    run = read()
    code, shape = dataclasses.replace(CODE, split="even with ends"), dataclasses.replace(run.shape, layers=94)
    run = dataclasses.replace(run, code=code, shape=shape, pp=8, vpp=4)
    assert layers_of_stages(run) == [11, 12, 12, 12, 12, 12, 12, 11]


def test_a_stage_without_a_layer_is_refused() -> None:
    run = read()
    code = dataclasses.replace(CODE, split="last takes the rest")
    with pytest.raises(RefusalError, match="4 layers in 3 stages"):
        layers_of_stages(dataclasses.replace(run, code=code, pp=3))


def test_parameters_of_sizes() -> None:
    shape = read().shape
    layer = 4 * 1024 * 1024 + 3 * 1024 * 4096
    assert parameters(shape) == (4 * layer + 17920 * 1024, 4 * layer + 2 * 17920 * 1024)


def test_the_table_of_code_that_ships_is_read() -> None:
    codes = read_code()
    assert {source for source, *_ in codes} == {"P04", "P05", "P12", "P14", "P18"}


WORDS = itertools.product(["attention", "overlap", "reduce", "sends", "split"], ["perhaps", ""])


@pytest.mark.parametrize(("column", "word"), [*WORDS, ("further", "perhaps")])
def test_an_unknown_word_of_code_is_refused(column: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_text(TABLE.read_text())
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[0][column] = word
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ValueError, match=f"row 2: {column} {word!r}: expected"):
        read_code(path)


def test_code_without_a_source_is_refused(tmp_path: Path) -> None:
    header, row = TABLE.read_text().splitlines()[:2]
    path = tmp_path / "code.csv"
    path.write_text(f'{header}\n{row[: row.index(chr(34))]}""\n')
    with pytest.raises(ValueError, match="row 2: no source"):
        read_code(path)
