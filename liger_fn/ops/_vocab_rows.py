"""Row passes over a shard of the columns: statistics first, the gradient from global ones.

    z = transformed logits of the shard / temperature                  (m, width)
    at = the place of y in it, -1 where y is elsewhere, -2 where a row is ignored

    statistics of a row: top, sum(exp(u)), z[at], first column at top, then for smoothed labels
                         sum(c * u), sum(c), and with `stats`
                         sum(exp(u) * u), sum(exp(u)**2), sum(z)                       u = z - top

    dz = p * (P + Q * logp) + R * p**2 + T * onehot(at) + M * c     logp = (z - top) - logsum

with top and logsum global and P, Q, R, T, M numbers of the row: what cross entropy and the
log-probabilities pull back has this form. c weighs columns, 1 without. Statistics are kept by lane
(`_math`) while a row is read, joined once: threads exchange nothing inside the loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_fn._launch import contiguous, launch, row_tile, tl, triton
from liger_fn._math import (
    anchor,
    by_lane,
    capped,
    capped_slope,
    drop,
    load_capped,
    of_lanes,
    online,
    whole,
    wide,
)
from liger_fn.ops._ce import Row, slope, transformed
from liger_fn.ops._logp import online_stats, shifted

PLAIN, WITH_STATS = 6, 9  # columns of the statistics

# -- reference -------------------------------------------------------------------------------------


def statistics_ref(
    z: Tensor, at: Tensor, c: Tensor | None, start: int, row: Row, temperature: float, stats: bool
) -> Tensor:
    """Plain torch: the statistics of each row of a shard, (m, columns)."""
    live = at != -2
    z = torch.where(live[:, None], transformed(z, row) / temperature, 0.0)
    c = z.new_ones(z.shape[1]) if c is None else c.to(z.dtype)
    if not z.shape[1]:  # an empty shard
        none = z.new_zeros(z.shape[0], WITH_STATS if stats else PLAIN)
        none[:, 0] = -torch.inf
        return none
    top, first = z.max(-1)
    shift = torch.where(top == -torch.inf, 0.0, top)
    u = z - shift[:, None]
    e = u.exp()
    zy = torch.where(at < 0, 0.0, z.gather(-1, at.clamp(min=0)[:, None])[:, 0])
    found = [
        top,
        e.sum(-1),
        zy,
        (first + start).to(z.dtype),
        (c * u).sum(-1),
        c.sum().expand(len(z)),
    ]
    if stats:
        found += [torch.where(e == 0, 0.0, e * u).sum(-1), (e * e).sum(-1), z.sum(-1)]
    return torch.stack(found, -1)


def gradient_ref(
    z: Tensor, at: Tensor, c: Tensor | None, factors: Tensor, row: Row, temperature: float,
    dz: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Plain torch: dz from the factors (m, 7) of each row."""
    live = (at != -2)[:, None]
    top, logsum, of_p, of_plogp, of_pp, of_one, of_c = factors[..., None].unbind(1)
    t = torch.where(live, transformed(z, row) / temperature, 0.0)
    logp = (t - top) - logsum
    p = logp.exp()
    g = p * (of_p + torch.where(p == 0, 0.0, of_plogp * logp)) + of_pp * p * p
    g = g + of_c * (1.0 if c is None else c.to(g.dtype))
    g = g + torch.where(at[:, None] == torch.arange(z.shape[1], device=z.device), of_one, 0.0)
    return torch.where(live, g * (slope(z, row, live[:, 0]) / temperature), 0.0)


# -- kernels ---------------------------------------------------------------------------------------


