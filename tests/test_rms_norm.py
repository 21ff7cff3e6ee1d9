"""rms_norm against float64 torch, numbers by hand, and the modules of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_fn import rms_norm, using
from tests.tolerance import (
    assert_pure_and_close,
    assert_pure_and_exact,
    assert_within_ulps,
    far_apart,
    results,
    same_bits,
)

EPS = 1e-5
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
CASTINGS = ["llama", "gemma", "none"]
Fn = Callable[..., Tensor]


def llama(x: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    """LlamaRMSNorm of Hugging Face."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def gemma(x: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    """GemmaRMSNorm of Hugging Face: w is the difference of the gain from 1."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + w.float())).type_as(x)


def olmo2(x: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    """Olmo2RMSNorm of Hugging Face: the gain in float32, one cast."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (w * h).to(x.dtype)


def plainly(x: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    """Every step in the dtype of x."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def plainly_on_gpu(x: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    """The same on a CPU: there torch.rsqrt of a few halves is 1 / round(sqrt)."""
    mean = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt((mean + eps).float()).to(x.dtype) * w


FAMILIES: dict[str, tuple[Fn, Fn]] = {
    "llama": (lambda x, w: rms_norm(x, w, EPS), llama),
    "gemma": (lambda x, w: rms_norm(x, w, EPS, offset=1.0, casting="gemma"), gemma),
    "olmo2": (lambda x, w: rms_norm(x, w, EPS, casting="gemma"), olmo2),
    "none": (lambda x, w: rms_norm(x, w, EPS, casting="none"), plainly),
}
family = pytest.mark.parametrize("name", FAMILIES)


def exact(x: Tensor, w: Tensor, offset: float = 0.0, eps: float = EPS) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w + offset, eps)


def hold(name: str, x: Tensor, w: Tensor) -> None:
    ours, plain = FAMILIES[name]
    offset = 1.0 if name == "gemma" else 0.0
    assert_pure_and_exact(ours, plain, lambda x, w: exact(x, w, offset), x, w)


def hold_shape(x: Tensor, w: Tensor, *dys: Tensor) -> None:
    assert_pure_and_close(lambda x, w: rms_norm(x, w, EPS), exact, x.double(), w.double(), dys=dys)


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


# -- numbers by hand


def close(got: Tensor, wanted: list[float]) -> None:
    want = torch.tensor(wanted, dtype=torch.float64, device=got.device)
    torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-16)


def test_3_4_becomes_its_direction_times_root_2(backend, device):
    x = torch.tensor([3.0, 4.0], dtype=torch.float64, device=device)  # mean square 25 / 2
    close(rms_norm(x, torch.ones_like(x), 0.0), [0.6 * math.sqrt(2), 0.8 * math.sqrt(2)])


def test_eps_is_added_to_the_mean_square_and_offset_to_the_gain(backend, device):
    x = torch.tensor([2.0, -2.0], dtype=torch.float64, device=device)  # 4 + 12 = 4**2
    w = torch.tensor([0.5, 3.0], dtype=torch.float64, device=device)
    close(rms_norm(x, w, 12.0, offset=1.0, casting="gemma"), [0.75, -2.0])


def test_gradients_of_3_4_by_hand(backend, device):
    x = torch.tensor([3.0, 4.0], dtype=torch.float64, device=device)
    dy = torch.tensor([1.0, 0.0], dtype=torch.float64, device=device)
    _, (dx, dw) = results(lambda x, w: rms_norm(x, w, 0.0), (x, torch.ones_like(x)), (dy,))
    close(
        dx, [0.64 * math.sqrt(2) / 5, -0.48 * math.sqrt(2) / 5]
    )  # (dy - xhat * mean(dy xhat)) / rms
    close(dw, [0.6 * math.sqrt(2), 0.0])


# -- as exact as plain torch


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
@family
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, name, dtype, scale):
    hold(
        name,
        scale * drawn(2, 3, 40, device=device, dtype=dtype),
        drawn(40, device=device, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_gains_of_any_magnitude_keep_the_error_rule(backend, device, dtype, scale):
    x, w = drawn(6, 33, device=device, dtype=dtype), scale * drawn(33, device=device, dtype=dtype)
    hold("llama", x, w)


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
@family
def test_mixed_dtypes_promote_as_in_the_family(backend, device, name, x_dtype, w_dtype):
    w = 1 + 1e-3 * torch.arange(24, dtype=torch.float64)
    hold(name, drawn(5, 24, device=device, dtype=x_dtype), w.to(device, w_dtype))


@pytest.mark.parametrize("casting", CASTINGS)
def test_float64_stays_float64_throughout(backend, device, casting):
    x, w = drawn(4, 37, device=device).double(), drawn(37, device=device).double()
    ours = results(lambda x, w: rms_norm(x, w, EPS, casting=casting), (x, w))
    want = results(exact, (x, w))
    for got, e in zip([*ours[0], *ours[1]], [*want[0], *want[1]], strict=True):
        assert got.dtype == torch.float64
        bound = 37 * torch.finfo(torch.float64).eps  # n rounded additions
        torch.testing.assert_close(got, e, rtol=bound, atol=bound)


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_gain_equals_a_gain_of_one(backend, device, casting, dtype):
    x = drawn(3, 21, device=device, dtype=dtype)
    (bare,), (dx,) = results(lambda x: rms_norm(x, None, EPS, casting=casting), (x,))
    (y,), (dx1, _) = results(
        lambda x, w: rms_norm(x, w, EPS, casting=casting), (x, torch.ones_like(x[0]))
    )
    assert same_bits(bare, y)
    assert same_bits(dx, dx1)


def test_a_gemma_gain_of_zero_is_the_bare_normalisation(backend, device):
    x = drawn(3, 16, device=device)
    y = rms_norm(x, torch.zeros_like(x[0]), EPS, offset=1.0, casting="gemma")
    assert same_bits(y, rms_norm(x, None, EPS, casting="gemma"))


def test_a_row_of_zeros_gives_zeros_and_finite_gradients(backend, device):
    x, w = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
    (y,), (dx, dw) = results(rms_norm, (x, w))
    assert y.eq(0).all()
    assert dx.isfinite().all()
    assert dw.eq(0).all()


def test_nan_in_a_row_stays_in_that_row(backend, device):
    x, w = drawn(3, 9, device=device), drawn(9, device=device)
    dy = torch.ones_like(x)
    clean = results(rms_norm, (x, w), (dy,))
    x[1, 4] = math.nan
    (y,), (dx, dw) = results(rms_norm, (x, w), (dy,))
    assert same_bits(y[::2], clean[0][0][::2])
    assert same_bits(dx[::2], clean[1][0][::2])
    assert all(t.isnan().all() for t in (y[1], dx[1], dw))


def test_a_large_mean_and_few_digits_leave_float32_statistics(backend, device):
    x = (8 + 0.5 * drawn(4, 256, device=device)).bfloat16()
    hold("llama", x, torch.ones(256, device=device, dtype=torch.bfloat16))


def test_eps_reaches_the_kernel_with_all_its_digits(backend, device):
    x, w = torch.zeros(1, 2, device=device, dtype=torch.float64), drawn(2, device=device).double()
    x[0, 0] = 1e-9
    y = rms_norm(x, w, 1e-17, casting="gemma")
    torch.testing.assert_close(y, exact(x, w, eps=1e-17), rtol=1e-14, atol=0.0)


# -- bit for bit as Hugging Face


@pytest.mark.parametrize("w_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", HALVES)
@family
def test_equals_the_module_of_the_family(backend, device, name, dtype, w_dtype):
    ours, module = FAMILIES[name]
    x = drawn(8, 96, device=device, dtype=dtype)
    w = (1 + 0.3 * drawn(96, device=device)).to(w_dtype or dtype)
    if backend == "triton" and name == "none":
        module = plainly_on_gpu
    got, want = ours(x, w), module(x, w)
    if backend == "reference":
        assert same_bits(got, want)
    else:  # sums in another order may tip a rounding
        assert got.dtype == want.dtype
        assert_within_ulps(got, want, 1, of=dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_castings_differ_where_the_families_do(device, dtype):
    x, w = (
        drawn(8, 96, device=device, dtype=dtype),
        1 + 0.3 * drawn(96, device=device, dtype=dtype),
    )
    with using("reference"):
        ys = [rms_norm(x, w, EPS, casting=casting) for casting in CASTINGS]
    assert not any(same_bits(a, b) for a, b in [(ys[0], ys[1]), (ys[1], ys[2]), (ys[0], ys[2])])


# -- shapes


@pytest.mark.parametrize(
    "shape",
    [(1,), (4,), (1, 1), (3, 1), (2, 3, 1), (1, 5), (2, 3, 4), (2, 1, 3, 7), (1, 1, 1, 2, 3)],
)
def test_any_number_of_leading_axes(backend, device, shape):
    hold_shape(drawn(*shape, device=device), drawn(shape[-1], device=device))


@pytest.mark.parametrize("n", [7, 8, 9, 15, 16, 17, 127, 128, 129, 1023, 1024, 1025])
def test_widths_about_powers_of_two(backend, device, n):
    hold("gemma", 5 + drawn(4, n, device=device), drawn(n, device=device))


@pytest.mark.parametrize("n", [8192, 8193, 20000])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_rows_longer_than_a_block(backend, device, name, n):
    hold(name, drawn(2, n, device=device), drawn(n, device=device))


def test_a_long_half_precision_row_under_none(backend, device):
    hold("none", drawn(2, 8193, device=device).bfloat16(), drawn(8193, device=device).bfloat16())


@pytest.mark.parametrize("rows", [1, 2, 31, 33, 40])
def test_gain_gradients_sum_every_row_once(backend, device, rows):
    hold_shape(drawn(rows, 5, device=device), drawn(5, device=device))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 4, 5), (2, 0, 3, 5), (0, 9000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_give_an_empty_result_and_zero_gain_gradients(backend, device, shape, dtype):
    x, w = drawn(*shape, device=device, dtype=dtype), drawn(shape[-1], device=device, dtype=dtype)
    (y,), (dx, dw) = results(rms_norm, (x, w))
    assert y.shape == dx.shape == x.shape
    assert y.dtype == dx.dtype == dw.dtype == dtype
    assert dw.shape == w.shape
    assert dw.eq(0).all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3, 0)])
def test_no_columns_give_an_empty_result(backend, device, shape):
    x, w = torch.zeros(shape, device=device), torch.zeros(0, device=device)
    (y,), (dx, dw) = results(rms_norm, (x, w))
    assert y.shape == dx.shape == x.shape
    assert dw.shape == w.shape


# -- strides

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {  # of (12, 20)
    "transposed": lambda t: t.T,
    "columns of a wider tensor": lambda t: t[:, 3:12],
    "every other row": lambda t: t[::2],
    "every other column": lambda t: t[:, ::2],
    "every other row and column": lambda t: t[1::2, ::3],
    "one row expanded": lambda t: t[0].expand(6, 20),
    "one row expanded twice": lambda t: t[0].expand(2, 3, 20),
    "one column expanded": lambda t: t[:, :1].expand(12, 9),
    "one number expanded": lambda t: t[:1, :1].expand(4, 5),
    "axes permuted": lambda t: t.view(3, 4, 20).permute(1, 0, 2),
    "last axis moved first": lambda t: t.view(3, 20, 4).permute(2, 0, 1),
    "columns of three axes": lambda t: t.view(3, 4, 20)[..., :7],
    "one column": lambda t: t[:, 4:5],
    "one row of a transpose": lambda t: t.T[3],
    "an offset into storage": lambda t: t[5:, :],
}
view = pytest.mark.parametrize("of", VIEWS.values(), ids=VIEWS.keys())


@view
def test_x_may_have_any_strides(backend, device, of):
    x = of(drawn(12, 20, device=device, dtype=torch.float64))
    hold_shape(x, drawn(x.shape[-1], device=device))


@view
def test_upstream_gradients_may_have_any_strides(backend, device, of):
    dy = of(drawn(12, 20, device=device, dtype=torch.float64))
    hold_shape(drawn(*dy.shape, device=device), drawn(dy.shape[-1], device=device), dy)


@pytest.mark.parametrize(
    "of", [lambda t: t[0, ::2], lambda t: t[:10, 3], lambda t: t[0, :1].expand(10)]
)
def test_w_may_have_any_strides(backend, device, of):
    hold_shape(drawn(4, 10, device=device), of(drawn(12, 20, device=device, dtype=torch.float64)))


def test_a_sum_as_loss_gives_the_gradients_of_ones(backend, device):
    x, w = drawn(4, 6, device=device), drawn(6, device=device)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    rms_norm(*leaves).sum().backward()
    _, grads = results(rms_norm, (x, w), (torch.ones_like(x),))
    assert all(same_bits(leaf.grad, g) for leaf, g in zip(leaves, grads, strict=True))


def test_rows_may_lie_beyond_2_to_the_31_elements(backend, device, tmp_path):
    hold("llama", far_apart(device, tmp_path, 6), drawn(6, device=device, dtype=torch.bfloat16))


# -- purity


def test_a_residual_that_shares_the_upstream_gradient_stays_right(backend, device):
    h, w = (
        drawn(4, 6, device=device, dtype=torch.float64),
        drawn(6, device=device, dtype=torch.float64),
    )
    _, ours = results(lambda h, w: rms_norm(h, w, EPS) + h, (h, w))
    _, want = results(lambda h, w: exact(h, w) + h, (h, w))
    for got, e in zip(ours, want, strict=True):
        torch.testing.assert_close(got, e, rtol=1e-13, atol=1e-13)


def test_a_second_backward_gives_the_same_gradients(backend, device):
    x, w = drawn(4, 6, device=device).requires_grad_(), drawn(6, device=device).requires_grad_()
    y = rms_norm(x, w)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, w), dy)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_frozen_arguments_get_no_gradient_and_change_no_other(backend, device):
    x, w = drawn(4, 6, device=device), drawn(6, device=device)
    _, both = results(rms_norm, (x, w))
    _, (dx,) = results(lambda x: rms_norm(x, w), (x,))
    _, (dw,) = results(lambda w: rms_norm(x, w), (w,))
    assert same_bits(dx, both[0])
    assert same_bits(dw, both[1])
    assert x.grad is None
    assert w.grad is None
    assert not rms_norm(x, w).requires_grad


def test_gradients_are_the_same_bits_in_every_run(backend, device):
    args = (drawn(37, 24, device=device), drawn(24, device=device))
    first = results(rms_norm, args)
    for _ in range(2):
        again = results(rms_norm, args)
        assert all(same_bits(a, b) for a, b in zip(first[1], again[1], strict=True))


def test_one_dimensional_zeros_give_the_same_gradients_ten_times(backend, device):
    args = (torch.zeros(4, device=device), drawn(4, device=device))
    runs = [results(lambda x, w: rms_norm(x, w, EPS), args)[1] for _ in range(10)]
    want = results(llama, args)[1]
    for dx, dw in runs:
        assert same_bits(dw, torch.zeros_like(dw))
        torch.testing.assert_close(dx, want[0], rtol=1e-4, atol=0.0)


def test_parameters_and_subclass_free_buffers_are_accepted(backend, device):
    w = torch.nn.Parameter(drawn(6, device=device))
    x = drawn(2, 6, device=device)
    y = rms_norm(x, w)
    y.sum().backward()
    assert type(y) is Tensor
    assert w.grad is not None
    assert w.grad.shape == (6,)
