"""relu2 against the square of torch's relu, which it equals bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_fn import relu2
from tests.tolerance import assert_pure_and_close, results, same_bits


def plain(x: Tensor) -> Tensor:
    """ReLUSquaredActivation of Hugging Face."""
    return torch.square(F.relu(x))


def test_numbers_by_hand(backend, device):
    x = torch.tensor([-2.0, 0.0, 3.0, -torch.inf, torch.inf], device=device)
    (y,), (dx,) = results(relu2, (x,), (torch.full_like(x, 0.5),))
    assert y.tolist() == [0.0, 0.0, 9.0, 0.0, torch.inf]
    assert dx.tolist() == [0.0, 0.0, 3.0, 0.0, torch.inf]


def test_nan_stays_nan(backend, device):
    x = torch.tensor([torch.nan, 1.0], device=device)
    (y,), (dx,) = results(relu2, (x,))
    assert y.isnan().tolist() == dx.isnan().tolist() == [True, False]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_plain_torch_bit_for_bit(backend, device, dtype, scale):
    x = (scale * torch.randn(5, 33, dtype=torch.float64)).to(device, dtype)
    assert same_bits(relu2(x), plain(x))


@pytest.mark.parametrize("shape", [(1,), (0, 4), (3, 0), (2, 3, 129), (2, 2500)])
def test_shapes(backend, device, shape):
    assert_pure_and_close(relu2, plain, torch.randn(shape, dtype=torch.float64, device=device))


def test_any_strides(backend, device):
    x = torch.randn(12, 20, dtype=torch.float64, device=device)
    for view in (x.T, x[:, 3:12], x[::2, ::2], x[0].expand(6, 20)):
        assert_pure_and_close(relu2, plain, view)
