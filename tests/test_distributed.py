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


def placed(t: Tensor, p: Any) -> Tensor:
    d = distribute_tensor(t, line(), [p])
    return d.requires_grad_() if t.is_floating_point() else d


def listed(t: Any) -> list[Any]:
    return [t] if isinstance(t, Tensor) else [*t]


def same(
    f: Callable[..., Any], whole: list[Tensor], places: list[Any], grads: dict[int, Any],
    out: list[Any] | None = None,
) -> None:  # fmt: skip
    """f of sharded tensors is f of whole ones, in values, gradients and their placements."""
    a = [t.clone().requires_grad_(t.is_floating_point()) for t in whole]
    d = [placed(t, p) for t, p in zip(whole, places, strict=True)]
    want, got = (listed(f(*c)) for c in (a, d))
    ct = [torch.randn_like(t) for t in want]
    for g, w in zip(got, want, strict=True):
        close(g, w.detach())
    assert out is None or [g.placements[0] for g in got] == out
    torch.autograd.backward(want, ct)
    torch.autograd.backward(got, [placed(c, Replicate()) for c in ct])
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


@on_ranks
def test_gates_softmaxes_and_divergences_stay_where_they_are():
    def check() -> None:
        gate, up = draw(4, 8), draw(4, 8)
        for axis in (0, 1):  # also within rows, as behind a column-parallel Linear
            s = Shard(axis)
            same(liger_fn.swiglu, [gate, up], [s, s], {0: s, 1: s}, [s])
            same(liger_fn.geglu, [gate, up], [s, Replicate()], {0: s, 1: Replicate()}, [s])
            same(liger_fn.relu2, [gate], [s], {0: s}, [s])
        rows = Shard(0)
        same(liger_fn.swiglu_packed, [gate], [rows], {0: rows}, [rows])
        same(liger_fn.softmax, [gate], [rows], {0: rows}, [rows])
        same(liger_fn.sparsemax, [gate], [rows], {0: rows}, [rows])
        dyt = [gate, draw(1), draw(8), draw(8)]
        r = Replicate()
        same(liger_fn.dyt, dyt, [rows, r, r, r], {0: rows, 1: r, 2: r, 3: r}, [rows])
        s = Shard(1)
        same(liger_fn.dyt, dyt, [s, r, Shard(0), Shard(0)], {0: s, 1: r, 2: Shard(0)}, [s])

    both_backends(check)


@on_ranks
def test_rope_turns_heads_batches_and_stretches_of_time_where_they_are():
    def check() -> None:
        q, k, angle = draw(4, 4, 8, 6), draw(4, 4, 8, 6), draw(8, 4)
        cos, sin, r = angle.cos(), angle.sin(), Replicate()
        for axis, table in ((0, r), (1, r), (2, Shard(0))):
            s = Shard(axis)
            grads = {0: s, 1: s, 2: table, 3: table}
            same(liger_fn.rope, [q, k, cos, sin], [s, s, table, table], grads, [s, s])
        s, own = Shard(0), draw(4, 8, 4)
        same(liger_fn.rope, [q, k, own.cos(), own.sin()], [s, s, s, s], {0: s, 2: s}, [s, s])
        ones = [c[None] for c in (cos, sin)]
        same(liger_fn.rope, [q, k, *ones], [s, s, r, r], {0: s, 2: r}, [s, s])

    both_backends(check)


@on_ranks
def test_cross_entropy_of_shards_is_the_mean_over_all_of_them():
    def check() -> None:
        z, y, weight = draw(4, 6, 7), torch.arange(24, device=device()).view(4, 6) % 7, draw(7).abs()
        y = torch.where(torch.arange(4, device=device())[:, None] < 2, -100, y)  # of some, nothing
        for axis in (0, 1):
            s = Shard(axis)
            for reduction in ("none", "sum", "mean"):

                def loss(z: Tensor, y: Tensor, w: Tensor, reduction: str = reduction) -> Tensor:
                    return liger_fn.cross_entropy(
                        z, y, reduction=reduction, class_weight=w.detach(), label_smoothing=0.1
                    )

                same(loss, [z, y, weight], [s, s, Replicate()], {0: s})

    both_backends(check)


