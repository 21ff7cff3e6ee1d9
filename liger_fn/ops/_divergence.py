"""What kl_div, jsd and tvd share: the divergence of two rows of logits, its pullback, the call.

    q = softmax(student / T)    p = softmax(teacher / T)    r = log(p / q)     each: (..., v)

A divergence D = sum over columns of f(p, q) with f(c p, c q) = c f(p, q) (as of each f(p, q) =
q g(p / q): Csiszar, 1967) equals, after Euler, the sum of its terms a and b, and they give both
pullbacks:

    a = p * df/dp    b = q * df/dq    D = sum(a + b)

    dstudent = dD / T * (b - q * sum(b))        dteacher = dD / T * (a - p * sum(a))

    kl    f = p r + q - p              a = p r                    b = q - p
    tvd   f = |p - q| / 2              a = p sign(p - q) / 2      b = q sign(q - p) / 2
    jsd   f = beta p log(p / m) + (1 - beta) q log(q / m)         m = beta p + (1 - beta) q
                                       a = beta p log(p / m)      b = (1 - beta) q log(q / m)

q - p sums to 0; with it, and near p = q as p * expm1(-r), the terms of KL add up to p times about
r**2 / 2, so that rounding is of the size of KL and not of p. A KL above 1 is the sum of a alone,
without the rounding of that 0. Near p = q f itself is formed, not a + b:
with h(x) = exp(x) - 1 - x from its series it is p h(-r) for KL and, as the slopes of both halves
cancel, beta p h(log(m / p)) + (1 - beta) q h(log(m / q)) for JSD.

r, whose sign TVD needs, comes from differences of logits and log(sum_p / sum_q), the sums being
those of exponentials. Their ratio is rounded by an ulp of 1, more than r where the distributions
are within 1e-7 of each other: near 1 its logarithm is log1p((sum_p - sum_q) / sum_q), the
difference a sum of exp(zq) * expm1(zp - zq) over columns. Where p = q every term is exactly 0.
All is float32 (float64 where a tensor is), and from differences to the maximum of a row, which keep
their digits under a large common offset. A row whose y is ignore_index is not read and does not
count: value and gradients are 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from liger_fn._check import (
    check_numbers,
    check_positive,
    check_same_shape,
    check_share,
    check_tensors,
)
from liger_fn._launch import contiguous, launch, row_tile, rows_of, tl, triton
from liger_fn._math import cast, narrow, wide
from liger_fn._vjp import custom_vjp
from liger_fn.ops._ce import (
    check_reduction,
    check_rows,
    divisor,
    live_weight,
    normaliser,
    reduce_rows,
)
from liger_fn.ops._divergence_terms import divergence_load, divergence_row, divergence_terms

# -- reference -------------------------------------------------------------------------------------


def _fwd_ref(
    student: Tensor, teacher: Tensor, y: Tensor | None, *,
    kind: str, beta: float, temperature: float, ignore_index: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    valid = None if y is None else (y != ignore_index)[..., None]
    zq, zp = _masked(student, teacher, valid)
    top_q, top_p = (z.detach().amax(-1, keepdim=True) for z in (zq, zp))
    zq, zp = zq - top_q, zp - top_p
    e_q, e_p = ((z * (1 / temperature)).exp() for z in (zq, zp))
    sum_q, sum_p = e_q.sum(-1, keepdim=True), e_p.sum(-1, keepdim=True)
    # log(sum_p / sum_q), from the difference where it is small
    x = (zp - zq) * (1 / temperature)
    near = x.abs() < 0.5
    apart = torch.where(near, e_q * torch.where(near, x, 0.0).expm1(), e_p - e_q)
    x = apart.sum(-1, keepdim=True) / sum_q
    near = x.abs() < 0.5
    gap = torch.where(near, torch.where(near, x, 0.0).log1p(), (sum_p / sum_q).log())
    stats = (top_q, sum_q, top_p, sum_p, gap)
    _, _, b, a, f = terms(student, teacher, valid, stats, kind, beta, temperature)
    b, a, f = (t.sum(-1, keepdim=True) for t in (b, a, f))
    if kind == "kl":
        f = torch.where(a > 1, a, f)
    return f[..., 0], torch.cat((*stats, b, a), -1)


def _bwd_ref(
    d: Tensor, student: Tensor, teacher: Tensor, y: Tensor | None, stats: Tensor, *,
    kind: str, beta: float, temperature: float, ignore_index: int, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    valid = None if y is None else (y != ignore_index)[..., None]
    *of_row, b_sum, a_sum = stats.split(1, -1)
    q, p, b, a, _ = terms(student, teacher, valid, of_row, kind, beta, temperature)
    d, out = d[..., None] * (1 / temperature), []
    both = ((student, b, q, b_sum), (teacher, a, p, a_sum))
    for (z, share, prob, total), want in zip(both, wanted, strict=True):
        g = d * (share - prob * total) if want else None
        if g is not None and valid is not None:
            g = torch.where(valid, g, 0.0)
        out.append(None if g is None else cast(g, z.dtype))
    return out[0], out[1]


def _masked(student: Tensor, teacher: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    # before exp and log: what an ignored row holds, NaN included, reaches neither value nor
    # gradient
    dtype = torch.promote_types(wide(student.dtype), teacher.dtype)
    z = student.to(dtype), teacher.to(dtype)
    return z if valid is None else (torch.where(valid, z[0], 0.0), torch.where(valid, z[1], 0.0))


def terms(
    student: Tensor, teacher: Tensor, valid: Tensor | None, stats: Sequence[Tensor],
    kind: str, beta: float, temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Plain torch: q, p, b, a, f."""
    top_q, sum_q, top_p, sum_p, gap = stats
    zq, zp = _masked(student, teacher, valid)
    zq, zp = zq - top_q, zp - top_p
    q, p = ((z * (1 / temperature)).exp() / s for z, s in ((zq, sum_q), (zp, sum_p)))
    # where a probability is 0 its logarithm is replaced before the product, not after it: the
    # gradient of 0 * inf is NaN
    no_q, no_p = q == 0, p == 0
    r = torch.where(no_q & no_p, 0.0, (zp - zq) * (1 / temperature) - gap)
    near = r.abs() < 0.5
    close = torch.where(near, r, 0.0)
    if kind == "tvd":
        half = 0.5 * torch.sign(r)
        f = torch.where(near, half * p * -torch.expm1(-close), half * (p - q))
        return q, p, -half * q, half * p, f
    if kind == "kl":
        b, a = torch.where(near, p * torch.expm1(-close), q - p), p * torch.where(no_p, 0.0, r)
        return q, p, b, a, torch.where(near, p * _rest(-close), a + b)
    # log(m / q) and log(m / p): near p = q from the first form, exactly 0 there, and smooth; away
    # from it from the second, which overflows nowhere. Beyond e**1000 a probability is 0; infinity
    # would be NaN in forward mode
    far = torch.where(near, 1.0, r.clamp(-1e3, 1e3))
    log_p, log_q = (r.new_full((), math.log(w)) for w in (beta, 1 - beta))
    m = torch.log1p(beta * torch.expm1(close))
    m_q = torch.where(near, m, torch.logaddexp(far + log_p, log_q))
    m_p = torch.where(near, m - close, torch.logaddexp(log_p, log_q - far))
    b = (beta - 1) * q * torch.where(no_q, 0.0, m_q)
    a = -beta * p * torch.where(no_p, 0.0, m_p)
    f = (1 - beta) * q * _rest(m) + beta * p * _rest(m - close)
    return q, p, b, a, torch.where(near, f, a + b)


