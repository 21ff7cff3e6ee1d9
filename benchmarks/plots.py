"""Two pictures of the results of a machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.cases import Op
from benchmarks.report import best, share

Rows = list[tuple[Op, list[dict[str, Any]]]]
# by the name of the peer: the same everywhere
COLORS = {
    "liger_fn": "#c0392b",
    "torch": "#7f8c8d",
    "torch.compile": "#34495e",
    "Liger-Kernel": "#2980b9",
    "QuACK": "#e67e22",
    "TRL": "#8e44ad",
    "CCE": "#16a085",
}
MARKS = dict(zip(list(COLORS)[1:], "os^DvP", strict=True))


def limits(rows: Rows, file: Path) -> None:
    """Share of the limit of forward + backward at the first shape: our bar, marks of others."""
    first = [(op.name, [r for r in of if r["shape"] == of[0]["shape"]]) for op, of in rows]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.28 * len(first)), layout="constrained")
    for at, (_, of) in enumerate(first):
        for row in of:
            percent, peer = share(row), row["peer"]
            if percent is None:
                continue
            if peer == "liger_fn":
                axes.barh(at, percent, color=COLORS[peer], alpha=0.55, height=0.6)
            elif peer in MARKS:
                axes.plot(percent, at, MARKS[peer], color=COLORS[peer], markersize=5)
    axes.barh(0, 0, color=COLORS["liger_fn"], alpha=0.55, label="liger_fn")
    shown = {row["peer"] for _, of in first for row in of if share(row) is not None}
    for peer in (peer for peer in MARKS if peer in shown):
        axes.plot([], [], MARKS[peer], color=COLORS[peer], label=peer)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_yticks(range(len(first)), [name for name, _ in first])
    axes.set_xlim(left=0)
    axes.set_xlabel("% of what copy or matrix product of the same run allow, forward + backward")
    axes.set_ylim(len(first) - 0.4, -0.6)
    figure.legend(loc="outside upper center", ncols=4)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def heads(rows: list[dict[str, Any]], file: Path) -> None:
    """Time of each token and memory of a head of Llama 3 8B against its tokens."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    points: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        ms, _ = best(row, "fwd+bwd")
        if row["shape"].startswith("llama-3-8b") and ms is not None:
            tokens = int(row["sizes"].split("x")[0])
            memory = row["peak_mib"].get("fwd+bwd", math.nan) / 1024
            points.setdefault(row["peer"], []).append((tokens, 1e3 * ms / tokens, memory))
    for peer, found in points.items():
        of, *variant = peer.split(",")
        tokens, *each = zip(*sorted(found), strict=True)
        for axes, values in zip(panels, each, strict=True):
            axes.plot(tokens, values, "o--" if variant else "o-", color=COLORS.get(of, "#d4ac0d"),
                      linewidth=2.5 if of == "liger_fn" else 1.2, markersize=4,
                      fillstyle="none" if variant else "full", label=peer)  # fmt: skip
    panels[0].set(ylabel="µs for each token, forward + backward", ylim=(0, None))
    panels[1].set(ylabel="peak GiB beyond the inputs", yscale="log")
    panels[1].set_yticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    for axes in panels:
        axes.set(xscale="log", xlabel="tokens")
        axes.set_xticks([2048, 8192, 32768], ["2k", "8k", "32k"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle("fused_linear_ce, d 4096, v 128256, bfloat16")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def draw(rows: Rows, file: Path) -> list[Path]:
    """Draw beside the file of the results, and return what was drawn."""
    if not rows:
        return []
    drawn = [file.with_name(f"{file.stem}-limits.png")]
    limits(rows, drawn[0])
    for op, of in rows:
        if op.name == "fused_linear_ce":
            drawn.append(file.with_name(f"{file.stem}-fused_linear_ce.png"))
            heads(of, drawn[-1])
    return drawn
