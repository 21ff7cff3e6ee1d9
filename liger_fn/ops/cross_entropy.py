"""Cross entropy of integer targets on logits. The loss of a row is written out in `_ce`.

    loss = sum over rows of token_weight * (nll + z_loss * zsq), divided by the number of targets

    logits: (..., v)   y: (...)   class_weight c: (v,)   token_weight: (...)   nll, zsq: (...)

Pullback of (d_nll, d_zsq), writing p = softmax(z), s = label_smoothing, A = (1 - s) * c[y]:

    dz      = d_nll * ((A + s / v * sum(c)) * p - A * onehot(y) - s / v * c)
              + d_zsq * 2 * c[y] * lse * p
    dlogits = dz * (1 - tanh(logit_scale * logits / softcap)**2) * logit_scale

The rule is one row's; weights, mean and sum are plain torch above it, so they differentiate by
themselves. Statistics and losses are float32 (float64 for float64 logits), dlogits has the dtype of
logits. z-loss: Chowdhery et al., 2022, arXiv:2204.02311; softcap: Gemma Team, 2024,
arXiv:2408.00118; label smoothing: Szegedy et al., 2015, arXiv:1512.00567.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._launch import contiguous, fresh, launch, row_tile, rows_of, tl, triton
from liger_fn._math import wide
from liger_fn._vjp import custom_vjp
from liger_fn.ops._ce import (
    CEStats,
    Row,
    check_options,
    check_rows,
    live_weight,
    reduced,
    reduced_loss,
    row_losses,
    row_pullback,
)
from liger_fn.ops._ce_row import ce_pull, ce_row, ce_store_gradient
from liger_fn.ops._collectives import Vocab, check_class_weight, shard_of
from liger_fn.ops._vocab_parallel import ce_on_shard

# -- reference: in _ce, since fused_linear_ce is the same rows -------------------------------------


def _fwd_ref(
    logits: Tensor, y: Tensor, class_weight: Tensor | None, *,
    ignore_index: int, label_smoothing: float, logit_scale: float, softcap: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    row = Row(ignore_index, label_smoothing, logit_scale, softcap)
    return row_losses(logits, y, class_weight, row)


def _bwd_ref(
    d_nll: Tensor | None, d_zsq: Tensor | None, d_correct: None,
    logits: Tensor, y: Tensor, class_weight: Tensor | None, top: Tensor, logsum: Tensor, *,
    ignore_index: int, label_smoothing: float, logit_scale: float, softcap: float | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor]:  # fmt: skip
    row = Row(ignore_index, label_smoothing, logit_scale, softcap)
    d = row_pullback(d_nll, d_zsq, logits, y, class_weight, top, logsum, row)
    return (d.to(logits.dtype),)


# -- kernels ---------------------------------------------------------------------------------------


@triton.jit
def _fwd_kernel(
    z_ptr, y_ptr, weight_ptr, nll_ptr, zsq_ptr, correct_ptr, top_ptr, logsum_ptr, v,
    IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(y_ptr + row).to(tl.int64)
    nll, zsq, correct, top, logsum = ce_row(
        z_ptr + row * v, weight_ptr, v, y, IGNORE, SMOOTHING, SCALE, CAP, BLOCK
    )
    tl.store(nll_ptr + row, nll)
    tl.store(zsq_ptr + row, zsq)
    tl.store(correct_ptr + row, correct)
    tl.store(top_ptr + row, top)
    tl.store(logsum_ptr + row, logsum)


@triton.jit
def _bwd_kernel(
    d_nll_ptr, d_zsq_ptr, z_ptr, y_ptr, weight_ptr, weights_ptr, top_ptr, logsum_ptr, dz_ptr, v,
    IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row).to(tl.int64)
    if y == IGNORE:
        tl.store(dz_ptr + row * v + col, tl.zeros((BLOCK,), tl.float32), col < v)
        return
    top, logsum = tl.load(top_ptr + row), tl.load(logsum_ptr + row)
    pull, target, spread = ce_pull(
        d_nll_ptr, d_zsq_ptr, row, y, weight_ptr, weights_ptr, v, top + logsum, SMOOTHING
    )
    ce_store_gradient(
        z_ptr + row * v, dz_ptr + row * v, weight_ptr, col, v, y, top, logsum, pull, target, spread,
        SMOOTHING, SCALE, CAP,
    )  # fmt: skip


def _fwd_triton(
    logits: Tensor, y: Tensor, class_weight: Tensor | None, *,
    ignore_index: int, label_smoothing: float, logit_scale: float, softcap: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    v = logits.shape[-1]
    z, y = rows_of(logits, v).contiguous(), y.contiguous()
    new = torch.empty_like
    nll = new(y, dtype=wide(logits.dtype))
    zsq, correct, top, logsum = new(nll), new(y, dtype=torch.bool), new(nll), new(nll)
    launch(
        _fwd_kernel, (y.numel(),), z, y, contiguous(class_weight), nll, zsq, correct, top, logsum,
        v, IGNORE=ignore_index, SMOOTHING=label_smoothing, SCALE=logit_scale, CAP=softcap or 0.0,
        **row_tile(v, 2048, 256),
    )  # fmt: skip
    return nll, zsq, correct, top, logsum


def _bwd_triton(
    d_nll: Tensor | None, d_zsq: Tensor | None, d_correct: None,
    logits: Tensor, y: Tensor, class_weight: Tensor | None, top: Tensor, logsum: Tensor, *,
    ignore_index: int, label_smoothing: float, logit_scale: float, softcap: float | None,
    wanted: tuple[bool, ...],
) -> tuple[Tensor]:  # fmt: skip
    v, tile = logits.shape[-1], row_tile(logits.shape[-1], 2048)
    z, dz = rows_of(logits, v).contiguous(), fresh(logits)
    weights = None if class_weight is None else class_weight.to(top.dtype).sum()
    rows = map(contiguous, (d_nll, d_zsq))
    launch(
        _bwd_kernel, (y.numel(), -(-v // tile["BLOCK"])), *rows, z, y.contiguous(),
        contiguous(class_weight), weights, top.contiguous(), logsum.contiguous(), dz, v,
        IGNORE=ignore_index, SMOOTHING=label_smoothing, SCALE=logit_scale, CAP=softcap or 0.0,
        **tile,
    )  # fmt: skip
    return (dz,)


# -- rule ------------------------------------------------------------------------------------------

_rows = custom_vjp(
    "cross_entropy",
    fwd={"reference": _fwd_ref, "triton": _fwd_triton},
    bwd={"reference": _bwd_ref, "triton": _bwd_triton},
    differentiable=("logits",),
    rows=("logits", "y"),
    outputs=3,
    axes="... [v], ..., [v] -> ..., ..., ..., ..., ...",
)


def cross_entropy(
    logits: Tensor, y: Tensor, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, class_weight: Tensor | None = None,
    token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None, group: Vocab | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy of targets `y` under softmax of `logits`; logits are never written to.

    Args:
        logits: unnormalised scores (..., v).
        y: target columns (...), integers; equal to ignore_index where a row does not count.
        ignore_index: rows with this target have loss and gradient 0, whatever their logits hold.
        label_smoothing: share in [0, 1] of the target's probability that is spread over all
            columns.
        z_loss: weight of the square of the log-normaliser.
        softcap: c of c * tanh(z / c), applied to the scaled logits.
        logit_scale: multiplies the logits first.
        class_weight: weight of each column (v,), as in torch; not differentiated.
        token_weight: weight of each row (...); differentiable; not counted by the mean.
        reduction: "mean", "sum" or "none".
        n_valid: what the mean divides by instead of the batch's own count (with class_weight, its
            sum of target weights): the global number of targets under gradient accumulation or data
            parallelism.
        group: (process group or one-dimensional mesh, v of the whole vocabulary): logits are this
            rank's shard of columns, cut as `torch.chunk` cuts, or, with the width of each rank's
            shard in place of v, as you please. y and the weights are the same on all ranks, and so
            are the results. One all-gather of 6 numbers a row. First derivatives only.

    Returns:
        float32 scalar (float64 for float64 logits), or a loss per row (...) with "none". No rows,
        or all ignored: 0 with gradient 0. A target outside [0, v) that is not ignore_index: that
        row is NaN.

    Raises:
        ValueError: shapes, devices or values of options do not fit.
        TypeError: logits or weights are not floating, or y is not integer.

    Example:
        >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor(1.3863)

    References:
        z-loss: Chowdhery et al., "PaLM", 2022, arXiv:2204.02311. softcap: Gemma Team, "Gemma 2",
        2024, arXiv:2408.00118. Label smoothing: Szegedy et al., 2015, arXiv:1512.00567.
    """
    row = Row(ignore_index, label_smoothing, logit_scale, softcap)
    return _call(
        "cross_entropy", reduced_loss, logits, y, row, z_loss, class_weight, token_weight,
        reduction, n_valid, group,
    )  # fmt: skip


