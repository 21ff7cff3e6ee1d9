"""kl_div, jsd and tvd against F.kl_div, TRL's formula and softmax in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from liger_fn import _launch
from tests.table import losses
from tests.tolerance import assert_pure_and_close, far_apart, results, same_bits, ulp

KEPT = 6  # rows that the interpreter walks; plain torch walks MANY
MANY = 256
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]
Fn = Callable[..., Any]


# -- the oracles: a loss per row -------------------------------------------------------------------


def kl_rows(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    q, p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def jsd_rows(
    student: Tensor, teacher: Tensor, temperature: float = 1.0, beta: float = 0.5
) -> Tensor:
    """The formula of TRL's GKD trainer."""
    if beta in (0, 1):
        return kl_rows(*((teacher, student) if beta else (student, teacher)), temperature)
    q, p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    m = torch.logsumexp(torch.stack([q + math.log(1 - beta), p + math.log(beta)]), 0)
    of_p, of_q = (F.kl_div(m, t, reduction="none", log_target=True).sum(-1) for t in (p, q))
    return beta * of_p + (1 - beta) * of_q


def tvd_rows(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    q, p = (student / temperature).softmax(-1), (teacher / temperature).softmax(-1)
    return 0.5 * (p - q).abs().sum(-1)


def mixed(beta: float) -> tuple[Fn, Fn]:
    return (
        lambda *a, **kw: liger_fn.jsd(*a, beta=beta, **kw),
        lambda *a, **kw: jsd_rows(*a, beta=beta, **kw),
    )


PAIRS: dict[str, tuple[Fn, Fn]] = {
    "kl_div": (liger_fn.kl_div, kl_rows),
    "jsd": (liger_fn.jsd, jsd_rows),
    "jsd 0": mixed(0),
    "jsd 1": mixed(1.0),
    "jsd 0.01": mixed(0.01),
    "jsd 0.9": mixed(0.9),
    "tvd": (liger_fn.tvd, tvd_rows),
}
every = pytest.mark.parametrize("name", PAIRS)
three = pytest.mark.parametrize("name", ["kl_div", "jsd", "tvd"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rows_of(name: str, temperature: float = 1.0, **options: Any) -> tuple[Fn, Fn]:
    """A loss per row and its oracle, as functions of student and teacher."""
    ours, oracle = PAIRS[name]
    return (
        lambda s, t: ours(s, t, temperature=temperature, reduction="none", **options),
        lambda s, t: oracle(s, t, temperature=temperature),
    )


def hold(name: str, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> None:
    """Hold the first rows and their gradients to twice the error of plain torch plus an ulp.

    The worst of plain torch is that of all rows, since of few it may be small by luck. It is given
    half precision widened: our losses are float32.
    """
    f, oracle = rows_of(name, temperature)
    if student.dtype == torch.float64:
        assert_pure_and_close(f, oracle, student, teacher)
        return
    args, dy = (student, teacher), torch.randn(student.shape[0], device=student.device)
    ours = results(f, tuple(t[:KEPT] for t in args), (dy[:KEPT],))
    exact = results(oracle, tuple(t.double() for t in args), (dy.double(),))
    plain = results(lambda s, t: oracle(s.float(), t.float()), args, (dy,))
    for got, p, e in zip(*((*of[0], *of[1]) for of in (ours, plain, exact)), strict=True):
        assert got.dtype == p.dtype
        error, allowed = ((t.double() - e[: len(t)]).abs().amax() for t in (got, p))
        assert error <= 2 * allowed + ulp(e.abs().amax(), got.dtype)


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def pair(
    *shape: int, device: torch.device, scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    made = [(scale * drawn(*shape, device=device)).to(dtype) for _ in range(2)]
    return made[0], made[1]


# -- by hand ---------------------------------------------------------------------------------------

# student 1/2, 1/2 and teacher 3/4, 1/4
BY_HAND: dict[str, float] = {
    "kl_div": 0.75 * math.log(3 / 2) + 0.25 * math.log(1 / 2),
    "jsd": 0.375 * math.log(6 / 5) + 0.125 * math.log(2 / 3)
    + 0.25 * math.log(4 / 5) + 0.25 * math.log(4 / 3),
    "jsd 0": 0.75 * math.log(3 / 2) + 0.25 * math.log(1 / 2),
    "jsd 1": 0.5 * math.log(2 / 3) + 0.5 * math.log(2),
    "tvd": 0.25,
}  # fmt: skip


@pytest.mark.parametrize(("name", "want"), BY_HAND.items(), ids=BY_HAND.keys())
def test_two_columns_by_hand(backend, device, name, want):
    student, teacher = torch.zeros(1, 2, device=device), torch.tensor([[3.0, 1.0]], device=device)
    assert PAIRS[name][0](student, teacher.log()).item() == pytest.approx(want, abs=6e-8)


def test_gradients_of_two_columns_by_hand(backend, device):
    # q - p, and p (log(p / q) - KL) = 3/16 log 3 either way; half of each at temperature 2
    student, teacher = torch.zeros(2, device=device), torch.tensor([9.0, 1.0], device=device).log()
    f = lambda s, t: liger_fn.kl_div(s, t, temperature=2.0)  # noqa: E731
    _, (ds, dt) = results(f, (student, teacher), (torch.tensor(1.0, device=device),))
    assert ds.tolist() == pytest.approx([-0.125, 0.125])
    assert dt.tolist() == pytest.approx([3 / 32 * math.log(3), -3 / 32 * math.log(3)])


@pytest.mark.parametrize("name", ["kl_div", "tvd"])
def test_what_is_next_to_certain_by_hand(backend, device, name):
    # q and p are 1 but for a column: float64 too rounds 1 + e**-61, unless told not to
    a, b = 80.0, 61.5
    q, p = math.exp(-a), math.exp(-b)
    want = {"kl_div": (p * (a - b - 1), q - p, p * (a - b)), "tvd": (p - q, -q, p)}[name]
    at = tuple(torch.tensor([z, 0.0], device=device) for z in (a, b))
    one = torch.tensor(1.0, device=device)
    (loss,), grads = results(PAIRS[name][0], at, (one,))
    # e**-80 is known to 80 roundings of its exponent
    assert [loss.item(), *(g[1].item() for g in grads)] == pytest.approx(want, rel=1e-5, abs=0)
    oracle = {"kl_div": losses.kl_rows, "tvd": losses.tvd_rows}[name]
    (loss,), grads = results(oracle, tuple(t.double() for t in at), (one.double(),))
    assert [loss.item(), *(g[1].item() for g in grads)] == pytest.approx(want, rel=1e-9, abs=0)
    assert [g[0].item() for g in grads] == pytest.approx([-w for w in want[1:]], rel=1e-9, abs=0)


# -- as exact as plain torch -----------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@every
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, name, scale, dtype):
    hold(name, *pair(MANY, 40, device=device, scale=scale, dtype=dtype))


@pytest.mark.parametrize("temperature", [0.5, 2.5])
@every
def test_a_temperature_divides_both_logits(backend, device, name, temperature):
    hold(name, *pair(3, 7, device=device), temperature=temperature)
    hold(
        name, *pair(MANY, 40, device=device, scale=3, dtype=torch.float32), temperature=temperature
    )


@pytest.mark.parametrize("noise", [1e-6, 1e-3])
@each_dtype
@pytest.mark.parametrize("name", [n for n in PAIRS if n != "tvd"])  # whose gradient jumps there
def test_near_equality_keeps_digits(backend, device, name, dtype, noise):
    teacher = 3 * drawn(MANY, 40, device=device)
    student = (teacher.to(dtype).double() + noise * drawn(MANY, 40, device=device)).to(dtype)
    hold(name, student, teacher.to(dtype))
    if noise == 1e-3 and dtype == torch.float32:  # plain torch has no digit left
        (f, oracle), args = rows_of(name), (student[:KEPT], teacher[:KEPT].to(dtype))
        want = oracle(*(t.double() for t in args))
        torch.testing.assert_close(f(*args).double(), want, rtol=0.05, atol=0)


@three
def test_logits_close_to_nothing_lose_no_digit(backend, device, name):
    # p / q is within 2e-4 of 1, and its logarithm, KL's terms and TVD's signs are known to 1e-7 of
    # that: plain torch is off by up to 1e8 ulp, and has wrong signs
    (f, oracle), args = rows_of(name), pair(KEPT, 257, device=device, scale=1e-4)
    student, teacher = (t.float() for t in args)
    dy = torch.ones(KEPT, device=device)
    ours = results(f, (student, teacher), (dy,))
    exact = results(oracle, (student.double(), teacher.double()), (dy.double(),))
    for got, want in zip((*ours[0], *ours[1]), (*exact[0], *exact[1]), strict=True):
        assert (got - want).abs().amax() <= 1e-6 * want.abs().amax()


@each_dtype
@every
def test_a_large_common_offset_costs_no_digits(backend, device, name, dtype):
    student, teacher = pair(MANY, 33, device=device, scale=4)
    student, teacher = student.round(), teacher.round()
    hold(name, (student + 30_000).to(dtype), (teacher - 30_000).to(dtype))
    (f, _), student, teacher = rows_of(name), student[:KEPT].float(), teacher[:KEPT].float()
    a = results(f, (student + 30_000, teacher - 30_000))
    b = results(f, (student, teacher))
    assert all(map(same_bits, (*a[0], *a[1]), (*b[0], *b[1])))


@pytest.mark.parametrize(("name", "n"), [("kl_div", 65_537), ("jsd", 131_072), ("tvd", 262_144)])
def test_error_does_not_grow_with_the_number_of_columns(backend, device, name, n):
    hold(name, *pair(2, n, device=device, scale=2, dtype=torch.float32))


MIXED = [
    (torch.bfloat16, torch.float32), (torch.float32, torch.float16),
    (torch.float64, torch.bfloat16), (torch.float32, torch.float64),
]  # fmt: skip


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
@three
def test_student_and_teacher_may_have_two_dtypes(backend, device, name, dtypes):
    f, oracle = rows_of(name)
    args = tuple(drawn(4, 9, device=device, dtype=d) for d in dtypes)
    (loss,), grads = results(f, args)
    assert loss.dtype == torch.promote_types(torch.float32, torch.promote_types(*dtypes))
    assert tuple(g.dtype for g in grads) == dtypes
    (exact,), wants = results(oracle, tuple(t.double() for t in args))
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-7)
    for g, want in zip(grads, wants, strict=True):
        eps = max(torch.finfo(g.dtype).eps, 1e-6)
        torch.testing.assert_close(g.double(), want, rtol=eps, atol=eps * want.abs().max().item())


@pytest.mark.parametrize("v", [257, 4097])
def test_kl_far_from_equality_is_known_to_an_ulp_or_two(backend, device, v):
    # one column of the teacher against logits of 2 and -2: the loss is log(sum_q) + 4. What q - p
    # add, 0, is a sum that may be off by several ulp of it
    student = torch.where(torch.rand(64, v, device=device) < 0.5, 2.0, -2.0)
    student[:, 0] = -2.0
    teacher = torch.zeros_like(student)
    teacher[:, 0] = 1e4
    got = liger_fn.kl_div(student, teacher, reduction="none")
    want = kl_rows(student.double(), teacher.double())
    assert ((got - want).abs() <= 2 * ulp(want, torch.float32)).all()


# -- equality, infinities, NaN ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@every
def test_equal_logits_cost_exactly_nothing(backend, device, name, dtype):
    x = (4 * drawn(6, 37, device=device)).to(dtype)
    x[1] *= 1e3
    x[2, ::2] = -math.inf
    f, _ = rows_of(name, 0.7)
    (loss,), grads = results(f, (x, x.clone()))
    assert not loss.any()
    assert not any(g.any() for g in grads)


@each_dtype
def test_at_a_tie_the_gradient_of_tvd_is_that_of_one_side_or_between(backend, device, dtype):
    # a permutation: p = q in four columns, though no rounding says so
    student = torch.tensor([-2.0, 0.0, -1.0, 1.0, -1.0, -1.0, -1.0], device=device)
    teacher = torch.tensor([-2.0, 1.0, -1.0, -1.0, -1.0, -1.0, 0.0], device=device)
    f, oracle = rows_of("tvd", 1.5)
    one = torch.tensor(1.0, device=device)
    (loss,), (ds, dt) = results(f, (student.to(dtype), teacher.to(dtype)), (one,))
    q, p = ((t.double() / 1.5).softmax(-1) for t in (student, teacher))
    torch.testing.assert_close(loss.double(), oracle(student.double(), teacher.double()))
    sides = []
    for side in (-1.0, 0.0, 1.0):
        s = torch.where(student == teacher, side, (p - q).sign())
        sides.append(torch.stack((q * ((q * s).sum() - s), p * (s - (p * s).sum()))) / 3)
    off = [(torch.stack((ds, dt)).double() - side).abs().max() for side in sides]
    assert min(off) <= torch.finfo(dtype).eps
    assert losses.tie(student, teacher)  # so that laws draw other points
    assert not losses.tie(student + teacher.sin(), teacher)
    # next to certain all digits are known
    assert not losses.tie(*(torch.tensor([z, 0.0], device=device) for z in (80.0, 61.5)))


@pytest.mark.parametrize("block", [4, 8192])
@every
def test_shared_masked_columns_add_nothing(backend, device, monkeypatch, name, block):
    monkeypatch.setattr(_launch, "_MAX_BLOCK", block)
    student, teacher = pair(4, 11, device=device)
    for t in (student, teacher):
        t[0, ::2] = t[1, :9] = t[2, 1:] = -math.inf  # the second row begins with blocks of them
    f, oracle = rows_of(name)
    (loss,), grads = results(f, (student, teacher))
    for i, free in enumerate([slice(1, None, 2), slice(9, None), slice(1), slice(None)]):
        (want,), wants = results(oracle, (student[i, free], teacher[i, free]), (cotangent(i),))
        torch.testing.assert_close(loss[i], want, rtol=1e-12, atol=1e-12)
        for g, w in zip(grads, wants, strict=True):
            torch.testing.assert_close(g[i, free], w, rtol=1e-12, atol=1e-12)
    dead = student == -math.inf
    assert not any(g[dead].any() for g in grads)


def cotangent(i: int) -> Tensor:
    """Row i of what `results` draws for four rows."""
    g = torch.Generator().manual_seed(7)
    return torch.randn(4, generator=g, dtype=torch.float64)[i]


def test_what_the_student_excludes_costs_infinity_as_in_torch(backend, device):
    student = torch.tensor([[0.0, -math.inf, 1.0]], device=device)
    teacher = torch.tensor([[1.0, 2.0, 0.0]], device=device)
    (loss,), (ds, _) = results(liger_fn.kl_div, (student, teacher), (torch.tensor(1.0),))
    assert loss.item() == math.inf
    torch.testing.assert_close(ds, student.softmax(-1) - teacher.softmax(-1))
    (loss,), (_, dt) = results(PAIRS["jsd 1"][0], (teacher, student), (torch.tensor(1.0),))
    assert loss.item() == math.inf
    torch.testing.assert_close(dt, student.softmax(-1) - teacher.softmax(-1))
    reverse = liger_fn.kl_div(teacher, student)
    torch.testing.assert_close(reverse, kl_rows(teacher[:, ::2], student[:, ::2])[0] - torch.log(
        teacher.softmax(-1)[0, ::2].sum()))  # fmt: skip


@pytest.mark.parametrize("beta", [0.01, 0.3, 0.5, 0.99])
def test_supports_apart_cost_the_entropy_of_beta(backend, device, beta):
    a = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]], device=device)
    want = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    for student, teacher in ((a, a.flip(-1)), (1e4 * drawn(1, 4, device=device), None)):
        if teacher is None:  # underflowed, not masked: whole tails of probability 0
            student[0, 0], teacher = 1e5, student.flip(-1)
            teacher[0, -1] = 1e5
        (loss,), grads = results(
            lambda s, t: liger_fn.jsd(s, t, beta=beta), (student.float(), teacher.float())
        )
        assert loss.item() == pytest.approx(want, rel=3e-7)
        assert all(g.abs().max() <= 1e-7 for g in grads)


