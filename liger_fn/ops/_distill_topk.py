"""Distillation from a teacher of whom k columns a row are known, the rest in one bucket.

    value = sum over known of p * (log p - log q) + r * (log r - log s)
    p: (k,) given    q = softmax(z / T)    r = 1 - sum of p    s = sum of q over the columns left

    dz = q - p where it is known, q - r * q / s elsewhere, both over T

s is a sum of its own, not a difference of sums, which would have no digits left where it is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_fn._launch import launch, tl, triton
from liger_fn._math import (
    anchor,
    by_lane,
    capped,
    load_capped,
    of_lanes,
    online,
    overwrite,
    whole,
    wide,
)

# -- reference -------------------------------------------------------------------------------------


def topk_ref(
    z: Tensor, valid: Tensor, logp: Tensor, at: Tensor, temperature: float
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Plain torch: values, and their pullback to z."""
    at = torch.where(valid[:, None], at, 0)
    z = torch.where(valid[:, None], wide(z) / temperature, 0.0)
    logp = torch.where(valid[:, None], logp.to(z.dtype), -math.inf)
    logq, q, p = z.log_softmax(-1), z.softmax(-1), logp.exp()
    own = logq.gather(-1, at)
    rest = (1 - p.sum(-1)).clamp(min=0) if at.shape[-1] < z.shape[-1] else p.new_zeros(p.shape[:-1])
    log_outside = logq.scatter(-1, at, -math.inf).logsumexp(-1)
    some = ((rest > 0) & (log_outside > -math.inf))[:, None]
    terms = p * torch.where(p > 0, logp - own, 0.0)
    log_rest = torch.where(rest > 0, rest, 1.0).log()
    tail = torch.where(rest > 0, rest * (log_rest - torch.where(rest > 0, log_outside, 0.0)), 0.0)
    value = torch.where(valid, terms.sum(-1) + tail, 0.0)

    def pull(d: Tensor) -> Tensor:
        outside = torch.where(some, z.scatter(-1, at, -math.inf), z).softmax(-1)
        g = q - torch.where(some, rest[:, None] * outside, 0.0)
        g = g.scatter(-1, at, q.gather(-1, at) - p) / temperature
        return torch.where(valid[:, None], d[:, None] * g, 0.0)

    return value, pull


# -- kernel: known columns lie apart, and NaN in their places --------------------------------------


@triton.jit
def _open(z_ptr, col, v, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Logits of columns that the teacher leaves open, -inf for known ones: those that hold NaN."""
    z = tl.load(z_ptr + col, col < v, other=float("nan"))
    hole = z != z
    return tl.where(hole, -float("inf"), capped(z, SCALE, CAP)), hole & (col < v)


@triton.jit
def _topk_sums(
    z_ptr, known_ptr, logp_ptr, v, k, dtype: tl.constexpr, COLD: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of open columns, of all columns; the teacher's open share."""
    col = tl.arange(0, BLOCK)
    tops = of_lanes(tl.full((), -float("inf"), dtype), BLOCK)
    sums, p = of_lanes(tl.full((), 0.0, dtype), BLOCK), tl.zeros((BLOCK,), dtype)
    holes = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, v, BLOCK):
        z, hole = _open(z_ptr, i + col, v, SCALE, CAP)
        tops, sums = online(tops, sums, by_lane(z), COLD)
        holes += hole.to(tl.int32)
    highs, totals = tops, sums
    for i in range(0, k, BLOCK):
        mask = i + col < k
        z = load_capped(known_ptr + i + col, mask, SCALE, CAP)
        highs, totals = online(highs, totals, by_lane(z), COLD)
        p += tl.exp(tl.load(logp_ptr + i + col, mask, other=-float("inf")).to(dtype))
    top, open_sum = whole(tops, sums, COLD)
    high, total = whole(highs, totals, COLD)
    high += tl.where(tl.sum(holes) > k, float("nan"), 0.0)  # a NaN that is the student's own
    rest = tl.where(k < v, 1.0 - tl.sum(p), 0.0)
    return top, open_sum, high, total, tl.where(rest < 0.0, 0.0, rest)


@triton.jit
def _topk_kernel(
    z_ptr, known_ptr, logp_ptr, y_ptr, a_ptr, value_ptr, v, k, COLD: tl.constexpr,
    IGNORE: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, PULL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    z_ptr += row * v
    known_ptr += row * k
    logp_ptr += row * k
    dtype: tl.constexpr = value_ptr.dtype.element_ty
    ignored = tl.load(y_ptr + row) == IGNORE
    n, known = tl.where(ignored, 0, v), tl.where(ignored, 0, k)
    top_open, sum_open, top, total, rest = _topk_sums(
        z_ptr, known_ptr, logp_ptr, n, known, dtype, COLD, SCALE, CAP, BLOCK
    )
    log_sum = tl.log(total)
    d = tl.load(a_ptr + row) * COLD if PULL else 0.0
    terms = tl.zeros((BLOCK,), dtype)
    for i in range(0, k, BLOCK):
        mask = i + col < known
        z = capped(tl.load(known_ptr + i + col, mask, other=0.0), SCALE, CAP)
        logq = (z - top) * COLD
        q, logq = tl.exp(logq) / total, logq - log_sum
        logp = tl.load(logp_ptr + i + col, mask, other=-float("inf")).to(dtype)
        p = tl.exp(logp)
        terms += p * tl.where(p > 0.0, logp - logq, 0.0)
        if PULL:
            overwrite(known_ptr, i + col, known, k, d * (q - p), SCALE, CAP)
    log_open = (top_open - top) * COLD + (tl.log(sum_open) - log_sum)
    tail = tl.where(rest > 0.0, rest * (tl.log(rest) - log_open), 0.0)
    tl.store(value_ptr + row, tl.sum(terms) + tail)
    if PULL:
        top_open = anchor(top_open)
        share = rest / tl.where(sum_open > 0.0, sum_open, float("inf"))
        for i in range(0, v, BLOCK):
            z, _ = _open(z_ptr, i + col, n, SCALE, CAP)
            g = tl.exp((z - top) * COLD) / total - share * tl.exp((z - top_open) * COLD)
            overwrite(z_ptr, i + col, n, v, d * g, SCALE, CAP)


def topk_triton(
    z: Tensor, y: Tensor, a: Tensor, logp: Tensor, at: Tensor, value: Tensor, *, PULL: bool,
    IGNORE: int, **meta: Any,
) -> None:  # fmt: skip
    """Fill value, and with PULL put gradients in the place of z, which is changed in any case."""
    at = torch.where((y != IGNORE)[:, None], at, 0)
    known = z.gather(1, at)
    z.scatter_(1, at, torch.nan)
    launch(
        _topk_kernel, (len(y),), z, known, logp.contiguous(), y, a, value, z.shape[1], at.shape[1],
        PULL=PULL, IGNORE=IGNORE, **meta,
    )  # fmt: skip
    if PULL:
        z.scatter_(1, at, known)
