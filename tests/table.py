"""The one table of public functions. A row buys every transform, law, cross-compile and benchmark.

A row gives a function of tensors, the same in plain torch from the paper or torch itself (never
from our reference), float64 arguments, and which of them have gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import liger_fn


@dataclass(frozen=True)
class Row:
    id: str
    fn: Callable[..., Any]
    oracle: Callable[..., Any]
    make: Callable[[Generator], dict[str, Tensor]]
    differentiable: tuple[str, ...]
    covers: str  # the public name
    block: int | None = None  # longest block of a kernel, to make short rows long ones

    def arguments(self, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        made = self.make(torch.Generator().manual_seed(seed))
        return {name: t.to(device) for name, t in made.items()}


def normal(g: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def rms_norm(x: Tensor, w: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], None, eps)
    return y if w is None else y * (w + offset)


def rope_oracle(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, pairs: bool
) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    c1, c2, s1, s2 = cos[..., :half], cos[..., half:], sin[..., :half], sin[..., half:]
    if pairs:
        c2, s2 = c1, s1

    def one(x: Tensor) -> Tensor:
        head, tail = x[..., : 2 * half], x[..., 2 * half :]
        a, b = (head[..., ::2], head[..., 1::2]) if pairs else head.chunk(2, -1)
        a, b = a * c1 - b * s1, b * c2 + a * s2
        turned = torch.stack((a, b), -1).flatten(-2) if pairs else torch.cat((a, b), -1)
        return torch.cat((turned, tail), -1)

    return one(q), one(k)


def rope_arguments(g: Generator, r: int, positions: bool) -> dict[str, Tensor]:
    b, h, hk, t, k = 2, 3, 1, 4, 8
    angle = normal(g, *((b,) if positions else ()), t, r // 2).repeat_interleave(2, -1)
    q, key = normal(g, b, t, h, k).transpose(1, 2), normal(g, b, hk, t, k)
    return {"q": q, "k": key, "cos": angle.cos(), "sin": angle.sin()}


def ce_rows(
    logits: Tensor, y: Tensor, c: Tensor | None = None, *, label_smoothing: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Per row: cross entropy from log_softmax, and c[y] * lse**2."""
    z = logits * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
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


def ce_arguments(g: Generator, *, full: bool) -> dict[str, Tensor]:
    y = torch.tensor([[3, 0, -100], [6, 2, 1]])
    made = {"logits": 2 * normal(g, 2, 3, 7), "y": y}
    if full:
        made |= {"c": normal(g, 7).abs() + 0.5, "u": normal(g, 2, 3)}
    return made


def linear_arguments(g: Generator, *, full: bool) -> dict[str, Tensor]:
    y = torch.tensor([[3, 0, -100], [6, 2, 1]])
    made = {"w": normal(g, 7, 4), "x": normal(g, 2, 3, 4), "y": y}
    if full:
        made |= {"b": normal(g, 7), "c": normal(g, 7).abs() + 0.5, "u": normal(g, 2, 3)}
    return made


