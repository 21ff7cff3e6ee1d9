"""Tests that need several processes: each is one function, run by every rank of 2 and of 4.

A process starts in seconds, so the ranks of one world run all tests that were asked for, one after
another, and leave what came of them in a folder that the workers of pytest-xdist share. They speak
gloo over the loopback device, or NCCL where there is a GPU for each: on two GPUs the world of 2
speaks NCCL, and that of 4 runs on the CPU, kernels in the interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import liger_fn

WORLDS = (2, 4)
SECONDS = 60  # that a collective may wait for the other ranks
LIMIT = 900  # of all tests of one world
ROOT = Path(__file__).parents[1]


def on_ranks(body: Callable[[], None]) -> Callable[..., None]:
    """Make a test of a function that every rank runs, once for each size of world."""

    @pytest.mark.parametrize("world", WORLDS)
    def test(world: int, request: pytest.FixtureRequest, tmp_path_factory: Any) -> None:
        home = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            home = home.parent
        home = home / f"{request.module.__name__}-{world}"
        made = [i for i in request.session.items if getattr(i, "module", None) is request.module]
        names = list(dict.fromkeys(getattr(i, "originalname", i.name) for i in made))
        found = outcomes(request.module.__name__, world, home, names)[body.__name__]
        if found:
            pytest.fail(found, pytrace=False)

    test.__doc__, test.__name__, test.__module__ = body.__doc__, body.__name__, body.__module__
    test.body = body  # type: ignore[attr-defined]  # functions take attributes
    return test


def outcomes(module: str, world: int, home: Path, names: list[str]) -> dict[str, str]:
    """The traceback of each test by name, empty where it passed; whoever comes first runs them."""
    import fcntl

    home.mkdir(exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = home / "done.json"
        found: dict[str, str] = json.loads(done.read_text()) if done.exists() else {}
        while left := [n for n in names if n not in found]:
            found |= _spawn(module, world, home, left)
            done.write_text(json.dumps(found))
    return found


def _spawn(module: str, world: int, home: Path, names: list[str]) -> dict[str, str]:
    """Run the tests until one fails, after which ranks may no longer agree."""
    for old in home.glob("rank*"):
        old.unlink()
    (home / "meet").unlink(missing_ok=True)
    env = environment(world, torch.cuda.device_count())
    command = [sys.executable, "-m", "tests.ranks", module, str(home), *names]
    with (home / "log").open("wb") as log:
        ranks = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
        late = ""
        try:
            ranks.wait(LIMIT)
        except subprocess.TimeoutExpired:
            late = f"more than {LIMIT} s; "
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    found: dict[str, str] = {}
    for name in names:
        parts = [home / f"rank{rank}-{name}" for rank in range(world)]
        texts = [p.read_text() if p.exists() else "no answer" for p in parts]
        bad = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if bad:
            tail = (home / "log").read_bytes()[-2000:].decode(errors="replace")
            return {**found, name: "\n".join([late, *bad, tail])}
        found[name] = ""
    return found


def environment(world: int, gpus: int) -> dict[str, str]:
    """Of the ranks of a world: with a GPU for each, or with none."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD": str(world)}
    if gpus >= world:
        env.pop("TRITON_INTERPRET", None)
        return env
    return {**env, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def device() -> torch.device:
    gpu = torch.cuda.device_count() >= int(os.environ["WORLD"])
    return torch.device("cuda", int(os.environ.get("RANK", 0))) if gpu else torch.device("cpu")


def be(rank: int, tests: Any, home: str, names: Sequence[str]) -> None:
    """Run the tests as one rank."""
    os.environ["RANK"], world, kind = str(rank), int(os.environ["WORLD"]), device().type
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{home}/meet", rank=rank,
        world_size=world, timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    for name in names:
        torch.manual_seed(0)
        text = ""
        try:
            with liger_fn.using("reference") if kind == "cpu" else nullcontext():
                getattr(tests, name).body()
            dist.barrier()
        except Exception:
            text = traceback.format_exc()
        Path(home, f"rank{rank}-{name}").write_text(text)
        if text:
            return  # the others may wait in a collective that never comes
    dist.destroy_process_group()


def main(module: str, home: str, *names: str) -> None:
    """Import once, then become all ranks; the first that fails ends the run."""
    tests, ranks = importlib.import_module(module), []
    for rank in range(int(os.environ["WORLD"])):
        if not (pid := os.fork()):
            be(rank, tests, home, names)
            os._exit(0)
        ranks.append(pid)
    for pid in ranks:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
