"""dyt against the formula in torch, numbers by hand, saturated and of any shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from liger_fn import dyt
from tests.test_check import raises
from tests.tolerance import (
    assert_pure_and_close,
    assert_pure_and_exact,
    far_apart,
    results,
    same_bits,
)

HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES]
Fn = Callable[..., Tensor]


def plain(x: Tensor, alpha: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(alpha * x) * w + b


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def arguments(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple:
    n = shape[-1]
    made = (drawn(*s, device=device, dtype=dtype) for s in (shape, (1,), (n,), (n,)))
    return tuple(made)


def close(got: Tensor, wanted: list[float]) -> None:
    want = torch.tensor(wanted, dtype=torch.float64, device=got.device)
    torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15)


# -- numbers by hand: tanh(log 2) = (2 - 1/2) / (2 + 1/2) = 3/5, tanh(log 3) = 4/5


def test_logarithms_have_a_rational_tanh(backend, device):
    x, w, b = torch.tensor(
        [[math.log(2), -math.log(3)], [10.0, 5.0], [1.0, -1.0]], dtype=torch.float64, device=device
    )
    one = torch.ones((), dtype=torch.float64, device=device)
    close(dyt(x, one, None, None), [0.6, -0.8])
    close(dyt(x, one, w, b), [7.0, -5.0])


def test_alpha_multiplies_x_alone(backend, device):
    x, w = torch.tensor([[math.log(4)], [10.0]], dtype=torch.float64, device=device)
    alpha = torch.tensor([0.5], dtype=torch.float64, device=device)
    close(dyt(x, alpha, w, None), [6.0])


def test_gradients_by_hand(backend, device):
    u = math.log(2)
    x, w, dy = torch.tensor([[u / 2, 0.0], [10.0, 5.0], [1.0, 1.0]], dtype=torch.float64).to(device)
    alpha = torch.full((), 2.0, dtype=torch.float64, device=device)
    _, (dx, dalpha, dw, db) = results(dyt, (x, alpha, w, w), (dy,))  # 1 - t**2 = 0.64, 1
    close(dx, [2 * 6.4, 2 * 5.0])
    close(dalpha, 6.4 * u / 2)
    close(dw, [0.6, 0.0])
    close(db, [1.0, 1.0])


# -- as exact as plain torch


def each(f: Fn) -> Fn:
    """f of sixteen x, each with its own alpha: by one sum alone either may be exact by luck."""
    return lambda x, alpha, w, b: torch.stack([f(x[i], alpha[i], w, b) for i in range(16)])


def hold(x: Tensor, *parameters: Tensor) -> None:
    assert_pure_and_exact(each(dyt), each(plain), each(plain), x, *parameters)


@pytest.mark.parametrize("scales", [(1e-4, 1.0), (1.0, 1.0), (1e4, 1.0), (1.0, 1e-4), (1.0, 1e4)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, dtype, scales):
    x, _, w, b = arguments(16, 2, 40, device=device, dtype=dtype)
    hold(scales[0] * x, scales[1] * drawn(16, 1, device=device, dtype=dtype), w, b)


@pytest.mark.parametrize("at", [-2.0, 0.06, 0.1])  # short series and forms end at 0.0625
@pytest.mark.parametrize("dtype", HALVES)
def test_wide_parameters_of_half_activations_keep_the_error_rule(backend, device, dtype, at):
    def rounds_once(x: Tensor, *parameters: Tensor) -> Tensor:
        return plain(x.float(), *parameters).to(x.dtype)

    x, _, w, b = arguments(16, 2, 40, device=device)
    args = (at + 1e-3 * x).to(dtype), torch.ones(16, 1, device=device), w, b
    assert_pure_and_exact(each(dyt), each(rounds_once), each(plain), *args)


@pytest.mark.parametrize("at", [-1.4, 0.6, 4.0, 8.0, 8.7])  # the seam is at 0.625
def test_near_saturation_gradients_keep_the_error_rule(backend, device, at):
    x, _, w, b = arguments(16, 2, 40, device=device)
    hold(at + 0.1 * x, torch.ones(16, 1, device=device), w, b)


@pytest.mark.parametrize("dtype", HALVES)
def test_y_has_the_dtype_of_x_and_gradients_those_of_their_arguments(backend, device, dtype):
    x, *parameters = arguments(3, 8, device=device)
    (y,), grads = results(dyt, (x.to(dtype), *parameters))
    assert [t.dtype for t in (y, *grads)] == [dtype, dtype, *[torch.float32] * 3]
    want = plain(*(t.double() for t in (x.to(dtype), *parameters)))
    torch.testing.assert_close(y, want.to(dtype), rtol=0, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_number_stays_where_it_is(backend, device, value):
    x, alpha, w, b = arguments(3, 5, device=device)
    x[1, 2] = value
    got, want = dyt(x, alpha, w, b), plain(x, alpha, w, b)
    torch.testing.assert_close(got, want, equal_nan=True)


# -- absent and frozen arguments


def test_absent_parameters_are_a_gain_of_one_and_a_bias_of_zero(backend, device):
    x, alpha, w, b = arguments(3, 7, device=device, dtype=torch.float64)
    assert_pure_and_close(
        lambda x, a, w: dyt(x, a, w, None), lambda x, a, w: torch.tanh(a * x) * w, x, alpha, w
    )
    assert_pure_and_close(
        lambda x, a, b: dyt(x, a, None, b), lambda x, a, b: torch.tanh(a * x) + b, x, alpha, b
    )
    assert_pure_and_close(
        lambda x, a: dyt(x, a, None, None), lambda x, a: torch.tanh(a * x), x, alpha
    )


def test_frozen_arguments_change_no_other_gradient(backend, device):
    args = arguments(4, 6, device=device)
    _, every = results(dyt, args)
    for i, want in enumerate(every):
        _, (alone,) = results(lambda t, i=i: dyt(*args[:i], t, *args[i + 1 :]), (args[i],))
        assert same_bits(alone, want)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_gradient_of_alpha_is_shaped_like_it(backend, device, shape):
    x, alpha, w, b = arguments(4, 6, device=device, dtype=torch.float64)
    assert_pure_and_close(dyt, plain, x, alpha.reshape(shape), w, b)


# -- shapes and strides


@pytest.mark.parametrize(
    "shape",
    [(1,), (7,), (3, 1), (2, 3, 4), (33, 5), (4, 127), (4, 128), (4, 129), (2, 1025), (2, 65537),
     pytest.param((1, 131072), marks=pytest.mark.slow)],
)  # fmt: skip
def test_any_shape(backend, device, shape):
    assert_pure_and_close(dyt, plain, *arguments(*shape, device=device, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 9000), (0,), (2, 3, 0)])
def test_nothing_gives_nothing_and_parameters_a_gradient_of_zero(backend, device, shape):
    args = arguments(*shape, device=device)
    (y,), grads = results(dyt, args)
    assert y.shape == shape
    assert [g.shape for g in grads] == [t.shape for t in args]
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize(
    "of", [lambda t: t.T, lambda t: t[::2, 1::3], lambda t: t[:1].expand(6, -1)]
)
def test_any_strides(backend, device, of):
    x = of(drawn(12, 20, device=device).double())
    other, alpha, w, b = arguments(*x.shape, device=device, dtype=torch.float64)
    w, b = torch.stack((w, b), 1).unbind(1)
    assert_pure_and_close(dyt, plain, x, alpha, w, b)
    assert_pure_and_close(dyt, plain, other, alpha, w, b, dys=(x,))


def test_rows_may_lie_beyond_2_to_the_31_elements(backend, device, tmp_path):
    x = far_apart(device, tmp_path, 6)
    _, *parameters = arguments(1, 6, device=device, dtype=torch.bfloat16)
    assert_pure_and_exact(dyt, plain, plain, x, *parameters)


def test_gradients_are_the_same_bits_in_every_run(backend, device):
    args = arguments(37, 24, device=device)
    first, again = (results(dyt, args)[1] for _ in range(2))
    assert all(map(same_bits, first, again))


# -- errors


@pytest.mark.parametrize(
    ("x", "alpha", "w", "b", "message"),
    [
        ((), (), (1,), (1,), "x must have shape (..., n), got ()"),
        ((2, 4), (2,), (4,), (4,), "alpha must have shape () or (1), got (2,)"),
        ((2, 4), (1, 1), (4,), (4,), "alpha must have shape () or (1), got (1, 1)"),
        ((2, 4), (0,), (4,), (4,), "alpha must have shape () or (1), got (0,)"),
        ((2, 4), (), (3,), (4,), "axis n is 3 in w but 4 in x"),
        ((2, 4), (), (4,), (1,), "axis n is 1 in b but 4 in x"),
    ],
)
def test_shapes_that_disagree_are_refused(x, alpha, w, b, message):
    raises(ValueError, f"dyt: {message}", dyt, *map(torch.ones, (x, alpha, w, b)))


def test_what_is_no_floating_tensor_is_refused():
    x = torch.ones(2, 4)
    raises(TypeError, "dyt: alpha must be a tensor, got float", dyt, x, 0.5, None, None)
