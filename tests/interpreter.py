"""Triton's interpreter as the suite uses it: rounding as a GPU does, and twice as fast."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter


def round_to_nearest_even() -> None:
    """Round to bfloat16 as a GPU does: by itself the interpreter truncates (3.7.1)."""
    convert = interpreter._convert_float

    def nearest(given: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(given, source, target, mode)
        bits = torch.tensor(given).bfloat16().view(torch.int16)
        return bits.numpy().view("uint16").reshape(given.shape)

    interpreter._convert_float = nearest


def stay_patched() -> None:
    """Let triton.language stay interpreted: to swap it at each call takes half of all time."""
    swap, modules = interpreter._patch_lang, (tl, tl.core)

    def once(fn: Any) -> Any:
        used = [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in modules]
        if any(tl.core.is_builtin(m.load) for m in used):
            swap(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = once
