"""Group relative policy optimisation and its relatives: policy gradients from sampled sequences.

    u = log(p / p_old) of a token     r = exp(u), or with importance "sequence" exp(mean of u)
    loss of a token = -min(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A) + beta * k3
    k3 = exp(v) - v - 1,    v = log(p_ref / p)                  logp: (b, t)    advantages A: (b,)

A group has no part in it: advantages come with it taken out. Without old_logp the policy is its own
old one: r is exactly 1, with the gradient of log p. float32 (float64 stays float64); masked before
any arithmetic; exponents stop at 60. Shao et al., 2024, arXiv:2402.03300; k3: Schulman, 2020.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from liger_fn._check import check_choice, check_count, check_positive, check_tensors
from liger_fn.ops._sequences import exp_capped, expm1_capped, live_tokens, masked, mean

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

    @property
    def low(self) -> float:
        """What lies below 1."""
        return 0.2 if self.eps_low is None else self.eps_low

    @property
    def high(self) -> float:
        """What lies above 1, or above 0 of cispo."""
        if self.eps_high is not None:
            return self.eps_high
        return 5.0 if self.loss_type == "cispo" else self.low


class Terms(NamedTuple):
    """What becomes a loss: `each` and `kl` of tokens; `ratio` of tokens, or (b, 1)."""

    each: Tensor
    kl: Tensor
    ratio: Tensor
    advantages: Tensor
    live: Tensor


def grpo_from_logp(
    logp: Tensor, y: Tensor | None, advantages: Tensor, *, old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None, loss_type: str = "grpo", importance: str = "token",
    eps_low: float | None = None, eps_high: float | None = None, delta: float | None = None,
    beta: float = 0.0, sapo_temperatures: tuple[float, float] | None = None,
    vespo_k: tuple[float, float] | None = None, vespo_lambda: tuple[float, float] | None = None,
    n_valid: float | Tensor | None = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Policy gradient loss of sampled sequences from log-probabilities of their tokens.

    With r the ratio, A the advantage, C = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), n the
    tokens of a sequence and N of the batch that count:

    | loss_type | of a token | sum over tokens divided by | paper |
    |---|---|---|---|
    | "grpo" | C | b n | arXiv:2402.03300; GSPO, arXiv:2507.18071 with importance "sequence" |
    | "bnpo" | C | N | BNPO, arXiv:2506.02864, its normalisation alone |
    | "dapo" | C | N | DAPO, arXiv:2503.14476 |
    | "dr_grpo" | C | b t | Dr. GRPO, arXiv:2503.20783 |
    | "luspo" | C | b | LUSPO, arXiv:2602.05261, which has importance "sequence" |
    | "cispo" | -stop(min(r, eps_high)) A log p | N | arXiv:2506.13585, arXiv:2510.13786 |
    | "sapo" | -4/T sigmoid(T (r - 1)) A | b n | SAPO, arXiv:2511.20347 |
    | "vespo" | -stop(W**k exp(l (1 - W))) A log p, W of a sequence | N | arXiv:2602.10693 |

    Args:
        logp: log-probabilities of the tokens under the policy (b, t).
        y: targets (b, t), integers, of which only ignore_index has a meaning: that token does not
            count, whatever the other tensors hold there; None: all count.
        advantages: of sequences (b,) or of tokens (b, t); not differentiated.
        old_logp: of the policy that sampled (b, t), not differentiated; None: this one.
        ref_logp: of the reference policy (b, t), not differentiated; where beta is not 0.
        loss_type: a name from the table.
        importance: "token", or "sequence": one ratio for each sequence, the exponential of the mean
            over its tokens. "vespo" has its own.
        eps_low: r is clipped below 1 - eps_low; default 0.2.
        eps_high: r is clipped above 1 + eps_high, default eps_low; "cispo": above eps_high, default
            5 (in arXiv:2506.13585's notation 1 + eps_high).
        delta: r is at most delta also where the advantage is negative (arXiv:2505.07291).
        beta: weight of k3, the estimate of KL(p || p_ref), which is added to each token.
        sapo_temperatures: T where A > 0, and elsewhere; default (1.0, 1.05).
        vespo_k: k where A >= 0, and elsewhere; default (2.0, 3.0).
        vespo_lambda: l where A >= 0, and elsewhere; default (3.0, 2.0).
        n_valid: replaces b in "grpo", "sapo" and "luspo", b t in "dr_grpo" (the paper: b times the
            longest completion allowed), N elsewhere: the global number under gradient accumulation
            or data parallelism.
        ignore_index: marks the tokens that do not count.

    Returns:
        float32 scalar (float64 for float64). An ignored sequence contributes 0 to value and
        gradient, and still counts in b.

    Raises:
        ValueError: shapes do not fit, or an option has no meaning beside the others.
        TypeError: a tensor is of the wrong kind.

    Example:
        >>> logp, y = torch.tensor([[-1.0, -2.0]]), torch.tensor([[3, -100]])
        >>> grpo_from_logp(logp, y, torch.tensor([0.5]), old_logp=logp - 1.0)
        tensor(-0.6000)

    Notes:
        Equal to TRL 1.16 without its vLLM and entropy corrections, but: exponents stop at 60 (k3
        and r are finite), eps_high of "cispo" defaults to 5, "dr_grpo" divides by t. As there, W of
        "vespo" comes from ratios clipped to exp(+-20), and lies in [1e-8, exp(20)].
    """
    o = Options(
        loss_type, importance, eps_low, eps_high, delta, beta, sapo_temperatures, vespo_k,
        vespo_lambda, n_valid, ignore_index,
    )  # fmt: skip
    _check("grpo_from_logp", logp, y, advantages, old_logp, ref_logp, o)
    return _reduce(_terms(logp, y, advantages, old_logp, ref_logp, o), o)


