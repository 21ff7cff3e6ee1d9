"""A layer that knows nothing of other tokens, a few tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from liger_fn._vjp import transformed


def tiled(f: Callable[[Tensor], Tensor], x: Tensor, chunk: int | None, owner: nn.Module) -> Tensor:
    """f(x) for x (..., t, d), of at most `chunk` tokens at a time, at least one of each row.

    What f holds for its backward is formed again there, tile by tile, so that no more of it exists
    than that of one tile. All at once where that is one tile, and under torch.func, whose
    transforms do not go with a checkpoint, all is held. f is the forward pass of its owner on a
    tile.
    """
    if chunk is None or x.dim() < 2:
        return f(x)
    step = max(1, chunk // max(1, math.prod(x.shape[:-2])))
    if x.shape[-2] <= step:
        return f(x)
    if torch.is_grad_enabled() and not transformed():
        # what is compiled has its parameters as arguments
        again = f if torch.compiler.is_compiling() else _by_its_parameters(f, owner)
        f = partial(checkpoint, again, use_reentrant=False)
    return torch.cat([f(t) for t in x.split(step, -2)], -2)


def _by_its_parameters(
    f: Callable[[Tensor], Tensor], owner: nn.Module
) -> Callable[[Tensor], Tensor]:
    """f with the parameters of now, also in backward, when `functional_call` has taken its back."""
    was: dict[str, Tensor] = dict(owner.named_parameters())
    versions = [p._version for p in was.values()]

    def again(x: Tensor) -> Tensor:
        if versions != [p._version for p in was.values()]:
            raise RuntimeError(
                f"{type(owner).__name__}: a parameter was modified in place between forward and "
                "backward, which forms the activations of its tiles again"
            )
        same = all(now is then for now, then in zip(owner.parameters(), was.values(), strict=True))
        return f(x) if same else functional_call(owner, was, (x,))

    return again
