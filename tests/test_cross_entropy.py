"""cross_entropy and cross_entropy_with_stats against torch's own cross entropy in float64."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from tests.tolerance import assert_exact_as, ulp

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = DTYPES[1:]
REDUCTIONS = ["mean", "sum", "none"]
FLOATS = (*DTYPES, torch.float64)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="about a GPU")

SINGLE: dict[str, dict[str, Any]] = {
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.2},
    "softcap": {"softcap": 1.5},
    "logit_scale": {"logit_scale": 0.125},
    "logit_scale_16": {"logit_scale": 1 / 16},
    "ignore_index": {"ignore_index": 2},
    "class_weight": {},
    "token_weight": {},
    "n_valid": {"n_valid": 3.5},
}
EVERY = {
    "label_smoothing": 0.1, "z_loss": 0.2, "softcap": 3.0, "logit_scale": 0.7, "ignore_index": 2,
}  # fmt: skip


# -- the oracle: torch's cross entropy of a row, and the rest of the formula written out -----------


def transform(z: Tensor, logit_scale: float, softcap: float | None) -> Tensor:
    z = z * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def stats_oracle(
    logits: Tensor, y: Tensor, *,
    class_weight: Tensor | None = None, token_weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, reduction: str = "mean",
    n_valid: float | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, nll and z_loss, computed in the dtype of logits on their device."""
    y, z = y.long(), transform(logits, logit_scale, softcap)
    c = None if class_weight is None else class_weight.to(z.dtype)
    v, live = z.shape[-1], y != ignore_index
    nll = F.cross_entropy(
        z.reshape(-1, v), y.reshape(-1), c,
        ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none",
    ).reshape(y.shape)  # fmt: skip
    own = live.to(z.dtype) if c is None else torch.where(live, c[torch.where(live, y, 0)], 0.0)
    zsq = z_loss * torch.where(live, own * z.logsumexp(-1) ** 2, 0.0)
    if token_weight is not None:
        nll, zsq = nll * token_weight, zsq * token_weight
    if reduction != "none":
        n = 1.0 if reduction == "sum" else own.sum() if n_valid is None else n_valid
        nll, zsq = nll.sum() / n, zsq.sum() / n
    return nll + zsq, nll, zsq


