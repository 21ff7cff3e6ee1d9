"""layer_norm against torch, numbers by hand, rows far from 0 and of any length."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_fn import layer_norm
from tests.test_check import raises
from tests.tolerance import (
    assert_pure_and_close,
    assert_pure_and_exact,
    far_apart,
    on_a_cpu,
    results,
    same_bits,
)

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]


def plain(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def hold(*args: Tensor) -> None:
    assert_pure_and_exact(layer_norm, plain, plain, *args)


def hold_shape(*args: Tensor, dys: tuple[Tensor, ...] = ()) -> None:
    assert_pure_and_close(layer_norm, plain, *(t.double() for t in args), dys=dys)


def close(got: Tensor, wanted: list[float]) -> None:
    want = torch.tensor(wanted, dtype=torch.float64, device=got.device)
    torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15)


# -- numbers by hand


def test_1_3_lies_one_deviation_to_each_side_of_its_mean(backend, device):
    x = torch.tensor([1.0, 3.0], dtype=torch.float64, device=device)  # mean 2, variance 1
    w, b = torch.tensor([[2.0, 5.0], [0.5, -1.0]], dtype=torch.float64, device=device)
    close(layer_norm(x, None, None, 0.0), [-1.0, 1.0])
    close(layer_norm(x, w, b, 0.0), [-1.5, 4.0])


def test_eps_is_added_to_the_variance(backend, device):
    x = torch.tensor([4.0, 10.0], dtype=torch.float64, device=device)  # 9 + 16 = 5**2
    close(layer_norm(x, None, None, 16.0), [-0.6, 0.6])


def test_gradients_of_0_0_3_by_hand(backend, device):
    x = torch.tensor([0.0, 0.0, 3.0], dtype=torch.float64, device=device)  # mean 1, variance 2
    w, dy = torch.ones_like(x), torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64, device=device)
    _, (dx, dw, db) = results(lambda x, w, b: layer_norm(x, w, b, 0.0), (x, w, w), (dy,))
    r = math.sqrt(0.5)  # mean(g) = 1, mean(g xhat) = -r, so dx = r (g - 1 + r xhat)
    close(dx, [1.5 * r, -1.5 * r, 0.0])
    close(dw, [-3 * r, 0.0, 0.0])
    close(db, [3.0, 0.0, 0.0])


# -- as exact as torch


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, dtype, scale):
    x = scale * drawn(4, 3, 40, device=device, dtype=dtype)
    hold(x, drawn(40, device=device, dtype=dtype), drawn(40, device=device, dtype=dtype))


@pytest.mark.parametrize("n", [40, 1536, 9000])  # the last is longer than a block
def test_a_mean_of_1e5_deviations_keeps_the_error_rule(backend, device, n):
    x = (1e3 + 1e-2 * drawn(16, n, device=device).double()).float()
    hold(x, drawn(n, device=device), drawn(n, device=device))


@pytest.mark.parametrize("dtype", HALVES)
def test_statistics_of_halves_are_float32(backend, device, dtype):
    x = (8 + 0.5 * drawn(4, 256, device=device)).to(dtype)
    hold(x, drawn(256, device=device, dtype=dtype), drawn(256, device=device, dtype=dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_take_float32_parameters(backend, device, dtype):
    # torch does so on a CPU alone; 1 + 1e-3 k would lose its digits in halves
    w = 1 + 1e-3 * torch.arange(24.0, device=device)
    there = on_a_cpu(plain)
    assert_pure_and_exact(
        layer_norm, there, there, drawn(5, 24, device=device, dtype=dtype), w, w - 2
    )


@pytest.mark.parametrize("wb", [torch.bfloat16, torch.float64])
def test_other_parameters_leave_x_its_dtype(backend, device, wb):
    x, w, b = drawn(3, 9, device=device), *drawn(2, 9, device=device, dtype=wb)
    (y,), grads = results(layer_norm, (x, w, b))
    assert [t.dtype for t in (y, *grads)] == [torch.float32, torch.float32, wb, wb]
    torch.testing.assert_close(y, plain(x.double(), w.double(), b.double()).float())


def test_a_mean_whose_square_overflows_is_no_infinity(backend, device):
    w = drawn(9000, device=device)
    hold(1e20 + torch.zeros(2, 9, device=device), w[:9], w[:9])
    hold(1e20 + torch.zeros(2, 9000, device=device), w, w)


def test_nan_in_a_row_stays_in_that_row(backend, device):
    x, w, dy = drawn(3, 9, device=device), drawn(9, device=device), torch.ones(3, 9, device=device)
    clean = results(layer_norm, (x, w, w), (dy,))
    x[1, 4] = math.nan
    (y,), (dx, dw, db) = results(layer_norm, (x, w, w), (dy,))
    assert same_bits(y[::2], clean[0][0][::2])
    assert same_bits(dx[::2], clean[1][0][::2])
    assert same_bits(db, clean[1][2])
    assert all(t.isnan().all() for t in (y[1], dx[1], dw))


# -- absent parameters, frozen parameters


def test_absent_parameters_are_a_gain_of_one_and_a_bias_of_zero(backend, device):
    x, w, b = (t.double() for t in (drawn(3, 7, device=device), *drawn(2, 7, device=device)))
    one, zero = torch.ones_like(w), torch.zeros_like(b)
    assert same_bits(layer_norm(x, None, b), layer_norm(x, one, b))
    assert_pure_and_close(lambda x, w: layer_norm(x, w, None), plain, x, w)
    assert_pure_and_close(lambda x, b: layer_norm(x, None, b), lambda x, b: plain(x, one, b), x, b)
    assert_pure_and_close(lambda x: layer_norm(x, None, None), lambda x: plain(x, one, zero), x)


def test_frozen_arguments_change_no_other_gradient(backend, device):
    x, w, b = drawn(4, 6, device=device), drawn(6, device=device), drawn(6, device=device)
    _, every = results(layer_norm, (x, w, b))
    alone = (
        results(lambda x: layer_norm(x, w, b), (x,)),
        results(lambda w: layer_norm(x, w, b), (w,)),
        results(lambda b: layer_norm(x, w, b), (b,)),
    )
    assert all(same_bits(got, want) for (_, (got,)), want in zip(alone, every, strict=True))


# -- shapes and strides


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 127, 128, 129, 8192, 8193, 20000])
def test_rows_of_any_length(backend, device, n):
    x = 5 + drawn(3, n, device=device)
    hold_shape(x, drawn(n, device=device), drawn(n, device=device))


@pytest.mark.parametrize("n", [65537, pytest.param(131072, marks=pytest.mark.slow)])
def test_long_rows(backend, device, n):
    hold(3 + drawn(2, n, device=device), drawn(n, device=device), drawn(n, device=device))


def test_one_column_gives_the_bias(backend, device):
    x, w, b = drawn(5, 1, device=device), drawn(1, device=device), drawn(1, device=device)
    (y,), (dx, dw, _) = results(layer_norm, (x, w, b))
    assert same_bits(y, b.expand(5, 1))
    assert not dx.any()
    assert not dw.any()


@pytest.mark.parametrize("rows", [1, 2, 31, 33, 40])
def test_parameter_gradients_sum_every_row_once(backend, device, rows):
    x = drawn(rows, 5, device=device)
    hold_shape(x, drawn(5, device=device), drawn(5, device=device))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 9000), (0,), (2, 3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_gives_nothing_and_parameters_a_gradient_of_zero(backend, device, shape, dtype):
    x, w = drawn(*shape, device=device, dtype=dtype), drawn(shape[-1], device=device, dtype=dtype)
    (y,), (dx, dw, db) = results(layer_norm, (x, w, w))
    assert y.shape == dx.shape == shape
    assert dw.shape == db.shape == w.shape
    assert y.dtype == dx.dtype == dw.dtype == db.dtype == dtype
    assert not dw.any()
    assert not db.any()


@pytest.mark.parametrize(
    "of",
    [lambda t: t.T, lambda t: t[::2, 1::3], lambda t: t[:1].expand(6, -1), lambda t: t[:, 4:5],
     lambda t: t.view(3, 20, 4).permute(2, 0, 1), lambda t: t[3]],
)  # fmt: skip
def test_any_strides(backend, device, of):
    x = of(drawn(12, 20, device=device).double())
    w, b = drawn(2, 2 * x.shape[-1], device=device).double()[:, ::2]
    hold_shape(x, w, b)
    hold_shape(drawn(*x.shape, device=device), w, b, dys=(x,))


def test_rows_may_lie_beyond_2_to_the_31_elements(backend, device, tmp_path):
    w = drawn(6, device=device, dtype=torch.bfloat16)
    hold(far_apart(device, tmp_path, 6), w, w)


def test_gradients_are_the_same_bits_in_every_run(backend, device):
    args = (drawn(37, 24, device=device), *drawn(2, 24, device=device))
    first, again = (results(layer_norm, args)[1] for _ in range(2))
    assert all(map(same_bits, first, again))


# -- errors


@pytest.mark.parametrize(
    ("x", "w", "b", "message"),
    [
        ((), (1,), (1,), "x must have shape (..., n), got ()"),
        ((2, 4), (3,), (4,), "axis n is 3 in w but 4 in x"),
        ((2, 4), (4,), (8,), "axis n is 8 in b but 4 in x"),
        ((2, 4), (2, 4), (4,), "w must have shape (n), got (2, 4)"),
    ],
)
def test_shapes_that_disagree_are_refused(x, w, b, message):
    raises(ValueError, f"layer_norm: {message}", layer_norm, *map(torch.ones, (x, w, b)))


def test_what_is_no_floating_tensor_is_refused():
    x, integers = torch.ones(2, 4), torch.ones(4, dtype=torch.int64)
    wanted = "must hold float32, bfloat16, float16 or float64, got torch.int64"
    raises(TypeError, f"layer_norm: b {wanted}", layer_norm, x, None, integers)
    raises(TypeError, "layer_norm: w must be a tensor, got float", layer_norm, x, 1.0, None)
