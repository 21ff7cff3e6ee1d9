"""The examples, on models of 0.1 M parameters: what they write, what train_llama survives."""

import importlib.util
import re
import signal
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import liger_fn
from tests.adapted import ALL, nodes

ROOT = Path(__file__).parents[1]
TINY = ["--device", "cpu", "--width", "64", "--layers", "2", "--batch", "2", "--context", "32"]


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclass looks its module up
    spec.loader.exec_module(module)
    return module


llama = load_example("train_llama")
CONFIG = llama.Config(width=64, layers=2, batch=2, context=32, steps=6)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """No interpreted kernels, one thread (tensors are small), one reading, short samples."""
    corpus, generate, threads = llama.corpus(), llama.generate, torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, liger_fn.using("reference"):
        patch.setattr(llama, "corpus", lambda: corpus)
        patch.setattr(llama, "generate", lambda p, prompt, _, c: generate(p, prompt, 20, c))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield
    torch.set_num_threads(threads)


def checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def run(folder: Path, *flags: str) -> dict:
    llama.main([*TINY, "--steps", "6", "--out", str(folder), *flags])
    return checkpoint(folder)


def press_ctrl_c_in_step(patch: pytest.MonkeyPatch, wanted: int) -> None:
    batch_at = llama.batch_at

    def pressing(text, step, config, device):
        if step == wanted:
            signal.raise_signal(signal.SIGINT)
        return batch_at(text, step, config, device)

    patch.setattr(llama, "batch_at", pressing)


def gradients(dtype: torch.dtype, functions: str) -> tuple[torch.Tensor, torch.Tensor]:
    config = llama.replace(CONFIG, functions=functions)
    params = {k: p.to(dtype).requires_grad_() for k, p in llama.fresh(config)["params"].items()}
    batch = llama.batch_at(llama.corpus()[0], 0, config, torch.device("cpu"))
    value = llama.loss(params, batch, config=config)
    grads = torch.autograd.grad(value, [*params.values()])
    return value.detach(), torch.cat([g.flatten() for g in grads])


def assert_as_exact(oracle: torch.Tensor, plain: torch.Tensor, liger: torch.Tensor) -> None:
    """Hold the norm of the error to twice that of plain torch, plus one ulp."""
    error, by_torch = (liger - oracle).norm(), (plain - oracle).norm()
    assert error <= 2 * by_torch + torch.finfo(torch.float32).eps * oracle.norm()


def test_a_run_leaves_checkpoint_curve_and_sample(tmp_path, capsys):
    run(tmp_path / "a" / "b", "--steps", "40")
    state = checkpoint(tmp_path / "a" / "b")
    assert len(state["losses"]) == len(state["seconds"]) == 40
    assert sum(state["losses"][-5:]) / 5 < state["losses"][0] - 1.0
    assert (tmp_path / "a" / "b" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in (tmp_path / "a" / "b").iterdir()} == {"checkpoint.pt", "loss.png"}
    shown = capsys.readouterr()
    assert re.search(r"loss \d\.\d+ -> \d\.\d+, held out \d\.\d+ nats per byte", shown.out)
    assert "\ndef " in shown.out
    assert re.search(r"40/40 .*loss \d\.\d+, [\d,]+ tok/s, \d\.\d+ GiB", shown.err)


def test_first_loss_is_that_of_a_uniform_guess():
    value, _ = gradients(torch.float64, "plain")
    assert abs(value - torch.tensor(256.0).log()) < 0.2


def test_text_is_python_source_and_split():
    text, held = llama.corpus()
    assert 0.02 < len(held) / len(text) < 0.15
    assert b"import " in bytes(held[:100_000].tolist())


def test_batch_depends_on_seed_and_step_only():
    text, device = llama.corpus()[0], torch.device("cpu")
    first = llama.batch_at(text, 3, CONFIG, device)
    assert first.shape == (2, 33)
    assert torch.equal(first, llama.batch_at(text, 3, CONFIG, device))
    assert not torch.equal(first, llama.batch_at(text, 4, CONFIG, device))
    other = llama.replace(CONFIG, seed=1)
    assert not torch.equal(first, llama.batch_at(text, 3, other, device))


