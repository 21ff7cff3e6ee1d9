"""Options and integer arguments of every public function: what they may be, and what they mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_fn
from tests.table import ROWS, Row

# what rows call by a short name, and options that have no default
_NAMES = {
    "u": "token_weight", "c": "class_weight", "ref": "ref_logp", "good": "desirable",
    "a": "advantages", "old": "old_logp",
}  # fmt: skip
_NEEDED: dict[str, dict[str, Any]] = {
    "group_norm": {"groups": 1},
    "mrope": {"sections": (2, 1, 1)},
    "kto_from_logp": {"kl": 0.0},
    "kto_loss": {"kl": 0.0},
    "grpo_from_logp": {"beta": 0.1},  # the rows of both have a reference
    "grpo_loss": {"beta": 0.1},
}


def _of(name: str) -> Row | None:
    base = name.removesuffix("_with_metrics")
    rows = [row for row in ROWS if row.covers in (name, base)]
    return min(rows, key=lambda row: len(row.id), default=None)


CALLABLE = {name: row for name in liger_fn.__all__ if (row := _of(name)) is not None}


def call(name: str, device: torch.device, **options: Any) -> Any:
    """Call a public function on the arguments of its row."""
    f, row = getattr(liger_fn, name), CALLABLE[name]
    args = {_NAMES.get(k, k): t for k, t in row.arguments(device).items()}
    return f(**{**args, **_NEEDED.get(name.removesuffix("_with_metrics"), {}), **options})


def _numbers() -> list[tuple[str, str, bool]]:
    """Function, option, and whether None may stand in its place."""
    found = []
    for name in CALLABLE:
        for p in inspect.signature(getattr(liger_fn, name)).parameters.values():
            kind = inspect.formatannotation(p.annotation).strip("'").partition(" | ")
            if kind[0] in ("float", "int") and "Tensor" not in kind[2]:
                found.append((name, p.name, bool(kind[2])))
    return found


def _says(name: str, option: str) -> str:
    return f"^{name}: {option} must "


def test_every_public_function_stands_here():
    """Those that take tensors, by the names of their arguments."""
    others = {"using", "custom_vjp", *(n for n in liger_fn.__all__ if n[0].isupper())}
    assert {*CALLABLE} == {*liger_fn.__all__} - others


@pytest.mark.parametrize("name", CALLABLE)
def test_its_row_calls_it_by_name(name: str, device: torch.device):
    assert call(name, device) is not None


@pytest.mark.parametrize(
    ("name", "option", "optional"), _numbers(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_number_is_a_number(
    backend: str, device: torch.device, name: str, option: str, optional: bool
):
    """A tensor would silently have no gradient."""
    wrong: list[Any] = [torch.tensor(1.0, requires_grad=True), "1", [1.0]]
    for value in [*wrong, *([] if optional else [None])]:
        with pytest.raises((TypeError, ValueError), match=_says(name, option)):
            call(name, device, **{option: value})


def _with(row: Row, *names: str, **sizes: int) -> bool:
    args = row.arguments()
    return all(name in args for name in names) and all(size in row.sizes for size in sizes)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if _with(row, "y", v=1)], ids=lambda row: row.id
)
def test_integers_of_any_width_mean_the_same(row: Row, backend: str, device: torch.device):
    """Also 156, which is -100 in 8 bits."""
    row = replace(row, sizes={**row.sizes, "v": 200})
    args = row.arguments(device)
    args["y"] = torch.where(args["y"] < 0, 156, args["y"])

    def values(dtype: torch.dtype) -> list[Tensor]:
        out = row.fn(*{**args, "y": args["y"].to(dtype)}.values())
        return [out] if isinstance(out, Tensor) else list(out)

    want = values(torch.int64)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        for got, t in zip(values(dtype), want, strict=True):
            assert torch.equal(got, t)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if _with(row, "y", "u")], ids=lambda row: row.id
)
@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
def test_the_weight_of_a_row_that_does_not_count_is_not_read(
    row: Row, odd: float, backend: str, device: torch.device
):
    """One over the number of tokens of a sequence is infinite where it has none."""
    args = row.arguments(device)
    dead = args["y"] == -100
    assert dead.any()

    def loss(weight: float) -> tuple[Tensor, Tensor]:
        u = args["u"].masked_fill(dead, weight).requires_grad_()
        out = row.fn(*{**args, "u": u}.values())
        value = out if isinstance(out, Tensor) else out[0]
        return value, torch.autograd.grad(value.sum(), u)[0]

    for got, want in zip(loss(odd), loss(0.0), strict=True):
        assert torch.equal(got, want)


def test_options_of_an_op_are_held_to_what_its_rule_says():
    def fwd(x: Tensor, *, scale: float, times: int) -> tuple[Tensor]:
        return (x * scale * times,)

    def bwd(d: Tensor, x: Tensor, *, scale: float, times: int, wanted: Any) -> tuple[Tensor]:
        return (d * scale * times,)

    op: Callable[..., Tensor] = liger_fn.custom_vjp(
        "scaled_for_a_test",
        fwd={"reference": fwd, "triton": fwd},
        bwd={"reference": bwd, "triton": bwd},
        differentiable=("x",),
    )
    x = torch.ones(2)
    assert op(x, scale=2, times=3).tolist() == [6.0, 6.0]
    with pytest.raises(TypeError, match=r"^scaled_for_a_test: scale must be a number, got Tensor$"):
        op(x, scale=torch.tensor(2.0), times=3)
    with pytest.raises(TypeError, match=r"^scaled_for_a_test: times must be a number, got float$"):
        op(x, scale=2.0, times=3.0)
