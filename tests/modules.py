"""One list of the modules of liger_fn.nn: what each stands for, what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_fn import nn

D, V = 8, 13
LOSS = nn.FusedLinearCrossEntropyLoss(softcap=3.0, logit_scale=0.5, label_smoothing=0.1)
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Row(NamedTuple):
    """A module, what of torch it stands for, its arguments, and how it prints."""

    make: Callable[..., torch.nn.Module]
    twin: Callable[..., torch.nn.Module] | None
    inputs: Callable[[], Inputs]
    text: str


def at(*shape: int) -> Callable[[], Inputs]:
    return lambda: ((torch.randn(shape),), {})


def head(b: int = 4, t: int = 3, **more: Tensor | float) -> Callable[[], Inputs]:
    """A head, activations and targets, one of them ignored."""

    def inputs() -> Inputs:
        y = torch.randint(V, (b, t))
        y[0, 0] = -100
        return (torch.randn(V, D), torch.randn(b, t, D), y), more

    return inputs


def logits() -> Inputs:
    return (torch.randn(4, V), torch.tensor([1, -100, 0, 12])), {}


def teacher() -> Inputs:
    (w, x, _), _ = head()()
    return (w, x, torch.randn(V, 6), torch.randn(4, 3, 6)), {}


def sampled() -> Inputs:
    args, _ = head()()
    return (*args, torch.randn(4)), {"old_logp": -torch.rand(4, 3), "ref_logp": -torch.rand(4, 3)}


def judged() -> Inputs:
    args, _ = head()()
    good = torch.tensor([True, False, False, True])
    return (*args, good), {"ref_logp": -torch.rand(4, 3), "kl": 0.1}


# those that hold parameters or buffers take device and, but for Rotary, dtype
LAYERS: dict[str, Row] = {
    "rms": Row(
        lambda **kw: nn.RMSNorm(D, 1e-5, casting="gemma", **kw),
        lambda **kw: torch.nn.RMSNorm(D, 1e-5, **kw),
        at(3, 5, D),
        "RMSNorm((8,), eps=1e-05, elementwise_affine=True, offset=0.0, casting='gemma')",
    ),
    "rms-axes": Row(
        lambda **kw: nn.RMSNorm([5, D], None, casting="gemma", **kw),
        lambda **kw: torch.nn.RMSNorm([5, D], None, **kw),
        at(3, 5, D),
        "RMSNorm((5, 8), eps=None, elementwise_affine=True, offset=0.0, casting='gemma')",
    ),
    "rms-plain": Row(
        lambda **kw: nn.RMSNorm(D, 1e-5, elementwise_affine=False, casting="gemma", **kw),
        lambda **kw: torch.nn.RMSNorm(D, 1e-5, elementwise_affine=False, **kw),
        at(3, D),
        "RMSNorm((8,), eps=1e-05, elementwise_affine=False, offset=0.0, casting='gemma')",
    ),
    "layer": Row(
        lambda **kw: nn.LayerNorm(D, **kw),
        lambda **kw: torch.nn.LayerNorm(D, **kw),
        at(3, 5, D),
        "LayerNorm((8,), eps=1e-05, elementwise_affine=True",
    ),
    "layer-axes": Row(
        lambda **kw: nn.LayerNorm((5, D), 1e-3, bias=False, **kw),
        lambda **kw: torch.nn.LayerNorm((5, D), 1e-3, bias=False, **kw),
        at(3, 5, D),
        "LayerNorm((5, 8), eps=0.001, elementwise_affine=True",
    ),
    "group": Row(
        lambda **kw: nn.GroupNorm(2, 4, **kw),
        lambda **kw: torch.nn.GroupNorm(2, 4, **kw),
        at(3, 4, 5, 2),
        "GroupNorm(2, 4, eps=1e-05, affine=True",
    ),
    "dyt": Row(lambda **kw: nn.DyT(D, **kw), None, at(3, D), "DyT(8, alpha=0.5)"),
    "swiglu": Row(
        lambda **kw: nn.SwiGLUMLP(D, 6, **kw), None, at(3, D),
        "SwiGLUMLP(\n  (gate_proj): Linear(in_features=8, out_features=6, bias=False)",
    ),
    "swiglu-tiles": Row(
        lambda **kw: nn.SwiGLUMLP(D, 6, chunk=2, **kw), None, at(5, D), "SwiGLUMLP(\n  chunk=2\n",
    ),
    "geglu": Row(
        lambda **kw: nn.GEGLUMLP(D, 6, bias=True, approximate="none", **kw), None, at(3, D),
        "GEGLUMLP(\n  approximate='none'\n  (gate_proj): Linear(in_features=8, out_features=6,",
    ),
    "head": Row(
        lambda **kw: nn.LMHead(D, V, **kw),
        lambda **kw: torch.nn.Linear(D, V, **kw),
        at(3, 5, D),
        "LMHead(\n  in_features=8, out_features=13, bias=True\n  (loss): FusedLinearCross",
    ),
}  # fmt: skip
OTHERS: dict[str, Row] = {
    "rotary": Row(
        lambda **kw: nn.RotaryEmbedding(4, **kw), None,
        lambda: ((torch.randn(2, 3, D), torch.arange(3)[None]), {}),
        "RotaryEmbedding(4, base=10000.0)",
    ),
    "ce": Row(
        lambda: nn.CrossEntropyLoss(z_loss=1e-3, weight=torch.ones(V)), None, logits,
        "CrossEntropyLoss(z_loss=0.001)",
    ),
    "fused": Row(
        lambda: nn.FusedLinearCrossEntropyLoss(softcap=3.0, chunk=2), None, head(n_valid=7.0),
        "FusedLinearCrossEntropyLoss(softcap=3.0, chunk=2)",
    ),
    "dpo": Row(
        lambda: nn.DPOLoss(beta=0.3, loss_type=["hinge", "sft"], softcap=4.0), None,
        head(ref_logp=-torch.ones(4)), "DPOLoss(loss_type=['hinge', 'sft'], beta=0.3, softcap=4.0)",
    ),
    "orpo": Row(lambda: nn.ORPOLoss(), None, head(), "ORPOLoss()"),
    "cpo": Row(lambda: nn.CPOLoss(nll_weight=0.0), None, head(n_valid=5.0),
               "CPOLoss(nll_weight=0.0)"),
    "simpo": Row(lambda: nn.SimPOLoss(temperature=0.7, chunk=2), None, head(),
                 "SimPOLoss(temperature=0.7, chunk=2)"),
    "kto": Row(lambda: nn.KTOLoss(undesirable_weight=0.5), None, judged,
               "KTOLoss(undesirable_weight=0.5)"),
    "grpo": Row(lambda: nn.GRPOLoss(loss_type="cispo", beta=0.1), None, sampled,
                "GRPOLoss(loss_type='cispo', beta=0.1)"),
    "jsd": Row(lambda: nn.JSDLoss(beta=0.2, reduction="none"), None, teacher,
               "JSDLoss(beta=0.2, reduction='none')"),
}  # fmt: skip
MODULES = LAYERS | OTHERS


def made(name: str, device: torch.device, **kw: Any) -> torch.nn.Module:
    """The module, with parameters that are not at their start."""
    if name not in LAYERS:
        return MODULES[name].make().to(device)
    module = MODULES[name].make(device=device, **kw)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) / 4)
    return module


def inputs(name: str, device: torch.device) -> Inputs:
    found: Inputs = torch.utils._pytree.tree_map(
        lambda t: t.to(device) if isinstance(t, Tensor) else t, MODULES[name].inputs()
    )
    return found
