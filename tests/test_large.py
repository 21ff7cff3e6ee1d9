"""Tensors of more than 2**31 elements, all of them in memory, on a GPU that holds such.

No row has a say in another: the last eight, which lie beyond 2**31, come out as they do alone, bit
for bit, and so do their gradients. The upstream gradient of a result is that result.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_fn
from benchmarks.cases import OPS, Draw, Op
from tests.conftest import DEVICE
from tests.table.row import bound
from tests.tolerance import same_bits

TAIL = 8
OF_ROWS = [op for op in OPS if op.bench.limit == "copy" and not op.name.endswith("_with_stats")]
GIB = torch.cuda.mem_get_info()[1] >> 30 if DEVICE.type == "cuda" else 0


def last(t: Tensor, m: int) -> Tensor:
    """The last rows of what has m of them."""
    return t.narrow(t.shape.index(m), m - TAIL, TAIL) if m in t.shape else t


def pulled(f: Callable[..., Any], args: dict[str, Tensor], wanted: list[str]) -> tuple[Tensor, ...]:
    leaves = {k: t.detach().requires_grad_(k in wanted) for k, t in args.items()}
    ys = f(*leaves.values())
    ys = ys if isinstance(ys, tuple) else (ys,)
    live = [y for y in ys if y.requires_grad]
    grads = torch.autograd.grad(live, [leaves[k] for k in wanted], [y.detach() for y in live])
    return *(y.detach() for y in ys), *grads


@pytest.mark.slow
@pytest.mark.skipif(GIB < 120, reason="needs a GPU with 120 GiB")
@pytest.mark.parametrize("op", OF_ROWS, ids=lambda op: op.name)
def test_rows_beyond_2_to_the_31_elements_are_those_of_a_short_tensor(op: Op) -> None:
    sizes = dict(next(iter(op.bench.gpu.values())))

    def draw(m: int) -> dict[str, Tensor]:
        more = {"lead": (m,)} if "lead" in sizes else {"b": m}
        return op.draw(Draw(DEVICE, torch.bfloat16), sizes | more)[0]

    first = op.wanted[0]
    m = 2**31 // draw(1)[first].numel() + 2 * TAIL
    args = draw(m)
    assert args[first].numel() > 2**31 + TAIL * args[first].numel() // m
    wanted = [k for k in op.wanted if m in args[k].shape]
    per_row = "reduction" in inspect.signature(getattr(liger_fn, op.name)).parameters
    f = bound(op.bench.fn or op.row.fn, **({"reduction": "none"} if per_row else {}))
    short = pulled(f, {k: last(t, m).contiguous() for k, t in args.items()}, wanted)
    for long, alone in zip(pulled(f, args, wanted), short, strict=True):
        assert same_bits(last(long, m), alone)
