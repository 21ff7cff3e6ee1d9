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
    torch.compile, fake tensors,       kernels are registered `liger_fn::*` ops; eager calls skip
    checkpoint policies, counters      the dispatcher, which would cost 3-60 us a call

This is the only file that names torch.autograd or functorch internals.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.flop_counter
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import Function

from liger_fn._launch import Backend, Rule, backend_for

_LIB = torch.library.Library("liger_fn", "DEF")
_KEYS = ("CPU", "CUDA", "XPU", "MPS")
_LEGACY_BATCHED = torch._C._dispatch_key_parse("Batched")
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SCHEMA = {
    "float": "float",
    "float | None": "float?",
    "int": "int",
    "int | None": "int?",
    "bool": "bool",
    "str": "str",
    "torch.dtype": "ScalarType",
    "tuple[bool, ...]": "bool[]",
}
_Maybe = Tensor | None


def custom_vjp(
    name: str,
    *,
    fwd: Mapping[Backend, Rule],
    bwd: Mapping[Backend, Rule],
    differentiable: Sequence[str],
    rows: Sequence[str] = (),
    outputs: int = 1,
    grouped: bool = False,
    opaque: bool = False,
    fake: Rule | None = None,
    layout: Callable[[Tensor], Tensor] | None = None,
    flops: tuple[Callable[..., int], Callable[..., int]] | None = None,
) -> Callable[..., Any]:
    """Make a differentiable function from rules.

    The two rules of each backend share one signature, read from the reference:

        fwd(*tensors, *, options) -> (*outputs, *residuals)
        bwd(*cotangents, *tensors, *residuals, *, wanted, options) -> cotangents of `differentiable`

    Every output and residual is a fresh tensor. A cotangent that arrives as None is zero. `wanted`
    is a tuple of bools, one per differentiable argument: where it is False the rule returns None
    and should do no work. A forward rule that names `wanted` among its options is told as well;
    what its residuals then leave out, bwd must recompute when it is wanted after all. The reference
    must be plain torch: forward mode and higher derivatives differentiate it. End it in an
    operation of its own: torch 2.11 compiles a Function that ends in a cast to the same dtype
    into a gradient of zero.

    Args:
        name: of the registered ops, `liger_fn::<name>_fwd` and `liger_fn::<name>_bwd`.
        fwd: forward rules, keyed "reference" and "triton".
        bwd: pullback rules, with the same keys.
        differentiable: names of the arguments that have cotangents.
        rows: names of the arguments whose leading axes are free; outputs, residuals and cotangents
            of outputs share those axes. vmap over these alone needs no further rule.
        outputs: how many results of fwd are public; the others are residuals.
        grouped: the triton rules take `groups: int`; then every row argument is a stack of that
            many groups, a shared argument may have a leading axis of that size, and cotangents of
            shared arguments come one per group.
        opaque: keep the op whole under torch.compile even where the reference runs.
        fake: shapes and strides of fwd's results for tracing; default: the reference on fake
            tensors, made contiguous.
        layout: an empty cotangent for an argument, as bwd lays it out; default: contiguous.
        flops: operations of fwd and of bwd from the shapes of their arguments, for FLOP counters.

    Returns:
        A function of the tensors (positional) and options (by keyword) that returns the outputs.

    Example:
        See `liger_fn/ops/rms_norm.py`, and "A new op in one file" in CONTRIBUTING.md.
    """
    op = _Op(name, fwd, bwd, differentiable, rows, outputs, grouped, opaque, fake, layout, flops)
    forward = _make_functions(op)

    def call(*tensors: _Maybe, **options: Any) -> Any:
        out: Any
        if _plain():
            unwanted = {"wanted": (False,) * len(differentiable)} if op.tells_fwd else {}
            out = op.fwd["reference"](*tensors, **unwanted, **options)
        else:
            grad = torch.is_grad_enabled()
            asked = [tensors[i] for i in op.slots]
            wanted = tuple([grad and t is not None and t.requires_grad for t in asked])
            # chosen here: backward on a GPU runs in its own thread, which using() does not reach
            given = [t for t in tensors if t is not None]
            backend = backend_for(given[0].device.type)
            values = tuple(options[o] for o in op.options)
            shared = (False,) * len(tensors)
            if any(wanted) or torch._C._are_functorch_transforms_active():
                out = forward(backend, (), shared, wanted, *values, *tensors)
            else:
                out = op.run_fwd(backend, (), shared, wanted, values, tensors)
        return out[0] if outputs == 1 else tuple(out[:outputs])

    return call


