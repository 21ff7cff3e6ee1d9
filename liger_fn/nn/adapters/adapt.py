"""adapt, restore, adapted: let one model compute with liger_fn, and let it go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from liger_fn.nn.adapters.binding import bind, bound, slot_of, unbind
from liger_fn.nn.adapters.fingerprint import Glu
from liger_fn.nn.adapters.forwards import bind_spec
from liger_fn.nn.adapters.head import PLAN, Plan, head_forward, model_forward
from liger_fn.nn.adapters.survey import SWITCHES, Found, survey
from liger_fn.ops._chunked import check_chunk, check_loop

M = TypeVar("M", bound=nn.Module)


class AdapterError(ValueError):
    """What was asked for does not fit the model; the message says why."""


def adapt(
    model: M, *, rms_norm: bool | None = None, layer_norm: bool | None = None,
    rope: bool | None = None, glu: bool | None = None, cross_entropy: bool | None = None,
    fused_linear_ce: bool | None = None, chunk: int | None = None,
    accum_dtype: torch.dtype = torch.float32, mlp_chunk: int | None = None,
) -> M:  # fmt: skip
    """Let this one model compute with the functions of liger_fn, wherever that means the same.

    Parameters, state dict, classes and signature stay; so does every other model. In training with
    labels the logits are not computed, unless somebody reads `outputs.logits`. What takes the place
    of a module later is not adapted (`resize_token_embeddings` makes a new head): call it again.

    Args:
        model: a Hugging Face model, bare or in PEFT, or any module. Adapted before: starts anew.
        rms_norm: None replaces every RMS norm that is recognised, True raises where there is none,
            False leaves all as they are; so do the other switches.
        layer_norm: `torch.nn.LayerNorm` likewise.
        rope: rotations of queries and keys likewise.
        glu: gated feed-forward layers and gates of packed experts likewise.
        cross_entropy: losses on logits that exist likewise.
        fused_linear_ce: in training, losses without logits likewise.
        chunk: tokens whose logits exist at a time, in a loss without logits and `token_logprobs`.
        accum_dtype: of the sums over chunks there that become the gradient of the head; bfloat16
            halves their memory.
        mlp_chunk: tokens whose inner activations exist at a time in a gated feed-forward layer;
            backward forms them again. Longer contexts fit, a step takes longer, and gradients of
            its weights are sums over chunks, each rounded to their dtype.

    Returns:
        The model itself.

    Raises:
        AdapterError: a switch is True and nothing matches it, or the model runs kernels from the
            hub (`use_kernels`), or there is an mlp_chunk and no gated layer for it. The model is
            as it was.
        ValueError: chunk or accum_dtype is none that `fused_linear_ce` takes, or mlp_chunk is no
            integer above 0.

    Example:
        >>> model = adapt(torch.nn.Sequential(torch.nn.LayerNorm(8)), layer_norm=True)
    """
    asked = dict(
        zip(
            SWITCHES,
            (rms_norm, layer_norm, rope, glu, cross_entropy, fused_linear_ce),
            strict=True,
        )
    )
    for switch, value in asked.items():
        if value not in (None, True, False):
            raise ValueError(f"adapt: {switch} must be True, False or None, got {value!r}")
    check_loop("adapt", chunk, accum_dtype)
    check_chunk("adapt", mlp_chunk, "mlp_chunk")
    if getattr(model, "use_kernels", False):
        raise AdapterError(
            "adapt: the model runs kernels from the hub: load it without use_kernels"
        )
    found = survey(model)
    for switch, value in asked.items():
        if value and not any(f.switch == switch and f.spec is not None for f in found):
            raise AdapterError(_nothing(switch, model, found))
    wanted = [f for f in found if f.spec is not None and asked[f.switch] is not False]
    if mlp_chunk is not None and not any(isinstance(f.spec, Glu) for f in wanted):
        raise AdapterError("adapt: mlp_chunk is given, but no gated feed-forward layer is adapted")
    restore(model)
    loop = {"chunk": chunk, "accum_dtype": accum_dtype}
    _bind_head([f for f in wanted if isinstance(f.spec, str)], loop)
    for f in wanted:
        if f.spec is not None and not isinstance(f.spec, str):
            bind_spec(f.module, f.spec, mlp_chunk)
    return model


def _bind_head(wanted: list[Found], loop: dict[str, Any]) -> None:
    """Both losses belong to one model and one head."""
    if not wanted:
        return
    from transformers.loss.loss_utils import ForCausalLMLoss

    owner, name = wanted[0].module, str(wanted[0].spec)
    switches = {f.switch for f in wanted}
    fused = "fused_linear_ce" in switches
    if fused:
        bind(owner._modules[name], head_forward)  # type: ignore[arg-type]  # the survey saw it
    inner = owner.__dict__.get(slot_of(owner))
    bind(owner, model_forward(getattr(inner, "__func__", type(owner).forward)))
    owner.__dict__[PLAN] = Plan(name, fused, "cross_entropy" in switches, ForCausalLMLoss, loop)


def _nothing(switch: str, model: nn.Module, found: list[Found]) -> str:
    near = {f"{type(f.module).__name__}: {f.reason}" for f in found if f.switch == switch}
    why = f" ({'; '.join(sorted(near))})" if near else ""
    return f"adapt: {switch}=True, but nothing in {type(model).__name__} matches{why}"


def restore(model: M) -> M:
    """Undo `adapt`: every module of the model runs its own forward again.

    Args:
        model: adapted or not.

    Returns:
        The model itself.

    Example:
        >>> model = restore(adapt(torch.nn.Sequential(torch.nn.LayerNorm(8))))
    """
    for m in model.modules():
        unbind(m)
        m.__dict__.pop(PLAN, None)
    return model


@contextmanager
def adapted(model: M, **switches: Any) -> Iterator[M]:
    """Adapt a model inside a `with` block; at the end it is as it was, plain or adapted.

    Args:
        model: as in `adapt`.
        switches: as in `adapt`.

    Example:
        >>> with adapted(torch.nn.Sequential(torch.nn.LayerNorm(8))) as model:
        ...     y = model(torch.ones(8))
    """
    before = [(m, kept) for m in model.modules() if (kept := bound(m, PLAN))]
    adapt(model, **switches)
    try:
        yield model
    finally:
        restore(model)
        for m, kept in before:
            m.__dict__.update(kept)
