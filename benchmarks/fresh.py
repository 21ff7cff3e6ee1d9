"""One variant of a benchmark in a process of its own, or in one on each rank, and what it found.

The same command runs again with --inside: there it prints its result, or why it has none, as one
line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

Found = dict[str, Any]


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
