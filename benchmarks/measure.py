"""How it is measured: errors against float64, time, memory, and the rates of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Drawn, Function, Op

Run = Callable[[Any], Any]
Timing = dict[str, float]  # ms: median; iqr: between the quartiles; n: how many were timed
LEAST = 5  # calls, however long one takes
SETTLING = 0.5  # seconds of products, after which an H200's clocks stay where its power lets them


class Inputs:
    """A private copy of what was drawn, which a peer may overwrite."""

    def __init__(self, op: Op, drawn: Drawn) -> None:
        arguments, upstream = drawn
        self.source = [*arguments.values(), *upstream]
        self.copies = [t.clone() for t in self.source]
        self.names = [*arguments, *("dy",) * len(upstream)]
        self.upstream = self.copies[len(arguments) :] or None
        named = dict(zip(arguments, self.copies, strict=False))
        # without gradients, as in evaluation: parameters still ask for them, activations do not
        self.untracked = tuple(t if name == "w" else t.detach() for name, t in named.items())
        self.wanted = [named[name].requires_grad_() for name in op.wanted]
        self.tracked = tuple(named.values())

    def restore(self) -> None:
        """Write the original contents back, in place."""
        with torch.no_grad():
            for copy, source in zip(self.copies, self.source, strict=True):
                copy.copy_(source)

    def overwritten(self) -> set[str]:
        """Name what no longer has its original content."""
        triples = zip(self.names, self.copies, self.source, strict=True)
        return {name for name, copy, source in triples if not torch.equal(copy, source)}


def forward(f: Function, inputs: Inputs) -> tuple[Tensor, ...]:
    """Evaluate without gradients."""
    with torch.no_grad():
        out = f(*inputs.untracked)
    return out if isinstance(out, tuple) else (out,)


def forward_backward(f: Function, inputs: Inputs) -> tuple[Tensor, ...]:
    """Evaluate, then pull the upstream gradients back: outputs, then gradients."""
    out = f(*inputs.tracked)
    out = out if isinstance(out, tuple) else (out,)
    return *out, *torch.autograd.grad(out, inputs.wanted, inputs.upstream)


def oracle(op: Op, drawn: Drawn) -> dict[str, Tensor]:
    """Compute outputs and gradients of the same values in float64, once for all peers."""
    arguments = {k: t.double() if t.is_floating_point() else t for k, t in drawn[0].items()}
    inputs = Inputs(op, (arguments, tuple(t.double() for t in drawn[1])))
    (*ys,) = forward_backward(op.plain, inputs)
    outputs = [f"y{i}" for i in range(len(ys) - len(op.wanted))]
    names = (*outputs, *(f"d{name}" for name in op.wanted))
    return dict(zip(names, (t.detach() for t in ys), strict=True))


def errors(
    f: Function, op: Op, drawn: Drawn, want: dict[str, Tensor]
) -> tuple[dict[str, float], list[str]]:
    """Relative error of each result, and the names of the arguments that the peer wrote to."""

    def error(name: str, got: Tensor) -> float:
        if got.shape != want[name].shape:
            raise ValueError(f"{name} has shape {tuple(got.shape)}")
        return ((got.detach().double() - want[name]).norm() / want[name].norm()).item()

    inputs, found = Inputs(op, drawn), {}
    # one pass after the other: results of the first may lie in what the second overwrites
    for name, got in zip(want, forward(f, inputs), strict=False):
        found[f"{name}, no grad"] = error(name, got)
    written = inputs.overwritten()
    inputs.restore()
    for name, got in zip(want, forward_backward(f, inputs), strict=True):
        found[name] = error(name, got)
    return found, sorted(written | inputs.overwritten())


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settle(run: Run, inputs: Any, device: torch.device) -> None:
    """Call until the clocks of a GPU settle: at first it runs a sixth faster, then slower."""
    end = time.perf_counter() + (SETTLING if device.type == "cuda" else 0.0)
    while time.perf_counter() < end:
        run(inputs)
        synchronize(device)


def rounds(sets: Sequence[Any], device: torch.device, seconds: float, least: int) -> Iterator[None]:
    """Restore all sets before each round, until time is up and `least` rounds are through."""
    end, done = time.perf_counter() + seconds, 0
    while done < least or time.perf_counter() < end:
        for inputs in sets:
            if isinstance(inputs, Inputs):
                inputs.restore()
        synchronize(device)
        yield
        done += 1


def summary(times: Sequence[float]) -> Timing:
    """Median and spread."""
    quarter, median, last = statistics.quantiles(times, n=4)
    return {"ms": median, "iqr": last - quarter, "n": len(times)}


class Clock:
    """An event on a CPU, which is where the host is."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: Clock) -> float:
        return 1e3 * (later.at - self.at)


