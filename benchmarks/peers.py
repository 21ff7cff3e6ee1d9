"""Who else computes a public function, by the name it has in liger_fn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import ModuleType
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
    compiles: bool = False  # by torch.compile: seconds for each new shape


def peer(
    name: str, source: str, call: Function | None = None, gpu_only: bool = True, **more: bool
) -> Peer:
    """Take `module:attribute` as it is, or as `call(attribute, *tensors)`."""
    module, attribute = source.split(":")

    def build() -> Function:
        try:
            f = attrgetter(attribute)(import_module(module))
        except AttributeError as error:
            raise ImportError(str(error)) from error
        return f if call is None else partial(call, f)

    return Peer(name, module.split(".")[0], build, gpu_only, **more)


def liger(source: str, call: Function | None = None, name: str = "Liger-Kernel") -> Peer:
    """Take an autograd Function of Liger-Kernel, in the implementation it chooses itself."""
    return peer(name, f"liger_kernel.ops:Liger{source}Function.apply", call)


def chunked(source: str, call: Function) -> Peer:
    """Take a loss of Liger-Kernel that compiles what it does to a chunk."""
    return peer("Liger-Kernel", f"liger_kernel.chunked_loss.functional:liger_fused_linear_{source}",
                call, compiles=True)  # fmt: skip


def quack(source: str, call: Function | None = None, **more: bool) -> Peer:
    """Take a function of QuACK."""
    return peer("QuACK", f"quack.{source}", call, **more)


def cce(filter_eps: str | None, name: str) -> Peer:
    """Take Apple's cut cross entropy, which by default leaves small gradients out."""
    call = partial(cce_call, filter_eps)
    return peer(name, "cut_cross_entropy:linear_cross_entropy", call)


