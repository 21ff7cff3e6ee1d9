"""The benchmark harness on small shapes of a CPU: not what it measures, only that it is right."""

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from benchmarks import __main__ as harness
from benchmarks import (
    convergence,
    convergence_page,
    distributed,
    dpo,
    fresh,
    kinds,
    model,
    models_page,
    networks,
    per_sample,
    store,
)
from benchmarks.cases import OPS, cases
from benchmarks.measure import Inputs, rates
from benchmarks.orders import Doubled, Reordered
from benchmarks.peers import Peer
from benchmarks.report import DOC, floors, markdown, report
from tests.table import ROWS

BY_NAME = {op.name: op for op in OPS}
QUICK = ("--quick", "--device", "cpu", "--commit", "c0ffee", "--out")


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its rates had been measured, and with no more calls than a median takes."""
    monkeypatch.setattr("benchmarks.measure.LEAST", 2)
    slow = {"copy": 1e9, "matmul": 1e9, "products": {"8x8x8": 1e9}}
    monkeypatch.setattr("benchmarks.measure.rates", lambda *_: slow)


def measured(out: Path, *more: str) -> store.Results:
    with liger_fn.using("reference"):
        return store.load(harness.main([*QUICK, str(out), "--seconds", "0", *more]))


def with_peers(monkeypatch: pytest.MonkeyPatch, **others: object) -> None:
    """swiglu alone, with peers that are given as functions."""
    peers = tuple(Peer(name, "torch", lambda f=f: f) for name, f in others.items())
    monkeypatch.setattr(harness, "OPS", [replace(BY_NAME["swiglu"], others=peers)])


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def test_every_function_with_kernels_has_a_shape_of_a_gpu() -> None:
    assert {row.covers for row in ROWS if row.ops} == {op.name for op in OPS if op.bench.gpu}
    assert len({op.name for op in OPS}) == len(OPS)


def test_every_op_is_measured(tmp_path: Path) -> None:
    results = measured(tmp_path, "--peers", "torch", "liger_fn")
    rows = results["rows"]
    assert {(r["op"], r["peer"]) for r in rows} == {
        (name, peer) for name in BY_NAME for peer in ("torch", "liger_fn")
    }
    for row in rows:
        assert row["status"] == "ok", row
        assert not row["overwrites"]
        assert set(row["bound"]) == set(row["error"])
        for of in (row["eager"], row["host"]):
            assert of["fwd"]["ms"] > 0
            assert of["fwd+bwd"]["ms"] > 0
    (run,) = results["runs"].values()
    assert run["commit"] == "c0ffee"
    assert run["versions"]["torch"] == torch.__version__
    page = markdown(results, "page")
    assert [text.split("\n")[0] for text in page.split("\n## ")[1:]] == list(BY_NAME)


def test_wrong_is_not_timed_and_failures_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(gate: Tensor, up: Tensor) -> Tensor:
        y = silu_times(gate, up.clone())
        up.data.zero_()
        return y

    with_peers(
        monkeypatch,
        off=lambda gate, up: torch.sigmoid(gate) * up,
        nan=lambda gate, up: silu_times(gate, up) * torch.nan,
        short=lambda gate, up: silu_times(gate, up)[1:],
        spoil=spoil,
    )
    results = measured(tmp_path)
    rows = {row["peer"]: row for row in results["rows"]}
    assert {peer: row["status"] for peer, row in rows.items()} == {
        "torch": "ok",
        "liger_fn": "ok",
        "off": "wrong",
        "nan": "wrong",
        "short": "failed",
        "spoil": "ok",
    }
    assert {peer for peer, row in rows.items() if "eager" in row} == {"torch", "liger_fn", "spoil"}
    assert rows["spoil"]["overwrites"] == ["up"]
    assert rows["short"]["note"] == "ValueError: y0 has shape (63, 256)"


def test_what_is_absent_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> None:
        raise ImportError("no such\nmodule inside")

    others = (Peer("a", "no_such_package", lacking), Peer("b", "json", lacking))
    ops = [replace(BY_NAME[name], others=others) for name in ("swiglu", "geglu")]
    monkeypatch.setattr(harness, "OPS", ops)
    results = measured(tmp_path)
    assert {row["peer"] for row in results["rows"]} == {"torch", "liger_fn"}
    (run,) = results["runs"].values()
    assert run["absent"] == {
        "no_such_package": "ImportError: No module named 'no_such_package'",
        "json": "ImportError: no such module inside",
    }
    assert markdown(results, "page").count("no_such_package (") == 1


def test_runs_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_peers(monkeypatch, other=silu_times)
    names = iter(("first", "second", "third"))

    class Clock:
        now = staticmethod(lambda _: Clock)
        isoformat = staticmethod(lambda timespec: next(names))

    monkeypatch.setattr(harness, "datetime", Clock)
    measured(tmp_path, "--peers", "torch", "liger_fn")
    results = measured(tmp_path, "--missing")
    assert {row["peer"]: row["run"] for row in results["rows"]} == {
        "torch": "first",
        "liger_fn": "first",
        "other": "second",
    }
    results = measured(tmp_path, "--peers", "torch", "liger_fn")
    assert {row["peer"]: row["run"] for row in results["rows"]} == {
        "torch": "third",
        "liger_fn": "third",
        "other": "second",
    }
    assert list(results["runs"]) == ["second", "third"]


def results_of(run: str, **sizes: str) -> store.Results:
    rows = [{"op": "f", "shape": "s", "peer": p, "sizes": n, "run": run} for p, n in sizes.items()]
    return {"machine": "m", "runs": {run: {}}, "rows": rows}


def test_merging_keeps_the_newest_and_no_sizes_of_the_past() -> None:
    old, new = results_of("1", a="8", b="8", c="8"), results_of("2", a="8", b="8")
    for merged in (store.merge(old, new), store.merge(new, old)):
        assert {row["peer"]: row["run"] for row in merged["rows"]} == {"a": "2", "b": "2", "c": "1"}
    merged = store.merge(old, results_of("2", a="9"))
    assert [(row["peer"], row["run"]) for row in merged["rows"]] == [("a", "2")]
    assert list(merged["runs"]) == ["2"]
    with pytest.raises(ValueError, match="wanted results of one machine"):
        store.merge(old, {**new, "machine": "other"})


def test_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_peers(monkeypatch)
    file = harness.main([*QUICK[1:], str(tmp_path), "--compile-budget", "0", "--seconds", "0"])
    assert {row["peer"] for row in store.load(file)["rows"]} == {"torch", "liger_fn"}
    harness.main([*QUICK, str(tmp_path / "none"), "--budget", "0"])
    assert not (tmp_path / "none").exists()


def test_the_first_shape_of_each_op_comes_first() -> None:
    found = cases(OPS, quick=False, gpu=True)
    assert [op.name for op, *_ in found[: len(OPS)]] == list(BY_NAME)
    assert len(found) == sum(len(op.bench.gpu) for op in OPS)


def test_committed_pages_are_those_of_the_committed_results() -> None:
    files = store.kept(store.HERE)
    for file in files:
        assert file.with_suffix(".md").read_text() == markdown(store.load(file), file.stem)
    assert f"<!-- floors -->\n{floors(store.load(files[-1]))}\n<!-- end -->" in DOC.read_text()


def test_committed_pages_of_models_are_those_of_the_committed_results() -> None:
    files = store.kept(store.HERE, models=True)
    for file in files:
        page = file.with_suffix(".md").read_text()
        assert page == models_page.markdown(store.load(file), file.stem)
    text = models_page.README.read_text()
    (shown,) = (file for file in files if f"/{file.stem}.png)" in text)
    assert models_page.summary(store.load(shown)) in text


@pytest.mark.parametrize("other", ["a-machine-models", "x86-64-models"])
def test_only_the_machine_that_readme_shows_writes_its_table(tmp_path, monkeypatch, other):
    (shown, *_) = store.kept(store.HERE, models=True)
    found, text = store.load(shown), models_page.README.read_text()
    monkeypatch.setattr(store, "HERE", tmp_path)
    monkeypatch.setattr(models_page, "README", tmp_path / "README.md")
    models_page.README.write_text(text)
    store.save(found, tmp_path / shown.name)
    store.save({**found, "rows": found["rows"][:1]}, tmp_path / f"{other}.json")
    report(["--out", str(tmp_path)])
    assert models_page.README.read_text() == text


@pytest.mark.parametrize(("models", "drawn"), [(False, 2), (True, 1)], ids=["functions", "models"])
def test_report_merges_and_draws(tmp_path: Path, models: bool, drawn: int) -> None:
    (file, *_) = store.kept(store.HERE, models)
    found = store.load(file)
    for name, some in (("a", found["rows"][::2]), ("b", found["rows"][1::2])):
        (tmp_path / name).write_text(json.dumps({**found, "rows": some}))
    out = tmp_path / "out"
    written = report([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)])
    assert (out / file.name).read_text() == file.read_text()
    assert written[0].read_text() == file.with_suffix(".md").read_text()
    assert [path.suffix for path in written] == [".md", *[".png"] * drawn]
    assert all(path.stat().st_size > 1000 for path in written)


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


@pytest.mark.slow  # six fresh processes
def test_sharded_heads_are_measured_on_ranks(tmp_path):
    out = tmp_path / "table.md"
    text = distributed.main(["--quick", "--ranks", "2", "--out", str(out)])
    assert out.read_text() == text
    for how in ("gathered", "sharded"):
        assert re.search(rf"\| 2 \| head, {how} \| m 64 d 16 v 32 \| [\d.]+ \| \d+ \|", text)
    why, _ = distributed.measured(2, "cpu", ("head", "sharded", {"m": 4, "d": 8, "v": 3}), 60)
    assert why.startswith("ValueError: fused_linear_ce: w must be the shard of rank 0 of 2")


def test_a_line_that_takes_too_long_is_a_row_that_says_so():
    case = ("head", "sharded", {"m": 4, "d": 8, "v": 4})
    assert distributed.measured(2, "cpu", case, 0.0) == ("not done in 0 s", "-")


# -- whole models ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("shape", ["tiny", "tiny-gemma"])
def test_a_whole_model_is_trained_in_each_variant(shape):
    pytest.importorskip("transformers")
    variants = ("plain", "liger_fn", "liger_fn, bf16 sums")
    plain, *others = (model.train(shape, name, 2, 32, 1) for name in variants)
    for ours in others:
        # bfloat16, another order of sums
        for of in ("losses", "norm"):
            got, want = (torch.tensor(found[of]) for found in (ours, plain))
            torch.testing.assert_close(got, want, rtol=2e-3, atol=0)
        assert ours["peak GiB"] == max(ours["GiB"]) > 0
    assert re.match(r"\| liger_fn \| 32 \| \d+ \| [\d.]+ \| ", model.line(others[0]))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("aten::addmm", "products"),
        ("ncclDevKernel_AllGather_RING_LL", "collectives"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("_rope_kernel", "fused functions"),
        ("triton_poi_fused_add_0", "fused functions"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "the rest of torch"),
        ("aten::_fused_adamw_", "optimizer"),
    ],
)
def test_kernels_are_known_by_their_names(name, wanted):
    assert kinds.kind(name) == wanted


def test_the_time_of_a_step_is_divided_by_kind():
    w, x = torch.randn(512, 512), torch.randn(512, 512)
    found = kinds.of_step(lambda: (w @ x).relu_(), torch.device("cpu"))
    assert found["products"] > found["the rest of torch"] > found["attention"] == 0
    rows = [{"variant": "a", "kinds": dict.fromkeys(kinds.KINDS, 0.0015)}, {"variant": "b"}]
    assert kinds.table(rows).splitlines()[-1] == "| a" + " | 2" * len(kinds.KINDS) + " |"
    assert kinds.table(rows[1:]) == ""


def test_shapes_of_real_models_have_their_number_of_parameters():
    hf = pytest.importorskip("transformers")
    sizes = {}
    for name in ("llama-3-8b", "llama-3.2-1b", "qwen-2.5-7b", "gemma-2-9b"):
        kind, options = networks.SHAPES[name]
        with torch.device("meta"):
            made = hf.AutoModelForCausalLM.from_config(getattr(hf, kind)(**options))
        made.tie_weights()
        sizes[name] = sum(p.numel() for p in made.parameters())
    assert sizes == {
        "llama-3-8b": 8_030_261_248,
        "llama-3.2-1b": 1_235_814_400,
        "qwen-2.5-7b": 7_615_616_512,
        "gemma-2-9b": 9_241_705_984,
    }


@pytest.mark.slow  # nine fresh processes
def test_ranks_have_the_losses_and_gradients_of_one_process(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # whole models on the reference
    given = ["--shape", "tiny", "--batch", "4", "--dtype", "float32", "--out", str(tmp_path)]
    (alone,) = model.main([*given, "--variant", "plain"])
    every = [name for name in model.SHARDED if name != "Liger-Kernel"]
    for found in model.main([*given, "--ranks", "2", "--variant", *every]):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)
    (file,) = store.kept(tmp_path, models=True)
    shapes = {row["shape"]: row["peer"] for row in store.load(file)["rows"]}
    assert [*shapes] == [f"tiny, 4 x 32, float32{more}" for more in ("", ", FSDP2 over 2")]


@pytest.mark.slow  # Inductor, in fresh processes: what it warns of is its own affair
def test_compiled_layers_train_alike(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = ["--shape", "tiny", "--out", str(tmp_path), "--variant"]
    plain, *compiled = model.main([*given, "plain", "plain, compile", "liger_fn, compile"])
    for found in compiled:
        assert found["losses"] == pytest.approx(plain["losses"], rel=2e-3)


@pytest.mark.parametrize(
    ("gpu", "tried"),
    [(0.0, [4096, 8192, 16384, 12288, 10240, 11264]), (112.0, [4096, 8192, 11264])],
    ids=["doubled", "as memory grows"],
)
def test_the_longest_context_is_found_to_an_eighth(monkeypatch, gpu, tried):
    seen = []

    def pretend(command, variant, ranks, limit):
        context = int(command[command.index("--context") + 1])
        seen.append(context)
        if variant == "broken":
            return {"variant": variant, "error": "ImportError: no"}
        if context > {"plain": 11_500, "small": 0}[variant]:
            return {"variant": variant, "error": "OutOfMemoryError: CUDA out of memory."}
        return {"context": context, "peak GiB": 50 + context / 200, "GPU GiB": gpu}

    monkeypatch.setattr(model, "fresh", pretend)
    args = model.asked(["--longest", "--context", "4096", "--batch", "1"])
    assert model.longest(args, "plain")["context"] == 11264
    assert seen == tried
    assert model.longest(args, "small")["error"] == "none fits"
    assert model.longest(args, "broken")["error"] == "ImportError: no"


def test_a_process_tells_its_result_or_why_there_is_none(monkeypatch, capsys):
    def pretend(stdout="", stderr="", status=1):
        def run(command, **_):
            if status is None:
                raise subprocess.TimeoutExpired(command, 3)
            assert command[-4:] == ["model", "--variant", "v", "--inside"]
            return subprocess.CompletedProcess(command, status, stdout, stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return fresh.fresh(["model"], "v", limit=3)

    fresh.inside("v", lambda: {"peak GiB": 1.0})
    assert pretend("noise\n" + capsys.readouterr().out, status=0)["peak GiB"] == 1.0
    monkeypatch.setattr(os, "_exit", lambda status: None)

    def fail():
        raise MemoryError("out of | memory\nand more")

    fresh.inside("v", fail)
    assert pretend(capsys.readouterr().out)["error"] == "MemoryError: out of / memory"
    assert pretend("", "first\nlast\n") == {"variant": "v", "error": "last"}
    assert pretend(status=7) == {"variant": "v", "error": "status 7"}
    assert pretend(status=None) == {"variant": "v", "error": "more than 3 s"}
    assert model.line(pretend("", "last")).startswith("| v | last | ")
    assert dpo.line(pretend("", "last")).startswith("| v | last | ")


TRAINED = {"tokens/s": 1000.0, "peak GiB": 65.25, "seconds": [1.0, 2.0, 0.5], "GiB": [1.0] * 3,
           "losses": [3.14159, 2.71828], "norm": 1.0, "GPU GiB": 139.8}  # fmt: skip
PREFERRED = {"seconds": 0.25, "tokens/s": 500.0, "peak GiB": 13.0, "losses": [0.5]}
FULL = {"error": "OutOfMemoryError: CUDA out of memory."}


def test_whole_models_are_kept_replaced_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv(fresh.ALLOCATOR, "expandable_segments:True")
    found = {"plain": TRAINED, "liger_fn": TRAINED, "Liger-Kernel": FULL}

    def pretend(command, variant, *_):
        context = int(command[command.index("--context") + 1])
        return {"variant": variant, "context": context, **found[variant]}

    monkeypatch.setattr(model, "fresh", pretend)
    monkeypatch.setattr(dpo, "fresh", lambda _, v, limit: {"variant": v, **PREFERRED})
    names = iter(("1", "2", "3", "4", "5"))

    class Clock:
        now = staticmethod(lambda _: Clock)
        isoformat = staticmethod(lambda timespec: next(names))

    monkeypatch.setattr(fresh, "datetime", Clock)
    given = ["--shape", "tiny", "--out", str(tmp_path), "--commit", "c0ffee", "--variant"]
    assert [row.get("error") for row in model.main([*given, *found])] == [None, None, FULL["error"]]
    found["plain"] = {**TRAINED, "tokens/s": 2000.0}
    model.main([*given, "plain", "--steps", "9"])
    model.main([*given, "plain", "--context", "64"])
    monkeypatch.setattr(model, "longest", lambda _, v: {"variant": v, **TRAINED, "context": 99})
    model.main([*given, "plain", "--longest"])
    dpo.main([*given, "TRL", "TRL, adapted"])

    (file,) = store.kept(tmp_path, models=True)
    results = store.load(file)
    assert {(r["shape"], r["peer"], r["run"], r["steps"]) for r in results["rows"]} == {
        ("tiny, 2 x 32", "plain", "2", 9),
        ("tiny, 2 x 32", "liger_fn", "1", 3),
        ("tiny, 2 x 32", "Liger-Kernel", "1", 3),
        ("tiny, 2 x 64", "plain", "3", 3),
        ("tiny, 1 x the longest", "plain", "4", 3),
        ("tiny, 2 pairs of 2 x 32", "TRL", "5", 5),
        ("tiny, 2 pairs of 2 x 32", "TRL, adapted", "5", 5),
    }
    assert next(row["error"] for row in results["rows"] if "error" in row) == FULL["error"]
    run = results["runs"]["5"]
    assert run["command"].startswith(
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m benchmarks dpo --shape tiny"
    )
    assert (run["commit"], run["versions"]["torch"]) == ("c0ffee", torch.__version__)

    page, plot = report(["--out", str(tmp_path)])
    text = page.read_text()
    assert re.findall(r"\n## (.*)", text) == [
        "tiny, 2 x 32", "tiny, 2 x 64", "tiny, 1 x the longest", "DPO: tiny, 2 pairs of 2 x 32",
    ]  # fmt: skip
    assert "| plain | 32 | 2000 | 65.2 | 1.00 s, 1.0 | " in text
    assert "| Liger-Kernel | OutOfMemoryError: CUDA out of memory. | | | | | | | | 3 | 1 |" in text
    assert "| plain | 99 | 1000 |" in text
    assert "| TRL, adapted | 250 | 500 | 13.0 | 0.5000 | 5 | 5 |" in text
    assert plot.stat().st_size > 1000
    assert models_page.summary(results).splitlines()[3:-1] == [
        "| tiny, 2 x 32 | 2000, 65.2 | out of memory | 1000, 65.2 | - |",
        "| tiny, 2 x 64 | 2000, 65.2 | - | - | - |",
        "| tiny, 1 x the longest | 99 tokens | - | - | - |",
        "| tiny, 2 pairs of 2 x 32, TRL's DPOTrainer | 500, 13.0 | - | 500, 13.0 | - |",
    ]


@pytest.mark.usefixtures("plain")
def test_a_step_of_preference_is_that_of_trl(monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(dpo.EXAMPLES))
    trl, *others = (
        dpo.train("tiny", name, 2, 32, 2) for name in ("TRL", "TRL, logits", "liger_fn")
    )
    for found in others:
        assert found["losses"] == pytest.approx(trl["losses"], rel=1e-2)


# -- convergence -----------------------------------------------------------------------------------


SUMS = {
    "linear": lambda x, w: F.linear(x, w[:5]),
    "linear with bias": lambda x, w: F.linear(x, w[:5], w[0, :5]),
    "matmul": lambda x, w: torch.matmul(x, w),
    "@": lambda x, w: x @ w,
    "mean": lambda x, w: x.pow(2).mean(-1, keepdim=True) * w.sum(),
    "softmax": lambda x, w: F.softmax(x, dim=-1) * w.sum(),
    "layer_norm": lambda x, w: F.layer_norm(x, w.shape[:1], w[0], w[1], 1e-5),
    "cross_entropy": lambda x, w: w.sum() * F.cross_entropy(x, torch.tensor([3, -100, 39, 0])),
    "grouped_mm": lambda x, w: F.grouped_mm(x, w[None], offs=torch.tensor([4], dtype=torch.int32)),
}


@pytest.mark.parametrize("name", SUMS)
def test_another_order_of_summation_is_the_same_mathematics(name):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 40, generator=g), torch.randn(40, 40, generator=g)

    def results(seed: int) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        with Reordered(seed):
            y = SUMS[name](*leaves)
            return [y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)]

    one, other = results(1), results(2)
    assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_float64_stays_float64():
    x = torch.randn(3, dtype=torch.float64)
    with Doubled():
        for y in (x.float(), x.to(torch.float32), F.softmax(x, dim=-1, dtype=torch.float32)):
            assert y.dtype == torch.float64


@pytest.mark.usefixtures("plain")
def test_a_family_converges_as_plain_torch_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out, page = tmp_path / "results", tmp_path / "page.md"
    command = ["--families", "llama", "--quick", "--processes", "1", "--out", str(out)]
    file = convergence.main([*command, "--page", str(page)], "c0ffee")
    rows = {row["shape"]: row for row in store.load(file)["rows"]}
    for dtype, allowed in (("float32", 1e-4), ("bfloat16", 0.3)):
        row = rows[dtype]
        assert row["status"] == "ok", row
        assert row["losses"]["torch"][-1] < row["losses"]["torch"][0]
        for who in ("liger_fn", "torch"):
            assert 0 < row["apart"][who][1] < allowed
            assert 0 < row["error"][who][1] < allowed
        assert f"{file.stem}-{dtype}.png" in page.read_text()
        assert (out / f"{file.stem}-{dtype}.png").stat().st_size > 1000


def test_verdicts_of_convergence() -> None:
    def said(apart: float, error: float) -> str:
        distances = {"liger_fn": [1.0, apart, 0.0], "torch": [1.0, 1.0, 0.0]}
        errors = {"liger_fn": [1.0, error, 0.0], "torch": [1.0, 1.0, 0.0]}
        return convergence_page.verdict({"apart": distances, "error": errors})

    assert said(2.0, 9.0) == convergence_page.WITHIN
    assert said(2.1, 2.0) == convergence_page.EXACT
    assert said(2.1, 2.1) == said(float("nan"), float("nan")) == convergence_page.BEYOND


def test_the_committed_page_of_convergence_is_that_of_the_committed_results() -> None:
    files = sorted(convergence_page.HERE.glob("*.json"))
    assert convergence_page.DOC.read_text() == convergence_page.markdown(files)


@pytest.mark.usefixtures("plain")
def test_gradients_of_samples_are_taken_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    per_sample.main([])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 3 * len(per_sample.NAMES)
    assert all(float(line.split("|")[4]) < 1e-2 for line in lines)