def test_loss_and_gradient_are_as_exact_as_plain_torch():
    oracle, plain, liger = (
        gradients(torch.float64, "plain"),
        gradients(torch.float32, "plain"),
        gradients(torch.float32, "liger"),
    )
    for triple in zip(oracle, plain, liger, strict=True):
        assert_as_exact(*triple)


def test_plain_run_stays_beside_the_default_one(tmp_path):
    liger, plain = run(tmp_path / "liger"), run(tmp_path / "plain", "--plain")
    # the oracle is the same training in float64: how far float32 may drift is measured by plain's
    exact = llama.fresh(llama.replace(CONFIG, functions="plain"))
    exact["params"] = {k: p.double() for k, p in exact["params"].items()}
    path, text = tmp_path / "exact.pt", llama.corpus()[0]
    exact = llama.train(exact, text, torch.device("cpu"), path, False)
    runs = exact, plain, liger
    assert_as_exact(*(torch.tensor(r["losses"], dtype=torch.float64) for r in runs))
    assert_as_exact(*(torch.cat([p.flatten() for p in r["params"].values()]) for r in runs))


def test_resumed_run_equals_a_straight_one(tmp_path, capsys):
    straight = run(tmp_path / "straight")
    with pytest.MonkeyPatch.context() as patch:
        press_ctrl_c_in_step(patch, 2)
        with pytest.raises(SystemExit) as stop:
            run(tmp_path / "resumed")
    assert stop.value.code == 130
    out = capsys.readouterr().out
    assert "stopped after 3 steps" in out
    assert out.rstrip().endswith(f"--steps 6 --out {tmp_path / 'resumed'} --resume")
    assert len(checkpoint(tmp_path / "resumed")["losses"]) == 3
    assert not (tmp_path / "resumed" / "loss.png").exists()
    resumed = run(tmp_path / "resumed", "--resume")
    assert resumed["losses"] == straight["losses"]
    assert resumed["params"].keys() == straight["params"].keys()
    assert all(torch.equal(p, straight["params"][k]) for k, p in resumed["params"].items())
    moments, others = resumed["optimizer"]["state"], straight["optimizer"]["state"]
    assert all(torch.equal(v, others[i][k]) for i, s in moments.items() for k, v in s.items())


def test_second_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT)  # what runs in the background may ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with llama.CtrlC() as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_finished_run_resumes_to_its_results(tmp_path):
    done = run(tmp_path)
    (tmp_path / "loss.png").unlink()
    again = run(tmp_path, "--resume")
    assert again["losses"] == done["losses"]
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "foreign", "no entry"])
def test_damaged_checkpoint_is_named_with_a_cure(tmp_path, harm):
    run(tmp_path)
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    if harm == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif harm == "flip":
        at = len(whole) // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "foreign":
        torch.save([1, 2], path)
    else:
        torch.save({"config": {}}, path)
    with pytest.raises(SystemExit, match=r"checkpoint\.pt is damaged \(.+\): delete it and start"):
        run(tmp_path, "--resume")


def test_checkpoint_of_another_run_is_refused(tmp_path):
    run(tmp_path)
    message = r"is of another run \(steps 6, not 7; seed 0, not 1\): resume with its flags"
    with pytest.raises(SystemExit, match=message):
        run(tmp_path, "--resume", "--steps", "7", "--seed", "1")


def test_nothing_to_resume(tmp_path):
    with pytest.raises(SystemExit, match=r"checkpoint\.pt does not exist: start without --resume"):
        run(tmp_path, "--resume")


