"""Peak memory of the fused head, against the logits and the gradient that it need not hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_fn import fused_linear_ce

ON_GPU = torch.cuda.is_available()
ROOT = Path(__file__).resolve().parent.parent
FORGET_PEAK = Path("/proc/self/clear_refs")  # the kernel keeps the peak of a process; 5 forgets it

# the logits of a small language model take 250 MiB, its head 62.5 MiB; a GPU has chunks of 1 GiB
M, D, V = 16_384 if ON_GPU else 2048, 512, 32_000
HEAD = V * D * 4 / 2**20

pytestmark = pytest.mark.skipif(
    not ON_GPU and not FORGET_PEAK.exists(), reason="nothing here tells a process its peak memory"
)


def step(name: str, m: int, device: str, measured: bool = True) -> float:
    """Run a step forward and backward; return its peak memory in MiB beyond the arguments."""
    g = torch.Generator().manual_seed(0)
    w, x = (torch.randn(n, D, generator=g).to(device) for n in (V if measured else 64, m))
    y = torch.randint(len(w), (m,), generator=g).to(device)
    w.requires_grad_("frozen" not in name)
    x.requires_grad_()
    before = start_of_peak(device)
    loss = loss_of(name, w, x, y)
    loss.backward()
    return peak(device) - before


def loss_of(name: str, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    if name == "plain":
        return F.cross_entropy(F.linear(x, w), y)
    if name == "no grad":
        with torch.no_grad():
            fused_linear_ce(w, x, y, chunk=16)
        return x[0, 0]
    return fused_linear_ce(w, x, y, chunk=16 if name == "fused, frozen" else None)


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


def measured(name: str, device: str) -> float:
    """Measure after a tiny step: libraries, threads and their workspaces are nobody's."""
    step(name, 16, device, measured=False)
    return step(name, M if name in ("plain", "fused") else 256, device)


def peak_of(name: str) -> float:
    """Measure on the GPU, or in a process of its own that has never held more."""
    if ON_GPU:
        return measured(name, "cuda")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # glibc then gives large blocks back at once, and the peak is what a step holds: what it keeps
    # of freed chunks for later differs by hundreds of MiB from run to run
    environment["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_memory", name],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_the_fused_head_needs_less_than_a_third_of_the_memory_of_plain_torch():
    fused, plain = peak_of("fused"), peak_of("plain")
    assert fused < plain / 3, f"{fused:.0f} MiB against {plain:.0f} MiB, {fused / plain:.2f} of it"


@pytest.mark.parametrize("name", ["fused, frozen", "no grad"])
def test_without_its_gradient_the_head_needs_no_memory_of_its_size(name):
    needed = peak_of(name)
    assert needed < HEAD / 2, f"{needed:.0f} MiB, a gradient of the head has {HEAD:.0f} MiB"


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.stdout.write(str(measured(sys.argv[1], "cpu")))
