"""Linear projection and cross entropy in one: the loss of a language model head without its logits.

    z = x w^T + b                             x: (..., d)   w: (v, d)   b: (v,)   z: never in memory
    loss = sum over rows of u * (nll + z_loss * zsq), divided by the number of targets

with nll and zsq of a row as in `_ce`, u token_weight. Pullback, dz the pullback of a row (see
`cross_entropy`) with d_nll = u and d_zsq = z_loss * u:

    dx = dloss * dz w        dw = dloss * dz^T x        db = dloss * sum of dz
    du = dloss * (nll + z_loss * zsq)

A scalar loss forms dx, dw and db in its forward pass, where a chunk of logits is at hand: 3
products, and backward only scales them. Gradients that were not formed (an outer transform asks
late), and those of nll or zsq alone, are formed in backward; so are all with reduction "none": 4
products. Sums over tokens are float32 (float64 for float64), dx, dw and db take the dtypes of x, w
and b. Memory: one chunk of logits. Chunked head with gradients in forward: Hsu et al., "Liger
Kernel", 2024, arXiv:2410.10989.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._launch import contiguous, launch, row_tile, tl, triton
from liger_fn._math import ce_pull, ce_row, ce_store_gradient, wide
from liger_fn._vjp import custom_vjp, tracked
from liger_fn.ops._ce import (
    CEStats,
    Row,
    check_options,
    check_rows,
    normaliser,
    reduced,
    row_losses,
    row_pullback,
)
from liger_fn.ops._chunked import Rows, chunk_size, head_loop, product_dtype

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
                    SCALE, CAP,
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
        **row_tile(z.shape[1], 4096),
    )  # fmt: skip
    return (nll, zsq, correct), z if gradient else None


# -- the two rules over either row pass: a loss that is a sum, and losses per row ------------------


def _loop(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, class_weight: Tensor | None,
    a: Tensor | None, e: Tensor | None, wanted: tuple[bool, ...], *,
    ignore_index: int, label_smoothing: float, logit_scale: float, softcap: float | None,
    chunk: int, compute: torch.dtype, accum_dtype: torch.dtype,
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    row = Row(ignore_index, label_smoothing, logit_scale, softcap)
    return head_loop(
        partial(rows, class_weight=class_weight, row=row), w, x, b, y, (a, e),
        ignore_index=ignore_index, chunk=chunk, compute=compute, accum_dtype=accum_dtype,
        wanted=wanted[:3],  # type: ignore[arg-type]  # three of them
    )  # fmt: skip


def _weighted(
    u: Tensor | None, y: Tensor, c: Tensor | float | None, dtype: torch.dtype
) -> Tensor | None:
    """c * u for each row; None where it is zero."""
    if c is None or (isinstance(c, float) and c == 0.0):
        return None
    return (y.new_ones(y.shape, dtype=dtype) if u is None else u.to(dtype)) * c


def _sum_fwd(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, class_weight: Tensor | None,
    u: Tensor | None, *,
    ignore_index: int, label_smoothing: float, logit_scale: float, softcap: float | None,
    z_loss: float, chunk: int, compute: torch.dtype, accum_dtype: torch.dtype,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = wide(compute)
    (nll, zsq, correct), dw, dx, db = _loop(
        rows, w, x, b, y, class_weight, _weighted(u, y, 1.0, dtype), _weighted(u, y, z_loss, dtype),
        wanted, ignore_index=ignore_index, label_smoothing=label_smoothing, logit_scale=logit_scale,
        softcap=softcap, chunk=chunk, compute=compute, accum_dtype=accum_dtype,
    )  # fmt: skip
    sums = [(t if u is None else t * u).sum() for t in (nll, zsq)]
    formed = (nll.new_empty(0) if t is None else t for t in (dw, dx, db))
    return sums[0] + z_loss * sums[1], *sums, correct, *formed, nll, zsq


def _sum_bwd(
    rows: Rows, d_loss: Tensor | None, d_nll: Tensor | None, d_zsq: Tensor | None, d_correct: None,
    w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, class_weight: Tensor | None,
    u: Tensor | None, dw: Tensor, dx: Tensor, db: Tensor, nll: Tensor, zsq: Tensor, *,
    z_loss: float, wanted: tuple[bool, ...], **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    scale = d_loss if d_nll is None and d_zsq is None else None
    c_nll, c_zsq = _plus(d_loss, d_nll), _plus(None if d_loss is None else z_loss * d_loss, d_zsq)
    primals, formed = (w, x, b), [dw, dx, db]
    missing = [
        want and (scale is None or t is None or g.shape != t.shape)
        for want, t, g in zip(wanted, primals, formed, strict=False)
    ]
    if any(missing):
        ones = (1.0, z_loss) if scale is not None else (c_nll, c_zsq)
        a, e = (_weighted(u, y, c, nll.dtype) for c in ones)
        _, *late = _loop(rows, w, x, b, y, class_weight, a, e, tuple(missing), **options)
        formed = [g if is_late else t for is_late, g, t in zip(missing, late, formed, strict=True)]  # type: ignore[misc]  # late ones exist
    out = [
        _scaled(g, scale, t.dtype) if want and t is not None else None
        for want, g, t in zip(wanted, formed, primals, strict=False)
    ]
    du = None
    if wanted[3] and u is not None:
        terms = (c * t for c, t in ((c_nll, nll), (c_zsq, zsq)) if c is not None)
        total: Tensor = sum(terms)  # type: ignore[assignment]  # never the int 0: one term exists
        du = total.to(u.dtype)
    return *out, du


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _scaled(g: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """scale * g in `dtype`, in one pass where nobody differentiates it.

    g may be (v, d) in float32.
    """
    if scale is None:
        return g.to(dtype)
    if tracked():
        return (g * scale).to(dtype)
    # one axis, so that a float32 scale is not rounded to a half g first
    return torch.mul(g, scale.view(1), out=torch.empty_like(g, dtype=dtype))


def _loss_bwd(rows: Rows, d_loss: Tensor, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor,
    class_weight: Tensor | None, u: Tensor | None, nll_sum: Tensor, zsq_sum: Tensor,
    correct: Tensor, dw: Tensor, dx: Tensor, db: Tensor, nll: Tensor, zsq: Tensor, **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _sum_bwd(
        rows, d_loss, None, None, None, w, x, b, y, class_weight, u, dw, dx, db, nll, zsq, **options
    )  # fmt: skip


def _rows_fwd(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, class_weight: Tensor | None, *,
    ignore_index: int, label_smoothing: float, logit_scale: float, softcap: float | None,
    chunk: int, compute: torch.dtype, accum_dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _loop(
        rows, w, x, b, y, class_weight, None, None, (False,) * 3, ignore_index=ignore_index,
        label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap, chunk=chunk,
        compute=compute, accum_dtype=accum_dtype,
    )[0]  # fmt: skip


def _rows_bwd(
    rows: Rows, d_nll: Tensor | None, d_zsq: Tensor | None, d_correct: None, w: Tensor, x: Tensor,
    b: Tensor | None, y: Tensor, class_weight: Tensor | None, *, wanted: tuple[bool, ...],
    **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    _, *grads = _loop(rows, w, x, b, y, class_weight, d_nll, d_zsq, wanted, **options)
    return tuple(
        g.to(t.dtype) if g is not None and t is not None else None
        for g, t in zip(grads, (w, x, b), strict=True)
    )


# -- rule ------------------------------------------------------------------------------------------


def _products(w: Any, x: Any, n: int) -> int:
    return 2 * x[0] * w[0] * w[1] * n


def _fwd_flops(w: Any, x: Any, *_: Any, wanted: Any = (), **__: Any) -> int:
    return _products(w, x, 1 + sum(wanted[:2]))


def _rows_fwd_flops(w: Any, x: Any, *_: Any, **__: Any) -> int:
    return _products(w, x, 1)


def _loss_flops(d_loss: Any, *_: Any, **__: Any) -> int:
    return 0  # formed in forward


def _late_flops(
    d_loss: Any,
    d_nll: Any,
    d_zsq: Any,
    d_correct: Any,
    w: Any,
    x: Any,
    *_: Any,
    wanted: Any = (),
    **__: Any,
) -> int:
    return 0 if d_nll is None and d_zsq is None else _products(w, x, 1 + sum(wanted[:2]))


def _rows_flops(
    d_nll: Any, d_zsq: Any, d_correct: Any, w: Any, x: Any, *_: Any, wanted: Any = (), **__: Any
) -> int:
    return _products(w, x, 1 + sum(wanted[:2]))


def _sum_fake(
    w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, class_weight: Tensor | None,
    u: Tensor | None, *, compute: torch.dtype, accum_dtype: torch.dtype, wanted: tuple[bool, ...],
    **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    sums = torch.promote_types(accum_dtype, compute) if compute == torch.float64 else accum_dtype
    dtype, half = wide(compute), x.device.type != "cpu" and x.dtype.itemsize < 4
    kinds = (sums, compute if half else dtype, dtype)
    formed = (
        w.new_empty(t.shape if want and t is not None else (0,), dtype=kind if want else dtype)
        for want, t, kind in zip(wanted, (w, x, b), kinds, strict=False)
    )
    scalars = (x.new_empty((), dtype=dtype) for _ in range(3))
    per_row = (y.new_empty(y.shape, dtype=dtype) for _ in range(2))
    return *scalars, y.new_empty(y.shape, dtype=torch.bool), *formed, *per_row


def _rows_fake(
    w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, *_: Any, compute: torch.dtype, **__: Any
) -> tuple[Tensor, ...]:
    dtypes = wide(compute), wide(compute), torch.bool
    return tuple(y.new_empty(y.shape, dtype=dtype) for dtype in dtypes)


def _rule(
    name: str, fwd: Any, bwd: Any, fake: Any, flops: Any, outputs: int, more: tuple[str, ...]
) -> Any:
    both = {"reference": _rows_ref, "triton": _rows_triton}
    return custom_vjp(
        name,
        fwd={backend: partial(fwd, rows) for backend, rows in both.items()},  # type: ignore[misc]  # the two names
        bwd={backend: partial(bwd, rows) for backend, rows in both.items()},  # type: ignore[misc]  # likewise
        differentiable=("w", "x", "b", *more),
        outputs=outputs,
        opaque=True,
        fake=fake,
        flops=flops,
    )


_loss = _rule(
    "fused_linear_ce", _sum_fwd, _loss_bwd, _sum_fake, (_fwd_flops, _loss_flops), 1, ("u",)
)
_stats = _rule(
    "fused_linear_ce_stats", _sum_fwd, _sum_bwd, _sum_fake, (_fwd_flops, _late_flops), 4, ("u",)
)
_per_row = _rule(
    "fused_linear_ce_rows", _rows_fwd, _rows_bwd, _rows_fake, (_rows_fwd_flops, _rows_flops), 3, ()
)


def fused_linear_ce(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, chunk: int | None = None, accum_dtype: torch.dtype = torch.float32,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, class_weight: Tensor | None = None,
    token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None,
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
    ).loss  # fmt: skip


def fused_linear_ce_with_stats(
    w: Tensor, x: Tensor, y: Tensor, *,
    b: Tensor | None = None, chunk: int | None = None, accum_dtype: torch.dtype = torch.float32,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, class_weight: Tensor | None = None,
    token_weight: Tensor | None = None, reduction: str = "mean",
    n_valid: float | Tensor | None = None,
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
    )  # fmt: skip


def _call(
    op: str, rule: Any, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, chunk: int | None,
    accum_dtype: torch.dtype, z_loss: float, class_weight: Tensor | None, u: Tensor | None,
    reduction: str, n_valid: float | Tensor | None, row: Row,
) -> CEStats:  # fmt: skip
    check_tensors(
        op,
        w=(w, "v d"),
        x=(x, "... d"),
        y=(y, "int ..."),
        b=(b, "? v"),
        class_weight=(class_weight, "? v"),
    )
    check_rows(op, y, x=x)
    check_options(op, y, w.shape[0], row, reduction, z_loss, u, n_valid)
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"{op}: chunk must be an integer above 0, got {chunk!r}")
    if accum_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{op}: accum_dtype must be float32 or bfloat16, got {accum_dtype}")
    y, compute = y.long(), product_dtype(w, x, b)
    options: dict[str, Any] = {**row._asdict(), "compute": compute, "accum_dtype": accum_dtype}
    options["chunk"] = chunk or chunk_size(w.shape[0], compute, x.device)
    weight = None if class_weight is None else class_weight.detach()
    a = (w, x.reshape(-1, x.shape[-1]), b, y.reshape(-1), weight)
    if reduction == "none":
        nll, zsq, correct = (t.view(y.shape) for t in _per_row(*a, **options))
        return reduced(nll, z_loss * zsq, correct, y, weight, row, reduction, n_valid, u)
    u = u if u is None else u.reshape(-1).to(wide(compute))
    n = normaliser(y, weight, row.ignore_index, reduction, n_valid, wide(compute))
    loss, *rest = (
        (out,) if isinstance(out := rule(*a, u, z_loss=z_loss, **options), Tensor) else out
    )
    scaled = [t if n is None else t / n for t in (loss, *rest[:2])]
    if not rest:
        return CEStats(*scaled * 5)
    valid = (y != row.ignore_index).sum()
    return CEStats(scaled[0], scaled[1], z_loss * scaled[2], valid, rest[2].sum())
