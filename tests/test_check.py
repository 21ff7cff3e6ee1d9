"""Errors: every message names op, argument, what was wanted and what came, before any work."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_fn import rms_norm, rope, swiglu, swiglu_packed
from liger_fn._check import (
    check_choice,
    check_least,
    check_positive,
    check_same_shape,
    check_share,
    check_tensors,
)
from tests.table import ROWS, Row

FLOATS = "float32, bfloat16, float16 or float64"


class NoWork(TorchDispatchMode):
    """Fails at the first operation on a tensor: a kernel needs memory for its result too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran before the checks were done")


def raises(kind: type[Exception], message: str, f: Callable[..., Any], *a: Any, **kw: Any) -> None:
    with NoWork(), pytest.raises(kind, match=f"^{re.escape(message)}$"):
        f(*a, **kw)


def ones(*shape: int, **kw: Any) -> Tensor:
    return torch.ones(shape, **kw)


# -- rms_norm


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ((2, 4), (3,), "axis n is 3 in w but 4 in x"),
        ((2, 4), (8,), "axis n is 8 in w but 4 in x"),  # x is one shard of the hidden width
        ((4,), (1,), "axis n is 1 in w but 4 in x"),
        ((2, 4), (1, 4), "w must have shape (n), got (1, 4)"),
        ((2, 4), (), "w must have shape (n), got ()"),
        ((), (1,), "x must have shape (..., n), got ()"),
        ((), (), "x must have shape (..., n), got ()"),
    ],
)
def test_rms_norm_refuses_shapes_that_disagree(x, w, message):
    raises(ValueError, f"rms_norm: {message}", rms_norm, ones(*x), ones(*w))


@pytest.mark.parametrize("casting", ["hf", "", "Llama", None, 1])
def test_rms_norm_refuses_an_unknown_casting(casting):
    message = f"rms_norm: casting must be one of 'llama', 'gemma', 'none', got {casting!r}"
    raises(ValueError, message, rms_norm, ones(2, 4), ones(4), casting=casting)


def test_rms_norm_without_a_gain_still_checks_x():
    raises(ValueError, "rms_norm: x must have shape (..., n), got ()", rms_norm, ones(), None)


# -- swiglu


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        ((2, 4), (2, 3), "axis n is 3 in up but 4 in gate"),
        ((2, 4), (2, 1), "axis n is 1 in up but 4 in gate"),
        ((2, 4), (3, 4), "the shape must be the same: (3, 4) in up but (2, 4) in gate"),
        ((2, 4), (1, 4), "the shape must be the same: (1, 4) in up but (2, 4) in gate"),
        ((2, 4), (4,), "the shape must be the same: (4,) in up but (2, 4) in gate"),
        ((), (), "gate must have shape (..., n), got ()"),
        ((4,), (), "up must have shape (..., n), got ()"),
    ],
)
def test_swiglu_refuses_shapes_that_differ(gate, up, message):
    raises(ValueError, f"swiglu: {message}", swiglu, ones(*gate), ones(*up))


@pytest.mark.parametrize("shape", [(5,), (1,), (2, 3, 7)])
def test_swiglu_packed_refuses_an_odd_width(shape):
    message = f"swiglu_packed: the last axis of gate_up must be even, got {shape[-1]}"
    raises(ValueError, message, swiglu_packed, ones(*shape))


def test_swiglu_packed_refuses_a_number():
    message = "swiglu_packed: gate_up must have shape (..., 2n), got ()"
    raises(ValueError, message, swiglu_packed, ones())


# -- rope: q (2, 3, 4, 8), k (2, 1, 4, 8), cos and sin (4, 8)


