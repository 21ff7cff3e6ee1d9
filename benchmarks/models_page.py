"""From kept results of whole models to a page, a plot and the table of README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks import dpo, kinds, model, store
from benchmarks.networks import MLP_CHUNK, SHAPES, TILES
from benchmarks.store import Results

Row = dict[str, Any]
README = Path(__file__).parents[1] / "README.md"
KINDS = {"model": (model, [*model.ALONE, *model.SHARDED]), "dpo": (dpo, [*dpo.VARIANTS])}
# the columns of README.md, by their variants in either kind, the first that is there
COLUMNS = {
    "as it is": ("plain", "TRL"),
    "Liger-Kernel": ("Liger-Kernel", "TRL, Liger-Kernel"),
    "`adapt(model)`": ("TRL, adapted", "liger_fn"),  # dpo has both
    f"`adapt(model, mlp_chunk={MLP_CHUNK})`": (f"liger_fn, {TILES}",),
}
PAGE = """# {machine}

Written by `python -m benchmarks report` from [{name}.json]({name}.json), which
`python -m benchmarks model` and `python -m benchmarks dpo` fill.

{runs}

Hugging Face models with random weights and tokens, AdamW, gradient checkpointing, bfloat16 unless
it says otherwise; each variant in a process of its own. The first step warms up and does not
count, times are medians of the others. Peaks: what PyTorch allocated on a GPU, on a CPU what the
process held. What did not fit, or failed, has its reason.

![tokens a second and peak memory of each variant]({name}.png)
"""


def ordered(results: Results) -> dict[str, list[Row]]:
    """Rows of each shape and sizes, all as their commands print them."""
    found: dict[str, list[Row]] = {}

    def place(row: Row) -> tuple[Any, ...]:
        shape = [*SHAPES].index(row["shape"].split(",")[0])
        longest, ranks = "longest" in row["sizes"], "FSDP2" in row["sizes"]
        variant = KINDS[row["op"]][1].index(row["peer"])
        at = 0 if longest else row["context"]
        return [*KINDS].index(row["op"]), shape, longest, ranks, at, row["shape"], variant

    for row in sorted(results["rows"], key=place):
        found.setdefault(row["shape"], []).append(row | {"variant": row["peer"]})
    return found


def markdown(results: Results, name: str) -> str:
    """Write the page of a machine."""
    tell, runs = [], list(results["runs"])
    for number, (began, run) in enumerate(results["runs"].items(), 1):
        told = ", ".join(f"{k} {v}" for k, v in run["versions"].items() if v != "absent")
        tell.append(f"{number}. {began}, commit {run['commit']}: `{run['command']}`; {told}.")
    text = PAGE.format(machine=results["machine"], name=name, runs="\n".join(tell))
    for title, rows in ordered(results).items():
        kind = KINDS[rows[0]["op"]][0]
        head, rule = kind.HEAD.split("\n")
        text += f"\n## {'DPO: ' * (kind is dpo)}{title}\n\n{head} steps | run |\n{rule}---|---|\n"
        for row in rows:
            text += f"{kind.line(row)} {row['steps']} | {1 + runs.index(row['run'])} |\n"
        text += kinds.table(rows)
    return text


def cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if "error" in row:
        return "out of memory" if "memory" in row["error"].lower() else "failed"
    if "longest" in row["shape"]:
        return f"{row['context']} tokens"
    return f"{row['tokens/s']:.0f}, {row['peak GiB']:.1f}"


def summary(results: Results) -> str:
    """Write what a user chooses by: tokens a second and peak GiB, or how long a context fits."""
    versions = results["runs"][max(results["runs"])]["versions"]
    names = [f"{name} {versions.get(name.lower(), '')}".strip() for name in COLUMNS]
    lines = [
        "| tokens/s, peak GiB | " + " | ".join(names) + " |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for title, rows in ordered(results).items():
        by_name = {row["peer"]: row for row in rows}
        cells = [
            cell(next((by_name[v] for v in variants if v in by_name), None))
            for variants in COLUMNS.values()
        ]
        dpo_or_not = ", TRL's DPOTrainer" * (rows[0]["op"] == "dpo")
        lines.append(f"| {title}{dpo_or_not} | {' | '.join(cells)} |")
    return "<!-- models -->\n" + "\n".join(lines) + "\n<!-- end -->"


def draw(results: Results, file: Path) -> None:
    """Tokens a second beside peak memory, a group of bars for each shape."""
    from benchmarks.plots import COLORS, plt

    groups = [(title, rows) for title, rows in ordered(results).items()
              if rows[0]["op"] == "model" and "longest" not in title]  # fmt: skip
    bars = sum(len(rows) + 1 for _, rows in groups)
    figure, panels = plt.subplots(
        1, 2, figsize=(10, 0.8 + 0.24 * bars), layout="constrained", sharey=True
    )
    names: dict[int, str] = {}
    at = 0
    for title, rows in groups:
        panels[0].text(0, at, title, va="center", fontsize=9, weight="bold")
        for row in rows:
            at += 1
            names[at], (whose, *how) = row["peer"], row["peer"].split(", ")
            color = COLORS["torch" if whose == "plain" else whose]
            for axes, of, digits in zip(panels, ("tokens/s", "peak GiB"), (0, 1), strict=True):
                axes.barh(at, row.get(of, 0), color=color, alpha=0.6, height=0.75,
                          hatch="///" * bool(how))  # fmt: skip
                said = cell(row) if "error" in row else f"{row[of]:.{digits}f}"
                axes.text(row.get(of, 0), at, f" {said}", va="center", fontsize=8)
        at += 1
    if full := max((row.get("GPU GiB", 0) for _, rows in groups for row in rows), default=0):
        panels[1].axvline(full, color="black", linewidth=0.8)
    panels[0].set_yticks([*names], [*names.values()], fontsize=8)
    panels[0].set(xlabel="tokens/s", ylim=(at - 0.4, -0.6))
    panels[0].margins(x=0.12)  # for what stands behind the longest bar
    panels[1].set_xlabel("peak GiB" + ", and what the GPU has" * bool(full))
    figure.savefig(file, dpi=110)
    plt.close(figure)


def report(file: Path) -> list[Path]:
    """Write page and plot of a machine beside its results; README.md has the table of one of them.

    That is the one whose plot it shows.
    """
    results, page, plot = store.load(file), file.with_suffix(".md"), file.with_suffix(".png")
    page.write_text(markdown(results, file.stem))
    draw(results, plot)
    text = README.read_text()
    if file.resolve().parent == store.HERE and f"/{plot.name})" in text:
        table = summary(results)
        README.write_text(re.sub(r"(?s)<!-- models -->.*<!-- end -->", lambda _: table, text))
    return [page, plot]
