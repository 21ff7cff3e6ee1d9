"""Group normalisation: statistics over the channels of a group and all positions.

    x, y: (b, c, ...)   w, b: (c,)   mean, rstd: (b, groups), over the k = c / groups * positions
                                     numbers of a group
    mean = mean(x)
    rstd = 1 / sqrt(mean((x - mean)**2) + eps)
    y    = (x - mean) * rstd * w + b

Pullback of dy, writing xhat = (x - mean) * rstd and g = dy * w:

    dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dw = sum over images and positions of dy * xhat
    db = sum over images and positions of dy

Everything is computed in float32 (float64 for float64 x) and rounded once, y and dx to the dtype of
x, dw and db to those of w and b, as in `layer_norm`. y is contiguous, however x lies. Wu and He,
2018, arXiv:1803.08494.
"""

import math

import torch
from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._launch import by_group, join_strips, launch, row_tile, rows_of, tl, triton
from liger_fn._math import cast, moments, normalised, up, wide
from liger_fn._vjp import custom_vjp

# -- reference: x (..., c, s) with all positions on one axis ---------------------------------------


def _fwd_ref(
    x: Tensor, w: Tensor | None, b: Tensor | None, *, n_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    xhat, mean, rstd = normalised(_grouped(wide(x), n_groups), eps)
    y = xhat.reshape(x.shape)
    if w is not None:
        y = y * w.to(y.dtype)[:, None]
    if b is not None:
        y = y + b.to(y.dtype)[:, None]
    return cast(y, x.dtype), mean[..., 0].clone(), rstd[..., 0].clone()


def _bwd_ref(
    dy: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, rstd: Tensor, *,
    n_groups: int, eps: float, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    c, dx, dw, db = x.shape[-2], None, None, None
    dy, rstd = dy.to(rstd.dtype), rstd[..., None]
    xhat = (_grouped(x, n_groups) - mean[..., None]) * rstd
    if wanted[0]:
        g = _grouped(dy if w is None else dy * w.to(dy.dtype)[:, None], n_groups)
        along = (g * xhat).mean(-1, keepdim=True)
        dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * along)
        dx = dx.reshape(x.shape).to(x.dtype)
    if wanted[1] and w is not None:
        dw = rows_of((dy * xhat.reshape(x.shape)).sum(-1), c).sum(0).to(w.dtype)
    if wanted[2] and b is not None:
        db = rows_of(dy.sum(-1), c).sum(0).to(b.dtype)
    return dx, dw, db


def _grouped(x: Tensor, n_groups: int) -> Tensor:
    """(..., c, s) as (..., groups, k)."""
    *lead, c, s = x.shape
    return x.reshape(*lead, n_groups, c // n_groups * s)


# -- kernels: a row holds the k numbers of a group; those of vmap have (c,) of w and b each --------


@triton.jit
def _first_channel(row, per_vmap, n_groups, channels):
    """Where w and b of a row begin; `channels` belong to a row."""
    return (row // per_vmap * n_groups + row % n_groups) * channels


@triton.jit
def _fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, k, s, n_groups, per_vmap,
    EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    first = _first_channel(row, per_vmap, n_groups, k // s)
    x, mean, variance = moments(x_ptr + row * k, k, mean_ptr.dtype.element_ty, BLOCK)
    rstd = 1.0 / tl.sqrt(variance + EPS)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    last = (k - 1) // BLOCK * BLOCK
    for i in range(0, k, BLOCK):  # from the last block, still in registers, down to the first
        at = last - i + col
        y = (x - mean) * rstd
        if w_ptr is not None:
            y *= up(tl.load(w_ptr + first + at // s, at < k, other=0.0))
        if b_ptr is not None:
            y += up(tl.load(b_ptr + first + at // s, at < k, other=0.0))
        tl.store(y_ptr + row * k + at, y, at < k)
        x = up(tl.load(x_ptr + row * k + at - BLOCK, at >= BLOCK, other=0.0))


@triton.jit
def _pulled(dy_ptr, x_ptr, w_ptr, mean, rstd, at, mask, s):
    """g and xhat of a row."""
    g = tl.load(dy_ptr + at, mask, other=0.0).to(mean.dtype)
    if w_ptr is not None:
        g *= up(tl.load(w_ptr + at // s, mask, other=0.0))
    x = up(tl.load(x_ptr + at, mask, other=0.0))
    return g, tl.where(mask, (x - mean) * rstd, 0.0)


@triton.jit
def _dx_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, k, s, n_groups, per_vmap, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    if w_ptr is not None:
        w_ptr += _first_channel(row, per_vmap, n_groups, k // s)
    dy_ptr += row * k
    x_ptr += row * k
    g = tl.zeros((BLOCK,), mean.dtype)
    xhat = tl.zeros((BLOCK,), mean.dtype)
    total = tl.zeros((BLOCK,), mean.dtype)
    along = tl.zeros((BLOCK,), mean.dtype)
    for i in range(0, k, BLOCK):
        g, xhat = _pulled(dy_ptr, x_ptr, w_ptr, mean, rstd, i + col, i + col < k, s)
        total += g
        along += g * xhat
    c, a = tl.sum(total) / k, tl.sum(along) / k
    last = (k - 1) // BLOCK * BLOCK
    for i in range(0, k, BLOCK):  # from the last block, still in registers, down to the first
        at = last - i + col
        tl.store(dx_ptr + row * k + at, rstd * (g - c - xhat * a), at < k)
        g, xhat = _pulled(dy_ptr, x_ptr, w_ptr, mean, rstd, at - BLOCK, at >= BLOCK, s)


@triton.jit
def _sums_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, m, s, channels,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # sums over the s positions of some of the m channels of all images, `channels` in a group
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mean = tl.load(mean_ptr + row // channels, row < m, other=0.0)
    rstd = tl.load(rstd_ptr + row // channels, row < m, other=0.0)
    dw = tl.zeros((ROWS,), mean.dtype)
    db = tl.zeros((ROWS,), mean.dtype)
    for i in range(0, s, BLOCK):
        at = row[:, None] * s + i + col[None, :]
        mask = (row < m)[:, None] & (i + col < s)[None, :]
        dy = tl.load(dy_ptr + at, mask, other=0.0).to(mean.dtype)
        db += tl.sum(dy, 1)
        if dw_ptr is not None:
            x = up(tl.load(x_ptr + at, mask, other=0.0))
            xhat = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
            dw += tl.sum(dy * xhat, 1)
    if dw_ptr is not None:
        tl.store(dw_ptr + row, dw, row < m)
    if db_ptr is not None:
        tl.store(db_ptr + row, db, row < m)


def _fwd_triton(
    x: Tensor, w: Tensor | None, b: Tensor | None, *,
    n_groups: int, eps: float, groups: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *lead, c, s = x.shape
    y, mean = x.new_empty(x.shape), x.new_empty(*lead, n_groups, dtype=wide(x.dtype))
    rstd, m, k = torch.empty_like(mean), mean.numel(), c // n_groups * s
    launch(
        _fwd_kernel, (m,), x.contiguous(), by_group(w, groups), by_group(b, groups), y, mean, rstd,
        k, max(s, 1), n_groups, m // (groups or 1), EPS=eps, **row_tile(k),
    )  # fmt: skip
    return y, mean, rstd


def _bwd_triton(
    dy: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, rstd: Tensor, *,
    n_groups: int, eps: float, wanted: tuple[bool, ...], groups: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    (*lead, c, s), g = x.shape, groups or 1
    k, m = c // n_groups * s, mean.numel()
    dy, x, mean, rstd = (t.contiguous() for t in (dy, x, mean, rstd))
    dx = x.new_empty(x.shape) if wanted[0] else None
    dw, db = (mean.new_empty(g, math.prod(lead) // g, c) if asked else None for asked in wanted[1:])
    if dx is not None:
        launch(
            _dx_kernel, (m,), dy, x, by_group(w, groups), mean, rstd, dx, k, max(s, 1), n_groups,
            m // g, **row_tile(k),
        )  # fmt: skip
    if dw is not None or db is not None:
        block, rows = row_tile(s, 1024)["BLOCK"], math.prod(lead) * c
        launch(
            _sums_kernel, (-(-rows // (1024 // block)),), dy, x, mean, rstd, dw, db, rows, s,
            c // n_groups, ROWS=1024 // block, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return dx, join_strips(dw, w, groups), join_strips(db, b, groups)


# -- rule ------------------------------------------------------------------------------------------

_group_norm = custom_vjp(
    "group_norm",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("x", "w", "b"),
    rows=("x",),
    grouped=True,
    axes="... [c] [p], [c], [c] -> ... [c] [p], ... [g], ... [g]",
)


def group_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, groups: int, eps: float = 1e-5
) -> Tensor:
    """Shift and scale each group of channels to mean 0, variance 1; multiply by `w`, add `b`.

    Args:
        x: images, or anything with positions (b, c, ...).
        w: gains (c,), or None for a gain of 1.
        b: biases (c,), or None for a bias of 0.
        groups: how many groups the channels form, neighbours together; 1 takes all channels as one,
            c each by itself.
        eps: added to the variance; keeps a constant group finite.

    Returns:
        Tensor shaped like x, in its dtype, contiguous.

    Raises:
        ValueError: x has no axis c, w or b is not (c,), groups does not divide c, or they lie on
            two devices.
        TypeError: x, w or b is not a floating tensor.

    Example:
        >>> group_norm(torch.tensor([[1.0, 3.0, 7.0, 7.0]]), torch.ones(4), None, groups=2, eps=0.1)
        tensor([[-0.9535,  0.9535,  0.0000,  0.0000]])

    References:
        Wu and He, "Group Normalization", 2018, arXiv:1803.08494.
    """
    check_tensors("group_norm", x=(x, "..."), w=(w, "? c"), b=(b, "? c"))
    if x.dim() < 2:
        raise ValueError(f"group_norm: x must have shape (b, c, ...), got {tuple(x.shape)}")
    c = x.shape[1]
    for name, t in (("w", w), ("b", b)):
        if t is not None and t.shape[0] != c:
            raise ValueError(f"group_norm: axis c is {t.shape[0]} in {name} but {c} in x")
    if groups < 1 or c % groups:
        raise ValueError(f"group_norm: groups must divide axis c of x, which is {c}, got {groups}")
    flat = x.reshape(x.shape[0], c, math.prod(x.shape[2:]))
    return _group_norm(flat, w, b, n_groups=groups, eps=eps).reshape(x.shape)
