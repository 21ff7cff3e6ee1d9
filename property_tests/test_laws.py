"""Laws over drawn shapes, strides, dtypes, scales: of every row of the table, then of each op."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

import liger_fn
from liger_fn import _launch
from property_tests.strategies import (
    BY_ID,
    DTYPES,
    HALVES,
    ONE,
    SCALES,
    Draw,
    alike,
    arguments,
    laid_out,
    layouts,
    normal,
    permutations,
    values,
)
from tests import table
from tests.conftest import DEVICE
from tests.table import ROWS, Row, bind
from tests.table.losses import ce_oracle
from tests.tolerance import cotangents, error, pure_results, results, same_bits, slack

LEADS, WIDTHS = st.sampled_from(table.LEADS), st.sampled_from(table.WIDTHS)
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
drawn = given(data=st.data())
F = Callable[..., Any]


@pytest.fixture(autouse=True)
def _rows_longer_than_a_block(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the laws of one op rows take 1 to 3 blocks of 16; else the row of the table decides."""
    if "row" not in request.fixturenames:
        monkeypatch.setattr(_launch, "_MAX_BLOCK", 16)


def point(row: Row, args: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(args[name] for name in row.differentiable)


def cast(args: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in args.items()}


def flat(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Hold float64 to a bound that no rounding reaches and no wrong number meets."""
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype == torch.float64
        size = max(1.0, w.abs().amax().item()) if w.numel() else 1.0
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12 * size, check_stride=False)


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert all(same_bits(g, w) for g, w in zip(got, want, strict=True)), f"{got}\nnot\n{want}"


# -- laws of every row -----------------------------------------------------------------------------


# at one point plain torch may be exact by luck; points nearby are conditioned alike and are not.
# Its error is the worst of theirs: 32 of them leave little to luck. As many lie within a few ulps:
# where logits of 1e4 are equal, those a sixteenth away are another matter
NEIGHBOURS = 64


def plain_of(row: Row) -> F:
    return row.plain or row.oracle


def exactly(row: Row, args: dict[str, Tensor], dys: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Results and gradients of the oracle in float64."""
    oracle, at = bind(row.oracle, row, cast(args, torch.float64)), point(row, args)
    ys, grads = results(oracle, tuple(t.double() for t in at), tuple(d.double() for d in dys))
    return *ys, *grads


def errors_of_plain(
    row: Row, args: dict[str, Tensor], dys: tuple[Tensor, ...], like: Sequence[Tensor]
) -> list[float]:
    """How far plain torch is from them, its results read in the dtypes of `like`."""
    ys, grads = results(bind(plain_of(row), row, args), point(row, args), dys)
    triples = zip((*ys, *grads), like, exactly(row, args, dys), strict=True)
    return [error(plain.to(t.dtype), exact) for plain, t, exact in triples]


def near(t: Tensor, g: torch.Generator, *, nearer: bool) -> Tensor:
    """Another tensor, within a sixteenth of each number, or a few ulps."""
    if not t.is_floating_point():
        return t
    step = 2 * torch.rand(t.shape, generator=g).to(DEVICE) - 1
    size = 8 * torch.finfo(t.dtype).eps if nearer else 1 / 16
    return (t.double() * (1 + size * step)).to(t.dtype)


def widened(t: Tensor) -> Tensor:
    """In float32, where half precision may hit by luck what is a float32 result of ours."""
    return t.float() if t.dtype in HALVES else t


@every_row
@drawn
def test_agrees_with_the_oracle(row: Row, backend: str, data: st.DataObject) -> None:
    args = data.draw(arguments(row, data.draw(st.sampled_from(DTYPES[1:])), SCALES))
    f, at = bind(row.fn, row, args), point(row, args)
    plain = flat(plain_of(row)(*args.values()))
    with liger_fn.using("reference"):
        ys = flat(f(*at))
    for y, p in zip(ys, plain, strict=True):
        assert y.dtype in (p.dtype, torch.promote_types(p.dtype, torch.float32))
    dys = data.draw(layouts(*(d.to(y) for d, y in zip(cotangents(plain), ys, strict=True))))
    _, (ys, grads) = pure_results(f, at, row.oracle, dys)
    assert [(g.dtype, g.shape) for g in grads] == [(t.dtype, t.shape) for t in at]
    got, dys = (*ys, *grads), tuple(d.to(p) for d, p in zip(dys, plain, strict=True))
    assert not any(t.isnan().any() for t in got)
    exact, given, like = exactly(row, args, dys), args, dys
    found = [error(*pair) for pair in zip(got, exact, strict=True)]
    allowed = [slack(*pair) for pair in zip(got, exact, strict=True)]
    bounds, g = allowed, torch.Generator().manual_seed(3)
    nearby = [functools.partial(near, g=g, nearer=i % 2 == 1) for i in range(NEIGHBOURS)]
    for step in (Tensor.detach, widened, *nearby):
        args, dys = {n: step(t) for n, t in given.items()}, tuple(map(step, like))
        worst = errors_of_plain(row, args, dys, got)
        bounds = [max(b, a + 2 * w) for b, a, w in zip(bounds, allowed, worst, strict=True)]
        if all(f <= b for f, b in zip(found, bounds, strict=True)):
            return
    pytest.fail(f"errors {found}, allowed {bounds}")


@every_row
@drawn
def test_agrees_with_the_oracle_in_float64(row: Row, backend: str, data: st.DataObject) -> None:
    args = data.draw(arguments(row))
    f, oracle, at = bind(row.fn, row, args), bind(row.oracle, row, args), point(row, args)
    dys = data.draw(layouts(*cotangents(flat(oracle(*at)))))
    _, (ys, grads) = pure_results(f, at, oracle, dys)
    close((*ys, *grads), sum(results(oracle, at, dys), ()))


def pullback(row: Row, args: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], F]:
    """The results at a point, and their pullback there."""
    leaves = [t.detach().requires_grad_() for t in point(row, args)]
    ys = flat(bind(row.fn, row, args)(*leaves))

    def pull(dys: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(ys, leaves, tuple(dys), retain_graph=True)

    return ys, pull


@every_row
@drawn
def test_the_pullback_is_linear(row: Row, backend: str, data: st.DataObject) -> None:
    ys, pull = pullback(row, data.draw(arguments(row)))
    one, two = (data.draw(alike(*ys)) for _ in range(2))
    s = data.draw(st.sampled_from([-1.0, 0.3, 0.0, 7.0]))
    together = pull([a + s * b for a, b in zip(one, two, strict=True)])
    close(together, [a + s * b for a, b in zip(pull(one), pull(two), strict=True)])


@every_row
@drawn
def test_the_pullback_of_twice_as_much_is_twice_that_bit_for_bit(
    row: Row, backend: str, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    ys, pull = pullback(row, data.draw(arguments(row, dtype)))
    # twice a view need not lie as it does, and sums over other strides round otherwise
    dys = [d.contiguous() for d in data.draw(alike(*ys))]
    same(pull([2 * d for d in dys]), [2 * g for g in pull(dys)])


@every_row
@drawn
def test_the_pullback_is_the_adjoint_of_the_pushforward(
    row: Row, backend: str, data: st.DataObject
) -> None:
    args = data.draw(arguments(row))
    ys, pull = pullback(row, args)
    dys = data.draw(alike(*ys))
    vs = data.draw(alike(*point(row, args)))
    at = tuple(t.clone() for t in point(row, args))  # torch makes no dual number of expanded ones
    _, jv = torch.func.jvp(bind(row.fn, row, args), at, vs)
    left, right = (
        sum((a * b).sum() for a, b in zip(*pair, strict=True))
        for pair in ((dys, flat(jv)), (pull(dys), vs))
    )
    size = sum((d * j).abs().sum() for d, j in zip(dys, flat(jv), strict=True)) + 1
    assert (left - right).abs() <= 1e-12 * size


# -- rms_norm --------------------------------------------------------------------------------------

CASTINGS = st.sampled_from(["llama", "gemma", "none"])


def nonzero(draw: Draw, lead: tuple[int, ...], n: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose rows have a direction, somehow in memory."""
    t = normal(draw, ONE, *lead, n)
    return laid_out(draw, torch.where(t == 0, 1.0, t).to(DEVICE, dtype))


@drawn
def test_rms_norm_knows_the_direction_of_a_row_but_not_its_length(
    backend: str, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    x = nonzero(data.draw, data.draw(LEADS), data.draw(WIDTHS), dtype)
    casting, k = data.draw(CASTINGS), data.draw(st.integers(-20, 20))

    def of(x: Tensor) -> tuple[Tensor, Tensor]:
        ys, dxs = results(lambda x: liger_fn.rms_norm(x, None, 0.0, casting=casting), (x,))
        return *ys, *dxs

    (y, dx), (y_k, dx_k), (y_neg, _) = of(x), of(x * 2.0**k), of(-x)
    same((y_k, dx_k * 2.0**k, y_neg), (y, dx, -y))


@drawn
def test_the_gradient_of_rms_norm_is_orthogonal_to_the_row(
    backend: str, data: st.DataObject
) -> None:
    x = nonzero(data.draw, data.draw(LEADS), data.draw(WIDTHS), torch.float64)
    w = normal(data.draw, ONE, x.shape[-1]).to(DEVICE)
    _, (dx, _) = results(lambda x, w: liger_fn.rms_norm(x, w, 0.0), (x, w))
    along, length = (x * dx).sum(-1), x.norm(dim=-1) * (1 + dx.norm(dim=-1))
    assert (along.abs() <= 1e-12 * length * w.abs().amax().clamp(min=1)).all()


@drawn
def test_rms_norm_follows_a_permutation_of_rows(backend: str, data: st.DataObject) -> None:
    args = data.draw(values(BY_ID["rms_norm"]))
    x, w = args["x"].reshape(-1, args["x"].shape[-1]).to(DEVICE), args["w"].to(DEVICE)
    dy, at = data.draw(alike(x))[0].contiguous(), data.draw(permutations(x.shape[0]))
    (y,), (dx, dw) = results(liger_fn.rms_norm, (x, w), (dy,))
    (y_at,), (dx_at, dw_at) = results(liger_fn.rms_norm, (x[at], w), (dy[at],))
    same((y_at, dx_at), (y[at], dx[at]))
    close((dw_at,), (dw,))


# -- add_rms_norm, layer_norm, group_norm, dyt -----------------------------------------------------


@drawn
def test_add_rms_norm_is_rms_norm_of_the_sum_bit_for_bit(backend: str, data: st.DataObject) -> None:
    args, casting = data.draw(values(BY_ID["add_rms_norm"], SCALES)), data.draw(CASTINGS)
    x, residual, w = (
        laid_out(data.draw, args[name].to(DEVICE, data.draw(st.sampled_from(DTYPES))))
        for name in ("x", "residual", "w")
    )
    s = x + residual
    got = liger_fn.add_rms_norm(x, residual, w, offset=1.0, casting=casting)
    same(got, (liger_fn.rms_norm(s, w, offset=1.0, casting=casting), s))


@drawn
def test_layer_norm_sees_neither_shift_nor_scale_of_a_row(
    backend: str, data: st.DataObject
) -> None:
    x = data.draw(values(BY_ID["layer_norm"]))["x"].to(DEVICE)
    x[..., 0] += 9.0  # no row is constant
    shift, scale = data.draw(alike(x[..., :1]))[0], 2.0 ** data.draw(st.integers(-20, 20))

    def of(x: Tensor) -> tuple[Tensor, Tensor]:
        ys, dxs = results(lambda x: liger_fn.layer_norm(x, None, None, 0.0), (x,))
        return *ys, *dxs

    (y, dx), (y_k, dx_k) = of(x), of(x * scale)
    same((y_k, dx_k * scale), (y, dx))
    moved = liger_fn.layer_norm(x + shift, None, None, 0.0)
    assert (moved - y).abs().le(1e-9).all()
    close((dx.sum(-1), (dx * x).sum(-1)), (torch.zeros_like(dx[..., 0]),) * 2)


@drawn
def test_group_norm_is_layer_norm_of_each_group(backend: str, data: st.DataObject) -> None:
    x = data.draw(values(BY_ID["group_norm"], SCALES))["x"].to(DEVICE)
    x, groups = laid_out(data.draw, x), data.draw(st.sampled_from([1, 2, x.shape[1]]))
    rows = x.reshape(x.shape[0], groups, x.shape[1:].numel() // groups)
    y = liger_fn.group_norm(x, None, None, groups)
    close((y,), (liger_fn.layer_norm(rows, None, None).reshape(x.shape),))


@drawn
def test_dyt_is_odd_in_x_and_in_alpha(backend: str, data: st.DataObject) -> None:
    args = data.draw(values(BY_ID["dyt"], SCALES))
    x, alpha, w = (
        laid_out(data.draw, args[name].to(DEVICE, data.draw(st.sampled_from(DTYPES))))
        for name in ("x", "alpha", "w")
    )
    y = liger_fn.dyt(x, alpha, w, None)
    for opposite in (liger_fn.dyt(-x, alpha, w, None), liger_fn.dyt(x, -alpha, w, None)):
        assert torch.equal(opposite, -y)  # 0 has two signs


# -- swiglu ----------------------------------------------------------------------------------------


@drawn
def test_swiglu_is_linear_in_up(backend: str, data: st.DataObject) -> None:
    gate, one = data.draw(
        layouts(*(t.to(DEVICE) for t in data.draw(values(BY_ID["swiglu"])).values()))
    )
    (two,), s = data.draw(alike(one)), data.draw(st.sampled_from([-1.0, 0.3, 0.0, 7.0]))
    y = liger_fn.swiglu(gate, one) + s * liger_fn.swiglu(gate, two)
    close((liger_fn.swiglu(gate, one + s * two),), (y,))


@drawn
def test_silu_of_a_gate_less_that_of_its_negative_is_the_gate(
    backend: str, data: st.DataObject
) -> None:
    gate, up = data.draw(
        layouts(*(t.to(DEVICE) for t in data.draw(values(BY_ID["swiglu"])).values()))
    )
    close((liger_fn.swiglu(gate, up) - liger_fn.swiglu(-gate, up),), (gate * up,))


@drawn
def test_swiglu_packed_is_swiglu_of_its_halves_bit_for_bit(
    backend: str, data: st.DataObject
) -> None:
    dtype, shape = data.draw(st.sampled_from(DTYPES)), (*data.draw(LEADS), 2 * data.draw(WIDTHS))
    packed = laid_out(data.draw, normal(data.draw, SCALES, *shape).to(DEVICE, dtype))
    (dy,) = data.draw(alike(packed[..., : shape[-1] // 2]))
    ys, (d,) = results(liger_fn.swiglu_packed, (packed,), (dy,))
    halves, ds = results(liger_fn.swiglu, packed.chunk(2, -1), (dy,))
    same((*ys, d), (*halves, torch.cat(ds, -1)))


# -- rope ------------------------------------------------------------------------------------------

ROPE_LAYOUTS = st.sampled_from(["half", "interleaved"])


def table_of(angle: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (..., r) of one angle for each pair (..., r / 2)."""
    a = torch.cat((angle, angle), -1)
    return a.cos(), a.sin()


def turned(q: Tensor, k: Tensor, angle: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    return liger_fn.rope(q, k, *table_of(angle), layout=layout)


@st.composite
def heads(draw: Draw) -> tuple[Tensor, Tensor, Tensor, str]:
    """q, k, an angle for each pair, a layout."""
    args = {name: t.to(DEVICE) for name, t in draw(values(BY_ID["rope"])).items()}
    q, k = (laid_out(draw, args[name]) for name in ("q", "k"))
    angle = args["cos"].acos()[..., : args["cos"].shape[-1] // 2]
    return q, k, angle, draw(ROPE_LAYOUTS)


def pairs_of(x: Tensor, r: int, layout: str) -> tuple[Tensor, Tensor]:
    x = x[..., :r]
    return x.chunk(2, -1) if layout == "half" else (x[..., ::2], x[..., 1::2])


@drawn
def test_rope_keeps_the_norm_of_each_pair(backend: str, data: st.DataObject) -> None:
    q, k, angle, layout = data.draw(heads())
    for x, y in zip((q, k), turned(q, k, angle, layout), strict=True):
        before, after = (torch.hypot(*pairs_of(t, 2 * angle.shape[-1], layout)) for t in (x, y))
        close((after,), (before,))


@drawn
def test_rope_by_one_angle_then_another_is_rope_by_their_sum(
    backend: str, data: st.DataObject
) -> None:
    q, k, a, layout = data.draw(heads())
    b = normal(data.draw, st.just(3.0), *a.shape).to(a)
    close(turned(*turned(q, k, a, layout), b, layout), turned(q, k, a + b, layout))


@drawn
def test_the_pullback_of_rope_turns_back(backend: str, data: st.DataObject) -> None:
    q, k, angle, layout = data.draw(heads())
    dys = data.draw(alike(q, k))
    _, back = results(lambda q, k: turned(q, k, angle, layout), (q, k), dys)
    close(back, turned(*dys, -angle, layout))


@drawn
def test_turned_products_depend_on_the_difference_of_positions_alone(
    backend: str, data: st.DataObject
) -> None:
    q, k, _, layout = data.draw(heads())
    r = 2 * data.draw(st.integers(1, q.shape[-1] // 2))
    frequency = 10.0 ** (-torch.arange(r // 2, dtype=torch.float64, device=DEVICE))
    position = torch.arange(q.shape[-2], dtype=torch.float64, device=DEVICE)
    shift = data.draw(st.integers(-100, 100))

    def scores(position: Tensor) -> Tensor:
        a, b = turned(q, k, position[:, None] * frequency, layout)
        return torch.einsum("...htk,...gsk->...hgts", a, b)

    close((scores(position + shift),), (scores(position),))


@drawn
def test_rope_passes_the_tail_through_bit_for_bit(backend: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    q, k, angle, layout = data.draw(heads())
    q, k, r = q.to(dtype), k.to(dtype), 2 * angle.shape[-1]
    angle_dtype = data.draw(st.sampled_from([dtype, torch.float32]))
    cos, sin = (t.to(angle_dtype) for t in table_of(angle))
    dys = data.draw(alike(q, k))
    ys, ds = results(lambda q, k: liger_fn.rope(q, k, cos, sin, layout=layout), (q, k), dys)
    same([t[..., r:] for t in (*ys, *ds)], [t[..., r:] for t in (q, k, *dys)])


# -- softmax and sparsemax -------------------------------------------------------------------------

to_distributions = pytest.mark.parametrize("f", [liger_fn.softmax, liger_fn.sparsemax])


@to_distributions
@drawn
def test_rows_become_distributions_whose_gradients_sum_to_zero(
    f: F, backend: str, data: st.DataObject
) -> None:
    x = laid_out(data.draw, data.draw(values(BY_ID["softmax"], SCALES))["x"].to(DEVICE))
    (y,), (dx,) = results(f, (x,))
    assert (y >= 0).all()
    close((y.sum(-1), dx.sum(-1)), (torch.ones_like(y.sum(-1)), torch.zeros_like(y.sum(-1))))


@to_distributions
@drawn
def test_distributions_do_not_see_a_shift_of_the_scores(
    f: F, backend: str, data: st.DataObject
) -> None:
    # multiples of 2**-8 below 2**4 keep all digits under a shift below 2**15
    x = (data.draw(values(BY_ID["softmax"]))["x"].clamp(-15, 15) * 2**8).round().float().to(
        DEVICE
    ) * 2**-8
    shift, dy = data.draw(st.integers(-(2**14), 2**14)), data.draw(alike(x))
    (ys, dxs), (ys_at, dxs_at) = (results(f, (t,), dy) for t in (x, x + shift))
    same((*ys_at, *dxs_at), (*ys, *dxs))


@drawn
def test_sparsemax_leaves_a_distribution_as_it_is(backend: str, data: st.DataObject) -> None:
    y = liger_fn.sparsemax(data.draw(values(BY_ID["softmax"], SCALES))["x"].to(DEVICE))
    close((liger_fn.sparsemax(y),), (y,))


# -- kl_div, jsd and tvd ---------------------------------------------------------------------------

DIVERGENCES: dict[str, F] = {
    "kl_div": liger_fn.kl_div, "jsd": liger_fn.jsd, "tvd": liger_fn.tvd,
}  # fmt: skip
divergences = pytest.mark.parametrize("name", DIVERGENCES)


@st.composite
def pairs(draw: Draw, scales: SearchStrategy[float] = ONE) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Student, teacher, and options of a loss per row."""
    args = draw(values(BY_ID["jsd"], scales))
    how: dict[str, Any] = {"reduction": "none", "temperature": draw(st.sampled_from([1.0, 0.7]))}
    if draw(st.booleans()):
        how["y"] = args["y"].to(DEVICE)
    student, teacher = (laid_out(draw, args[n].to(DEVICE)) for n in ("student", "teacher"))
    return student, teacher, how


@divergences
@drawn
def test_a_divergence_is_at_least_zero_and_zero_of_equals(
    name: str, backend: str, data: st.DataObject
) -> None:
    student, teacher, how = data.draw(pairs(SCALES))
    f = DIVERGENCES[name]
    assert (f(student, teacher, **how) >= -1e-15).all()
    (loss,), grads = results(lambda s, t: f(s, t, **how), (student, student.clone()))
    assert not any(t.any() for t in (loss, *grads))


@divergences
@drawn
def test_gradients_of_a_divergence_sum_to_zero_over_columns(
    name: str, backend: str, data: st.DataObject
) -> None:
    student, teacher, how = data.draw(pairs())
    _, grads = results(lambda s, t: DIVERGENCES[name](s, t, **how), (student, teacher))
    sums = [g.sum(-1) for g in grads]
    close(sums, [torch.zeros_like(t) for t in sums])


@drawn
def test_a_swap_of_student_and_teacher_swaps_the_weights_of_jsd(
    backend: str, data: st.DataObject
) -> None:
    student, teacher, how = data.draw(pairs())
    beta = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    one = results(lambda s, t: liger_fn.jsd(s, t, beta=beta, **how), (student, teacher))
    two = results(lambda t, s: liger_fn.jsd(t, s, beta=1 - beta, **how), (teacher, student))
    close((*one[0], *one[1]), (*two[0], *two[1][::-1]))
    bounds = -math.log(0.5) if beta == 0.5 else math.inf
    assert (one[0][0] <= bounds + 1e-15).all()


# -- cross_entropy ---------------------------------------------------------------------------------


@st.composite
def options(draw: Draw, reduction: str | None = None) -> dict[str, Any]:
    """Options that change what a row costs and how rows are reduced."""
    made = {
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 0.2])),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.7])),
        "reduction": reduction or draw(st.sampled_from(["mean", "sum", "none"])),
    }
    if made["reduction"] == "mean" and draw(st.booleans()):
        made["n_valid"] = 3.5
    return made


def weights(draw: Draw, args: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some of the weights, under the names that cross entropies give them."""
    named = {"class_weight": args["c"], "token_weight": args["u"]}
    return {name: t for name, t in named.items() if draw(st.booleans())}


def loss_and_gradients(
    f: F, at: Sequence[Tensor], dy: Tensor | None = None, **given: Any
) -> tuple[Tensor, ...]:
    """The loss and its gradients; upstream 0.7 unless given."""
    leaves = [t.detach().requires_grad_() for t in at]
    loss = f(*leaves, **given)
    dy = torch.full_like(loss, 0.7) if dy is None else dy
    return loss.detach(), *torch.autograd.grad(loss, leaves, dy)


def on_device(args: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to(DEVICE) for name, t in args.items()}


@drawn
def test_cross_entropy_under_any_options_is_that_of_the_oracle(
    backend: str, data: st.DataObject
) -> None:
    args, how = on_device(data.draw(values(BY_ID["cross_entropy-all"]))), data.draw(options())
    w, y = weights(data.draw, args), args["y"]
    if data.draw(st.booleans()):  # another column may stand for ignored ones
        how["ignore_index"] = last = args["logits"].shape[-1] - 1
        y = torch.where(y == -100, last, y)
        y.view(-1)[0] = 0
    if how.get("ignore_index") == 0:  # one column: nothing would count
        del how["ignore_index"]
    got = loss_and_gradients(lambda z: liger_fn.cross_entropy(z, y, **w, **how), (args["logits"],))
    want = loss_and_gradients(
        lambda z: ce_oracle(z, y, w.get("class_weight"), w.get("token_weight"), **how)[0],
        (args["logits"],),
    )
    close(got, want)


@drawn
def test_cross_entropy_does_not_see_a_shift_of_the_logits(
    backend: str, data: st.DataObject
) -> None:
    args, how = on_device(data.draw(values(BY_ID["cross_entropy-all"]))), data.draw(options())
    how |= {"z_loss": 0.0, "softcap": None, "logit_scale": 1.0}
    w = weights(data.draw, {name: t.float() for name, t in args.items()})
    # multiples of 2**-8 below 2**4 keep all digits under a shift below 2**15
    logits = (args["logits"].clamp(-15, 15) * 2**8).round().float() * 2**-8
    shift = data.draw(st.integers(-(2**14), 2**14)) * (1 + args["y"][..., None] % 2).to(logits)
    got, want = (
        loss_and_gradients(lambda z: liger_fn.cross_entropy(z, args["y"], **w, **how), (z,))
        for z in (logits + shift, logits)
    )
    assert all(map(torch.equal, got, want))  # where all is 0 its sign is free


@drawn
def test_cross_entropy_follows_a_permutation_of_columns(backend: str, data: st.DataObject) -> None:
    args, how = on_device(data.draw(values(BY_ID["cross_entropy-all"]))), data.draw(options())
    logits, y, w = args["logits"], args["y"], weights(data.draw, args)
    v = logits.shape[-1]
    at = data.draw(permutations(v))
    y_at = torch.where(y == -100, y, at.argsort()[y.clamp(min=0)])
    w_at = {name: t[at] if name == "class_weight" else t for name, t in w.items()}
    loss, d = loss_and_gradients(lambda z: liger_fn.cross_entropy(z, y, **w, **how), (logits,))
    got = loss_and_gradients(
        lambda z: liger_fn.cross_entropy(z, y_at, **w_at, **how), (logits[..., at],)
    )
    close(got, (loss, d[..., at]))


@drawn
def test_cross_entropy_follows_a_permutation_of_rows(backend: str, data: st.DataObject) -> None:
    args, how = on_device(data.draw(values(BY_ID["cross_entropy-all"]))), data.draw(options())
    rows = {
        "logits": args["logits"].reshape(-1, args["logits"].shape[-1]),
        "y": args["y"].reshape(-1),
    }
    w = weights(data.draw, {**args, "u": args["u"].reshape(-1)})
    rows |= {name: t for name, t in w.items() if name == "token_weight"}
    at = data.draw(permutations(rows["y"].numel()))

    def of(logits: Tensor, **rest: Tensor) -> tuple[Tensor, ...]:
        return loss_and_gradients(
            lambda z: liger_fn.cross_entropy(z, **{**w, **rest}, **how), (logits,)
        )

    loss, d = of(**rows)
    loss_at, d_at = of(**{name: t[at] for name, t in rows.items()})
    if how["reduction"] == "none":
        same((loss_at, d_at), (loss[at], d[at]))
    else:
        close((loss_at, d_at), (loss, d[at]))


@drawn
def test_gradients_of_cross_entropy_sum_to_zero_over_columns(
    backend: str, data: st.DataObject
) -> None:
    args, how = on_device(data.draw(values(BY_ID["cross_entropy-all"]))), data.draw(options())
    how |= {"z_loss": 0.0, "softcap": None}
    w = weights(data.draw, args)
    _, d = loss_and_gradients(
        lambda z: liger_fn.cross_entropy(z, args["y"], **w, **how), (args["logits"],)
    )
    total = d.sum(-1)
    close((total,), (torch.zeros_like(total),))


# -- cross_entropy and fused_linear_ce: both are one loss of rows ----------------------------------

LOSSES = ["cross_entropy", "fused_linear_ce"]
both_losses = pytest.mark.parametrize("name", LOSSES)


def of_rows(name: str, args: dict[str, Tensor]) -> tuple[F, tuple[Tensor, ...]]:
    """The statistics as a function of tensors, and those tensors, the one of rows last."""
    if name == "cross_entropy":
        return liger_fn.cross_entropy_with_stats, (args["logits"],)
    return (
        lambda w, b, x, y, **given: liger_fn.fused_linear_ce_with_stats(
            w, x, y, b=b, chunk=2, **given
        ),
        (args["w"], args["b"], args["x"]),
    )


@st.composite
def losses(draw: Draw, name: str) -> dict[str, Tensor]:
    return on_device(draw(values(BY_ID[f"{name}-all"])))


@both_losses
@drawn
def test_ignored_rows_may_hold_anything(name: str, backend: str, data: st.DataObject) -> None:
    args, how = data.draw(losses(name)), data.draw(options())
    f, (*head, rows) = of_rows(name, args)
    y, w = args["y"], weights(data.draw, args)
    held = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
    ignored = (y == -100)[..., None]
    got, want = (
        loss_and_gradients(lambda *t: f(*t, y, **w, **how).loss, (*head, t))
        for t in (torch.where(ignored, held, rows), rows)
    )
    same(got, want)
    assert not torch.where(ignored, got[-1], 0.0).any()


@both_losses
@drawn
def test_the_mean_times_the_count_is_the_sum(name: str, backend: str, data: st.DataObject) -> None:
    args, how = data.draw(losses(name)), data.draw(options("mean"))
    f, at = of_rows(name, args)
    w, count = weights(data.draw, args), how.pop("n_valid", None)
    given = {"n_valid": count} if count is not None else {}
    stats = f(*at, args["y"], **w, **how, **given)
    assert stats.n_valid == (args["y"] != -100).sum()
    if count is None:
        c = torch.ones_like(args["c"]) if "class_weight" not in w else args["c"]
        count = c[args["y"][args["y"] != -100]].sum()
    total = f(*at, args["y"], **w, **{**how, "reduction": "sum"})
    per_row = f(*at, args["y"], **w, **{**how, "reduction": "none"})
    close([t * count for t in stats[:3]], total[:3])
    close([t.sum() for t in per_row[:3]], total[:3])
    close((stats.nll + stats.z_loss,), (stats.loss,))
    assert stats.n_valid == total.n_valid == per_row.n_valid
    assert stats.n_correct == total.n_correct == per_row.n_correct <= stats.n_valid


@both_losses
@drawn
def test_nothing_but_ignored_rows_costs_nothing(
    name: str, backend: str, data: st.DataObject
) -> None:
    args, how = data.draw(losses(name)), data.draw(options())
    f, at = of_rows(name, args)
    y, w = torch.full_like(args["y"], -100), weights(data.draw, args)
    got = loss_and_gradients(lambda *t: f(*t, y, **w, **how).loss, at)
    assert not any(t.any() for t in got)


# -- fused_linear_ce -------------------------------------------------------------------------------


@drawn
def test_fused_linear_ce_is_cross_entropy_of_the_logits(backend: str, data: st.DataObject) -> None:
    args, how = on_device(data.draw(values(BY_ID["fused_linear_ce-all"]))), data.draw(options())
    chunk = data.draw(st.one_of(st.none(), st.integers(1, 8)))
    y, c = args["y"], args["c"] if data.draw(st.booleans()) else None
    at = [laid_out(data.draw, args[name]) for name in ("w", "x", "b", "u")]

    def fused(w: Tensor, x: Tensor, b: Tensor, u: Tensor) -> Tensor:
        return liger_fn.fused_linear_ce(
            w, x, y, b=b, chunk=chunk, class_weight=c, token_weight=u, **how
        )

    def apart(w: Tensor, x: Tensor, b: Tensor, u: Tensor) -> Tensor:
        return liger_fn.cross_entropy(
            torch.nn.functional.linear(x, w, b), y, class_weight=c, token_weight=u, **how
        )

    close(loss_and_gradients(fused, at), loss_and_gradients(apart, at))


@drawn
def test_the_chunk_of_fused_linear_ce_is_irrelevant(backend: str, data: st.DataObject) -> None:
    args, how = on_device(data.draw(values(BY_ID["fused_linear_ce-all"]))), data.draw(options())
    w = weights(data.draw, args)
    chunks = [data.draw(st.one_of(st.none(), st.integers(1, 8))) for _ in range(2)]

    def of(chunk: int | None) -> F:
        return lambda x, b, head: liger_fn.fused_linear_ce(
            head, x, args["y"], b=b, chunk=chunk, **w, **how
        )

    at = [args[name] for name in ("x", "b", "w")]
    close(*(loss_and_gradients(of(chunk), at) for chunk in chunks))
