"""How close is close enough: derived from plain torch in the same dtype, never tuned.

The error to a float64 oracle is at most twice that of plain torch, plus one ulp of the largest
entry. Where the oracle overflows the dtype, the result must be the same infinity. Shapes and
strides are tested in float64, against a bound that no rounding reaches and no wrong number meets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


def ulp(at: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between the numbers of `dtype` around `at`, as float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(at.double().abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(at, info.eps, dtype=torch.float64), exponent - 1)


def bounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """In float64, with all that overflows `dtype` one step beyond its largest number."""
    top = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
    beyond = (top + ulp(top, dtype)).item()
    return t.double().clamp(-beyond, beyond)


def error(got: Tensor, exact: Tensor) -> float:
    """The largest distance to the oracle, in float64."""
    far = (bounded(got, got.dtype) - bounded(exact, got.dtype)).abs()
    return far.nan_to_num(nan=math.inf).amax().item() if far.numel() else 0.0


def slack(got: Tensor, exact: Tensor) -> float:
    """One ulp of the largest entry."""
    exact = bounded(exact, got.dtype).abs()
    return ulp(exact.amax(), got.dtype).item() if exact.numel() else 0.0


def assert_within_ulps(got: Tensor, wanted: Tensor, ulps: int, *, of: torch.dtype) -> None:
    """Hold two tensors of one dtype to a distance of so many ulps of `of`, entry by entry."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    far = (got.double() - wanted.double()).abs() / ulp(wanted, of)
    same = got.eq(wanted)  # infinities too
    worst = far.masked_fill(same, 0.0).nan_to_num(nan=torch.inf).amax() if far.numel() else 0.0
    assert worst <= ulps, f"{worst:.1f} ulp apart"


def assert_exact_as(got: Tensor, plain: Tensor, exact: Tensor, what: str = "") -> None:
    """Hold the error of `got` to 2 x the error of plain torch + 1 ulp."""
    assert got.dtype == plain.dtype, f"{what}: {got.dtype}, plain torch gives {plain.dtype}"
    assert got.shape == plain.shape == exact.shape, f"{what}: {got.shape}, not {exact.shape}"
    rounded = exact.to(got.dtype)
    fits = rounded.isfinite()
    assert torch.equal(got[~fits], rounded[~fits]), f"{what}: not the infinity of the oracle"
    if not fits.any():
        return
    exact = exact[fits]
    error, allowed = (
        (t[fits].double() - exact).abs().nan_to_num(nan=torch.inf).amax() for t in (got, plain)
    )
    allowed = 2 * allowed + ulp(exact.abs().amax(), got.dtype)
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def results(
    f: Callable[..., Any], args: tuple[Tensor, ...], dys: tuple[Tensor, ...] | None = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs of f and gradients of all arguments, as strided; `dys` are drawn if not given."""
    leaves = [t.detach().requires_grad_() for t in args]
    y = f(*leaves)
    ys = y if isinstance(y, tuple) else (y,)
    if dys is None:
        dys = cotangents(ys)
    assert all(y.grad_fn is not None for y in ys)
    return tuple(y.detach() for y in ys), torch.autograd.grad(ys, leaves, dys)


def on_a_cpu(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run f on a CPU, and bring its result to where the first argument lies."""
    return lambda *args: f(*(t.cpu() for t in args)).to(args[0].device)


def cotangents(ys: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(7)
    return tuple(torch.randn(y.shape, generator=g, dtype=torch.float64).to(y) for y in ys)


def assert_pure_and_exact(
    f: Callable[..., Any], plain: Callable[..., Any], oracle: Callable[..., Any], *args: Tensor
) -> None:
    """Hold f and its gradients to the error rule, and f to purity."""
    dys, ours = pure_results(f, args, plain)
    torches = results(plain, args, dys)
    exact = results(oracle, tuple(t.double() for t in args), tuple(t.double() for t in dys))
    for kind, o, p, e in zip(("output", "gradient"), ours, torches, exact, strict=True):
        for i in range(len(o)):
            assert_exact_as(o[i], p[i], e[i], f"{kind} {i}")


def assert_pure_and_close(
    f: Callable[..., Any], oracle: Callable[..., Any], *args: Tensor, dys: tuple[Tensor, ...] = ()
) -> None:
    """Hold f of float64 tensors and its gradients to the oracle, and f to purity."""
    assert all(t.dtype == torch.float64 for t in args)
    dys, ours = pure_results(f, args, oracle, dys)
    exact = results(oracle, args, dys)
    for o, e in zip((*ours[0], *ours[1]), (*exact[0], *exact[1]), strict=True):
        torch.testing.assert_close(o, e, rtol=1e-12, atol=1e-12)


def pure_results(
    f: Callable[..., Any],
    args: tuple[Tensor, ...],
    like: Callable[..., Any],
    dys: tuple[Tensor, ...] = (),
) -> tuple[tuple[Tensor, ...], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Upstream gradients and `results`: nothing given was written, nothing made aliases it."""
    if not dys:
        ys = like(*args)
        dys = cotangents(ys if isinstance(ys, tuple) else (ys,))
    given = (*args, *dys)
    before = [t.clone() for t in given]
    ours = results(f, args, dys)
    assert all(same_bits(t, b) for t, b in zip(given, before, strict=True)), "an argument changed"
    made, theirs = (*ours[0], *ours[1]), {home(t) for t in given if t.numel()}
    assert not theirs & {home(t) for t in made if t.numel()}, "a result aliases an argument"
    return dys, ours


def far_apart(device: torch.device, folder: Path, *shape: int) -> Tensor:
    """Three entries of (3, *shape), bfloat16, so far apart that the third is beyond 2**31 elements.

    As much lies before the first, so that an offset that wraps reads zeros, not the memory of
    others. On a CPU the storage is a file with holes, on a GPU 8 GiB.
    """
    stride = 2**30 + 2**20
    n = 2**31 + 2 * stride + torch.Size(shape).numel()
    if device.type == "cuda":
        if torch.cuda.mem_get_info()[0] < 3 * n:
            pytest.skip("needs 13 GB of free memory")
        storage = torch.zeros(n, device=device, dtype=torch.bfloat16)
    else:
        path = folder / "holes"
        with path.open("wb") as file:
            file.truncate(2 * n)
        storage = torch.from_file(str(path), shared=True, size=n, dtype=torch.bfloat16)
        path.unlink()
    inner = torch.empty(shape, device="meta").stride()
    view = storage.as_strided((3, *shape), (stride, *inner), 2**31)
    return view.copy_(torch.randn(view.shape, dtype=torch.float64))


def home(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree bit for bit, signs of zeros and payloads of NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
