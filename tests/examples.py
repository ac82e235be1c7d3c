"""The example models under scripts/examples, imported by path, and plans for them on made-up machines."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import tpplan
from profiles import synthetic_profile
from tpplan.machine.profile import HardwareProfile
from tpplan.plan.plan import Plan

FOLDER = Path(__file__).resolve().parent.parent / "scripts" / "examples"
NAMES = ("llama", "gpt", "mlp", "vit", "nanogpt")


@functools.cache
def example(name: str) -> ModuleType:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def machine(**settings: Any) -> HardwareProfile:
    """A synthetic profile; see profiles.synthetic_profile for the settings."""
    return HardwareProfile.from_dict(synthetic_profile(**settings), origin="synthetic")


def eager_to_shard(**settings: Any) -> HardwareProfile:
    """A machine on which sharding pays even for tiny models: slow kernels, links that cost next to nothing."""
    rates = {"flop_per_s": 1e9, "hbm_bytes_per_s": 1e9, "launch_s": 1e-9, "intra_bytes_per_s": 1e10, "latency_s": 1e-9}
    return machine(**{**rates, **settings})


def solve_eagerly(
    build: Callable[[], nn.Module], inputs: Callable[..., Any], *, batch: int, seq_len: int, tp: int = 2, **options: Any
) -> Plan:
    """A plan of one micro-batch on tp ranks of a machine on which sharding pays, in float32 unless told."""
    cluster = tpplan.Cluster(gpus=tp, gpus_per_node=tp, profile=eager_to_shard())
    defaults = {"micro_batch": batch, "precision": "fp32"}
    return tpplan.solve(
        build, inputs, cluster=cluster, global_batch=batch, seq_len=seq_len, tp=tp, **{**defaults, **options}
    )


def solve_example(name: str, profile: HardwareProfile, *, gpus: int, builder: Any = None, **options: Any) -> Plan:
    """A plan of an example model, in float32, on all GPUs, ZeRO-3 and without recomputation unless told."""
    module = example(name)
    defaults = {"global_batch": 8, "micro_batch": 4, "seq_len": 32, "precision": "fp32"}
    defaults |= {"recompute": "none", "reshard_after_forward": True, "all_gpus": True}
    gpus_per_node = options.pop("gpus_per_node", gpus)
    return tpplan.solve(
        builder or module.build_model,
        module.example_inputs,
        loss=module.loss,
        unused_outputs=getattr(module, "unused_outputs", ()),
        cluster=tpplan.Cluster(gpus=gpus, gpus_per_node=gpus_per_node, profile=profile),
        **{**defaults, **options},
    )
