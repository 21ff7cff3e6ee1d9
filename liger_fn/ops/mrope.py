"""Multimodal rotary position embedding: time, height and width turn columns of their own.

    column j of a half takes its angle from cos[i], sin[i] where j lies in section i
    q: (b, h, t, k)   k: (b, hk, t, k)   cos, sin: (3, b, t, r), r = 2 * sum(sections) <= k

Choosing columns is plain torch on the small tables; the rest, rule and pullback, is `rope` with
layout "half". Wang et al., "Qwen2-VL", 2024, arXiv:2409.12191.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_fn.ops.rope import check_turn, turned


def mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by three positions per token, each for a section of the columns.

    Args:
        q: queries (..., h, t, k), any strides.
        k: keys (..., hk, t, k); hk may differ from h.
        cos: cosines (3, ..., t, r) of temporal, height and width positions, r even and at most k.
        sin: sines, shaped as cos.
        sections: how many columns of a half belong to each of the three; they add up to r / 2.

    Returns:
        The turned (q, k), shaped and typed like the arguments; entries from r on are unchanged.

    Raises:
        ValueError: axes disagree, cos does not start with 3, or sections do not add up to r / 2.
        TypeError: an argument is not a floating tensor.

    Example:
        >>> one, none = torch.ones(3, 1, 6), torch.zeros(3, 1, 6)
        >>> mrope(torch.ones(1, 1, 6), torch.ones(1, 1, 6), one, none, (1, 1, 1))[0]
        tensor([[[1., 1., 1., 1., 1., 1.]]])

    References:
        Wang et al., "Qwen2-VL", 2024, arXiv:2409.12191.
    """
    check_turn("mrope", q, k, cos, sin, tables=1)
    r = cos.shape[-1]
    if cos.dim() < 3 or cos.shape[0] != 3:
        raise ValueError(f"mrope: cos must have shape (3, ..., t, r), got {tuple(cos.shape)}")
    if len(sections) != 3 or min(sections) < 0 or 2 * sum(sections) != r:
        raise ValueError(
            f"mrope: sections must be three counts that add up to {r / 2:g}, half of axis r, "
            f"got {tuple(sections)}"
        )

    def chosen(table: Tensor) -> Tensor:
        parts = table.split([*sections, *sections], -1)
        return torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)

    return turned(q, k, chosen(cos), chosen(sin), "half")
