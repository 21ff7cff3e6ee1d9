"""Row passes of distillation: options, masked columns, rows that are certain, ignored or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from liger_fn.ops import _distill_rows, _distill_topk
from tests.test_fused_linear_kl import NAMES, capped, drawn, fused
from tests.tolerance import (
    assert_pure_and_close,
    assert_pure_and_exact,
    results,
    same_bits,
)

Head = Callable[..., Tensor]
CAPS = {"softcap": 2.0, "logit_scale": 0.5}
every = pytest.mark.parametrize("kind", ["cosine", "topk"])
divergences = pytest.mark.parametrize("name", NAMES)


def known(tw: Tensor, tx: Tensor, k: int = 3) -> tuple[Tensor, Tensor]:
    logp, at = (tx @ tw.mT).log_softmax(-1).topk(k, -1)
    return logp, at


def head(kind: str, tw: Tensor, tx: Tensor, **how: Any) -> Head:
    if kind == "cosine":
        return lambda w, x: liger_fn.fused_linear_cosine(w, x, tw, tx, **how)
    columns = known(tw, tx)
    return lambda w, x: liger_fn.fused_linear_kl(w, x, None, None, teacher_logp_topk=columns, **how)


def oracle(
    kind: str, tw: Tensor, tx: Tensor, *, b: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0, **_: Any,
) -> Head:  # fmt: skip
    """Losses of rows in plain torch."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        z = capped(F.linear(x, w, b), softcap, logit_scale)
        if kind == "cosine":
            zt = capped(F.linear(tx, tw), teacher_softcap, teacher_logit_scale)
            return 1 - F.cosine_similarity(z, zt, -1, 0.0)
        logp, at = known(tw.double(), tx.double())
        p, q = logp.exp(), (z / temperature).softmax(-1)
        q_known = q.gather(-1, at)
        left = torch.ones_like(q).scatter(-1, at, 0.0)
        rest, q_rest = 1 - p.sum(-1), (q * left).sum(-1)
        return (p * (logp - q_known.log())).sum(-1) + rest * (rest / q_rest).log()

    return f


# -- options


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("cosine", {"chunk": 3, **CAPS}),
    ("cosine", {**CAPS, "teacher_softcap": 3.0, "teacher_logit_scale": 2.0}),
    ("topk", {"chunk": 3, **CAPS}),
    ("topk", {**CAPS, "temperature": 0.7}),
]


@pytest.mark.parametrize(("kind", "how"), OPTIONS, ids=str)
def test_options(kind, backend, device, how):
    w, x, tw, tx = drawn(7, device)
    how = {**how, "b": torch.randn(9).to(w)}
    y = torch.tensor([1, -100, 3, 4, -100, 5, 6], device=device)
    u = torch.randn(7).to(w)
    f = head(kind, tw, tx, y=y, token_weight=u, **how)
    rows = oracle(kind, tw, tx, **how)

    def want(w: Tensor, x: Tensor) -> Tensor:
        return torch.where(y == -100, 0.0, rows(w, x) * u).sum() / 5

    assert_pure_and_close(f, want, w, x)
    each = head(kind, tw, tx, reduction="none", **how)
    assert_pure_and_close(each, rows, w, x)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_plain_torch(kind, backend, device, dtype):
    w, x, tw, tx = drawn(64, device, dtype, v=33)
    columns = known(tw.double(), tx.double())

    def f(w: Tensor, x: Tensor) -> Tensor:
        if kind == "cosine":
            return liger_fn.fused_linear_cosine(w, x, tw, tx, chunk=48)
        return liger_fn.fused_linear_kl(w, x, None, None, teacher_logp_topk=columns, chunk=48)

    def plain(w: Tensor, x: Tensor) -> Tensor:
        z = F.linear(x, w).float()
        if kind == "cosine":
            return (1 - F.cosine_similarity(z, F.linear(tx, tw).float(), -1)).mean()
        (logp, at), logq = (columns[0].float(), columns[1]), z.log_softmax(-1)
        p = logp.exp()
        rest = 1 - p.sum(-1)
        q_rest = logq.scatter(-1, at, -math.inf).logsumexp(-1)
        terms = (p * (logp - logq.gather(-1, at))).sum(-1)
        return (terms + rest * (rest.log() - q_rest)).mean()

    exact = oracle(kind, tw.double(), tx.double())
    assert_pure_and_exact(f, plain, lambda w, x: exact(w, x).mean(), w, x)


# -- columns that are masked, rows that are certain


