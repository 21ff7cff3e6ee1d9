"""From kept results of convergence to docs/convergence.md and a figure for each dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks import store
from benchmarks.report import line
from benchmarks.store import Results

Row = dict[str, Any]
HERE = store.HERE / "convergence"
DOC = Path(__file__).parents[1] / "docs" / "convergence.md"
FOLDER = "../benchmarks/results/convergence/"  # from docs
FACTOR = 2.0
WITHIN, EXACT, BEYOND = "within", "as exact", "**beyond**"
PAGE = """# Convergence with and without liger_fn

Written by `python -m benchmarks convergence`, which trains the tiny models of
[tests/zoo.py](../tests/zoo.py), every family of [families.md](families.md), on the sources of
Python's standard library: from one seed, on the same batches, by AdamW; in float32, and in bfloat16
with weights kept in float32 beside it, so that no update is lost to rounding.

**What it is held to.** No two programs that round differently train the same model bit for bit, so
the measure is plain torch itself. Each model is trained three times as it is and three times by
`adapt(model)`: in torch's own order of summation and in two that are drawn. A drawn order permutes
the rows of each batch and the terms of the sums over features that torch is asked for (linear,
matmul, mean, softmax, layer norm, cross entropy), forward and backward; the mathematics stays.

- *plain*: the largest distance between the three plain trainings. *ours*: the largest between
  the adapted and the plain training of the same order.
- loss: the largest difference on the curve. weights: norm of the difference of all final weights
  over the norm of how far they moved. log p: mean difference of the log-probabilities of the ten
  likeliest tokens at each position of a held-out batch.
- error: the same distances to one training of the plain model in float64, the largest of three.

**within**: each *ours* is at most {factor:g} times *plain*. **as exact**: that does not hold, but
each error of ours is at most {factor:g} times that of plain torch, the rule for every function
here. **beyond**: neither.

Why two questions: another order of summation changes only sums, while a function with a pullback of
its own, or a head that does not round its logits to bfloat16, also rounds in other places. What
plain torch loses to a rounding that each of its orders makes is no part of its distance to itself;
in bfloat16 that is most of it, as *plain* beside the error of plain torch shows. Then the float64
run is the judge. Three orders are few, and the trainings amplify what they start from: a ratio
near {factor:g} in one row says little by itself, and `--draw 1`, with other batches, says more.
"""
COLUMNS = ("family", "loss, first and last", "loss: ours / plain", "weights", "log p",
           "error of loss: ours / plain", "weights", "log p", "")  # fmt: skip


def verdict(row: Row) -> str:
    """Say what a family is held to, and whether it is."""
    for name, said in (("apart", WITHIN), ("error", EXACT)):
        pairs = zip(row[name]["liger_fn"], row[name]["torch"], strict=True)
        if all(ours <= FACTOR * plain for ours, plain in pairs):
            return said
    return BEYOND


def cells(row: Row) -> list[str]:
    if row["status"] != "ok":
        return [row["op"], row["note"], *[""] * (len(COLUMNS) - 3), row["status"]]
    pairs = [
        f"{ours:.1e} / {plain:.1e}"
        for name in ("apart", "error")
        for ours, plain in zip(row[name]["liger_fn"], row[name]["torch"], strict=True)
    ]
    losses = row["losses"]["torch"]
    return [row["op"], f"{losses[0]:.2f}, {losses[-1]:.2f}", *pairs, verdict(row)]


def of_dtypes(results: Results) -> dict[str, list[Row]]:
    """Rows by dtype, float32 first."""
    found: dict[str, list[Row]] = {}
    for row in results["rows"]:
        found.setdefault(row["shape"], []).append(row)
    return {dtype: found[dtype] for dtype in sorted(found, reverse=True)}


def markdown(files: list[Path]) -> str:
    """Write the page from the results of every machine."""
    text = PAGE.format(factor=FACTOR)
    for file in files:
        results = store.load(file)
        text += f"\n## {results['machine']}\n"
        for number, (name, run) in enumerate(results["runs"].items(), 1):
            told = ", ".join(f"{k} {v}" for k, v in run["versions"].items() if v != "absent")
            text += f"\n{number}. {name}, commit {run['commit']}, {run['runs']}: "
            text += f"`{run['command']}`; {told}.\n"
        for dtype, rows in of_dtypes(results).items():
            said = [verdict(row) if row["status"] == "ok" else row["status"] for row in rows]
            counts = ", ".join(f"{said.count(each)} {each}" for each in dict.fromkeys(said))
            sizes = " and ".join(dict.fromkeys(row["sizes"] for row in rows))
            ours, plain = (
                torch.tensor([r["error"][who][1] for r in rows if "error" in r]).log().mean().exp()
                for who in ("liger_fn", "torch")
            )
            text += f"\n### {dtype}\n\n{len(rows)} models, {sizes}: {counts}. "
            text += "Error of the weights, geometric mean: "
            text += f"{ours:.2g} ours, {plain:.2g} plain torch.\n\n"
            text += f"![loss curves]({picture(file, dtype, FOLDER)})\n\n"
            text += "\n".join([line(COLUMNS), "|---" * len(COLUMNS) + "|"])
            text += "".join("\n" + line(cells(row)) for row in rows) + "\n"
    return text


def picture(file: Path, dtype: str, folder: str = "") -> str:
    return f"{folder}{file.stem}-{dtype}.png"


def draw(dtype: str, rows: list[Row], file: Path) -> None:
    """Two panels for each family: its loss, and how far it is from that of plain torch."""
    from benchmarks.plots import COLORS, plt

    rows, across = [row for row in rows if row["status"] == "ok"], 7
    down = -(-len(rows) // across)
    figure, panels = plt.subplots(
        2 * down, across, figsize=(14, 3.1 * down + 0.6), layout="constrained", squeeze=False,
        gridspec_kw={"height_ratios": [3, 2] * down},
    )  # fmt: skip
    for at in range(down * across):
        above, below = (
            panels[2 * (at // across)][at % across],
            panels[2 * (at // across) + 1][at % across],
        )
        if at >= len(rows):
            above.set_axis_off()
            below.set_axis_off()
            continue
        row = rows[at]
        steps = int(row["sizes"].split()[1])
        for who, width in (("torch", 3.0), ("liger_fn", 1.0)):
            losses, gaps = row["losses"][who], row["gaps"][who]
            x = [min(steps, (i + 1) * steps / len(losses)) for i in range(len(losses))]
            name = {"torch": "plain torch", "liger_fn": "adapt(model)"}[who]
            above.plot(x, losses, color=COLORS[who], linewidth=width, label=name)
            below.semilogy(x, gaps, color=COLORS[who], linewidth=width)
        above.set_title(f"{row['op']}: {verdict(row).strip('*')}", fontsize=9)
        for axes in (above, below):
            axes.tick_params(labelsize=7, which="both")
            axes.grid(alpha=0.3)
        above.tick_params(labelbottom=False)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"{dtype}: loss, and below it the distance of losses: adapted from plain, "
                    "plain from plain in another order of summation")  # fmt: skip
    figure.savefig(file, dpi=80)
    plt.close(figure)


def report(folder: Path = HERE, page: Path = DOC) -> list[Path]:
    """Write the page and draw the figures of all that is kept in a folder."""
    files = sorted(folder.glob("*.json"))
    page.write_text(markdown(files))
    written = [page]
    for file in files:
        for dtype, rows in of_dtypes(store.load(file)).items():
            written.append(file.with_name(picture(file, dtype)))
            draw(dtype, rows, written[-1])
    return written
