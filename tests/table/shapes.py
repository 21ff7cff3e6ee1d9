"""Sizes at which functions are measured, by the name of what is that large, and the least work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Sizes = Mapping[str, Any]


class Model(NamedTuple):
    """Widths of a language model: of rows, of gates, of the vocabulary; heads and their width."""

    d: int
    ff: int
    v: int
    h: int
    hk: int
    k: int


MODELS = {
    "llama-2-7b": Model(4096, 11008, 32000, 32, 32, 128),
    "llama-3-8b": Model(4096, 14336, 128256, 32, 8, 128),
    "qwen-2.5-7b": Model(3584, 18944, 152064, 28, 4, 128),
    "gemma-2-2b": Model(2304, 9216, 256000, 8, 4, 256),
    "gemma-2-9b": Model(3584, 14336, 256000, 16, 8, 256),
}


def rows(m: int, n: int) -> Sizes:
    return {"lead": (m,), "n": n}


def gates(*names: str) -> dict[str, Sizes]:
    return {name: rows(16384, MODELS[name].ff) for name in names}


def logits(m: int, name: str) -> Sizes:
    return {"lead": (m,), "v": MODELS[name].v, "full": False}


def heads(m: int, name: str, **flags: bool) -> Sizes:
    return {"lead": (m,), "d": MODELS[name].d, "v": MODELS[name].v, **flags}


def positions(name: str, **more: Any) -> Sizes:
    model = MODELS[name]
    return {"lead": (4,), "t": 4096, "h": model.h, "hk": model.hk, **more}


NORMS = {
    "llama-3-8b": rows(16384, 4096),
    "short rows": rows(32768, 1024),
    "long rows": rows(4096, 16384),
    "qwen-2.5-7b": rows(16384, 3584),
    "decode": rows(8, 4096),
    "tiny": rows(8, 64),  # nothing but host time
}
SEQUENCES = {"llama-3-8b": {"b": 4, "t": 1024, "d": 4096, "v": 128256}}
SMALL = rows(64, 256)
SMALL_LOGITS = {"lead": (64,), "v": 1000, "full": False}
SMALL_HEAD = {"lead": (64,), "d": 64, "v": 1000}
SMALL_SEQUENCES = {"b": 2, "t": 16, "d": 64, "v": 1000}


def some(shapes: Mapping[str, Sizes], *names: str) -> dict[str, Sizes]:
    return {name: shapes[name] for name in names}


# least work of a forward, and of a forward and a backward: elements moved, or operations
Work = Callable[..., tuple[float, float]]


def elements(forward: float, both: float) -> Work:
    """So often each element of a tensor of rows is read or written."""

    def work(lead: tuple[int, ...], **rest: Any) -> tuple[float, float]:
        size = math.prod(lead) * rest.get("n", rest.get("v"))
        return forward * size, both * size

    return work


def products(forward: float, both: float) -> Work:
    """So many products of all rows with a projection (v, d)."""

    def work(d: int, v: int, **rest: Any) -> tuple[float, float]:
        m = math.prod(rest["lead"]) if "lead" in rest else rest["b"] * rest["t"]
        return forward * 2 * m * d * v, both * 2 * m * d * v

    return work


def images(b: int, per_group: int, at: tuple[int, ...], groups: int = 2) -> tuple[float, float]:
    size = b * groups * per_group * math.prod(at)
    return 2 * size, 5 * size


def turned(
    lead: tuple[int, ...], t: int, h: int, hk: int, pairs: int, **_: Any
) -> tuple[float, float]:
    size = math.prod(lead) * t * (h + hk) * 2 * pairs
    return 2 * size, 4 * size
