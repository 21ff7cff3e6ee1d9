"""What is measured: each op, the same by others, its shapes, and the least work it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
Shape = tuple[int, ...]
Drawn = tuple[dict[str, Tensor], tuple[Tensor, ...]]  # arguments by name, upstream gradients


class Draw(NamedTuple):
    """Where and how random arguments are made."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normal entries with standard deviation `scale`."""
        t = torch.empty(shape, device=self.device, dtype=self.dtype)
        return t.normal_(0.0, scale, generator=self.generator)

    def targets(self, m: int, v: int) -> Tensor:
        """Draw m columns out of v."""
        return torch.randint(v, (m,), generator=self.generator, device=self.device)


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


@dataclass(frozen=True)
class Op:
    """One public function, `name`, with what it is compared with and measured against."""

    name: str
    axes: str  # what the numbers of a shape are
    make: Callable[..., Drawn]  # no upstream gradient stands for 1, that of a scalar loss
    plain: Function  # plain torch; the oracle when its arguments are float64
    formula: str  # the same as text
    others: Sequence[Peer]
    wanted: tuple[str, ...]  # arguments that get gradients
    outputs: tuple[str, ...]
    elements: Callable[..., int]  # of the tensors that make the work large
    units: tuple[int, int]  # least work of forward and of forward + backward, in `elements`
    counted: str  # the same in words
    gpu: Sequence[Shape]  # bfloat16
    cpu: Sequence[Shape]  # float32
    limit: Literal["copy", "matmul"] = "copy"  # the rate that bounds it
    graph: bool = False  # host time matters at these shapes: replay CUDA graphs as well
    host: Shape | None = None  # where nothing but host time is left

    def peers(self) -> list[Peer]:
        """List everyone who computes this op, installed or not."""
        compiled = partial(torch.compile, self.plain, dynamic=False)
        torches = [
            Peer("torch", "torch", lambda: self.plain),
            Peer("torch.compile", "torch", compiled),
        ]
        at = sum(p.package == "liger_fn" for p in self.others)
        return [*self.others[:at], *torches, *self.others[at:]]

    def limits(self, shape: Shape, itemsize: int, rates: dict[str, float]) -> list[float]:
        """Least milliseconds of forward and of forward + backward at the measured rates."""
        each = itemsize if self.limit == "copy" else shape[1]
        return [1e3 * n * self.elements(*shape) * each / rates[self.limit] for n in self.units]


def wide(t: Tensor) -> Tensor:
    """Half precision to float32, the rest as it is."""
    return t.float() if t.itemsize < 4 else t


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn one tensor of heads as Llama's code in transformers does."""
    x1, x2 = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-x2, x1), -1) * sin.unsqueeze(1)


def make_rope(draw: Draw, b: int, t: int, h: int, hk: int, k: int) -> Drawn:
    """Draw what attention holds: (b, t, h, k) in memory, seen transposed."""
    turns = 1e4 ** (-torch.arange(0, k, 2, dtype=torch.float64, device=draw.device) / k)
    angle = torch.arange(t, dtype=torch.float64, device=draw.device)[:, None] * turns
    angle = torch.cat((angle, angle), -1)[None]
    q, key, dq, dkey = (draw.normal(b, t, n, k).transpose(1, 2) for n in (h, hk, h, hk))
    cos, sin = angle.cos().to(draw.dtype), angle.sin().to(draw.dtype)
    return {"q": q, "k": key, "cos": cos, "sin": sin}, (dq, dkey)


def make_head(draw: Draw, m: int, d: int, v: int) -> Drawn:
    """Draw a head whose logits have standard deviation 3: some tokens likely, most not."""
    w, x = draw.normal(v, d, scale=3 * d**-0.5), draw.normal(m, d)
    return {"w": w, "x": x, "y": draw.targets(m, v)}, ()


