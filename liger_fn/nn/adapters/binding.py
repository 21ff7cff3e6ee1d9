"""Give one module another forward, and take it back: nothing of its class or its file changes.

A bound method in the module's own `__dict__` hides that of its class. It survives deepcopy (which
binds it to the copy); a pickle stores it by the name of its class's method, so that it loads plain.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from liger_fn.nn.gates import hooks_of

_MARK = "_liger_fn"
_KEPT = "_liger_fn_kept"
_SLOTS = ("forward", "_old_forward", "_apply_gate")
# their hooks gather weights, move tensors and enter contexts, whatever it is that a module returns
_ENGINES = ("torch", "accelerate", "deepspeed", "trl")


def slot_of(m: nn.Module) -> str:
    """Where the live forward is: the hooks of accelerate (offload, device_map) move it."""
    hooked = "_hf_hook" in m.__dict__ and "_old_forward" in m.__dict__
    return "_old_forward" if hooked else "forward"


def is_bound(m: nn.Module, slot: str) -> bool:
    """Whether a slot holds a function of ours, and not a wrapper that copied its attributes."""
    f = getattr(m.__dict__.get(slot), "__func__", None)
    return f is not None and getattr(f, _MARK, None) is f


def is_replaced(m: nn.Module) -> bool:
    """Whether somebody else gave this one module its own forward."""
    if slot_of(m) != "forward" or "forward" not in m.__dict__ or is_bound(m, "forward"):
        return False
    # a pickle of an adapted module leaves the method of its class there
    return getattr(m.__dict__["forward"], "__func__", None) is not type(m).forward


def hooks_of_others(m: nn.Module) -> bool:
    """Whether somebody watches or changes what goes through a module, who wants plain tensors."""
    return any(_package(hook) not in _ENGINES for hook in hooks_of(m))


def _package(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(hook.__module__).partition(".")[0]


def bind(m: nn.Module, f: Callable[..., Any], slot: str | None = None) -> None:
    """Let m run f(m, ...); what lay in the slot is kept for `unbind`."""
    slot = slot or slot_of(m)
    setattr(f, _MARK, f)
    f.__name__ = slot if slot == "_apply_gate" else "forward"  # pickle looks this name up
    if slot in m.__dict__:
        m.__dict__.setdefault(_KEPT, {})[slot] = m.__dict__[slot]
    m.__dict__[slot] = MethodType(f, m)


def bound(m: nn.Module, *more: str) -> dict[str, Any]:
    """What an adapted module has in its own `__dict__` for it, and `more`; empty for another."""
    if not any(is_bound(m, slot) for slot in _SLOTS):
        return {}
    state = m.__dict__
    kept = {_KEPT: {**state[_KEPT]}} if _KEPT in state else {}
    return kept | {k: state[k] for k in (*_SLOTS, *more) if k in state}


def unbind(m: nn.Module) -> None:
    """Undo every `bind` on m."""
    kept = m.__dict__.pop(_KEPT, {})
    for slot in _SLOTS:
        if not is_bound(m, slot):
            continue
        if slot in kept:
            m.__dict__[slot] = kept[slot]
        elif slot == "_old_forward":  # a hook came after us and moved our forward here
            m.__dict__[slot] = MethodType(type(m).forward, m)
        else:
            del m.__dict__[slot]


def with_globals(f: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Copy f so that it reads these names instead of those of its file, under all its decorators.

    The other names are those of this moment. `__name__` is left out: by it Dynamo would look names
    up in the real file.
    """
    inner = inspect.unwrap(f)
    scope = {k: v for k, v in inner.__globals__.items() if k != "__name__"} | names
    return _rewrapped(f, inner, _copied(inner, scope, inner.__closure__))


def _copied(f: Any, scope: dict[str, Any], closure: tuple[CellType, ...] | None) -> Any:
    made: Any = FunctionType(f.__code__, scope, f.__name__, f.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__, made.__doc__ = (
        f.__kwdefaults__,
        f.__qualname__,
        f.__doc__,
    )
    made.__dict__.update(f.__dict__)
    return made


def _rewrapped(outer: Any, inner: Any, new: Any) -> Any:
    if outer is inner:
        return new
    below = outer.__wrapped__
    made = _rewrapped(below, inner, new)
    cells = outer.__closure__ or ()
    cells = tuple(CellType(made) if c.cell_contents is below else c for c in cells)
    wrapper = _copied(outer, outer.__globals__, cells)
    wrapper.__wrapped__ = made
    return wrapper
