"""Measure every function on this machine beside others, print the tables and keep them.

`python -m benchmarks distributed` measures what sharding costs and saves.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import distributed, measure
from benchmarks.cases import OPS, Draw, Drawn, Op, halved, leading, numbers
from benchmarks.measure import Inputs
from benchmarks.peers import Function, Peer
from tests.table import Sizes

Row = dict[str, Any]
PASSES: dict[str, Function] = {"fwd": measure.forward, "fwd+bwd": measure.forward_backward}
# beyond twice the error of plain torch: an ulp, and in float32 another order of summation
LEEWAY = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-19}
BEGAN = time.perf_counter()

PAGE = """# {machine}

`{command}`, {date}, {dtype}; {versions}

- Rates in this run: copy {copy:.3g} TB/s, read + written; products {products} TFLOP/s.
- fwd is without gradients. eager: median call by events (on a CPU, a clock), enqueued without
  waiting: the longer of host and device time. graph: replay of a CUDA graph, device time alone.
- limit: the least time at these rates over the measured one, of the graph where there is one. It
  means little on a CPU, whose caches hold these shapes.
- Each call of a round has its own inputs and upstream gradients, restored between rounds outside
  the timed part: what a peer overwrites costs it nothing here, and is named.
- peak: MiB that fwd+bwd holds beyond the inputs, results included.
- error: norm of the difference to float64 over its norm, the largest of outputs and of gradients.
  Above 2 x plain torch's + {leeway:.1e} a peer is "wrong", and not timed.
