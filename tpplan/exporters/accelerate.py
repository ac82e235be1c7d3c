"""the arguments of accelerate's ParallelismConfig as JSON: the degrees of the mesh

    accelerate.Accelerator(parallelism_config=accelerate.ParallelismConfig(**json.load(open("degrees.json"))))

ParallelismConfig says how many ranks an axis has, not how weights are cut: for a plan with tensor parallelism the model
is loaded with the tp_plan that `--to huggingface` writes, and a plan that this cannot say is refused here, too.
"""

import json

from tpplan.exporters import LaidOut
from tpplan.exporters._own_layers import at_own_layers


def export(laid: LaidOut) -> str:
    """Returns the degrees as JSON. Raises ExportError where no tp_plan says how the plan's tp axis cuts weights."""
    mesh = laid.plan.mesh
    if mesh.tp > 1:
        at_own_layers(laid)
    degrees = {"dp_replicate_size": mesh.replicate, "dp_shard_size": mesh.shard, "tp_size": mesh.tp}
    return json.dumps(degrees, indent=2) + "\n"
