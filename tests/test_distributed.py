"""What is promised on several processes, one test each, on 2 ranks and on 4."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import liger_fn
from liger_fn.nn import (
    DPOLoss,
    FusedLinearCrossEntropyLoss,
    GRPOLoss,
    JSDLoss,
    LMHead,
    ORPOLoss,
    RMSNorm,
    VocabParallelHead,
)
from liger_fn.ops import _chunked
from tests.ranks import device, on_ranks


def line(name: str = "tp") -> Any:
    """All ranks in a row."""
    return init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=(name,))


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers on each rank."""
    return torch.randn(*shape, dtype=dtype).to(device())


def both_backends(check: Callable[[], None]) -> None:
    """On 4 ranks of a CPU the reference alone: no kernel knows of ranks, and they take minutes."""
    few = dist.get_world_size() == 2 or device().type == "cuda"
    for backend in ("reference", "triton") if few else ("reference",):
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
        z, y, weight = (
            draw(4, 6, 7),
            torch.arange(24, device=device()).view(4, 6) % 7,
            draw(7).abs(),
        )
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
    with pytest.raises(ValueError, match=r"layer_norm: w is .* the module that owns it"):
        liger_fn.layer_norm(rows, placed(draw(8), Shard(0)), None)
    with pytest.raises(
        ValueError, match=r"swiglu: one dimension .* axis 1 of up but axis 0 of gate"
    ):
        liger_fn.swiglu(columns, rows)
    with pytest.raises(
        TypeError, match=r"rms_norm: x is a DTensor but w is a plain tensor: .*Replicate"
    ):
        liger_fn.rms_norm(rows, w.to_local())
    with pytest.raises(TypeError, match="rms_norm: w is a DTensor but x is a plain tensor"):
        liger_fn.rms_norm(x, w)
    other = init_device_mesh(device().type, (1, dist.get_world_size()))
    with pytest.raises(ValueError, match=r"rms_norm: w is on .* but x is on"):
        liger_fn.rms_norm(rows, distribute_tensor(draw(8), other, [Replicate(), Replicate()]))
    y = placed(torch.zeros(4, dtype=torch.int64, device=device()), Shard(0))
    with pytest.raises(NotImplementedError, match=r"fused_linear_ce: .*nn.VocabParallelHead"):
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


# -- models whose parameters are sharded -----------------------------------------------------------

VOCAB = 13


class Small(nn.Module):
    """An embedding, a norm and a head."""

    def __init__(self, tied: bool = False, chunk: int | None = None) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, 8), RMSNorm(8)
        loss = FusedLinearCrossEntropyLoss(chunk=chunk)
        self.head = LMHead(8, VOCAB, bias=False, loss=loss)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor, n_valid: Tensor | None = None) -> Tensor:
        return self.head(self.norm(self.embed(x)), y, n_valid=n_valid)


def twins(**options: Any) -> tuple[Small, Small]:
    torch.manual_seed(1)
    plain = Small(**options).double().to(device())
    model = Small(**options).double().to(device())
    model.load_state_dict(plain.state_dict())
    return plain, model


