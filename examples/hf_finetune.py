"""Train a Hugging Face model with the Trainer, with and without liger_fn.

    python examples/hf_finetune.py                              # a random Llama
    python examples/hf_finetune.py --model FOLDER --lr 1e-5     # or a name on the hub

One line differs between the runs: `adapt(model)`. Both train on the source of Python's standard
library, each in a process of its own, and a table compares time, peak memory and loss. A random
model gets a tokenizer that is trained here; on a GPU it has 1.24 B parameters instead of 8 M and
runs under bfloat16 autocast. On a CPU liger_fn runs its references in plain torch, which save
memory, not time: about two minutes of processor time in all. Nothing is downloaded unless --model
names it.

Needs `pip install -e ".[examples,hf]"` in the checkout.
"""

import argparse
from collections.abc import Sequence

import torch
import transformers as hf
from hf_runs import (
    LARGE,
    TINY,
    Run,
    both,
    load_model,
    load_tokenizer,
    measured,
    parser,
    python_text,
    report,
    settings,
)
from torch import Tensor

from liger_fn.nn.adapters import adapt

HELD = 4  # batches never trained on


def rows(tokenizer: hf.PreTrainedTokenizerBase, pieces: Sequence[str], n: int, t: int) -> Tensor:
    """The first n rows of t tokens (n, t) of the pieces, drawn in an order of their own."""
    ids: list[int] = []
    for i in torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist():
        if len(ids) >= n * t:
            break
        ids += tokenizer(pieces[i], add_special_tokens=False)["input_ids"]
    if len(ids) < n * t:
        raise SystemExit(f"the text has {len(ids)} tokens, not {n * t}: fewer --steps, or --batch")
    return torch.tensor(ids[: n * t]).view(n, t)


def train(name: str, args: argparse.Namespace, text: Tensor, held: Tensor) -> Run:
    model = load_model(args.model, args.shape)
    if name == "liger_fn":
        adapt(model)
    trainer = hf.Trainer(
        model, hf.TrainingArguments(**settings(args, args.batch)),
        train_dataset=[{"input_ids": row, "labels": row} for row in text],
        eval_dataset=[{"input_ids": row, "labels": row} for row in held],
    )  # fmt: skip
    return measured(trainer, name, args.device)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    options = parser(__doc__, steps=30, lr=5e-4, out="runs/hf_finetune.png")
    options.add_argument("--batch", type=int, default=8, help="rows of a step")
    options.add_argument("--context", type=int, metavar="N", help="tokens of a row")
    args = options.parse_args(argv)
    args.shape = LARGE if args.device == "cuda" else TINY
    args.context = args.context or (1024 if args.device == "cuda" else 256)
    pieces, held = python_text()
    tokenizer = load_tokenizer(args.model, args.shape, pieces)
    text = rows(tokenizer, pieces, args.steps * args.batch, args.context)
    runs = both(train, args, text, rows(tokenizer, held, HELD * args.batch, args.context))
    report(runs, args.out)
    return runs


if __name__ == "__main__":
    main()