@divergences
def test_a_column_masked_on_both_sides_is_as_if_it_were_not_there(name, backend, device):
    w, x, tw, tx = drawn(5, device)
    b = torch.zeros(9).to(w)
    b[4] = -math.inf
    f = lambda w, x: getattr(liger_fn, name)(w, x, tw, tx, b=b, teacher_b=b)  # noqa: E731
    live = b == 0
    less = lambda w, x: getattr(liger_fn, name)(w[live], x, tw[live], tx)  # noqa: E731
    (got,), grads = results(f, (w, x))
    (want,), exact = results(less, (w, x))
    torch.testing.assert_close((got, *grads), (want, *exact))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_masked_column_that_nobody_knows(backend, device, softcap):
    w, x, tw, tx = drawn(5, device)
    columns = known(tw, tx)
    free = torch.ones(5, 9, dtype=torch.bool, device=device).scatter(1, columns[1], False)
    column = int(free.sum(0).argmax())
    rows = free[:, column]  # where the teacher leaves it open
    b = torch.zeros(9).to(w)
    b[column] = -math.inf
    y = torch.where(rows, 0, -100)
    f = head("topk", tw, tx, b=b, softcap=softcap, y=y)
    # exp(-300) is next to nothing; under a cap -inf is -c, and so is -300
    each = oracle("topk", tw, tx, b=b.clamp(min=-300), softcap=softcap)
    assert_pure_and_close(f, lambda w, x: each(w, x)[rows].mean(), w, x)


def test_what_a_certain_student_leaves_keeps_its_digits(backend, device):
    # open columns have 2e-26 of the student's probability, one minus the rest would be 0
    w = torch.tensor([[60.0], [59.0], [0.0], [0.5]], device=device)
    x, at = torch.ones(1, 1, device=device), torch.tensor([[0, 1]], device=device)
    logp = torch.tensor([[0.5, 0.25]], device=device).log()
    f = lambda w: liger_fn.fused_linear_kl(w, x, None, None, teacher_logp_topk=(logp, at))  # noqa: E731
    (loss,), (dw,) = results(f, (w,), (torch.ones((), device=device),))
    q = w.double().flatten().softmax(-1)
    rest = 0.25 * (0.25 / q[2:].sum()).log()
    want = 0.5 * (0.5 / q[0]).log() + 0.25 * (0.25 / q[1]).log() + rest
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    exact = torch.cat((q[:2] - logp.exp().double()[0], -0.25 * q[2:] / q[2:].sum()))
    torch.testing.assert_close(dw.flatten().double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("where", ["open", "known"])
def test_nan_among_the_columns_is_nan(backend, device, where, softcap):
    w, x, tw, tx = drawn(3, device)
    logp, at = known(tw[:, :1], tx[:1, :1].expand(3, 1))  # the same columns for every row
    column = int(at[0, 0])
    if where == "open":
        column = next(c for c in range(9) if c not in at[0].tolist())
    w[column] = math.nan
    loss = liger_fn.fused_linear_kl(
        w, x, None, None, teacher_logp_topk=(logp, at), softcap=softcap, reduction="none"
    )
    assert loss.isnan().all()


# -- ignored rows, and what is launched


@every
@pytest.mark.parametrize("held", [math.nan, math.inf])
def test_ignored_rows_may_hold_anything(kind, backend, device, held):
    w, x, tw, tx = drawn(4, device)
    y = torch.tensor([1, -100, 3, 4], device=device)
    logp, at = known(tw, tx)
    bad, bad_t, bad_logp, bad_at = x.clone(), tx.clone(), logp.clone(), at.clone()
    bad[1] = bad_t[1] = bad_logp[1] = held
    bad_at[1] = 10**6

    def f(tx: Tensor, *columns: Tensor) -> Head:
        how: dict[str, Any] = {"y": y, "softcap": 3.0}
        if kind == "cosine":
            return lambda w, x: liger_fn.fused_linear_cosine(w, x, tw, tx, **how)
        return lambda w, x: liger_fn.fused_linear_kl(
            w, x, None, None, teacher_logp_topk=columns, **how
        )

    got, got_grads = results(f(bad_t, bad_logp, bad_at), (w, bad))
    want, grads = results(f(tx, logp, at), (w, x))
    assert all(map(same_bits, (*got, *got_grads), (*want, *grads)))


@pytest.mark.parametrize("kind", ["cosine", "topk", "kl"])
def test_one_launch_a_chunk_and_no_gradient_where_nobody_asks(kind, device, monkeypatch):
    w, x, tw, tx = drawn(8, device, torch.float32)
    pulls: list[object] = []

    def recorded(module: Any) -> None:
        launch = module.launch

        def record(*args: Any, **meta: Any) -> None:
            pulls.append(meta["PULL"])
            launch(*args, **meta)

        monkeypatch.setattr(module, "launch", record)

    recorded(_distill_rows)
    recorded(_distill_topk)
    f = fused("fused_linear_kl", tw, tx, chunk=4) if kind == "kl" else head(kind, tw, tx, chunk=4)
    with liger_fn.using("triton"):
        f(w, x)
        assert not any(pulls)
        assert len(pulls) == 2
        pulls.clear()
        results(f, (w, x))
    assert all(pulls)
    assert len(pulls) == 2
