"""Device functions of cross entropy: one pass over a row of logits, then its gradient."""

from liger_fn._launch import tl, triton
from liger_fn._math import (
    ahead_beside,
    ahead_in_lanes,
    anchor,
    by_lane,
    capped,
    capped_slope,
    load_capped,
    of_lanes,
    online,
    whole,
)


@triton.jit
def ce_row(
    z_ptr, weight_ptr, v, y, IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass over a row of logits, on line (Milakov and Gimelshein, 2018, arXiv:1805.02867).

    Returns:
        nll, zsq, whether y is the argmax, the maximum, lse - maximum. Differences to the maximum
        and to z[y] keep their digits under a large common offset, where lse alone has none left.
    """
    bad = (y < 0) | (y >= v)
    at = tl.where(bad, 0, y)
    steps = tl.where(y == IGNORE, 0, v)  # an ignored row is not read
    zy = capped(tl.load(z_ptr + at), SCALE, CAP)
    col = tl.arange(0, BLOCK)
    tops = of_lanes(zy, BLOCK)
    totals = of_lanes(tl.full((), 0.0, zy.dtype), BLOCK)
    spread = tl.zeros((BLOCK,), zy.dtype)
    base = anchor(zy)  # finite, so that an infinite loss stays one
    ahead = of_lanes(tl.full((), 0, tl.int32), BLOCK)
    first = tl.min(by_lane(col), 1)
    for k in range(0, steps, BLOCK):
        mask = k + col < v
        z = load_capped(z_ptr + k + col, mask, SCALE, CAP)
        tops, totals = online(tops, totals, by_lane(z), 1.0)
        ahead += ahead_in_lanes(by_lane(z), zy, k + first, at)
        if SMOOTHING != 0.0:  # sum of weight * (base - z), and of weight * (lse - base) below
            gap = tl.where(mask, base - z, 0.0)
            if weight_ptr is not None:
                gap *= tl.load(weight_ptr + k + col, mask, other=0.0).to(zy.dtype)
            spread += gap
    top, total = whole(tops, totals, 1.0)
    logsum = tl.log(total)
    before = tl.sum(ahead) + ahead_beside(z_ptr, zy, at, v, SCALE, CAP, 1.0, BLOCK)
    own = tl.full((), 1.0, zy.dtype)
    weights = own * v
    if weight_ptr is not None:
        own = tl.load(weight_ptr + at).to(zy.dtype)
        if SMOOTHING != 0.0:
            weights = weight_sum(weight_ptr, v, zy.dtype, BLOCK)
    gap = logsum - (zy - top)
    nll = (1.0 - SMOOTHING) * own * gap
    if SMOOTHING != 0.0:
        every = weights * (logsum - (base - top)) + tl.sum(spread)
        nll += SMOOTHING / tl.full((), v, zy.dtype) * every
    zsq = own * (top + logsum) * (top + logsum)
    nan = tl.where(bad, float("nan"), 0.0)
    nll, zsq = tl.where(y == IGNORE, 0.0, nll + nan), tl.where(y == IGNORE, 0.0, zsq + nan)
    return nll, zsq, (before == 0) & (y != IGNORE) & (bad == 0), top, logsum


@triton.jit
def weight_sum(weight_ptr, v, dtype: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype)
    for k in range(0, v, BLOCK):
        total += tl.load(weight_ptr + k + col, k + col < v, other=0.0).to(dtype)
    return tl.sum(total)


@triton.jit
def ce_pull(d_nll_ptr, d_zsq_ptr, row, y, weight_ptr, weights_ptr, v, lse, SMOOTHING: tl.constexpr):
    """Factors of a row's gradient: of p, of the one at y, of the weights.

    NaN for a y out of range.
    """
    bad = (y < 0) | (y >= v)
    own = tl.full((), 1.0, lse.dtype)
    if weight_ptr is not None:
        own = tl.load(weight_ptr + tl.where(bad, 0, y)).to(lse.dtype)
    d_nll = tl.full((), 0.0, lse.dtype)
    if d_nll_ptr is not None:
        d_nll = tl.load(d_nll_ptr + row).to(lse.dtype)
    count = tl.full((), v, lse.dtype)
    weights = count if weights_ptr is None else tl.load(weights_ptr)
    pull = d_nll * ((1.0 - SMOOTHING) * own + SMOOTHING / count * weights)
    if d_zsq_ptr is not None:
        pull += tl.load(d_zsq_ptr + row).to(lse.dtype) * 2.0 * own * lse
    pull += tl.where(bad, float("nan"), 0.0)
    return pull, d_nll * (1.0 - SMOOTHING) * own, d_nll * SMOOTHING / count


@triton.jit
def ce_store_gradient(
    z_ptr, dz_ptr, weight_ptr, col, v, y, top, logsum, pull, target, spread,
    SMOOTHING: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Write pull * p - spread * weight - target at y, back through cap and scale, at `col`."""
    mask = col < v
    z, slope = capped_slope(tl.load(z_ptr + col, mask, other=0.0), SCALE, CAP)
    g = pull * tl.exp((z - top) - logsum) - tl.where(col == y, target, 0.0)
    if SMOOTHING != 0.0:
        weight = 1.0
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + col, mask, other=0.0).to(z.dtype)
        g -= spread * weight
    tl.store(dz_ptr + col, g * slope * SCALE, mask)
