"""SwiGLU: the gate of Llama's feed-forward layer.

    y = silu(gate) * up        silu(g) = g * s    s = 1 / (1 + exp(-g))        gate, up, y: (..., n)

Pullback of dy:

    dgate = dy * up * s * (1 + gate * (1 - s))
    dup   = dy * silu(gate)

Rules, kernels and dtypes are those of all gates, in `_gated`. Shazeer, 2020, arXiv:2002.05202.
"""

from torch import Tensor

from liger_fn.ops._gated import check_gated, check_packed, gated, packed

_swiglu = gated("swiglu")
_swiglu_packed = packed("swiglu_packed")


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
    check_gated("swiglu", gate, up)
    return _swiglu(gate, up, act="silu")


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
    check_packed("swiglu_packed", gate_up)
    return _swiglu_packed(gate_up, act="silu")
