"""Teach a small Llama to prefer docstrings over code, in a training loop of one's own.

    python examples/dpo_loop.py        # two CPU cores: about two minutes

Trains the model of train_llama.py for a while, freezes a copy as the reference, then runs direct
preference optimisation on pairs of lines from Python's standard library: a line of a docstring is
chosen over a line of code. `liger_fn.dpo_loss_with_metrics` takes the head and the activations, so
the logits of no sequence are ever in memory. Writes the curves of margin and accuracy.

Needs `pip install -e ".[examples]"` in the checkout.
"""

import argparse
import ast
import random
import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm
from train_llama import Config, Params, adamw, batch_at, corpus, hidden, init, loss, update

import liger_fn

IGNORE = -100
MODEL = Config(width=128, layers=2, context=96, batch=16, steps=200, lr=4e-3)
FILES, LINE = 400, (24, 72)  # how many files are read; bytes of a line


class Pairs(NamedTuple):
    """Lines, [:b] chosen and [b:] rejected: what is read (2b, t), what comes next (2b, t)."""

    tokens: Tensor
    y: Tensor

    def take(self, at: Tensor) -> "Pairs":
        """Some of the pairs."""
        both = torch.cat((at, at + self.y.shape[0] // 2))
        return Pairs(self.tokens[both], self.y[both])


def lines() -> tuple[list[str], list[str]]:
    """Lines of docstrings and lines of code."""
    docs, code = [], []
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.glob("*.py"))[:FILES]:
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, holders)]
        docs += [text.strip() for text in "\n".join(texts).splitlines()]
        known = set(docs)
        code += [x.strip() for x in source.splitlines() if x.strip() not in known and "(" in x]

    def whole(found: list[str]) -> list[str]:
        low, high = LINE
        return sorted({x for x in found if low <= len(x) <= high and x.isascii() and x[0] != "#"})

    return whole(docs), whole(code)


def make_pairs(seed: int = 0) -> Pairs:
    docs, code = lines()
    draw = random.Random(seed)
    draw.shuffle(docs)
    draw.shuffle(code)
    b = min(len(docs), len(code))
    rows = [("\n" + x + "\n").encode() for x in (*docs[:b], *code[:b])]
    t = max(map(len, rows)) - 1
    tokens, y = torch.zeros(2 * b, t, dtype=torch.int64), torch.full((2 * b, t), IGNORE)
    for i, row in enumerate(rows):
        codes = torch.tensor([*row])
        tokens[i, : len(row) - 1], y[i, : len(row) - 1] = codes[:-1], codes[1:]
    return Pairs(tokens, y)


def pretrained(steps: int) -> Params:
    """A language model of Python sources, before it is taught to prefer anything."""
    params = init(MODEL, torch.Generator().manual_seed(0))
    params = {k: p.requires_grad_() for k, p in params.items()}
    text, optimizer, cpu = corpus()[0], adamw(params, MODEL), torch.device("cpu")
    bar = tqdm(range(steps), "language model", mininterval=1)
    for step in bar:
        value = update(
            params, optimizer, partial(loss, config=MODEL), batch_at(text, step, MODEL, cpu)
        )
        bar.set_postfix_str(f"loss {value:.3f}")
    return {k: p.detach() for k, p in params.items()}


def preference(params: Params, ref: Params, pairs: Pairs, beta: float) -> "liger_fn.PairMetrics":
    """Loss and metrics of some pairs; the reference is read, never differentiated."""
    with torch.no_grad():
        ref_x = hidden(ref, pairs.tokens, MODEL)
    return liger_fn.dpo_loss_with_metrics(
        params["head"], hidden(params, pairs.tokens, MODEL), pairs.y,
        ref_w=ref["head"], ref_x=ref_x, beta=beta, ignore_index=IGNORE,
    )  # fmt: skip


def draw(curves: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axis, (name, values) in zip(figure.subplots(1, 2), curves.items(), strict=True):
        axis.plot(values)
        axis.set(xlabel="step", ylabel=name)
    figure.savefig(path, dpi=120)


def count(text: str) -> int:
    """A number on the command line, 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--warmup", type=int, default=MODEL.steps, help="steps of language model")
    parser.add_argument("--steps", type=count, default=60, help="steps of preference optimisation")
    parser.add_argument("--pairs", type=count, default=16, help="pairs of a step")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--out", type=Path, default=Path("runs/dpo.png"))
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    pairs = make_pairs()
    held = torch.arange(64)
    ref = pretrained(args.warmup)
    policy = {k: p.clone().requires_grad_() for k, p in ref.items()}
    optimizer = torch.optim.AdamW(policy.values(), 2e-4, weight_decay=0.0, fused=True)
    curves: dict[str, list[float]] = {"reward margin": [], "accuracy": []}
    bar = tqdm(range(args.steps), "preference", mininterval=1)
    for _ in bar:
        at = 64 + torch.randint(pairs.y.shape[0] // 2 - 64, (args.pairs,))
        found = preference(policy, ref, pairs.take(at), args.beta)
        found.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in zip(curves, (found.margin, found.accuracy), strict=True):
            curves[name].append(value.item())
        bar.set_postfix_str(f"loss {found.loss:.3f}, margin {found.margin:.2f}")
    with torch.no_grad():
        last = preference(policy, ref, pairs.take(held), args.beta)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(curves, args.out)
    print(f"64 pairs never trained on: margin {last.margin:.2f}, accuracy {last.accuracy:.0%}")
    print(
        f"margin {curves['reward margin'][0]:.2f} -> {curves['reward margin'][-1]:.2f}; {args.out}"
    )
    return curves


if __name__ == "__main__":
    main()
