"""The row pass of log-probabilities over a chunk of logits; formulas are in fused_linear_logp.

A chunk is read by one program for each row: sums on line, then, if its gradient is wanted, a second
time, and that is written over it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_fn._launch import launch, row_tile, tl, triton
from liger_fn._math import (
    ahead_beside,
    ahead_in_lanes,
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
from liger_fn.ops._ce import Row, out_of_range, slope, transformed
from liger_fn.ops._chunked import Chunk, Rows, head_loop

# -- reference: the row pass in plain torch; the rest is the loop of _chunked ----------------------


def _rows_ref(
    z: Tensor, y: Tensor, *cotangents: Any, row: Row, temperature: float, stats: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    *ds, gradient = cotangents
    valid = y != row.ignore_index
    bad, at = out_of_range(y, z.shape[-1], valid)
    t = torch.where(valid[..., None], transformed(z, row) / temperature, 0.0)
    u = t - t.detach().amax(-1, keepdim=True)
    logp = u - u.exp().sum(-1, keepdim=True).log()
    logp = torch.where(logp == -torch.inf, logp.detach(), logp)  # no gradient, not that of 0 * inf
    p, parts = logp.exp(), [logp.gather(-1, at[..., None])[..., 0]]
    if stats:
        surprise = torch.where(p == 0, 0.0, logp)
        parts.append(-(p * surprise).sum(-1))
        parts += [torch.logsumexp(2 * logp, -1), t.mean(-1)]
    parts = [torch.where(valid, part.masked_fill(bad, torch.nan), 0.0) for part in parts]
    found = (*parts, valid & (z.argmax(-1) == y)) if stats else tuple(parts)
    if not gradient:
        return found, None
    d_logp, d_entropy, d_sum_sq, d_mean = (
        None if d is None else d[..., None] for d in (*ds, None, None, None)[:4]
    )
    g = torch.zeros_like(p)
    if d_logp is not None:
        g = (-d_logp * p).scatter_add(-1, at[..., None], d_logp)
    if d_entropy is not None:
        g = g - d_entropy * p * (surprise + parts[1][..., None])
    if d_sum_sq is not None:
        g = g + 2 * d_sum_sq * ((2 * logp - parts[2][..., None]).exp() - p)
    if d_mean is not None:
        g = g + d_mean / z.shape[-1]
    g = g * (slope(z, row, valid) / temperature)
    return found, torch.where(valid[..., None], g.masked_fill(bad[..., None], torch.nan), 0.0)


# -- kernel: d and out hold COLUMNS numbers a row, logp alone or all four --------------------------


@triton.jit
def _row(
    z_ptr, v, y, SCALE: tl.constexpr, CAP: tl.constexpr, COLD: tl.constexpr, STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass over a row: z[y] - top, top, log of the sum, entropy, log_sum_sq, mean, is_top1."""
    zy = capped(tl.load(z_ptr + y), SCALE, CAP) * COLD
    col = tl.arange(0, BLOCK)
    first = tl.min(by_lane(col), 1)
    zero = of_lanes(tl.full((), 0.0, zy.dtype), BLOCK)
    tops, total, along, squares, plain = zero + zy, zero, zero, zero, zero  # along: sum of exp(u) u
    ahead = of_lanes(tl.full((), 0, tl.int32), BLOCK)
    for k in range(0, v, BLOCK):
        mask = k + col < v
        z = by_lane(load_capped(z_ptr + k + col, mask, SCALE, CAP) * COLD)
        if STATS:
            plain += tl.sum(tl.where(by_lane(mask), z, 0.0), 1)
            ahead += ahead_in_lanes(z, zy, k + first, y)
            tops, total, along, squares = online_stats(tops, total, along, squares, z)
        else:
            tops, total = online(tops, total, z, 1.0)
    top, sums = whole(tops, total, 1.0)
    logsum = tl.log(sums)
    before = tl.full((), 0, tl.int32)
    if STATS:
        along, squares = shifted(along, squares, total, tops, anchor(top))
        before = tl.sum(ahead) + ahead_beside(z_ptr, zy, y, v, SCALE, CAP, COLD, BLOCK)
    sum_sq = tl.log(tl.sum(squares)) - 2.0 * logsum
    return (
        zy - top, top, logsum, logsum - tl.sum(along) / sums, sum_sq, tl.sum(plain) / v, before == 0
    )  # fmt: skip


@triton.jit
def online_stats(top, total, along, squares, z):
    """Take a block, by lane: what `online` does, and sums of exp(u) * u and exp(2 u)."""
    new = tl.maximum(top, tl.max(z, 1))
    shift = anchor(new)
    along, squares = shifted(along, squares, total, top, shift)
    u = z - shift[:, None]
    e = tl.exp(u)
    along += tl.sum(tl.where(e == 0.0, 0.0, e * u), 1)
    return new, total * tl.exp(top - shift) + tl.sum(e, 1), along, squares + tl.sum(e * e, 1)