def liger_head(sums: torch.dtype | None, f: Function, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Call Liger-Kernel's fused head, whose accum_dtype comes twelfth."""
    return f(x, w, y, None, None, -100, 0.0, 0.0, "mean", None, False, sums)[0]


EPS = 1e-6
HEAD = "fused_linear_cross_entropy:LigerFusedLinearCrossEntropyFunction"

OPS = [
    Op(
        "rms_norm", "m x n",
        lambda draw, m, n: (
            {"x": draw.normal(m, n), "w": draw.normal(n, scale=0.1).add_(1)}, (draw.normal(m, n),)),
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS), "F.rms_norm(x, (n,), w, eps)",
        [peer("liger_fn", "liger_fn:rms_norm", lambda f, x, w: f(x, w, EPS)),
         liger("rms_norm:LigerRMSNormFunction", lambda f, x, w: f(x, w, EPS)),
         peer("QuACK", "quack:rmsnorm", lambda f, x, w: f(x, weight=w, eps=EPS), gpu_only=True)],
        wanted=("x", "w"), outputs=("y",), elements=lambda m, n: m * n, units=(2, 5),
        counted="2 and 5 times m*n elements: read x, write y; backward reads x and dy, writes dx",
        gpu=[(16384, 4096), (32768, 1024), (4096, 16384)], cpu=[(1024, 1024)],
        graph=True, host=(8, 64),
    ),
    Op(
        "swiglu", "m x n",
        lambda draw, m, n: (
            {"gate": draw.normal(m, n), "up": draw.normal(m, n)}, (draw.normal(m, n),)),
        lambda gate, up: F.silu(gate) * up, "F.silu(gate) * up",
        [peer("liger_fn", "liger_fn:swiglu"), liger("swiglu:LigerSiLUMulFunction")],
        wanted=("gate", "up"), outputs=("y",), elements=lambda m, n: m * n, units=(3, 8),
        counted="3 and 8 times m*n elements: read gate and up, write y; backward reads gate, up, "
        "dy and writes dgate, dup",
        gpu=[(16384, 14336)], cpu=[(512, 2048)], graph=True, host=(8, 64),
    ),
    Op(
        "rope", "b x t x h x hk x k", make_rope,
        lambda q, k, cos, sin: (turned(q, cos, sin), turned(k, cos, sin)),
        "x * cos + cat((-x2, x1)) * sin, of q and of k",
        [peer("liger_fn", "liger_fn:rope"), liger("rope:LigerRopeFunction")],
        wanted=("q", "k"), outputs=("q turned", "k turned"),
        elements=lambda b, t, h, hk, k: b * t * (h + hk) * k, units=(2, 4),
        counted="2 and 4 times b*t*(h + hk)*k elements: read and write q and k; backward the same "
        "for their gradients",
        gpu=[(4, 4096, 32, 8, 128)], cpu=[(1, 512, 8, 2, 64)], graph=True,
    ),
    Op(
        "cross_entropy", "m x v",
        lambda draw, m, v: ({"logits": draw.normal(m, v, scale=3), "y": draw.targets(m, v)}, ()),
        lambda logits, y: F.cross_entropy(logits, y),
        "F.cross_entropy(logits, y), each step rounded to the dtype of logits",
        [peer("liger_fn", "liger_fn:cross_entropy"),
         peer("torch, float32 inside", "torch.nn.functional:cross_entropy",
              lambda f, logits, y: f(wide(logits), y), gpu_only=True),
         liger("cross_entropy:LigerCrossEntropyFunction", lambda f, x, y: f(x, y, None)[0]),
         peer("QuACK", "quack:cross_entropy", gpu_only=True)],
        wanted=("logits",), outputs=("loss",), elements=lambda m, v: m * v, units=(1, 3),
        counted="1 and 3 times m*v elements: read logits; backward, apart, reads them again and "
        "writes their gradient (2 would do for who forms the gradient in the forward pass)",
        gpu=[(8192, 128256), (8192, 32000)], cpu=[(512, 8000)],
    ),
    Op(
        "fused_linear_ce", "m x d x v", make_head,
        lambda w, x, y: F.cross_entropy(wide(F.linear(x, w)), y),
        "F.cross_entropy(F.linear(x, w).float(), y)",
        [peer("liger_fn", "liger_fn:fused_linear_ce"),
         peer("liger_fn, bf16 sums", "liger_fn:fused_linear_ce",
              lambda f, *wxy: f(*wxy, accum_dtype=torch.bfloat16), gpu_only=True),
         liger(HEAD, partial(liger_head, None)),
         liger(HEAD, partial(liger_head, torch.float32), "Liger-Kernel, fp32 sums")],
        wanted=("w", "x"), outputs=("loss",), elements=lambda m, d, v: m * v, units=(2, 6),
        counted="2 and 6 times m*d*v operations: one product forward, three with backward",
        limit="matmul",
        gpu=[(8192, 4096, 128256), (16384, 4096, 32000)], cpu=[(512, 256, 8000)],
    ),
]  # fmt: skip
