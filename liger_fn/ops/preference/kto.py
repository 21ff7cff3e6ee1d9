"""Kahneman-Tversky optimisation: single sequences that are desirable or not, against their mean.

    r = log(p / p_ref) of a sequence        kl >= 0, detached           logp: (b, t), (b,)
    loss = mean over sequences of  weight_d * (1 - sigmoid(beta * (r - kl)))   where desirable
                                   weight_u * (1 - sigmoid(beta * (kl - r)))   elsewhere

kl estimates KL(p || p_ref) from sequences of other prompts. float32 (float64 stays float64).
Ethayarajh et al., 2024, arXiv:2402.01306.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_fn._check import check_count, check_positive
from liger_fn.ops._sequences import check_logp, live_tokens, mean, sequence_logp


class KTOMetrics(NamedTuple):
    """The loss of kto, and what one watches beside it.

    All but the loss are detached; means are over the sequences that count, 0 of none.

    Attributes:
        loss: scalar, differentiable.
        kl: the point of reference.
        chosen_logp: mean log-probability of a desirable sequence.
        rejected_logp: of an undesirable one.
        chosen_reward: mean of beta * r of a desirable sequence.
        rejected_reward: of an undesirable one.
        margin: chosen_reward - rejected_reward.
    """

    loss: Tensor
    kl: Tensor
    chosen_logp: Tensor
    rejected_logp: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor
    margin: Tensor


class Options(NamedTuple):
    """Options of kto beside its tensors."""

    beta: float
    desirable_weight: float
    undesirable_weight: float
    average_logp: bool
    n_valid: float | Tensor | None
    ignore_index: int


def kto_from_logp(
    logp: Tensor, y: Tensor | None, desirable: Tensor, ref_logp: Tensor, *,
    kl: float | Tensor | None = None, kl_logp: Tensor | None = None,
    kl_ref_logp: Tensor | None = None, kl_y: Tensor | None = None, beta: float = 0.1,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0, average_logp: bool = False,
    n_valid: float | Tensor | None = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Loss of single sequences, each of them desirable or not.

    Args:
        logp: log-probabilities per token (b, t) beside y, or per sequence (b,) with y None.
        y: targets (b, t), integers, of which only ignore_index has a meaning: that token does not
            count, whatever the other tensors hold there.
        desirable: whether to prefer a sequence (b,), booleans.
        ref_logp: of the reference policy, not differentiated: (b, t), or (b,), taken as it is.
        kl: the point of reference, a number or a scalar tensor; below 0 it counts as 0.
        kl_logp: in place of kl, log-probabilities of mismatched sequences, completions of other
            prompts, (n, t) beside kl_y or (n,) without: kl is the mean of their log-ratio, at least
            0. Neither is differentiated.
        kl_ref_logp: the same of the reference policy.
        kl_y: targets (n, t) of the mismatched sequences.
        beta: how far the policy may leave the reference: higher is closer.
        desirable_weight: of the loss of desirable sequences.
        undesirable_weight: of the others.
        average_logp: logp of a sequence is the mean over its tokens, not their sum.
        n_valid: what the mean over sequences divides by instead of b: the global number under
            gradient accumulation or data parallelism.
        ignore_index: marks the tokens that do not count.

    Returns:
        float32 scalar (float64 for float64). An ignored sequence contributes 0 to value and
        gradient, and still counts in b; an ignored mismatched one does not count.

    Raises:
        ValueError: shapes or values of options do not fit, or kl is given twice or not at all.
        TypeError: a tensor is of the wrong kind.

    Example:
        >>> logp, ref = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0])
        >>> kto_from_logp(logp, None, torch.tensor([True, False]), ref, kl=0.0, beta=1.0)
        tensor(0.2689)

    Notes:
        Equal to TRL 1.16 with loss_type "kto" where every sequence has a token; TRL takes the mean
        of kl over processes, which is the caller's to do here.

    References:
        Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024,
        arXiv:2402.01306.
    """
    o = Options(beta, desirable_weight, undesirable_weight, average_logp, n_valid, ignore_index)
    _check("kto_from_logp", logp, y, desirable, ref_logp, o)
    _check_kl("kto_from_logp", logp, kl, kl_logp, kl_ref_logp, kl_y, o)
    if kl_logp is not None and kl_ref_logp is not None:
        kl = _mismatched_kl(kl_logp, kl_y, kl_ref_logp, o)
    return _loss(logp, y, desirable, ref_logp, kl, o).loss


