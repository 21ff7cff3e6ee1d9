"""An adapted model under other libraries: accelerate, PEFT, the Trainer of transformers, TRL."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf

import liger_fn
from liger_fn.nn import adapters
from liger_fn.nn.adapters import DeferredLogits, adapt, restore
from tests import zoo
from tests.adapted import ALL, gradients, nodes, on

pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture
def llama(device):
    return zoo.build("llama").to(device)


@pytest.fixture
def batch(device):
    return on(device, zoo.batch("llama"))


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


def test_the_sft_trainer_of_trl_trains_alike(llama, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    ids = torch.randint(3, 120, (8, 10)).tolist()
    rows = datasets.Dataset.from_list([{"input_ids": row} for row in ids])
    llama.cpu().save_pretrained(tmp_path / "model")
    args = trl.SFTConfig(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], bf16=False,
        save_strategy="no", logging_steps=1, disable_tqdm=True, use_cpu=True, learning_rate=1e-2,
    )  # fmt: skip
    words = tokenizer()
    seen = []
    for callbacks in ([], [adapters.AdaptCallback()]):
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        trainer = trl.SFTTrainer(
            model, args, train_dataset=rows, processing_class=words, callbacks=callbacks
        )
        with liger_fn.using("reference"):
            trainer.train()
        seen.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert seen[1] == pytest.approx(seen[0], rel=1e-4)


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """One that has a token for padding; the rows are tokens already."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"p": 0}, unk_token="p")
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="p", eos_token="p"
    )
