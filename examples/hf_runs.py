"""What the examples for Hugging Face trainers share: text, tokenizer, model, two runs, a table."""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers as hf
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from train_llama import corpus, memory

TINY = {
    "vocab_size": 16384, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3,
}  # fmt: skip
# 1.24 B parameters, shaped like Llama 3.2 1B: 8192 tokens have 4.2 GB of logits in float32
LARGE = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
WORDS = 32768  # tokens at most: the library has no more to teach a tokenizer
# with it glibc gives blocks of 4 MiB back once they are freed, and the peak on a CPU is that of
# tensors; by default its heap keeps them, in the defaults of hf_finetune.py 100 to 300 MiB
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**22)}
FORGET_PEAK = Path("/proc/self/clear_refs")  # Linux keeps the peak of a process; 5 forgets it


class Run(NamedTuple):
    """What a training run was like; peak: bytes above what was held before it."""

    losses: list[float]
    seconds: list[float]
    peak: float
    held_out: float


def python_text() -> tuple[list[str], list[str]]:
    """Sources of the standard library in pieces: to train on, and held out."""
    whole = (part.numpy().tobytes().decode(errors="replace") for part in corpus())
    train, held = ([x[i : i + 10_000] for i in range(0, len(x), 10_000)] for x in whole)
    return train, held


def train_tokenizer(pieces: Sequence[str], size: int) -> hf.PreTrainedTokenizerFast:
    """A byte-level BPE; seconds for all of the standard library."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(size, WORDS), special_tokens=["<pad>", "<end>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(pieces, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", bos_token="<end>"
    )


def load_tokenizer(model: str | None, shape: dict[str, Any], pieces: Sequence[str]) -> Any:
    """The tokenizer of the model; one trained here where it has none, or is random."""
    if model is None:
        return train_tokenizer(pieces, shape["vocab_size"])
    try:
        tokenizer = hf.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):  # of a name without a model too: then its config is not found
        size = hf.AutoConfig.from_pretrained(model).get_text_config().vocab_size
        return train_tokenizer(pieces, size)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def load_model(model: str | None, shape: dict[str, Any]) -> Any:
    """A pretrained model in float32, or a random Llama of that shape, the same at each call."""
    if model is not None:
        return hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**shape, **special))


# -- two runs --------------------------------------------------------------------------------------


class Watch(hf.TrainerCallback):
    """A progress bar that knows the loss; keeps what `Run` asks for."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif FORGET_PEAK.exists():
            FORGET_PEAK.write_text("5")
        self.before = memory(self.device)[0]
        self.bar = tqdm(total=state.max_steps, desc=self.name, dynamic_ncols=True)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])
            self.bar.set_postfix_str(f"loss {logs['loss']:.3f}, {self.seconds[-1]:.2f} s/step")
            self.bar.update()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.peak = memory(self.device)[1] - self.before
        self.bar.close()


def settings(args: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Arguments of a trainer that leaves nothing on disk and logs each step."""
    return {
        "output_dir": str(args.out.parent), "max_steps": args.steps, "learning_rate": args.lr,
        "per_device_train_batch_size": rows, "per_device_eval_batch_size": rows,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "warmup_steps": min(10, args.steps // 5), "bf16": args.device == "cuda",
        "use_cpu": args.device == "cpu", "seed": 0,
    }  # fmt: skip


def measured(trainer: hf.Trainer, name: str, device: str) -> Run:
    watch = Watch(name, torch.device(device))
    trainer.remove_callback(hf.PrinterCallback)
    trainer.add_callback(watch)
    trainer.train()
    held_out = trainer.evaluate()["eval_loss"]
    return Run(watch.losses, watch.seconds, watch.peak, held_out)


def both(train: Callable[..., Run], *given: Any) -> dict[str, Run]:
    """train(name, *given) for each name, in its own process: else one peak hides the other."""
    runs = {}
    for name in ("plain", "liger_fn"):
        fresh = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        with patch.dict(os.environ, MALLOC), fresh:
            runs[name] = fresh.submit(train, name, *given).result()
    return runs


# -- results ---------------------------------------------------------------------------------------


def report(runs: dict[str, Run], path: Path) -> None:
    print(f"{'':10}{'last loss':>10}{'held out':>10}{'seconds':>9}{'ms/step':>9}{'peak MiB':>10}")
    for name, run in runs.items():
        total, typical = sum(run.seconds), 1000 * statistics.median(run.seconds)
        print(
            f"{name:10}{run.losses[-1]:10.4f}{run.held_out:10.4f}{total:9.1f}{typical:9.1f}"
            f"{run.peak / 2**20:10.0f}"
        )
    plain, liger = (run.losses for run in runs.values())
    gaps = [abs(a - b) for a, b in zip(plain, liger, strict=True)]
    print("peak: above what the process held before it trained")
    print(f"largest difference of loss: {max(gaps[:10]):.1e} in 10 steps, {max(gaps):.1e} in all")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(run.losses) + 1), run.losses, style, label=name)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


# -- command line ----------------------------------------------------------------------------------


def parser(doc: str, steps: int, lr: float, out: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc.partition("\n")[0], allow_abbrev=False)
    made.add_argument("--model", metavar="NAME", help="name or folder; default: a random Llama")
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--lr", type=float, default=lr, help="learning rate")
    made.add_argument("--out", type=Path, default=Path(out), help="picture of the losses")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", choices=("cpu", "cuda"), default=found)
    return made
