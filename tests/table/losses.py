"""Rows of losses on logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from tests.table.row import LOGITS, Bench, Draw, Function, Row, bound, first, log_softmax, tanh
from tests.table.shapes import SMALL_LOGITS, elements, logits


def ce_rows(
    logits: Tensor, y: Tensor, c: Tensor | None = None, *, label_smoothing: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Per row: cross entropy from log_softmax, and c[y] * lse**2."""
    z = logits * logit_scale
    z = z if softcap is None else softcap * tanh(z / softcap)
    c = torch.ones(z.shape[-1], dtype=z.dtype, device=z.device) if c is None else c
    at, logp = y.clamp(min=0), z.log_softmax(-1)
    own = c[at]
    nll = (label_smoothing - 1) * own * logp.gather(-1, at[..., None])[..., 0]
    nll = nll - label_smoothing / z.shape[-1] * (c * logp).sum(-1)
    live = y != ignore_index
    return torch.where(live, nll, 0.0), torch.where(live, own * z.logsumexp(-1) ** 2, 0.0)


HARD: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 3.0, "logit_scale": 0.7}


def ce_oracle(
    logits: Tensor, y: Tensor, c: Tensor | None = None, u: Tensor | None = None, *,
    z_loss: float = 0.0, reduction: str = "mean", n_valid: float | None = None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    nll, zsq = ce_rows(logits, y, c, **options)
    u = torch.ones_like(nll) if u is None else u
    live = y != options.get("ignore_index", -100)
    n = (live if c is None else torch.where(live, c[y.clamp(min=0)], 0.0)).sum()
    n = n.to(nll.dtype) if n_valid is None else n_valid
    nll, zsq = u * nll, z_loss * u * zsq
    if reduction != "none":
        scale = 1.0 if reduction == "sum" else 1.0 / n
        nll, zsq = nll.sum() * scale, zsq.sum() * scale
    return nll + zsq, nll, zsq


def labelled(draw: Draw, lead: tuple[int, ...], v: int, full: bool) -> dict[str, Tensor]:
    weights = {"c": draw.positive(v), "u": draw.normal(*lead)} if full else {}
    return {"y": draw.targets(lead, v), **weights}


def logits_and_targets(
    draw: Draw, lead: tuple[int, ...], v: int, full: bool = True
) -> dict[str, Tensor]:
    return {"logits": draw.normal(*lead, v, scale=2.0), **labelled(draw, lead, v, full)}


def ce(logits: Tensor, y: Tensor, c: Any = None, u: Any = None, **options: Any) -> Tensor:
    return liger_fn.cross_entropy(logits, y, class_weight=c, token_weight=u, **options)


def ce_stats(logits: Tensor, y: Tensor, c: Any = None, u: Any = None, **options: Any) -> Any:
    out = liger_fn.cross_entropy_with_stats(logits, y, class_weight=c, token_weight=u, **options)
    return tuple(out[:3])


def plain_ce(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def wide(t: Tensor) -> Tensor:
    """Logits as users hand them to a loss: in float32 where they were formed in less."""
    return t if t.dtype == torch.float64 else t.float()


def plain_z_loss(logits: Tensor, y: Tensor) -> Tensor:
    return plain_ce(wide(logits), y) + 1e-4 * wide(logits).logsumexp(-1).square().mean()


ALL = {**HARD, "z_loss": 0.2}


def kl_rows(q: Tensor, p: Tensor) -> Tensor:
    q, p = log_softmax(q), log_softmax(p)
    return (p.exp() * (p - q)).sum(-1)


def jsd_rows(q: Tensor, p: Tensor, beta: float = 0.3) -> Tensor:
    """As TRL's GKD trainer has it."""
    q, p = log_softmax(q), log_softmax(p)
    m = torch.logaddexp(q + math.log(1 - beta), p + math.log(beta))
    return (beta * p.exp() * (p - m) + (1 - beta) * q.exp() * (q - m)).sum(-1)


def tvd_rows(q: Tensor, p: Tensor) -> Tensor:
    if q.dtype != torch.float64:
        return 0.5 * (p.softmax(-1) - q.softmax(-1)).abs().sum(-1)
    q, p = log_softmax(q), log_softmax(p)
    near = (p - q).abs() < 1  # there a difference of probabilities would lose their digits
    apart = q.exp() * torch.where(near, p - q, 0.0).expm1()
    return 0.5 * torch.where(near, apart, p.exp() - q.exp()).abs().sum(-1)


def divergence_oracle(
    student: Tensor, teacher: Tensor, y: Tensor | None = None, u: Tensor | None = None, *,
    rows: Callable[..., Tensor], temperature: float = 1.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    loss = rows(student / temperature, teacher / temperature)
    live = torch.ones_like(loss) if y is None else (y != -100).to(loss)
    loss = loss * live if u is None else loss * live * u
    return loss if reduction == "none" else loss.sum() / live.sum()


def divergence(
    student: Tensor, teacher: Tensor, y: Any = None, u: Any = None, *, of: Callable[..., Tensor],
    **options: Any,
) -> Tensor:  # fmt: skip
    return of(student, teacher, y=y, token_weight=u, **options)


def student_and_teacher(
    draw: Draw, lead: tuple[int, ...], v: int, full: bool = True
) -> dict[str, Tensor]:
    made = {name: draw.normal(*lead, v, scale=2.0) for name in ("student", "teacher")}
    return made | ({"y": draw.targets(lead, v), "u": draw.normal(*lead)} if full else {})


def tie(student: Tensor, teacher: Tensor, *_: Any, **__: Any) -> bool:
    """Whether rounding decides which of p and q is larger somewhere: there tvd has a kink.

    So it does where rows are permutations of one another. Logits off by d each move log p by at
    most 2 d (1 - p).
    """
    eps = torch.finfo(wide(student).dtype).eps
    q, p = (log_softmax(t.double() / 1.5) for t in (student, teacher))
    d = 4 * eps * torch.maximum(student.abs().amax(), teacher.abs().amax()).double()
    return bool(((p - q).abs() < -d * (p.expm1() + q.expm1())).any())


def plain_divergence(student: Tensor, teacher: Tensor, **options: Any) -> Tensor:
    return divergence_oracle(wide(student), wide(teacher), **options)


def kept_teacher(plain: Function, name: str = "llama-2-7b") -> Bench:
    return Bench(
        elements(2, 5),
        "read both logits; backward reads them again, writes the student's gradient",
        {name: logits(8192, name)},
        SMALL_LOGITS,
        ("student",),
        plain=plain,
    )


CE_SIZES = {"lead": (2, 3), "v": 7}
DIFF_LOGITS = ("logits", "u")
PAIR = ("student", "teacher")
CE_WORK = "read logits; backward reads them again, writes their gradient"
ROWS = [
    Row("kl_div", bound(divergence, of=liger_fn.kl_div), bound(divergence_oracle, rows=kl_rows),
        student_and_teacher, PAIR, {**CE_SIZES, "full": False}, {**LOGITS, "full": [False]},
        bench=kept_teacher(bound(plain_divergence, rows=kl_rows), "llama-3-8b")),
    Row("kl_div-all-none", bound(divergence, of=liger_fn.kl_div, temperature=1.5, reduction="none"),
        bound(divergence_oracle, rows=kl_rows, temperature=1.5, reduction="none"),
        student_and_teacher, (*PAIR, "u"), CE_SIZES, LOGITS, ("y", "u"), block=4, composed=True),
    Row("jsd", bound(divergence, of=liger_fn.jsd, beta=0.3, temperature=1.5),
        bound(divergence_oracle, rows=jsd_rows, temperature=1.5),
        student_and_teacher, (*PAIR, "u"), CE_SIZES, LOGITS, ("y", "u"),
        bench=kept_teacher(bound(plain_divergence, rows=jsd_rows, temperature=1.5))),
    Row("tvd", bound(divergence, of=liger_fn.tvd, temperature=1.5),
        bound(divergence_oracle, rows=tvd_rows, temperature=1.5),
        student_and_teacher, (*PAIR, "u"), CE_SIZES, LOGITS, ("y", "u"), block=4, kink=tie,
        bench=kept_teacher(bound(plain_divergence, rows=tvd_rows, temperature=1.5))),
    Row("cross_entropy", ce, first(ce_oracle), logits_and_targets, ("logits",),
        {**CE_SIZES, "full": False}, {**LOGITS, "full": [False]}, plain=plain_ce,
        bench=Bench(elements(1, 3), CE_WORK,
                    {"llama-3-8b": logits(8192, "llama-3-8b"),
                     "llama-2-7b": logits(8192, "llama-2-7b"),
                     "gemma-2-9b": logits(4096, "gemma-2-9b")}, SMALL_LOGITS)),
    Row("cross_entropy-all", bound(ce, **ALL, n_valid=3.5),
        first(bound(ce_oracle, **ALL, n_valid=3.5)), logits_and_targets, DIFF_LOGITS, CE_SIZES,
        LOGITS, ("c", "u"), block=4),
    Row("cross_entropy-none", bound(ce, **ALL, reduction="none"),
        first(bound(ce_oracle, **ALL, reduction="none")), logits_and_targets, DIFF_LOGITS,
        CE_SIZES, LOGITS, ("c", "u"), composed=True),
    Row("cross_entropy_with_stats", bound(ce_stats, **ALL), bound(ce_oracle, **ALL),
        logits_and_targets, DIFF_LOGITS, CE_SIZES, LOGITS, ("c", "u"), composed=True,
        bench=Bench(elements(1, 3), CE_WORK, {"llama-2-7b": logits(8192, "llama-2-7b")},
                    SMALL_LOGITS, wanted=("logits",), plain=plain_z_loss,
                    fn=lambda z, y: liger_fn.cross_entropy_with_stats(z, y, z_loss=1e-4).loss)),
]  # fmt: skip
