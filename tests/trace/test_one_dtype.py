"""Ops that meta tensors run on two dtypes and devices do not: real tensors are the oracle."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpplan
from tpplan.core.errors import ModelError
from tpplan.plan.plan import ProofStatus
from tpplan.search.models.user_model import load_model_file
from tpplan.trace.stopped_trace import TraceError
from tpplan.trace.trace import trace

DIM = 4


def places(x: Tensor) -> Tensor:
    return torch.arange(DIM, device=x.device)


#: functions of two [DIM, DIM] tensors
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, y: x @ y,
    "of a vector": lambda x, y: x @ y[0],
    "of batches": lambda x, y: torch.bmm(x[None], y[None]),
    "linear": lambda x, y: F.linear(x, y),
    "its bias": lambda x, y: F.linear(x, x, y[0]),
    "added": lambda x, y: torch.addmm(x, x, y),
    "convolution": lambda x, y: F.conv1d(x[None], y[:, :, None]),
    "transposed": lambda x, y: F.conv_transpose1d(x[None], y[:, :, None]),
    "index_add": lambda x, y: x.index_add(0, places(x), y),
    "index_copy": lambda x, y: x.index_copy(0, places(x), y),
    "index_put": lambda x, y: x.index_put((places(x),), y),
    "sum": lambda x, y: x + y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "joined": lambda x, y: torch.cat((x, y)),
}


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y).float().sum()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtypes", list(itertools.product((torch.float32, torch.bfloat16), repeat=2)))
def test_a_trace_refuses_the_dtypes_that_tensors_refuse(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    module = Function(FUNCTIONS[name])
    inputs = {key: torch.randn(DIM, DIM).to(dtype) for key, dtype in zip("xy", dtypes, strict=True)}
    try:
        module(**inputs)
    except RuntimeError:
        with pytest.raises(TraceError, match="dtype"):
            trace(module, inputs)
    else:
        trace(module, inputs)


MODEL = """
import torch
from torch import nn

class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("turn", torch.eye(8), persistent=False)

    def forward(self, x):
        return self.inner(self.inner(x) @ self.turn.float()).square().mean()

def build_model(): return Turned()
def example_inputs(batch, seq_len): return {"x": torch.zeros(batch, seq_len, 8)}
"""


def solve(path: Path, precision: str) -> tpplan.Plan:
    spec = load_model_file(str(path))
    cluster = tpplan.Cluster(gpus=2, profile="h100-sxm")
    return tpplan.solve(
        spec.build_model, spec.example_inputs, cluster=cluster, global_batch=2, seq_len=4, tp=2, precision=precision
    )


def test_the_error_names_precision_op_line_and_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "turned.py"
    path.write_text(MODEL)
    with pytest.raises(ModelError) as error:
        solve(path, "bf16-mixed")
    for told in ("matmul gets bfloat16 and float32 under --precision bf16-mixed", "turned.py:12", "bf16-autocast"):
        assert told in str(error.value)
    assert solve(path, "bf16-autocast").proof.status is ProofStatus.PROVEN