def test_failed_write_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    llama.save(path, {"losses": [1.0]})

    def full_disk(state, file):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        llama.save(path, {"losses": [2.0]})
    assert torch.load(path, weights_only=True) == {"losses": [1.0]}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    plain = llama.PLAIN._replace(head_loss=lambda w, x, y: (w.sum() + x.sum()) * torch.nan)
    monkeypatch.setattr(llama, "PLAIN", plain)
    with pytest.raises(SystemExit, match="the loss is nan in step 1"):
        run(tmp_path, "--plain")
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps must be from 1 to 1000000000, got 0"),
        (["--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["--context", "1"], "--context must be from 2 to 65536, got 1"),
        (["--batch", "-1"], "--batch must be from 1 to 1000000, got -1"),
        (["--layers", "0"], "--layers must be from 1 to 1000, got 0"),
        (["--seed", "-1"], "--seed must be from 0 to 2147483648, got -1"),
        (["--width", "96"], "--width must be a multiple of 64, got 96"),
        (["--width", "32"], "--width must be from 64 to 65536, got 32"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--compare", "--plain"], "drop --plain and --resume"),
        (["--compare", "--resume"], "drop --plain and --resume"),
        (["--out", __file__], "--out: "),
        (["--step", "3"], "unrecognized arguments: --step 3"),
    ],
)
def test_bad_arguments(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        llama.main([*TINY, "--out", str(tmp_path), *flags])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is there")
def test_absent_gpu(capsys):
    with pytest.raises(SystemExit):
        llama.main(["--device", "cuda"])
    assert "--device cuda: torch finds no CUDA device" in capsys.readouterr().err


def test_compare_reports_both_variants(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the two processes need no installed package
    llama.main([*TINY, "--steps", "3", "--out", str(tmp_path), "--compare"])
    out = capsys.readouterr().out
    assert re.search(r"last loss +seconds +ms/step +peak MiB\n", out)
    for name in ("liger", "plain"):
        assert re.search(rf"^{name} +\d\.\d+ +\d+\.\d +\d+\.\d +\d+$", out, re.MULTILINE)
        assert len(checkpoint(tmp_path / name)["losses"]) == 3
    assert re.search(r"largest difference of loss: (\d\.\de[-+]\d\d) in 10 steps, \1 in all\n", out)
    assert re.search(r"largest difference of a parameter: \d\.\de[-+]\d\d in \S+\n", out)


def test_compare_names_the_run_that_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise SystemExit(1)")
    with pytest.raises(SystemExit, match=r"the liger run failed: .*train_llama\.py"):
        llama.main([*TINY, "--out", str(tmp_path), "--compare"])


@pytest.mark.parametrize("functions", ["liger", "plain"])
def test_compiled_loss_is_one_graph(tmp_path, monkeypatch, functions):
    # inductor takes half a minute and is tested with the functions; here only the graph is at stake
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    flags = ["--plain"] if functions == "plain" else []
    eager = run(tmp_path / "eager", *flags)["losses"]
    compiled = run(tmp_path / "compiled", "--compile", *flags)["losses"]
    assert compiled == pytest.approx(eager, rel=1e-5)


# -- the examples on top of it


@pytest.fixture(scope="module")
def dpo(quick):
    dpo = load_example("dpo_loop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpo, "corpus", llama.corpus)
        patch.setattr(dpo, "MODEL", CONFIG)
        patch.setattr(dpo, "FILES", 12)
        yield dpo


def test_pairs_are_lines_of_docstrings_and_of_code(dpo):
    docs, code = dpo.lines()
    assert not set(docs) & set(code)
    assert all("(" in line for line in code)
    pairs = dpo.make_pairs()
    b = pairs.y.shape[0] // 2
    row = pairs.y[b][pairs.y[b] != dpo.IGNORE]
    assert (
        bytes(row.tolist()).decode()
        == bytes(pairs.tokens[b][1:].tolist()).decode().strip("\0") + "\n"
    )
    assert "(" in bytes(row.tolist()).decode()


def test_the_margin_rises_and_its_curve_is_kept(dpo, tmp_path, capsys):
    flags = ["--warmup", "2", "--steps", "6", "--pairs", "4", "--out", str(tmp_path / "dpo.png")]
    curves = dpo.main(flags)
    assert curves["reward margin"][0] == 0
    assert curves["reward margin"][-1] > 0
    assert (tmp_path / "dpo.png").stat().st_size > 10_000
    assert "64 pairs never trained on: margin" in capsys.readouterr().out


def test_gradient_norms_of_pairs_equal_those_one_by_one(dpo, capsys):
    each = load_example("per_sample_gradients")
    each.MODEL = CONFIG
    kept: list[tuple[torch.Tensor, ...]] = []
    loss = each.pair_loss
    each.pair_loss = lambda *a: kept.append(a) or loss(*a)
    norms = each.main(["--warmup", "1", "--pairs", "3"])
    assert len(kept) == 1
    assert "norms of 3 pairs" in capsys.readouterr().out
    torch.manual_seed(0)
    params = {k: p.requires_grad_() for k, p in dpo.pretrained(1).items()}
    pairs = dpo.make_pairs()
    for i, norm in enumerate(norms):
        one = pairs.take(torch.tensor([i]))
        ref = liger_fn.fused_linear_logp(
            params["head"].detach(), llama.hidden(params, one.tokens, CONFIG).detach(), one.y
        )
        grads = torch.autograd.grad(loss(params, *one, ref), list(params.values()))
        torch.testing.assert_close(torch.stack([g.norm() for g in grads]).norm(), norm)


# -- the examples for trainers of Hugging Face

SHAPE = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
SHORT = {
    "hf_finetune": ["--batch", "2", "--context", "16"],
    "dpo_trl": ["--pairs", "2"],
}


def hf_example(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """An example with little text and a tiny model."""
    for needed in ("transformers", "accelerate", *(["trl"] if "trl" in name else [])):
        pytest.importorskip(needed)
    patch.syspath_prepend(ROOT / "examples")  # for the processes that it starts
    patch.setenv("PYTHONPATH", str(ROOT))
    runs = load_example("hf_runs")
    train, held = (pieces[:9] for pieces in runs.python_text())
    patch.setattr(runs, "python_text", lambda: (train, held))
    patch.setattr(runs, "TINY", SHAPE)
    return load_example(name)


def short_runs(example: ModuleType, folder: Path) -> dict:
    flags = ["--device", "cpu", "--steps", "4", "--out", str(folder / "curves.png")]
    return example.main([*flags, *SHORT[example.__name__]])


@pytest.mark.parametrize("name", SHORT)
def test_a_trainer_runs_alike_with_and_without(name, tmp_path, capsys, monkeypatch):
    example, found = hf_example(name, monkeypatch), {}
    if name == "dpo_trl":
        monkeypatch.setattr(sys.modules["dpo_loop"], "FILES", 12)
        monkeypatch.setattr(example, "HELD", 4)

    def here(train, *given):
        return {name: train(name, *given) for name in ("plain", "liger_fn")}

    def measured(trainer, name, device):
        found[name] = trainer
        return sys.modules["hf_runs"].measured(trainer, name, device)

    monkeypatch.setattr(example, "both", here)
    monkeypatch.setattr(example, "measured", measured)
    runs = short_runs(example, tmp_path)
    plain, liger = runs["plain"], runs["liger_fn"]
    assert len(plain.losses) == len(plain.seconds) == 4
    assert len(set(plain.losses)) == 4
    assert liger.losses == pytest.approx(plain.losses, rel=1e-5)
    assert liger.held_out == pytest.approx(plain.held_out, rel=1e-5)
    batch = next(iter(found["plain"].get_train_dataloader()))
    used = {k: nodes(t.compute_loss(t.model.train(), dict(batch))) for k, t in found.items()}
    assert used == {"plain": 0, "liger_fn": ALL}
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert re.search(r"last loss +held out +seconds +ms/step +peak MiB\n", out)
    for name in runs:
        assert re.search(rf"^{name} +\d\.\d+ +\d\.\d+ +\d+\.\d +\d+\.\d +\d+$", out, re.M)


def test_each_run_has_a_process_of_its_own(tmp_path, monkeypatch):
    runs = short_runs(hf_example("hf_finetune", monkeypatch), tmp_path)
    assert [len(run.losses) for run in runs.values()] == [4, 4]
    assert all(run.peak > 0 for run in runs.values())


def test_a_model_without_tokenizer_gets_one(tmp_path, monkeypatch):
    hf_example("hf_finetune", monkeypatch)
    runs = sys.modules["hf_runs"]
    runs.load_model(None, SHAPE).save_pretrained(tmp_path)
    pieces = runs.python_text()[0]
    made = runs.load_tokenizer(str(tmp_path), {}, pieces)
    assert 256 < len(made) <= SHAPE["vocab_size"]
    assert made.decode(made("def é(x):\n")["input_ids"]) == "def é(x):\n"
    made.save_pretrained(tmp_path)
    assert runs.load_tokenizer(str(tmp_path), {}, []).get_vocab() == made.get_vocab()
    want = runs.load_model(None, SHAPE).state_dict()
    got = runs.load_model(str(tmp_path), {}).state_dict()
    assert all(torch.equal(got[k], p) for k, p in want.items())
