"""The algebra of kto and its checks: r of each sequence, the point of reference, the loss.

Formulas and the paper are in `kto`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_fn._check import check_count, check_least, check_numbers, check_positive, check_tensors
from liger_fn.ops._sequences import (
    Head,
    Reference,
    check_logp,
    check_sequences,
    given,
    live_tokens,
    mean,
    sequence_logp,
)


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


class Mismatched(NamedTuple):
    """Where kto_loss takes kl from."""

    kl: float | Tensor | None
    x: Tensor | None
    y: Tensor | None
    ref_logp: Tensor | None
    ref_x: Tensor | None


def mismatched_kl(kl_logp: Tensor, kl_y: Tensor | None, kl_ref_logp: Tensor, o: Options) -> Tensor:
    live = live_tokens(kl_y, o.ignore_index)
    policy, ref = (sequence_logp(t.detach(), live, o.average_logp) for t in (kl_logp, kl_ref_logp))
    counts = torch.ones_like(policy, dtype=torch.bool) if live is None else live.any(-1)
    return mean(policy - ref, counts, None, counts.sum())


def kto_terms(
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


def _check_options(op: str, o: Options) -> None:
    check_positive(op, "beta", o.beta)
    check_least(op, "desirable_weight", o.desirable_weight)
    check_least(op, "undesirable_weight", o.undesirable_weight)


def check_logps(
    op: str, logp: Tensor, y: Tensor | None, desirable: Tensor, ref_logp: Tensor, o: Options
) -> None:
    _check_options(op, o)
    check_numbers(op, ignore_index=o.ignore_index)
    needs_y = "average_logp divides by numbers of tokens" if o.average_logp else None
    if not isinstance(ref_logp, Tensor):
        raise TypeError(f"{op}: ref_logp must be a tensor, got {type(ref_logp).__name__}")
    check_logp(op, y, needs_y, "b", logp=logp, ref_logp=ref_logp)
    _check_desirable(op, desirable, logp)
    check_count(op, "n_valid", o.n_valid, logp=logp)


def _check_desirable(op: str, desirable: Tensor, of: Tensor) -> None:
    if not isinstance(desirable, Tensor):
        raise TypeError(f"{op}: desirable must be a tensor, got {type(desirable).__name__}")
    if desirable.dtype != torch.bool:
        raise TypeError(f"{op}: desirable must hold booleans, got {desirable.dtype}")
    if desirable.shape != of.shape[:1]:
        raise ValueError(
            f"{op}: desirable must have shape {tuple(of.shape[:1])}, one for each sequence, "
            f"got {tuple(desirable.shape)}"
        )
    if desirable.device != of.device:
        raise ValueError(f"{op}: desirable is on {desirable.device} but y is on {of.device}")


def _check_point(op: str, kl: float | Tensor | None, **home: Tensor) -> None:
    """Hold a tensor to one number; a number may lie below 0, as an estimate often does."""
    if isinstance(kl, Tensor):
        check_count(op, "kl", kl, **home)
    elif kl is not None:
        check_numbers(op, kl=kl)


def check_kl(
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
    _check_point(op, kl, logp=logp)
    if kl_logp is not None:
        needs_y = "average_logp divides by numbers of tokens" if o.average_logp else None
        check_logp(op, kl_y, needs_y, "n", kl_logp=kl_logp, kl_ref_logp=kl_ref_logp)


def check_fused(
    op: str, w: Tensor, x: Tensor, y: Tensor, desirable: Tensor, b: Tensor | None, ref: Reference,
    m: Mismatched, o: Options, head: Head,
) -> None:  # fmt: skip
    """Hold the arguments of kto_loss together."""
    _check_options(op, o)
    check_sequences(op, w, x, y, b, ref, head, "b")
    if given(ref) is None:
        raise TypeError(f"{op}: ref_logp must be a tensor, got NoneType, and so is ref_w")
    _check_desirable(op, desirable, x)
    check_count(op, "n_valid", o.n_valid, x=x)
    _check_point(op, m.kl, x=x)
    rest = {"kl_y": m.y, "kl_ref_logp": m.ref_logp, "kl_ref_x": m.ref_x}
    if m.x is None:
        if m.kl is None:
            raise ValueError(f"{op}: one of kl and kl_x must be given, got nothing")
        for name, t in rest.items():
            if t is not None:
                raise ValueError(f"{op}: {name} is for kl_x, got kl")
        return
    if m.kl is not None:
        raise ValueError(f"{op}: one of kl and kl_x must be given, got both")
    if (m.ref_logp is None) == (m.ref_x is None) or (m.ref_x is not None and ref.w is None):
        raise ValueError(f"{op}: kl_x must come with kl_ref_logp, or with kl_ref_x for ref_w")
    whole = isinstance(m.ref_logp, Tensor) and m.ref_logp.dim() == 1
    check_tensors(
        op, w=(w, "v d"), kl_x=(m.x, "n t d"), kl_y=(m.y, "int n t"),
        kl_ref_logp=(m.ref_logp, f"? n{'' if whole else ' t'}"), kl_ref_x=(m.ref_x, "? n t e"),
        ref_w=(ref.w, "? u e"),
    )  # fmt: skip