def _plain() -> bool:
    """Whether the call must run as plain torch: in forward mode, or under a compiled transform."""
    if torch.compiler.is_compiling():
        return torch._C._are_functorch_transforms_active()
    if forward_ad._current_level >= 0:
        return True
    stack = get_interpreter_stack()
    return stack is not None and any(level.key() == TransformType.Jvp for level in stack)


def tracked() -> bool:
    """Whether someone may differentiate or map the running code: it must not reuse buffers."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or _plain()


def _is_legacy_batched(t: Tensor) -> bool:
    """Whether `torch.autograd.grad(is_grads_batched=True)` made t: its vmap knows no rules."""
    return torch._C._dispatch_keys(t).has(_LEGACY_BATCHED)


def _legacy_vmap(pull: Callable, ct: tuple) -> tuple[Tensor, ...] | None:
    """Pull back cotangents that carry an axis of the old vmap by way of the new one.

    None where they carry two. The level of the axis is found by trying: the thread that runs
    backward on a GPU does not know it, and removing an absent level leaves the tensor batched.
    """
    live = [d for d in ct if d is not None]
    on = [_is_legacy_batched(d) for d in live]
    for level in range(1, 64):
        bare = [
            torch._remove_batch_dim(d, level, 0, 0) if b else d
            for d, b in zip(live, on, strict=True)
        ]
        if not any(map(_is_legacy_batched, bare)):
            break
    else:
        return None

    def of_live(*some: Tensor) -> tuple[Tensor, ...]:
        left = iter(some)
        return tuple(pull(*(None if d is None else next(left) for d in ct)))

    out = torch.vmap(of_live, tuple(0 if b else None for b in on))(*bare)
    return tuple(torch._add_batch_dim(g, 0, level) for g in out)


class _Op:
    """The table of one op, and how its rules run: backend, groups, visible or direct."""

    def __init__(
        self,
        name: str,
        fwd: Mapping[Backend, Rule],
        bwd: Mapping[Backend, Rule],
        differentiable: Sequence[str],
        rows: Sequence[str],
        outputs: int,
        grouped: bool,
        opaque: bool,
        fake: Rule | None,
        layout: Callable[[Tensor], Tensor] | None,
        flops: tuple[Callable[..., int], Callable[..., int]] | None,
    ) -> None:
        parameters = list(inspect.signature(fwd["reference"]).parameters.values())
        self.names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        options = {
            p.name: inspect.formatannotation(p.annotation).strip("'")
            for p in parameters
            if p.kind is p.KEYWORD_ONLY
        }
        self.tells_fwd = options.pop("wanted", None) is not None
        self.options = list(options)
        self.slots = [self.names.index(d) for d in differentiable]
        self.rows = [n in rows for n in self.names]
        self.fwd, self.bwd, self.fake = fwd, bwd, fake
        self.layout = layout or _dense
        self.outputs, self.grouped, self.opaque = outputs, grouped, opaque
        self.shares = any(not self.rows[i] for i in self.slots)
        pullback = inspect.signature(bwd["reference"]).parameters.values()
        positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in pullback)
        self.residuals = positional - outputs - len(self.names)
        self.all_rows = [True] * outputs + self.rows + [True] * self.residuals
        if not rows:
            self.all_rows = [False] * positional
        self.fwd_op = self._register(name + "_fwd", self._fwd_impl, self._fwd_fake, options, 0)
        self.bwd_op = self._register(
            name + "_bwd", self._bwd_impl, self._bwd_fake, options, outputs
        )
        for visible, formula in zip((self.fwd_op, self.bwd_op), flops or (), strict=False):
            torch.utils.flop_counter.register_flop_formula(visible.overloadpacket)(formula)

    # -- registered ops: Tensor lists out, so that a cotangent that nobody wants has no tensor

    def _register(
        self, name: str, impl: Callable, fake: Callable, options: dict[str, str], n_ct: int
    ) -> Any:
        ct = [f"Tensor? d_{i}" for i in range(n_ct)]
        res = [f"Tensor? r_{i}" for i in range(self.residuals)] if n_ct else []
        tensors = [f"Tensor? {n}" for n in self.names]
        kw = [f"{_SCHEMA[annotation]} {o}" for o, annotation in options.items()]
        kw += ["str backend", "int[] groups", "bool[] mapped", "bool[] wanted"]
        _LIB.define(f"{name}({', '.join([*ct, *tensors, *res])}, *, {', '.join(kw)}) -> Tensor[]")
        for key in _KEYS:
            _LIB.impl(name, impl, key)
        torch.library.register_fake(f"liger_fn::{name}", fake, lib=_LIB)
        return getattr(torch.ops.liger_fn, name).default

    def _fwd_impl(self, *tensors: _Maybe, **kw: Any) -> list[Tensor]:
        return self._settled(self._call(self._fwd_rule, tensors, **kw), kw)

    def _bwd_impl(self, *tensors: _Maybe, **kw: Any) -> list[Tensor]:
        return self._settled(self._call(self._bwd_rule, tensors, **kw), kw)

    @staticmethod
    def _settled(out: tuple[Tensor, ...], kw: dict[str, Any]) -> list[Tensor]:
        """Kernels lay results out as their fakes say, the others are made contiguous."""
        own = kw["backend"] == "triton" and not kw["groups"]
        return [t if own else t.contiguous() for t in out]

    def _fwd_fake(self, *tensors: _Maybe, **kw: Any) -> list[Tensor]:
        whole = kw["backend"] == "triton" or self.opaque
        if self.fake is None or kw["groups"] or not whole:
            kw["backend"] = "reference"
            return [_dense(t) for t in self._call(self._fwd_rule, tensors, **kw)]
        del kw["backend"], kw["groups"], kw["mapped"]
        if not self.tells_fwd:
            del kw["wanted"]
        return [t for t in self.fake(*tensors, **kw) if t is not None]

    def _bwd_fake(self, *tensors: _Maybe, wanted: Sequence[bool], **kw: Any) -> list[Tensor]:
        primals = tensors[self.outputs : self.outputs + len(self.names)]
        groups, out = kw["groups"], []
        for i in itertools.compress(self.slots, wanted):
            t = primals[i]
            if t is None:  # what is wanted exists
                continue
            if groups and not kw["mapped"][self.outputs + i]:
                out.append(t.new_empty((*groups, *t.shape)))
            else:
                own = kw["backend"] == "triton" and not groups
                out.append(self.layout(t) if own else _dense(t))
        return out

    # -- running a rule

    def _fwd_rule(self, backend: Backend, wanted: Sequence[bool], **options: Any) -> Callable:
        told = {"wanted": tuple(wanted)} if self.tells_fwd else {}
        return functools.partial(self.fwd[backend], **told, **options)

    def _bwd_rule(self, backend: Backend, wanted: Sequence[bool], **options: Any) -> Callable:
        rule = functools.partial(self.bwd[backend], wanted=tuple(wanted), **options)
        return lambda *a, **kw: tuple(itertools.compress(rule(*a, **kw), wanted))

    def _call(
        self,
        make_rule: Callable,
        tensors: Sequence[_Maybe],
        *,
        backend: Backend,
        groups: Sequence[int],
        mapped: Sequence[bool],
        wanted: Sequence[bool],
        **options: Any,
    ) -> tuple[Tensor, ...]:
        rule = make_rule(backend, wanted, **options)
        if not groups:
            return rule(*tensors)
        if self.grouped and backend == "triton":
            return _one_launch(rule, groups, mapped, tensors)
        return _loop(rule, groups, mapped, tensors)

    def _run(
        self,
        pullback: bool,
        backend: Backend,
        groups: tuple,
        mapped: tuple,
        wanted: tuple,
        values: tuple,
        a: Sequence,
    ) -> Sequence[Tensor]:
        kw = dict(zip(self.options, values, strict=True))
        kw.update(backend=backend, groups=groups, mapped=mapped, wanted=wanted)
        if self._visible(backend, a):
            return (self.bwd_op if pullback else self.fwd_op)(*a, **kw)
        return self._call(self._bwd_rule if pullback else self._fwd_rule, a, **kw)

    def run_fwd(self, *args: Any) -> Sequence[Tensor]:
        return self._run(False, *args)

    def run_bwd(self, *args: Any) -> Sequence[Tensor]:
        return self._run(True, *args)

    def _visible(self, backend: Backend, tensors: Sequence[_Maybe]) -> bool:
        """Whether to go through the dispatcher: whoever traces or counts must see an op."""
        if torch.compiler.is_compiling():
            return self.opaque or backend == "triton"
        if torch._C._len_torch_dispatch_stack() > 0:
            return True
        return any(t is not None and type(t) not in _PLAIN for t in tensors)

    def reference_pullback(
        self, groups: tuple, mapped: tuple, wanted: tuple, values: tuple
    ) -> Callable[..., tuple[Tensor, ...]]:
        """(cotangents, tensors) -> wanted cotangents, as differentiable plain torch."""
        options = dict(zip(self.options, values, strict=True))
        forward = self._fwd_rule("reference", wanted, **options)
        pull = self._bwd_rule("reference", wanted, **options)

        def rule(*a: _Maybe) -> tuple[Tensor, ...]:
            return pull(*a, *forward(*a[self.outputs :])[self.outputs :])

        for depth in reversed(range(len(groups))):
            del depth
            rule = _vmap(rule, mapped)
        return rule


def _make_functions(op: _Op) -> Callable[..., tuple[Tensor, ...]]:
    """Build the two autograd Functions of an op; return the forward one's apply."""
    k, n, c = len(op.options), len(op.names), op.outputs
    lead = 4 + k  # backend, groups, mapped, wanted, options
    slots, residuals = tuple(op.slots), op.residuals
    traced_fwd = _make_traced(op, op.fwd_op, op.fwd["reference"], op.tells_fwd)
    traced_bwd = _make_traced(op, op.bwd_op, op.bwd["reference"], True)

    def split(a: Sequence) -> tuple[Backend, tuple, tuple, tuple, tuple, tuple]:
        return a[0], a[1], a[2], a[3], tuple(a[4:lead]), tuple(a[lead:])

    class Pullback(Function):
        @staticmethod
        def forward(*a: Any) -> tuple[Tensor, ...]:
            return tuple(op.run_bwd(*split(a)))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            ctx.static = inputs[:lead]
            ctx.save_for_backward(*inputs[lead : lead + c + n])

        @staticmethod
        def backward(ctx: Any, *ct: Tensor) -> tuple[_Maybe, ...]:
            _, groups, mapped, wanted, values, _ = split(ctx.static)
            rule = op.reference_pullback(groups, mapped[: c + n], wanted, values)
            saved = ctx.saved_tensors
            live = [i for i in range(c + n) if ctx.needs_input_grad[lead + i]]

            def of_live(*some: Tensor) -> tuple[Tensor, ...]:
                a = list(saved)
                for i, t in zip(live, some, strict=True):
                    a[i] = t
                return rule(*a)

            pull = torch.func.vjp(of_live, *(saved[i] for i in live))[1]
            grads = dict(zip(live, pull(tuple(ct)), strict=True))
            none = (None,)
            return none * lead + tuple(map(grads.get, range(c + n))) + none * op.residuals

        @staticmethod
        def vmap(info: Any, dims: tuple, *a: Any) -> Any:
            wanted = split(a)[3]
            sums = any(w and not op.rows[i] for i, w in zip(op.slots, wanted, strict=True))
            return _batch(Pullback, op, info.batch_size, dims[lead:], sums, c, a, lead)

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
            ctx.save_for_backward(*inputs[lead:], *output[c:])

        @staticmethod
        def backward(ctx: Any, *ct: _Maybe) -> tuple[_Maybe, ...]:
            backend, groups, mapped, _, values, _ = split(ctx.static)
            wanted = tuple(ctx.needs_input_grad[lead + i] for i in slots)
            ct = ct[:c]
            out: list[_Maybe] = [None] * (lead + n)
            if all(d is None for d in ct) or not any(wanted):
                return tuple(out)
            saved = ctx.saved_tensors
            marks = (bool(groups),) * c + tuple(mapped) + (bool(groups),) * residuals
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
            return _batch(Forward, op, info.batch_size, dims[lead:], False, 0, a, lead)

    def run_fwd(*args: Any) -> tuple[Tensor, ...]:
        return tuple(op.run_fwd(*args))

    def pull_back(
        backend: Backend, groups: tuple, marks: tuple, wanted: tuple, values: tuple, ct: tuple,
        saved: tuple,
    ) -> Sequence[Tensor]:  # fmt: skip
        batched = any(d is not None and _is_legacy_batched(d) for d in ct)
        if batched:
            again = functools.partial(pull_back, backend, groups, marks, wanted, values)
            out = _legacy_vmap(lambda *d: again(d, saved), ct)
            if out is not None:
                return out
        if batched or _plain():
            rule = op.reference_pullback(groups, marks[: c + n], wanted, values)
            return rule(*ct, *saved[:n])
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return Pullback.apply(backend, groups, marks, wanted, *values, *ct, *saved)
        return op.run_bwd(backend, groups, marks, wanted, values, (*ct, *saved))

    _set_arity(Forward, lead + n)
    _set_arity(Pullback, lead + c + n + op.residuals)
    return Forward.apply


