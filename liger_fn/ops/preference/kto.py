"""Kahneman-Tversky optimisation: single sequences that are desirable or not, against their mean.

    r = log(p / p_ref) of a sequence        kl >= 0, detached           logp: (b, t), (b,)
    loss = mean over sequences of  weight_d * (1 - sigmoid(beta * (r - kl)))   where desirable
                                   weight_u * (1 - sigmoid(beta * (kl - r)))   elsewhere

kl estimates KL(p || p_ref) from sequences of other prompts. float32 (float64 stays float64).
Ethayarajh et al., 2024, arXiv:2402.01306.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_fn._math import wide
from liger_fn.ops._ce import divisor
from liger_fn.ops._collectives import Vocab
from liger_fn.ops._logp_loss import algebra, logp_loss, whole_logp
from liger_fn.ops._sequences import Head, Reference, head_logp, reference_logp
from liger_fn.ops.preference._kto import (
    KTOMetrics,
    Mismatched,
    Options,
    check_fused,
    check_kl,
    check_logps,
    kto_terms,
    mismatched_kl,
)


def kto_from_logp(
    logp: Tensor, y: Tensor | None, desirable: Tensor, ref_logp: Tensor, *,
    kl: float | Tensor | None = None, kl_logp: Tensor | None = None,
    kl_ref_logp: Tensor | None = None, kl_y: Tensor | None = None, beta: float = 0.1,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0, average_logp: bool = False,
    n_valid: float | Tensor | None = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Loss of single sequences, each of them desirable or not.

    Args:
        logp: log-probabilities per token (b, t) beside y, or per sequence (b,) with y None.
        y: targets (b, t), integers, of which only ignore_index has a meaning: that token does not
            count, whatever the other tensors hold there.
        desirable: whether to prefer a sequence (b,), booleans.
        ref_logp: of the reference policy, not differentiated: (b, t), or (b,), taken as it is.
        kl: the point of reference, a number or a scalar tensor; below 0 it counts as 0.
        kl_logp: in place of kl, log-probabilities of mismatched sequences, completions of other
            prompts, (n, t) beside kl_y or (n,) without: kl is the mean of their log-ratio, at least
            0. Neither is differentiated.
        kl_ref_logp: the same of the reference policy.
        kl_y: targets (n, t) of the mismatched sequences.
        beta: how far the policy may leave the reference: higher is closer.
        desirable_weight: of the loss of desirable sequences.
        undesirable_weight: of the others.
        average_logp: logp of a sequence is the mean over its tokens, not their sum.
        n_valid: what the mean over sequences divides by instead of b: the global number under
            gradient accumulation or data parallelism.
        ignore_index: marks the tokens that do not count.

    Returns:
        float32 scalar (float64 for float64). An ignored sequence contributes 0 to value and
        gradient, and still counts in b; an ignored mismatched one does not count.

    Raises:
        ValueError: shapes or values of options do not fit, or kl is given twice or not at all.
        TypeError: a tensor is missing or of the wrong kind.

    Example:
        >>> logp, ref = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0])
        >>> kto_from_logp(logp, None, torch.tensor([True, False]), ref, kl=0.0, beta=1.0)
        tensor(0.2689)

    Notes:
        Equal to TRL 1.16 with loss_type "kto" where every sequence has a token; TRL takes the mean
        of kl over processes, which is the caller's to do here.

    References:
        Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024,
        arXiv:2402.01306.
    """
    o = Options(beta, desirable_weight, undesirable_weight, average_logp, n_valid, ignore_index)
    check_logps("kto_from_logp", logp, y, desirable, ref_logp, o)
    check_kl("kto_from_logp", logp, kl, kl_logp, kl_ref_logp, kl_y, o)
    if kl_logp is not None and kl_ref_logp is not None:
        kl = mismatched_kl(kl_logp, kl_y, kl_ref_logp, o)
    return kto_terms(logp, y, desirable, ref_logp, kl, o).loss


