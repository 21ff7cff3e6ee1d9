"""How to draw the arguments of each public function, and how they lie in memory.

A strategy gives every tensor that a row of the table may take, contiguous and in float64;
`arguments` picks those the row asks for, rounds them to a dtype and lays each out. Sizes are small:
in the interpreter a row of a loss takes 20 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from tests.conftest import DEVICE
from tests.table import Row

Draw = Callable[[SearchStrategy[Any]], Any]

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALVES)
SCALES = st.integers(-4, 4).map(lambda k: 10.0**k)
ONE = st.just(1.0)

LEADS = st.sampled_from([(1,), (), (5,), (2, 3), (0,), (2, 0)])
LOSS_LEADS = st.sampled_from(
    [(1,), (), (5,), (2, 1)]
)  # a mean over no rows is 0 here, NaN in torch
WIDTHS = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 33, 40]))
COLUMNS = st.one_of(st.integers(2, 9), st.sampled_from([16, 17, 33]))


# -- values ----------------------------------------------------------------------------------------


def normal(draw: Draw, scales: SearchStrategy[float], *shape: int) -> Tensor:
    """Normal numbers times a drawn scale; or whole ones, which have zeros and ties."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    t = torch.randn(shape, generator=g, dtype=torch.float64)
    return draw(scales) * (t.round() if draw(st.booleans()) else t)


def targets(draw: Draw, lead: tuple[int, ...], v: int) -> Tensor:
    """Columns, some of them ignored but never the first."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    y = torch.randint(v, lead, generator=g)
    y.view(-1)[1:][torch.rand(y.numel() - 1, generator=g) < 0.3] = -100
    return y


@st.composite
def rms_norm(draw: Draw, scales: SearchStrategy[float] = ONE) -> dict[str, Tensor]:
    lead, n = draw(LEADS), draw(WIDTHS)
    return {"x": normal(draw, scales, *lead, n), "w": normal(draw, scales, n)}


@st.composite
def swiglu(draw: Draw, scales: SearchStrategy[float] = ONE) -> dict[str, Tensor]:
    shape = (*draw(LEADS), draw(WIDTHS))
    return {name: normal(draw, scales, *shape) for name in ("gate", "up")}


@st.composite
def swiglu_packed(draw: Draw, scales: SearchStrategy[float] = ONE) -> dict[str, Tensor]:
    # the oracle of the row splits at 5; other widths are held to swiglu, bit for bit
    return {"gate_up": normal(draw, scales, *draw(LEADS), 10)}


@st.composite
def rope(draw: Draw, scales: SearchStrategy[float] = ONE) -> dict[str, Tensor]:
    lead, t, pairs = draw(st.sampled_from([(), (2,), (1, 2), (0,)])), draw(st.integers(0, 3)), 4
    r = 2 * draw(st.integers(1, pairs))
    k = r + draw(st.integers(0, 3))
    own = draw(st.sampled_from([(), lead, (1,) * len(lead)]))  # one table, or one for each sequence
    made = {name: normal(draw, scales, *lead, draw(st.integers(1, 3)), t, k) for name in ("q", "k")}
    angle = normal(draw, ONE, *own, t, r)
    return {**made, "cos": angle.cos(), "sin": angle.sin()}


@st.composite
def softmax(draw: Draw, scales: SearchStrategy[float] = ONE) -> dict[str, Tensor]:
    return {"x": normal(draw, scales, *draw(LEADS), draw(WIDTHS))}


@st.composite
def cross_entropy(draw: Draw, scales: SearchStrategy[float] = ONE) -> dict[str, Tensor]:
    lead, v = draw(LOSS_LEADS), draw(columns(scales))
    return {"logits": normal(draw, scales, *lead, v), **of_losses(draw, scales, lead, v)}


@st.composite
def fused_linear_ce(draw: Draw, scales: SearchStrategy[float] = ONE) -> dict[str, Tensor]:
    lead, v, d = draw(LOSS_LEADS), draw(columns(scales)), draw(st.integers(1, 6))
    made = {"w": normal(draw, scales, v, d), "x": normal(draw, scales, *lead, d)}
    return {**made, "b": normal(draw, scales, v), **of_losses(draw, scales, lead, v)}


@st.composite
def divergence(draw: Draw, scales: SearchStrategy[float] = ONE) -> dict[str, Tensor]:
    lead, v = draw(LOSS_LEADS), draw(COLUMNS)
    made = {name: normal(draw, scales, *lead, v) for name in ("student", "teacher")}
    return {**made, **of_losses(draw, scales, lead, v)}


def columns(scales: SearchStrategy[float]) -> SearchStrategy[int]:
    # the gradient of one column is a difference of equal numbers: 0 in plain torch, which forms
    # both by one sum, below an ulp of them elsewhere; tolerances at scale one allow for that
    return st.one_of(st.just(1), COLUMNS) if scales is ONE else COLUMNS


def of_losses(
    draw: Draw, scales: SearchStrategy[float], lead: tuple[int, ...], v: int
) -> dict[str, Tensor]:
    """Targets y, class weights c, token weights u."""
    c = normal(draw, ONE, v).abs() + 0.5
    return {"y": targets(draw, lead, v), "c": c, "u": normal(draw, scales, *lead)}


STRATEGIES: dict[str, Callable[..., SearchStrategy[dict[str, Tensor]]]] = {
    "rms_norm": rms_norm,
    "swiglu": swiglu,
    "swiglu_packed": swiglu_packed,
    "rope": rope,
    "softmax": softmax,
    "sparsemax": softmax,
    "kl_div": divergence,
    "jsd": divergence,
    "tvd": divergence,
    "cross_entropy": cross_entropy,
    "cross_entropy_with_stats": cross_entropy,
    "fused_linear_ce": fused_linear_ce,
    "fused_linear_ce_with_stats": fused_linear_ce,
}


# -- memory ----------------------------------------------------------------------------------------


def transposed(t: Tensor, axis: int) -> Tensor:
    """The same numbers with `axis` outermost in memory."""
    return t.movedim(axis, 0).contiguous().movedim(0, axis)


def stepped(t: Tensor, axis: int) -> Tensor:
    """Every other entry along `axis` of a tensor that holds poison between them."""
    poison = torch.nan if t.is_floating_point() else torch.iinfo(t.dtype).max
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
    made = draw(STRATEGIES[row.covers](scales))
    return {
        name: laid_out(draw, t.to(DEVICE, dtype if t.is_floating_point() else None))
        for name, t in ((name, made[name]) for name in row.arguments())
    }
