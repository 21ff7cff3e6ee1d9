"""Where the time of a step goes: its kernels, of a CPU its operations, by what they are for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# by the first that is found in a name
KINDS = {
    "attention": r"flash|fmha|sdpa|attention",
    "products": r"gemm|cutlass|nvjet|xmma|aten::(mm|addmm|bmm)$",
    "collectives": r"nccl|gloo|c10d",
    "optimizer": r"multi_tensor|adam",
    "fused functions": r"^_\w*kernel|^triton_|liger",
    "the rest of torch": "",
}


def of_step(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds of each kind in one run of a step; kernels that overlap count each for itself."""
    gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
        step()
        if gpu:
            torch.cuda.synchronize()
    found = dict.fromkeys(KINDS, 0.0)
    for event in seen.key_averages():
        if not event.is_user_annotation:
            spent = event.self_device_time_total if gpu else event.self_cpu_time_total
            found[kind(event.key)] += spent / 1e6
    return found


def kind(name: str) -> str:
    return next(kind for kind, known in KINDS.items() if re.search(known, name, re.IGNORECASE))


def table(rows: list[dict[str, Any]]) -> str:
    """Of rows that were profiled: milliseconds of each kind."""
    rows = [row for row in rows if "kinds" in row]
    if not rows:
        return ""
    text = (
        "\n| profiled step, ms | " + " | ".join(KINDS) + " |\n" + "|---" * (1 + len(KINDS)) + "|\n"
    )
    for row in rows:
        cells = " | ".join(f"{1e3 * row['kinds'][kind]:.0f}" for kind in KINDS)
        text += f"| {row['variant']} | {cells} |\n"
    return text
