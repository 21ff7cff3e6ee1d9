"""Plain torch in another order of summation, and in float64 throughout."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@functools.cache
def drawn(seed: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """An order of n things, and its inverse."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(device)
    return order, order.argsort()


class Reordered(TorchFunctionMode):
    """Plain torch that adds up the same terms in an order that is drawn, forward and backward."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, (x, *rest) = kwargs or {}, args or (None,)
        dim = kwargs.get("dim", rest[0] if rest else None) if func in OVER_LAST else None
        if func not in PRODUCTS and func not in ROWWISE and not (type(dim) is int and dim == -1):
            return func(*args, **kwargs)
        order, back = drawn(self.seed, x.shape[-1], x.device)
        x = x.index_select(-1, order)
        if func in PRODUCTS:
            rest[0] = rest[0].index_select(PRODUCTS[func], order)
        elif func is F.cross_entropy:
            rest[0] = torch.where(rest[0] < 0, rest[0], back[rest[0].clamp(min=0)])
        elif func is F.layer_norm:
            kwargs |= {k: kwargs[k].index_select(0, order) for k in ("weight", "bias")}
        y = func(x, *rest, **kwargs)
        return y.index_select(-1, back) if func in (F.softmax, F.layer_norm) else y


# by the axis of the second operand that is summed over
PRODUCTS = {F.linear: -1, torch.matmul: -2, Tensor.matmul: -2, Tensor.__matmul__: -2,
            torch.bmm: -2, torch._grouped_mm: -2}  # fmt: skip
OVER_LAST = (Tensor.mean, F.softmax)
ROWWISE = (F.cross_entropy, F.layer_norm)


class Doubled(TorchFunctionMode):
    """What a model casts to float32 on its way stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def swap(a: Any) -> Any:
            return torch.float64 if a is torch.float32 else a

        if func is Tensor.float:
            return args[0].double()
        return func(*map(swap, args), **{k: swap(a) for k, a in (kwargs or {}).items()})
