"""Which transforms are at work around a call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_legacy_batchedtensor,
)
from torch.autograd.graph import saved_tensors_hooks

_DIFFERENTIATES = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)


def plain() -> bool:
    """Whether the call must run as plain torch: in forward mode, or under a compiled transform."""
    if torch.compiler.is_compiling():
        return torch._C._are_functorch_transforms_active()
    if forward_ad._current_level >= 0:
        return True
    stack = get_interpreter_stack()
    return stack is not None and any(level.key() == TransformType.Jvp for level in stack)


def transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    return torch._C._are_functorch_transforms_active()


def tracked(t: Tensor | None = None) -> bool:
    """Whether someone may differentiate or map the running code: it must not reuse buffers.

    Of t: whether through t, beside the rules of an op.
    """
    graph = torch.is_grad_enabled() and (t is None or t.requires_grad)
    return graph or torch._C._are_functorch_transforms_active() or plain()


def derivative(f: Callable[..., Tensor], x: Tensor, *args: Tensor | None) -> Tensor:
    """df / dx of a scalar f(x, *args) in plain torch, wherever a rule runs.

    Inside a registered op the dispatcher leaves out what differentiates: it is let in again.
    """
    left_out = torch._C._dispatch_tls_local_exclude_set()
    inside = left_out.has(torch._C.DispatchKey.ADInplaceOrView)
    if not inside and torch._C._are_functorch_transforms_active():
        return torch.func.grad(f)(x, *args)
    if not inside and torch.is_grad_enabled():  # someone may differentiate the derivative
        at = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(f(at, *args), at, create_graph=True)[0]
    with (
        torch._C._ForceDispatchKeyGuard(
            torch._C._dispatch_tls_local_include_set(), left_out - _DIFFERENTIATES
        ),
        _no_hooks(),
        torch.enable_grad(),
    ):
        at = x.detach().requires_grad_()
        return torch.autograd.grad(f(at, *args), at)[0]


def _no_hooks() -> AbstractContextManager[None]:
    """What is saved here is not for the checkpoint around; under torch.func there is none."""
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]  # no stub
    return saved_tensors_hooks(lambda t: t, lambda t: t) if enabled else nullcontext()


def legacy_vmap(pull: Callable, ct: tuple) -> tuple[Tensor, ...] | None:
    """Pull back cotangents that carry an axis of the old vmap by way of the new one.

    `torch.autograd.grad(is_grads_batched=True)` makes them: its vmap knows no rules. None where
    they carry two axes. The level of the axis is found by trying: the thread that runs
    backward on a GPU does not know it, and removing an absent level leaves the tensor batched.
    """
    live = [d for d in ct if d is not None]
    on = [is_legacy_batchedtensor(d) for d in live]
    for level in range(1, 64):
        bare = [
            torch._remove_batch_dim(d, level, 0, 0) if b else d
            for d, b in zip(live, on, strict=True)
        ]
        if not any(map(is_legacy_batchedtensor, bare)):
            break
    else:
        return None

    def of_live(*some: Tensor) -> tuple[Tensor, ...]:
        left = iter(some)
        return tuple(pull(*(None if d is None else next(left) for d in ct)))

    out = torch.vmap(of_live, tuple(0 if b else None for b in on))(*bare)
    return tuple(torch._add_batch_dim(g, 0, level) for g in out)
