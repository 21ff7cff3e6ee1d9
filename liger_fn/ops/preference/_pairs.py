"""What the losses on pairs share: who is chosen, which pairs count, the terms they have in common.

Sequences [:b] of a batch (2b, ...) are chosen, [b:] rejected. A pair counts where both of them have
a token that is not ignored; the term of another is 0, and so is its gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_fn._check import check_count, check_least, check_numbers, check_positive
from liger_fn._math import wide
from liger_fn.ops._ce import divisor
from liger_fn.ops._logp_loss import logp_loss
from liger_fn.ops._sequences import (
    Head,
    Reference,
    check_logp,
    check_sequences,
    live_tokens,
    masked,
    mean,
    sequence_logp,
)


class PairMetrics(NamedTuple):
    """A loss on pairs, and what one watches beside it.

    All but the loss are detached means over the pairs that count.

    Attributes:
        loss: scalar, differentiable.
        chosen_logp: log-probability of a chosen sequence, reduced as the loss reduces it.
        rejected_logp: of a rejected one.
        chosen_reward: beta * (chosen_logp - its reference), the reference being 0 without one.
        rejected_reward: of a rejected one.
        margin: chosen_reward - rejected_reward.
        accuracy: share of pairs with a margin above 0.
        nll: -logp of a token, over the unignored chosen tokens.
    """

    loss: Tensor
    chosen_logp: Tensor
    rejected_logp: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor
    margin: Tensor
    accuracy: Tensor
    nll: Tensor


class Pairs(NamedTuple):
    """Log-probabilities of b pairs, each (b,), 0 where a pair does not count."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    n_chosen: Tensor  # tokens, at least 1
    n_rejected: Tensor
    live: Tensor
    nll: Tensor  # scalar; 0 without y


def check_pairs(
    op: str, logp: Tensor, y: Tensor | None, ignore_index: int, needs_y: str | None = None,
    **more: Tensor | None,
) -> None:  # fmt: skip
    check_numbers(op, ignore_index=ignore_index)
    check_logp(op, y, needs_y, "2b", logp=logp, **more)
    _check_even(op, "logp", logp)


def check_pair_head(
    op: str, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, ref: Reference, head: Head
) -> None:
    check_sequences(op, w, x, y, b, ref, head, "2b")
    _check_even(op, "x", x)


def _check_even(op: str, name: str, t: Tensor) -> None:
    if t.shape[0] % 2:
        raise ValueError(
            f"{op}: {name} must have an even first axis, chosen sequences and then as many "
            f"rejected, got {tuple(t.shape)}"
        )


def check_pair_options(
    op: str, beta: float, label_smoothing: float = 0.0, nll_weight: float = 0.0
) -> None:
    check_positive(op, "beta", beta)
    check_numbers(op, label_smoothing=label_smoothing)
    check_least(op, "nll_weight", nll_weight)
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"{op}: label_smoothing must lie in [0, 1), got {label_smoothing}")


def check_counts(
    op: str, logp: Tensor, n_valid: float | Tensor | None, nll_n_valid: float | Tensor | None,
    has_nll: bool, has_pairs: bool = True,
) -> None:  # fmt: skip
    check_count(op, "n_valid", n_valid, logp=logp)
    check_count(op, "nll_n_valid", nll_n_valid, logp=logp)
    if nll_n_valid is not None and not has_nll:
        raise ValueError(f"{op}: nll_n_valid is for the nll term, which has weight 0")
    if n_valid is not None and not has_pairs:
        raise ValueError(f"{op}: n_valid is for a mean over pairs: 'sft' alone has nll_n_valid")


def read_pairs(
    logp: Tensor, y: Tensor | None, ref_logp: Tensor | None, *, ignore_index: int, average: bool,
    ld_alpha: float | None = None, nll_n_valid: float | Tensor | None = None,
) -> Pairs:  # fmt: skip
    b = logp.shape[0] // 2
    live = live_tokens(y, ignore_index)
    weight = None if live is None or ld_alpha is None else _tail_weight(logp, live, ld_alpha)
    policy = sequence_logp(logp, live, average, weight)
    if ref_logp is None:
        ref = torch.zeros_like(policy)
    else:
        ref = sequence_logp(ref_logp.detach(), live, average, weight)
    if live is None:
        n = torch.ones_like(policy)
        nll = policy.new_zeros(())
    else:
        n = live.sum(-1)
        nll = mean(-masked(logp[:b], live[:b]), None, nll_n_valid, n[:b].sum())
    counts = (n[:b] > 0) & (n[b:] > 0)
    policy, ref = (torch.where(counts.repeat(2), t, 0.0) for t in (policy, ref))
    n = n.clamp(min=1)
    return Pairs(policy[:b], policy[b:], ref[:b], ref[b:], n[:b], n[b:], counts, nll)


def _tail_weight(logp: Tensor, live: Tensor, ld_alpha: float) -> Tensor:
    """1 on as many tokens as the shorter sequence of a pair has, ld_alpha on those past them."""
    n, b = live.sum(-1), logp.shape[0] // 2
    shared = torch.minimum(n[:b], n[b:]).repeat(2)
    past = live.cumsum(-1) > shared[:, None]
    return torch.ones_like(logp, dtype=wide(logp.dtype)).masked_fill(past, ld_alpha)


def pair_loss(
    name: str, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, head: Head,
    ref_logp: Tensor | None, n_valid: float | Tensor | None, nll_n_valid: float | Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of that name and logp, the means divided by numbers that hold for the whole batch."""
    half, dtype = y.shape[0] // 2, wide(x.dtype)
    if nll_n_valid is None:
        nll_n_valid = (y[:half].long() != head.ignore_index).sum()
    counts = (divisor(half if n_valid is None else n_valid, x.device, dtype),
              divisor(nll_n_valid, x.device, dtype))  # fmt: skip
    return logp_loss(
        name, w, x, y, b, head, *counts, ref_logp, ignore_index=head.ignore_index, **options
    )[:2]


def pair_mean(terms: Tensor, live: Tensor, n_valid: float | Tensor | None) -> Tensor:
    return mean(terms, live, n_valid, terms.shape[0])


def pair_metrics(loss: Tensor, pairs: Pairs, beta: float) -> PairMetrics:
    p = Pairs(*(t.detach() for t in pairs))
    chosen, rejected = beta * (p.chosen - p.ref_chosen), beta * (p.rejected - p.ref_rejected)
    right = (chosen > rejected).to(loss.dtype)
    count = p.live.sum()
    means = [
        mean(t, p.live, None, count)
        for t in (p.chosen, p.rejected, chosen, rejected, chosen - rejected, right)
    ]
    return PairMetrics(loss, means[0], means[1], means[2], means[3], means[4], means[5], p.nll)
