"""Softmax over the last axis.

    y = exp(x - top) / total    top = max(x)    total = sum(exp(x - top))       x, y: (..., n)

Pullback of dy:

    dx = y * (dy - sum(dy * y))

In float32 (float64 for float64 x); y and dx take the dtype of x. Backward keeps y, not x, as torch
does. An entry of -inf is exactly 0, a row of nothing else NaN. Rows longer than a block are read
twice, after Milakov and Gimelshein, 2018, arXiv:1805.02867.
"""

from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._launch import fresh, launch, row_tile, rows_of, tl, triton
from liger_fn._math import by_lane, cast, of_lanes, online, up, whole, wide
from liger_fn._vjp import custom_vjp

# -- reference -------------------------------------------------------------------------------------


def _fwd_ref(x: Tensor) -> tuple[Tensor]:
    h = wide(x)
    top = (h.detach().amax if h.shape[-1] else h.sum)(-1, keepdim=True)  # no maximum of nothing
    e = (h - top).exp()
    return (cast(e / e.sum(-1, keepdim=True), x.dtype),)


def _bwd_ref(dy: Tensor, y: Tensor, *, wanted: tuple[bool, ...]) -> tuple[Tensor]:
    p, dy = wide(y), wide(dy)
    return (cast(p * (dy - (dy * p).sum(-1, keepdim=True)), y.dtype),)


# -- kernels: a row that FITS a block stays in registers -------------------------------------------


@triton.jit
def _fwd_kernel(x_ptr, y_ptr, n, FITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x_ptr, y_ptr = x_ptr + row * n, y_ptr + row * n
    if FITS:
        x = up(tl.load(x_ptr + col, col < n, other=-float("inf")))
        e = tl.where(col < n, tl.exp(x - tl.max(x)), 0.0)
        tl.store(y_ptr + col, e / tl.sum(e), col < n)
    else:
        zero = up(tl.full((), 0.0, x_ptr.dtype.element_ty))
        tops, totals = of_lanes(zero - float("inf"), BLOCK), of_lanes(zero, BLOCK)
        for k in range(0, n, BLOCK):
            x = up(tl.load(x_ptr + k + col, k + col < n, other=-float("inf")))
            tops, totals = online(tops, totals, by_lane(x), 1.0)
        top, total = whole(tops, totals, 1.0)
        for k in range(0, n, BLOCK):
            x = up(tl.load(x_ptr + k + col, k + col < n, other=0.0))
            tl.store(y_ptr + k + col, tl.exp(x - top) / total, k + col < n)


@triton.jit
def _bwd_kernel(dy_ptr, y_ptr, dx_ptr, n, FITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    dy_ptr, y_ptr, dx_ptr = dy_ptr + row * n, y_ptr + row * n, dx_ptr + row * n
    if FITS:
        dy, y = _load(dy_ptr, y_ptr, col, n)
        tl.store(dx_ptr + col, y * (dy - tl.sum(dy * y)), col < n)
    else:
        sums = up(tl.zeros((BLOCK,), y_ptr.dtype.element_ty))
        for k in range(0, n, BLOCK):
            dy, y = _load(dy_ptr, y_ptr, k + col, n)
            sums += dy * y
        c = tl.sum(sums)
        for k in range(0, n, BLOCK):
            dy, y = _load(dy_ptr, y_ptr, k + col, n)
            tl.store(dx_ptr + k + col, y * (dy - c), k + col < n)


@triton.jit
def _load(dy_ptr, y_ptr, col, n):
    y = up(tl.load(y_ptr + col, col < n, other=0.0))
    return tl.load(dy_ptr + col, col < n, other=0.0).to(y.dtype), y


def _fwd_triton(x: Tensor) -> tuple[Tensor]:
    n, tile = x.shape[-1], row_tile(x.shape[-1], 16384)
    rows, y = rows_of(x, n).contiguous(), fresh(x)
    launch(_fwd_kernel, (rows.shape[0],), rows, y, n, FITS=n <= tile["BLOCK"], **tile)
    return (y,)


def _bwd_triton(dy: Tensor, y: Tensor, *, wanted: tuple[bool, ...]) -> tuple[Tensor]:
    n, tile = y.shape[-1], row_tile(y.shape[-1], 16384 if y.shape[-1] <= 16384 else 4096)
    rows, dx = rows_of(y, n).contiguous(), fresh(y)
    launch(
        _bwd_kernel, (rows.shape[0],), dy.contiguous(), rows, dx, n, FITS=n <= tile["BLOCK"], **tile
    )  # fmt: skip
    return (dx,)


# -- rule ------------------------------------------------------------------------------------------

_softmax = custom_vjp(
    "softmax",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("x",),
    rows=("x",),
    outputs=("y",),
    axes="... [n] -> ... [n]",
)


def softmax(x: Tensor) -> Tensor:
    """Make each row of `x` a distribution: exp(x) over the sum of exp(x).

    Args:
        x: scores (..., n); -inf where an entry is to have probability 0.

    Returns:
        Tensor shaped like x, in its dtype. A row of nothing but -inf is NaN.

    Raises:
        ValueError: x has no axis.
        TypeError: x is not a floating tensor.

    Example:
        >>> softmax(torch.tensor([0.0, 0.0, -torch.inf]))
        tensor([0.5000, 0.5000, 0.0000])

    References:
        Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867.
    """
    check_tensors("softmax", x=(x, "... n"))
    return _softmax(x)
