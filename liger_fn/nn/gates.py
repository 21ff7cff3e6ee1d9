"""Gated feed-forward layers that stand for LlamaMLP and GemmaMLP.

    y = down_proj(act(gate_proj(x)) * up_proj(x))        x, y: (..., hidden)   between: (..., inner)

Names of parameters are theirs: gate_proj.weight, up_proj.weight, down_proj.weight (and biases).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_fn._check import check_choice
from liger_fn.ops.geglu import geglu
from liger_fn.ops.swiglu import swiglu


class SwiGLUMLP(nn.Module):
    """Feed-forward layer of Llama: down_proj(silu(gate_proj(x)) * up_proj(x)).

    Args:
        hidden_size: width of x and y.
        intermediate_size: width between.
        bias: whether the three projections have one.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> SwiGLUMLP(4, 8)(torch.ones(2, 4)).shape
        torch.Size([2, 4])

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        inward = (hidden_size, intermediate_size, bias, device, dtype)
        self.gate_proj, self.up_proj = nn.Linear(*inward), nn.Linear(*inward)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the projections as `torch.nn.Linear` does."""
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., hidden_size) to the same shape."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class GEGLUMLP(SwiGLUMLP):
    """Feed-forward layer of Gemma: down_proj(gelu(gate_proj(x)) * up_proj(x)).

    Args:
        hidden_size: as in `SwiGLUMLP`.
        intermediate_size: as there.
        bias: as there.
        device: as there.
        dtype: as there.
        approximate: "tanh" (Gemma's gelu_pytorch_tanh) or "none" (with erf).

    Example:
        >>> GEGLUMLP(4, 8)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        approximate: str = "tanh",
    ) -> None:  # fmt: skip
        check_choice("GEGLUMLP", "approximate", approximate, ("tanh", "none"))
        super().__init__(hidden_size, intermediate_size, bias, device, dtype)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., hidden_size) to the same shape."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(geglu(gate, up, approximate=self.approximate))

    def extra_repr(self) -> str:
        """Name the option."""
        return f"approximate={self.approximate!r}"
