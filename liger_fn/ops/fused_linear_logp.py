"""Log-probabilities of targets under a language model head, without its logits in memory.

    z = softcap * tanh(logit_scale * (x w^T + b) / softcap) / temperature    x: (..., d)  w: (v, d)
    p = exp(z - lse), lse = log(sum(exp(z)))                                 y, results: (...)

    logp = z[y] - lse      entropy = -sum(p * log p)      log_sum_sq = log(sum(p**2))
    mean_logit = mean(z)   is_top1: y is the argmax

Pullback of one cotangent for each, d_logp, d_entropy, d_log_sum_sq, d_mean_logit:

    dz = d_logp * (onehot(y) - p) - d_entropy * p * (log p + entropy)
         + d_log_sum_sq * 2 * (p**2 / sum(p**2) - p) + d_mean_logit / v

then back through temperature, cap and scale; dx = dz w, dw = dz^T x, db = sum of dz. Only z[y] and
sums over columns leave a chunk; backward forms the logits again: 4 products. Logits that take about
what the float32 sums of dw over chunks would (`plan`) are held for it instead: 3 products, and dz
exists a block of columns at a time, so that dw needs no sums. Statistics and results are float32
(float64 for float64), gradients take the dtypes of w, x and b. Sums over a row are taken on line
(Milakov and Gimelshein, 2018, arXiv:1805.02867), in one pass over its logits.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_fn._check import check_numbers, check_positive
from liger_fn.ops._ce import Row
from liger_fn.ops._chunked import Rows, check_head, chunk_size, plan
from liger_fn.ops._collectives import Shard, Vocab, shard_of
from liger_fn.ops._linear_rules import is_kept, primal_dtypes, rows_rule
from liger_fn.ops._logp import LOGP_PASSES, logp_loop
from liger_fn.ops._products import held_products, product_dtype
from liger_fn.ops._vocab_parallel import LOGP_SHARD, logp_rows


class LogpStats(NamedTuple):
    """What one pass over the logits tells of each token. All but is_top1 are differentiable."""

    logp: Tensor
    entropy: Tensor
    log_sum_sq: Tensor
    mean_logit: Tensor
    is_top1: Tensor


_BLOCKS = 16  # of columns, whose gradient exists at a time where logits are held


# -- rule ------------------------------------------------------------------------------------------


def _fwd(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, *,
    ignore_index: int, logit_scale: float, softcap: float | None, temperature: float, chunk: int,
    compute: torch.dtype, accum_dtype: torch.dtype, wanted: tuple[bool, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    hold = plan(x.shape[0], w, 1, chunk, compute, accum_dtype, wanted[0])[2]
    found, z, *_ = logp_loop(
        rows, w, x, b, y, (), (False,) * 3, ignore_index=ignore_index, logit_scale=logit_scale,
        softcap=softcap, temperature=temperature, chunk=chunk, compute=compute,
        accum_dtype=accum_dtype, hold=hold,
    )  # fmt: skip
    return *found, found[0].new_empty(0) if z is None else z


def _pull(
    rows: Rows, ds: tuple[Tensor | None, ...], w: Tensor, x: Tensor, b: Tensor | None, y: Tensor,
    z: Tensor, wanted: tuple[bool, ...], **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if not is_kept(z.shape):
        return primal_dtypes(logp_loop(rows, w, x, b, y, ds, wanted, **options)[1:], w, x, b)
    row = Row(options["ignore_index"], 0.0, options["logit_scale"], options["softcap"])
    size = max(128, -(-w.shape[0] // (128 * _BLOCKS)) * 128)
    how: dict[str, Any] = {"row": row, "temperature": options["temperature"], "columns": size}
    blocks: Any = rows(z.view(y.numel(), -1), y, *ds, True, **how)[1]
    live = y != row.ignore_index
    return primal_dtypes(held_products(blocks, w, x, live, options["compute"], wanted), w, x, b)


def _logp_bwd(
    rows: Rows, d_logp: Tensor, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, z: Tensor, *,
    wanted: tuple[bool, ...], **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _pull(rows, (d_logp,), w, x, b, y, z, wanted, **options)


def _stats_bwd(
    rows: Rows, d_logp: Tensor | None, d_entropy: Tensor | None, d_sum_sq: Tensor | None,
    d_mean: Tensor | None, d_top1: None, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor,
    z: Tensor, *, wanted: tuple[bool, ...], **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _pull(rows, (d_logp, d_entropy, d_sum_sq, d_mean), w, x, b, y, z, wanted, **options)


def _rows(
    backend: Any, z: Tensor, y: Tensor, *cotangents: Any, columns: int = 0, **how: Any
) -> tuple[tuple[Tensor, ...], Any]:
    """The row pass; of logits that are held dz comes in blocks of columns."""
    if columns and backend == "triton":
        every = Shard(None, 0, z.shape[1])
        return logp_rows(backend, z, y, *cotangents, shard=every, columns=columns, **how)
    found, dz = LOGP_PASSES[backend](z, y, *cotangents, **how)
    return found, [(slice(None), dz)] if columns else dz


def _rules(name: str, bwd: Any, *, stats: bool, floats: int) -> tuple[Any, Any]:
    """Of all columns, and of a shard of them."""
    kinds: dict[str, Any] = {"floats": floats, "flag": stats, "held": True}
    own: dict[Any, Rows] = {kind: partial(_rows, kind, stats=stats) for kind in LOGP_PASSES}
    shard: dict[Any, Rows] = {kind: partial(f, stats=stats) for kind, f in LOGP_SHARD.items()}
    return (
        rows_rule(name, own, _fwd, bwd, **kinds),
        rows_rule(f"{name}_shard", shard, _fwd, bwd, **kinds, shard=True),
    )


_logp = _rules("fused_linear_logp", _logp_bwd, stats=False, floats=1)
_stats = _rules("fused_linear_logp_stats", _stats_bwd, stats=True, floats=4)


def fused_linear_logp(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> Tensor:  # fmt: skip
    """Log-probability of each target `y` under softmax of x w^T + b, without the logits in memory.

    Args:
        w: projection (v, d), as `torch.nn.Linear` holds it. Frozen: no product and no buffer for
            it.
        x: activations (..., d). Frozen: no product for it.
        y: target columns (...), already aligned with x, integers; ignore_index where a row does not
            count.
        b: bias (v,).
        temperature: divides the logits, after scale and cap.
        softcap: c of c * tanh(z / c), applied to the scaled logits.
        logit_scale: multiplies the logits first.
        ignore_index: rows with this target have log-probability and gradient 0, whatever x holds.
        chunk: tokens whose logits exist at a time; default: as many as fit 1 GiB (16 MiB on a CPU),
            or all where they take about what sums over chunks for the gradient of w would. Logits
            of a single chunk are held for backward if w has a gradient.
        accum_dtype: of the sums over chunks that become the gradient of w: float32 or bfloat16.
        group: (process group or one-dimensional mesh, v of the whole vocabulary): w and b are this
            rank's shard of rows, cut as `torch.chunk` cuts, or, with the width of each rank's shard
            in place of v, as you please. x and y are the same on all ranks, and so are the results;
            w and b get the gradient of the shard. First derivatives in reverse mode only.

    Returns:
        float32 (float64 for float64) log-probabilities (...), at most 0. A target outside [0, v)
        that is not ignore_index: NaN. Mixed dtypes promote; under autocast the products run in its
        dtype, in backward too.

    Raises:
        ValueError: shapes, devices or values of options do not fit.
        TypeError: w, x or b is not floating, or y is not integer.

    Example:
        >>> fused_linear_logp(torch.zeros(4, 2), torch.ones(2, 2), torch.tensor([3, -100]))
        tensor([-1.3863,  0.0000])

    References:
        Chunked head: Hsu et al., "Liger Kernel", 2024, arXiv:2410.10989. The fields of its
        `_with_stats` are those of the fused head of TRL 1.16 (Hugging Face).
    """
    return _call(
        "fused_linear_logp", _logp, w, x, y, b, temperature, softcap, logit_scale, ignore_index,
        chunk, accum_dtype, group,
    )[0]  # fmt: skip


def fused_linear_logp_with_stats(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, group: Vocab | None = None,
) -> LogpStats:  # fmt: skip
    """Return what `fused_linear_logp` does and more of each token, from the same pass.

    The arguments are those of `fused_linear_logp`.

    Returns:
        LogpStats(logp, entropy, log_sum_sq, mean_logit, is_top1), each (...): log p(y),
        -sum p log p, log sum p**2, the mean of the logits after scale, cap and temperature, and
        whether y is the first of the largest (bool). The first four are differentiable. 0 and False
        where ignored.

    Raises:
        ValueError: as there.
        TypeError: as there.

    Example:
        >>> fused_linear_logp_with_stats(torch.eye(2), torch.zeros(1, 2), torch.tensor([1])).entropy
        tensor([0.6931])
    """
    return LogpStats(*_call(
        "fused_linear_logp_with_stats", _stats, w, x, y, b, temperature, softcap, logit_scale,
        ignore_index, chunk, accum_dtype, group,
    ))  # fmt: skip


def _call(
    op: str, rules: tuple[Any, Any], w: Tensor, x: Tensor, y: Tensor, b: Tensor | None,
    temperature: float, softcap: float | None, logit_scale: float, ignore_index: int,
    chunk: int | None, accum_dtype: torch.dtype, group: Vocab | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_head(op, w, x, y, b, chunk, accum_dtype)
    widest, shard = w.shape[0], {}
    if group is not None:
        place, widest = shard_of(op, group, widest, "w")
        shard = place._asdict()
    if widest == 0:
        raise ValueError(f"{op}: axis v must not be empty")
    check_numbers(op, logit_scale=logit_scale, ignore_index=ignore_index)
    check_positive(op, "temperature", temperature)
    check_positive(op, "softcap", softcap, optional=True)
    compute = product_dtype(w, x, b)
    if group is not None:
        chunk = chunk or chunk_size(widest, compute, x.device)  # alike on all ranks
    m = y.numel()
    out = rules[0 if group is None else 1](
        w, x.reshape(m, x.shape[-1]), b, y.long().reshape(m), ignore_index=ignore_index,
        logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        chunk=chunk or 0, compute=compute, accum_dtype=accum_dtype, **shard,
    )  # fmt: skip
    return tuple(t.view(y.shape) for t in ((out,) if isinstance(out, Tensor) else out))
