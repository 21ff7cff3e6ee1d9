"""A step of preference optimisation by TRL's own trainer, and by the one of examples/dpo_trl.py.

A policy and its frozen reference of random weights, bfloat16, AdamW, gradient checkpointing, pairs
of random tokens whose first quarter is a prompt they share; each variant in a process of its own.

    TRL                 its trainer: a fused head of its own, which leaves out prompts, and metrics
    TRL, logits         its trainer, but for log-probabilities from logits that are in memory
    TRL, Liger-Kernel   its trainer with use_liger_kernel, which leaves the head to TRL
    TRL, adapted        its trainer and head on models that `adapt` has changed
    liger_fn            `token_logprobs` and `dpo_from_logp`; of the metrics, the loss alone
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.fresh import Found, fresh, inside, keeper, options, place
from benchmarks.networks import SHAPES, build
from tests.peak import peak

VARIANTS = ("TRL", "TRL, logits", "TRL, Liger-Kernel", "TRL, adapted", "liger_fn")
EXAMPLES = Path(__file__).parents[1] / "examples"
WORDS = 900  # that occur, of the vocabulary
HEAD = "| variant | ms a step | tokens/s | peak GiB | losses |\n" + "|---" * 5 + "|"


def with_logits(trl: Any) -> Any:
    """TRL's trainer without its head."""
    from trl.trainer.utils import selective_log_softmax

    class WithLogits(trl.DPOTrainer):  # type: ignore[misc]  # known only when it runs
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, *_: Any, **__: Any
        ) -> Any:
            mask = inputs.pop("completion_mask")[:, 1:]

            def logps(which: Any) -> Any:
                logits = which(**inputs, use_cache=False).logits[:, :-1]
                logp = selective_log_softmax(logits, inputs["input_ids"][:, 1:])
                return (logp.float() * mask).sum(1)  # of bfloat16 logits it is bfloat16

            with torch.no_grad():
                ref = logps(self.ref_model)
            chosen, rejected = (logps(model) - ref).chunk(2)
            loss = -torch.nn.functional.logsigmoid(self.beta * (chosen - rejected)).mean()
            return (loss, None) if return_outputs else loss

    return WithLogits


def train(shape: str, variant: str, pairs: int, context: int, steps: int) -> Found:
    """One step to warm up, then `steps` that count, of a trainer."""
    sys.path.insert(0, str(EXAMPLES))
    # the example comes first: it asks the hub's client for silence, which is read at import
    example, runs, trl = (importlib.import_module(name) for name in ("dpo_trl", "hf_runs", "trl"))
    device = place(1)
    model, ref = (build(shape, "plain", device) for _ in range(2))
    kinds = {"TRL, logits": with_logits, "liger_fn": lambda _: example.LeanDPOTrainer}
    kind = kinds.get(variant, lambda trl: trl.DPOTrainer)(trl)
    if variant == "TRL, adapted":
        model, ref = example.adapt(model), example.adapt(ref)
    rows = example.datasets.Dataset.from_list(drawn(pairs * (steps + 1), context))
    example.datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as home:
        given = argparse.Namespace(
            steps=steps + 1, lr=1e-4, device=device.type, out=Path(home, "none")
        )
        config = {**runs.settings(given, pairs), "bf16": False, "max_length": context}
        config |= {"use_liger_kernel": "Liger-Kernel" in variant}
        trainer = kind(
            model, ref_model=ref, args=trl.DPOConfig(**config), processing_class=tokenizer(),
            train_dataset=rows, eval_dataset=rows.select(range(pairs)),
        )  # fmt: skip
        run = runs.measured(trainer, variant, device.type)
    seconds = statistics.median(run.seconds[1:])
    most = peak(device.type) / 1024
    rate = 2 * pairs * context / seconds
    return {"seconds": seconds, "tokens/s": rate, "peak GiB": most, "losses": run.losses}


def drawn(n: int, context: int) -> list[dict[str, str]]:
    """Pairs of `context` tokens each, prompt and end included."""
    draw, quarter = random.Random(0), context // 4
    sizes = {"prompt": quarter, "chosen": context - quarter - 1, "rejected": context - quarter - 1}
    return [
        {name: "".join(f"w{draw.randrange(WORDS)} " for _ in range(k)) for name, k in sizes.items()}
        for _ in range(n)
    ]


def tokenizer() -> Any:
    """A token for each word."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["pad", "end", *(f"w{i}" for i in range(WORDS))]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="pad")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="pad", eos_token="end")


def line(found: Found) -> str:
    """One row of the table; a variant that failed has its reason."""
    if "error" in found:
        return f"| {found['variant']} | {found['error']} | | | |"
    losses = ", ".join(f"{loss:.4f}" for loss in found["losses"])
    return (
        f"| {found['variant']} | {1e3 * found['seconds']:.0f} | {found['tokens/s']:.0f} | "
        f"{found['peak GiB']:.1f} | {losses} |"
    )


def sizes(args: argparse.Namespace) -> str:
    return f"{args.pairs} pairs of 2 x {args.context}"


def main(argv: list[str]) -> list[Found]:
    """Print the table, keep what is in it, and return it."""
    parser = options("dpo", __doc__)
    add, gpu = parser.add_argument, torch.cuda.is_available()
    add("--shape", choices=[*SHAPES], default="llama-3.2-1b" if gpu else "tiny")
    add("--variant", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    add("--pairs", type=int, default=8 if gpu else 2)
    add("--context", type=int, default=1024 if gpu else 32)
    add("--steps", type=int, default=5)
    args = parser.parse_args(argv)
    given = {"pairs": args.pairs, "context": args.context, "steps": args.steps}
    if args.inside:
        inside(args.variant[0], lambda: train(args.shape, args.variant[0], **given))
        return []
    print(
        f"{args.shape}, {sizes(args)} tokens, bfloat16, AdamW, checkpointing\n\n{HEAD}", flush=True
    )
    command = ["dpo", "--shape", args.shape]
    command += [text for name, n in given.items() for text in (f"--{name}", str(n))]
    rows, keep = [], keeper("dpo", argv, args, sizes(args))
    for variant in args.variant:
        rows.append(fresh(command, variant, limit=args.limit))
        keep(rows[-1])
        print(line(rows[-1]), flush=True)
    return rows
