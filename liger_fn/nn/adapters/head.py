"""The head of a causal language model: its logits deferred, its loss formed inside its own call.

In training a model's own forward runs with a `View` of the model as self, whose head defers: it
returns `DeferredLogits`, which record what the model does to logits (a scale, a soft cap), and
whose loss_function hands the loss to the head as `head(hidden, formed)`. The weight is read inside
the head's call, where FSDP and ZeRO have gathered it. What is not understood makes real logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import liger_fn
from liger_fn.nn.adapters.binding import hooks_of_others, is_bound, slot_of

PLAN = "_liger_fn_plan"
Formed = Callable[..., Tensor]


@dataclass(frozen=True)
class Plan:
    """What an adapted model does with its logits; kept on the model, gone when it is restored."""

    head: str
    fused: bool
    cross_entropy: bool
    loss: Callable[..., Tensor]  # the loss_function that we know; any other one is left to itself
    loop: dict[str, Any]  # how a head goes through the tokens: chunk, accum_dtype


def head_forward(self: Any, x: Tensor, formed: Formed | None = None) -> Tensor:
    """Logits as `torch.nn.Linear` makes them, or what `formed` makes of x, weight and bias."""
    if formed is None:
        return F.linear(x, self.weight, self.bias)
    return formed(x, self.weight, self.bias)


def model_forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a model; signature and everything that it returns stay."""

    @functools.wraps(inner)
    def forward(
        self: Any, *args: Any, skip_logits: bool | None = None, through_head: Any = None, **kw: Any
    ) -> Any:
        plan = self.__dict__.get(PLAN)
        if through_head is not None:
            out = inner(View(self, plan, plan.fused), *args, **{**kw, "return_dict": True})
            return through_head(out.logits, plan.loop)
        if plan is None or kw.get("labels") is None:
            return inner(self, *args, **kw)
        defer = plan.fused and (self.training if skip_logits is None else skip_logits)
        if not defer and not plan.cross_entropy:
            return inner(self, *args, **kw)
        out = inner(View(self, plan, defer), *args, **kw)
        parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else ()
        for logits in parts:
            if isinstance(logits, DeferredLogits):
                logits.version = _version(logits.head)
        return out

    return forward


