"""Distillation under two heads, without the logits of either: what fused_linear_kl, ... share.

For each chunk of tokens student and teacher logits are formed, a row pass (`_distill_rows`) gives
their divergences and the gradient of the student's logits, and the loop of `_chunked` goes on from
there: a sum forms dw, dx and db in its forward pass, 3 products and the teacher's one; values per
row form all of it again in backward. The teacher has no gradient. Memory: two chunks of logits, or
one where the teacher is a few columns; the reference holds more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_fn._check import check_numbers, check_positive, check_share, check_tensors
from liger_fn._math import wide
from liger_fn.ops._ce import (
    Row,
    check_reduction,
    check_rows,
    live_weight,
    normaliser,
    reduce_rows,
)
from liger_fn.ops._chunked import Rows, check_loop, head_loop
from liger_fn.ops._distill_rows import rows_ref, rows_triton
from liger_fn.ops._linear_rules import (
    formed_fake,
    head_rule,
    is_kept,
    primal_dtypes,
    settled,
    weighted,
)
from liger_fn.ops._products import logits, product_dtype
from liger_fn.ops.fused_linear_ce import fused_linear_ce


def _loop(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, teacher_w: Tensor | None,
    teacher_x: Tensor, teacher_b: Tensor | None, at: Tensor | None, a: Tensor | None,
    wanted: Sequence[bool], *, kind: str, beta: float, temperature: float, ignore_index: int,
    logit_scale: float, softcap: float | None, teacher_logit_scale: float,
    teacher_softcap: float | None, chunk: int, compute: torch.dtype, accum_dtype: torch.dtype,
    keep: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    how: dict[str, Any] = {"kind": kind, "beta": beta, "temperature": temperature}
    how["student"] = Row(ignore_index, 0.0, logit_scale, softcap)
    how["teacher"] = Row(ignore_index, 0.0, teacher_logit_scale, teacher_softcap)
    if teacher_w is not None:
        teacher_w, teacher_x = teacher_w.to(compute), teacher_x.to(compute)
        teacher_b = None if teacher_b is None else teacher_b.to(compute)

    def of_chunk(
        z: Tensor, y: Tensor, a: Tensor | None, xt: Tensor, at: Tensor | None, gradient: bool
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        zt = xt if teacher_w is None else logits(xt, teacher_w, teacher_b)
        return rows(z, y, a, zt, at, gradient, **how)

    return head_loop(
        of_chunk, w, x, b, y, (a, teacher_x, at), ignore_index=ignore_index, chunk=chunk,
        compute=compute, accum_dtype=accum_dtype, wanted=tuple(wanted[:3]),  # type: ignore[arg-type]  # three
        heads=_heads(at), keep=keep,
    )  # fmt: skip


def _heads(at: Tensor | None) -> int:
    """Buffers of logits: the student's, and those of a teacher that is not a few known columns."""
    return 1 if at is not None else 2


