"""group_norm against torch, numbers by hand, images far from 0 and of any shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_fn import group_norm, layer_norm
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
FLOATS = [torch.float32, *HALVES]
Fn = Callable[..., Tensor]


def by(f: Fn, groups: int) -> Fn:
    """group_norm of ours or of torch, as a function of tensors."""
    if f is group_norm:
        return lambda x, w=None, b=None: group_norm(x, w, b, groups)
    return lambda x, w=None, b=None: F.group_norm(x, groups, w, b)


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def hold(groups: int, *args: Tensor) -> None:
    plain = by(F.group_norm, groups)
    assert_pure_and_exact(by(group_norm, groups), plain, plain, *args)


def hold_shape(groups: int, *args: Tensor, dys: tuple[Tensor, ...] = ()) -> None:
    args = tuple(t.double() for t in args)
    assert_pure_and_close(by(group_norm, groups), by(F.group_norm, groups), *args, dys=dys)


def parameters(c: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple:
    return tuple(drawn(2, c, device=device, dtype=dtype))


def close(got: Tensor, wanted: list) -> None:
    want = torch.tensor(wanted, dtype=torch.float64, device=got.device)
    torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15)


# -- numbers by hand: two channels of two positions


def image(device: torch.device) -> Tensor:
    return torch.tensor([[[1.0, 3.0], [5.0, 5.0]]], dtype=torch.float64, device=device)


def test_a_group_for_each_channel(backend, device):  # variances 1 and 0; 1 + 3 = 2**2
    close(group_norm(image(device), None, None, 2, 3.0), [[[-0.5, 0.5], [0.0, 0.0]]])


def test_one_group_for_both_channels(backend, device):
    # mean 3.5, variance (6.25 + 0.25 + 2.25 + 2.25) / 4 = 2.75; 2.75 + 3.5 = 2.5**2
    w, b = torch.tensor([[1.0, 10.0], [0.0, 2.0]], dtype=torch.float64, device=device)
    close(group_norm(image(device), w, b, 1, 3.5), [[[-1.0, -0.2], [8.0, 8.0]]])


def test_gradients_by_hand(backend, device):
    w = torch.tensor([2.0, 1.0], dtype=torch.float64, device=device)
    dy = torch.tensor([[[1.0, 0.0], [3.0, 1.0]]], dtype=torch.float64, device=device)
    _, (dx, dw, db) = results(lambda x, w, b: group_norm(x, w, b, 2, 3.0), (image(device), w, w),
                              (dy,))  # fmt: skip
    # g = 2, 0: mean 1, mean(g xhat) = -1/2; then g = 3, 1: mean 2, and rstd = 1 / sqrt(3)
    close(dx, [[[0.5 * (2 - 1 - 0.25), 0.5 * (0 - 1 + 0.25)], [3**-0.5, -(3**-0.5)]]])
    close(dw, [-0.5, 0.0])
    close(db, [1.0, 4.0])


# -- as exact as torch


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, dtype, scale):
    x = scale * drawn(3, 6, 5, 4, device=device, dtype=dtype)
    hold(3, x, *parameters(6, device, dtype))


@pytest.mark.parametrize("s", [20, 700, 5000])  # groups of the last are longer than a block
def test_a_mean_of_1e5_deviations_keeps_the_error_rule(backend, device, s):
    x = (1e3 + 1e-2 * drawn(4, 8, s, device=device).double()).float()
    hold(4, x, *parameters(8, device))


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_take_float32_parameters(backend, device, dtype):
    w = 1 + 1e-3 * torch.arange(24.0, device=device)
    plain = on_a_cpu(by(F.group_norm, 4))  # torch takes them there alone
    x = drawn(5, 24, 3, device=device, dtype=dtype)
    assert_pure_and_exact(by(group_norm, 4), plain, plain, x, w, w - 2)


def test_a_mean_whose_square_overflows_is_no_infinity(backend, device):
    hold(2, 1e20 + torch.zeros(2, 4, 3, device=device), *parameters(4, device))


# -- absent and frozen parameters, other norms


def test_absent_parameters_are_a_gain_of_one_and_a_bias_of_zero(backend, device):
    x, (w, b) = drawn(3, 4, 5, device=device).double(), parameters(4, device, torch.float64)
    ours, torchs = by(group_norm, 2), by(F.group_norm, 2)
    assert_pure_and_close(ours, torchs, x)
    assert_pure_and_close(ours, torchs, x, w)
    assert_pure_and_close(
        lambda x, b: ours(x, None, b), lambda x, b: torchs(x, torch.ones_like(b), b), x, b
    )


def test_frozen_arguments_change_no_other_gradient(backend, device):
    args = (drawn(3, 4, 5, device=device), *parameters(4, device))
    f = by(group_norm, 2)
    _, every = results(f, args)
    for i, want in enumerate(every):
        _, (alone,) = results(lambda t, i=i: f(*args[:i], t, *args[i + 1 :]), (args[i],))
        assert same_bits(alone, want)


def test_one_group_without_parameters_is_layer_norm_of_an_image(backend, device):
    x = drawn(3, 4, 5, 2, device=device).double()
    y = layer_norm(x.flatten(1), None, None).view(x.shape)
    torch.testing.assert_close(group_norm(x, None, None, 1), y, rtol=1e-14, atol=1e-14)


# -- shapes and strides


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 1), 1), ((3, 6), 2), ((3, 6), 6), ((2, 4, 1), 2), ((2, 3, 7), 3), ((5, 4, 2, 3, 2), 2),
     ((2, 8, 127), 4), ((2, 8, 129), 2), ((33, 2, 3), 1), ((1, 2, 8193), 2), ((1, 512, 17), 1),
     ((1, 2, 65537), 1), ((2, 1, 131072), 1)],
)  # fmt: skip
def test_any_shape(backend, device, shape, groups):
    hold_shape(groups, 3 + drawn(*shape, device=device), *parameters(shape[1], device))


def test_a_group_of_one_number_gives_the_bias(backend, device):  # where torch refuses
    w, b = parameters(4, device)
    (y,), (dx, dw, _) = results(by(group_norm, 4), (drawn(1, 4, device=device), w, b))
    assert same_bits(y, b[None])
    assert not dx.any()
    assert not dw.any()


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (0, 4), (2, 4, 3, 0), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_gives_nothing_and_parameters_a_gradient_of_zero(backend, device, shape, dtype):
    args = (drawn(*shape, device=device, dtype=dtype), *parameters(shape[1], device, dtype))
    (y,), grads = results(by(group_norm, 2), args)
    assert y.shape == shape
    assert y.dtype == dtype
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, dtype) for t in args]
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize(
    "of",
    [lambda t: t.contiguous(memory_format=torch.channels_last), lambda t: t.transpose(0, 1),
     lambda t: t[:, :, ::2, 1::2], lambda t: t[:1].expand(3, -1, -1, -1),
     lambda t: t[:, :, :1].expand(-1, -1, 3, -1)],
)  # fmt: skip
def test_any_strides_give_a_contiguous_result(backend, device, of):
    x = of(drawn(4, 4, 6, 5, device=device).double())
    other, (w, b) = drawn(*x.shape, device=device), drawn(4, 2, device=device).double().T
    hold_shape(2, x, w, b)
    hold_shape(2, other, w, b, dys=(x,))
    assert group_norm(x, w, b, 2).is_contiguous()


def test_images_may_lie_beyond_2_to_the_31_elements(backend, device, tmp_path):
    x = far_apart(device, tmp_path, 4, 3)
    hold(2, x, *parameters(4, device, torch.bfloat16))


def test_gradients_are_the_same_bits_in_every_run(backend, device):
    args = (drawn(7, 6, 9, device=device), *parameters(6, device))
    first, again = (results(by(group_norm, 3), args)[1] for _ in range(2))
    assert all(map(same_bits, first, again))


# -- errors


@pytest.mark.parametrize(
    ("x", "w", "b", "groups", "message"),
    [
        ((4,), (4,), (4,), 1, "x must have shape (b, c, ...), got (4,)"),
        ((2, 4), (3,), (3,), 1, "axis c is 3 in w but 4 in x"),
        ((2, 4, 3), (4,), (3,), 1, "axis c is 3 in b but 4 in w"),
        ((2, 4, 3), (1, 4), (4,), 1, "w must have shape (c), got (1, 4)"),
        ((2, 4, 3), (4,), (4,), 3, "groups must divide axis c of x, which is 4, got 3"),
        ((2, 4, 3), (4,), (4,), 0, "groups must divide axis c of x, which is 4, got 0"),
        ((2, 4, 3), (4,), (4,), -2, "groups must divide axis c of x, which is 4, got -2"),
    ],
)
def test_shapes_and_groups_that_disagree_are_refused(x, w, b, groups, message):
    args = map(torch.ones, (x, w, b))
    raises(ValueError, f"group_norm: {message}", group_norm, *args, groups)


def test_what_is_no_floating_tensor_is_refused():
    x, integers = torch.ones(2, 4), torch.ones(4, dtype=torch.int64)
    wanted = "must hold float32, bfloat16, float16 or float64, got torch.int64"
    raises(TypeError, f"group_norm: w {wanted}", group_norm, x, integers, None, 2)
    raises(ValueError, "group_norm: axis c is 3 in b but 4 in x", group_norm, x, None,
           torch.ones(3), 2)  # fmt: skip
