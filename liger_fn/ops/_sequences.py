"""What the losses on log-probabilities share: which tokens count, sequences of them, means.

    live = y != ignore_index                                                (n, t)
    logp of a sequence = sum of logp where live, over their number with average_logp        (n,)

Every tensor is masked before any arithmetic: what an ignored position holds, NaN included, reaches
neither value nor gradient. Exponents stop at 60 (e**60 = 1.1e26: float32 still holds the sum of
many), where the gradient is 0. Statistics are float32 (float64 stays float64).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._math import wide
from liger_fn.ops._ce import divisor

EXP_MAX = 60.0


def check_logp(
    op: str, y: Tensor | None, needs_y: str | None, first: str, **named: Tensor | None
) -> None:
    """Hold log-probabilities to (first, t) beside y, or to (first,) without; later ones to either.

    `needs_y` says why a loss cannot do without y.
    """
    (head, logp), *later = named.items()
    if y is None and needs_y is not None:
        raise ValueError(f"{op}: y must be given, {needs_y}")
    if y is None and isinstance(logp, Tensor) and logp.dim() == 2:
        raise ValueError(f"{op}: y must be given with {head} per token, to say which tokens count")
    tail = "" if y is None else " t"
    specs: dict[str, tuple[Tensor | None, str]] = {
        head: (logp, first + tail),
        "y": (y, f"? int {first} t"),
    }
    for name, t in later:
        whole = isinstance(t, Tensor) and t.dim() == 1
        specs[name] = (t, f"? {first}{'' if whole else tail}")
    check_tensors(op, **specs)


def live_tokens(y: Tensor | None, ignore_index: int) -> Tensor | None:
    return None if y is None else y != ignore_index


def masked(t: Tensor, live: Tensor | None) -> Tensor:
    return wide(t) if live is None else torch.where(live, wide(t), 0.0)


def sequence_logp(
    logp: Tensor, live: Tensor | None, average: bool, weight: Tensor | None = None
) -> Tensor:
    """Reduce (n, t) to (n,); what is (n,) already stays. A sequence without live tokens is 0."""
    if logp.dim() == 1 or live is None:
        return wide(logp)
    logp = masked(logp, live)
    total = (logp if weight is None else logp * weight).sum(-1)
    return total / live.sum(-1).clamp(min=1) if average else total


def mean(
    terms: Tensor, live: Tensor | None, n: float | Tensor | None, otherwise: float | Tensor
) -> Tensor:
    """Sum where live, divided by n, or without n by what else it should be; at least by 1 of 0."""
    terms = terms if live is None else torch.where(live, terms, 0.0)
    return terms.sum() / divisor(otherwise if n is None else n, terms.device, terms.dtype)


def exp_capped(x: Tensor) -> Tensor:
    return x.clamp(max=EXP_MAX).exp()


def expm1_capped(x: Tensor) -> Tensor:
    return x.clamp(max=EXP_MAX).expm1()


def preferred(x: Tensor, smoothing: float = 0.0) -> Tensor:
    """-log of the probability sigmoid(x) that a label is right; smoothed: it may be wrong."""
    if smoothing == 0.0:
        return -F.logsigmoid(x)
    return -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x)
