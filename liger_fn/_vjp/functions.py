"""The two autograd Functions of an op: its forward rule and its pullback."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from liger_fn._launch import Backend, Maybe, Rule
from liger_fn._vjp.batching import joined
from liger_fn._vjp.levels import is_legacy_batched, legacy_vmap, plain
from liger_fn._vjp.op import Op


def make_functions(op: Op) -> Callable[..., tuple[Tensor, ...]]:
    """Build the two autograd Functions of an op; return the forward one's apply.

    Their arguments: backend, sizes of group axes, which tensors have those, which gradients are
    wanted, the options, then the tensors.
    """
    return _forward_function(op, _pullback_function(op))


def _splitter(op: Op) -> tuple[int, Callable[[Sequence], tuple]]:
    lead = 4 + len(op.options)

    def split(a: Sequence) -> tuple[Backend, tuple, tuple, tuple, tuple, tuple]:
        return a[0], a[1], a[2], a[3], tuple(a[4:lead]), tuple(a[lead:])

    return lead, split


def _one_more_axis(
    apply: Callable, op: Op, is_row: Sequence[bool], free: bool, size: int, dims: tuple, a: tuple
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Call under vmap: the axis joins the rows where no sum runs over them, else the groups."""
    lead, split = _splitter(op)
    backend, groups, mapped, wanted, values, tensors = split(a)
    on = dims[lead:]
    fold = free and any(is_row)
    fold = fold and all(d is None for d, row in zip(on, is_row, strict=True) if not row)
    moved, inner, mapped = joined(tensors, on, is_row, groups, mapped, size, fold)
    out = apply(backend, inner, mapped, wanted, *values, *moved)
    return out, (len(groups) if fold else 0,) * len(out)


def _pullback_function(op: Op) -> Callable[..., tuple[Tensor, ...]]:
    """Cotangents, tensors and residuals to wanted cotangents; differentiated by the reference."""
    lead, split = _splitter(op)
    given = op.given

    class Pullback(Function):
        @staticmethod
        def forward(*a: Any) -> tuple[Tensor, ...]:
            return tuple(op.run_bwd(*split(a)))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            ctx.static = inputs[:lead]
            ctx.save_for_backward(*inputs[lead : lead + given])

        @staticmethod
        def backward(ctx: Any, *ct: Tensor) -> tuple[Maybe, ...]:
            _, groups, mapped, wanted, values, _ = split(ctx.static)
            rule = op.reference_pullback(groups, mapped[:given], wanted, values)
            saved = ctx.saved_tensors
            live = [i for i in range(given) if ctx.needs_input_grad[lead + i]]

            def of_live(*some: Tensor) -> tuple[Tensor, ...]:
                a = list(saved)
                for i, t in zip(live, some, strict=True):
                    a[i] = t
                return rule(*a)

            pull = torch.func.vjp(of_live, *(saved[i] for i in live))[1]
            grads = dict(zip(live, pull(tuple(ct)), strict=True))
            none = (None,)
            return none * lead + tuple(map(grads.get, range(given))) + none * op.residuals

        @staticmethod
        def vmap(info: Any, dims: tuple, *a: Any) -> Any:
            free = not any(w and not op.rows[i] for i, w in zip(op.slots, a[3], strict=True))
            return _one_more_axis(Pullback.apply, op, op.all_rows, free, info.batch_size, dims, a)

    _set_arity(Pullback, lead + given + op.residuals)
    return Pullback.apply


def _pull_back(op: Op, pullback: Callable) -> Callable[..., Sequence[Tensor]]:
    """The pullback as backward calls it, outside of torch.compile."""
    given = op.given

    def pull_back(
        backend: Backend, groups: tuple, marks: tuple, wanted: tuple, values: tuple, ct: tuple,
        saved: tuple,
    ) -> Sequence[Tensor]:  # fmt: skip
        batched = any(d is not None and is_legacy_batched(d) for d in ct)
        if batched:
            again = functools.partial(pull_back, backend, groups, marks, wanted, values)
            out = legacy_vmap(lambda *d: again(d, saved), ct)
            if out is not None:
                return out
        if batched or plain():
            rule = op.reference_pullback(groups, marks[:given], wanted, values)
            return rule(*ct, *saved[: given - op.outputs])
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return pullback(backend, groups, marks, wanted, *values, *ct, *saved)
        return op.run_bwd(backend, groups, marks, wanted, values, (*ct, *saved))

    return pull_back


