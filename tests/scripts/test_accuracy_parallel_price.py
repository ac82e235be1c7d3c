"""scripts/evidence/accuracy.py parallel: prices of invented runs against whole models and closed forms; the report."""

import csv
import dataclasses
import itertools
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "evidence"))
sys.path.append(str(Path(__file__).resolve().parent))

import accuracy
from accuracy_parts.parallel_models import Kind
from accuracy_parts.parallel_price import (
    ParallelPrice,
    Ranks,
    different_share,
    pieces,
    price_parallel,
    small,
)
from accuracy_parts.parallel_read import ParallelRun, read_parallel
from accuracy_parts.parallel_report import Found, missed_bars, refusals, regrets, spread
from test_accuracy_parallel import CODE, EXPERTS, ROW, read

from tpplan.core.mesh import GroupShape
from tpplan.machine.profile import Collective, load_profile
from tpplan.plan.parts import (
    COMPUTE,
    DATA_PARALLEL,
    EXPERT_PARALLEL,
    OPTIMIZER,
    RECOMPUTATION,
    TENSOR_PARALLEL,
)
from tpplan.plan.plan import Recompute

SENDS = "sends between stages"


def whole(run: ParallelRun) -> float:
    """Seconds of a micro-batch of the run's whole model, priced at once."""
    ranks = Ranks(machine=run.machine, gpus=run.tp, gpus_per_node=8, tp=run.tp, sequence_parallel=run.sequence_parallel)
    return small(
        run.shape, Kind.GPT, ranks, run.micro_batch, run.recompute, layers=run.shape.layers, has_head=True
    ).seconds


@pytest.mark.parametrize("recompute", ["none", "full", "selective: norm, act"])
@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_are_those_of_the_whole_model(recompute: str, tp: int) -> None:
    run = dataclasses.replace(read(recompute=recompute), gpus=tp, dp=1, tp=tp, pp=1, sequence_parallel=tp > 1)
    price = price_parallel(run).time_s
    once = price.get(OPTIMIZER, 0.0) + price.get(DATA_PARALLEL, 0.0)
    assert (sum(price.values()) - once) / run.micro_batches == pytest.approx(whole(run), rel=1e-6)


def test_full_recomputation_runs_the_whole_forward_again() -> None:
    full = dataclasses.replace(read(), gpus=2, dp=1, pp=1)
    plain = dataclasses.replace(full, recompute=Recompute.NONE)
    layer, before = pieces(full).layer, pieces(plain).layer
    assert layer.seconds == pytest.approx(before.seconds + before.forward_s)
    assert layer.time_s[RECOMPUTATION] > 0
    assert layer.time_s[TENSOR_PARALLEL] > before.time_s[TENSOR_PARALLEL] > 0


def test_what_is_outside_of_layers_is_not_recomputed() -> None:
    run = dataclasses.replace(read(), gpus=2, dp=1, pp=1)
    own, plain = pieces(run), pieces(dataclasses.replace(run, recompute=Recompute.NONE))
    assert own.head.time_s[RECOMPUTATION] == pytest.approx(0, abs=1e-12)
    assert own.embedding.time_s[RECOMPUTATION] == pytest.approx(0, abs=1e-12)
    assert own.head.seconds == pytest.approx(plain.head.seconds)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_layer_has_megatrons_collectives(family: str) -> None:
    params = "0.104" if family == "llama" else "0.0872"
    run = dataclasses.replace(read(family=family, params_b=params, recompute="none"), gpus=2, dp=1, pp=1)
    num_bytes = 2.0 * run.micro_batch * run.shape.seq_len * run.shape.hidden
    group = GroupShape(ranks=2, ranks_per_node=2)
    reduced = load_profile(run.machine).collective(Collective.ALL_REDUCE, group, num_bytes).seconds
    # attention and feed-forward, both ways; where the embedding is summed may differ by a launch between two models
    assert pieces(run).layer.time_s[TENSOR_PARALLEL] == pytest.approx(4 * reduced, rel=0.05)
    again = dataclasses.replace(run, recompute=Recompute.FULL)
    assert pieces(again).layer.time_s[TENSOR_PARALLEL] == pytest.approx(6 * reduced, rel=0.05)


def test_stages_share_layers_and_wait_for_each_other() -> None:
    run = dataclasses.replace(read(), dp=1, gpus=4, micro_batches=8)
    own = pieces(run)
    first, last = (2 * own.layer.seconds + end.seconds for end in (own.embedding, own.head))
    price = price_parallel(run).time_s
    beside = price["bubble"] + price[SENDS] + price.get(OPTIMIZER, 0.0) + price.get(DATA_PARALLEL, 0.0)
    assert price["bubble"] == pytest.approx(min(first, last))
    assert sum(price.values()) - beside == pytest.approx(run.micro_batches * max(first, last))


