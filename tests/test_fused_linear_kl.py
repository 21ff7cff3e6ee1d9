"""fused_linear_kl, _jsd and _tvd: the divergences of logits that are never in memory together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from tests.tolerance import assert_pure_and_close, assert_pure_and_exact, results, same_bits

NAMES = {"fused_linear_kl": "kl_div", "fused_linear_jsd": "jsd", "fused_linear_tvd": "tvd"}
every = pytest.mark.parametrize("name", NAMES)


def drawn(
    m: int, device: torch.device, dtype: torch.dtype = torch.float64, v: int = 9
) -> tuple[Tensor, ...]:
    """w, x, teacher_w, teacher_x."""
    shapes = ((v, 4), (m, 4), (v, 6), (m, 6))
    return tuple(torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes)


def capped(z: Tensor, softcap: float | None, scale: float) -> Tensor:
    z = z * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def apart(name: str, tw: Tensor, tx: Tensor, **how: Any) -> Callable[..., Tensor]:
    """The function of logits, on logits that plain torch forms."""
    student = {k: how.pop(k, d) for k, d in (("softcap", None), ("logit_scale", 1.0))}
    teacher = {k: how.pop("teacher_" + k, d) for k, d in (("softcap", None), ("logit_scale", 1.0))}
    b, teacher_b = how.pop("b", None), how.pop("teacher_b", None)
    how.pop("chunk", None)

    def f(w: Tensor, x: Tensor) -> Tensor:
        z = capped(F.linear(x, w, b), student["softcap"], student["logit_scale"])
        zt = capped(
            F.linear(tx.to(z), tw.to(z), teacher_b), teacher["softcap"], teacher["logit_scale"]
        )
        return getattr(liger_fn, NAMES[name])(z, zt, **how)

    return f


def fused(name: str, tw: Tensor, tx: Tensor, **how: Any) -> Callable[..., Tensor]:
    return lambda w, x: getattr(liger_fn, name)(w, x, tw, tx, **how)


# -- numbers by hand


def test_a_certain_teacher_and_an_undecided_student(backend, device):
    w = 200 * torch.eye(2, device=device)
    student, teacher = torch.zeros(1, 2, device=device), torch.tensor([[1.0, 0.0]], device=device)
    got = [getattr(liger_fn, name)(w, student, w, teacher).item() for name in NAMES]
    jsd = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3) + 0.25 * math.log(2)
    assert got == pytest.approx([math.log(2), jsd, 0.5])


@every
def test_zero_where_student_and_teacher_are_equal(name, backend, device):
    w, x, _, _ = drawn(5, device, torch.float32)
    (loss,), grads = results(fused(name, w, x, chunk=2), (w, x))
    assert loss.item() == 0
    assert not any(g.any() for g in grads)


# -- the same as on logits


OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk": 3, "temperature": 0.7},
    {"reduction": "sum", "softcap": 2.0, "logit_scale": 0.5},
    {"reduction": "none", "chunk": 4, "teacher_softcap": 3.0, "teacher_logit_scale": 2.0},
    {"n_valid": 3.5},
]


@every
@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_equals_the_function_of_logits(name, backend, device, how):
    w, x, tw, tx = drawn(7, device)
    assert_pure_and_close(fused(name, tw, tx, **how), apart(name, tw, tx, **how), w, x)
    how = {**how, "b": torch.randn(9).to(w), "teacher_b": torch.randn(9).to(w)}
    y = torch.tensor([1, -100, 3, 4, -100, 5, 6], device=device)
    how |= {"y": y, "token_weight": torch.randn(7).to(w)}
    assert_pure_and_close(fused(name, tw, tx, **how), apart(name, tw, tx, **how), w, x)


@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
def test_beta_of_jsd(backend, device, beta):
    w, x, tw, tx = drawn(5, device)
    f, want = (of("fused_linear_jsd", tw, tx, beta=beta) for of in (fused, apart))
    assert_pure_and_close(f, want, w, x)


@every
def test_labels_take_their_share(name, backend, device):
    w, x, tw, tx = drawn(5, device)
    y = torch.tensor([1, -100, 3, 4, 0], device=device)
    how = {"y": y, "temperature": 1.5}
    soft, (dw, dx) = results(fused(name, tw, tx, **how), (w, x))
    hard, (dw2, dx2) = results(lambda w, x: liger_fn.fused_linear_ce(w, x, y), (w, x))
    both, (dw3, dx3) = results(fused(name, tw, tx, **how, hard_weight=0.3), (w, x))
    for a, b, c in zip((*soft, dw, dx), (*hard, dw2, dx2), (*both, dw3, dx3), strict=True):
        torch.testing.assert_close(c, 0.7 * a + 0.3 * b)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_plain_torch(name, backend, device, dtype):
    w, x, tw, tx = drawn(64, device, dtype, v=33)

    def plain(w: Tensor, x: Tensor) -> Tensor:
        z, zt = F.linear(x, w).float(), F.linear(tx, tw).float()
        q, p = z.log_softmax(-1), zt.log_softmax(-1)
        if name == "fused_linear_tvd":
            return 0.5 * (p.exp() - q.exp()).abs().sum(-1).mean()
        if name == "fused_linear_kl":
            return (p.exp() * (p - q)).sum(-1).mean()
        m = torch.logaddexp(p, q) - math.log(2)
        return 0.5 * (p.exp() * (p - m) + q.exp() * (q - m)).sum(-1).mean()

    exact = partial(apart(name, tw.double(), tx.double()))
    assert_pure_and_exact(fused(name, tw, tx, chunk=48), plain, exact, w, x)


# -- cosine, and a teacher of whom some columns are known


def test_cosine_distance_by_hand(backend, device):
    w = torch.eye(2, dtype=torch.float64, device=device)
    x = torch.tensor([[3.0, 4.0], [1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]).to(w)
    t = torch.tensor([[4.0, 3.0], [-5.0, 0.0], [6.0, 0.0], [1.0, 0.0]]).to(w)
    loss = liger_fn.fused_linear_cosine(w, x, w, t, reduction="none")
    assert loss.tolist() == pytest.approx([1 - 24 / 25, 2.0, 0.0, 1.0])
    assert loss[2] == 0
    _, (dx,) = results(lambda x: liger_fn.fused_linear_cosine(w, x, w, t), (x,))
    assert dx[2:].eq(0).all()


def test_cosine_distance_is_that_of_torch(backend, device):
    w, x, tw, tx = drawn(7, device)
    want = lambda w, x: (1 - F.cosine_similarity(x @ w.T, tx @ tw.T, -1)).mean()  # noqa: E731
    f = lambda w, x: liger_fn.fused_linear_cosine(w, x, tw, tx, chunk=3)  # noqa: E731
    assert_pure_and_close(f, want, w, x)


def test_all_columns_known_is_the_whole_divergence(backend, device):
    w, x, tw, tx = drawn(5, device)
    logp, at = (tx @ tw.T).log_softmax(-1).topk(9, -1)
    f = lambda w, x: liger_fn.fused_linear_kl(w, x, None, None, teacher_logp_topk=(logp, at))  # noqa: E731
    got, grads = results(f, (w, x))
    want, exact = results(fused("fused_linear_kl", tw, tx), (w, x))
    # what rounding leaves of the teacher's probability is a bucket of its own
    torch.testing.assert_close((*got, *grads), (*want, *exact), rtol=1e-9, atol=1e-9)


def test_the_columns_nobody_knows_are_one_bucket(backend, device):
    # the student is sure of column 0 by 3/4 of 4 columns; the teacher gives it 1/2
    w = torch.tensor([[math.log(9)], [0.0], [0.0], [0.0]], dtype=torch.float64, device=device)
    x = torch.ones(1, 1, dtype=torch.float64, device=device)
    known = (
        torch.full((1, 1), math.log(0.5)).to(w),
        torch.zeros(1, 1, dtype=torch.int64, device=device),
    )
    f = lambda w: liger_fn.fused_linear_kl(w, x, None, None, teacher_logp_topk=known)  # noqa: E731
    (loss,), (dw,) = results(f, (w,), (torch.ones((), dtype=torch.float64, device=device),))
    assert loss.item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    # q - p where it is known; elsewhere q times (1 - rest of p / rest of q)
    assert dw.flatten().tolist() == pytest.approx([0.25, *[1 / 12 * (1 - 2)] * 3])


@pytest.mark.parametrize("outside", [-1, 9])
def test_a_column_outside_the_vocabulary_makes_its_row_nan(backend, device, outside):
    w, x, tw, tx = drawn(3, device)
    logp, at = (tx @ tw.T).log_softmax(-1).topk(2, -1)
    at[1, 1] = outside
    f = lambda x: liger_fn.fused_linear_kl(  # noqa: E731
        w, x, None, None, teacher_logp_topk=(logp, at), reduction="none"
    )
    (losses,), (dx,) = results(f, (x,))
    for t in (losses[:, None], dx):
        assert t.isnan().any(1).tolist() == [False, True, False]


def test_known_columns_take_the_place_of_the_teacher():
    w, x, tw, tx = drawn(3, torch.device("cpu"))
    logp, at = (tx @ tw.T).log_softmax(-1).topk(2, -1)
    f = liger_fn.fused_linear_kl
    with pytest.raises(
        ValueError, match=r"^fused_linear_kl: teacher_w and teacher_logp_topk cannot be"
    ):
        f(w, x, tw, None, teacher_logp_topk=(logp, at))
    with pytest.raises(
        TypeError, match=r"^fused_linear_kl: teacher_logp_topk must be \(values, indices\), "
    ):
        f(w, x, None, None, teacher_logp_topk=logp)
    with pytest.raises(
        ValueError, match=r"^fused_linear_kl: axis k is 1 in indices but 2 in values"
    ):
        f(w, x, None, None, teacher_logp_topk=(logp, at[:, :1]))
    with pytest.raises(
        ValueError, match=r"^fused_linear_kl: axis k of indices must be 1 to 9, got 0"
    ):
        f(w, x, None, None, teacher_logp_topk=(logp[:, :0], at[:, :0]))
    with pytest.raises(TypeError, match=r"^fused_linear_kl: indices must hold integers"):
        f(w, x, None, None, teacher_logp_topk=(logp, logp))
    with pytest.raises(
        ValueError, match=r"^fused_linear_kl: leading axes are \(2,\) in values but \(3,\) in x"
    ):
        f(w, x, None, None, teacher_logp_topk=(logp[:2], at[:2]))


# -- rows that do not count, and what is paid for


@every
@pytest.mark.parametrize("held", [math.nan, math.inf])
def test_ignored_rows_may_hold_anything(name, backend, device, held):
    w, x, tw, tx = drawn(4, device)
    y = torch.tensor([1, -100, 3, 4], device=device)
    bad, bad_t = x.clone(), tx.clone()
    bad[1] = bad_t[1] = held
    got, got_grads = results(fused(name, tw, bad_t, y=y, softcap=3.0), (w, bad))
    want, grads = results(fused(name, tw, tx, y=y, softcap=3.0), (w, x))
    assert all(map(same_bits, (*got, *got_grads), (*want, *grads)))
    none = torch.full_like(y, -100)
    (loss,), grads = results(fused(name, tw, tx, y=none), (w, x))
    assert loss.item() == 0
    assert not any(g.any() for g in grads)


@every
def test_the_teacher_has_no_gradient(name, backend, device):
    w, x, tw, tx = drawn(4, device)
    tw, tx = tw.requires_grad_(), tx.requires_grad_()
    assert not fused(name, tw, tx)(w, x).requires_grad
    fused(name, tw, tx)(w.requires_grad_(), x).backward()
    assert tw.grad is None
    assert tx.grad is None


# -- errors


@every
def test_errors(name):
    w, x, tw, tx = drawn(3, torch.device("cpu"))
    f = getattr(liger_fn, name)
    y = torch.zeros(3, dtype=torch.long)
    cases: list[tuple[tuple[Tensor, ...], dict[str, Any], str]] = [
        ((w, x, tw[:8], tx), {}, "axis v is 8 in teacher_w but 9 in w"),
        ((w, x, tw, tx[:2]), {}, "leading axes are (2,) in teacher_x but (3,) in x"),
        (
            (w, x, tw, tx),
            {"hard_weight": 0.5},
            "y must be given where hard_weight is not 0, got None",
        ),
        ((w, x, tw, tx), {"hard_weight": 1.5, "y": y}, "hard_weight must lie in [0, 1], got 1.5"),
        ((w, x, tw, tx), {"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ((w, x, tw, tx), {"teacher_softcap": -1.0}, "teacher_softcap must be above 0, got -1.0"),
        ((w, x, tw, tx), {"chunk": 0}, "chunk must be an integer above 0, got 0"),
        (
            (w, x, tw, tx),
            {"accum_dtype": torch.float16},
            "accum_dtype must be float32 or bfloat16, ",
        ),
    ]
    for tensors, how, message in cases:
        with pytest.raises(ValueError, match="^" + re.escape(f"{name}: {message}")):
            f(*tensors, **how)
