"""Options and integer arguments of every public function: what they may be, and what they mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves

import liger_fn
from tests.table import ROWS, Row, norms_and_gates

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


def scaled(x: Tensor, *, scale: float, times: int = 2) -> tuple[Tensor]:
    return (x * scale * times,)


def pulled(d: Tensor, x: Tensor, *, scale: float, times: int, wanted: Any) -> tuple[Tensor]:
    return (d * scale * times,)


def made(name: str, **options: Any) -> Callable[..., Any]:
    rules: dict[str, Any] = {
        "fwd": dict.fromkeys(("reference", "triton"), scaled),
        "bwd": dict.fromkeys(("reference", "triton"), pulled),
        "differentiable": ("x",),
    }
    return liger_fn.custom_vjp(name, **{**rules, **options})


def odd(x: Tensor, *, mode: bool | None) -> tuple[Tensor]:
    return (x,)


def test_a_call_of_an_op_names_what_is_missing_or_unknown():
    op, x = made("called_for_a_test"), torch.ones(2)
    assert op(x, scale=2.0).tolist() == [4.0, 4.0]  # times has a default
    for args, options, message in (
        ((x,), {}, "option scale must be given"),
        ((x,), {"scale": 2.0, "tims": 3}, r"options must be among \['scale', 'times'\], got tims"),
        ((), {"scale": 2.0, "x": x}, r"options must be among \['scale', 'times'\], got x"),
        ((), {"scale": 2.0}, r"tensors must be 1, \['x'\], got 0"),
        ((x, x), {"scale": 2.0}, r"tensors must be 1, \['x'\], got 2"),
    ):
        with pytest.raises(TypeError, match=f"^called_for_a_test: {message}$"):
            op(*args, **options)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"fwd": {"reference": scaled}}, ValueError, "fwd of 'told' must be keyed 'reference' and"),
        ({"rows": ("q",)}, ValueError, r"rows of 'told' must be among the tensors \['x'\], got"),
        ({"differentiable": ("z",)}, ValueError, "differentiable of 'told' must be among the ten"),
        (
            {"fwd": {"reference": odd, "triton": odd}},
            TypeError,
            "option mode of 'told' must be annotated as one of .*, got bool | None",
        ),
    ],
)
def test_the_table_of_an_op_is_held_to_itself(
    options: dict[str, Any], kind: type[Exception], message: str
):
    with pytest.raises(kind, match=f"^custom_vjp: {message}"):
        made("told", **options)


def test_a_name_is_given_once():
    made("once_for_a_test")
    for name in ("once_for_a_test", "rms_norm", "no name"):
        with pytest.raises(ValueError, match=f"^custom_vjp: the name of '{name}' must be"):
            made(name)


def test_what_is_not_differentiable_has_no_gradient_whatever_else_has_one(backend: str):
    def fwd(x: Tensor, m: Tensor) -> tuple[Tensor]:
        return (x * m,)

    def bwd(d: Tensor, x: Tensor, m: Tensor, *, wanted: Any) -> tuple[Tensor]:
        return (d * m,)

    twice: Any = ("reference", "triton")
    op = made(
        f"masked_for_a_test_{backend}", fwd=dict.fromkeys(twice, fwd), bwd=dict.fromkeys(twice, bwd)
    )
    m = torch.ones(2, requires_grad=True)
    assert not op(torch.ones(2), m).requires_grad
    op(torch.ones(2, requires_grad=True), m).sum().backward()
    assert m.grad is None


def test_options_of_an_op_are_held_to_what_its_rule_says():
    op, x = made("scaled_for_a_test"), torch.ones(2)
    assert op(x, scale=2, times=3).tolist() == [6.0, 6.0]
    with pytest.raises(TypeError, match=r"^scaled_for_a_test: scale must be a number, got Tensor$"):
        op(x, scale=torch.tensor(2.0), times=3)
    with pytest.raises(TypeError, match=r"^scaled_for_a_test: times must be a number, got float$"):
        op(x, scale=2.0, times=3.0)


LOSSES: dict[str, dict[str, Any]] = {
    "dpo_loss": {"loss_type": ("sigmoid", "sft"), "loss_weights": (0.5, 0.5), "ld_alpha": 0.5},
    "orpo_loss": {},
    "cpo_loss": {"label_smoothing": 0.1},
    "simpo_loss": {"gamma_beta_ratio": 0.5},
    "kto_loss": {"desirable_weight": 1.5},
    "grpo_loss": {"delta": 4.0},
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_loss_takes_numbers_that_change(name: str, device: torch.device):
    """Dynamo makes a symbol of the second one."""
    f, row, options = getattr(liger_fn, name), CALLABLE[name], LOSSES[name]
    args = {_NAMES.get(k, k): t for k, t in row.arguments(device).items()}
    args.update({k: v for k, v in _NEEDED.get(name, {}).items() if k != "beta"})

    def loss(scale: float) -> Tensor:
        scaled = {k: v * scale for k, v in options.items() if isinstance(v, float)}
        if name == "dpo_loss":
            scaled["loss_weights"] = (scale, 0.5)
        value: Tensor = f(**{**args, **options, **scaled}, beta=scale)
        return value

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for scale in (0.1, 0.2, 0.3):
        torch.testing.assert_close(compiled(scale), loss(scale))


# the mean of a loss divides one number by another, where torch's own vmap (2.13) has an error
_WHOLE = [row for row in ROWS if row.ops and not _with(row, "y") and row in norms_and_gates.ROWS]


@pytest.mark.parametrize("row", _WHOLE, ids=lambda row: row.id)
def test_vmap_over_no_samples(row: Row, backend: str, device: torch.device):
    """Empty results of the right shapes, as an empty rank wants them: no kernel has an address."""
    args = row.arguments(device)
    at = tuple(i for i, n in enumerate(args) if n in row.differentiable)

    def total(*a: Tensor) -> Tensor:
        return tree_leaves(row.fn(*a))[0].sum()

    for f in (row.fn, grad(total, at)):
        for names in ([name] for name in args), [[*args]]:
            for mapped in names:
                dims = tuple(0 if name in mapped else None for name in args)
                a = [t.expand(2, *t.shape) if n in mapped else t for n, t in args.items()]
                none = [t[:0] if n in mapped else t for n, t in zip(args, a, strict=True)]
                want, got = tree_leaves(vmap(f, dims)(*a)), tree_leaves(vmap(f, dims)(*none))
                assert [(t.shape, t.dtype) for t in got] == [
                    ((0, *t.shape[1:]), t.dtype) for t in want
                ]
