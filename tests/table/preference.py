"""Rows of the post-training losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import liger_fn
from tests.table.heads import bare_head, logp_oracle, plain_logp
from tests.table.row import Bench, Draw, Function, Row, bound
from tests.table.shapes import SEQUENCES as AT_SCALE
from tests.table.shapes import SMALL_SEQUENCES, products


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


def log_sigmoid(x: Tensor) -> Tensor:
    return torch.log(torch.sigmoid(x))


def dpo_oracle(logp: Tensor, y: Tensor, ref: Tensor) -> Tensor:
    chosen, rejected = (whole(logp, y) - whole(ref, y)).chunk(2)
    return over_pairs(-log_sigmoid(0.1 * (chosen - rejected)), y)


DPO_MORE: dict[str, Any] = {
    "loss_type": ("robust", "sigmoid_norm"), "loss_weights": (0.7, 0.5), "label_smoothing": 0.2,
    "f_divergence": "js", "nll_weight": 0.3, "beta": 0.8,
}  # fmt: skip


def dpo_more_oracle(logp: Tensor, y: Tensor, ref: Tensor) -> Tensor:
    n = (y != -100).sum(-1).clamp(min=1)
    score = math.log(2) + log_sigmoid(whole(logp, y) - whole(ref, y))
    d, by_length = (0.8 * (t.chunk(2)[0] - t.chunk(2)[1]) for t in (score, score / n))
    robust = (-0.8 * log_sigmoid(d) + 0.2 * log_sigmoid(-d)) / 0.6
    norm = -0.8 * log_sigmoid(by_length) - 0.2 * log_sigmoid(-by_length)
    return over_pairs(0.7 * robust + 0.5 * norm, y) + 0.3 * chosen_nll(logp, y)


def orpo_oracle(logp: Tensor, y: Tensor) -> Tensor:
    n = (y != -100).sum(-1)
    p = torch.where(n > 0, whole(logp, y) / n.clamp(min=1), -1.0)
    chosen, rejected = (p - torch.log(-torch.expm1(p))).chunk(2)
    return chosen_nll(logp, y) + over_pairs(-0.1 * log_sigmoid(chosen - rejected), y)


def cpo_oracle(logp: Tensor, y: Tensor) -> Tensor:
    chosen, rejected = whole(logp, y).chunk(2)
    each = -log_sigmoid(0.1 * (chosen - rejected))
    return chosen_nll(logp, y) + over_pairs(each, y)


def simpo_oracle(logp: Tensor, y: Tensor) -> Tensor:
    n = (y != -100).sum(-1).clamp(min=1)
    chosen, rejected = (whole(logp, y) / n).chunk(2)
    return over_pairs(-log_sigmoid(2.0 * (chosen - rejected) - 1.0), y)


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
    return lambda *a, **k: of(*a[:-1], ref_logp=a[-1], kl=0.3, **k)


def dpo_loss(w: Tensor, x: Tensor, y: Tensor, ref: Tensor, chunk: Any = 4) -> Tensor:
    return liger_fn.dpo_loss(w, x, y, ref_logp=ref, chunk=chunk)


def dpo_long(w: Tensor, x: Tensor, y: Tensor, ref: Tensor, chunk: Any = 3) -> Tensor:
    return dpo_loss(w, x, y, ref, chunk=chunk)  # no pair of tokens fits: two passes


SEQUENCES = {"b": range(1, 4), "t": range(1, 5)}
HEADED = {**SEQUENCES, "d": range(1, 4), "v": range(2, 8)}
FEW = {"b": 2, "t": 3}
PAIR_HEADED = {"b": 1, "t": 2, "d": 2, "v": 3}


def bench(fn: Function, oracle: Function, *more: str) -> Bench:
    """With a reference that gives every token what the policy does on average."""

    def make(draw: Draw, b: int, t: int, d: int, v: int) -> dict[str, Tensor]:
        n, made = 2 * b, bare_head(draw, (2 * b, t), d, v)
        given = {"ref": -2 - math.log(v) + draw.normal(n, t, scale=0.0),
                 "good": draw.targets((n,), 2) == 1, "a": draw.normal(n)}  # fmt: skip
        return made | {name: given[name] for name in more}

    def plain(w: Tensor, x: Tensor, y: Tensor, *rest: Tensor) -> Tensor:
        return oracle(plain_logp(w, x, y), y, *rest)

    return Bench(products(2, 6), "one product forward, 3 with backward: gradients at once",
                 AT_SCALE, SMALL_SEQUENCES, ("w", "x"), fn, plain, make, "matmul")  # fmt: skip


ROWS = [
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
        ("w", "x"), {**PAIR_HEADED, "b": 2}, HEADED, composed=True,
        bench=bench(lambda *a: liger_fn.dpo_loss(*a[:3], ref_logp=a[3]), dpo_oracle, "ref")),
    Row("dpo_loss-long", dpo_long, under_head(dpo_oracle), headed(bound(sequences, ref=True)),
        ("w", "x"), PAIR_HEADED, HEADED, flops=4 / 3, composed=True),
    Row("orpo_loss", bound(liger_fn.orpo_loss, chunk=4), under_head(orpo_oracle),
        headed(sequences), ("w", "x"), PAIR_HEADED, HEADED, composed=True,
        bench=bench(liger_fn.orpo_loss, orpo_oracle)),
    Row("cpo_loss", bound(liger_fn.cpo_loss, chunk=4), under_head(cpo_oracle), headed(sequences),
        ("w", "x"), PAIR_HEADED, HEADED, composed=True,
        bench=bench(liger_fn.cpo_loss, cpo_oracle)),
    Row("simpo_loss", bound(liger_fn.simpo_loss, chunk=4), under_head(simpo_oracle),
        headed(sequences), ("w", "x"), PAIR_HEADED, HEADED, composed=True,
        bench=bench(liger_fn.simpo_loss, simpo_oracle)),
    Row("kto_loss", kto(bound(liger_fn.kto_loss, chunk=4)), under_head(kto_oracle),
        headed(single), ("w", "x"), {**PAIR_HEADED, "b": 2}, HEADED, composed=True,
        bench=bench(kto(liger_fn.kto_loss), kto_oracle, "good", "ref")),
    Row("grpo_loss", bound(grpo, of=liger_fn.grpo_loss, chunk=4), under_head(grpo_oracle),
        headed(sampled), ("w", "x"), {**PAIR_HEADED, "b": 2}, HEADED, ("old", "ref"),
        composed=True, bench=bench(liger_fn.grpo_loss, grpo_oracle, "a")),
]  # fmt: skip
