"""Norms that stand for those of `torch.nn`, as subclasses: what looks for those finds these.

RMSNorm     torch.nn.RMSNorm, LlamaRMSNorm, GemmaRMSNorm (weight)
LayerNorm   torch.nn.LayerNorm (weight, bias)
GroupNorm   torch.nn.GroupNorm (weight, bias)
DyT         the layer of Zhu et al., 2025, arXiv:2503.10622 (alpha, weight, bias)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from liger_fn._check import check_choice
from liger_fn._math import wide
from liger_fn.ops._rms import CASTINGS
from liger_fn.ops.dyt import dyt
from liger_fn.ops.group_norm import group_norm
from liger_fn.ops.layer_norm import layer_norm
from liger_fn.ops.rms_norm import rms_norm


def _rows(name: str, x: Tensor, shape: Sequence[int]) -> Tensor:
    """X with the normalised axes as one."""
    if tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape) or x.dim() < len(shape):
        wanted = ", ".join(("...", *map(str, shape)))
        raise ValueError(f"{name}: x must have shape ({wanted}), got {tuple(x.shape)}")
    return x if len(shape) == 1 else x.flatten(-len(shape))


class RMSNorm(nn.RMSNorm):
    """Divide by the root mean square of the last axes, then scale by `offset + weight`.

    Args:
        normalized_shape: size of the last axis, or sizes of the last axes.
        eps: added to the mean square; None takes the resolution of float32
            (float64 for float64 x), as torch does.
        elementwise_affine: whether there is a weight.
        device: of the weight.
        dtype: of the weight.
        offset: added to the weight, which starts as 1 - offset: 0.0 for Llama and torch, 1.0 for
            Gemma.
        casting: where half precision rounds, see `liger_fn.rms_norm`: "llama", "gemma" (also what
            torch and OLMo-2 do) or "none".

    Example:
        >>> RMSNorm(2, eps=0.0)(torch.tensor([3.0, 4.0])).detach()
        tensor([0.8485, 1.1314])
    """

    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, eps: float | None = 1e-6,
        elementwise_affine: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, offset: float = 0.0, casting: str = "llama",
    ) -> None:  # fmt: skip
        check_choice("RMSNorm", "casting", casting, CASTINGS)
        self.offset, self.casting = offset, casting  # before reset_parameters, which reads offset
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    @property
    def variance_epsilon(self) -> float | None:
        """What Llama's module calls eps."""
        return self.eps

    def reset_parameters(self) -> None:
        """Give every channel a gain of 1."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., *normalized_shape)."""
        w = self.weight.flatten() if self.elementwise_affine else None
        eps = torch.finfo(wide(x.dtype)).eps if self.eps is None else self.eps
        rows = _rows("RMSNorm", x, self.normalized_shape)
        y = rms_norm(rows, w, eps, offset=self.offset, casting=self.casting)
        return y.view(x.shape)

    def extra_repr(self) -> str:
        """Name the options."""
        return f"{super().extra_repr()}, offset={self.offset}, casting={self.casting!r}"


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, arguments and all, on `liger_fn.layer_norm`.

    Example:
        >>> LayerNorm(2)(torch.tensor([3.0, 5.0])).detach()
        tensor([-1.0000,  1.0000])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., *normalized_shape)."""
        w, b = (None if p is None else p.flatten() for p in (self.weight, self.bias))
        return layer_norm(_rows("LayerNorm", x, self.normalized_shape), w, b, self.eps).view(
            x.shape
        )


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm`, arguments and all, on `liger_fn.group_norm`.

    Example:
        >>> GroupNorm(1, 2, affine=False)(torch.tensor([[3.0, 5.0]]))
        tensor([[-1.0000,  1.0000]])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (b, c, ...)."""
        return group_norm(x, self.weight, self.bias, self.num_groups, self.eps)


class DyT(nn.Module):
    """Squash by tanh in place of a norm: tanh(alpha x) * weight + bias.

    Args:
        num_features: size of the last axis.
        alpha: where the scale before the tanh starts.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> DyT(2)(torch.zeros(2)).tolist()
        [0.0, 0.0]

    References:
        Zhu et al., "Transformers without Normalization", 2025, arXiv:2503.10622.
    """

    def __init__(
        self, num_features: int, alpha: float = 0.5, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_features, self.init_alpha = num_features, alpha
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with a gain of 1, a bias of 0 and the alpha asked for."""
        nn.init.constant_(self.alpha, self.init_alpha)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Squash x (..., num_features)."""
        return dyt(x, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Name the size and the first alpha."""
        return f"{self.num_features}, alpha={self.init_alpha}"
