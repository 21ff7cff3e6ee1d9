"""Odds ratio preference optimisation: fine-tuning on what is chosen, and its odds over the rest.

    odds(p) = p / (1 - p)    p = exp(logp), logp a mean over tokens          logp: (2b, t), (2b,)
    loss = nll - beta * mean over pairs of log sigmoid(log(odds(p_c) / odds(p_r)))

log(1 - p) is log1p(-p) up to p = 1/2 and log(-expm1(logp)) from there (Maechler, 2012), for p up to
1 - 2**-23 (float64: 1 - 2**-52, float16: 1 - 3e-5), where its gradient ends: a token of logp 0, or
1e-7 from rounding, costs what one of that p costs. Hong, Lee and Thorne, 2024, arXiv:2403.07691.
"""

from __future__ import annotations

import math

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


def orpo_from_logp(
    logp: Tensor, y: Tensor, *, beta: float = 0.1, average_logp: bool = True,
    n_valid: float | Tensor | None = None, nll_n_valid: float | Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Negative log-likelihood of chosen tokens, and the odds of chosen over rejected sequences.

    Args:
        logp: log-probabilities per token (2b, t); rows [:b] chosen, [b:] rejected.
        y: targets (2b, t), integers, of which only ignore_index has a meaning: that token does not
            count, whatever logp holds there.
        beta: weight of the odds ratio.
        average_logp: logp of a sequence is the mean over its tokens, as in the paper; else a sum.
        n_valid: what the mean over pairs divides by instead of b: the global number under gradient
            accumulation or data parallelism.
        nll_n_valid: what the nll, a mean over all unignored chosen tokens, divides by instead.
        ignore_index: marks the tokens that do not count.

    Returns:
        float32 scalar (float64 for float64). A pair with an ignored sequence contributes nothing to
        the odds, and still counts in b.

    Raises:
        ValueError: shapes or values of options do not fit.
        TypeError: a tensor is missing or of the wrong kind.

    Example:
        >>> orpo_from_logp(torch.tensor([[-0.5], [-1.0]]), torch.zeros(2, 1, dtype=torch.int64))
        tensor(0.5320)

    Notes:
        TRL 1.16 differs: its nll is over prompt and completion, and p = 1 or an ignored sequence
        makes the batch NaN.

    References:
        Hong, Lee and Thorne, "ORPO: Monolithic Preference Optimization without Reference Model",
        2024, arXiv:2403.07691.
    """
    check_pair_options("orpo_from_logp", beta)
    check_pairs("orpo_from_logp", logp, y, ignore_index, "the nll term is a mean over tokens")
    check_counts("orpo_from_logp", logp, n_valid, nll_n_valid, True)
    return _loss(
        logp, y, n_valid, nll_n_valid, beta=beta, average_logp=average_logp,
        ignore_index=ignore_index,
    )  # fmt: skip


@algebra("orpo", together=2)
def _loss(
    logp: Tensor, y: Tensor, n_valid: float | Tensor | None, nll_n_valid: float | Tensor | None,
    *_: None, beta: float, average_logp: bool, ignore_index: int,
) -> Tensor:  # fmt: skip
    pairs = read_pairs(
        logp, y, None, ignore_index=ignore_index, average=average_logp, nll_n_valid=nll_n_valid
    )
    # a pair that does not count holds 0, which is p = 1: any other number will do there
    chosen, rejected = (torch.where(pairs.live, t, -1.0) for t in (pairs.chosen, pairs.rejected))
    # float16: its largest number bounds the gradient, 1 / (1 - p)
    eps = max(torch.finfo(chosen.dtype).eps, 2 / torch.finfo(logp.dtype).max)
    odds = chosen - rejected - (_log1mexp(chosen, eps) - _log1mexp(rejected, eps))
    return pairs.nll + beta * pair_mean(preferred(odds), pairs.live, n_valid)


def _log1mexp(x: Tensor, eps: float) -> Tensor:
    """log(1 - exp(x)) for x up to -eps."""
    x = x.clamp(max=-eps)
    small = x < -math.log(2)  # exp(x) below 1/2
    near, far = torch.where(small, -1.0, x), torch.where(small, x, -1.0)
    return torch.where(small, torch.log1p(-far.exp()), (-near.expm1()).log())


def orpo_loss(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, beta: float = 0.1, average_logp: bool = True,
    n_valid: float | Tensor | None = None, nll_n_valid: float | Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> Tensor:  # fmt: skip
    """Odds ratio preference optimisation of a head, without its logits in memory.

    Args:
        w: projection (v, d), as `torch.nn.Linear` holds it; frozen, it costs no product.
        x: activations (2b, t, d); rows [:b] chosen, [b:] rejected.
        y: target columns (2b, t), already aligned with x; ignore_index where a token does not
            count.
        b: bias (v,).
        beta: weight of the odds ratio.
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
        >>> orpo_loss(w, x, y)
        tensor(0.3260)

    References:
        Hong, Lee and Thorne, 2024, arXiv:2403.07691.
    """
    return _fused(
        "orpo_loss", w, x, y, b, beta, average_logp, n_valid, nll_n_valid,
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group),
    )[0]  # fmt: skip


def orpo_loss_with_metrics(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, beta: float = 0.1, average_logp: bool = True,
    n_valid: float | Tensor | None = None, nll_n_valid: float | Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> PairMetrics:  # fmt: skip
    """Return what `orpo_loss` does, and what one watches beside it.

    The arguments are those of `orpo_loss`.

    Returns:
        PairMetrics(loss, chosen_logp, rejected_logp, chosen_reward, rejected_reward, margin,
        accuracy, nll), scalars; all but the loss are detached.

    Raises:
        ValueError: as there.
        TypeError: as there.
    """
    loss, logp = _fused(
        "orpo_loss_with_metrics", w, x, y, b, beta, average_logp, n_valid, nll_n_valid,
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group),
    )  # fmt: skip
    pairs = read_pairs(
        logp, y, None, ignore_index=ignore_index, average=average_logp,
        nll_n_valid=nll_n_valid,
    )  # fmt: skip
    return pair_metrics(loss, pairs, beta)


def _fused(
    op: str, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, beta: float,
    average_logp: bool, n_valid: float | Tensor | None, nll_n_valid: float | Tensor | None,
    head: Head,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_pair_options(op, beta)
    check_pair_head(op, w, x, y, b, NO_REFERENCE, head)
    check_counts(op, x, n_valid, nll_n_valid, True)
    return pair_loss(
        "orpo", w, x, y, b, head, None, n_valid, nll_n_valid, beta=beta, average_logp=average_logp
    )
