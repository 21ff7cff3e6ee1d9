"""Log-probabilities of targets under a language model head, without its logits in memory.

    z = softcap * tanh(logit_scale * (x w^T + b) / softcap) / temperature    x: (..., d)  w: (v, d)
    p = exp(z - lse), lse = log(sum(exp(z)))                                 y, results: (...)

    logp = z[y] - lse      entropy = -sum(p * log p)      log_sum_sq = log(sum(p**2))
    mean_logit = mean(z)   is_top1: y is the argmax

Pullback of one cotangent for each, d_logp, d_entropy, d_log_sum_sq, d_mean_logit:

    dz = d_logp * (onehot(y) - p) - d_entropy * p * (log p + entropy)
         + d_log_sum_sq * 2 * (p**2 / sum(p**2) - p) + d_mean_logit / v

then back through temperature, cap and scale; dx = dz w, dw = dz^T x, db = sum of dz. Only z[y] and
sums over columns leave a chunk; backward forms the logits again: 4 products. Statistics and results
are float32 (float64 for float64), gradients take the dtypes of w, x and b. Sums over a row are
taken on line (Milakov and Gimelshein, 2018, arXiv:1805.02867), in one pass over its logits.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_fn._check import check_positive
from liger_fn._launch import launch, row_tile, tl, triton
from liger_fn._math import capped, capped_slope, wide
from liger_fn.ops._ce import Row, out_of_range, slope, transformed
from liger_fn.ops._chunked import Rows, check_head, chunk_size, head_loop, product_dtype
from liger_fn.ops._collectives import Vocab, shard_of
from liger_fn.ops._linear_rules import primal_dtypes, rows_rule
from liger_fn.ops._vocab_parallel import logp_rows, passes


class LogpStats(NamedTuple):
    """What one pass over the logits tells of each token. All but is_top1 are differentiable."""

    logp: Tensor
    entropy: Tensor
    log_sum_sq: Tensor
    mean_logit: Tensor
    is_top1: Tensor


# -- reference: the row pass in plain torch; the rest is the loop of _chunked ----------------------


def _rows_ref(
    z: Tensor, y: Tensor, *cotangents: Any, row: Row, temperature: float, stats: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    *ds, gradient = cotangents
    valid = y != row.ignore_index
    bad, at = out_of_range(y, z.shape[-1], valid)
    t = torch.where(valid[..., None], transformed(z, row) / temperature, 0.0)
    u = t - t.detach().amax(-1, keepdim=True)
    logp = u - u.exp().sum(-1, keepdim=True).log()
    logp = torch.where(logp == -torch.inf, logp.detach(), logp)  # no gradient, not that of 0 * inf
    p, parts = logp.exp(), [logp.gather(-1, at[..., None])[..., 0]]
    if stats:
        surprise = torch.where(p == 0, 0.0, logp)
        parts.append(-(p * surprise).sum(-1))
        parts += [torch.logsumexp(2 * logp, -1), t.mean(-1)]
    parts = [torch.where(valid, part.masked_fill(bad, torch.nan), 0.0) for part in parts]
    found = (*parts, valid & (z.argmax(-1) == y)) if stats else tuple(parts)
    if not gradient:
        return found, None
    d_logp, d_entropy, d_sum_sq, d_mean = (
        None if d is None else d[..., None] for d in (*ds, None, None, None)[:4]
    )
    g = torch.zeros_like(p)
    if d_logp is not None:
        g = (-d_logp * p).scatter_add(-1, at[..., None], d_logp)
    if d_entropy is not None:
        g = g - d_entropy * p * (surprise + parts[1][..., None])
    if d_sum_sq is not None:
        g = g + 2 * d_sum_sq * ((2 * logp - parts[2][..., None]).exp() - p)
    if d_mean is not None:
        g = g + d_mean / z.shape[-1]
    g = g * (slope(z, row, valid) / temperature)
    return found, torch.where(valid[..., None], g.masked_fill(bad[..., None], torch.nan), 0.0)


# -- kernel: d and out hold COLUMNS numbers a row, logp alone or all four --------------------------


@triton.jit
def _row(
    z_ptr, v, y, SCALE: tl.constexpr, CAP: tl.constexpr, COLD: tl.constexpr, STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass over a row: z[y] - top, top, log of the sum, entropy, log_sum_sq, mean, is_top1."""
    zy = capped(tl.load(z_ptr + y), SCALE, CAP) * COLD
    top = zy
    col = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), zy.dtype)
    along = tl.zeros((BLOCK,), zy.dtype)  # sum of exp(u) * u
    squares = tl.zeros((BLOCK,), zy.dtype)
    plain = tl.zeros((BLOCK,), zy.dtype)
    ahead = tl.zeros((BLOCK,), tl.int32)
    for k in range(0, v, BLOCK):
        mask = k + col < v
        z = capped(tl.load(z_ptr + k + col, mask, other=0.0), SCALE, CAP) * COLD
        if STATS:
            plain += tl.where(mask, z, 0.0)
            ahead += (mask & ((z > zy) | ((z == zy) & (k + col < y)))).to(tl.int32)
        z = tl.where(mask, z, -float("inf"))  # after the cap: tanh(-inf) is -1
        new = tl.maximum(top, tl.max(z))
        shift = tl.where(new == -float("inf"), 0.0, new)
        fall = tl.exp(top - shift)
        e = tl.exp(z - shift)
        if STATS:
            down = tl.where(top == -float("inf"), 0.0, top - shift)
            along = (along + total * down) * fall + tl.where(e == 0.0, 0.0, e * (z - shift))
            squares = squares * fall * fall + e * e
        total = total * fall + e
        top = new
    sums = tl.sum(total)
    logsum = tl.log(sums)
    sum_sq = tl.log(tl.sum(squares)) - 2.0 * logsum
    return (
        zy - top, top, logsum, logsum - tl.sum(along) / sums, sum_sq, tl.sum(plain) / v,
        tl.sum(ahead) == 0,
    )  # fmt: skip


