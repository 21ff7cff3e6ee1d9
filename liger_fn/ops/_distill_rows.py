"""The row pass of distillation: logits of one chunk to divergences and their gradient.

kl, reverse (KL with the roles swapped), jsd, tvd     as in `_divergence`
cosine    1 - cos(z, zt) = |z/|z| - zt/|zt||**2 / 2, exactly 0 for equals; 1 where one is 0
top k     KL from a teacher of whom k log-probabilities a row are known, the rest in one bucket:
          sum over k of p * (log p - log q) + r * (log r - log(1 - sum of q)), r = 1 - sum of p
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_fn._math import wide
from liger_fn.ops._ce import Row, slope, transformed
from liger_fn.ops._chunked import logits

Passes = tuple[Callable[..., Any], Callable[..., Any]]  # forward and pullback of _divergence
Found = tuple[Tensor, Callable[[Tensor], Tensor]]  # values, and their pullback


def distilled_rows(
    passes: Passes, teacher_w: Tensor | None, teacher_b: Tensor | None, student: Row, teacher: Row,
    how: dict[str, Any], z: Tensor, y: Tensor, a: Tensor | None, teacher_x: Tensor,
    at: Tensor | None, gradient: bool,
) -> tuple[tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    """Values of rows, and where it is asked for the gradient of their logits times a."""
    plain = student.softcap is None and student.logit_scale == 1.0
    zs = z if plain else transformed(z, student)
    valid = y != student.ignore_index
    if at is not None:
        value, pull = _topk(zs, valid, teacher_x, at, how["temperature"])
    else:
        zt = logits(teacher_x, teacher_w, teacher_b)  # type: ignore[arg-type]  # without at it is there
        if teacher.softcap is not None or teacher.logit_scale != 1.0:
            zt = transformed(zt, teacher)
        if how["kind"] == "cosine":
            value, pull = _cosine(zs, valid, zt)
        else:
            value, pull = _divergence(passes, how, zs, zt, y, student.ignore_index)
    if not gradient:
        return (value,), None
    dz = pull(torch.ones_like(value) if a is None else a.to(value.dtype))
    return (value,), dz if plain else dz * slope(z, student, valid)


def _divergence(
    passes: Passes, how: dict[str, Any], zs: Tensor, zt: Tensor, y: Tensor, ignore_index: int
) -> Found:
    forward, pull = passes
    reverse = how["kind"] == "reverse"
    how = {**how, "kind": "kl" if reverse else how["kind"], "ignore_index": ignore_index}
    pair, wanted = (zt, zs) if reverse else (zs, zt), (not reverse, reverse)
    value, stats = forward(*pair, y, **how)
    return value, lambda d: pull(d, *pair, y, stats, **how, wanted=wanted)[reverse]


def _cosine(z: Tensor, valid: Tensor, zt: Tensor) -> Found:
    z, zt = (torch.where(valid[:, None], wide(t), 1.0) for t in (z, zt))
    sizes = [torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (z, zt)]
    empty = (sizes[0] == 0) | (sizes[1] == 0)
    unit, other = (t / torch.where(empty, 1.0, n) for t, n in zip((z, zt), sizes, strict=True))
    apart = unit - other
    value = torch.where(empty[:, 0], 1.0, 0.5 * apart.square().sum(-1))

    def pull(d: Tensor) -> Tensor:
        along = (unit * apart).sum(-1, keepdim=True)
        g = (apart - along * unit) / torch.where(empty, 1.0, sizes[0])
        return torch.where(valid[:, None] & ~empty, d[:, None] * g, 0.0)

    return torch.where(valid, value, 0.0), pull


def _topk(z: Tensor, valid: Tensor, logp: Tensor, at: Tensor, temperature: float) -> Found:
    at = torch.where(valid[:, None], at, 0)
    z = torch.where(valid[:, None], wide(z) / temperature, 0.0)
    logp = torch.where(valid[:, None], logp.to(z.dtype), -math.inf)
    logq, p = z.log_softmax(-1), logp.exp()
    own = logq.gather(-1, at)
    rest = (1 - p.sum(-1)).clamp(min=0) if at.shape[-1] < z.shape[-1] else p.new_zeros(p.shape[:-1])
    log_outside = logq.scatter(-1, at, -math.inf).logsumexp(-1)
    terms = p * torch.where(p > 0, logp - own, 0.0)
    log_rest = torch.where(rest > 0, rest, 1.0).log()
    tail = torch.where(rest > 0, rest * (log_rest - torch.where(rest > 0, log_outside, 0.0)), 0.0)
    value = torch.where(valid, terms.sum(-1) + tail, 0.0)

    def pull(d: Tensor) -> Tensor:
        some = (rest > 0) & (log_outside > -math.inf)
        spread = torch.where(some, log_outside, math.inf)[:, None]
        g = logq.exp() - rest[:, None] * (logq - spread).exp()
        g = g.scatter(-1, at, own.exp() - p) / temperature
        return torch.where(valid[:, None], d[:, None] * g, 0.0)

    return value, pull
