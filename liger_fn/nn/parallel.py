"""The style that shards a head over the vocabulary, in a plan of torch's `parallelize_module`."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from liger_fn.nn.losses import LMHead


class VocabParallelHead(ParallelStyle):
    """Shard an `LMHead` over the vocabulary: its loss is formed where each shard lies.

    The weight becomes a DTensor, Shard(0), cut as torch cuts. `head(x, y)` is then a vocabulary
    parallel `fused_linear_ce`: no logits in memory and none sent. `head(x)` gathers logits.
    Targets, and what else the loss is given, are whole on each rank; but `ref_w` and `ref_b`, the
    head of a reference, are shards too. A loss of your own is called as loss(w, x, ..., b=b,
    group=group).

    Args:
        input_layouts: how x lies: Replicate(), or Shard(1) behind a sequence parallel norm, or
            Shard(0) where each rank has rows of its own: it is gathered and its gradient cut again.

    Raises:
        TypeError: the module is no `LMHead`, or its loss does not take `group`.
        ValueError: the mesh has more dimensions than one.

    Example:
        `parallelize_module(model, mesh["tp"], {"head": VocabParallelHead()})`
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LMHead):
            raise TypeError(
                f"VocabParallelHead: the module must be a liger_fn.nn.LMHead, got "
                f"{type(module).__name__}"
            )
        _check_loss(module.loss)
        if device_mesh.ndim != 1:
            raise ValueError(f"VocabParallelHead: the mesh must have one dimension: {device_mesh}")
        module.vocab_mesh = device_mesh
        return distribute_module(module, device_mesh, _partition, self._prepare)

    def _prepare(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        x, *rest = inputs
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
        if not all(p.is_replicate() for p in x.placements):
            x = x.redistribute(placements=[Replicate()])
        return x.to_local(), *rest


def _partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, p in module.named_parameters(recurse=False):
        cut = distribute_tensor(p, mesh, [Shard(0)])
        module.register_parameter(key, nn.Parameter(cut, requires_grad=p.requires_grad))


def _check_loss(loss: Any) -> None:
    """Hold the loss of a head to one that knows shards."""
    # a HeadLoss hands all keywords to its function
    f = getattr(loss, "function", getattr(loss, "forward", loss))
    takes = inspect.signature(f).parameters
    if "group" not in takes and all(p.kind is not p.VAR_KEYWORD for p in takes.values()):
        raise TypeError(
            f"VocabParallelHead: the loss of the head must take group, as cross entropy and those "
            f"of preference and policy do, got {loss}"
        )


def shard_of_head(
    head: LMHead, mesh: DeviceMesh
) -> tuple[Tensor, Tensor | None, tuple[DeviceMesh, int]]:
    """Weight and bias of this rank, and the group that they are a shard over."""
    b: Tensor | None = head.bias
    b = None if b is None else _local(b, mesh)
    return _local(head.weight, mesh), b, (mesh, head.out_features)


def _local(p: Tensor, mesh: DeviceMesh) -> Tensor:
    if not isinstance(p, DTensor) or p.device_mesh != mesh or p.placements != (Shard(0),):
        what = p.placements if isinstance(p, DTensor) else type(p).__name__
        raise ValueError(
            f"LMHead: its parameters must be Shard(0) on {mesh} inside its call, got {what}: "
            "call it through the module that FSDP wraps"
        )
    return p.to_local()


def gathered_logits(head: LMHead, x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Logits of all columns on each rank."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    z = nn.functional.linear(whole, head.weight, head.bias)
    return z.redistribute(placements=[Replicate()]).to_local()  # type: ignore[attr-defined]  # a DTensor of DTensors
