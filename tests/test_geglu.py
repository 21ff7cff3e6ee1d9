"""geglu and geglu_packed. Strides, shapes and purity of the kernels they share: test_swiglu."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_fn import geglu, geglu_packed
from tests.tolerance import (
    assert_pure_and_close,
    assert_pure_and_exact,
    assert_within_ulps,
    results,
    same_bits,
)

HALVES = [torch.bfloat16, torch.float16]
both = pytest.mark.parametrize("how", ["tanh", "none"])


def plain(gate: Tensor, up: Tensor, *, how: str) -> Tensor:
    """GemmaMLP of Hugging Face: act_fn(gate_proj(x)) * up_proj(x)."""
    return F.gelu(gate, approximate=how) * up


def exact(gate: Tensor, up: Tensor, *, how: str) -> Tensor:
    if how == "none":
        return 0.5 * gate * torch.erfc(-gate * math.sqrt(0.5)) * up
    u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(2 * u) * up


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def close(got: Tensor, wanted: list[float]) -> None:
    want = torch.tensor(wanted, dtype=torch.float64, device=got.device)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize(
    ("how", "share"),
    # (1 + erf(1 / sqrt(2))) / 2, and (1 + tanh(sqrt(2 / pi) * 1.044715)) / 2
    [("none", 0.8413447460685429), ("tanh", 0.8411919906082768)],
)
def test_the_share_of_one_that_passes(backend, device, how, share):
    gate = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64, device=device)
    up = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64, device=device)
    (y,), (dgate, dup) = results(partial(geglu, approximate=how), (gate, up), (gate * 0 + 1,))
    close(y, [2 * share, -3 * (1 - share), 0.0])
    close(dup, [share, share - 1, 0.0])
    close(dgate[2:], [2.5])
    close(geglu_packed(torch.cat((gate, up)), approximate=how), y.tolist())


def test_the_slope_at_one_of_the_exact_form(backend, device):
    one = torch.ones(1, dtype=torch.float64, device=device)
    _, (dgate, _) = results(partial(geglu, approximate="none"), (one, one), (one,))
    close(dgate, [0.8413447460685429 + math.exp(-0.5) / math.sqrt(2 * math.pi)])


def test_the_slope_keeps_its_digits_where_the_gate_is_nearly_open(backend, device):
    gate = torch.linspace(-9, 9, 257, device=device)
    one = torch.ones_like(gate)
    _, (dgate, _) = results(geglu, (gate, one), (one,))
    _, (want, _) = results(
        partial(exact, how="tanh"), (gate.double(), one.double()), (one.double(),)
    )
    assert (dgate - want).abs().amax() <= 4 * 2**-24


@both
def test_far_gates_pass_up_through_or_close_without_nan(backend, device, how):
    gate = torch.tensor([1e4, -1e4, 1e25, -1e25, 0.0], device=device)
    up = torch.full_like(gate, 0.5)
    (y,), (dgate, dup) = results(partial(geglu, approximate=how), (gate, up), (up * 2,))
    assert y.tolist() == (gate.clamp(min=0) * 0.5).tolist()
    assert dgate.tolist() == [0.5, 0.0, 0.5, 0.0, 0.25]
    assert dup.tolist() == gate.clamp(min=0).tolist()


@both
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, dtype, scale, how):
    gate, up = (scale * drawn(3, 4, 40, device=device, dtype=dtype) for _ in range(2))
    ours, torchs, oracle = (
        partial(geglu, approximate=how), partial(plain, how=how), partial(exact, how=how)
    )  # fmt: skip
    assert_pure_and_exact(ours, torchs, oracle, gate, up)


@both
@pytest.mark.parametrize("dtype", HALVES)
def test_equals_the_two_calls_of_hugging_face(backend, device, dtype, how):
    gate, up = (drawn(16, 96, device=device, dtype=dtype) for _ in range(2))
    got, want = geglu(gate, up, approximate=how), plain(gate, up, how=how)
    if backend == "reference":
        assert same_bits(got, want)
    else:  # another exp may tip a rounding
        assert_within_ulps(got, want, 2, of=dtype)


@both
@pytest.mark.parametrize("n", [1, 7, 8, 9, 1025, 2500])
def test_widths_about_powers_of_two_and_beyond_a_block(backend, device, n, how):
    gate, up = drawn(2, n, device=device), drawn(2, n, device=device)
    assert_pure_and_close(partial(geglu, approximate=how), partial(exact, how=how), gate, up)


@both
@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4), (3, 0)])
def test_nothing_in_gives_nothing_out(backend, device, shape, how):
    gate, up = drawn(*shape, device=device), drawn(*shape, device=device)
    (y,), grads = results(partial(geglu, approximate=how), (gate, up))
    assert all(t.shape == shape for t in (y, *grads))


@both
def test_packed_agrees_with_two_tensors_bit_for_bit(backend, device, how):
    packed = drawn(3, 5, 14, device=device, dtype=torch.bfloat16)
    (y,), (d,) = results(partial(geglu_packed, approximate=how), (packed,))
    (y2,), d2 = results(partial(geglu, approximate=how), packed.chunk(2, -1))
    assert same_bits(y, y2)
    assert same_bits(d, torch.cat(d2, -1))


def test_mixed_dtypes_promote_as_the_product_does(backend, device):
    gate = drawn(4, 24, device=device, dtype=torch.bfloat16)
    up = drawn(4, 24, device=device, dtype=torch.float32)
    assert_pure_and_exact(geglu, partial(plain, how="tanh"), partial(exact, how="tanh"), gate, up)


def test_errors():
    x = torch.ones(2, 3)
    for call in (
        lambda: geglu(x, x, approximate="erf"),
        lambda: geglu_packed(x[:, :2], approximate=""),
    ):
        with pytest.raises(
            ValueError, match=r"^geglu(_packed)?: approximate must be one of 'tanh', "
        ):
            call()
    with pytest.raises(ValueError, match=r"^geglu: the shape must be the same: \(1, 3\) in up but"):
        geglu(x, x[:1])
    with pytest.raises(
        ValueError, match=r"^geglu_packed: the last axis of gate_up must be even, got 3"
    ):
        geglu_packed(x)
