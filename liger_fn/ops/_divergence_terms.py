"""Device functions of a divergence of two rows of logits: the algebra stands in `_divergence`."""

from liger_fn._launch import tl, triton
from liger_fn._math import anchor, by_lane, load_capped, of_lanes, quotient


@triton.jit
def log1p(x):
    u = 1.0 + x  # x / (u - 1) undoes the rounding of u (Goldberg, 1991, theorem 4)
    exact = u == 1.0
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1.0, u - 1.0)))


@triton.jit
def is_near(x):
    """Whether `expm1_rest` knows x; of NaN False."""
    return tl.abs(x) < (0.015625 if x.dtype == tl.float64 else 0.5)


@triton.jit
def horner(p, x, c: tl.constexpr):
    """p * x + c, in one instruction."""
    return tl.fma(p, x, tl.full((), c, x.dtype))


@triton.jit
def expm1_rest(x):
    """Return exp(x) - 1 - x where x `is_near`, with all its digits."""
    p = horner(tl.full((), 1 / 362880, x.dtype), x, 1 / 40320)
    p = horner(horner(horner(p, x, 1 / 5040), x, 1 / 720), x, 1 / 120)
    return x * x * horner(horner(horner(p, x, 1 / 24), x, 1 / 6), x, 1 / 2)


@triton.jit
def is_tiny(x):
    return tl.abs(x) < 0.015625


@triton.jit
def expm1_rest_of_tiny(x):
    """What `expm1_rest` gives, of x that `is_tiny`: in float32 a third of the work."""
    short = x * x * horner(horner(tl.full((), 1 / 24, x.dtype), x, 1 / 6), x, 1 / 2)
    return expm1_rest(x) if x.dtype == tl.float64 else short


@triton.jit
def step(e_p, e_q, x):
    """Return e_p - e_q, where e_p = e_q * exp(x), with all its digits for a tiny x too."""
    return tl.where(is_tiny(x), e_q * (x + expm1_rest_of_tiny(x)), e_p - e_q)


@triton.jit
def shifted(z, top, SCALE: tl.constexpr):
    """SCALE * (z - top), and its exponential; nothing seen so far, -inf, counts as 0."""
    z = z - anchor(top)
    return z, tl.exp(z * SCALE)


@triton.jit
def both_online(top_q, sum_q, top_p, sum_p, ahead, zq, zp, SCALE: tl.constexpr):
    """Do what `online` does to both rows, and to `ahead`, sum_p - sum_q without cancellation."""
    new_q, new_p = tl.maximum(top_q, tl.max(zq, 1)), tl.maximum(top_p, tl.max(zp, 1))
    zq, e_q = shifted(zq, new_q[:, None], SCALE)
    zp, e_p = shifted(zp, new_p[:, None], SCALE)
    old_q, f_q = shifted(top_q, new_q, SCALE)
    old_p, f_p = shifted(top_p, new_p, SCALE)
    ahead = ahead * f_p + sum_q * step(f_p, f_q, (old_p - old_q) * SCALE)
    ahead += tl.sum(step(e_p, e_q, (zp - zq) * SCALE), 1)
    return new_q, sum_q * f_q + tl.sum(e_q, 1), new_p, sum_p * f_p + tl.sum(e_p, 1), ahead


@triton.jit
def both_whole(tops_q, sums_q, tops_p, sums_p, aheads, SCALE: tl.constexpr):
    """Both maxima and sums of a row, and log(sum_p / sum_q)."""
    top_q, top_p = tl.max(tops_q), tl.max(tops_p)
    old_q, f_q = shifted(tops_q, top_q, SCALE)
    old_p, f_p = shifted(tops_p, top_p, SCALE)
    ahead = tl.sum(aheads * f_p + sums_q * step(f_p, f_q, (old_p - old_q) * SCALE))
    sum_q, sum_p = tl.sum(sums_q * f_q), tl.sum(sums_p * f_p)
    of_q = tl.where(sum_q == 0.0, 1.0, sum_q)  # a row that is not read
    x = ahead / of_q
    gap = tl.where(tl.abs(x) < 0.25, log1p(x), tl.log(quotient(sum_p, of_q)))
    return top_q, sum_q, top_p, sum_p, gap


