"""What is measured: the rows of tests/table that name sizes, each with its peers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers import PEERS, Function, Peer
from tests import table
from tests.table import ROWS, Bench, Row, Sizes

Drawn = tuple[dict[str, Tensor], tuple[Tensor, ...]]  # arguments by name, upstream gradients


class Draw(table.Draw):
    """Random arguments of one dtype on one device; every target counts."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator(device).manual_seed(0), dtype

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        t = torch.empty(shape, device=self.generator.device, dtype=self.dtype)
        return t.normal_(0.0, scale, generator=self.generator)

    def targets(self, lead: tuple[int, ...], v: int) -> Tensor:
        return torch.randint(v, lead, generator=self.generator, device=self.generator.device)


@dataclass(frozen=True)
class Op:
    """One public function as it is measured."""

    row: Row
    bench: Bench
    others: tuple[Peer, ...]

    @property
    def name(self) -> str:
        """The public name."""
        return self.row.covers

    @property
    def wanted(self) -> tuple[str, ...]:
        """Arguments that get gradients."""
        return self.bench.wanted or self.row.differentiable

    @property
    def plain(self) -> Function:
        """Plain torch; the oracle when its arguments are float64."""
        return self.bench.plain or self.row.plain or self.row.oracle

    def draw(self, draw: Draw, sizes: Sizes) -> Drawn:
        """Arguments, and upstream gradients; none stands for 1, that of a scalar loss."""
        arguments = (self.bench.make or self.row.make)(draw, **sizes)
        meta = {name: t.to("meta") for name, t in arguments.items()}
        out = self.plain(*meta.values())
        outs = out if isinstance(out, tuple) else (out,)
        if not outs[0].dim():
            return arguments, ()
        upstream = (draw.normal(*t.shape) for t in outs)
        return arguments, tuple(
            torch.empty_strided(t.shape, t.stride(), dtype=d.dtype, device=d.device).copy_(d)
            for t, d in zip(outs, upstream, strict=True)
        )

    def peers(self) -> list[Peer]:
        """List everyone who computes this op, installed or not."""
        ours = self.bench.fn or self.row.fn
        compiled = partial(torch.compile, self.plain, dynamic=False)
        return [
            Peer("torch", "torch", lambda: self.plain),
            Peer("liger_fn", "liger_fn", lambda: ours),
            *(p for p in self.others if p.package == "liger_fn"),
            Peer("torch.compile", "torch", compiled, compiles=True),
            *(p for p in self.others if p.package != "liger_fn"),
        ]

    def largest(self, sizes: Sizes) -> float:
        """Elements of the largest tensor that plain torch holds."""
        if self.bench.limit == "copy":
            return self.bench.work(**sizes)[0]
        return math.prod(leading(sizes)) * sizes["v"]

    def least_ms(self, sizes: Sizes, itemsize: int, rates: dict[str, float]) -> list[float]:
        """Least milliseconds of forward and of forward + backward at the measured rates."""
        each = itemsize if self.bench.limit == "copy" else 1
        return [1e3 * n * each / rates[self.bench.limit] for n in self.bench.work(**sizes)]


def leading(sizes: Sizes) -> tuple[int, ...]:
    """Leading axes: as they are given, or those of b pairs of t tokens."""
    return sizes["lead"] if "lead" in sizes else (2 * sizes["b"], sizes["t"])


def halved(sizes: Sizes) -> Sizes:
    """Half as many rows."""
    if "lead" not in sizes:
        return {**sizes, "b": sizes["b"] // 2}
    lead = sizes["lead"]
    return {**sizes, "lead": (lead[0] // 2, *lead[1:])}


def label(sizes: Sizes) -> str:
    """The sizes without flags, several axes as one number."""
    found = (math.prod(s) if isinstance(s, (tuple, list)) else s for s in sizes.values())
    return "x".join(str(s) for s in found if isinstance(s, int) and not isinstance(s, bool))


Case = tuple[Op, str, Sizes]


def cases(ops: Iterable[Op], quick: bool, gpu: bool) -> list[Case]:
    """Name the sizes of each op, first those to know of all ops, so that a short run has them."""
    found = []
    for op in ops:
        shapes = op.bench.gpu if gpu else {"small": op.bench.cpu}
        every = list(shapes.items())[: 1 if quick else None]
        found += [(at, op, name, sizes) for at, (name, sizes) in enumerate(every)]
    return [case[1:] for case in sorted(found, key=lambda case: case[0])]


OPS = [Op(row, row.bench, tuple(PEERS.get(row.covers, ()))) for row in ROWS if row.bench]
