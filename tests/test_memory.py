"""Peak memory of the fused heads, against the logits and the gradients that they need not hold.

fused_linear_ce at the size of a small model, by the peak of a process. Every head of the table at
small sizes, by the tensors that torch allocates, which a profiler counts to the byte.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from liger_fn import fused_linear_ce, using
from tests.memory import held
from tests.peak import FORGET_PEAK, peak, start_of_peak
from tests.table import ROWS, Draw, Row

ON_GPU = torch.cuda.is_available()
ROOT = Path(__file__).resolve().parent.parent

# the logits of a small language model take 250 MiB, its head 62.5 MiB; a GPU has chunks of 1 GiB
M, D, V = 16_384 if ON_GPU else 2048, 512, 32_000
HEAD = V * D * 4 / 2**20

HEADS = {row.id: row for row in ROWS if {"d", "v"} <= row.sizes.keys()}
# heads of scalar losses with a row kernel of their own: how many chunks of logits it works on
KERNELS = {
    "fused_linear_ce": 1, "fused_linear_kl": 2, "fused_linear_kl-topk": 1, "fused_linear_jsd": 2,
    "fused_linear_tvd": 2, "fused_linear_cosine": 2,
}  # fmt: skip

of_a_process = pytest.mark.skipif(
    not ON_GPU and not FORGET_PEAK.exists(), reason="nothing here tells a process its peak memory"
)


def step(name: str, m: int, device: str, measured: bool = True) -> float:
    """Run a step forward and backward; return its peak memory in MiB beyond the arguments."""
    g = torch.Generator().manual_seed(0)
    w, x = (torch.randn(n, D, generator=g).to(device) for n in (V if measured else 64, m))
    w /= D**0.5  # else most of a softmax is denormal, whose products take a CPU a minute
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


@of_a_process
def test_the_fused_head_needs_less_than_a_third_of_the_memory_of_plain_torch():
    fused, plain = peak_of("fused"), peak_of("plain")
    assert fused < plain / 3, f"{fused:.0f} MiB against {plain:.0f} MiB, {fused / plain:.2f} of it"


@of_a_process
@pytest.mark.parametrize("name", ["fused, frozen", "no grad"])
def test_without_its_gradient_the_head_needs_no_memory_of_its_size(name):
    needed = peak_of(name)
    assert needed < HEAD / 2, f"{needed:.0f} MiB, a gradient of the head has {HEAD:.0f} MiB"


# -- every head: what torch allocates --------------------------------------------------------------


def step_of(
    row: Row, device: torch.device, tokens: int, d: int, v: int
) -> tuple[int, Callable[..., Any]]:
    """Bytes of the logits of a row, and a step forward and backward."""
    lead = {"lead": (tokens,)} if "lead" in row.sizes else {"b": tokens // 16, "t": 8}
    made = row.make(Draw(), **{**row.sizes, **lead, "d": d, "v": v})
    args = {n: (t.float() if t.is_floating_point() else t).to(device) for n, t in made.items()}
    wanted = [args[name].requires_grad_() for name in row.differentiable]

    def of(f: Callable[..., Any], **options: Any) -> None:
        out = tree_leaves(f(*args.values(), **options))
        torch.autograd.grad(sum(t.sum() for t in out), wanted)

    return args["x"].shape[:-1].numel() * v * 4, of


@pytest.mark.parametrize("name", HEADS)
def test_every_head_needs_less_than_a_third_of_the_memory_of_plain_torch(name, device, tmp_path):
    row = HEADS[name]
    logits, step = step_of(row, device, tokens=64, d=4, v=512)
    plain = held(lambda: step(row.oracle), device, tmp_path)
    assert plain > 3 * logits  # logits, what softmax made of them, their gradient
    fused = held(lambda: step(row.fn, chunk=4), device, tmp_path)
    assert fused < plain / 3, f"{fused} bytes against {plain}, {fused / plain:.2f} of it"


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_kernel_turns_logits_into_their_gradient_in_place(name, device, tmp_path):
    logits, step = step_of(HEADS[name], device, tokens=32, d=1, v=2048)
    with using("triton"):
        peak = held(lambda: step(HEADS[name].fn, chunk=32), device, tmp_path)
    assert peak < (KERNELS[name] + 0.25) * logits, f"{peak / logits:.2f} chunks"


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.stdout.write(str(measured(sys.argv[1], "cpu")))
