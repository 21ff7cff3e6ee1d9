"""What liger_fn can replace in a model, and why not the rest: looked at, nothing changed."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_fn.nn.adapters.binding import hooks_of_others, is_replaced
from liger_fn.nn.adapters.fingerprint import Spec, fingerprint

SWITCHES = ("rms_norm", "layer_norm", "rope", "glu", "cross_entropy", "fused_linear_ce")


@dataclass(frozen=True)
class Found:
    """One module under one switch: its spec (a head's name for losses), or the reason for none."""

    switch: str
    module: nn.Module
    spec: Spec | str | None
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """As many modules of one class as have one spec, or one reason."""

    switch: str
    name: str
    count: int
    spec: Spec | str


@dataclass(frozen=True)
class Report:
    """What is recognised in a model (`rows`) and what is left as it is (`skipped`, with reasons).

    Print it for a table.
    """

    rows: tuple[Row, ...]
    skipped: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [(r.switch, f"{r.count} x {r.name}", str(r.spec)) for r in self.rows]
        lines += [(r.switch, f"{r.count} x {r.name}", f"left: {r.spec}") for r in self.skipped]
        widths = [max(len(line[i]) for line in lines) for i in (0, 1)] if lines else [0, 0]
        return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in lines)


def report(model: nn.Module) -> Report:
    """Say what `adapt` recognises in a model, whether it is adapted or not.

    Args:
        model: any module; nothing of it changes.

    Returns:
        Report(rows, skipped): per switch and class, how many modules have which spec; and those
        that look like one of ours by name but compute something else, with the reason.

    Example:
        >>> print(report(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.LayerNorm(8))))
        layer_norm  2 x LayerNorm  Affine()
    """
    found = survey(model)
    rows = Counter((f.switch, type(f.module).__name__, f.spec) for f in found if f.spec is not None)
    left = Counter((f.switch, type(f.module).__name__, f.reason) for f in found if f.spec is None)
    return Report(
        tuple(Row(switch, name, n, spec) for (switch, name, spec), n in rows.items() if spec),
        tuple(Row(switch, name, n, why) for (switch, name, why), n in left.items()),
    )


def survey(model: nn.Module) -> list[Found]:
    """Look at every module, then at the head."""
    found = []
    for m in model.modules():
        seen = fingerprint(m)
        if seen is not None:
            switch, spec = seen
            why = spec if isinstance(spec, str) else ""
            found.append(Found(switch, m, None if why else spec, why))
    return found + _losses(model)


def _losses(model: nn.Module) -> list[Found]:
    owned = head_of(model)
    if owned is None:
        return []
    owner, name = owned
    why = _unknown_loss(owner)
    unfused = why or _unfused(owner, owner._modules[name])
    return [
        Found(switch, owner, None if reason else name, reason)
        for switch, reason in (("cross_entropy", why), ("fused_linear_ce", unfused))
    ]


def head_of(model: nn.Module) -> tuple[Any, str] | None:
    """The causal language model in a model (wrapped by PEFT, say) and the name of its head."""
    for owner in model.modules():
        if not hasattr(type(owner), "get_output_embeddings") or not hasattr(owner, "loss_function"):
            continue
        head = getattr(owner, "get_output_embeddings")()  # noqa: B009  # Module says Tensor
        for name, child in owner._modules.items():
            if head is not None and child is head:
                return owner, name
    return None


def _unknown_loss(owner: Any) -> str:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if owner.loss_function is not ForCausalLMLoss:
        return "its loss_function is not ForCausalLMLoss"
    if is_replaced(owner) and not hasattr(owner.__dict__["forward"], "__func__"):
        return "its forward was replaced by others"
    # a forward that names its class or super() would not know the view of it
    if "__class__" in inspect.unwrap(type(owner).forward).__code__.co_freevars:
        return "its forward calls super()"
    return ""


def _unfused(owner: Any, head: Any) -> str:
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"its head is a {type(head).__name__}, not a plain Linear"
    if is_replaced(head):
        return "the forward of its head was replaced by others"
    if getattr(owner, "tp_size", None) is not None:
        return "its head is sharded by tensor parallelism"
    if hooks_of_others(head):
        return "hooks of others see the logits of its head"
    return ""