class View:
    """A model as its own forward sees it, but for a head that defers and a loss that knows it."""

    def __init__(self, model: Any, plan: Plan, defer: bool) -> None:
        for name, value in (("_model", model), ("_plan", plan), ("_defer", defer)):
            object.__setattr__(self, name, value)  # the model's attributes are set by plain names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if name == self._plan.head and self._defer and is_bound(found, slot_of(found)):
            return found if hooks_of_others(found) else _DeferredHead(found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def loss_function(
        self, logits: Any, labels: Tensor | None, vocab_size: int,
        num_items_in_batch: Any = None, ignore_index: int = -100,
        shift_labels: Tensor | None = None, **kw: Any,
    ) -> Any:  # fmt: skip
        """Loss of labels, which are shifted here unless shift_labels are given."""
        known = self._model.loss_function is self._plan.loss and vocab_size == logits.shape[-1]
        y = shifted(labels, ignore_index) if shift_labels is None else shift_labels
        if known and y.numel() == logits.shape[:-1].numel():
            options: dict[str, Any] = {"ignore_index": ignore_index, "n_valid": num_items_in_batch}
            options["y"] = y.reshape(logits.shape[:-1])
            if isinstance(logits, DeferredLogits):
                formed = functools.partial(_fused_ce, **options, **self._plan.loop)
                loss = logits.through(formed)
                if loss is not None:
                    return loss
            if self._plan.cross_entropy:
                z = _real(logits)
                return liger_fn.cross_entropy(z, **beside(z, options))
        return self._model.loss_function(
            _real(logits), labels, vocab_size, num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index, shift_labels=shift_labels, **kw,
        )  # fmt: skip


def _fused_ce(x: Tensor, w: Tensor, b: Tensor | None, **options: Any) -> Tensor:
    return liger_fn.fused_linear_ce(w, x, b=b, **beside(x, options))


def beside(x: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Bring options to x, which a hook of device_map may have brought to the weight of the head."""
    return {k: v.to(x.device) if isinstance(v, Tensor) else v for k, v in options.items()}


def shifted(labels: Any, ignore_index: int) -> Tensor:
    """Targets aligned with the tokens that predict them; the last token predicts nothing."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


class _DeferredHead:
    """Called, it defers; asked for anything else, it is the head."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> DeferredLogits:
        return DeferredLogits(hidden, self._head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


class DeferredLogits:
    """Logits that nobody has computed; read in any way, they are the real ones, with gradients.

    `outputs.logits` of an adapted model in training. Read them before the optimizer changes the
    weight (later it is an error), or call the model with `skip_logits=False`.
    """

    def __init__(self, hidden: Tensor, head: Any, steps: tuple[tuple[str, Any], ...] = ()) -> None:
        self.hidden, self.head, self.steps = hidden, head, steps
        self.version: int | None = None
        self._value: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the logits."""
        casts = [value for step, value in self.steps if isinstance(value, torch.dtype)]
        return casts[-1] if casts else self.hidden.dtype

    @property
    def device(self) -> torch.device:
        """Where the logits would be."""
        moves = [v for step, v in self.steps if step == "to" and not isinstance(v, torch.dtype)]
        return torch.device(moves[-1]) if moves else self.hidden.device

    def form(self) -> tuple[float, float | None] | None:
        """Scale and soft cap that the steps amount to, or None where they are something else."""
        before, after, capped = 1.0, 1.0, False
        for step, value in self.steps:
            if step == "tanh" and capped:
                return None
            capped = capped or step == "tanh"
            factor = value if step == "*" else 1.0 / value if step == "/" else 1.0
            before, after = (before, after * factor) if capped else (before * factor, after)
        return (before * after, after) if capped else (before, None)

    def through(self, formed: Formed) -> Tensor | None:
        """Call the head for something else than logits, with their scale and soft cap.

        None where the steps are something else than a scale and a soft cap, or the logits exist.
        """
        # logits that exist may have been written to
        form = self.form() if self._value is None else None
        if form is None:
            return None
        scale, cap = form
        return self.head(self.hidden, functools.partial(formed, logit_scale=scale, softcap=cap))

    def value(self) -> Tensor:
        """The logits, computed on first use."""
        if self._value is None:
            if self.version not in (None, _version(self.head)):
                raise RuntimeError(
                    "these logits were deferred and the weight of the head has changed since: read "
                    "them before the optimizer steps, or call the model with skip_logits=False"
                )
            z = self.head(self.hidden)
            for step, value in self.steps:
                z = _STEPS[step](z, value)
            self._value = z
        return self._value

    def _then(self, step: str, value: Any) -> Any:
        if self._value is not None:
            return _STEPS[step](self._value, value)
        then = DeferredLogits(self.hidden, self.head, (*self.steps, (step, value)))
        then.version = self.version
        return then

    def __mul__(self, other: Any) -> Any:
        return self._then("*", other) if isinstance(other, Real) else self.value() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        fine = isinstance(other, Real) and other != 0
        return self._then("/", other) if fine else self.value() / other

    def tanh(self) -> Any:
        """Tanh, deferred too."""
        return self._then("tanh", None)

    def to(self, *args: Any, **kw: Any) -> Any:
        """Logits in another dtype or on another device, deferred too."""
        plain = len(args) == 1 and isinstance(args[0], (torch.dtype, torch.device, str, int))
        if plain and not kw.keys() - {"non_blocking"}:
            return self._then("to", args[0])
        return self.value().to(*args, **kw)

    def float(self) -> Any:
        """Logits in float32, deferred too."""
        return self._then("to", torch.float32)

    def contiguous(self) -> Any:
        """These logits, which will be contiguous."""
        return self if self._value is None else self._value

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(
        cls, f: Callable[..., Any], types: Any, args: Any = (), kw: Any = None
    ) -> Any:
        if f is torch.tanh:
            return args[0].tanh()
        args, kw = torch.utils._pytree.tree_map(_real, (args, kw or {}))
        return f(*args, **kw)


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.value(), name)(*args)

    return operator


# Python looks operators up on the class, and without these == and != would compare identities
for _name in (
    "add", "radd", "sub", "rsub", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "matmul", "rmatmul", "neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge",
    "getitem", "setitem", "contains", "iter", "bool", "int", "float", "complex", "index", "array",
):  # fmt: skip
    setattr(DeferredLogits, f"__{_name}__", _operator(f"__{_name}__"))


_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "*": torch.mul,
    "/": torch.div,
    "tanh": lambda z, _: torch.tanh(z),
    "to": lambda z, to: z.to(to),
}


def _version(head: nn.Module) -> int | None:
    # not head.weight: ZeRO-3 takes that for a use outside the head's call, and gathers the weight
    # in each forward of the whole model from then on
    w = head._parameters.get("weight")
    return None if w is None else w._version


def _real(value: Any) -> Any:
    return value.value() if isinstance(value, DeferredLogits) else value
