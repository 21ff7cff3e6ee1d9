"""Calls of an adapted model: logits that are kept, caches, odd heads, weights in other places."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers as hf
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_fn
from liger_fn.nn import adapters
from liger_fn.nn.adapters import DeferredLogits, adapt, report, token_logprobs
from liger_fn.nn.adapters.binding import bind
from liger_fn.nn.adapters.head import _fused_ce, head_forward
from tests import zoo
from tests.adapted import ALL, gradients, nodes, on, same_gradients

pytestmark = pytest.mark.usefixtures("plain")


# -- logits that are kept


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "mixtral_aux"])
@pytest.mark.parametrize("kept", [8, torch.tensor([1, 2, 5, 6, 9, 10])], ids=["last", "index"])
def test_logits_that_are_kept_have_the_loss_of_their_labels(device, name, kept):
    model, batch = zoo.build(name).to(device), on(device, zoo.batch(name))
    if isinstance(kept, Tensor):
        kept = kept.to(device)
    at = slice(-kept, None) if isinstance(kept, int) else kept
    batch |= {"labels": batch["labels"][:, at], "logits_to_keep": kept}
    same_gradients(model, batch)
    logits = adapt(model)(**batch).logits
    assert logits._value is None
    assert logits.shape[:2] == batch["labels"].shape


@pytest.mark.parametrize("kept", [1, torch.tensor([3, 0])], ids=["last", "index"])
def test_logits_that_are_kept_without_labels_are_the_real_ones(llama, batch, kept):
    del batch["labels"]
    want = (
        llama(**batch).logits[:, -1:] if isinstance(kept, int) else llama(**batch).logits[:, kept]
    )
    got = adapt(llama)(**batch, logits_to_keep=kept).logits
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# -- caches


@pytest.mark.parametrize("name", ["llama", "gemma2", "glm4", "olmo2"])
@pytest.mark.parametrize("training", [False, True])
def test_a_cache_carries_the_beginning_of_a_text(device, name, training):
    model = zoo.build(name).to(device).train(training)
    ids = on(device, zoo.batch(name))["input_ids"]

    def read_in_two() -> list[Tensor]:
        first = model(input_ids=ids[:, :7], use_cache=True)
        rest = model(input_ids=ids[:, 7:], past_key_values=first.past_key_values)
        return [first.logits, rest.logits]

    with torch.no_grad():
        want, whole = read_in_two(), model(input_ids=ids).logits
        adapt(model)
        for got, wanted in zip(read_in_two(), want, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        if not training:  # in training 4.57 gives Gemma 2 no cache
            torch.testing.assert_close(torch.cat(want, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "how",
    [{"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}],
    ids=["beams", "static", "none"],
)
def test_text_is_written_the_same_whatever_the_search_and_the_cache(llama, batch, how):
    ids = batch["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    options |= how | ({"disable_compile": True} if "cache_implementation" in how else {})
    want = llama.eval().generate(ids, **options)
    assert torch.equal(adapt(llama).generate(ids, **options), want)


# -- heads


class Odd(hf.LlamaForCausalLM):
    """Does to its logits what is no scale and no soft cap."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kw):
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        logits, loss = self.changed(self.lm_head(out.last_hidden_state)), None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kw)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def changed(self, logits):
        return logits.tanh().tanh()


def test_logits_of_another_form_are_made_and_their_loss_is_right(device, batch):
    model = Odd(hf.LlamaConfig(**zoo.TEXT)).to(device).train()
    same_gradients(model, batch)
    labels = batch.pop("labels")
    logp = model(**batch).logits[:, :-1].log_softmax(-1)
    want = logp.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    got = token_logprobs(adapt(model), labels=labels, **batch)
    torch.testing.assert_close(got, want.masked_fill(labels[:, 1:] == -100, 0.0))


class Written(Odd):
    """Writes to its logits before it forms their loss, as Chameleon does."""

    def changed(self, logits):
        logits[..., :5] = -1e4
        logits.mul_(0.5)
        return 2 * logits.float()


def test_logits_that_a_model_writes_to_are_those_of_its_loss(device, batch):
    model = Written(hf.LlamaConfig(**zoo.TEXT)).to(device).train()
    same_gradients(model, batch)


def halve(module, args, *logits):
    return logits[0] / 2 if logits else (args[0] / 2,)


@pytest.mark.parametrize("when", ["register_forward_pre_hook", "register_forward_hook"])
def test_a_hook_on_the_head_sees_logits(llama, batch, when):
    early = adapt(llama)
    getattr(llama.lm_head, when)(functools.partial(halve))
    got, found = gradients(early, batch)
    want, wanted = gradients(adapters.restore(llama), batch)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    same_gradients(llama, batch)
    assert [r.spec for r in report(llama).skipped] == ["hooks of others see the logits of its head"]


def test_a_hook_on_the_head_sees_the_gradient_of_logits(llama, batch):
    seen = []
    llama.lm_head.register_full_backward_hook(lambda m, dx, dy: seen.append(dy[0].shape))
    adapt(llama)(**batch).loss.backward()
    assert seen == [(*batch["input_ids"].shape, zoo.VOCAB)]


