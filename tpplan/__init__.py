"""tpplan: from an unmodified PyTorch model to a sharding plan, and from the plan to a model that trains with it.

    plan = tpplan.solve(build_model, example_inputs, cluster=tpplan.Cluster(...), global_batch=..., seq_len=...)
    plan.dump("plan.json")
    model = tpplan.apply_plan(model, "plan.json")    # in the training script, under torchrun

The stages, in order: trace -> graph -> space (layouts, by rules) -> costs (by profile) -> formulate (a Problem) ->
solvers -> assemble (a Plan), with prove between; and apply. A module imports only from those above it.
Names below are loaded when first used: reading a plan needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tpplan.garbage import rarely_collected

if TYPE_CHECKING:
    from tpplan.apply import apply_plan as apply_plan
    from tpplan.apply import no_sync as no_sync
    from tpplan.batching import BatchShare as BatchShare
    from tpplan.checkpoint import load_checkpoint as load_checkpoint
    from tpplan.checkpoint import save_checkpoint as save_checkpoint
    from tpplan.checkpoint_folder import latest_checkpoint as latest_checkpoint
    from tpplan.data import PlanSampler as PlanSampler
    from tpplan.data import by_step as by_step
    from tpplan.exporters import export as export
    from tpplan.load_weights import init_weights as init_weights
    from tpplan.load_weights import load_safetensors as load_safetensors
    from tpplan.load_weights import load_state_dict as load_state_dict
    from tpplan.losses import cross_entropy as cross_entropy
    from tpplan.mesh import Mesh as Mesh
    from tpplan.options import Cluster as Cluster
    from tpplan.plan import Plan as Plan
    from tpplan.plan import Precision as Precision
    from tpplan.planner import price as price
    from tpplan.planner import solve as solve
    from tpplan.profile import HardwareProfile as HardwareProfile
    from tpplan.profile import load_profile as load_profile
    from tpplan.proof import prove_plan as prove_plan
    from tpplan.reuse import Reuse as Reuse
    from tpplan.style import styles as styles
    from tpplan.trace import forward_inputs as forward_inputs
    from tpplan.verify import verify_plan as verify_plan
    from tpplan.watch import guard as guard
    from tpplan.weighting import loss_weights as loss_weights

_HOME = {
    "BatchShare": "batching",
    "Cluster": "options",
    "HardwareProfile": "profile",
    "Mesh": "mesh",
    "Plan": "plan",
    "PlanSampler": "data",
    "Precision": "plan",
    "Reuse": "reuse",
    "apply_plan": "apply",
    "by_step": "data",
    "cross_entropy": "losses",
    "export": "exporters",
    "forward_inputs": "trace",
    "guard": "watch",
    "init_weights": "load_weights",
    "latest_checkpoint": "checkpoint_folder",
    "load_checkpoint": "checkpoint",
    "load_profile": "profile",
    "load_safetensors": "load_weights",
    "load_state_dict": "load_weights",
    "loss_weights": "weighting",
    "no_sync": "apply",
    "price": "planner",
    "prove_plan": "proof",
    "save_checkpoint": "checkpoint",
    "solve": "planner",
    "styles": "style",
    "verify_plan": "verify",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above, sorted


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tpplan' has no attribute {name!r}")
    with rarely_collected():
        value = getattr(importlib.import_module(f"tpplan.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
