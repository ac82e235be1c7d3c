"""Machines made to measure: profiles with real tables, whose rates and links a test sets freely."""

from tpplan.core.mesh import GroupShape
from tpplan.machine.tables import Collective, bottleneck_traffic

#: close enough that straight lines in logarithms follow latency + n / bandwidth within 3 %
BYTES = [2**i for i in range(10, 35)]
SIZES = [2**i for i in range(6, 13)]
HEADS, SEQUENCES, DIMS = [4, 16], [512, 1024, 2048], [64, 128]
OWN = {"sources": ["made-up"]}


def synthetic_profile(
    *,
    name: str = "synthetic",
    flop_per_s: float = 4e14,
    hbm_bytes_per_s: float = 2.9e12,
    launch_s: float = 5e-6,
    intra_bytes_per_s: float = 3e11,
    inter_bytes_per_s: float = 4e10,
    latency_s: float = 1e-5,
    memory_bytes: int = 80 * 2**30,
    reserved_bytes: int = 0,
    gpus_per_node: int = 8,
    max_nodes: int = 16,
) -> dict[str, object]:
    """Content of a profile, for HardwareProfile.from_dict.

    A matmul takes launch + flop / rate, attention runs at the same rate (float32 too), and a collective takes
    latency + bottleneck_traffic * n / bandwidth: within a node that of one GPU, across nodes that of one network port
    per GPU. Measured are all divisors of gpus_per_node as ranks per node, on 1, 2, 4, .. max_nodes nodes.
    """
    own: dict[str, object] = {"sources": ["made-up"]}
    shapes = [(m, n, k) for m in SIZES for n in SIZES for k in SIZES]
    times = [launch_s + 2 * m * n * k / flop_per_s for m, n, k in shapes]
    matmul = {"batch": [1], "m": SIZES, "n": SIZES, "k": SIZES, "time_s": times, **own}
    matmul |= {"relative_error": 0.05, "extrapolation_relative_error": 0.1}
    rates = {"forward_flop_per_s": flop_per_s, "backward_flop_per_s": flop_per_s, "relative_error": 0.1, **own}
    dtypes = ("bfloat16", "float16", "float32")

    def collective(kind: Collective, group: GroupShape) -> dict[str, object]:
        bandwidth = inter_bytes_per_s if group.nodes > 1 else intra_bytes_per_s
        traffic = bottleneck_traffic(kind, group)
        return {
            "kind": str(kind),
            "ranks": group.ranks,
            "ranks_per_node": group.ranks_per_node,
            "latency_s": latency_s,
            "bytes": BYTES,
            "time_s": [latency_s + traffic * n / bandwidth for n in BYTES],
            "relative_error": [0.05] * len(BYTES),
            **own,
        }

    per_node = [q for q in range(1, gpus_per_node + 1) if gpus_per_node % q == 0]
    nodes = [2**i for i in range(max_nodes.bit_length()) if 2**i <= max_nodes]
    groups = [GroupShape(ranks=q * count, ranks_per_node=q) for q in per_node for count in nodes if q * count > 1]
    return {
        "schema_version": 1,
        "name": name,
        "device": "made up",
        "device_type": "cuda",
        "gpus_per_node": gpus_per_node,
        "notes": [],
        "sources": [{"id": "made-up", "licence": "none", "source": "tests/profiles.py"}],
        "memory": {"memory_bytes": memory_bytes, "reserved_bytes": reserved_bytes, **own},
        "bandwidth": {"hbm_bytes_per_s": hbm_bytes_per_s, "relative_error": 0.05, **own},
        "launch": {"launch_s": launch_s, "relative_error": 0.1, **own},
        "matmuls": [{"dtype": dtype} | matmul for dtype in dtypes],
        "attention_rates": [{"dtype": dtype} | rates for dtype in dtypes],
        "group_extrapolation": {"in_node_relative_error": 0.2, "across_nodes_relative_error": 0.3},
        "collectives": [collective(kind, group) for kind in Collective for group in groups],
    }


def attention_content(causal: bool, backward: bool, flop_per_s: float) -> dict[str, object]:
    """4 b s^2 d FLOP, half where causal, 2.5 times as many backward, at a rate."""
    points = [(b, n, d) for b in HEADS for n in SEQUENCES for d in DIMS]
    factor = 4.0 * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    return {
        "dtype": "bfloat16",
        "causal": causal,
        "backward": backward,
        "batch_heads": HEADS,
        "sequence": SEQUENCES,
        "head_dim": DIMS,
        "time_s": [5e-6 + factor * b * n**2 * d / flop_per_s for b, n, d in points],
        "relative_error": 0.05,
        "extrapolation_relative_error": 0.1,
        "spread": {"relative": [0.01] * 11 + [0.3], "noisy_above": 0.2, "noisy": [11]},
        **OWN,
    }


def misaligned(count: int, flop_per_s: float) -> dict[str, object]:
    """bfloat16 matmuls on rows that begin at multiples of so many bytes, of a machine with 4e14 FLOP/s."""
    rates = {"flop_per_s": flop_per_s, "aligned_flop_per_s": 4e14, "relative_error": 0.25}
    return {"dtype": "bfloat16", "bytes": count, **rates, **OWN}


def batched(inner: tuple[float, ...] = (1e14, 2e14, 4e14)) -> dict[str, object]:
    """bfloat16 matmuls in batches, with sizes of 128, 256 and 2048 beside those of 2048, of the same machine."""
    rates = {"inner_flop_per_s": list(inner), "outer_flop_per_s": [1.5e14, 2.5e14, 4e14], "relative_error": 0.1}
    return {"dtype": "bfloat16", "sizes": [128, 256, 2048], **rates, **OWN}


def full_profile() -> dict[str, object]:
    """A profile with all that one may hold."""
    content = synthetic_profile(hbm_bytes_per_s=2e12, launch_s=5e-6)
    cached = {"bytes": [2**14, 2**20, 2**30], "time_s": [6e-6, 7e-6, 5e-4], "relative_error": [0.2, 0.1, 0.05], **OWN}
    return content | {
        "software": {"torch": "2.13.0", "cuda": "13.0", "nccl": "2.28.3", "driver": "580.65", "python": "3.12.3"},
        "date": "2026-03-01",
        "attention_tables": [attention_content(True, backward, 4e14) for backward in (False, True)],
        "memory_bound_table": cached,
        "misaligned_matmuls": [misaligned(8, 2e14), misaligned(2, 1e14)],
        "batched_matmuls": [batched()],
        "launch": {"launch_s": 5e-6, "issue_s": 8e-6, "relative_error": 0.1, **OWN},
        "overlap": {"matmul_slowdown": 0.15, "collective_slowdown": 0.3, "relative_error": 0.1, **OWN},
        "fitted": [
            {"name": "step_factor", "value": 1.07, "residual": 0.05, "runs": 40, "what": "all that is not priced"}
        ],
    }
