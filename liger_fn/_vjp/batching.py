"""vmap: each level adds an axis, to the rows where that is enough, else to the groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_fn._launch import Maybe


def joined(
    tensors: Sequence[Maybe],
    dims: Sequence[int | None],
    is_row: Sequence[bool],
    groups: tuple[int, ...],
    mapped: Sequence[bool],
    size: int,
    fold: bool,
) -> tuple[list[Maybe], tuple[int, ...], tuple[bool, ...]]:
    """Bring one more mapped axis of `size` into a call.

    With `fold` it becomes the first leading axis of the rows, behind the group axes; else it is the
    outermost group axis.

    Args:
        tensors: arguments of the rule; those that are `mapped` start with the axes `groups`.
        dims: where the new axis of each lies, None where it has none.
        is_row: whether an argument has free leading axes.
        groups: sizes of the group axes so far.
        mapped: which arguments have them.
        size: of the new axis.
        fold: only where no argument that is not a row has the new axis.

    Returns:
        The arguments, the group axes and which arguments have them.
    """
    depth, moved, marks = len(groups), [], []
    for t, d, row, had in zip(tensors, dims, is_row, mapped, strict=True):
        has = t is not None and (row or had or d is not None)
        if fold:
            has = t is not None and row
        if t is not None and has:
            at = depth if fold else 0
            t = t.unsqueeze(at) if d is None else t.movedim(d, at)
            t = t.expand(*t.shape[:at], size, *t.shape[at + 1 :])
            if not fold and groups and not had:  # its first group axis: join the inner ones
                own = t.shape[1:]
                t = t.reshape(size, *(1,) * depth, *own).expand(size, *groups, *own)
        moved.append(t)
        marks.append(had if fold else has)
    return moved, groups if fold else (size, *groups), tuple(marks)


def _flat(tensors: Sequence[Maybe], groups: Sequence[int], mapped: Sequence[bool]) -> list[Maybe]:
    """One group axis instead of several."""
    g, k = math.prod(groups), len(groups)
    return [
        t.reshape(g, *t.shape[k:]) if k > 1 and on and t is not None else t
        for t, on in zip(tensors, mapped, strict=True)
    ]


def one_launch(
    rule: Callable, groups: Sequence[int], mapped: Sequence[bool], tensors: Sequence[Maybe]
) -> tuple[Tensor, ...]:
    """Run a rule that knows groups."""
    out = rule(*_flat(tensors, groups, mapped), groups=math.prod(groups))
    return tuple(t if len(groups) == 1 else t.unflatten(0, groups) for t in out)


def loop(
    rule: Callable, groups: Sequence[int], mapped: Sequence[bool], tensors: Sequence[Maybe]
) -> tuple[Tensor, ...]:
    """Run a rule once per group."""
    a = list(zip(_flat(tensors, groups, mapped), mapped, strict=True))
    outs = [
        rule(*(t[i] if on and t is not None else t for t, on in a))
        for i in range(math.prod(groups))
    ]
    return tuple(torch.stack(o).unflatten(0, groups) for o in zip(*outs, strict=True))


def none_of(
    rule: Callable, groups: Sequence[int], mapped: Sequence[bool], tensors: Sequence[Maybe]
) -> tuple[Tensor, ...]:
    """No samples: the shapes that a rule gives for one, in groups of none."""
    one = [
        t.new_zeros(t.shape[len(groups) :]) if on and t is not None else t
        for t, on in zip(tensors, mapped, strict=True)
    ]
    return tuple(t.new_empty((*groups, *t.shape)) for t in rule(*one))


def vmap_rule(rule: Callable, mapped: Sequence[bool]) -> Callable:
    """torch.vmap over the first axis of mapped arguments, some of which may be None."""

    def mapped_rule(*a: Maybe) -> tuple[Tensor, ...]:
        on = [i for i, t in enumerate(a) if t is not None]

        def some(*some: Tensor) -> tuple[Tensor, ...]:
            full = list(a)
            for i, t in zip(on, some, strict=True):
                full[i] = t
            return rule(*full)

        dims = tuple(0 if mapped[i] else None for i in on)
        out: tuple[Tensor, ...] = torch.vmap(some, dims)(*(t for t in a if t is not None))
        return out

    return mapped_rule