def cce_call(filter_eps: str | None, f: Function, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return f(x, w, y, filter_eps=filter_eps)


def liger_head(
    sums: torch.dtype | None, z_loss: float, f: Function, w: Tensor, x: Tensor, y: Tensor
) -> Tensor:
    """Call Liger-Kernel's fused head, whose accum_dtype comes twelfth."""
    return f(x, w, y, None, None, -100, z_loss, 0.0, "mean", None, False, sums)[0]


def trl_head(outputs: tuple[str, ...], temperature: float) -> Peer:
    """Take TRL's fused head from its one file: `import trl` needs all that a trainer does."""

    def build() -> Function:
        trl = find_spec("trl")
        if trl is None or not trl.submodule_search_locations:
            raise ImportError("No module named 'trl'")
        for name in ("_trl", "_trl.kernels", "_trl.trainer", "_trl.trainer.utils"):
            sys.modules.setdefault(name, ModuleType(name)).__path__ = []
        # what its backward imports: it gathers weights that DeepSpeed has sharded, none here
        sys.modules["_trl.trainer.utils"].maybe_gather_lm_head_ctx = lambda *_: nullcontext()  # type: ignore[attr-defined]
        file = Path(trl.submodule_search_locations[0]) / "kernels" / "chunked_logprob.py"
        spec = spec_from_file_location("_trl.kernels.chunked_logprob", file)
        if spec is None or spec.loader is None or not file.exists():
            raise ImportError(f"this trl has no {file.name}")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return partial(trl_call, module.ChunkedLogProbFunction.apply, outputs, temperature)

    return Peer("TRL", "trl", build)


def trl_call(
    f: Function, outputs: tuple[str, ...], temperature: float, w: Tensor, x: Tensor, y: Tensor
) -> Any:
    found = f(x, w, None, y, temperature, 32768, None, 1.0, outputs)  # the chunk is its trainers'
    return found[:2] if outputs else found[0]


def log_softmaxes(t: float, *logits: Tensor) -> list[Tensor]:
    return [(z.float() / t).log_softmax(-1) for z in logits]


def kto_call(f: Function, w: Tensor, x: Tensor, y: Tensor, good: Tensor, ref: Tensor) -> Tensor:
    """With the log-probability of a reference that is alike for all sequences within kl."""
    return f(x, w, y, good, None, None, None, None, ref[0].float().sum() + 0.3, -100, 0.1, True,
             False)[0]  # fmt: skip


def grpo_call(f: Function, w: Tensor, x: Tensor, y: Tensor, a: Tensor) -> Tensor:
    return f(x, w, y, torch.ones_like(y), a, None, None, None, None, None, None, 0.0, 0.2, 0.2,
             "grpo", None, "token", 1.0, 1.05, 1.0, True, False)[0]  # fmt: skip


EPS = 1e-3  # of the row of the table
QWEN_SECTIONS = [16, 24, 24]
FP32 = "Liger-Kernel, fp32 sums"

PEERS: dict[str, list[Peer]] = {
    "rms_norm": [
        liger("RMSNorm", lambda f, x, w: f(x, w, EPS)),
        quack("rmsnorm:rmsnorm", lambda f, x, w: f(x, weight=w, eps=EPS)),
    ],
    "add_rms_norm": [
        liger("FusedAddRMSNorm", lambda f, x, r, w: f(x, r, w, EPS)),
        quack("rmsnorm:rmsnorm",
              lambda f, x, r, w: f(x, weight=w, residual=r, eps=EPS, prenorm=True)),
    ],
    "layer_norm": [liger("LayerNorm", lambda f, x, w, b: f(x, w, b, EPS))],
    "group_norm": [liger("GroupNorm", lambda f, x, w, b: f(x, w, b, x.shape[1], 32, 1e-5))],
    "dyt": [liger("DyT")],
    "swiglu": [liger("SiLUMul")],
    "swiglu_packed": [liger("FusedGateUpSiLUMul")],
    "geglu": [liger("GELUMul")],
    "relu2": [liger("ReLUSquared")],
    "rope": [liger("Rope")],
    "mrope": [liger("Qwen2VLMRope", lambda f, *a: f(*a, QWEN_SECTIONS))],
    "softmax": [liger("Softmax"), quack("softmax:softmax")],
    "sparsemax": [liger("Sparsemax", lambda f, x: f(x, -1))],
    "cross_entropy": [
        peer("torch, float32 inside", "torch.nn.functional:cross_entropy",
             lambda f, logits, y: f(logits.float(), y)),
        liger("CrossEntropy", lambda f, x, y: f(x, y, None)[0]),
        quack("cross_entropy:cross_entropy"),
    ],
    "cross_entropy_with_stats": [
        liger("CrossEntropy",
              lambda f, x, y: f(x, y, None, -100, 1e-4, 0.0, "mean", None, True)[0]),
    ],
    "kl_div": [liger("KLDivLoss", lambda f, *z: f(*log_softmaxes(1.0, *z), "batchmean", True))],
    "jsd": [liger("JSD", lambda f, *z: f(*log_softmaxes(1.5, *z), None, 0.3))],
    "tvd": [liger("TVDLoss", lambda f, *z: f(*(p.exp() for p in log_softmaxes(1.5, *z))))],
    "fused_linear_ce": [
        peer("liger_fn, bf16 sums", "liger_fn:fused_linear_ce",
             lambda f, *wxy: f(*wxy, accum_dtype=torch.bfloat16)),
        peer("F.linear_cross_entropy", "torch.nn.functional:linear_cross_entropy",
             lambda f, w, x, y: f(x, w, y)),
        liger("FusedLinearCrossEntropy", partial(liger_head, None, 0.0)),
        liger("FusedLinearCrossEntropy", partial(liger_head, torch.float32, 0.0), FP32),
        quack("linear_cross_entropy:chunked_linear_cross_entropy",
              lambda f, w, x, y: f(x, w, y), compiles=True),  # and tries tiles
        cce("high", "CCE"),
        cce(None, "CCE, exact"),
    ],
    "fused_linear_ce_with_stats": [
        liger("FusedLinearCrossEntropy", partial(liger_head, torch.float32, 1e-4), FP32),
    ],
    "fused_linear_logp": [trl_head((), 0.7)],
    "fused_linear_logp_with_stats": [trl_head(("entropy",), 1.0)],
    "fused_linear_kl": [
        liger("FusedLinearKLDiv",
              lambda f, w, x, tw, tx: f(x, w, (tx @ tw.mT).float().softmax(-1))),
    ],
    "fused_linear_jsd": [
        liger("FusedLinearJSD", lambda f, w, x, tw, tx: f(x, w, tx, tw, None, 0.3)),
    ],
    "fused_linear_cosine": [
        chunked("cosine", lambda f, w, x, tw, tx: f(
            x, w, tx, tw, x.new_zeros(len(x), dtype=torch.int64), None, None, 0.0, 1.0, 1.0)),
    ],
    "dpo_loss": [
        peer("liger_fn, bf16 sums", "liger_fn:dpo_loss", lambda f, w, x, y, ref: f(
            w, x, y, ref_logp=ref, accum_dtype=torch.bfloat16)),
        # without a reference, which is alike for both of a pair here and so cancels
        chunked("dpo", lambda f, w, x, y, ref: f(
            x, w, y, None, None, None, None, -100, 0.1, False, True, False)[0]),
    ],
    "orpo_loss": [chunked("orpo", lambda f, w, x, y: f(x, w, y)[0])],
    "cpo_loss": [chunked("cpo", lambda f, w, x, y: f(x, w, y)[0])],
    "simpo_loss": [
        chunked("simpo", lambda f, w, x, y: f(
            x, w, y, None, -100, 2.0, 1.0, 0.0, False, True, 1.0)[0]),
    ],
    "kto_loss": [chunked("kto", kto_call)],
    "grpo_loss": [chunked("grpo", grpo_call)],
}  # fmt: skip
