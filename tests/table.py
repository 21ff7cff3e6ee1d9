"""The one table of public functions. A row buys every transform, law, cross-compile and benchmark.

A row gives a function of tensors, the same in plain torch from the paper or torch itself (never
from our reference), how its arguments are drawn at given sizes, and which of them have gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn

Function = Callable[..., Any]
Sizes = Mapping[str, Any]


class Draw:
    """Where the numbers of arguments come from: one seed, float64."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return self.normal(*shape).abs() + 0.5

    def targets(self, lead: tuple[int, ...], v: int) -> Tensor:
        """Columns, some of them ignored but never the first."""
        y = torch.randint(v, lead, generator=self.generator)
        y.view(-1)[2::7] = -100
        return y


@dataclass(frozen=True)
class Bench:
    """Sizes worth measuring, and the least work there."""

    work: Callable[..., tuple[float, float]]  # forward, forward + backward: elements or operations
    counted: str  # the same in words
    gpu: Sequence[Sizes]  # bfloat16
    cpu: Sequence[Sizes]  # float32
    wanted: tuple[str, ...] | None = None  # gradients, where users do not ask for all
    fn: Function | None = None  # as users call it, where options of the row are not theirs
    limit: Literal["copy", "matmul"] = "copy"  # the rate that bounds it
    host: Sizes | None = None  # where nothing but host time is left


@dataclass(frozen=True)
class Row:
    """One public function with its options, and all that the suites need to know of it."""

    id: str  # the public name, "-", what is special
    fn: Function
    oracle: Function
    make: Callable[..., dict[str, Tensor]]  # (draw, **sizes) to arguments in order
    differentiable: tuple[str, ...]
    sizes: Sizes  # of every test on one point
    axes: Mapping[str, Sequence[Any]]  # what laws draw for each of the sizes
    optional: tuple[str, ...] = ()  # arguments that may be None
    plain: Function | None = None  # plain torch as users write it, where the oracle is not that
    flops: float = 1.0  # of plain torch's: more where logits are formed again
    ops: bool = True  # whether kernels run, as registered ops; else it is algebra in plain torch
    block: int | None = None  # longest block of a kernel, to make short rows long ones
    bench: Bench | None = None

    @property
    def covers(self) -> str:
        """The public name."""
        return self.id.split("-")[0]

    def arguments(self, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        made = self.make(Draw(seed), **self.sizes)
        return {name: t.to(device) for name, t in made.items()}

    def longer(self, size: int) -> Row:
        """The row with `size` as its first leading axis."""
        if "lead" in self.sizes:
            return replace(self, sizes={**self.sizes, "lead": (size, *self.sizes["lead"][1:])})
        return replace(self, sizes={**self.sizes, "b": size})


def bind(fn: Function, row: Row, args: dict[str, Tensor]) -> Function:
    """fn as a function of its differentiable arguments alone."""

    def f(*d: Tensor) -> Any:
        return fn(*{**args, **dict(zip(row.differentiable, d, strict=True))}.values())

    return f


# -- oracles and arguments -------------------------------------------------------------------------


def rms_norm(x: Tensor, w: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], None, eps)
    return y if w is None else y * (w + offset)


def rms_norm_step_by_step(x: Tensor) -> Tensor:
    """Every step in the dtype of x, as casting "none" means it."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)


def rows(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return {"x": draw.normal(*lead, n)}


def rows_and_gain(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return {"x": draw.normal(*lead, n), "w": draw.normal(n)}


def add_rms_norm(
    x: Tensor, residual: Tensor, w: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return rms_norm(x + residual, w, eps), x + residual


def terms_and_gain(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return {"x": draw.normal(*lead, n), "residual": draw.normal(*lead, n), "w": draw.normal(n)}


def terms(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return {"x": draw.normal(*lead, n), "residual": draw.normal(*lead, n)}


def layer_norm(x: Tensor, w: Tensor | float, b: Tensor, eps: float) -> Tensor:
    # from the paper: torch 2.13 gives F.layer_norm wrong second derivatives in x and w together
    d = x - x.mean(-1, keepdim=True)
    return d / (d.square().mean(-1, keepdim=True) + eps).sqrt() * w + b


def rows_gain_and_bias(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return {**rows_and_gain(draw, lead, n), "b": draw.normal(n)}


def group_norm(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
    rows = x.reshape(x.shape[0], groups, x.shape[1:].numel() // groups)
    y = layer_norm(rows, 1.0, torch.zeros_like(b[0]), eps).reshape(x.shape)
    each = (-1, *(1,) * (x.dim() - 2))
    return y * w.reshape(each) + b.reshape(each)


def images(draw: Draw, b: int, per_group: int, at: tuple[int, ...]) -> dict[str, Tensor]:
    """Two groups of channels, of the positions `at`."""
    c = 2 * per_group
    return {"x": draw.normal(b, c, *at), "w": draw.normal(c), "b": draw.normal(c)}


def swiglu_packed(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def halves(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return dict(zip(("gate", "up"), draw.normal(*lead, 2 * n).chunk(2, -1), strict=True))


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


def rope_arguments(
    draw: Draw, lead: tuple[int, ...], t: int, h: int, hk: int, pairs: int, tail: int = 0,
    own: str = "shared", equal: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Heads as attention holds them, (b, t, h, k) in memory; halves of cos alike if `equal`."""
    first = {"shared": (), "own": lead, "ones": (1,) * len(lead)}[own]
    q, k = (draw.normal(*lead, t, heads, 2 * pairs + tail).transpose(-3, -2) for heads in (h, hk))
    angle = draw.normal(*first, t, pairs)
    angle = torch.cat((angle, angle if equal else draw.normal(*first, t, pairs)), -1)
    return {"q": q, "k": k, "cos": angle.cos(), "sin": angle.sin()}


