"""From kept results to a page and plots: no GPU, and the same text from the same file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.cases import OPS, Op
from benchmarks.store import Results

Row = dict[str, Any]
PASSES = ("fwd", "fwd+bwd")
DOC = Path(__file__).parents[1] / "docs" / "performance.md"
PAGE = """# {machine}

Written by `python -m benchmarks report` from [{json}]({json}), which `python -m benchmarks` fills.

{runs}

- In one process and on the same inputs: ours, plain torch (the function that the row of
  [tests/table](../../tests/table) names), torch.compile of it, and other libraries. A run
  measures the rates of a copy (read + written) and of products itself, before all else.
- a / b: a without gradients, b forward and backward together. A backward alone is not measured;
  it takes about the difference.
- ms: median of CUDA graph replays, the time of the GPU alone; with ~ of calls one after the other,
  where there is no graph or a call takes 20 ms and more.
- of limit: the least time at the rates of the run, over the measured one. Above 100 % where
  another mix of reads and writes is faster than a copy.
- eager: median call, enqueued without waiting: the longer of host and GPU time. host: until such
  a call returns.
- Each call of a round has its own inputs and upstream gradients, restored between rounds outside
  the timed part: what a peer overwrites costs it nothing here, and is named.
- MiB: the most that forward and backward hold beyond the inputs, results included.
- error: norm of the difference to float64 over its norm, the largest of outputs / of gradients.
  Above 2 x plain torch's + the leeway of the run a peer is "wrong", and not timed. On fewer rows
  where float64 does not fit.
