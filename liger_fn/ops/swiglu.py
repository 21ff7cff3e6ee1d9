"""SwiGLU: the gate of Llama's feed-forward layer.

    y = silu(gate) * up        silu(g) = g * s    s = 1 / (1 + exp(-g))        gate, up, y: (..., n)

Pullback of dy:

    dgate = dy * up * s * (1 + gate * (1 - s))
    dup   = dy * silu(gate)

Computed in float32 (float64 for float64) from gate and up alone, nothing else is saved. silu(gate)
is rounded to the dtype of gate before the product, as two torch calls do; y has the dtype of the
product. Shazeer, 2020, arXiv:2002.05202.
"""

import torch
from torch import Tensor

from liger_fn._check import check_same_shape, check_tensors
from liger_fn._launch import launch, row_tile, rows_of, tl, triton
from liger_fn._math import rounded, up, wide
from liger_fn._vjp import custom_vjp

# -- reference -------------------------------------------------------------------------------------


def _fwd_ref(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    return (torch.nn.functional.silu(gate) * up,)


def _bwd_ref(
    dy: Tensor, gate: Tensor, up: Tensor, *, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    g, dgate, dup = wide(gate), None, None
    s = torch.sigmoid(g)
    if wanted[0]:
        dgate = (dy * wide(up) * s * (1 + g * (1 - s))).to(gate.dtype)
    if wanted[1]:
        dup = (dy * (g * s)).to(up.dtype)
    return dgate, dup


def _packed_fwd_ref(gate_up: Tensor) -> tuple[Tensor]:
    return _fwd_ref(*gate_up.chunk(2, -1))


def _packed_bwd_ref(dy: Tensor, gate_up: Tensor, *, wanted: tuple[bool, ...]) -> tuple[Tensor]:
    dgate, dup = _bwd_ref(dy, *gate_up.chunk(2, -1), wanted=(True, True))
    return (torch.cat((dgate, dup), -1),)  # type: ignore[arg-type]  # both were wanted


# -- kernels: rows may lie apart, so that halves of one tensor are read and written in place -------


@triton.jit
def _fwd_kernel(gate_ptr, up_ptr, y_ptr, n, gate_stride, up_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = up(tl.load(gate_ptr + row * gate_stride + col, col < n, other=0.0))
    u = up(tl.load(up_ptr + row * up_stride + col, col < n, other=0.0))
    tl.store(
        y_ptr + row * n + col, rounded(g * tl.sigmoid(g), gate_ptr.dtype.element_ty) * u, col < n
    )


@triton.jit
def _bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, gate_stride, up_stride, d_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dy = up(tl.load(dy_ptr + row * n + col, col < n, other=0.0))
    g = up(tl.load(gate_ptr + row * gate_stride + col, col < n, other=0.0))
    s = tl.sigmoid(g)
    if dgate_ptr is not None:
        u = up(tl.load(up_ptr + row * up_stride + col, col < n, other=0.0))
        dgate = dy * u * s * (1.0 + g * (1.0 - s))
        tl.store(dgate_ptr + row * d_stride + col, dgate, col < n)
    if dup_ptr is not None:
        tl.store(dup_ptr + row * d_stride + col, dy * g * s, col < n)


def _fwd_triton(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    n = gate.shape[-1]
    y = gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    gate, up, tile = rows_of(gate, n), rows_of(up, n), row_tile(n, 1024)
    grid = (gate.shape[0], -(-n // tile["BLOCK"]))
    launch(_fwd_kernel, grid, gate, up, y, n, gate.stride(0), up.stride(0), **tile)
    return (y,)


def _launch_bwd(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor | None, dup: Tensor | None, d_stride: int
) -> None:
    n = gate.shape[-1]
    dy, gate, up, tile = dy.contiguous(), rows_of(gate, n), rows_of(up, n), row_tile(n, 1024)
    grid = (gate.shape[0], -(-n // tile["BLOCK"]))
    launch(
        _bwd_kernel, grid, dy, gate, up, dgate, dup, n, gate.stride(0), up.stride(0), d_stride,
        **tile,
    )  # fmt: skip


def _bwd_triton(
    dy: Tensor, gate: Tensor, up: Tensor, *, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    dgate = gate.new_empty(gate.shape) if wanted[0] else None
    dup = up.new_empty(up.shape) if wanted[1] else None
    _launch_bwd(dy, gate, up, dgate, dup, gate.shape[-1])
    return dgate, dup


def _packed_fwd_triton(gate_up: Tensor) -> tuple[Tensor]:
    return _fwd_triton(*gate_up.chunk(2, -1))


def _packed_bwd_triton(dy: Tensor, gate_up: Tensor, *, wanted: tuple[bool, ...]) -> tuple[Tensor]:
    d = gate_up.new_empty(gate_up.shape)
    dgate, dup = rows_of(d, d.shape[-1]).chunk(2, -1)
    gate, up = gate_up.chunk(2, -1)
    _launch_bwd(dy, gate, up, dgate, dup, d.shape[-1])
    return (d,)


# -- rule ------------------------------------------------------------------------------------------

_swiglu = custom_vjp(
    "swiglu",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("gate", "up"),
    rows=("gate", "up"),
)
_swiglu_packed = custom_vjp(
    "swiglu_packed",
    fwd={"reference": _packed_fwd_ref, "triton": _packed_fwd_triton},
    bwd={"reference": _packed_bwd_ref, "triton": _packed_bwd_triton},
    differentiable=("gate_up",),
    rows=("gate_up",),
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply `up` by silu of `gate`.

    Args:
        gate: activations (..., n); rows may lie apart, as halves of one tensor do.
        up: activations (..., n), likewise.

    Returns:
        Tensor (..., n) in the dtype of the product of gate and up.

    Raises:
        ValueError: the shapes differ, or gate and up lie on two devices.
        TypeError: gate or up is not a floating tensor.

    Example:
        >>> swiglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([0.0000, 1.4621])

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.
    """
    check_tensors("swiglu", gate=(gate, "... n"), up=(up, "... n"))
    check_same_shape("swiglu", gate=gate, up=up)
    return _swiglu(gate, up)


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """Multiply the second half of the last axis by silu of the first, as one tensor in and out.

    Args:
        gate_up: activations (..., 2n), the gate first, as Phi-3, GLM-4 and packed experts store
            them.

    Returns:
        Tensor (..., n) in the dtype of gate_up. Its gradient is one tensor too, never a
        concatenation.

    Raises:
        ValueError: the last axis is odd.
        TypeError: gate_up is not a floating tensor.

    Example:
        >>> swiglu_packed(torch.tensor([0.0, 1.0, 5.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    check_tensors("swiglu_packed", gate_up=(gate_up, "... 2n"))
    if gate_up.shape[-1] % 2:
        raise ValueError(
            f"swiglu_packed: the last axis of gate_up must be even, got {gate_up.shape[-1]}"
        )
    return _swiglu_packed(gate_up)
