"""Process groups without processes: a fake group of any size, and a mesh seen from one rank without any group."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, untyped
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

# Importing it registers the backend.
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpplan.torch_internals.probes import Probe


@dataclass(frozen=True, slots=True)
class _Group:
    """The part of a process group's interface that tpplan uses, without a group."""

    num_ranks: int
    own_rank: int
    group_name: str = "nobody"

    def size(self) -> int:
        """Number of ranks."""
        return self.num_ranks

    def rank(self) -> int:
        """This process's rank."""
        return self.own_rank


class RankMesh(DeviceMesh):
    """A one-dimensional mesh of num_ranks seen from one rank, without a process group."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        super().__init__("cpu", torch.arange(num_ranks, device="cpu"), _init_backend=False, _rank=rank)
        self._group = _Group(num_ranks, rank)

    def get_group(self, mesh_dim: int | str | None = None) -> _Group:  # type: ignore[override]
        """The stand-in for the mesh's only process group."""
        return self._group


def mesh_of_one() -> DeviceMesh:
    """A mesh of one rank, this process."""
    return RankMesh(1, 0)


def regrouped(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of the ranks of `mesh`, in their order, with other axes; their sizes multiply to its size. Every rank must
    call it."""
    flat: DeviceMesh = mesh._flatten() if mesh.ndim > 1 else mesh
    return flat._unflatten(0, sizes, names)


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Makes this process rank 0 of a default group of `ranks`, whose collectives do nothing. Raises ValueError where
    there is a default group already."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_of_all_axes(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh whose axes have names; every rank of the default group calls this."""
    return mesh._flatten().get_group()


def default_store() -> Store:
    """The store of the default process group. Raises ValueError where there is no default group."""
    return dist.distributed_c10d._get_default_store()


# ---- probes


def _meshes() -> bool:
    mesh = RankMesh(4, 2)
    local = distribute_tensor(torch.arange(8), mesh, [Shard(0)], src_data_rank=None).to_local()
    return (mesh.size(), mesh.get_group().rank()) == (4, 2) and local.tolist() == [4, 5]


def _regrouping() -> bool:
    if dist.is_initialized():  # a rank of a real job, whose peers may not run this probe
        return callable(DeviceMesh._unflatten)
    with fake_group(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        found = regrouped(mesh, (2, 4, 1), ("d", "e", "f"))
        return tuple(found.shape) == (2, 4, 1) and found["e"].get_group().size() == 4


def _fake_groups() -> bool:
    if dist.is_initialized():  # a rank of a real job, which cannot have a second default group
        return True
    with fake_group(8):
        found = torch.ops._c10d_functional.all_gather_into_tensor(torch.zeros(2), 8, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        is_store = isinstance(default_store(), Store)
        is_gathered = tuple(torch.ops._c10d_functional.wait_tensor(found).shape) == (16,)
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("first", "second"))
        return is_gathered and is_store and group_of_all_axes(mesh).size() == 8


PROBES = (
    Probe(
        name="meshes without a process group",
        uses="DeviceMesh(_init_backend=False, _rank=...)",
        needed_for="the proof, which applies a plan as one rank of a mesh without processes",
        works=_meshes,
    ),
    Probe(
        name="meshes with other axes",
        uses="DeviceMesh._flatten, DeviceMesh._unflatten",
        needed_for="FSDP over the shard and tp axes together",
        works=_regrouping,
    ),
    Probe(
        name="fake process groups",
        uses="torch.testing._internal.distributed.fake_pg, distributed_c10d._get_default_store, DeviceMesh._flatten",
        needed_for="`tpplan verify --dry`, `tpplan.guard`, models in stages",
        works=_fake_groups,
    ),
)
