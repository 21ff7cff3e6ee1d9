"""Sparsemax over the last axis: the distribution that is nearest to the scores.

    y = max(x - tau, 0)        sum(y) = 1        x, y: (..., n)   tau: (...)

Pullback of dy, where S is the support, y > 0, and |S| the number of its entries:

    dx = dy - sum of dy over S / |S|  in S,  0 elsewhere

In float32 (float64 for float64 x), on differences to the maximum of a row, which keep their digits
under a large common offset; y and dx take the dtype of x. An entry of -inf is never in S; a row of
nothing else is NaN. Martins and Astudillo, 2016, arXiv:1602.02068.
"""

import torch
from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._launch import fresh, fresh_rows, launch, row_tile, rows_of, tl, triton
from liger_fn._math import cast, quotient, up, wide
from liger_fn._vjp import custom_vjp

# -- reference: tau by a sort ----------------------------------------------------------------------


def _fwd_ref(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    top = wide(x).detach().amax(-1, keepdim=True)
    u = wide(x) - top
    z = u.detach().sort(-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=u.dtype)
    size = (1 + k * z > z.cumsum(-1)).sum(-1, keepdim=True).clamp(min=1)
    least = z.gather(-1, size - 1)
    outside = u < least  # a NaN is inside, so that its row is NaN
    tau = (torch.where(outside, 0.0, u).sum(-1, keepdim=True) - 1) / (~outside).sum(
        -1, keepdim=True
    )
    y = torch.where(u <= tau, 0.0, u - tau)
    return cast(y, x.dtype), top[..., 0].clone(), tau[..., 0].clone()


def _bwd_ref(
    dy: Tensor, x: Tensor, top: Tensor, tau: Tensor, *, wanted: tuple[bool, ...]
) -> tuple[Tensor]:
    outside = wide(x) - top[..., None] <= tau[..., None]
    dy, size = torch.where(outside, 0.0, dy.to(top.dtype)), (~outside).sum(-1, keepdim=True)
    mean = dy.sum(-1, keepdim=True) / size
    # what rounding took: of equal numbers the mean is then theirs
    mean = mean + torch.where(outside, 0.0, dy - mean).sum(-1, keepdim=True) / size
    mean = torch.where(tau.isnan()[..., None], torch.nan, mean)
    return (cast(torch.where(outside, 0.0, dy - mean), x.dtype),)


# -- kernels: tau by Newton's method ---------------------------------------------------------------


@triton.jit
def _fwd_kernel(x_ptr, y_ptr, top_ptr, tau_ptr, n, FITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x_ptr, y_ptr = x_ptr + row * n, y_ptr + row * n
    x = up(tl.load(x_ptr + col, col < n, other=-float("inf")))
    top = tl.max(x)
    for k in range(BLOCK, n, BLOCK):
        x = up(tl.load(x_ptr + k + col, k + col < n, other=-float("inf")))
        top = tl.maximum(top, tl.max(x))
    # With u = x - top, tau is the root of f(t) = sum(max(u - t, 0)) - 1, convex and falling with
    # slope -c, c the number of u > t. From f(-1) >= 0 Newton's t + f / c = (sum of those u - 1) / c
    # only grows and c only falls; f is linear where c stays, so the next step then moves nothing
    # and the loop ends: after n steps at most. After far fewer, as convexity gives f' / f + c' / c
    # <= 1 from one step to the next, so f c falls by 4 or more: from below n**2 down to the
    # rounding of f, eps, in log2(n) + log2(1 / eps) / 2 steps.
    tau = tl.full((), -1.0, top.dtype)
    count = tl.full((), 1, tl.int32) + n
    last = count + 1
    while count < last:
        last = count
        counts, sums = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), top.dtype)
        for k in range(0, n, BLOCK):
            if not FITS:
                x = up(tl.load(x_ptr + k + col, k + col < n, other=-float("inf")))
            inside = ((x - top <= tau) == 0) & (k + col < n)  # a NaN is, so that its row is NaN
            counts += inside.to(tl.int32)
            sums += tl.where(inside, x - top, 0.0)
        count = tl.sum(counts)
        tau = quotient(tl.sum(sums) - 1.0, count)  # a tie with an entry of x stays one
    tl.store(top_ptr + row, top)
    tl.store(tau_ptr + row, tau)
    for k in range(0, n, BLOCK):
        if not FITS:
            x = up(tl.load(x_ptr + k + col, k + col < n, other=-float("inf")))
        y = x - top - tau
        tl.store(y_ptr + k + col, tl.where(x - top <= tau, 0.0, y), k + col < n)


