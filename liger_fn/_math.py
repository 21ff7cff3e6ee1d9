"""The maths that several functions share. Device functions use no libdevice: the interpreter runs them."""

from typing import overload

import torch
from torch import Tensor

from liger_fn._launch import tl, triton


@overload
def wide(t: Tensor) -> Tensor: ...
@overload
def wide(t: torch.dtype) -> torch.dtype: ...
def wide(t: Tensor | torch.dtype) -> Tensor | torch.dtype:
    """Widen a tensor or a dtype to that of statistics: float64 stays, everything else becomes float32."""
    if isinstance(t, torch.dtype):
        return torch.promote_types(t, torch.float32)
    return t if t.dtype == torch.float64 else t.float()


@triton.jit
def up(x):
    """Widen to the type of statistics: float64 stays, everything else becomes float32."""
    if x.dtype == tl.float64:
        return x
    return x.to(tl.float32)


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def tanh(x):
    # 1 - 2/(e^2x + 1) cancels near 0: there the odd polynomial of Cephes' tanhf (S. Moshier) is good to
    # an ulp of float32. float64 has room for the plain form: its absolute error is 1e-16.
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    if x.dtype == tl.float64:
        return far
    s = x * x
    p = (((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1) * s
    return tl.where(tl.abs(x) < 0.625, x + x * s * (p - 3.33332819422e-1), far)


@triton.jit
def rounded(x, like):
    """Round to the element type of `like`, a tensor or a pointer, and widen again."""
    if like.dtype.is_ptr():
        return up(x.to(like.dtype.element_ty))
    return up(x.to(like.dtype))
