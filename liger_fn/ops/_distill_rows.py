"""The row passes of distillation: logits of one chunk to divergences and their gradient.

kl, reverse (KL with the roles swapped), jsd, tvd     as in `_divergence`
cosine    1 - cos(z, zt); where that is below 1/2 as |z/|z| - zt/|zt||**2 / 2, exactly 0 for
          equals, whose own rounding is an ulp of 2 far from it; 1 where one is 0
top k     as in `_distill_topk`

Both passes take (z, y, a, zt, at, gradient): z holds the student's logits before scale and cap, zt
the teacher's (with at, columns, its k log-probabilities), a the coefficients of rows. They give
values, and dz where it is asked for. The kernels, one a chunk, write it over z.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from liger_fn._launch import launch, row_tile, tl, triton
from liger_fn._math import capped, overwrite, wide
from liger_fn.ops._ce import Row, slope, transformed
from liger_fn.ops._distill_topk import topk_ref, topk_triton
from liger_fn.ops._divergence import _bwd_ref, _fwd_ref
from liger_fn.ops._divergence_terms import divergence_load, divergence_row, divergence_terms

Found = tuple[Tensor, Callable[[Tensor], Tensor]]  # values, and their pullback

# -- reference -------------------------------------------------------------------------------------


def rows_ref(
    z: Tensor, y: Tensor, a: Tensor | None, zt: Tensor, at: Tensor | None, gradient: bool, *,
    kind: str, beta: float, temperature: float, student: Row, teacher: Row,
) -> tuple[tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    """Plain torch."""
    plain = student.softcap is None and student.logit_scale == 1.0
    zs = z if plain else transformed(z, student)
    valid = y != student.ignore_index
    if at is None and (teacher.softcap is not None or teacher.logit_scale != 1.0):
        zt = transformed(zt, teacher)
    if at is not None:
        value, pull = topk_ref(zs, valid, zt, at, temperature)
    elif kind == "cosine":
        value, pull = _cosine(zs, valid, zt)
    else:
        value, pull = _divergence(zs, y, zt, kind, beta, temperature, student.ignore_index)
    if not gradient:
        return (value,), None
    dz = pull(torch.ones_like(value) if a is None else a.to(value.dtype))
    return (value,), dz if plain else dz * slope(z, student, valid)


def _divergence(
    z: Tensor, y: Tensor, zt: Tensor, kind: str, beta: float, temperature: float, ignore_index: int
) -> Found:
    reverse = kind == "reverse"
    pair, wanted = (zt, z) if reverse else (z, zt), (not reverse, reverse)
    kind = "kl" if reverse else kind
    value, stats = _fwd_ref(
        *pair, y, kind=kind, beta=beta, temperature=temperature, ignore_index=ignore_index
    )

    def pull(d: Tensor) -> Tensor:
        return _bwd_ref(  # type: ignore[return-value]  # the one that is wanted
            d, *pair, y, stats, kind=kind, beta=beta, temperature=temperature,
            ignore_index=ignore_index, wanted=wanted,
        )[reverse]  # fmt: skip

    return value, pull


def _cosine(z: Tensor, valid: Tensor, zt: Tensor) -> Found:
    z, zt = (torch.where(valid[:, None], wide(t), 1.0) for t in (z, zt))
    sizes = [torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (z, zt)]
    empty = (sizes[0] == 0) | (sizes[1] == 0)
    unit, other = (t / torch.where(empty, 1.0, n) for t, n in zip((z, zt), sizes, strict=True))
    value = 0.5 * (unit - other).square().sum(-1)
    value = torch.where(value < 0.5, value, 1 - (unit * other).sum(-1))
    value = torch.where(empty[:, 0], 1.0, value)

    def pull(d: Tensor) -> Tensor:
        # what of -other is across unit, and so of unit - other: that has the digits where they are
        # close, and far from it would lose some. unit is 1 long but for its rounding
        e = torch.where(value[:, None] < 0.5, unit, 0.0) - other
        square = torch.where(empty, 1.0, unit.square().sum(-1, keepdim=True))
        g = e - (unit * e).sum(-1, keepdim=True) / square * unit
        g = g / torch.where(empty, 1.0, sizes[0])
        return torch.where(valid[:, None] & ~empty, d[:, None] * g, 0.0)

    return torch.where(valid, value, 0.0), pull


# -- kernels: one program reads a row and, with PULL, turns its logits into their gradient ---------


@triton.jit
def _divergence_kernel(
    zq_ptr, zp_ptr, y_ptr, a_ptr, value_ptr, v, KIND: tl.constexpr, BETA: tl.constexpr,
    COLD: tl.constexpr, IGNORE: tl.constexpr, SCALE_Q: tl.constexpr, CAP_Q: tl.constexpr,
    SCALE_P: tl.constexpr, CAP_P: tl.constexpr, PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PULL is "q", "p" or neither: which of the two becomes its gradient."""
    row = tl.program_id(0).to(tl.int64)
    zq_ptr += row * v
    zp_ptr += row * v
    dtype: tl.constexpr = value_ptr.dtype.element_ty
    n = tl.where(tl.load(y_ptr + row) == IGNORE, 0, v)  # an ignored row is not read
    value, top_q, sum_q, top_p, sum_p, gap, b_sum, a_sum = divergence_row(
        zq_ptr, zp_ptr, n, dtype, KIND, BETA, COLD, BLOCK, SCALE_Q, CAP_Q, SCALE_P, CAP_P
    )
    tl.store(value_ptr + row, value)
    if PULL != "":
        d = tl.load(a_ptr + row) * COLD
        for k in range(0, v, BLOCK):
            col = k + tl.arange(0, BLOCK)
            zq, zp = divergence_load(zq_ptr, zp_ptr, col, n, dtype, SCALE_Q, CAP_Q, SCALE_P, CAP_P)
            q, p, b, a, _ = divergence_terms(
                zq, zp, top_q, sum_q, top_p, sum_p, gap, KIND, BETA, COLD
            )
            if PULL == "q":
                overwrite(zq_ptr, col, n, v, d * (b - q * b_sum), SCALE_Q, CAP_Q)
            else:
                overwrite(zp_ptr, col, n, v, d * (a - p * a_sum), SCALE_P, CAP_P)


