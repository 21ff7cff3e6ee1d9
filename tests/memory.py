"""What torch allocates for tensors, to the byte."""

import gc
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch

CPU = torch.profiler.ProfilerActivity.CPU


def held(run: Callable[[], object], device: torch.device, folder: Path) -> int:
    """Bytes of tensors at the peak of a run, beyond those that were there."""
    if device.type == "cuda":
        run()  # workspaces of libraries stay
        gc.collect()  # what earlier tests left in circles must not go in between
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[CPU], profile_memory=True) as profile:
        run()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return max(accumulate(change for _, change in changes))
