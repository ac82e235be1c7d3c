"""What every practitioner knows, found again by the planner without being told."""

import pytest
from examples import eager_to_shard, example, machine, solve_example

from tpplan.core.errors import InfeasibleError
from tpplan.core.layout import P, R, S, copied
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan


def wide_llama(num_layers: int = 2):
    llama = example("llama")
    return lambda: llama.Llama(
        llama.Config(num_layers=num_layers, model_dim=256, hidden_dim=768, num_heads=8, num_kv_heads=4, vocab_size=512)
    )


def placements(plan: Plan) -> dict[str, str]:
    return {name: str(parameter.placement) for name, parameter in plan.parameters.items()}


def test_planner_rediscovers_megatron_mlp() -> None:
    """Few rows and wide weights: columns, then rows, and one sum after each pair."""
    plan = solve_example("mlp", eager_to_shard(), gpus=4, tp=4, global_batch=4, micro_batch=4)
    found = placements(plan)
    assert found["layers.*.up_proj.weight"] == str(S(0))
    assert found["layers.*.up_proj.bias"] == str(S(0))
    assert found["layers.*.down_proj.weight"] == str(S(1))
    # The row-parallel bias is one summand of the partial output, not added by every rank.
    assert plan.parameters["layers.*.down_proj.bias"].reads == {"layers.*.down_proj": P}
    crossing = plan.boundary_plans()["layers.1.down_proj"].outputs["output"]
    assert crossing.conversion.source == P
    assert crossing.dtype == "float32"


def test_planner_rediscovers_megatron_attention() -> None:
    plan = solve_example(
        "llama", eager_to_shard(), gpus=4, tp=4, builder=wide_llama(), global_batch=1, micro_batch=1, seq_len=64
    )
    found = placements(plan)
    for name in (
        "attention.q_proj",
        "attention.k_proj",
        "attention.v_proj",
        "feed_forward.gate_proj",
        "feed_forward.up_proj",
    ):
        assert found[f"layers.*.{name}.weight"] == str(S(0)), name
    for name in ("attention.o_proj", "feed_forward.down_proj"):
        assert found[f"layers.*.{name}.weight"] == str(S(1)), name


def test_planner_shares_the_heads_of_keys_and_values_among_ranks() -> None:
    """Layers as wide as Llama 3 8B's, 32 heads of queries on 16 ranks: the 8 of keys and values are on two each."""
    llama = example("llama")
    sizes = {"model_dim": 4096, "hidden_dim": 14336, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 4096}
    plan = solve_example(
        "llama",
        machine(gpus_per_node=16),
        gpus=16,
        tp=16,
        builder=lambda: llama.Llama(llama.Config(num_layers=2, max_seq_len=8192, **sizes)),
        global_batch=1,
        micro_batch=1,
        seq_len=4096,
    )
    found = {name: plan.parameters[f"layers.*.attention.{name}_proj.weight"] for name in "qkvo"}
    assert {name: str(parameter.placement) for name, parameter in found.items()} == {
        "q": "S(0)", "k": "R", "v": "R", "o": "S(1)",
    }  # fmt: skip
    for name in "kv":
        assert found[name].reads == {f"layers.*.attention.{name}_proj": copied(0, 8)}
    # Once per step, beside the norms' and whole: no rank knows what its neighbour's queries have added.
    reduced = sum(c.num_bytes * c.count for c in plan.collectives if c.axis == "tp" and c.during == "step")
    keys_and_values, norms = 2 * 2 * (8 * 128) * 4096, (2 * 2 + 1) * 4096
    assert reduced == 4 * (keys_and_values + norms)


def test_planner_shards_the_vocabulary_of_the_head() -> None:
    """The loss runs on sharded logits: nothing of size tokens x vocabulary is ever gathered."""
    plan = solve_example(
        "llama", eager_to_shard(), gpus=4, tp=4, builder=wide_llama(), global_batch=1, micro_batch=1, seq_len=64
    )
    assert placements(plan)["lm_head.weight"] == str(S(0))
    assert plan.outputs == {"output": S(2)}
    logits_bytes = 64 * 512 * 4
    gathered = [c for c in plan.collectives if c.kind == "all_gather" and c.num_bytes >= logits_bytes]
    assert not gathered