def batches(n: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (n, world, 6), the same on each rank."""
    torch.manual_seed(2)
    x, y = torch.randint(VOCAB, (2, n, dist.get_world_size(), 6)).to(device())
    return x, y


def agree(model: nn.Module, plain: nn.Module) -> None:
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        close(got.grad, want.grad)


@on_ranks
def test_fsdp_gathers_the_head_once_a_pass_and_reduces_its_gradient_once_however_many_chunks():
    for chunk in (1, 4, None):
        plain, model = twins(chunk=chunk)
        for part in (model.head, model):
            fully_shard(part)
        (x,), (y,) = batches(1)
        with CommDebugMode() as comms:
            model(x[dist.get_rank()], y[dist.get_rank()]).backward()
        # of the head once forward and once backward, of the rest, which stays whole, once
        assert counts(comms) == {"_allgather_base_": 3, "_reduce_scatter_base_": 2}
        plain(x, y).backward()
        agree(model, plain)


def counts(comms: CommDebugMode) -> dict[str, int]:
    return {str(op).rsplit(".")[-1]: n for op, n in comms.get_comm_counts().items()}


@on_ranks
def test_a_head_tied_to_the_embedding_has_the_gradient_of_both():
    for wrap in (fully_shard, nn.parallel.DistributedDataParallel):
        plain, model = twins(tied=True)
        wrapped = wrap(model)
        (x,), (y,) = batches(1)
        wrapped(x[dist.get_rank()], y[dist.get_rank()]).backward()
        plain(x, y).backward()
        agree(model, plain)


@on_ranks
def test_accumulated_over_micro_batches_with_the_global_count_it_is_the_mean_over_all_targets():
    """Ranks have as many targets as they have: the last one none at all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = batches(2)
    y[0, :, 2:], y[:, -1] = -100, -100
    mine = (y[:, rank] != -100).sum()
    dist.all_reduce(mine)
    n = mine / world  # FSDP and DDP take the mean over ranks
    plain, model = twins()
    plain(x, y).backward()
    for part in (model.head, model):
        fully_shard(part)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        loss = model(x[step, rank], y[step, rank], n)
        assert loss.isfinite()
        loss.backward()
    agree(model, plain)
    _, bare = twins()
    wrapped = nn.parallel.DistributedDataParallel(bare)
    for step in range(2):
        with nullcontext() if step else wrapped.no_sync():
            wrapped(x[step, rank], y[step, rank], n).backward()
    agree(bare, plain)


@on_ranks
def test_a_checkpoint_saved_by_shards_is_read_by_shards_and_by_one_process():
    home = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(home)
    plain, model = twins()
    _, other = twins()
    for part in (model.head, model, other):
        fully_shard(part)
    with torch.no_grad():
        model.head.weight.mul_(2)
        plain.head.weight.mul_(2)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=home[0])
    found = {"model": get_model_state_dict(other)}
    dcp.load(found, checkpoint_id=home[0])
    set_model_state_dict(other, found["model"])
    whole = {"model": {k: torch.zeros_like(v) for k, v in plain.state_dict().items()}}
    dcp.load(whole, checkpoint_id=home[0])
    for name, want in plain.state_dict().items():
        close(other.state_dict()[name], want)
        close(whole["model"][name], want)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(home[0])


@on_ranks
def test_accelerate_prepares_a_head_as_any_other():
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "WORLD_SIZE": os.environ["WORLD"]}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, not used
    from accelerate import Accelerator

    accelerator, rank = Accelerator(cpu=device().type == "cpu"), dist.get_rank()
    plain, model = twins()
    x, y = batches(2)
    prepared = accelerator.prepare(model)
    for step in range(2):
        with nullcontext() if step else accelerator.no_sync(prepared):
            accelerator.backward(prepared(x[step, rank], y[step, rank]) / 2)
    plain(x, y).backward()
    agree(model, plain)


@on_ranks
def test_a_weight_that_a_module_does_not_hold_together_is_refused_with_the_cure():
    _, model = twins()
    fully_shard(model)
    x, y = draw(3, 8), torch.zeros(3, dtype=torch.int64, device=device())
    with pytest.raises(NotImplementedError, match=r"fused_linear_ce: .*nn.LMHead"):
        liger_fn.fused_linear_ce(model.head.weight, x, y)
    empty = nn.Parameter(
        torch.empty(0, dtype=torch.float64, device=device())
    )  # as ZeRO-3 leaves it
    with pytest.raises(ValueError, match=r"w must have shape \(v, d\), got \(0,\) .*GatheredParam"):
        liger_fn.fused_linear_ce(empty, x, y)
    with pytest.raises(ValueError, match=r"axis n is 0 in w but 8 in x .*ZeRO-3"):
        liger_fn.rms_norm(x, empty)


# -- a sharded vocabulary --------------------------------------------------------------------------