"""
COLUMNS = ("shape", "peer", "ms", "of limit", "eager ms", "host µs", "MiB", "error", "remarks")


def number(value: float | None, before: str = "", digits: int = 3) -> str:
    if value is None:
        return "-"
    return before + (f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}")


def pair(cells: Sequence[str]) -> str:
    """What holds for fwd and for fwd+bwd, or nothing."""
    return "" if set(cells) == {"-"} else " / ".join(cells)


def best(row: Row, name: str) -> tuple[float | None, str]:
    """Milliseconds of the graph, or of eager calls and a mark."""
    for kind, mark in (("graph", ""), ("eager", "~")):
        if name in row.get(kind, {}):
            return row[kind][name]["ms"], mark
    return None, ""


def share(row: Row, name: str = "fwd+bwd") -> float | None:
    """How much of the measured time the least time is, in per cent."""
    ms, _ = best(row, name)
    return None if ms is None else 100 * row["least_ms"][name] / ms


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def table_row(op: Op, row: Row, runs: list[str]) -> str:
    """Write one line of the table of an op, but for the shape."""
    error, gradients = row.get("error", {}), {f"d{name}" for name in op.wanted}
    worst = [
        max((e for k, e in error.items() if (k in gradients) is which), default=None)
        for which in (False, True)
    ]
    eager, host = (
        [row.get(kind, {}).get(name, {}).get("ms") for name in PASSES] for kind in ("eager", "host")
    )
    shares, peak = [share(row, name) for name in PASSES], row.get("peak_mib", {}).get("fwd+bwd")
    overwrites = ", ".join(row.get("overwrites", ()))
    remarks = ["" if row["status"] == "ok" else row["status"], row.get("note", "")]
    remarks += ["overwrites " + overwrites if overwrites else ""]
    remarks += [f"run {1 + runs.index(row['run'])}" if len(runs) > 1 else ""]
    return line([
        row["peer"],
        pair([number(*best(row, name)) for name in PASSES]),
        pair([number(s if s is None else round(s)) + " %" * (s is not None) for s in shares]),
        pair([number(ms) for ms in eager]),
        pair([number(ms if ms is None else round(1e3 * ms), digits=4) for ms in host]),
        "" if peak is None else f"{peak:.0f}",
        pair(["-" if e is None else f"{e:.1e}" for e in worst]),
        "; ".join(filter(None, remarks)),
    ])  # fmt: skip


def table(op: Op, rows: list[Row], runs: list[str]) -> str:
    """Write the table of an op; a shape stands where it begins."""
    lines, last = [line(COLUMNS), "|---" * len(COLUMNS) + "|"], ""
    for row in rows:
        shape = f"{row['shape']}, {row['sizes']}"
        lines.append(f"| {shape if shape != last else ''} {table_row(op, row, runs)}")
        last = shape
    return "\n".join(lines) + "\n"


def ordered(results: Results) -> list[tuple[Op, list[Row]]]:
    """The rows of each op in the order of the table."""
    found = []
    for op in OPS:
        shapes = [*op.bench.gpu, "small"]
        peers = [peer.name for peer in op.peers()]
        peers.insert(0, peers.pop(peers.index("liger_fn")))
        known = [row for row in results["rows"] if row["op"] == op.name]
        known = [row for row in known if row["shape"] in shapes and row["peer"] in peers]
        known.sort(key=lambda row: (shapes.index(row["shape"]), peers.index(row["peer"])))
        if known:
            found.append((op, known))
    return found


def told(number: int, name: str, run: dict[str, Any]) -> str:
    """One run in words."""
    rates, versions = run["rates"], run["versions"]
    products = ", ".join(f"{k} {v / 1e12:.0f}" for k, v in rates["products"].items())
    absent = "; ".join(f"{k} ({why})" for k, why in run["absent"].items())
    return (
        f"{number}. {name}, commit {run['commit']}, {run['dtype']}: `{run['command']}`; "
        f"{', '.join(f'{k} {v}' for k, v in versions.items())}. Copy "
        f"{rates['copy'] / 1e12:.3g} TB/s, products {products} TFLOP/s, leeway {run['leeway']:.1e}."
    ) + (f" Absent: {absent}." if absent else "")


def markdown(results: Results, name: str) -> str:
    """Write the page of a machine."""
    runs = list(results["runs"])
    tell = [told(i, run, results["runs"][run]) for i, run in enumerate(runs, 1)]
    text = PAGE.format(machine=results["machine"], json=f"{name}.json", runs="\n".join(tell))
    text += f"\n![share of the limit of each function]({name}-limits.png)\n"
    for op, rows in ordered(results):
        text += f"\n## {op.name}\n\nLeast work: {op.bench.counted}.\n\n"
        if op.name == "fused_linear_ce":
            text += f"![time and memory against tokens]({name}-fused_linear_ce.png)\n\n"
        text += table(op, rows, runs)
    return text


def floors(results: Results) -> str:
    """Write what each function has to move or compute, and how long that takes at least."""
    rates = results["runs"][max(results["runs"])]["rates"]
    at = f"{rates['copy'] / 1e12:.3g} TB/s, {rates['matmul'] / 1e12:.0f} TFLOP/s"
    lines = [line(["function", "shape", "fwd", "fwd+bwd", f"floor fwd ms ({at})", "fwd+bwd"])]
    lines += ["|---" * 6 + "|"]
    for op in OPS:
        shape, sizes = next(iter(op.bench.gpu.items()))
        products = op.bench.limit == "matmul"
        scale, unit = (1e-12, "TFLOP") if products else (2e-9, "GB")
        work = [f"{number(scale * n)} {unit}" for n in op.bench.work(**sizes)]
        least = [number(ms) for ms in op.least_ms(sizes, 2, rates)]
        lines.append(line([f"`{op.name}`", shape, *work, *least]))
    return "\n".join(lines)


def report(arguments: Sequence[str]) -> list[Path]:
    """Write page and plots of each JSON file, merged with others of its machine first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=report.__doc__)
    parser.add_argument("more", nargs="*", type=Path, help="JSON of other runs, to be merged")
    parser.add_argument("--out", type=Path, default=store.HERE, help="folder of the results")
    given = parser.parse_args(arguments)
    for more in map(store.load, given.more):
        store.join(store.path(given.out, more["machine"]), more)
    written = []
    from benchmarks import models_page, plots  # which need matplotlib

    for file in store.kept(given.out, models=True):
        written += models_page.report(file)
    for file in store.kept(given.out):
        results = store.load(file)
        page = file.with_suffix(".md")
        page.write_text(markdown(results, file.stem))
        written += [page, *plots.draw(ordered(results), file)]
        if given.out == store.HERE:
            table = f"<!-- floors -->\n{floors(results)}\n<!-- end -->"
            DOC.write_text(re.sub(r"(?s)<!-- floors -->.*<!-- end -->", table, DOC.read_text()))
    print(*written, sep="\n")
    return written