@triton.jit
def _units(
    z_ptr, zt_ptr, col, v, size, other, SCALE: tl.constexpr, CAP: tl.constexpr,
    SCALE_T: tl.constexpr, CAP_T: tl.constexpr,
):  # fmt: skip
    """z / size and zt / other."""
    z = capped(tl.load(z_ptr + col, col < v, other=0.0), SCALE, CAP)
    return z / size, capped(tl.load(zt_ptr + col, col < v, other=0.0), SCALE_T, CAP_T) / other


@triton.jit
def _size(
    z_ptr, v, dtype: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype)
    for k in range(0, v, BLOCK):
        z = capped(tl.load(z_ptr + k + col, k + col < v, other=0.0), SCALE, CAP)
        squares += z * z
    return tl.sqrt(tl.sum(squares))


@triton.jit
def _cosine_kernel(
    z_ptr, zt_ptr, y_ptr, a_ptr, value_ptr, v, IGNORE: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, SCALE_T: tl.constexpr, CAP_T: tl.constexpr, PULL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    z_ptr += row * v
    zt_ptr += row * v
    dtype: tl.constexpr = value_ptr.dtype.element_ty
    live = tl.load(y_ptr + row) != IGNORE
    n = tl.where(live, v, 0)
    size = _size(z_ptr, n, dtype, SCALE, CAP, BLOCK)
    other = _size(zt_ptr, n, dtype, SCALE_T, CAP_T, BLOCK)
    empty = (size == 0.0) | (other == 0.0)
    size, other = tl.where(empty, 1.0, size), tl.where(empty, 1.0, other)
    zeros = tl.zeros((BLOCK,), dtype)
    apart, square, along, away = zeros, zeros, zeros, zeros
    for k in range(0, n, BLOCK):
        unit, ut = _units(z_ptr, zt_ptr, k + col, n, size, other, SCALE, CAP, SCALE_T, CAP_T)
        e = unit - ut
        apart += e * e
        square += unit * unit
        along += unit * e
        away -= unit * ut
    value, away_sum = 0.5 * tl.sum(apart), tl.sum(away)
    value = tl.where(empty, 1.0, tl.where(value < 0.5, value, 1.0 + away_sum))
    tl.store(value_ptr + row, tl.where(live, value, 0.0))
    if PULL:
        d = tl.where(empty, 0.0, tl.load(a_ptr + row) / size)
        near = tl.where(value < 0.5, 1.0, 0.0)  # which of two forms has the digits: see _cosine
        inward = tl.where(value < 0.5, tl.sum(along), away_sum)
        inward /= tl.where(empty, 1.0, tl.sum(square))
        for k in range(0, v, BLOCK):
            unit, ut = _units(z_ptr, zt_ptr, k + col, n, size, other, SCALE, CAP, SCALE_T, CAP_T)
            overwrite(z_ptr, k + col, n, v, d * (near * unit - ut - inward * unit), SCALE, CAP)


def rows_triton(
    z: Tensor, y: Tensor, a: Tensor | None, zt: Tensor, at: Tensor | None, gradient: bool, *,
    kind: str, beta: float, temperature: float, student: Row, teacher: Row,
) -> tuple[tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    """The kernels. z and zt are the loop's own: gradients take their place."""
    y = y.contiguous()
    value = torch.empty_like(y, dtype=wide(z.dtype))
    a = torch.ones_like(value) if a is None else a.to(value.dtype).contiguous()
    ours, theirs = ((row.logit_scale, row.cap) for row in (student, teacher))
    more = {"IGNORE": student.ignore_index, **row_tile(z.shape[1], 2048, 256)}
    if at is not None:
        topk_triton(
            z, y, a, zt, at, value, SCALE=ours[0], CAP=ours[1], COLD=1 / temperature, PULL=gradient,
            **more,
        )  # fmt: skip
    elif kind == "cosine":
        launch(
            _cosine_kernel, (len(y),), z, zt, y, a, value, z.shape[1], SCALE=ours[0], CAP=ours[1],
            SCALE_T=theirs[0], CAP_T=theirs[1], PULL=gradient, **more,
        )  # fmt: skip
    else:
        q, p, side = (zt, z, "p") if kind == "reverse" else (z, zt, "q")
        of_q, of_p = (theirs, ours) if kind == "reverse" else (ours, theirs)
        launch(
            _divergence_kernel, (len(y),), q, p, y, a, value, z.shape[1],
            KIND="kl" if kind == "reverse" else kind, BETA=beta, COLD=1 / temperature,
            SCALE_Q=of_q[0], CAP_Q=of_q[1], SCALE_P=of_p[0], CAP_P=of_p[1],
            PULL=side if gradient else "", **more,
        )  # fmt: skip
    return (value,), z if gradient else None