def kto_loss(
    w: Tensor, x: Tensor, y: Tensor, desirable: Tensor, *, b: Tensor | None = None,
    ref_logp: Tensor | None = None, ref_w: Tensor | None = None, ref_x: Tensor | None = None,
    ref_b: Tensor | None = None, kl: float | Tensor | None = None, kl_x: Tensor | None = None,
    kl_y: Tensor | None = None, kl_ref_logp: Tensor | None = None, kl_ref_x: Tensor | None = None,
    beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
    average_logp: bool = False, n_valid: float | Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> Tensor:  # fmt: skip
    """Kahneman-Tversky optimisation of a head and a frozen reference, without logits in memory.

    Args:
        w: projection (v, d), as `torch.nn.Linear` holds it; frozen, it costs no product.
        x: activations (b, t, d).
        y: target columns (b, t), already aligned with x; ignore_index where a token does not count.
        desirable: whether to prefer a sequence (b,), booleans.
        b: bias (v,).
        ref_logp: log-probabilities of the reference policy, (b, t), or (b,), taken as they are.
        ref_w: in place of ref_logp, its projection (v, e).
        ref_x: its activations (b, t, e).
        ref_b: its bias (v,).
        kl: the point of reference, a number or a scalar tensor; below 0 it counts as 0.
        kl_x: in place of kl, activations of completions under other prompts (n, t, d): kl is the
            mean of their log-ratio, at least 0, not differentiated.
        kl_y: their targets (n, t).
        kl_ref_logp: their log-probabilities under the reference policy, (n, t) or (n,).
        kl_ref_x: in place of kl_ref_logp, their activations in the reference (n, t, e), for ref_w.
        beta: how far the policy may leave the reference: higher is closer.
        desirable_weight: of the loss of desirable sequences.
        undesirable_weight: of the others.
        average_logp: logp of a sequence is the mean over its tokens, not their sum.
        n_valid: what the mean over sequences divides by instead of b.
        temperature: divides the logits, after scale and cap.
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
        >>> w, x = torch.eye(2), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> y, good = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([True, False])
        >>> kto_loss(w, x, y, good, ref_logp=torch.zeros(2), kl=0.0, beta=1.0)
        tensor(0.3948)

    References:
        Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024,
        arXiv:2402.01306.
    """
    return _fused(
        "kto_loss", w, x, y, desirable, b, Reference(ref_logp, ref_w, ref_x, ref_b),
        Mismatched(kl, kl_x, kl_y, kl_ref_logp, kl_ref_x),
        Options(beta, desirable_weight, undesirable_weight, average_logp, n_valid, ignore_index),
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group),
    ).loss  # fmt: skip


def kto_loss_with_metrics(
    w: Tensor, x: Tensor, y: Tensor, desirable: Tensor, *, b: Tensor | None = None,
    ref_logp: Tensor | None = None, ref_w: Tensor | None = None, ref_x: Tensor | None = None,
    ref_b: Tensor | None = None, kl: float | Tensor | None = None, kl_x: Tensor | None = None,
    kl_y: Tensor | None = None, kl_ref_logp: Tensor | None = None, kl_ref_x: Tensor | None = None,
    beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
    average_logp: bool = False, n_valid: float | Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> KTOMetrics:  # fmt: skip
    """Return what `kto_loss` does, and what one watches beside it.

    The arguments are those of `kto_loss`.

    Returns:
        KTOMetrics(loss, kl, chosen_logp, rejected_logp, chosen_reward, rejected_reward, margin),
        scalars; all but the loss are detached.

    Raises:
        ValueError: as there.
        TypeError: as there.
    """
    return _fused(
        "kto_loss_with_metrics", w, x, y, desirable, b, Reference(ref_logp, ref_w, ref_x, ref_b),
        Mismatched(kl, kl_x, kl_y, kl_ref_logp, kl_ref_x),
        Options(beta, desirable_weight, undesirable_weight, average_logp, n_valid, ignore_index),
        Head(temperature, softcap, logit_scale, ignore_index, chunk, accum_dtype, group),
    )  # fmt: skip


def _fused(
    op: str, w: Tensor, x: Tensor, y: Tensor, desirable: Tensor, b: Tensor | None, ref: Reference,
    m: Mismatched, o: Options, head: Head,
) -> KTOMetrics:  # fmt: skip
    check_fused(op, w, x, y, desirable, b, ref, m, o, head)
    ref_logp, kl = reference_logp(ref, y, head, whole_logp), m.kl
    if m.x is not None and m.y is not None:
        policy = head_logp(w.detach(), m.x.detach(), m.y, None if b is None else b.detach(), head)
        base = reference_logp(ref._replace(logp=m.ref_logp, x=m.ref_x), m.y, head)
        kl = mismatched_kl(policy, m.y, base, o)
    n = divisor(y.shape[0] if o.n_valid is None else o.n_valid, x.device, wide(x.dtype))
    point = kl if isinstance(kl, Tensor) else x.new_full((), kl or 0.0, dtype=wide(x.dtype))
    loss, logp, _ = logp_loss(
        "kto", w, x, y, b, head, desirable, ref_logp, point.to(x.device), n,
        **{k: v for k, v in o._asdict().items() if k != "n_valid"},
    )  # fmt: skip
    return kto_terms(logp, y, desirable, ref_logp, kl, o)._replace(loss=loss)


@algebra("kto", together=1)
def _of_sequences(
    logp: Tensor, y: Tensor, desirable: Tensor, ref_logp: Tensor, kl: Tensor, n_valid: Tensor,
    **options: Any,
) -> Tensor:  # fmt: skip
    o = Options(n_valid=n_valid, **options)
    return kto_terms(logp, y, desirable, ref_logp, kl, o).loss
