"""A vocabulary sharded over the ranks of a group: each has some rows of w, all have x and y.

Per chunk of tokens: local statistics of its rows, one all-gather of them (6 float32 numbers a token
and rank, 9 with the statistics of log-probabilities), combined alike on every rank, so that results
are equal bit for bit; then the local gradient. dX is a sum over ranks: one all-reduce a backward,
in its dtype. dW and db need none.

    top = max of top_r,  f_r = exp(top_r - top),  lse = top + log(sum of f_r * total_r)

Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_fn._launch import rows_of
from liger_fn._math import wide
from liger_fn._vjp import custom_vjp, tracked
from liger_fn.ops._ce import Row
from liger_fn.ops._chunked import Rows
from liger_fn.ops._collectives import Shard, gathered, summed
from liger_fn.ops._vocab_rows import (
    gradient_ref,
    gradient_triton,
    statistics_ref,
    statistics_triton,
)

_KERNELS: dict[Any, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "reference": (statistics_ref, gradient_ref),
    "triton": (statistics_triton, gradient_triton),
}


# -- statistics of whole rows ----------------------------------------------------------------------


class Whole(NamedTuple):
    """What is known of each row over all shards; the last three only where asked for."""

    top: Tensor
    logsum: Tensor
    zy: Tensor
    first: Tensor
    spread: Tensor  # sum of c * (z - top)
    weights: Tensor
    along: Tensor | None = None
    squares: Tensor | None = None
    plain: Tensor | None = None


def combined(parts: Tensor) -> Whole:
    """From statistics of shards, (ranks, m, columns)."""
    tops, totals, zy, firsts, spreads, weights, *more = parts.unbind(-1)
    top = tops.amax(0)
    down = torch.where(tops == -torch.inf, 0.0, tops - top)  # their sums are 0
    f = (tops - top).exp()
    total = (f * totals).sum(0)
    first = torch.where(tops == top, firsts, torch.inf).amin(0)
    spread = (spreads + weights * down).sum(0)
    whole = Whole(top, total.log(), zy.sum(0), first, spread, weights.sum(0))
    if not more:
        return whole
    along = (f * (more[0] + totals * down)).sum(0) / total
    return whole._replace(
        along=along, squares=(f * f * more[1]).sum(0) / total**2, plain=more[2].sum(0)
    )


class Targets(NamedTuple):
    """Where the targets of rows are."""

    at: Tensor  # in this shard; -1 elsewhere, -2 ignored
    live: Tensor
    bad: Tensor
    safe: Tensor  # a column of the whole vocabulary

    def settled(self, t: Tensor) -> Tensor:
        """Results of rows: NaN where a target is no column, 0 where it is ignored."""
        return torch.where(self.live, t.masked_fill(self.bad, torch.nan), 0.0)


def targets(y: Tensor, width: int, shard: Shard, ignore_index: int) -> Targets:
    """Where the targets y of rows lie, in this shard and in the whole vocabulary."""
    live = y != ignore_index
    bad = live & ((y < 0) | (y >= shard.vocab))
    here = (y >= shard.start) & (y < shard.start + width) & ~bad
    at = torch.where(live, torch.where(here, y - shard.start, -1), -2)
    return Targets(at, live, bad, torch.where(live & ~bad, y, 0).long())


def _statistics(
    kernels: tuple[Callable[..., Tensor], Callable[..., Tensor]], z: Tensor, t: Targets,
    c: Tensor | None, shard: Shard, row: Row, temperature: float, stats: bool,
) -> Whole:  # fmt: skip
    if shard.group is not None and tracked(z):
        raise NotImplementedError(
            "a sharded vocabulary has first derivatives in reverse mode only: no forward mode, no "
            "derivative of a gradient"
        )
    found = kernels[0](z, t.at, c, shard.start, row, temperature, stats)
    return combined(gathered(found, shard.group))


# -- cross entropy ---------------------------------------------------------------------------------


def _ce_results(
    s: Whole, y: Tensor, t: Targets, weight: Tensor | None, row: Row, shard: Shard
) -> tuple[Tensor, ...]:
    own = 1.0 if weight is None else weight.to(s.top.dtype)[t.safe]
    nll = (1 - row.label_smoothing) * own * (s.logsum - (s.zy - s.top))
    if row.label_smoothing:
        share = row.label_smoothing / shard.vocab
        nll = nll + share * (s.weights * s.logsum - s.spread)
    zsq = own * (s.top + s.logsum) ** 2
    correct = t.live & ~t.bad & (s.first == y)
    return t.settled(nll), t.settled(zsq), correct


def _ce_factors(
    d_nll: Tensor | None, d_zsq: Tensor | None, top: Tensor, logsum: Tensor, t: Targets,
    weight: Tensor | None, row: Row, shard: Shard,
) -> Tensor:  # fmt: skip
    own = torch.ones_like(top) if weight is None else weight.to(top.dtype)[t.safe]
    weights = shard.vocab if weight is None else weight.to(top.dtype).sum()
    zero, share = torch.zeros_like(top), row.label_smoothing / shard.vocab
    d = zero if d_nll is None else d_nll.to(top.dtype)
    of_one = d * (1 - row.label_smoothing) * own
    of_p = of_one + d * share * weights
    if d_zsq is not None:
        of_p = of_p + d_zsq.to(top.dtype) * 2 * own * (top + logsum)
    of_p = of_p.masked_fill(t.bad, torch.nan)
    return torch.stack([top, logsum, of_p, zero, zero, -of_one, -d * share], -1)


def _columns(weight: Tensor | None, width: int, shard: Shard) -> Tensor | None:
    return None if weight is None else weight[shard.start : shard.start + width]


def ce_rows(
    backend: Any, z: Tensor, y: Tensor, a: Tensor | None, e: Tensor | None, gradient: bool, *,
    class_weight: Tensor | None, row: Row, shard: Shard,
) -> tuple[tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    """The row pass of `fused_linear_ce` on a shard; the kernels write dz over z."""
    kernels, t = _KERNELS[backend], targets(y, z.shape[1], shard, row.ignore_index)
    c = _columns(class_weight, z.shape[1], shard)
    s = _statistics(kernels, z, t, c, shard, row, 1.0, False)
    results = _ce_results(s, y, t, class_weight, row, shard)
    if not gradient:
        return results, None
    a = torch.ones_like(s.top) if a is None and e is None else a
    factors = _ce_factors(a, e, s.top, s.logsum, t, class_weight, row, shard)
    return results, kernels[1](z, t.at, c, factors, row, 1.0)


def _ce_fwd(
    backend: Any, logits: Tensor, y: Tensor, class_weight: Tensor | None, *,
    ignore_index: int, label_smoothing: float, logit_scale: float, softcap: float | None,
    group: str, start: int, vocab: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    row, shard = (
        Row(ignore_index, label_smoothing, logit_scale, softcap),
        Shard(group, start, vocab),
    )
    width, flat = logits.shape[-1], y.reshape(-1)
    z, t = rows_of(logits, width).contiguous(), targets(flat, width, shard, ignore_index)
    c = _columns(class_weight, width, shard)
    s = _statistics(_KERNELS[backend], z, t, c, shard, row, 1.0, False)
    found = (*_ce_results(s, flat, t, class_weight, row, shard), s.top, s.logsum)
    return tuple(r.view(y.shape) for r in found)


def _ce_bwd(
    backend: Any, d_nll: Tensor | None, d_zsq: Tensor | None, d_correct: None, logits: Tensor,
    y: Tensor, class_weight: Tensor | None, top: Tensor, logsum: Tensor, *,
    ignore_index: int, label_smoothing: float, logit_scale: float, softcap: float | None,
    group: str, start: int, vocab: int, wanted: tuple[bool, ...],
) -> tuple[Tensor]:  # fmt: skip
    row, shard = (
        Row(ignore_index, label_smoothing, logit_scale, softcap),
        Shard(group, start, vocab),
    )
    width = logits.shape[-1]
    z, t = rows_of(logits, width).contiguous(), targets(y.reshape(-1), width, shard, ignore_index)
    d_nll, d_zsq = (None if r is None else r.reshape(-1) for r in (d_nll, d_zsq))
    factors = _ce_factors(
        d_nll, d_zsq, top.reshape(-1), logsum.reshape(-1), t, class_weight, row, shard
    )
    place = {"dz": torch.empty_like(z)} if backend == "triton" else {}
    c = _columns(class_weight, width, shard)
    dz = _KERNELS[backend][1](z, t.at, c, factors, row, 1.0, **place)
    return (dz.view(logits.shape).to(logits.dtype),)


def _ce_fake(
    logits: Tensor, y: Tensor, class_weight: Tensor | None, **_: Any
) -> tuple[Tensor, ...]:
    nll = y.new_empty(y.shape, dtype=wide(logits.dtype))
    zsq, top, logsum = (torch.empty_like(nll) for _ in range(3))
    return nll, zsq, torch.empty_like(nll, dtype=torch.bool), top, logsum


ce_on_shard = custom_vjp(
    "cross_entropy_shard",
    fwd={backend: partial(_ce_fwd, backend) for backend in _KERNELS},
    bwd={backend: partial(_ce_bwd, backend) for backend in _KERNELS},
    differentiable=("logits",),
    outputs=3,
    opaque=True,
    fake=_ce_fake,
)


# -- log-probabilities -----------------------------------------------------------------------------


def logp_rows(
    backend: Any, z: Tensor, y: Tensor, *cotangents: Any, row: Row, temperature: float,
    stats: bool, shard: Shard, columns: int = 0,
) -> tuple[tuple[Tensor, ...], Any]:  # fmt: skip
    """The row pass of `fused_linear_logp` on a shard; the kernels write dz over z.

    Not over logits that are held: of those dz comes in blocks of so many columns.
    """
    *ds, gradient = cotangents
    kernels, t = _KERNELS[backend], targets(y, z.shape[1], shard, row.ignore_index)
    s = _statistics(kernels, z, t, None, shard, row, temperature, stats)
    parts = [(s.zy - s.top) - s.logsum]
    if s.along is not None and s.squares is not None and s.plain is not None:
        parts += [s.logsum - s.along, s.squares.log(), s.plain / shard.vocab]
    found = [t.settled(part) for part in parts]
    if stats:
        found.append(t.live & ~t.bad & (s.first == y))
    if not gradient:
        return tuple(found), None
    zero = torch.zeros_like(s.top)
    d_logp, d_entropy, d_sum_sq, d_mean = (
        zero if d is None else d.to(zero.dtype) for d in (*ds, None, None, None)[:4]
    )
    of_p, of_pp = -d_logp, zero
    if stats:
        of_p = of_p - d_entropy * parts[1] - 2 * d_sum_sq
        of_pp = 2 * d_sum_sq * (-parts[2]).exp()
    of_p = of_p.masked_fill(t.bad, torch.nan)
    factors = [s.top, s.logsum, of_p, -d_entropy, of_pp, d_logp, d_mean / shard.vocab]
    pull = partial(kernels[1], row=row, temperature=temperature)
    if columns:
        return tuple(found), _blocks(pull, z, t.at, torch.stack(factors, -1), columns)
    return tuple(found), pull(z, t.at, None, torch.stack(factors, -1))


def _blocks(
    pull: Callable[..., Tensor], z: Tensor, at: Tensor, factors: Tensor, columns: int
) -> Iterator[tuple[slice, Tensor]]:
    """The gradient of z in blocks of columns, each valid until the next."""
    buffer = z.new_empty(z.shape[0] * columns)
    for start in range(0, z.shape[1], columns):
        block = z[:, start : start + columns]
        here = (at >= start) & (at < start + columns)
        own = torch.where(at < 0, at, torch.where(here, at - start, -1))
        dz = buffer[: block.numel()].view(block.shape)
        yield slice(start, start + columns), pull(block, own, None, factors, dz=dz)


# -- rules of a head become rules of its shard -----------------------------------------------------


# row passes on each backend
CE_SHARD: dict[Any, Rows] = {kind: partial(ce_rows, kind) for kind in _KERNELS}
LOGP_SHARD: dict[Any, Rows] = {kind: partial(logp_rows, kind) for kind in _KERNELS}


def on_shard(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a head, told which shard its rows are of; a pullback sums dX over the ranks."""
    signature = inspect.signature(rule)
    pullback = [*signature.parameters][1].startswith("d_")

    def run(
        rows: Any, *tensors: Any, group: str, start: int, vocab: int, **options: Any
    ) -> tuple[Tensor | None, ...]:
        out = rule(partial(rows, shard=Shard(group, start, vocab)), *tensors, **options)
        if not pullback or out[1] is None:
            return out
        return out[0], summed(out[1], group), *out[2:]  # dX is fresh: its rule made it

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(name, keyword, annotation=kind)
        for name, kind in (("group", str), ("start", int), ("vocab", int))
    ]
    rest = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    run.__signature__ = signature.replace(parameters=[*rest, *more])  # type: ignore[attr-defined]  # functions take attributes
    return run
