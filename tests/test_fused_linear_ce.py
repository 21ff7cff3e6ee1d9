"""fused_linear_ce and its statistics against torch's linear and cross entropy in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from liger_fn.ops import _products
from tests.test_cross_entropy import (
    DTYPES,
    ERRORS,
    EVERY,
    HALVES,
    REDUCTIONS,
    SINGLE,
    assert_raises,
    cast,
    hold,
    named,
    on_gpu,
    oracle,
    pick,
    run,
    stats_oracle,
    waiting_is_an_error,
)
from tests.tolerance import assert_exact_as, ulp

V, D = 7, 4
LEAVES = ["w", "x", "b"]
ALL_LEAVES = [*LEAVES, "token_weight"]


@pytest.fixture
def loop() -> Iterator[None]:
    """The loop over chunks is one for both backends: a CPU shows it with the quick one."""
    with nullcontext() if torch.cuda.is_available() else liger_fn.using("reference"):
        yield


def linear_oracle(
    w: Tensor, x: Tensor, y: Tensor, b: Tensor | None = None, **options: Any
) -> Tensor:
    return oracle(F.linear(x, w, b), y, **options)


def linear_stats_oracle(
    w: Tensor, x: Tensor, y: Tensor, b: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return stats_oracle(F.linear(x, w, b), y, **options)


def make(
    *lead: int, device: torch.device, v: int = V, d: int = D, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Activations with these leading axes, a head with bias; each fourth target is ignored."""
    g = torch.Generator().manual_seed(sum(lead) + v)
    shapes = {"w": (v, d), "x": (*lead, d), "b": (v,)}
    made = {
        k: torch.randn(s, generator=g, dtype=torch.float64).to(device, dtype)
        for k, s in shapes.items()
    }
    y = torch.randint(v, lead, generator=g)
    y.view(-1)[1::4] = -100
    return {**made, "y": y.to(device)}


def make_full(*lead: int, device: torch.device, **more: Any) -> dict[str, Tensor]:
    """`make` with weights of classes and tokens; ignored is 2."""
    tensors = make(*lead, device=device, **more)
    g = torch.Generator().manual_seed(1)
    tensors["y"][tensors["y"] == -100] = 2
    c = torch.rand(len(tensors["w"]), generator=g, dtype=torch.float64) + 0.5
    u = torch.randn(lead, generator=g, dtype=torch.float64)
    return {**tensors, "class_weight": c.to(tensors["w"]), "token_weight": u.to(tensors["w"])}


def plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: tensors[k] for k in ("w", "x", "y")}


