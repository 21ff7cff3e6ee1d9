"""Contrastive preference optimisation: dpo without a reference, and fine-tuning on what is chosen.

    loss = mean over pairs of -log sigmoid(beta * (logp_c - logp_r)) + nll_weight * nll

logp: (2b, t) or (2b,), float32 (float64 stays float64). Xu et al., 2024, arXiv:2401.08417.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_fn.ops._collectives import Vocab
from liger_fn.ops._logp_loss import algebra
from liger_fn.ops._sequences import NO_REFERENCE, Head, preferred
from liger_fn.ops.preference._pairs import (
    PairMetrics,
    check_counts,
    check_pair_head,
    check_pair_options,
    check_pairs,
    pair_loss,
    pair_mean,
    pair_metrics,
    read_pairs,
)


def cpo_from_logp(
    logp: Tensor, y: Tensor | None = None, *, beta: float = 0.1, nll_weight: float = 1.0,
    label_smoothing: float = 0.0, average_logp: bool = False,
    n_valid: float | Tensor | None = None, nll_n_valid: float | Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Preference of chosen over rejected sequences without a reference, and the chosen ones' nll.

    Args:
        logp: log-probabilities per token (2b, t) beside y, or, with nll_weight 0, per sequence
            (2b,) without; rows [:b] chosen, [b:] rejected.
        y: targets (2b, t), integers, of which only ignore_index has a meaning: that token does not
            count, whatever logp holds there.
        beta: scales the margin.
        nll_weight: of the mean of -logp over all unignored chosen tokens.
        label_smoothing: chance in [0, 1) that a pair is labelled the wrong way round.
        average_logp: logp of a sequence is the mean over its tokens, not their sum.
        n_valid: what the mean over pairs divides by instead of b: the global number under gradient
            accumulation or data parallelism.
        nll_n_valid: what the nll term divides by instead of the batch's own number of tokens.
        ignore_index: marks the tokens that do not count.

    Returns:
        float32 scalar (float64 for float64). A pair with an ignored sequence contributes nothing to
        the preference, and still counts in b.

    Raises:
        ValueError: shapes or values of options do not fit.
        TypeError: a tensor is missing or of the wrong kind.

    Example:
        >>> cpo_from_logp(torch.tensor([-1.0, -3.0]), beta=0.5, nll_weight=0.0)
        tensor(0.3133)

    Notes:
        Equal to TRL 1.16 with loss_type "sigmoid" where every sequence has a token.

    References:
        Xu et al., "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance
        in Machine Translation", 2024, arXiv:2401.08417.
    """
    check_pair_options("cpo_from_logp", beta, label_smoothing, nll_weight)
    needs_y = "nll_weight weighs a mean over tokens" if nll_weight > 0 else None
    if average_logp:
        needs_y = "average_logp divides by numbers of tokens"
    check_pairs("cpo_from_logp", logp, y, ignore_index, needs_y)
    check_counts("cpo_from_logp", logp, n_valid, nll_n_valid, nll_weight > 0)
    return _loss(
        logp, y, n_valid, nll_n_valid, beta=beta, nll_weight=nll_weight,
        label_smoothing=label_smoothing, average_logp=average_logp, ignore_index=ignore_index,
    )  # fmt: skip


@algebra("cpo", together=2)
def _loss(
    logp: Tensor, y: Tensor | None, n_valid: float | Tensor | None,
    nll_n_valid: float | Tensor | None, *_: None,
    beta: float, nll_weight: float, label_smoothing: float, average_logp: bool, ignore_index: int,
) -> Tensor:  # fmt: skip
    pairs = read_pairs(
        logp, y, None, ignore_index=ignore_index, average=average_logp, nll_n_valid=nll_n_valid
    )
    terms = preferred(beta * (pairs.chosen - pairs.rejected), label_smoothing)
    loss = pair_mean(terms, pairs.live, n_valid)
    return loss + nll_weight * pairs.nll if nll_weight > 0 else loss


