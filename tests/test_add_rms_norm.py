"""add_rms_norm against rms_norm of a torch sum, float64 torch, and numbers by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_fn import _launch, add_rms_norm, rms_norm
from tests.test_check import raises
from tests.tolerance import (
    assert_pure_and_close,
    assert_pure_and_exact,
    far_apart,
    home,
    results,
    same_bits,
)

EPS = 1e-5
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES]
MIXED = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), tuple(HALVES)]
casting = pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
Pair = tuple[Tensor, Tensor]


def ours(casting: str = "llama") -> Callable[..., Pair]:
    return lambda x, residual, w: add_rms_norm(x, residual, w, EPS, casting=casting)


def apart(casting: str = "llama") -> Callable[..., Pair]:
    """A torch sum, then rms_norm."""
    return lambda x, residual, w: (
        rms_norm(x + residual, w, EPS, casting=casting),
        x + residual,
    )


def exact(x: Tensor, residual: Tensor, w: Tensor) -> Pair:
    return F.rms_norm(x + residual, w.shape, w, EPS), x + residual


def plain(x: Tensor, residual: Tensor, w: Tensor) -> Pair:
    """The sum of a Hugging Face decoder layer, and its LlamaRMSNorm."""
    s = x + residual
    h = s.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return w * h.to(s.dtype), s


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def arguments(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple:
    return (*drawn(2, *shape, device=device, dtype=dtype),
            drawn(shape[-1], device=device, dtype=dtype))  # fmt: skip


def close(got: Tensor, wanted: list[float]) -> None:
    want = torch.tensor(wanted, dtype=torch.float64, device=got.device)
    torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15)


# -- numbers by hand


def test_1_4_and_2_0_add_to_3_4_whose_length_leaves(backend, device):
    x, residual, w = torch.tensor(
        [[1.0, 4.0], [2.0, 0.0], [1.0, -1.0]], dtype=torch.float64, device=device
    )
    y, s = add_rms_norm(x, residual, w, 0.0)
    close(s, [3.0, 4.0])
    close(y, [0.6 * 2**0.5, -0.8 * 2**0.5])


def test_eps_is_added_to_the_mean_square_and_offset_to_the_gain(backend, device):
    x, residual, w = torch.tensor(
        [[5.0, 0.0], [-3.0, -2.0], [0.5, 3.0]], dtype=torch.float64, device=device
    )  # the sum is 2, -2: 4 + 12 = 4**2
    close(add_rms_norm(x, residual, w, 12.0, offset=1.0, casting="gemma").y, [0.75, -2.0])


def test_the_gradient_of_the_sum_adds_to_that_through_the_norm(backend, device):
    x, residual, w, dy, ds = torch.tensor(
        [[1.0, 4.0], [2.0, 0.0], [1.0, 1.0], [1.0, 0.0], [10.0, 20.0]],
        dtype=torch.float64, device=device,
    )  # fmt: skip
    _, (dx, dresidual, dw) = results(
        lambda x, r, w: tuple(add_rms_norm(x, r, w, 0.0)), (x, residual, w), (dy, ds)
    )
    close(dx, [10 + 0.64 * 2**0.5 / 5, 20 - 0.48 * 2**0.5 / 5])
    close(dresidual, dx.tolist())
    close(dw, [0.6 * 2**0.5, 0.0])


# -- bit for bit as rms_norm of the sum


@casting
@pytest.mark.parametrize("n", [1, 33, 20000])  # the last is longer than a block
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_equals_rms_norm_of_the_sum_bit_for_bit(backend, device, casting, x_dtype, dtype, n):
    x, residual = drawn(2, n, device=device, dtype=x_dtype), drawn(2, n, device=device, dtype=dtype)
    w = drawn(n, device=device, dtype=dtype)
    for gain in (w, None):
        (y, s), (wanted, s_wanted) = (f(casting)(x, residual, gain) for f in (ours, apart))
        assert same_bits(s, s_wanted)
        if x_dtype == dtype or _launch._INTERPRET or backend == "reference":
            assert same_bits(y, wanted)
        else:  # a compiled sum over s may go another way where s comes from two dtypes
            torch.testing.assert_close(y, wanted)


@casting
def test_gradients_without_one_of_the_sum_are_those_of_rms_norm(backend, device, casting):
    args = arguments(5, 40, device=device)
    got = results(lambda *a: ours(casting)(*a)[0], args)
    want = results(lambda *a: apart(casting)(*a)[0], args)
    assert all(map(same_bits, got[1], want[1]))


# -- as exact as plain torch


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, dtype, scale):
    x, residual, w = arguments(2, 3, 40, device=device, dtype=dtype)
    assert_pure_and_exact(ours(), plain, exact, scale * x, scale * residual, w)


@pytest.mark.parametrize(("x_dtype", "dtype"), MIXED)
def test_mixed_dtypes_promote_as_in_torch(backend, device, x_dtype, dtype):
    x, residual, w = arguments(6, 24, device=device)
    assert_pure_and_exact(ours(), plain, exact, x.to(x_dtype), residual.to(dtype), w.to(dtype))


# -- outputs and arguments alone


def test_each_output_alone_pulls_back_what_it_should(backend, device):
    args = arguments(5, 9, device=device, dtype=torch.float64)
    for i in range(2):
        leaves = [t.clone().requires_grad_() for t in args]
        out, want = ours()(*leaves)[i], exact(*leaves)[i]
        dy = torch.randn_like(out)
        given = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        for got, e in zip(torch.autograd.grad(out, leaves, dy, **given),
                          torch.autograd.grad(want, leaves, dy, **given), strict=True):  # fmt: skip
            torch.testing.assert_close(got, e, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_two_terms_are_one_tensor_but_apart_in_leaves(backend, device):
    args = arguments(4, 7, device=device)
    _, (dx, dresidual, _) = results(ours(), args)
    assert home(dx) == home(dresidual)
    x, residual, w = (t.clone().requires_grad_() for t in args)
    ours()(x, residual, w)[0].sum().backward()
    assert same_bits(x.grad, residual.grad)
    assert home(x.grad) != home(residual.grad)


def test_of_the_terms_and_their_sum_backward_keeps_the_sum_alone(backend, device):
    kept: list[Tensor] = []
    x, residual, w = (t.requires_grad_() for t in arguments(4, 7, device=device))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, s = ours()(x, residual, w)
    assert {home(t) for t in kept} & {home(t) for t in (x, residual, s)} == {home(s)}


def test_each_subset_of_gradients_holds_the_same_numbers(backend, device):
    args = arguments(4, 6, device=device)
    dys = (torch.randn_like(args[0]), torch.randn_like(args[0]))
    _, every = results(ours(), args, dys)
    for bits in itertools.product([False, True], repeat=3):
        leaves = [t.clone().requires_grad_(on) for t, on in zip(args, bits, strict=True)]
        for y, dy in zip(ours()(*leaves), dys, strict=True):
            if y.requires_grad:
                torch.autograd.backward(y, dy, retain_graph=True)
        for t, on, want in zip(leaves, bits, every, strict=True):
            torch.testing.assert_close(t.grad, want if on else None)


def test_x_may_be_its_own_residual(backend, device):
    x, _, w = arguments(3, 8, device=device, dtype=torch.float64)
    assert_pure_and_close(lambda x, w: ours()(x, x, w), lambda x, w: exact(x, x, w), x, w)


# -- shapes and strides


@pytest.mark.parametrize(
    "shape",
    [(1,), (7,), (3, 1), (2, 3, 4), (33, 5), (4, 127), (4, 128), (4, 129), (2, 8193), (2, 65537),
     pytest.param((1, 131072), marks=pytest.mark.slow)],
)  # fmt: skip
def test_any_shape(backend, device, shape):
    args = arguments(*shape, device=device, dtype=torch.float64)
    assert_pure_and_close(ours(), exact, *args)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 9000), (0,), (2, 3, 0)])
def test_nothing_gives_nothing_and_the_gain_a_gradient_of_zero(backend, device, shape):
    ys, (dx, dresidual, dw) = results(ours(), arguments(*shape, device=device))
    assert all(t.shape == shape for t in (*ys, dx, dresidual))
    assert dw.shape == shape[-1:]
    assert not dw.any()


@pytest.mark.parametrize(
    "of", [lambda t: t.T, lambda t: t[::2, 1::3], lambda t: t[:1].expand(6, -1)]
)
def test_any_strides(backend, device, of):
    x, other = of(drawn(12, 20, device=device).double()), drawn(12, 20, device=device).double()
    other, w = of(other).contiguous(), drawn(x.shape[-1], device=device).double()
    assert_pure_and_close(ours(), exact, x, other, w)
    assert_pure_and_close(ours(), exact, other, x, w)
    assert_pure_and_close(ours(), exact, other, other, w, dys=(x, x))


def test_rows_may_lie_beyond_2_to_the_31_elements(backend, device, tmp_path):
    x, w = far_apart(device, tmp_path, 6), drawn(6, device=device, dtype=torch.bfloat16)
    assert_pure_and_exact(ours(), plain, exact, x, x.flip(0), w)


# -- errors


@pytest.mark.parametrize(
    ("x", "residual", "w", "message"),
    [
        ((), (), (1,), "x must have shape (..., n), got ()"),
        ((2, 4), (2, 3), (4,), "axis n is 3 in residual but 4 in x"),
        ((2, 4), (2, 4), (3,), "axis n is 3 in w but 4 in x"),
        ((2, 4), (4,), (4,), "the shape must be the same: (4,) in residual but (2, 4) in x"),
        ((2, 4), (1, 4), (4,), "the shape must be the same: (1, 4) in residual but (2, 4) in x"),
    ],
)
def test_shapes_that_disagree_are_refused(x, residual, w, message):
    args = map(torch.ones, (x, residual, w))
    raises(ValueError, f"add_rms_norm: {message}", add_rms_norm, *args)


def test_an_unknown_casting_and_what_is_no_floating_tensor_are_refused():
    x, integers = torch.ones(2, 4), torch.ones(2, 4, dtype=torch.int64)
    message = "add_rms_norm: casting must be one of 'llama', 'gemma', 'none', got 'hf'"
    raises(ValueError, message, add_rms_norm, x, x, None, casting="hf")
    wanted = "residual must hold float32, bfloat16, float16 or float64, got torch.int64"
    raises(TypeError, f"add_rms_norm: {wanted}", add_rms_norm, x, integers, None)
