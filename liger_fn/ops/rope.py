"""Rotary position embedding of queries and keys.

    y = x * cos + rot(x) * sin        on the first r entries of each head; the tail passes through

    layout "half":         rot(x) = (-x2, x1) for the halves x1, x2 of the r entries (NeoX, Llama)
    layout "interleaved":  rot(x) = (-x1, x0, -x3, x2, ...); pair i turns by entry i of cos and sin
                           (GLM)

    q: (..., h, t, k)   k: (..., hk, t, k)   cos, sin: (..., t, r), r <= k

Pullback of dy, since rot is antisymmetric:

    dx   = dy * cos - rot(dy * sin)
    dcos = sum over heads of dy * x,   dsin = sum over heads of dy * rot(x)

y has the dtype of x. The reference takes products in the dtype that x and cos promote to, as torch
does, the kernels in float32 (float64 for float64 x) with one rounding at the end. Backward keeps y,
not x, where the angles have no gradient.
Su et al., 2021, arXiv:2104.09864; half-width form: Black et al., 2022, arXiv:2204.06745.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from liger_fn._check import check_choice, check_same_shape, check_tensors
from liger_fn._launch import launch, tl, triton
from liger_fn._math import up, wide
from liger_fn._vjp import custom_vjp, transformed

# -- reference -------------------------------------------------------------------------------------


def _rot(x: Tensor, layout: str) -> Tensor:
    if layout == "half":
        x1, x2 = x.chunk(2, -1)
        return torch.cat((-x2, x1), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _spread(c: Tensor, layout: str) -> Tensor:
    """Angles of every entry of a head: (..., t, r) to (..., 1, t, r)."""
    if layout == "interleaved":
        c = c[..., : c.shape[-1] // 2].repeat_interleave(2, -1)
    return c.unsqueeze(-3)


def _wide(x: Tensor, cos: Tensor) -> Tensor:
    return x.to(torch.promote_types(wide(x.dtype), cos.dtype))


def _fwd_ref(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str
) -> tuple[Tensor, Tensor]:
    r, cos, sin = cos.shape[-1], _spread(cos, layout), _spread(sin, layout)
    q1, k1 = ((x[..., :r] * cos + _rot(x[..., :r], layout) * sin).to(x.dtype) for x in (q, k))
    return torch.cat((q1, q[..., r:]), -1), torch.cat((k1, k[..., r:]), -1)


def _bwd_ref(
    dq: Tensor | None, dk: Tensor | None, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *,
    layout: str, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    out: list[Tensor | None] = [
        _pull_x(d, x, cos, sin, layout) if want else None
        for want, d, x in zip(wanted[:2], (dq, dk), (q, k), strict=True)
    ]
    return *out, *_pull_angles(dq, dk, q, k, cos, sin, layout, wanted[2:])


def _pull_x(d: Tensor | None, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    if d is None:
        return torch.zeros_like(x)
    r = cos.shape[-1]
    d1 = _wide(d[..., :r], cos)
    d1 = d1 * _spread(cos, layout) - _rot(d1 * _spread(sin, layout), layout)
    return torch.cat((d1.to(x.dtype), d[..., r:]), -1)


def _pull_angles(
    dq: Tensor | None, dk: Tensor | None, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor,
    layout: str, wanted: tuple[bool, ...],
) -> list[Tensor | None]:  # fmt: skip
    out: list[Tensor | None] = []
    if not any(wanted):
        return [None, None]
    r = cos.shape[-1]
    pairs = [
        (_wide(d[..., :r], cos), _wide(x[..., :r], cos))
        for d, x in ((dq, q), (dk, k))
        if d is not None
    ]
    turns: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, lambda x: _rot(x, layout))
    for c, want, turn in zip((cos, sin), wanted, turns, strict=True):
        if not want:
            out.append(None)
            continue
        dc: Tensor = sum((d * turn(x)).sum(-3) for d, x in pairs)  # type: ignore[assignment]  # not 0
        if layout == "interleaved":
            dc = rearrange(dc, "... (p two) -> ... p two", two=2).sum(-1)
            dc = torch.cat((dc, torch.zeros_like(dc)), -1)
        out.append(dc.sum_to_size(c.shape).to(c.dtype))
    return out


# -- kernels ---------------------------------------------------------------------------------------


@triton.jit
def _rope_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, h, t, width, r, xb, xh, xt, yb, yh, yt, angle_b,
    BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # one token and BLOCK_H of its heads; strides of both tensors, so that no layout needs a copy
    token = tl.program_id(0).to(tl.int64)
    b, time = token // t, token % t
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    x_ptr += b * xb + time * xt + head * xh
    y_ptr += b * yb + time * yt + head * yh
    angle = b * angle_b + time * r
    half = r // 2
    col = tl.arange(0, BLOCK)[None, :]
    mask = (head < h) & (col < half)
    one = 2 * col if INTERLEAVED else col
    two = one + (1 if INTERLEAVED else half)
    c1 = tl.load(cos_ptr + angle + col, col < half, other=0.0)
    s1 = tl.load(sin_ptr + angle + col, col < half, other=0.0)
    c2, s2 = c1, s1
    if not INTERLEAVED:
        c2 = tl.load(cos_ptr + angle + half + col, col < half, other=0.0)
        s2 = tl.load(sin_ptr + angle + half + col, col < half, other=0.0)
    x1 = up(tl.load(x_ptr + one, mask, other=0.0))
    x2 = up(tl.load(x_ptr + two, mask, other=0.0))
    c1, s1, c2, s2 = up(c1), up(s1), up(c2), up(s2)
    if BACKWARD:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    tl.store(y_ptr + one, y1, mask)
    tl.store(y_ptr + two, y2, mask)
    for k in range(r, width, BLOCK):
        tail = (head < h) & (k + col < width)
        tl.store(y_ptr + k + col, tl.load(x_ptr + k + col, tail), tail)


def _new_like(x: Tensor) -> Tensor:
    """Empty (b, h, t, k), in memory (b, t, h, k) where x is the transposed view of that."""
    b, h, t, width = math.prod(x.shape[:-3]), *x.shape[-3:]
    if min(h, t) > 1 and x.stride(-2) > x.stride(-3):
        return x.new_empty(b, t, h, width).transpose(1, 2)
    return x.new_empty(b, h, t, width)


def _empty_like(x: Tensor) -> Tensor:
    """What comes out for x: a gradient lies in memory as its primal does, angles are contiguous."""
    if x.dim() < 3:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return _new_like(x).view(x.shape)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, layout: str, like: Tensor, *, backward: bool
) -> Tensor:
    lead, (h, t, width), r = x.shape[:-3], x.shape[-3:], cos.shape[-1]
    y, x4 = _new_like(like), x.reshape(math.prod(lead), h, t, width)
    if x.numel() == 0:
        return y.view(x.shape)
    x4 = x4 if x4.stride(-1) == 1 else x4.contiguous()
    shared = math.prod(cos.shape[:-2]) == 1
    cos, sin = ((c if shared else c.expand(*lead, t, r)).contiguous() for c in (cos, sin))
    block = triton.next_power_of_2(max(r // 2, 1))
    block_h = min(triton.next_power_of_2(h), max(1, 2048 // block))
    launch(
        _rope_kernel, (x4.shape[0] * t, -(-h // block_h)), x4, y, cos, sin, h, t, width, r,
        *x4.stride()[:3], *y.stride()[:3], 0 if shared else t * r,
        BACKWARD=backward, INTERLEAVED=layout == "interleaved", BLOCK_H=block_h, BLOCK=block,
    )  # fmt: skip
    return y.view(x.shape)


def _fwd_triton(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str
) -> tuple[Tensor, Tensor]:
    q, k = (_rotate(x, cos, sin, layout, x, backward=False) for x in (q, k))
    return q, k


def _bwd_triton(
    dq: Tensor | None, dk: Tensor | None, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *,
    layout: str, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    out = [
        None if not want
        else _empty_like(x).zero_() if d is None
        else _rotate(d, cos, sin, layout, x, backward=True)
        for want, d, x in zip(wanted[:2], (dq, dk), (q, k), strict=True)
    ]  # fmt: skip
    return *out, *_pull_angles(dq, dk, q, k, cos, sin, layout, wanted[2:])


def _fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str) -> tuple[Tensor, Tensor]:
    return _empty_like(q), _empty_like(k)


# -- rules: of angles that have gradients, which need q and k, and of those that have none ---------

_bwd: Any = {"reference": _bwd_ref, "triton": _bwd_triton}
_shared: Any = {
    "fwd": {"reference": _fwd_ref, "triton": _fwd_triton}, "rows": ("q", "k", "cos", "sin"),
    "fake": _fake, "layout": _empty_like,
    "axes": "... h t [k], ... h t [k], ... t [r], ... t [r] -> ... h t [k], ... h t [k]",
}  # fmt: skip


def _fixed_bwd(rule: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Of q and k it asks dtype, shape and layout alone, which their results have too."""

    def fixed(
        dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, q1: Tensor, k1: Tensor, *,
        layout: str, wanted: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        return rule(dq, dk, q1, k1, cos, sin, layout=layout, wanted=(*wanted, False, False))[:2]

    return fixed


_rope = custom_vjp("rope", bwd=_bwd, differentiable=("q", "k", "cos", "sin"), outputs=2, **_shared)
_fixed = custom_vjp(
    "rope_fixed", bwd={kind: _fixed_bwd(rule) for kind, rule in _bwd.items()},
    differentiable=("q", "k"), outputs=("q1", "k1"), **_shared,
)  # fmt: skip


def check_turn(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, tables: int = 0) -> None:
    """Hold heads and cosines together; the first axes of cos may count `tables`."""
    check_tensors(
        op, q=(q, "... h t k"), k=(k, "... hk t k"), cos=(cos, "... t r"), sin=(sin, "... t r")
    )
    check_same_shape(op, cos=cos, sin=sin)
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            f"{op}: leading axes are {tuple(k.shape[:-3])} in k but {tuple(q.shape[:-3])} in q"
        )
    lead, own, r = q.shape[:-3], tuple(cos.shape[tables:-2]), cos.shape[-1]
    if r % 2 or r > q.shape[-1]:
        raise ValueError(f"{op}: axis r of cos must be even and at most {q.shape[-1]}, got {r}")
    full = (1,) * (len(lead) - len(own)) + own
    if len(own) > len(lead) or any(n not in (1, size) for n, size in zip(full, lead, strict=True)):
        raise ValueError(f"{op}: leading axes of cos must broadcast to {tuple(lead)}, got {own}")


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Call the rule with as many axes in the tables as it wants."""
    ones = (1,) * (q.dim() - 1 - cos.dim())
    cos, sin = (c.reshape(*ones, *c.shape) for c in (cos, sin))
    learned = cos.requires_grad or sin.requires_grad or transformed()
    return (_rope if learned else _fixed)(q, k, cos, sin, layout=layout)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "half"
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by the angles of their positions.

    Args:
        q: queries (..., h, t, k), any strides: the transposed view of (..., t, h, k) is read in
            place.
        k: keys (..., hk, t, k); hk may differ from h.
        cos: cosines (..., t, r) with r <= k even; leading axes broadcast to those of q without the
            heads, so one table serves a batch or each row has its own positions. Any floating
            dtype.
        sin: sines, shaped as cos.
        layout: "half" pairs entry i with i + r/2, each half reading its own columns of cos and sin;
            "interleaved" pairs entries 2i and 2i + 1, which both read column i < r/2.

    Returns:
        The turned (q, k), shaped and typed like the arguments; entries from r on are unchanged, bit
        for bit.

    Raises:
        ValueError: axes disagree, r is odd or above k, cos does not broadcast, or layout is
            unknown.
        TypeError: an argument is not a floating tensor.

    Example:
        >>> one = torch.tensor([[[1.0, 0.0]]])
        >>> rope(one, one, torch.zeros(1, 2), torch.ones(1, 2))[0]
        tensor([[[0., 1.]]])

    References:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
        arXiv:2104.09864.
    """
    check_turn("rope", q, k, cos, sin)
    check_choice("rope", "layout", layout, ("half", "interleaved"))
    return turned(q, k, cos, sin, layout)
