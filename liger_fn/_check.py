"""Checks of arguments before any launch.

They share one wording: op, argument, what was wanted, what came.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WHOLE = (int, torch.SymInt)
NUMBERS = (*WHOLE, float, torch.SymFloat)


def check_tensors(op: str, **named: tuple[Tensor | None, str]) -> None:
    """Hold tensors to shapes such as "... n" or "v d", to floating dtypes and to one device.

    "..." stands for any number of leading axes and is not compared; a name stands for one size
    everywhere. A spec that starts with "int" asks for integers instead of floats, one that starts
    with "?" lets None pass.
    """
    sizes: dict[str, tuple[str, int]] = {}
    home: tuple[str, torch.device] | None = None
    for name, (t, spec) in named.items():
        optional, integer, free, axes = _parsed(spec)
        if t is None and optional:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.dtype not in (_INTEGERS if integer else _FLOATS):
            kind = "integers" if integer else "float32, bfloat16, float16 or float64"
            raise TypeError(f"{op}: {name} must hold {kind}, got {t.dtype}")
        if home is None:
            home = name, t.device
        elif t.device != home[1]:
            raise ValueError(f"{op}: {name} is on {t.device} but {home[0]} is on {home[1]}")
        shape = t.shape
        lead = len(shape) - len(axes)
        if lead < 0 or (lead and not free):
            wanted = ", ".join(["..."] * free + axes)
            raise ValueError(
                f"{op}: {name} must have shape ({wanted}), got {tuple(shape)}{_partitioned(t)}"
            )
        for i, axis in enumerate(axes, lead):
            first, known = sizes.setdefault(axis, (name, shape[i]))
            if shape[i] != known:
                text = f"{op}: axis {axis} is {shape[i]} in {name} but {known} in {first}"
                raise ValueError(text + _partitioned(t))


def _parsed(spec: str) -> tuple[bool, bool, bool, list[str]]:
    """Whether None may pass, whether integers are asked for, leading axes, the other axes."""
    axes = spec.split()
    optional = axes[0] == "?"
    axes = axes[1:] if optional else axes
    integer = axes[0] == "int"
    axes = axes[1:] if integer else axes
    free = axes[:1] == ["..."]
    return optional, integer, free, axes[1:] if free else axes


def _partitioned(t: Tensor) -> str:
    """The cure, where a tensor does not fit because DeepSpeed has left nothing of it."""
    if t.shape != (0,):
        return ""
    return (
        " (0 elements: is it a parameter partitioned by ZeRO-3? It is whole inside the call of the "
        "module that owns it, as in nn.LMHead, and under deepspeed.zero.GatheredParameters)"
    )


def check_same_shape(op: str, **named: Tensor | None) -> None:
    """Hold tensors to one shape."""
    home: tuple[str, torch.Size] | None = None
    for name, t in named.items():
        if t is None:
            continue
        if home is None:
            home = name, t.shape
        elif t.shape != home[1]:
            raise ValueError(
                f"{op}: the shape must be the same: {tuple(t.shape)} in {name} but "
                f"{tuple(home[1])} in {home[0]}"
            )


def check_choice(op: str, name: str, value: object, choices: Collection[str]) -> None:
    """Hold an option to a list of names."""
    if value not in choices:
        wanted = ", ".join(map(repr, choices))
        raise ValueError(f"{op}: {name} must be one of {wanted}, got {value!r}")


def check_numbers(op: str, **named: object) -> None:
    """Hold options to numbers: a tensor would have no gradient; ignore_index to a whole one."""
    for name, value in named.items():
        whole = name == "ignore_index"
        if not isinstance(value, WHOLE if whole else NUMBERS):
            kind = "an integer" if whole else "a number"
            raise TypeError(f"{op}: {name} must be {kind}, got {type(value).__name__}")


def check_positive(op: str, name: str, value: float | None, *, optional: bool = False) -> None:
    """Hold a number to values above 0."""
    if optional and value is None:
        return
    if not isinstance(value, NUMBERS):
        check_numbers(op, **{name: value})
    elif not 0 < value < math.inf:
        wanted = "above 0" if value != math.inf else "finite"
        raise ValueError(f"{op}: {name} must be {wanted}, got {value}")


def check_least(op: str, name: str, value: float) -> None:
    """Hold a number to values from 0 on."""
    if not isinstance(value, NUMBERS):
        check_numbers(op, **{name: value})
    elif not value >= 0:
        raise ValueError(f"{op}: {name} must be at least 0, got {value}")


def check_share(op: str, name: str, value: float) -> None:
    """Hold a number to [0, 1]."""
    if not isinstance(value, NUMBERS):
        check_numbers(op, **{name: value})
    elif not 0 <= value <= 1:
        raise ValueError(f"{op}: {name} must lie in [0, 1], got {value}")


def check_count(op: str, name: str, value: float | Tensor | None, **home: Tensor) -> None:
    """Hold what a mean divides by to one number, not below 0, beside the tensor it divides."""
    if isinstance(value, Tensor):
        ((of, t),) = home.items()
        if value.dim():
            raise ValueError(f"{op}: {name} must have shape (), got {tuple(value.shape)}")
        if value.device not in (t.device, torch.device("cpu")):
            raise ValueError(f"{op}: {name} is on {value.device} but {of} is on {t.device}")
        if value.dtype not in (*_FLOATS, *_INTEGERS):
            raise TypeError(f"{op}: {name} must hold a number, got {value.dtype}")
    elif value is not None:
        check_least(op, name, value)
