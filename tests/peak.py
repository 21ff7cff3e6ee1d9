"""The most memory that a process has held, or a GPU for it, in MiB."""

import re
from pathlib import Path

import torch

FORGET_PEAK = Path("/proc/self/clear_refs")  # the kernel keeps the peak of a process; 5 forgets it


def start_of_peak(device: str) -> float:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    FORGET_PEAK.write_text("5")
    return of_process("VmRSS")


def peak(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else of_process("VmHWM")


def of_process(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