def events(n: int, device: torch.device) -> list[Any]:
    """Events that note the device's time when it gets to them."""
    gpu = device.type == "cuda"
    return [torch.cuda.Event(enable_timing=True) if gpu else Clock() for _ in range(n)]


def eager(
    run: Run, sets: Sequence[Any], device: torch.device, seconds: float
) -> tuple[Timing, Timing]:
    """Time single calls, one set of inputs after another; then until they return, on the host.

    On a GPU the calls of a round are enqueued without waiting, as in training: a call takes the
    longer of its host and its device time.
    """
    times: list[float] = []
    hosts: list[float] = []
    for _ in rounds(sets, device, seconds, least=-(-LEAST // len(sets))):
        starts, stops = events(len(sets), device), events(len(sets), device)
        for inputs, start, stop in zip(sets, starts, stops, strict=True):
            start.record()
            began = time.perf_counter()
            run(inputs)
            hosts.append(1e3 * (time.perf_counter() - began))
            stop.record()
        synchronize(device)
        times += [a.elapsed_time(b) for a, b in zip(starts, stops, strict=True)]
    return summary(times), summary(hosts)


def graph(run: Run, sets: Sequence[Inputs], device: torch.device, seconds: float) -> Timing:
    """Time replays of a CUDA graph that holds one call for each set; milliseconds of a call."""
    torch.cuda.set_sync_debug_mode("error")  # who waits for the GPU fails here, not in a capture
    try:
        run(sets[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for inputs in [*sets, *sets][:3]:
            run(inputs)
    torch.cuda.current_stream(device).wait_stream(stream)
    synchronize(device)
    captured, (start, stop) = torch.cuda.CUDAGraph(), events(2, device)
    # the outer context: a capture that fails does not give the stream back
    with torch.cuda.stream(stream), torch.cuda.graph(captured, stream=stream):
        for inputs in sets:
            run(inputs)
    captured.replay()
    times: list[float] = []
    for _ in rounds(sets, device, seconds, LEAST):
        start.record()
        captured.replay()
        stop.record()
        synchronize(device)
        times.append(start.elapsed_time(stop) / len(sets))
    captured.reset()
    return summary(times)


def peak_mib(run: Run, inputs: Inputs, device: torch.device) -> float:
    """Most memory of a GPU that one call holds beyond what was there, its results included."""
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run(inputs)
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def rates(device: torch.device, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Bytes a second of a copy, read + written, and operations a second of the better product."""
    gpu = device.type == "cuda"
    source = torch.randn(2**30 if gpu else 2**22, device=device, dtype=dtype)
    copies = [(torch.empty_like(source), source)] * 10
    copy, _ = eager(lambda pair: pair[0].copy_(pair[1]), copies, device, seconds)
    products: dict[str, float] = {}
    for m, k, n in [(8192, 8192, 8192), (8192, 4096, 128256)] if gpu else [(1024, 1024, 1024)]:
        a, b = (torch.randn(rows, k, device=device, dtype=dtype) for rows in (m, n))
        pairs = [(a, b.T)] * 10
        settle(lambda pair: torch.mm(*pair), pairs[0], device)
        product, _ = eager(lambda pair: torch.mm(*pair), pairs, device, seconds)
        products[f"{m}x{k}x{n}"] = 2e3 * m * k * n / product["ms"]
    return {
        "copy": 2e3 * source.nbytes / copy["ms"],
        "matmul": max(products.values()),
        "products": products,
    }
