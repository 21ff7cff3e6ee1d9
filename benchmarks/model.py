"""Train a whole Hugging Face model for a few steps: as it is, with Liger-Kernel, with liger_fn.

Random weights in bfloat16, AdamW, gradient checkpointing, random tokens; each variant in a process
of its own. Prints tokens a second, peak memory and where the time of a step goes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("LlamaConfig", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "rope_theta": 5e5, "max_position_embeddings": 131072,
    }),
    "qwen-2.5-7b": ("Qwen2Config", {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "rope_theta": 1e6, "max_position_embeddings": 131072,
    }),
    "tiny": ("LlamaConfig", {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    }),
}  # fmt: skip
VARIANTS = ("plain", "Liger-Kernel", "liger_fn")
PARTS = ("forward", "backward", "optimizer")


def build(shape: str, variant: str, device: torch.device) -> Any:
    """Random weights, the same in each variant."""
    import transformers as hf

    kind, options = SHAPES[shape]
    if variant == "Liger-Kernel":
        from liger_kernel.transformers import _apply_liger_kernel

        _apply_liger_kernel("qwen2" if kind == "Qwen2Config" else "llama")
    torch.manual_seed(0)
    config = getattr(hf, kind)(**options, use_cache=False, attn_implementation="sdpa")
    with device:
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if variant == "liger_fn":
        from liger_fn.nn.adapters import adapt

        adapt(model)
    return model.train()


def train(shape: str, variant: str, rows: int, context: int, steps: int) -> dict[str, Any]:
    """One warm-up step, then `steps` that count."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(shape, variant, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator, times, losses = torch.Generator().manual_seed(1), [], []
    for _ in range(steps + 1):
        ids = torch.randint(model.config.vocab_size, (rows, context), generator=generator)
        ids, marks = ids.to(device), [mark(device)]
        loss = model(input_ids=ids, labels=ids).loss
        marks.append(mark(device))
        loss.backward()
        marks.append(mark(device))
        optimizer.step()
        optimizer.zero_grad()
        marks.append(mark(device))
        losses.append(loss.item())
        times.append([b - a for a, b in itertools.pairwise(marks)])
    parts = [statistics.median(part) for part in zip(*times[1:], strict=True)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "variant": variant, "tokens/s": rows * context / sum(parts), "peak GiB": peak,
        **dict(zip(PARTS, parts, strict=True)), "losses": losses,
    }  # fmt: skip


def mark(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def line(found: dict[str, Any]) -> str:
    """One row of the table; a variant that failed has its reason."""
    if "error" in found:
        return f"| {found['variant']} | {found['error']} | | | | | |"
    peak = "" if found["peak GiB"] is None else f"{found['peak GiB']:.1f}"
    parts = " | ".join(f"{found[part]:.2f}" for part in PARTS)
    return (
        f"| {found['variant']} | {found['tokens/s']:.0f} | {peak} | {parts} | "
        f"{found['losses'][0]:.4f}, {found['losses'][-1]:.4f} |"
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks model", description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=[*SHAPES], default="llama-3-8b" if gpu else "tiny")
    parser.add_argument("--variant", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--batch", type=int, default=8 if gpu else 2)
    parser.add_argument("--context", type=int, default=4096 if gpu else 32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:  # the last line is the result
        found = train(args.shape, args.variant[0], args.batch, args.context, args.steps)
        print(json.dumps(found))
        return
    print(f"{args.shape}, {args.batch} x {args.context} tokens, bfloat16, AdamW, checkpointing")
    print("| variant | tokens/s | peak GiB | forward s | backward s | optimizer s | losses |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for variant in args.variant:
        size = ["--batch", str(args.batch), "--context", str(args.context)]
        command = [sys.executable, "-m", "benchmarks", "model", "--inside", "--shape", args.shape]
        command += ["--variant", variant, *size, "--steps", str(args.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            found = {"variant": variant, "error": done.stderr.strip().splitlines()[-1][:120]}
        else:
            found = json.loads(done.stdout.strip().splitlines()[-1])
        print(line(found), flush=True)
