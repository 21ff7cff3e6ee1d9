"""Linear projection and cross entropy in one: the loss of a language model head without its logits.

    z = x w^T + b                             x: (..., d)   w: (v, d)   b: (v,)   z: never in memory
    loss = sum over rows of u * (nll + z_loss * zsq), divided by the number of targets

with nll and zsq of a row as in `_ce`, u token_weight. Pullback, dz the pullback of a row (see
`cross_entropy`) with d_nll = u and d_zsq = z_loss * u:

    dx = dloss * dz w        dw = dloss * dz^T x        db = dloss * sum of dz
    du = dloss * (nll + z_loss * zsq)

A scalar loss forms dx, dw and db in its forward pass, where a chunk of logits is at hand: 3
products, and backward only scales them. Where all tokens are one chunk it keeps dz instead, and
backward forms dloss * dz w and dz^T (dloss * x). Gradients that were not formed (an outer transform
asks late), and those of nll or zsq alone, are formed in backward; so are all with reduction "none":
4 products. Sums over tokens are float32 (float64 for float64), dx, dw and db take the dtypes of x,
w and b. Memory: one chunk of logits. Chunked head with gradients in forward: Hsu et al., "Liger
Kernel", 2024, arXiv:2410.10989.
"""

from typing import Any

import torch
from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._launch import contiguous, launch, row_tile, tl, triton
from liger_fn._math import wide
from liger_fn.ops._ce import (
    CEStats,
    Row,
    check_options,
    live_weight,
    normaliser,
    reduced,
    row_losses,
    row_pullback,
)
from liger_fn.ops._ce_row import ce_pull, ce_row, ce_store_gradient
from liger_fn.ops._chunked import check_head, chunk_size
from liger_fn.ops._collectives import Vocab, check_class_weight, shard_of
from liger_fn.ops._linear_rules import ce_rows_rule, stats_rule, sum_rule
from liger_fn.ops._products import product_dtype
from liger_fn.ops._vocab_parallel import CE_SHARD

# -- reference: the row pass in plain torch; the rest is the loop of _chunked ----------------------


