"""KL divergence of a student's head from its teacher's, without the logits of either.

    loss = mean over tokens of sum over columns of p * (log p - log q)
    p = softmax(teacher_x teacher_w^T / T), q = softmax(x w^T / T)        x: (..., d)   w: (v, d)
                                                        teacher_x: (..., e)   teacher_w: (v, e)

Pullback as in `kl_div`, through the student's head: dx = dz w, dw = dz^T x. Losses and sums over
tokens are float32 (float64 for float64). The gradient of columns in teacher_logp_topk is q - p, p
given by a rounded logarithm: where the two agree to 1e-7, an ulp of that logarithm moves the
gradient by a multiple of itself. Rules in `_distill`. Hinton, Vinyals and Dean, 2015,
arXiv:1503.02531.
"""

import torch
from torch import Tensor

from liger_fn.ops._distill import distill


def fused_linear_kl(
    w: Tensor, x: Tensor, teacher_w: Tensor | None, teacher_x: Tensor | None, *,
    teacher_logp_topk: tuple[Tensor, Tensor] | None = None, y: Tensor | None = None,
    b: Tensor | None = None, teacher_b: Tensor | None = None, temperature: float = 1.0,
    hard_weight: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    teacher_softcap: float | None = None, teacher_logit_scale: float = 1.0,
    ignore_index: int = -100,
    token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Kullback-Leibler divergence of a student's head from its teacher's, without their logits.

    Args:
        w: the student's projection (v, d), as `torch.nn.Linear` holds it. Frozen: no product and
            no buffer for it.
        x: the student's activations (..., d). Frozen: no product for it.
        teacher_w: the teacher's projection (v, e); never differentiated, nor are its other tensors.
        teacher_x: the teacher's activations (..., e).
        teacher_logp_topk: in place of both, which are None then: the teacher's log-probabilities of
            k columns of each row (..., k), and which columns (..., k), all different; one outside
            [0, v) makes its row NaN. What they leave of its probability is one bucket, held against
            the same bucket of the student.
        y: integers (...): rows that hold ignore_index do not count; with hard_weight also targets.
        b: the student's bias (v,).
        teacher_b: the teacher's bias (v,).
        temperature: divides both logits, after scale and cap.
        hard_weight: share in [0, 1] of the cross entropy of y (at temperature 1) in the loss.
        softcap: c of c * tanh(z / c), applied to the student's scaled logits.
        logit_scale: multiplies the student's logits first.
        teacher_softcap: the same for the teacher.
        teacher_logit_scale: the same for the teacher.
        ignore_index: rows with this y have loss and gradient 0, whatever x holds.
        token_weight: weight of each row (...); differentiable; not counted by the mean.
        reduction: "mean" over the rows that count, "sum" or "none". Only "none" computes the logits
            again for its gradient.
        n_valid: what the mean divides by instead of the batch's own count.
        chunk: tokens whose logits exist at a time; default: as many as fit 1 GiB (16 MiB on a CPU).
        accum_dtype: of the sums over chunks that become dw; bfloat16 halves their memory.

    Returns:
        float32 scalar (float64 for float64), or a loss per row (...) with "none". No rows, or all
        ignored: 0 with gradient 0. Nothing multiplies by temperature**2.

    Raises:
        ValueError: shapes, devices or values of options do not fit.
        TypeError: a tensor is not floating, or y is not integer.

    Example:
        >>> w, x = torch.eye(2), torch.zeros(1, 2)
        >>> fused_linear_kl(w, x, w, torch.tensor([[0.0, -100.0]]))
        tensor(0.6931)

    References:
        Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015,
        arXiv:1503.02531. Chunked head: Hsu et al., "Liger Kernel", 2024, arXiv:2410.10989.
    """
    return distill(
        "fused_linear_kl", "kl", w, x, teacher_w, teacher_x, topk=teacher_logp_topk, y=y,
        b=b, teacher_b=teacher_b, temperature=temperature, hard_weight=hard_weight,
        softcap=softcap, logit_scale=logit_scale,
        teacher_softcap=teacher_softcap, teacher_logit_scale=teacher_logit_scale,
        ignore_index=ignore_index, token_weight=token_weight, reduction=reduction, n_valid=n_valid,
        chunk=chunk, accum_dtype=accum_dtype,
    )  # fmt: skip
