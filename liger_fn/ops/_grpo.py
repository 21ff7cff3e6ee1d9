"""The algebra of grpo and its checks: terms of tokens, what their sum is divided by.

Formulas and papers are in `grpo`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from liger_fn._check import (
    check_choice,
    check_count,
    check_least,
    check_numbers,
    check_positive,
    check_tensors,
)
from liger_fn.ops._sequences import (
    Head,
    Reference,
    check_sequences,
    exp_capped,
    expm1_capped,
    given,
    live_tokens,
    masked,
    mean,
)

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*_CLIPPED, "cispo", "sapo", "vespo")
# what reads an option: with other losses it would do nothing
_READ_BY = {
    "eps_low": _CLIPPED,
    "eps_high": (*_CLIPPED, "cispo"),
    "delta": _CLIPPED,
    "sapo_temperatures": ("sapo",),
    "vespo_k": ("vespo",),
    "vespo_lambda": ("vespo",),
}


class GRPOMetrics(NamedTuple):
    """The loss of grpo, and what one watches beside it.

    All but the loss are detached means over the tokens that count (over the sequences that do, of
    what is one number for each), 0 of none.

    Attributes:
        loss: scalar, differentiable.
        kl: k3; 0 without a reference.
        entropy: of the policy's distributions.
        ratio: r.
        clip_low: share with r below 1 - eps_low where the advantage is negative; else 0.
        clip_high: share with r above 1 + eps_high ("cispo": eps_high), where it is positive.
    """

    loss: Tensor
    kl: Tensor
    entropy: Tensor
    ratio: Tensor
    clip_low: Tensor
    clip_high: Tensor


class Options(NamedTuple):
    """Options of grpo beside its tensors."""

    loss_type: str
    importance: str
    eps_low: float | None
    eps_high: float | None
    delta: float | None
    beta: float
    sapo_temperatures: tuple[float, float] | None
    vespo_k: tuple[float, float] | None
    vespo_lambda: tuple[float, float] | None
    n_valid: float | Tensor | None
    ignore_index: int


# functions of the options: torch 2.9 does not trace properties of a NamedTuple


def low_of(o: Options) -> float:
    """How far below 1 a ratio may lie."""
    return 0.2 if o.eps_low is None else o.eps_low


def high_of(o: Options) -> float:
    """How far above 1, or above 0 of cispo."""
    if o.eps_high is not None:
        return o.eps_high
    return 5.0 if o.loss_type == "cispo" else low_of(o)


class Terms(NamedTuple):
    """What becomes a loss: (b, t), or (b, 1) where it is one number for each sequence."""

    each: Tensor
    kl: Tensor
    ratio: Tensor
    advantages: Tensor
    live: Tensor


def grpo_terms(
    logp: Tensor, y: Tensor | None, advantages: Tensor, old_logp: Tensor | None,
    ref_logp: Tensor | None, o: Options,
) -> Terms:  # fmt: skip
    """The losses of tokens or sequences, and what they are made of."""
    live = live_tokens(y, o.ignore_index)
    live = torch.ones_like(logp, dtype=torch.bool) if live is None else live
    a = advantages.detach()
    a = masked(a, live) if a.dim() == 2 else masked(a, live.any(-1))[:, None]
    logp = masked(logp, live)
    # of the policy itself when it is its own old one: the difference is 0 bit for bit
    u = logp - (logp.detach() if old_logp is None else masked(old_logp.detach(), live))
    if o.importance == "sequence":
        ratio = exp_capped(u.sum(-1, keepdim=True) / live.sum(-1, keepdim=True).clamp(min=1))
    else:
        ratio = exp_capped(u)
    if ref_logp is None:
        kl = torch.zeros_like(logp)
    else:
        v = masked(ref_logp.detach(), live) - logp
        kl = expm1_capped(v) - v
    each = _policy_term(logp, u, ratio, a, live, o)
    return Terms(each + o.beta * kl if o.beta else each, kl, ratio, a, live)


def _policy_term(
    logp: Tensor, u: Tensor, ratio: Tensor, a: Tensor, live: Tensor, o: Options
) -> Tensor:
    if o.loss_type == "cispo":
        return -ratio.detach().clamp(max=high_of(o)) * a * logp
    if o.loss_type == "vespo":
        return -_vespo_weight(u.detach(), a, live, o) * a * logp
    if o.loss_type == "sapo":
        above, below = o.sapo_temperatures or (1.0, 1.05)
        t = torch.full_like(a, below).masked_fill(a > 0, above)
        return -4.0 / t * torch.sigmoid(t * (ratio - 1)) * a
    clipped = ratio.clamp(1 - low_of(o), 1 + high_of(o))
    held = ratio if o.delta is None else ratio.clamp(max=o.delta)
    return -torch.minimum(held * a, clipped * a)


def _vespo_weight(u: Tensor, a: Tensor, live: Tensor, o: Options) -> Tensor:
    """W**k exp(l (1 - W)), W the ratio of a whole sequence: of products, not of means."""
    log_w = torch.where(live, u.clamp(-20.0, 20.0), 0.0).sum(-1, keepdim=True)
    log_w = log_w.clamp(math.log(1e-8), 20.0)
    k, rate = (
        torch.full_like(a, below).masked_fill(a >= 0, above)
        for above, below in (o.vespo_k or (2.0, 3.0), o.vespo_lambda or (3.0, 2.0))
    )
    return (k * log_w - rate * torch.expm1(log_w)).exp()


def grpo_reduced(terms: Terms, o: Options) -> Tensor:
    """The loss, from its terms."""
    each, live = terms.each, terms.live
    n = grpo_count(live, o) if o.n_valid is None else o.n_valid
    if o.loss_type in ("grpo", "sapo"):
        each = masked(each, live).sum(-1) / live.sum(-1).clamp(min=1)
        return mean(each, None, n, n)
    return mean(each, live, n, n)


def grpo_count(live: Tensor, o: Options) -> float | Tensor:
    """What a loss divides by unless it is told."""
    b, t = live.shape
    own = {"grpo": b, "sapo": b, "luspo": b, "dr_grpo": b * t}
    return own[o.loss_type] if o.loss_type in own else live.sum()


def grpo_metrics(loss: Tensor, terms: Terms, entropy: Tensor, o: Options) -> GRPOMetrics:
    """The loss beside means of what one watches."""
    ratio, a, live = terms.ratio.detach(), terms.advantages, terms.live
    clips = o.loss_type in _CLIPPED
    held = ratio if o.delta is None else ratio.clamp(max=o.delta)
    low = (held < 1 - low_of(o)) & (a < 0) & clips
    high = (held > high_of(o) + clips) & (a > 0) & (clips or o.loss_type == "cispo")
    if o.importance == "sequence" and a.shape[1] == 1:
        live = live.any(-1, keepdim=True)

    def over_tokens(t: Tensor, live: Tensor) -> Tensor:
        return mean(t.to(loss.dtype).expand(live.shape), live, None, live.sum())

    ratio, low, high = (over_tokens(t, live) for t in (ratio, low, high))
    kl, entropy = (over_tokens(t.detach(), terms.live) for t in (terms.kl, entropy))
    return GRPOMetrics(loss, kl, entropy, ratio, low, high)


def check_logps(
    op: str, logp: Tensor, y: Tensor | None, advantages: Tensor, old_logp: Tensor | None,
    ref_logp: Tensor | None, o: Options,
) -> None:  # fmt: skip
    """Hold the arguments of grpo_from_logp together."""
    _check_options(op, o)
    flat = isinstance(advantages, Tensor) and advantages.dim() == 1
    check_tensors(
        op, logp=(logp, "b t"), y=(y, "? int b t"), advantages=(advantages, "b" if flat else "b t"),
        old_logp=(old_logp, "? b t"), ref_logp=(ref_logp, "? b t"),
    )  # fmt: skip
    check_count(op, "n_valid", o.n_valid, logp=logp)
    _check_reference_use(op, o, None if ref_logp is None else "ref_logp")


def _check_reference_use(op: str, o: Options, given: str | None) -> None:
    if given is not None and o.beta == 0:
        raise ValueError(f"{op}: {given} cannot be used with beta 0")
    if given is None and o.beta != 0:
        raise TypeError(f"{op}: ref_logp must be a tensor, got NoneType: beta is {o.beta}")


def _check_options(op: str, o: Options) -> None:
    check_choice(op, "loss_type", o.loss_type, LOSS_TYPES)
    check_choice(op, "importance", o.importance, ("token", "sequence"))
    for name, losses in _READ_BY.items():
        value = getattr(o, name)
        if value is not None and o.loss_type not in losses:
            raise ValueError(f"{op}: {name} cannot be used with loss_type {o.loss_type!r}")
        for number in value if isinstance(value, tuple) else (value,):
            check_positive(op, name, number, optional=value is None)
    if o.importance == "sequence" and o.loss_type == "vespo":
        raise ValueError(f"{op}: importance 'sequence' cannot be used with loss_type 'vespo'")
    check_least(op, "beta", o.beta)
    check_numbers(op, ignore_index=o.ignore_index)


def check_fused(
    op: str, w: Tensor, x: Tensor, y: Tensor, advantages: Tensor, b: Tensor | None,
    old_logp: Tensor | None, ref: Reference, o: Options, head: Head,
) -> None:  # fmt: skip
    """Hold the arguments of grpo_loss together."""
    _check_options(op, o)
    check_sequences(op, w, x, y, b, ref, head, "b")
    flat = isinstance(advantages, Tensor) and advantages.dim() == 1
    check_tensors(
        op, x=(x, "b t d"), advantages=(advantages, "b" if flat else "b t"),
        old_logp=(old_logp, "? b t"), ref_logp=(ref.logp, "? b t"),
    )  # fmt: skip
    check_count(op, "n_valid", o.n_valid, x=x)
    _check_reference_use(op, o, given(ref))
