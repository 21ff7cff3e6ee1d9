"""Who else computes a public function, by the name it has in liger_fn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

Function = Callable[..., Any]


class Peer(NamedTuple):
    """One implementation: `build` imports it from `package` and returns the function."""

    name: str
    package: str
    build: Callable[[], Function]
    gpu_only: bool = False


def peer(name: str, source: str, call: Function | None = None, gpu_only: bool = False) -> Peer:
    """Take `module:attribute` as it is, or as `call(attribute, *tensors)`."""
    module, attribute = source.split(":")

    def build() -> Function:
        f = attrgetter(attribute)(import_module(module))
        return f if call is None else partial(call, f)

    return Peer(name, module.split(".")[0], build, gpu_only)


def liger(source: str, call: Function | None = None, name: str = "Liger-Kernel") -> Peer:
    """Take an autograd Function of Liger-Kernel, which needs no transformers."""
    return peer(name, f"liger_kernel.ops.{source}.apply", call, gpu_only=True)


def quack(source: str, call: Function | None = None) -> Peer:
    """Take a function of QuACK."""
    return peer("QuACK", f"quack:{source}", call, gpu_only=True)


def liger_head(sums: torch.dtype | None, f: Function, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Call Liger-Kernel's fused head, whose accum_dtype comes twelfth."""
    return f(x, w, y, None, None, -100, 0.0, 0.0, "mean", None, False, sums)[0]


def liger_distilled(
    beta: float, sums: torch.dtype | None, f: Function, w: Tensor, x: Tensor, teacher_w: Tensor,
    teacher_x: Tensor,
) -> Tensor:  # fmt: skip
    """Call Liger-Kernel's Jensen-Shannon head, at beta 0 forward KL; accum_dtype comes ninth."""
    return f(x, w, teacher_x, teacher_w, None, beta, -100, 1.0, sums)


def liger_chunked(
    beta: float, f: Function, w: Tensor, x: Tensor, teacher_w: Tensor, teacher_x: Tensor
) -> Tensor:
    """Call a distillation of Liger-Kernel in compiled torch; it wants labels without their loss."""
    y = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return f(x, w, teacher_x, teacher_w, y, None, None, 0.0, 1.0, beta)


EPS = 1e-3  # of the row of the table
BETA = 0.3  # likewise
TWO_HEADS = "fused_linear_jsd:LigerFusedLinearJSDFunction"
HEAD = "fused_linear_cross_entropy:LigerFusedLinearCrossEntropyFunction"


def chunked(source: str, beta: float) -> Peer:
    """Take a distillation of Liger-Kernel that is torch, chunk by chunk."""
    source = f"liger_kernel.chunked_loss.{source}.apply"
    return peer("Liger-Kernel, chunked", source, partial(liger_chunked, beta), gpu_only=True)


def distilled_by_liger(beta: float) -> list[Peer]:
    """Both of Liger-Kernel's Jensen-Shannon heads."""
    return [
        liger(TWO_HEADS, partial(liger_distilled, beta, None)),
        liger(TWO_HEADS, partial(liger_distilled, beta, torch.float32), "Liger-Kernel, fp32 sums"),
        chunked("jsd_loss:LigerFusedLinearJSDFunction", beta),
    ]


PEERS: dict[str, list[Peer]] = {
    "rms_norm": [
        liger("rms_norm:LigerRMSNormFunction", lambda f, x, w: f(x, w, EPS)),
        quack("rmsnorm", lambda f, x, w: f(x, weight=w, eps=EPS)),
    ],
    "swiglu": [liger("swiglu:LigerSiLUMulFunction")],
    "rope": [liger("rope:LigerRopeFunction")],
    "cross_entropy": [
        peer("torch, float32 inside", "torch.nn.functional:cross_entropy",
             lambda f, logits, y: f(logits.float(), y), gpu_only=True),
        liger("cross_entropy:LigerCrossEntropyFunction", lambda f, x, y: f(x, y, None)[0]),
        quack("cross_entropy"),
    ],
    "fused_linear_ce": [
        peer("liger_fn, bf16 sums", "liger_fn:fused_linear_ce",
             lambda f, *wxy: f(*wxy, accum_dtype=torch.bfloat16), gpu_only=True),
        liger(HEAD, partial(liger_head, None)),
        liger(HEAD, partial(liger_head, torch.float32), "Liger-Kernel, fp32 sums"),
    ],
    "fused_linear_kl": distilled_by_liger(0.0),
    "fused_linear_jsd": distilled_by_liger(BETA),
    "fused_linear_cosine": [
        chunked("cosine_similarity_loss:LigerFusedLinearCosineSimilarityFunction", 1.0),
    ],
}  # fmt: skip
