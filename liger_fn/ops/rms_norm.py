"""RMS normalisation over the last axis.

    rstd = 1 / sqrt(mean(x * x) + eps)            x: (..., n)   rstd: (...)
    y    = x * rstd * (offset + w)                w: (n,)       y: (..., n)

Pullback of dy, writing xhat = x * rstd and g = dy * (offset + w):

    dx = rstd * (g - xhat * mean(g * xhat))
    dw = sum over rows of dy * xhat

Statistics and sums are float32 (float64 for float64 x); dx and dw take the dtypes of x and w. Zhang
and Sennrich, 2019, arXiv:1910.07467. Where half precision rounds is part of the meaning, see
`casting`.
"""

import torch
from torch import Tensor

from liger_fn._check import check_choice, check_tensors
from liger_fn._launch import rows_of
from liger_fn._math import cast, wide
from liger_fn._vjp import custom_vjp
from liger_fn.ops._rms import CASTINGS, bwd_triton, fwd_triton

# -- reference -------------------------------------------------------------------------------------


def _fwd_ref(
    x: Tensor, w: Tensor | None, *, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    h = x if casting == "none" else wide(x)
    rstd = torch.rsqrt((h * h).mean(-1, keepdim=True) + eps)
    y = h * rstd if casting == "gemma" else cast(h * rstd, x.dtype)
    if w is not None:
        gain = w.to(y.dtype) if casting == "gemma" else w
        y = y * (gain + offset if offset else gain)
    return cast(y, x.dtype) if casting == "gemma" else y, wide(rstd)[..., 0].clone()


def _bwd_ref(
    dy: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, *,
    eps: float, offset: float, casting: str, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    dy, rstd = dy.to(rstd.dtype), rstd[..., None]
    xhat, dx, dw = x * rstd, None, None
    if wanted[0]:
        g = dy if w is None else dy * (w.to(rstd.dtype) + offset)
        dx = (rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype)
    if wanted[1] and w is not None:
        kept = xhat if casting == "gemma" else xhat.to(x.dtype)
        dw = rows_of(dy * kept, x.shape[-1]).sum(0).to(w.dtype)
    return dx, dw


# -- rule: the kernels, shared with add_rms_norm, are in _rms.py -----------------------------------

_rms_norm = custom_vjp(
    "rms_norm",
    fwd={"reference": _fwd_ref, "triton": fwd_triton},
    bwd={"reference": _bwd_ref, "triton": bwd_triton},
    differentiable=("x", "w"),
    rows=("x",),
    grouped=True,
    axes="... [n], [n] -> ... [n], ...",
)


def rms_norm(
    x: Tensor, w: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, casting: str = "llama"
) -> Tensor:
    """Divide each row of `x` by its root mean square, then scale it by `offset + w`.

    Args:
        x: activations (..., n).
        w: gains (n,), or None for a gain of 1.
        eps: added to the mean square; keeps an all-zero row finite.
        offset: added to w; 1.0 for models that store the gain as its difference from 1 (Gemma).
        casting: where half precision rounds, each as a family of Hugging Face models does. "llama"
            casts x * rstd to the dtype of x before the gain, "gemma" multiplies in float32 and
            casts once, "none" does every step in the dtype of x.

    Returns:
        Tensor shaped like x, in its dtype with "gemma", else in the dtype of a product of x and w.

    Raises:
        ValueError: x has no axis, w is not (n,), they lie on two devices, or casting is unknown.
        TypeError: x or w is not a floating tensor.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), eps=0.0)
        tensor([0.8485, 1.1314])

    References:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.
    """
    check_tensors("rms_norm", x=(x, "... n"), w=(w, "? n"))
    check_choice("rms_norm", "casting", casting, CASTINGS)
    return _rms_norm(x, w, eps=eps, offset=offset, casting=casting)