def cuts(v: int) -> list[Any]:
    """Ways to say how v columns are cut, and the first and last column of this rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    each = -(-v // n)
    uneven = [v - (n - 1), *[1] * (n - 1)]
    ends = [0, *itertools.accumulate(uneven)]
    return [
        (v, min(v, rank * each), min(v, (rank + 1) * each)),
        (uneven, ends[rank], ends[rank + 1]),
    ]


def options() -> dict[str, dict[str, Any]]:
    v = VOCAB
    weight = torch.linspace(0.5, 2, v, dtype=torch.float64, device=device())
    tokens = torch.linspace(0, 1, 9, dtype=torch.float64, device=device())
    return {
        "plain": {},
        "smooth": {"label_smoothing": 0.2, "class_weight": weight, "reduction": "sum"},
        "z-loss": {"z_loss": 0.1, "softcap": 3.0, "logit_scale": 1.5, "label_smoothing": 0.1},
        "weights": {"class_weight": weight, "token_weight": tokens, "n_valid": 7.0},
    }


def head(v: int = VOCAB) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    y = torch.arange(9, device=device()) % v
    y[4] = -100
    return draw(v, 8), draw(9, 8), y, draw(v)


def leaves(*ts: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in ts]


@on_ranks
def test_fused_cross_entropy_of_a_sharded_vocabulary_is_that_of_the_whole():
    def check() -> None:
        w0, x0, y, b0 = head()
        for given in options().values():
            for chunk in (4, None):
                w, x, b = leaves(w0, x0, b0)
                want = liger_fn.fused_linear_ce(w, x, y, b=b, chunk=chunk, **given)
                (want * 3).backward()
                for cut, i, j in cuts(VOCAB):
                    ws, xs, bs = leaves(w0[i:j], x0, b0[i:j])
                    group = (line(), cut)
                    got = liger_fn.fused_linear_ce(
                        ws, xs, y, b=bs, chunk=chunk, group=group, **given
                    )
                    close(got, want.detach())
                    (got * 3).backward()
                    close(xs.grad, x.grad)
                    close(ws.grad, w.grad[i:j])
                    close(bs.grad, b.grad[i:j])

    both_backends(check)


@on_ranks
def test_cross_entropy_of_sharded_logits_is_that_of_the_whole():
    def check() -> None:
        z0, y = draw(3, 3, VOCAB), head()[2].view(3, 3)
        z0[1, 2, 4:7] = -torch.inf
        for name, given in options().items():
            if name in ("smooth", "z-loss"):
                z0 = z0.clamp(min=-2.0)
            if "token_weight" in given:
                given["token_weight"] = given["token_weight"].view(3, 3)
            (z,) = leaves(z0)
            want = liger_fn.cross_entropy_with_stats(z, y, **given)
            want.loss.backward()
            for cut, i, j in cuts(VOCAB):
                (zs,) = leaves(z0[..., i:j])
                got = liger_fn.cross_entropy_with_stats(zs, y, group=(line(), cut), **given)
                for g, w in zip(got, want, strict=True):
                    close(g.detach(), w.detach())
                got.loss.backward()
                close(zs.grad, z.grad[..., i:j])

    both_backends(check)


@on_ranks
def test_log_probabilities_and_statistics_of_a_sharded_vocabulary_are_those_of_the_whole():
    def check() -> None:
        w0, x0, y, b0 = head()
        given = {"temperature": 0.7, "softcap": 4.0, "chunk": 5}
        w, x, b = leaves(w0, x0, b0)
        want = liger_fn.fused_linear_logp_with_stats(w, x, y, b=b, **given)
        ct = [torch.randn_like(t) for t in want[:4]]
        torch.autograd.backward(want[:4], ct)
        for cut, i, j in cuts(VOCAB):
            ws, xs, bs = leaves(w0[i:j], x0, b0[i:j])
            group = (line(), cut)
            got = liger_fn.fused_linear_logp_with_stats(ws, xs, y, b=bs, group=group, **given)
            for g, t in zip(got, want, strict=True):
                close(g.detach(), t.detach())
            torch.autograd.backward(got[:4], ct)
            close(xs.grad, x.grad)
            close(ws.grad, w.grad[i:j])
            close(bs.grad, b.grad[i:j])
            logp = liger_fn.fused_linear_logp(ws, xs, y, b=bs, group=group, **given)
            close(logp.detach(), want.logp.detach())
            ones = torch.ones_like(logp)
            assert torch.autograd.grad(logp, ws, ones)[0].shape == ws.shape

    both_backends(check)


@on_ranks
def test_per_token_losses_counts_and_targets_that_are_no_columns_are_those_of_the_whole():
    def check() -> None:
        w0, x0, y, _ = head()
        y[1], y[2] = VOCAB, -1  # no columns of the vocabulary
        w, x = leaves(w0, x0)
        want = liger_fn.fused_linear_ce_with_stats(w, x, y, reduction="none", z_loss=0.1)
        (cut, i, j), _ = cuts(VOCAB)
        ws, xs = leaves(w0[i:j], x0)
        group = (line(), cut)
        got = liger_fn.fused_linear_ce_with_stats(
            ws, xs, y, reduction="none", z_loss=0.1, group=group
        )
        for g, t in zip(got, want, strict=True):
            close(g.detach(), t.detach(), equal_nan=True)
        ct = torch.rand_like(want.loss).masked_fill(want.loss.isnan(), 0.0)
        for loss in (want.loss, got.loss):
            loss.backward(ct)
        close(xs.grad, x.grad, equal_nan=True)
        loss = liger_fn.fused_linear_ce(ws, xs, torch.full_like(y, -100), group=group)
        ws.grad = None
        loss.backward()
        assert loss.item() == 0
        assert not ws.grad.any()

    both_backends(check)


@on_ranks
def test_ranks_with_unequal_shards_take_as_many_chunks():
    rank, world = dist.get_rank(), dist.get_world_size()
    widths = [1] * (world - 1) + [VOCAB - world + 1]
    w0, x0, y, _ = head()
    many, ys = x0.repeat(20, 1), y.repeat(20)
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cpu", "cuda"):  # 16 tokens a chunk for the widest, all of them for others
            patch.setitem(_chunked._BUDGET, kind, 16 * 8 * widths[-1])
        for f in (liger_fn.fused_linear_ce, liger_fn.fused_linear_logp):
            w, x = leaves(w0, many)
            ws, xs = leaves(w0.split(widths)[rank], many)
            want = f(w, x, ys)
            with spied() as seen:
                got = f(ws, xs, ys, group=(line(), widths))
            assert len(seen) == -(-len(ys) // 16)
            close(got.detach(), want.detach())
            ct = torch.ones_like(want)
            dw, dx = torch.autograd.grad(want, (w, x), ct)
            dws, dxs = torch.autograd.grad(got, (ws, xs), ct)
            close(dxs, dx)
            close(dws, dw.split(widths)[rank])


@on_ranks
def test_collectives_are_one_small_one_a_chunk_and_one_for_dx_and_none_without_it():
    w0, x0, y, _ = head()
    (cut, i, j), _ = cuts(VOCAB)
    group, item = (line(), cut), 8
    for chunk, n in ((9, 1), (3, 3), (2, 5)):
        ws, xs = leaves(w0[i:j], x0)
        with spied() as seen:
            loss = liger_fn.fused_linear_ce(ws, xs, y, chunk=chunk, group=group)
        assert [kind for kind, _ in seen] == ["all_gather"] * n
        assert sum(size for _, size in seen) == 9 * 6 * item
        with spied() as seen:
            loss.backward()
        assert seen == [("all_reduce", x0.numel() * item)]
        loss = liger_fn.fused_linear_ce(ws, xs.detach(), y, chunk=chunk, group=group)
        with spied() as seen:
            loss.backward()
        assert seen == []
    with spied() as seen:
        logp = liger_fn.fused_linear_logp_with_stats(ws, xs, y, group=group).logp
        logp.sum().backward()
    assert seen == [("all_gather", 9 * 9 * item)] * 2 + [("all_reduce", x0.numel() * item)]
    (zs,) = leaves(draw(9, j - i))
    with spied() as seen:
        liger_fn.cross_entropy(zs, y, group=group).backward()
    assert seen == [("all_gather", 9 * 6 * item)]


@contextmanager
def spied() -> Iterator[list[tuple[str, int]]]:
    """The collectives that run inside, each with the bytes that a rank gives."""
    seen: list[tuple[str, int]] = []
    gather, reduce = dist.all_gather, dist.all_reduce

    def all_gather(out: Any, t: Tensor, **kw: Any) -> Any:
        seen.append(("all_gather", t.nbytes))
        return gather(out, t, **kw)

    def all_reduce(t: Tensor, **kw: Any) -> Any:
        seen.append(("all_reduce", t.nbytes))
        return reduce(t, **kw)

    dist.all_gather, dist.all_reduce = all_gather, all_reduce
    try:
        yield seen
    finally:
        dist.all_gather, dist.all_reduce = gather, reduce


def composes(
    loss: Callable[..., Tensor], whole: Callable[..., Tensor], w0: Tensor, x0: Tensor, i: int,
    j: int,
) -> None:  # fmt: skip
    """The loss of rows i to j of w has the first gradients of `whole`, and no second ones."""
    w, x = leaves(w0, x0)
    whole(w, x).backward()
    dw, dx = torch.func.grad(loss, (0, 1))(w0[i:j], x0)
    close(dw, w.grad[i:j])
    close(dx, x.grad)
    ws, xs = leaves(w0[i:j], x0)
    torch.compile(loss, fullgraph=True, backend="aot_eager")(ws, xs).backward()
    close(ws.grad, w.grad[i:j])
    close(xs.grad, x.grad)
    with pytest.raises(NotImplementedError, match="first derivatives in reverse mode only"):
        torch.func.jvp(loss, (w0[i:j], x0), (w0[i:j], x0))
    (g,) = torch.autograd.grad(loss(ws, xs), ws, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives in reverse mode only"):
        g.sum().backward()


@on_ranks
def test_a_sharded_vocabulary_composes_with_func_grad_and_compile_and_refuses_what_it_cannot():
    w0, x0, y, _ = head()
    (cut, i, j), _ = cuts(VOCAB)
    group = (line(), cut)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return liger_fn.fused_linear_ce(w, x, y, group=group, chunk=4)

    composes(loss, lambda w, x: liger_fn.fused_linear_ce(w, x, y), w0, x0, i, j)


@on_ranks
def test_what_is_not_the_shard_of_a_rank_is_refused():
    w, x, y, _ = head()
    n, rank = dist.get_world_size(), dist.get_rank()
    (_, i, j), _ = cuts(VOCAB)
    group = (line(), VOCAB)
    wanted = rf"must be the shard of rank {rank} of {n}, {j - i} of {VOCAB} columns"
    with pytest.raises(ValueError, match=f"fused_linear_ce: w {wanted}, got {VOCAB}"):
        liger_fn.fused_linear_ce(w, x, y, group=group)
    with pytest.raises(ValueError, match=f"fused_linear_logp: w {wanted}"):
        liger_fn.fused_linear_logp(w[i : j - 1], x, y, group=group)
    with pytest.raises(ValueError, match=f"cross_entropy: logits {wanted}"):
        liger_fn.cross_entropy(x @ w.t(), y, group=group)  # gathered already
    with pytest.raises(ValueError, match=f"{n} ranks but 1 widths"):
        liger_fn.fused_linear_ce(w[i:j], x, y, group=(line(), [VOCAB]))
    with pytest.raises(TypeError, match=r"group must be .process group or mesh, v"):
        liger_fn.fused_linear_ce(w[i:j], x, y, group=line())
    short = torch.ones(j - i, dtype=torch.float64, device=device())
    with pytest.raises(ValueError, match=rf"class_weight must have shape \({VOCAB},\)"):
        liger_fn.fused_linear_ce(w[i:j], x, y, group=group, class_weight=short)
    with pytest.raises(ValueError, match=rf"class_weight must have shape \({VOCAB},\)"):
        liger_fn.cross_entropy(draw(9, j - i), y, group=group, class_weight=short)


@on_ranks
def test_more_ranks_than_columns_leave_some_with_none_and_halves_keep_their_digits():
    def check() -> None:
        w0, x0, y, _ = head(3)
        (cut, i, j), _ = cuts(3)
        w, x = leaves(w0, x0)
        liger_fn.fused_linear_ce(w, x, y).backward()
        ws, xs = leaves(w0[i:j], x0)
        liger_fn.fused_linear_ce(ws, xs, y, group=(line(), cut)).backward()
        close(xs.grad, x.grad)
        close(ws.grad, w.grad[i:j])

    both_backends(check)
    w0, x0, y, _ = head()
    (cut, i, j), _ = cuts(VOCAB)
    w, x, wp, xp = leaves(w0, x0, w0.bfloat16(), x0.bfloat16())
    nn.functional.cross_entropy(x @ w.t(), y).backward()
    nn.functional.cross_entropy(xp @ wp.t(), y).backward()
    for backend in ("reference", "triton"):
        ws, xs = leaves(w0[i:j].bfloat16(), x0.bfloat16())
        with liger_fn.using(backend):
            liger_fn.fused_linear_ce(ws, xs, y, group=(line(), cut)).backward()
        for got, want, plain in ((ws.grad, w.grad[i:j], wp.grad[i:j]), (xs.grad, x.grad, xp.grad)):
            bound = 2 * (plain - want).norm() + 2**-8 * want.norm()
            assert (got - want).norm() <= bound


def post_training() -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Losses of 4 sequences of 3 tokens: arguments behind w, x and y, and those by keyword."""
    ref, old, good = draw(4, 3) - 2, draw(4, 3) - 2, torch.arange(4, device=device()) % 2 == 0
    head_ = {"ref_w": draw(VOCAB, 5), "ref_x": draw(4, 3, 5), "ref_b": draw(VOCAB)}
    y = torch.arange(6, device=device()).view(2, 3)
    return {
        "dpo": ("dpo_loss", (), {"ref_logp": ref, "nll_weight": 0.3, "n_valid": 3}),
        "dpo, a head": ("dpo_loss", (), {**head_, "loss_type": ["ipo", "hinge"], "softcap": 4.0}),
        "dpo, weighed": ("dpo_loss", (), {**head_, "wpo": True}),
        "dpo, sorted": ("dpo_loss", (), {"ref_logp": ref, "loss_type": "aot"}),
        "orpo": ("orpo_loss", (), {"logit_scale": 0.5}),
        "cpo": ("cpo_loss", (), {"temperature": 0.7}),
        "simpo": ("simpo_loss", (), {}),
        "kto": ("kto_loss", (good,), {"ref_logp": ref, "kl": 0.1}),
        "kto, a head": ("kto_loss", (good,), {
            **head_, "kl_x": draw(2, 3, 8), "kl_y": y, "kl_ref_x": draw(2, 3, 5),
        }),
        "grpo": ("grpo_loss", (draw(4),), {"old_logp": old}),
        "grpo, a head": ("grpo_loss", (draw(4),), {**head_, "beta": 0.1, "loss_type": "cispo"}),
    }  # fmt: skip


