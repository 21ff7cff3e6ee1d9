"""What the losses on log-probabilities share: which tokens count, sequences of them, means.

    live = y != ignore_index                                                (n, t)
    logp of a sequence = sum of logp where live, over their number with average_logp        (n,)

Every tensor is masked before any arithmetic: what an ignored position holds, NaN included, reaches
neither value nor gradient. Exponents stop at 60 (e**60 = 1.1e26: float32 still holds the sum of
many), where the gradient is 0. Statistics are float32 (float64 stays float64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_fn._check import check_numbers, check_positive, check_tensors
from liger_fn._math import wide
from liger_fn.ops._ce import divisor
from liger_fn.ops._chunked import check_head
from liger_fn.ops._collectives import Vocab, shard_of
from liger_fn.ops.fused_linear_logp import fused_linear_logp

EXP_MAX = 60.0


class Head(NamedTuple):
    """Options of `fused_linear_logp` that a loss hands on to it."""

    temperature: float
    softcap: float | None
    logit_scale: float
    ignore_index: int
    chunk: int | None
    accum_dtype: torch.dtype = torch.float32
    group: Vocab | None = None


class Reference(NamedTuple):
    """The reference policy: its log-probabilities, or the head and the activations they are of."""

    logp: Tensor | None
    w: Tensor | None
    x: Tensor | None
    b: Tensor | None


NO_REFERENCE = Reference(None, None, None, None)


def given(ref: Reference) -> str | None:
    """The name of the first tensor that there is; no property: torch 2.9 traces none."""
    names = ("ref_logp", "ref_w", "ref_x", "ref_b")
    return next((name for name, t in zip(names, ref, strict=True) if t is not None), None)


def check_sequences(
    op: str, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, ref: Reference, head: Head,
    first: str,
) -> None:  # fmt: skip
    """Hold the tensors of a fused loss together, x being (first, t, d)."""
    check_head(op, w, x, y, b, head.chunk, head.accum_dtype)
    check_numbers(op, logit_scale=head.logit_scale, ignore_index=head.ignore_index)
    check_positive(op, "temperature", head.temperature)
    check_positive(op, "softcap", head.softcap, optional=True)
    if ref.logp is not None and given(ref._replace(logp=None)):
        raise ValueError(f"{op}: ref_logp and ref_w, ref_x cannot be given together")
    if (ref.w is None) != (ref.x is None) or (ref.w is None and ref.b is not None):
        raise ValueError(f"{op}: ref_w and ref_x must be given together, and with ref_b")
    whole = isinstance(ref.logp, Tensor) and ref.logp.dim() == 1
    check_tensors(
        op, x=(x, f"{first} t d"), ref_logp=(ref.logp, f"? {first}{'' if whole else ' t'}"),
        ref_w=(ref.w, "? v e"), ref_x=(ref.x, f"? {first} t e"), ref_b=(ref.b, "? v"),
    )  # fmt: skip
    if head.group is not None:
        for name, t in (("w", w), ("ref_w", ref.w)):
            if t is not None:
                shard_of(op, head.group, t.shape[0], name)


def head_logp(w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, head: Head) -> Tensor:
    """Log-probabilities of y under a head."""
    return fused_linear_logp(w, x, y, b=b, **head._asdict())


def reference_logp(
    ref: Reference, y: Tensor, head: Head, logp_of: Callable[..., Tensor] = head_logp
) -> Tensor:
    """What is given, or what the reference's head says; never differentiated."""
    if ref.logp is not None:
        return ref.logp
    w, x = (t.detach() for t in (ref.w, ref.x) if t is not None)
    return logp_of(w, x, y, None if ref.b is None else ref.b.detach(), head)


def check_logp(
    op: str, y: Tensor | None, needs_y: str | None, first: str, **named: Tensor | None
) -> None:
    """Hold log-probabilities to (first, t) beside y, or to (first,) without; later ones to either.

    `needs_y` says why a loss cannot do without y.
    """
    (head, logp), *later = named.items()
    if y is None and needs_y is not None:
        raise TypeError(f"{op}: y must be a tensor, got NoneType: {needs_y}")
    if y is None and isinstance(logp, Tensor) and logp.dim() == 2:
        raise TypeError(f"{op}: y must be a tensor, got NoneType: {head} is per token")
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
    """Which tokens count; None without y: all of them."""
    return None if y is None else y.long() != ignore_index  # 8 bits would wrap an index


def masked(t: Tensor, live: Tensor | None) -> Tensor:
    """In the dtype of statistics, 0 where a token does not count."""
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
    """exp(x), x at most 60."""
    return x.clamp(max=EXP_MAX).exp()


def expm1_capped(x: Tensor) -> Tensor:
    """exp(x) - 1, x at most 60."""
    return x.clamp(max=EXP_MAX).expm1()


def preferred(x: Tensor, smoothing: float = 0.0) -> Tensor:
    """-log of the probability sigmoid(x) that a label is right; smoothed: it may be wrong."""
    if smoothing == 0.0:
        return -log_sigmoid(x)
    return -(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x)


def log_sigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)); F.logsigmoid itself fails under a nested vmap on CUDA (torch 2.11)."""
    return -F.softplus(-x, threshold=40)  # beyond it log(1 + exp(x)) is x, in float64 too
