"""What the gates of a feed-forward layer share: y = act(gate) * up, or act(gate) without up.

    act          act(g)                          slope act'(g)
    "silu"       g * s(g)          s * (1 + g * (1 - s))              s(g) = 1 / (1 + exp(-g))
    "gelu_tanh"  g * s(2 * u)      s + g * s * (1 - s) * 2 * u'       u = c * (g + 0.044715 * g**3)
    "gelu_none"  g * cdf           cdf + g * exp(-g**2 / 2) * c / 2   cdf = (1 + erf(g/sqrt(2))) / 2
    "relu2"      max(g, 0)**2      2 * max(g, 0)

with c = sqrt(2 / pi); g * s(2 * u) is g * (1 + tanh(u)) / 2 without its cancellation.
Pullback of dy: dgate = dy * up * act'(gate), dup = dy * act(gate). All is computed in float32
(float64 for float64) from gate and up alone; act(gate) is rounded to the dtype of gate before the
product, as two torch calls do, and y has the dtype of the product.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_fn._check import check_same_shape, check_tensors
from liger_fn._launch import fresh, launch, row_tile, rows_of, tl, triton
from liger_fn._math import normal_cdf_of_half, rounded, up, wide
from liger_fn._vjp import custom_vjp

# -- reference -------------------------------------------------------------------------------------


def _value(g: Tensor, act: str) -> Tensor:
    if act == "silu":
        return F.silu(g)
    if act == "relu2":
        return F.relu(g).square()
    return F.gelu(g, approximate=act.removeprefix("gelu_"))


def _slope(g: Tensor, act: str) -> Tensor:
    # not global: in a checkpoint compiled with dynamic=True a global float fails within Dynamo
    a, c = 0.044715, 0.7978845608028654  # sqrt(2 / pi)
    if act == "relu2":
        return 2 * F.relu(g)
    if act == "gelu_none":
        normal = torch.exp(-0.5 * g * g) * (c / 2)
        return 0.5 * (1 + torch.erf(g * math.sqrt(0.5))) + g * normal
    if act == "silu":
        s = torch.sigmoid(g)
        return s * (1 + g * (1 - s))
    u2 = 2 * c * (g + a * g**3)
    s = torch.sigmoid(u2)
    bend = s * torch.sigmoid(-u2)  # 1 - s would cancel, and u' is large there
    # 0 where s is 0 or 1, also where g**2 overflows
    return s + torch.where(bend == 0, 0.0, bend * g * (2 * c) * (1 + 3 * a * g * g))


def _fwd_ref(gate: Tensor, up: Tensor | None, *, act: str) -> tuple[Tensor]:
    y = _value(gate, act)
    return (y if up is None else y * up,)


def _bwd_ref(
    dy: Tensor, gate: Tensor, up: Tensor | None, *, act: str, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    g, dgate, dup = wide(gate), None, None
    if wanted[0]:
        dgate = (dy * _slope(g, act) if up is None else dy * wide(up) * _slope(g, act)).to(
            gate.dtype
        )
    if up is not None and wanted[1]:
        dup = (dy * _value(g, act)).to(up.dtype)
    return dgate, dup


def _packed_fwd_ref(gate_up: Tensor, *, act: str) -> tuple[Tensor]:
    return _fwd_ref(*gate_up.chunk(2, -1), act=act)


def _packed_bwd_ref(
    dy: Tensor, gate_up: Tensor, *, act: str, wanted: tuple[bool, ...]
) -> tuple[Tensor]:
    dgate, dup = _bwd_ref(dy, *gate_up.chunk(2, -1), act=act, wanted=(True, True))
    return (torch.cat((dgate, dup), -1),)  # type: ignore[arg-type]  # both were wanted


# -- kernels: rows may lie apart, so that halves of one tensor are read and written in place -------


@triton.jit
def _act(g, ACT: tl.constexpr):
    if ACT == "silu":
        y = g * tl.sigmoid(g)
    elif ACT == "relu2":
        y = tl.where(g < 0.0, 0.0, g * g)  # NaN stays NaN
    elif ACT == "gelu_none":
        y = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    elif ACT == "gelu_none_of_half":
        cdf, _ = normal_cdf_of_half(g)
        y = g * cdf
    else:
        y = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    return y


@triton.jit
def _act_slope(g, ACT: tl.constexpr):
    """act(g), for the gradient of up, and its slope."""
    y = _act(g, ACT)
    if ACT == "silu":
        s = tl.sigmoid(g)
        slope = s * (1.0 + g * (1.0 - s))
    elif ACT == "relu2":
        slope = tl.where(g < 0.0, 0.0, 2.0 * g)
    elif ACT == "gelu_none":
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        slope = cdf + g * tl.exp(-0.5 * g * g) * 0.3989422804014327
    elif ACT == "gelu_none_of_half":
        cdf, e = normal_cdf_of_half(g)
        y, slope = g * cdf, cdf + g * e * 0.3989422804014327
    else:  # both from one exponential
        u2 = 1.5957691216057308 * (g + 0.044715 * g * g * g)
        e = tl.exp(-tl.abs(u2))
        r = 1.0 / (1.0 + e)
        s, bend = tl.where(u2 < 0.0, e * r, r), e * r * r  # s * (1 - s) would cancel
        rest = bend * g * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        y, slope = g * s, s + tl.where(bend == 0.0, 0.0, rest)
    return y, slope


@triton.jit
def _place(blocks, BLOCK: tl.constexpr):
    """Row and first column of a program; both may lie beyond 32 bits."""
    pid = tl.program_id(0)
    return (pid // blocks).to(tl.int64), (pid % blocks).to(tl.int64) * BLOCK


@triton.jit
def _fwd_kernel(
    gate_ptr, up_ptr, y_ptr, n, blocks, gate_stride, up_stride, ACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, first = _place(blocks, BLOCK)
    col = tl.arange(0, BLOCK)
    mask = col < n - first
    g = up(tl.load(gate_ptr + row * gate_stride + first + col, mask, other=0.0))
    y = _act(g, ACT)
    if up_ptr is not None:
        u = up(tl.load(up_ptr + row * up_stride + first + col, mask, other=0.0))
        y = rounded(y, gate_ptr.dtype.element_ty) * u
    tl.store(y_ptr + row * n + first + col, y, mask)


@triton.jit
def _bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, blocks, gate_stride, up_stride, d_stride,
    ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first = _place(blocks, BLOCK)
    col = tl.arange(0, BLOCK)
    mask = col < n - first
    dy = up(tl.load(dy_ptr + row * n + first + col, mask, other=0.0))
    g = up(tl.load(gate_ptr + row * gate_stride + first + col, mask, other=0.0))
    y, slope = _act_slope(g, ACT)  # what is not stored is not computed
    if dgate_ptr is not None:
        d = dy * slope
        if up_ptr is not None:
            d *= up(tl.load(up_ptr + row * up_stride + first + col, mask, other=0.0))
        tl.store(dgate_ptr + row * d_stride + first + col, d, mask)
    if dup_ptr is not None:
        tl.store(dup_ptr + row * d_stride + first + col, dy * y, mask)


def _tiling(
    act: str, m: int, n: int, strides: tuple[int, ...], size: int
) -> tuple[int, int, int, dict[str, Any]]:
    """Rows, their length, blocks in each, options; rows that lie side by side are one long row.

    size: bytes of an element of the widest result; what two of them hold, a shorter erf gives.
    """
    flat = set(strides) == {n}
    # nothing to compile for a new m
    tile = row_tile(1024 if flat else n, 1024, 512 if act == "gelu_none" else 256)
    m, n = (1, m * n) if flat else (m, n)
    half = act == "gelu_none" and size == 2
    return m, n, -(-n // tile["BLOCK"]), {"ACT": act + "_of_half" * half, **tile}


def _fwd_triton(gate: Tensor, up: Tensor | None, *, act: str) -> tuple[Tensor]:
    n = gate.shape[-1]
    dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    y = fresh(gate, dtype)
    gate, up = rows_of(gate, n), None if up is None else rows_of(up, n)
    apart = gate.stride(0), gate.stride(0) if up is None else up.stride(0)
    m, n, blocks, how = _tiling(act, gate.shape[0], n, apart, y.element_size())
    launch(_fwd_kernel, (m * blocks,), gate, up, y, n, blocks, *apart, **how)
    return (y,)


def _launch_bwd(
    dy: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None,
    d_stride: int, act: str,
) -> None:  # fmt: skip
    n = gate.shape[-1]
    dy, gate, up = dy.contiguous(), rows_of(gate, n), None if up is None else rows_of(up, n)
    apart = gate.stride(0), gate.stride(0) if up is None else up.stride(0), d_stride
    size = max(gate.element_size(), 0 if dup is None else dup.element_size())
    m, n, blocks, how = _tiling(act, gate.shape[0], n, apart, size)
    launch(_bwd_kernel, (m * blocks,), dy, gate, up, dgate, dup, n, blocks, *apart, **how)


def _bwd_triton(
    dy: Tensor, gate: Tensor, up: Tensor | None, *, act: str, wanted: tuple[bool, ...],
    donated: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    own = donated and dy.dtype == gate.dtype and dy.is_contiguous()
    dgate = (dy if own else fresh(gate)) if wanted[0] else None
    dup = fresh(up) if up is not None and wanted[1] else None
    _launch_bwd(dy, gate, up, dgate, dup, gate.shape[-1], act)
    return dgate, dup


def _packed_fwd_triton(gate_up: Tensor, *, act: str) -> tuple[Tensor]:
    return _fwd_triton(*gate_up.chunk(2, -1), act=act)


def _packed_bwd_triton(
    dy: Tensor, gate_up: Tensor, *, act: str, wanted: tuple[bool, ...]
) -> tuple[Tensor]:
    d = fresh(gate_up)
    dgate, dup = rows_of(d, d.shape[-1]).chunk(2, -1)
    gate, up = gate_up.chunk(2, -1)
    _launch_bwd(dy, gate, up, dgate, dup, d.shape[-1], act)
    return (d,)


# -- rule ------------------------------------------------------------------------------------------


def gated(name: str) -> Callable[..., Any]:
    """(gate, up or None, act=...) to y, as the op `name`."""
    return custom_vjp(
        name,
        fwd={"reference": _fwd_ref, "triton": _fwd_triton},
        bwd={"reference": _bwd_ref, "triton": _bwd_triton},
        differentiable=("gate", "up"),
        rows=("gate", "up"),
        axes="..., ... -> ...",
    )


def packed(name: str) -> Callable[..., Any]:
    """(gate_up, act=...) to y: gate and up are the halves of the last axis."""
    return custom_vjp(
        name,
        fwd={"reference": _packed_fwd_ref, "triton": _packed_fwd_triton},
        bwd={"reference": _packed_bwd_ref, "triton": _packed_bwd_triton},
        differentiable=("gate_up",),
        rows=("gate_up",),
        axes="... [two_n] -> ... [n]",
    )


def check_gated(op: str, gate: Tensor, up: Tensor) -> None:
    """Hold gate and up to one shape and one device."""
    check_tensors(op, gate=(gate, "... n"), up=(up, "... n"))
    check_same_shape(op, gate=gate, up=up)


def check_packed(op: str, gate_up: Tensor) -> None:
    """Hold the last axis to two halves."""
    check_tensors(op, gate_up=(gate_up, "... 2n"))
    if gate_up.shape[-1] % 2:
        raise ValueError(f"{op}: the last axis of gate_up must be even, got {gate_up.shape[-1]}")