def _rest(x: Tensor) -> Tensor:
    """exp(x) - 1 - x, by its series: for |x| <= 1/2."""
    h = torch.ones_like(x)
    for k in range(15, 2, -1):
        h = 1 + x * h / k
    return x * x * h / 2


# -- kernels ---------------------------------------------------------------------------------------


@triton.jit
def _fwd_kernel(
    student_ptr, teacher_ptr, y_ptr, value_ptr, stats_ptr, v, KIND: tl.constexpr,
    BETA: tl.constexpr, SCALE: tl.constexpr, IGNORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v_read = v
    if y_ptr is not None:  # a row that is ignored is not read
        v_read = tl.where(tl.load(y_ptr + row) == IGNORE, 0, v)
    value, top_q, sum_q, top_p, sum_p, gap, b_sum, a_sum = divergence_row(
        student_ptr + row * v, teacher_ptr + row * v, v_read, value_ptr.dtype.element_ty,
        KIND, BETA, SCALE, BLOCK,
    )  # fmt: skip
    tl.store(value_ptr + row, value)
    stats_ptr += 7 * row
    tl.store(stats_ptr, top_q)
    tl.store(stats_ptr + 1, sum_q)
    tl.store(stats_ptr + 2, top_p)
    tl.store(stats_ptr + 3, sum_p)
    tl.store(stats_ptr + 4, gap)
    tl.store(stats_ptr + 5, b_sum)
    tl.store(stats_ptr + 6, a_sum)


@triton.jit
def _bwd_kernel(
    d_ptr, student_ptr, teacher_ptr, y_ptr, stats_ptr, dstudent_ptr, dteacher_ptr, v,
    KIND: tl.constexpr, BETA: tl.constexpr, SCALE: tl.constexpr, IGNORE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stats_ptr += 7 * row
    v_read = v
    if y_ptr is not None:
        v_read = tl.where(tl.load(y_ptr + row) == IGNORE, 0, v)
    zq, zp = divergence_load(
        student_ptr + row * v, teacher_ptr + row * v, col, v_read, stats_ptr.dtype.element_ty
    )
    q, p, b, a, _ = divergence_terms(
        zq, zp, tl.load(stats_ptr), tl.load(stats_ptr + 1), tl.load(stats_ptr + 2),
        tl.load(stats_ptr + 3), tl.load(stats_ptr + 4), KIND, BETA, SCALE,
    )  # fmt: skip
    d = tl.load(d_ptr + row) * SCALE
    if dstudent_ptr is not None:
        g = tl.where(v_read == 0, 0.0, d * (b - q * tl.load(stats_ptr + 5)))
        g = narrow(g, dstudent_ptr.dtype.element_ty)
        tl.store(dstudent_ptr + row * v + col, g, col < v)
    if dteacher_ptr is not None:
        g = tl.where(v_read == 0, 0.0, d * (a - p * tl.load(stats_ptr + 6)))
        g = narrow(g, dteacher_ptr.dtype.element_ty)
        tl.store(dteacher_ptr + row * v + col, g, col < v)


def _fwd_triton(
    student: Tensor, teacher: Tensor, y: Tensor | None, *,
    kind: str, beta: float, temperature: float, ignore_index: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    v, lead = student.shape[-1], student.shape[:-1]
    dtype = torch.promote_types(wide(student.dtype), teacher.dtype)
    value = student.new_empty(lead, dtype=dtype)
    stats = student.new_empty((*lead, 7), dtype=dtype)
    zq, zp = (rows_of(z, v).contiguous() for z in (student, teacher))
    launch(
        _fwd_kernel, (zq.shape[0],), zq, zp, contiguous(y), value, stats, v,
        KIND=kind, BETA=beta, SCALE=1 / temperature, IGNORE=ignore_index, **row_tile(v, 2048, 256),
    )  # fmt: skip
    return value, stats


def _bwd_triton(
    d: Tensor, student: Tensor, teacher: Tensor, y: Tensor | None, stats: Tensor, *,
    kind: str, beta: float, temperature: float, ignore_index: int, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    v, tile = student.shape[-1], row_tile(student.shape[-1], 2048)
    zq, zp = (rows_of(z, v).contiguous() for z in (student, teacher))
    dstudent = student.new_empty(student.shape) if wanted[0] else None
    dteacher = teacher.new_empty(teacher.shape) if wanted[1] else None
    launch(
        _bwd_kernel, (zq.shape[0], -(-v // tile["BLOCK"])), d.contiguous(), zq, zp, contiguous(y),
        stats.contiguous(), dstudent, dteacher, v,
        KIND=kind, BETA=beta, SCALE=1 / temperature, IGNORE=ignore_index, **tile,
    )  # fmt: skip
    return dstudent, dteacher


# -- rule ------------------------------------------------------------------------------------------

_rows = custom_vjp(
    "divergence",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("student", "teacher"),
    rows=("student", "teacher", "y"),
    axes="... [v], ... [v], ... -> ..., ... [s]",
)


def divergence(
    op: str, kind: str, student: Tensor, teacher: Tensor, y: Tensor | None, *, beta: float = 0.5,
    temperature: float, ignore_index: int, token_weight: Tensor | None, reduction: str,
    n_valid: float | Tensor | None,
) -> Tensor:  # fmt: skip
    """Check the arguments of a public function, and reduce its rows."""
    check_tensors(
        op, student=(student, "... v"), teacher=(teacher, "... v"), y=(y, "? int ..."),
        token_weight=(token_weight, "? ..."),
    )  # fmt: skip
    check_same_shape(op, student=student, teacher=teacher)
    check_rows(op, y, student=student)
    check_rows(op, token_weight, "token_weight", "weight", student=student)
    check_numbers(op, ignore_index=ignore_index)
    check_positive(op, "temperature", temperature)
    check_reduction(op, student.shape[-1], reduction, n_valid, student=student)
    check_share(op, "beta", beta)
    if kind == "jsd" and beta in (0, 1):
        kind, student, teacher = "kl", *((teacher, student) if beta else (student, teacher))
    y = None if y is None else y.long()
    rows = _rows(
        student, teacher, y, kind=kind, beta=beta, temperature=temperature,
        ignore_index=ignore_index,
    )  # fmt: skip
    if y is not None:
        n = normaliser(y, None, ignore_index, reduction, n_valid, rows.dtype)
    elif reduction == "mean":
        n = divisor(rows.numel() if n_valid is None else n_valid, rows.device, rows.dtype)
    else:
        n = None
    if token_weight is not None and y is not None:
        token_weight = live_weight(token_weight, y, ignore_index)
    return reduce_rows(rows, token_weight, reduction, n)
