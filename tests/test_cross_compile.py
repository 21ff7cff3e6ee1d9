"""Every kernel compiles for every GPU that we name, on a machine that has none of them.

Kernels are found, not listed: every `@triton.jit` function named *_kernel under liger_fn/ops. How
each is launched is recorded by running the rows of the table in the interpreter, so a kernel that
no row launches fails here. Compilation needs Triton without its interpreter: a fresh process per
target.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_fn
from liger_fn import _launch
from liger_fn._math import wide
from liger_fn.ops import _ce
from liger_fn.ops._vocab_rows import gradient_triton, statistics_triton
from tests.table import ROWS, Row

ROOT = Path(liger_fn.__file__).parent
TARGETS = {
    "cuda-80": ("cuda", 80, 32, 163 << 10),
    "cuda-90": ("cuda", 90, 32, 227 << 10),
    "cuda-100": ("cuda", 100, 32, 227 << 10),
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
    "gfx950": ("hip", "gfx950", 64, 160 << 10),
    "gfx1100": ("hip", "gfx1100", 32, 64 << 10),
}
NEIGHBOURS = {"cuda-80", "cuda-100", "gfx950", "gfx1100"}  # a minute each; of another's maker
POINTERS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip


def kernels() -> set[str]:
    """Module and name of every kernel in the sources."""
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert any("jit" in ast.dump(d) for d in node.decorator_list)
                module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
                found.add(f"{module}:{node.name}")
    return found


@functools.cache
def launches() -> list[dict[str, Any]]:
    """How the rows of the table launch kernels: in their own tiles, and in the largest ones."""
    seen: dict[str, dict[str, Any]] = {}

    def record(kernel: Any, grid: tuple[int, ...], *args: object, **meta: object) -> None:
        names = kernel.arg_names
        signature, constants = {}, {}
        for name, a in zip(names, args, strict=False):
            if isinstance(a, torch.Tensor):
                signature[name] = POINTERS[a.dtype]
            elif isinstance(a, int):
                signature[name] = "i32"
            else:
                signature[name], constants[name] = "constexpr", a
        for name in names[len(args) :]:
            signature[name], constants[name] = "constexpr", meta[name]
        fn = kernel.fn
        one = {"kernel": f"{fn.__module__}:{fn.__name__}", "signature": signature}
        one |= {"constants": constants, "num_warps": meta.get("num_warps", 4)}
        seen[json.dumps(one)] = one

    modules = [sys.modules[name] for name in {k.split(":")[0] for k in kernels()}]
    tile, strip = _launch.row_tile, _launch.strip_tile
    halves = torch.bfloat16  # 4096 of them: the most that a persistent loop has on its way
    for longest, dtype in (
        (0, torch.float64), (1 << 20, torch.float32), (1 << 20, halves), (4096, halves)
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch, liger_fn.using("triton"):
            for module in modules:
                patch.setattr(module, "launch", record)
                if longest and hasattr(module, "row_tile"):
                    of_rows = lambda n, *a, to=longest, **k: tile(to, *a, **k)  # noqa: E731
                    patch.setattr(module, "row_tile", of_rows)
                if longest and hasattr(module, "strip_tile"):
                    of_strips = lambda m, n, *a, to=longest, **k: strip(m, to, *a, **k)  # noqa: E731
                    patch.setattr(module, "strip_tile", of_strips)
            for row in ROWS:
                if not longest:
                    patch.setattr(_launch, "_MAX_BLOCK", row.block or 1 << 20)
                run(row, dtype)
            run_shards(dtype)
    return list(seen.values())


def run(row: Row, dtype: torch.dtype) -> None:
    args = row.arguments()
    given = {n: t.to(dtype) if t.is_floating_point() else t for n, t in args.items()}
    given |= {n: given[n].requires_grad_() for n in row.differentiable}
    out = row.fn(*given.values())
    sum(t.sum() for t in torch.utils._pytree.tree_leaves(out)).backward()


def run_shards(dtype: torch.dtype) -> None:
    """What only ranks of a group launch: the row passes over a shard of the vocabulary."""
    z, at = torch.randn(3, 6).to(dtype), torch.tensor([0, -1, -2])
    factors = torch.zeros(3, 7, dtype=wide(dtype))
    for row in (_ce.Row(-100, 0.0, 1.0, None), _ce.Row(-100, 0.1, 0.5, 3.0)):
        for c, stats in ((None, True), (z[0], False)):
            statistics_triton(z, at, c, 6, row, 0.7, stats)
            gradient_triton(z, at, c, factors, row, 0.7)


COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
backend, arch, warp, limit, launches = json.load(sys.stdin)
worst = {}
for one in launches:
    module, name = one["kernel"].split(":")
    fn = getattr(importlib.import_module(module), name)
    source = ASTSource(fn=fn, signature=one["signature"], constexprs=one["constants"])
    options = {"num_warps": one["num_warps"], "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget(backend, arch, warp), options=options)
    assert made.metadata.shared <= limit, (one, made.metadata.shared, limit)
    worst[one["kernel"]] = made.metadata.shared
json.dump(sorted(worst), sys.stdout)
"""


@pytest.mark.skipif(
    not _launch._INTERPRET, reason="launches are recorded in the interpreter, on a CPU"
)
@pytest.mark.parametrize(
    "target",
    [pytest.param(t, marks=[pytest.mark.slow] if t in NEIGHBOURS else []) for t in TARGETS],
)
def test_every_kernel_compiles_for(target: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps([*TARGETS[target], launches()]),
        capture_output=True, text=True, env=environment, cwd=ROOT.parent, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(json.loads(done.stdout)) == kernels()
