"""Results of a machine: one JSON file that several runs fill."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

Results = dict[str, Any]  # machine; runs by the time they began; rows, each naming its run
HERE = Path(__file__).parent / "results"


def path(folder: Path, machine: str) -> Path:
    return folder / (re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-") + ".json")


def kept(folder: Path, models: bool = False) -> list[Path]:
    """The files of functions, or those of whole models."""
    return [f for f in sorted(folder.glob("*.json")) if f.stem.endswith("-models") == models]


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["op"], row["shape"], row["peer"]


def merge(*several: Results) -> Results:
    """Join results of one machine: of each op, shape and peer, what was measured last.

    Sizes of a shape that are no longer measured go, and so do runs of which no row is left.
    """
    machines = {each["machine"] for each in several}
    if len(machines) != 1:
        raise ValueError(f"merge: wanted results of one machine, got {sorted(machines)}")
    last: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in sorted((r for each in several for r in each["rows"]), key=lambda row: row["run"]):
        last.pop(key(row), None)  # to the end, where the newest is
        last[key(row)] = row
    sizes = {key(row)[:2]: row["sizes"] for row in last.values()}
    rows = [row for row in last.values() if row["sizes"] == sizes[key(row)[:2]]]
    runs = {name: run for each in several for name, run in each["runs"].items()}
    used = {row["run"] for row in rows}
    return {
        "machine": machines.pop(),
        "runs": {name: runs[name] for name in sorted(runs) if name in used},
        "rows": sorted(rows, key=key),
    }


def rounded(value: Any) -> Any:
    """The same with six digits of each number, which is more than is known."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def save(results: Results, file: Path) -> None:
    """Write one line for each run and each row; whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    runs = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in results["runs"].items())
    rows = ",\n".join(f"  {json.dumps(rounded(row))}" for row in results["rows"])
    text = f'{{\n "machine": {json.dumps(results["machine"])},\n "runs": {{\n{runs}\n }},\n'
    part = file.with_suffix(".part")
    part.write_text(f'{text} "rows": [\n{rows}\n ]\n}}\n')
    part.replace(file)


def load(file: Path) -> Results:
    return json.loads(file.read_text())


def join(file: Path, more: Results) -> None:
    """Add to what a file holds."""
    save(merge(*([load(file)] if file.exists() else []), more), file)


def add(file: Path, machine: str, began: str, run: dict[str, Any], rows: list[Any]) -> None:
    """Add rows of a run, after each case: a run that is cut short leaves what it has."""
    rows = [row | {"run": began} for row in rows]
    join(file, {"machine": machine, "runs": {began: run}, "rows": rows})