@on_ranks
def test_what_is_replicated_stays_replicated_and_what_is_pending_is_summed_first():
    r = Replicate()
    same(liger_fn.rms_norm, [draw(4, 5), draw(5)], [r, r], {0: r, 1: r}, [r])
    whole, w = draw(4, 5), placed(draw(5), r)
    share = whole if dist.get_rank() == 0 else torch.zeros_like(whole)
    x = DTensor.from_local(share, line(), [Partial()]).requires_grad_()
    y = liger_fn.rms_norm(x, w)
    assert y.placements == (r,)
    close(y.detach(), liger_fn.rms_norm(whole, w.to_local()).detach())
    y.sum().backward()
    assert x.grad.placements == (r,)


@on_ranks
def test_what_cannot_be_local_is_refused_with_the_cure():
    x, w, mesh = draw(4, 8), placed(draw(8), Replicate()), line()
    rows, columns = placed(x, Shard(0)), placed(x, Shard(1))
    with pytest.raises(ValueError, match=r"rms_norm: x is S.* of axis n on the mesh.*redistribute"):
        liger_fn.rms_norm(columns, w)
    with pytest.raises(ValueError, match="layer_norm: w is .* the module that owns it"):
        liger_fn.layer_norm(rows, placed(draw(8), Shard(0)), None)
    with pytest.raises(ValueError, match=r"swiglu: one dimension .* axis 1 of up but axis 0 of gate"):
        liger_fn.swiglu(columns, rows)
    with pytest.raises(TypeError, match=r"rms_norm: x is a DTensor but w is a plain tensor: .*Replicate"):
        liger_fn.rms_norm(rows, w.to_local())
    with pytest.raises(TypeError, match="rms_norm: w is a DTensor but x is a plain tensor"):
        liger_fn.rms_norm(x, w)
    other = init_device_mesh(device().type, (1, dist.get_world_size()))
    with pytest.raises(ValueError, match="rms_norm: w is on .* but x is on"):
        liger_fn.rms_norm(rows, distribute_tensor(draw(8), other, [Replicate(), Replicate()]))
    y = placed(torch.zeros(4, dtype=torch.int64, device=device()), Shard(0))
    with pytest.raises(NotImplementedError, match="fused_linear_ce: .*nn.VocabParallelHead"):
        liger_fn.fused_linear_ce(placed(draw(6, 8), Replicate()), rows, y)
    assert mesh.ndim == 1


@on_ranks
def test_shards_of_unequal_size_and_none_are_served():
    for m in (5, 1):
        s = Shard(0)
        same(liger_fn.rms_norm, [draw(m, 3), draw(3)], [s, Replicate()], {0: s}, [s])
        same(liger_fn.swiglu, [draw(m, 3), draw(m, 3)], [s, s], {0: s, 1: s}, [s])


@on_ranks
def test_a_mesh_of_two_dimensions_cuts_two_axes():
    mesh = init_device_mesh(device().type, (2, dist.get_world_size() // 2))
    x, w = draw(4, 4, 6), draw(6)
    a = [t.clone().requires_grad_() for t in (x, w)]
    d = [
        distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_(),
        distribute_tensor(w, mesh, [Replicate(), Replicate()]).requires_grad_(),
    ]
    for t in (a, d):
        liger_fn.rms_norm(*t).square().sum().backward()
    for got, want in zip(d, a, strict=True):
        assert got.grad.placements == got.placements
        close(got.grad, want.grad)


@on_ranks
def test_compiled_functions_follow_the_same_rules():
    def f(x: Tensor, w: Tensor) -> Tensor:
        return liger_fn.swiglu(liger_fn.rms_norm(x, w), x)

    for backend in ("reference", "triton"):
        with liger_fn.using(backend):
            compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
            same(compiled, [draw(4, 8), draw(8)], [Shard(0), Replicate()], {0: Shard(0)})
