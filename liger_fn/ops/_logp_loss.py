"""Losses that are plain algebra on log-probabilities, under a head.

A loss is a sum over sequences (or pairs of them) of f(logp). While one of them fits a chunk, its
gradients are formed in the forward pass, as those of a cross entropy are:

    z = x w^T + b    logp = z[y] - lse    c = df / dlogp    dz = c * (onehot(y) - p)    dx, dw, db

one row pass gives logp (and, if asked, the entropy), plain torch differentiates f for c, a number
for each token, and a second row pass turns z into dz: 3 products. Beyond that `fused_linear_logp`
goes over the tokens twice: 4 products, in a memory that does not grow with the length of a
sequence.

On a shard of the vocabulary each row pass gathers its statistics over the ranks: two exchanges a
chunk, one without gradients. What follows from logp is alike on all ranks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_fn._check import NUMBERS
from liger_fn._math import wide
from liger_fn._vjp import derivative, plain
from liger_fn.ops._chunked import Chunk, Rows, chunk_size
from liger_fn.ops._collectives import shard_of
from liger_fn.ops._linear_rules import formed_fake, head_rule, is_kept, settled
from liger_fn.ops._logp import LOGP_PASSES, logp_loop
from liger_fn.ops._products import product_dtype
from liger_fn.ops._sequences import Head
from liger_fn.ops._vocab_parallel import LOGP_SHARD
from liger_fn.ops.fused_linear_logp import fused_linear_logp, fused_linear_logp_with_stats

# (logp (n, t), y (n, t), *tensors, **options) to a sum over sequences: plain torch. Tensors are
# None, a scalar, or something for each of the n sequences
Algebra = Callable[..., Tensor]
_ALGEBRA: dict[str, tuple[Algebra, int]] = {}
_TENSORS = 4


def algebra(name: str, together: int) -> Callable[[Algebra], Algebra]:
    """Register the algebra of a loss; sequences i, n / together + i, ... belong together."""

    def register(f: Algebra) -> Algebra:
        _ALGEBRA[name] = f, together
        return f

    return register


def logp_loss(
    name: str, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, head: Head,
    *tensors: Tensor | None, entropy: bool = False, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the loss of that name, with gradients for w, x and b; logp and the entropy without.

    The entropy is empty unless asked for.
    """
    f, together = _ALGEBRA[name]
    compute, widest = product_dtype(w, x, b), w.shape[0]
    shard: dict[str, Any] = {}
    if head.group is not None:
        place, widest = shard_of(name, head.group, widest, "w")
        shard = place._asdict()
    fit = head.chunk or chunk_size(widest, compute, x.device)
    tensors = tuple(None if t is None else t.detach() for t in tensors)
    tensors += (None,) * (_TENSORS - len(tensors))
    if 0 < together * y.shape[1] <= fit and y.shape[0] > 0 and not plain():
        how = {**head._asdict(), "chunk": fit if shard else head.chunk or 0}  # alike on all ranks
        del how["group"]
        loss, *found = _rules[1 if shard else 0](
            w, x, b, y.long(), *tensors, loss=_spell(name, _constant(tuple(options.items()))),
            entropy=entropy, compute=compute, **how, **shard,
        )  # fmt: skip
        return loss, found[0].detach(), found[1].detach()
    if entropy:
        logp, each, *_ = fused_linear_logp_with_stats(w, x, y, b=b, **head._asdict())
    else:
        logp = fused_linear_logp(w, x, y, b=b, **head._asdict())
        each = logp.new_empty(0)
    return f(logp, y, *tensors, **options), logp.detach(), each.detach()


@algebra("pairs", together=2)
@algebra("sequences", together=1)
def _nothing(logp: Tensor, y: Tensor, *tensors: None) -> Tensor:
    return logp.new_zeros(())


def pair_logp(w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, head: Head) -> Tensor:
    """log p(y) in the chunks of a loss on pairs: a policy that is its reference has its bits."""
    return logp_loss("pairs", w, x, y, b, head)[1]


def whole_logp(w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, head: Head) -> Tensor:
    """log p(y) in the chunks of a loss on single sequences."""
    return logp_loss("sequences", w, x, y, b, head)[1]


def _constant(value: Any) -> Any:
    """Without symbols: Dynamo makes one of a number that it has seen change."""
    if isinstance(value, (tuple, list)):
        return tuple([_constant(v) for v in value])
    if not torch.compiler.is_compiling() or not isinstance(value, NUMBERS):
        return value
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # not at import: it takes long

    return guard_scalar(value)


def _spell(name: str, options: tuple[tuple[str, Any], ...]) -> str:
    """A loss as an option of a registered op, which takes no functions."""
    return json.dumps([name, dict(options)])


_spell._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as backend_for in _launch


@functools.lru_cache(256)  # beta may change from step to step
def _read(loss: str) -> tuple[Algebra, int]:
    name, options = json.loads(loss)
    f, together = _ALGEBRA[name]
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return functools.partial(f, **given), together


# -- rule ------------------------------------------------------------------------------------------


