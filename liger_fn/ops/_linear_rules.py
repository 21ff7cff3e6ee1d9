"""The two rules over a row pass: a cross entropy that is a sum, and results per row.

A sum forms dw, dx and db in its forward pass, while a chunk of logits is at hand, with the weights
of the rows as coefficients: 3 products. Its pullback scales them. Where all rows are one chunk that
would be a pass over the whole of dw: forward keeps dz, and the pullback scales x on its way into
dw, and dx. Losses per row do not know their coefficients before backward, and form all of it there
from new logits: 4 products; or from logits that forward has held.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_fn._math import wide
from liger_fn._vjp import custom_vjp
from liger_fn.ops._ce import Row
from liger_fn.ops._chunked import Rows, head_loop, plan
from liger_fn.ops._products import dx_dtype, kept_products, logits_dtype, operand_dtype, scaled
from liger_fn.ops._vocab_parallel import on_shard


def _loop(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, class_weight: Tensor | None,
    a: Tensor | None, e: Tensor | None, wanted: tuple[bool, ...], *,
    ignore_index: int, label_smoothing: float, logit_scale: float, softcap: float | None,
    chunk: int, compute: torch.dtype, accum_dtype: torch.dtype, keep: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    row = Row(ignore_index, label_smoothing, logit_scale, softcap)
    return head_loop(
        partial(rows, class_weight=class_weight, row=row), w, x, b, y, (a, e),
        ignore_index=ignore_index, chunk=chunk, compute=compute, accum_dtype=accum_dtype,
        wanted=wanted[:3],  # type: ignore[arg-type]  # three of them
        keep=keep,
    )  # fmt: skip


def weighted(
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
        rows, w, x, b, y, class_weight, weighted(u, y, 1.0, dtype), weighted(u, y, z_loss, dtype),
        wanted, ignore_index=ignore_index, label_smoothing=label_smoothing, logit_scale=logit_scale,
        softcap=softcap, chunk=chunk, compute=compute, accum_dtype=accum_dtype, keep=True,
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

    def late(missing: tuple[bool, ...]) -> Sequence[Tensor | None]:
        ones = (1.0, z_loss) if scale is not None else (c_nll, c_zsq)
        a, e = (weighted(u, y, c, nll.dtype) for c in ones)
        return _loop(rows, w, x, b, y, class_weight, a, e, missing, **options)[1:]

    out = settled(wanted, (w, x, b), (dw, dx, db), scale, late, y, **options)
    du = None
    if wanted[3] and u is not None:
        terms = (c * t for c, t in ((c_nll, nll), (c_zsq, zsq)) if c is not None)
        total: Tensor = sum(terms)  # type: ignore[assignment]  # never the int 0: one term exists
        du = total.to(u.dtype)
    return *out, du


def settled(
    wanted: Sequence[bool], primals: Sequence[Tensor | None], formed: Sequence[Tensor],
    scale: Tensor | None, late: Callable[[tuple[bool, ...]], Sequence[Tensor | None]], y: Tensor, *,
    ignore_index: int, compute: torch.dtype, **_: Any,
) -> list[Tensor | None]:  # fmt: skip
    """What forward formed, times `scale`; the products of a dz that it kept; the rest is `late`.

    Without a scale all is late.
    """
    out: list[Tensor | None] = [None] * 3
    if scale is not None and is_kept(formed[0].shape):
        w, x, _b = primals
        live = y != ignore_index
        out[:2] = kept_products(formed[0], scale, w, x, live, compute, wanted)  # type: ignore[arg-type]  # w and x exist
    missing = [
        want and g is None and (scale is None or t is None or f.shape != t.shape)
        for want, g, t, f in zip(wanted, out, primals, formed, strict=False)
    ]
    found: Sequence[Tensor | None] = formed
    if any(missing):
        every = zip(missing, late(tuple(missing)), formed, strict=True)
        found = [g if is_late else t for is_late, g, t in every]
    return [
        done if done is not None
        else scaled(g, scale, t.dtype) if want and t is not None and g is not None
        else None
        for done, want, g, t in zip(out, wanted, found, primals, strict=False)
    ]  # fmt: skip


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


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
    return primal_dtypes(grads, w, x, b)


def primal_dtypes(
    grads: Sequence[Tensor | None], *primals: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Each gradient in the dtype of its argument."""
    return tuple(
        g.to(t.dtype) if g is not None and t is not None else None
        for g, t in zip(grads, primals, strict=True)
    )


def _operations(w: Any, x: Any, n: int) -> int:
    return 2 * x[0] * w[0] * w[1] * n


def formed_flops(
    w: Any, x: Any, *_: Any, out_shape: Any, wanted: Any = (), at: int = 4, **__: Any
) -> int:
    """Operations of a forward pass whose output `at` is dw, or the dz that it keeps."""
    return _operations(w, x, 1 if is_kept(out_shape[at]) else 1 + sum(wanted[:2]))


def is_kept(dw: Any) -> bool:
    """Whether this is the shape of a dz in place of dw."""
    return len(dw) == 1 and dw[0] > 0


def _loss_flops(d_loss: Any, w: Any, x: Any, *a: Any, wanted: Any = (), **_: Any) -> int:
    return _operations(w, x, sum(wanted[:2])) if is_kept(a[7]) else 0


