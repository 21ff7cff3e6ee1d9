"""Gated feed-forward layers that stand for LlamaMLP and GemmaMLP.

    y = down_proj(act(gate_proj(x)) * up_proj(x))        x, y: (..., hidden)   between: (..., inner)

Names of parameters are theirs: gate_proj.weight, up_proj.weight, down_proj.weight (and biases).
With `chunk` the inner activations of so many tokens exist at a time: backward forms them again,
tile by tile. After Bekman et al., "Arctic Long Sequence Training", 2025, arXiv:2506.13996.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_fn._check import check_choice
from liger_fn._vjp import donate
from liger_fn.nn.tiles import tiled
from liger_fn.ops._chunked import check_chunk
from liger_fn.ops.geglu import geglu
from liger_fn.ops.swiglu import swiglu


def hooks_of(m: nn.Module) -> list[Any]:
    """Who sees what goes through a module, forward or backward."""
    kinds = (m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks)
    return [hook for hooks in kinds for hook in hooks.values()]


def projected(down: nn.Module, h: Tensor) -> Tensor:
    """down(h), for an h that is used nowhere else.

    A plain Linear makes a cotangent of h that nobody else sees: that of the gate is written over
    it, and backward holds four tensors as large as h at a time, not five.
    """
    plain = type(down) is nn.Linear and type(down.weight) is nn.Parameter
    watched = hooks_of(down) or nn.modules.module._has_any_global_hook()
    if plain and "forward" not in vars(down) and not watched:
        donate(h)
    return down(h)


class SwiGLUMLP(nn.Module):
    """Feed-forward layer of Llama: down_proj(silu(gate_proj(x)) * up_proj(x)).

    Args:
        hidden_size: width of x and y.
        intermediate_size: width between.
        bias: whether the three projections have one.
        device: of the parameters.
        dtype: of the parameters.
        chunk: tokens whose inner activations exist at a time, for two or three products more in
            training; default: all. Gradients of the parameters are then sums over chunks, each
            rounded to their dtype.

    Raises:
        ValueError: chunk is no integer above 0.
        RuntimeError: in backward of tiles, a parameter was modified in place since forward.

    Example:
        >>> SwiGLUMLP(4, 8)(torch.ones(2, 4)).shape
        torch.Size([2, 4])

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        chunk: int | None = None,
    ) -> None:  # fmt: skip
        check_chunk(type(self).__name__, chunk)
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.chunk = chunk
        inward = (hidden_size, intermediate_size, bias, device, dtype)
        self.gate_proj, self.up_proj = nn.Linear(*inward), nn.Linear(*inward)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the projections as `torch.nn.Linear` does."""
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., hidden_size) to the same shape."""
        return tiled(self._tile, x, self.chunk, self)

    def _tile(self, x: Tensor) -> Tensor:
        return projected(self.down_proj, swiglu(self.gate_proj(x), self.up_proj(x)))

    def extra_repr(self) -> str:
        """Name the option that was given."""
        return "" if self.chunk is None else f"chunk={self.chunk}"


class GEGLUMLP(SwiGLUMLP):
    """Feed-forward layer of Gemma: down_proj(gelu(gate_proj(x)) * up_proj(x)).

    Args:
        hidden_size: as in `SwiGLUMLP`.
        intermediate_size: as there.
        bias: as there.
        device: as there.
        dtype: as there.
        approximate: "tanh" (Gemma's gelu_pytorch_tanh) or "none" (with erf).
        chunk: as there.

    Raises:
        ValueError: as there, or approximate is unknown.

    Example:
        >>> GEGLUMLP(4, 8)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        approximate: str = "tanh", chunk: int | None = None,
    ) -> None:  # fmt: skip
        check_choice("GEGLUMLP", "approximate", approximate, ("tanh", "none"))
        super().__init__(hidden_size, intermediate_size, bias, device, dtype, chunk=chunk)
        self.approximate = approximate

    def _tile(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return projected(self.down_proj, geglu(gate, up, approximate=self.approximate))

    def extra_repr(self) -> str:
        """Name the options."""
        given = super().extra_repr()
        return f"approximate={self.approximate!r}" + (f", {given}" if given else "")