def test_chunks_shorten_the_bubble_and_multiply_sends() -> None:
    one = dataclasses.replace(read(), micro_batches=8)
    two = dataclasses.replace(one, vpp=2)
    plain, chunked = price_parallel(one).time_s, price_parallel(two).time_s
    assert chunked["bubble"] == pytest.approx(plain["bubble"] / 2)
    # M v c + c seconds of one link
    assert chunked[SENDS] / plain[SENDS] == pytest.approx((2 * 8 + 1) / (8 + 1))
    hidden = dataclasses.replace(two, code=dataclasses.replace(CODE, overlaps=True))
    assert price_parallel(hidden).time_s[SENDS] == pytest.approx(2 * plain[SENDS] / (8 + 1))


def test_zero_1_scatters_gradients_and_gathers_parameters_once_a_step() -> None:
    run = dataclasses.replace(read(), tp=1, pp=1, gpus=4, gpus_per_node=4)
    profile, shape = load_profile(run.machine), run.shape
    norms = 2 * 1024
    number = 4 * (4 * 1024**2 + 3 * 1024 * 4096 + norms) + 2 * shape.vocab * 1024
    group = GroupShape(ranks=4, ranks_per_node=4)
    scattered = profile.collective(Collective.REDUCE_SCATTER, group, 4.0 * number).seconds
    gathered = profile.collective(Collective.ALL_GATHER, group, 2.0 * number).seconds
    assert price_parallel(run).time_s[DATA_PARALLEL] == pytest.approx(scattered + gathered)
    replicas = dataclasses.replace(run, zero=0)
    reduced = profile.collective(Collective.ALL_REDUCE, group, 4.0 * number).seconds
    assert price_parallel(replicas).time_s[DATA_PARALLEL] == pytest.approx(reduced)
    assert price_parallel(replicas).time_s[OPTIMIZER] == pytest.approx(4 * price_parallel(run).time_s[OPTIMIZER])


def test_zero_3_moves_each_layer_in_each_micro_batch() -> None:
    run = dataclasses.replace(read(), tp=1, pp=1, gpus=4, gpus_per_node=4, zero=3, micro_batches=2)
    more = dataclasses.replace(run, micro_batches=6)
    once, thrice = (price_parallel(own).time_s[DATA_PARALLEL] for own in (run, more))
    assert thrice == pytest.approx(3 * once)
    hidden = dataclasses.replace(run, code=dataclasses.replace(CODE, overlaps=True))
    assert price_parallel(hidden).time_s[DATA_PARALLEL] < once


def test_a_slower_network_slows_what_crosses_nodes_alone() -> None:
    run = dataclasses.replace(read(), micro_batches=8)  # a stage fills a node
    port = load_profile(run.machine)
    bytes_sent = 2.0**32
    pair = GroupShape(ranks=2, ranks_per_node=1)
    of_node = 8 * bytes_sent / 2 / port.collective(Collective.ALL_GATHER, pair, bytes_sent).seconds
    slow = dataclasses.replace(run, code=dataclasses.replace(CODE, node_bytes_per_s=of_node / 4))
    before, after = price_parallel(run).time_s, price_parallel(slow).time_s
    assert after[SENDS] == pytest.approx(4 * before[SENDS])
    assert after[TENSOR_PARALLEL] == before[TENSOR_PARALLEL]
    assert after[DATA_PARALLEL] == before[DATA_PARALLEL]


def test_experts_exchange_rows_and_share_their_parameters() -> None:
    run = dataclasses.replace(read(**EXPERTS), micro_batches=8)
    own, all_experts = pieces(run), pieces(dataclasses.replace(run, ep=8))
    assert run.shape.experts == 8
    assert own.layer.time_s[EXPERT_PARALLEL] > 0
    assert own.experts == 8 * 3 * 1024 * 4096 / 4
    assert all_experts.experts == own.experts / 2
    assert price_parallel(run).time_s[COMPUTE] > 0


def test_rows_that_are_sent_once_take_the_share_of_different_ranks() -> None:
    every, once = (pieces(read(**EXPERTS, flags=flags)).layer for flags in ("dispatcher=alltoall", "dispatcher=deepep"))
    share = once.time_s[EXPERT_PARALLEL] / every.time_s[EXPERT_PARALLEL]
    assert share == pytest.approx(different_share(4, 2))


@pytest.mark.parametrize(("places", "draws"), [(1, 3), (2, 2), (3, 4), (4, 2)])
def test_different_places_by_counting_all_draws(places: int, draws: int) -> None:
    every = list(itertools.product(range(places), repeat=draws))
    mean = sum(len(set(drawn)) for drawn in every) / len(every)
    assert different_share(places, draws) * draws == pytest.approx(mean)


