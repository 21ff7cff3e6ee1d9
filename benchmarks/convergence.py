"""Train a tiny model of every family with and without liger_fn, from one seed on the same text.

Each in float32 and bfloat16 (weights kept in float32), as it is and adapted, in three orders of
summation, and once in float64. Writes results, a page and a plot for each family.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import store
from benchmarks.convergence_page import DOC, HERE, report
from benchmarks.orders import Doubled, Reordered, drawn
from benchmarks.run import failed, machine, say, versions

ROWS, CONTEXT, LR, ORDERS, POINTS = 8, 32, 4e-3, 3, 25
Texts = tuple[Tensor, Tensor]  # to train on, and held out
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Run(NamedTuple):
    """Losses, final weights, how far they moved, log-probabilities of held-out text."""

    losses: Tensor
    weights: Tensor
    moved: Tensor
    logp: Tensor


def batch_at(name: str, text: Tensor, seed: int) -> dict[str, Tensor]:
    """Rows of text with what the family reserves left in place; each printable byte is a token."""
    from tests import zoo

    made = zoo.batch(name, ROWS, CONTEXT)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(len(text) - CONTEXT, (ROWS, 1), generator=generator)
    ids = text[start + torch.arange(CONTEXT)].long()
    ids = torch.where((ids >= 32) & (ids < 127), ids - 29, torch.where(ids == 10, 98, 99))
    ids = torch.where(made["input_ids"] < zoo.OURS.stop, ids, made["input_ids"])
    return made | {"input_ids": ids, "labels": ids.masked_fill(made["labels"] == -100, -100)}


def prepared(name: str, dtype: torch.dtype, device: torch.device, how: str) -> Any:
    """The model of a family: as it is, adapted, or with the same weights in float64."""
    from liger_fn.nn.adapters import adapt
    from tests import zoo

    model = zoo.build(name, dtype).to(device)
    if how == "float64":
        with contextlib.suppress(AttributeError, ValueError):  # there is no grouped_mm in float64
            model.set_experts_implementation("eager")
        return model.double()
    return adapt(model) if how == "liger_fn" else model


def train(name: str, dtype: torch.dtype, steps: int, device: torch.device, read: Texts,
          how: str, seed: int = 0) -> Run:  # fmt: skip
    """Train in one order of summation; seed 0 leaves it as torch has it."""
    model, mode = prepared(name, dtype, device, how), contextlib.nullcontext()
    if seed or how == "float64":
        mode = Reordered(seed) if seed else Doubled()
    rows = drawn(seed, ROWS, torch.device("cpu"))[0] if seed else torch.arange(ROWS)

    def call(text: Tensor, at: int, rows: Tensor) -> tuple[Any, Tensor]:
        batch = {}
        for key, t in batch_at(name, text, at).items():
            t = t.unflatten(0, (ROWS, -1))[rows].flatten(0, 1)  # an image goes with its row
            batch[key] = (t.to(dtype).to(model.dtype) if t.is_floating_point() else t).to(device)
        with mode:
            return model(**batch), batch["labels"]

    params, wide = list(model.parameters()), torch.promote_types(model.dtype, torch.float32)
    masters = [p.detach().to(wide, copy=True) for p in params]
    start, losses = torch.cat([p.flatten() for p in masters]), []
    optimizer = torch.optim.AdamW(masters, lr=LR)
    for step in range(steps):
        loss = call(read[0], step, rows)[0].loss
        with mode:
            loss.backward()
        for master, p in zip(masters, params, strict=True):
            master.grad, p.grad = None if p.grad is None else p.grad.to(wide), None
        optimizer.step()
        for master, p in zip(masters, params, strict=True):
            p.detach().copy_(master)
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        out, labels = call(read[1], steps, torch.arange(ROWS))
    weights = torch.cat([p.flatten() for p in masters])
    logp = out.logits.double().log_softmax(-1)[labels != -100]
    return Run(torch.stack(losses).double(), weights.double(), (weights - start).norm(), logp)


# -- what is compared ------------------------------------------------------------------------------


def apart(a: Run, b: Run, top: Tensor) -> list[float]:
    """Distance of losses, of weights over how far they moved, of log-probabilities."""
    loss, weights = (a.losses - b.losses).abs().max(), (a.weights - b.weights).norm() / b.moved
    return [loss.item(), weights.item(), (a.logp - b.logp).gather(-1, top).abs().mean().item()]


def worst(pairs: list[tuple[Run, Run]], top: Tensor) -> list[float]:
    return torch.tensor([apart(a, b, top) for a, b in pairs]).amax(0).tolist()  # NaN stays


def thinned(curves: list[Tensor], steps: int, of: Any = torch.amax) -> list[float]:
    """Several curves as one: their largest, or another `of` them, in each of a few stretches."""
    parts = torch.stack(curves).split(-(-steps // POINTS), dim=1)
    return [of(part).item() for part in parts]


def measure(name: str, dtype: str, steps: int, device: torch.device, draw: int) -> dict[str, Any]:
    """One family in one dtype: a row of the results."""
    sizes = f"{ROWS}x{CONTEXT}, {steps} steps"
    row = {"op": name, "shape": dtype, "peer": "liger_fn", "sizes": sizes}
    try:
        from examples.train_llama import corpus

        text, held = corpus()
        read = text[draw * 100_003 :], held
        go = functools.partial(train, name, DTYPES[dtype], steps, device, read)
        exact = go("float64")
        plain, ours = ([go(how, i) for i in range(ORDERS)] for how in ("plain", "liger_fn"))
    except Exception as error:
        return row | failed(error)
    top = exact.logp.topk(10).indices
    pairs = list(zip(ours, plain, strict=True))
    gaps = {"torch": list(itertools.combinations(plain, 2)), "liger_fn": pairs}
    return row | {
        "status": "ok",
        "apart": {who: worst(of, top) for who, of in gaps.items()},
        "error": {who: worst([(run, exact) for run in of], top)
                  for who, of in (("torch", plain), ("liger_fn", ours))},
        "losses": {who: thinned([of[0].losses], steps, torch.mean)
                   for who, of in (("torch", plain), ("liger_fn", ours))},
        "gaps": {who: thinned([(a.losses - b.losses).abs() for a, b in of], steps)
                 for who, of in gaps.items()},
    }  # fmt: skip


def rows_of(jobs: list[tuple[Any, ...]], processes: int) -> Iterator[dict[str, Any]]:
    """Measure in several fresh processes, or in this one."""
    if processes == 1:
        yield from itertools.starmap(measure, jobs)
        return
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, fresh, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(measure, *zip(*jobs, strict=True))


def main(argv: list[str], commit: str) -> Path:
    """Measure, keep each row as it comes, and write page and figures."""
    from tests import zoo

    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks convergence", description=__doc__)
    add = parser.add_argument
    add("--families", nargs="+", choices=[*zoo.FAMILIES], default=[*zoo.FAMILIES], metavar="NAME")
    add("--dtypes", nargs="+", choices=[*DTYPES], default=[*DTYPES])
    add("--steps", type=int, default=40)
    add("--quick", action="store_true", help="three steps of each")
    add("--draw", type=int, default=0, help="other batches: 1, 2, ...; give --out and --page too")
    add("--processes", type=int, default=4 if gpu else os.cpu_count(), help="side by side")
    add("--out", type=Path, default=HERE, help="folder of the results, which are added to")
    add("--page", type=Path, default=DOC, help="what to write")
    add("--report", action="store_true", help="only page and figures, from results kept")
    given = parser.parse_args(argv)
    device = torch.device("cuda" if gpu else "cpu")
    file = store.path(given.out, machine(device))
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    run = {"command": " ".join(["python -m benchmarks convergence", *argv]), "commit": commit,
           "runs": "Triton kernels" if gpu else "the references, in plain torch",
           "versions": versions()}  # fmt: skip
    steps = 3 if given.quick else given.steps
    each = [] if given.report else itertools.product(given.families, given.dtypes)
    jobs = [(name, dtype, steps, device, given.draw) for name, dtype in each]
    for row in rows_of(jobs, given.processes):
        say(row["op"], row["shape"], row.get("note", ""))
        store.add(file, machine(device), began, run, [row])
    print(*report(given.out, given.page), sep="\n")
    return file