def _fwd(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, t0: Tensor | None,
    t1: Tensor | None, t2: Tensor | None, t3: Tensor | None, *,
    loss: str, ignore_index: int, logit_scale: float, softcap: float | None, temperature: float,
    chunk: int, compute: torch.dtype, accum_dtype: torch.dtype, entropy: bool,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    f, together = _read(loss)
    n, t = y.shape
    tensors = (t0, t1, t2, t3)

    def both(
        z: Tensor, y: Tensor, sequence: Tensor, gradient: bool, **row: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        (logp, *more), _ = rows(z, y, None, False, stats=entropy, **row)
        found = (logp, *more[:1])
        if not gradient:
            return found, None
        at = sequence[::t]
        own = (e[at] if e is not None and e.dim() else e for e in tensors)
        c = derivative(f, logp.view(-1, t), y.view(-1, t), *own)
        return found, rows(z, y, c.reshape(-1), True, stats=False, **row)[1]

    sequence = torch.arange(n, device=y.device).repeat_interleave(t)
    (logp, *more), dw, dx, db = logp_loop(
        both, w, x.reshape(n * t, x.shape[-1]), b, y.reshape(n * t), (sequence,), wanted,
        ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap,
        temperature=temperature, chunk=chunk, compute=compute, accum_dtype=accum_dtype,
        chunks=functools.partial(_whole, n // together, together, t), keep=True,
    )  # fmt: skip
    logp = logp.view(n, t)
    each = more[0].view(n, t) if more else None
    dx = None if dx is None else dx.view(x.shape)
    formed = (logp.new_empty(0) if g is None else g for g in (each, dw, dx, db))
    return f(logp, y, *tensors), logp, *formed


def _whole(groups: int, together: int, t: int, at_once: int) -> list[Chunk]:
    """Chunks of as many groups of sequences as fit, about as many in each."""
    most = max(1, at_once // (together * t))
    each = -(-groups // -(-groups // most))
    return [
        tuple(
            slice((k * groups + i) * t, (k * groups + min(i + each, groups)) * t)
            for k in range(together)
        )
        for i in range(0, groups, each)
    ]


def _bwd(
    rows: Rows, d_loss: Tensor | None, d_logp: Tensor | None, d_entropy: None, w: Tensor, x: Tensor,
    b: Tensor | None, y: Tensor, t0: Tensor | None, t1: Tensor | None, t2: Tensor | None,
    t3: Tensor | None, dw: Tensor, dx: Tensor, db: Tensor, *,
    loss: str, entropy: bool, wanted: tuple[bool, ...], **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    scale, rows = d_loss if d_logp is None else None, functools.partial(rows, stats=False)

    def late(missing: tuple[bool, ...]) -> Sequence[Tensor | None]:
        flat, of = x.reshape(y.numel(), x.shape[-1]), y.reshape(y.numel())
        (logp,), *_ = logp_loop(rows, w, flat, b, of, (None,), (False,) * 3, **options)
        c = derivative(_read(loss)[0], logp.view(y.shape), y, t0, t1, t2, t3)
        if d_logp is not None:
            c = d_logp if d_loss is None else d_loss * c + d_logp
        _, *found = logp_loop(rows, w, flat, b, of, (c.reshape(-1),), missing, **options)
        return [g if i != 1 or g is None else g.view(x.shape) for i, g in enumerate(found)]

    return tuple(settled(wanted, (w, x, b), (dw, dx, db), scale, late, y, **options))


def _fake(
    w: Tensor, x: Tensor, b: Tensor | None, y: Tensor, *tensors: Any, chunk: int,
    compute: torch.dtype, accum_dtype: torch.dtype, entropy: bool, wanted: tuple[bool, ...],
    **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    formed = formed_fake(w, x, b, chunk, compute, accum_dtype, wanted)
    shapes = (), y.shape, y.shape if entropy else (0,)
    return *(x.new_empty(shape, dtype=wide(compute)) for shape in shapes), *formed


def _flops(w: Any, x: Any, *_: Any, out_shape: Any, wanted: Any = (), **__: Any) -> int:
    return 2 * x[0] * x[1] * w[0] * w[1] * (1 if is_kept(out_shape[3]) else 1 + sum(wanted[:2]))


def _late_flops(
    d_loss: Any, d_logp: Any, d_entropy: Any, w: Any, x: Any, *a: Any, wanted: Any, **_: Any
) -> int:
    late = 2 if d_logp is not None else 0
    products = late + sum(wanted[:2]) if late or is_kept(a[6]) else 0
    return 2 * x[0] * x[1] * w[0] * w[1] * products


def _rule(name: str, rows: dict[Any, Rows], shard: bool = False) -> Callable[..., Any]:
    return head_rule(
        name, rows, _fwd, _bwd, outputs=3, fake=_fake, flops=(_flops, _late_flops), shard=shard
    )


# of all columns, and of a shard of them
_rules = (
    _rule("logp_loss", LOGP_PASSES),
    _rule("logp_loss_shard", LOGP_SHARD, shard=True),
)