@pytest.mark.parametrize("name", ["jsd", "tvd"])
def test_second_derivatives_where_supports_differ_are_those_of_plain_torch(backend, device, name):
    student, teacher = (t[0] for t in pair(1, 5, device=device))
    student[1], teacher[2] = -math.inf, -math.inf
    f, _ = PAIRS[name]
    for order in (torch.func.jacfwd, torch.func.jacrev):
        hessian = order(torch.func.jacrev(lambda s: f(s, teacher)))(student)
        least = torch.where(student == -math.inf, -800.0, student)  # as good as nothing
        rest = torch.where(teacher == -math.inf, -800.0, teacher)
        want = torch.func.hessian(lambda s: PAIRS[name][1](s, rest))(least)  # noqa: B023
        torch.testing.assert_close(hessian, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("held", [[math.nan] + [0.0] * 8, [0.0] * 8 + [math.inf], [-math.inf] * 9])
@three
def test_what_has_no_distribution_is_nan_in_its_row_alone(backend, device, name, held, which):
    args = pair(3, 9, device=device, dtype=torch.float32)
    f, _ = rows_of(name)
    (clean,), _ = results(f, args)
    args[which][1] = torch.tensor(held, device=device)
    (loss,), grads = results(f, args)
    assert loss.isnan().tolist() == [False, True, False]
    assert same_bits(loss[::2], clean[::2])
    assert grads[which][1].isnan().all()
    assert all(g[::2].isfinite().all() for g in grads)


# -- shapes and strides ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [(1,), (7,), (3, 1), (5, 2), (2, 1, 3, 5), (3, 127), (3, 128), (3, 129), (2, 4097)], ids=str,
)  # fmt: skip
@three
def test_every_shape_agrees_with_the_oracle(backend, device, name, shape):
    hold(name, *pair(*shape, device=device))