- torch is the plain function of the row in tests/table.
- A scalar loss is pulled back with 1, everything else with random gradients.
- host: so small that eager is host time alone, until the call returns.
"""
COLUMNS = [
    *(
        "shape",
        "peer",
        "eager fwd ms",
        "fwd+bwd",
        "graph fwd ms",
        "fwd+bwd",
        "limit fwd",
        "fwd+bwd",
    ),
    *("peak MiB", "error", "of gradients", "overwrites", "status", "note"),
]


def say(*words: object) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s ", *words, flush=True)


def label(sizes: Sizes) -> str:
    return "x".join(map(str, numbers(sizes)))


def failed(error: Exception) -> Row:
    text = " ".join(str(error).split())[:200]
    return {"status": "failed", "note": f"{type(error).__name__}: {text}"}


class Bench:
    """One run on one device: checks every peer, then times those that are right."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device, self.quick, self.gpu = device, quick, device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.seconds = 0.02 if quick else 0.4 if self.gpu else 0.1  # for each number, at least
        self.memory = torch.cuda.get_device_properties(device).total_memory if self.gpu else 2**34
        say("rates of", machine(device))
        self.rates = measure.rates(device, self.dtype, self.seconds)

    def draw(self, op: Op, sizes: Sizes) -> Drawn:
        return op.draw(Draw(self.device, self.dtype), sizes)

    def runs(self, peer: Peer) -> bool:
        if self.quick and peer.name == "torch.compile":
            return False
        return find_spec(peer.package) is not None and (self.gpu or not peer.gpu_only)

    def free(self) -> None:
        if self.gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def check(self, op: Op, sizes: Sizes) -> list[tuple[Row, Function]]:
        """Compare every peer with float64, on fewer rows where six such tensors do not fit."""
        torch.compiler.reset()
        checked = sizes
        while op.largest(checked) * 8 * 6 > self.memory / 2 and leading(halved(checked))[0]:
            checked = halved(checked)
        drawn = self.draw(op, checked)
        want = measure.oracle(op, drawn)
        plain, _ = measure.errors(op.plain, op, drawn, want)
        bound = {k: 2 * e + LEEWAY[self.dtype] for k, e in plain.items()}
        done = []
        for peer in filter(self.runs, op.peers()):
            say("check", op.name, label(sizes), peer.name)
            row: Row = {"op": op.name, "sizes": sizes, "peer": peer.name, "checked": checked}
            function: Function = op.plain
            try:
                function = peer.build()
                row["error"], row["overwrites"] = measure.errors(function, op, drawn, want)
                # written so that NaN is wrong
                right = all(e <= bound[k] for k, e in row["error"].items())
                row |= {"bound": bound, "status": "ok" if right else "wrong"}
            except Exception as error:
                row |= failed(error)
            done.append((row, function))
            self.free()
        return done

    def case(self, op: Op, sizes: Sizes) -> list[Row]:
        """Check, then time, all peers of one op at one shape."""
        done, drawn = self.check(op, sizes), self.draw(op, sizes)
        size = sum(t.nbytes for t in (*drawn[0].values(), *drawn[1]))
        n = int(min(12e9, self.memory / 8) // size) if self.gpu else 3
        sets = [Inputs(op, drawn) for _ in range(max(1, min(16, n)))]
        for row, function in done:
            if row["status"] != "ok":
                continue
            say("time", op.name, label(sizes), row["peer"])
            row |= {"eager": {}, "graph": {}, "sets": len(sets)}
            try:
                (self.host if sizes == op.bench.host else self.time)(op, row, function, sets)
            except Exception as error:
                row |= failed(error)
            self.free()
        return [row for row, _ in done]

    def time(self, op: Op, row: Row, function: Function, sets: list[Inputs]) -> None:
        limits = op.limits(row["sizes"], self.dtype.itemsize, self.rates)
        row["limit"] = {}
        for (name, passes), limit in zip(PASSES.items(), limits, strict=True):
            run = partial(passes, function)
            for inputs in sets[:2]:
                run(inputs)
            best = row["eager"][name] = measure.eager(run, sets, self.device, self.seconds)
            if self.gpu:
                row["peak_mib"] = measure.peak_mib(run, sets[0], self.device)
            if self.gpu:
                try:
                    best = measure.graph(run, sets, self.device, self.seconds / 2)
                    row["graph"][name] = best
                except Exception as error:
                    row["note"] = f"no graph of {name}: {failed(error)['note']}"
            row["limit"][name] = limit / best["ms"]

    def host(self, op: Op, row: Row, function: Function, sets: list[Inputs]) -> None:
        row["note"], host = "host", partial(measure.host, device=self.device)
        inputs, calls = sets[0], 10 if self.quick else 100
        with torch.no_grad():
            row["eager"]["fwd"] = host(partial(function, *inputs.untracked), calls=calls)
        row["eager"]["fwd, tracked"] = host(partial(function, *inputs.tracked), calls=calls)
        both = partial(measure.forward_backward, function, inputs)
        row["eager"]["fwd+bwd"] = host(both, calls=calls)


def machine(device: torch.device) -> str:
    """Name the GPU, or the CPU as Linux knows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{(names or [platform.machine()])[0]}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in ("torch", "triton", "liger_fn", "liger-kernel", "quack-kernels"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "from source" if name == "liger_fn" else "absent"
    return found


def line(*cells: object) -> str:
    texts = (f"{c:.{3 if c < 1e3 else 4}g}" if isinstance(c, float) else str(c) for c in cells)
    return "| " + " | ".join(t.replace("|", "/") for t in texts) + " |"


def table_row(op: Op, row: Row) -> str:
    """Write one row of the table of an op."""
    error, gradients = row.get("error", {}), {f"d{name}" for name in op.wanted}
    outputs = [e for k, e in error.items() if k not in gradients]
    times = [
        row.get(kind, {}).get(p, {}).get("ms", "") for kind in ("eager", "graph") for p in PASSES
    ]
    limits = row.get("limit", {})
    return line(
        *(label(row["sizes"]), row["peer"], *times),
        *(f"{100 * limits[p]:.0f} %" if p in limits else "" for p in PASSES),
        f"{row['peak_mib']:.0f}" if "peak_mib" in row else "",
        f"{max(outputs):.1e}" if error else "",
        f"{max(error[k] for k in gradients):.1e}" if error else "",
        *(", ".join(row.get("overwrites", ())), row["status"], row.get("note", "")),
    )


def markdown(report: dict[str, Any]) -> str:
    """Write the report as a page of tables."""
    rates = report["rates"]
    products = ", ".join(f"{k} {v / 1e12:.3g}" for k, v in rates["products"].items())
    names = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    named = {**report, "versions": names, "copy": rates["copy"] / 1e12, "products": products}
    text = PAGE.format(**named)
    for op in OPS:
        rows = [row for row in report["rows"] if row["op"] == op.name]
        if rows:
            axes = " x ".join(name for name, s in op.bench.gpu[0].items() if numbers({name: s}))
            text += f"\n## {op.name}, {axes}\n\nLeast work: {op.bench.counted}.\n\n"
            lines = [line(*COLUMNS), "|---" * len(COLUMNS) + "|", *(table_row(op, r) for r in rows)]
            text += "\n".join(lines) + "\n"
    return text


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write `<machine>.json` and `<machine>.md`, print the latter and return its path."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [op.name for op in OPS]
    here = Path(__file__).parent / "results"
    parser.add_argument("--op", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument("--out", type=Path, default=here, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="one shape each, no torch.compile")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    given = parser.parse_args(arguments)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(device, given.quick)
    report: dict[str, Any] = {
        "machine": machine(device),
        "command": " ".join(["python -m benchmarks", *(arguments or sys.argv[1:])]),
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "dtype": str(bench.dtype),
        "leeway": LEEWAY[bench.dtype],
        "versions": versions(),
        "rates": bench.rates,
        "rows": [],
    }
    page = given.out / (re.sub(r"[^a-z0-9]+", "-", report["machine"].lower()).strip("-") + ".md")
    page.parent.mkdir(parents=True, exist_ok=True)
    for op in (op for op in OPS if op.name in given.op):
        every = op.bench.gpu if bench.gpu else op.bench.cpu
        host = [op.bench.host] if op.bench.host else []
        for sizes in [*every[: 1 if given.quick else None], *host]:
            try:
                report["rows"] += bench.case(op, sizes)
            except Exception as error:
                row = {"op": op.name, "sizes": sizes, "peer": "all", **failed(error)}
                report["rows"].append(row)
            bench.free()
            # after each, so that a run that is cut short leaves what it has
            page.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            page.write_text(markdown(report))
    print("", page.read_text(), sep="\n", flush=True)
    return page


if __name__ == "__main__":
    if sys.argv[1:2] == ["distributed"]:
        distributed.main(sys.argv[2:])
    else:
        main()
