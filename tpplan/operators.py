"""The operators of tpplan's own that stand in traced graphs: `torch.ops.tpplan.*`.

boundary  a tensor crosses into or out of a module's forward; a view, so aliasing stays as it was
frame     a tensor enters or leaves the forward of a layer that its siblings may copy; a view
sibling   a layer that is like one already traced: gives tensors like that one's outputs
resize    a planned conversion, in a retrace on local shapes: a tensor of the shape behind it
"""

from typing import Any

import torch
from torch import Tensor

#: outputs of traced layers by name, one table for each trace that is running
running_traces: list[dict[str, list[Tensor]]] = []


def boundary(x: Tensor, module: str, direction: str, path: str) -> Tensor:
    """Marks a crossing."""
    marked: Tensor = torch.ops.tpplan.boundary(x, module, direction, path)
    return marked


def frame(x: Tensor, module: str, side: str) -> Tensor:
    """Marks where a layer's own forward begins ("enter") or ends ("leave")."""
    marked: Tensor = torch.ops.tpplan.frame(x, module, side)
    return marked


def sibling(inputs: list[Tensor], module: str, like: str) -> list[Tensor]:
    """Stands for a whole layer."""
    outputs: list[Tensor] = torch.ops.tpplan.sibling(inputs, module, like)
    return list(outputs)


def resize(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """An empty tensor of other sizes."""
    resized: Tensor = torch.ops.tpplan.resize(x, list(sizes))
    return resized


def _sibling(inputs: list[Tensor], module: str, like: str) -> list[Tensor]:
    return [output.new_empty_strided(output.shape, output.stride()) for output in running_traces[-1][like]]


_LIBRARY: Any = torch.library.Library("tpplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("boundary(Tensor(a) x, str module, str direction, str path) -> Tensor(a)")
_LIBRARY.define("frame(Tensor(a) x, str module, str side) -> Tensor(a)")
_LIBRARY.define("sibling(Tensor[] inputs, str module, str like) -> Tensor[]")
_LIBRARY.define("resize(Tensor x, int[] sizes) -> Tensor")
_LIBRARY.impl("boundary", lambda x, module, direction, path: x.view_as(x), "CompositeImplicitAutograd")
_LIBRARY.impl("frame", lambda x, module, side: x.view_as(x), "CompositeImplicitAutograd")
_LIBRARY.impl("sibling", _sibling, "CompositeExplicitAutograd")
_LIBRARY.impl("resize", lambda x, sizes: x.new_empty(sizes), "CompositeExplicitAutograd")
