"""Residual addition and RMS normalisation in one pass: the seam between two blocks of a Llama.

    s    = x + residual                           x, residual, s: (..., n)
    rstd = 1 / sqrt(mean(s * s) + eps)            rstd: (...)
    y    = s * rstd * (offset + w)                w: (n,)       y: (..., n)

Pullback of dy and ds, writing xhat = s * rstd and g = dy * (offset + w):

    dx = dresidual = ds + rstd * (g - xhat * mean(g * xhat))
    dw = sum over rows of dy * xhat

s has the dtype of a torch sum and its bits; y is that of `rms_norm(s, w)`, bit for bit. Statistics
and sums are float32 (float64 for float64 s); each gradient takes the dtype of its argument. The
backward pass forms s again from x and residual. Zhang and Sennrich, 2019, arXiv:1910.07467.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_fn._check import check_choice, check_same_shape, check_tensors
from liger_fn._vjp import custom_vjp
from liger_fn.ops._rms import CASTINGS, bwd_triton, fwd_triton
from liger_fn.ops.rms_norm import _bwd_ref as _norm_bwd_ref
from liger_fn.ops.rms_norm import _fwd_ref as _norm_fwd_ref


class AddNorm(NamedTuple):
    """The normalised sum, and the sum itself: the residual of the next block."""

    y: Tensor
    residual: Tensor


# -- reference -------------------------------------------------------------------------------------


def _fwd_ref(
    x: Tensor, w: Tensor | None, residual: Tensor, *, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    s = x + residual
    y, rstd = _norm_fwd_ref(s, w, eps=eps, offset=offset, casting=casting)
    return y, s, rstd


def _bwd_ref(
    dy: Tensor | None, ds: Tensor | None, x: Tensor, w: Tensor | None, residual: Tensor,
    rstd: Tensor, *, wanted: tuple[bool, ...], **options: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    dy = _or_zero(dy, ds)
    asked = (wanted[0] or wanted[2], wanted[1])
    d, dw = _norm_bwd_ref(dy, x + residual, w, rstd, wanted=asked, **options)
    if d is not None and ds is not None:
        d = d + ds
    dx = d.to(x.dtype) if d is not None and wanted[0] else None
    dresidual = d.to(residual.dtype, copy=True) if d is not None and wanted[2] else None
    return dx, dw, dresidual


def _or_zero(dy: Tensor | None, ds: Tensor | None) -> Tensor:
    """The upstream gradient of y, zero where y is unused: of the two one exists."""
    return torch.zeros_like(ds) if dy is None else dy  # type: ignore[arg-type]


# -- rule: the kernels, shared with rms_norm, are in _rms.py ---------------------------------------


def _bwd_triton(
    dy: Tensor | None, ds: Tensor | None, x: Tensor, w: Tensor | None, residual: Tensor,
    rstd: Tensor, **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return bwd_triton(_or_zero(dy, ds), x, w, rstd, residual, ds, **options)


_add_rms_norm = custom_vjp(
    "add_rms_norm",
    fwd={"reference": _fwd_ref, "triton": fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("x", "w", "residual"),
    rows=("x", "residual"),
    outputs=2,
    grouped=True,
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
    return AddNorm(*_add_rms_norm(x, w, residual, eps=eps, offset=offset, casting=casting))
