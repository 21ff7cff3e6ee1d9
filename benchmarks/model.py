"""Train a whole Hugging Face model for a few steps: as it is, with Liger-Kernel, with liger_fn.

Random weights in bfloat16, AdamW, gradient checkpointing, random tokens; each variant in a process
of its own. Prints tokens a second, peak memory and where the time of a step goes, and keeps them;
`python -m benchmarks report` then writes a page.

    --longest    instead, how long a context fits, and each variant at its own
    --profile    also what the time of a step goes to
    --ranks N    FSDP2 of each layer and the rest over N processes, which share the batch: sums of
                 gradients in float32; NCCL where there is a GPU for each, gloo on a CPU
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import kinds
from benchmarks.fresh import Found, fresh, inside, keeper, options, place
from benchmarks.networks import (
    SHAPES,
    TILES,
    VOCAB_PARALLEL,
    build,
    loss_of,
    norm_of_gradient,
    over_ranks,
)
from tests.peak import peak, start_of_peak

ALONE = (
    "plain", "plain, compile", "Liger-Kernel", "liger_fn", "liger_fn, compile",
    "liger_fn, bf16 sums", f"liger_fn, {TILES}",
)  # fmt: skip
SHARDED = ("plain", "Liger-Kernel", "liger_fn", f"liger_fn, {VOCAB_PARALLEL}")
WARM = 256  # tokens of the first step where its time does not matter
FULL = 0.96  # of a GPU, where its allocator runs out
HEAD = (
    "| variant | context | tokens/s | peak GiB | forward: s, peak GiB | backward | optimizer | "
    "first and last loss | norm of the first gradient |\n" + "|---" * 9 + "|"
)


def train(
    shape: str, variant: str, rows: int, context: int, steps: int, warm: int | None = None,
    dtype: torch.dtype = torch.bfloat16, profiled: bool = False,
) -> Found:  # fmt: skip
    """One step to warm up, of `warm` tokens a row, then `steps` that count."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = place(world)
    model = build(shape, variant, device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator, times, peaks, losses = torch.Generator().manual_seed(1), [], [], []
    norms: list[float] = []

    def after(part: str) -> None:
        marks.append(mark(device))
        held.append(peak(device.type) / 1024)
        if part == "backward" and not norms:
            norms.append(norm_of_gradient(model))
        start_of_peak(device.type)

    for step in range(steps + 1):
        size = (rows, context if step else warm or context)
        ids = torch.randint(model.config.vocab_size, size, generator=generator)
        ids = ids.tensor_split(world)[rank].to(device)
        start_of_peak(device.type)
        marks, held = [mark(device)], []
        loss = one_step(model, optimizer, ids, variant, after)
        losses.append(over_ranks(loss, device) / world)
        times.append([b - a for a, b in itertools.pairwise(marks)])
        peaks.append([over_ranks(gib, device, dist.ReduceOp.MAX) for gib in held])
    seconds = [statistics.median(part) for part in zip(*times[1:], strict=True)]
    most = [max(part) for part in zip(*peaks[1:], strict=True)]
    found = {
        "variant": variant, "context": context, "tokens/s": rows * context / sum(seconds),
        "peak GiB": max(most), "seconds": seconds, "GiB": most, "losses": losses, "norm": norms[0],
        "GPU GiB": torch.cuda.mem_get_info()[1] / 2**30 if device.type == "cuda" else 0.0,
    }  # fmt: skip
    if profiled:
        again = functools.partial(one_step, model, optimizer, ids, variant)
        found["kinds"] = kinds.of_step(again, device)
    return found


def one_step(
    model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, variant: str,
    after: Callable[[str], None] = lambda _: None,
) -> Tensor:  # fmt: skip
    """Train on ids; tell `after` of each part."""
    loss = loss_of(model, ids, variant)
    after("forward")
    loss.backward()
    after("backward")
    optimizer.step()
    optimizer.zero_grad()
    after("optimizer")
    return loss.detach()


def mark(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def one_of_ranks(args: argparse.Namespace) -> Found | None:
    """Train the one variant in this process, which may be one rank of several."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        if gpu := place(world).type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if gpu else "gloo")
    warm, dtype = (WARM if args.longest else None), getattr(torch, args.dtype)
    size = args.batch, args.context, args.steps
    found = train(args.shape, args.variant[0], *size, warm, dtype, args.profile)
    if world > 1:
        first = dist.get_rank() == 0
        dist.destroy_process_group()
        return found if first else None
    return found


def command(args: argparse.Namespace, context: int, steps: int) -> list[str]:
    made = ["model", "--shape", args.shape, "--batch", str(args.batch), "--steps", str(steps)]
    made += ["--context", str(context), "--dtype", args.dtype]
    return made + ["--longest"] * args.longest + ["--profile"] * args.profile


def longest(args: argparse.Namespace, variant: str) -> Found:
    """The longest context that fits, to about an eighth."""
    fits: list[Found] = []
    context, fails = args.context, 0
    while args.context // 4 <= context <= args.most:
        found = fresh(command(args, context, 1), variant, args.ranks, args.limit)
        print(f"<!-- {context}: {found.get('error', found.get('peak GiB'))} -->", flush=True)
        if "error" not in found:
            fits.append(found)
        elif "memory" in found["error"].lower():
            fails = context
        else:
            return fits[-1] if fits else found
        context = onward(fits, fails)
    return fits[-1] if fits else {"variant": variant, "error": "none fits"}


def onward(fits: list[Found], fails: int) -> int:
    """The next context to try: doubled, then where memory would be full; 0 after the last."""
    last = fits[-1]["context"] if fits else 0
    if fails:
        return (last + fails) // 2 if fails - last > fails // 8 else 0
    if len(fits) < 2 or not fits[-1]["GPU GiB"]:
        return 2 * last
    (a, before), (b, most) = ((found["context"], found["peak GiB"]) for found in fits[-2:])
    room = FULL * fits[-1]["GPU GiB"] - most
    guess = int(b + room * (b - a) / (most - before)) // 1024 * 1024
    return guess if guess > b * 9 // 8 else 0


def line(found: Found) -> str:
    """One row of the table; a variant that failed has its reason."""
    if "error" in found:
        return f"| {found['variant']} | {found['error']} | | | | | | | |"
    pairs = zip(found["seconds"], found["GiB"], strict=True)
    parts = " | ".join(f"{seconds:.2f} s, {gib:.1f}" for seconds, gib in pairs)
    losses = f"{found['losses'][0]:.4f}, {found['losses'][-1]:.4f}"
    return (
        f"| {found['variant']} | {found['context']} | {found['tokens/s']:.0f} | "
        f"{found['peak GiB']:.1f} | {parts} | {losses} | {found['norm']:.4f} |"
    )


def asked(argv: list[str]) -> argparse.Namespace:
    parser = options("model", __doc__)
    add, gpu = parser.add_argument, torch.cuda.is_available()
    every = list(dict.fromkeys(ALONE + SHARDED))
    add("--shape", choices=[*SHAPES], default="llama-3-8b" if gpu else "tiny")
    add("--variant", choices=every, nargs="+", help="default: all, with --ranks those for it")
    add("--batch", type=int, help="rows of all ranks; default: 8, of a tiny shape 2")
    add("--context", type=int, help="tokens of a row, or the first to try; default: 4096, 16384")
    add("--steps", type=int, default=3)
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--ranks", type=int, default=1)
    add("--longest", action="store_true")
    add("--profile", action="store_true", help="one more step, and what its time went to")
    add("--most", type=int, default=2**18, help="the longest context to try")
    args = parser.parse_args(argv)
    tiny = args.shape.startswith("tiny")
    args.variant = args.variant or list(SHARDED if args.ranks > 1 else ALONE)
    args.batch = args.batch or (args.ranks if args.longest else max(args.ranks, 2 if tiny else 8))
    args.context = args.context or (32 if tiny else 16384 if args.longest else 4096)
    return args


def sizes(args: argparse.Namespace) -> str:
    """Rows and context, and what is not as usual."""
    text = f"{args.batch} x {'the longest' if args.longest else args.context}"
    text += f", {args.dtype}" if args.dtype != "bfloat16" else ""
    return text + (f", FSDP2 over {args.ranks}" if args.ranks > 1 else "")


def main(argv: list[str]) -> list[Found]:
    """Print the table, keep what is in it, and return it."""
    args = asked(argv)
    if args.inside:
        inside(args.variant[0], lambda: one_of_ranks(args))
        return []
    print(
        f"{args.shape}, {args.batch} rows, {args.dtype}, AdamW, checkpointing, "
        f"{args.ranks} process{'es, FSDP2' if args.ranks > 1 else ''}\n\n{HEAD}",
        flush=True,
    )  # fmt: skip
    rows, keep = [], keeper("model", argv, args, sizes(args), args.ranks)
    for variant in args.variant:
        if args.longest:
            rows.append(longest(args, variant))
        else:
            one = command(args, args.context, args.steps)
            rows.append(fresh(one, variant, args.ranks, args.limit))
        keep(rows[-1])
        print(line(rows[-1]), flush=True)
    print(kinds.table(rows), end="")
    return rows