def _terms(
    logp: Tensor, y: Tensor | None, advantages: Tensor, old_logp: Tensor | None,
    ref_logp: Tensor | None, o: Options,
) -> Terms:  # fmt: skip
    live = live_tokens(y, o.ignore_index)
    live = torch.ones_like(logp, dtype=torch.bool) if live is None else live
    a = advantages.detach()
    a = masked(a[:, None] if a.dim() == 1 else a, live)
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
        return -ratio.detach().clamp(max=o.high) * a * logp
    if o.loss_type == "vespo":
        return -_vespo_weight(u.detach(), a, live, o) * a * logp
    if o.loss_type == "sapo":
        above, below = o.sapo_temperatures or (1.0, 1.05)
        t = torch.full_like(a, below).masked_fill(a > 0, above)
        return -4.0 / t * torch.sigmoid(t * (ratio - 1)) * a
    clipped = ratio.clamp(1 - o.low, 1 + o.high)
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


def _reduce(terms: Terms, o: Options) -> Tensor:
    each, live = terms.each, terms.live
    b, n = each.shape[0], live.sum(-1)
    if o.loss_type in ("grpo", "sapo"):
        each = masked(each, live).sum(-1) / n.clamp(min=1)
        return mean(each, None, o.n_valid, b)
    whole = {"dr_grpo": b * each.shape[1], "luspo": b}.get(o.loss_type, n.sum())
    return mean(each, live, o.n_valid, whole)


def _check(
    op: str, logp: Tensor, y: Tensor | None, advantages: Tensor, old_logp: Tensor | None,
    ref_logp: Tensor | None, o: Options,
) -> None:  # fmt: skip
    check_options(op, o)
    flat = isinstance(advantages, Tensor) and advantages.dim() == 1
    check_tensors(
        op, logp=(logp, "b t"), y=(y, "? int b t"), advantages=(advantages, "b" if flat else "b t"),
        old_logp=(old_logp, "? b t"), ref_logp=(ref_logp, "? b t"),
    )  # fmt: skip
    check_count(op, "n_valid", o.n_valid, logp=logp)
    check_reference_use(op, o, ref_logp is not None, "ref_logp")


def check_reference_use(op: str, o: Options, given: bool, name: str) -> None:
    """Hold a call to a reference where beta asks for one, and to none where it does not."""
    if given != (o.beta != 0):
        raise ValueError(
            f"{op}: {name} {'cannot' if given else 'must'} be given with beta {o.beta}"
        )


def check_options(op: str, o: Options) -> None:
    """Hold the options of grpo to each other."""
    check_choice(op, "loss_type", o.loss_type, LOSS_TYPES)
    check_choice(op, "importance", o.importance, ("token", "sequence"))
    for name, losses in _READ_BY.items():
        value = getattr(o, name)
        if value is not None and o.loss_type not in losses:
            raise ValueError(f"{op}: {name} cannot be used with loss_type {o.loss_type!r}")
        for number in value if isinstance(value, tuple) else (value,):
            check_positive(op, name, number)
    if o.importance == "sequence" and o.loss_type == "vespo":
        raise ValueError(f"{op}: importance 'sequence' cannot be used with loss_type 'vespo'")
    if not o.beta >= 0:
        raise ValueError(f"{op}: beta must be at least 0, got {o.beta}")
