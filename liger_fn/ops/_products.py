"""The products of a language model head and the dtypes they run in.

    z = x w^T + b        dx = dz w        dw = dz^T x        db = sum of dz

Half precision products accumulate in float32 inside; on a CPU they run in float32.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from liger_fn._math import wide
from liger_fn._vjp import tracked

_AUTOCAST = ("cpu", "cuda", "xpu", "mps")  # a meta tensor has none


def product_dtype(w: Tensor, x: Tensor, b: Tensor | None) -> torch.dtype:
    """What the operands of w, x and b are cast to: autocast's dtype, else what they promote to."""
    dtype = torch.promote_types(w.dtype, x.dtype)
    if b is not None:
        dtype = torch.promote_types(dtype, b.dtype)
    kind = x.device.type
    if dtype != torch.float64 and kind in _AUTOCAST and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return dtype


def logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """bfloat16 logits have the range of float32; float16 ones overflow, and a CPU gains nothing."""
    return dtype if dtype != torch.float16 and device.type != "cpu" else wide(dtype)


def operand_dtype(compute: torch.dtype, device: torch.device) -> torch.dtype:
    """What goes into the products: on a CPU in the dtype of logits, rounded to `compute` before."""
    return compute if device.type != "cpu" else logits_dtype(compute, device)


def dx_dtype(x: Tensor, compute: torch.dtype) -> torch.dtype:
    """What dx rounds to as it is formed: to no less than x does, to float16 only when scaled."""
    half = x.dtype.itemsize < 4 and compute != torch.float16 and x.device.type != "cpu"
    return compute if half else wide(compute)


def logits(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """x w^T + b of one chunk, all of one dtype, in the dtype of logits."""
    zdtype = logits_dtype(x.dtype, x.device)
    if x.device.type == "cpu":
        x, w = x.to(zdtype), w.to(zdtype)
    return mm(x, w.t(), zdtype, None, b)


def kept_products(
    dz: Tensor, scale: Tensor, w: Tensor, x: Tensor, live: Tensor, compute: torch.dtype,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """scale * dz^T x and scale * dz w of a single step."""
    operand, flat = operand_dtype(compute, x.device), x.reshape(-1, x.shape[-1])
    dz, dw, dx = dz.view(flat.shape[0], -1), None, None
    with autocast_off(x.device.type):
        if wanted[0]:
            at = torch.where(live.reshape(-1, 1), flat.to(compute), 0.0)
            at = scaled(at, scale, operand)
            sums = torch.promote_types(w.dtype, operand)
            dw = accumulate(None, dz.t(), at, sums, False).to(w.dtype)
        if wanted[1]:
            dx = mm(dz, w.to(compute).to(operand), dx_dtype(x, compute))
            dx = scaled(dx, scale, x.dtype).view(x.shape)
    return dw, dx


def held_products(
    blocks: Iterable[tuple[slice, Tensor]], w: Tensor, x: Tensor, live: Tensor,
    compute: torch.dtype, wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dz^T x, dz w and sum of dz, from blocks of columns of dz: dw needs no sums over tokens."""
    operand, own = operand_dtype(compute, x.device), not tracked()
    at = torch.where(live[:, None], x.to(compute), 0.0).to(operand)
    sums, wide_w = torch.promote_types(w.dtype, operand), w.to(compute).to(operand)
    dw = w.new_empty(w.shape, dtype=sums) if own and wanted[0] else None
    dws, dbs, dx = [], [], None
    with autocast_off(x.device.type):
        for columns, dz in blocks:
            if wanted[2]:
                dbs.append(over_tokens(dz))
            dz = dz.to(operand)
            if wanted[0]:
                dws.append(mm(dz.t(), at, sums, None if dw is None else dw[columns]))
            if wanted[1]:
                dx = accumulate(dx, dz, wide_w[columns], wide(compute), own)
    if wanted[0]:
        dw = torch.cat(dws) if dw is None else dw
    return dw, dx, torch.cat(dbs) if wanted[2] else None


def scaled(g: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """scale * g in `dtype`, in one pass where nobody differentiates it.

    g may be (v, d) in float32.
    """
    if scale is None:
        return g.to(dtype)
    if tracked():
        return (g * scale).to(dtype)
    # one axis, so that a float32 scale is not rounded to a half g first
    return torch.mul(g, scale.view(1), out=torch.empty_like(g, dtype=dtype))


def over_tokens(dz: Tensor) -> Tensor:
    """Sum over tokens, cheap enough to round but once."""
    return dz.sum(0, dtype=torch.float64 if dz.device.type != "mps" else wide(dz.dtype))


def autocast_off(kind: str) -> AbstractContextManager[Any]:
    """Whatever the caller has set: operands are cast already."""
    return torch.autocast(kind, enabled=False) if kind in _AUTOCAST else nullcontext()


def mm(
    a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None,
    plus: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a @ b + plus, rounded to `dtype` once."""
    more: dict[str, Any] = {} if a.dtype == dtype else {"out_dtype": dtype}
    more |= {} if out is None else {"out": out}
    return torch.mm(a, b, **more) if plus is None else torch.addmm(plus.to(dtype), a, b, **more)


def accumulate(sums: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype, own: bool) -> Tensor:
    """sums + a @ b in `dtype`, in place where the sums are our own."""
    if sums is None:
        return mm(a, b, dtype) if dtype != torch.bfloat16 or a.dtype == dtype else (a @ b).to(dtype)
    if a.dtype == dtype:
        return torch.addmm(sums, a, b, out=sums) if own else torch.addmm(sums, a, b)
    if dtype == torch.float32:
        return torch.addmm(sums, a, b, out_dtype=dtype, out=sums if own else None)
    return sums.add_((a @ b).to(dtype)) if own else sums + (a @ b).to(dtype)
