"""Heads whose weight is sharded: two processes of gloo against the whole batch in one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import liger_fn
from liger_fn.nn import LMHead, ORPOLoss
from liger_fn.nn.adapters import adapt, token_logprobs
from tests import zoo

WORLD = 2
CASES = [
    (name, how)
    for name in ("llama", "gemma2", "granite")
    for how in ("head", "root", "ddp", "adapted-late", "tiles")
    if (name, how) != ("gemma2", "head")  # tied to the embedding: torch has both in one group
]


class Small(nn.Module):
    """An embedding and a head of ours."""

    def __init__(self, loss: nn.Module | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCAB, 8)
        self.head = LMHead(8, zoo.VOCAB, bias=False, loss=loss)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.embed(x), y)


def whole(t: Tensor | None) -> Tensor:
    assert t is not None
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def shard(model: Any, how: str) -> Any:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(adapt(model))
    if how != "adapted-late":
        adapt(model, mlp_chunk=4 if how == "tiles" else None)
    for layer in model.model.layers:
        fully_shard(layer)
    if how == "head":
        fully_shard(model.lm_head)
    fully_shard(model)
    return adapt(model) if how == "adapted-late" else model


def mine(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {k: v[rank::WORLD] for k, v in batch.items()}


def compare(name: str, how: str, rank: int) -> None:
    """Mean of the losses of both halves, sharded and not."""
    batch, plain = zoo.batch(name), zoo.build(name)
    sum(plain(**mine(batch, r)).loss for r in range(WORLD)).div(WORLD).backward()
    want = [p.grad for p in plain.parameters()]
    model = shard(zoo.build(name), how)
    model(**mine(batch, rank)).loss.backward()
    for got, wanted in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(whole(got.grad), wanted, rtol=1e-4, atol=1e-6)
    inputs = mine(batch, rank)
    logp = token_logprobs(model, **inputs)
    z = plain(**inputs).logits[:, :-1].log_softmax(-1)
    y = inputs["labels"][:, 1:]
    want_logp = z.gather(-1, y[..., None].clamp(min=0))[..., 0].masked_fill(y == -100, 0.0)
    torch.testing.assert_close(logp, want_logp, rtol=1e-4, atol=1e-5)


def compare_head(rank: int, loss: nn.Module | None) -> None:
    torch.manual_seed(0)
    plain, model = Small(loss), Small(loss)
    model.load_state_dict(plain.state_dict())
    x, y = torch.randint(zoo.VOCAB, (2, WORLD, 2, 5))
    (sum(plain(x[r], y[r]) for r in range(WORLD)) / WORLD).backward()
    fully_shard(model.head)
    fully_shard(model)
    model(x[rank], y[rank]).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), whole(want.grad), rtol=1e-5, atol=1e-7)


def work(rank: int, home: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{home}/meet", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    with liger_fn.using("reference"):
        for loss in (None, ORPOLoss()):
            compare_head(rank, loss)
        for name, how in CASES:
            try:
                compare(name, how, rank)
            except Exception as error:
                raise AssertionError(f"{name}, {how}") from error
    dist.destroy_process_group()


@pytest.mark.slow  # two fresh processes
def test_sharded_models_have_the_gradients_of_whole_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # else a mesh would lie on GPUs, without NCCL
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=WORLD)
