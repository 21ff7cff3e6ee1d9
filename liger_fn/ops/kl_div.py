"""Kullback-Leibler divergence of a student from its teacher, on logits.

    KL(p || q) = sum over columns of p * (log p - log q)        p, q: (..., v), softmax(logits / T)

Pullback of d, one per row:

    dstudent = d / T * (q - p)        dteacher = d / T * p * (log p - log q - KL(p || q))

Reference, kernels and rule are those of every divergence, in `_divergence`. Hinton, Vinyals and
Dean, 2015, arXiv:1503.02531.
"""

from torch import Tensor

from liger_fn.ops._divergence import divergence


def kl_div(
    student: Tensor, teacher: Tensor, *, y: Tensor | None = None, temperature: float = 1.0,
    ignore_index: int = -100, token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Kullback-Leibler divergence of softmax of `student` from softmax of `teacher`.

    The forward one: it weighs by the teacher. `jsd` with beta 1 is the reverse. Nothing multiplies
    by temperature**2: do so to keep the size of gradients when the temperature changes.

    Args:
        student: logits (..., v).
        teacher: logits (..., v); differentiated as well, where they want a gradient.
        y: integers (...) that only say which rows count: those equal to ignore_index do not.
        temperature: divides both logits.
        ignore_index: rows with this y have loss and gradient 0, whatever their logits hold.
        token_weight: weight of each row (...); differentiable; not counted by the mean.
        reduction: "mean" over the rows that count, "sum" or "none".
        n_valid: what the mean divides by instead of the batch's own count: the global number of
            targets under gradient accumulation or data parallelism.

    Returns:
        float32 scalar (float64 for float64 logits), or a loss per row (...) with "none". No rows,
        or all ignored: 0 with gradient 0. Infinity where a column has probability in the teacher
        but none (-inf) in the student; -inf in both adds nothing.

    Raises:
        ValueError: shapes, devices or values of options do not fit.
        TypeError: logits or weights are not floating, or y is not integer.

    Example:
        >>> kl_div(torch.tensor([0.0, 0.0]), torch.tensor([0.0, -torch.inf]))
        tensor(0.6931)

    References:
        Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015,
        arXiv:1503.02531.
    """
    return divergence(
        "kl_div", "kl", student, teacher, y, temperature=temperature, ignore_index=ignore_index,
        token_weight=token_weight, reduction=reduction, n_valid=n_valid,
    )  # fmt: skip
