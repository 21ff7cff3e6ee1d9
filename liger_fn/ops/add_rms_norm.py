"""Residual addition and RMS normalisation in one pass: the seam between two blocks of a Llama.

    s    = x + residual                           x, residual, s: (..., n)
    rstd = 1 / sqrt(mean(s * s) + eps)            rstd: (...)
    y    = s * rstd * (offset + w)                w: (n,)       y: (..., n)

Pullback of dy and ds, writing xhat = s * rstd and g = dy * (offset + w):

    dx = dresidual = ds + rstd * (g - xhat * mean(g * xhat))
    dw = sum over rows of dy * xhat

s has the dtype of a torch sum and its bits; y is that of `rms_norm(s, w)`, bit for bit. Statistics
and sums are float32 (float64 for float64 s); each gradient takes the dtype of its argument, and
dx and dresidual of one dtype are one tensor. Of x, residual and s backward keeps s alone. Zhang and
Sennrich, 2019, arXiv:1910.07467.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_fn._check import check_choice, check_same_shape, check_tensors
from liger_fn._vjp import custom_vjp
from liger_fn.ops._rms import CASTINGS, bwd_triton, fwd_triton
from liger_fn.ops.rms_norm import _bwd_ref as norm_bwd_ref
from liger_fn.ops.rms_norm import _fwd_ref as norm_fwd_ref


class AddNorm(NamedTuple):
    """The normalised sum, and the sum itself: the residual of the next block."""

    y: Tensor
    residual: Tensor


# -- reference -------------------------------------------------------------------------------------


def _fwd_ref(
    x: Tensor, w: Tensor | None, residual: Tensor, *,
    eps: float, offset: float, casting: str, x_dtype: torch.dtype, residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    s = x + residual
    y, rstd = norm_fwd_ref(s, w, eps=eps, offset=offset, casting=casting)
    return y, s, rstd


def _bwd_ref(
    dy: Tensor | None, ds: Tensor | None, w: Tensor | None, s: Tensor, rstd: Tensor | None, *,
    eps: float, offset: float, casting: str, x_dtype: torch.dtype, residual_dtype: torch.dtype,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    how: dict[str, Any] = {"eps": eps, "offset": offset, "casting": casting}
    rstd = norm_fwd_ref(s, w, **how)[1] if rstd is None else rstd
    asked = (wanted[0] or wanted[2], wanted[1])
    d, dw = norm_bwd_ref(_or_zero(dy, s), s, w, rstd, wanted=asked, **how)
    if d is not None and ds is not None:
        d = d + ds
    dx = d.to(x_dtype) if d is not None and wanted[0] else None
    if dx is not None and x_dtype == residual_dtype:
        return dx, dw, dx if wanted[2] else None
    return dx, dw, d.to(residual_dtype) if d is not None and wanted[2] else None


def _or_zero(dy: Tensor | None, s: Tensor) -> Tensor:
    """The upstream gradient of y, zero where y is unused."""
    return torch.zeros_like(s) if dy is None else dy


# -- rule: the kernels, shared with rms_norm, are in _rms.py ---------------------------------------


def _fwd_triton(
    x: Tensor, w: Tensor | None, residual: Tensor, *,
    x_dtype: torch.dtype, residual_dtype: torch.dtype, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return fwd_triton(x, w, residual, **options)


def _bwd_triton(
    dy: Tensor | None, ds: Tensor | None, w: Tensor | None, s: Tensor, rstd: Tensor, *,
    x_dtype: torch.dtype, residual_dtype: torch.dtype, wanted: tuple[bool, ...], **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    asked, dtypes = (wanted[0] or wanted[2], wanted[1]), (x_dtype, residual_dtype)
    dx, dresidual, dw = bwd_triton(
        _or_zero(dy, s), s, w, rstd, ds, wanted=asked, dtypes=dtypes, **options
    )
    return dx if wanted[0] else None, dw, dresidual if wanted[2] else None


_add_rms_norm = custom_vjp(
    "add_rms_norm",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("x", "w", "residual"),
    rows=("x", "residual"),
    outputs=("y", "s"),
    grouped=True,
    axes="... [n], [n], ... [n] -> ... [n], ... [n], ...",
)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    w: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> AddNorm:
    """Add `residual` to `x`, and divide each row of the sum by its root mean square.

    Args:
        x: what a block adds to its residual (..., n).
        residual: what entered the block (..., n).
        w: gains (n,), or None for a gain of 1.
        eps: added to the mean square; keeps an all-zero row finite.
        offset: added to w, as in `rms_norm`.
        casting: where half precision rounds: "llama", "gemma" or "none", as in `rms_norm`.

    Returns:
        `AddNorm(y, residual)`: `rms_norm(x + residual, w, ...)` and `x + residual`, bit for bit.

    Raises:
        ValueError: x has no axis, residual is shaped otherwise, w is not (n,), they lie on two
            devices, or casting is unknown.
        TypeError: x, residual or w is not a floating tensor.

    Example:
        >>> add_rms_norm(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 0.0]), torch.ones(2), eps=0.0)
        AddNorm(y=tensor([0.8485, 1.1314]), residual=tensor([3., 4.]))

    References:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.
    """
    check_tensors("add_rms_norm", x=(x, "... n"), residual=(residual, "... n"), w=(w, "? n"))
    check_same_shape("add_rms_norm", x=x, residual=residual)
    check_choice("add_rms_norm", "casting", casting, CASTINGS)
    how = {"eps": eps, "offset": offset, "casting": casting}
    dtypes = {"x_dtype": x.dtype, "residual_dtype": residual.dtype}
    return AddNorm(*_add_rms_norm(x, w, residual, **how, **dtypes))