def linear_oracle(
    w: Tensor, x: Tensor, y: Tensor, b: Tensor | None = None, c: Tensor | None = None,
    u: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return ce_oracle(x @ w.mT + (0.0 if b is None else b), y, c, u, **options)


def ce(logits: Tensor, y: Tensor, c: Any = None, u: Any = None, **options: Any) -> Tensor:
    return liger_fn.cross_entropy(logits, y, class_weight=c, token_weight=u, **options)


def ce_stats(logits: Tensor, y: Tensor, c: Any = None, u: Any = None, **options: Any) -> Any:
    out = liger_fn.cross_entropy_with_stats(logits, y, class_weight=c, token_weight=u, **options)
    return tuple(out[:3])


def linear(
    w: Tensor, x: Tensor, y: Tensor, b: Any = None, c: Any = None, u: Any = None, **options: Any
) -> Tensor:
    return liger_fn.fused_linear_ce(
        w, x, y, b=b, class_weight=c, token_weight=u, chunk=4, **options
    )


def linear_stats(
    w: Tensor, x: Tensor, y: Tensor, b: Any = None, c: Any = None, u: Any = None, **options: Any
) -> Any:
    out = liger_fn.fused_linear_ce_with_stats(
        w, x, y, b=b, class_weight=c, token_weight=u, chunk=4, **options
    )
    return tuple(out[:3])


def kl_rows(q: Tensor, p: Tensor) -> Tensor:
    q, p = q.log_softmax(-1), p.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def jsd_rows(q: Tensor, p: Tensor, beta: float = 0.3) -> Tensor:
    """As TRL's GKD trainer has it."""
    q, p = q.log_softmax(-1), p.log_softmax(-1)
    m = torch.logaddexp(q + math.log(1 - beta), p + math.log(beta))
    return (beta * p.exp() * (p - m) + (1 - beta) * q.exp() * (q - m)).sum(-1)


def tvd_rows(q: Tensor, p: Tensor) -> Tensor:
    return 0.5 * (p.softmax(-1) - q.softmax(-1)).abs().sum(-1)


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


def divergence_arguments(g: Generator, *, full: bool) -> dict[str, Tensor]:
    made = {name: 2 * normal(g, 2, 3, 7) for name in ("student", "teacher")}
    return made | ({"y": ce_arguments(g, full=False)["y"], "u": normal(g, 2, 3)} if full else {})


def sparsemax(x: Tensor) -> Tensor:
    """Algorithm 1 of Martins and Astudillo, 2016; halves in float32, where a sum of them fits."""
    h = x if x.dtype == torch.float64 else x.float()
    z = h.sort(-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=h.dtype)
    size = (1 + k * z > z.cumsum(-1)).sum(-1, keepdim=True).detach()
    tau = (z.cumsum(-1).gather(-1, size - 1) - 1) / size
    return torch.relu(h - tau).to(x.dtype)  # an entry at the threshold is outside: no gradient


def first(f: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    return lambda *a, **k: f(*a, **k)[0]


def bound(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *a: f(*a, **options)


ALL = {**HARD, "z_loss": 0.2}
W, LOGITS, LINEAR = ("x", "w"), ("logits", "u"), ("w", "x", "b", "u")
PAIR = ("student", "teacher")

ROWS = [
    Row("rms_norm", bound(liger_fn.rms_norm, eps=1e-3), bound(rms_norm, eps=1e-3),
        lambda g: {"x": normal(g, 2, 3, 5), "w": normal(g, 5)}, W, "rms_norm"),
    Row("rms_norm-gemma", bound(liger_fn.rms_norm, eps=0.1, offset=1.0, casting="gemma"),
        bound(rms_norm, eps=0.1, offset=1.0),
        lambda g: {"x": normal(g, 3, 6), "w": normal(g, 6)}, W, "rms_norm", block=4),
    Row("rms_norm-no-gain", lambda x: liger_fn.rms_norm(x, None, 0.1, casting="none"),
        lambda x: rms_norm(x, None, 0.1), lambda g: {"x": normal(g, 3, 5)}, ("x",), "rms_norm"),
    Row("swiglu", liger_fn.swiglu, lambda gate, up: F.silu(gate) * up,
        lambda g: dict(zip(("gate", "up"), normal(g, 2, 3, 10).chunk(2, -1), strict=True)),
        ("gate", "up"), "swiglu"),
    Row("swiglu_packed", liger_fn.swiglu_packed, lambda p: F.silu(p[..., :5]) * p[..., 5:],
        lambda g: {"gate_up": normal(g, 2, 3, 10)}, ("gate_up",), "swiglu_packed", block=4),
    Row("rope", liger_fn.rope, bound(rope_oracle, pairs=False),
        lambda g: rope_arguments(g, 8, positions=False), ("q", "k", "cos", "sin"), "rope"),
    Row("rope-interleaved-partial", bound(liger_fn.rope, layout="interleaved"),
        bound(rope_oracle, pairs=True),
        lambda g: rope_arguments(g, 4, positions=True), ("q", "k", "cos", "sin"), "rope"),
    Row("softmax", liger_fn.softmax, bound(torch.softmax, dim=-1),
        lambda g: {"x": 2 * normal(g, 2, 3, 7)}, ("x",), "softmax"),
    Row("softmax-long", liger_fn.softmax, bound(torch.softmax, dim=-1),
        lambda g: {"x": 2 * normal(g, 3, 7)}, ("x",), "softmax", block=4),
    Row("sparsemax", liger_fn.sparsemax, sparsemax,
        lambda g: {"x": normal(g, 2, 3, 7)}, ("x",), "sparsemax"),
    Row("sparsemax-long", liger_fn.sparsemax, sparsemax,
        lambda g: {"x": normal(g, 3, 7)}, ("x",), "sparsemax", block=4),
    Row("cross_entropy", ce, first(ce_oracle), lambda g: ce_arguments(g, full=False),
        ("logits",), "cross_entropy"),
    Row("cross_entropy-all", bound(ce, **ALL, n_valid=3.5),
        first(bound(ce_oracle, **ALL, n_valid=3.5)),
        lambda g: ce_arguments(g, full=True), LOGITS, "cross_entropy", block=4),
    Row("cross_entropy-none", bound(ce, **ALL, reduction="none"),
        first(bound(ce_oracle, **ALL, reduction="none")),
        lambda g: ce_arguments(g, full=True), LOGITS, "cross_entropy"),
    Row("cross_entropy_with_stats", bound(ce_stats, **ALL), bound(ce_oracle, **ALL),
        lambda g: ce_arguments(g, full=True), LOGITS, "cross_entropy_with_stats"),
    Row("kl_div", bound(divergence, of=liger_fn.kl_div), bound(divergence_oracle, rows=kl_rows),
        lambda g: divergence_arguments(g, full=False), PAIR, "kl_div"),
    Row("kl_div-all-none", bound(divergence, of=liger_fn.kl_div, temperature=1.5, reduction="none"),
        bound(divergence_oracle, rows=kl_rows, temperature=1.5, reduction="none"),
        lambda g: divergence_arguments(g, full=True), (*PAIR, "u"), "kl_div", block=4),
    Row("jsd", bound(divergence, of=liger_fn.jsd, beta=0.3, temperature=1.5),
        bound(divergence_oracle, rows=jsd_rows, temperature=1.5),
        lambda g: divergence_arguments(g, full=True), (*PAIR, "u"), "jsd"),
    Row("tvd", bound(divergence, of=liger_fn.tvd, temperature=1.5),
        bound(divergence_oracle, rows=tvd_rows, temperature=1.5),
        lambda g: divergence_arguments(g, full=True), (*PAIR, "u"), "tvd", block=4),
    Row("fused_linear_ce", linear, first(linear_oracle), lambda g: linear_arguments(g, full=False),
        ("w", "x"), "fused_linear_ce"),
    Row("fused_linear_ce-all", bound(linear, **ALL), first(bound(linear_oracle, **ALL)),
        lambda g: linear_arguments(g, full=True), LINEAR, "fused_linear_ce", block=4),
    Row("fused_linear_ce-none", bound(linear, **ALL, reduction="none"),
        first(bound(linear_oracle, **ALL, reduction="none")),
        lambda g: linear_arguments(g, full=True), LINEAR, "fused_linear_ce"),
    Row("fused_linear_ce_with_stats", bound(linear_stats, **ALL), bound(linear_oracle, **ALL),
        lambda g: linear_arguments(g, full=True), LINEAR, "fused_linear_ce_with_stats"),
]  # fmt: skip
