"""tpplan: from an unmodified PyTorch model to a sharding plan, and from the plan to a model that trains with it.

    plan = tpplan.solve(build_model, example_inputs, cluster=tpplan.Cluster(...), global_batch=..., seq_len=...)
    plan.dump("plan.json")
    model = tpplan.apply_plan(model, "plan.json")    # in the training script, under torchrun

README.md in this folder names the rooms and walks from a model to a plan and to training. The names below are loaded
when first used: reading a plan needs no torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tpplan.core.gc_pause import imported_for_good

if TYPE_CHECKING:
    from tpplan.apply.apply import apply_plan as apply_plan
    from tpplan.apply.apply import no_sync as no_sync
    from tpplan.apply.autocast import autocast_of as autocast_of
    from tpplan.apply.clip_gradients import clip_grad_norm_ as clip_grad_norm_
    from tpplan.apply.collectives.cross_entropy import cross_entropy as cross_entropy
    from tpplan.apply.parallel_style import styles as styles
    from tpplan.core.mesh import Mesh as Mesh
    from tpplan.experts.expert_share import expert_load as expert_load
    from tpplan.exporters import export as export
    from tpplan.machine.profile import HardwareProfile as HardwareProfile
    from tpplan.machine.profile import load_profile as load_profile
    from tpplan.plan.batch_share import BatchShare as BatchShare
    from tpplan.plan.pipeline_plan import PipelinePlan as PipelinePlan
    from tpplan.plan.plan import Plan as Plan
    from tpplan.plan.plan import Precision as Precision
    from tpplan.search.models.trace_cache import Reuse as Reuse
    from tpplan.search.pipelines.any_pipeline import solve_any as solve_any
    from tpplan.search.pipelines.solve_stages import solve_stages as solve_stages
    from tpplan.search.planner import price as price
    from tpplan.search.planner import solve as solve
    from tpplan.search.points.options import Cluster as Cluster
    from tpplan.trace.forward_arguments import forward_inputs as forward_inputs
    from tpplan.train.checkpoint import load_checkpoint as load_checkpoint
    from tpplan.train.checkpoint import save_checkpoint as save_checkpoint
    from tpplan.train.checkpoint import save_checkpoint_async as save_checkpoint_async
    from tpplan.train.checkpoint_folder import latest_checkpoint as latest_checkpoint
    from tpplan.train.guard import guard as guard
    from tpplan.train.load_weights import init_weights as init_weights
    from tpplan.train.load_weights import load_safetensors as load_safetensors
    from tpplan.train.load_weights import load_state_dict as load_state_dict
    from tpplan.train.loss_weights import loss_weights as loss_weights
    from tpplan.train.sampler import PlanSampler as PlanSampler
    from tpplan.train.sampler import by_step as by_step
    from tpplan.train.save_weights import save_safetensors as save_safetensors
    from tpplan.verify.prove_plan import prove_plan as prove_plan
    from tpplan.verify.verify import verify_plan as verify_plan

_HOME = {
    "BatchShare": "plan.batch_share",
    "Cluster": "search.points.options",
    "HardwareProfile": "machine.profile",
    "Mesh": "core.mesh",
    "PipelinePlan": "plan.pipeline_plan",
    "Plan": "plan.plan",
    "PlanSampler": "train.sampler",
    "Precision": "plan.plan",
    "Reuse": "search.models.trace_cache",
    "apply_plan": "apply.apply",
    "autocast_of": "apply.autocast",
    "by_step": "train.sampler",
    "clip_grad_norm_": "apply.clip_gradients",
    "cross_entropy": "apply.collectives.cross_entropy",
    "expert_load": "experts.expert_share",
    "export": "exporters",
    "forward_inputs": "trace.forward_arguments",
    "guard": "train.guard",
    "init_weights": "train.load_weights",
    "latest_checkpoint": "train.checkpoint_folder",
    "load_checkpoint": "train.checkpoint",
    "load_profile": "machine.profile",
    "load_safetensors": "train.load_weights",
    "load_state_dict": "train.load_weights",
    "loss_weights": "train.loss_weights",
    "no_sync": "apply.apply",
    "price": "search.planner",
    "prove_plan": "verify.prove_plan",
    "save_checkpoint": "train.checkpoint",
    "save_checkpoint_async": "train.checkpoint",
    "save_safetensors": "train.save_weights",
    "solve": "search.planner",
    "solve_any": "search.pipelines.any_pipeline",
    "solve_stages": "search.pipelines.solve_stages",
    "styles": "apply.parallel_style",
    "verify_plan": "verify.verify",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above, sorted


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tpplan' has no attribute {name!r}")
    home = f"tpplan.{_HOME[name]}"
    if home not in sys.modules:
        with imported_for_good():
            importlib.import_module(home)
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
