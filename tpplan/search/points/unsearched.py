"""Meshes of a cluster that solve leaves out without a bound, and why."""

from collections.abc import Iterator

from tpplan.core.mesh import divisors, tp_degrees
from tpplan.machine.profile import HardwareProfile
from tpplan.search.points.options import Cluster

#: why no plan was searched whose layers FSDP shards over shard and tp together
WITHOUT_UNITS_OVER_TP = "FSDP over shard x tp: the fastest plan without it has no layer that tp replicates"


def unsearched_degrees(cluster: Cluster, profile: HardwareProfile) -> Iterator[str]:
    """Lines on tp degrees that no searched mesh has, where none is pinned."""
    gpus, per_node = cluster.gpus, cluster.gpus_per_node
    if gpus <= per_node:
        return
    missing = profile.unmeasured_across_nodes
    if missing:
        yield f"tp across nodes: profile {profile.name} has no {', '.join(missing)} across nodes"
    searched = tp_degrees(gpus, per_node, across_nodes=True)
    uneven = [degree for degree in divisors(gpus) if degree not in searched]
    if uneven:
        yield f"tp {', '.join(map(str, uneven))}: neither divides a node of {per_node} GPUs nor fills whole ones"


def unsearched_counts(cluster: Cluster) -> Iterator[str]:
    """Lines on smaller numbers of GPUs, and tp degrees on them, that no searched mesh has."""
    gpus, per_node = cluster.gpus, cluster.gpus_per_node
    inside = [n for n in range(1, min(gpus, per_node)) if per_node % n]
    if inside or gpus > per_node > 1:
        yield "fewer GPUs that neither divide a node nor fill whole ones"
    if any(gpus % n for n in range(2 * per_node, gpus, per_node)):
        yield f"on fewer GPUs, tp across nodes of degrees that do not divide {gpus}"
