"""One run: check every peer against float64, then time those that are right."""

from __future__ import annotations

import gc
import platform
import re
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.cases import Draw, Drawn, Op, halved, label, leading
from benchmarks.measure import Inputs
from benchmarks.peers import Function, Peer
from tests.table import Sizes

Row = dict[str, Any]
Built = list[tuple[Peer, Function]]
PASSES: dict[str, Function] = {"fwd": measure.forward, "fwd+bwd": measure.forward_backward}
# beyond twice the error of plain torch: an ulp, and in float32 another order of summation
LEEWAY = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-19}
ONE_SET_MS = 5.0  # beyond this a call has no use for inputs that caches have forgotten
SLOW_S = 0.2  # for each number of such a call, at least
NO_GRAPH_MS = 20.0  # beyond this the host is never what a call waits for
BEGAN = time.perf_counter()


def say(*words: object) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s ", *words, flush=True)


def failed(error: Exception) -> Row:
    text = " ".join(str(error).split())[:200]
    return {"status": "failed", "note": f"{type(error).__name__}: {text}"}


@dataclass
class Budget:
    """Seconds that a run may take: for each number, for all, for what torch.compile does."""

    each: float
    whole: float
    compiling: float

    def spent(self) -> bool:
        return time.perf_counter() - BEGAN > self.whole


class Runner:
    """Measures on one device; `absent` tells which packages are not there, once for all ops."""

    def __init__(self, device: torch.device, budget: Budget) -> None:
        self.device, self.budget, self.gpu = device, budget, device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.memory = torch.cuda.get_device_properties(device).total_memory if self.gpu else 2**34
        self.absent: dict[str, str] = {}
        self.left_out: list[str] = []
        say("rates of", machine(device))
        self.rates = measure.rates(device, self.dtype, 4 * budget.each)

    def free(self, cycles: bool = False) -> None:
        """Give memory back; with cycles it takes a tenth of a second, so once for each case."""
        if cycles:
            gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()

    def build(self, peer: Peer, op: Op, shape: str) -> Function | None:
        """Return the function of a peer, or note why its package has none."""
        if {peer.package, peer.name} & set(self.absent) or (peer.gpu_only and not self.gpu):
            return None
        if peer.compiles and self.budget.compiling <= 0:
            self.left_out.append(f"{peer.name} of {op.name} {shape}")
            return None
        try:
            if find_spec(peer.package) is None:
                raise ImportError(f"No module named {peer.package!r}")
            return peer.build()
        except ImportError as error:
            # a package may be there but for what it needs; torch and liger_fn lack one function
            why = peer.name if peer.package in ("torch", "liger_fn") else peer.package
            self.absent[why] = failed(error)["note"]
            say("absent:", why, self.absent[why])
            return None

    def check(self, op: Op, sizes: Sizes, drawn: Drawn, built: Built) -> list[tuple[Row, Function]]:
        """Compare peers with one float64 oracle: rows, each with its function."""
        want = measure.oracle(op, drawn)
        plain, written = measure.errors(op.plain, op, drawn, want)
        bound = {k: 2 * e + LEEWAY[self.dtype] for k, e in plain.items()}
        done = []
        for peer, function in built:
            row: Row = {"peer": peer.name, "checked": label(sizes)}
            began = time.perf_counter()
            try:
                found = (plain, written)
                if function is not op.plain:
                    found = measure.errors(function, op, drawn, want)
                row["error"], row["overwrites"] = found
                # written so that NaN is wrong
                right = all(e <= bound[k] for k, e in row["error"].items())
                row |= {"bound": bound, "status": "ok" if right else "wrong"}
            except Exception as error:
                row |= failed(error)
            if peer.compiles:
                self.budget.compiling -= time.perf_counter() - began
            done.append((row, function))
            self.free()
        return done

    def case(self, op: Op, shape: str, sizes: Sizes, peers: list[Peer]) -> list[Row]:
        """Check, then time, peers of one op at one shape."""
        built = [(peer, f) for peer in peers if (f := self.build(peer, op, shape)) is not None]
        if not built:
            return []
        say(op.name, shape, label(sizes))
        if any(peer.compiles for peer, _ in built):
            torch.compiler.reset()
        self.free(cycles=True)
        checked = sizes
        # on fewer rows where six such tensors in float64 do not fit
        while op.largest(checked) * 8 * 6 > self.memory / 2 and leading(halved(checked))[0]:
            checked = halved(checked)
        drawn = op.draw(Draw(self.device, self.dtype), checked)
        done = self.check(op, checked, drawn, built)
        if checked != sizes:
            drawn = op.draw(Draw(self.device, self.dtype), sizes)
        size = sum(t.nbytes for t in (*drawn[0].values(), *drawn[1]))
        # enough to leave the caches, and four to keep the queue of a GPU filled
        n = min(max(4, 2**28 // size), 16, int(self.memory / 16) // size) if self.gpu else 1
        sets = [Inputs(op, drawn) for _ in range(max(1, n))]
        least = op.least_ms(sizes, self.dtype.itemsize, self.rates)
        facts = {"op": op.name, "shape": shape, "sizes": label(sizes)}
        facts["least_ms"] = dict(zip(PASSES, least, strict=True))
        for row, function in done:
            row |= facts
            self.attempt(row, function, sets)
        return [row for row, _ in done]

    def attempt(self, row: Row, function: Function, sets: list[Inputs]) -> None:
        """Time what is right, and say what came out."""
        if row["status"] == "ok":
            try:
                self.time(row, function, sets)
            except Exception as error:
                row |= failed(error)
        self.free()
        ms = (row.get("graph") or row.get("eager") or {}).get("fwd+bwd", {}).get("ms")
        found = f"{ms:.4g} ms, {100 * row['least_ms']['fwd+bwd'] / ms:.0f} %" if ms else ""
        say("  ", row["peer"], row["status"], row.get("note", ""), found)

    def time(self, row: Row, function: Function, sets: list[Inputs]) -> None:
        row |= {key: {} for key in ("eager", "host", "graph", "peak_mib")}
        for name, passes in PASSES.items():
            run = partial(passes, function)
            run(sets[-1])
            if self.gpu:
                row["peak_mib"][name] = measure.peak_mib(run, sets[0], self.device)
            measure.synchronize(self.device)
            began = time.perf_counter()
            run(sets[-1])
            measure.synchronize(self.device)
            slow = 1e3 * (time.perf_counter() - began) > ONE_SET_MS
            some = sets[:1] if slow else sets
            seconds = self.budget.each
            if slow and self.gpu:
                seconds = max(seconds, SLOW_S)
                measure.settle(run, sets[0], self.device)
            found = measure.eager(run, some, self.device, seconds)
            row["eager"][name], row["host"][name] = found
            if self.gpu and found[0]["ms"] < NO_GRAPH_MS:
                try:
                    row["graph"][name] = measure.graph(run, some, self.device, seconds)
                except Exception as error:
                    row["note"] = f"no graph of {name}: {failed(error)['note']}"


def machine(device: torch.device) -> str:
    """Name the GPU, or the CPU as Linux knows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{(names or [platform.machine()])[0]}, {torch.get_num_threads()} threads"


def commit() -> str:
    """Name the commit that is checked out, + where files differ from it."""
    try:
        asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    names = ("torch", "triton", "transformers", "trl")
    for name in (*names, "liger-kernel", "quack-kernels", "cut-cross-entropy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found
