"""The forward of each spec: one function per spec, shared by all modules that have it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import liger_fn
from liger_fn.nn.adapters.binding import bind, with_globals
from liger_fn.nn.adapters.fingerprint import (
    ACTS,
    ROPE_NAME,
    Affine,
    Gate,
    Glu,
    Norm,
    Rope,
    Spec,
)
from liger_fn.nn.gates import projected
from liger_fn.nn.tiles import tiled


def bind_spec(m: nn.Module, spec: Spec, mlp_chunk: int | None) -> None:
    """Let a module compute its spec with the function of liger_fn."""
    match spec:
        case Norm():
            bind(m, _norm(spec))
        case Affine():
            bind(m, _affine)
        case Glu():
            bind(m, _glu(spec, mlp_chunk))
        case Gate():
            bind(m, _gate(spec), "_apply_gate")
        case Rope():
            bind(m, _attention(type(m).forward, spec.layout))


def _of_one(f: Callable[[Any, Tensor], Tensor]) -> Callable[..., Any]:
    """A forward of one tensor; what is called in another way runs its own."""

    def forward(self: Any, *args: Any, **kw: Any) -> Any:
        if kw or len(args) != 1:
            return type(self).forward(self, *args, **kw)
        return f(self, args[0])

    return forward


@functools.cache
def _norm(spec: Norm) -> Callable[..., Any]:
    eps, offset, casting = spec.eps, spec.offset, spec.casting

    def norm(self: Any, x: Tensor) -> Tensor:
        return liger_fn.rms_norm(x, self.weight, getattr(self, eps), offset=offset, casting=casting)

    return _of_one(norm)


@_of_one
def _affine(self: Any, x: Tensor) -> Tensor:
    return liger_fn.layer_norm(x, self.weight, self.bias, self.eps)


@functools.cache
def _glu(spec: Glu, chunk: int | None) -> Callable[..., Any]:
    *inward, down = spec.parts
    act = ACTS[spec.act][len(inward) == 1]

    def tile(self: Any, x: Tensor) -> Tensor:
        return projected(getattr(self, down), act(*[getattr(self, name)(x) for name in inward]))

    def glu(self: Any, x: Tensor) -> Tensor:
        return tiled(functools.partial(tile, self), x, chunk, self)

    return _of_one(glu)


@functools.cache
def _gate(spec: Gate) -> Callable[..., Tensor]:
    act = ACTS[spec.act][True]

    def _apply_gate(self: Any, gate_up: Tensor) -> Tensor:
        return act(gate_up)

    return _apply_gate


@functools.cache
def _attention(theirs: Callable[..., Any], layout: str) -> Callable[..., Any]:
    original = inspect.unwrap(theirs).__globals__[ROPE_NAME]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kw: Any) -> Any:
        if args or kw:  # another axis for the heads, or what the fingerprint has not seen
            return original(q, k, cos, sin, *args, **kw)
        return liger_fn.rope(q, k, cos, sin, layout=layout)

    return with_globals(theirs, **{ROPE_NAME: rotate})
