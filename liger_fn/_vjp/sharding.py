"""DTensors: which axes of an op's tensors may be sharded, from one line of its table.

    axes="... [n], [n] -> ... [n], ..."          arguments -> outputs and residuals, in their order

A name stands for one axis everywhere, "..." for leading axes, counted from the right as torch
broadcasts, "()" a tensor without axes. An axis in brackets must be whole on each rank. Any other
may be sharded: what has it is then cut alike on each rank, what has it not is the same on all, and
the op runs on what is local. A tensor whose size is 1 on an axis does not have it.

A gradient is placed as its argument: of one that is the same on all ranks it is a sum over them,
one all-reduce. What is Partial is summed before the op, and its gradient is the same on all ranks.

`register_sharding` of torch 2.13 cannot say this: it gives all results of a list one placement.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from liger_fn._launch import Maybe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    from liger_fn._vjp.op import Op

Axis = str | int  # a name, or a place in "...", counted from its right end
_SUM = -1  # the result of a sum over an axis, which it has not
_waiting: list[Callable[[type], None]] = []


def ready() -> None:
    """Register the rules for DTensor, once there is one: importing it takes a second."""
    cls = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    while cls is not None and _waiting:
        _waiting.pop()(cls)


# Dynamo need not trace it. The mark of torch.compiler.assume_constant_result, see _launch
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


class Axes:
    """What `axes` says of one tensor."""

    def __init__(self, text: str) -> None:
        names = text.replace("()", "").split()
        self.lead = names[:1] == ["..."]
        self.own = [name.strip("[]") for name in names[self.lead :]]
        self.whole = {name.strip("[]") for name in names if name.startswith("[")}

    def of(self, dims: int) -> list[Axis]:
        """The axis behind each dimension of a tensor that has so many."""
        return [*range(dims - len(self.own) - 1, -1, -1), *self.own]


def parsed(axes: str) -> tuple[list[Axes], list[Axes]]:
    """The two sides of the line."""
    left, right = ([Axes(t) for t in side.split(",")] for side in axes.split("->"))
    return left, right


def register(op: Op, axes: str | None, lib: Any) -> None:
    """Give the two registered ops of a table their rules for DTensor."""
    left, right = ([], []) if axes is None else parsed(axes)
    cotangents = [f"the cotangent of output {i}" for i in range(op.outputs)]
    kept = [*(op.names[i] for i in op.args), *(f"result {i}" for i in op.results)]

    def forward(args: tuple[Any, ...], kw: dict[str, Any]) -> list[Any]:
        return Run(op.name, op.names, left, args, 0)(op.fwd_op, right, [None] * len(right), kw)

    def backward(args: tuple[Any, ...], kw: dict[str, Any]) -> list[Any]:
        given = [*right[: op.outputs], *(left[i] for i in op.args), *(right[i] for i in op.results)]
        run = Run(op.name, [*cotangents, *kept], given, args, op.outputs)
        asked = [i for i, want in zip(op.slots, kw["wanted"], strict=True) if want]
        primals = dict(zip(op.args, args[op.outputs :], strict=False))
        return run(op.bwd_op, [left[i] for i in asked], [primals.get(i) for i in asked], kw)

    def refuse(args: tuple[Any, ...], kw: dict[str, Any]) -> list[Any]:
        raise NotImplementedError(
            f"{op.name}: there is no rule for DTensors: give what is local, as x.to_local(); a "
            "head sharded over the vocabulary belongs in nn.LMHead under nn.VocabParallelHead"
        )

    def tell(cls: type) -> None:
        for visible, rule in ((op.fwd_op, forward), (op.bwd_op, backward)):
            own = rule if axes is not None else refuse
            torch.library.register_torch_dispatch(visible, cls, _as_dispatch(own), lib=lib)

    _waiting.append(tell)


def _as_dispatch(
    rule: Callable[[tuple[Any, ...], dict[str, Any]], list[Any]],
) -> Callable[..., Any]:
    return lambda _, func, types, args=(), kwargs=None: rule(args, kwargs or {})


class Run:
    """One call on DTensors: what is cut along which axis on each dimension of the mesh."""

    def __init__(
        self, op: str, names: Sequence[str], axes: Sequence[Axes], args: Sequence[Any], skip: int
    ) -> None:
        self.op, self.names, self.args = op, names, args
        self.mesh = self._mesh()
        self.dims = [
            [] if t is None else a.of(t.dim()) for a, t in zip(axes, args, strict=True)
        ]  # the axis of each dimension
        self.sizes: dict[Axis, int] = {}
        for t, dims in zip(args, self.dims, strict=True):
            for axis, size in zip(dims, () if t is None else t.shape, strict=True):
                self.sizes[axis] = max(size, self.sizes.get(axis, 1)) if size else 0
        # cotangents follow: what came out of forward was cut as its arguments
        voters = [*zip(names, axes, self.dims, args, strict=True)][skip:]
        self.cut = [self._cut(i, voters) for i in range(self.mesh.ndim)]

    def _mesh(self) -> DeviceMesh:
        """The one mesh of all arguments; one of them is a DTensor, or nobody would ask."""
        given = [(n, t) for n, t in zip(self.names, self.args, strict=True) if t is not None]
        plain = [name for name, t in given if not hasattr(t, "device_mesh")]
        (first, mesh), *others = [(n, t.device_mesh) for n, t in given if n not in plain]
        for name, other in others:
            if other != mesh:
                raise ValueError(f"{self.op}: {name} is on {other} but {first} is on {mesh}")
        if plain:
            raise TypeError(
                f"{self.op}: {first} is a DTensor but {plain[0]} is a plain tensor: make it one "
                f"too, distribute_tensor({plain[0]}, mesh, [Replicate()]), or give "
                f"{first}.to_local()"
            )
        found: DeviceMesh = mesh
        return found

    def _cut(self, i: int, voters: Sequence[tuple[str, Axes, list[Axis], Any]]) -> Axis | None:
        """The axis that dimension i of the mesh cuts."""
        cut: tuple[str, Axis] | None = None
        for name, axes, dims, t in voters:
            if t is None or t.placements[i].is_replicate() or t.placements[i].is_partial():
                continue
            axis = dims[t.placements[i].dim] if t.placements[i].is_shard() else None
            if axis is None or axis in axes.whole:
                raise ValueError(
                    f"{self.op}: {name} is {t.placements[i]} of axis {axis} on the mesh, but each "
                    f"rank needs that axis whole: {name}.redistribute(placements=[Replicate()]) "
                    "first; a parameter is gathered by the call of the module that owns it"
                )
            if cut is not None and cut[1] != axis:
                raise ValueError(
                    f"{self.op}: one dimension of the mesh cuts axis {axis} of {name} but axis "
                    f"{cut[1]} of {cut[0]}: redistribute one of them"
                )
            cut = name, axis
        return None if cut is None else cut[1]

    def _places(self, dims: Sequence[Axis], shape: Sequence[int]) -> list[int | None]:
        """For each dimension of the mesh, the one of a tensor that it cuts, _SUM or None."""
        has = {a: d for d, a in enumerate(dims) if shape[d] == self.sizes.get(a, shape[d])}
        return [None if cut is None else has.get(cut, _SUM) for cut in self.cut]

    def __call__(
        self, visible: Any, axes: Sequence[Axes], primals: Sequence[Maybe], kw: dict[str, Any]
    ) -> list[Any]:
        from torch.distributed.tensor import Replicate

        local: list[Any] = []
        for t, dims in zip(self.args, self.dims, strict=True):
            if t is not None:
                wanted = _placements(self._places(dims, t.shape), Replicate())
                t = _placed(t, wanted).to_local()
            local.append(t)
        out = []
        for t, a, primal in zip(visible(*local, **kw), axes, primals, strict=False):
            out.append(self._result(t, a.of(t.dim()), primal))
        return out

    def _result(self, t: Tensor, dims: list[Axis], primal: Any) -> DTensor:
        """A DTensor of a local result; a gradient is placed as its primal."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        shape = [self.sizes.get(a, n) for a, n in zip(dims, t.shape, strict=True)]
        if primal is not None:
            shape = [*primal.shape]
        places = self._places(dims, shape)
        d = DTensor.from_local(
            t, self.mesh, _placements(places, Partial()), run_check=False, shape=torch.Size(shape),
            stride=_strides(t, shape),
        )  # fmt: skip
        wanted = _placements(places, Replicate())
        if primal is not None:
            wanted = [Replicate() if p.is_partial() else p for p in primal.placements]
        return _placed(d, wanted)


def _placements(places: Iterable[int | None], summed: Placement) -> list[Placement]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if at is None else summed if at == _SUM else Shard(at) for at in places]


def _placed(t: DTensor, wanted: Sequence[Placement]) -> DTensor:
    if tuple(t.placements) == tuple(wanted):
        return t
    # an argument may ask for gradients, which is not for the inside of an op to see
    return cast("DTensor", t.detach()).redistribute(placements=wanted)


def _strides(t: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Those of the whole tensor, its axes in the order in which the local one holds them."""
    order = sorted(range(t.dim()), key=lambda d: (t.stride(d), -d))
    return tuple(
        math.prod(max(shape[e], 1) for e in order[: order.index(d)]) for d in range(t.dim())
    )
