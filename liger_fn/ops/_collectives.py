"""Which shard of a vocabulary a rank holds, and the two collectives that the ranks need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

Vocab = tuple[Any, int | Sequence[int]]


class Shard(NamedTuple):
    """Which columns of the vocabulary a rank holds. Static."""

    group: str | None  # name of the process group, for a traced graph; None: all columns are here
    start: int
    vocab: int


def shard_of(op: str, group: Vocab, width: int, name: str) -> tuple[Shard, int]:
    """The shard that `width` columns of `name` are, and the widest of all."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(group, tuple) or len(group) != 2:
        raise TypeError(
            f"{op}: group must be (process group or mesh, v of the whole vocabulary or the width "
            f"of each rank's shard), got {type(group).__name__}"
        )
    ranks, cut = group
    ranks = ranks.get_group() if isinstance(ranks, DeviceMesh) else ranks
    n, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    if isinstance(cut, int):  # as torch.chunk and DTensor cut
        each = -(-cut // n)
        widths = [max(0, min(each, cut - i * each)) for i in range(n)]
    else:
        widths = [*cut]
    if len(widths) != n:
        raise ValueError(f"{op}: group has {n} ranks but {len(widths)} widths of shards")
    if width != widths[rank]:
        raise ValueError(
            f"{op}: {name} must be the shard of rank {rank} of {n}, {widths[rank]} of "
            f"{sum(widths)} columns, got {width}: neither the whole nor what was gathered"
        )
    return Shard(ranks.group_name, sum(widths[:rank]), sum(widths)), max(widths)


def check_class_weight(op: str, c: Tensor | None, shard: Shard) -> None:
    """Hold the weights of classes to the whole vocabulary: every rank has them all."""
    if c is not None and c.shape != (shard.vocab,):
        raise ValueError(
            f"{op}: class_weight must have shape ({shard.vocab},), the whole vocabulary on each "
            f"rank, got {tuple(c.shape)}"
        )


def _ranks(group: str) -> Any:
    import torch.distributed.distributed_c10d as c10d

    resolve: Any = c10d._resolve_process_group  # type: ignore[attr-defined]  # torch's own of functional collectives
    return resolve(group)


def gathered(t: Tensor, group: str | None) -> Tensor:
    """What each rank has, (ranks, ...)."""
    if group is None:
        return t[None]
    import torch.distributed as dist

    ranks = _ranks(group)
    out = t.new_empty(ranks.size(), *t.shape)
    dist.all_gather([*out.unbind(0)], t.contiguous(), group=ranks)
    return out


def summed(t: Tensor, group: str) -> Tensor:
    """The sum over ranks, over t itself where that is contiguous."""
    import torch.distributed as dist

    t = t.contiguous()
    dist.all_reduce(t, group=_ranks(group))
    return t
