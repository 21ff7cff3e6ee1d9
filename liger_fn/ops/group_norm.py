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
from liger_fn._launch import by_group, launch, row_tile, rows_of, tl, triton
from liger_fn._math import cast, join_strips, normalised, up, wide
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


# -- kernels: a row is a group: its channels by its s positions, in tiles of ROWS by BLOCK --------


@triton.jit
def _first_channel(row, per_vmap, n_groups, channels):
    """Where w and b of a row begin: those of vmap have (c,) of each."""
    return (row // per_vmap * n_groups + row % n_groups) * channels


@triton.jit
def _tile(ptr, c, i, channels, s, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Entries of a group, and where the tile has them."""
    at, col = c + tl.arange(0, ROWS)[:, None], i + tl.arange(0, BLOCK)[None, :]
    mask = (at < channels) & (col < s)
    return up(tl.load(ptr + at * s + col, mask, other=0.0)), mask


@triton.jit
def _of_channels(ptr, c, channels, otherwise, ROWS: tl.constexpr):
    """What w or b holds for the channels of a tile."""
    at = c + tl.arange(0, ROWS)
    if ptr is None:
        out = tl.zeros((ROWS,), otherwise.dtype) + otherwise
    else:
        out = tl.load(ptr + at, at < channels, other=0.0).to(otherwise.dtype)
    return out


@triton.jit
def _put(ptr, c, i, channels, s, value, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at, col = c + tl.arange(0, ROWS)[:, None], i + tl.arange(0, BLOCK)[None, :]
    tl.store(ptr + at * s + col, value, (at < channels) & (col < s))


@triton.jit
def _fwd_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, channels, s, n_groups, per_vmap,
    EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = channels * s
    x_ptr += row * k
    y_ptr += row * k
    first = _first_channel(row, per_vmap, n_groups, channels)
    if w_ptr is not None:
        w_ptr += first
    if b_ptr is not None:
        b_ptr += first
    x, _ = _tile(x_ptr, 0, 0, channels, s, ROWS, BLOCK)
    pivot = tl.sum(x) / (tl.minimum(channels, ROWS) * tl.minimum(s, BLOCK))  # see `moments`
    sums, squares = tl.zeros_like(x), tl.zeros_like(x)
    for c in range(0, channels, ROWS):
        for i in range(0, s, BLOCK):
            x, mask = _tile(x_ptr, c, i, channels, s, ROWS, BLOCK)
            d = tl.where(mask, x - pivot, 0.0)
            sums += d
            squares += d * d
    ahead = tl.sum(sums) / k
    mean = pivot + ahead
    rstd = 1.0 / tl.sqrt(tl.maximum(tl.sum(squares) / k - ahead * ahead, 0.0) + EPS)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for c in range(0, channels, ROWS):  # backwards: what was read last is still in a cache
        c = (channels - 1) // ROWS * ROWS - c
        w = _of_channels(w_ptr, c, channels, tl.full((), 1.0, mean.dtype), ROWS)
        b = _of_channels(b_ptr, c, channels, tl.full((), 0.0, mean.dtype), ROWS)
        for i in range(0, s, BLOCK):
            i = (s - 1) // BLOCK * BLOCK - i
            x, _ = _tile(x_ptr, c, i, channels, s, ROWS, BLOCK)
            y = (x - mean) * rstd * w[:, None] + b[:, None]
            _put(y_ptr, c, i, channels, s, y, ROWS, BLOCK)


@triton.jit
def _bwd_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, channels, s, n_groups,
    per_vmap, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # sums over the positions of each channel are dw and db of an image, and with w all that dx asks
    row = tl.program_id(0).to(tl.int64)
    k = channels * s
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    if w_ptr is not None:
        w_ptr += _first_channel(row, per_vmap, n_groups, channels)
    dy_ptr += row * k
    x_ptr += row * k
    one = tl.full((), 1.0, mean.dtype)
    totals, alongs = tl.zeros((ROWS,), mean.dtype), tl.zeros((ROWS,), mean.dtype)
    for c in range(0, channels, ROWS):
        db, dw = tl.zeros((ROWS, BLOCK), mean.dtype), tl.zeros((ROWS, BLOCK), mean.dtype)
        for i in range(0, s, BLOCK):
            dy, mask = _tile(dy_ptr, c, i, channels, s, ROWS, BLOCK)
            db += dy
            if dx_ptr is not None or dw_ptr is not None:
                x, _ = _tile(x_ptr, c, i, channels, s, ROWS, BLOCK)
                dw += dy * tl.where(mask, (x - mean) * rstd, 0.0)
        total, along = tl.sum(db, 1), tl.sum(dw, 1)
        at = c + tl.arange(0, ROWS)
        if db_ptr is not None:
            tl.store(db_ptr + row * channels + at, total, at < channels)
        if dw_ptr is not None:
            tl.store(dw_ptr + row * channels + at, along, at < channels)
        w = _of_channels(w_ptr, c, channels, one, ROWS)
        totals += w * total
        alongs += w * along
    if dx_ptr is not None:
        total, along = tl.sum(totals) / k, tl.sum(alongs) / k
        for c in range(0, channels, ROWS):
            c = (channels - 1) // ROWS * ROWS - c
            w = _of_channels(w_ptr, c, channels, one, ROWS)
            for i in range(0, s, BLOCK):
                i = (s - 1) // BLOCK * BLOCK - i
                dy, _ = _tile(dy_ptr, c, i, channels, s, ROWS, BLOCK)
                x, _ = _tile(x_ptr, c, i, channels, s, ROWS, BLOCK)
                dx = rstd * (dy * w[:, None] - total - (x - mean) * rstd * along)
                _put(dx_ptr + row * k, c, i, channels, s, dx, ROWS, BLOCK)


def _tiles(channels: int, s: int, size: int, warps: int) -> dict[str, int]:
    """Of at most `size` numbers: positions side by side first, then channels."""
    block = row_tile(s, size)["BLOCK"]
    rows = min(size // block, row_tile(channels)["BLOCK"])
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(1, rows * block * warps // size)}


def _fwd_triton(
    x: Tensor, w: Tensor | None, b: Tensor | None, *,
    n_groups: int, eps: float, groups: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    *lead, c, s = x.shape
    y, mean = x.new_empty(x.shape), x.new_empty(*lead, n_groups, dtype=wide(x.dtype))
    rstd, m = torch.empty_like(mean), mean.numel() if s else 0
    launch(
        _fwd_kernel, (m,), x.contiguous(), by_group(w, groups), by_group(b, groups), y, mean, rstd,
        c // n_groups, s, n_groups, m // (groups or 1), EPS=eps,
        **_tiles(c // n_groups, s, 8192, 16),
    )  # fmt: skip
    return y, mean, rstd


def _bwd_triton(
    dy: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, rstd: Tensor, *,
    n_groups: int, eps: float, wanted: tuple[bool, ...], groups: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    (*lead, c, s), g, m = x.shape, groups or 1, mean.numel()
    dy, x, mean, rstd = (t.contiguous() for t in (dy, x, mean, rstd))
    dx = x.new_empty(x.shape) if wanted[0] else None
    dw, db = (mean.new_empty(g, math.prod(lead) // g, c) if asked else None for asked in wanted[1:])
    launch(
        _bwd_kernel, (m,), dy, x, by_group(w, groups), mean, rstd, dx, dw, db, c // n_groups, s,
        n_groups, m // g, **_tiles(c // n_groups, s, 4096, 4),
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
    if not isinstance(groups, int) or groups < 1 or c % groups:
        raise ValueError(f"group_norm: groups must divide axis c of x, which is {c}, got {groups}")
    flat = x.reshape(x.shape[0], c, math.prod(x.shape[2:]))
    return _group_norm(flat, w, b, n_groups=groups, eps=eps).reshape(x.shape)