@pytest.mark.parametrize(
    "of",
    [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[::2, 3:], lambda t: t[0].expand(6, 20),
     lambda t: t[:, :1].expand(12, 9), lambda t: t.view(3, 4, 20).permute(2, 0, 1)],
    ids=["transposed", "stepped", "offset", "expanded row", "expanded column", "permuted"],
)  # fmt: skip
@three
def test_logits_and_upstream_gradients_may_have_any_strides(backend, device, name, of):
    student, teacher = (of(t) for t in pair(12, 20, device=device))
    dy = drawn(*student.shape[:-1], 2, device=device)[..., 0]
    f, oracle = rows_of(name)
    assert_pure_and_close(f, oracle, student, teacher, dys=(dy,))


def test_rows_may_lie_beyond_2_to_the_31_elements(backend, device, tmp_path):
    far = far_apart(device, tmp_path, 6)
    hold("jsd", far, drawn(3, 6, device=device, dtype=torch.bfloat16))


# -- rows that do not count, weights, reductions ---------------------------------------------------


def reduced(
    oracle: Fn, student: Tensor, teacher: Tensor, u: Tensor, y: Tensor | None, reduction: str,
    n_valid: float | None = None,
) -> Tensor:  # fmt: skip
    live = torch.ones_like(u, dtype=torch.bool) if y is None else y != 2
    rows = u * torch.where(live, oracle(student, teacher), 0.0)
    n = 1.0 if reduction == "sum" else live.sum() if n_valid is None else n_valid
    return rows if reduction == "none" else rows.sum() / n