def _mismatched_kl(kl_logp: Tensor, kl_y: Tensor | None, kl_ref_logp: Tensor, o: Options) -> Tensor:
    live = live_tokens(kl_y, o.ignore_index)
    policy, ref = (sequence_logp(t.detach(), live, o.average_logp) for t in (kl_logp, kl_ref_logp))
    counts = torch.ones_like(policy, dtype=torch.bool) if live is None else live.any(-1)
    return mean(policy - ref, counts, None, counts.sum())


def _loss(
    logp: Tensor, y: Tensor | None, desirable: Tensor, ref_logp: Tensor, kl: float | Tensor | None,
    o: Options,
) -> KTOMetrics:  # fmt: skip
    live = live_tokens(y, o.ignore_index)
    policy, ref = (sequence_logp(t, live, o.average_logp) for t in (logp, ref_logp.detach()))
    counts = torch.ones_like(policy, dtype=torch.bool) if live is None else live.any(-1)
    ratio = torch.where(counts, policy - torch.where(counts, ref, 0.0), 0.0)
    if isinstance(kl, Tensor):
        kl = kl.detach().to(ratio).clamp(min=0)
    else:
        kl = ratio.new_full((), max(kl or 0.0, 0.0))
    gap = o.beta * (ratio - kl)
    good = o.desirable_weight * torch.sigmoid(-gap)
    each = torch.where(desirable, good, o.undesirable_weight * torch.sigmoid(gap))
    loss = mean(each, counts, o.n_valid, each.shape[0])
    policy, reward = policy.detach(), o.beta * ratio.detach()
    sides = (counts & desirable, counts & ~desirable)
    logps, rewards = ([mean(t, side, None, side.sum()) for side in sides] for t in (policy, reward))
    return KTOMetrics(loss, kl, logps[0], logps[1], rewards[0], rewards[1], rewards[0] - rewards[1])


def _check(
    op: str, logp: Tensor, y: Tensor | None, desirable: Tensor, ref_logp: Tensor, o: Options
) -> None:
    check_positive(op, "beta", o.beta)
    for name in ("desirable_weight", "undesirable_weight"):
        if not getattr(o, name) >= 0:
            raise ValueError(f"{op}: {name} must be at least 0, got {getattr(o, name)}")
    needs_y = "average_logp divides by numbers of tokens" if o.average_logp else None
    if not isinstance(ref_logp, Tensor):
        raise TypeError(f"{op}: ref_logp must be a tensor, got {type(ref_logp).__name__}")
    check_logp(op, y, needs_y, "b", logp=logp, ref_logp=ref_logp)
    _check_desirable(op, desirable, logp)
    check_count(op, "n_valid", o.n_valid, logp=logp)


def _check_desirable(op: str, desirable: Tensor, logp: Tensor) -> None:
    if not isinstance(desirable, Tensor):
        raise TypeError(f"{op}: desirable must be a tensor, got {type(desirable).__name__}")
    if desirable.dtype != torch.bool:
        raise TypeError(f"{op}: desirable must hold booleans, got {desirable.dtype}")
    if desirable.shape != logp.shape[:1]:
        raise ValueError(
            f"{op}: desirable must have shape {tuple(logp.shape[:1])}, one for each sequence, "
            f"got {tuple(desirable.shape)}"
        )
    if desirable.device != logp.device:
        raise ValueError(f"{op}: desirable is on {desirable.device} but logp is on {logp.device}")


def _check_kl(
    op: str, logp: Tensor, kl: float | Tensor | None, kl_logp: Tensor | None,
    kl_ref_logp: Tensor | None, kl_y: Tensor | None, o: Options,
) -> None:  # fmt: skip
    if (kl is None) == (kl_logp is None):
        what = "nothing" if kl is None else "both"
        raise ValueError(f"{op}: one of kl and kl_logp must be given, got {what}")
    if (kl_logp is None) != (kl_ref_logp is None):
        raise ValueError(f"{op}: kl_logp and kl_ref_logp must be given together")
    if kl_logp is None and kl_y is not None:
        raise ValueError(f"{op}: kl_y is for kl_logp, got kl")
    check_count(op, "kl", kl, logp=logp)
    if kl_logp is not None:
        needs_y = "average_logp divides by numbers of tokens" if o.average_logp else None
        check_logp(op, kl_y, needs_y, "n", kl_logp=kl_logp, kl_ref_logp=kl_ref_logp)