def _forward_function(op: Op, pullback: Callable) -> Callable[..., tuple[Tensor, ...]]:
    """Tensors to outputs and residuals. What Dynamo traces here closes over no object of ours."""
    lead, split = _splitter(op)
    n, c, slots = len(op.names), op.outputs, tuple(op.slots)
    args, results = tuple(op.args), tuple(op.results)
    traced_fwd = _make_traced(op, op.fwd_op, op.fwd["reference"], op.tells_fwd)
    traced_bwd = _make_traced(op, op.bwd_op, op.bwd["reference"], True)
    pull_back = _pull_back(op, pullback)

    class Forward(Function):
        @staticmethod
        def forward(*a: Any) -> tuple[Tensor, ...]:
            backend, groups, mapped, wanted, values, tensors = split(a)
            if torch.compiler.is_compiling():
                return traced_fwd(backend, mapped, wanted, values, tensors)
            return run_fwd(backend, groups, mapped, wanted, values, tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
            ctx.static = inputs[:lead]
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(
                *(t for i, t in enumerate(output) if i >= c or not t.is_floating_point())
            )
            taken = [inputs[lead + i] for i in args]
            ctx.save_for_backward(*taken, *(output[i] for i in results))

        @staticmethod
        def backward(ctx: Any, *ct: Maybe) -> tuple[Maybe, ...]:
            backend, groups, mapped, _, values, _ = split(ctx.static)
            wanted = tuple(ctx.needs_input_grad[lead + i] for i in slots)
            ct = ct[:c]
            out: list[Maybe] = [None] * (lead + n)
            if all(d is None for d in ct) or not any(wanted):
                return tuple(out)
            saved = ctx.saved_tensors
            own = bool(groups)  # results have the axes of all groups
            marks = (own,) * c + tuple(mapped[i] for i in args) + (own,) * len(results)
            grads: Sequence[Tensor]
            if torch.compiler.is_compiling():  # Dynamo does not trace a nested apply
                grads = traced_bwd(backend, marks, wanted, values, (*ct, *saved))
            else:
                grads = pull_back(backend, groups, marks, wanted, values, ct, saved)
            asked = [i for i, w in zip(slots, wanted, strict=True) if w]
            for i, g in zip(asked, grads, strict=True):
                shared = groups and not mapped[i]
                out[lead + i] = g.sum(tuple(range(len(groups)))) if shared else g
            return tuple(out)

        @staticmethod
        def vmap(info: Any, dims: tuple, *a: Any) -> Any:
            return _one_more_axis(Forward.apply, op, op.rows, True, info.batch_size, dims, a)

    def run_fwd(*args: Any) -> tuple[Tensor, ...]:
        return tuple(op.run_fwd(*args))

    _set_arity(Forward, lead + n)
    return Forward.apply


def _make_traced(op: Op, visible: Any, reference: Rule, tells: bool) -> Callable[..., tuple]:
    """A rule as Dynamo meets it: plain closures, it cannot name an object inside a Function."""
    names = tuple(op.options)

    def through_op(
        backend: Backend, marks: tuple, wanted: tuple, values: tuple, a: tuple
    ) -> tuple[Tensor, ...]:
        kw = {"backend": backend, "groups": (), "mapped": marks, "wanted": wanted}
        return tuple(visible(*a, **dict(zip(names, values, strict=True)), **kw))

    if op.opaque:
        return through_op

    def traced(
        backend: Backend, marks: tuple, wanted: tuple, values: tuple, a: tuple
    ) -> tuple[Tensor, ...]:
        if backend == "triton":
            return through_op(backend, marks, wanted, values, a)
        options = dict(zip(names, values, strict=True))
        if tells:
            options["wanted"] = wanted
        return tuple([t for t in reference(*a, **options) if t is not None])

    return traced


def _set_arity(cls: type[Function], m: int) -> None:
    """Dynamo counts the parameters of forward to decide whether it wants a context."""
    kind = inspect.Parameter.POSITIONAL_ONLY
    parameters = [inspect.Parameter(f"a{i}", kind) for i in range(m)]
    cls.forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions take attributes
