"""Where and how kernels run: the choice of backend, the device guard, tiles and grids.

The device decides: CUDA, ROCm and XPU tensors run Triton, all others the plain torch reference.
With `TRITON_INTERPRET=1` in the environment CPU tensors run the kernels too, through Triton's
interpreter.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # macOS, Windows: the module must import, its kernels are never launched
    HAS_TRITON = False
    tl: Any = SimpleNamespace(constexpr=None)  # type: ignore[no-redef]  # stands in for a module
    triton: Any = SimpleNamespace(jit=lambda fn: fn)  # type: ignore[no-redef]  # likewise

Backend = Literal["reference", "triton"]
Maybe = Tensor | None
Rule = Callable[..., tuple[Maybe, ...]]

_INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
_TRITON_DEVICES = {"cuda", "xpu"} | ({"cpu"} if _INTERPRET else set())
_asked: ContextVar[Backend | None] = ContextVar("liger_fn_backend", default=None)

# registers hold a row of this many elements; longer rows are walked in strides of it, or of less
_MAX_BLOCK = 16384


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Run every function of this library on one backend inside a `with` block.

    The choice belongs to the current thread and task. A compiled function keeps the backend that
    was in force when it was compiled.

    Args:
        backend: "reference" (plain torch) or "triton" (the kernels).

    Raises:
        ValueError: at once for another name; from the function that is called when the tensors it
            is given lie where the backend cannot run.

    Example:
        >>> with using("reference"):
        ...     y = liger_fn.swiglu(torch.ones(2), torch.ones(2))
    """
    if backend not in ("reference", "triton"):
        raise ValueError(f"using: backend must be 'reference' or 'triton', got {backend!r}")
    token = _asked.set(backend)
    try:
        yield
    finally:
        _asked.reset(token)


def backend_for(device_type: str) -> Backend:
    """Name the backend that serves tensors of a device type; raise if the asked-for one cannot."""
    asked = _asked.get()
    can = HAS_TRITON and device_type in _TRITON_DEVICES
    if asked == "triton" and not can:
        cure = "set TRITON_INTERPRET=1 before import" if HAS_TRITON else "install triton"
        raise NotImplementedError(
            f"the triton backend cannot run on {device_type} tensors; {cure}, or use 'reference'"
        )
    return asked or ("triton" if can else "reference")


# Dynamo cannot trace a ContextVar: the answer is a constant of the compiled graph. The mark of
# torch.compiler.assume_constant_result, which would import Dynamo here, for seconds.
backend_for._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **meta: object) -> None:
    """Launch a kernel on the device of its first tensor; an empty grid launches nothing.

    Every operation of a kernel rounds by itself, as in plain torch and in the interpreter. A fused
    a * b + c would not: a b - c, with c that product rounded, must be 0.
    """
    if 0 in grid:
        return
    meta["enable_fp_fusion"] = False
    first = next(t for t in args if isinstance(t, Tensor))
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            kernel[grid](*args, **meta)
    else:
        kernel[grid](*args, **meta)


def row_tile(
    n: int, limit: int = 8192, per_warp: int = 512, most_warps: int = 16
) -> dict[str, int]:
    """Block and warps for a kernel that walks rows of n elements, at most `limit` at a time."""
    block = min(1 << max(n - 1, 0).bit_length(), limit, _MAX_BLOCK)
    return {"BLOCK": block, "num_warps": min(max(block // per_warp, 1), most_warps)}


def strip_tile(
    rows: int, n: int, x: Tensor, per_warp: int = 512
) -> tuple[int, int, dict[str, int]]:
    """Programs, stages and tile of a persistent loop over rows that keeps sums in registers.

    As few programs as keep a processor busy: each leaves sums of its own to be added up. Rows on
    their way lie in shared memory, of which every GPU has 48 KiB for what is loaded of x and dy.
    """
    tile = row_tile(n, _MAX_BLOCK, per_warp)
    stages = 3 if 6 * tile["BLOCK"] * x.element_size() <= 48 << 10 else 1
    return strips(rows, x.device, max(1, 8192 // tile["BLOCK"])), stages, tile


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4  # the interpreter runs programs one after another: few, but more than one


def strips(rows: int, device: torch.device, per_processor: int = 1) -> int:
    """How many programs share `rows` rows in a persistent loop."""
    return max(1, min(rows, per_processor * _processors(device)))


def rows_of(t: Tensor, n: int) -> Tensor:
    """View `t` as (m, n) with each row contiguous; copy only where no such view exists."""
    flat = t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), n)
    return flat if flat.stride(1) == 1 or n == 1 else flat.contiguous()


def contiguous(t: Tensor | None) -> Tensor | None:
    """Lay a tensor out contiguously, if there is one."""
    return None if t is None else t.contiguous()


def fresh(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a result shaped like t. From a torch.Size it would take four times as long."""
    return torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)


def fresh_rows(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for one number a row of t."""
    return t.new_empty(tuple(t.shape[:-1]), dtype=dtype)


def by_group(w: Tensor | None, groups: int | None) -> Tensor | None:
    """One row (n,) of a shared argument for each group of rows, (g, n); (n,) without groups."""
    if w is None or groups is None:
        return contiguous(w)
    return w.expand(groups, w.shape[-1]).contiguous()
