"""softmax against torch's own in float64, and numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from liger_fn import _launch, softmax
from tests.tolerance import (
    assert_pure_and_close,
    assert_pure_and_exact,
    far_apart,
    results,
    same_bits,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def exact(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def hold(x: Tensor) -> None:
    assert_pure_and_exact(softmax, exact, exact, x)


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


# -- numbers by hand


@pytest.mark.parametrize(
    ("weights", "want"),
    [([1.0, 1.0], [0.5, 0.5]), ([1.0, 2.0, 5.0], [0.125, 0.25, 0.625]), ([7.0], [1.0])],
)
def test_exponents_of_weights_give_their_shares(backend, device, weights, want):
    x = torch.tensor(weights, dtype=torch.float64, device=device).log()
    assert softmax(x).tolist() == pytest.approx(want, rel=1e-15)


def test_the_gradient_of_three_shares_by_hand(backend, device):
    # y = 1/4, 1/4, 1/2 and dy = 4, 0, 2: sum(dy y) = 2, so y * (2, -2, 0)
    x = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64, device=device).log()
    dy = torch.tensor([4.0, 0.0, 2.0], dtype=torch.float64, device=device)
    _, (dx,) = results(softmax, (x,), (dy,))
    assert dx.tolist() == pytest.approx([0.5, -0.5, 0.0], abs=1e-15)


# -- as exact as plain torch


@each_dtype
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("rows", "n"), [(64, 40), (4, 9000)])
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, rows, n, scale, dtype):
    hold((scale * drawn(rows, n, device=device)).to(dtype))


@each_dtype
def test_a_large_common_offset_costs_no_digits(backend, device, dtype):
    x = (3e4 + 8 * drawn(64, 33, device=device)).to(dtype)
    hold(x)
    x = x.double().round().float()
    assert same_bits(softmax(x), softmax(x - 3e4))


@pytest.mark.parametrize("n", [65_537, 131_072, 262_144])
def test_long_rows_neither_overflow_nor_lose_digits(backend, device, n):
    hold(3 * drawn(2, n, device=device, dtype=torch.float32))


# -- infinities and NaN


@pytest.mark.parametrize("block", [4, 8192])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_entries_of_minus_infinity_have_no_share_and_no_gradient(
    backend, device, monkeypatch, block, dtype
):
    monkeypatch.setattr(_launch, "_MAX_BLOCK", block)
    x = drawn(3, 11, device=device, dtype=dtype)
    x[0, ::2] = x[1, :9] = x[2, 1:] = -math.inf  # the second row begins with blocks of them
    (y,), (dx,) = results(softmax, (x,))
    for t in (y, dx):
        assert t[x == -math.inf].eq(0).all()
        assert t.isfinite().all()
    assert y[2, 0] == 1
    hold(x) if dtype != torch.float64 else assert_pure_and_close(softmax, exact, x)


@pytest.mark.parametrize("held", [[-math.inf] * 9, [math.nan, *[0.0] * 8], [0.0] * 8 + [math.inf]])
@pytest.mark.parametrize("block", [4, 8192])
def test_what_has_no_softmax_is_nan_in_its_row_alone(backend, device, monkeypatch, block, held):
    monkeypatch.setattr(_launch, "_MAX_BLOCK", block)
    x = drawn(3, 9, device=device, dtype=torch.float32)
    clean = softmax(x)
    x[1] = torch.tensor(held, device=device)
    (y,), (dx,) = results(softmax, (x,))
    assert torch.equal(y.isnan(), exact(x).isnan())
    assert dx[1].isnan().all()
    assert same_bits(y[::2], clean[::2])
    assert dx[::2].isfinite().all()


# -- shapes and strides


@pytest.mark.parametrize(
    "shape",
    [(1,), (1, 1), (3, 1), (5,), (2, 1, 3, 7), (4, 127), (4, 128), (4, 129), (2, 8191), (2, 8193),
     (0, 5), (3, 0, 5), (0, 9000)],
    ids=str,
)  # fmt: skip
def test_every_shape_agrees_with_torch(backend, device, shape):
    assert_pure_and_close(softmax, exact, drawn(*shape, device=device))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3, 0)], ids=str)
def test_no_columns_give_an_empty_result(backend, device, shape):
    (y,), (dx,) = results(softmax, (torch.zeros(shape, device=device),))
    assert y.shape == dx.shape == shape


@pytest.mark.parametrize(
    "of",
    [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[::2, 3:], lambda t: t[0].expand(6, 20),
     lambda t: t[:, :1].expand(12, 9), lambda t: t.view(3, 4, 20).permute(2, 0, 1)],
    ids=["transposed", "stepped", "offset", "expanded row", "expanded column", "permuted"],
)  # fmt: skip
def test_rows_and_upstream_gradients_may_have_any_strides(backend, device, of):
    x, dy = (of(drawn(12, 20, device=device)) for _ in range(2))
    assert_pure_and_close(softmax, exact, x, dys=(dy,))


def test_rows_may_lie_beyond_2_to_the_31_elements(backend, device, tmp_path):
    hold(far_apart(device, tmp_path, 6))


# -- errors


def test_x_must_have_an_axis_and_be_floating():
    with pytest.raises(ValueError, match=r"^softmax: x must have shape \(..., n\), got \(\)$"):
        softmax(torch.zeros(()))
    with pytest.raises(TypeError, match=r"^softmax: x must hold float32, .*, got torch.int64$"):
        softmax(torch.zeros(3, dtype=torch.int64))