@triton.jit
def _statistics_kernel(
    z_ptr, at_ptr, c_ptr, out_ptr, v, start, SMOOTHED: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, COLD: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    z_ptr += row * v
    out_ptr += row * COLUMNS
    at = tl.load(at_ptr + row)
    n = tl.where(at == -2, 0, v)  # an ignored row is not read
    d: tl.constexpr = out_ptr.dtype.element_ty
    zero, lanes = of_lanes(tl.full((), 0.0, d), BLOCK), tl.min(by_lane(col), 1)
    tops, begins = zero - float("inf"), of_lanes(tl.full((), 0, tl.int32), BLOCK)
    total, spread, weights, along, squares, plain = zero, zero, zero, zero, zero, zero
    for k in range(0, n, BLOCK):
        mask = k + col < v
        z = by_lane(load_capped(z_ptr + k + col, mask, SCALE, CAP) * COLD)
        begins = tl.where(tl.max(z, 1) > tops, k + lanes, begins)
        if SMOOTHED:
            spread, weights = _spread(spread, weights, tops, z, c_ptr, k + col, v, v - k - lanes)
        if COLUMNS > 6:
            plain += tl.sum(tl.where(by_lane(mask), z, 0.0), 1)
            tops, total, along, squares = online_stats(tops, total, along, squares, z)
        else:
            tops, total = online(tops, total, z, 1.0)
    top, sums = whole(tops, total, 1.0)
    begin = tl.min(tl.where(tops == top, begins, v))
    first = _first(z_ptr, n, top, begin, SCALE, CAP, COLD, BLOCK)
    zy = tl.full((), 0.0, d)
    if at >= 0:
        zy = (capped(tl.load(z_ptr + at), SCALE, CAP) * COLD).to(d)
    tl.store(out_ptr, top)
    tl.store(out_ptr + 1, sums)
    tl.store(out_ptr + 2, zy)
    tl.store(out_ptr + 3, (first + start).to(d))
    tl.store(out_ptr + 4, tl.sum(spread + weights * drop(tops, top)))
    tl.store(out_ptr + 5, tl.sum(weights))
    if COLUMNS > 6:
        shift = anchor(top)
        along, squares = shifted(along, squares, total, tops, shift)
        tl.store(out_ptr + 6, tl.sum(along))
        tl.store(out_ptr + 7, tl.sum(squares))
        tl.store(out_ptr + 8, tl.sum(plain))


@triton.jit
def _spread(spread, weights, top, z, c_ptr, col, v, left):
    """Take a block, by lane, into sums of c * (z - top) and of c, before `top` takes it.

    `left` columns remain from the first of each lane on: to sum up a mask takes shared memory.
    """
    new = tl.maximum(top, tl.max(z, 1))
    shift = anchor(new)
    gap = tl.where(by_lane(col < v), z - shift[:, None], 0.0)
    own = tl.minimum(tl.maximum(left, 0), z.shape[1]).to(z.dtype)
    if c_ptr is not None:
        c = by_lane(tl.load(c_ptr + col, col < v, other=0.0).to(z.dtype))
        gap, own = gap * c, tl.sum(c, 1)
    return spread + weights * drop(top, shift) + tl.sum(gap, 1), weights + own


@triton.jit
def _first(
    z_ptr, n, top, begin, SCALE: tl.constexpr, CAP: tl.constexpr, COLD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first column at `top`, in the lane that begins at `begin`."""
    LANE: tl.constexpr = 8 if BLOCK >= 8 else BLOCK
    col = begin + tl.arange(0, LANE)
    z = load_capped(z_ptr + col, col < n, SCALE, CAP) * COLD
    return tl.min(tl.where(z == top, col, begin + LANE))


@triton.jit
def _gradient_kernel(
    z_ptr, dz_ptr, at_ptr, c_ptr, factors_ptr, stride, v, SCALE: tl.constexpr, CAP: tl.constexpr,
    COLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < v
    at = tl.load(at_ptr + row)
    if at == -2:
        tl.store(dz_ptr + row * v + col, tl.zeros((BLOCK,), tl.float32), mask)
        return
    f = factors_ptr + row * 7
    top, logsum = tl.load(f), tl.load(f + 1)
    z, slope = capped_slope(tl.load(z_ptr + row * stride + col, mask, other=0.0), SCALE, CAP)
    logp = (z * COLD - top) - logsum
    p = tl.exp(logp)
    g = p * (tl.load(f + 2) + tl.where(p == 0.0, 0.0, tl.load(f + 3) * logp))
    g += tl.load(f + 4) * p * p + tl.where(col == at, tl.load(f + 5), 0.0)
    c = tl.full((BLOCK,), 1.0, p.dtype)
    if c_ptr is not None:
        c = tl.load(c_ptr + col, mask, other=0.0).to(p.dtype)
    tl.store(dz_ptr + row * v + col, (g + tl.load(f + 6) * c) * slope * (SCALE * COLD), mask)


def statistics_triton(
    z: Tensor, at: Tensor, c: Tensor | None, start: int, row: Row, temperature: float, stats: bool
) -> Tensor:
    """The same statistics by the kernel."""
    columns = WITH_STATS if stats else PLAIN
    out = z.new_empty(z.shape[0], columns, dtype=wide(z.dtype))
    launch(
        _statistics_kernel, (z.shape[0],), z, at, contiguous(c), out, z.shape[1], start,
        SMOOTHED=row.label_smoothing != 0, SCALE=row.logit_scale, CAP=row.cap, COLD=1 / temperature,
        COLUMNS=columns, **row_tile(z.shape[1], 2048 if stats else 4096),
    )  # fmt: skip
    return out


def gradient_triton(
    z: Tensor, at: Tensor, c: Tensor | None, factors: Tensor, row: Row, temperature: float,
    dz: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Over z itself, or to `dz`, whose rows lie side by side; those of z need not."""
    v, tile, dz = z.shape[1], row_tile(z.shape[1], 4096), z if dz is None else dz
    launch(
        _gradient_kernel, (z.shape[0], -(-v // tile["BLOCK"])), z, dz, at, contiguous(c),
        factors.contiguous(), z.stride(0), v, SCALE=row.logit_scale, CAP=row.cap,
        COLD=1 / temperature, **tile,
    )  # fmt: skip
    return dz
