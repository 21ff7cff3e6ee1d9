"""Dynamic tanh: an elementwise layer that stands in for a norm.

    t = tanh(alpha * x)                           x, t: (..., n)   alpha: ()
    y = t * w + b                                 w, b: (n,)       y: (..., n)

Pullback of dy, writing g = dy * w * (1 - t**2):

    dx     = g * alpha
    dalpha = sum over everything of g * x
    dw     = sum over rows of dy * t
    db     = sum over rows of dy

Computed in float32 (float64 for float64 x) from x and the parameters alone, nothing else is saved.
y is rounded once, to the dtype of x, whatever the dtypes of the parameters; each gradient takes the
dtype of its argument. Zhu, Chen, He, LeCun and Liu, 2025, arXiv:2503.10622.
"""

import math

import torch
from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._launch import (
    by_group,
    fresh,
    launch,
    row_tile,
    rows_of,
    strips,
    tl,
    triton,
)
from liger_fn._math import cast, join_strips, tanh, tanh_slope_of_half, tanh_slope_ref, up, wide
from liger_fn._vjp import custom_vjp

_LIMIT = 1024  # elements are independent: a block need not hold a row, and small ones spread better

# -- reference -------------------------------------------------------------------------------------


def _fwd_ref(x: Tensor, alpha: Tensor, w: Tensor | None, b: Tensor | None) -> tuple[Tensor]:
    h = wide(x)
    y = torch.tanh(alpha.to(h.dtype) * h)
    if w is not None:
        y = y * w.to(y.dtype)
    if b is not None:
        y = y + b.to(y.dtype)
    return (cast(y, x.dtype),)


