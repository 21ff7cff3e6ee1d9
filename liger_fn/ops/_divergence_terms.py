"""Device functions of a divergence of two rows of logits: the algebra stands in `_divergence`."""

from liger_fn._launch import tl, triton
from liger_fn._math import by_lane, load_capped, of_lanes, online, quotient, whole


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
    SCALE: tl.constexpr, BLOCK: tl.constexpr, SCALE_Q: tl.constexpr = 1.0,
    CAP_Q: tl.constexpr = 0.0, SCALE_P: tl.constexpr = 1.0, CAP_P: tl.constexpr = 0.0,
):  # fmt: skip
    """Two passes over a row of student logits (q) and of teacher logits (p).

    Returns:
        the divergence, then what its gradients need, of q and of p: the maximum of the logits,
        sum(exp(SCALE * (z - maximum))), the sum of the terms.
    """
    col = tl.arange(0, BLOCK)
    tops_q = of_lanes(tl.full((), -float("inf"), dtype), BLOCK)
    sums_q = of_lanes(tl.full((), 0.0, dtype), BLOCK)
    tops_p, sums_p = tops_q, sums_q
    for k in range(0, v, BLOCK):
        zq, zp = divergence_load(zq_ptr, zp_ptr, k + col, v, dtype, SCALE_Q, CAP_Q, SCALE_P, CAP_P)
        tops_q, sums_q = online(tops_q, sums_q, by_lane(zq), SCALE)
        tops_p, sums_p = online(tops_p, sums_p, by_lane(zp), SCALE)
    top_q, sum_q = whole(tops_q, sums_q, SCALE)
    top_p, sum_p = whole(tops_p, sums_p, SCALE)
    value = tl.zeros((BLOCK,), dtype)
    b_sums, a_sums = value, value
    for k in range(0, v, BLOCK):
        zq, zp = divergence_load(zq_ptr, zp_ptr, k + col, v, dtype, SCALE_Q, CAP_Q, SCALE_P, CAP_P)
        _, _, b, a = divergence_terms(zq, zp, top_q, sum_q, top_p, sum_p, KIND, BETA, SCALE)
        value, b_sums, a_sums = value + (a + b), b_sums + b, a_sums + a
    return tl.sum(value), top_q, sum_q, tl.sum(b_sums), top_p, sum_p, tl.sum(a_sums)


@triton.jit
def divergence_load(
    zq_ptr, zp_ptr, col, v, dtype: tl.constexpr, SCALE_Q: tl.constexpr = 1.0,
    CAP_Q: tl.constexpr = 0.0, SCALE_P: tl.constexpr = 1.0, CAP_P: tl.constexpr = 0.0,
):  # fmt: skip
    # -inf outside, in both: probability 0 on either side, terms of exactly 0
    zq = load_capped(zq_ptr + col, col < v, SCALE_Q, CAP_Q).to(dtype)
    return zq, load_capped(zp_ptr + col, col < v, SCALE_P, CAP_P).to(dtype)


@triton.jit
def divergence_terms(
    zq, zp, top_q, sum_q, top_p, sum_p, KIND: tl.constexpr, BETA: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """Return q, p, and b = q * df/dq, a = p * df/dp of a divergence; see ops/_divergence."""
    zq, zp = (zq - top_q) * SCALE, (zp - top_p) * SCALE
    q, p = tl.exp(zq) / sum_q, tl.exp(zp) / sum_p
    # log(p / q); NaN where both are 0
    r = (zp - zq) - tl.log(quotient(sum_p, sum_q))
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
