"""Measure every function on this machine beside others and keep what was found.

`python -m benchmarks report` then writes the page and the plots, for which no GPU is needed.
`python -m benchmarks model` trains whole models, `python -m benchmarks dpo` on pairs; kept too.
`python -m benchmarks distributed` measures what sharding costs and saves.
`python -m benchmarks convergence` trains every family of models with and without liger_fn.
`python -m benchmarks per-sample` takes the gradient of each sample by vmap and by a loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks import convergence, distributed, dpo, model, per_sample, store
from benchmarks.cases import OPS, Case, cases, label
from benchmarks.peers import Peer
from benchmarks.report import report
from benchmarks.run import LEEWAY, Budget, Row, Runner, commit, failed, machine, say, versions


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


def attempt(runner: Runner, case: Case, peers: list[Peer]) -> list[Row]:
    """Measure one case; what stops all of its peers becomes a row of the first."""
    op, shape, sizes = case
    try:
        return runner.case(op, shape, sizes, peers)
    except Exception as error:
        row = {"op": op.name, "shape": shape, "sizes": label(sizes), "peer": peers[0].name}
        say("  ", failed(error)["note"])
        return [row | failed(error)]


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, add to `<machine>.json` after each case, and return its path."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = options().parse_args(arguments)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    budget = Budget(given.seconds, given.budget, 0.0 if given.quick else given.compile_budget)
    runner = Runner(device, budget)
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    run = {"command": " ".join(["python -m benchmarks", *arguments]), "commit": given.commit,
           "dtype": str(runner.dtype), "leeway": LEEWAY[runner.dtype], "versions": versions(),
           "rates": runner.rates, "absent": runner.absent}  # fmt: skip
    file = store.path(given.out, machine(device))
    had = store.load(file)["rows"] if given.missing and file.exists() else []
    known = {store.key(row) for row in had}
    ops = [op for op in OPS if op.name in given.op]
    for case in cases(ops, given.quick, runner.gpu):
        peers = [peer for peer in case[0].peers() if peer.name in given.peers]
        peers = [peer for peer in peers if (case[0].name, case[1], peer.name) not in known]
        if peers and budget.spent():
            runner.left_out.append(f"{case[0].name} {case[1]}")
        elif peers:
            store.add(file, machine(device), began, run, attempt(runner, case, peers))
    if runner.left_out and not given.quick:
        say("out of time, --missing goes on with:", *(f"{what};" for what in runner.left_out))
    say("written:", file)
    return file


if __name__ == "__main__":
    others = {
        "report": report, "model": model.main, "dpo": dpo.main, "distributed": distributed.main,
        "convergence": lambda rest: convergence.main(rest, commit()), "per-sample": per_sample.main,
    }  # fmt: skip
    if sys.argv[1:2] and sys.argv[1] in others:
        others[sys.argv[1]](sys.argv[2:])
    else:
        main()
