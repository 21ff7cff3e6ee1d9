"""What a module computes, found by running its own forward on tiny inputs, never by its name.

A twin of the module (its class and plain attributes, but parameters of ours on a CPU, in training
mode so that a dropout shows) is run beside the function of liger_fn that might replace it. Norms
must agree bit for bit in float32, bfloat16 and a mix of both; gates and rotations, where the order
of operations is free, to 1e-12 in float64.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

import liger_fn
from liger_fn.nn.adapters.binding import is_replaced

EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
ACT_NAMES = ("act_fn", "activation_fn", "act")
PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate_up_proj", "down_proj"),
)
ROPE_NAME = "apply_rotary_pos_emb"
ACTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (liger_fn.swiglu, liger_fn.swiglu_packed),
    "gelu_tanh": (liger_fn.geglu, liger_fn.geglu_packed),
    "gelu": (
        functools.partial(liger_fn.geglu, approximate="none"),
        functools.partial(liger_fn.geglu_packed, approximate="none"),
    ),
}


@dataclass(frozen=True)
class Norm:
    """An rms_norm: where its eps is kept, and its options."""

    eps: str
    offset: float
    casting: str


@dataclass(frozen=True)
class Affine:
    """A layer_norm over the last axis."""


@dataclass(frozen=True)
class Glu:
    """A gated feed-forward layer: names of its projections, down last; two where it is packed."""

    act: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Gate:
    """The gate of packed experts, which they call as `_apply_gate`."""

    act: str


@dataclass(frozen=True)
class Rope:
    """A rotation of queries and keys in an attention layer."""

    layout: str


Spec = Norm | Affine | Glu | Gate | Rope


def fingerprint(m: nn.Module) -> tuple[str, Spec | str] | None:
    """Name the switch that a module falls under with its spec, or with the reason for having none.

    None where the module looks like nothing that we replace.
    """
    name = type(m).__name__
    if type(m).__module__.startswith("liger_fn."):
        return None  # ours already
    found: Iterable[tuple[str, Spec | None, bool, str]] = (
        ("rms_norm", fit_norm(m), "RMSNorm" in name, "computes something else than rms_norm"),
        ("layer_norm", fit_layer(m), _is_layer_norm(m), "is not over one last axis"),
        (
            "glu",
            fit_glu(m) or fit_gate(m),
            name.endswith(("MLP", "Experts")),
            "is no gate of silu or gelu",
        ),
        ("rope", _rope_of(m), name.endswith("Attention"), "calls no rotation that is rope"),
    )
    for switch, spec, _, _ in found:
        if spec is not None:
            return switch, "its forward was replaced by others" if is_replaced(m) else spec
    return next(((switch, why) for switch, _, looks, why in found if looks), None)


def fit_norm(m: nn.Module) -> Norm | None:
    """Recognise an rms_norm with a gain."""
    w = m._parameters.get("weight")
    if isinstance(m, nn.RMSNorm) and type(m).forward is nn.RMSNorm.forward:  # rounds by device
        fits = w is not None and w.dim() == 1 and m.eps is not None
        return Norm("eps", 0.0, "gemma") if fits else None
    eps = next((n for n in EPS_NAMES if isinstance(getattr(m, n, None), float)), None)
    if eps is None or w is None or w.dim() != 1 or m._modules or len(m._parameters) != 1:
        return None
    if _inputs(type(m).forward) != 1:  # a gate or a residual, say, if only by default None
        return None
    seen = []
    for dtype, wtype in _NORM_DTYPES:
        x, gain = _rows(16, dtype), _drawn((16,), wtype, 2)
        seen.append((x, gain, _run(_twin(m, weight=nn.Parameter(gain), **{eps: _EPS}), x)))
    for offset in (0.0, 1.0):
        for casting in ("llama", "gemma", "none"):
            options = {"offset": offset, "casting": casting}
            if all(_same(y, _ours(liger_fn.rms_norm, x, g, _EPS, **options)) for x, g, y in seen):
                return Norm(eps, offset, casting)
    return None


_EPS = 1e-3  # large beside the squares of x, so that what ignores it is found out
_NORM_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)


def fit_layer(m: nn.Module) -> Affine | None:
    """Recognise torch's own layer norm over one axis."""
    return Affine() if _is_layer_norm(m) and len(m.normalized_shape) == 1 else None


def _is_layer_norm(m: nn.Module) -> TypeGuard[nn.LayerNorm]:
    return isinstance(m, nn.LayerNorm) and type(m).forward is nn.LayerNorm.forward


