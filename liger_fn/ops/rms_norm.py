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
from liger_fn._launch import contiguous, launch, row_tile, rows_of, strips, tl, triton
from liger_fn._math import rounded, up, wide
from liger_fn._vjp import custom_vjp

# -- reference -------------------------------------------------------------------------------------


def _to(t: Tensor, dtype: torch.dtype) -> Tensor:
    # torch 2.11 compiles a cast to the same dtype at the end of a Function into a gradient of zero
    return t if t.dtype == dtype else t.to(dtype)


def _fwd_ref(
    x: Tensor, w: Tensor | None, *, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    h = x if casting == "none" else wide(x)
    rstd = torch.rsqrt((h * h).mean(-1, keepdim=True) + eps)
    y = h * rstd if casting == "gemma" else _to(h * rstd, x.dtype)
    if w is not None:
        gain = w.to(y.dtype) if casting == "gemma" else w
        y = y * (gain + offset if offset else gain)
    return _to(y, x.dtype) if casting == "gemma" else y, wide(rstd)[..., 0].clone()


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


# -- kernels: w_ptr is None without a gain; w_stride is 0 where all groups share it ----------------


@triton.jit
def _fwd_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, n, per_group, w_stride,
    EPS: tl.constexpr, OFFSET: tl.constexpr, CASTING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), rstd_ptr.dtype.element_ty)
    t: tl.constexpr = x_ptr.dtype.element_ty
    for k in range(0, n, BLOCK):
        x = up(tl.load(x_ptr + row * n + k + col, k + col < n, other=0.0))
        squares += rounded(x * x, t) if CASTING == "none" else x * x
    mean = tl.sum(squares) / n
    if CASTING == "none":  # plain torch in the dtype of x rounds after every step
        rstd = 1.0 / tl.sqrt(rounded(rounded(mean, t) + EPS, t))
        rstd = rounded(rstd, t)
    else:
        rstd = 1.0 / tl.sqrt(mean + EPS)
    tl.store(rstd_ptr + row, rstd)
    for k in range(0, n, BLOCK):
        mask = k + col < n
        y = up(tl.load(x_ptr + row * n + k + col, mask, other=0.0)) * rstd
        if CASTING != "gemma":
            y = rounded(y, t)
        if w_ptr is not None:
            w = tl.load(w_ptr + row // per_group * w_stride + k + col, mask, other=0.0)
            y = y * (up(w) + OFFSET if CASTING == "gemma" else rounded(up(w) + OFFSET, w.dtype))
        tl.store(y_ptr + row * n + k + col, y, mask)


@triton.jit
def _mean_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, c_ptr, n, per_group, w_stride,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # mean(g * xhat) of a row that is longer than a block
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), rstd_ptr.dtype.element_ty)
    for k in range(0, n, BLOCK):
        x = up(tl.load(x_ptr + row * n + k + col, k + col < n, other=0.0))
        dy = tl.load(dy_ptr + row * n + k + col, k + col < n, other=0.0).to(total.dtype)
        if w_ptr is not None:
            w = tl.load(w_ptr + row // per_group * w_stride + k + col, k + col < n, other=0.0)
            dy *= up(w) + OFFSET
        total += x * dy
    tl.store(c_ptr + row, tl.sum(total) * tl.load(rstd_ptr + row) / n)


@triton.jit
def _bwd_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, c_ptr, dx_ptr, dw_ptr, m, n, w_stride,
    OFFSET: tl.constexpr, CASTING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # one strip of the m rows of a group and one block of columns: the sums for dw stay in registers
    strip, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    col = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    dw = tl.zeros((BLOCK,), rstd_ptr.dtype.element_ty)
    gain = dw + 1.0
    if w_ptr is not None:
        gain = up(tl.load(w_ptr + group * w_stride + col, mask, other=0.0)) + OFFSET
    for i in range(strip, m, tl.num_programs(0)):
        row = group * m + i
        rstd = tl.load(rstd_ptr + row)
        xhat = up(tl.load(x_ptr + row * n + col, mask, other=0.0)) * rstd
        dy = tl.load(dy_ptr + row * n + col, mask, other=0.0).to(dw.dtype)
        if dx_ptr is not None:
            g = dy * gain
            c = tl.sum(g * xhat) / n if c_ptr is None else tl.load(c_ptr + row)
            tl.store(dx_ptr + row * n + col, rstd * (g - xhat * c), mask)
        dw += dy * (xhat if CASTING == "gemma" else rounded(xhat, x_ptr.dtype.element_ty))
    if dw_ptr is not None:
        tl.store(dw_ptr + (group * tl.num_programs(0) + strip) * n + col, dw, mask)


def _fwd_triton(
    x: Tensor,
    w: Tensor | None,
    *,
    eps: float,
    offset: float,
    casting: str,
    groups: int | None = None,
) -> tuple[Tensor, Tensor]:
    n, dtype = x.shape[-1], x.dtype
    if w is not None and casting != "gemma":
        dtype = torch.promote_types(x.dtype, w.dtype)
    rows, w, w_stride = _layout(x, w, n)
    y, rstd = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=wide(x.dtype))
    launch(
        _fwd_kernel, (rows.shape[0],), rows, w, y, rstd, n, rows.shape[0] // (groups or 1),
        w_stride, EPS=eps, OFFSET=offset, CASTING=casting, **row_tile(n),
    )  # fmt: skip
    return y, rstd


def _bwd_triton(
    dy: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, *,
    eps: float, offset: float, casting: str, wanted: tuple[bool, ...], groups: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    n, g = x.shape[-1], groups or 1
    (rows, w, w_stride), dy, rstd = _layout(x, w, n), dy.contiguous(), rstd.contiguous()
    m, tile = rows.shape[0] // g, row_tile(n)
    p = strips(m, x.device, 8)
    dx = x.new_empty(x.shape) if wanted[0] else None
    dw = rstd.new_empty(g, p, n) if wanted[1] else None
    c = None
    if wanted[0] and n > tile["BLOCK"]:
        c = torch.empty_like(rstd)
        launch(
            _mean_kernel, (rows.shape[0],), dy, rows, w, rstd, c, n, m, w_stride,
            OFFSET=offset, **tile,
        )  # fmt: skip
    launch(
        _bwd_kernel, (p, g, -(-n // tile["BLOCK"])), dy, rows, w, rstd, c, dx, dw, m, n, w_stride,
        OFFSET=offset, CASTING=casting, **tile,
    )  # fmt: skip
    if dw is None or w is None:
        return dx, None
    return dx, (dw.sum(1) if groups else dw[0].sum(0)).to(w.dtype)


def _layout(x: Tensor, w: Tensor | None, n: int) -> tuple[Tensor, Tensor | None, int]:
    """Packed rows, the gain, and how far apart the gains of two groups lie."""
    return rows_of(x, n).contiguous(), contiguous(w), n if w is not None and w.dim() == 2 else 0


# -- rule ------------------------------------------------------------------------------------------

_rms_norm = custom_vjp(
    "rms_norm",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("x", "w"),
    rows=("x",),
    grouped=True,
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
    check_choice("rms_norm", "casting", casting, ("llama", "gemma", "none"))
    return _rms_norm(x, w, eps=eps, offset=offset, casting=casting)