def _bwd_ref(
    dy: Tensor, x: Tensor, alpha: Tensor, w: Tensor | None, b: Tensor | None, *,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    h, n, dw, db = wide(x), x.shape[-1], None, None
    a, dy = alpha.to(h.dtype), dy.to(h.dtype)
    t = torch.tanh(a * h)
    g = (dy if w is None else dy * w.to(h.dtype)) * tanh_slope_ref(a * h)
    dx = (g * a).to(x.dtype) if wanted[0] else None
    dalpha = (g * h).sum().to(alpha.dtype) if wanted[1] else None
    if wanted[2] and w is not None:
        dw = rows_of(dy * t, n).sum(0).to(w.dtype)
    if wanted[3] and b is not None:
        db = rows_of(dy, n).sum(0).to(b.dtype)
    return dx, dalpha, dw, db


# -- kernels: alpha_ptr holds one number for each group, w_ptr and b_ptr (groups, n) or None -------


@triton.jit
def _tanh_slope(x, HALF: tl.constexpr):
    if HALF:  # what comes of it is 16 bits wide
        t, slope = tanh_slope_of_half(x)
    else:
        t = tanh(x)
        slope = 1.0 - t * t  # tanh_slope has an ulp less, and takes half as long again
    return t, slope


@triton.jit
def _fwd_kernel(x_ptr, alpha_ptr, w_ptr, b_ptr, y_ptr, n, per_group, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, group = col < n, row // per_group
    x = up(tl.load(x_ptr + row * n + col, mask, other=0.0))
    y, _ = _tanh_slope(
        tl.load(alpha_ptr + group) * x, x_ptr.dtype.element_ty.primitive_bitwidth == 16
    )
    if w_ptr is not None:
        y *= up(tl.load(w_ptr + group * n + col, mask, other=0.0))
    if b_ptr is not None:
        y += up(tl.load(b_ptr + group * n + col, mask, other=0.0))
    tl.store(y_ptr + row * n + col, y, mask)


@triton.jit
def _bwd_kernel(
    dy_ptr, x_ptr, alpha_ptr, w_ptr, dx_ptr, dalpha_ptr, dw_ptr, db_ptr, m, n,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # one strip of the m rows of a group and one block of columns: the sums stay in registers
    strip, group, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    col = block * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    alpha = tl.load(alpha_ptr + group)
    dalpha = tl.zeros((BLOCK,), alpha.dtype)
    dw = tl.zeros((BLOCK,), alpha.dtype)
    db = tl.zeros((BLOCK,), alpha.dtype)
    gain = dw + 1.0
    if w_ptr is not None:
        gain = up(tl.load(w_ptr + group * n + col, mask, other=0.0))
    for i in tl.range(strip, m, tl.num_programs(0), num_stages=3):
        at = (group * m + i) * n + col
        dy = tl.load(dy_ptr + at, mask, other=0.0).to(alpha.dtype)
        db += dy
        if dx_ptr is not None or dalpha_ptr is not None or dw_ptr is not None:
            x = up(tl.load(x_ptr + at, mask, other=0.0))
            t, slope = _tanh_slope(alpha * x, HALF)
            g = dy * gain * slope
            if dx_ptr is not None:
                tl.store(dx_ptr + at, g * alpha, mask)
            dalpha += g * x
            dw += dy * t
    part = group * tl.num_programs(0) + strip
    if dalpha_ptr is not None:
        tl.store(dalpha_ptr + part * tl.num_programs(2) + block, tl.sum(dalpha))
    if dw_ptr is not None:
        tl.store(dw_ptr + part * n + col, dw, mask)
    if db_ptr is not None:
        tl.store(db_ptr + part * n + col, db, mask)


def _fwd_triton(
    x: Tensor, alpha: Tensor, w: Tensor | None, b: Tensor | None, *, groups: int | None = None
) -> tuple[Tensor]:
    n, y, tile = x.shape[-1], fresh(x), row_tile(x.shape[-1], _LIMIT, _LIMIT)
    m = math.prod(x.shape[:-1])
    launch(
        _fwd_kernel, (m, -(-n // tile["BLOCK"])), x.contiguous(), _alphas(alpha, x, groups),
        by_group(w, groups), by_group(b, groups), y, n, m // (groups or 1), **tile,
    )  # fmt: skip
    return (y,)


def _bwd_triton(
    dy: Tensor, x: Tensor, alpha: Tensor, w: Tensor | None, b: Tensor | None, *,
    wanted: tuple[bool, ...], groups: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    n, g, tile = x.shape[-1], groups or 1, row_tile(x.shape[-1], _LIMIT, _LIMIT)
    a, m, blocks = _alphas(alpha, x, groups), math.prod(x.shape[:-1]) // g, -(-n // tile["BLOCK"])
    p = strips(m, x.device, max(1, 8 // max(1, blocks)))
    dx = fresh(x) if wanted[0] else None
    dalpha = a.new_empty(g, p, blocks) if wanted[1] else None
    dw, db = (a.new_empty(g, p, n) if asked else None for asked in wanted[2:])
    half = x.element_size() == 2 and not (wanted[1] and alpha.element_size() > 2)
    if w is not None and wanted[2]:
        half = half and w.element_size() == 2
    launch(
        _bwd_kernel, (p, g, blocks), dy.contiguous(), x.contiguous(), a, by_group(w, groups), dx,
        dalpha, dw, db, m, n, HALF=half, **tile,
    )  # fmt: skip
    if dalpha is not None:
        dalpha = dalpha.sum((1, 2) if groups else None).to(alpha.dtype)
    return dx, dalpha, join_strips(dw, w, groups), join_strips(db, b, groups)


def _alphas(alpha: Tensor, x: Tensor, groups: int | None) -> Tensor:
    """One number for each group, in the dtype of the sums."""
    return alpha.reshape(-1).to(wide(x.dtype)).expand(groups or 1).contiguous()


# -- rule ------------------------------------------------------------------------------------------

_dyt = custom_vjp(
    "dyt",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("x", "alpha", "w", "b"),
    rows=("x",),
    grouped=True,
    axes="... n, (), n, n -> ... n",
)


def dyt(x: Tensor, alpha: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """Squash `alpha * x` by tanh, then multiply by `w` and add `b`.

    Args:
        x: activations (..., n).
        alpha: scale before the tanh () or (1,).
        w: gains (n,), or None for a gain of 1.
        b: biases (n,), or None for a bias of 0.

    Returns:
        Tensor shaped like x, in its dtype.

    Raises:
        ValueError: x has no axis, alpha is not one number, w or b is not (n,), or they lie on two
            devices.
        TypeError: an argument is not a floating tensor.

    Example:
        >>> dyt(torch.tensor([0.0, 2.0]), torch.tensor(0.5), torch.ones(2), torch.ones(2))
        tensor([1.0000, 1.7616])

    References:
        Zhu, Chen, He, LeCun and Liu, "Transformers without Normalization", 2025, arXiv:2503.10622.
    """
    check_tensors("dyt", x=(x, "... n"), alpha=(alpha, "..."), w=(w, "? n"), b=(b, "? n"))
    if alpha.shape not in ((), (1,)):
        raise ValueError(f"dyt: alpha must have shape () or (1), got {tuple(alpha.shape)}")
    return _dyt(x, alpha.reshape(()), w, b)