def cpo_loss(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, beta: float = 0.1, nll_weight: float = 1.0,
    label_smoothing: float = 0.0, average_logp: bool = False,
    n_valid: float | Tensor | None = None, nll_n_valid: float | Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> Tensor:  # fmt: skip
    """Contrastive preference optimisation of a head, without its logits in memory.

    Args:
        w: projection (v, d), as `torch.nn.Linear` holds it; frozen, it costs no product.
        x: activations (2b, t, d); rows [:b] chosen, [b:] rejected.
        y: target columns (2b, t), already aligned with x; ignore_index where a token does not
            count.
        b: bias (v,).
        beta: scales the margin.
        nll_weight: of the mean of -logp over all unignored chosen tokens.
        label_smoothing: chance in [0, 1) that a pair is labelled the wrong way round.
        average_logp: logp of a sequence is the mean over its tokens; else their sum.
        n_valid: what the mean over pairs divides by instead of b.
        nll_n_valid: what the nll term divides by instead of the batch's own number of tokens.
        temperature: divides the logits, after scale and cap.
        softcap: c of c * tanh(z / c), applied to the scaled logits.
        logit_scale: multiplies the logits first.
        ignore_index: marks the tokens that do not count.
        chunk: tokens whose logits exist at a time; default: as many as fit 1 GiB (16 MiB on a CPU).
        accum_dtype: of the sums over chunks that become the gradient of w: float32 or bfloat16.
        group: as in `fused_linear_logp`: w and b are this rank's shard, the rest whole.

    Returns:
        float32 scalar (float64 for float64), with gradients for w, x and b. NaN where a target is
        neither in [0, v) nor ignore_index.

    Raises:
        ValueError: shapes, devices or values of options do not fit.
        TypeError: a tensor is missing or of the wrong kind.

    Example:
        >>> w, x = torch.eye(2), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> y = torch.zeros(2, 1, dtype=torch.int64)
        >>> cpo_loss(w, x, y)
        tensor(0.9577)

    References:
        Xu et al., 2024, arXiv:2401.08417.
    """
    return _fused(
        "cpo_loss", w, x, y, b, beta, nll_weight, label_smoothing,
        average_logp, n_valid, nll_n_valid,
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group),
    )[0]  # fmt: skip


def cpo_loss_with_metrics(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, beta: float = 0.1, nll_weight: float = 1.0,
    label_smoothing: float = 0.0, average_logp: bool = False,
    n_valid: float | Tensor | None = None, nll_n_valid: float | Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> PairMetrics:  # fmt: skip
    """Return what `cpo_loss` does, and what one watches beside it.

    The arguments are those of `cpo_loss`.

    Returns:
        PairMetrics(loss, chosen_logp, rejected_logp, chosen_reward, rejected_reward, margin,
        accuracy, nll), scalars; all but the loss are detached.

    Raises:
        ValueError: as there.
        TypeError: as there.
    """
    loss, logp = _fused(
        "cpo_loss_with_metrics", w, x, y, b, beta, nll_weight, label_smoothing,
        average_logp, n_valid, nll_n_valid,
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group),
    )  # fmt: skip
    pairs = read_pairs(
        logp, y, None, ignore_index=ignore_index, average=average_logp,
        nll_n_valid=nll_n_valid,
    )  # fmt: skip
    return pair_metrics(loss, pairs, beta)


def _fused(
    op: str, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, beta: float,
    nll_weight: float, label_smoothing: float, average_logp: bool,
    n_valid: float | Tensor | None, nll_n_valid: float | Tensor | None, head: Head,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_pair_options(op, beta, label_smoothing, nll_weight)
    check_pair_head(op, w, x, y, b, NO_REFERENCE, head)
    check_counts(op, x, n_valid, nll_n_valid, nll_weight > 0)
    return pair_loss(
        "cpo", w, x, y, b, head, None, n_valid, nll_n_valid, beta=beta, nll_weight=nll_weight,
        label_smoothing=label_smoothing, average_logp=average_logp,
    )  # fmt: skip
