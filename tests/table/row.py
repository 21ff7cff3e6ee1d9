"""What a row of the table is.

A row gives a function of tensors, the same in plain torch from the paper or torch itself (never
from our reference), how its arguments are drawn at given sizes, and which of them have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tests.table.shapes import Sizes, Work

Function = Callable[..., Any]


class Draw:
    """Where the numbers of arguments come from: one seed, float64."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def positive(self, *shape: int) -> Tensor:
        return self.normal(*shape).abs() + 0.5

    def targets(self, lead: tuple[int, ...], v: int) -> Tensor:
        """Columns, some of them ignored but never the first."""
        y = torch.randint(v, lead, generator=self.generator)
        y.view(-1)[2::7] = -100
        return y


@dataclass(frozen=True)
class Bench:
    """Sizes worth measuring, and the least work there."""

    work: Work
    counted: str  # the same in words
    gpu: Mapping[str, Sizes]  # bfloat16; the first is the one to know
    cpu: Sizes  # float32, small: on a CPU the harness is checked, not much measured
    wanted: tuple[str, ...] | None = None  # gradients, where users do not ask for all
    fn: Function | None = None  # as users call it, where options of the row are not theirs
    plain: Function | None = None  # the same in plain torch, as they write it
    make: Callable[..., dict[str, Tensor]] | None = None  # where they draw other arguments
    limit: Literal["copy", "matmul"] = "copy"  # the rate that bounds it


@dataclass(frozen=True)
class Row:
    """One public function with its options, and all that the suites need to know of it."""

    id: str  # the public name, "-", what is special
    fn: Function
    oracle: Function
    make: Callable[..., dict[str, Tensor]]  # (draw, **sizes) to arguments in order
    differentiable: tuple[str, ...]
    sizes: Sizes  # of every test on one point
    axes: Mapping[str, Sequence[Any]]  # what laws draw for each of the sizes
    optional: tuple[str, ...] = ()  # arguments that may be None
    plain: Function | None = None  # plain torch as users write it, where the oracle is not that
    flops: float = 1.0  # of plain torch's: more where logits are formed again
    ops: bool = True  # whether kernels run, as registered ops; else it is algebra in plain torch
    composed: bool = False  # every kernel it launches is launched by another row too
    kink: Function | None = None  # whether rounding decides a derivative: laws draw elsewhere
    block: int | None = None  # longest block of a kernel, to make short rows long ones
    bench: Bench | None = None

    @property
    def covers(self) -> str:
        """The public name."""
        return self.id.split("-")[0]

    def arguments(self, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        made = self.make(Draw(seed), **self.sizes)
        return {name: t.to(device) for name, t in made.items()}

    def longer(self, size: int) -> Row:
        """The row with `size` as its first leading axis."""
        if "lead" in self.sizes:
            return replace(self, sizes={**self.sizes, "lead": (size, *self.sizes["lead"][1:])})
        return replace(self, sizes={**self.sizes, "b": size})


def bind(fn: Function, row: Row, args: dict[str, Tensor]) -> Function:
    """fn as a function of its differentiable arguments alone."""

    def f(*d: Tensor) -> Any:
        return fn(*{**args, **dict(zip(row.differentiable, d, strict=True))}.values())

    return f


def tanh(x: Tensor) -> Tensor:
    """torch.tanh; in float64, as an oracle, without a gradient that cancels: 1 - tanh(x)**2."""
    if x.dtype != torch.float64:
        return torch.tanh(x)
    far = x.sign() * (1 - 2 * torch.sigmoid(-2 * x.abs()))
    return torch.where(x.abs() > 1, far, torch.tanh(x))


def log_softmax(x: Tensor) -> Tensor:
    """torch.log_softmax; in float64, as an oracle, with the digits of what is next to 0.

    The logarithm of the largest entry is -log1p(sum of the others): float64 too rounds 1 + 1e-17.
    """
    if x.dtype != torch.float64:
        return x.log_softmax(-1)
    top = x.argmax(-1, keepdim=True)
    z = (x - x.gather(-1, top)).scatter(-1, top, 0.0)
    return z - z.exp().scatter(-1, top, 0.0).sum(-1, keepdim=True).log1p()


def first(f: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    return lambda *a, **k: f(*a, **k)[0]


def bound(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *a, **k: f(*a, **(options | k))


# what laws draw
LEADS = [(1,), (), (5,), (2, 3), (0,), (2, 0)]
LOSS_LEADS = [(1,), (), (5,), (2, 1)]  # a mean over no rows is 0 here, NaN in torch
WIDTHS = [*range(1, 10), 15, 16, 17, 33, 40]
COLUMNS = [*range(1, 10), 16, 17, 33]
ROWS_OF = {"lead": LEADS, "n": WIDTHS}
LOGITS = {"lead": LOSS_LEADS, "v": COLUMNS}
