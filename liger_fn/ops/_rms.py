"""The kernels that rms_norm and add_rms_norm share: they normalise x, or s = x + residual.

The sum costs no pass of its own; backward reads s alone. residual_ptr, s_ptr, ds_ptr and
dresidual_ptr are None for rms_norm; w_ptr is None without a gain, else (groups, n). Formulas and
dtypes stand in the files of the two functions.
"""

import torch
from torch import Tensor

from liger_fn._launch import (
    by_group,
    contiguous,
    fresh,
    fresh_rows,
    launch,
    row_tile,
    strip_tile,
    tl,
    triton,
)
from liger_fn._math import join_strips, rounded, up, wide

CASTINGS = ("llama", "gemma", "none")


@triton.jit
def _row(x_ptr, residual_ptr, s_ptr, at, mask):
    """Entries of x, or of x + residual, rounded as torch rounds a sum, and stored if asked."""
    x = tl.load(x_ptr + at, mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask, other=0.0)
        s = up(x) + up(residual)  # of two dtypes: in float32 or float64, as it stands
        x = s.to(x.dtype) if x.dtype == residual.dtype else s
    if s_ptr is not None:
        tl.store(s_ptr + at, x, mask)
    return x


@triton.jit
def _fwd_kernel(
    x_ptr, residual_ptr, w_ptr, s_ptr, y_ptr, rstd_ptr, n, per_group, EPS: tl.constexpr,
    OFFSET: tl.constexpr, CASTING: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    shared = (tl.program_id(0) // per_group).to(tl.int64) * n
    row = tl.program_id(0).to(tl.int64)
    start, col = row * n, tl.arange(0, BLOCK)
    t: tl.constexpr = x_ptr.dtype.element_ty if s_ptr is None else s_ptr.dtype.element_ty
    x = _row(x_ptr, residual_ptr, s_ptr, start + col, col < n)
    squares = _square(x, CASTING, t)
    if not ONE:
        for k in range(BLOCK, n, BLOCK):
            at = k + col
            squares += _square(_row(x_ptr, residual_ptr, s_ptr, start + at, at < n), CASTING, t)
    mean = tl.sum(squares) / n
    if CASTING == "none":  # plain torch in the dtype of x rounds after every step
        rstd = 1.0 / tl.sqrt(rounded(rounded(mean, t) + EPS, t))
        rstd = rounded(rstd, t)
    else:
        rstd = 1.0 / tl.sqrt(mean + EPS)
    tl.store(rstd_ptr + row, rstd)
    if ONE:
        _store_row(x, rstd, w_ptr, y_ptr + start, shared, col, n, OFFSET, CASTING, t)
    else:
        last = (n - 1) // BLOCK * BLOCK
        for k in range(0, n, BLOCK):  # from the last block, which the caches hold, to the first
            at = last - k + col
            x = _row(x_ptr, residual_ptr, None, start + at, at < n)
            _store_row(x, rstd, w_ptr, y_ptr + start, shared, at, n, OFFSET, CASTING, t)


@triton.jit
def _square(x, CASTING: tl.constexpr, t: tl.constexpr):
    return rounded(up(x) * up(x), t) if CASTING == "none" else up(x) * up(x)


@triton.jit
def _store_row(
    x, rstd, w_ptr, y_ptr, shared, col, n, OFFSET: tl.constexpr, CASTING: tl.constexpr,
    t: tl.constexpr,
):  # fmt: skip
    y = up(x) * rstd
    if CASTING != "gemma":
        y = rounded(y, t)
    if w_ptr is not None:
        w = tl.load(w_ptr + shared + col, col < n, other=0.0)
        y = y * (up(w) + OFFSET if CASTING == "gemma" else rounded(up(w) + OFFSET, w.dtype))
    tl.store(y_ptr + col, y, col < n)


@triton.jit
def _mean_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, c_ptr, n, per_group, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    # mean(g * xhat) of a row that is longer than a block
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), rstd_ptr.dtype.element_ty)
    for k in range(0, n, BLOCK):
        mask = k + col < n
        g = tl.load(dy_ptr + row * n + k + col, mask, other=0.0).to(total.dtype)
        if w_ptr is not None:
            w = tl.load(w_ptr + row // per_group * n + k + col, mask, other=0.0)
            g *= up(w) + OFFSET
        total += up(tl.load(x_ptr + row * n + k + col, mask, other=0.0)) * g
    tl.store(c_ptr + row, tl.sum(total) * tl.load(rstd_ptr + row) / n)


@triton.jit
def _bwd_kernel(
    dy_ptr, ds_ptr, x_ptr, w_ptr, rstd_ptr, c_ptr, dx_ptr, dresidual_ptr, dw_ptr,
    m, n, OFFSET: tl.constexpr, CASTING: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # one strip of the m rows of a group and one block of columns: the sums for dw stay in registers
    strip, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    col = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    dw = tl.zeros((BLOCK,), rstd_ptr.dtype.element_ty)
    gain = dw + 1.0
    if w_ptr is not None:
        gain = up(tl.load(w_ptr + group * n + col, mask, other=0.0)) + OFFSET
    for i in tl.range(strip, m, tl.num_programs(0), num_stages=STAGES):
        row = group * m + i
        at = row * n + col
        rstd = tl.load(rstd_ptr + row)
        xhat = up(tl.load(x_ptr + at, mask, other=0.0)) * rstd
        dy = tl.load(dy_ptr + at, mask, other=0.0).to(dw.dtype)
        if dx_ptr is not None:
            g = dy * gain
            c = tl.sum(g * xhat) / n if c_ptr is None else tl.load(c_ptr + row)
            if BLOCK > 8192:  # registers hold the sums of such a row, or the row: read it again
                x = tl.load(x_ptr + at, mask, other=0.0, eviction_policy="evict_first")
                dy = tl.load(dy_ptr + at, mask, other=0.0, eviction_policy="evict_first")
                xhat, dy = up(x) * rstd, dy.to(dw.dtype)
                g = dy * gain
            d = rstd * (g - xhat * c)
            if ds_ptr is not None:
                d += tl.load(ds_ptr + at, mask, other=0.0).to(dw.dtype)
            tl.store(dx_ptr + at, d, mask)
            if dresidual_ptr is not None:
                tl.store(dresidual_ptr + at, d, mask)
        dw += dy * (xhat if CASTING == "gemma" else rounded(xhat, x_ptr.dtype.element_ty))
    if dw_ptr is not None:
        tl.store(dw_ptr + (group * tl.num_programs(0) + strip) * n + col, dw, mask)


def fwd_triton(
    x: Tensor, w: Tensor | None, residual: Tensor | None = None, *,
    eps: float, offset: float, casting: str, groups: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Give y and rstd; with a residual y, s and rstd."""
    n, dtype, s = x.shape[-1], x.dtype, None
    if residual is not None:
        dtype = torch.promote_types(dtype, residual.dtype)
        s = fresh(x, dtype)
    product = dtype if w is None or casting == "gemma" else torch.promote_types(dtype, w.dtype)
    y, rstd = fresh(x, product), fresh_rows(x, wide(dtype))
    m, tile = rstd.numel(), row_tile(n, 16384, 1024)
    launch(
        _fwd_kernel, (m,), x.contiguous(), contiguous(residual), by_group(w, groups), s, y, rstd,
        n, m // (groups or 1), EPS=eps, OFFSET=offset, CASTING=casting,
        ONE=n <= tile["BLOCK"], **tile,
    )  # fmt: skip
    return (y, rstd) if s is None else (y, s, rstd)


def bwd_triton(
    dy: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, ds: Tensor | None = None, *,
    eps: float, offset: float, casting: str, wanted: tuple[bool, ...], groups: int | None = None,
    dtypes: tuple[torch.dtype, ...] = (),
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Give dx and dw; with dtypes of two gradients of x those (one tensor if alike) and dw."""
    n, g = x.shape[-1], groups or 1
    dy, rstd, gain = dy.contiguous(), rstd.contiguous(), by_group(w, groups)
    x, m = x.contiguous(), rstd.numel() // g
    p, stages, tile = strip_tile(m, n, x)
    one, *two = dict.fromkeys(dtypes or (x.dtype,))
    dx = fresh(x, one) if wanted[0] else None
    dresidual = fresh(x, two[0]) if two and wanted[0] else None
    dw = rstd.new_empty(g, p, n) if wanted[1] else None
    c = None
    if n > tile["BLOCK"] and dx is not None:
        c = torch.empty_like(rstd)
        launch(_mean_kernel, (g * m,), dy, x, gain, rstd, c, n, m, OFFSET=offset, **tile)
    launch(
        _bwd_kernel, (p, g, -(-n // tile["BLOCK"])), dy, contiguous(ds), x, gain, rstd, c, dx,
        dresidual, dw, m, n, OFFSET=offset, CASTING=casting, STAGES=stages, **tile,
    )  # fmt: skip
    both = (dx, dresidual if two else dx)[: max(1, len(dtypes))]
    return *both, join_strips(dw, w, groups)