def turned(**changed: Any) -> tuple[Any, ...]:
    args = {"q": (2, 3, 4, 8), "k": (2, 1, 4, 8), "cos": (4, 8), "sin": (4, 8)}
    if "angles" in changed:
        changed["cos"] = changed["sin"] = changed.pop("angles")
    return tuple(ones(*shape) for shape in (args | changed).values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": (4, 8)}, "q must have shape (..., h, t, k), got (4, 8)"),
        ({"k": (4, 8)}, "k must have shape (..., hk, t, k), got (4, 8)"),
        ({"cos": (8,)}, "cos must have shape (..., t, r), got (8,)"),
        ({"sin": ()}, "sin must have shape (..., t, r), got ()"),
        ({"k": (2, 1, 4, 6)}, "axis k is 6 in k but 8 in q"),
        ({"k": (2, 1, 5, 8)}, "axis t is 5 in k but 4 in q"),
        ({"angles": (5, 8)}, "axis t is 5 in cos but 4 in q"),
        ({"angles": (1, 8)}, "axis t is 1 in cos but 4 in q"),
        ({"sin": (3, 8)}, "axis t is 3 in sin but 4 in q"),
        ({"sin": (4, 6)}, "axis r is 6 in sin but 8 in cos"),
        ({"sin": (1, 4, 8)}, "the shape must be the same: (1, 4, 8) in sin but (4, 8) in cos"),
        ({"k": (3, 1, 4, 8)}, "leading axes are (3,) in k but (2,) in q"),
        ({"k": (1, 4, 8)}, "leading axes are () in k but (2,) in q"),
        ({"angles": (4, 3)}, "axis r of cos must be even and at most 8, got 3"),
        ({"angles": (4, 1)}, "axis r of cos must be even and at most 8, got 1"),
        ({"angles": (4, 10)}, "axis r of cos must be even and at most 8, got 10"),
        ({"angles": (3, 4, 8)}, "leading axes of cos must broadcast to (2,), got (3,)"),
        ({"angles": (0, 4, 8)}, "leading axes of cos must broadcast to (2,), got (0,)"),
        ({"angles": (1, 2, 4, 8)}, "leading axes of cos must broadcast to (2,), got (1, 2)"),
        (
            {"q": (3, 4, 8), "k": (1, 4, 8), "angles": (1, 4, 8)},
            "leading axes of cos must broadcast to (), got (1,)",
        ),
        (
            {"q": (2, 3, 1, 4, 8), "k": (2, 3, 1, 4, 8), "angles": (2, 4, 8)},
            "leading axes of cos must broadcast to (2, 3), got (2,)",
        ),
    ],
)
def test_rope_refuses_shapes_that_disagree(changed, message):
    raises(ValueError, f"rope: {message}", rope, *turned(**changed))


@pytest.mark.parametrize("layout", ["neox", "", "Half", None, True])
def test_rope_refuses_an_unknown_layout(layout):
    message = f"rope: layout must be one of 'half', 'interleaved', got {layout!r}"
    raises(ValueError, message, rope, *turned(), layout=layout)


# -- kind, dtype and device of every argument of these functions

SIGNATURES: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "rms_norm": (rms_norm, {"x": (2, 4), "w": (4,)}),
    "swiglu": (swiglu, {"gate": (2, 4), "up": (2, 4)}),
    "swiglu_packed": (swiglu_packed, {"gate_up": (2, 4)}),
    "rope": (rope, {"q": (2, 3, 4, 8), "k": (2, 1, 4, 8), "cos": (4, 8), "sin": (4, 8)}),
}
ARGUMENTS = [(op, name) for op, (_, shapes) in SIGNATURES.items() for name in shapes]
every_argument = pytest.mark.parametrize(("op", "name"), ARGUMENTS)


def with_one(
    op: str, name: str, change: Callable[[Tensor], Any]
) -> tuple[Callable[..., Any], list[Any]]:
    f, shapes = SIGNATURES[op]
    args = {n: ones(*shape) for n, shape in shapes.items()}
    args[name] = change(args[name])
    return f, list(args.values())


@every_argument
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.bool, torch.complex64, torch.uint8]
)
def test_other_dtypes_than_floats_are_refused(op, name, dtype):
    f, args = with_one(op, name, lambda t: t.to(dtype))
    raises(TypeError, f"{op}: {name} must hold {FLOATS}, got {dtype}", f, *args)


@every_argument
def test_float8_is_refused(op, name):
    f, args = with_one(op, name, lambda t: t.to(torch.float8_e4m3fn))
    raises(TypeError, f"{op}: {name} must hold {FLOATS}, got torch.float8_e4m3fn", f, *args)


@every_argument
@pytest.mark.parametrize("value", [1.0, [1.0], "x", 1])
def test_what_is_no_tensor_is_refused(op, name, value):
    f, args = with_one(op, name, lambda t: value)
    raises(TypeError, f"{op}: {name} must be a tensor, got {type(value).__name__}", f, *args)


@pytest.mark.parametrize(("op", "name"), [a for a in ARGUMENTS if a != ("rms_norm", "w")])
def test_a_missing_tensor_is_refused(op, name):
    f, args = with_one(op, name, lambda t: None)
    raises(TypeError, f"{op}: {name} must be a tensor, got NoneType", f, *args)


@pytest.mark.parametrize(("op", "name"), [a for a in ARGUMENTS if a[0] != "swiglu_packed"])
def test_two_devices_are_refused(op, name):
    f, args = with_one(op, name, lambda t: t.to("meta"))
    first, second, *_ = SIGNATURES[op][1]
    if name == first:
        message = f"{op}: {second} is on cpu but {first} is on meta"
    else:
        message = f"{op}: {name} is on meta but {first} is on cpu"
    raises(ValueError, message, f, *args)


# -- the same of every public function, from the table

FULLEST = {row.covers: row for row in sorted(ROWS, key=lambda row: len(row.arguments()))}


