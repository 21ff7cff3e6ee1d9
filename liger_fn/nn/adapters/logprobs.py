"""token_logprobs: what post-training needs from any adapted causal language model."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

import liger_fn
from liger_fn.nn.adapters.adapt import AdapterError
from liger_fn.nn.adapters.head import PLAN, DeferredLogits, shifted


def token_logprobs(
    model: nn.Module, *, labels: Tensor, temperature: float = 1.0, ignore_index: int = -100,
    **inputs: Any,
) -> Tensor:  # fmt: skip
    """Log-probability of each label under an adapted model, without the logits in memory.

    The model is called as a whole, so that hooks around it (FSDP, DDP, ZeRO) run; its own scale and
    soft cap of logits hold.

    Args:
        model: adapted with `fused_linear_ce` (with `cross_entropy` alone it forms its logits), bare
            or wrapped. Where a library gives the model a forward of its own (trainers of TRL do),
            adapt before it: adapted after, the model forms its logits.
        labels: tokens (b, t), as the model takes them: not shifted.
        temperature: divides the logits.
        ignore_index: labels that do not count: log-probability and gradient 0.
        inputs: what else the model takes: input_ids, attention_mask, pixel_values, ...

    Returns:
        float32 (b, t - 1): entry i is log p(labels[:, i + 1]). Differentiable.

    Raises:
        AdapterError: the model is not adapted, or no longer runs what `adapt` gave it.
    """
    if not any(PLAN in m.__dict__ for m in model.modules()):
        raise AdapterError(
            f"token_logprobs: no head of {type(model).__name__} is adapted: it takes a causal "
            "language model, after adapt(model) with fused_linear_ce or cross_entropy on"
        )
    y = shifted(labels, ignore_index)
    form = functools.partial(_logp, y=y, temperature=temperature, ignore_index=ignore_index)
    logp = model(**inputs, through_head=form)
    if not isinstance(logp, Tensor):  # outputs of the model: a forward that ignores through_head
        raise AdapterError(
            f"token_logprobs: {type(model).__name__} was adapted, but runs another forward (of a "
            "library that put its own there, or from a pickle): call adapt(model) again"
        )
    return logp[..., :-1]


def _logp(
    logits: Any, loop: dict[str, Any], *, y: Tensor, temperature: float, ignore_index: int
) -> Tensor:  # fmt: skip
    def formed(x: Tensor, w: Tensor, b: Tensor | None, **form: Any) -> Tensor:
        options = {**form, **loop, "temperature": temperature, "ignore_index": ignore_index}
        return liger_fn.fused_linear_logp(w, x, y.to(x.device), b=b, **options)

    if isinstance(logits, DeferredLogits):
        logp = logits.through(formed)
        if logp is not None:
            return logp
        logits = logits.value()
    return -liger_fn.cross_entropy(  # LoRA on the head, say
        logits, y.to(logits.device), logit_scale=1.0 / temperature, ignore_index=ignore_index,
        reduction="none",
    )  # fmt: skip
