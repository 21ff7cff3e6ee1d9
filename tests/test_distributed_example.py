"""The example on several processes: the losses of one process, and a checkpoint that moves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import liger_fn
from tests.test_examples import ROOT, load_example

SIZES = {"width": 128, "layers": 2, "batch": 4, "context": 16}


def launch(world: int, out: Path, *flags: str) -> list[float]:
    given = [x for name, n in SIZES.items() for x in (f"--{name}", str(n))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env.pop("TRITON_INTERPRET", None)  # whole models on the reference
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(world), "examples/train_fsdp2.py", *given, "--out", str(out), *flags],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return json.loads((out / "latest.json").read_text())["losses"]


def test_the_losses_are_those_of_one_process_and_two_ranks_hand_over_to_four(tmp_path, monkeypatch):
    llama = load_example("train_llama")
    state, text = llama.fresh(llama.Config(**SIZES, steps=4)), llama.corpus()[0]
    with liger_fn.using("reference"):
        for steps in (4, 7):
            state["config"]["steps"] = steps
            state = llama.train(state, text, torch.device("cpu"), tmp_path / "one.pt", False)
    out = tmp_path / "many"
    first = launch(2, out, "--steps", "4")
    assert first == pytest.approx(state["losses"][:4], rel=1e-5)
    assert launch(4, out, "--steps", "7", "--resume") == pytest.approx(state["losses"], rel=1e-4)
    assert [p.name for p in out.glob("step-*")] == ["step-7"]