@pytest.mark.parametrize("marks", [None, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "how", [{"reduction": r} for r in REDUCTIONS] + [{"reduction": "mean", "n_valid": 3.5}], ids=str
)
@three
def test_reductions_marks_and_weights_agree_with_the_oracle(backend, device, name, how, marks):
    y = None if marks is None else torch.tensor([[0, 2, 1], [2, 5, 9]], device=device, dtype=marks)
    student, teacher = pair(2, 3, 7, device=device)
    u = drawn(2, 3, device=device)
    ours, oracle = PAIRS[name]
    assert_pure_and_close(
        lambda s, t, u: ours(s, t, y=y, token_weight=u, ignore_index=2, **how),
        lambda s, t, u: reduced(oracle, s, t, u, y, **how), student, teacher, u,
    )  # fmt: skip


@pytest.mark.parametrize("n_valid", [11, torch.tensor(11)], ids=str)
def test_n_valid_is_a_number_or_a_tensor(backend, device, n_valid):
    student, teacher = pair(4, 7, device=device)
    there = n_valid.to(device) if isinstance(n_valid, Tensor) else n_valid
    got = liger_fn.kl_div(student, teacher, n_valid=there)
    torch.testing.assert_close(got, kl_rows(student, teacher).sum() / 11, rtol=1e-13, atol=0)


@pytest.mark.parametrize("held", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@three
def test_ignored_rows_may_hold_anything(backend, device, name, reduction, held):
    y = torch.tensor([3, -100, 0, -100], device=device)
    student, teacher = pair(4, 7, device=device, dtype=torch.float32)
    f = lambda s, t: PAIRS[name][0](s, t, y=y, reduction=reduction)  # noqa: E731
    (want,), wants = results(f, (student, teacher))
    student[1], teacher[3, 2:4] = held, held
    (got,), grads = results(f, (student, teacher))
    assert same_bits(got, want)
    assert all(map(same_bits, grads, wants))
    assert not any(g[1::2].any() for g in grads)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (2, 0, 5)], ids=str)