def _rows_ref(
    z: Tensor, y: Tensor, a: Tensor | None, e: Tensor | None, gradient: bool, *,
    class_weight: Tensor | None, row: Row,
) -> tuple[tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    nll, zsq, correct, top, logsum = row_losses(z, y, class_weight, row)
    if not gradient:
        return (nll, zsq, correct), None
    a = torch.ones_like(nll) if a is None and e is None else a
    return (nll, zsq, correct), row_pullback(a, e, z, y, class_weight, top, logsum, row)


# -- kernels: the row pass, which turns a chunk of logits into its gradient in place ---------------


@triton.jit
def _rows_kernel(
    z_ptr, dz_ptr, y_ptr, weight_ptr, weights_ptr, a_ptr, e_ptr, nll_ptr, zsq_ptr, correct_ptr, v,
    IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * v
    y = tl.load(y_ptr + row).to(tl.int64)
    nll, zsq, correct, top, logsum = ce_row(
        z_ptr, weight_ptr, v, y, IGNORE, SMOOTHING, SCALE, CAP, BLOCK
    )
    tl.store(nll_ptr + row, nll)
    tl.store(zsq_ptr + row, zsq)
    tl.store(correct_ptr + row, correct)
    if dz_ptr is not None:
        dz_ptr += row * v
        col = tl.arange(0, BLOCK)
        if y == IGNORE:
            for k in range(0, v, BLOCK):
                tl.store(dz_ptr + k + col, tl.zeros((BLOCK,), tl.float32), k + col < v)
        else:
            pull, target, spread = ce_pull(
                a_ptr, e_ptr, row, y, weight_ptr, weights_ptr, v, top + logsum, SMOOTHING
            )
            for k in range(0, v, BLOCK):
                ce_store_gradient(
                    z_ptr, dz_ptr, weight_ptr, k + col, v, y, top, logsum, pull, target, spread,
                    SMOOTHING, SCALE, CAP,
                )  # fmt: skip


def _rows_triton(
    z: Tensor, y: Tensor, a: Tensor | None, e: Tensor | None, gradient: bool, *,
    class_weight: Tensor | None, row: Row,
) -> tuple[tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    y = y.contiguous()
    nll = torch.empty_like(y, dtype=wide(z.dtype))
    zsq, correct = torch.empty_like(nll), torch.empty_like(y, dtype=torch.bool)
    weights = None if class_weight is None else class_weight.to(nll.dtype).sum()
    a = torch.ones_like(nll) if a is None and e is None else a
    launch(
        _rows_kernel, (y.numel(),), z, z if gradient else None, y, contiguous(class_weight),
        weights, contiguous(a), contiguous(e), nll, zsq, correct, z.shape[1],
        IGNORE=row.ignore_index, SMOOTHING=row.label_smoothing, SCALE=row.logit_scale, CAP=row.cap,
        **row_tile(z.shape[1]),
    )  # fmt: skip
    return (nll, zsq, correct), z if gradient else None


# -- rule ------------------------------------------------------------------------------------------

_PASSES = {"reference": _rows_ref, "triton": _rows_triton}
# of all columns, and of a shard of them
_loss = sum_rule("fused_linear_ce", _PASSES), sum_rule("fused_linear_ce_shard", CE_SHARD, True)
_stats = (
    stats_rule("fused_linear_ce_stats", _PASSES),
    stats_rule("fused_linear_ce_stats_shard", CE_SHARD, True),
)
_per_row = (
    ce_rows_rule("fused_linear_ce_rows", _PASSES),
    ce_rows_rule("fused_linear_ce_rows_shard", CE_SHARD, True),
)


def fused_linear_ce(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, chunk: int | None = None, accum_dtype: torch.dtype = torch.float32,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, class_weight: Tensor | None = None,
    token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None, group: Vocab | None = None,
) -> Tensor:  # fmt: skip
    """Cross entropy of targets `y` under softmax of x w^T + b, without the logits in memory.

    Args:
        w: projection (v, d), as `torch.nn.Linear` holds it. Frozen: no product and no buffer for
            it.
        x: activations (..., d). Frozen: no product for it.
        y: target columns (...), already aligned with x, integers; ignore_index where a row does not
            count.
        b: bias (v,).
        chunk: tokens whose logits exist at a time; default: as many as fit 1 GiB (16 MiB on a CPU).
        accum_dtype: of the sums over chunks that become dw; bfloat16 halves their memory.
        ignore_index: rows with this target have loss and gradient 0.
        label_smoothing: share in [0, 1] of the target's probability that is spread over all
            columns.
        z_loss: weight of the square of the log-normaliser.
        softcap: c of c * tanh(z / c), applied to the scaled logits.
        logit_scale: multiplies the logits first.
        class_weight: weight of each column (v,), as in torch; not differentiated.
        token_weight: weight of each row (...); differentiable; not counted by the mean.
        reduction: "mean", "sum" or "none". Only "none" computes the logits again for its gradient.
        n_valid: what the mean divides by instead of the batch's own count (with class_weight, its
            sum of target weights): the global number of targets under gradient accumulation or data
            parallelism.
        group: (process group or one-dimensional mesh, v of the whole vocabulary): w and b are this
            rank's shard of rows, cut as `torch.chunk` cuts, or, with the width of each rank's shard
            in place of v, as you please. x, y and the weights are the same on all ranks, and so are
            the results; w and b get the gradient of the shard. First derivatives only.

    Returns:
        float32 scalar (float64 for float64), or a loss per row (...) with "none". No rows, or all
        ignored: 0 with gradient 0. A target outside [0, v) that is not ignore_index: that row is
        NaN. Mixed dtypes promote; under autocast the products run in its dtype, in backward too.

    Raises:
        ValueError: shapes, devices or values of options do not fit.
        TypeError: w, x, b or weights are not floating, or y is not integer.

    Example:
        >>> w, x, y = torch.zeros(4, 2), torch.ones(3, 2), torch.tensor([0, 3, -100])
        >>> fused_linear_ce(w, x, y)
        tensor(1.3863)

    References:
        Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024,
        arXiv:2410.10989.
    """
    return _call(
        "fused_linear_ce", _loss, w, x, y, b, chunk, accum_dtype, z_loss, class_weight,
        token_weight, reduction, n_valid, Row(ignore_index, label_smoothing, logit_scale, softcap),
        group,
    ).loss  # fmt: skip


def fused_linear_ce_with_stats(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, chunk: int | None = None, accum_dtype: torch.dtype = torch.float32,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, class_weight: Tensor | None = None,
    token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None, group: Vocab | None = None,
) -> CEStats:  # fmt: skip
    """Return what `fused_linear_ce` does, its two terms, and the counts that go with them.

    The arguments are those of `fused_linear_ce`. Differentiating `loss` costs what it costs there;
    a gradient of `nll` or `z_loss` by itself runs the chunks once more.

    Returns:
        CEStats(loss, nll, z_loss, n_valid, n_correct): loss = nll + z_loss, all three reduced alike
        and differentiable; the number of targets that count and of those that are the argmax (int64
        scalars).

    Raises:
        ValueError: as there.
        TypeError: as there.

    Example:
        >>> w, x, y = torch.eye(2), torch.eye(2), torch.tensor([0, 0])
        >>> fused_linear_ce_with_stats(w, x, y).n_correct
        tensor(1)
    """
    return _call(
        "fused_linear_ce_with_stats", _stats, w, x, y, b, chunk, accum_dtype, z_loss, class_weight,
        token_weight, reduction, n_valid, Row(ignore_index, label_smoothing, logit_scale, softcap),
        group,
    )  # fmt: skip


def _call(
    op: str, rules: Any, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, chunk: int | None,
    accum_dtype: torch.dtype, z_loss: float, class_weight: Tensor | None, u: Tensor | None,
    reduction: str, n_valid: float | Tensor | None, row: Row, group: Vocab | None,
) -> CEStats:  # fmt: skip
    check_head(op, w, x, y, b, chunk, accum_dtype)
    columns, widest, shard = w.shape[0], 0, {}
    if group is None:
        check_tensors(op, w=(w, "v d"), class_weight=(class_weight, "? v"))
    else:
        place, widest = shard_of(op, group, columns, "w")
        check_class_weight(op, class_weight, place)
        columns, shard = place.vocab, place._asdict()
    check_options(op, y, columns, row, reduction, z_loss, u, n_valid)
    y, compute = y.long(), product_dtype(w, x, b)
    sharded = 0 if group is None else 1  # no bool: torch 2.11 traces no index that is one
    if sharded:
        chunk = chunk or chunk_size(widest, compute, x.device)  # alike on all ranks
    options: dict[str, Any] = {**row._asdict(), "compute": compute, "accum_dtype": accum_dtype}
    options |= {"chunk": chunk or 0, **shard}
    weight = None if class_weight is None else class_weight.detach()
    u = None if u is None else live_weight(u, y, row.ignore_index)
    a = (w, x.reshape(y.numel(), x.shape[-1]), b, y.reshape(y.numel()), weight)
    if reduction == "none":
        nll, zsq, correct = (t.view(y.shape) for t in _per_row[sharded](*a, **options))
        return reduced(nll, zsq, correct, y, weight, row, z_loss, reduction, n_valid, u)
    rule = rules[sharded]
    u = u if u is None else u.reshape(y.numel()).to(wide(compute))
    n = normaliser(y, weight, row.ignore_index, reduction, n_valid, wide(compute))
    loss, *rest = (
        (out,) if isinstance(out := rule(*a, u, z_loss=z_loss, **options), Tensor) else out
    )
    scaled = [t if n is None else t / n for t in (loss, *rest[:2])]
    if not rest:
        return CEStats(*scaled * 5)
    valid = (y != row.ignore_index).sum()
    return CEStats(scaled[0], scaled[1], z_loss * scaled[2], valid, rest[2].sum())
