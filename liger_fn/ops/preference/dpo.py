"""Direct preference optimisation: the policy's own log-probabilities as a reward model.

    c, r = log(p / p_ref) of chosen and rejected sequences        (b,)        logp: (2b, t), (2b,)
    loss = mean over pairs of -log sigmoid(beta * (c - r))

Other losses of one pair, by loss_type, are in `_dpo_terms`; they are algebra on log-probabilities,
in float32 (float64 stays float64), and plain torch differentiates them. Rafailov et al., 2023,
arXiv:2305.18290.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_fn.ops._collectives import Vocab
from liger_fn.ops._logp_loss import algebra, pair_logp
from liger_fn.ops._sequences import Head, Reference, given, head_logp, reference_logp
from liger_fn.ops.fused_linear_logp import fused_linear_logp_with_stats
from liger_fn.ops.preference._dpo_terms import (
    SORTED,
    Options,
    check_logps,
    check_options,
    check_reference_use,
    has_nll,
    live_terms,
    terms_of,
    trust_of,
    types_of,
    weights_of,
)
from liger_fn.ops.preference._pairs import (
    PairMetrics,
    check_counts,
    check_pair_head,
    pair_loss,
    pair_mean,
    pair_metrics,
    read_pairs,
)


def dpo_from_logp(
    logp: Tensor, y: Tensor | None = None, ref_logp: Tensor | None = None,
    log_sum_sq: Tensor | None = None, *,
    loss_type: str | Sequence[str] = "sigmoid", loss_weights: Sequence[float] | None = None,
    beta: float = 0.1, label_smoothing: float = 0.0, f_divergence: str = "reverse_kl",
    f_alpha: float | None = None, discopop_tau: float | None = None, ld_alpha: float | None = None,
    average_logp: bool = False, nll_weight: float = 0.0, n_valid: float | Tensor | None = None,
    nll_n_valid: float | Tensor | None = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Preference loss of pairs from log-probabilities of their tokens or sequences.

    With s label_smoothing, b beta, c and r the log-ratios of a pair, d = c - r, S the sigmoid:

    | loss_type | loss of a pair | paper |
    |---|---|---|
    | "sigmoid" | -(1-s) log S(b d) - s log S(-b d) | DPO, arXiv:2305.18290 |
    | "robust" | (-(1-s) log S(b d) + s log S(-b d)) / (1 - 2s) | rDPO, arXiv:2403.00409 |
    | "hinge" | max(0, 1 - b d) | SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657 |
    | "ipo" | (d' - 1/(2b))**2, d' from c and r over their numbers of tokens | arXiv:2310.12036 |
    | "exo_pair" | KL((S(b d), S(-b d)), (1-s, s)) | EXO, arXiv:2402.00856 |
    | "nca_pair" | -log S(b c) - (log S(-b c) + log S(-b r)) / 2 | NCA, arXiv:2402.05369 |
    | "sppo_hard" | (c - 1/(2b))**2 + (r + 1/(2b))**2 | SPPO, arXiv:2405.00675 |
    | "apo_zero" | 1 - S(b c) + S(b r) | APO, arXiv:2408.06266 |
    | "apo_down" | S(b c) + 1 - S(b d) | APO, arXiv:2408.06266 |
    | "discopop" | -S(-b d/tau) log S(b d) + S(b d/tau) exp(-b d) | arXiv:2406.08414 |
    | "bco_pair" | -log S(b c) - log S(-b r), shift of rewards 0 | BCO, arXiv:2404.04656 |
    | "sigmoid_norm" | "sigmoid" of d' | Tulu 3, arXiv:2411.15124 |
    | "aot" | "sigmoid" of log p_c/p_r less that of ref, each sorted | AOT, arXiv:2406.05882 |
    | "aot_unpaired" | "sigmoid" of c less r, each sorted | AOT, arXiv:2406.05882 |
    | "sft" | the nll term alone; reads no reference | RPO, arXiv:2404.19733 |

    Args:
        logp: log-probabilities per token (2b, t) beside y, or per sequence (2b,) without; rows
            [:b] chosen, [b:] rejected.
        y: targets (2b, t), integers, of which only ignore_index has a meaning: that token does not
            count, whatever the other tensors hold there.
        ref_logp: of the reference policy, not differentiated: (2b, t), or (2b,), taken as it is.
        log_sum_sq: log sum p**2 of each token (2b, t): weighs pairs by how likely the policy is to
            write them (WPO, arXiv:2406.11827); not differentiated.
        loss_type: a name from the table, or several whose losses add up.
        loss_weights: one for each name of a list; default 1.
        beta: how far the policy may leave the reference: higher is closer.
        label_smoothing: chance in [0, 1) that a pair is labelled the wrong way round.
        f_divergence: f' of the ratio takes the place of its logarithm in d: "reverse_kl",
            "forward_kl" (1 - 1/u), "js" (log(2u / (1 + u))), "alpha" ((u**(a-1) - 1) / (a - 1));
            where the loss reads d alone. f-DPO, arXiv:2309.16240.
        f_alpha: a of "alpha"; default 0.5.
        discopop_tau: tau of "discopop"; default 0.05.
        ld_alpha: weight of the tokens of a sequence past the length of the other (LD-DPO,
            arXiv:2409.06411).
        average_logp: logp of a sequence is the mean over its tokens, not their sum.
        nll_weight: of the mean of -logp over all unignored chosen tokens, which is added.
        n_valid: what the mean over pairs divides by instead of b: the global number under gradient
            accumulation or data parallelism.
        nll_n_valid: what the nll term divides by instead of the batch's own number of tokens.
        ignore_index: marks the tokens that do not count.

    Returns:
        float32 scalar (float64 for float64). A pair with an ignored sequence contributes 0 to value
        and gradient, and still counts in b. Exponents stop at 60.

    Raises:
        ValueError: shapes do not fit, or an option has no meaning beside the others.
        TypeError: a tensor is missing or of the wrong kind.

    Example:
        >>> dpo_from_logp(torch.tensor([-1.0, -3.0]), None, torch.tensor([-2.0, -2.0]), beta=0.5)
        tensor(0.3133)

    Notes:
        TRL 1.16 differs: it does not smooth "sigmoid" and "sigmoid_norm", clamps only the exponent
        of "alpha" (at 80), and lets an ignored sequence into the mean.
    """
    o = Options(
        loss_type, loss_weights, beta, label_smoothing, f_divergence, f_alpha, discopop_tau,
        ld_alpha, average_logp, nll_weight,
    )  # fmt: skip
    check_logps(
        "dpo_from_logp", logp, y, ref_logp, log_sum_sq, o, n_valid, nll_n_valid, ignore_index
    )
    return _loss(logp, y, ref_logp, log_sum_sq, o, n_valid, nll_n_valid, ignore_index)


