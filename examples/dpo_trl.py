"""Direct preference optimisation with TRL, with and without liger_fn.

    python examples/dpo_trl.py                              # a tiny random Llama
    python examples/dpo_trl.py --model FOLDER --lr 1e-6     # or a name on the hub

The pairs are those of dpo_loop.py: a line of a docstring is chosen over a line of code. `plain` is
TRL's own trainer; `liger_fn` is the subclass below, whose log-probabilities come from
`token_logprobs` and whose loss from `dpo_from_logp`: the logits of no sequence are in memory, nor
are they under TRL 1.16. Each runs in a process of its own, and a table compares time, peak memory
and loss, after about two minutes of processor time. Nothing is downloaded unless --model names it.

Needs `pip install -e ".[examples,hf]" "trl==1.16.*"` in the checkout.
"""

import argparse
import copy
import os
import random
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # a trainer of TRL reports that it ran

import datasets
import torch
import trl
from dpo_loop import IGNORE, lines
from hf_runs import (
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

from liger_fn import dpo_from_logp
from liger_fn.nn.adapters import adapt, token_logprobs

HELD = 64  # pairs never trained on
Rows = list[dict[str, str]]


class LeanDPOTrainer(trl.DPOTrainer):
    """TRL's trainer of pairs on the functions of liger_fn; of its metrics, the loss alone."""

    def __init__(self, model: Any, ref_model: Any, **given: Any) -> None:
        # before TRL gives both models a forward of its own: that one calls ours
        super().__init__(adapt(model), adapt(ref_model), **given)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        given = {k: v for k, v in inputs.items() if k != "completion_mask"}
        y = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORE)
        logp = token_logprobs(model, labels=y, **given)
        with torch.no_grad():
            ref_logp = token_logprobs(self.ref_model, labels=y, **given)
        loss = dpo_from_logp(logp, y[:, 1:], ref_logp, beta=self.beta)
        return (loss, None) if return_outputs else loss


def make_pairs() -> Rows:
    docs, code = lines()
    draw = random.Random(0)
    draw.shuffle(docs)
    draw.shuffle(code)
    return [{"prompt": "\n", "chosen": x, "rejected": y} for x, y in zip(docs, code, strict=False)]


def train(name: str, args: argparse.Namespace, tokenizer: Any, pairs: Rows) -> Run:
    model = load_model(args.model, args.shape)
    kind = LeanDPOTrainer if name == "liger_fn" else trl.DPOTrainer
    datasets.disable_progress_bars()
    trainer = kind(
        model, ref_model=copy.deepcopy(model), processing_class=tokenizer,
        args=trl.DPOConfig(
            **settings(args, args.pairs), beta=args.beta, gradient_checkpointing=False
        ),
        train_dataset=datasets.Dataset.from_list(pairs[HELD:]),
        eval_dataset=datasets.Dataset.from_list(pairs[:HELD]),
    )  # fmt: skip
    return measured(trainer, name, args.device)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    options = parser(__doc__, steps=30, lr=3e-4, out="runs/dpo_trl.png")
    options.add_argument("--pairs", type=int, default=16, help="pairs of a step")
    options.add_argument("--beta", type=float, default=0.1)
    args = options.parse_args(argv)
    args.shape = TINY
    tokenizer = load_tokenizer(args.model, args.shape, python_text()[0])
    runs = both(train, args, tokenizer, make_pairs())
    report(runs, args.out)
    return runs


if __name__ == "__main__":
    main()