@three
def test_nothing_to_count_is_loss_zero_and_gradient_zero(
    backend, device, name, shape, reduction, marked
):
    y = torch.full(shape[:-1], -100, device=device) if marked or shape[0] == 3 else None
    f = lambda s, t: PAIRS[name][0](s, t, y=y, reduction=reduction)  # noqa: E731
    (loss,), grads = results(f, pair(*shape, device=device, dtype=torch.bfloat16))
    assert loss.dtype == torch.float32
    assert loss.shape == (shape[:-1] if reduction == "none" else ())
    assert not loss.any()
    assert not any(g.any() for g in grads)


@three
def test_each_gradient_is_the_same_with_and_without_the_other(backend, device, name):
    args = pair(4, 9, device=device)
    f, _ = rows_of(name)
    _, both = results(f, args)
    for i in range(2):
        alone = lambda t, i=i: f(*(t if j == i else args[j] for j in range(2)))  # noqa: E731
        _, (g,) = results(alone, (args[i],))
        assert same_bits(g, both[i])
    assert not f(*args).requires_grad


# -- errors ----------------------------------------------------------------------------------------

Z, U = torch.zeros(2, 3, 5), torch.ones(2, 3)
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"student": torch.zeros(())}, ValueError, "student must have shape (..., v), got ()"),
    ({"teacher": Z[..., :4]}, ValueError, "axis v is 4 in teacher but 5 in student"),
    ({"teacher": Z[0]}, ValueError,
     "the shape must be the same: (3, 5) in teacher but (2, 3, 5) in student"),
    ({"student": Z[..., :0], "teacher": Z[..., :0]}, ValueError, "axis v must not be empty"),
    ({"teacher": Z.long()}, TypeError,
     "teacher must hold float32, bfloat16, float16 or float64, got torch.int64"),
    ({"teacher": Z.to("meta")}, ValueError, "teacher is on meta but student is on cpu"),
    ({"y": U}, TypeError, "y must hold integers, got torch.float32"),
    ({"y": U[0].long()}, ValueError,
     "y must have shape (2, 3), one target for each row of student, got (3,)"),
    ({"token_weight": U.T}, ValueError,
     "token_weight must have shape (2, 3), one weight for each row of student, got (3, 2)"),
    ({"temperature": 0.0}, ValueError, "temperature must be above 0, got 0.0"),
    ({"temperature": -1}, ValueError, "temperature must be above 0, got -1"),
    ({"reduction": "batchmean"}, ValueError,
     "reduction must be one of 'mean', 'sum', 'none', got 'batchmean'"),
    ({"n_valid": 3, "reduction": "sum"}, ValueError,
     "n_valid is for reduction 'mean', got reduction 'sum'"),
    ({"n_valid": -1}, ValueError, "n_valid must be at least 0, got -1"),
    ({"n_valid": U.to("meta").sum()}, ValueError, "n_valid is on meta but student is on cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "message"), ERRORS, ids=[e[2] for e in ERRORS])
@three
def test_errors_name_the_op_the_argument_and_what_came(monkeypatch, name, given, kind, message):
    monkeypatch.setattr("liger_fn.ops._divergence.launch", None)
    with pytest.raises(kind, match=f"^{re.escape(f'{name}: {message}')}$"):
        PAIRS[name][0](**{"student": Z, "teacher": Z, **given})


@pytest.mark.parametrize("beta", [-0.1, 1.5, math.nan])
def test_beta_must_be_a_share(beta):
    with pytest.raises(ValueError, match=rf"^jsd: beta must lie in \[0, 1\], got {beta}$"):
        liger_fn.jsd(Z, Z, beta=beta)