def _sum_fwd(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, teacher_w: Tensor | None,
    teacher_x: Tensor, teacher_b: Tensor | None, at: Tensor | None, u: Tensor | None, *,
    kind: str, beta: float, temperature: float, ignore_index: int, logit_scale: float,
    softcap: float | None, teacher_logit_scale: float, teacher_softcap: float | None, chunk: int,
    compute: torch.dtype, accum_dtype: torch.dtype, wanted: tuple[bool, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    (value,), *formed = _loop(
        rows, w, x, b, y, teacher_w, teacher_x, teacher_b, at, u, wanted, kind=kind, beta=beta,
        temperature=temperature, ignore_index=ignore_index, logit_scale=logit_scale,
        softcap=softcap, teacher_logit_scale=teacher_logit_scale, teacher_softcap=teacher_softcap,
        chunk=chunk, compute=compute, accum_dtype=accum_dtype, keep=True,
    )  # fmt: skip
    total = (value if u is None else value * u).sum()
    return total, *(value.new_empty(0) if t is None else t for t in formed), value


def _sum_bwd(
    rows: Rows, d_loss: Tensor, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor,
    teacher_w: Tensor | None, teacher_x: Tensor, teacher_b: Tensor | None, at: Tensor | None,
    u: Tensor | None, dw: Tensor,
    dx: Tensor, db: Tensor, value: Tensor, *, wanted: tuple[bool, ...], **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    teacher = (teacher_w, teacher_x, teacher_b, at)

    def late(missing: tuple[bool, ...]) -> Sequence[Tensor | None]:
        a = weighted(u, y, 1.0, value.dtype)
        return _loop(rows, w, x, b, y, *teacher, a, missing, **options)[1:]

    out = settled(wanted, (w, x, b), (dw, dx, db), d_loss, late, y, **options)
    return *out, (d_loss * value).to(u.dtype) if wanted[3] and u is not None else None


def _rows_fwd(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, teacher_w: Tensor | None,
    teacher_x: Tensor, teacher_b: Tensor | None, at: Tensor | None, *,
    kind: str, beta: float, temperature: float, ignore_index: int, logit_scale: float,
    softcap: float | None, teacher_logit_scale: float, teacher_softcap: float | None, chunk: int,
    compute: torch.dtype, accum_dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _loop(
        rows, w, x, b, y, teacher_w, teacher_x, teacher_b, at, None, (False,) * 3, kind=kind,
        beta=beta, temperature=temperature, ignore_index=ignore_index, logit_scale=logit_scale,
        softcap=softcap, teacher_logit_scale=teacher_logit_scale, teacher_softcap=teacher_softcap,
        chunk=chunk, compute=compute, accum_dtype=accum_dtype,
    )[0]  # fmt: skip


def _rows_bwd(
    rows: Rows, d: Tensor, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor,
    teacher_w: Tensor | None, teacher_x: Tensor, teacher_b: Tensor | None, at: Tensor | None, *,
    wanted: tuple[bool, ...],
    **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    teacher = (teacher_w, teacher_x, teacher_b, at)
    _, *grads = _loop(rows, w, x, b, y, *teacher, d, wanted, **options)
    return primal_dtypes(grads, w, x, b)


# -- rule ------------------------------------------------------------------------------------------

_PASSES: dict[Any, Rows] = {"reference": rows_ref, "triton": rows_triton}


def _flops(
    w: Any, x: Any, b: Any, y: Any, teacher_w: Any, *_: Any, out_shape: Any, wanted: Any = (),
    **__: Any,
) -> int:  # fmt: skip
    formed = 0 if is_kept(out_shape[1]) else sum(wanted[:2])
    return 2 * x[0] * w[0] * (w[1] * (1 + formed) + _columns(teacher_w))


def _columns(teacher_w: Any) -> int:
    return 0 if teacher_w is None else teacher_w[1]


def _sum_bwd_flops(d: Any, w: Any, x: Any, *a: Any, wanted: Any, **_: Any) -> int:
    return 2 * x[0] * w[0] * w[1] * sum(wanted[:2]) if is_kept(a[7]) else 0


def _rows_flops(
    w: Any, x: Any, b: Any, y: Any, teacher_w: Any, *_: Any, wanted: Any = (), **__: Any
) -> int:
    return 2 * x[0] * w[0] * (w[1] * (1 + sum(wanted[:2])) + _columns(teacher_w))


def _sum_fake(
    w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, teacher_w: Any, teacher_x: Any,
    teacher_b: Any, at: Any, *_: Any, chunk: int, compute: torch.dtype, accum_dtype: torch.dtype,
    wanted: tuple[bool, ...], **__: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    scalar, value = (y.new_empty(shape, dtype=wide(compute)) for shape in ((), y.shape))
    formed = formed_fake(w, x, b, chunk, compute, accum_dtype, wanted, _heads(at))
    return scalar, *formed, value


_sum = head_rule(
    "fused_linear_divergence", _PASSES, _sum_fwd, _sum_bwd, outputs=1, fake=_sum_fake,
    flops=(_flops, _sum_bwd_flops), more=("u",),
)  # fmt: skip
_per_row = head_rule(
    "fused_linear_divergence_rows", _PASSES, _rows_fwd, _rows_bwd, outputs=1,
    fake=lambda w, x, b, y, *_, compute, **__: (y.new_empty(y.shape, dtype=wide(compute)),),
    flops=(lambda *a, **_: _rows_flops(*a), lambda d, *a, **how: _rows_flops(*a, **how)),
)  # fmt: skip


def distill(
    op: str, kind: str, w: Tensor, x: Tensor, teacher_w: Tensor | None, teacher_x: Tensor | None, *,
    topk: tuple[Tensor, Tensor] | None = None, y: Tensor | None, b: Tensor | None,
    teacher_b: Tensor | None, hard_weight: float, chunk: int | None, ignore_index: int,
    token_weight: Tensor | None, reduction: str, n_valid: float | Tensor | None,
    accum_dtype: torch.dtype, beta: float = 0.5, **how: Any,
) -> Tensor:  # fmt: skip
    """Check the arguments of a public function, run its rule and mix in the labels."""
    tensors = {"w": w, "x": x, "teacher_w": teacher_w, "teacher_x": teacher_x, "y": y, "b": b}
    tensors |= {"teacher_b": teacher_b, "token_weight": token_weight}
    at = None
    if topk is not None:
        teacher_x, at = _check_topk(op, tensors, topk)
    _check(op, tensors, hard_weight, {**how, "beta": beta, "ignore_index": ignore_index})
    check_reduction(op, w.shape[0], reduction, n_valid, x=x)
    check_loop(op, chunk, accum_dtype)
    if at is not None and teacher_x is not None:  # both of top k
        outside = (at < 0) | (at >= w.shape[0])
        at, teacher_x = at.masked_fill(outside, 0), teacher_x.masked_fill(outside, torch.nan)
    live = torch.full(x.shape[:-1], ignore_index + 1, device=x.device) if y is None else y.long()
    if kind == "jsd" and beta in (0, 1):
        kind = "reverse" if beta else "kl"
    compute = product_dtype(w, x, b)
    flat = (w, x.reshape(live.numel(), x.shape[-1]), b, live.reshape(live.numel()))
    teacher = [None if t is None else t.detach() for t in (teacher_w, teacher_x, teacher_b, at)]
    for i in (1, 3):
        teacher[i] = None if (t := teacher[i]) is None else t.reshape(live.numel(), t.shape[-1])
    options: dict[str, Any] = {**how, "kind": kind, "beta": beta, "ignore_index": ignore_index}
    options |= {"compute": compute, "accum_dtype": accum_dtype}
    options["chunk"] = chunk or 0
    dtype = wide(compute)
    n = normaliser(live, None, ignore_index, reduction, n_valid, dtype)
    if token_weight is not None:
        token_weight = live_weight(token_weight, live, ignore_index)
    if reduction == "none":
        loss = reduce_rows(
            _per_row(*flat, *teacher, **options).view(live.shape), token_weight, reduction, n
        )
    else:
        u = None if token_weight is None else token_weight.reshape(live.numel()).to(dtype)
        loss = _sum(*flat, *teacher, u, **options)
        loss = loss if n is None else loss / n
    if not hard_weight:
        return loss
    hard = fused_linear_ce(
        w, x, y, b=b, chunk=chunk, accum_dtype=accum_dtype, ignore_index=ignore_index,  # type: ignore[arg-type]  # checked
        softcap=how["softcap"], logit_scale=how["logit_scale"], token_weight=token_weight,
        reduction=reduction, n_valid=n_valid,
    )  # fmt: skip
    return (1 - hard_weight) * loss + hard_weight * hard


_SPECS = {
    "w": "v d", "x": "... d", "teacher_w": "v e", "teacher_x": "... e", "y": "? int ...",
    "b": "? v", "teacher_b": "? v", "token_weight": "? ...", "values": "... k",
    "indices": "int ... k",
}  # fmt: skip


def _check_topk(
    op: str, tensors: dict[str, Any], topk: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Take the place of the teacher's tensors: log-probabilities (..., k) and their columns."""
    for name in ("teacher_w", "teacher_x", "teacher_b"):
        if tensors[name] is not None:
            raise ValueError(f"{op}: {name} and teacher_logp_topk cannot be given together")
    if not isinstance(topk, tuple) or len(topk) != 2:
        raise TypeError(
            f"{op}: teacher_logp_topk must be (values, indices), got {type(topk).__name__}"
        )
    values, at = topk
    del tensors["teacher_w"], tensors["teacher_x"]
    tensors |= {"values": values, "indices": at}
    return values, at.long() if isinstance(at, Tensor) else at


def _check(op: str, tensors: dict[str, Any], hard_weight: float, how: dict[str, Any]) -> None:
    check_tensors(op, **{name: (t, _SPECS[name]) for name, t in tensors.items()})
    x, y = tensors["x"], tensors["y"]
    for name in ("teacher_x", "values", "indices"):
        t = tensors.get(name, x)
        if t.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"{op}: leading axes are {tuple(t.shape[:-1])} in {name} but "
                f"{tuple(x.shape[:-1])} in x"
            )
    k, v = tensors.get("indices", x).shape[-1], tensors["w"].shape[0]
    if "indices" in tensors and not 0 < k <= v:
        raise ValueError(f"{op}: axis k of indices must be 1 to {v}, got {k}")
    check_rows(op, y, x=x)
    check_rows(op, tensors["token_weight"], "token_weight", "weight", x=x)
    scales = {name: how[name] for name in ("logit_scale", "teacher_logit_scale")}
    check_numbers(op, ignore_index=how["ignore_index"], **scales)
    check_positive(op, "temperature", how["temperature"])
    for name in ("softcap", "teacher_softcap"):
        check_positive(op, name, how[name], optional=True)
    check_share(op, "beta", how["beta"])
    check_share(op, "hard_weight", hard_weight)
    if hard_weight and y is None:
        raise ValueError(f"{op}: y must be given where hard_weight is not 0, got None")
