"""Softmax over the last axis.

    y = exp(x - top) / total    top = max(x)    total = sum(exp(x - top))       x, y: (..., n)

Pullback of dy:

    dx = y * (dy - sum(dy * y))

In float32 (float64 for float64 x); y and dx take the dtype of x. Only top and total are saved, so
the y of the pullback is not rounded to half precision. An entry of -inf is exactly 0, a row of
nothing else NaN, as in torch. Rows longer than a block are read twice, after Milakov and
Gimelshein, 2018, arXiv:1805.02867.
"""

import torch
from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._launch import launch, row_tile, rows_of, tl, triton
from liger_fn._math import cast, online, up, wide
from liger_fn._vjp import custom_vjp

# -- reference -------------------------------------------------------------------------------------


def _fwd_ref(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = wide(x)
    top = (h.detach().amax if h.shape[-1] else h.sum)(-1, keepdim=True)  # no maximum of nothing
    e = (h - top).exp()
    total = e.sum(-1, keepdim=True)
    return cast(e / total, x.dtype), top[..., 0].clone(), total[..., 0].clone()


def _bwd_ref(
    dy: Tensor, x: Tensor, top: Tensor, total: Tensor, *, wanted: tuple[bool, ...]
) -> tuple[Tensor]:
    y = (wide(x) - top[..., None]).exp() / total[..., None]
    dy = dy.to(y.dtype)
    return (cast(y * (dy - (dy * y).sum(-1, keepdim=True)), x.dtype),)


# -- kernels: a row that FITS a block stays in registers -------------------------------------------


@triton.jit
def _fwd_kernel(
    x_ptr, y_ptr, top_ptr, total_ptr, n, FITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x_ptr, y_ptr = x_ptr + row * n, y_ptr + row * n
    if FITS:
        x = up(tl.load(x_ptr + col, col < n, other=-float("inf")))
        top = tl.max(x)
        e = tl.where(col < n, tl.exp(x - top), 0.0)
        total = tl.sum(e)
        tl.store(y_ptr + col, e / total, col < n)
    else:
        top = tl.full((), -float("inf"), top_ptr.dtype.element_ty)
        totals = tl.zeros((BLOCK,), top.dtype)
        for k in range(0, n, BLOCK):
            x = up(tl.load(x_ptr + k + col, k + col < n, other=-float("inf")))
            top, totals = online(top, totals, x, 1.0)
        total = tl.sum(totals)
        for k in range(0, n, BLOCK):
            x = up(tl.load(x_ptr + k + col, k + col < n, other=0.0))
            tl.store(y_ptr + k + col, tl.exp(x - top) / total, k + col < n)
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, total)


@triton.jit
def _bwd_kernel(
    dy_ptr, x_ptr, top_ptr, total_ptr, dx_ptr, n, FITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    dy_ptr, x_ptr, dx_ptr = dy_ptr + row * n, x_ptr + row * n, dx_ptr + row * n
    top, total = tl.load(top_ptr + row), tl.load(total_ptr + row)
    if FITS:
        dy, y = _load(dy_ptr, x_ptr, col, n, top, total)
        tl.store(dx_ptr + col, y * (dy - tl.sum(dy * y)), col < n)
    else:
        sums = tl.zeros((BLOCK,), top.dtype)
        for k in range(0, n, BLOCK):
            dy, y = _load(dy_ptr, x_ptr, k + col, n, top, total)
            sums += dy * y
        c = tl.sum(sums)
        for k in range(0, n, BLOCK):
            dy, y = _load(dy_ptr, x_ptr, k + col, n, top, total)
            tl.store(dx_ptr + k + col, y * (dy - c), k + col < n)


@triton.jit
def _load(dy_ptr, x_ptr, col, n, top, total):
    dy = tl.load(dy_ptr + col, col < n, other=0.0).to(top.dtype)
    x = up(tl.load(x_ptr + col, col < n, other=0.0))
    return dy, tl.where(col < n, tl.exp(x - top) / total, 0.0)


def _fwd_triton(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, tile = x.shape[-1], row_tile(x.shape[-1])
    rows, y = rows_of(x, n).contiguous(), x.new_empty(x.shape)
    top = x.new_empty(x.shape[:-1], dtype=wide(x.dtype))
    total = torch.empty_like(top)
    launch(
        _fwd_kernel, (rows.shape[0],), rows, y, top, total, n, FITS=n <= tile["BLOCK"], **tile
    )  # fmt: skip
    return y, top, total


def _bwd_triton(
    dy: Tensor, x: Tensor, top: Tensor, total: Tensor, *, wanted: tuple[bool, ...]
) -> tuple[Tensor]:
    n, tile = x.shape[-1], row_tile(x.shape[-1])
    rows, dx = rows_of(x, n).contiguous(), x.new_empty(x.shape)
    launch(
        _bwd_kernel, (rows.shape[0],), dy.contiguous(), rows, top.contiguous(), total.contiguous(),
        dx, n, FITS=n <= tile["BLOCK"], **tile,
    )  # fmt: skip
    return (dx,)


# -- rule ------------------------------------------------------------------------------------------

_softmax = custom_vjp(
    "softmax",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("x",),
    rows=("x",),
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
