"""Jensen-Shannon divergence of two heads, without the logits of either.

    loss = mean over tokens of beta * KL(p || m) + (1 - beta) * KL(q || m)
    m = beta * p + (1 - beta) * q
    p = softmax(teacher_x teacher_w^T / T), q = softmax(x w^T / T)        x: (..., d)   w: (v, d)
                                                        teacher_x: (..., e)   teacher_w: (v, e)

Pullback as in `jsd`, through the student's head: dx = dz w, dw = dz^T x. Losses and sums over
tokens are float32 (float64 for float64). Rules in `_distill`. Agarwal et al., 2024,
arXiv:2306.13649.
"""

import torch
from torch import Tensor

from liger_fn.ops._distill import distill


def fused_linear_jsd(
    w: Tensor, x: Tensor, teacher_w: Tensor, teacher_x: Tensor, *,
    beta: float = 0.5, y: Tensor | None = None, b: Tensor | None = None,
    teacher_b: Tensor | None = None,
    temperature: float = 1.0, hard_weight: float = 0.0, softcap: float | None = None,
    logit_scale: float = 1.0, teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0, ignore_index: int = -100,
    token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Jensen-Shannon divergence of a student's head and its teacher's, without their logits.

    The arguments are those of `fused_linear_kl`, and beta.

    Args:
        w: as there, and so are all others but beta.
        x: as there.
        teacher_w: as there.
        teacher_x: as there.
        beta: weight of the teacher in the mixture; 0 stands for the forward divergence KL(p || q),
            1 for the reverse one KL(q || p).
        y: as there.
        b: as there.
        teacher_b: as there.
        temperature: as there.
        hard_weight: as there.
        softcap: as there.
        logit_scale: as there.
        teacher_softcap: as there.
        teacher_logit_scale: as there.
        ignore_index: as there.
        token_weight: as there.
        reduction: as there.
        n_valid: as there.
        chunk: as there.
        accum_dtype: as there.

    Returns:
        As there; finite for 0 < beta < 1, whatever columns are masked.

    Raises:
        ValueError: as there.
        TypeError: as there.

    Example:
        >>> w, x = 200 * torch.eye(2), torch.tensor([[1.0, 0.0]])
        >>> fused_linear_jsd(w, x, w, x.flip(-1))
        tensor(0.6931)

    References:
        Agarwal et al., "On-Policy Distillation of Language Models", 2024, arXiv:2306.13649.
    """
    return distill(
        "fused_linear_jsd", "jsd", w, x, teacher_w, teacher_x, y=y, b=b, teacher_b=teacher_b,
        beta=beta, temperature=temperature, hard_weight=hard_weight, softcap=softcap,
        logit_scale=logit_scale,
        teacher_softcap=teacher_softcap, teacher_logit_scale=teacher_logit_scale,
        ignore_index=ignore_index, token_weight=token_weight, reduction=reduction, n_valid=n_valid,
        chunk=chunk, accum_dtype=accum_dtype,
    )  # fmt: skip
