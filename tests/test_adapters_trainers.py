"""An adapted model under other libraries: accelerate, PEFT, the Trainer of transformers, TRL."""

from __future__ import annotations

import copy
import random

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf

import liger_fn
from liger_fn.nn import adapters
from liger_fn.nn.adapters import AdapterError, DeferredLogits, adapt, restore, token_logprobs
from tests import zoo
from tests.adapted import ALL, gradients, nodes, on

pytestmark = pytest.mark.usefixtures("plain")


def test_hooks_of_accelerate_stay(llama, batch):
    hooks = pytest.importorskip("accelerate.hooks")
    want = llama(**batch).loss
    for m in (llama, llama.model.norm, llama.lm_head, llama.model.layers[0].mlp):
        hooks.add_hook_to_module(m, hooks.ModelHook())
    assert nodes(adapt(llama)(**batch).loss) == ALL
    torch.testing.assert_close(llama(**batch).loss, want)
    restore(llama)
    assert nodes(llama(**batch).loss) == 0
    hooks.add_hook_to_module(
        adapt(llama).model.layers[1].mlp, hooks.ModelHook()
    )  # one that is late
    assert nodes(llama(**batch).loss) == ALL
    assert nodes(restore(llama)(**batch).loss) == 0


@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj", "lm_head"], []], ids=["linear", "head", "saved"]
)
@pytest.mark.parametrize("first", [False, True])
def test_lora_trains_alike(llama, batch, targets, first):
    peft = pytest.importorskip("peft")
    config = {"target_modules": targets or ["q_proj"], "init_lora_weights": False}
    config |= {} if targets else {"modules_to_save": ["lm_head"]}
    if first:
        adapt(llama)
    torch.manual_seed(1)
    model = peft.get_peft_model(llama, peft.LoraConfig(**config))
    ours, grads = gradients(model if first else adapt(model), batch)
    got = model(**batch)
    assert nodes(got.loss) == ALL - 1  # nothing before the first norm has a gradient
    assert isinstance(got.logits, DeferredLogits) == (targets == "all-linear")
    want, wanted = gradients(restore(model), batch)
    torch.testing.assert_close(ours, want)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("how", ["model", "callback"])
def test_the_trainer_of_transformers_trains_alike(llama, batch, how, tmp_path):
    pytest.importorskip("accelerate")
    rows = [{k: v[i % 2].cpu() for k, v in batch.items()} for i in range(8)]
    args = hf.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        use_cpu=batch["labels"].device.type == "cpu", learning_rate=1e-2,
    )  # fmt: skip
    ours = adapt(copy.deepcopy(llama)) if how == "model" else copy.deepcopy(llama)
    callbacks = [adapters.AdaptCallback(rope=True)] if how == "callback" else []
    seen = []
    for model, extra in ((llama, []), (ours, callbacks)):
        trainer = hf.Trainer(model, args, train_dataset=rows, eval_dataset=rows, callbacks=extra)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        seen.append([*losses, trainer.evaluate()["eval_loss"]])
    assert seen[1] == pytest.approx(seen[0], rel=1e-4)
    assert nodes(ours(**batch).loss) == ALL


def test_the_one_line_loader_gives_an_adapted_model(llama, batch, tmp_path):
    llama.cpu().save_pretrained(tmp_path)
    batch = on(torch.device("cpu"), batch)
    with liger_fn.using("reference"):
        model = adapters.AutoModelForCausalLM.from_pretrained(tmp_path).train()
        assert nodes(model(**batch).loss) == ALL
        made = adapters.AutoModelForCausalLM.from_config(llama.config).train()
        assert nodes(made(**batch).loss) == ALL


def test_logprobs_pass_the_wrapper_of_another_library(llama, batch):
    labels = batch.pop("labels")
    want = token_logprobs(adapt(llama), labels=labels, **batch)
    ours = llama.forward
    llama.forward = lambda *args, **kw: ours(*args, **kw)
    got = token_logprobs(llama, labels=labels, **batch)
    assert torch.equal(got, want)
    assert nodes(got.sum()) == ALL  # the head among them: no logits
    llama.forward = lambda *args, through_head, **kw: ours(*args, **kw)
    with pytest.raises(AdapterError, match=r"^token_logprobs: LlamaForCausalLM was adapted, but"):
        token_logprobs(llama, labels=labels, **batch)


WORDS = [f"w{i}" for i in zoo.OURS]
KINDS = {
    "SFT": ("text",),
    "DPO": ("prompt", "chosen", "rejected"),
    "KTO": ("prompt", "completion"),
    "Reward": ("chosen", "rejected"),
}


@pytest.mark.parametrize("how", ["model", "callback"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_trainers_of_trl_train_alike(device, kind, how, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    draw = random.Random(0)
    rows = [{k: " ".join(draw.choices(WORDS, k=6)) + " " for k in KINDS[kind]} for _ in range(8)]
    if kind == "KTO":
        rows = [row | {"label": i % 2 == 0} for i, row in enumerate(rows)]
    args = getattr(trl, f"{kind}Config")(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[], bf16=False,
        save_strategy="no", logging_steps=1, disable_tqdm=True, use_cpu=device.type == "cpu",
        learning_rate=1e-2,
    )  # fmt: skip
    counts: list[int] = []

    class Counting(getattr(trl, f"{kind}Trainer")):
        def compute_loss(self, *args, **kw):
            loss = super().compute_loss(*args, **kw)
            counts.append(nodes(loss))
            return loss

    seen = []
    for adapts in (False, True):
        model = rewarding() if kind == "Reward" else zoo.build("llama")
        reference = {"ref_model": copy.deepcopy(model)} if kind in ("DPO", "KTO") else {}
        trainer = Counting(
            adapt(model) if adapts and how == "model" else model, args=args, **reference,
            train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer(),
            callbacks=[adapters.AdaptCallback()] if adapts and how == "callback" else [],
        )  # fmt: skip
        trainer.train()
        seen.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(seen[0]) == 3
    assert len(set(seen[0])) == 3
    assert seen[1] == pytest.approx(seen[0], rel=1e-4)
    # the loss is TRL's own
    assert counts == [0] * 3 + [ALL - 1] * 3


def rewarding() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.LlamaForSequenceClassification(hf.LlamaConfig(**zoo.TEXT, num_labels=1))


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """A token for each word."""
    tokenizers = pytest.importorskip("tokenizers")
    numbers = {"pad": 0, "end": 2, **dict(zip(WORDS, zoo.OURS, strict=True))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="pad"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="pad", eos_token="end")