@pytest.mark.parametrize("package", ["torch", "accelerate", "deepspeed", "trl"])
def test_a_hook_of_an_engine_leaves_the_head_fused(llama, batch, package):
    def gathered(*args):
        return None

    gathered.__module__ = f"{package}.somewhere"
    llama.lm_head.register_forward_pre_hook(functools.partial(gathered, 1))
    assert isinstance(adapt(llama)(**batch).logits, DeferredLogits)


class Coarse(torch.nn.Linear):
    """Stands for a quantised layer: its forward is its own, its weight is read another way."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, (self.weight * 8).round() / 8, self.bias)


def coarse(linear: torch.nn.Linear) -> Coarse:
    made = Coarse(linear.in_features, linear.out_features, bias=False)
    made.weight = linear.weight
    return made


def test_layers_of_another_class_keep_their_forward_and_such_a_head_its_logits(llama, batch):
    for layer in llama.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, coarse(getattr(layer.mlp, name)))
    same_gradients(llama, batch)
    assert nodes(adapt(llama)(**batch).loss) == ALL
    llama.lm_head = coarse(llama.lm_head)
    assert [r.spec for r in report(llama).skipped] == ["its head is a Coarse, not a plain Linear"]
    assert isinstance(adapt(llama)(**batch).logits, Tensor)
    same_gradients(llama, batch)


def test_a_head_that_tensor_parallelism_shards_keeps_its_logits(llama, batch, monkeypatch):
    monkeypatch.setattr(llama, "_tp_size", 2)
    reasons = [r.spec for r in report(llama).skipped]
    assert reasons == ["its head is sharded by tensor parallelism"]
    assert isinstance(adapt(llama)(**batch).logits, Tensor)


def test_targets_follow_the_activations_that_a_hook_moves():
    head = torch.nn.Linear(4, 7, bias=False, device="meta")
    bind(head, head_forward)
    head.register_forward_pre_hook(lambda _, args: (args[0].to("meta"), *args[1:]))
    options: dict[str, Any] = {"y": torch.tensor([1, 2]), "n_valid": torch.tensor(2)}
    loss = DeferredLogits(torch.randn(2, 4), head).through(
        functools.partial(_fused_ce, ignore_index=-100, **options)
    )
    assert loss.device.type == "meta"


# -- deferred logits


def test_deferred_logits_stay_so_in_another_dtype_or_place(device):
    head = torch.nn.Linear(4, 7, device=device)
    z = DeferredLogits(torch.randn(3, 4, device=device), head)
    z.version = head.weight._version
    late = z.float()
    for cast in (z.to(torch.float64), z.to(device, non_blocking=True).to(torch.float64)):
        assert isinstance(cast, DeferredLogits)
        assert (cast.dtype, cast.device.type, cast.version) == (
            torch.float64,
            device.type,
            z.version,
        )
        assert cast.form() == (1.0, None)
        torch.testing.assert_close(cast.value(), z.value().double())
    assert z.to("meta").device.type == "meta"
    assert isinstance(z.to(torch.float64, copy=True), Tensor)
    with torch.no_grad():
        head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"^these logits were deferred and the weight"):
        late.sum()
    z.float().sum()  # of those that were read in time


# -- models in several places


def test_weights_on_a_disk_are_read_for_each_call(llama, batch, tmp_path):
    pytest.importorskip("accelerate")
    want, labels = llama(**batch), batch["labels"]
    ids = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(labels)}
    text = llama.eval().generate(**ids, max_new_tokens=4, do_sample=False)
    llama.cpu().save_pretrained(tmp_path)
    places = {"model": "cpu", "model.layers.1": "disk", "lm_head": "disk"}
    places |= {
        f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb", "layers.0")
    }
    del places["model"]
    model = adapters.AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path, attn_implementation="eager"
    )
    batch, ids = (on(torch.device("cpu"), d) for d in (batch, ids))
    assert model.lm_head.weight.is_meta
    with torch.no_grad(), liger_fn.using("reference"):
        got = model.train()(**batch)
        assert isinstance(got.logits, DeferredLogits)
        assert got.logits._value is None
        torch.testing.assert_close(got.loss, want.loss.cpu())
        torch.testing.assert_close(got.logits + 0, want.logits.detach().cpu(), rtol=1e-4, atol=1e-4)
        logp = token_logprobs(model, **batch)
        nll = -logp.sum() / (batch["labels"][:, 1:] != -100).sum()
        torch.testing.assert_close(nll, want.loss.detach().cpu())
        again = model.eval().generate(**ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(again, text.cpu())


def test_a_model_in_four_bits_trains_its_adapters_alike(llama, batch, tmp_path):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    llama.save_pretrained(tmp_path)
    four = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=four, device_map={"": batch["labels"].device},
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, config).train()
    want, wanted = gradients(model, batch)
    got, grads = gradients(adapt(model), batch)
    assert nodes(model(**batch).loss) == ALL - 1  # nothing before the first norm has a gradient
    torch.testing.assert_close(got, want)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
