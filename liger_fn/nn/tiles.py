"""A layer that knows nothing of other tokens, a few tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_fn._vjp import transformed


def tiled(f: Callable[[Tensor], Tensor], x: Tensor, chunk: int | None) -> Tensor:
    """f(x) for x (..., t, d), of at most `chunk` tokens at a time, at least one of each row.

    What f holds for its backward is formed again there, tile by tile, so that no more of it exists
    than that of one tile. All at once where that is one tile, and under torch.func, whose
    transforms do not go with a checkpoint, all is held.
    """
    if chunk is None or x.dim() < 2:
        return f(x)
    step = max(1, chunk // max(1, math.prod(x.shape[:-2])))
    if x.shape[-2] <= step:
        return f(x)
    tile = f if transformed() else partial(checkpoint, f, use_reentrant=False)
    return torch.cat([tile(t) for t in x.split(step, -2)], -2)
