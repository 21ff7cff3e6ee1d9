"""check_adapter: the same loss and the same gradients, on a batch of yours."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_fn.nn.adapters.adapt import AdapterError, adapt, restore


class CheckResult(NamedTuple):
    """How far an adapted model is from the plain one, relative to the size of each."""

    loss_error: float
    grad_error: float
    worst_parameter: str


def check_adapter(
    model: nn.Module, batch: Mapping[str, Any], *, rtol: float = 1e-3, **switches: Any
) -> CheckResult:
    """Compare loss and gradients of a model with and without `adapt`, on copies of it.

    Args:
        model: any model with a loss; it stays as it is. The copies run in training mode, both with
            the same random numbers.
        batch: its keyword arguments, labels included.
        rtol: the largest relative error of the loss, and of each gradient in the 2-norm (of a tiny
            one, relative to a thousandth of the largest).
        switches: as in `adapt`.

    Returns:
        CheckResult(loss_error, grad_error, worst_parameter).

    Raises:
        AdapterError: an error is above rtol or no number, or other parameters got gradients.
    """
    loss, grads = _gradients(restore(copy.deepcopy(model)), batch)
    ours, theirs = _gradients(adapt(copy.deepcopy(model), **switches), batch)
    if grads.keys() != theirs.keys():
        names = sorted(grads.keys() ^ theirs.keys())
        raise AdapterError(f"check_adapter: only one of the two has gradients of {names}")
    # what is 0 but for rounding, as the bias of a key is, has no relative error of its own
    floor = 1e-3 * max((g.double().norm().item() for g in grads.values()), default=0.0)
    loss_error = _error(ours, loss)
    errors = {name: _error(theirs[name], g, floor) for name, g in grads.items()}
    worst = max(errors, key=lambda name: errors[name], default="")
    result = CheckResult(loss_error, errors.get(worst, 0.0), worst)
    if not max(result[:2]) <= rtol:
        raise AdapterError(f"check_adapter: wanted errors of at most {rtol}, got {result}")
    return result


def _gradients(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.train().zero_grad(set_to_none=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = getattr(model(**batch), "loss", None)
        if not isinstance(loss, Tensor):
            raise AdapterError(
                f"check_adapter: {type(model).__name__} gives no loss for this batch: are there "
                "labels in it, and a head?"
            )
        loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def _error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    got, want = got.double(), want.double()
    error = ((got - want).norm() / want.norm().clamp(min=max(floor, 1e-12))).item()
    return error if error == error else float("inf")
