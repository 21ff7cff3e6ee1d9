"""sparsemax against a sort in float64, numbers by hand, and what a projection must satisfy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from liger_fn import _launch, sparsemax
from tests.tolerance import assert_pure_and_close, far_apart, results, same_bits, ulp

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
KEPT, MANY = 6, 256  # rows that the interpreter walks, and plain torch


def exact(x: Tensor) -> Tensor:
    """Algorithm 1 of the paper, which differentiates by itself."""
    z = x.sort(-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    size = (1 + k * z > z.cumsum(-1)).sum(-1, keepdim=True)
    tau = (z.cumsum(-1).gather(-1, size - 1) - 1) / size
    return torch.relu(x - tau)


def hold(x: Tensor, kept: int = KEPT) -> None:
    """Hold the first rows and their gradients to twice the error of plain torch plus an ulp.

    Plain torch runs in float32. Near the threshold its support may differ from that of float64, as
    ours may: rows where an entry is that near are left out of gradients.
    """
    dy = torch.randn(x.shape, device=x.device).to(x.dtype)
    (y,), (dx,) = results(sparsemax, (x[:kept],), (dy[:kept],))
    (want,), (d_want,) = results(exact, (x.double(),), (dy.double(),))
    (plain,), (d_plain,) = results(lambda x: exact(x.float()).to(x.dtype), (x,), (dy,))
    assert y.dtype == dx.dtype == x.dtype
    clear = [((t > 0) == (want[: len(t)] > 0)).all(-1) for t in (y, plain)]
    assert clear[0].any()
    for got, p, e, (ours, theirs) in (
        (y, plain, want, (slice(None), slice(None))),
        (dx, d_plain, d_want, clear),
    ):
        error = (got.double() - e[:kept])[ours].abs().amax()
        assert error <= 2 * (p.double() - e)[theirs].abs().amax() + ulp(e.abs().amax(), x.dtype)


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


# -- numbers by hand


@pytest.mark.parametrize(
    ("x", "want"),
    [
        ([1.0, 0.5, -1.0], [0.75, 0.25, 0.0]),  # tau 1/4
        ([0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]),  # tau 0, on an entry: it is outside
        ([3.0, 3.0, 3.0, 3.0], [0.25] * 4),
        ([2.0, 1.0, 0.0], [1.0, 0.0, 0.0]),  # a lead of 1 takes all
        ([-7.0], [1.0]),
    ],
)
def test_scores_by_hand(backend, device, x, want):
    assert sparsemax(torch.tensor(x, device=device)).tolist() == pytest.approx(want, abs=1e-7)


def test_a_gradient_by_hand(backend, device):
    # support of two, mean of dy there 3
    x = torch.tensor([1.0, 0.5, -1.0], device=device)
    _, (dx,) = results(sparsemax, (x,), (torch.tensor([4.0, 2.0, 9.0], device=device),))
    assert dx.tolist() == [1.0, -1.0, 0.0]


# -- as exact as plain torch


@each_dtype
@pytest.mark.parametrize("scale", [1e-4, 0.1, 1.0, 1e4])
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, scale, dtype):
    hold((scale * drawn(MANY, 40, device=device)).to(dtype))


@pytest.mark.parametrize("block", [4, 8192])
@pytest.mark.parametrize("scale", [1e-4, 0.1, 1.0, 1e4])
def test_float64_finds_the_threshold_of_the_sort(backend, device, monkeypatch, scale, block):
    monkeypatch.setattr(_launch, "_MAX_BLOCK", block)
    assert_pure_and_close(sparsemax, exact, scale * drawn(6, 21, device=device))


@each_dtype
def test_a_large_common_offset_costs_no_digits(backend, device, dtype):
    x = drawn(KEPT, 33, device=device, dtype=dtype).float().mul(64).round() / 64
    a, b = (results(sparsemax, (t,)) for t in (x + 16_384, x))  # exact in float32
    assert all(map(same_bits, (*a[0], *a[1]), (*b[0], *b[1])))


@pytest.mark.parametrize("n", [65_537, 131_072])
@pytest.mark.parametrize("scale", [1e-4, 0.05, 1.0])
def test_long_rows_sum_to_one(backend, device, n, scale):
    x = scale * drawn(2, n, device=device, dtype=torch.float32)
    y, want = sparsemax(x), exact(x.double())
    assert (y.double() - want).abs().max() <= 1e-6 * want.max()
    assert (y.double().sum(-1) - 1).abs().max() <= 1e-5


def staircase(n: int) -> Tensor:
    """Scores that shed entries a few at a time: each is below the threshold of those above it."""
    gaps = torch.logspace(0, -12, n - 1, base=2, dtype=torch.float64)
    return torch.cat((torch.zeros(1, dtype=torch.float64), -gaps.flip(0)))


@pytest.mark.parametrize("n", [63, 500])
def test_thresholds_that_move_slowly_are_found(backend, device, n):
    x = staircase(n).to(device).expand(2, n)
    assert_pure_and_close(sparsemax, exact, x.contiguous())


# -- ties, infinities and NaN


@each_dtype
def test_ties_share_alike(backend, device, dtype):
    x = (2 * drawn(KEPT, 40, device=device)).round().div(4).to(dtype)
    (y,), (dx,) = results(sparsemax, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(y.double(), exact(x.double()), rtol=0, atol=torch.finfo(dtype).eps)
    for row, shares in zip(x, y, strict=True):
        assert all(shares[row == value].unique().numel() == 1 for value in row.unique())
    assert not dx.any()  # dy is constant on the support


@each_dtype
@pytest.mark.parametrize("block", [4, 8192])
def test_a_gradient_of_equal_numbers_is_exactly_nothing(backend, device, monkeypatch, block, dtype):
    # the mean of equal numbers, rounded, need not be theirs
    monkeypatch.setattr(_launch, "_MAX_BLOCK", block)
    sizes = torch.logspace(-3, 1, 24, device=device)[:, None]
    x = (sizes * drawn(24, 33, device=device)).to(dtype)
    x[0], x[1:9, :7] = -2310.4119, -math.inf  # all in the support; and none of the first block
    dy = drawn(24, 1, device=device, dtype=dtype).expand(24, 33)
    _, (dx,) = results(sparsemax, (x,), (dy,))
    assert not dx.any()


@pytest.mark.parametrize("block", [4, 8192])
def test_entries_of_minus_infinity_are_outside(backend, device, monkeypatch, block):
    monkeypatch.setattr(_launch, "_MAX_BLOCK", block)
    x = drawn(3, 11, device=device)
    x[0, ::2] = x[1, :9] = x[2, 1:] = -math.inf  # the second row begins with blocks of them
    (y,), (dx,) = results(sparsemax, (x,))
    for i, free in enumerate([slice(1, None, 2), slice(9, None), slice(1)]):
        torch.testing.assert_close(y[i, free], exact(x[i, free]), rtol=1e-14, atol=1e-14)
    assert not y[x == -math.inf].any()
    assert not dx[x == -math.inf].any()
    assert dx.isfinite().all()


@pytest.mark.parametrize("held", [[-math.inf] * 9, [math.nan, *[0.0] * 8], [0.0] * 8 + [math.inf]])
@pytest.mark.parametrize("block", [4, 8192])
def test_what_has_no_projection_is_nan_in_its_row_alone(backend, device, monkeypatch, block, held):
    monkeypatch.setattr(_launch, "_MAX_BLOCK", block)
    x = drawn(3, 9, device=device, dtype=torch.float32)
    clean = sparsemax(x)
    x[1] = torch.tensor(held, device=device)
    (y,), (dx,) = results(sparsemax, (x,))
    assert y[1].isnan().all()
    assert dx[1].isnan().all()
    assert same_bits(y[::2], clean[::2])
    assert dx[::2].isfinite().all()


# -- shapes and strides


@pytest.mark.parametrize(
    "shape",
    [(1,), (3, 1), (5,), (2, 1, 3, 7), (4, 127), (4, 128), (4, 129), (2, 8193), (0, 5), (3, 0, 5)],
    ids=str,
)
def test_every_shape_agrees_with_the_sort(backend, device, shape):
    assert_pure_and_close(sparsemax, exact, drawn(*shape, device=device))


@pytest.mark.parametrize(
    "of",
    [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[::2, 3:], lambda t: t[0].expand(6, 20),
     lambda t: t.view(3, 4, 20).permute(2, 0, 1)],
    ids=["transposed", "stepped", "offset", "expanded row", "permuted"],
)  # fmt: skip
def test_rows_and_upstream_gradients_may_have_any_strides(backend, device, of):
    x, dy = (of(drawn(12, 20, device=device)) for _ in range(2))
    assert_pure_and_close(sparsemax, exact, x, dys=(dy,))


def test_rows_may_lie_beyond_2_to_the_31_elements(backend, device, tmp_path):
    hold(far_apart(device, tmp_path, 6), kept=3)


# -- errors


def test_x_must_have_columns_and_be_floating():
    with pytest.raises(ValueError, match=r"^sparsemax: x must have shape \(..., n\), got \(\)$"):
        sparsemax(torch.zeros(()))
    with pytest.raises(ValueError, match=r"^sparsemax: axis n must not be empty$"):
        sparsemax(torch.zeros(3, 0))
    with pytest.raises(TypeError, match=r"^sparsemax: x must hold float32, .*, got torch.int64$"):
        sparsemax(torch.zeros(3, dtype=torch.int64))
