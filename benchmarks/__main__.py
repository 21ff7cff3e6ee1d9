"""Measure every function on this machine beside others and keep what was found.

`python -m benchmarks report` then writes the page and the plots, for which no GPU is needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks import store
from benchmarks.cases import OPS, cases, label
from benchmarks.report import report
from benchmarks.run import LEEWAY, Budget, Runner, failed, machine, say, versions


def commit() -> str:
    """Name the commit that is checked out, + where files differ from it."""
    try:
        asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    peers = sorted({peer.name for op in OPS for peer in op.peers()})
    names = [op.name for op in OPS]
    add("--op", nargs="+", choices=names, default=names, metavar="OP", help="only these functions")
    add("--peers", nargs="+", choices=peers, default=peers, metavar="PEER", help=", ".join(peers))
    add("--quick", action="store_true", help="one shape each, torch.compile left out")
    add("--missing", action="store_true", help="only what the results of this machine lack")
    add("--seconds", type=float, default=0.05, help="for each number, at least (default 0.05)")
    add("--budget", type=float, default=360.0, help="start no case after so long (default 360)")
    add("--compile-budget", type=float, default=90.0, help="for torch.compile (default 90)")
    add("--out", type=Path, default=store.HERE, help="folder of the results, which are added to")
    add("--commit", default=commit(), help="what is measured, where git cannot tell")
    add("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    return parser


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, add to `<machine>.json` after each case, and return its path."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = options().parse_args(arguments)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    compiling = 0.0 if given.quick else given.compile_budget
    budget = Budget(min(given.seconds, 0.02) if given.quick else given.seconds, given.budget,
                    compiling)  # fmt: skip
    runner = Runner(device, budget)
    name = datetime.now(timezone.utc).isoformat(timespec="seconds")
    command = " ".join(["python -m benchmarks", *arguments])
    facts = {"command": command, "commit": given.commit, "dtype": str(runner.dtype)}
    facts |= {"leeway": LEEWAY[runner.dtype], "versions": versions(), "rates": runner.rates}
    results = {"machine": machine(device), "runs": {}, "rows": []}
    file = store.path(given.out, results["machine"])
    if file.exists():
        results = store.load(file)
    known = {store.key(row) for row in results["rows"]} if given.missing else set()
    for op, shape, sizes in cases([op for op in OPS if op.name in given.op], given.quick,
                                  runner.gpu):  # fmt: skip
        wanted = [peer for peer in op.peers() if peer.name in given.peers]
        wanted = [peer for peer in wanted if (op.name, shape, peer.name) not in known]
        if budget.spent():
            runner.left_out.append(f"{op.name} {shape}")
        if budget.spent() or not wanted:
            continue
        try:
            rows = runner.case(op, shape, sizes, wanted)
        except Exception as error:
            rows = [{"op": op.name, "shape": shape, "sizes": label(sizes), "peer": wanted[0].name,
                     **failed(error)}]  # fmt: skip
            say("  ", rows[0]["note"])
        # after each, so that a run that is cut short leaves what it has
        run = facts | {"absent": runner.absent}
        new = {"machine": results["machine"], "runs": {name: run},
               "rows": [row | {"run": name} for row in rows]}  # fmt: skip
        results = store.merge(results, new)
        store.save(results, file)
    if runner.left_out and not given.quick:
        say("out of time, --missing goes on with:", *(f"{what};" for what in runner.left_out))
    say("written:", file)
    return file


if __name__ == "__main__":
    if sys.argv[1:2] == ["report"]:
        report(sys.argv[2:])
    else:
        main()
