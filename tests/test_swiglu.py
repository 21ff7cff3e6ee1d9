"""swiglu and swiglu_packed against float64, numbers by hand, and Hugging Face's two calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn.ops._gated
from liger_fn import swiglu, swiglu_packed
from tests.tolerance import (
    assert_pure_and_close,
    assert_pure_and_exact,
    assert_within_ulps,
    far_apart,
    results,
    same_bits,
)

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]


def plain(gate: Tensor, up: Tensor) -> Tensor:
    """LlamaMLP of Hugging Face: act_fn(gate_proj(x)) * up_proj(x)."""
    return F.silu(gate) * up


def plain_packed(gate_up: Tensor) -> Tensor:
    """Phi3MLP of Hugging Face."""
    gate, up = gate_up.chunk(2, dim=-1)
    return up * F.silu(gate)


def exact(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def exact_packed(gate_up: Tensor) -> Tensor:
    n = gate_up.shape[-1] // 2
    return exact(gate_up[..., :n], gate_up[..., n:])


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def hold_shape(gate: Tensor, up: Tensor, *dys: Tensor) -> None:
    assert_pure_and_close(swiglu, exact, gate, up, dys=dys)


# -- numbers by hand


def close(got: Tensor, wanted: list[float]) -> None:
    want = torch.tensor(wanted, dtype=torch.float64, device=got.device)
    torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-16)


def logs(device: torch.device) -> Tensor:
    return torch.tensor([math.log(3), -math.log(3), 0.0], dtype=torch.float64, device=device)


def test_sigmoid_of_log_3_is_three_quarters(backend, device):
    up = torch.tensor([4.0, 8.0, 5.0], dtype=torch.float64, device=device)
    close(swiglu(logs(device), up), [3 * math.log(3), -2 * math.log(3), 0.0])
    packed = torch.cat((logs(device), up))
    close(swiglu_packed(packed), [3 * math.log(3), -2 * math.log(3), 0.0])


def test_gradients_by_hand(backend, device):
    up = torch.tensor([4.0, 4.0, 6.0], dtype=torch.float64, device=device)
    dy = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64, device=device)
    _, (dgate, dup) = results(swiglu, (logs(device), up), (dy,))
    # s = 3/4, 1/4, 1/2: dgate = dy up s (1 + gate (1 - s)), dup = dy gate s
    log3 = math.log(3)
    close(dgate, [3 + 0.75 * log3, 1 - 0.75 * log3, 6.0])
    close(dup, [0.75 * log3, -0.25 * log3, 0.0])


def test_far_gates_pass_up_through_or_close_without_nan(backend, device):
    gate = torch.tensor([1e4, -1e4, 0.0, 88.8, -104.0], device=device)
    up = torch.full_like(gate, 0.5)
    (y,), (dgate, dup) = results(swiglu, (gate, up), (torch.ones_like(gate),))
    assert y[:3].tolist() == [5e3, 0.0, 0.0]
    assert dgate[:3].tolist() == [0.5, 0.0, 0.25]
    assert dup[:3].tolist() == [1e4, 0.0, 0.0]
    assert all(t.isfinite().all() for t in (y, dgate, dup))


# -- as exact as plain torch


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, dtype, scale):
    gate, up = (scale * drawn(3, 4, 40, device=device, dtype=dtype) for _ in range(2))
    assert_pure_and_exact(swiglu, plain, exact, gate, up)
    packed = torch.cat((gate, up), -1)
    assert_pure_and_exact(swiglu_packed, plain_packed, exact_packed, packed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_gate_under_a_large_up_keeps_the_error_rule(backend, device, dtype):
    gate, up = (s * drawn(6, 40, device=device, dtype=dtype) for s in (1e-4, 1e4))
    assert_pure_and_exact(swiglu, plain, exact, gate, up)


@pytest.mark.parametrize(
    ("gate_dtype", "up_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float16),
    ],
)
def test_mixed_dtypes_promote_as_the_product_does(backend, device, gate_dtype, up_dtype):
    gate, up = (
        drawn(4, 24, device=device, dtype=gate_dtype),
        drawn(4, 24, device=device, dtype=up_dtype),
    )
    assert_pure_and_exact(swiglu, plain, exact, gate, up)


@pytest.mark.parametrize("doubled", [0, 1])
def test_float64_beside_float32_gives_float64(backend, device, doubled):
    args = [drawn(3, 9, device=device, dtype=torch.float32) for _ in range(2)]
    args[doubled] = args[doubled].double()
    assert_pure_and_exact(swiglu, plain, exact, *args)


@pytest.mark.parametrize("dtype", HALVES)
def test_equals_the_two_calls_of_hugging_face(backend, device, dtype):
    gate, up = (drawn(16, 96, device=device, dtype=dtype) for _ in range(2))
    packed = torch.cat((gate, up), -1)
    pairs = [(swiglu(gate, up), plain(gate, up)), (swiglu_packed(packed), plain_packed(packed))]
    for got, want in pairs:
        if backend == "reference":
            assert same_bits(got, want)
        else:  # another exp may tip a rounding
            assert_within_ulps(got, want, 1, of=dtype)


# -- shapes


@pytest.mark.parametrize("shape", [(1,), (4,), (1, 1), (3, 1), (2, 3, 1), (2, 3, 4), (2, 1, 3, 7)])
def test_any_number_of_leading_axes(backend, device, shape):
    hold_shape(drawn(*shape, device=device), drawn(*shape, device=device))
    packed = drawn(*shape[:-1], 2 * shape[-1], device=device)
    assert_pure_and_close(swiglu_packed, exact_packed, packed)


@pytest.mark.parametrize("n", [2, 3, 7, 8, 9, 127, 128, 129, 1023, 1024, 1025, 2500])
def test_widths_about_powers_of_two_and_beyond_a_block(backend, device, n):
    hold_shape(drawn(2, n, device=device), drawn(2, n, device=device))
    assert_pure_and_close(swiglu_packed, exact_packed, drawn(2, 2 * n, device=device))


@pytest.mark.parametrize(
    "shape", [(0, 4), (3, 0, 4), (0, 2, 4), (0, 3000), (0,), (3, 0), (2, 3, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_in_gives_nothing_out(backend, device, shape, dtype):
    gate, up = drawn(*shape, device=device, dtype=dtype), drawn(*shape, device=device, dtype=dtype)
    (y,), grads = results(swiglu, (gate, up))
    assert all(t.shape == shape and t.dtype == dtype for t in (y, *grads))


@pytest.mark.parametrize(
    "shape", [(0, 4), (3, 0, 4), (0, 2, 4), (0, 6000), (0,), (3, 0), (2, 3, 0)]
)
def test_nothing_in_gives_nothing_out_when_packed(backend, device, shape):
    packed = drawn(*shape, device=device)
    (y,), (d,) = results(swiglu_packed, (packed,))
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    assert d.shape == shape


# -- strides

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {  # of (12, 20)
    "transposed": lambda t: t.T,
    "columns of a wider tensor": lambda t: t[:, 3:12],
    "every other row": lambda t: t[::2],
    "every other column": lambda t: t[:, ::2],
    "one row expanded": lambda t: t[0].expand(6, 20),
    "one row expanded twice": lambda t: t[0].expand(2, 3, 20),
    "one column expanded": lambda t: t[:, :1].expand(12, 8),
    "axes permuted": lambda t: t.view(3, 4, 20).permute(1, 0, 2),
    "last axis moved first": lambda t: t.view(12, 5, 4)[:6].permute(1, 2, 0)[:2],
    "columns of three axes": lambda t: t.view(3, 4, 20)[..., :6],
    "one column": lambda t: t[:, 4:5],
    "one row of a transpose": lambda t: t.T[3],
    "an offset into storage": lambda t: t[5:],
}
view = pytest.mark.parametrize("of", VIEWS.values(), ids=VIEWS.keys())


@view
@pytest.mark.parametrize("strided", ["gate", "up", "dy"])
def test_any_strides(backend, device, of, strided):
    t = of(drawn(12, 20, device=device))
    a, b = drawn(*t.shape, device=device), drawn(*t.shape, device=device)
    hold_shape(*{"gate": (t, a, b), "up": (a, t, b), "dy": (a, b, t)}[strided])


@pytest.mark.parametrize(
    "of", [pytest.param(of, id=name) for name, of in VIEWS.items() if name != "one column"]
)
def test_any_strides_when_packed(backend, device, of):
    t = of(drawn(12, 20, device=device))
    t = t[..., : t.shape[-1] // 2 * 2]
    assert_pure_and_close(swiglu_packed, exact_packed, t)
    assert_pure_and_close(
        swiglu_packed, exact_packed, drawn(*t.shape[:-1], 2 * t.shape[-1], device=device), dys=(t,)
    )


def halves(
    device: torch.device, *lead: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    return drawn(*lead, 14, device=device, dtype=dtype).chunk(2, -1)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_halves_of_one_tensor(backend, device, lead):
    hold_shape(*halves(device, *lead))
    gate, up = halves(device, *lead)
    hold_shape(up, gate)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_kernels_read_and_write_halves_in_place(device, monkeypatch, lead):
    launches: list[tuple[Any, ...]] = []
    ops = liger_fn.ops._gated
    launch = ops.launch
    monkeypatch.setattr(ops, "launch", lambda *a, **kw: (launches.append(a[2:]), launch(*a, **kw)))
    gate, up = halves(device, *lead, dtype=torch.float32)
    packed = drawn(*lead, 14, device=device, dtype=torch.float32)
    with liger_fn.using("triton"):
        results(swiglu, (gate, up))
        _, (d,) = results(swiglu_packed, (packed,))
    assert len(launches) == 4
    for read in (launches[0][:2], launches[1][1:3]):
        assert [t.data_ptr() for t in read] == [gate.data_ptr(), up.data_ptr()]
    for there, given in [
        (launches[2][:2], packed),
        (launches[3][1:3], packed),
        (launches[3][3:5], d),
    ]:
        wanted = [half.data_ptr() for half in given.chunk(2, -1)]
        assert [t.data_ptr() for t in there] == wanted


def test_packed_agrees_with_two_tensors_bit_for_bit(backend, device):
    packed = drawn(3, 5, 14, device=device, dtype=torch.bfloat16)
    (y,), (d,) = results(swiglu_packed, (packed,))
    (y2,), d2 = results(swiglu, packed.chunk(2, -1))
    assert same_bits(y, y2)
    assert same_bits(d, torch.cat(d2, -1))
    assert d.is_contiguous()


def test_rows_may_lie_beyond_2_to_the_31_elements(backend, device, tmp_path):
    packed = far_apart(device, tmp_path, 12)
    assert_pure_and_exact(swiglu_packed, plain_packed, exact_packed, packed)
    assert_pure_and_exact(swiglu, plain, exact, *packed.chunk(2, -1))


# -- purity


def test_one_tensor_as_both_gate_and_up(backend, device):
    u = drawn(3, 5, device=device)

    def of(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        def both(u: Tensor) -> Tensor:
            e = u.exp()  # saves its own output for backward
            return f(e, e)

        return both

    _, (got,) = results(of(swiglu), (u,))
    _, (want,) = results(of(exact), (u,))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("f", [swiglu, lambda gate, up: swiglu_packed(torch.cat((gate, up), -1))])
def test_a_second_backward_gives_the_same_gradients(backend, device, f):
    leaves = [drawn(3, 6, device=device).requires_grad_() for _ in range(2)]
    y = f(*leaves)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    second = torch.autograd.grad(y, leaves, dy)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_frozen_arguments_get_no_gradient_and_change_no_other(backend, device):
    gate, up = drawn(3, 6, device=device), drawn(3, 6, device=device)
    _, both = results(swiglu, (gate, up))
    _, (dgate,) = results(lambda gate: swiglu(gate, up), (gate,))
    _, (dup,) = results(lambda up: swiglu(gate, up), (up,))
    assert same_bits(dgate, both[0])
    assert same_bits(dup, both[1])
    assert gate.grad is None
    assert up.grad is None
    assert not swiglu(gate, up).requires_grad


def test_the_kernel_is_not_told_to_write_a_frozen_gradient(device, monkeypatch):
    launches: list[tuple[Any, ...]] = []
    ops = liger_fn.ops._gated
    launch = ops.launch
    monkeypatch.setattr(ops, "launch", lambda *a, **kw: (launches.append(a[2:]), launch(*a, **kw)))
    gate, up = drawn(3, 6, device=device), drawn(3, 6, device=device)
    with liger_fn.using("triton"):
        results(lambda gate: swiglu(gate, up), (gate,))
        results(lambda up: swiglu(gate, up), (up,))
    assert launches[1][4] is None
    assert launches[3][3] is None


def test_a_sum_as_loss_gives_the_gradients_of_ones(backend, device):
    gate, up = drawn(3, 6, device=device), drawn(3, 6, device=device)
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    swiglu(*leaves).sum().backward()
    _, grads = results(swiglu, (gate, up), (torch.ones_like(gate),))
    assert all(same_bits(leaf.grad, g) for leaf, g in zip(leaves, grads, strict=True))