def residual_is_sharded(plan: Plan) -> bool:
    """The stream between the blocks runs on slices of the sequence: some conversion gathers or scatters dim 1."""
    return any(
        S(1) in (crossing.conversion.source, crossing.conversion.target)
        for boundary in plan.boundary_plans().values()
        for crossing in (*boundary.inputs.values(), *boundary.outputs.values())
    )


def test_planner_turns_to_sequence_parallelism_when_activations_bind() -> None:
    """Where a collective's latency is what costs, one all-reduce beats a gather and a scatter, until memory binds."""
    profile = machine(flop_per_s=1e11, hbm_bytes_per_s=1e13, launch_s=1e-9, intra_bytes_per_s=1e9, latency_s=1e-3)
    options = {"gpus": 4, "tp": 4, "builder": wide_llama(6), "global_batch": 1, "micro_batch": 1, "seq_len": 512}
    ample = solve_example("llama", profile, **options)
    assert not residual_is_sharded(ample)
    limit = 0.9 * ample.predicted.peak_memory_bytes
    tight = solve_example("llama", profile, memory_limit_bytes=limit, **options)
    assert residual_is_sharded(tight)
    assert tight.predicted.peak_memory_bytes < ample.predicted.peak_memory_bytes
    assert tight.predicted.step_time_s >= ample.predicted.step_time_s


def test_planner_replicates_a_model_that_fits_where_the_network_is_slow() -> None:
    """Pure data parallelism moves each gradient once a step; sharding would move parameters as well. With less to
    compute, all GPUs would rather do all of it, each for itself."""
    profile = machine(inter_bytes_per_s=1e8, intra_bytes_per_s=1e8, latency_s=1e-4)
    plan = solve_example("llama", profile, gpus=8, gpus_per_node=1, global_batch=256, micro_batch=4)
    assert plan.mesh_degrees.replicate == 8
    assert {c.kind for c in plan.collectives} == {"all_reduce"}


def test_planner_shards_with_fsdp_when_memory_binds() -> None:
    profile = machine(inter_bytes_per_s=1e8, intra_bytes_per_s=1e8, latency_s=1e-4)
    options = {"gpus": 8, "gpus_per_node": 1, "tp": 1, "global_batch": 32, "micro_batch": 4, "builder": wide_llama(4)}
    ample = solve_example("llama", profile, **options)
    assert ample.mesh_degrees.replicate == 8
    limit = ample.predicted.peak_memory_bytes - 0.5 * ample.predicted.memory_bytes["optimizer states"]
    plan = solve_example("llama", profile, memory_limit_bytes=limit, **options)
    assert plan.mesh_degrees.shard > 1
    assert plan.mesh_degrees.tp == 1
    assert plan.predicted.peak_memory_bytes <= limit
    assert {"all_gather", "reduce_scatter"} <= {c.kind for c in plan.collectives}


def test_planner_keeps_tp_inside_the_node() -> None:
    """Two sequences for sixteen GPUs: eight must share one, and they do so where the links are fast."""
    profile = machine(flop_per_s=1e11, launch_s=1e-9, intra_bytes_per_s=1e11, inter_bytes_per_s=1e9, latency_s=1e-7)
    plan = solve_example(
        "llama", profile, gpus=16, gpus_per_node=8, global_batch=2, micro_batch=1, builder=wide_llama(), seq_len=128
    )
    assert plan.mesh_degrees.tp == 8
    assert plan.mesh.group("tp", 8).nodes == 1  # type: ignore[arg-type]
    # Four heads of keys and values are on two ranks each, or attention stays whole; the MLP must not.
    assert placements(plan)["layers.*.feed_forward.up_proj.weight"] != str(R)


