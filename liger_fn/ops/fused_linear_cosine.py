"""Cosine distance of the logits of two heads, without the logits of either.

    loss = mean over tokens of 1 - cos(z, zt)      z = x w^T, zt = teacher_x teacher_w^T
                                                   x: (..., d)   w: (v, d)
                                                   teacher_x: (..., e)   teacher_w: (v, e)

Pullback, writing e = z/|z| - zt/|zt|: dz = (e - z/|z| * sum(e * z/|z|)) / |z|, then dx = dz w,
dw = dz^T x. Losses and sums over tokens are float32 (float64 for float64). Rules in `_distill`.
"""

import torch
from torch import Tensor

from liger_fn.ops._distill import distill


def fused_linear_cosine(
    w: Tensor, x: Tensor, teacher_w: Tensor, teacher_x: Tensor, *,
    y: Tensor | None = None, b: Tensor | None = None, teacher_b: Tensor | None = None,
    hard_weight: float = 0.0, softcap: float | None = None,
    logit_scale: float = 1.0, teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0, ignore_index: int = -100,
    token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Cosine distance of a student's logits from its teacher's, without either in memory.

    The arguments are those of `fused_linear_kl` without temperature, which changes no angle.

    Returns:
        As there; between 0 and 2, and 1 where the logits of one side are all 0.

    Raises:
        ValueError: as there.
        TypeError: as there.

    Example:
        >>> w, x = torch.eye(2), torch.tensor([[1.0, 0.0]])
        >>> fused_linear_cosine(w, x, w, x.flip(-1))
        tensor(1.)

    References:
        Chunked head: Hsu et al., "Liger Kernel", 2024, arXiv:2410.10989.
    """
    return distill(
        "fused_linear_cosine", "cosine", w, x, teacher_w, teacher_x, y=y, b=b, teacher_b=teacher_b,
        temperature=1.0, hard_weight=hard_weight, softcap=softcap, logit_scale=logit_scale,
        teacher_softcap=teacher_softcap, teacher_logit_scale=teacher_logit_scale,
        ignore_index=ignore_index, token_weight=token_weight, reduction=reduction, n_valid=n_valid,
        chunk=chunk, accum_dtype=accum_dtype,
    )  # fmt: skip
