"""The maths that several functions share.

Device functions use no libdevice: the interpreter runs them.
"""

from typing import overload

import torch
from torch import Tensor

from liger_fn._launch import tl, triton


@overload
def wide(t: Tensor) -> Tensor: ...
@overload
def wide(t: torch.dtype) -> torch.dtype: ...
def wide(t: Tensor | torch.dtype) -> Tensor | torch.dtype:
    """Widen a tensor or a dtype to that of statistics: float64 stays, all else becomes float32."""
    if isinstance(t, torch.dtype):
        return torch.promote_types(t, torch.float32)
    return t if t.dtype == torch.float64 else t.float()


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    # torch 2.11 compiles a cast to the same dtype at the end of a Function into a gradient of zero
    return t if t.dtype == dtype else t.to(dtype)


def normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows shifted and scaled to mean 0 and variance 1; mean and 1 / deviation (..., 1)."""
    mean = x.mean(-1, keepdim=True)
    mean = mean + (x - mean).mean(-1, keepdim=True)  # what rounding took from a large mean
    d = x - mean
    rstd = torch.rsqrt((d * d).mean(-1, keepdim=True) + eps)
    return d * rstd, mean, rstd


@triton.jit
def up(x):
    """Widen to the type of statistics: float64 stays, everything else becomes float32."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Make a result ready to be stored in a type.

    By way of float32: Triton's interpreter (3.7) turns float64 into bfloat16 as into an integer.
    """
    return x if dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def tanh(x):
    # 1 - 2/(e^2x + 1) cancels near 0: there the odd polynomial of Cephes' tanhf (S. Moshier) is
    # good to an ulp of float32. float64 has room for the plain form: its absolute error is 1e-16.
    # From the positive side: below 0 it would be off by 3 ulp, and 1 - t * t doubles that.
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    far = tl.where(x < 0.0, -far, far)
    s = x * x
    p = (
        ((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1
    ) * s
    near = x + x * s * (p - 3.33332819422e-1)
    return far if x.dtype == tl.float64 else tl.where(tl.abs(x) < 0.625, near, far)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round to a type and widen again."""
    return up(x.to(dtype))