def sequences() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    y = torch.randint(VOCAB, (4, 3)).to(device())
    y[1, 2] = y[2, 0] = -100
    return draw(VOCAB, 8), draw(4, 3, 8), y, draw(VOCAB)


@on_ranks
def test_losses_of_post_training_and_their_metrics_on_a_sharded_vocabulary_are_those_of_the_whole():
    def check(name: str, chunk: int | None, some: list[Any]) -> None:
        loss, args, given = cases[name]
        f, metrics = (getattr(liger_fn, n) for n in (loss, f"{loss}_with_metrics"))
        given = {**given, "chunk": chunk}
        w, x, b = leaves(w0, x0, b0)
        want = metrics(w, x, y, *args, b=b, **given)
        (want.loss * 3).backward()
        for cut, i, j in some:
            mine = {k: t[i:j] for k, t in given.items() if k in ("ref_w", "ref_b")}
            mine = {**given, **mine, "group": (line(), cut)}
            ws, xs, bs = leaves(w0[i:j], x0, b0[i:j])
            got = metrics(ws, xs, y, *args, b=bs, **mine)
            for g, t in zip(got, want, strict=True):
                close(g.detach(), t.detach())
            (got.loss * 3).backward()
            close(xs.grad, x.grad)
            close(ws.grad, w.grad[i:j])
            close(bs.grad, b.grad[i:j])
            close(f(ws, xs, y, *args, b=bs, **mine).detach(), want.loss.detach())

    w0, x0, y, b0 = sequences()
    cases = post_training()
    few = dist.get_world_size() == 2 or device().type == "cuda"
    for name in cases:
        for chunk in (2, 6) if few else (6,):  # less than a sequence, a pair at a time
            check(name, chunk, cuts(VOCAB))
    if few:
        with liger_fn.using("triton"):
            for name in ("dpo, weighed", "orpo", "kto, a head"):
                check(name, None, cuts(VOCAB)[1:])


