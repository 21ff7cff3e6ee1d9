"""A gated layer lets the pullback of its gate write over a cotangent that nobody else sees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_fn import nn, swiglu, using
from liger_fn._vjp import donate
from tests.memory import held
from tests.tolerance import same_bits

M, D, INNER = 6, 4, 8
BETWEEN = 256 * 512 * 4  # bytes of a float32 tensor between the projections, in the last test


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with using("triton"):
        yield


@pytest.fixture(params=[nn.SwiGLUMLP, nn.GEGLUMLP])
def mlp(request: Any, device: torch.device) -> nn.SwiGLUMLP:
    return request.param(D, INNER, bias=True, device=device)


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(M, D, device=device, requires_grad=True)


def gate_of(y: Tensor) -> Any:
    """The node of the gate in the graph of a layer."""
    return next(f for f, _ in y.grad_fn.next_functions if "ForwardBackward" in type(f).__name__)


def written_over(y: Tensor) -> bool:
    """Whether backward from y puts the gradient of the gate where the cotangent was."""
    given, made, gate = [], [], gate_of(y)
    gate.register_prehook(lambda ct: given.append(ct[0].data_ptr()))
    gate.register_hook(lambda grads, _: made.extend(d.data_ptr() for d in grads))
    y.sum().backward()
    assert len(made) == 2
    return given[0] == made[0]


def gradients(f: Callable[[Tensor], Tensor], x: Tensor, mlp: torch.nn.Module) -> list[Tensor]:
    y = f(x)
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    return list(torch.autograd.grad(y, [x, *mlp.parameters()], dy))


def guarded(mlp: nn.SwiGLUMLP) -> nn.SwiGLUMLP:
    """A copy whose down projection shows its inputs to a hook."""
    kept = copy.deepcopy(mlp)
    kept.down_proj.register_forward_pre_hook(lambda *_: None)
    return kept


def test_the_gradient_of_the_gate_lies_where_the_cotangent_was(mlp, x):
    assert written_over(mlp(x))
    assert not written_over(guarded(mlp)(x))


def test_gradients_are_those_without_it(mlp, x):
    def again(x: Tensor) -> Tensor:
        return checkpoint(mlp, x, use_reentrant=False)

    other = guarded(mlp)
    want = gradients(other, x, other)
    for found in (gradients(mlp, x, mlp), gradients(again, x, mlp)):
        for got, w in zip(found, want, strict=True):
            assert same_bits(got, w)


def test_a_second_pass_over_the_graph_is_the_first(mlp, x):
    y = mlp(x)
    passes = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2)]
    assert same_bits(*passes)


def test_second_derivatives_are_those_of_the_formula(mlp, x):
    def of_gradient(module: torch.nn.Module) -> list[Tensor]:
        (d,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(d.square().sum(), [x, *module.parameters()]))

    got = of_gradient(mlp)
    with using("reference"):
        want = of_gradient(guarded(mlp))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_transforms_go_through(mlp, x):
    def loss(x: Tensor) -> Tensor:
        return mlp(x).square().sum()

    want = torch.autograd.grad(loss(x), x)[0]
    torch.testing.assert_close(torch.func.grad(loss)(x), want)
    each = torch.vmap(torch.func.grad(loss))(x.detach()[:, None])[:, 0]
    torch.testing.assert_close(each, want)
    t = torch.randn_like(x)
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (t,))[1], (want * t).sum())


@pytest.mark.parametrize(
    "watch",
    [
        lambda down, see: down.register_full_backward_hook(lambda _, given, __: see(given[0])),
        lambda down, see: down.register_forward_pre_hook(
            lambda _, h: h[0].register_hook(see) and None
        ),
        lambda down, see: torch.nn.modules.module.register_module_full_backward_hook(
            lambda m, given, _: see(given[0]) if m is down else None
        ),
    ],
    ids=["backward hook", "hook of the tensor", "hook of all modules"],
)
def test_a_cotangent_that_a_hook_keeps_stays_as_it_was(mlp, x, watch):
    seen = []

    def see(d: Tensor) -> None:
        seen.append((d, d.clone()))

    hook = watch(mlp.down_proj, see)
    try:
        mlp(x).sum().backward()
    finally:
        hook.remove()
    assert seen
    assert all(same_bits(d, before) for d, before in seen)


class Twice(torch.nn.Linear):
    """A projection that uses its input twice, as LoRA does."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) + h[..., :1]


def test_any_other_projection_keeps_the_cotangent(mlp, x, monkeypatch):
    asked = []
    monkeypatch.setattr("liger_fn.nn.gates.donate", asked.append)
    mlp(x)
    assert len(asked) == 1
    monkeypatch.setattr(mlp.down_proj, "forward", lambda h: h[..., :D])
    mlp(x)
    mlp.down_proj = Twice(INNER, D, device=x.device)
    mlp(x)
    assert len(asked) == 1


def test_a_cotangent_of_another_dtype_or_layout_is_not_written_over(device):
    gate = torch.randn(M, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    up = torch.randn(M, D, device=device, requires_grad=True)
    y = swiglu(gate, up)
    donate(y)
    dy = torch.randn(M, D, device=device)
    before = dy.clone()
    torch.autograd.grad(y, [gate, up], dy)
    assert same_bits(dy, before)
    same = swiglu(up, up.detach())
    donate(same)
    across = torch.randn(D, M, device=device).T
    before = across.clone()
    torch.autograd.grad(same, up, across)
    assert same_bits(across, before)


def test_what_has_no_graph_is_left_alone(device):
    y = swiglu(torch.ones(2, device=device), torch.ones(2, device=device))
    donate(y)
    leaf = torch.ones(2, device=device, requires_grad=True)
    donate(leaf * 1)
    assert y.grad_fn is None


def test_backward_holds_one_tensor_less(device, tmp_path, monkeypatch):
    # what the interpreter runs is freed later; nobody reads what the kernels would write
    monkeypatch.setattr("liger_fn.ops._gated.launch", lambda *_, **__: None)
    mlp = nn.SwiGLUMLP(4, 512, device=device)
    x = torch.randn(256, 4, device=device, requires_grad=True)

    def peak(mlp: torch.nn.Module) -> float:
        return held(lambda: gradients(mlp, x, mlp), device, tmp_path) / BETWEEN

    assert peak(guarded(mlp)) > 4.9
    assert peak(mlp) < 4.2
