"""Losses of post-training as modules: each holds the options of one function and calls it.

    DPOLoss(beta=0.2)(w, x, y, ref_logp=ref) = dpo_loss(w, x, y, ref_logp=ref, beta=0.2)

An option is a keyword of the function that takes no tensor. Options are checked when the module is
made, by a call on a batch of no rows. What belongs to a batch (y, advantages, ref_logp, n_valid) or
to a weight (b, group) goes to the call. None owns a weight: `LMHead(d, v, loss=DPOLoss())` gives
them that of the head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_fn._launch import using
from liger_fn.ops.fused_linear_jsd import fused_linear_jsd
from liger_fn.ops.grpo import grpo_loss
from liger_fn.ops.preference.cpo import cpo_loss
from liger_fn.ops.preference.dpo import dpo_loss
from liger_fn.ops.preference.kto import kto_loss
from liger_fn.ops.preference.orpo import orpo_loss
from liger_fn.ops.preference.simpo import simpo_loss


class HeadLoss(nn.Module):
    """The options of one function of (w, x, ...), held and checked.

    Args:
        options: see `defaults` of each class; their meaning is with its function.

    Raises:
        TypeError: an option that the function does not have.
        ValueError: a value that it does not take, or not beside the others.
    """

    function: ClassVar[Callable[..., Tensor]]
    defaults: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        found = inspect.signature(cls.function).parameters.values()
        keywords = [p for p in found if p.kind is p.KEYWORD_ONLY]
        fixed = [p for p in keywords if "Tensor" not in str(p.annotation) and p.name != "group"]
        cls.defaults = {p.name: p.default for p in fixed}

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name in options:
            if name not in self.defaults:
                wanted = ", ".join(self.defaults)
                raise TypeError(f"{type(self).__name__}: options are {wanted}, got {name}")
        for name, value in {**self.defaults, **options}.items():
            setattr(self, name, value)
        with torch.device("cpu"), using("reference"):
            w, x = torch.empty(1, 1), torch.empty(0, 1, 1)
            self(w, x, y=torch.empty(0, 1, dtype=torch.int64), **self.none(w, x))

    def none(self, w: Tensor, x: Tensor) -> dict[str, Any]:
        """What a batch of no rows has beside w, x and y."""
        return {}

    def options(self) -> dict[str, Any]:
        """The options as keyword arguments of the function."""
        return {name: getattr(self, name) for name in self.defaults}

    def forward(self, w: Tensor, x: Tensor, *batch: Tensor, **more: Any) -> Tensor:
        """Call the function on w (v, d), x (..., d) and what else it takes that is no option."""
        return type(self).function(w, x, *batch, **more, **self.options())

    def extra_repr(self) -> str:
        """Name the options that are not at their default."""
        given = self.options().items()
        return ", ".join(f"{k}={v!r}" for k, v in given if v != self.defaults[k])


class DPOLoss(HeadLoss):
    """Direct preference optimisation: `liger_fn.dpo_loss` of (w, x, y, ref_logp=...).

    Args:
        options: as in `HeadLoss`: beta, loss_type, ...

    Example:
        >>> w, x = torch.eye(2), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> y = torch.zeros(2, 1, dtype=torch.int64)
        >>> DPOLoss(beta=1.0)(w, x, y, ref_logp=torch.zeros(2))
        tensor(0.3133)
    """

    function = staticmethod(dpo_loss)

    def none(self, w: Tensor, x: Tensor) -> dict[str, Any]:
        """A reference, but for the one loss that has none."""
        alone = self.loss_type in ("sft", ["sft"], ("sft",))
        return {} if alone else {"ref_logp": x.flatten()}


class ORPOLoss(HeadLoss):
    """Odds ratio preference optimisation: `liger_fn.orpo_loss` of (w, x, y).

    Args:
        options: as in `HeadLoss`: beta, average_logp, ...

    Example:
        >>> head = liger_fn.nn.LMHead(2, 5, loss=ORPOLoss(beta=0.2))
        >>> head(torch.zeros(4, 3, 2), torch.zeros(4, 3, dtype=torch.int64)).shape
        torch.Size([])
    """

    function = staticmethod(orpo_loss)


class CPOLoss(HeadLoss):
    """Contrastive preference optimisation: `liger_fn.cpo_loss` of (w, x, y).

    Args:
        options: as in `HeadLoss`: beta, nll_weight, label_smoothing, ...
    """

    function = staticmethod(cpo_loss)


class SimPOLoss(HeadLoss):
    """Simple preference optimisation: `liger_fn.simpo_loss` of (w, x, y).

    Args:
        options: as in `HeadLoss`: beta, gamma_beta_ratio, ...
    """

    function = staticmethod(simpo_loss)


class KTOLoss(HeadLoss):
    """Single sequences: `liger_fn.kto_loss` of (w, x, y, desirable, ref_logp=..., kl=...).

    Args:
        options: as in `HeadLoss`: beta, desirable_weight, undesirable_weight, ...
    """

    function = staticmethod(kto_loss)

    def none(self, w: Tensor, x: Tensor) -> dict[str, Any]:
        """No verdicts and no reference."""
        return {"desirable": x.flatten().bool(), "ref_logp": x.flatten(), "kl": 0.0}


class GRPOLoss(HeadLoss):
    """Policy gradients: `liger_fn.grpo_loss` of (w, x, y, advantages, old_logp=...).

    Args:
        options: as in `HeadLoss`: loss_type, importance, beta, eps_low, ...
    """

    function = staticmethod(grpo_loss)

    def none(self, w: Tensor, x: Tensor) -> dict[str, Any]:
        """No advantages, and a reference where beta weighs it."""
        ref = {"ref_logp": x.flatten(1)} if self.beta else {}
        return {"advantages": x.flatten(), **ref}


class JSDLoss(HeadLoss):
    """Divergence from a teacher: `liger_fn.fused_linear_jsd` of (w, x, teacher_w, teacher_x).

    Args:
        options: as in `HeadLoss`: beta, temperature, hard_weight, reduction, ...
    """

    function = staticmethod(fused_linear_jsd)

    def none(self, w: Tensor, x: Tensor) -> dict[str, Any]:
        """A teacher that saw no rows."""
        return {"teacher_w": w, "teacher_x": x}
