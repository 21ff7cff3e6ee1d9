"""Simple preference optimisation: the mean log-probability of a token as the reward, with a margin.

    loss = mean over pairs of -log sigmoid(beta * (logp_c - logp_r) - gamma)
    gamma = gamma_beta_ratio * beta        logp a mean over tokens          logp: (2b, t), (2b,)

float32 (float64 stays float64). Meng, Xia and Chen, 2024, arXiv:2405.14734.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_fn._check import check_numbers
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
        TypeError: a tensor is missing or of the wrong kind.

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
    check_numbers("simpo_from_logp", gamma_beta_ratio=gamma_beta_ratio)
    check_pairs("simpo_from_logp", logp, y, ignore_index)
    check_counts("simpo_from_logp", logp, n_valid, None, False)
    return _loss(
        logp, y, n_valid, beta=beta, gamma_beta_ratio=gamma_beta_ratio, average_logp=average_logp,
        ignore_index=ignore_index,
    )  # fmt: skip


@algebra("simpo", together=2)
def _loss(
    logp: Tensor, y: Tensor | None, n_valid: float | Tensor | None, *_: Tensor | None,
    beta: float, gamma_beta_ratio: float, average_logp: bool, ignore_index: int,
) -> Tensor:  # fmt: skip
    pairs = read_pairs(logp, y, None, ignore_index=ignore_index, average=average_logp)
    terms = preferred(beta * (pairs.chosen - pairs.rejected - gamma_beta_ratio))
    return pair_mean(terms, pairs.live, n_valid)


def simpo_loss(
    w: Tensor, x: Tensor, y: Tensor, *, b: Tensor | None = None, beta: float = 2.0,
    gamma_beta_ratio: float = 0.5, average_logp: bool = True,
    n_valid: float | Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> Tensor:  # fmt: skip
    """Simple preference optimisation of a head, without its logits in memory.

    Args:
        w: projection (v, d), as `torch.nn.Linear` holds it; frozen, it costs no product.
        x: activations (2b, t, d); rows [:b] chosen, [b:] rejected.
        y: target columns (2b, t), already aligned with x; ignore_index where a token does not
            count.
        b: bias (v,).
        beta: scales the margin.
        gamma_beta_ratio: the margin that is wanted, before beta.
        average_logp: logp of a sequence is the mean over its tokens; else their sum.
        n_valid: what the mean over pairs divides by instead of b.
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
        >>> simpo_loss(w, x, y)
        tensor(0.3133)

    References:
        Meng, Xia and Chen, 2024, arXiv:2405.14734.
    """
    return _fused(
        "simpo_loss", w, x, y, b, beta, gamma_beta_ratio, average_logp, n_valid,
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group),
    )[0]  # fmt: skip


def simpo_loss_with_metrics(
    w: Tensor, x: Tensor, y: Tensor, *, b: Tensor | None = None, beta: float = 2.0,
    gamma_beta_ratio: float = 0.5, average_logp: bool = True,
    n_valid: float | Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> PairMetrics:  # fmt: skip
    """Return what `simpo_loss` does, and what one watches beside it.

    The arguments are those of `simpo_loss`.

    Returns:
        PairMetrics(loss, chosen_logp, rejected_logp, chosen_reward, rejected_reward, margin,
        accuracy, nll), scalars; all but the loss are detached.

    Raises:
        ValueError: as there.
        TypeError: as there.
    """
    loss, logp = _fused(
        "simpo_loss_with_metrics", w, x, y, b, beta, gamma_beta_ratio, average_logp, n_valid,
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group),
    )  # fmt: skip
    pairs = read_pairs(
        logp, y, None, ignore_index=ignore_index, average=average_logp,
    )  # fmt: skip
    return pair_metrics(loss, pairs, beta)


def _fused(
    op: str, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, beta: float,
    gamma_beta_ratio: float, average_logp: bool,
    n_valid: float | Tensor | None, head: Head,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_pair_options(op, beta)
    check_numbers(op, gamma_beta_ratio=gamma_beta_ratio)
    check_pair_head(op, w, x, y, b, NO_REFERENCE, head)
    check_counts(op, x, n_valid, None, False)
    return pair_loss(
        "simpo", w, x, y, b, head, None, n_valid, None, beta=beta,
        gamma_beta_ratio=gamma_beta_ratio, average_logp=average_logp,
    )  # fmt: skip
