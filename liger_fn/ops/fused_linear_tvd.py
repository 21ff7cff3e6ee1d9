"""Total variation distance of two heads, without the logits of either.

    loss = mean over tokens of sum over columns of |p - q| / 2
    p = softmax(teacher_x teacher_w^T / T), q = softmax(x w^T / T)        x: (..., d)   w: (v, d)
                                                        teacher_x: (..., e)   teacher_w: (v, e)

Pullback as in `tvd`, through the student's head: dx = dz w, dw = dz^T x. Losses and sums over
tokens are float32 (float64 for float64). Rules in `_distill`. Wen et al., 2023,
arXiv:2307.15190.
"""

import torch
from torch import Tensor

from liger_fn.ops._distill import distill


def fused_linear_tvd(
    w: Tensor, x: Tensor, teacher_w: Tensor, teacher_x: Tensor, *,
    y: Tensor | None = None, b: Tensor | None = None, teacher_b: Tensor | None = None,
    temperature: float = 1.0, hard_weight: float = 0.0, softcap: float | None = None,
    logit_scale: float = 1.0, teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0, ignore_index: int = -100,
    token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Total variation distance of a student's head from its teacher's, without their logits.

    The arguments are those of `fused_linear_kl`.

    Returns:
        As there; between 0 and 1.

    Raises:
        ValueError: as there.
        TypeError: as there.

    Example:
        >>> w, x = 200 * torch.eye(2), torch.tensor([[1.0, 0.0]])
        >>> fused_linear_tvd(w, x, w, x.flip(-1))
        tensor(1.)

    References:
        Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation", 2023,
        arXiv:2307.15190.
    """
    return distill(
        "fused_linear_tvd", "tvd", w, x, teacher_w, teacher_x, y=y, b=b, teacher_b=teacher_b,
        temperature=temperature, hard_weight=hard_weight, softcap=softcap, logit_scale=logit_scale,
        teacher_softcap=teacher_softcap, teacher_logit_scale=teacher_logit_scale,
        ignore_index=ignore_index, token_weight=token_weight, reduction=reduction, n_valid=n_valid,
        chunk=chunk, accum_dtype=accum_dtype,
    )  # fmt: skip
