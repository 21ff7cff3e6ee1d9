"""Tables of cosines and sines for `liger_fn.rope`; stands for LlamaRotaryEmbedding.

    angle = position * inv_freq        inv_freq_i = base ** (-2 i / dim), i < dim / 2
    cos, sin: (..., t, dim), both halves alike

Computed once a step, read by every layer. Su et al., 2021, arXiv:2104.09864.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, as `liger_fn.rope` takes them.

    Args:
        dim: how many entries of a head are turned, even.
        base: wavelengths run from 2 pi to 2 pi times this.
        device: of the frequencies.

    The buffer `inv_freq` (dim / 2,) is in no state dict, as in Hugging Face models. It stays
    float32 when the model is cast: bfloat16 has no position beyond 256. Assign it to scale it.

    Example:
        >>> cos, sin = RotaryEmbedding(4)(torch.ones(1), torch.arange(3)[None])
        >>> q, k = liger_fn.rope(torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4), cos, sin)

    References:
        Su et al., "RoFormer", 2021, arXiv:2104.09864.
    """

    inv_freq: Tensor

    def __init__(
        self, dim: int, base: float = 10000.0, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"RotaryEmbedding: dim must be even and above 0, got {dim}")
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", torch.empty(dim // 2, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the frequencies: also after `to_empty`, which leaves them unset."""
        even = torch.arange(0, self.dim, 2, device=self.inv_freq.device, dtype=torch.float32)
        self.inv_freq = 1.0 / self.base ** (even / self.dim)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (..., t, dim) of position_ids (..., t) in the dtype of x."""
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def extra_repr(self) -> str:
        """Name the size and the base."""
        return f"{self.dim}, base={self.base}"

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kw: Any) -> RotaryEmbedding:
        before = self.inv_freq
        super()._apply(fn, *args, **kw)  # type: ignore[no-untyped-call]  # torch has none
        if self.inv_freq.dtype != before.dtype:
            self.inv_freq = before.to(self.inv_freq.device)
        return self
