"""Triton's interpreter as the suite uses it: rounding as a GPU does, and four times as fast."""

from __future__ import annotations

import functools
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
    swap, modules, scope = interpreter._patch_lang, (tl, tl.core), interpreter._LangPatchScope()

    @functools.cache
    def once(fn: Any) -> Any:
        used = [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in modules]
        if any(tl.core.is_builtin(m.load) for m in used):
            swap(fn)
        return scope  # with nothing to restore

    interpreter._patch_lang = once


def remember_types() -> None:
    """Make each type of a block once: a tensor is made at every operation, and its type with it."""
    block, tensor = tl.block_type.__init__, tl.tensor.__init__
    numpys, known, dtypes = interpreter._get_np_dtype, {}, {}

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(n, "value", n) for n in shape))
        if key not in known:
            block(self, element_ty, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        made = type.__dict__.get("of_a_tensor")
        if made is None:
            tensor(self, handle, type)
            type.of_a_tensor = {k: v for k, v in self.__dict__.items() if k != "handle"}
        else:
            self.__dict__.update(made, handle=handle)

    def numpy_dtype(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = numpys(type)
        return dtypes[type.name]

    tl.block_type.__init__, tl.tensor.__init__ = block_init, tensor_init
    interpreter._get_np_dtype = numpy_dtype
