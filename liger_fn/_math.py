"""The maths that several functions share.

Device functions use no libdevice: the interpreter runs them.
"""

from typing import overload

import torch
from torch import Tensor

from liger_fn._launch import launch, tl, triton


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


def tanh_slope_ref(x: Tensor) -> Tensor:
    """The derivative of tanh(x), where 1 - tanh(x)**2 cancels, from the side where q <= 1/2."""
    q = torch.sigmoid(torch.where(x > 0, -2 * x, 2 * x))  # |x| would lose a derivative at 0
    return 4 * q * (1 - q)


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
def quotient(a, b):
    """a / b to the nearest: in float32 on a GPU `/` alone may be 2 ulp off, and x / x not 1."""
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b.to(tl.float32))


@triton.jit
def tanh(x):
    t, _ = tanh_slope(x)
    return t


@triton.jit
def tanh_slope(x):
    """tanh(x) and its derivative, 4 q (1 - q) with q = 1 / (e^2x + 1): 1 - t * t cancels."""
    # 1 - 2 q cancels near 0: there the odd polynomial of Cephes' tanhf (S. Moshier) is
    # good to an ulp of float32. float64 has room for the plain form: its absolute error is 1e-16.
    # From the positive side: below 0 it would be off by 3 ulp.
    q = 1.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    far = 1.0 - 2.0 * q
    far = tl.where(x < 0.0, -far, far)
    s = x * x
    p = tl.fma(tl.fma(s, -5.70498872745e-3, 2.06390887954e-2), s, -5.37397155531e-2)
    p = tl.fma(tl.fma(p, s, 1.33314422036e-1), s, -3.33332819422e-1)
    near = tl.fma(x * s, p, x)
    t = far if x.dtype == tl.float64 else tl.where(tl.abs(x) < 0.625, near, far)
    return t, 4.0 * q * (1.0 - q)


@triton.jit
def tanh_slope_of_half(x):
    """tanh(x) and its derivative, for results that are 16 bits wide: good to 2**-17."""
    e = tl.exp(-2.0 * tl.abs(x))
    r = tl.rsqrt(1.0 + e)
    s = r * r  # 1 / (1 + e) in two instructions
    q = e * s
    far = tl.fma(q, -2.0, 1.0)
    near = tl.fma(x * x, x * -0.3333333333333333, x)
    return tl.where(tl.abs(x) < 0.0625, near, tl.where(x < 0.0, -far, far)), 4.0 * q * s


@triton.jit
def normal_cdf_of_half(x):
    """The distribution of a normal number and exp(-x**2 / 2), for results that are 16 bits wide.

    Good to 2**-19, in the lower tail as well: exp(-x**2 / 2) times a polynomial in 1 / (1 + c |x|),
    the form of Hastings, 1955, with coefficients by least squares of relative errors.
    """
    e = tl.exp(-0.5 * x * x)
    t = 1.0 / tl.fma(tl.abs(x), 0.35355339059327373, 1.0)
    p = tl.fma(t, 0.04456228051668257, -0.17999125240951472)
    p = tl.fma(tl.fma(p, t, 0.19688697367038352), t, 0.017331416913970374)
    p = tl.fma(tl.fma(p, t, 0.1413589598513634), t, 0.13867700171689906)
    tail = tl.fma(p, t, 0.14117402859727735) * t * e
    return tl.where(x < 0.0, tail, 1.0 - tail), e


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round to a type and widen again."""
    return up(x.to(dtype))


@triton.jit
def moments(x_ptr, n, dtype: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """The first block of a row, its mean and its variance. ONE: no block follows.

    By deviations from the mean of the first block. It lies within sqrt(n / BLOCK) deviations of the
    mean of all, so that the subtraction below costs a factor of n / BLOCK at worst, however large
    the mean is; nothing where one block holds the row.
    """
    col = tl.arange(0, BLOCK)
    x = up(tl.load(x_ptr + col, col < n, other=0.0))
    pivot = tl.sum(x) / tl.full((), tl.minimum(n, BLOCK), dtype)
    d = tl.where(col < n, x - pivot, 0.0)  # after the subtraction: padding deviates by -pivot
    squares = d * d
    if not ONE:
        for k in range(BLOCK, n, BLOCK):
            more = up(tl.load(x_ptr + k + col, k + col < n, other=0.0))
            more = tl.where(k + col < n, more - pivot, 0.0)
            d += more
            squares += more * more
    ahead = tl.sum(d) / n
    return x, pivot + ahead, tl.maximum(tl.sum(squares) / n - ahead * ahead, 0.0)


@triton.jit
def capped(z, SCALE: tl.constexpr, CAP: tl.constexpr):
    """CAP * tanh(SCALE * z / CAP), or SCALE * z where CAP is 0. Mask after it: tanh(-inf) is -1."""
    z, _ = capped_slope(z, SCALE, CAP)
    return z


@triton.jit
def capped_slope(z, SCALE: tl.constexpr, CAP: tl.constexpr):
    """What `capped` gives, and its derivative but for the factor SCALE."""
    z = up(z) * SCALE
    slope = tl.full((), 1.0, z.dtype)
    if CAP != 0.0:
        t, slope = tanh_slope(z / CAP)
        z = CAP * t
    return z, slope


@triton.jit
def load_capped(z_ptr, mask, SCALE: tl.constexpr, CAP: tl.constexpr):
    """What `capped` makes of logits; -inf outside of the mask."""
    if CAP == 0.0 and SCALE > 0.0:
        z = up(tl.load(z_ptr, mask, other=-float("inf"))) * SCALE
    else:  # after the cap: tanh(-inf) is -1
        z = capped(tl.load(z_ptr, mask, other=0.0), SCALE, CAP)
        z = tl.where(mask, z, -float("inf"))
    return z


@triton.jit
def by_lane(x):
    """A block as rows of 8 columns, its lanes: a thread holds one, sums along it cross none."""
    LANE: tl.constexpr = 8 if x.shape[0] >= 8 else x.shape[0]
    return tl.reshape(x, (x.shape[0] // LANE, LANE))


@triton.jit
def of_lanes(value, BLOCK: tl.constexpr):
    """Return `value`, a scalar, for each lane of a block."""
    return tl.zeros((BLOCK // 8 if BLOCK >= 8 else 1,), value.dtype) + value


@triton.jit
def anchor(top):
    """What to subtract in an exponent: top, but 0 while nothing is seen, as -inf - -inf is NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def drop(top, new):
    """From one maximum to a larger one; 0 where nothing is seen so far: the sums are 0."""
    return tl.where(top == -float("inf"), 0.0, top - new)