@on_ranks
def test_a_loss_of_post_training_on_a_sharded_vocabulary_takes_two_small_collectives_a_chunk():
    w0, x0, y, _ = sequences()
    (cut, i, j), _ = cuts(VOCAB)
    ws, xs = leaves(w0[i:j], x0)
    for chunk, n in ((12, 1), (6, 2)):
        with spied() as seen:
            loss = liger_fn.orpo_loss(ws, xs, y, chunk=chunk, group=(line(), cut))
        assert seen == [("all_gather", 12 // n * 6 * 8)] * 2 * n
        with spied() as seen:
            loss.backward()
        assert seen == [("all_reduce", x0.numel() * 8)]
    with spied() as seen, torch.no_grad():
        liger_fn.orpo_loss(ws, xs, y, group=(line(), cut))
    assert seen == [("all_gather", 12 * 6 * 8)]


@on_ranks
def test_a_loss_of_post_training_on_a_sharded_vocabulary_composes_and_refuses_what_it_cannot():
    w0, x0, y, _ = sequences()
    (cut, i, j), _ = cuts(VOCAB)
    group, ref = (line(), cut), draw(4, 3) - 2

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return liger_fn.dpo_loss(w, x, y, ref_logp=ref, group=group)

    composes(loss, lambda w, x: liger_fn.dpo_loss(w, x, y, ref_logp=ref), w0, x0, i, j)
    wanted = rf"must be the shard of rank {dist.get_rank()} of .* {j - i} of {VOCAB} columns, got"
    for name, args, given in post_training().values():
        given = {k: t for k, t in given.items() if k != "ref_b"}
        f = getattr(liger_fn, name)
        with pytest.raises(ValueError, match=rf"{name}: w {wanted} {VOCAB}"):
            f(w0, x0, y, *args, group=group, **given)
        if "ref_w" in given:
            with pytest.raises(ValueError, match=rf"{name}: ref_w {wanted} {VOCAB}"):
                f(w0[i:j], x0, y, *args, group=group, **given)
    with pytest.raises(TypeError, match=r"orpo_loss: group must be .process group or mesh, v"):
        liger_fn.orpo_loss(w0[i:j], x0, y, group=line())


# -- models under tensor and sequence parallel plans -----------------------------------------------


@on_ranks
def test_one_line_of_a_plan_shards_the_head_over_the_vocabulary():
    (x,), (y,) = batches(1)
    for bias in (False, True):
        plain, model = (LMHead(8, VOCAB, bias=bias).double().to(device()) for _ in range(2))
        model.load_state_dict(plain.state_dict())
        model = parallelize_module(model, line(), VocabParallelHead())
        h, hs = leaves(*[draw(*x.shape, 8)] * 2)
        for call in ({"y": y, "n_valid": 5}, {}):
            for t in (h, hs):
                t.grad = None
            for head_, t in ((plain, h), (model, hs)):
                head_.zero_grad()
                out = head_(t, **call)
                out.backward(torch.ones_like(out))
            close(hs.grad, h.grad)
            agree(model, plain)
        close(model(hs).detach(), plain(h).detach())
        assert [p.placements for p in model.parameters()] == [(Shard(0),)] * (1 + bias)
    with pytest.raises(TypeError, match=r"must be a liger_fn.nn.LMHead, got Linear"):
        parallelize_module(nn.Linear(8, VOCAB), line(), VocabParallelHead())
    with pytest.raises(TypeError, match=r"loss of the head must take group, .* got JSDLoss\("):
        parallelize_module(LMHead(8, VOCAB, loss=JSDLoss()), line(), VocabParallelHead())


@on_ranks
def test_a_sharded_head_forms_a_loss_of_post_training_and_one_of_your_own():
    def own(w: Tensor, x: Tensor, y: Tensor, **head: Any) -> Tensor:
        return liger_fn.orpo_from_logp(liger_fn.fused_linear_logp(w, x, y, **head), y, beta=0.3)

    _, x, y, _ = sequences()
    ref = LMHead(8, VOCAB).double().to(device())
    of_ref = {"ref_w": ref.weight.detach(), "ref_b": ref.bias.detach(), "ref_x": x - 1}
    (_, i, j), _ = cuts(VOCAB)
    of_shard = {k: t if k == "ref_x" else t[i:j] for k, t in of_ref.items()}
    cases = [
        (ORPOLoss(beta=0.3), own, (), {}, {}),
        (DPOLoss(), DPOLoss(), (), of_ref, of_shard),
        (GRPOLoss(beta=0.1), GRPOLoss(beta=0.1), (draw(4),), of_ref, of_shard),
    ]
    for loss, sharded, args, whole, mine in cases:
        h, hs = leaves(x, x)
        plain = LMHead(8, VOCAB, loss=loss).double().to(device())
        model = LMHead(8, VOCAB, loss=sharded).double().to(device())
        model.load_state_dict(plain.state_dict())
        model = parallelize_module(model, line(), VocabParallelHead())
        plain(h, y, *args, **whole).backward()
        model(hs, y, *args, **mine).backward()
        close(hs.grad, h.grad)
        agree(model, plain)


@on_ranks
def test_sequence_parallel_norm_and_vocabulary_parallel_head_make_one_model():
    (x,), (y,) = batches(1)
    x, y = (t[:, : 2 * dist.get_world_size()].repeat(1, 2) for t in (x, y))  # (b, t), t = 2 or 4 n
    plain, model = twins()
    parallelize_module(
        model, line(),
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": VocabParallelHead(input_layouts=Shard(1)),
        },
    )  # fmt: skip
    loss, want = model(x, y), plain(x, y)
    close(loss.detach(), want.detach())
    loss.backward()
    want.backward()
    agree(model, plain)


@on_ranks
def test_fsdp_over_one_dimension_and_the_vocabulary_over_the_other():
    world = dist.get_world_size()
    mesh = init_device_mesh(device().type, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    (x,), (y,) = batches(1)
    plain, model = twins()
    parallelize_module(model, mesh["tp"], {"head": VocabParallelHead()})
    for part in (model.head, model):
        fully_shard(part, mesh=mesh["dp"])
    rank = mesh["dp"].get_local_rank()
    rows = slice(rank * 2, rank * 2 + 2)
    loss = model(x[rows], y[rows])
    loss.backward()
    plain(x, y).backward()
    agree(model, plain)
    with pytest.raises(ValueError, match=r"LMHead: its parameters must be Shard.*FSDP wraps"):
        model.head.forward(draw(2, 8), y[0, :2])  # not through its hooks: nobody has gathered it


@on_ranks
def test_ranks_with_tokens_of_their_own_share_a_sharded_head():
    (x,), (y,) = batches(1)
    plain, model = twins()
    parallelize_module(model, line(), {"head": VocabParallelHead(input_layouts=Shard(0))})
    for part in (model.embed, model.norm):
        fully_shard(part)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    loss = model(x[dist.get_rank()][None], y)
    want = plain(x, y)
    close(loss.detach(), want.detach())
    loss.backward()
    want.backward()
    agree(model, plain)