class Products:
    """Shapes (rows, inner, columns) of the matrix products of the loop, by what they make."""

    def __init__(self, patch: pytest.MonkeyPatch, v: int) -> None:
        mm, accumulate = _products.mm, _products.accumulate
        inside: list[int] = []
        self.operands: tuple[Tensor, ...] = ()
        self.z: list[tuple[int, int, int]] = []
        self.dx: list[tuple[int, int, int]] = []
        self.dw: list[tuple[int, int, int]] = []
        self.sums: set[torch.dtype] = set()

        def spy_mm(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
            if not inside:
                made = self.z if b.shape[1] == v else self.dx
                made.append((*a.shape, b.shape[1]))
                self.operands = a, b
            return mm(a, b, *rest)

        def spy_accumulate(sums: Tensor | None, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
            self.dw.append((*a.shape, b.shape[1]))
            inside.append(1)
            out = accumulate(sums, a, b, *rest)
            inside.pop()
            self.sums.add(out.dtype)
            return out

        patch.setattr(_products, "mm", spy_mm)
        patch.setattr(_products, "accumulate", spy_accumulate)

    def counts(self) -> tuple[int, int, int]:
        return len(self.z), len(self.dx), len(self.dw)


# -- by hand ---------------------------------------------------------------------------------------


def test_a_head_of_zeros_costs_the_log_of_the_number_of_columns(backend, device):
    w = torch.zeros(4, 2, device=device, requires_grad=True)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device, requires_grad=True)
    y = torch.tensor([0, -100], device=device)
    loss = liger_fn.fused_linear_ce(w, x, y)
    loss.backward()
    assert loss.item() == pytest.approx(1.3862944, rel=2e-7)
    assert w.grad.tolist() == [[-0.75, -1.5], *[[0.25, 0.5]] * 3]
    assert not x.grad.any()


def test_two_columns_by_hand(backend, device):
    # logits (log 3, 0): p = 3/4, 1/4; target the second: log 4, dz = (3/4, -3/4)
    w = torch.tensor([[math.log(3), 1.0], [0.0, 1.0]], device=device, requires_grad=True)
    x = torch.tensor([[1.0, 0.0]], device=device, requires_grad=True)
    y = torch.tensor([1], device=device)
    loss = liger_fn.fused_linear_ce(w, x, y)
    loss.backward()
    assert loss.item() == pytest.approx(1.3862944, rel=2e-7)
    assert w.grad.tolist() == [pytest.approx([0.75, 0.0]), pytest.approx([-0.75, 0.0])]
    assert x.grad.tolist() == [pytest.approx([0.75 * math.log(3), 0.0], abs=1e-7)]


def test_bias_and_z_loss_by_hand(backend, device):
    # w = 0, b = log (1, 2, 5): nll log 4, z_loss half of (log 8)^2; db = p - onehot + log 8 * p
    w, x = torch.zeros(3, 2, device=device), torch.ones(1, 2, device=device)
    b = torch.tensor([1.0, 2.0, 5.0], device=device).log().requires_grad_()
    y = torch.tensor([1], device=device)
    stats = liger_fn.fused_linear_ce_with_stats(w, x, y, b=b, z_loss=0.5)
    stats.loss.backward()
    assert stats.nll.item() == pytest.approx(1.3862944, rel=3e-7)
    assert stats.z_loss.item() == pytest.approx(2.1620385, rel=3e-7)
    assert stats.loss.item() == pytest.approx(3.5483329, rel=3e-7)
    p = [0.125, 0.25, 0.625]
    want = [q * (1 + math.log(8)) - (k == 1) for k, q in enumerate(p)]
    assert b.grad.tolist() == pytest.approx(want, rel=1e-6)


# -- shapes and layouts ----------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3)], ids=str)
def test_any_leading_axes_agree_with_torch(backend, device, lead, reduction):
    tensors = make(*lead, device=device)
    tensors["y"][...] = 3 if not lead else tensors["y"]
    hold(
        liger_fn.fused_linear_ce, linear_oracle, tensors, LEAVES,
        reduction=reduction, private={"chunk": 4},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("v", "d"), [(1, 3), (2, 1), (127, 5), (128, 8), (129, 9), (257, 3), (4097, 2)], ids=str
)
def test_any_width_and_vocabulary_agree_with_torch(backend, device, v, d):
    tensors = make(3, device=device, v=v, d=d)
    hold(liger_fn.fused_linear_ce, linear_oracle, tensors, LEAVES, private={"chunk": 2})


def test_any_layout_is_read_where_it_lies(backend, device):
    def strided(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def loss(w, x, b, y, token_weight, class_weight):
            return f(
                w.t(), x.permute(1, 2, 0), y.t(), b=b.expand(5), token_weight=token_weight[::2],
                class_weight=class_weight[:, 1], label_smoothing=0.1, z_loss=0.1, reduction="sum",
            )  # fmt: skip

        return loss

    tensors = {
        "w": torch.randn(3, 5, device=device, dtype=torch.float64),
        "x": torch.randn(3, 2, 4, device=device, dtype=torch.float64),
        "b": torch.randn(1, device=device, dtype=torch.float64),
        "token_weight": torch.randn(4, 4, device=device, dtype=torch.float64),
        "class_weight": torch.rand(5, 2, device=device, dtype=torch.float64) + 0.5,
        "y": torch.randint(5, (4, 2), device=device),
    }
    hold(strided(liger_fn.fused_linear_ce), strided(linear_oracle), tensors, ALL_LEAVES)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "column": lambda t: t[:, 1],
    "stride 2": lambda t: t[0, ::2],
    "expanded": lambda t: t[2, :1].expand(4),
}


@pytest.mark.parametrize("view", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_targets_and_token_weights_of_any_stride_are_read_where_they_lie(
    backend, device, view, reduction
):
    tensors = make_full(4, 8, device=device)
    strided = {**tensors, **{k: view(tensors[k]) for k in ("y", "token_weight")}}
    strided["x"] = tensors["x"][0, :4]
    dense = {k: t.contiguous() for k, t in strided.items()}
    f = liger_fn.fused_linear_ce
    d = torch.arange(4.0) if reduction == "none" else None
    got, want = (run(f, t, LEAVES, d, **EVERY, reduction=reduction) for t in (strided, dense))
    assert all(map(torch.equal, got, want))


def test_expanded_activations_collect_the_gradient_of_every_use(backend, device):
    def expanded(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda w, x, y: f(w, x.expand(5, D), y.expand(5), reduction="sum")

    tensors = plain(make(1, device=device))
    hold(expanded(liger_fn.fused_linear_ce), expanded(linear_oracle), tensors, ["w", "x"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_targets_are_any_integers(backend, device, dtype):
    tensors = make(5, device=device)
    tensors["y"][tensors["y"] == -100] = 2
    want = run(liger_fn.fused_linear_ce, tensors, LEAVES, ignore_index=2)
    tensors["y"] = tensors["y"].to(dtype)
    got = run(liger_fn.fused_linear_ce, tensors, LEAVES, ignore_index=2)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("dtype", "v"), [(torch.uint8, 257), (torch.int8, 257)], ids=str)
def test_narrow_targets_need_not_hold_the_number_of_columns(backend, device, dtype, v):
    tensors = make(3, device=device, v=v)
    tensors["y"] = torch.tensor([3, 100, 0], device=device)
    want = run(liger_fn.fused_linear_ce, tensors, LEAVES)
    tensors["y"] = tensors["y"].to(dtype)
    got = run(liger_fn.fused_linear_ce, tensors, LEAVES)
    assert all(map(torch.equal, got, want))


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", [*SINGLE, "b"])
def test_an_option_alone_agrees_with_torch_and_is_never_ignored(backend, device, name, reduction):
    if name == "n_valid":
        reduction = "mean"
    full = make_full(5, device=device)
    if name != "b":
        del full["b"]
    tensors, leaves = pick(name, full)
    options = {**SINGLE.get(name, {}), "reduction": reduction}
    f = liger_fn.fused_linear_ce
    got = hold(f, linear_oracle, tensors, leaves, **options, private={"chunk": 4})
    assert not torch.allclose(got[0], f(**plain(tensors), reduction=reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_options_together_agree_with_torch(backend, device, reduction):
    tensors = make_full(2, 4, device=device)
    got = hold(
        liger_fn.fused_linear_ce, linear_oracle, tensors, ALL_LEAVES,
        **EVERY, reduction=reduction, private={"chunk": 3},
    )  # fmt: skip
    assert [t.dtype for t in got] == [torch.float64] * 5


@pytest.mark.parametrize("n_valid", [11, torch.tensor(2.5)], ids=str)
def test_n_valid_replaces_the_count_as_number_and_as_tensor(backend, device, n_valid):
    tensors = make_full(5, device=device)
    there = n_valid.to(device) if isinstance(n_valid, Tensor) else n_valid
    got = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, **EVERY, n_valid=there)
    total = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, **EVERY, reduction="sum")
    want = [t / float(n_valid) for t in total]
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_token_weights_of_any_dtype_get_their_gradient_in_it(backend, device, dtype, reduction):
    tensors = make_full(5, device=device, dtype=torch.float32)
    tensors["token_weight"] = tensors["token_weight"].to(dtype)
    options = {**EVERY, "reduction": reduction}
    got = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, **options)
    assert [t.dtype for t in got] == [torch.float32] * 4 + [dtype]
    tensors["token_weight"] = tensors["token_weight"].float()
    want = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, **options)
    got[-1] = got[-1].float()
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float64_token_weights_do_not_change_the_dtype_of_the_loss(backend, device, reduction):
    u = torch.ones(3, device=device, dtype=torch.float64)
    tensors = make(3, device=device, dtype=torch.float32)
    loss = liger_fn.fused_linear_ce(**tensors, token_weight=u, reduction=reduction)
    assert loss.dtype == torch.float32


def test_class_weights_are_not_differentiated(backend, device):
    tensors = make_full(3, device=device)
    tensors["class_weight"].requires_grad_()
    assert not liger_fn.fused_linear_ce(**tensors, **EVERY).requires_grad


# -- rows that do not count, and rows that cannot --------------------------------------------------


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("lead", [(5,), (0,), (2, 0), ()], ids=str)
def test_nothing_to_count_is_loss_zero_and_gradient_zero(backend, device, lead, reduction, weights):
    tensors = make_full(*lead, device=device) if weights else plain(make(*lead, device=device))
    tensors["y"] = torch.full(lead, -100, device=device)
    leaves = ALL_LEAVES if weights else ["w", "x"]
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0}):
        got = run(
            liger_fn.fused_linear_ce, tensors, leaves, reduction=reduction, chunk=4, **options
        )
        assert torch.equal(got[0], torch.zeros(lead if reduction == "none" else (), device=device))
        for g, name in zip(got[1:], leaves, strict=True):
            assert torch.equal(g, torch.zeros_like(tensors[name])), name


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_may_overflow(backend, device, reduction):
    # finite activations, logits of +-inf and NaN
    tensors = make_full(6, device=device, dtype=torch.float32)
    tensors["y"][1::2] = 2
    options = {**EVERY, "reduction": reduction}
    want = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, **options)
    tensors["x"][1::2] = 3e38 * tensors["x"][1::2].sign()
    assert not F.linear(tensors["x"], tensors["w"])[1::2].isfinite().all()
    got = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, **options)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("held", [math.nan, math.inf])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_may_hold_anything(backend, device, reduction, held):
    tensors = make_full(6, device=device)
    tensors["y"][1::2] = 2
    options = {**EVERY, "reduction": reduction}
    want = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, **options)
    tensors["x"][1] = held
    tensors["x"][3, 1] = held
    got = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, **options)
    for name, a, b in zip(("loss", *ALL_LEAVES), got, want, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("label", [-1, V, 2**40])
def test_a_target_out_of_range_makes_its_row_nan_and_no_other(backend, device, label):
    tensors = make(4, device=device)
    options = {"reduction": "none", "chunk": 3, "label_smoothing": 0.1}
    tensors["y"][2] = 0
    want = run(liger_fn.fused_linear_ce, tensors, ["x"], torch.ones(4), **options)
    tensors["y"][2] = label
    got = run(liger_fn.fused_linear_ce, tensors, ["x"], torch.ones(4), **options)
    for a, b in zip(got, want, strict=True):
        assert a[2].isnan().all()
        assert torch.equal(a[[0, 1, 3]], b[[0, 1, 3]])
    for reduction in ("mean", "sum"):
        assert liger_fn.fused_linear_ce(**tensors, reduction=reduction).isnan()


def test_columns_masked_by_the_bias_get_no_probability_and_no_gradient(backend, device):
    tensors = make(4, device=device)
    tensors["b"][:5] = -math.inf
    tensors["y"] = torch.tensor([5, 6, -100, 6], device=device)
    got = hold(liger_fn.fused_linear_ce, linear_oracle, tensors, LEAVES, private={"chunk": 2})
    assert got[0].isfinite()
    assert not got[1][:5].any()
    assert not got[3][:5].any()


# -- range and precision ---------------------------------------------------------------------------


@pytest.mark.parametrize("v", [33, 3001])
def test_a_large_common_offset_costs_no_digits(backend, device, v):
    # the logits round at 3e4, as in plain torch; what comes after them must not
    tensors = make(8, device=device, v=v, d=2, dtype=torch.float32)
    tensors["x"], tensors["b"] = tensors["x"].round(), tensors["b"].round() + 3e4
    tensors["w"] = (4 * tensors["w"]).round()
    hold(liger_fn.fused_linear_ce, linear_oracle, tensors, LEAVES, reduction="none")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float16_activations_of_200_and_width_4096_stay_finite(backend, device, reduction):
    d, f16 = 4096, torch.float16
    sign = torch.ones(d)
    sign[::7] = -1
    x = 200 * sign.expand(3, d)
    w = 0.1 * torch.stack((sign, -sign, torch.ones(d), 0 * sign, sign.roll(1)))
    y = torch.tensor([0, 2, 4])
    assert F.linear(x, w).abs().max() > torch.finfo(f16).max
    tensors = {"w": w.to(device, f16), "x": x.to(device, f16), "y": y.to(device)}
    upstream = torch.ones(3) if reduction == "none" else None
    options = {"reduction": reduction}
    got = run(liger_fn.fused_linear_ce, tensors, ["w", "x"], upstream, **options)
    wide = cast(tensors, torch.float64, "cpu")
    exact = run(linear_oracle, wide, ["w", "x"], upstream, **options)
    # a float32 sum of d products is off by at most d / 2 ulps of the sum of their magnitudes
    bound = d * torch.finfo(torch.float32).eps * 200 * 0.1 * d
    assert (got[0].cpu() - exact[0]).abs().max() <= (3 if reduction == "sum" else 1) * bound
    for g, e in zip(got[1:], exact[1:], strict=True):
        assert ((g.cpu().double() - e).abs() <= ulp(e, f16)).all()


def assert_float16_gradients(tensors: dict[str, Tensor], upstream: float, **options: Any) -> None:
    """Hold float16 gradients to one rounding of each operand and one of the result, by entry."""
    half = torch.finfo(torch.float16).eps
    d = torch.tensor(upstream)
    got = run(liger_fn.fused_linear_ce, tensors, LEAVES, d, **options)
    wide = cast(tensors, torch.float64, "cpu")
    exact = run(linear_oracle, wide, LEAVES, d, **options)
    z = {"logits": F.linear(*(wide.pop(name) for name in ("x", "w", "b"))), **wide}
    dz = run(oracle, z, ["logits"], d, **options)[1].abs()
    w, x = (tensors[name].cpu().double().abs() for name in ("w", "x"))
    for name, g, e, size in zip(
        LEAVES, got[1:], exact[1:], (dz.T @ x, dz @ w, dz.sum(0)), strict=True
    ):
        off = (g.cpu().double() - e).abs()
        assert (off <= ulp(e, torch.float16) + half * size).all(), name


@pytest.mark.parametrize("upstream", [1.0, 1024.0])
@pytest.mark.parametrize("n_valid", [20_000, 1_000_000])
def test_float16_gradients_of_a_mean_over_many_tokens_do_not_underflow(
    loop, device, n_valid, upstream
):
    # 1 / n_valid is subnormal in float16: it must meet no gradient as a float16 number
    tensors = make(32, device=device, v=8, dtype=torch.float16)
    tensors["w"] *= 30
    tensors["x"] *= 30
    assert_float16_gradients(tensors, upstream, n_valid=n_valid)


def test_float16_gradients_of_thousands_of_tokens_do_not_underflow(loop, device):
    assert_float16_gradients(make(4096, device=device, v=8, dtype=torch.float16), 1.0)


def test_float16_gradients_overflow_no_sooner_than_what_they_are_scaled_to(loop, device):
    # before the upstream gradient scales them, those of x are up to 1e6
    tensors = make(4, device=device, v=8, dtype=torch.float16)
    tensors["token_weight"] = torch.full((4,), 3e4, dtype=torch.float16, device=device)
    tensors["w"] *= 30
    assert_float16_gradients(tensors, 1e-3, reduction="sum")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("reduction", "options"), [("none", {}), ("none", EVERY), ("mean", EVERY)],
    ids=["rows", "rows, all options", "mean, all options"],
)  # fmt: skip
def test_error_is_that_of_torch_in_each_dtype(backend, device, reduction, options, dtype):
    made = make_full if options else make
    tensors = made(24, device=device, v=67, d=32, dtype=dtype)
    for name in ("w", "b"):
        tensors[name] *= 0.3
    hold(
        liger_fn.fused_linear_ce, linear_oracle, tensors, ALL_LEAVES if options else LEAVES,
        **options, reduction=reduction, private={"chunk": 16},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduced_losses_are_the_sum_of_the_rows(backend, device, dtype):
    tensors = make_full(7, device=device, dtype=dtype)
    rows, total, mean = (
        liger_fn.fused_linear_ce(**tensors, **EVERY, reduction=r, chunk=3).double()
        for r in ("none", "sum", "mean")
    )
    n = tensors["class_weight"].double()[tensors["y"][tensors["y"] != 2]].sum()
    bound = len(rows) * torch.finfo(torch.float32).eps * rows.abs().sum()  # of a sum in float32
    assert (total - rows.sum()).abs() <= bound
    assert (mean - rows.sum() / n).abs() <= 2 * bound / n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_sums_stay_within_their_rounding(backend, device, monkeypatch, dtype):
    spy = Products(monkeypatch, 9)
    tensors = make(12, device=device, v=9, dtype=dtype)
    got = run(liger_fn.fused_linear_ce, tensors, ["w"], chunk=4, accum_dtype=torch.bfloat16)
    assert spy.sums == {torch.bfloat16}
    assert got[1].dtype == dtype
    spy.sums.clear()
    wide = run(liger_fn.fused_linear_ce, tensors, ["w"], chunk=4)
    assert spy.sums == {torch.float32}
    assert torch.equal(got[0], wide[0])
    off = (got[1].double() - wide[1].double()).abs().max().item()
    # 3 products, 2 sums and a result are rounded, each by half an ulp of at most the sum of |x|
    largest = tensors["x"].double().abs().sum(0).max().item() / 9
    assert off <= 6 * torch.finfo(torch.bfloat16).eps / 2 * largest
    assert off > 0 or dtype == torch.bfloat16


# -- dtypes and autocast ---------------------------------------------------------------------------

AUTOCAST = HALVES if torch.cuda.is_available() else [torch.bfloat16]
PAIRS = list(itertools.product(DTYPES, DTYPES))


def cast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@pytest.mark.parametrize("autocast", [None, *AUTOCAST], ids=str)
@pytest.mark.parametrize(("x_dtype", "w_dtype"), PAIRS, ids=str)
def test_every_pair_of_dtypes_is_as_exact_as_torch(loop, device, x_dtype, w_dtype, autocast):
    tensors = make(24, device=device, v=33, d=16)
    dtypes = {"x": x_dtype, "w": w_dtype, "b": w_dtype}
    tensors |= {k: tensors[k].to(t) for k, t in dtypes.items()}
    with cast_to(autocast, device):
        got = run(liger_fn.fused_linear_ce, tensors, LEAVES, chunk=16)
        rows = liger_fn.fused_linear_ce(**tensors, chunk=16, reduction="none")
    compute = autocast or torch.promote_types(x_dtype, w_dtype)
    narrow = cast(tensors, compute, device.type)
    exact = cast(narrow, torch.float64, "cpu")
    assert got[0].dtype == rows.dtype == torch.float32
    of_rows = {"reduction": "none"}
    assert_exact_as(
        rows.cpu(),
        linear_oracle(**narrow, **of_rows).cpu().float(),
        linear_oracle(**exact, **of_rows),
    )
    torchs, exacts = run(linear_oracle, narrow, LEAVES), run(linear_oracle, exact, LEAVES)
    for name, a, b, c in zip(LEAVES, got[1:], torchs[1:], exacts[1:], strict=True):
        assert a.dtype == dtypes[name]
        assert_exact_as(a.cpu(), b.cpu().to(a.dtype), c, name)


@pytest.mark.parametrize("dtype", AUTOCAST, ids=str)
def test_operands_of_products_are_numbers_of_the_dtype_of_autocast(
    loop, device, monkeypatch, dtype
):
    spy = Products(monkeypatch, V)
    tensors = make(5, device=device, dtype=torch.float32)
    for autocast, rounded in ((dtype, True), (None, False)):
        with cast_to(autocast, device):
            liger_fn.fused_linear_ce(**tensors)
        for t in spy.operands:
            assert torch.equal(t.to(dtype).to(t.dtype), t) == rounded


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("forward", [None, torch.bfloat16], ids=str)
def test_backward_keeps_the_dtype_of_forward_inside_and_outside_autocast(
    backend, device, forward, reduction
):
    tensors = make(5, device=device, dtype=torch.float32)
    leaves = [tensors[k].requires_grad_() for k in LEAVES]
    grads = []
    for backward in (None, torch.bfloat16):
        with cast_to(forward, device):
            loss = liger_fn.fused_linear_ce(**tensors, reduction=reduction)
        with cast_to(backward, device):
            grads.append(torch.autograd.grad(loss, leaves, torch.ones_like(loss)))
    assert all(map(torch.equal, *grads))
    assert [g.dtype for g in grads[0]] == [torch.float32] * 3


def test_float64_is_left_alone_by_autocast(loop, device):
    tensors = make(5, device=device)
    want = run(liger_fn.fused_linear_ce, tensors, LEAVES)
    with cast_to(torch.bfloat16, device):
        got = run(liger_fn.fused_linear_ce, tensors, LEAVES)
    assert got[0].dtype == torch.float64
    assert all(map(torch.equal, got, want))


# -- chunks and products ---------------------------------------------------------------------------

M = 2 * 16 + 7


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, M - 1, M, M + 1, 1000, None])
def test_every_token_counts_once_whatever_the_chunk(loop, device, monkeypatch, chunk):
    tensors = make(M, device=device)
    tensors["y"].clamp_(min=0)
    spy = Products(monkeypatch, V)
    stats = liger_fn.fused_linear_ce_with_stats(**tensors, chunk=chunk)
    assert stats.n_valid.item() == M
    rows = [z[0] for z in spy.z]
    assert sum(rows) == M
    assert max(rows) <= (chunk or M)
    hold(
        liger_fn.fused_linear_ce, linear_oracle, tensors, LEAVES,
        reduction="sum", private={"chunk": chunk},
    )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_chunk_changes_nothing_but_rounding(backend, device, reduction):
    tensors = make_full(7, device=device)
    options = {**EVERY, "reduction": reduction}
    d = torch.arange(7.0) if reduction == "none" else None
    want = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, d, **options)
    for chunk in (1, 3, 8):
        got = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, d, **options, chunk=chunk)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_scalar_loss_costs_three_products_a_chunk_and_none_in_backward(
    loop, device, monkeypatch, reduction
):
    spy = Products(monkeypatch, V)
    tensors = plain(make(18, device=device))
    leaves = [tensors[k].requires_grad_() for k in ("w", "x")]
    loss = liger_fn.fused_linear_ce(**tensors, chunk=16, reduction=reduction)
    assert spy.counts() == (2, 2, 2)
    for d in (1.0, 3.0):
        torch.autograd.grad(loss, leaves, torch.full_like(loss, d), retain_graph=True)
    assert spy.counts() == (2, 2, 2)


