"""Odds ratio preference optimisation: fine-tuning on what is chosen, and its odds over the rest.

    odds(p) = p / (1 - p)    p = exp(logp), logp a mean over tokens          logp: (2b, t), (2b,)
    loss = nll - beta * mean over pairs of log sigmoid(log(odds(p_c) / odds(p_r)))

log(1 - p) is log1p(-p) up to p = 1/2 and log(-expm1(logp)) from there (Maechler, 2012), for p up to
1 - 2**-23 (float64: 1 - 2**-52), where its gradient ends: a token of logp 0, or 1e-7 from rounding,
costs what one of that p costs. Hong, Lee and Thorne, 2024, arXiv:2403.07691.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_fn.ops._sequences import preferred
from liger_fn.ops.preference._pairs import (
    Pairs,
    check_counts,
    check_pair_options,
    check_pairs,
    pair_mean,
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
        TypeError: a tensor is of the wrong kind.

    Example:
        >>> orpo_from_logp(torch.tensor([[-0.5], [-1.0]]), torch.zeros(2, 1, dtype=torch.int64))
        tensor(0.5271)

    Notes:
        TRL 1.16 differs: its nll is over prompt and completion (leave the prompt unignored in y for
        that term alone), and p = 1 or an ignored sequence makes the batch NaN.

    References:
        Hong, Lee and Thorne, "ORPO: Monolithic Preference Optimization without Reference Model",
        2024, arXiv:2403.07691.
    """
    check_pair_options("orpo_from_logp", beta)
    check_pairs("orpo_from_logp", logp, y, "the nll term is a mean over tokens")
    check_counts("orpo_from_logp", logp, n_valid, nll_n_valid, True)
    return _loss(logp, y, beta, average_logp, n_valid, nll_n_valid, ignore_index)[0]


def _loss(
    logp: Tensor, y: Tensor, beta: float, average_logp: bool, n_valid: float | Tensor | None,
    nll_n_valid: float | Tensor | None, ignore_index: int,
) -> tuple[Tensor, Pairs]:  # fmt: skip
    pairs = read_pairs(
        logp, y, None, ignore_index=ignore_index, average=average_logp, nll_n_valid=nll_n_valid
    )
    # a pair that does not count holds 0, which is p = 1: any other number will do there
    chosen, rejected = (torch.where(pairs.live, t, -1.0) for t in (pairs.chosen, pairs.rejected))
    odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return pairs.nll + beta * pair_mean(preferred(odds), pairs.live, n_valid), pairs


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x))."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    small = x < -math.log(2)  # exp(x) below 1/2
    near, far = torch.where(small, -1.0, x), torch.where(small, x, -1.0)
    return torch.where(small, torch.log1p(-far.exp()), (-near.expm1()).log())
