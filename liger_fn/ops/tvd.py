"""Total variation distance of a student and its teacher, on logits.

    TVD = sum over columns of |p - q| / 2        p, q: (..., v), softmax(logits / T)

Pullback of d, one per row, with s = sign(p - q), 0 for equal ones:

    dstudent = d / T * q * (sum(q * s) - s) / 2
    dteacher = d / T * p * (s - sum(p * s)) / 2

The sign s is that of log p - log q, formed from differences of logits: closer than 1e-7 of each
other, float32 p and q no longer tell which is larger. s jumps at a tie, so that logits within an
ulp of one have either gradient.

Reference, kernels and rule are those of every divergence, in `_divergence`. Wen et al., 2023,
arXiv:2307.15190.
"""

from torch import Tensor

from liger_fn.ops._divergence import divergence


def tvd(
    student: Tensor, teacher: Tensor, *, y: Tensor | None = None, temperature: float = 1.0,
    ignore_index: int = -100, token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Total variation distance of softmax of `student` and softmax of `teacher`.

    Args:
        student: as in `kl_div`, and so are all other arguments.
        teacher: as there.
        y: as there.
        temperature: as there.
        ignore_index: as there.
        token_weight: as there.
        reduction: as there.
        n_valid: as there.

    Returns:
        float32 scalar (float64 for float64 logits), or a loss per row (...) with "none", at most 1.
        No rows, or all ignored: 0 with gradient 0.

    Raises:
        ValueError: shapes, devices or values of options do not fit.
        TypeError: logits or weights are not floating, or y is not integer.

    Example:
        >>> tvd(torch.zeros(2), torch.tensor([3.0, 1.0]).log())
        tensor(0.2500)

    References:
        Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation", 2023,
        arXiv:2307.15190.
    """
    return divergence(
        "tvd", "tvd", student, teacher, y, temperature=temperature, ignore_index=ignore_index,
        token_weight=token_weight, reduction=reduction, n_valid=n_valid,
    )  # fmt: skip