def arguments(wanted: Callable[[Row, str], bool] = lambda row, name: True) -> pytest.MarkDecorator:
    """Every argument of every public function: of the row that gives the most of them."""
    pairs = [(row, name) for row in FULLEST.values() for name in row.arguments()]
    kept = [
        pytest.param(*pair, id=f"{pair[0].covers}-{pair[1]}") for pair in pairs if wanted(*pair)
    ]
    return pytest.mark.parametrize(("row", "name"), kept)


def required(row: Row, name: str) -> bool:
    return name not in row.optional


def row_with_one(row: Row, name: str, change: Callable[[Tensor], Any]) -> list[Any]:
    args: dict[str, Any] = row.arguments()
    args[name] = change(args[name])
    return list(args.values())


def row_raises(
    row: Row, name: str, kind: type[Exception], says: str, change: Callable[[Tensor], Any]
) -> None:
    args = row_with_one(row, name, change)
    with NoWork(), pytest.raises(kind, match=rf"^{row.covers}: .*{says}"):
        row.fn(*args)


@arguments()
def test_every_function_wants_tensors(row, name):
    row_raises(row, name, TypeError, "must be a tensor, got list", lambda t: [1.0])


@arguments(required)
def test_every_function_wants_its_tensors(row, name):
    row_raises(row, name, TypeError, "must be a tensor, got NoneType", lambda t: None)


@arguments()
def test_every_function_wants_floats_where_it_computes_and_integers_where_it_counts(row, name):
    def other(t: Tensor) -> Tensor:
        return t.long() if t.is_floating_point() else t.double()

    row_raises(row, name, TypeError, r"must hold .*, got torch\.(int64|float64)", other)


@arguments(lambda row, name: name != "alpha")  # one number
def test_every_function_wants_axes(row, name):
    row_raises(row, name, ValueError, r"got \(\)|\(\) in ", lambda t: t.new_zeros(()))


@arguments(lambda row, name: len(row.arguments()) > 1)
def test_every_function_wants_one_device(row, name):
    row_raises(
        row, name, ValueError, "is on (meta|cpu) but .* is on (meta|cpu)", lambda t: t.to("meta")
    )


# -- the wording, where no function above reaches it


def test_names_of_axes_are_compared_across_arguments_and_dots_are_not():
    check_tensors("op", a=(ones(2, 3), "... n"), b=(ones(3), "n"), c=(ones(5, 7, 3), "... n"))
    check_tensors("op", a=(ones(3, 3), "n n"), b=(ones(3, 2), "n d"))
    raises(
        ValueError, "op: axis n is 2 in a but 3 in a", check_tensors, "op", a=(ones(3, 2), "n n")
    )


def test_none_passes_where_a_tensor_is_optional():
    check_tensors("op", a=(ones(3), "n"), b=(None, "? n"))
    check_same_shape("op", a=None, b=ones(3), c=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_labels_must_be_integers(dtype):
    with pytest.raises(TypeError, match=f"^op: y must hold integers, got {re.escape(str(dtype))}$"):
        check_tensors("op", y=(ones(3, dtype=dtype), "int ..."))


def test_integers_of_every_width_pass_as_labels():
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        check_tensors("op", y=(ones(3, dtype=dtype), "int ..."))


def test_a_shape_that_differs_is_told_with_both_names():
    message = "op: the shape must be the same: (2,) in c but (3,) in a"
    raises(ValueError, message, check_same_shape, "op", a=ones(3), b=ones(3), c=ones(2))


@pytest.mark.parametrize("value", [0, -1, 0.0, float("nan"), -float("inf")])
def test_what_must_be_positive_is_refused_at_zero_and_below(value):
    raises(
        ValueError, f"op: chunk must be above 0, got {value}", check_positive, "op", "chunk", value
    )


def test_positive_numbers_pass_and_none_where_it_may():
    for value in (1, 1e-30, True):
        check_positive("op", "cap", value)
    check_positive("op", "cap", None, optional=True)
    raises(TypeError, "op: cap must be a number, got NoneType", check_positive, "op", "cap", None)
    raises(ValueError, "op: cap must be finite, got inf", check_positive, "op", "cap", math.inf)
    raises(ValueError, "op: cap must be above 0, got nan", check_positive, "op", "cap", math.nan)


def test_ranges_hold_nan_to_be_outside():
    for check, wanted in ((check_least, "be at least 0"), (check_share, "lie in [0, 1]")):
        check("op", "rate", 0)
        raises(ValueError, f"op: rate must {wanted}, got nan", check, "op", "rate", math.nan)
        raises(ValueError, f"op: rate must {wanted}, got -1", check, "op", "rate", -1)
        raises(TypeError, "op: rate must be a number, got str", check, "op", "rate", "1")
    raises(ValueError, "op: rate must lie in [0, 1], got 1.5", check_share, "op", "rate", 1.5)


def test_a_choice_is_told_with_all_names():
    message = "op: mode must be one of 'a', 'b', got 'c'"
    raises(ValueError, message, check_choice, "op", "mode", "c", ("a", "b"))
    check_choice("op", "mode", "b", ("a", "b"))
