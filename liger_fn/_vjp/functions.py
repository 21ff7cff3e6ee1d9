"""The autograd Functions of an op: its forward rule and its pullback."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from liger_fn._launch import Maybe, Rule
from liger_fn._vjp.batching import joined
from liger_fn._vjp.levels import legacy_vmap, plain, transformed
from liger_fn._vjp.op import Op


def make_functions(op: Op) -> tuple[Callable[..., tuple], Callable[..., tuple]]:
    """Build the autograd Functions of an op; return apply of the forward one and of its eager twin.

    Their arguments: one tuple (backend, sizes of group axes, which tensors have those, which
    gradients are wanted, the options), then the tensors.
    """
    return _forward_functions(op, _pullback_function(op))


def donate(y: Tensor) -> None:
    """Let the pullback of y, the result of an op, write over the cotangent of y.

    For a y that stays inside one function, and whose one use makes a cotangent that nobody else
    sees: a product. It is written over in plain backward passes alone, by kernels whose rule names
    `donated`.
    """
    if torch.compiler.is_compiling() or transformed():
        return
    if isinstance(y.grad_fn, BackwardCFunction):  # the context of backward
        y.grad_fn.donated = True


def _one_more_axis(
    apply: Callable, op: Op, is_row: Sequence[bool], free: bool, size: int, dims: tuple, a: tuple
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Call under vmap: the axis joins the rows where no sum runs over them, else the groups."""
    (backend, groups, mapped, wanted, values), *tensors = a
    on = dims[1:]
    fold = free and any(is_row)
    fold = fold and all(d is None for d, row in zip(on, is_row, strict=True) if not row)
    moved, inner, mapped = joined(tensors, on, is_row, groups, mapped, size, fold)
    out = apply((backend, inner, mapped, wanted, values), *moved)
    return out, (len(groups) if fold else 0,) * len(out)


def _pullback_function(op: Op) -> Callable[..., tuple[Tensor, ...]]:
    """Cotangents, tensors and residuals to wanted cotangents; differentiated by the reference."""
    given = op.given

    class Pullback(Function):
        @staticmethod
        def forward(static: tuple, *a: Maybe) -> tuple[Tensor, ...]:
            return tuple(op.run_bwd(static, a))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            ctx.static = inputs[0]
            ctx.save_for_backward(*inputs[1 : 1 + given])

        @staticmethod
        def backward(ctx: Any, *ct: Tensor) -> tuple[Maybe, ...]:
            rule = op.reference_pullback(*ctx.static)
            saved = ctx.saved_tensors
            live = [i for i in range(given) if ctx.needs_input_grad[1 + i]]

            def of_live(*some: Tensor) -> tuple[Tensor, ...]:
                a = list(saved)
                for i, t in zip(live, some, strict=True):
                    a[i] = t
                return rule(*a)

            pull = torch.func.vjp(of_live, *(saved[i] for i in live))[1]
            grads = dict(zip(live, pull(tuple(ct)), strict=True))
            none = (None,)
            return none + tuple(map(grads.get, range(given))) + none * op.residuals

        @staticmethod
        def vmap(info: Any, dims: tuple, *a: Any) -> Any:
            wanted = a[0][3]
            free = not any(w and not op.rows[i] for i, w in zip(op.slots, wanted, strict=True))
            return _one_more_axis(Pullback.apply, op, op.all_rows, free, info.batch_size, dims, a)

    _set_arity(Pullback, 1 + given + op.residuals)
    return Pullback.apply


def _pull_back(op: Op, pullback: Callable) -> Callable[..., Sequence[Tensor]]:
    """The pullback as backward calls it, outside of torch.compile."""

    def pull_back(
        static: tuple, ct: tuple, saved: tuple, donated: bool = False
    ) -> Sequence[Tensor]:
        batched = any(d is not None and is_legacy_batchedtensor(d) for d in ct)
        if batched:
            out = legacy_vmap(lambda *d: pull_back(static, d, saved), ct)
            if out is not None:
                return out
        if batched or plain():
            return op.reference_pullback(*static)(*ct, *saved[: op.given - op.outputs])
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return pullback(static, *ct, *saved)
        return op.run_bwd(static, (*ct, *saved), donated)

    return pull_back