@triton.jit
def online(top, total, z, SCALE: tl.constexpr):
    """Take a block, by lane, into maxima and sums of exp(SCALE * (z - top)) of each lane.

    On line: Milakov and Gimelshein, 2018, arXiv:1805.02867. `whole` joins the lanes, once a row.
    """
    new = tl.maximum(top, tl.max(z, 1))
    shift = anchor(new)
    e = tl.exp((z - shift[:, None]) * SCALE)
    return new, total * tl.exp((top - shift) * SCALE) + tl.sum(e, 1)


@triton.jit
def whole(top, total, SCALE: tl.constexpr):
    """The maximum of a row, and its sum of exp(SCALE * (z - maximum))."""
    high = tl.max(top)
    shift = anchor(high)
    return high, tl.sum(total * tl.exp((top - shift) * SCALE))


@triton.jit
def ahead_in_lanes(z, zy, first, y):
    """Lanes with an entry that comes before z[y] in order: larger, or as large and further left.

    `first` is the column where each lane begins. The lane of y itself is `ahead_beside`.
    """
    LANE: tl.constexpr = z.shape[1]
    high = tl.max(z, 1)
    left = (first + LANE <= y) & (high >= zy)
    return (left | ((first > y) & (high > zy))).to(tl.int32)


@triton.jit
def ahead_beside(
    z_ptr, zy, y, v, SCALE: tl.constexpr, CAP: tl.constexpr, COLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Count what comes before z[y] in its own lane."""
    LANE: tl.constexpr = 8 if BLOCK >= 8 else BLOCK
    col = y // LANE * LANE + tl.arange(0, LANE)
    z = load_capped(z_ptr + col, col < v, SCALE, CAP) * COLD
    return tl.sum(((z > zy) | ((z == zy) & (col < y))).to(tl.int32))


@triton.jit
def overwrite(z_ptr, col, v, size, g, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Put g, back through cap and scale, in the place of logits; 0 where none are read, v = 0."""
    _, slope = capped_slope(tl.load(z_ptr + col, col < v, other=0.0), SCALE, CAP)
    tl.store(z_ptr + col, tl.where(v == 0, 0.0, g * slope * SCALE), col < size)


@triton.jit
def _join_kernel(parts_ptr, out_ptr, p, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # torch would take a tenth of a norm's backward for the same sum: few columns, many rows
    group, col = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), parts_ptr.dtype.element_ty)
    for i in range(0, p, ROWS):
        at = (group * p + i + row)[:, None] * n + col[None, :]
        total += tl.load(parts_ptr + at, (i + row < p)[:, None] & (col < n)[None, :], other=0.0)
    total = narrow(tl.sum(total, 0), out_ptr.dtype.element_ty)
    tl.store(out_ptr + group * n + col, total, col < n)


def join_strips(parts: Tensor | None, w: Tensor | None, groups: int | None) -> Tensor | None:
    """The gradient of w from the sums (g, p, n) of p strips in each group; no w, no gradient."""
    if parts is None or w is None:
        return None
    g, p, n = parts.shape
    dw = w.new_empty((g, n))
    launch(_join_kernel, (-(-n // 8), g), parts, dw, p, n, ROWS=256, BLOCK=8, num_warps=8)
    return dw if groups else dw[0]