def _loss(
    logp: Tensor, y: Tensor | None, ref_logp: Tensor | None, log_sum_sq: Tensor | None, o: Options,
    n_valid: float | Tensor | None, nll_n_valid: float | Tensor | None, ignore_index: int,
) -> Tensor:  # fmt: skip
    pairs = read_pairs(
        logp, y, ref_logp, ignore_index=ignore_index, average=o.average_logp, ld_alpha=o.ld_alpha,
        nll_n_valid=nll_n_valid,
    )  # fmt: skip
    terms, trust = terms_of(pairs, o), None
    if log_sum_sq is not None and y is not None:
        trust = trust_of(logp, log_sum_sq, y.long() != ignore_index)
    parts = [o.nll_weight * pairs.nll] if o.nll_weight > 0 else []
    for name, share in zip(types_of(o), weights_of(o), strict=True):
        if name == "sft":
            parts.append(share * pairs.nll)
            continue
        each, live = live_terms(name, terms)
        each = each if trust is None else each * trust
        parts.append(share * pair_mean(each, live, n_valid))
    return sum(parts[1:], parts[0])


def dpo_loss(
    w: Tensor, x: Tensor, y: Tensor, *, b: Tensor | None = None, ref_logp: Tensor | None = None,
    ref_w: Tensor | None = None, ref_x: Tensor | None = None, ref_b: Tensor | None = None,
    wpo: bool = False,
    loss_type: str | Sequence[str] = "sigmoid", loss_weights: Sequence[float] | None = None,
    beta: float = 0.1, label_smoothing: float = 0.0, f_divergence: str = "reverse_kl",
    f_alpha: float | None = None, discopop_tau: float | None = None, ld_alpha: float | None = None,
    average_logp: bool = False, nll_weight: float = 0.0, n_valid: float | Tensor | None = None,
    nll_n_valid: float | Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> Tensor:  # fmt: skip
    """Preference loss of pairs under a head and a frozen reference, without logits in memory.

    Args:
        w: projection (v, d), as `torch.nn.Linear` holds it; frozen, it costs no product.
        x: activations (2b, t, d); rows [:b] chosen, [b:] rejected.
        y: target columns (2b, t), already aligned with x; ignore_index where a token does not
            count.
        b: bias (v,).
        ref_logp: log-probabilities of the reference policy, (2b, t), or (2b,), taken as they are.
        ref_w: in place of ref_logp, its projection (v, e).
        ref_x: its activations (2b, t, e).
        ref_b: its bias (v,).
        wpo: weigh pairs by how likely the policy is to write them (WPO, arXiv:2406.11827).
        loss_type: a name from the table of `dpo_from_logp`, or several.
        loss_weights: one for each name of a list; default 1.
        beta: how far the policy may leave the reference: higher is closer.
        label_smoothing: chance in [0, 1) that a pair is labelled the wrong way round.
        f_divergence: "reverse_kl", "forward_kl", "js" or "alpha".
        f_alpha: a of "alpha"; default 0.5.
        discopop_tau: tau of "discopop"; default 0.05.
        ld_alpha: weight of the tokens of a sequence past the length of the other.
        average_logp: logp of a sequence is the mean over its tokens; else their sum.
        nll_weight: of the mean of -logp over all unignored chosen tokens.
        n_valid: what the mean over pairs divides by instead of b.
        nll_n_valid: what the nll term divides by instead of the batch's own number of tokens.
        temperature: divides the logits, after scale and cap.
        softcap: c of c * tanh(z / c), applied to the scaled logits.
        logit_scale: multiplies the logits first.
        ignore_index: marks the tokens that do not count.
        chunk: tokens whose logits exist at a time; default: as many as fit 1 GiB (16 MiB on a CPU).
        accum_dtype: of the sums over chunks that become the gradient of w: float32 or bfloat16.
        group: as in `fused_linear_logp`: w, b, ref_w, ref_b are this rank's shard, the rest whole.

    More of the options of pairs is with `dpo_from_logp`.

    Returns:
        float32 scalar (float64 for float64), with gradients for w, x and b. NaN where a target is
        neither in [0, v) nor ignore_index.

    Raises:
        ValueError: shapes, devices or values of options do not fit.
        TypeError: a tensor is missing or of the wrong kind.

    Example:
        >>> w, x = torch.eye(2), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> y = torch.zeros(2, 1, dtype=torch.int64)
        >>> dpo_loss(w, x, y, ref_logp=torch.zeros(2), beta=1.0)
        tensor(0.3133)

    References:
        Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward
        Model", 2023, arXiv:2305.18290.
    """
    return _fused(
        "dpo_loss", w, x, y, b, Reference(ref_logp, ref_w, ref_x, ref_b), wpo,
        Options(
            loss_type, loss_weights, beta, label_smoothing, f_divergence, f_alpha, discopop_tau,
            ld_alpha, average_logp, nll_weight,
        ),
        n_valid, nll_n_valid,
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group),
    )[0]  # fmt: skip


