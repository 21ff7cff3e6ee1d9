"""One variant of a benchmark in a process of its own, or in one on each rank, and what it found.

The same command runs again with --inside: there it prints its result, or why it has none, as one
line of JSON, which becomes a row of `<machine>-models.json`.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import store
from benchmarks.run import commit, machine, versions

Found = dict[str, Any]
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # decides with the machine what fits


def options(name: str, doc: str | None) -> argparse.ArgumentParser:
    """What every command has that trains whole models."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--limit", type=float, default=600.0, help="seconds that one process may take")
    add("--out", type=Path, default=store.HERE, help="folder of the results, which are added to")
    add("--commit", default=commit(), help="what is measured, where git cannot tell")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def place(ranks: int) -> torch.device:
    """GPUs, where there is one for each rank."""
    return torch.device("cuda" if torch.cuda.device_count() >= ranks else "cpu")


@functools.cache
def named(device: torch.device) -> str:
    """The machine; this process does not open a GPU, whose memory is for those that train."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        return other.submit(machine, device).result()


def keeper(
    name: str, argv: list[str], args: argparse.Namespace, sizes: str, ranks: int = 1
) -> Callable[[Found], None]:
    """What adds a row to the results of this machine; it names the sizes, also if it failed."""
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    where = named(place(ranks)) + ", models"
    told = [f"{ALLOCATOR}={os.environ[ALLOCATOR]}"] if ALLOCATOR in os.environ else []
    command = " ".join([*told, "python -m benchmarks", name, *argv])
    run = {"command": command, "commit": args.commit, "versions": versions()}

    def keep(found: Found) -> None:
        row = row_of(name, args, sizes, found)
        store.add(store.path(args.out, where), where, began, run, [row])

    return keep


def row_of(name: str, args: argparse.Namespace, sizes: str, found: Found) -> Found:
    """What one process found, as results have it."""
    row = {"op": name, "shape": f"{args.shape}, {sizes}", "sizes": sizes, "peer": found["variant"],
           "context": args.context, "steps": args.steps}  # fmt: skip
    return row | {k: v for k, v in found.items() if k != "variant"}


def fresh(command: list[str], variant: str, ranks: int = 1, limit: float = 600.0) -> Found:
    """Run `python -m benchmarks *command` inside; `limit` in seconds."""
    start = ["-m"]
    if ranks > 1:
        start = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "-m",
        ]
    line = [sys.executable, *start, "benchmarks", *command, "--variant", variant, "--inside"]
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str((os.cpu_count() or 1) // ranks or 1)}
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, check=False, timeout=limit, env=env | os.environ
        )
    except subprocess.TimeoutExpired:
        return {"variant": variant, "error": f"more than {limit:.0f} s"}
    told = [text for text in done.stdout.splitlines() if text.startswith('{"variant"')]
    if told:
        found: Found = json.loads(told[0])  # of ranks that fail, the first one knows why
        return found
    last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return {"variant": variant, "error": last[:200]}


def inside(variant: str, work: Callable[[], Found | None]) -> None:
    """Print what `work` finds; None from ranks that leave that to another."""
    try:
        found = work()
    except Exception as error:  # a row of the table, whatever it is
        traceback.print_exc()
        text = (str(error).strip().splitlines() or [""])[0].replace("|", "/")
        print(json.dumps({"variant": variant, "error": f"{type(error).__name__}: {text}"[:200]}))
        sys.stdout.flush()
        os._exit(1)  # the other ranks may wait for this one in a collective
    else:
        if found is not None:
            print(json.dumps({"variant": variant, **found}), flush=True)
