"""Rows of the fused heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from tests.table.losses import (
    ALL,
    ce_oracle,
    divergence_oracle,
    jsd_rows,
    kl_rows,
    labelled,
    plain_ce,
    plain_divergence,
    plain_z_loss,
    tie,
    tvd_rows,
    wide,
)
from tests.table.row import LOGITS, Bench, Draw, Function, Row, bound, first, tanh
from tests.table.shapes import SMALL_HEAD, heads, products


def head(draw: Draw, lead: tuple[int, ...], d: int, v: int, full: bool = True) -> dict[str, Tensor]:
    """A projection whose logits have standard deviation 2."""
    y, *weights = labelled(draw, lead, v, full).items()
    bias = {"b": draw.normal(v)} if full else {}
    w, x = draw.normal(v, d, scale=2 / math.sqrt(d)), draw.normal(*lead, d)
    return {"w": w, "x": x, **dict([y]), **bias, **dict(weights)}


def linear_oracle(
    w: Tensor, x: Tensor, y: Tensor, b: Tensor | None = None, c: Tensor | None = None,
    u: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return ce_oracle(x @ w.mT + (0.0 if b is None else b), y, c, u, **options)


def linear(
    w: Tensor, x: Tensor, y: Tensor, b: Any = None, c: Any = None, u: Any = None, *,
    chunk: Any = 4, **options: Any,
) -> Tensor:  # fmt: skip
    return liger_fn.fused_linear_ce(
        w, x, y, b=b, class_weight=c, token_weight=u, chunk=chunk, **options
    )


def linear_stats(
    w: Tensor, x: Tensor, y: Tensor, b: Any = None, c: Any = None, u: Any = None, *,
    chunk: Any = 4, **options: Any,
) -> Any:  # fmt: skip
    out = liger_fn.fused_linear_ce_with_stats(
        w, x, y, b=b, class_weight=c, token_weight=u, chunk=chunk, **options
    )
    return tuple(out[:3])


def plain_linear_ce(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return plain_ce(wide(F.linear(x, w)), y)


def biased_head(draw: Draw, lead: tuple[int, ...], d: int, v: int) -> dict[str, Tensor]:
    made = head(draw, lead, d, v)
    return {name: made[name] for name in ("w", "x", "y", "b")}


def bare_head(draw: Draw, lead: tuple[int, ...], d: int, v: int) -> dict[str, Tensor]:
    return head(draw, lead, d, v, full=False)


def logp(w: Tensor, x: Tensor, y: Tensor, b: Any = None, chunk: Any = 4, **options: Any) -> Tensor:
    return liger_fn.fused_linear_logp(w, x, y, b=b, chunk=chunk, **options)


def plain_logp(w: Tensor, x: Tensor, y: Tensor, temperature: float = 1.0) -> Tensor:
    z = wide(F.linear(x, w)) / temperature
    return z.log_softmax(-1).gather(-1, y[..., None])[..., 0]


def plain_logp_and_entropy(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    log_p = wide(F.linear(x, w)).log_softmax(-1)
    return log_p.gather(-1, y[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def logp_and_entropy(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return liger_fn.fused_linear_logp_with_stats(w, x, y)[:2]


def logp_stats(w: Tensor, x: Tensor, y: Tensor, b: Any = None, **how: Any) -> Any:
    found = liger_fn.fused_linear_logp_with_stats(w, x, y, b=b, **how)
    return tuple(found[:4])


def logp_oracle(
    w: Tensor, x: Tensor, y: Tensor, b: Tensor | None = None, *, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    z = (x @ w.mT + (0.0 if b is None else b)) * logit_scale
    z = (z if softcap is None else softcap * tanh(z / softcap)) / temperature
    log_p, live = z.log_softmax(-1), y != -100
    p = log_p.exp()
    own = log_p.gather(-1, y.clamp(min=0)[..., None])[..., 0]
    found = own, -(p * log_p).sum(-1), p.square().sum(-1).log(), z.mean(-1)
    return tuple(torch.where(live, t, 0.0) for t in found)


def two_heads(
    draw: Draw, lead: tuple[int, ...], d: int, v: int, full: bool = True, alike: bool = False
) -> dict[str, Tensor]:
    """Student and teacher, whose widths differ by one unless `alike`."""
    made = {}
    for of, width in (("", d), ("teacher_", d if alike else d + 1)):
        made[of + "w"] = draw.normal(v, width, scale=2 / math.sqrt(d))
        made[of + "x"] = draw.normal(*lead, width)
    return made | ({"y": draw.targets(lead, v), "u": draw.normal(*lead)} if full else {})


def distilled(
    w: Tensor, x: Tensor, teacher_w: Tensor, teacher_x: Tensor, y: Any = None, u: Any = None, *,
    of: Function, chunk: Any = 2, **options: Any,
) -> Tensor:  # fmt: skip
    return of(w, x, teacher_w, teacher_x, y=y, token_weight=u, chunk=chunk, **options)


def distilled_oracle(
    w: Tensor, x: Tensor, teacher_w: Tensor, teacher_x: Tensor, y: Any = None, u: Any = None, *,
    softcap: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    z = x @ w.mT
    z = z if softcap is None else softcap * tanh(z / softcap)
    return divergence_oracle(z, teacher_x @ teacher_w.mT, y, u, **options)


def plain_distilled(
    w: Tensor, x: Tensor, teacher_w: Tensor, teacher_x: Tensor, **options: Any
) -> Tensor:
    return plain_divergence(F.linear(x, w), F.linear(teacher_x, teacher_w), **options)


def distillation(of: Function, rows: Function, **options: Any) -> Bench:
    return Bench(
        products(2, 4), "one product for each of the two logits, two more with backward",
        {"llama-3-8b": heads(4096, "llama-3-8b", full=False, alike=True)},
        {**SMALL_HEAD, "full": False, "alike": True}, ("w", "x"), limit="matmul",
        fn=bound(distilled, of=of, chunk=None, **options),
        plain=bound(plain_distilled, rows=rows, **options),
    )  # fmt: skip


def cosine_rows(q: Tensor, p: Tensor) -> Tensor:
    """1 with gradient 0 where a vector is 0: it has no direction."""
    none = (q == 0).all(-1) | (p == 0).all(-1)
    q, p = (torch.where(none[..., None], 1.0, t) for t in (q, p))
    return torch.where(none, 1.0, 1 - F.cosine_similarity(q, p, -1, 0.0))


def head_and_columns(
    draw: Draw, lead: tuple[int, ...], d: int, v: int, k: int
) -> dict[str, Tensor]:
    """A student, and k of the columns of its teacher."""
    made = two_heads(draw, lead, d, v, full=False)
    known = (made["teacher_x"] @ made["teacher_w"].mT).log_softmax(-1).topk(k, -1)
    return {"w": made["w"], "x": made["x"], "logp": known.values, "at": known.indices}


def known_columns(w: Tensor, x: Tensor, logp: Tensor, at: Tensor, chunk: Any = 2) -> Tensor:
    known = (logp, at)
    return liger_fn.fused_linear_kl(w, x, None, None, teacher_logp_topk=known, chunk=chunk)


def known_columns_oracle(w: Tensor, x: Tensor, logp: Tensor, at: Tensor) -> Tensor:
    p, logq = logp.exp(), (x @ w.mT).log_softmax(-1)
    known = torch.zeros_like(logq, dtype=torch.bool).scatter(-1, at, True)
    rest, q_rest = (1 - p.sum(-1)).clamp(min=0), torch.where(known, -math.inf, logq).logsumexp(-1)
    tail = torch.where(rest > 0, rest * (torch.where(rest > 0, rest, 1.0).log() - q_rest), 0.0)
    return ((p * (logp - logq.gather(-1, at))).sum(-1) + tail).mean()


HEAD = {**LOGITS, "d": range(1, 7)}
HEAD_SIZES = {"lead": (2, 3), "d": 4, "v": 7}
DIFF_HEAD = ("w", "x", "b", "u")


ONCE = "one product forward, three with backward"
AGAIN = "one product forward, four with backward: logits are formed again"
PAIR_SIZES = {"lead": (3,), "d": 3, "v": 5}
EACH = {"temperature": 1.5, "softcap": 3.0, "reduction": "none"}
WARM = {"temperature": 1.7, "softcap": 3.0, "logit_scale": 0.8}
ROWS = [
    Row("fused_linear_ce", linear, first(linear_oracle), head, ("w", "x"),
        {**HEAD_SIZES, "full": False}, {**HEAD, "full": [False]}, plain=plain_linear_ce,
        bench=Bench(products(1, 3), ONCE,
                    {"llama-3-8b": heads(8192, "llama-3-8b"),
                     "llama-3-8b, 2k": heads(2048, "llama-3-8b"),
                     "llama-3-8b, 32k": heads(32768, "llama-3-8b"),
                     "llama-2-7b": heads(16384, "llama-2-7b"),
                     "gemma-2-2b": heads(16384, "gemma-2-2b"),
                     "qwen-2.5-7b": heads(8192, "qwen-2.5-7b")},
                    SMALL_HEAD, make=bare_head, fn=liger_fn.fused_linear_ce, limit="matmul")),
    Row("fused_linear_ce-all", bound(linear, **ALL), first(bound(linear_oracle, **ALL)), head,
        DIFF_HEAD, HEAD_SIZES, HEAD, ("b", "c", "u"), block=4),
    Row("fused_linear_ce-none", bound(linear, **ALL, reduction="none"),
        first(bound(linear_oracle, **ALL, reduction="none")), head, DIFF_HEAD, HEAD_SIZES, HEAD,
        ("b", "c", "u"), flops=4 / 3, composed=True),
    Row("fused_linear_ce_with_stats", bound(linear_stats, **ALL), bound(linear_oracle, **ALL), head,
        DIFF_HEAD, HEAD_SIZES, HEAD, ("b", "c", "u"), composed=True,
        flops=2.0,  # gradients of its terms are late
        bench=Bench(products(1, 3), ONCE, {"llama-3-8b": heads(8192, "llama-3-8b")}, SMALL_HEAD,
                    wanted=("w", "x"), make=bare_head, limit="matmul",
                    fn=lambda *a: liger_fn.fused_linear_ce_with_stats(*a, z_loss=1e-4).loss,
                    plain=lambda w, x, y: plain_z_loss(F.linear(x, w), y))),
    Row("fused_linear_logp", bound(logp, temperature=0.7),
        first(bound(logp_oracle, temperature=0.7)), biased_head, ("w", "x", "b"), HEAD_SIZES,
        HEAD, ("b",), flops=4 / 3,
        bench=Bench(products(1, 4), AGAIN,
                    {"llama-3-8b": heads(8192, "llama-3-8b"),
                     "llama-3-8b, 32k": heads(32768, "llama-3-8b")},
                    SMALL_HEAD, wanted=("w", "x"), make=bare_head, limit="matmul",
                    fn=bound(logp, temperature=0.7, chunk=None),
                    plain=bound(plain_logp, temperature=0.7))),
    Row("fused_linear_logp_with_stats", bound(logp_stats, **WARM), bound(logp_oracle, **WARM),
        biased_head, ("w", "x", "b"), HEAD_SIZES, HEAD, ("b",), block=4,
        bench=Bench(products(1, 4), AGAIN, {"llama-3-8b": heads(8192, "llama-3-8b")}, SMALL_HEAD,
                    wanted=("w", "x"), make=bare_head, limit="matmul", fn=logp_and_entropy,
                    plain=plain_logp_and_entropy)),
    Row("fused_linear_kl", bound(distilled, of=liger_fn.fused_linear_kl),
        bound(distilled_oracle, rows=kl_rows), two_heads, ("w", "x"), {**PAIR_SIZES, "full": False},
        {**HEAD, "full": [False]}, composed=True,
        bench=distillation(liger_fn.fused_linear_kl, kl_rows)),
    Row("fused_linear_kl-none", bound(distilled, of=liger_fn.fused_linear_kl, **EACH),
        bound(distilled_oracle, rows=kl_rows, **EACH), two_heads, ("w", "x", "u"), PAIR_SIZES, HEAD,
        ("y", "u"), block=4, flops=20 / 13),  # both logits again; widths 3 and 4
    Row("fused_linear_kl-topk", known_columns, known_columns_oracle, head_and_columns, ("w", "x"),
        {**PAIR_SIZES, "k": 2}, {**HEAD, "k": [1], "v": range(4, 9)}, block=4),
    Row("fused_linear_cosine", bound(distilled, of=liger_fn.fused_linear_cosine),
        bound(distilled_oracle, rows=cosine_rows), two_heads, ("w", "x", "u"), PAIR_SIZES, HEAD,
        ("y", "u"), block=4, bench=distillation(liger_fn.fused_linear_cosine, cosine_rows)),
    Row("fused_linear_jsd", bound(distilled, of=liger_fn.fused_linear_jsd, beta=0.3),
        bound(distilled_oracle, rows=jsd_rows), two_heads, ("w", "x", "u"), PAIR_SIZES, HEAD,
        ("y", "u"), composed=True,
        bench=distillation(bound(liger_fn.fused_linear_jsd, beta=0.3), jsd_rows)),
    Row("fused_linear_tvd", bound(distilled, of=liger_fn.fused_linear_tvd, temperature=1.5),
        bound(distilled_oracle, rows=tvd_rows, temperature=1.5), two_heads, ("w", "x", "u"),
        PAIR_SIZES, HEAD, ("y", "u"), composed=True,
        kink=lambda w, x, v, z, *_, **__: tie(x @ w.mT, z @ v.mT),
        bench=distillation(liger_fn.fused_linear_tvd, tvd_rows, temperature=1.5)),
]  # fmt: skip
