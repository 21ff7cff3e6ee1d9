"""Measure what sharding costs and saves on this machine: `python -m benchmarks distributed`.

    head, gathered   the weight is gathered, each rank has its share of the tokens, the gradient is
                     reduce-scattered: what FSDP does
    head, sharded    each rank has its share of the vocabulary and all tokens: `group=`
    model            a step of the Llama of examples/train_fsdp2.py under FSDP2, with a larger
                     vocabulary, on plain torch functions and on liger_fn

Each line runs in processes of its own, gloo on a CPU, NCCL where there is a GPU for each. Time is
the median of the slowest rank, peak what the worst rank held beyond what it had before. A line that
fails, or takes more than its seconds, says so in its row, and the next one runs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, spawn

import liger_fn
from tests.peak import peak, start_of_peak

ROOT = Path(__file__).parents[1]
HEADS = {
    "cpu": [{"m": 1024, "d": 256, "v": 16384}, {"m": 4096, "d": 256, "v": 4096}],
    "cuda": [{"m": m, "d": 4096, "v": v} for v in (128256, 256000) for m in (8192, 32768)],
}
MODELS = {"cpu": {"v": 16384}, "cuda": {"v": 128256}}
QUICK = [
    ("head", "gathered", {"m": 64, "d": 16, "v": 32}),
    ("head", "sharded", {"m": 64, "d": 16, "v": 32}),
]
Step = Callable[[], None]


def head(kind: str, device: torch.device, m: int, d: int, v: int) -> Step:
    n, rank, dtype = dist.get_world_size(), dist.get_rank(), torch.float32
    dtype = torch.bfloat16 if device.type == "cuda" else dtype
    shard = torch.randn(v // n, d, device=device, dtype=dtype) / d**0.5
    x, y = torch.randn(m, d, device=device, dtype=dtype), torch.arange(m, device=device) % v
    group = (dist.group.WORLD, v)

    def sharded() -> None:
        w, x_ = shard.requires_grad_(), x.requires_grad_()
        torch.autograd.grad(liger_fn.fused_linear_ce(w, x_, y, group=group), (w, x_))

    # without a copy, as FSDP; torch 2.13 has new names for both
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    mine = x[rank * m // n : (rank + 1) * m // n]
    targets = y[rank * m // n : (rank + 1) * m // n]

    def gathered() -> None:
        w = torch.empty(v // n * n, d, device=device, dtype=dtype)
        gather(w, shard)
        w, x_ = w.requires_grad_(), mine.detach().requires_grad_()
        dw, _ = torch.autograd.grad(liger_fn.fused_linear_ce(w, x_, targets, n_valid=m), (w, x_))
        scatter(torch.empty_like(shard), dw)

    return sharded if kind == "sharded" else gathered


def model(kind: str, device: torch.device, v: int) -> Step:
    sys.path.insert(0, str(ROOT / "examples"))
    example, plain = (importlib.import_module(n) for n in ("train_fsdp2", "train_llama"))
    config = plain.GPU if device.type == "cuda" else plain.CPU
    example.VOCAB = plain.VOCAB = v
    if kind == "plain":
        example.liger_fn = SimpleNamespace(rope=plain.plain_rope, swiglu=plain.plain_swiglu)
        example.RMSNorm, example.LMHead = plain_norm, PlainHead
    world = dist.get_world_size()
    mesh = example.init_device_mesh(device.type, (world, 1), mesh_dim_names=("data", "tensor"))
    net = example.sharded(config, mesh, device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    tokens = torch.randint(v, (config.batch // world, config.context + 1), device=device)

    def step() -> None:
        net(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_norm(d: int) -> nn.Module:
    return nn.RMSNorm(d, eps=1e-6)


class PlainHead(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # as LMHead
        return nn.functional.cross_entropy(super().forward(x).flatten(0, -2), y.flatten())


def cases(kind: str) -> list[tuple[str, str, dict[str, int]]]:
    heads = [("head", how, sizes) for sizes in HEADS[kind] for how in ("gathered", "sharded")]
    return [*heads, ("model", "plain", MODELS[kind]), ("model", "liger_fn", MODELS[kind])]


def be(rank: int, world: int, kind: str, case: tuple[str, str, dict[str, int]], home: str) -> None:
    """One rank of one case."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{home}/meet", rank=rank,
        world_size=world, device_id=device if kind == "cuda" else None,
    )  # fmt: skip
    what, how, sizes = case
    torch.manual_seed(rank)
    step = (head if what == "head" else model)(how, device, **sizes)
    gc.collect()
    before, times = start_of_peak(device.type), []
    for i in range(8):
        dist.barrier()
        start = time.perf_counter()
        step()
        if kind == "cuda":
            torch.cuda.synchronize()
        if i > 2:
            times.append(time.perf_counter() - start)
    mine = torch.tensor([statistics.median(times) * 1e3, peak(device.type) - before], device=device)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(home, "found").write_text(json.dumps(mine.tolist()))
    dist.destroy_process_group()


def measured(
    world: int, kind: str, case: tuple[str, str, dict[str, int]], seconds: float
) -> tuple[str, str]:
    """Time and peak of one case on ranks of its own, or why there is neither."""
    with tempfile.TemporaryDirectory() as home:
        ranks = spawn(be, (world, kind, case, home), nprocs=world, join=False)
        end = time.monotonic() + seconds
        try:
            while not ranks.join(1.0):
                if time.monotonic() > end:
                    return f"not done in {seconds:g} s", "-"
            ms, mib = json.loads(Path(home, "found").read_text())
        except ProcessException as error:
            named = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", str(error), re.MULTILINE)
            return [*str(error).split("\n")[:1], *named][-1][:100].replace("|", " "), "-"
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
    return f"{ms:.1f}", f"{mib:.0f}"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks distributed", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", help="default: 2 and 4, on GPUs that exist")
    add("--what", choices=["head", "model"], help="only these lines")
    add("--seconds", type=float, default=150.0, help="that a line may take (default 150)")
    add("--out", type=Path, help="file of the table")
    add("--quick", action="store_true", help="two tiny lines, to see that it runs")
    return parser


def main(arguments: Sequence[str] | None = None) -> str:
    """Measure all lines, print them as a table and return it."""
    given = options().parse_args(arguments)
    gpus = torch.cuda.device_count()
    kind = "cuda" if gpus > 1 else "cpu"
    worlds = given.ranks or [n for n in (2, 4, 8) if n <= (gpus if kind == "cuda" else 4)]
    name = torch.cuda.get_device_name() if kind == "cuda" else f"CPU, {os.cpu_count()} cores"
    lines = [
        f"{name}, torch {torch.__version__}", "",
        "| ranks | what | sizes | ms | peak MiB |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for world in worlds:
        for case in QUICK if given.quick else cases(kind):
            what, how, sizes = case
            if given.what not in (None, what):
                continue
            ms, mib = measured(world, kind, case, given.seconds)
            shape = " ".join(f"{k} {n}" for k, n in sizes.items())
            lines.append(f"| {world} | {what}, {how} | {shape} | {ms} | {mib} |")
            print(lines[-1], file=sys.stderr, flush=True)
            if given.out:  # after each, so that a run that is cut short leaves what it has
                given.out.write_text("\n".join(lines) + "\n")
    text = "\n".join(lines) + "\n"
    print(text)
    return text