def fit_glu(m: nn.Module) -> Glu | None:
    """Recognise a gated layer; the projections may be of any class (LoRA, quantised)."""
    act = next((n for n in ACT_NAMES if callable(getattr(m, n, None))), None)
    parts = next((p for p in PROJECTIONS if set(p) == set(m._modules) - {act}), None)
    if act is None or parts is None:
        return None
    packed = len(parts) == 2
    widths = dict.fromkeys(parts[:-1], (8, 12 if packed else 6)) | {parts[-1]: (6, 8)}
    linears = {p: _linear(*widths[p], seed=i) for i, p in enumerate(parts)}
    x = _rows(8, torch.float64)
    y = _run(_twin(m, **linears, **{act: getattr(m, act)}), x)
    with torch.no_grad():
        inner = [linears[p](x) for p in parts[:-1]]
        for name, fs in ACTS.items():
            if _close(y, linears[parts[-1]](_ours(fs[packed], *inner))):
                return Glu(name, parts)
    return None


def fit_gate(m: nn.Module) -> Gate | None:
    """Recognise the gate of experts that are held as one tensor (transformers 5)."""
    if not hasattr(type(m), "_apply_gate"):
        return None
    x = _rows(12, torch.float64)
    y = _run(m, x, "_apply_gate")
    return next((Gate(n) for n, fs in ACTS.items() if _close(y, _ours(fs[True], x))), None)


def _rope_of(m: nn.Module) -> Rope | None:
    return fit_attention(type(m).forward)


@functools.cache
def fit_attention(forward: Callable[..., Any]) -> Rope | None:
    """Recognise the rotation that the forward of an attention layer looks up in its file."""
    f = inspect.unwrap(forward)
    code, scope = getattr(f, "__code__", None), getattr(f, "__globals__", {})
    if code is None or ROPE_NAME not in code.co_names or ROPE_NAME not in scope:
        return None
    return fit_rope(scope[ROPE_NAME])


def fit_rope(f: Callable[..., Any]) -> Rope | None:
    """Recognise f(q, k, cos, sin) as rope; whether it turns heads in part too is up to it."""
    q, k = (_drawn((2, heads, 5, 16), torch.float64, heads) for heads in (3, 1))
    for layout in ("half", "interleaved"):
        agrees = [_turns_alike(f, layout, q, k, r) for r in (16, 8)]
        if agrees[0] and agrees[1] is not False:
            return Rope(layout)
    return None


def _turns_alike(f: Callable[..., Any], layout: str, q: Tensor, k: Tensor, r: int) -> bool | None:
    angles = _drawn((2, 5, r // 2), torch.float64, 9).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    try:
        got = f(q, k, cos, sin)
    except Exception:
        return None  # it refuses such heads
    want = _ours(liger_fn.rope, q, k, cos, sin, layout=layout)
    return len(got) == 2 and all(map(_close, got, want))


# -- running a stranger's forward


def _inputs(forward: Callable[..., Any]) -> int:
    """How many tensors it may take by their place."""
    kinds = [p.kind for p in inspect.signature(forward).parameters.values()]
    return kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 1


def _twin(m: nn.Module, **own: Any) -> nn.Module:
    """The class and plain attributes of m, with nothing but `own` as parameters and modules."""
    twin = copy.copy(m)
    state = twin.__dict__
    for name in ("_parameters", "_buffers", "_modules", *(n for n in state if "_hooks" in n)):
        state[name] = type(state[name])()
    for name, value in own.items():
        state.pop(name, None)
        setattr(twin, name, value)
    state["training"] = True
    return twin


def _run(m: nn.Module, x: Tensor, method: str = "forward") -> Any:
    try:
        with _aside():
            return getattr(type(m), method)(m, x)
    except Exception:
        return None  # whatever it wants, it is not what we offer


def _ours(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with _aside():
        return f(*args, **options)


@contextmanager
def _aside() -> Iterator[None]:
    """Plain torch on a CPU, out of sight of autograd and autocast."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), liger_fn.using("reference"):
        yield


@functools.cache
def _drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float64).to(dtype)


@functools.cache
def _rows(n: int, dtype: torch.dtype) -> Tensor:
    """Rows of (2, 4, n), from small to large and with outliers: a clamp or a missing eps shows."""
    scales = torch.tensor([0.02, 0.5, 2.0, 50.0], device="cpu", dtype=torch.float64)
    return (scales[:, None] * _drawn((2, 4, n), torch.float64, 1) ** 3).to(dtype)


def _linear(d: int, v: int, *, seed: int) -> nn.Linear:
    linear = nn.Linear(d, v, bias=False, device="meta", dtype=torch.float64)
    linear.weight = nn.Parameter(_drawn((v, d), torch.float64, seed), requires_grad=False)
    return linear


def _same(got: Any, want: Tensor) -> bool:
    return isinstance(got, Tensor) and got.dtype == want.dtype and torch.equal(got, want)


def _close(got: Any, want: Tensor) -> bool:
    return (
        isinstance(got, Tensor)
        and got.shape == want.shape
        and torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    )
