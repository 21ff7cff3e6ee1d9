"""fused_linear_logp: log-probabilities and what else one pass over the logits tells of a token."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import liger_fn
from liger_fn import fused_linear_logp, fused_linear_logp_with_stats
from tests.table.heads import logp_oracle
from tests.tolerance import assert_pure_and_close, assert_pure_and_exact, results, same_bits

OPTIONS = [
    {},
    {"temperature": 0.6},
    {"softcap": 4.0, "logit_scale": 0.5, "temperature": 1.3},
    {"chunk": 40},
]
some_options = pytest.mark.parametrize("how", OPTIONS, ids=str)


def drawn(
    m: int, d: int, v: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    w, x, b = torch.randn(v, d), torch.randn(m, d), torch.randn(v)
    w, x, b = (t.to(device, dtype) for t in (2 * w / math.sqrt(d), x, b))
    return w, x, b, torch.randint(v, (m,), device=device)


def ours(y: Tensor, **how: Any) -> Any:
    return lambda w, x, b: tuple(fused_linear_logp_with_stats(w, x, y, b=b, **how)[:4])


def exact(y: Tensor, chunk: int = 0, **how: Any) -> Any:
    return lambda w, x, b: logp_oracle(w, x, y, b, **how)


def plain(y: Tensor, chunk: int = 0, **how: Any) -> Any:
    """Plain torch with logits in float32, as trainers hold them."""

    def f(w: Tensor, x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        z = F.linear(x, w, b).float()
        return logp_oracle(torch.eye(z.shape[-1], device=z.device), z, y, **how)

    return f


# -- numbers by hand


def test_uniform_logits(backend, device):
    w, x = torch.zeros(4, 3, device=device), torch.ones(2, 3, device=device)
    b = torch.full((4,), 2.0, device=device)
    found = fused_linear_logp_with_stats(w, x, torch.tensor([0, 3], device=device), b=b)
    log4 = torch.full((2,), math.log(4), device=device)
    for got, want in zip(found[:4], (-log4, log4, -log4, 0 * log4 + 2), strict=True):
        torch.testing.assert_close(got, want)
    assert found.is_top1.tolist() == [True, False]  # the first of equals


def test_two_columns(backend, device):
    # logits log 3 and 0: p = 3/4, 1/4
    w = torch.tensor([[math.log(3)], [0.0]], dtype=torch.float64, device=device)
    x, y = torch.ones(1, 1, dtype=torch.float64, device=device), torch.tensor([1], device=device)
    found = fused_linear_logp_with_stats(w, x, y)
    entropy = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    wanted = [math.log(0.25), entropy, math.log(10 / 16), math.log(3) / 2]
    assert [t.item() for t in found[:4]] == pytest.approx(wanted, rel=1e-14)
    assert not found.is_top1.item()
    _, (dw,) = results(lambda w: fused_linear_logp(w, x, y), (w,), (torch.ones_like(x[0]),))
    assert dw.flatten().tolist() == pytest.approx([-0.75, 0.75])


def test_temperature_divides_the_capped_logits(backend, device):
    w, x, b, y = drawn(3, 4, 6, device)
    z = 2.0 * torch.tanh(0.5 * (x @ w.T + b) / 2.0) / 0.7
    got = fused_linear_logp(w, x, y, b=b, softcap=2.0, logit_scale=0.5, temperature=0.7)
    torch.testing.assert_close(got, z.log_softmax(-1).gather(1, y[:, None])[:, 0])


# -- as exact as plain torch


@some_options
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, dtype, how):
    # many rows: the largest error of a few is luck
    w, x, b, y = drawn(96, 16, 33, device, dtype)
    assert_pure_and_exact(ours(y, **how), plain(y, **how), exact(y, **how), w, x, b)


@some_options
@pytest.mark.parametrize("v", [1, 2, 7, 8, 9, 129])
def test_any_number_of_columns(backend, device, v, how):
    w, x, b, y = drawn(5, 3, v, device)
    assert_pure_and_close(ours(y, **how), exact(y, **how), w, x, b)


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 2)])
def test_any_number_of_leading_axes(backend, device, lead):
    w, x, b, y = drawn(math.prod(lead), 3, 5, device)
    x, y = x.reshape(*lead, 3), y.reshape(lead)
    found = fused_linear_logp_with_stats(w, x, y, b=b)
    assert all(t.shape == lead for t in found)
    torch.testing.assert_close(tuple(found[:4]), logp_oracle(w, x, y, b))


def test_no_rows(backend, device):
    w, x, b, y = drawn(0, 3, 5, device)
    (logp,), grads = results(lambda *t: fused_linear_logp(t[0], t[1], y, b=t[2]), (w, x, b))
    assert logp.shape == (0,)
    assert not any(g.any() for g in grads)


def test_equals_the_loss_per_row_of_cross_entropy(backend, device):
    w, x, b, y = drawn(6, 4, 9, device, torch.float32)
    nll = liger_fn.fused_linear_ce(w, x, y, b=b, reduction="none")
    torch.testing.assert_close(fused_linear_logp(w, x, y, b=b), -nll, rtol=1e-6, atol=1e-6)


def test_logp_alone_is_that_of_the_stats(backend, device):
    w, x, b, y = drawn(6, 4, 9, device, torch.float32)
    alone, found = fused_linear_logp(w, x, y, b=b), fused_linear_logp_with_stats(w, x, y, b=b)
    assert same_bits(alone, found.logp)
    assert found.is_top1.tolist() == ((x @ w.T + b).argmax(-1) == y).tolist()


# -- far numbers


def test_logp_is_never_above_zero(backend, device):
    w = torch.tensor([[1e4], [0.0], [1e4]], device=device)
    x, y = torch.tensor([[1.0], [-1.0], [0.0]], device=device), torch.tensor([0, 1, 2])
    found = fused_linear_logp_with_stats(w, x, y.to(device))
    assert (found.logp <= 0).all()
    assert found.logp.tolist() == pytest.approx([-math.log(2), 0.0, -math.log(3)])
    assert found.entropy.tolist() == pytest.approx([math.log(2), 0.0, math.log(3)])


def test_a_common_offset_keeps_the_digits(backend, device):
    w, x, b, y = drawn(4, 3, 7, device, torch.float32)
    b = (b * 2**8).round() * 2**-8  # keeps all digits beside 3e4
    zero = torch.zeros_like(x)
    got = fused_linear_logp_with_stats(w, zero, y, b=b + 3e4)
    want = fused_linear_logp_with_stats(w, zero, y, b=b)
    for p, q in zip((got.logp, got.entropy, got.log_sum_sq), (*want[:3],), strict=True):
        assert same_bits(p, q)


def test_columns_without_probability(backend, device):
    w, x, b, y = drawn(3, 4, 6, device)
    dead = b.clone()
    dead[4:] = -torch.inf
    y = y % 4
    got, grads = results(lambda w, x: fused_linear_logp_with_stats(w, x, y, b=dead)[:3], (w, x))
    want, exact_grads = results(lambda w, x: logp_oracle(w[:4], x, y, b[:4])[:3], (w, x))
    torch.testing.assert_close((*got, *grads), (*want, *exact_grads))


# -- rows that do not count


@pytest.mark.parametrize("held", [math.nan, math.inf, 1e300])
def test_ignored_rows_may_hold_anything(backend, device, held):
    w, x, b, y = drawn(4, 3, 5, device)
    y[1] = -100
    bad = x.clone()
    bad[1] = held
    f = ours(y)
    ys, (dw, dx, db) = results(f, (w, bad, b))
    want, (dw2, dx2, db2) = results(f, (w, x, b))
    assert all(
        same_bits(*pair) for pair in zip((*ys, dw, dx, db), (*want, dw2, dx2, db2), strict=True)
    )
    assert all(t[1] == 0 for t in ys)
    assert not dx[1].any()


@pytest.mark.parametrize("label", [5, -1, 10**6])
def test_a_label_out_of_range_makes_its_row_nan(backend, device, label):
    w, x, b, y = drawn(3, 3, 5, device)
    y[1] = label
    ys, (_, dx, _) = results(ours(y), (w, x, b))
    for t in (*ys, dx):
        assert t[1].isnan().all()
        assert t[[0, 2]].isfinite().all()
    assert not fused_linear_logp_with_stats(w, x, y, b=b).is_top1[1]


# -- what is paid for


@pytest.mark.parametrize(
    ("wanted", "chunk", "products"),
    [("wx", None, 2), ("wx", 16, 2), ("wx", 2, 3), ("w", None, 1), ("w", 2, 2), ("x", None, 2),
     ("", None, 0)],
)  # fmt: skip
def test_frozen_tensors_cost_no_product(backend, device, wanted, chunk, products):
    w, x, _, y = drawn(4, 3, 5, device)
    w, x = w.requires_grad_("w" in wanted), x.requires_grad_("x" in wanted)
    with FlopCounterMode(display=False) as counter:
        logp = fused_linear_logp(w, x, y, chunk=chunk)
        forward = counter.get_total_flops()
        if wanted:
            logp.sum().backward()
    assert forward == 2 * 4 * 3 * 5
    assert counter.get_total_flops() == (1 + products) * forward


@pytest.mark.parametrize(("chunk", "held"), [(None, 1), (6, 1), (5, 0)])
@pytest.mark.parametrize("wanted", ["wx", "x", ""])
def test_logits_of_a_single_step_are_held_for_a_gradient_of_w_alone(
    backend, device, chunk, held, wanted
):
    w, x, _, y = drawn(6, 3, 300, device)
    w, x = w.requires_grad_("w" in wanted), x.requires_grad_("x" in wanted)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        fused_linear_logp(w, x, y, chunk=chunk)
    assert kept.count(torch.Size([6 * 300])) == held * ("w" in wanted)


def test_backward_takes_the_logits_that_are_held(backend, device, monkeypatch):
    w, x, _, y = drawn(6, 3, 300, device)
    logp = fused_linear_logp(w.requires_grad_(), x, y)
    # the loop that would form them again
    monkeypatch.delattr(sys.modules["liger_fn.ops.fused_linear_logp"], "logp_loop")
    logp.sum().backward()
    assert w.grad is not None


def test_values_are_those_without_gradients(backend, device):
    # whose logits are in chunks, of as many tokens
    w, x, _, y = drawn(5, 3, 300, device, torch.float32)
    for chunk in (None, 2, 5):
        want = fused_linear_logp_with_stats(w, x, y, chunk=chunk)
        got = fused_linear_logp_with_stats(w.clone().requires_grad_(), x, y, chunk=chunk)
        assert all(same_bits(*pair) for pair in zip(got, want, strict=True))


# -- errors


def test_errors():
    w, x, y = torch.ones(5, 3), torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"softcap": -1.0}, "softcap must be above 0, got -1.0"),
        ({"chunk": 0}, "chunk must be an integer above 0, got 0"),
        ({"b": torch.ones(4)}, "axis v is 4 in b but 5 in w"),
    ]
    for name in ("fused_linear_logp", "fused_linear_logp_with_stats"):
        f = getattr(liger_fn, name)
        for how, message in cases:
            with pytest.raises(ValueError, match="^" + re.escape(f"{name}: {message}") + "$"):
                f(w, x, y, **how)
        with pytest.raises(ValueError, match=rf"^{name}: axis v must not be empty$"):
            f(w[:0], x, y)
        with pytest.raises(ValueError, match=rf"^{name}: y must have shape \(2,\), one target"):
            f(w, x, y[:1])