@triton.jit
def _gradient(z, d_ptr, hit, v, top, logsum, entropy, sum_sq, STATS: tl.constexpr):
    logp = (z - top) - logsum
    p = tl.exp(logp)
    d = tl.load(d_ptr).to(z.dtype)
    g = tl.where(hit, d, 0.0) - d * p
    if STATS:
        g -= tl.load(d_ptr + 1).to(z.dtype) * tl.where(p == 0.0, 0.0, p * (logp + entropy))
        g += tl.load(d_ptr + 2).to(z.dtype) * 2.0 * (tl.exp(2.0 * logp - sum_sq) - p)
        g += tl.load(d_ptr + 3).to(z.dtype) / v
    return g


@triton.jit
def _rows_kernel(
    z_ptr, dz_ptr, y_ptr, d_ptr, out_ptr, is_top1_ptr, v, IGNORE: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, COLD: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    z_ptr += row * v
    out_ptr += row * COLUMNS
    y = tl.load(y_ptr + row).to(tl.int64)
    live = y != IGNORE
    bad = live & ((y < 0) | (y >= v))
    STATS: tl.constexpr = COLUMNS > 1
    n = tl.where(live, v, 0)  # an ignored row is not read
    zy, top, logsum, entropy, sum_sq, mean, first = _row(
        z_ptr, n, tl.where(live & (bad == 0), y, 0), SCALE, CAP, COLD, STATS, BLOCK
    )
    nan = tl.where(bad, float("nan"), 0.0)
    tl.store(out_ptr, tl.where(live, zy - logsum + nan, 0.0))
    if STATS:
        tl.store(out_ptr + 1, tl.where(live, entropy + nan, 0.0))
        tl.store(out_ptr + 2, tl.where(live, sum_sq + nan, 0.0))
        tl.store(out_ptr + 3, tl.where(live, mean + nan, 0.0))
        tl.store(is_top1_ptr + row, first & live & (bad == 0))
    if dz_ptr is not None:
        dz_ptr += row * v
        for k in range(0, v, BLOCK):
            mask = k + col < v
            z, slope = capped_slope(tl.load(z_ptr + k + col, mask, other=0.0), SCALE, CAP)
            g = _gradient(
                z * COLD,
                d_ptr + row * COLUMNS,
                k + col == y,
                v,
                top,
                logsum,
                entropy,
                sum_sq,
                STATS,
            )
            g = tl.where(live, (g + nan) * slope * (SCALE * COLD), 0.0)
            tl.store(dz_ptr + k + col, g, mask)


def _rows_triton(
    z: Tensor, y: Tensor, *cotangents: Any, row: Row, temperature: float, stats: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    *ds, gradient = cotangents
    m, columns = y.numel(), 4 if stats else 1
    out = z.new_empty(m, columns, dtype=wide(z.dtype))
    is_top1 = torch.empty_like(y, dtype=torch.bool) if stats else None
    d = None
    if gradient:
        zero = out.new_zeros(())
        d = torch.stack([(zero if c is None else c).expand(m) for c in ds], -1).to(out.dtype)
    launch(
        _rows_kernel, (m,), z, z if gradient else None, y.contiguous(), d, out, is_top1, z.shape[1],
        IGNORE=row.ignore_index, SCALE=row.logit_scale, CAP=row.cap, COLD=1 / temperature,
        COLUMNS=columns, **row_tile(z.shape[1], 4096),
    )  # fmt: skip
    parts = (*out.unbind(-1), is_top1) if stats else out.unbind(-1)
    return parts, z if gradient else None  # type: ignore[return-value]  # is_top1 with stats exists


# -- rule ------------------------------------------------------------------------------------------


def _fwd(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, *,
    ignore_index: int, logit_scale: float, softcap: float | None, temperature: float, chunk: int,
    compute: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _loop(
        rows, w, x, b, y, (), (False,) * 3, ignore_index, logit_scale, softcap, temperature, chunk,
        compute,
    )[0]  # fmt: skip


def _loop(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor,
    cotangents: tuple[Tensor | None, ...], wanted: tuple[bool, ...], ignore_index: int,
    logit_scale: float, softcap: float | None, temperature: float, chunk: int, compute: torch.dtype,
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    row = Row(ignore_index, 0.0, logit_scale, softcap)
    return head_loop(
        partial(rows, row=row, temperature=temperature), w, x, b, y, cotangents,
        ignore_index=ignore_index, chunk=chunk, compute=compute, accum_dtype=torch.float32,
        wanted=wanted,  # type: ignore[arg-type]  # three of them
    )  # fmt: skip


def _logp_bwd(
    rows: Rows, d_logp: Tensor, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, *,
    wanted: tuple[bool, ...], **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    _, *grads = _loop(rows, w, x, b, y, (d_logp,), wanted, **options)
    return primal_dtypes(grads, w, x, b)


def _stats_bwd(
    rows: Rows, d_logp: Tensor | None, d_entropy: Tensor | None, d_sum_sq: Tensor | None,
    d_mean: Tensor | None, d_top1: None, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, *,
    wanted: tuple[bool, ...], **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    cotangents = (d_logp, d_entropy, d_sum_sq, d_mean)
    _, *grads = _loop(rows, w, x, b, y, cotangents, wanted, **options)
    return primal_dtypes(grads, w, x, b)


def _passes(stats: bool) -> dict[Any, Rows]:
    both = {"reference": _rows_ref, "triton": _rows_triton}
    return {backend: partial(rows, stats=stats) for backend, rows in both.items()}


def _rules(name: str, bwd: Any, *, stats: bool, floats: int) -> tuple[Any, Any]:
    """Of all columns, and of a shard of them."""
    kinds: dict[str, Any] = {"floats": floats, "flag": stats}
    shard = passes(logp_rows, stats=stats)
    return (
        rows_rule(name, _passes(stats), _fwd, bwd, **kinds),
        rows_rule(f"{name}_shard", shard, _fwd, bwd, **kinds, shard=True),
    )


_logp = _rules("fused_linear_logp", _logp_bwd, stats=False, floats=1)
_stats = _rules("fused_linear_logp_stats", _stats_bwd, stats=True, floats=4)


def fused_linear_logp(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, chunk: int | None = None,
    group: Vocab | None = None,
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
        chunk: tokens whose logits exist at a time; default: as many as fit 1 GiB (16 MiB on a CPU).
        group: (process group or one-dimensional mesh, v of the whole vocabulary): w and b are this
            rank's shard of rows, cut as `torch.chunk` cuts, or, with the width of each rank's shard
            in place of v, as you please. x and y are the same on all ranks, and so are
            the results; w and b get the gradient of the shard. First derivatives only.

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
        chunk, group,
    )[0]  # fmt: skip


def fused_linear_logp_with_stats(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, chunk: int | None = None,
    group: Vocab | None = None,
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
        ignore_index, chunk, group,
    ))  # fmt: skip


def _call(
    op: str, rules: tuple[Any, Any], w: Tensor, x: Tensor, y: Tensor, b: Tensor | None,
    temperature: float, softcap: float | None, logit_scale: float, ignore_index: int,
    chunk: int | None, group: Vocab | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_head(op, w, x, y, b, chunk)
    widest, shard = w.shape[0], {}
    if group is not None:
        place, widest = shard_of(op, group, w.shape[0], "w")
        shard = place._asdict()
    if widest == 0:
        raise ValueError(f"{op}: axis v must not be empty")
    check_positive(op, "temperature", temperature)
    check_positive(op, "softcap", softcap)
    compute = product_dtype(w, x, b)
    out = rules[group is not None](
        w, x.reshape(-1, x.shape[-1]), b, y.long().reshape(-1), ignore_index=ignore_index,
        logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        chunk=chunk or chunk_size(widest, compute, x.device), compute=compute, **shard,
    )  # fmt: skip
    return tuple(t.view(y.shape) for t in ((out,) if isinstance(out, Tensor) else out))
