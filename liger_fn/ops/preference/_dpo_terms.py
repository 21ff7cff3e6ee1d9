"""The loss of one pair under each loss_type of dpo, and which options each of them reads.

    c, r    log(p / p_ref) of the chosen and of the rejected sequence                   (b,)
    f'      derivative of the f-divergence that holds the policy, at p / p_ref
    delta   beta * (f'(c) - f'(r)), or with lengths beta * (f'(c) / n_c - f'(r) / n_r)

Papers are in the table of `dpo_from_logp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_fn._check import check_choice, check_numbers, check_positive, check_share
from liger_fn.ops._sequences import exp_capped, expm1_capped, log_sigmoid, masked, preferred
from liger_fn.ops.preference._pairs import Pairs, check_counts, check_pair_options, check_pairs

DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")


class Options(NamedTuple):
    """Options of dpo that give one pair its loss."""

    loss_type: str | Sequence[str]
    loss_weights: Sequence[float] | None
    beta: float
    label_smoothing: float
    f_divergence: str
    f_alpha: float | None
    discopop_tau: float | None
    ld_alpha: float | None
    average_logp: bool
    nll_weight: float


# functions of the options: torch 2.9 does not trace properties of a NamedTuple


def types_of(o: Options) -> tuple[str, ...]:
    """The names of the losses that are added up."""
    return (o.loss_type,) if isinstance(o.loss_type, str) else tuple(o.loss_type)


def weights_of(o: Options) -> tuple[float, ...]:
    """Their weights."""
    return (1.0,) * len(types_of(o)) if o.loss_weights is None else tuple(o.loss_weights)


def has_nll(o: Options) -> bool:
    """Whether the mean over tokens is part of the loss."""
    return o.nll_weight > 0 or "sft" in types_of(o)


class Terms(NamedTuple):
    """What the loss of a pair is made of, each (b,)."""

    c: Tensor
    r: Tensor
    delta: Tensor
    delta_by_length: Tensor
    pairs: Pairs
    o: Options


def terms_of(pairs: Pairs, o: Options) -> Terms:
    c, r = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    score_c, score_r = _score(c, o), _score(r, o)
    by_length = score_c / pairs.n_chosen - score_r / pairs.n_rejected
    return Terms(c, r, o.beta * (score_c - score_r), o.beta * by_length, pairs, o)


def _score(ratio: Tensor, o: Options) -> Tensor:
    """f'(p / p_ref) from its logarithm."""
    if o.f_divergence == "forward_kl":
        return -expm1_capped(-ratio)
    if o.f_divergence == "js":
        return math.log(2) + log_sigmoid(ratio)
    a = 0.0 if o.f_divergence != "alpha" else (0.5 if o.f_alpha is None else o.f_alpha) - 1
    return ratio if abs(a) < 1e-6 else expm1_capped(a * ratio) / a


def _robust(t: Terms) -> Tensor:
    s = t.o.label_smoothing
    return ((1 - s) * preferred(t.delta) - s * preferred(-t.delta)) / (1 - 2 * s)


def _exo_pair(t: Terms) -> Tensor:
    right, wrong = -preferred(t.delta), -preferred(-t.delta)
    s = t.o.label_smoothing
    return right.exp() * (right - math.log1p(-s)) + wrong.exp() * (wrong - math.log(s))


def _nca_pair(t: Terms) -> Tensor:
    c, r = t.o.beta * t.c, t.o.beta * t.r
    return preferred(c) + 0.5 * preferred(-c) + 0.5 * preferred(-r)


def _discopop(t: Terms) -> Tensor:
    # the exponential joins its weight inside exp: far below 0 it overflows where the weight is 0
    tau = 0.05 if t.o.discopop_tau is None else t.o.discopop_tau
    gate = t.delta / tau
    logistic = preferred(t.delta) * torch.sigmoid(-gate)
    return logistic + exp_capped(log_sigmoid(gate) - t.delta)


def _ranked(x: Tensor, live: Tensor) -> Tensor:
    """In ascending order, those that do not count last, as 0."""
    ordered = torch.where(live, x, math.inf).sort(stable=True).values
    return torch.where(_ranks(live), ordered, 0.0)


def _ranks(live: Tensor) -> Tensor:
    """Where the pairs that count stand after sorting."""
    return torch.arange(live.shape[0], device=live.device) < live.sum()


def _aot(t: Terms) -> Tensor:
    p, live = t.pairs, t.pairs.live
    policy, ref = _ranked(p.chosen - p.rejected, live), _ranked(p.ref_chosen - p.ref_rejected, live)
    return preferred(t.o.beta * (policy - ref), t.o.label_smoothing)


def _aot_unpaired(t: Terms) -> Tensor:
    live = t.pairs.live
    delta = t.o.beta * (_ranked(t.c, live) - _ranked(t.r, live))
    return preferred(delta, t.o.label_smoothing)


TERMS: dict[str, Callable[[Terms], Tensor]] = {
    "sigmoid": lambda t: preferred(t.delta, t.o.label_smoothing),
    "robust": _robust,
    "hinge": lambda t: torch.relu(1 - t.delta),
    "ipo": lambda t: ((t.delta_by_length - 0.5) / t.o.beta) ** 2,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "sppo_hard": lambda t: (t.c - 0.5 / t.o.beta) ** 2 + (t.r + 0.5 / t.o.beta) ** 2,
    "apo_zero": lambda t: torch.sigmoid(-t.o.beta * t.c) + torch.sigmoid(t.o.beta * t.r),
    "apo_down": lambda t: torch.sigmoid(t.o.beta * t.c) + torch.sigmoid(t.o.beta * (t.r - t.c)),
    "discopop": _discopop,
    "bco_pair": lambda t: preferred(t.o.beta * t.c) + preferred(-t.o.beta * t.r),
    "sigmoid_norm": lambda t: preferred(t.delta_by_length, t.o.label_smoothing),
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
}
LOSS_TYPES = (*TERMS, "sft")
SORTED = {"aot", "aot_unpaired"}
BY_LENGTH = {"ipo", "sigmoid_norm"}
# what reads an option: with other losses alone it would do nothing
_SMOOTHED = {"sigmoid", "robust", "exo_pair", "sigmoid_norm", *SORTED}
_DIVERGENT = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}


