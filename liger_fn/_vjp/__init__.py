"""custom_vjp: forward and pullback rules become one function that composes with everything.

After `jax.custom_vjp` (Frostig, Johnson and Leary, 2018). An op states its mathematics twice, as
plain torch (the reference) and as kernel launches; this file serves every transform from that:

    backward, func.grad, vjp, jacrev   one autograd Function, the rules of the op inside
    second and higher order            the pullback is a Function too; its own pullback
                                       differentiates the reference, residuals recomputed
    jvp, jacfwd, forward-mode AD       the reference, as plain torch under the transform: a `jvp`
                                       rule is dropped by torch.compile and gives 0 when nested
    vmap                               leading axes where rows are free, a group axis in the kernel
                                       where sums over rows stay per sample, else a loop
    DTensor                            sharding rules from one line of the table, in `sharding`
    torch.compile, fake tensors,       kernels are registered `liger_fn::*` ops; eager calls skip
    checkpoint policies, counters      the dispatcher, which would cost 3-60 us a call

This package is the only place that names torch.autograd or functorch internals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from liger_fn._launch import Backend, Maybe, Rule, backend_for
from liger_fn._vjp.functions import donate as donate
from liger_fn._vjp.functions import make_functions
from liger_fn._vjp.levels import derivative as derivative
from liger_fn._vjp.levels import plain as plain
from liger_fn._vjp.levels import tracked as tracked
from liger_fn._vjp.levels import transformed as transformed
from liger_fn._vjp.op import Op
from liger_fn._vjp.sharding import ready


def custom_vjp(
    name: str,
    *,
    fwd: Mapping[Backend, Rule],
    bwd: Mapping[Backend, Rule],
    differentiable: Sequence[str],
    rows: Sequence[str] = (),
    outputs: int | Sequence[str] = 1,
    grouped: bool = False,
    opaque: bool = False,
    fake: Rule | None = None,
    layout: Callable[[Tensor], Tensor] | None = None,
    flops: tuple[Callable[..., int], Callable[..., int]] | None = None,
    axes: str | None = None,
) -> Callable[..., Any]:
    """Make a differentiable function from rules.

    The two rules of each backend share one signature, read from the reference:

        fwd(*tensors, *, options) -> (*outputs, *residuals)
        bwd(*cotangents, *tensors, *residuals, *, wanted, options) -> cotangents of `differentiable`

    Every output and residual is a fresh tensor. A cotangent that arrives as None is zero. `wanted`
    is a tuple of bools, one per differentiable argument: where it is False the rule returns None
    and should do no work. A forward rule that names `wanted` among its options is told as well;
    what its residuals then leave out (empty tensors, never None), bwd must recompute when it is
    wanted after all. Where the
    pullback rule of the kernels names `donated`, True lets it write over its first cotangent.

    What bwd does not name among its tensors is not kept for it, and what `outputs` names may stand
    behind them: a softmax keeps its result, not its argument. A bwd that does without some argument
    is given residuals of None where it is differentiated, and finds them itself. The reference
    must be plain torch: forward mode and higher derivatives differentiate it. End it in an
    operation of its own: torch 2.11 compiles a Function that ends in a cast to the same dtype
    into a gradient of zero.

    Args:
        name: of the registered ops, `liger_fn::<name>_fwd` and `liger_fn::<name>_bwd`.
        fwd: forward rules, keyed "reference" and "triton". Each option is annotated as float, int,
            bool, str, torch.dtype or tuple[bool, ...], the first two perhaps with `| None`.
        bwd: pullback rules, with the same keys.
        differentiable: names of the arguments that have cotangents; others have no gradient in
            reverse mode.
        rows: names of the arguments whose leading axes are free; outputs, residuals and cotangents
            of outputs share those axes. vmap over these alone needs no further rule.
        outputs: how many results of fwd are public, or their names; the others are residuals.
        grouped: the triton rules take `groups: int`; then every row argument is a stack of that
            many groups, a shared argument may have a leading axis of that size, and cotangents of
            shared arguments come one per group.
        opaque: keep the op whole under torch.compile even where the reference runs.
        fake: shapes and strides of fwd's results for tracing; default: the reference on fake
            tensors, made contiguous.
        layout: an empty cotangent for an argument, or for the output that bwd keeps in its place,
            as bwd lays it out; default: contiguous.
        flops: operations of fwd and of bwd from the shapes of their arguments, for FLOP counters.
        axes: which axes of a DTensor may be sharded, as "... [n], [n] -> ... [n], ..." of a norm:
            arguments, then outputs and residuals; those in brackets must be whole. None: refused.

    Raises:
        ValueError: the name is taken, a name or a key of the rules does not fit.
        TypeError: an option is annotated as something else.

    Returns:
        A function of the tensors (positional) and options (by keyword) that returns the outputs.
        It raises TypeError for an option that should be a number and is not: a tensor would
        silently have no gradient.

    Example:
        See `liger_fn/ops/rms_norm.py`, and "A new op in one file" in CONTRIBUTING.md.
    """
    op = Op(
        name, fwd, bwd, differentiable, rows, outputs, grouped, opaque, fake, layout, flops, axes
    )
    forward, eager = make_functions(op)

    def call(*tensors: Maybe, **options: Any) -> Any:
        out: Any
        ready()
        for o, kinds in op.kinds.items():
            if o not in options:
                options[o] = op.default(o)
            if not isinstance(options[o], kinds):
                raise TypeError(f"{name}: {o} must be a number, got {type(options[o]).__name__}")
        if len(options) > len(op.kinds) or len(tensors) != len(op.names):
            raise TypeError(op.usage(len(tensors), options))
        if plain():
            unwanted = {"wanted": (False,) * len(differentiable)} if op.tells_fwd else {}
            out = op.fwd["reference"](*tensors, **unwanted, **options)
        else:
            grad = torch.is_grad_enabled()
            asked = [tensors[i] for i in op.slots]
            wanted = tuple([grad and t is not None and t.requires_grad for t in asked])
            # chosen here: backward on a GPU runs in its own thread, which using() does not reach
            given = [t for t in tensors if t is not None]
            backend = backend_for(given[0].device.type)
            values = tuple([options[o] for o in op.options])
            static = (backend, (), (False,) * len(tensors), wanted, values)
            transformed = torch._C._are_functorch_transforms_active()
            if not transformed and not any(wanted):
                with torch.no_grad() if grad else nullcontext():
                    out = op.run_fwd(static, tensors)
            elif transformed or torch.compiler.is_compiling():
                out = forward(static, *tensors)
            else:
                out = eager(static, *tensors)
        return out[0] if op.outputs == 1 else tuple(out[: op.outputs])

    return call
