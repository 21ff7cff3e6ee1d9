"""The table of one op, its registered ops, and how its rules run."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.flop_counter
from torch import Tensor

from liger_fn._check import NUMBERS, WHOLE
from liger_fn._launch import Backend, Maybe, Rule
from liger_fn._vjp.batching import loop, none_of, one_launch, vmap_rule
from liger_fn._vjp.sharding import register

_LIB = torch.library.Library("liger_fn", "DEF")
_KEYS = ("CPU", "CUDA", "XPU", "MPS")
_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None)}
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


@dataclass
class Op:
    """The table of one op, and how its rules run: backend, groups, visible or direct.

    The fields are the arguments of custom_vjp.
    """

    name: str
    fwd: Mapping[Backend, Rule]
    bwd: Mapping[Backend, Rule]
    differentiable: Sequence[str]
    row_names: Sequence[str]
    output_names: int | Sequence[str]
    grouped: bool
    opaque: bool
    fake: Rule | None
    layout: Callable[[Tensor], Tensor] | None
    flops: tuple[Callable[..., int], Callable[..., int]] | None
    axes: str | None

    def __post_init__(self) -> None:
        parameters = list(inspect.signature(self.fwd["reference"]).parameters.values())
        self.names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        options = {
            p.name: inspect.formatannotation(p.annotation).strip("'")
            for p in parameters
            if p.kind is p.KEYWORD_ONLY
        }
        self.tells_fwd = options.pop("wanted", None) is not None
        self.options = list(options)
        self._check(options)
        numbers = {"float": NUMBERS, "int": WHOLE}  # of which type an option must be
        self.kinds: dict[str, Any] = {
            o: (*numbers[kind], *[type(None)] * bool(more)) if kind in numbers else object
            for o, annotation in options.items()
            for kind, _, more in [annotation.partition(" | ")]
        }
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.slots = [self.names.index(d) for d in self.differentiable]
        self.rows = [n in self.row_names for n in self.names]
        named = self.output_names
        names = [""] * named if isinstance(named, int) else list(named)
        self.outputs = len(names)
        pullback = inspect.signature(self.bwd["reference"]).parameters.values()
        taken = [p.name for p in pullback if p.kind is p.POSITIONAL_OR_KEYWORD][self.outputs :]
        # what bwd takes behind the cotangents: arguments, outputs, then residuals, by their place
        self.args = [self.names.index(t) for t in taken if t in self.names]
        outs = [names.index(t) for t in taken if t in names]
        self.residuals = len(taken) - len(self.args) - len(outs)
        self.reuses = "donated" in inspect.signature(self.bwd["triton"]).parameters
        self.results = [*outs, *range(self.outputs, self.outputs + self.residuals)]
        self.given = self.outputs + len(self.args) + len(outs)
        free = (
            [True] * self.outputs + [self.rows[i] for i in self.args] + [True] * len(self.results)
        )
        self.all_rows = free if self.row_names else [False] * len(free)
        self.fwd_op = self._register("fwd", self._fwd_impl, self._fwd_fake, options, 0)
        self.bwd_op = self._register("bwd", self._bwd_impl, self._bwd_fake, options, self.outputs)
        for visible, formula in zip((self.fwd_op, self.bwd_op), self.flops or (), strict=False):
            torch.utils.flop_counter.register_flop_formula(visible.overloadpacket)(formula)
        register(self, self.axes, _LIB)

    def _check(self, options: dict[str, str]) -> None:
        """Hold the table to itself, where whoever writes it can see what is wrong."""
        says = f"custom_vjp: {{}} of {self.name!r} must be {{}}, got {{}}".format
        if not self.name.isidentifier() or hasattr(torch.ops.liger_fn, f"{self.name}_fwd"):
            raise ValueError(says("the name", "an identifier that is not taken", self.name))
        for way, rules in (("fwd", self.fwd), ("bwd", self.bwd)):
            if {*rules} != {"reference", "triton"}:
                raise ValueError(says(way, "keyed 'reference' and 'triton'", [*rules]))
        for way, named in (("differentiable", self.differentiable), ("rows", self.row_names)):
            if not {*named} <= {*self.names}:
                raise ValueError(says(way, f"among the tensors {self.names}", [*named]))
        for o, annotation in options.items():
            if annotation not in _SCHEMA:
                raise TypeError(
                    says(f"option {o}", f"annotated as one of {[*_SCHEMA]}", annotation)
                )

    def default(self, option: str) -> Any:
        """What an option is where it is not given."""
        if option not in self.defaults:
            raise TypeError(f"{self.name}: option {option} must be given")
        return self.defaults[option]

    def usage(self, tensors: int, options: Mapping[str, Any]) -> str:
        """Say how a call should have been."""
        unknown = sorted({*options} - {*self.options})
        if unknown:
            return f"{self.name}: options must be among {self.options}, got {', '.join(unknown)}"
        return f"{self.name}: tensors must be {len(self.names)}, {self.names}, got {tensors}"

    # -- registered ops: Tensor lists out, so that a cotangent that nobody wants has no tensor

    def _register(
        self, way: str, impl: Callable, fake: Callable, options: dict[str, str], n_ct: int
    ) -> Any:
        name = f"{self.name}_{way}"
        ct = [f"Tensor? d_{i}" for i in range(n_ct)]
        res = [f"Tensor? r_{i}" for i in range(self.residuals)] if n_ct else []
        tensors = [f"Tensor? {n}" for n in self.names]
        if n_ct:
            tensors = [f"Tensor? {self.names[i]}" for i in self.args]
            tensors += [f"Tensor? y_{i}" for i in self.results if i < self.outputs]
        kw = [f"{_SCHEMA[annotation]} {o}" for o, annotation in options.items()]
        kw += ["str backend", "int[] groups", "bool[] mapped", "bool[] wanted"]
        _LIB.define(f"{name}({', '.join([*ct, *tensors, *res])}, *, {', '.join(kw)}) -> Tensor[]")
        for key in _KEYS:
            _LIB.impl(name, impl, key)
        torch.library.register_fake(f"liger_fn::{name}", fake, lib=_LIB)
        return getattr(torch.ops.liger_fn, name).default

    def _fwd_impl(self, *tensors: Maybe, **kw: Any) -> list[Tensor]:
        return self._settled(self._call(self._fwd_rule, tensors, **kw), kw)

    def _bwd_impl(self, *tensors: Maybe, **kw: Any) -> list[Tensor]:
        return self._settled(self._call(self._apart_rule, tensors, **kw), kw)

    @staticmethod
    def _settled(out: tuple[Tensor, ...], kw: dict[str, Any]) -> list[Tensor]:
        """Kernels lay results out as their fakes say, the others are made contiguous."""
        own = kw["backend"] == "triton" and not kw["groups"]
        return [t if own else t.contiguous() for t in out]

    def _fwd_fake(self, *tensors: Maybe, **kw: Any) -> list[Tensor]:
        whole = kw["backend"] == "triton" or self.opaque
        if self.fake is None or kw["groups"] or not whole:
            kw["backend"] = "reference"
            return [dense(t) for t in self._call(self._fwd_rule, tensors, **kw)]
        del kw["backend"], kw["groups"], kw["mapped"]
        if not self.tells_fwd:
            del kw["wanted"]
        return [t for t in self.fake(*tensors, **kw) if t is not None]

    def _bwd_fake(self, *tensors: Maybe, **kw: Any) -> list[Tensor]:
        primals, groups = tensors[self.outputs :], kw["groups"]
        own = kw["backend"] == "triton" and not groups
        if len(self.args) < len(self.names):  # who knows what is not here?
            if own and self.layout:  # outputs in its place: one for each gradient
                kept = itertools.compress(primals[len(self.args) :], kw["wanted"])
                return [self.layout(t) for t in kept if t is not None]
            kw["backend"] = "reference"
            return [dense(t) for t in self._call(self._bwd_rule, tensors, **kw)]
        out = []
        for i in itertools.compress(self.slots, kw["wanted"]):
            t = primals[i]
            if t is None:  # what is wanted exists
                continue
            if groups and not kw["mapped"][self.outputs + i]:
                out.append(t.new_empty((*groups, *t.shape)))
            else:
                out.append((self.layout or dense)(t) if own else dense(t))
        return out

    # -- running a rule

    def _fwd_rule(self, backend: Backend, wanted: Sequence[bool], options: dict) -> Callable:
        told = {"wanted": tuple(wanted)} if self.tells_fwd else {}
        return functools.partial(self.fwd[backend], **told, **options)

    def _bwd_rule(self, backend: Backend, wanted: Sequence[bool], options: dict) -> Callable:
        rule = functools.partial(self.bwd[backend], wanted=tuple(wanted), **options)
        return lambda *a, **kw: tuple(itertools.compress(rule(*a, **kw), wanted))

    def _apart_rule(self, backend: Backend, wanted: Sequence[bool], options: dict) -> Callable:
        """No two results of a registered op are one tensor."""
        rule = self._bwd_rule(backend, wanted, options)

        def apart(*a: Maybe, **groups: int) -> tuple[Tensor, ...]:
            out = rule(*a, **groups)
            return tuple(
                t.clone() if any(t is u for u in out[:i]) else t for i, t in enumerate(out)
            )

        return apart

    def _call(
        self,
        make_rule: Callable,
        tensors: Sequence[Maybe],
        *,
        backend: Backend,
        groups: Sequence[int],
        mapped: Sequence[bool],
        wanted: Sequence[bool],
        **options: Any,
    ) -> tuple[Tensor, ...]:
        rule = make_rule(backend, wanted, options)
        if not groups:
            return rule(*tensors)
        if 0 in groups:
            return none_of(rule, groups, mapped, tensors)
        if self.grouped and backend == "triton":
            return one_launch(rule, groups, mapped, tensors)
        return loop(rule, groups, mapped, tensors)

    def _run(
        self, visible: Any, make_rule: Callable, static: tuple, a: Sequence[Maybe], **told: bool
    ) -> Sequence[Tensor]:
        backend, groups, mapped, wanted, values = static
        options = dict(zip(self.options, values, strict=True))
        seen = self._visible(backend, a)
        if not groups and not seen:
            return make_rule(backend, wanted, options | told)(*a)
        options.update(backend=backend, groups=groups, mapped=mapped, wanted=wanted)
        return visible(*a, **options) if seen else self._call(make_rule, a, **options)

    def run_fwd(self, static: tuple, a: Sequence[Maybe]) -> Sequence[Tensor]:
        return self._run(self.fwd_op, self._fwd_rule, static, a)

    def run_bwd(self, static: tuple, a: Sequence[Maybe], donated: bool = False) -> Sequence[Tensor]:
        told = {"donated": True} if donated and self.reuses and static[0] == "triton" else {}
        return self._run(self.bwd_op, self._bwd_rule, static, a, **told)

    def _visible(self, backend: Backend, tensors: Sequence[Maybe]) -> bool:
        """Whether to go through the dispatcher: whoever traces or counts must see an op."""
        if torch.compiler.is_compiling():
            return self.opaque or backend == "triton"
        if torch._C._len_torch_dispatch_stack() > 0:
            return True
        return not _PLAIN.issuperset(map(type, tensors))

    def reference_pullback(
        self, _: Backend, groups: tuple, mapped: tuple, wanted: tuple, values: tuple
    ) -> Callable[..., tuple[Tensor, ...]]:
        """(cotangents, tensors) -> wanted cotangents, as differentiable plain torch."""
        options = dict(zip(self.options, values, strict=True))
        forward = self._fwd_rule("reference", wanted, options)
        pull = self._bwd_rule("reference", wanted, options)

        def rule(*a: Maybe) -> tuple[Tensor, ...]:
            if len(self.args) < len(self.names):
                return pull(*a, *(None,) * self.residuals)
            return pull(
                *a, *forward(*a[self.outputs : self.outputs + len(self.names)])[self.outputs :]
            )

        for _ in groups:
            rule = vmap_rule(rule, mapped[: self.given])
        return rule


def dense(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)