@triton.jit
def shifted(along, squares, total, top, shift):
    """Sums of exp(u) * u and exp(2 u), u = z - top, as of u = z - shift."""
    fall = tl.exp(top - shift)
    return (along + total * drop(top, shift)) * fall, squares * fall * fall


@triton.jit
def _gradient(z, d_ptr, hit, v, top, logsum, entropy, sum_sq, STATS: tl.constexpr):
    logp = (z - top) - logsum
    p = tl.exp(logp)
    d = tl.load(d_ptr).to(z.dtype)
    g = tl.where(hit, d, 0.0) - d * p
    if STATS:
        g -= tl.load(d_ptr + 1).to(z.dtype) * tl.where(p == 0.0, 0.0, p * (logp + entropy))
        g += tl.load(d_ptr + 2).to(z.dtype) * 2.0 * (tl.exp(2.0 * logp - sum_sq) - p)
        g += tl.load(d_ptr + 3).to(z.dtype) / v
    return g


@triton.jit
def _rows_kernel(
    z_ptr, dz_ptr, y_ptr, d_ptr, out_ptr, is_top1_ptr, v, IGNORE: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, COLD: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    z_ptr += row * v
    out_ptr += row * COLUMNS
    y = tl.load(y_ptr + row).to(tl.int64)
    live = y != IGNORE
    bad = live & ((y < 0) | (y >= v))
    STATS: tl.constexpr = COLUMNS > 1
    n = tl.where(live, v, 0)  # an ignored row is not read
    zy, top, logsum, entropy, sum_sq, mean, first = _row(
        z_ptr, n, tl.where(live & (bad == 0), y, 0), SCALE, CAP, COLD, STATS, BLOCK
    )
    nan = tl.where(bad, float("nan"), 0.0)
    tl.store(out_ptr, tl.where(live, zy - logsum + nan, 0.0))
    if STATS:
        tl.store(out_ptr + 1, tl.where(live, entropy + nan, 0.0))
        tl.store(out_ptr + 2, tl.where(live, sum_sq + nan, 0.0))
        tl.store(out_ptr + 3, tl.where(live, mean + nan, 0.0))
        tl.store(is_top1_ptr + row, first & live & (bad == 0))
    if dz_ptr is not None:
        dz_ptr += row * v
        for k in range(0, v, BLOCK):
            mask = k + col < v
            z, slope = capped_slope(tl.load(z_ptr + k + col, mask, other=0.0), SCALE, CAP)
            g = _gradient(
                z * COLD,
                d_ptr + row * COLUMNS,
                k + col == y,
                v,
                top,
                logsum,
                entropy,
                sum_sq,
                STATS,
            )
            g = tl.where(live, (g + nan) * slope * (SCALE * COLD), 0.0)
            tl.store(dz_ptr + k + col, g, mask)


def _rows_triton(
    z: Tensor, y: Tensor, *cotangents: Any, row: Row, temperature: float, stats: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    *ds, gradient = cotangents
    m, columns = y.numel(), 4 if stats else 1
    out = z.new_empty(m, columns, dtype=wide(z.dtype))
    is_top1 = torch.empty_like(y, dtype=torch.bool) if stats else None
    d = None
    if gradient:
        zero = out.new_zeros(())
        d = torch.stack([(zero if c is None else c).expand(m) for c in ds], -1).to(out.dtype)
    launch(
        _rows_kernel, (m,), z, z if gradient else None, y.contiguous(), d, out, is_top1, z.shape[1],
        IGNORE=row.ignore_index, SCALE=row.logit_scale, CAP=row.cap, COLD=1 / temperature,
        COLUMNS=columns, **row_tile(z.shape[1], 2048 if stats else 4096),
    )  # fmt: skip
    parts = (*out.unbind(-1), is_top1) if stats else out.unbind(-1)
    return parts, z if gradient else None  # type: ignore[return-value]  # is_top1 with stats exists


# -- the loop ------------------------------------------------------------------------------------


def logp_loop(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor,
    row_args: tuple[Tensor | None, ...], wanted: tuple[bool, ...], *,
    ignore_index: int, logit_scale: float, softcap: float | None, temperature: float, chunk: int,
    compute: torch.dtype, accum_dtype: torch.dtype,
    chunks: Callable[[int], Sequence[Chunk]] | None = None, keep: bool = False, hold: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The loop over chunks of a head, with a row pass of log-probabilities."""
    row = Row(ignore_index, 0.0, logit_scale, softcap)
    return head_loop(
        partial(rows, row=row, temperature=temperature), w, x, b, y, row_args,
        ignore_index=ignore_index, chunk=chunk, compute=compute, accum_dtype=accum_dtype,
        wanted=wanted,  # type: ignore[arg-type]  # three of them
        chunks=chunks, keep=keep, hold=hold,
    )  # fmt: skip


# the row pass on each backend; `stats` says whether of logp alone or with its statistics
LOGP_PASSES: dict[Any, Rows] = {"reference": _rows_ref, "triton": _rows_triton}