def _forward_functions(op: Op, pullback: Callable) -> tuple[Callable, Callable]:
    """Tensors to outputs and residuals. What Dynamo traces here closes over no object of ours."""
    c, args, results = op.outputs, tuple(op.args), tuple(op.results)
    traced_fwd = _make_traced(op, op.fwd_op, op.fwd["reference"], op.tells_fwd)

    def run_fwd(static: tuple, tensors: Sequence[Maybe]) -> tuple[Tensor, ...]:
        return tuple(op.run_fwd(static, tensors))

    class Forward(Function):
        backward = staticmethod(_backward(op, pullback))

        @staticmethod
        def forward(static: tuple, *tensors: Maybe) -> tuple[Tensor, ...]:
            if torch.compiler.is_compiling():
                return traced_fwd(static, tensors)
            return run_fwd(static, tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
            ctx.static, *tensors = inputs
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(
                *[t for i, t in enumerate(output) if i >= c or not t.is_floating_point()]
            )
            ctx.save_for_backward(*[tensors[i] for i in args], *[output[i] for i in results])

        @staticmethod
        def vmap(info: Any, dims: tuple, *a: Any) -> Any:
            return _one_more_axis(Forward.apply, op, op.rows, True, info.batch_size, dims, a)

    class EagerForward(Function):
        # outside of transforms: for a Function with setup_context, apply binds a signature each
        # time, 12 us of a call
        @staticmethod
        def forward(ctx: Any, static: tuple, *tensors: Maybe) -> tuple[Tensor, ...]:
            output = run_fwd(static, tensors)
            Forward.setup_context(ctx, (static, *tensors), output)
            return output

        backward = Forward.backward

    _set_arity(Forward, 1 + len(op.names))
    return Forward.apply, EagerForward.apply


def _backward(op: Op, pullback: Callable) -> Callable[..., tuple[Maybe, ...]]:
    """Backward of both: one cotangent for each argument, None where none is needed."""
    n, c, slots = len(op.names), op.outputs, tuple(op.slots)
    args, results = tuple(op.args), tuple(op.results)
    traced_bwd = _make_traced(op, op.bwd_op, op.bwd["reference"], True)
    pull_back = _pull_back(op, pullback)

    def backward(ctx: Any, *ct: Maybe) -> tuple[Maybe, ...]:
        backend, groups, mapped, _, values = ctx.static
        needed = ctx.needs_input_grad
        wanted = tuple([needed[1 + i] for i in slots])
        ct = ct[:c]
        out: list[Maybe] = [None] * (1 + n)
        if all(d is None for d in ct) or not any(wanted):
            return tuple(out)
        own = bool(groups)  # results have the axes of all groups
        marks = (own,) * c + tuple([mapped[i] for i in args]) + (own,) * len(results)
        static = backend, groups, marks, wanted, values
        grads: Sequence[Tensor]
        if torch.compiler.is_compiling():  # Dynamo does not trace a nested apply
            grads = traced_bwd(static, (*ct, *ctx.saved_tensors))
        else:
            grads = pull_back(static, ct, ctx.saved_tensors, getattr(ctx, "donated", False))
        asked = [i for i, w in zip(slots, wanted, strict=True) if w]
        for i, g in zip(asked, grads, strict=True):
            shared = groups and not mapped[i]
            out[1 + i] = g.sum(tuple(range(len(groups)))) if shared else g
        return tuple(out)

    return backward


def _make_traced(op: Op, visible: Any, reference: Rule, tells: bool) -> Callable[..., tuple]:
    """A rule as Dynamo meets it: plain closures, it cannot name an object inside a Function."""
    names = tuple(op.options)

    def through_op(static: tuple, a: tuple) -> tuple[Tensor, ...]:
        backend, _, marks, wanted, values = static
        kw = {"backend": backend, "groups": (), "mapped": marks, "wanted": wanted}
        return tuple(visible(*a, **dict(zip(names, values, strict=True)), **kw))

    if op.opaque:
        return through_op

    def traced(static: tuple, a: tuple) -> tuple[Tensor, ...]:
        backend, _, _, wanted, values = static
        if backend == "triton":
            return through_op(static, a)
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