@triton.jit
def moments(x_ptr, n, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """Mean and variance of a row, and its last block, which registers still hold.

    Squares of deviations, block by block; blocks join after Chan, Golub and LeVeque, 1979.
    """
    col = tl.arange(0, BLOCK)
    x = tl.zeros((BLOCK,), dtype)
    mean = tl.full((), 0.0, dtype)
    squares = tl.full((), 0.0, dtype)
    for k in range(0, n, BLOCK):
        mask = k + col < n
        x = up(tl.load(x_ptr + k + col, mask, other=0.0))
        size = tl.full((), tl.minimum(n - k, BLOCK), dtype)
        share = size / (k + size)
        own = tl.sum(x) / size
        own += tl.sum(tl.where(mask, x - own, 0.0)) / size  # what rounding took from a large mean
        d = tl.where(mask, x - own, 0.0)  # after the subtraction: padding deviates by -mean
        ahead = own - mean
        mean += ahead * share
        squares += tl.sum(d * d) + ahead * (k * share) * ahead  # the square alone may overflow
    return x, mean, squares / n


@triton.jit
def capped(z, SCALE: tl.constexpr, CAP: tl.constexpr):
    """CAP * tanh(SCALE * z / CAP), or SCALE * z where CAP is 0. Mask after it: tanh(-inf) is -1."""
    z = up(z) * SCALE
    if CAP != 0.0:
        z = CAP * tanh(z / CAP)
    return z


@triton.jit
def capped_slope(z, SCALE: tl.constexpr, CAP: tl.constexpr):
    """What `capped` gives, and its derivative but for the factor SCALE."""
    z = up(z) * SCALE
    slope = tl.full((), 1.0, z.dtype)
    if CAP != 0.0:  # from tanh itself: z / CAP would round it twice more, and 1 - t * t cancels
        t = tanh(z / CAP)
        z = CAP * t
        slope = 1.0 - t * t
    return z, slope


@triton.jit
def online(top, total, z, SCALE: tl.constexpr):
    """Take a block into a running maximum (a scalar) and sums of exp(SCALE * (z - top)) (a block).

    On line: Milakov and Gimelshein, 2018, arXiv:1805.02867.
    """
    new = tl.maximum(top, tl.max(z))
    shift = tl.where(new == -float("inf"), 0.0, new)  # -inf - -inf is NaN: nothing seen so far
    return new, total * tl.exp((top - shift) * SCALE) + tl.exp((z - shift) * SCALE)


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
    top = zy
    col = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), zy.dtype)
    spread = tl.zeros((BLOCK,), zy.dtype)
    ahead = tl.zeros((BLOCK,), tl.int32)
    for k in range(0, steps, BLOCK):
        mask = k + col < v
        z = capped(tl.load(z_ptr + k + col, mask, other=0.0), SCALE, CAP)
        z = tl.where(mask, z, -float("inf"))  # after the cap: tanh(-inf) is -1
        top, total = online(top, total, z, 1.0)
        ahead += ((z > zy) | ((z == zy) & (k + col < at))).to(tl.int32)
        if (
            SMOOTHING != 0.0
        ):  # sum of weight * (z[y] - z); the rest of weight * (lse - z) is gap below
            gap = tl.where(mask, zy - z, 0.0)
            if weight_ptr is not None:
                gap *= tl.load(weight_ptr + k + col, mask, other=0.0).to(zy.dtype)
            spread += gap
    logsum = tl.log(tl.sum(total))
    own = tl.full((), 1.0, zy.dtype)
    weights = own * v
    if weight_ptr is not None:
        own = tl.load(weight_ptr + at).to(zy.dtype)
        if SMOOTHING != 0.0:
            weights = weight_sum(weight_ptr, v, zy.dtype, BLOCK)
    gap = logsum - (zy - top)
    nll = (1.0 - SMOOTHING) * own * gap
    if SMOOTHING != 0.0:
        nll += SMOOTHING / tl.full((), v, zy.dtype) * (weights * gap + tl.sum(spread))
    zsq = own * (top + logsum) * (top + logsum)
    nan = tl.where(bad, float("nan"), 0.0)
    nll, zsq = tl.where(y == IGNORE, 0.0, nll + nan), tl.where(y == IGNORE, 0.0, zsq + nan)
    return nll, zsq, (tl.sum(ahead) == 0) & (y != IGNORE) & (bad == 0), top, logsum


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
    SCALE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Write pull * p - spread * weight - target at y, back through cap and scale, at `col`."""
    mask = col < v
    z, slope = capped_slope(tl.load(z_ptr + col, mask, other=0.0), SCALE, CAP)
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col, mask, other=0.0).to(z.dtype)
    g = pull * tl.exp((z - top) - logsum) - spread * weight - tl.where(col == y, target, 0.0)
    tl.store(dz_ptr + col, g * slope * SCALE, mask)


@triton.jit
def log1p(x):
    u = 1.0 + x  # x / (u - 1) undoes the rounding of u (Goldberg, 1991, theorem 4)
    exact = u == 1.0
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1.0, u - 1.0)))


@triton.jit
def expm1_near(x):
    """Return exp(x) - 1: to an ulp of float32 for |x| <= 1/2, of float64 for |x| <= 1/64."""
    p = 1 / 720 + x * (1 / 5040 + x * (1 / 40320 + x / 362880))
    return x + x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * p))))


@triton.jit
def divergence_row(
    zq_ptr, zp_ptr, v, dtype: tl.constexpr, KIND: tl.constexpr, BETA: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Two passes over a row of student logits (q) and of teacher logits (p).

    Returns:
        the divergence, then what its gradients need, of q and of p: the maximum of the logits,
        sum(exp(SCALE * (z - maximum))), the sum of the terms.
    """
    col = tl.arange(0, BLOCK)
    top_q = tl.full((), -float("inf"), dtype)
    zeros = tl.zeros((BLOCK,), dtype)
    top_p, sums_q, sums_p = top_q, zeros, zeros
    for k in range(0, v, BLOCK):
        zq, zp = divergence_load(zq_ptr, zp_ptr, k + col, v, dtype)
        top_q, sums_q = online(top_q, sums_q, zq, SCALE)
        top_p, sums_p = online(top_p, sums_p, zp, SCALE)
    sum_q, sum_p = tl.sum(sums_q), tl.sum(sums_p)
    value, b_sums, a_sums = zeros, zeros, zeros
    for k in range(0, v, BLOCK):
        zq, zp = divergence_load(zq_ptr, zp_ptr, k + col, v, dtype)
        _, _, b, a = divergence_terms(zq, zp, top_q, sum_q, top_p, sum_p, KIND, BETA, SCALE)
        value, b_sums, a_sums = value + (a + b), b_sums + b, a_sums + a
    return tl.sum(value), top_q, sum_q, tl.sum(b_sums), top_p, sum_p, tl.sum(a_sums)


@triton.jit
def divergence_load(zq_ptr, zp_ptr, col, v, dtype: tl.constexpr):
    # -inf in both: probability 0 on either side, terms of exactly 0
    zq = tl.load(zq_ptr + col, col < v, other=-float("inf")).to(dtype)
    return zq, tl.load(zp_ptr + col, col < v, other=-float("inf")).to(dtype)


@triton.jit
def divergence_terms(
    zq, zp, top_q, sum_q, top_p, sum_p, KIND: tl.constexpr, BETA: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """Return q, p, and b = q * df/dq, a = p * df/dp of a divergence; see ops/_divergence."""
    zq, zp = (zq - top_q) * SCALE, (zp - top_p) * SCALE
    q, p = tl.exp(zq) / sum_q, tl.exp(zp) / sum_p
    r = (zp - zq) - tl.log(sum_p / sum_q)  # log(p / q); NaN where both are 0
    size = tl.abs(r)
    near = size < (0.015625 if r.dtype == tl.float64 else 0.5)
    if KIND == "kl":
        b = tl.where(near, p * expm1_near(-r), q - p)
        a = tl.where(p == 0.0, 0.0, p * r)
    elif KIND == "tvd":
        half = tl.where(p > q, 0.5, tl.where(p < q, -0.5, 0.0))
        b, a = -half * q, half * p
    else:
        of_p, of_q = tl.full((), BETA, p.dtype), tl.full((), 1.0 - BETA, p.dtype)
        own, other = tl.where(r > 0.0, of_p, of_q), tl.where(r > 0.0, of_q, of_p)
        less = tl.exp(-size)  # the smaller of p and q over the larger
        x = other * tl.where(near, expm1_near(-size), less - 1.0)
        # log of m over the larger: as log1p exactly 0 where p = q, else without cancellation
        m = tl.where(x > -0.5, log1p(x), tl.log(own + other * less))
        b = tl.where(q == 0.0, 0.0, of_q * q * (-m - tl.maximum(r, 0.0)))
        a = tl.where(p == 0.0, 0.0, of_p * p * (tl.minimum(r, 0.0) - m))
    return q, p, b, a
