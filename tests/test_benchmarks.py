"""The benchmark harness on tiny shapes of a CPU: not what it measures, only that it is right."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import liger_fn
from benchmarks import __main__ as harness
from benchmarks import distributed
from benchmarks.cases import OPS, Op, numbers
from benchmarks.measure import Inputs, rates
from benchmarks.peers import Peer

BY_NAME = {op.name: op for op in OPS}


def tiny(op: Op) -> Op:
    """The op at the sizes of its tests alone."""
    return replace(op, bench=replace(op.bench, cpu=[op.row.sizes]))


def measured(
    ops: list[Op], out: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[list, str]:
    monkeypatch.setattr(harness, "OPS", [tiny(op) for op in ops])
    slow = {"copy": 1e9, "matmul": 1e9, "products": {"8x8x8": 1e9}}
    monkeypatch.setattr(harness.measure, "rates", lambda *_: slow)
    with liger_fn.using("reference"):
        page = harness.main(["--quick", "--device", "cpu", "--out", str(out), *more])
    report = json.loads(page.with_suffix(".json").read_text())
    assert report["versions"]["torch"] == torch.__version__
    return report["rows"], page.read_text()


def test_every_op_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, page = measured(OPS, tmp_path, monkeypatch)
    both = ("liger_fn", "torch")
    assert {(r["op"], r["peer"]) for r in rows} == {(n, p) for n in BY_NAME for p in both}
    for row in rows:
        assert row["status"] == "ok", row
        assert row["eager"]["fwd"]["ms"] > 0
        assert row["eager"]["fwd+bwd"]["ms"] > 0
        assert not row["overwrites"]
        assert set(row["bound"]) == set(row["error"])
    hosts = [numbers(r["sizes"]) for r in rows if r.get("note") == "host"]
    assert hosts == [numbers(op.bench.host) for op in OPS if op.bench.host for _ in both]
    assert [text.split(",")[0] for text in page.split("\n## ")[1:]] == list(BY_NAME)


def test_only_the_ops_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = measured(OPS, tmp_path, monkeypatch, "--op", "rope", "swiglu")
    assert {row["op"] for row in rows} == {"swiglu", "rope"}


def test_wrong_is_not_timed_and_failures_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nan(gate: Tensor, up: Tensor) -> Tensor:
        return gate * up * torch.nan

    def short(gate: Tensor, up: Tensor) -> Tensor:
        return (gate * up)[1:]

    def spoil(gate: Tensor, up: Tensor) -> Tensor:
        y = torch.nn.functional.silu(gate) * up.clone()
        up.data.zero_()
        return y

    def absent() -> None:
        raise ImportError("no | such\nthing")

    others = [
        Peer("off", "torch", lambda: lambda gate, up: torch.sigmoid(gate) * up),
        Peer("nan", "torch", lambda: nan),
        Peer("short", "torch", lambda: short),
        Peer("spoil", "torch", lambda: spoil),
        Peer("absent", "torch", absent),
        Peer("not installed", "no_such_package", absent),
    ]
    op = BY_NAME["swiglu"]
    op = replace(op, others=tuple(others), bench=replace(op.bench, host=None))
    rows, page = measured([op], tmp_path, monkeypatch)
    by_peer = {row["peer"]: row for row in rows if row["peer"] != "liger_fn"}
    assert {peer: row["status"] for peer, row in by_peer.items()} == {
        "torch": "ok",
        "off": "wrong",
        "nan": "wrong",
        "short": "failed",
        "spoil": "ok",
        "absent": "failed",
    }
    assert {peer for peer, row in by_peer.items() if "eager" in row} == {"torch", "spoil"}
    assert by_peer["spoil"]["overwrites"] == ["up"]
    assert by_peer["short"]["note"] == "ValueError: y0 has shape (1, 3, 5)"
    assert "ImportError: no / such thing |" in page


def test_inputs_come_back() -> None:
    x, w, dy = torch.randn(3, 4), torch.randn(4), torch.randn(3, 4)
    inputs = Inputs(BY_NAME["rms_norm"], ({"x": x, "w": w}, (dy,)))
    for t in (inputs.untracked[0], inputs.upstream[0]):
        t.zero_()
    assert inputs.overwritten() == {"x", "dy"}
    inputs.restore()
    assert inputs.overwritten() == set()
    assert [t.requires_grad for t in inputs.untracked] == [False, True]


def test_rates() -> None:
    found = rates(torch.device("cpu"), torch.float32, 0.0)
    assert found["copy"] > 0
    assert found["matmul"] == max(found["products"].values()) > 0


@pytest.mark.slow  # four fresh processes
def test_sharded_heads_are_measured_on_ranks(tmp_path):
    out = tmp_path / "table.md"
    text = distributed.main(["--quick", "--ranks", "2", "--out", str(out)])
    assert out.read_text() == text
    for how in ("gathered", "sharded"):
        assert re.search(rf"\| 2 \| head, {how} \| m 64 d 16 v 32 \| [\d.]+ \| \d+ \|", text)
