"""Losses as modules, and the head that owns the weight that they read."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import liger_fn
from liger_fn import nn
from tests.modules import LOSS, MODULES, D, V, inputs, made

FUNCTIONS = {
    "fused": liger_fn.fused_linear_ce, "dpo": liger_fn.dpo_loss, "orpo": liger_fn.orpo_loss,
    "cpo": liger_fn.cpo_loss, "simpo": liger_fn.simpo_loss, "kto": liger_fn.kto_loss,
    "grpo": liger_fn.grpo_loss, "jsd": liger_fn.fused_linear_jsd,
}  # fmt: skip
OPTIONS = {
    "fused": {"softcap": 3.0, "chunk": 2},
    "dpo": {"beta": 0.3, "loss_type": ["hinge", "sft"], "softcap": 4.0}, "orpo": {},
    "cpo": {"nll_weight": 0.0}, "simpo": {"temperature": 0.7, "chunk": 2},
    "kto": {"undesirable_weight": 0.5}, "grpo": {"loss_type": "cispo", "beta": 0.1},
    "jsd": {"beta": 0.2, "reduction": "none"},
}  # fmt: skip
on_heads = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.mark.parametrize("shape", [(V,), (4, V), (4, V, 3), (2, V, 3, 2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_that_of_torch_with_classes_on_its_axis(device, shape, reduction):
    weight = torch.rand(V, device=device, dtype=torch.float64)
    options = {"weight": weight, "ignore_index": 2, "label_smoothing": 0.1, "reduction": reduction}
    logits = torch.randn(shape, device=device, dtype=torch.float64)
    y = torch.randint(V, (*shape[:1], *shape[2:]) if len(shape) > 1 else (), device=device)
    ours, theirs = nn.CrossEntropyLoss(**options), torch.nn.CrossEntropyLoss(**options)
    want = theirs.cpu()(logits.cpu(), y.cpu()).to(device)  # on CUDA torch has no deterministic one
    torch.testing.assert_close(ours(logits, y), want)
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]


def test_a_head_gives_logits_or_the_loss_of_these_logits(device):
    head = nn.LMHead(D, V, device=device, dtype=torch.float64, loss=copy.deepcopy(LOSS))
    x, y = torch.randn(2, 5, D, device=device).double(), torch.randint(V, (2, 5), device=device)
    z = head(x)
    torch.testing.assert_close(z, 3.0 * torch.tanh(F.linear(x, head.weight, head.bias) / 6.0))
    want = F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(head(x, y), want)
    torch.testing.assert_close(head(x, y, n_valid=5.0), 2 * want)
    torch.testing.assert_close(head(x, y, token_weight=torch.ones_like(x[..., 0]) / 2), want / 2)
    torch.testing.assert_close(LOSS(head.weight, x, y, head.bias), want)


def test_hooks_around_a_head_see_the_call_that_forms_the_loss(device):
    head, seen = nn.LMHead(D, V, bias=False, device=device), []
    head.register_forward_pre_hook(lambda *a: seen.append("before"))
    head.register_forward_hook(lambda *a: seen.append("after"))
    head(torch.randn(3, D, device=device), torch.arange(3, device=device)).backward()
    assert seen == ["before", "after"]
    assert list(head.state_dict()) == ["weight"]


# -- losses of post-training


@on_heads
def test_a_loss_is_its_function_with_its_options(device, name):
    args, kw = inputs(name, device)
    w, x = (t.requires_grad_() for t in args[:2])
    got, want = made(name, device)(*args, **kw), FUNCTIONS[name](*args, **kw, **OPTIONS[name])
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for a, b in zip(*(torch.autograd.grad(t.sum(), (w, x)) for t in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@on_heads
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_gives_its_weight_to_any_loss(device, name, bias):
    (_, x, *targets), kw = inputs(name, device)
    head = nn.LMHead(D, V, bias, device=device, loss=MODULES[name].make())
    want = FUNCTIONS[name](head.weight, x, *targets, b=head.bias, **kw, **OPTIONS[name])
    torch.testing.assert_close(head(x, *targets, **kw), want, rtol=0, atol=0)
    z, cap = F.linear(x, head.weight, head.bias), OPTIONS[name].get("softcap")
    for logits in (head(x), head(x, None), head(x, n_valid=None)):
        torch.testing.assert_close(logits, z if cap is None else cap * torch.tanh(z / cap))
    for again in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        torch.testing.assert_close(again(x, *targets, **kw), want, rtol=0, atol=0)


def test_a_head_takes_a_function_as_its_loss(device):
    (_, x, y), kw = inputs("dpo", device)
    head = nn.LMHead(D, V, device=device, loss=liger_fn.dpo_loss_with_metrics)
    got = pickle.loads(pickle.dumps(head))(x, y, **kw)
    want = liger_fn.dpo_loss_with_metrics(head.weight, x, y, b=head.bias, **kw)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(head(x), F.linear(x, head.weight, head.bias))


def test_a_loss_adds_nothing_to_the_state_of_a_head(device):
    assert list(nn.LMHead(D, V, device=device, loss=nn.DPOLoss()).state_dict()) == [
        "weight",
        "bias",
    ]


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (nn.ORPOLoss, {"bta": 1.0}, TypeError, r"^ORPOLoss: options are beta, .*, got bta$"),
        (nn.DPOLoss, {"ref_logp": None}, TypeError, "^DPOLoss: options are wpo, .*, got ref_logp$"),
        (nn.DPOLoss, {"loss_type": "dpo"}, ValueError, "^dpo_loss: loss_type must be one of"),
        (nn.DPOLoss, {"f_alpha": 0.2}, ValueError, "^dpo_loss: f_alpha cannot be used with f_div"),
        (nn.CPOLoss, {"label_smoothing": 1}, ValueError, r"^cpo_loss: label_smoothing must lie in"),
        (nn.SimPOLoss, {"beta": 0.0}, ValueError, "^simpo_loss: beta must be above 0, got 0.0$"),
        (
            nn.KTOLoss,
            {"desirable_weight": -1},
            ValueError,
            "^kto_loss: desirable_weight must be at",
        ),
        (nn.GRPOLoss, {"beta": -0.1}, ValueError, "^grpo_loss: beta must be at least 0, got -0.1$"),
        (nn.GRPOLoss, {"delta": 2.0, "loss_type": "sapo"}, ValueError, "^grpo_loss: delta cannot"),
        (nn.JSDLoss, {"beta": 2.0}, ValueError, r"^fused_linear_jsd: beta must lie in \[0, 1\]"),
        (nn.JSDLoss, {"chunk": 0}, ValueError, "^fused_linear_jsd: chunk must be an integer above"),
    ],
)
def test_a_wrong_option_is_refused_when_the_module_is_made(kind, options, error, message):
    with pytest.raises(error, match=message):
        kind(**options)


@pytest.mark.parametrize("loss_type", ["sft", ["sft"], ("sft",)])
def test_the_loss_that_has_no_reference_is_made_and_called_without(device, loss_type):
    args, _ = inputs("dpo", device)
    loss = nn.DPOLoss(loss_type=loss_type)
    torch.testing.assert_close(loss(*args), liger_fn.dpo_loss(*args, loss_type="sft"))


def test_an_option_cannot_change_in_a_call(device):
    args, _ = inputs("orpo", device)
    with pytest.raises(TypeError, match=r"multiple values for keyword argument 'beta'"):
        nn.ORPOLoss()(*args, beta=0.2)


def test_a_loss_is_made_whatever_the_default_device_and_backend_are(device):
    with torch.device("meta"):
        nn.DPOLoss()
    with liger_fn.using("triton"):
        nn.DPOLoss()