def dpo_loss_with_metrics(
    w: Tensor, x: Tensor, y: Tensor, *, b: Tensor | None = None, ref_logp: Tensor | None = None,
    ref_w: Tensor | None = None, ref_x: Tensor | None = None, ref_b: Tensor | None = None,
    wpo: bool = False,
    loss_type: str | Sequence[str] = "sigmoid", loss_weights: Sequence[float] | None = None,
    beta: float = 0.1, label_smoothing: float = 0.0, f_divergence: str = "reverse_kl",
    f_alpha: float | None = None, discopop_tau: float | None = None, ld_alpha: float | None = None,
    average_logp: bool = False, nll_weight: float = 0.0, n_valid: float | Tensor | None = None,
    nll_n_valid: float | Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> PairMetrics:  # fmt: skip
    """Return what `dpo_loss` does, and what one watches beside it.

    The arguments are those of `dpo_loss`.

    Returns:
        PairMetrics(loss, chosen_logp, rejected_logp, chosen_reward, rejected_reward, margin,
        accuracy, nll), scalars; all but the loss are detached.

    Raises:
        ValueError: as there.
        TypeError: as there.
    """
    loss, logp, ref_logp = _fused(
        "dpo_loss_with_metrics", w, x, y, b, Reference(ref_logp, ref_w, ref_x, ref_b), wpo,
        Options(
            loss_type, loss_weights, beta, label_smoothing, f_divergence, f_alpha, discopop_tau,
            ld_alpha, average_logp, nll_weight,
        ),
        n_valid, nll_n_valid,
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group),
    )  # fmt: skip
    pairs = read_pairs(
        logp, y, ref_logp, ignore_index=ignore_index, average=average_logp, ld_alpha=ld_alpha,
        nll_n_valid=nll_n_valid,
    )  # fmt: skip
    return pair_metrics(loss, pairs, beta)


def _fused(
    op: str, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, ref: Reference, wpo: bool,
    o: Options, n_valid: float | Tensor | None, nll_n_valid: float | Tensor | None, head: Head,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the loss, logp and ref_logp."""
    check_options(op, o, wpo)
    check_pair_head(op, w, x, y, b, ref, head)
    check_counts(op, x, n_valid, nll_n_valid, has_nll(o), types_of(o) != ("sft",))
    check_reference_use(op, o, given(ref))
    if not wpo and not SORTED & {*types_of(o)}:
        ref_logp = reference_logp(ref, y, head, pair_logp) if given(ref) else None
        loss, logp = pair_loss(
            "dpo", w, x, y, b, head, ref_logp, n_valid, nll_n_valid, **o._asdict()
        )
        return loss, logp, ref_logp
    # not a sum over pairs, or of more than their logp
    ref_logp = reference_logp(ref, y, head) if given(ref) else None
    if wpo:
        logp, _, log_sum_sq, *_ = fused_linear_logp_with_stats(w, x, y, b=b, **head._asdict())
    else:
        logp, log_sum_sq = head_logp(w, x, y, b, head), None
    loss = _loss(logp, y, ref_logp, log_sum_sq, o, n_valid, nll_n_valid, head.ignore_index)
    return loss, logp.detach(), ref_logp


@algebra("dpo", together=2)
def _of_pairs(
    logp: Tensor, y: Tensor, n_valid: Tensor, nll_n_valid: Tensor, ref_logp: Tensor | None,
    *_: None, ignore_index: int, **options: Any,
) -> Tensor:  # fmt: skip
    o = Options(**options)
    return _loss(logp, y, ref_logp, None, o, n_valid, nll_n_valid, ignore_index)
