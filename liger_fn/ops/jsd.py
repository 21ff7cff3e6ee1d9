"""Generalised Jensen-Shannon divergence of a student and its teacher, on logits.

    JSD = beta * KL(p || m) + (1 - beta) * KL(q || m)        m = beta * p + (1 - beta) * q
                                                     p, q: (..., v), softmax(logits / T)

Pullback of d, one per row:

    dstudent = d / T * (1 - beta) * q * (log q - log m - KL(q || m))
    dteacher = d / T * beta * p * (log p - log m - KL(p || m))

JSD itself is 0 at beta 0 and 1; there the function is KL(p || q) and KL(q || p), which are the
limits of JSD / beta and JSD / (1 - beta), as in TRL's GKD trainer. Where q is 0 wherever p is not,
log p - log m is the same in every column, and dteacher is exactly 0, as dstudent is with the roles
swapped: what is computed there is rounding, up to an ulp of the terms. Reference, kernels and
rule are those of every divergence, in `_divergence`. Agarwal et al., 2024, arXiv:2306.13649.
"""

from torch import Tensor

from liger_fn.ops._divergence import divergence


def jsd(
    student: Tensor, teacher: Tensor, *, beta: float = 0.5, y: Tensor | None = None,
    temperature: float = 1.0, ignore_index: int = -100, token_weight: Tensor | None = None,
    reduction: str = "mean", n_valid: float | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Jensen-Shannon divergence of softmax of `student` and of `teacher`; no label loss in it.

    Args:
        student: as in `kl_div`, and so are all other arguments but beta.
        teacher: as there.
        beta: weight of the teacher in the mixture; 0 stands for the forward divergence KL(p || q),
            1 for the reverse one KL(q || p), p the teacher and q the student.
        y: as there.
        temperature: as there.
        ignore_index: as there.
        token_weight: as there.
        reduction: as there.
        n_valid: as there.

    Returns:
        float32 scalar (float64 for float64 logits), or a loss per row (...) with "none". No rows,
        or all ignored: 0 with gradient 0. With 0 < beta < 1 it is finite and at most the entropy of
        (beta, 1 - beta), whatever columns are masked with -inf.

    Raises:
        ValueError: shapes, devices or values of options do not fit.
        TypeError: logits or weights are not floating, or y is not integer.

    Example:
        >>> jsd(torch.tensor([0.0, -torch.inf]), torch.tensor([-torch.inf, 0.0]))
        tensor(0.6931)

    References:
        Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated
        Mistakes", 2024, arXiv:2306.13649.
    """
    return divergence(
        "jsd", "jsd", student, teacher, y, beta=beta, temperature=temperature,
        ignore_index=ignore_index, token_weight=token_weight, reduction=reduction, n_valid=n_valid,
    )  # fmt: skip