def _make_traced(op: _Op, visible: Any, reference: Rule, tells: bool) -> Callable[..., tuple]:
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


# -- vmap: each level adds an axis, to the rows where that is enough, else to the groups


def _batch(
    cls: type[Function], op: _Op, size: int, dims: tuple, sums: bool, c: int, a: tuple, lead: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    backend, groups, mapped, tensors = *a[:3], a[lead:]
    is_row = (op.all_rows if c else op.rows)[: len(tensors)]
    fold = any(is_row) and not sums
    fold = fold and all(d is None for d, row in zip(dims, is_row, strict=True) if not row)
    depth = len(groups) if fold else 0
    moved, marks = [], []
    for t, d, row, had in zip(tensors, dims, is_row, mapped, strict=True):
        has = t is not None and (row or d is not None)
        if has:
            t = (
                t.unsqueeze(depth).expand(*t.shape[:depth], size, *t.shape[depth:])
                if d is None
                else t.movedim(d, depth)
            )
            if (
                not fold and groups and not had
            ):  # mapped here for the first time: join the inner levels
                inner = t.shape[1:]
                t = t.reshape(size, *(1,) * len(groups), *inner).expand(size, *groups, *inner)
        moved.append(t)
        marks.append(had if fold else has or had)
        if not fold and not has and had and t is not None:
            moved[-1] = t.expand(size, *t.shape)
    new_groups = groups if fold else (size, *groups)
    out = cls.apply(backend, new_groups, tuple(marks), *a[3:lead], *moved)
    return out, (depth,) * len(out)


def _flat(t: Tensor, groups: Sequence[int]) -> Tensor:
    return t if len(groups) == 1 else t.reshape(math.prod(groups), *t.shape[len(groups) :])


def _one_launch(
    rule: Callable, groups: Sequence[int], mapped: Sequence[bool], tensors: Sequence
) -> tuple:
    a = [
        _flat(t, groups) if t is not None and on else t
        for t, on in zip(tensors, mapped, strict=True)
    ]
    out = rule(*a, groups=math.prod(groups))
    return tuple(t if len(groups) == 1 else t.unflatten(0, groups) for t in out)


def _loop(
    rule: Callable, groups: Sequence[int], mapped: Sequence[bool], tensors: Sequence
) -> tuple:
    a = [
        _flat(t, groups) if t is not None and on else t
        for t, on in zip(tensors, mapped, strict=True)
    ]
    outs = [
        rule(*(t[i] if t is not None and on else t for t, on in zip(a, mapped, strict=True)))
        for i in range(math.prod(groups))
    ]
    return tuple(torch.stack(o).unflatten(0, groups) for o in zip(*outs, strict=True))


def _vmap(rule: Callable, mapped: Sequence[bool]) -> Callable:
    def mapped_rule(*a: _Maybe) -> tuple[Tensor, ...]:
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


def _dense(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)
