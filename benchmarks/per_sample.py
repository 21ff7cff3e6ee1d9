"""Gradients of each sample: `vmap(grad(f))` in one launch, beside a loop, beside plain torch.

64 samples of 256 rows of 4096 on a GPU, less on a CPU; the gradient of w for each sample. Rows are
those of tests/table whose kernels have a group axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from benchmarks import measure
from benchmarks.cases import OPS, Draw, Op

NAMES = ("rms_norm", "add_rms_norm", "layer_norm", "dyt")


def total(f: Callable[..., Any], args: dict[str, Tensor], w: Tensor, *rows: Tensor) -> Tensor:
    """The sum of squares of f, of its parameter w and a sample's rows; the rest is shared."""
    given = {**args, "w": w, **dict(zip(("x", "residual"), rows, strict=False))}
    out = f(*given.values())
    ys = out if isinstance(out, tuple) else (out,)
    return torch.stack([y.float().square().sum() for y in ys]).sum()


def ways(op: Op, args: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Gradients of w, one for each sample, by three ways."""
    rows = [args[name] for name in ("x", "residual") if name in args]
    ours, plain = (grad(partial(total, f, args)) for f in (op.row.fn, op.plain))
    on = (None, *[0] * len(rows))

    def loop() -> Tensor:
        return torch.stack([ours(args["w"], *sample) for sample in zip(*rows, strict=True)])

    return {
        "vmap(grad)": lambda: vmap(ours, on)(args["w"], *rows),
        "loop over grad": loop,
        "plain torch, vmap(grad)": lambda: vmap(plain, on)(args["w"], *rows),
    }


def main(_: Sequence[str]) -> None:
    """Print milliseconds and, of w, the relative difference to plain torch in float64."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lead, n = ((64, 256), 4096) if device.type == "cuda" else ((8, 16), 64)
    print("| function | way | ms | error |\n|---|---|---|---|")
    for op in (op for op in OPS if op.name in NAMES):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        args = op.row.make(Draw(device, dtype), lead=lead, n=n)
        exact = ways(op, {k: t.double() for k, t in args.items()})["plain torch, vmap(grad)"]()
        for way, run in ways(op, args).items():
            error = (run().double() - exact).norm() / exact.norm()
            ms = measure.eager(lambda _, run=run: run(), [None] * 4, device, 0.2)[0]["ms"]
            print(f"| `{op.name}` | {way} | {ms:.3g} | {error:.1e} |", flush=True)