def cross_entropy_with_stats(
    logits: Tensor, y: Tensor, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, class_weight: Tensor | None = None,
    token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None, group: Vocab | None = None,
) -> CEStats:  # fmt: skip
    """Return what `cross_entropy` does, its two terms, and the counts that go with them.

    Args:
        logits: as in `cross_entropy`, and so are all other arguments.
        y: as there.
        ignore_index: as there.
        label_smoothing: as there.
        z_loss: as there.
        softcap: as there.
        logit_scale: as there.
        class_weight: as there.
        token_weight: as there.
        reduction: as there.
        n_valid: as there.
        group: as there.

    Returns:
        CEStats(loss, nll, z_loss, n_valid, n_correct): loss = nll + z_loss, all three reduced alike
        and differentiable; the number of targets that count and of those that are the argmax (int64
        scalars).

    Raises:
        ValueError: as there.
        TypeError: as there.

    Example:
        >>> cross_entropy_with_stats(torch.eye(3), torch.tensor([0, 1, 0])).n_correct
        tensor(2)
    """
    row = Row(ignore_index, label_smoothing, logit_scale, softcap)
    return _call(
        "cross_entropy_with_stats", reduced, logits, y, row, z_loss, class_weight, token_weight,
        reduction, n_valid, group,
    )  # fmt: skip


