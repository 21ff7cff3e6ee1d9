"""What tests of adapted models share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_fn.nn.adapters import adapt, restore

ALL = 10  # functions of liger_fn in a step of the Llama: 5 norms, 2 rotations, 2 gates, 1 loss


def on(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Any]:
    return {k: v.to(device) for k, v in batch.items()}


def nodes(loss: Tensor) -> int:
    """How many functions of liger_fn are in the graph of a loss."""
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        f = todo.pop()
        if f is not None and f not in seen:
            seen.add(f)
            todo += [g for g, _ in f.next_functions]
    return sum(type(f).__name__.endswith("ForwardBackward") for f in seen)


def gradients(model: Any, batch: dict[str, Any], call: Any = None) -> tuple[Tensor, list[Tensor]]:
    """Loss of a batch and gradients of all parameters that have one."""
    model.zero_grad(set_to_none=True)
    loss = (model if call is None else call)(**batch).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same_gradients(model: Any, batch: dict[str, Any], **switches: bool | None) -> None:
    """Hold an adapted model to the plain one, which is the state that it is left in."""
    want, wanted = gradients(restore(model), batch)
    got, grads = gradients(adapt(model, **switches), batch)
    restore(model)
    torch.testing.assert_close(got, want)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
