"""A made-up machine on which sharding pays, for the scripts beside this file."""

import itertools

from tpplan.core.mesh import GroupShape
from tpplan.machine.profile import HardwareProfile
from tpplan.machine.tables import Collective, bottleneck_traffic

#: a made-up machine on which sharding pays however small the model: slow kernels, links that cost next to nothing
FLOP_PER_S, BYTES_PER_S, LINK_BYTES_PER_S, LATENCY_S = 1e9, 1e9, 1e10, 1e-9
MEMORY_BYTES = 2**50
SIZES = (1, 2**20)  # straight lines in logarithms between them are exact
GPUS_PER_NODE = 8


def machine(
    *,
    flop_per_s: float = FLOP_PER_S,
    bytes_per_s: float = BYTES_PER_S,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
    latency_s: float = LATENCY_S,
    device_type: str = "cuda",
) -> HardwareProfile:
    """The made-up machine, one node of it; its rates may be others."""
    own: dict[str, object] = {"sources": ["made-up"]}
    shapes = list(itertools.product(SIZES, repeat=3))
    matmul = {"batch": [1], "m": SIZES, "n": SIZES, "k": SIZES, "relative_error": 0.0, **own}
    matmul |= {"time_s": [2 * m * n * k / flop_per_s for m, n, k in shapes], "extrapolation_relative_error": 0.0}
    rates = {"forward_flop_per_s": flop_per_s, "backward_flop_per_s": flop_per_s, "relative_error": 0.0, **own}
    num_bytes = [2**exponent for exponent in range(10, 40)]

    def collective(kind: Collective, ranks: int) -> dict[str, object]:
        traffic = bottleneck_traffic(kind, GroupShape(ranks=ranks, ranks_per_node=ranks)) / link_bytes_per_s
        times = {"latency_s": latency_s, "bytes": num_bytes, "time_s": [latency_s + traffic * n for n in num_bytes]}
        return {"kind": kind, "ranks": ranks, "ranks_per_node": ranks, "relative_error": [0.0] * len(num_bytes)} | {
            **times,
            **own,
        }

    data = {
        "schema_version": 1,
        "name": "eager-to-shard",
        "device": "made up, as capable as an H100",  # code asks for the compute capability
        "device_type": device_type,
        "gpus_per_node": GPUS_PER_NODE,
        "notes": [],
        "sources": [{"id": "made-up", "licence": "none", "source": "scripts/evidence/made_up_machine.py"}],
        "memory": {"memory_bytes": MEMORY_BYTES, "reserved_bytes": 0, **own},
        "bandwidth": {"hbm_bytes_per_s": bytes_per_s, "relative_error": 0.0, **own},
        "launch": {"launch_s": latency_s, "relative_error": 0.0, **own},
        "matmuls": [{"dtype": dtype, **matmul} for dtype in ("bfloat16", "float16", "float32")],
        "attention_rates": [{"dtype": dtype, **rates} for dtype in ("bfloat16", "float16", "float32")],
        "group_extrapolation": {"in_node_relative_error": 0.0, "across_nodes_relative_error": 0.0},
        "collectives": [collective(kind, ranks) for kind in Collective for ranks in (2, 4, GPUS_PER_NODE)],
    }
    return HardwareProfile.from_dict(data, origin="eager-to-shard")
