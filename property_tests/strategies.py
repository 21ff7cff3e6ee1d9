"""How laws draw the arguments of a row of the table, and how they lie in memory.

The row says how arguments are made and which sizes are drawn; numbers, dtypes and layouts are drawn
here. Sizes are small: in the interpreter a row of a loss takes 20 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from tests.conftest import DEVICE
from tests.table import ROWS, Row

Draw = Callable[[SearchStrategy[Any]], Any]

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALVES)
SCALES = st.integers(-4, 4).map(lambda k: 10.0**k)
ONE = st.just(1.0)
BY_ID = {row.id: row for row in ROWS}


# -- values ----------------------------------------------------------------------------------------


def normal(draw: Draw, scales: SearchStrategy[float], *shape: int) -> Tensor:
    """Normal numbers times a drawn scale; or whole ones, which have zeros and ties."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    t = torch.randn(shape, generator=g, dtype=torch.float64)
    return draw(scales) * (t.round() if draw(st.booleans()) else t)


class Drawn:
    """What tests.table.Draw is, with numbers that Hypothesis chooses."""

    def __init__(self, draw: Draw, scales: SearchStrategy[float]) -> None:
        self.draw, self.scales = draw, scales

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return normal(self.draw, self.scales, *shape)

    def positive(self, *shape: int) -> Tensor:
        return normal(self.draw, ONE, *shape).abs() + 0.5

    def targets(self, lead: tuple[int, ...], v: int) -> Tensor:
        """Columns, some of them ignored but never the first."""
        g = torch.Generator().manual_seed(self.draw(st.integers(0, 2**16)))
        y = torch.randint(v, lead, generator=g)
        y.view(-1)[1:][torch.rand(max(y.numel() - 1, 0), generator=g) < 0.3] = -100
        return y


@st.composite
def values(
    draw: Draw, row: Row, scales: SearchStrategy[float] = ONE, **fixed: Any
) -> dict[str, Tensor]:
    """The arguments of a row at drawn sizes, in float64 on the CPU."""
    sizes = {name: draw(st.sampled_from(choices)) for name, choices in row.axes.items()} | fixed
    if sizes.get("v") == 1 and scales is not ONE:
        # the gradient of one column is a difference of equal numbers: 0 in plain torch, which forms
        # both by one sum, below an ulp of them elsewhere; tolerances at scale one allow for that
        sizes["v"] = 2
    return row.make(Drawn(draw, scales), **sizes)


# -- memory ----------------------------------------------------------------------------------------


def transposed(t: Tensor, axis: int) -> Tensor:
    """The same numbers with `axis` outermost in memory."""
    return t.movedim(axis, 0).contiguous().movedim(0, axis)


def stepped(t: Tensor, axis: int) -> Tensor:
    """Every other entry along `axis` of a tensor that holds poison between them."""
    poison = torch.nan if t.is_floating_point() else True
    if not t.is_floating_point() and t.dtype != torch.bool:
        poison = torch.iinfo(t.dtype).max
    wide = t.new_full((*t.shape[:axis], 2 * t.shape[axis], *t.shape[axis + 1 :]), poison)
    view = wide[(*[slice(None)] * axis, slice(1, None, 2))]
    return view.copy_(t)


def expanded(t: Tensor, axis: int) -> Tensor:
    """The first entry along `axis`, as often as there were entries."""
    return t.narrow(axis, 0, min(1, t.shape[axis])).expand_as(t)


LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "contiguous": lambda t, axis: t.contiguous(),
    "transposed": transposed,
    "stepped": stepped,
    "expanded": expanded,
}


def laid_out(draw: Draw, t: Tensor) -> Tensor:
    if t.dim() == 0:
        return t
    return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](t, draw(st.integers(0, t.dim() - 1)))


@st.composite
def layouts(draw: Draw, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of these shapes and dtypes, each somehow in memory."""
    return tuple(laid_out(draw, t) for t in tensors)


@st.composite
def alike(draw: Draw, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Normal numbers for each tensor, of its shape and dtype, somehow in memory."""
    return tuple(laid_out(draw, normal(draw, ONE, *t.shape).to(t)) for t in tensors)


@st.composite
def permutations(draw: Draw, n: int) -> Tensor:
    return torch.tensor(draw(st.permutations(range(n))), dtype=torch.int64, device=DEVICE)


@st.composite
def arguments(
    draw: Draw, row: Row, dtype: torch.dtype = torch.float64, scales: SearchStrategy[float] = ONE
) -> dict[str, Tensor]:
    """The arguments of a row, in its order, of one dtype but for targets."""
    made = {
        name: laid_out(draw, t.to(DEVICE, dtype if t.is_floating_point() else None))
        for name, t in draw(values(row, scales)).items()
    }
    assume(row.kink is None or not row.kink(*made.values()))
    return made
