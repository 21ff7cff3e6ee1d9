"""GEGLU: the gate of Gemma's feed-forward layer.

    y = gelu(gate) * up                                                        gate, up, y: (..., n)

    "none": gelu(g) = g * cdf          cdf = (1 + erf(g / sqrt(2))) / 2
    "tanh": gelu(g) = g * s            s = (1 + tanh(u)) / 2, u = sqrt(2/pi) * (g + 0.044715 * g**3)

Pullback of dy:

    dgate = dy * up * gelu'(gate)      "none": gelu'(g) = cdf + g * exp(-g**2 / 2) / sqrt(2 * pi)
    dup   = dy * gelu(gate)            "tanh": gelu'(g) = s + g * s * (1 - s) * 2 * u'(g)

Rules, kernels and dtypes are those of all gates, in `_gated`. Hendrycks and Gimpel, 2016,
arXiv:1606.08415; Shazeer, 2020, arXiv:2002.05202.
"""

from torch import Tensor

from liger_fn._check import check_choice
from liger_fn.ops._gated import check_gated, check_packed, gated, packed

_geglu = gated("geglu")
_geglu_packed = packed("geglu_packed")


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Multiply `up` by gelu of `gate`.

    Args:
        gate: activations (..., n); rows may lie apart, as halves of one tensor do.
        up: activations (..., n), likewise.
        approximate: "tanh" (Gemma's gelu_pytorch_tanh) or "none" (with erf), as in
            `torch.nn.functional.gelu`.

    Returns:
        Tensor (..., n) in the dtype of the product of gate and up.

    Raises:
        ValueError: the shapes differ, gate and up lie on two devices, or approximate is unknown.
        TypeError: gate or up is not a floating tensor.

    Example:
        >>> geglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([0.0000, 1.6824])

    References:
        Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, arXiv:1606.08415. Shazeer, "GLU
        Variants Improve Transformer", 2020, arXiv:2002.05202.
    """
    check_gated("geglu", gate, up)
    check_choice("geglu", "approximate", approximate, ("tanh", "none"))
    return _geglu(gate, up, act="gelu_" + approximate)


def geglu_packed(gate_up: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Multiply the second half of the last axis by gelu of the first, as one tensor in and out.

    Args:
        gate_up: activations (..., 2n), the gate first.
        approximate: as in `geglu`.

    Returns:
        Tensor (..., n) in the dtype of gate_up. Its gradient is one tensor too, never a
        concatenation.

    Raises:
        ValueError: the last axis is odd, or approximate is unknown.
        TypeError: gate_up is not a floating tensor.

    Example:
        >>> geglu_packed(torch.tensor([0.0, 1.0, 5.0, 2.0]))
        tensor([0.0000, 1.6824])
    """
    check_packed("geglu_packed", gate_up)
    check_choice("geglu_packed", "approximate", approximate, ("tanh", "none"))
    return _geglu_packed(gate_up, act="gelu_" + approximate)