def test_a_single_step_keeps_its_dz_and_multiplies_once_asked(loop, device, monkeypatch):
    spy = Products(monkeypatch, V)
    tensors = plain(make(16, device=device))
    leaves = [tensors[k].requires_grad_() for k in ("w", "x")]
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = liger_fn.fused_linear_ce(**tensors, chunk=16)
    assert spy.counts() == (1, 0, 0)
    assert [t.shape for t in kept if t.numel() > 2 * V].count((16 * V,)) == 1
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert spy.counts() == (1, 1, 1)
    thrice = torch.autograd.grad(loss, leaves, torch.full_like(loss, 3.0), retain_graph=True)
    torch.testing.assert_close(thrice, tuple(3 * g for g in once))


def test_of_float16_no_dz_is_kept_since_x_times_a_small_gradient_has_no_digits(
    loop, device, monkeypatch
):
    spy = Products(monkeypatch, V)
    tensors = plain(make(16, device=device, dtype=torch.float16))
    for name in ("w", "x"):
        tensors[name].requires_grad_()
    liger_fn.fused_linear_ce(**tensors, chunk=16)
    assert spy.counts() == (1, 1, 1)


def test_losses_per_row_cost_four_products_a_chunk(loop, device, monkeypatch):
    spy = Products(monkeypatch, V)
    tensors = plain(make(18, device=device))
    leaves = [tensors[k].requires_grad_() for k in ("w", "x")]
    loss = liger_fn.fused_linear_ce(**tensors, chunk=16, reduction="none")
    assert spy.counts() == (2, 0, 0)
    torch.autograd.grad(loss, leaves, torch.ones_like(loss))
    assert spy.counts() == (4, 2, 2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("no_grad", [True, False])
def test_without_gradients_there_is_one_product_a_chunk(
    loop, device, monkeypatch, reduction, stats, no_grad
):
    spy = Products(monkeypatch, V)
    tensors = make(18, device=device)
    if no_grad:
        for name in LEAVES:
            tensors[name].requires_grad_()
    f = liger_fn.fused_linear_ce_with_stats if stats else liger_fn.fused_linear_ce
    with torch.no_grad() if no_grad else nullcontext():
        out = f(**tensors, chunk=16, reduction=reduction)
    assert not (out.loss if stats else out).requires_grad
    assert spy.counts() == (2, 0, 0)


SUBSETS = [s for r in (1, 2, 3, 4) for s in itertools.combinations(ALL_LEAVES, r)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_each_subset_of_gradients_is_right_and_pays_only_for_itself(
    loop, device, monkeypatch, wanted, reduction
):
    tensors = make_full(4, device=device)
    options = {**EVERY, "reduction": reduction}
    hold(liger_fn.fused_linear_ce, linear_oracle, tensors, wanted, **options)
    spy = Products(monkeypatch, V)
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    leaves = [tensors[k].requires_grad_() for k in wanted]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = liger_fn.fused_linear_ce(**tensors, **options)
    torch.autograd.grad(loss, leaves, torch.ones_like(loss))
    late = reduction == "none" and wanted != ("token_weight",)
    assert spy.counts() == (1 + late, "x" in wanted, "w" in wanted)
    assert {z[1:] for z in spy.z} == {(D, V)}
    if "w" not in wanted:
        home = tensors["w"].untyped_storage().data_ptr()
        assert all(t.untyped_storage().data_ptr() == home for t in kept if t.shape == (V, D))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", ["w", "x", "b"])
def test_a_frozen_argument_changes_no_other_gradient(backend, device, frozen, reduction):
    tensors = make_full(4, device=device)
    leaves = [k for k in ALL_LEAVES if k != frozen]
    f = liger_fn.fused_linear_ce
    hold(f, linear_oracle, tensors, leaves, **EVERY, reduction=reduction)


def test_a_token_weight_alone_needs_no_gradient_of_the_logits(loop, device, monkeypatch):
    spy = Products(monkeypatch, V)
    tensors = make_full(4, device=device)
    u = tensors["token_weight"].requires_grad_()
    liger_fn.fused_linear_ce(**tensors, **EVERY).backward()
    assert spy.counts() == (1, 0, 0)
    assert u.grad.any()


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_stats_are_the_loss_and_its_two_terms(backend, device, reduction):
    tensors = make_full(2, 3, device=device)
    options = {**EVERY, "reduction": reduction}
    stats = liger_fn.fused_linear_ce_with_stats(**tensors, **options, chunk=4)
    exact = linear_stats_oracle(**cast(tensors, torch.float64, "cpu"), **options)
    for a, b in zip(stats[:3], exact, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.loss, stats.nll + stats.z_loss, rtol=1e-14, atol=1e-14)
    loss = liger_fn.fused_linear_ce(**tensors, **options, chunk=4)
    torch.testing.assert_close(stats.loss, loss, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("mixture", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.3, -2.0, 5.0)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nll_and_z_loss_are_differentiable_alone_and_mixed(backend, device, reduction, mixture):
    def mixed(f: Callable[..., Any]) -> Callable[..., Tensor]:
        # terms of weight 0 are left out: their cotangents must then arrive as nothing
        return lambda **kw: sum(a * t for a, t in zip(mixture, f(**kw)[:3], strict=True) if a)

    hold(
        mixed(liger_fn.fused_linear_ce_with_stats), mixed(linear_stats_oracle),
        make_full(5, device=device), ALL_LEAVES, **EVERY, reduction=reduction,
    )  # fmt: skip


def test_the_gradient_of_the_loss_costs_the_same_with_stats(loop, device, monkeypatch):
    spy = Products(monkeypatch, V)
    tensors = plain(make(18, device=device))
    leaves = [tensors[k].requires_grad_() for k in ("w", "x")]
    stats = liger_fn.fused_linear_ce_with_stats(**tensors, z_loss=0.1, chunk=16)
    torch.autograd.grad(stats.loss, leaves)
    assert spy.counts() == (2, 2, 2)


def test_counts_are_integers_without_gradient_over_all_chunks(backend, device):
    w = torch.eye(5, device=device, requires_grad=True)
    x = torch.eye(5, device=device)
    x[3] = 0.0  # all logits equal: the first column is the argmax
    y = torch.tensor([0, 1, -100, 3, 0], device=device)
    stats = liger_fn.fused_linear_ce_with_stats(w, x, y, chunk=2)
    assert (stats.n_valid.item(), stats.n_correct.item()) == (4, 2)
    y[3] = 0
    stats = liger_fn.fused_linear_ce_with_stats(w, x, y, chunk=2)
    assert (stats.n_valid.item(), stats.n_correct.item()) == (4, 3)
    for count in stats[3:]:
        assert count.dtype == torch.int64
        assert count.shape == ()
        assert not count.requires_grad
    assert all(t.requires_grad for t in stats[:3])


# -- upstream gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", ["scalar", "per row", "stride 0", "transposed"])
def test_upstream_gradients_of_every_form_are_honoured(backend, device, upstream):
    def f(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def loss(**tensors):
            kind = "mean" if upstream == "scalar" else "none"
            rows = fn(**tensors, reduction=kind, z_loss=0.1)
            if upstream == "per row":
                return rows * torch.arange(-1.0, 5.0, device=rows.device).view(2, 3)
            if upstream == "transposed":
                return rows.t().contiguous() * torch.arange(6.0, device=rows.device).view(3, 2)
            return 3.0 * rows

        return loss

    d = torch.tensor(0.7).expand(2, 3) if upstream == "stride 0" else None
    tensors = make(2, 3, device=device)
    hold(f(liger_fn.fused_linear_ce), f(linear_oracle), tensors, LEAVES, upstream=d)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_are_linear_in_upstream(backend, device, reduction):
    tensors = make_full(5, device=device)
    a, b = torch.randn((2, 5) if reduction == "none" else (2,), dtype=torch.float64)
    options = {**EVERY, "reduction": reduction}

    def pull(d: Tensor) -> list[Tensor]:
        return run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, d, **options)[1:]

    first = pull(a)
    want = [2 * s - 3 * t for s, t in zip(first, pull(b), strict=True)]
    torch.testing.assert_close(pull(2 * a - 3 * b), want, rtol=1e-12, atol=1e-12)
    assert all(map(torch.equal, pull(4 * a), [4 * t for t in first]))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice_with_different_upstreams_is_right_both_times(backend, device, reduction):
    tensors = make_full(5, device=device)
    leaves = [tensors[k].requires_grad_() for k in ALL_LEAVES]
    loss = liger_fn.fused_linear_ce(**tensors, **EVERY, reduction=reduction)
    for d in torch.randn(2, *loss.shape, device=device, dtype=torch.float64):
        got = torch.autograd.grad(loss, leaves, d, retain_graph=True)
        want = run(liger_fn.fused_linear_ce, tensors, ALL_LEAVES, d, **EVERY, reduction=reduction)
        assert all(map(torch.equal, got, want[1:]))


def test_a_tied_embedding_collects_both_gradients(backend, device):
    def tied(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda w, y: f(w, w[(y + 1) % V].tanh(), y)

    w = torch.randn(V, D, device=device, dtype=torch.float64)
    tensors = {"w": w, "y": torch.tensor([0, 3, 6], device=device)}
    hold(tied(liger_fn.fused_linear_ce), tied(linear_oracle), tensors, ["w"])


def test_activations_may_have_other_consumers(backend, device):
    def both(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda **tensors: f(**tensors) + (tensors["x"] ** 2).sum()

    hold(both(liger_fn.fused_linear_ce), both(linear_oracle), make(5, device=device), LEAVES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_arguments_and_upstream_gradients_are_never_written(backend, device, reduction, dtype):
    tensors = make_full(5, device=device, dtype=dtype)
    d = torch.randn(5 if reduction == "none" else (), device=device)
    given = {**tensors, "upstream": d}
    before = {k: (t.clone(), t._version) for k, t in given.items()}
    leaves = [tensors[k].requires_grad_() for k in ALL_LEAVES]
    loss = liger_fn.fused_linear_ce(**tensors, **EVERY, reduction=reduction, chunk=4)
    grads = torch.autograd.grad(loss, leaves, d, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, d)
    for name, (copy, version) in before.items():
        assert torch.equal(given[name], copy), name
        assert given[name]._version == version, name
    assert all(map(torch.equal, grads, again))
    homes = [t.untyped_storage().data_ptr() for t in (*given.values(), loss, *grads, *again)]
    assert len(set(homes)) == len(homes)


@on_gpu
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_neither_forward_nor_backward_waits_for_the_gpu(device, reduction):
    tensors = make_full(5, device=device)
    leaves = [tensors[k].requires_grad_() for k in ALL_LEAVES]
    d = torch.ones(5 if reduction == "none" else (), device=device)
    options = {**EVERY, "reduction": reduction, "chunk": 2}
    torch.autograd.grad(liger_fn.fused_linear_ce(**tensors, **options), leaves, d)  # compiles
    with waiting_is_an_error():
        stats = liger_fn.fused_linear_ce_with_stats(**tensors, **options)
        torch.autograd.grad(stats.loss, leaves, d)


# -- errors ----------------------------------------------------------------------------------------

W, X, Y = torch.zeros(5, 4), torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
FUSED_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *ERRORS,
    ({"chunk": 0}, ValueError, "chunk must be an integer above 0, got 0"),
    ({"chunk": -3}, ValueError, "chunk must be an integer above 0, got -3"),
    ({"chunk": 2.5}, ValueError, "chunk must be an integer above 0, got 2.5"),
    ({"accum_dtype": torch.float16}, ValueError,
     "accum_dtype must be float32 or bfloat16, got torch.float16"),
    ({"w": torch.zeros(5, 3)}, ValueError, "axis d is 4 in x but 3 in w"),
    ({"w": torch.zeros(20)}, ValueError, "w must have shape (v, d), got (20,)"),
    ({"w": W.long()}, TypeError,
     "w must hold float32, bfloat16, float16 or float64, got torch.int64"),
    ({"x": X.long()}, TypeError,
     "x must hold float32, bfloat16, float16 or float64, got torch.int64"),
    ({"x": torch.tensor(1.0)}, ValueError, "x must have shape (..., d), got ()"),
    ({"y": Y[0]}, ValueError, "y must have shape (2, 3), one target for each row of x, got (3,)"),
    ({"b": torch.zeros(4)}, ValueError, "axis v is 4 in b but 5 in w"),
    ({"b": torch.zeros(1, 5)}, ValueError, "b must have shape (v), got (1, 5)"),
    ({"b": torch.zeros(5).long()}, TypeError,
     "b must hold float32, bfloat16, float16 or float64, got torch.int64"),
    ({"class_weight": torch.ones(4)}, ValueError, "axis v is 4 in class_weight but 5 in w"),
    ({"x": X.to("meta")}, ValueError, "x is on meta but w is on "),
    ({"y": Y.to("meta")}, ValueError, "y is on meta but w is on "),
    ({"b": torch.ones(5, device="meta")}, ValueError, "b is on meta but w is on "),
    ({"class_weight": torch.ones(5, device="meta")}, ValueError,
     "class_weight is on meta but w is on "),
]  # fmt: skip


@pytest.mark.parametrize(
    "f", [liger_fn.fused_linear_ce, liger_fn.fused_linear_ce_with_stats], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    ("given", "kind", "message"), FUSED_ERRORS, ids=[named(e[0]) for e in FUSED_ERRORS]
)
def test_errors_name_the_op_the_argument_and_what_came_before_any_launch(
    device, monkeypatch, f, given, kind, message
):
    monkeypatch.setattr(_products, "mm", None)
    tensors = {"w": W, "x": X, "y": Y}
    assert_raises(monkeypatch, "fused_linear_ce", f, tensors, given, kind, message, device)


@pytest.mark.parametrize("name", ["token_weight", "n_valid"])
def test_a_weight_or_count_on_another_device_is_an_error_that_names_it(device, name):
    elsewhere = torch.ones((2, 3) if name == "token_weight" else (), device="meta")
    tensors = [t.to(device) for t in (W, X, Y)]
    with pytest.raises(ValueError, match=f"^fused_linear_ce: {name} is on meta but "):
        liger_fn.fused_linear_ce(*tensors, **{name: elsewhere})
