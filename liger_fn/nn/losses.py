"""Losses that stand for `torch.nn.CrossEntropyLoss`, and the head of a language model.

The head owns the weight and forms the loss inside its own call: what gathers the weight around a
module's call (FSDP, ZeRO) has gathered it then, as for any `torch.nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_fn.ops._collectives import Vocab
from liger_fn.ops.cross_entropy import cross_entropy
from liger_fn.ops.fused_linear_ce import fused_linear_ce

_DEFAULTS = {
    "class_weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0,
    "z_loss": 0.0, "softcap": None, "logit_scale": 1.0, "chunk": None,
    "accum_dtype": torch.float32,
}  # fmt: skip


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` of class indices on `liger_fn.cross_entropy`.

    Args:
        args: those of `torch.nn.CrossEntropyLoss`, and so are `kw`: weight, ignore_index,
            reduction, label_smoothing.
        z_loss: weight of the square of the log-normaliser.
        softcap: c of c * tanh(z / c), applied to the scaled logits.
        logit_scale: multiplies the logits first.

    A mean over no targets is 0 with gradient 0, where torch gives NaN; a target outside the classes
    makes the loss NaN, where torch raises or reads out of bounds.

    Example:
        >>> CrossEntropyLoss()(torch.zeros(1, 4), torch.tensor([2]))
        tensor(1.3863)
    """

    def __init__(
        self, *args: Any, z_loss: float = 0.0, softcap: float | None = None,
        logit_scale: float = 1.0, **kw: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kw)
        self.z_loss, self.softcap, self.logit_scale = z_loss, softcap, logit_scale

    def options(self) -> dict[str, Any]:
        """The options as keyword arguments of the function."""
        names = ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "logit_scale")
        return {"class_weight": self.weight, **{name: getattr(self, name) for name in names}}

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        """Loss of targets y (...) on logits (v,), (b, v) or, as in torch, (b, v, ...)."""
        logits = logits.movedim(1, -1) if logits.dim() > 2 else logits
        return cross_entropy(logits, y, **self.options())

    def extra_repr(self) -> str:
        """Name the options that are not at their default."""
        given = self.options()
        given["class_weight"] = None  # a buffer, which has no place in a line
        return ", ".join(f"{k}={v!r}" for k, v in given.items() if v != _DEFAULTS[k])


class FusedLinearCrossEntropyLoss(CrossEntropyLoss):
    """Cross entropy under a linear head that somebody else owns, without the logits in memory.

    Where the head is yours, `LMHead` is safer: this module reads a weight outside the call of its
    owner, which FSDP and ZeRO do not see.

    Args:
        args: as in `CrossEntropyLoss`, and so are `kw`.
        chunk: tokens whose logits exist at a time; default: as many as fit the budget.
        accum_dtype: of the sums over chunks that become the gradient of w.

    Example:
        >>> w, x = torch.zeros(4, 3), torch.ones(1, 3)
        >>> FusedLinearCrossEntropyLoss()(w, x, torch.tensor([2]))
        tensor(1.3863)
    """

    def __init__(
        self, *args: Any, chunk: int | None = None, accum_dtype: torch.dtype = torch.float32,
        **kw: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kw)
        self.chunk, self.accum_dtype = chunk, accum_dtype

    def options(self) -> dict[str, Any]:
        """The options as keyword arguments of the function."""
        return {**super().options(), "chunk": self.chunk, "accum_dtype": self.accum_dtype}

    def forward(  # type: ignore[override]  # the weight comes first, as in the function
        self, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None = None, *,
        token_weight: Tensor | None = None, n_valid: float | Tensor | None = None,
        group: Vocab | None = None,
    ) -> Tensor:  # fmt: skip
        """Loss of targets y (...) under w (v, d) and b (v,) on x (..., d)."""
        options = {**self.options(), "token_weight": token_weight, "n_valid": n_valid}
        return fused_linear_ce(w, x, y, b=b, group=group, **options)


class LMHead(nn.Linear):
    """`torch.nn.Linear` that gives logits, or with targets their loss without the logits.

    Args:
        in_features: width d of x.
        out_features: size v of the vocabulary.
        bias: whether there is one.
        device: of the parameters.
        dtype: of the parameters.
        loss: a module or function that is called as loss(w, x, ..., b=b), say `DPOLoss`; its
            logit_scale and softcap, where it has them, hold for the logits too.

    Example:
        >>> head, x = LMHead(3, 4, bias=False), torch.ones(2, 3)
        >>> head(x).shape, head(x, torch.tensor([2, 3])).shape
        (torch.Size([2, 4]), torch.Size([]))
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        loss: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.loss = FusedLinearCrossEntropyLoss() if loss is None else loss
        self.vocab_mesh: Any = None  # over which VocabParallelHead has sharded the parameters

    def forward(  # type: ignore[override]  # x has company where there is a loss
        self, x: Tensor, *targets: Tensor | None, **more: Any
    ) -> Any:
        """Logits (..., v) of x (..., d) alone, or the loss of x beside what else the loss takes."""
        mesh = self.vocab_mesh
        w: Tensor = self.weight
        b: Tensor | None = self.bias
        if any(t is not None for t in (*targets, *more.values())):
            if mesh is not None:
                from liger_fn.nn.parallel import shard_of_head

                w, b, more["group"] = shard_of_head(self, mesh)
            return self.loss(w, x, *targets, b=b, **more)
        if mesh is None:
            z = F.linear(x, w, b)
        else:
            from liger_fn.nn.parallel import gathered_logits

            z = gathered_logits(self, x, mesh)
        scale, cap = (getattr(self.loss, name, None) for name in ("logit_scale", "softcap"))
        z = z if scale in (None, 1.0) else z * scale
        return z if cap is None else cap * torch.tanh(z / cap)
