"""What is promised on several processes, one test each, on 2 ranks and on 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import liger_fn
from tests.ranks import device, on_ranks


def line(name: str = "tp") -> Any:
    """All ranks in a row."""
    return init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=(name,))


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers on each rank."""
    return torch.randn(*shape, dtype=dtype).to(device())


def both_backends(check: Callable[[], None]) -> None:
    for backend in ("reference", "triton"):
        with liger_fn.using(backend):  # type: ignore[arg-type]  # one of the two
            check()


def close(got: Tensor, want: Tensor, **tolerance: float) -> None:
    if isinstance(got, DTensor):
        got = got.full_tensor()
    torch.testing.assert_close(got, want, **({"rtol": 1e-9, "atol": 1e-12} | tolerance))


def same(
    f: Callable[..., Any], whole: list[Tensor], placed: list[Any], grads: dict[int, Any],
    out: list[Any],
) -> None:  # fmt: skip
    """f of sharded tensors is f of whole ones, in values, gradients and their placements."""
    mesh = line()
    a = [t.clone().requires_grad_(t.is_floating_point()) for t in whole]
    d = [
        distribute_tensor(t, mesh, [p]).requires_grad_(t.is_floating_point())
        for t, p in zip(whole, placed, strict=True)
    ]
    want, got = f(*a), f(*d)
    want, got = ((t,) if isinstance(t, Tensor) else t for t in (want, got))
    ct = [torch.randn_like(t) for t in want]
    for g, w, p in zip(got, want, out, strict=True):
        assert list(g.placements) == [p], (g.placements, p)
        close(g, w.detach())
    torch.autograd.backward(want, ct)
    torch.autograd.backward(
        got, [distribute_tensor(c, mesh, g.placements) for c, g in zip(ct, got, strict=True)]
    )
    for i, p in grads.items():
        assert list(d[i].grad.placements) == [p], (i, d[i].grad.placements, p)
        close(d[i].grad, a[i].grad)


# -- DTensors --------------------------------------------------------------------------------------


@on_ranks
def test_norms_of_batch_or_sequence_shards_stay_local_and_sum_the_gradient_of_w_once():
    def check() -> None:
        for axis in (0, 1):
            x, w, b = draw(4, 6, 5), draw(5), draw(5)
            s, r = Shard(axis), Replicate()
            same(liger_fn.rms_norm, [x, w], [s, r], {0: s, 1: r}, [s])
            same(liger_fn.layer_norm, [x, w, b], [s, r, r], {0: s, 1: r, 2: r}, [s])
            same(liger_fn.add_rms_norm, [x, x + 1, w], [s, s, r], {0: s, 1: s, 2: r}, [s, s])

    both_backends(check)
    mesh = line()
    x = distribute_tensor(draw(4, 8, 5), mesh, [Shard(1)]).requires_grad_()
    w = distribute_tensor(draw(5), mesh, [Replicate()]).requires_grad_()
    with CommDebugMode() as comms:
        y = liger_fn.rms_norm(x, w)
    assert comms.get_total_counts() == 0
    with CommDebugMode() as comms:
        y.backward(torch.ones_like(y))
    assert dict(comms.get_comm_counts()) == {torch.ops.c10d_functional.all_reduce: 1}