def live_terms(name: str, t: Terms) -> tuple[Tensor, Tensor]:
    """The losses of pairs, and which of them count."""
    return TERMS[name](t), _ranks(t.pairs.live) if name in SORTED else t.pairs.live


def check_options(op: str, o: Options, weighted: bool) -> None:
    """Hold the options of dpo to each other; `weighted` by WPO."""
    types = {*types_of(o)}
    check_pair_options(op, o.beta, o.label_smoothing, o.nll_weight)
    for name in types_of(o):
        check_choice(op, "loss_type", name, LOSS_TYPES)
    if not types or len(types) < len(types_of(o)):
        raise ValueError(f"{op}: loss_type must be a name or different names, got {o.loss_type!r}")
    if o.loss_weights is not None and (
        isinstance(o.loss_type, str) or len(o.loss_weights) != len(types_of(o))
    ):
        raise ValueError(
            f"{op}: loss_weights must be as many as a list loss_type has names, got "
            f"{o.loss_weights!r} for {o.loss_type!r}"
        )
    for weight in o.loss_weights or ():
        check_numbers(op, loss_weights=weight)
    check_choice(op, "f_divergence", o.f_divergence, DIVERGENCES)
    check_positive(op, "discopop_tau", o.discopop_tau, optional=True)
    if o.f_alpha is not None:
        check_numbers(op, f_alpha=o.f_alpha)
    if o.ld_alpha is not None:
        check_share(op, "ld_alpha", o.ld_alpha)
    if "exo_pair" in types and o.label_smoothing == 0:
        raise ValueError(f"{op}: label_smoothing must be above 0 with 'exo_pair', got 0")
    if "robust" in types and not o.label_smoothing < 0.5:
        raise ValueError(
            f"{op}: label_smoothing must be below 0.5 with 'robust', got {o.label_smoothing}"
        )
    _check_unused(op, o, types, weighted)


def _check_unused(op: str, o: Options, types: set[str], weighted: bool) -> None:
    pure_sft = types == {"sft"}
    pairwise = not pure_sft and types <= _DIVERGENT
    unread = {
        "label_smoothing": o.label_smoothing != 0 and not types & _SMOOTHED,
        "f_divergence": o.f_divergence != "reverse_kl" and not pairwise,
        "f_alpha": o.f_alpha is not None and o.f_divergence != "alpha",
        "discopop_tau": o.discopop_tau is not None and "discopop" not in types,
        "ld_alpha": o.ld_alpha is not None and pure_sft,
        "average_logp": o.average_logp and bool(types & BY_LENGTH or pure_sft),
        "wpo": weighted and bool(types & {*SORTED, "sft"}),
    }
    for name, bad in unread.items():
        if bad:
            beside = "f_divergence" if name == "f_alpha" else "loss_type"
            raise ValueError(f"{op}: {name} cannot be used with {beside} {getattr(o, beside)!r}")


def check_reference_use(op: str, o: Options, given: str | None) -> None:
    """Hold a call to a reference where a loss reads one, and to none where none does."""
    if given and types_of(o) == ("sft",):
        raise ValueError(f"{op}: {given} cannot be used with 'sft', which has no reference")
    if not given and types_of(o) != ("sft",):
        raise TypeError(f"{op}: ref_logp must be a tensor, got NoneType: it is for {o.loss_type!r}")


def trust_of(logp: Tensor, log_sum_sq: Tensor, live: Tensor) -> Tensor:
    """WPO: how likely the policy is to write both sequences of a pair, against its own samples."""
    aligned = masked(logp.detach(), live) - masked(log_sum_sq.detach(), live)
    chosen, rejected = (aligned.sum(-1) / live.sum(-1).clamp(min=1)).exp().tensor_split(2)
    return chosen * rejected


def check_logps(
    op: str, logp: Tensor, y: Tensor | None, ref_logp: Tensor | None, log_sum_sq: Tensor | None,
    o: Options, n_valid: float | Tensor | None, nll_n_valid: float | Tensor | None,
    ignore_index: int,
) -> None:  # fmt: skip
    """Hold the arguments of dpo_from_logp together."""
    weighted = log_sum_sq is not None
    check_options(op, o, weighted)
    reasons = {
        "'sft' is a mean over tokens": "sft" in types_of(o),
        "nll_weight weighs a mean over tokens": o.nll_weight > 0,
        "'ipo' and 'sigmoid_norm' divide by numbers of tokens": bool(BY_LENGTH & {*types_of(o)}),
        "average_logp divides by numbers of tokens": o.average_logp,
        "ld_alpha weighs tokens": o.ld_alpha is not None,
        "log_sum_sq is per token": weighted,
    }
    needs_y = next((reason for reason, holds in reasons.items() if holds), None)
    check_pairs(op, logp, y, ignore_index, needs_y, ref_logp=ref_logp, log_sum_sq=log_sum_sq)
    check_counts(op, logp, n_valid, nll_n_valid, has_nll(o), types_of(o) != ("sft",))
    check_reference_use(op, o, None if ref_logp is None else "ref_logp")
