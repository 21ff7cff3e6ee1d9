"""Group relative policy optimisation and its relatives: policy gradients from sampled sequences.

    u = log(p / p_old) of a token     r = exp(u), or with importance "sequence" exp(mean of u)
    loss of a token = -min(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A) + beta * k3
    k3 = exp(v) - v - 1,    v = log(p_ref / p)                  logp: (b, t)    advantages A: (b,)

A group has no part in it: advantages come with it taken out. Without old_logp the policy is its own
old one: r is exactly 1, with the gradient of log p. float32 (float64 stays float64); masked before
any arithmetic; exponents stop at 60. Shao et al., 2024, arXiv:2402.03300; k3: Schulman, 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_fn._math import wide
from liger_fn.ops._ce import divisor
from liger_fn.ops._collectives import Vocab
from liger_fn.ops._grpo import (
    GRPOMetrics,
    Options,
    check_fused,
    check_logps,
    grpo_count,
    grpo_metrics,
    grpo_reduced,
    grpo_terms,
)
from liger_fn.ops._logp_loss import algebra, logp_loss, whole_logp
from liger_fn.ops._sequences import Head, Reference, given, reference_logp


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
        TypeError: a tensor is missing or of the wrong kind.

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
    check_logps("grpo_from_logp", logp, y, advantages, old_logp, ref_logp, o)
    return grpo_reduced(grpo_terms(logp, y, advantages, old_logp, ref_logp, o), o)


def grpo_loss(
    w: Tensor, x: Tensor, y: Tensor, advantages: Tensor, *, b: Tensor | None = None,
    old_logp: Tensor | None = None, ref_logp: Tensor | None = None, ref_w: Tensor | None = None,
    ref_x: Tensor | None = None, ref_b: Tensor | None = None, loss_type: str = "grpo",
    importance: str = "token", eps_low: float | None = None, eps_high: float | None = None,
    delta: float | None = None, beta: float = 0.0,
    sapo_temperatures: tuple[float, float] | None = None,
    vespo_k: tuple[float, float] | None = None, vespo_lambda: tuple[float, float] | None = None,
    n_valid: float | Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> Tensor:  # fmt: skip
    """Policy gradient loss of sampled sequences under a head, without its logits in memory.

    Args:
        w: projection (v, d), as `torch.nn.Linear` holds it; frozen, it costs no product.
        x: activations (b, t, d).
        y: sampled columns (b, t), already aligned with x; ignore_index where a token does not
            count.
        advantages: of sequences (b,) or of tokens (b, t); not differentiated.
        b: bias (v,).
        old_logp: of the policy that sampled (b, t), at the same temperature; None: this one.
        ref_logp: log-probabilities of the reference policy (b, t), at the same temperature.
        ref_w: in place of ref_logp, its projection (v, e).
        ref_x: its activations (b, t, e).
        ref_b: its bias (v,).
        loss_type: a name from the table of `grpo_from_logp`.
        importance: "token", or "sequence": one ratio for each sequence.
        eps_low: the ratio is clipped below 1 - eps_low; default 0.2.
        eps_high: the ratio is clipped above 1 + eps_high; "cispo": above eps_high.
        delta: the ratio is at most delta also where the advantage is negative.
        beta: weight of the estimate of KL(p || p_ref).
        sapo_temperatures: T where A > 0, and elsewhere; default (1.0, 1.05).
        vespo_k: k where A >= 0, and elsewhere; default (2.0, 3.0).
        vespo_lambda: l where A >= 0, and elsewhere; default (3.0, 2.0).
        n_valid: replaces the batch's own number that the loss_type divides by.
        temperature: divides the logits, after scale and cap: that of sampling.
        softcap: c of c * tanh(z / c), applied to the scaled logits.
        logit_scale: multiplies the logits first.
        ignore_index: marks the tokens that do not count.
        chunk: tokens whose logits exist at a time; default: as many as fit 1 GiB (16 MiB on a CPU).
        accum_dtype: of the sums over chunks that become the gradient of w: float32 or bfloat16.
        group: as in `fused_linear_logp`: w, b, ref_w, ref_b are this rank's shard, the rest whole.

    Returns:
        float32 scalar (float64 for float64), with gradients for w, x and b. NaN where a target is
        neither in [0, v) nor ignore_index.

    Raises:
        ValueError: shapes, devices or values of options do not fit.
        TypeError: a tensor is missing or of the wrong kind.

    Example:
        >>> w, x, y = torch.eye(2), torch.zeros(2, 1, 2), torch.tensor([[0], [1]])
        >>> old = torch.tensor([[-0.6931], [-1.6931]])
        >>> grpo_loss(w, x, y, torch.tensor([1.0, 1.0]), old_logp=old)
        tensor(-1.1000)

    References:
        Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300.
    """
    return _fused(
        "grpo_loss", w, x, y, advantages, b, old_logp,
        Reference(ref_logp, ref_w, ref_x, ref_b),
        Options(
            loss_type, importance, eps_low, eps_high, delta, beta, sapo_temperatures, vespo_k,
            vespo_lambda, n_valid, ignore_index,
        ),
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group), False,
    )[0]  # fmt: skip


def grpo_loss_with_metrics(
    w: Tensor, x: Tensor, y: Tensor, advantages: Tensor, *, b: Tensor | None = None,
    old_logp: Tensor | None = None, ref_logp: Tensor | None = None, ref_w: Tensor | None = None,
    ref_x: Tensor | None = None, ref_b: Tensor | None = None, loss_type: str = "grpo",
    importance: str = "token", eps_low: float | None = None, eps_high: float | None = None,
    delta: float | None = None, beta: float = 0.0,
    sapo_temperatures: tuple[float, float] | None = None,
    vespo_k: tuple[float, float] | None = None, vespo_lambda: tuple[float, float] | None = None,
    n_valid: float | Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> GRPOMetrics:  # fmt: skip
    """Return what `grpo_loss` does, and what one watches beside it.

    The arguments are those of `grpo_loss`.

    Returns:
        GRPOMetrics(loss, kl, entropy, ratio, clip_low, clip_high), scalars; all but the loss are
        detached.

    Raises:
        ValueError: as there.
        TypeError: as there.
    """
    o = Options(
        loss_type, importance, eps_low, eps_high, delta, beta, sapo_temperatures, vespo_k,
        vespo_lambda, n_valid, ignore_index,
    )  # fmt: skip
    loss, logp, entropy, ref_logp = _fused(
        "grpo_loss_with_metrics", w, x, y, advantages, b, old_logp,
        Reference(ref_logp, ref_w, ref_x, ref_b), o,
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group), True,
    )  # fmt: skip
    terms = grpo_terms(logp, y, advantages, old_logp, ref_logp, o)
    return grpo_metrics(loss, terms, entropy, o)


def _fused(
    op: str, w: Tensor, x: Tensor, y: Tensor, advantages: Tensor, b: Tensor | None,
    old_logp: Tensor | None, ref: Reference, o: Options, head: Head, entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The loss, then logp, entropy and logp of the reference, without gradients."""
    check_fused(op, w, x, y, advantages, b, old_logp, ref, o, head)
    ref_logp = reference_logp(ref, y, head, whole_logp) if given(ref) else None
    n = grpo_count(y.long() != o.ignore_index, o) if o.n_valid is None else o.n_valid
    options = o._asdict()
    del options["n_valid"]
    found = logp_loss(
        "grpo", w, x, y, b, head, advantages, old_logp, ref_logp,
        divisor(n, x.device, wide(x.dtype)), entropy=entropy, **options,
    )  # fmt: skip
    return *found, ref_logp


@algebra("grpo", together=1)
def _loss(
    logp: Tensor, y: Tensor, advantages: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None,
    n_valid: Tensor, **options: Any,
) -> Tensor:  # fmt: skip
    o = Options(n_valid=n_valid, **options)
    return grpo_reduced(grpo_terms(logp, y, advantages, old_logp, ref_logp, o), o)