@triton.jit
def divergence_row(
    zq_ptr, zp_ptr, v, dtype: tl.constexpr, KIND: tl.constexpr, BETA: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, SCALE_Q: tl.constexpr = 1.0,
    CAP_Q: tl.constexpr = 0.0, SCALE_P: tl.constexpr = 1.0, CAP_P: tl.constexpr = 0.0,
):  # fmt: skip
    """Two passes over a row of student logits (q) and of teacher logits (p).

    Returns:
        the divergence, then what its gradients need: of q and of p the maximum of the logits and
        sum(exp(SCALE * (z - maximum))), log(sum_p / sum_q), the sums of the terms b and a.
    """
    col = tl.arange(0, BLOCK)
    tops_q = of_lanes(tl.full((), -float("inf"), dtype), BLOCK)
    sums_q = of_lanes(tl.full((), 0.0, dtype), BLOCK)
    tops_p, sums_p, aheads = tops_q, sums_q, sums_q
    for k in range(0, v, BLOCK):
        zq, zp = divergence_load(zq_ptr, zp_ptr, k + col, v, dtype, SCALE_Q, CAP_Q, SCALE_P, CAP_P)
        tops_q, sums_q, tops_p, sums_p, aheads = both_online(
            tops_q, sums_q, tops_p, sums_p, aheads, by_lane(zq), by_lane(zp), SCALE
        )
    top_q, sum_q, top_p, sum_p, gap = both_whole(tops_q, sums_q, tops_p, sums_p, aheads, SCALE)
    value = tl.zeros((BLOCK,), dtype)
    b_sums, a_sums = value, value
    for k in range(0, v, BLOCK):
        zq, zp = divergence_load(zq_ptr, zp_ptr, k + col, v, dtype, SCALE_Q, CAP_Q, SCALE_P, CAP_P)
        _, _, b, a, f = divergence_terms(zq, zp, top_q, sum_q, top_p, sum_p, gap, KIND, BETA, SCALE)
        value, b_sums, a_sums = value + f, b_sums + b, a_sums + a
    value, a_sum = tl.sum(value), tl.sum(a_sums)
    if KIND == "kl":
        value = tl.where(a_sum > 1.0, a_sum, value)
    return value, top_q, sum_q, top_p, sum_p, gap, tl.sum(b_sums), a_sum


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
    zq, zp, top_q, sum_q, top_p, sum_p, gap, KIND: tl.constexpr, BETA: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Return q, p, b = q * df/dq, a = p * df/dp and f of a divergence; see ops/_divergence."""
    zq, zp = zq - top_q, zp - top_p
    one = tl.full((), 1.0, zq.dtype)  # a division a row, not one a column
    q, p = tl.exp(zq * SCALE) * quotient(one, sum_q), tl.exp(zp * SCALE) * quotient(one, sum_p)
    r = (zp - zq) * SCALE - gap  # log(p / q); NaN where both are 0
    near = is_near(r)
    if KIND == "kl":
        rest = expm1_rest(-r)
        b = tl.where(near, p * (rest - r), q - p)
        a = tl.where(p == 0.0, 0.0, p * r)
        f = tl.where(near, p * rest, a + b)
    elif KIND == "tvd":
        half = tl.where(r > 0.0, 0.5, tl.where(r < 0.0, -0.5, 0.0))
        b, a = -half * q, half * p
        f = tl.where(is_tiny(r), a * (r - expm1_rest_of_tiny(-r)), a + b)
    else:
        of_p, of_q = tl.full((), BETA, p.dtype), tl.full((), 1.0 - BETA, p.dtype)
        own, other = tl.where(r > 0.0, of_p, of_q), tl.where(r > 0.0, of_q, of_p)
        size = tl.abs(r)
        less = tl.exp(-size)  # the smaller of p and q over the larger
        x = other * tl.where(near, expm1_rest(-size) - size, less - 1.0)
        # log of m over the larger: as log1p exactly 0 where p = q, else without cancellation
        m = log1p(x)
        if BETA < 0.25 or BETA > 0.75:  # else 1 + x is at least a quarter
            m = tl.where(x > -0.5, m, tl.log(own + other * less))
        m_q, m_p = m + tl.maximum(r, 0.0), m - tl.minimum(r, 0.0)
        q_share, p_share = of_q * q, of_p * p
        b = tl.where(q == 0.0, 0.0, -q_share * m_q)
        a = tl.where(p == 0.0, 0.0, -p_share * m_p)
        f = q_share * expm1_rest_of_tiny(m_q) + p_share * expm1_rest_of_tiny(m_p)
        f = tl.where(is_tiny(r), f, a + b)
    return q, p, b, a, f
