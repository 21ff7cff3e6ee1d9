"""Simple preference optimisation: the mean log-probability of a token as the reward, with a margin.

    loss = mean over pairs of -log sigmoid(beta * (logp_c - logp_r) - gamma)
    gamma = gamma_beta_ratio * beta        logp a mean over tokens          logp: (2b, t), (2b,)

float32 (float64 stays float64). Meng, Xia and Chen, 2024, arXiv:2405.14734.
"""

from __future__ import annotations

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


def simpo_from_logp(
    logp: Tensor, y: Tensor | None = None, *, beta: float = 2.0, gamma_beta_ratio: float = 0.5,
    average_logp: bool = True, n_valid: float | Tensor | None = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Preference of chosen over rejected sequences by a margin, without a reference.

    Args:
        logp: log-probabilities per token (2b, t) beside y, or per sequence (2b,) without, which are
            taken as they are: means, for the loss of the paper; rows [:b] chosen, [b:] rejected.
        y: targets (2b, t), integers, of which only ignore_index has a meaning: that token does not
            count, whatever logp holds there.
        beta: scales the margin.
        gamma_beta_ratio: the margin that is wanted, before beta.
        average_logp: logp of a sequence is the mean over its tokens, as in the paper; else a sum.
        n_valid: what the mean over pairs divides by instead of b: the global number under gradient
            accumulation or data parallelism.
        ignore_index: marks the tokens that do not count.

    Returns:
        float32 scalar (float64 for float64). A pair with an ignored sequence contributes 0 to value
        and gradient, and still counts in b.

    Raises:
        ValueError: shapes or values of options do not fit.
        TypeError: a tensor is of the wrong kind.

    Example:
        >>> simpo_from_logp(torch.tensor([-1.0, -2.5]))
        tensor(0.1269)

    Notes:
        Equal to TRL 1.16's CPO with loss_type "simpo", simpo_gamma = gamma_beta_ratio * beta and
        cpo_alpha 0, where every sequence has a token.

    References:
        Meng, Xia and Chen, "SimPO: Simple Preference Optimization with a Reference-Free Reward",
        2024, arXiv:2405.14734.
    """
    check_pair_options("simpo_from_logp", beta)
    check_pairs("simpo_from_logp", logp, y)
    check_counts("simpo_from_logp", logp, n_valid, None, False)
    return _loss(logp, y, beta, gamma_beta_ratio, average_logp, n_valid, ignore_index)[0]


def _loss(
    logp: Tensor, y: Tensor | None, beta: float, gamma_beta_ratio: float, average_logp: bool,
    n_valid: float | Tensor | None, ignore_index: int,
) -> tuple[Tensor, Pairs]:  # fmt: skip
    pairs = read_pairs(logp, y, None, ignore_index=ignore_index, average=average_logp)
    terms = preferred(beta * (pairs.chosen - pairs.rejected - gamma_beta_ratio))
    return pair_mean(terms, pairs.live, n_valid), pairs