def found(row_id: str, measured_s: float, predicted_s: float, plan_group: str = "G", **changes: str) -> Found:
    run = dataclasses.replace(read(**changes), row_id=row_id, measured_s=measured_s, plan_group=plan_group)
    return Found(run=run, price=ParallelPrice(time_s={COMPUTE: predicted_s}))


def test_errors_are_of_seconds() -> None:
    runs = [found("1", 1.0, 0.9), found("2", 1.0, 1.3), found("3", 2.0, 2.2)]
    assert [one.error for one in runs] == pytest.approx([-0.1, 0.3, 0.1])
    median, high = spread(runs)
    assert median == pytest.approx(0.1)
    assert high == pytest.approx(0.1 + 0.8 * 0.2)


def test_the_regret_of_a_group_is_that_of_its_predicted_best() -> None:
    runs = [found("1", 1.0, 2.0, "G"), found("2", 1.5, 1.0, "G"), found("3", 9.0, 9.0, "H"), found("4", 9.0, 1.0, "")]
    assert regrets(runs) == pytest.approx({"G": 0.5})


def test_runs_of_other_batches_are_compared_by_token() -> None:
    half = {"global_batch": "32", "step_time_s": "0.5"}
    runs = [found("1", 1.0, 1.0), found("2", 0.6, 0.4, **half)]
    assert regrets(runs) == pytest.approx({"G": 0.2})


def test_of_equal_predictions_the_slowest_counts() -> None:
    assert regrets([found("1", 1.0, 1.0), found("2", 1.25, 1.0)]) == pytest.approx({"G": 0.25})


def test_missed_bars_are_named() -> None:
    runs = [found("1", 1.0, 1.2), found("2", 1.5, 1.1)]
    assert missed_bars(runs) == [
        "dense pp: median 23.3%, at most 10%",
        "dense pp: 90th percentile 26.0%, at most 25%",
        "order: 0% of plan groups, at least 80%",
    ]
    assert missed_bars([found("1", 1.0, 1.0), found("2", 1.5, 1.5)]) == []


def test_refusals_are_counted_by_reason() -> None:
    rows = [ROW | {"row_id": "a", "heads": ""}, ROW | {"row_id": "b", "heads": ""}, ROW | {"row_id": "c", "cp": "2"}]
    runs, refused = read_parallel(rows, [("S1", "*", "*", CODE)])
    assert not runs
    assert list(refusals(refused)) == [
        "refused: 3 rows",
        "     2  no heads  (a)",
        "     1  context parallelism  (c: context parallelism: cp 2)",
    ]


CODE_TABLE = """\
source_id,models,global_batches,attention,overlap,reduce,sends,sequence_parallel,split,window,vocab_multiple,recompute,zero,\
node_bytes_per_s,vpp,source
S1,*,*,flash,exposed,fp32,whole,stated,even,0,128,stated,stated,0,stated,here
"""


def run_script(tmp_path: Path, rows: list[dict[str, str]], *extra: str) -> int:
    data, code = tmp_path / "runs.csv", tmp_path / "code.csv"
    code.write_text(CODE_TABLE)
    with data.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    sys.argv = ["accuracy.py", "parallel", "--data", str(data), "--code", str(code), *extra]
    return accuracy.main()


def test_the_script_prints_refusals_rows_and_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    measured = price_parallel(read()).step_s
    right = ROW | {"row_id": "right", "step_time_s": f"{measured:.6g}", "tokens_per_s_per_gpu": ""}
    late = right | {"row_id": "late", "step_time_s": f"{2 * measured:.6g}", "plan_group": ""}
    rows = [right, late, ROW | {"row_id": "refused", "cp": "2"}]
    assert run_script(tmp_path, rows, "--out", str(tmp_path / "out.csv")) == 1
    printed = capsys.readouterr().out
    assert "     1  context parallelism  (refused: context parallelism: cp 2)" in printed
    assert "missed: dense pp: median 25.0%, at most 10%" in printed
    written = list(csv.DictReader((tmp_path / "out.csv").open(newline="")))
    assert [row["row_id"] for row in written] == ["right", "late"]
    assert [float(row["error"]) for row in written] == pytest.approx([0, -0.5], abs=1e-4)
    assert run_script(tmp_path, rows, "--rows", "right") == 0
    assert "all bars are met" in capsys.readouterr().out
    assert run_script(tmp_path, rows, "--only", "MoE") == 2
    assert run_script(tmp_path, [{"row_id": "1"}]) == 2
    assert "no column 'trust'" in capsys.readouterr().err