@pytest.mark.parametrize("degree", [2, 4])
def test_pinned_degrees_hold(degree: int) -> None:
    plan = solve_example("mlp", eager_to_shard(), gpus=4, tp=degree, fsdp=4 // degree)
    assert (plan.mesh_degrees.tp, plan.mesh_degrees.shard, plan.mesh_degrees.replicate) == (degree, 4 // degree, 1)


def test_planner_turns_to_ulysses_where_sequences_are_long_and_weights_small() -> None:
    """Every layer runs on slices of the sequence, with whole weights, but attention: an all-to-all before and after it
    exchanges slices of the sequence for heads, and moves a fraction of what Megatron's gathers move."""
    llama = example("llama")
    config = llama.Config(
        num_layers=2, model_dim=64, hidden_dim=128, num_heads=4, num_kv_heads=4, vocab_size=256, max_seq_len=2048
    )
    options = {"gpus": 4, "tp": 4, "global_batch": 1, "micro_batch": 1}
    profile = machine(
        flop_per_s=1e10, hbm_bytes_per_s=1e13, launch_s=1e-9, intra_bytes_per_s=1e9, latency_s=1e-9, gpus_per_node=4
    )
    plan = solve_example("llama", profile, builder=lambda: llama.Llama(config), seq_len=2048, **options)
    found = placements(plan)
    layers = {name: placement for name, placement in found.items() if name.startswith("layers.*")}
    assert set(layers.values()) == {str(R)}, layers
    boundaries = plan.boundary_plans()
    for name in "qkv":
        crossing = boundaries[f"layers.1.attention.{name}_proj"].outputs["output"].conversion
        assert (crossing.source, crossing.target) == (S(1), S(2)), name
    crossing = next(iter(boundaries["layers.1.attention.o_proj"].inputs.values())).conversion
    assert (crossing.source, crossing.target) == (S(2), S(1))
    exchanged = [c for c in plan.collectives if c.kind == "all_to_all" and c.during == "forward"]
    assert sum(c.count for c in exchanged) == 4 * config.num_layers
    # Few tokens and wide weights: the same model's layers are split instead.
    wide = wide_llama()
    short = solve_example("llama", profile, builder=wide, seq_len=64, **options)
    assert {c.kind for c in short.collectives}.isdisjoint({"all_to_all"})


def treatments_of(plan: Plan) -> set[str]:
    """What is done to some layer that takes time and saves memory."""
    found = {str(mode) for mode in plan.recomputed_modules().values()}
    return found | ({"resharded"} if any(plan.resharded_units().values()) else set())


def first_seen(profile: HardwareProfile) -> list[str]:
    """Treatments in the order in which they come as the limit falls from ample to the least that anything fits in."""
    options = {"gpus": 2, "gpus_per_node": 2, "tp": 1, "fsdp": 2, "builder": wide_llama(4), "seq_len": 128}
    free = {"recompute": None, "reshard_after_forward": None, "global_batch": 8, "micro_batch": 4}
    ample = solve_example("llama", profile, **options, **free)
    assert not treatments_of(ample)
    with pytest.raises(InfeasibleError) as caught:
        solve_example("llama", profile, memory_limit_bytes=1.0, **options, **free)
    least, most = caught.value.needed_bytes, ample.predicted.peak_memory_bytes
    assert least < most
    order: list[str] = []
    seconds = [ample.predicted.step_time_s]
    for tenth in range(10, -1, -1):
        limit = least + (most - least) * tenth / 10 + 1
        plan = solve_example("llama", profile, memory_limit_bytes=limit, **options, **free)
        order += sorted(treatments_of(plan) - set(order))
        seconds.append(plan.predicted.step_time_s)
    assert seconds == sorted(seconds), "a lower limit never makes a step faster"
    return order


@pytest.mark.long
def test_what_saves_memory_comes_in_order_of_price() -> None:
    """Where links are fast FSDP's second gather is cheaper than any kernel; where they are slow it comes last. What is
    light to do again comes before products."""
    kernels = {"flop_per_s": 1e10, "hbm_bytes_per_s": 1e10, "launch_s": 1e-9, "latency_s": 1e-9}
    fast = first_seen(machine(**kernels, intra_bytes_per_s=1e12))
    assert fast[0] == "resharded"
    assert fast.index("selective") < fast.index("full")
    slow = first_seen(machine(**kernels, intra_bytes_per_s=1e7))
    assert slow[-1] == "resharded"
    assert slow.index("selective") < slow.index("full")