def oracle(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    return stats_oracle(logits, y, **options)[0]


# -- the error rule --------------------------------------------------------------------------------


def cast(tensors: dict[str, Tensor], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {
        k: t.detach().to(device, dtype if t.dtype in FLOATS else None) for k, t in tensors.items()
    }


def run(
    f: Callable[..., Tensor], tensors: dict[str, Tensor], leaves: Sequence[str],
    upstream: Tensor | None = None, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """The loss and its gradients for `leaves`, which keep their strides."""
    made = {
        k: t.detach().requires_grad_() if k in leaves else t.detach() for k, t in tensors.items()
    }
    loss = f(**made, **options)
    d = torch.ones_like(loss) if upstream is None else upstream.to(loss.device, loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, [made[k] for k in leaves], d)]


def hold(
    f: Callable[..., Tensor], reference: Callable[..., Tensor], tensors: dict[str, Tensor],
    leaves: Sequence[str], *, upstream: Tensor | None = None, private: dict[str, Any] | None = None,
    **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Hold f and its gradients to the oracle in float64, and to the error rule in other dtypes.

    `private` options are f's alone. The rule says nothing about a reduced loss, where errors cancel
    by luck; another test holds it to the sum of its rows.
    """
    first = tensors[leaves[0]]
    if upstream is None and options.get("reduction") == "none":
        upstream = torch.randn(tensors["y"].shape, generator=torch.Generator().manual_seed(7))
    got = run(f, tensors, leaves, upstream, **options, **(private or {}))
    exact = run(reference, cast(tensors, torch.float64, "cpu"), leaves, upstream, **options)
    if first.dtype == torch.float64:
        torch.testing.assert_close([t.cpu() for t in got], exact, rtol=1e-12, atol=1e-12)
        return got
    plain = run(
        reference, cast(tensors, first.dtype, first.device.type), leaves, upstream, **options
    )
    for name, a, b, c in zip(("loss", *leaves), got, plain, exact, strict=True):
        assert a.dtype == (torch.float32 if name == "loss" else tensors[name].dtype), name
        if name != "loss" or options.get("reduction") == "none":
            assert_exact_as(a.cpu(), b.cpu().to(a.dtype), c, name)
    return got


def make(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Logits of this shape, and targets of which each fourth is ignored (-100)."""
    g = torch.Generator().manual_seed(sum(shape))
    logits = 2 * torch.randn(shape, generator=g, dtype=torch.float64)
    y = torch.randint(shape[-1], shape[:-1], generator=g)
    y.view(-1)[1::4] = -100
    return {"logits": logits.to(device, dtype), "y": y.to(device)}


def make_full(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """`make` with weights of classes and tokens; ignored is 2."""
    tensors = make(*shape, device=device, dtype=dtype)
    g = torch.Generator().manual_seed(1)
    tensors["y"][tensors["y"] == -100] = 2
    c = torch.rand(shape[-1], generator=g, dtype=torch.float64) + 0.5
    u = torch.randn(shape[:-1], generator=g, dtype=torch.float64)
    return {**tensors, "class_weight": c.to(device, dtype), "token_weight": u.to(device, dtype)}


# -- by hand ---------------------------------------------------------------------------------------


def test_uniform_logits_cost_the_log_of_the_number_of_columns(backend, device):
    logits = torch.zeros(1, 4, device=device, requires_grad=True)
    loss = liger_fn.cross_entropy(logits, torch.tensor([2], device=device))
    loss.backward()
    assert loss.item() == pytest.approx(1.3862944, rel=2e-7)
    assert logits.grad.tolist() == [pytest.approx([0.25, 0.25, -0.75, 0.25])]


def test_z_loss_of_a_row_with_mass_eight_is_the_squared_log_of_eight(backend, device):
    # p = 1/8, 2/8, 5/8; target the second: log 4, and half of (log 8)^2 = 4.3240771
    logits = torch.tensor([[1.0, 2.0, 5.0]], device=device).log().requires_grad_()
    y = torch.tensor([1], device=device)
    loss, nll, z_loss, *_ = liger_fn.cross_entropy_with_stats(logits, y, z_loss=0.5)
    (g,) = torch.autograd.grad(nll, logits, retain_graph=True)
    (gz,) = torch.autograd.grad(z_loss, logits)
    assert nll.item() == pytest.approx(1.3862944, rel=3e-7)
    assert z_loss.item() == pytest.approx(2.1620385, rel=3e-7)
    assert loss.item() == pytest.approx(3.5483329, rel=3e-7)
    assert g.tolist() == [pytest.approx([0.125, -0.75, 0.625])]
    assert gz.tolist() == [pytest.approx([math.log(8) * p for p in (0.125, 0.25, 0.625)])]


def test_label_smoothing_of_two_columns_by_hand(backend, device):
    # p = 3/4, 1/4; s = 0.2: 0.9 * log(4/3) + 0.1 * log 4, and gradient p - (0.9, 0.1)
    logits = torch.tensor([[math.log(3), 0.0]], device=device, requires_grad=True)
    loss = liger_fn.cross_entropy(logits, torch.tensor([0], device=device), label_smoothing=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.3975433, rel=3e-7)
    assert logits.grad.tolist() == [pytest.approx([-0.15, 0.15])]


@pytest.mark.parametrize("at", [0, 1])
def test_a_smoothed_loss_is_infinite_where_a_logit_is_minus_infinity(backend, device, at):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0]], device=device, requires_grad=True)
    loss = liger_fn.cross_entropy(logits, torch.tensor([at], device=device), label_smoothing=0.3)
    loss.backward()
    twin = logits.detach().clone().requires_grad_()
    F.cross_entropy(twin, torch.tensor([at], device=device), label_smoothing=0.3).backward()
    assert loss.item() == torch.inf
    torch.testing.assert_close(logits.grad, twin.grad)


def test_a_weighted_mean_divides_by_the_weights_of_its_targets(backend, device):
    # losses log 2 and log 2, weights 1 and 3, tokens 1 and 2: (1 * 1 + 3 * 2) / 4 * log 2
    loss = liger_fn.cross_entropy(
        torch.zeros(2, 2, device=device),
        torch.tensor([0, 1], device=device),
        class_weight=torch.tensor([1.0, 3.0], device=device),
        token_weight=torch.tensor([1.0, 2.0], device=device),
    )
    assert loss.item() == pytest.approx(1.2130076, rel=3e-7)


def test_softcap_bends_the_scaled_logit_by_hand(backend, device):
    # 0.5 * 2 log 3 = log 3, 2 tanh(log(3) / 2) = 1: loss log(1 + 1/e)
    logits = torch.tensor([[2 * math.log(3), 0.0]], device=device)
    y = torch.tensor([0], device=device)
    loss = liger_fn.cross_entropy(logits, y, softcap=2.0, logit_scale=0.5)
    assert loss.item() == pytest.approx(0.3132617, rel=3e-7)


# -- shapes and layouts ----------------------------------------------------------------------------

SHAPES = [
    (0, 5), (2, 0, 3), (3, 1), (1,), (7,), (5, 2), (4, 7), (2, 3, 7), (2, 1, 3, 5),
    (3, 127), (3, 128), (3, 129), (4, 257), (2, 4095), (2, 4096), (2, 4097),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_agrees_with_torch(backend, device, shape):
    tensors = make(*shape, device=device)
    hold(liger_fn.cross_entropy, oracle, tensors, ["logits"], reduction="none")


@pytest.mark.parametrize("shape", [(4, 7), (2, 3, 7), (2, 4097)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_mean_and_sum_agree_with_torch(backend, device, shape, reduction):
    tensors = make(*shape, device=device)
    hold(liger_fn.cross_entropy, oracle, tensors, ["logits"], reduction=reduction)


def test_one_column_is_certain_whatever_the_options(backend, device):
    tensors = make_full(3, 1, device=device)
    _, nll, _, *_ = liger_fn.cross_entropy_with_stats(**tensors, **EVERY, reduction="none")
    assert torch.equal(nll, torch.zeros_like(nll))
    options = {**EVERY, "z_loss": 0.0, "reduction": "sum"}
    _, g = run(liger_fn.cross_entropy, tensors, ["logits"], **options)
    terms = tensors["token_weight"].abs().max() * tensors["class_weight"]
    assert g.abs().max() <= torch.finfo(g.dtype).eps * terms.item()  # a difference of these


@pytest.mark.parametrize("shape", [(0, 5), (7,), (2, 3, 7), (3, 129), (2, 4097)], ids=str)
def test_every_shape_agrees_with_torch_under_all_options(backend, device, shape):
    tensors = make_full(*shape, device=device)
    hold(
        liger_fn.cross_entropy, oracle, tensors, ["logits", "token_weight"],
        **EVERY, reduction="none",
    )  # fmt: skip


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t()[:6, :5],
    "permuted": lambda t: t.reshape(8, 3, 3).permute(1, 2, 0),
    "strided columns": lambda t: t[:, ::2],
    "offset columns": lambda t: t[:, 3:],
    "strided rows": lambda t: t[::3],
    "expanded row": lambda t: t[:1].expand(4, 9),
    "expanded column": lambda t: t[:, :1].expand(8, 5),
    "expanded leading axis": lambda t: t[:3].expand(2, 3, 9),
    "one row": lambda t: t[2],
    "one column of a matrix": lambda t: t[:, 4],
}


@pytest.mark.parametrize("view", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_layout_of_logits_is_read_where_it_lies(backend, device, view):
    def viewed(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda logits, y: f(view(logits), y, reduction="sum", label_smoothing=0.1)

    base = make(8, 9, device=device)["logits"]
    shape = view(base).shape
    y = torch.randint(shape[-1], shape[:-1], device=device)
    hold(viewed(liger_fn.cross_entropy), viewed(oracle), {"logits": base, "y": y}, ["logits"])


def test_any_layout_of_targets_and_weights_is_read_where_it_lies(backend, device):
    def f(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def strided(logits, y, class_weight, token_weight):
            return fn(
                logits, y.t(), class_weight=class_weight[:, 1],
                token_weight=token_weight.expand(4, 3), label_smoothing=0.1, z_loss=0.1,
            )  # fmt: skip

        return strided

    tensors = {
        "logits": torch.randn(4, 3, 5, device=device, dtype=torch.float64),
        "y": torch.randint(5, (3, 4), device=device),
        "class_weight": torch.rand(5, 2, device=device, dtype=torch.float64) + 0.5,
        "token_weight": torch.randn(4, 1, device=device, dtype=torch.float64),
    }
    hold(f(liger_fn.cross_entropy), f(oracle), tensors, ["logits", "token_weight"])


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_targets_are_any_integers(backend, device, dtype):
    tensors = make(4, 7, device=device)
    ignored = 6 if dtype == torch.uint8 else -100
    tensors["y"][tensors["y"] == -100] = ignored
    want = run(liger_fn.cross_entropy, tensors, ["logits"], ignore_index=ignored)
    tensors["y"] = tensors["y"].to(dtype)
    got = run(liger_fn.cross_entropy, tensors, ["logits"], ignore_index=ignored)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("dtype", "v"), [(torch.uint8, 257), (torch.int8, 257), (torch.int16, 40_000)], ids=str
)
def test_narrow_targets_need_not_hold_the_number_of_columns(backend, device, dtype, v):
    logits = make(2, v, device=device)["logits"]
    y = torch.tensor([3, 100], device=device)
    want = run(liger_fn.cross_entropy, {"logits": logits, "y": y}, ["logits"])
    got = run(liger_fn.cross_entropy, {"logits": logits, "y": y.to(dtype)}, ["logits"])
    assert all(map(torch.equal, got, want))


def test_unsigned_targets_never_equal_a_negative_ignore_index(backend, device):
    logits = make(2, 200, device=device)["logits"]
    y = torch.tensor([156, 3], device=device)  # 156 is -100 modulo 256
    tensors = {"logits": logits, "y": y}
    want = liger_fn.cross_entropy_with_stats(**tensors)
    got = liger_fn.cross_entropy_with_stats(logits, y.to(torch.uint8))
    assert all(map(torch.equal, got, want))


# -- options ---------------------------------------------------------------------------------------


def pick(name: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Of the weights of `make_full` only the one that the option is about."""
    kept = {k: t for k, t in tensors.items() if k in ("logits", "w", "x", "b", "y", name)}
    return kept, [k for k in kept if k not in ("y", "class_weight")]


@pytest.mark.parametrize("name", SINGLE)
def test_an_option_alone_agrees_with_torch_and_is_never_ignored(backend, device, name):
    tensors, leaves = pick(name, make_full(5, 7, device=device))
    reduction = "mean" if name == "n_valid" else "none"
    options = {**SINGLE[name], "reduction": reduction}
    got = hold(liger_fn.cross_entropy, oracle, tensors, leaves, **options)
    plain = liger_fn.cross_entropy(tensors["logits"], tensors["y"], reduction=reduction)
    assert not torch.allclose(got[0], plain)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [None, "class_weight", "token_weight"], ids=str)
def test_each_reduction_agrees_with_torch_under_weights(backend, device, weight, reduction):
    tensors, leaves = pick(weight or "", make_full(5, 7, device=device))
    hold(
        liger_fn.cross_entropy, oracle, tensors, leaves,
        reduction=reduction, ignore_index=2, label_smoothing=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_options_together_agree_with_torch(backend, device, reduction):
    tensors = make_full(2, 3, 7, device=device)
    leaves = ["logits", "token_weight"]
    got = hold(liger_fn.cross_entropy, oracle, tensors, leaves, **EVERY, reduction=reduction)
    assert [t.dtype for t in got] == [torch.float64] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, EVERY], ids=["plain", "all options"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_error_is_that_of_torch_in_each_dtype(backend, device, reduction, options, dtype):
    tensors, leaves = make(8, 257, device=device, dtype=dtype), ["logits"]
    if options:
        tensors, leaves = make_full(8, 257, device=device, dtype=dtype), ["logits", "token_weight"]
    hold(liger_fn.cross_entropy, oracle, tensors, leaves, **options, reduction=reduction)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduced_losses_are_the_sum_of_the_rows(backend, device, dtype):
    tensors = make_full(6, 67, device=device, dtype=dtype)
    rows, total, mean = (
        liger_fn.cross_entropy(**tensors, **EVERY, reduction=r).double()
        for r in ("none", "sum", "mean")
    )
    n = tensors["class_weight"].double()[tensors["y"][tensors["y"] != 2]].sum()
    bound = len(rows) * torch.finfo(torch.float32).eps * rows.abs().sum()  # of a sum in float32
    assert (total - rows.sum()).abs() <= bound
    assert (mean - rows.sum() / n).abs() <= 2 * bound / n


@pytest.mark.parametrize("n_valid", [11, 2.5, torch.tensor(11), torch.tensor(2.5)], ids=str)
def test_n_valid_replaces_the_count_as_number_and_as_tensor(backend, device, n_valid):
    tensors = make_full(5, 7, device=device)
    there = n_valid.to(device) if isinstance(n_valid, Tensor) else n_valid
    leaves = ["logits", "token_weight"]
    got = run(liger_fn.cross_entropy, tensors, leaves, **EVERY, n_valid=there)
    total = run(liger_fn.cross_entropy, tensors, leaves, **EVERY, reduction="sum")
    want = [t / float(n_valid) for t in total]
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


def test_accumulated_parts_with_the_global_count_are_the_mean_of_the_whole(backend, device):
    tensors = make(6, 7, device=device)
    logits, y = tensors["logits"], tensors["y"]
    n = (y != -100).sum()
    parts = [liger_fn.cross_entropy(logits[i], y[i], n_valid=n) for i in (slice(1), slice(1, 6))]
    want = liger_fn.cross_entropy(logits, y)
    torch.testing.assert_close(sum(parts), want, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_token_weights_of_any_dtype_get_their_gradient_in_it(backend, device, dtype):
    tensors = make_full(5, 7, device=device, dtype=torch.float32)
    tensors["token_weight"] = tensors["token_weight"].to(dtype)
    loss, dlogits, du = run(liger_fn.cross_entropy, tensors, ["logits", "token_weight"], **EVERY)
    assert (loss.dtype, dlogits.dtype, du.dtype) == (torch.float32, torch.float32, dtype)
    tensors["token_weight"] = tensors["token_weight"].float()
    want = run(liger_fn.cross_entropy, tensors, ["logits", "token_weight"], **EVERY)
    torch.testing.assert_close(
        [loss, dlogits, du.float()], want, rtol=torch.finfo(dtype).eps, atol=0
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_weighted_mean_sums_its_weights_in_float32(backend, device, dtype):
    # 2049 is no number of either dtype, 120 000 is beyond the range of float16
    logits, y = torch.zeros(2, 2, device=device), torch.tensor([0, 1], device=device)
    for weights in ([2048.0, 1.0], [6e4, 6e4]):
        c = torch.tensor(weights, device=device, dtype=dtype)
        loss = liger_fn.cross_entropy(logits, y, class_weight=c)
        assert loss.item() == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float64_token_weights_do_not_change_the_dtype_of_the_loss(backend, device, reduction):
    tensors = make(3, 7, device=device, dtype=torch.float32)
    u = torch.ones(3, device=device, dtype=torch.float64)
    loss = liger_fn.cross_entropy(**tensors, token_weight=u, reduction=reduction)
    assert loss.dtype == torch.float32


def test_class_weights_are_not_differentiated(backend, device):
    tensors = make_full(5, 7, device=device)
    tensors["class_weight"].requires_grad_()
    assert not liger_fn.cross_entropy(**tensors, **EVERY).requires_grad


# -- rows that do not count, and rows that cannot --------------------------------------------------


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (2, 0, 5), (5,)], ids=str)
def test_nothing_to_count_is_loss_zero_and_gradient_zero(
    backend, device, shape, reduction, weights
):
    tensors = {
        "logits": torch.randn(shape, device=device),
        "y": torch.full(shape[:-1], -100, device=device),
    }
    leaves = ["logits"]
    if weights:
        tensors["class_weight"] = torch.rand(5, device=device)
        tensors["token_weight"] = torch.randn(shape[:-1], device=device)
        leaves += ["token_weight"]
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0}):
        got = run(liger_fn.cross_entropy, tensors, leaves, reduction=reduction, **options)
        want = torch.zeros(shape[:-1] if reduction == "none" else (), device=device)
        assert torch.equal(got[0], want)
        for g, name in zip(got[1:], leaves, strict=True):
            assert torch.equal(g, torch.zeros_like(tensors[name]))


@pytest.mark.parametrize("held", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignored_rows_may_hold_anything(backend, device, reduction, held):
    tensors = make_full(6, 7, device=device, dtype=torch.float32)
    tensors["y"][1::2] = 2
    run_all = (liger_fn.cross_entropy, tensors, ["logits", "token_weight"])
    want = run(*run_all, **EVERY, reduction=reduction)
    tensors["logits"][1] = held
    tensors["logits"][3, 2:4] = held
    got = run(*run_all, **EVERY, reduction=reduction)
    assert all(map(torch.equal, got, want))
    assert torch.equal(got[1][1::2], torch.zeros_like(got[1][1::2]))


OUTSIDE = [-1, 7, 8, 100_000, -(2**31), 2**31 - 1, 2**40, -(2**40)]


@pytest.mark.parametrize("everything", [False, True])
def test_a_target_out_of_range_makes_its_row_nan_and_no_other(backend, device, everything):
    tensors = make_full(2 * len(OUTSIDE), 7, device=device)
    tensors["y"][::2] = 0
    if not everything:
        del tensors["class_weight"], tensors["token_weight"]
    options = {**(EVERY if everything else {"ignore_index": 2}), "reduction": "none"}
    d = torch.ones(2 * len(OUTSIDE))
    want = run(liger_fn.cross_entropy, tensors, ["logits"], d, **options)
    tensors["y"][::2] = torch.tensor(OUTSIDE, device=device)
    got = run(liger_fn.cross_entropy, tensors, ["logits"], d, **options)
    for a, b in zip(got, want, strict=True):
        assert a[::2].isnan().all()
        assert torch.equal(a[1::2], b[1::2])


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("label", [-1, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_target_out_of_range_makes_the_reduced_loss_nan(
    backend, device, reduction, label, weight
):
    tensors = make(3, 7, device=device)
    tensors["y"][1] = label
    if weight:
        tensors["class_weight"] = torch.ones(7, device=device)
    assert liger_fn.cross_entropy(**tensors, reduction=reduction).isnan()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8], ids=str)
def test_a_narrow_target_out_of_range_makes_its_row_nan(backend, device, dtype):
    logits = torch.randn(3, 7, device=device)
    y = torch.tensor([-1, 7, 3], device=device, dtype=dtype)
    stats = liger_fn.cross_entropy_with_stats(logits, y, reduction="none")
    assert stats.loss.isnan().tolist() == [True, True, False]


def test_a_target_out_of_range_is_never_correct_but_counted(backend, device):
    logits = torch.zeros(3, 5, device=device)
    y = torch.tensor([0, 5, -1], device=device)
    stats = liger_fn.cross_entropy_with_stats(logits, y)
    assert (stats.n_valid.item(), stats.n_correct.item()) == (3, 1)


# -- range -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("v", [5, 4500])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_large_common_offset_costs_no_digits(backend, device, v, smoothing):
    # float32 near 3e4 is spaced 2e-3: the oracle reads the rounded logits, so the rest is ours
    tensors = make(3, v, device=device, dtype=torch.float32)
    tensors["logits"] += 3e4
    options = {"label_smoothing": smoothing, "reduction": "none"}
    got = hold(liger_fn.cross_entropy, oracle, tensors, ["logits"], **options)
    tensors["logits"] -= 3e4  # exact
    want = run(
        liger_fn.cross_entropy, tensors, ["logits"],
        torch.randn(3, generator=torch.Generator().manual_seed(7)), **options,
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_capped_logit_never_leaves_the_cap_however_large(backend, device, dtype):
    large = [1e3, -1e3, 1e4, -6e4, 6e4, 0.0, 1e5 if dtype != torch.float16 else 6e4]
    logits = torch.tensor([large, large[::-1]], device=device, dtype=dtype)
    y = torch.tensor([0, 2], device=device)
    for z_loss in (0.0, 0.1):
        options = {"softcap": 30.0, "z_loss": z_loss, "reduction": "none"}
        loss, g = run(liger_fn.cross_entropy, {"logits": logits, "y": y}, ["logits"], **options)
        z = 30.0 * logits.sign().double()
        nll = z.logsumexp(-1) - z.gather(-1, y[:, None])[:, 0]
        want = nll + z_loss * z.logsumexp(-1) ** 2
        torch.testing.assert_close(loss.double(), want, rtol=3e-7, atol=1e-6)
        # the slope of the cap at 1e3 is 1 / cosh(1e3 / 30)**2
        assert g[logits != 0].double().abs().amax() < 10 * 4 * math.exp(-2e3 / 30)
        assert g.isfinite().all()


@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap_agrees_with_torch_from_small_to_large_logits(backend, device, softcap):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 33, generator=g) * 10.0 ** torch.arange(-3.0, 3.0)[:, None]
    tensors = {"logits": logits.to(device), "y": torch.randint(33, (6,), generator=g).to(device)}
    hold(
        liger_fn.cross_entropy, oracle, tensors, ["logits"], softcap=softcap, reduction="none",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_logits_lose_only_the_rounding_of_the_gradient(backend, device, dtype):
    # +-60 underflows in a float16 denominator; the loss is held to plain torch in float32
    logits = torch.linspace(-60, 60, 257).to(device, dtype).expand(3, 257).contiguous()
    tensors = {"logits": logits, "y": torch.tensor([0, 128, 256], device=device)}
    d = torch.tensor([1.0, -0.3, 2.0])
    got = run(liger_fn.cross_entropy, tensors, ["logits"], d, reduction="none")
    plain = run(oracle, cast(tensors, torch.float32, device.type), ["logits"], d, reduction="none")
    exact = run(oracle, cast(tensors, torch.float64, "cpu"), ["logits"], d, reduction="none")
    assert got[0].dtype == torch.float32
    assert_exact_as(got[0].cpu(), plain[0].cpu(), exact[0])
    assert ((got[1].cpu().double() - exact[1]).abs() <= ulp(exact[1], dtype)).all()


def test_error_does_not_grow_with_the_number_of_columns(backend, device):
    tensors = make(2, 262_144, device=device, dtype=torch.bfloat16)
    got = run(liger_fn.cross_entropy, tensors, ["logits"], reduction="none", label_smoothing=0.1)
    exact, _ = run(
        oracle,
        cast(tensors, torch.float64, "cpu"),
        ["logits"],
        reduction="none",
        label_smoothing=0.1,
    )
    torch.testing.assert_close(got[0].cpu().double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("v", [7, 4500])
def test_masked_columns_get_no_probability_and_no_gradient(backend, device, v, z_loss):
    tensors = make(3, v, device=device)
    free = v - 3  # of a long row the whole first block is masked
    tensors["logits"][:, :free] = -math.inf
    tensors["logits"][2, : v - 1] = -math.inf
    tensors["y"] = torch.tensor([free, -100, v - 1], device=device)
    loss, g = hold(
        liger_fn.cross_entropy, oracle, tensors, ["logits"], reduction="none", z_loss=z_loss,
    )  # fmt: skip
    assert loss.isfinite().all()
    assert torch.equal(g[:, :free], torch.zeros_like(g[:, :free]))


def test_a_masked_target_costs_infinity_as_in_torch(backend, device):
    logits = torch.tensor([[0.0, -math.inf, 0.0]], device=device)
    y = torch.tensor([1], device=device)
    loss, g = run(liger_fn.cross_entropy, {"logits": logits, "y": y}, ["logits"])
    assert loss.item() == math.inf
    assert g.tolist() == [pytest.approx([0.5, -1.0, 0.5])]


def test_an_infinite_logit_lies_at_the_cap(backend, device):
    logits = torch.tensor([[math.inf, -math.inf, 0.0]], device=device)
    y = torch.tensor([1], device=device)
    loss, g = run(liger_fn.cross_entropy, {"logits": logits, "y": y}, ["logits"], softcap=3.0)
    z = torch.tensor([3.0, -3.0, 0.0], dtype=torch.float64)
    assert loss.item() == pytest.approx((z.logsumexp(0) + 3).item(), rel=3e-7)
    assert g[0].tolist() == pytest.approx([0.0, 0.0, z.softmax(0)[2].item()])


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_a_nan_in_a_row_that_counts_is_seen(backend, device, z_loss):
    tensors = make(3, 5000, device=device)
    tensors["y"][:] = 1
    tensors["logits"][1, 4321] = math.nan
    loss = liger_fn.cross_entropy(**tensors, reduction="none", z_loss=z_loss)
    assert loss.isnan().tolist() == [False, True, False]


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_stats_are_the_loss_and_its_two_terms(backend, device, reduction):
    tensors = make_full(2, 3, 7, device=device)
    options = {**EVERY, "reduction": reduction}
    stats = liger_fn.cross_entropy_with_stats(**tensors, **options)
    exact = stats_oracle(**cast(tensors, torch.float64, "cpu"), **options)
    for a, b in zip(stats[:3], exact, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.loss, stats.nll + stats.z_loss, rtol=1e-15, atol=0)
    assert torch.equal(stats.loss, liger_fn.cross_entropy(**tensors, **options))


@pytest.mark.parametrize("mixture", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.3, -2.0, 5.0)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_and_z_loss_are_differentiable_alone_and_mixed(backend, device, reduction, mixture):
    def mixed(f: Callable[..., Any]) -> Callable[..., Tensor]:
        # terms of weight 0 are left out: their cotangents must then arrive as nothing
        return lambda **kw: sum(a * t for a, t in zip(mixture, f(**kw)[:3], strict=True) if a)

    hold(
        mixed(liger_fn.cross_entropy_with_stats), mixed(stats_oracle),
        make_full(5, 7, device=device), ["logits", "token_weight"], **EVERY, reduction=reduction,
    )  # fmt: skip


def test_counts_are_integers_without_gradient(backend, device):
    logits = torch.eye(4, device=device, requires_grad=True)
    y = torch.tensor([0, 1, -100, 2], device=device)
    stats = liger_fn.cross_entropy_with_stats(logits, y)
    assert (stats.n_valid.item(), stats.n_correct.item()) == (3, 2)
    for count in stats[3:]:
        assert count.dtype == torch.int64
        assert count.shape == ()
        assert not count.requires_grad
    assert all(t.requires_grad for t in stats[:3])


def test_of_equal_logits_the_first_is_the_argmax(backend, device):
    logits = torch.zeros(4, 5000, device=device)
    logits[2:, [10, 4097]] = 1.0  # in two blocks
    for y, correct in (([0, 1, 10, 4097], 2), ([1, 4999, 4097, 10], 1)):
        stats = liger_fn.cross_entropy_with_stats(logits, torch.tensor(y, device=device))
        assert stats.n_correct.item() == correct


def test_logits_tied_by_the_cap_are_ties(backend, device):
    logits = torch.tensor([[1e4, 1e5], [1e4, 1e5]], device=device)
    y = torch.tensor([0, 1], device=device)
    assert liger_fn.cross_entropy_with_stats(logits, y, softcap=30.0).n_correct.item() == 1


# -- upstream gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", ["scalar", "per row", "stride 0", "transposed"])
def test_upstream_gradients_of_every_form_are_honoured(backend, device, upstream):
    def f(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def loss(logits, y):
            kind = "mean" if upstream == "scalar" else "none"
            rows = fn(logits, y, reduction=kind, z_loss=0.1)
            if upstream == "per row":
                return rows * torch.arange(-1.0, 5.0, device=rows.device).view(2, 3)
            if upstream == "transposed":
                return rows.t().contiguous() * torch.arange(6.0, device=rows.device).view(3, 2)
            return 3.0 * rows

        return loss

    d = torch.tensor(0.7).expand(2, 3) if upstream == "stride 0" else None
    tensors = make(2, 3, 7, device=device)
    hold(f(liger_fn.cross_entropy), f(oracle), tensors, ["logits"], upstream=d)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_are_linear_in_upstream(backend, device, reduction):
    tensors = make_full(5, 7, device=device)
    leaves = ["logits", "token_weight"]
    a, b = torch.randn((2, 5) if reduction == "none" else (2,), dtype=torch.float64)

    def pull(d: Tensor) -> list[Tensor]:
        return run(liger_fn.cross_entropy, tensors, leaves, d, **EVERY, reduction=reduction)[1:]

    first = pull(a)
    want = [2 * s - 3 * t for s, t in zip(first, pull(b), strict=True)]
    torch.testing.assert_close(pull(2 * a - 3 * b), want, rtol=1e-12, atol=1e-12)
    assert all(map(torch.equal, pull(4 * a), [4 * t for t in first]))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_twice_with_different_upstreams_is_right_both_times(backend, device, reduction):
    tensors = make_full(5, 7, device=device)
    leaves = [tensors[k].requires_grad_() for k in ("logits", "token_weight")]
    loss = liger_fn.cross_entropy(**tensors, **EVERY, reduction=reduction)
    for d in torch.randn(2, *loss.shape, device=device, dtype=torch.float64):
        got = torch.autograd.grad(loss, leaves, d, retain_graph=True)
        want = run(
            liger_fn.cross_entropy, tensors, ["logits", "token_weight"], d,
            **EVERY, reduction=reduction,
        )  # fmt: skip
        assert all(map(torch.equal, got, want[1:]))


def test_logits_may_have_other_consumers(backend, device):
    tensors = make(8, 8, device=device)
    logits = tensors["logits"].requires_grad_()
    want = run(liger_fn.cross_entropy, tensors, ["logits"])[1] + 2 * logits.detach()
    for first in (True, False):
        logits.grad = None
        before = (logits**2).sum() if first else 0.0
        loss = liger_fn.cross_entropy(**tensors)
        (loss + (before if first else (logits**2).sum())).backward()
        torch.testing.assert_close(logits.grad, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_arguments_and_upstream_gradients_are_never_written(backend, device, reduction):
    tensors = make_full(5, 7, device=device, dtype=torch.float32)
    d = torch.randn(5 if reduction == "none" else (), device=device)
    given = {**tensors, "upstream": d}
    before = {k: (t.clone(), t._version) for k, t in given.items()}
    leaves = [tensors[k].requires_grad_() for k in ("logits", "token_weight")]
    loss = liger_fn.cross_entropy(**tensors, **EVERY, reduction=reduction)
    grads = torch.autograd.grad(loss, leaves, d)
    for name, (copy, version) in before.items():
        assert torch.equal(given[name], copy), name
        assert given[name]._version == version, name
    owned = {t.untyped_storage().data_ptr() for t in given.values()}
    assert owned.isdisjoint(t.untyped_storage().data_ptr() for t in (loss, *grads))


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Let no code inside wait for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_neither_forward_nor_backward_waits_for_the_gpu(device):
    tensors = make_full(5, 7, device=device)
    leaves = [tensors[k].requires_grad_() for k in ("logits", "token_weight")]
    liger_fn.cross_entropy(**tensors, **EVERY).backward()  # compiles
    with waiting_is_an_error():
        stats = liger_fn.cross_entropy_with_stats(**tensors, **EVERY)
        torch.autograd.grad(stats.loss, leaves)


@on_gpu
@pytest.mark.gpu_memory
def test_more_than_two_to_the_31_logits_are_indexed_right(device):
    m, v = 70_000, 32_768
    last = torch.randn(2, v, device=device)
    logits = torch.zeros(m, v, device=device, dtype=torch.bfloat16)
    logits[-2:] = last
    y = torch.full((m,), 5, device=device)
    loss, g = run(liger_fn.cross_entropy, {"logits": logits, "y": y}, ["logits"], reduction="none")
    want = run(
        liger_fn.cross_entropy, {"logits": logits[-2:], "y": y[-2:]}, ["logits"], reduction="none"
    )
    assert torch.equal(loss[-2:], want[0])
    assert torch.equal(g[-2:], want[1])
    torch.testing.assert_close(loss[:-2].max().item(), math.log(v))


# -- errors ----------------------------------------------------------------------------------------

LOGITS, Y = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reduction": "max"}, ValueError,
     "reduction must be one of 'mean', 'sum', 'none', got 'max'"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing must lie in [0, 1], got 1.5"),
    ({"label_smoothing": -0.1}, ValueError, "label_smoothing must lie in [0, 1], got -0.1"),
    ({"z_loss": -1e-4}, ValueError, "z_loss must be at least 0, got -0.0001"),
    ({"softcap": 0}, ValueError, "softcap must be above 0, got 0"),
    ({"softcap": -30.0}, ValueError, "softcap must be above 0, got -30.0"),
    ({"y": Y.float()}, TypeError, "y must hold integers, got torch.float32"),
    ({"y": Y.bool()}, TypeError, "y must hold integers, got torch.bool"),
    ({"y": [0, 1]}, TypeError, "y must be a tensor, got list"),
    ({"class_weight": torch.ones(5).int()}, TypeError,
     "class_weight must hold float32, bfloat16, float16 or float64, got torch.int32"),
    ({"class_weight": torch.ones(2, 5)}, ValueError,
     "class_weight must have shape (v), got (2, 5)"),
    ({"token_weight": torch.ones(3, 2)}, ValueError,
     "the shape must be the same: (3, 2) in token_weight but (2, 3) in y"),
    ({"token_weight": torch.ones(2, 3).long()}, TypeError,
     "token_weight must hold float32, bfloat16, float16 or float64, got torch.int64"),
    ({"n_valid": 3, "reduction": "sum"}, ValueError,
     "n_valid is for reduction 'mean', got reduction 'sum'"),
    ({"n_valid": 3, "reduction": "none"}, ValueError,
     "n_valid is for reduction 'mean', got reduction 'none'"),
    ({"n_valid": torch.ones(2)}, ValueError, "n_valid must have shape (), got (2,)"),
    ({"n_valid": -1}, ValueError, "n_valid must be at least 0, got -1"),
]  # fmt: skip
CE_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *ERRORS,
    ({"logits": LOGITS.long()}, TypeError,
     "logits must hold float32, bfloat16, float16 or float64, got torch.int64"),
    ({"logits": torch.tensor(1.0)}, ValueError, "logits must have shape (..., v), got ()"),
    ({"y": Y[0]}, ValueError,
     "y must have shape (2, 3), one target for each row of logits, got (3,)"),
    ({"class_weight": torch.ones(4)}, ValueError, "axis v is 4 in class_weight but 5 in logits"),
    ({"y": Y.to("meta")}, ValueError, "y is on meta but logits is on "),
    ({"class_weight": torch.ones(5, device="meta")}, ValueError,
     "class_weight is on meta but logits is on "),
]  # fmt: skip


def named(given: dict[str, Any]) -> str:
    def short(v: Any) -> str:
        if isinstance(v, Tensor):
            return f"{tuple(v.shape)} {str(v.dtype)[6:]} {v.device.type}"
        return str(v)

    return ", ".join(f"{k}={short(v)}" for k, v in given.items())


def assert_raises(
    monkeypatch: pytest.MonkeyPatch, module: str, f: Callable[..., Any], tensors: dict[str, Tensor],
    given: dict[str, Any], kind: type[Exception], message: str, device: torch.device,
) -> None:  # fmt: skip
    """Hold f to this error, raised while its module cannot launch a kernel."""
    monkeypatch.setattr(f"liger_fn.ops.{module}.launch", None)
    arguments = {
        k: t.to(device) if isinstance(t, Tensor) and t.device.type != "meta" else t
        for k, t in {**tensors, **given}.items()
    }
    with pytest.raises(kind, match=re.escape(f"{f.__name__.removesuffix('_with_stats')}")) as error:
        f(**arguments)
    assert re.sub(r"^\w+: ", "", str(error.value)).startswith(message)


@pytest.mark.parametrize(
    "f", [liger_fn.cross_entropy, liger_fn.cross_entropy_with_stats], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    ("given", "kind", "message"), CE_ERRORS, ids=[named(e[0]) for e in CE_ERRORS]
)
def test_errors_name_the_op_the_argument_and_what_came_before_any_launch(
    device, monkeypatch, f, given, kind, message
):
    tensors = {"logits": LOGITS, "y": Y}
    assert_raises(monkeypatch, "cross_entropy", f, tensors, given, kind, message, device)


@pytest.mark.parametrize("name", ["token_weight", "n_valid"])
def test_a_weight_or_count_on_another_device_is_an_error_that_names_it(device, name):
    elsewhere = torch.ones((2, 3) if name == "token_weight" else (), device="meta")
    with pytest.raises(ValueError, match=f"^cross_entropy: {name} is on meta but "):
        liger_fn.cross_entropy(LOGITS.to(device), Y.to(device), **{name: elsewhere})


# -- softcap at saturation ------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [3.0, 50.0])
def test_gradient_of_a_saturated_softcap_keeps_the_error_rule(backend, device, cap):
    g = torch.Generator().manual_seed(0)
    z = (2.5 * cap * (1 + torch.rand(40, 8, generator=g) / 4)).to(device)
    y = torch.randint(8, (40,), generator=g).to(device)

    def plain(z: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(cap * torch.tanh(z / cap), y, reduction="sum")

    def ours(z: Tensor) -> Tensor:
        return liger_fn.cross_entropy(z, y, softcap=cap, reduction="sum")

    def gradient(f: Any, z: Tensor) -> Tensor:
        z = z.detach().requires_grad_()
        return torch.autograd.grad(f(z), z)[0]

    assert_exact_as(gradient(ours, z), gradient(plain, z), gradient(plain, z.double()))