def mrope_arguments(
    draw: Draw, lead: tuple[int, ...], t: int, h: int, hk: int, tail: int = 0
) -> dict[str, Tensor]:
    made = rope_arguments(draw, lead, t, h, hk, sum(SECTIONS), tail)
    angle = draw.normal(3, *lead, t, 2 * sum(SECTIONS))
    return {"q": made["q"], "k": made["k"], "cos": angle.cos(), "sin": angle.sin()}


SECTIONS = (1, 1, 2)


def mrope_oracle(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    kind = torch.arange(3, device=cos.device).repeat_interleave(
        torch.tensor(SECTIONS, device=cos.device), output_size=4
    )
    at = kind.repeat(2).expand(1, *cos.shape[1:])
    return rope_oracle(q, k, cos.gather(0, at)[0], sin.gather(0, at)[0], pairs=False)


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


def labelled(draw: Draw, lead: tuple[int, ...], v: int, full: bool) -> dict[str, Tensor]:
    weights = {"c": draw.positive(v), "u": draw.normal(*lead)} if full else {}
    return {"y": draw.targets(lead, v), **weights}


def logits_and_targets(
    draw: Draw, lead: tuple[int, ...], v: int, full: bool = True
) -> dict[str, Tensor]:
    return {"logits": draw.normal(*lead, v, scale=2.0), **labelled(draw, lead, v, full)}


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


def plain_ce(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def plain_linear_ce(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(x, w)
    return plain_ce(logits if logits.dtype == torch.float64 else logits.float(), y)


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
    return lambda *a, **k: f(*a, **options, **k)


ALL = {**HARD, "z_loss": 0.2}
W, LOGITS, LINEAR = ("x", "w"), ("logits", "u"), ("w", "x", "b", "u")


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


def student_and_teacher(
    draw: Draw, lead: tuple[int, ...], v: int, full: bool = True
) -> dict[str, Tensor]:
    made = {name: draw.normal(*lead, v, scale=2.0) for name in ("student", "teacher")}
    return made | ({"y": draw.targets(lead, v), "u": draw.normal(*lead)} if full else {})


def biased_head(draw: Draw, lead: tuple[int, ...], d: int, v: int) -> dict[str, Tensor]:
    made = head(draw, lead, d, v)
    return {name: made[name] for name in ("w", "x", "y", "b")}


def logp(w: Tensor, x: Tensor, y: Tensor, b: Any = None, chunk: Any = 4, **options: Any) -> Tensor:
    return liger_fn.fused_linear_logp(w, x, y, b=b, chunk=chunk, **options)


def logp_stats(w: Tensor, x: Tensor, y: Tensor, b: Any = None, **options: Any) -> Any:
    found = liger_fn.fused_linear_logp_with_stats(w, x, y, b=b, chunk=4, **options)
    return tuple(found[:4])


def logp_oracle(
    w: Tensor, x: Tensor, y: Tensor, b: Tensor | None = None, *, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    z = (x @ w.mT + (0.0 if b is None else b)) * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p, live = z.log_softmax(-1), y != -100
    p = log_p.exp()
    own = log_p.gather(-1, y.clamp(min=0)[..., None])[..., 0]
    found = own, -(p * log_p).sum(-1), p.square().sum(-1).log(), z.mean(-1)
    return tuple(torch.where(live, t, 0.0) for t in found)


def counted(y: Tensor) -> Tensor:
    """Which pairs have a token on both sides."""
    chosen, rejected = (y != -100).any(-1).chunk(2)
    return chosen & rejected


def whole(t: Tensor, y: Tensor) -> Tensor:
    """Sums over the tokens that count; one number for each sequence."""
    return torch.where(y == -100, 0.0, t).sum(-1)


def chosen_nll(logp: Tensor, y: Tensor) -> Tensor:
    y = y.chunk(2)[0]
    return -whole(logp.chunk(2)[0], y).sum() / (y != -100).sum()


def over_pairs(each: Tensor, y: Tensor) -> Tensor:
    return torch.where(counted(y), each, 0.0).sum() / each.numel()


def dpo_oracle(logp: Tensor, y: Tensor, ref: Tensor) -> Tensor:
    chosen, rejected = (whole(logp, y) - whole(ref, y)).chunk(2)
    return over_pairs(-F.logsigmoid(0.1 * (chosen - rejected)), y)


DPO_MORE: dict[str, Any] = {
    "loss_type": ("robust", "sigmoid_norm"), "loss_weights": (0.7, 0.5), "label_smoothing": 0.2,
    "f_divergence": "js", "nll_weight": 0.3, "beta": 0.8,
}  # fmt: skip


def dpo_more_oracle(logp: Tensor, y: Tensor, ref: Tensor) -> Tensor:
    n = (y != -100).sum(-1).clamp(min=1)
    score = math.log(2) + F.logsigmoid(whole(logp, y) - whole(ref, y))
    d, by_length = (0.8 * (t.chunk(2)[0] - t.chunk(2)[1]) for t in (score, score / n))
    robust = (-0.8 * F.logsigmoid(d) + 0.2 * F.logsigmoid(-d)) / 0.6
    norm = -0.8 * F.logsigmoid(by_length) - 0.2 * F.logsigmoid(-by_length)
    return over_pairs(0.7 * robust + 0.5 * norm, y) + 0.3 * chosen_nll(logp, y)


def orpo_oracle(logp: Tensor, y: Tensor) -> Tensor:
    n = (y != -100).sum(-1)
    p = torch.where(n > 0, whole(logp, y) / n.clamp(min=1), -1.0)
    chosen, rejected = (p - torch.log(-torch.expm1(p))).chunk(2)
    return chosen_nll(logp, y) + over_pairs(-0.1 * F.logsigmoid(chosen - rejected), y)


def cpo_oracle(logp: Tensor, y: Tensor) -> Tensor:
    chosen, rejected = whole(logp, y).chunk(2)
    each = -F.logsigmoid(0.1 * (chosen - rejected))
    return chosen_nll(logp, y) + over_pairs(each, y)


def simpo_oracle(logp: Tensor, y: Tensor) -> Tensor:
    n = (y != -100).sum(-1).clamp(min=1)
    chosen, rejected = (whole(logp, y) / n).chunk(2)
    return over_pairs(-F.logsigmoid(2.0 * (chosen - rejected) - 1.0), y)


def kto_oracle(logp: Tensor, y: Tensor, desirable: Tensor, ref: Tensor) -> Tensor:
    gap = 0.1 * (whole(logp, y) - whole(ref, y) - 0.3)
    each = 1 - torch.sigmoid(torch.where(desirable, gap, -gap))
    return torch.where((y != -100).any(-1), each, 0.0).mean()


def grpo_oracle(
    logp: Tensor, y: Tensor | None, a: Tensor, old: Tensor | None = None,
    ref: Tensor | None = None,
) -> Tensor:  # fmt: skip
    live = torch.ones_like(logp, dtype=torch.bool) if y is None else y != -100
    ratio = torch.exp(logp - (logp.detach() if old is None else old))
    each = -torch.minimum(ratio * a[:, None], ratio.clamp(0.8, 1.2) * a[:, None])
    if ref is not None:
        each = each + 0.3 * (torch.exp(ref - logp) - (ref - logp) - 1)
    per_sequence = torch.where(live, each, 0.0).sum(-1) / live.sum(-1).clamp(min=1)
    return per_sequence.mean()


def grpo(*args: Tensor, of: Function, **options: Any) -> Tensor:
    *first, old, ref = args
    beta = 0.0 if ref is None else 0.3
    return of(*first, old_logp=old, ref_logp=ref, beta=beta, **options)


def sequences(
    draw: Draw, b: int, t: int, v: int = 9, each: int = 2, ref: bool = False
) -> dict[str, Tensor]:
    """Log-probabilities of `each` times b sequences, under the policy and its reference."""
    n = each * b
    made = {"logp": -draw.positive(n, t), "y": draw.targets((n, t), v)}
    return made | ({"ref": -draw.positive(n, t)} if ref else {})


def single(draw: Draw, b: int, t: int) -> dict[str, Tensor]:
    made = sequences(draw, b, t, each=1, ref=True)
    return {"logp": made["logp"], "y": made["y"], "good": draw.targets((b,), 2) == 1,
            "ref": made["ref"]}  # fmt: skip


def sampled(draw: Draw, b: int, t: int) -> dict[str, Tensor]:
    made = sequences(draw, b, t, each=1, ref=True)
    return {"logp": made["logp"], "y": made["y"], "a": draw.normal(b), "old": -draw.positive(b, t),
            "ref": made["ref"]}  # fmt: skip


def headed(of: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """The same under a head: w and x in place of logp, a reference's own log-probabilities."""

    def make(draw: Draw, b: int, t: int, d: int, v: int, **options: Any) -> dict[str, Tensor]:
        made = of(draw, b, t, **options)
        lead = made.pop("logp").shape
        w, x = draw.positive(v, d), draw.positive(*lead, d)
        return {"w": w, "x": x, **made, "y": draw.targets(tuple(lead), v)}

    return make


def under_head(oracle: Function) -> Function:
    return lambda w, x, y, *more: oracle(logp_oracle(w, x, y)[0], y, *more)


def kto(of: Function) -> Function:
    return lambda *a: of(*a[:-1], ref_logp=a[-1], kl=0.3)


def dpo_loss(w: Tensor, x: Tensor, y: Tensor, ref: Tensor) -> Tensor:
    return liger_fn.dpo_loss(w, x, y, ref_logp=ref, chunk=4)


def two_heads(
    draw: Draw, lead: tuple[int, ...], d: int, v: int, full: bool = True
) -> dict[str, Tensor]:
    """Student and teacher, whose widths differ by one."""
    made = {
        "w": draw.normal(v, d, scale=2 / math.sqrt(d)), "x": draw.normal(*lead, d),
        "teacher_w": draw.normal(v, d + 1, scale=2 / math.sqrt(d)),
        "teacher_x": draw.normal(*lead, d + 1),
    }  # fmt: skip
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
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return divergence_oracle(z, teacher_x @ teacher_w.mT, y, u, **options)


# -- the table -------------------------------------------------------------------------------------

# what laws draw
LEADS = [(1,), (), (5,), (2, 3), (0,), (2, 0)]
LOSS_LEADS = [(1,), (), (5,), (2, 1)]  # a mean over no rows is 0 here, NaN in torch
WIDTHS = [*range(1, 10), 15, 16, 17, 33, 40]
COLUMNS = [*range(1, 10), 16, 17, 33]
ROWS_OF = {"lead": LEADS, "n": WIDTHS}
CENTRED = {"lead": LEADS, "n": COLUMNS[1:]}  # of one column nothing is left but rounding
TABLES = {
    "lead": [(), (2,), (1, 2), (0,)], "t": range(4), "h": range(1, 4), "hk": range(1, 4),
    "pairs": range(1, 5), "tail": range(4), "own": ["shared", "own", "ones"],
}  # fmt: skip
LOGITS = {"lead": LOSS_LEADS, "v": COLUMNS}
HEAD = {**LOGITS, "d": range(1, 7)}

GATED = "read gate and up, write y; backward reads gate, up, dy, writes dgate, dup"
ALL = {**HARD, "z_loss": 0.2}
ROW_SHAPES = [{"lead": (16384,), "n": 4096}, {"lead": (32768,), "n": 1024},
              {"lead": (4096,), "n": 16384}]  # fmt: skip
CE_SIZES, HEAD_SIZES = {"lead": (2, 3), "v": 7}, {"lead": (2, 3), "d": 4, "v": 7}
DIFF_LOGITS, DIFF_HEAD = ("logits", "u"), ("w", "x", "b", "u")


def elements(*counts: float) -> Callable[..., tuple[float, float]]:
    """Work in units of one tensor of rows: how often its elements are read or written."""
    forward, both = counts

    def work(lead: tuple[int, ...], **rest: Any) -> tuple[float, float]:
        size = math.prod(lead) * rest.get("n", rest.get("v"))
        return forward * size, both * size

    return work


def turned(lead: tuple[int, ...], t: int, h: int, hk: int, pairs: int, **_: Any) -> Any:
    size = math.prod(lead) * t * (h + hk) * 2 * pairs
    return 2 * size, 4 * size


def again(lead: tuple[int, ...], d: int, v: int) -> tuple[float, float]:
    size = 2 * math.prod(lead) * d * v
    return size, 4 * size


def distillation(lead: tuple[int, ...], d: int, v: int, **_: Any) -> tuple[float, float]:
    size = 2 * math.prod(lead) * v
    return size * (2 * d + 1), size * (4 * d + 1)


def products(lead: tuple[int, ...], d: int, v: int, **_: Any) -> tuple[float, float]:
    size = 2 * math.prod(lead) * d * v
    return size, 3 * size


PAIR = ("student", "teacher")
KEPT_TEACHER = Bench(
    elements(2, 5), "read both logits; backward reads them again, writes the student's gradient",
    [{"lead": (4096,), "v": 128256, "full": False}], [{"lead": (256,), "v": 4096, "full": False}],
    wanted=("student",),
)  # fmt: skip

SEQUENCES = {"b": range(1, 4), "t": range(1, 5)}
HEADED = {**SEQUENCES, "d": range(1, 4), "v": range(2, 8)}
FEW, PAIR_HEADED = {"b": 2, "t": 3}, {"b": 1, "t": 2, "d": 2, "v": 3}


def reasoned(b: int, t: int, d: int, v: int, **_: Any) -> tuple[float, float]:
    size = 2 * 2 * b * t * d * v
    return size, 4 * size


PAIR_SIZES = {"lead": (3,), "d": 3, "v": 5}
EACH = {"temperature": 1.5, "softcap": 3.0, "reduction": "none"}
WARM = {"temperature": 1.7, "softcap": 3.0, "logit_scale": 0.8}

ROWS = [
    Row("rms_norm", bound(liger_fn.rms_norm, eps=1e-3), bound(rms_norm, eps=1e-3), rows_and_gain,
        ("x", "w"), {"lead": (2, 3), "n": 5}, ROWS_OF, ("w",),
        plain=lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-3),
        bench=Bench(elements(2, 5), "read x, write y; backward reads x and dy, writes dx",
                    ROW_SHAPES, [{"lead": (1024,), "n": 1024}], host={"lead": (8,), "n": 64})),
    Row("rms_norm-gemma", bound(liger_fn.rms_norm, eps=0.1, offset=1.0, casting="gemma"),
        bound(rms_norm, eps=0.1, offset=1.0), rows_and_gain, ("x", "w"),
        {"lead": (3,), "n": 6}, ROWS_OF, ("w",), block=4),
    Row("rms_norm-no-gain", lambda x: liger_fn.rms_norm(x, None, 0.1, casting="none"),
        lambda x: rms_norm(x, None, 0.1), rows, ("x",), {"lead": (3,), "n": 5}, ROWS_OF,
        plain=rms_norm_step_by_step),
    Row("add_rms_norm", bound(liger_fn.add_rms_norm, eps=1e-3), bound(add_rms_norm, eps=1e-3),
        terms_and_gain, ("x", "residual", "w"), {"lead": (2, 3), "n": 5}, ROWS_OF, ("w",),
        bench=Bench(elements(4, 8), "read x and residual, write y and the sum; backward reads dy, "
                    "ds and the sum, writes the gradient of both", ROW_SHAPES,
                    [{"lead": (1024,), "n": 1024}])),
    Row("add_rms_norm-gemma",
        lambda x, r: liger_fn.add_rms_norm(x, r, None, 0.1, offset=1.0, casting="gemma"),
        bound(add_rms_norm, w=None, eps=0.1), terms, ("x", "residual"), {"lead": (3,), "n": 6},
        ROWS_OF, block=4),
    Row("layer_norm", bound(liger_fn.layer_norm, eps=1e-3), bound(layer_norm, eps=1e-3),
        rows_gain_and_bias, ("x", "w", "b"), {"lead": (2, 3), "n": 5}, CENTRED, ("w", "b"),
        plain=lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-3),
        bench=Bench(elements(2, 5), "read x, write y; backward reads x and dy, writes dx",
                    ROW_SHAPES, [{"lead": (1024,), "n": 1024}], host={"lead": (8,), "n": 64})),
    Row("layer_norm-no-gain", lambda x, b: liger_fn.layer_norm(x, None, b, 0.1),
        lambda x, b: layer_norm(x, 1.0, b, 0.1),
        lambda draw, lead, n: {"x": draw.normal(*lead, n), "b": draw.normal(n)}, ("x", "b"),
        {"lead": (3,), "n": 6}, CENTRED, block=4),
    Row("group_norm", bound(liger_fn.group_norm, groups=2, eps=0.1),
        bound(group_norm, groups=2, eps=0.1), images, ("x", "w", "b"),
        {"b": 2, "per_group": 2, "at": (2, 1)},
        {"b": range(4), "per_group": range(1, 4), "at": [(2,), (7,), (3, 2), (17,), (1, 2, 3)]},
        ("w", "b")),
    Row("dyt", liger_fn.dyt, lambda x, alpha, w, b: torch.tanh(alpha * x) * w + b,
        lambda draw, lead, n: {"x": draw.normal(*lead, n), "alpha": draw.normal(1),
                               "w": draw.normal(n), "b": draw.normal(n)},
        ("x", "alpha", "w", "b"), {"lead": (2, 2), "n": 3}, ROWS_OF, ("w", "b")),
    Row("swiglu", liger_fn.swiglu, lambda gate, up: F.silu(gate) * up, halves, ("gate", "up"),
        {"lead": (2, 3), "n": 5}, ROWS_OF,
        bench=Bench(elements(3, 8), GATED, [{"lead": (16384,), "n": 14336}],
                    [{"lead": (512,), "n": 2048}], host={"lead": (8,), "n": 64})),
    Row("geglu", liger_fn.geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, halves,
        ("gate", "up"), {"lead": (2, 3), "n": 5}, ROWS_OF,
        bench=Bench(elements(3, 8), GATED, [{"lead": (16384,), "n": 14336}],
                    [{"lead": (512,), "n": 2048}])),
    Row("geglu_packed", bound(liger_fn.geglu_packed, approximate="none"),
        lambda gate_up: F.gelu(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1],
        lambda draw, lead, n: {"gate_up": draw.normal(*lead, 2 * n)}, ("gate_up",),
        {"lead": (2, 3), "n": 5}, ROWS_OF, block=4),
    Row("relu2", liger_fn.relu2, lambda x: F.relu(x).square(), rows, ("x",),
        {"lead": (2, 3), "n": 5}, ROWS_OF,
        bench=Bench(elements(2, 5), "read x, write y; backward reads x and dy, writes dx",
                    [{"lead": (16384,), "n": 14336}], [{"lead": (512,), "n": 2048}])),
    Row("swiglu_packed", liger_fn.swiglu_packed, swiglu_packed,
        lambda draw, lead, n: {"gate_up": draw.normal(*lead, 2 * n)}, ("gate_up",),
        {"lead": (2, 3), "n": 5}, ROWS_OF, block=4),
    Row("rope", liger_fn.rope, bound(rope_oracle, pairs=False), rope_arguments,
        ("q", "k", "cos", "sin"), {"lead": (2,), "t": 4, "h": 3, "hk": 1, "pairs": 4}, TABLES,
        bench=Bench(turned, "read and write q and k; backward the same for their gradients",
                    [{"lead": (4,), "t": 4096, "h": 32, "hk": 8, "pairs": 64, "own": "ones",
                      "equal": True}],
                    [{"lead": (1,), "t": 512, "h": 8, "hk": 2, "pairs": 32, "own": "ones",
                      "equal": True}], wanted=("q", "k"))),
    Row("rope-interleaved-partial", bound(liger_fn.rope, layout="interleaved"),
        bound(rope_oracle, pairs=True), rope_arguments, ("q", "k", "cos", "sin"),
        {"lead": (2,), "t": 4, "h": 3, "hk": 1, "pairs": 2, "tail": 4, "own": "own"}, TABLES),
    Row("mrope", bound(liger_fn.mrope, sections=SECTIONS), mrope_oracle, mrope_arguments,
        ("q", "k", "cos", "sin"), {"lead": (2,), "t": 3, "h": 2, "hk": 1},
        {name: TABLES[name] for name in ("lead", "t", "h", "hk", "tail")}),
    Row("softmax", liger_fn.softmax, bound(torch.softmax, dim=-1), rows, ("x",),
        {"lead": (2, 3), "n": 7}, ROWS_OF,
        bench=Bench(elements(2, 5), "read x, write y; backward reads y and dy, writes dx",
                    [{"lead": (16384,), "n": 4096}], [{"lead": (1024,), "n": 1024}])),
    Row("softmax-long", liger_fn.softmax, bound(torch.softmax, dim=-1), rows, ("x",),
        {"lead": (3,), "n": 7}, ROWS_OF, block=4),
    Row("sparsemax", liger_fn.sparsemax, sparsemax, rows, ("x",), {"lead": (2, 3), "n": 7}, ROWS_OF,
        bench=Bench(elements(2, 5), "read x, write y; backward reads y and dy, writes dx",
                    [{"lead": (16384,), "n": 4096}], [{"lead": (256,), "n": 256}])),
    Row("sparsemax-long", liger_fn.sparsemax, sparsemax, rows, ("x",), {"lead": (3,), "n": 7},
        ROWS_OF, block=4),
    Row("kl_div", bound(divergence, of=liger_fn.kl_div), bound(divergence_oracle, rows=kl_rows),
        student_and_teacher, PAIR, {**CE_SIZES, "full": False}, {**LOGITS, "full": [False]},
        bench=KEPT_TEACHER),
    Row("kl_div-all-none", bound(divergence, of=liger_fn.kl_div, temperature=1.5, reduction="none"),
        bound(divergence_oracle, rows=kl_rows, temperature=1.5, reduction="none"),
        student_and_teacher, (*PAIR, "u"), CE_SIZES, LOGITS, ("y", "u"), block=4),
    Row("jsd", bound(divergence, of=liger_fn.jsd, beta=0.3, temperature=1.5),
        bound(divergence_oracle, rows=jsd_rows, temperature=1.5),
        student_and_teacher, (*PAIR, "u"), CE_SIZES, LOGITS, ("y", "u"), bench=KEPT_TEACHER),
    Row("tvd", bound(divergence, of=liger_fn.tvd, temperature=1.5),
        bound(divergence_oracle, rows=tvd_rows, temperature=1.5),
        student_and_teacher, (*PAIR, "u"), CE_SIZES, LOGITS, ("y", "u"), block=4,
        bench=KEPT_TEACHER),
    Row("cross_entropy", ce, first(ce_oracle), logits_and_targets, ("logits",),
        {**CE_SIZES, "full": False}, {**LOGITS, "full": [False]}, plain=plain_ce,
        bench=Bench(elements(1, 3), "read logits; backward reads them again, writes their gradient",
                    [{"lead": (8192,), "v": 128256, "full": False},
                     {"lead": (8192,), "v": 32000, "full": False}],
                    [{"lead": (512,), "v": 8000, "full": False}])),
    Row("cross_entropy-all", bound(ce, **ALL, n_valid=3.5),
        first(bound(ce_oracle, **ALL, n_valid=3.5)), logits_and_targets, DIFF_LOGITS, CE_SIZES,
        LOGITS, ("c", "u"), block=4),
    Row("cross_entropy-none", bound(ce, **ALL, reduction="none"),
        first(bound(ce_oracle, **ALL, reduction="none")), logits_and_targets, DIFF_LOGITS,
        CE_SIZES, LOGITS, ("c", "u")),
    Row("cross_entropy_with_stats", bound(ce_stats, **ALL), bound(ce_oracle, **ALL),
        logits_and_targets, DIFF_LOGITS, CE_SIZES, LOGITS, ("c", "u")),
    Row("fused_linear_ce", linear, first(linear_oracle), head, ("w", "x"),
        {**HEAD_SIZES, "full": False}, {**HEAD, "full": [False]}, plain=plain_linear_ce,
        bench=Bench(products, "one product forward, three with backward",
                    [{"lead": (8192,), "d": 4096, "v": 128256, "full": False},
                     {"lead": (16384,), "d": 4096, "v": 32000, "full": False}],
                    [{"lead": (512,), "d": 256, "v": 8000, "full": False}],
                    fn=liger_fn.fused_linear_ce, limit="matmul")),
    Row("fused_linear_ce-all", bound(linear, **ALL), first(bound(linear_oracle, **ALL)), head,
        DIFF_HEAD, HEAD_SIZES, HEAD, ("b", "c", "u"), block=4),
    Row("fused_linear_ce-none", bound(linear, **ALL, reduction="none"),
        first(bound(linear_oracle, **ALL, reduction="none")), head, DIFF_HEAD, HEAD_SIZES, HEAD,
        ("b", "c", "u"), flops=4 / 3),
    Row("fused_linear_ce_with_stats", bound(linear_stats, **ALL), bound(linear_oracle, **ALL), head,
        DIFF_HEAD, HEAD_SIZES, HEAD, ("b", "c", "u"), flops=2.0),  # late gradients of its terms
    Row("fused_linear_logp", bound(logp, temperature=0.7),
        first(bound(logp_oracle, temperature=0.7)), biased_head, ("w", "x", "b"), HEAD_SIZES,
        HEAD, ("b",), flops=4 / 3,
        bench=Bench(again, "one product forward, three backward: logits are formed again",
                    [{"lead": (8192,), "d": 4096, "v": 128256}],
                    [{"lead": (512,), "d": 256, "v": 8000}],
                    fn=bound(logp, temperature=0.7, chunk=None), limit="matmul")),
    Row("fused_linear_logp_with_stats", bound(logp_stats, **WARM), bound(logp_oracle, **WARM),
        biased_head, ("w", "x", "b"), HEAD_SIZES, HEAD, ("b",), block=4, flops=4 / 3),
    Row("dpo_from_logp", bound(liger_fn.dpo_from_logp, **DPO_MORE), dpo_more_oracle,
        bound(sequences, ref=True), ("logp",), FEW, SEQUENCES, ops=False),
    Row("orpo_from_logp", liger_fn.orpo_from_logp, orpo_oracle, sequences, ("logp",), FEW,
        SEQUENCES, ops=False),
    Row("cpo_from_logp", liger_fn.cpo_from_logp, cpo_oracle, sequences, ("logp",), FEW, SEQUENCES,
        ops=False),
    Row("simpo_from_logp", liger_fn.simpo_from_logp, simpo_oracle, sequences, ("logp",), FEW,
        SEQUENCES, ops=False),
    Row("kto_from_logp", kto(liger_fn.kto_from_logp), kto_oracle, single, ("logp",), FEW,
        SEQUENCES, ops=False),
    Row("grpo_from_logp", bound(grpo, of=liger_fn.grpo_from_logp), grpo_oracle, sampled,
        ("logp",), FEW, SEQUENCES, ("y", "old", "ref"), ops=False),
    Row("dpo_loss", dpo_loss, under_head(dpo_oracle), headed(bound(sequences, ref=True)),
        ("w", "x"), {**PAIR_HEADED, "b": 2}, HEADED, flops=4 / 3,
        bench=Bench(reasoned, "one product forward, three backward: logits are formed again",
                    [{"b": 4, "t": 1024, "d": 4096, "v": 128256}],
                    [{"b": 2, "t": 128, "d": 256, "v": 8000}],
                    fn=lambda w, x, y, ref: liger_fn.dpo_loss(w, x, y, ref_logp=ref),
                    limit="matmul")),
    Row("orpo_loss", bound(liger_fn.orpo_loss, chunk=4), under_head(orpo_oracle),
        headed(sequences), ("w", "x"), PAIR_HEADED, HEADED, flops=4 / 3),
    Row("cpo_loss", bound(liger_fn.cpo_loss, chunk=4), under_head(cpo_oracle), headed(sequences),
        ("w", "x"), PAIR_HEADED, HEADED, flops=4 / 3),
    Row("simpo_loss", bound(liger_fn.simpo_loss, chunk=4), under_head(simpo_oracle),
        headed(sequences), ("w", "x"), PAIR_HEADED, HEADED, flops=4 / 3),
    Row("kto_loss", kto(bound(liger_fn.kto_loss, chunk=4)), under_head(kto_oracle),
        headed(single), ("w", "x"), {**PAIR_HEADED, "b": 2}, HEADED, flops=4 / 3),
    Row("grpo_loss", bound(grpo, of=liger_fn.grpo_loss, chunk=4), under_head(grpo_oracle),
        headed(sampled), ("w", "x"), {**PAIR_HEADED, "b": 2}, HEADED, ("old", "ref"), flops=4 / 3),


    Row("fused_linear_kl", bound(distilled, of=liger_fn.fused_linear_kl),
        bound(distilled_oracle, rows=kl_rows), two_heads, ("w", "x"), {**PAIR_SIZES, "full": False},
        {**HEAD, "full": [False]},
        bench=Bench(distillation, "one product for each of the two logits, two more with backward",
                    [{"lead": (8192,), "d": 4096, "v": 128256, "full": False}],
                    [{"lead": (256,), "d": 256, "v": 8000, "full": False}],
                    fn=bound(distilled, of=liger_fn.fused_linear_kl, chunk=None), limit="matmul")),
    Row("fused_linear_kl-none", bound(distilled, of=liger_fn.fused_linear_kl, **EACH),
        bound(distilled_oracle, rows=kl_rows, **EACH), two_heads, ("w", "x", "u"), PAIR_SIZES, HEAD,
        ("y", "u"), block=4, flops=20 / 13),  # both logits again; their widths are 3 and 4
    Row("fused_linear_jsd", bound(distilled, of=liger_fn.fused_linear_jsd, beta=0.3),
        bound(distilled_oracle, rows=jsd_rows), two_heads, ("w", "x", "u"), PAIR_SIZES, HEAD,
        ("y", "u")),
    Row("fused_linear_tvd", bound(distilled, of=liger_fn.fused_linear_tvd, temperature=1.5),
        bound(distilled_oracle, rows=tvd_rows, temperature=1.5), two_heads, ("w", "x", "u"),
        PAIR_SIZES, HEAD, ("y", "u")),
]  # fmt: skip
