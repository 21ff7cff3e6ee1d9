"""Heads whose weight ZeRO-3 has taken apart: two processes against the whole batch in one."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import liger_fn
from liger_fn.nn import ORPOLoss
from liger_fn.nn.adapters import adapt, token_logprobs
from tests import zoo
from tests.test_adapters_sharded import WORLD, Small, mine

FAMILIES = ("llama", "gemma2", "granite")  # a soft cap and a tied head; a scale


def sharded(model: Any) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def same_gradients(engine: Any, loss: torch.Tensor, plain: torch.nn.Module) -> None:
    from deepspeed.utils import safe_get_full_grad

    engine.backward(loss)
    for got, want in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(safe_get_full_grad(got), want.grad, rtol=1e-4, atol=1e-6)


def compare(name: str, rank: int) -> None:
    """Mean of the losses of both halves, and log-probabilities in training and in evaluation."""
    batch, plain = zoo.batch(name), zoo.build(name)
    losses = [plain(**mine(batch, r)).loss for r in range(WORLD)]
    sum(losses).div(WORLD).backward()  # type: ignore[union-attr]  # not of no losses
    engine = sharded(adapt(zoo.build(name)))
    assert engine.module.lm_head.weight.numel() == 0
    inputs = mine(batch, rank)
    z = plain(**inputs).logits[:, :-1].log_softmax(-1)
    y = inputs["labels"][:, 1:]
    want = z.gather(-1, y[..., None].clamp(min=0))[..., 0].masked_fill(y == -100, 0.0)
    for training in (False, True):
        engine.train(training)
        with torch.no_grad():
            logp = token_logprobs(engine, **inputs)
            torch.testing.assert_close(logp, want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(engine(**inputs).loss, losses[rank], rtol=1e-5, atol=0)
    out = engine(**inputs)
    assert engine.module.lm_head.weight.numel() == 0  # nobody but the head has asked for it
    torch.testing.assert_close(out.logits + 0, plain(**inputs).logits, rtol=1e-4, atol=1e-4)
    same_gradients(engine, out.loss, plain)


def compare_head(rank: int, loss: torch.nn.Module | None) -> None:
    torch.manual_seed(0)
    plain, model = Small(loss), Small(loss)
    model.load_state_dict(plain.state_dict())
    x, y = torch.randint(zoo.VOCAB, (2, WORLD, 2, 5))
    (sum(plain(x[r], y[r]) for r in range(WORLD)) / WORLD).backward()
    engine = sharded(model)
    assert engine.module.head.weight.numel() == 0
    same_gradients(engine, engine(x[rank], y[rank]), plain)


def work(rank: int, port: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    import deepspeed

    deepspeed.init_distributed("gloo")
    with liger_fn.using("reference"):
        for loss in (None, ORPOLoss()):
            compare_head(rank, loss)
        for name in FAMILIES:
            try:
                compare(name, rank)
            except Exception as error:
                raise AssertionError(name) from error
    torch.distributed.destroy_process_group()


@pytest.mark.slow  # two fresh processes
def test_models_under_zero_3_have_the_gradients_of_whole_ones():
    pytest.importorskip("deepspeed")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    torch.multiprocessing.spawn(work, (port,), nprocs=WORLD)