def _late_flops(
    d_loss: Any, d_nll: Any, d_zsq: Any, d_correct: Any, w: Any, x: Any, *a: Any, wanted: Any = (),
    **_: Any,
) -> int:  # fmt: skip
    late = d_nll is not None or d_zsq is not None
    return _operations(w, x, late + sum(wanted[:2])) if late or is_kept(a[4]) else 0


def formed_fake(
    w: Tensor, x: Tensor, b: Tensor | None, chunk: int, compute: torch.dtype,
    accum_dtype: torch.dtype, wanted: Sequence[bool], heads: int = 1,
) -> list[Tensor]:  # fmt: skip
    """Shapes of dw, dx and db as forward forms them; those that nobody wants are empty."""
    m = math.prod(x.shape[:-1])
    _, sums, keep = plan(m, w, heads, chunk, compute, accum_dtype, wanted[0])
    dtype = wide(compute)
    kinds = (sums, dx_dtype(x, compute), dtype)
    formed = [
        w.new_empty(t.shape if want and t is not None else (0,), dtype=kind if want else dtype)
        for want, t, kind in zip(wanted, (w, x, b), kinds, strict=False)
    ]
    if keep:
        dz = w.new_empty(m * w.shape[0], dtype=operand_dtype(compute, x.device))
        formed[:2] = dz, w.new_empty(0, dtype=dtype)
    return formed


def _sum_fake(
    w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, class_weight: Tensor | None,
    u: Tensor | None, *, chunk: int, compute: torch.dtype, accum_dtype: torch.dtype,
    wanted: tuple[bool, ...], **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    scalars = (x.new_empty((), dtype=wide(compute)) for _ in range(3))
    per_row = (y.new_empty(y.shape, dtype=wide(compute)) for _ in range(2))
    formed = formed_fake(w, x, b, chunk, compute, accum_dtype, wanted)
    return *scalars, y.new_empty(y.shape, dtype=torch.bool), *formed, *per_row


def head_rule(
    name: str, passes: dict[Any, Rows], fwd: Callable[..., Any], bwd: Callable[..., Any], *,
    outputs: int, fake: Any, flops: Any, more: tuple[str, ...] = (), shard: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Make the rule of a head from its two passes over chunks."""
    if shard:
        fwd, bwd = on_shard(fwd), on_shard(bwd)
    return custom_vjp(
        name,
        fwd={backend: partial(fwd, rows) for backend, rows in passes.items()},
        bwd={backend: partial(bwd, rows) for backend, rows in passes.items()},
        differentiable=("w", "x", "b", *more),
        outputs=outputs,
        opaque=True,
        fake=fake,
        flops=flops,
    )


def sum_rule(name: str, passes: dict[Any, Rows], shard: bool = False) -> Callable[..., Any]:
    """(w, x, b, y, class_weight, u) to the sum of u * (nll + z_loss * zsq)."""
    return head_rule(
        name, passes, _sum_fwd, _loss_bwd, outputs=1, fake=_sum_fake,
        flops=(formed_flops, _loss_flops), more=("u",), shard=shard,
    )  # fmt: skip


def stats_rule(name: str, passes: dict[Any, Rows], shard: bool = False) -> Callable[..., Any]:
    """The same, the sums of its two terms, and which rows have y as their argmax."""
    return head_rule(
        name, passes, _sum_fwd, _sum_bwd, outputs=4, fake=_sum_fake,
        flops=(formed_flops, _late_flops), more=("u",), shard=shard,
    )  # fmt: skip


def rows_rule(
    name: str, passes: dict[Any, Rows], fwd: Callable[..., Any], bwd: Callable[..., Any], *,
    floats: int, flag: bool, shard: bool = False, held: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """(w, x, b, y, ...) to results of each row: so many numbers, then perhaps a bool.

    With `held`, forward keeps all logits (m v,) where `plan` allows it, after the results.
    """
    outputs = floats + flag

    def fake(
        w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, *_: Any, chunk: int,
        compute: torch.dtype, accum_dtype: torch.dtype, wanted: Sequence[bool] = (), **__: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        kinds = (wide(compute),) * floats + (torch.bool,) * flag
        found = tuple(y.new_empty(y.shape, dtype=kind) for kind in kinds)
        if not held:
            return found
        if plan(x.shape[0], w, 1, chunk, compute, accum_dtype, wanted[0])[2]:
            kind = logits_dtype(compute, x.device)
            return *found, w.new_empty(x.shape[0] * w.shape[0], dtype=kind)
        return *found, w.new_empty(0, dtype=wide(compute))

    def fwd_flops(w: Any, x: Any, *_: Any, **__: Any) -> int:
        return _operations(w, x, 1)

    def bwd_flops(*a: Any, wanted: Any, **_: Any) -> int:
        again = not (held and is_kept(a[-1]))
        return _operations(a[outputs], a[outputs + 1], again + sum(wanted[:2]))

    flops = (fwd_flops, bwd_flops)
    return head_rule(name, passes, fwd, bwd, outputs=outputs, fake=fake, flops=flops, shard=shard)


def ce_rows_rule(name: str, passes: dict[Any, Rows], shard: bool = False) -> Callable[..., Any]:
    """(w, x, b, y, class_weight) to nll, zsq and whether y is the argmax, of each row."""
    return rows_rule(name, passes, _rows_fwd, _rows_bwd, floats=2, flag=True, shard=shard)