def _call(
    op: str, reduce: Callable[..., Any], logits: Tensor, y: Tensor, row: Row, z_loss: float,
    class_weight: Tensor | None, u: Tensor | None, reduction: str, n_valid: float | Tensor | None,
    group: Vocab | None,
) -> Any:  # fmt: skip
    columns = "v" if group is None else "u"  # each rank has the weights of all columns
    check_tensors(
        op, logits=(logits, "... v"), y=(y, "int ..."), class_weight=(class_weight, f"? {columns}")
    )
    check_rows(op, y, logits=logits)
    shard = None if group is None else shard_of(op, group, logits.shape[-1], "logits")[0]
    if shard is not None:
        check_class_weight(op, class_weight, shard)
    v = logits.shape[-1] if shard is None else shard.vocab
    check_options(op, y, v, row, reduction, z_loss, u, n_valid)
    y, weight = y.long(), None if class_weight is None else class_weight.detach()
    if shard is None:
        nll, zsq, correct = _rows(logits, y, weight, **row._asdict())
    else:
        nll, zsq, correct = ce_on_shard(logits, y, weight, **row._asdict(), **shard._asdict())
    u = None if u is None else live_weight(u, y, row.ignore_index)
    return reduce(nll, zsq, correct, y, weight, row, z_loss, reduction, n_valid, u)
