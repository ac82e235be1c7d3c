"""Checks before sharding that all ranks have the same versions of torch and tpplan, the same plan and the same model.

Each rank describes what it has; where two ranks differ, all raise the same error, which names the rank and the
difference. Agreement costs one all-gather of small objects; where models differ, two broadcasts of their descriptions.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tpplan.core.errors import PlanMismatchError, TpplanError
from tpplan.core.files import tpplan_version
from tpplan.core.name_patterns import ROOT

T = TypeVar("T")

#: the most ranks that an error lists
_MOST_LISTED = 16
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The versions on one rank, digests of its plan and model, and why the plan does not fit the model (`problem`; ""
    where it fits)."""

    problem: str
    torch_version: str
    tpplan_version: str
    plan_hash: str
    model: str


def _own_state(model: nn.Module, plan_hash: str, error: TpplanError | None) -> RankState:
    return RankState(
        problem=str(error) if error is not None else "",
        torch_version=str(torch.__version__),
        tpplan_version=tpplan_version(),
        plan_hash=plan_hash,
        model=_digest(description(model)),
    )


def all_ranks(own: T) -> list[T]:
    """The arguments `own` of all ranks of the default process group, by rank; every rank must call this function.
    Without a process group, and on a fake one, this process's argument alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return [own]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def raise_on_all_ranks(error: Exception | None, elsewhere: type[TpplanError]) -> None:
    """Raises where some rank passes an error: on that rank the error itself, on others `elsewhere`, with the number of
    the first such rank. Every rank must call this function."""
    problem = str(error) if isinstance(error, TpplanError) else f"{type(error).__name__}: {error}"
    problems = all_ranks(problem if error is not None else "")
    if error is not None:
        raise error
    for rank, found in enumerate(problems):
        if found:
            raise elsewhere(f"rank {rank}: {found}")


def check_ranks_agree(model: nn.Module, plan_hash: str, error: TpplanError | None) -> None:
    """Raises PlanMismatchError on every rank where two ranks differ, or where the plan does not fit on any rank.

    `error` is why the plan does not fit on this rank, or None; it is raised itself where all ranks have the same one.
    Every rank of the default process group must call this function. A single rank and a fake group exchange nothing.
    """
    everyone = all_ranks(_own_state(model, plan_hash, error))
    remedy = "install the same on every node"
    _check_equal("different versions of torch", [one.torch_version for one in everyone], remedy)
    _check_equal("different versions of tpplan", [one.tpplan_version for one in everyone], remedy)
    if error is not None and len({one.problem for one in everyone}) == 1:
        raise error
    for rank, one in enumerate(everyone):
        if one.problem:
            raise PlanMismatchError(f"rank {rank}: {one.problem}") from error
    _check_equal("different plans", [one.plan_hash for one in everyone], "give every rank the same file")
    if len({one.model for one in everyone}) > 1:
        _explain_models(model, [one.model for one in everyone])


def _check_equal(what: str, found: Sequence[str], remedy: str) -> None:
    if others := [rank for rank, value in enumerate(found) if value != found[0]]:
        raise PlanMismatchError(
            f"the ranks hold {what}: rank 0 has {found[0]}, rank {others[0]} has {found[others[0]]}, and "
            f"{len(others)} of {len(found)} differ from rank 0 (ranks {', '.join(map(str, others[:_MOST_LISTED]))}); "
            f"{remedy}"
        )


def _explain_models(model: nn.Module, digests: Sequence[str]) -> None:
    """Raises the error that names the first difference between rank 0's model and another rank's. All ranks call it."""
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, second = (_description_of(model, rank) for rank in (0, other))
    remedy = f"build the same model on every rank. {_first_difference(first, second, other)}"
    _check_equal("different models", digests, remedy)


def _description_of(model: nn.Module, rank: int) -> tuple[str, ...]:
    held = [description(model) if dist.get_rank() == rank else ()]
    dist.broadcast_object_list(held, src=rank)
    return held[0]


def _first_difference(ours: Sequence[str], theirs: Sequence[str], other: int) -> str:
    for one, two in zip(ours, theirs, strict=False):
        if one != two:
            return f"Rank 0 has {one}, rank {other} {two}"
    rank, longer = (0, ours) if len(ours) > len(theirs) else (other, theirs)
    return f"Rank {rank} alone has {longer[min(len(ours), len(theirs))]}"


def description(model: nn.Module) -> tuple[str, ...]:
    """Returns a line for each module (repr, digest of its forward's code), parameter and buffer (shape, dtype)."""
    lines = []
    for name, module in model.named_modules():
        kind = type(module)
        extra = " ".join(_ADDRESS.sub("", module.extra_repr()).split())
        lines.append(f"{name or ROOT}: {kind.__qualname__}({extra}), code {_code(kind)}")
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        trains = ", trains" if tensor.requires_grad else ""
        lines.append(f"{name}: {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{trains}")
    return tuple(lines)


def _code(kind: type[nn.Module]) -> str:
    """Returns a digest of the bytecode of a class's forward, without line numbers; "none" where it has no bytecode."""
    code = getattr(kind.forward, "__code__", None)
    return hashlib.sha256(code.co_code).hexdigest()[:8] if code is not None else "none"


def _digest(lines: Sequence[str]) -> str:
    return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()
