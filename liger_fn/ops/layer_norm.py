"""Layer normalisation over the last axis.

    mean = mean(x)                                x: (..., n)   mean, rstd: (...)
    rstd = 1 / sqrt(mean((x - mean)**2) + eps)
    y    = (x - mean) * rstd * w + b              w, b: (n,)    y: (..., n)

Pullback of dy, writing xhat = (x - mean) * rstd and g = dy * w:

    dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dw = sum over rows of dy * xhat
    db = sum over rows of dy

Everything is computed in float32 (float64 for float64 x) and rounded once, y and dx to the dtype of
x, dw and db to those of w and b. These may be any: torch takes another dtype only on a CPU, float32
beside half precision, and does the same. Ba, Kiros and Hinton, 2016, arXiv:1607.06450.
"""

import torch
from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._launch import (
    by_group,
    fresh,
    fresh_rows,
    launch,
    row_tile,
    rows_of,
    strip_tile,
    tl,
    triton,
)
from liger_fn._math import cast, join_strips, moments, normalised, up, wide
from liger_fn._vjp import custom_vjp

# -- reference -------------------------------------------------------------------------------------


def _fwd_ref(
    x: Tensor, w: Tensor | None, b: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = normalised(wide(x), eps)
    if w is not None:
        y = y * w.to(y.dtype)
    if b is not None:
        y = y + b.to(y.dtype)
    return cast(y, x.dtype), mean[..., 0].clone(), rstd[..., 0].clone()


def _bwd_ref(
    dy: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, rstd: Tensor, *,
    eps: float, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    n, dx, dw, db = x.shape[-1], None, None, None
    dy, rstd = dy.to(rstd.dtype), rstd[..., None]
    xhat = (x - mean[..., None]) * rstd
    if wanted[0]:
        g = dy if w is None else dy * w.to(dy.dtype)
        c = (g * xhat).mean(-1, keepdim=True)
        dx = (rstd * (g - g.mean(-1, keepdim=True) - xhat * c)).to(x.dtype)
    if wanted[1] and w is not None:
        dw = rows_of(dy * xhat, n).sum(0).to(w.dtype)
    if wanted[2] and b is not None:
        db = rows_of(dy, n).sum(0).to(b.dtype)
    return dx, dw, db


# -- kernels: w_ptr and b_ptr are None without them, else (groups, n) ------------------------------


@triton.jit
def _fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, n, per_group,
    EPS: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) // per_group).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x_ptr += row * n
    x, mean, variance = moments(x_ptr, n, mean_ptr.dtype.element_ty, ONE, BLOCK)
    rstd = 1.0 / tl.sqrt(variance + EPS)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    if ONE:
        _store_row(x, mean, rstd, w_ptr, b_ptr, y_ptr + row * n, group * n, col, n)
    else:
        last = (n - 1) // BLOCK * BLOCK
        for k in range(0, n, BLOCK):  # from the last block, which the caches hold, to the first
            at = last - k + col
            x = up(tl.load(x_ptr + at, at < n, other=0.0))
            _store_row(x, mean, rstd, w_ptr, b_ptr, y_ptr + row * n, group * n, at, n)


@triton.jit
def _store_row(x, mean, rstd, w_ptr, b_ptr, y_ptr, shared, col, n):
    y = (x - mean) * rstd
    if w_ptr is not None:
        y *= up(tl.load(w_ptr + shared + col, col < n, other=0.0))
    if b_ptr is not None:
        y += up(tl.load(b_ptr + shared + col, col < n, other=0.0))
    tl.store(y_ptr + col, y, col < n)


@triton.jit
def _means_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, c_ptr, n, per_group, BLOCK: tl.constexpr
):
    # mean(g) and mean(g * xhat) of a row that is longer than a block
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mean = tl.load(mean_ptr + row)
    total = tl.zeros((BLOCK,), mean_ptr.dtype.element_ty)
    along = tl.zeros((BLOCK,), mean_ptr.dtype.element_ty)
    for k in range(0, n, BLOCK):
        mask = k + col < n
        g = tl.load(dy_ptr + row * n + k + col, mask, other=0.0).to(total.dtype)
        if w_ptr is not None:
            g *= up(tl.load(w_ptr + row // per_group * n + k + col, mask, other=0.0))
        x = up(tl.load(x_ptr + row * n + k + col, mask, other=0.0))
        total += g
        along += g * tl.where(mask, x - mean, 0.0)
    tl.store(c_ptr + 2 * row, tl.sum(total) / n)
    tl.store(c_ptr + 2 * row + 1, tl.sum(along) * tl.load(rstd_ptr + row) / n)


@triton.jit
def _bwd_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, c_ptr, dx_ptr, dw_ptr, db_ptr, m, n,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # one strip of the m rows of a group and one block of columns: the sums for dw and db stay in
    # registers
    strip, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    col = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    dw = tl.zeros((BLOCK,), mean_ptr.dtype.element_ty)
    db = tl.zeros((BLOCK,), mean_ptr.dtype.element_ty)
    gain = dw + 1.0
    if w_ptr is not None:
        gain = up(tl.load(w_ptr + group * n + col, mask, other=0.0))
    for i in tl.range(strip, m, tl.num_programs(0), num_stages=STAGES):
        row = group * m + i
        dy = tl.load(dy_ptr + row * n + col, mask, other=0.0).to(dw.dtype)
        db += dy
        if dx_ptr is not None or dw_ptr is not None:
            rstd = tl.load(rstd_ptr + row)
            x = up(tl.load(x_ptr + row * n + col, mask, other=0.0))
            xhat = tl.where(mask, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
            dw += dy * xhat
            if dx_ptr is not None:
                g = dy * gain
                c = tl.sum(g) / n if c_ptr is None else tl.load(c_ptr + 2 * row)
                along = tl.sum(g * xhat) / n if c_ptr is None else tl.load(c_ptr + 2 * row + 1)
                tl.store(dx_ptr + row * n + col, rstd * (g - c - xhat * along), mask)
    at = (group * tl.num_programs(0) + strip) * n + col
    if dw_ptr is not None:
        tl.store(dw_ptr + at, dw, mask)
    if db_ptr is not None:
        tl.store(db_ptr + at, db, mask)


def _fwd_triton(
    x: Tensor, w: Tensor | None, b: Tensor | None, *, eps: float, groups: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    n, y = x.shape[-1], fresh(x)
    mean = fresh_rows(x, wide(x.dtype))
    rstd, m = torch.empty_like(mean), mean.numel()
    tile = row_tile(n, 16384, 1024) if n <= 16384 else row_tile(n)
    launch(
        _fwd_kernel, (m,), x.contiguous(), by_group(w, groups), by_group(b, groups), y, mean, rstd,
        n, m // (groups or 1), EPS=eps, ONE=n <= tile["BLOCK"], **tile,
    )  # fmt: skip
    return y, mean, rstd


def _bwd_triton(
    dy: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, rstd: Tensor, *,
    eps: float, wanted: tuple[bool, ...], groups: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    n, g = x.shape[-1], groups or 1
    rows = (
        dy.contiguous(), x.contiguous(), by_group(w, groups), mean.contiguous(), rstd.contiguous(),
    )  # fmt: skip
    m = mean.numel() // g
    p, stages, tile = strip_tile(m, n, x, 1024)
    dx = fresh(x) if wanted[0] else None
    dw, db = (mean.new_empty(g, p, n) if asked else None for asked in wanted[1:])
    c = None
    if wanted[0] and n > tile["BLOCK"]:
        c = mean.new_empty(g * m, 2)
        launch(_means_kernel, (g * m,), *rows, c, n, m, **tile)
    launch(
        _bwd_kernel, (p, g, -(-n // tile["BLOCK"])), *rows, c, dx, dw, db, m, n, STAGES=stages,
        **tile,
    )  # fmt: skip
    return dx, join_strips(dw, w, groups), join_strips(db, b, groups)


# -- rule ------------------------------------------------------------------------------------------

_layer_norm = custom_vjp(
    "layer_norm",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("x", "w", "b"),
    rows=("x",),
    grouped=True,
    axes="... [n], [n], [n] -> ... [n], ..., ...",
)


def layer_norm(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Shift and scale each row of `x` to mean 0 and variance 1, then multiply by `w` and add `b`.

    Args:
        x: activations (..., n).
        w: gains (n,), or None for a gain of 1.
        b: biases (n,), or None for a bias of 0.
        eps: added to the variance; keeps a constant row finite.

    Returns:
        Tensor shaped like x, in its dtype.

    Raises:
        ValueError: x has no axis, w or b is not (n,), or they lie on two devices.
        TypeError: x, w or b is not a floating tensor.

    Example:
        >>> layer_norm(torch.tensor([1.0, 3.0]), torch.ones(2), torch.tensor([0.0, 5.0]), eps=0.0)
        tensor([-1.,  6.])

    References:
        Ba, Kiros and Hinton, "Layer Normalization", 2016, arXiv:1607.06450.
    """
    check_tensors("layer_norm", x=(x, "... n"), w=(w, "? n"), b=(b, "? n"))
    return _layer_norm(x, w, b, eps=eps)
