"""docs/from-liger-kernel.md: its names exist on both sides, and its losses agree on a CPU."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import liger_fn
from liger_fn import nn
from liger_fn.nn import adapters

PAGE = (Path(liger_fn.__file__).parents[1] / "docs/from-liger-kernel.md").read_text()
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
SWITCHES = {"rope", "rms_norm", "cross_entropy", "fused_linear_ce", "glu", "adapt"}
OURS = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[1])}
THEIRS = {
    name
    for name in re.findall(r"`(\w+)`", PAGE)
    if re.match(r"(Auto)?Liger|liger_(?!fn|kernel)|apply_liger|triton_grpo", name)
}
MODULES = (
    "transformers", "transformers.functional", "chunked_loss", "transformers.group_norm",
    "transformers.grpo_loss", "transformers.qwen2vl_mrope",
)  # fmt: skip


def test_there_is_a_page_to_read():
    assert len(ROWS) > 30
    assert {"adapt", "RMSNorm", "fused_linear_ce", "DPOLoss"} <= OURS
    assert {"AutoLigerKernelForCausalLM", "LigerRMSNorm", "liger_rope"} <= THEIRS


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_name_of_ours_exists(name):
    where = (liger_fn, nn, adapters)
    assert name in SWITCHES or any(name in module.__all__ for module in where)


@pytest.fixture(scope="module")
def liger():
    """Their public modules, in the version that the page is about."""
    pytest.importorskip("liger_kernel")
    pytest.importorskip("transformers")
    if version("liger-kernel") != "0.8.5":
        pytest.skip("the page is about Liger-Kernel 0.8.5")
    return [importlib.import_module(f"liger_kernel.{name}") for name in MODULES]


def test_every_name_of_theirs_exists(liger):
    assert [name for name in sorted(THEIRS) if not any(hasattr(m, name) for m in liger)] == []


def test_no_public_name_of_theirs_is_missing(liger):
    public = {n for m in liger[:3] for n in dir(m) if re.match(r"Liger(?!.*Function)|liger_", n)}
    assert sorted(public - THEIRS) == []


PAIRS = {
    "DPO": ({"beta": 0.3}, {"beta": 0.3}),
    "ORPO": ({"beta": 0.2}, {"beta": 0.2}),
    "CPO": ({"alpha": 0.5, "label_smoothing": 0.1}, {"nll_weight": 0.5, "label_smoothing": 0.1}),
    "SimPO": (
        {"beta": 2.0, "gamma": 0.8, "compute_nll_loss": False},
        {"beta": 2.0, "gamma_beta_ratio": 0.4},
    ),
}


def heads(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size) for size in sizes]


@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_pairs_are_theirs(liger, name):
    there, here = PAIRS[name]
    w, x, ref_w, ref_x = heads((7, 4), (4, 3, 4), (7, 5), (4, 3, 5))
    y = torch.tensor([[0, 1, -100], [2, -100, -100], [3, 4, 5], [6, 0, -100]])
    theirs = getattr(liger[2], f"LigerFusedLinear{name}Loss")(compiled=False, **there)
    dpo = name == "DPO"
    want = theirs(w, x, y, None, *([ref_x, ref_w] if dpo else []))[0]
    more = {"ref_w": ref_w, "ref_x": ref_x} if dpo else {}
    got = getattr(nn, f"{name}Loss")(**here)(w, x, y, **more)
    torch.testing.assert_close(got, want)


def test_losses_of_single_sequences_are_theirs(liger):
    w, x, ref_w, ref_x = heads((7, 4), (3, 2, 4), (7, 5), (3, 2, 5))
    y, good = torch.tensor([[0, 1], [2, -100], [3, 4]]), torch.tensor([True, False, True])
    theirs = liger[2].LigerFusedLinearKTOLoss(compiled=False, use_ref_model=True, beta=0.3)
    want = theirs(x, w, y, None, good, ref_x, ref_w, None, torch.tensor(0.2))[0]
    got = nn.KTOLoss(beta=0.3)(w, x, y, good, ref_w=ref_w, ref_x=ref_x, kl=0.2)
    torch.testing.assert_close(got, want)


def test_losses_of_sampled_sequences_are_theirs(liger):
    w, x, a, old, ref = heads((7, 4), (3, 2, 4), (3,), (3, 2), (3, 2))
    y, old, ref = torch.tensor([[0, 1], [2, 5], [3, 4]]), old - 2, ref - 2
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    theirs = liger[2].LigerFusedLinearGRPOLoss(compiled=False)
    want = theirs(x, w, y, mask, a, None, ref, old)[0]
    loss = nn.GRPOLoss(loss_type="dapo", beta=0.04)
    got = loss(w, x, y.where(mask == 1, -100), a, old_logp=old, ref_logp=ref)
    torch.testing.assert_close(got, want)


def test_losses_of_a_teacher_are_theirs(liger):
    w, x, teacher_w, teacher_x = heads((7, 4), (5, 4), (7, 6), (5, 6))
    y = torch.tensor([0, 3, -100, 6, 2])
    theirs = liger[2].LigerFusedLinearJSDLoss(
        0.3, 0.7, beta=0.2, temperature=1.5, compiled=False, chunk_size=2
    )
    want = theirs(x, w, teacher_x, teacher_w, y)
    loss = nn.JSDLoss(beta=0.2, hard_weight=0.3, temperature=1.5)
    torch.testing.assert_close(loss(w, x, teacher_w, teacher_x, y=y), want)
    theirs = liger[2].LigerFusedLinearCosineSimilarityLoss(0.3, 0.7, beta=1.0, compiled=False)
    want = theirs(x, w, teacher_x, teacher_w, y)
    got = liger_fn.fused_linear_cosine(w, x, teacher_w, teacher_x, y=y, hard_weight=0.3)
    torch.testing.assert_close(got, want)