@triton.jit
def _bwd_kernel(dy_ptr, x_ptr, top_ptr, tau_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    dy_ptr, x_ptr, dx_ptr = dy_ptr + row * n, x_ptr + row * n, dx_ptr + row * n
    top, tau = tl.load(top_ptr + row), tl.load(tau_ptr + row)
    counts, sums = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), top.dtype)
    # by deviations from the mean of the first block in S: of equal numbers the mean is then theirs
    pivot, met = tl.full((), 0.0, top.dtype), tl.full((), 0, tl.int32)
    for k in range(0, n, BLOCK):
        dy, outside = _load(dy_ptr, x_ptr, k + col, n, top, tau)
        if met == 0:
            met = tl.sum((outside == 0).to(tl.int32))
            pivot = tl.sum(dy) / tl.maximum(met, 1)
        counts += (outside == 0).to(tl.int32)
        sums += tl.where(outside, 0.0, dy - pivot)
    mean = pivot + quotient(tl.sum(sums), tl.sum(counts))
    mean = tl.where(tau == tau, mean, tau)  # NaN in, NaN out
    for k in range(0, n, BLOCK):
        dy, outside = _load(dy_ptr, x_ptr, k + col, n, top, tau)
        tl.store(dx_ptr + k + col, tl.where(outside, 0.0, dy - mean), k + col < n)


@triton.jit
def _load(dy_ptr, x_ptr, col, n, top, tau):
    """Return dy, 0 outside the support, and what is outside."""
    x = up(tl.load(x_ptr + col, col < n, other=0.0))
    outside = (x - top <= tau) | (col >= n)
    return tl.load(dy_ptr + col, outside == 0, other=0.0).to(top.dtype), outside


def _fwd_triton(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, tile = x.shape[-1], row_tile(x.shape[-1])
    rows, y = rows_of(x, n).contiguous(), fresh(x)
    top = fresh_rows(x, wide(x.dtype))
    tau = torch.empty_like(top)
    launch(_fwd_kernel, (rows.shape[0],), rows, y, top, tau, n, FITS=n <= tile["BLOCK"], **tile)
    return y, top, tau


def _bwd_triton(
    dy: Tensor, x: Tensor, top: Tensor, tau: Tensor, *, wanted: tuple[bool, ...]
) -> tuple[Tensor]:
    n = x.shape[-1]
    rows, dx = rows_of(x, n).contiguous(), fresh(x)
    launch(
        _bwd_kernel, (rows.shape[0],), dy.contiguous(), rows, top.contiguous(), tau.contiguous(),
        dx, n, **row_tile(n),
    )  # fmt: skip
    return (dx,)


# -- rule ------------------------------------------------------------------------------------------

_sparsemax = custom_vjp(
    "sparsemax",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("x",),
    rows=("x",),
    axes="... [n] -> ... [n], ..., ...",
)


def sparsemax(x: Tensor) -> Tensor:
    """Project each row of `x` onto the distributions; most entries come out as exactly 0.

    Args:
        x: scores (..., n); -inf where an entry is to have probability 0.

    Returns:
        Tensor shaped like x, in its dtype. A row of nothing but -inf is NaN.

    Raises:
        ValueError: x has no axis, or no columns.
        TypeError: x is not a floating tensor.

    Example:
        >>> sparsemax(torch.tensor([1.0, 0.5, -1.0]))
        tensor([0.7500, 0.2500, 0.0000])

    References:
        Martins and Astudillo, "From Softmax to Sparsemax", 2016, arXiv:1602.02068. Newton's method
        on the threshold: Michelot, 1986, as in Condat, "Fast projection onto the simplex and the l1
        ball", 2016.
    """
    check_tensors("sparsemax", x=(x, "... n"))
    if x.shape[-1] == 0:
        raise ValueError("sparsemax: axis n must not be empty")
    return _sparsemax(x)
