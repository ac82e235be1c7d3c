"""Gradients clipped by tpplan.clip_grad_norm_ in one process; on several meshes: tests/experts and tests/stages."""

import pytest
import torch
from torch import nn

import tpplan


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (4,), ())]
    for parameter in found[:2]:  # the last one has no gradient
        parameter.grad = torch.randn_like(parameter)
    return found


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, float("inf")])
def test_plain_gradients_are_clipped_as_by_torch(norm_type: float) -> None:
    own, torchs = parameters(), parameters()
    norm = tpplan.clip_grad_norm_(iter(own), 0.1, norm_type)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(torchs, 0.1, norm_type))
    for one, other in zip(own[:2], torchs[:2], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert own[2].grad is None


def test_a_norm_that_is_not_finite_is_an_error_where_asked_for() -> None:
    found = parameters()
    assert found[0].grad is not None
    found[0].grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of all gradients is inf, and cannot be clipped"):
        tpplan.clip_grad_norm_(found, 0.1, error_if_nonfinite=True)
    assert tpplan.clip_grad_norm_(found, 0.1).item() == float("inf")
