"""Every family of Hugging Face models that the adapters name: what is recognised, and that it is.

The golden table holds what `report` says of each; a change of transformers shows here as a diff.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import liger_fn
from liger_fn.nn import adapters
from liger_fn.nn.adapters import adapt, check_adapter, report, restore, token_logprobs
from liger_fn.nn.adapters.fingerprint import Affine, Gate, Glu, Norm, Rope
from tests import zoo
from tests.adapted import nodes, on
from tests.tolerance import same_bits

pytestmark = [
    pytest.mark.usefixtures("plain"),
    # Mllama calls its own layers by the old name
    pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning"),
]
every = pytest.mark.parametrize("name", zoo.FAMILIES)

LLAMA, GEMMA = Norm("variance_epsilon", 0.0, "llama"), Norm("eps", 1.0, "gemma")
OLMO = Norm("variance_epsilon", 0.0, "gemma")
THREE, TWO = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
SILU, GELU, PACKED, GATE = (
    Glu("silu", THREE),
    Glu("gelu_tanh", THREE),
    Glu("silu", TWO),
    Gate("silu"),
)
HALF, PAIRS = Rope("half"), Rope("interleaved")
HEAD = "lm_head"


def llama_like(stem: str, norms: int = 5, norm: Norm = LLAMA, glu: Glu = SILU, rope: Rope = HALF):
    """Rows of a decoder of two layers."""
    return {
        (f"{stem}RMSNorm", norms, norm), (f"{stem}MLP", 2, glu), (f"{stem}Attention", 2, rope),
        (f"{stem}ForCausalLM", 1, HEAD),
    }  # fmt: skip


MOE = {("MixtralRMSNorm", 5, LLAMA), ("MixtralExperts", 2, GATE), ("MixtralAttention", 2, HALF),
       ("MixtralForCausalLM", 1, HEAD)}  # fmt: skip
MLLAMA = {("MllamaTextRMSNorm", 9, LLAMA), ("MllamaTextMLP", 3, SILU),
          ("MllamaTextSelfAttention", 2, HALF)}  # fmt: skip
ROWS: dict[str, set[tuple[str, int, Any]]] = {
    "llama": llama_like("Llama"),
    "llama3": llama_like("Llama"),
    "mistral": llama_like("Mistral"),
    "mixtral": MOE,
    "mixtral_aux": MOE,
    "gemma": llama_like("Gemma", 5, GEMMA, GELU),
    "gemma2": llama_like("Gemma2", 9, GEMMA, GELU),
    "gemma3": llama_like("Gemma3", 13, GEMMA, GELU),
    "gemma3_mm": llama_like("Gemma3", 14, GEMMA, GELU) - {("Gemma3ForCausalLM", 1, HEAD)}
    | {("Gemma3ForConditionalGeneration", 1, HEAD), ("LayerNorm", 4, Affine())},
    "qwen2": llama_like("Qwen2"),
    "qwen2_vl": {("Qwen2VLRMSNorm", 5, LLAMA), ("Qwen2MLP", 2, SILU), ("LayerNorm", 3, Affine()),
                 ("Qwen2VLAttention", 2, HALF), ("Qwen2VLForConditionalGeneration", 1, HEAD)},
    "qwen2_5_vl": {("Qwen2_5_VLRMSNorm", 8, LLAMA), ("Qwen2MLP", 2, SILU),
                   ("Qwen2_5_VLMLP", 1, SILU), ("Qwen2_5_VLAttention", 2, HALF),
                   ("Qwen2_5_VLForConditionalGeneration", 1, HEAD)},
    "qwen3": llama_like("Qwen3", 9),
    "qwen3_moe": {("Qwen3MoeRMSNorm", 9, LLAMA), ("Qwen3MoeMLP", 1, SILU),
                  ("Qwen3MoeExperts", 1, GATE), ("Qwen3MoeAttention", 2, HALF),
                  ("Qwen3MoeForCausalLM", 1, HEAD)},
    "phi3": llama_like("Phi3", glu=PACKED),
    "phi3_partial": llama_like("Phi3", glu=PACKED),
    "granite": llama_like("Granite"),
    "olmo2": llama_like("Olmo2", 9, OLMO),
    "glm4": llama_like("Glm4", 9, glu=PACKED, rope=PAIRS),
    "mllama": MLLAMA | {("LayerNorm", 8, Affine()), ("MllamaForConditionalGeneration", 1, HEAD)},
    "mllama_text": MLLAMA | {("MllamaForCausalLM", 1, HEAD)},
}  # fmt: skip
LEFT: dict[str, set[str]] = {
    "gemma3_mm": {"SiglipAttention", "SiglipMLP", "MultiheadAttention"},
    "qwen2_vl": {"VisionAttention"},
    "qwen2_5_vl": {"Qwen2_5_VLVisionAttention"},
    "mllama": {"MllamaVisionAttention", "MllamaVisionMLP", "MllamaTextCrossAttention"},
    "mllama_text": {"MllamaTextCrossAttention"},
}
# SigLIP's last norm is before a pooling that nobody reads; without an image Mllama skips a layer
UNUSED = {"gemma3_mm": 1, "mllama_text": 5}
UNFUSED: set[str] = set()

if zoo.OLD:
    experts = ("MixtralBlockSparseTop2MLP", 8, Glu("silu", ("w1", "w3", "w2")))
    ROWS["mixtral"] = ROWS["mixtral_aux"] = MOE - {("MixtralExperts", 2, GATE)} | {experts}
    ROWS["qwen3_moe"] = ROWS["qwen3_moe"] - {
        ("Qwen3MoeExperts", 1, GATE), ("Qwen3MoeMLP", 1, SILU)
    } | {("Qwen3MoeMLP", 5, SILU)}  # fmt: skip
    for name, stem, norms in (("qwen2_vl", "Qwen2VL", 5), ("qwen2_5_vl", "Qwen2_5_VL", 8)):
        theirs = {(f"{stem}RMSNorm", norms, LLAMA), (f"{stem}Attention", 2, HALF)}
        ROWS[name] = ROWS[name] - theirs | {("Qwen2RMSNorm", norms, LLAMA)}
        LEFT[name] = LEFT[name] | {f"{stem}Attention"}  # it rotates by sections of its own
    UNFUSED = {"gemma3_mm"}  # it slices its logits before a loss of its own
    UNUSED["gemma3_mm"] = 2


@every
def test_report_says_what_the_golden_table_says(name):
    said = report(zoo.build(name))
    assert {(r.name, r.count, r.spec) for r in said.rows} == ROWS[name]
    assert {r.name for r in said.skipped} == LEFT.get(name, set())
    assert all(r.name in str(said) for r in (*said.rows, *said.skipped))


@every
@pytest.mark.parametrize("items", [None, 7])
def test_loss_and_gradients_are_those_of_the_plain_model(device, name, items):
    batch = on(device, zoo.batch(name))
    if items is not None:
        batch["num_items_in_batch"] = torch.tensor(items)
    got = check_adapter(zoo.build(name).to(device), batch)
    assert got.loss_error <= 1e-6
    assert got.grad_error <= 1e-5


@every
def test_each_recognised_module_runs_one_function_and_no_logits_exist(device, name):
    model = adapt(zoo.build(name).to(device))
    out = model(**on(device, zoo.batch(name)))
    assert nodes(out.loss) == sum(n for _, n, _ in ROWS[name]) - UNUSED.get(name, 0)
    assert isinstance(out.logits, adapters.DeferredLogits)
    assert (out.logits._value is None) == (name not in UNFUSED)


@every
def test_norms_gates_and_rotations_in_half_precision_are_bit_identical(name):
    model, batch = zoo.build(name, torch.bfloat16), zoo.batch(name)
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    want = model(**batch).logits
    adapt(model, layer_norm=False, cross_entropy=False, fused_linear_ce=False)
    assert same_bits(model(**batch).logits.detach(), want.detach())


@every
def test_token_logprobs_are_the_log_softmax_of_the_logits(device, name):
    model, batch = zoo.build(name).to(device), on(device, zoo.batch(name))
    labels = batch.pop("labels")
    rows = model(**batch).logits[:, :-1].double().log_softmax(-1)
    want = rows.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    want = want.masked_fill(labels[:, 1:] == -100, 0.0)
    got = token_logprobs(adapt(model), labels=labels, **batch)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert got.requires_grad


@every
def test_an_adapted_model_in_eval_gives_real_logits_and_the_same_loss(device, name):
    model, batch = zoo.build(name).to(device).eval(), on(device, zoo.batch(name))
    want = model(**batch)
    got = adapt(model)(**batch)
    assert isinstance(got.logits, Tensor)
    assert type(got) is type(want)
    assert list(got.keys()) == list(want.keys())
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    quiet = model(**batch, skip_logits=True)
    assert isinstance(quiet.logits, adapters.DeferredLogits)
    torch.testing.assert_close(quiet.loss, want.loss, rtol=1e-6, atol=1e-6)


@every
def test_restore_leaves_no_trace_and_no_other_model_changes(name):
    model = zoo.build(name)
    before = {n: (set(vars(m)), type(m).forward) for n, m in model.named_modules()}
    keys = list(model.state_dict())
    other = copy.deepcopy(model)
    adapt(adapt(model))
    assert list(model.state_dict()) == keys
    assert {n: (set(vars(m)), type(m).forward) for n, m in other.named_modules()} == before
    restore(model)
    assert {n: (set(vars(m)), type(m).forward) for n, m in model.named_modules()} == before


@pytest.mark.parametrize("name", ["llama", "gemma2", "glm4", "mixtral"])
def test_a_decoder_writes_the_same_text(device, name):
    model = zoo.build(name).to(device).eval()
    ids = on(device, zoo.batch(name))["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    want = model.generate(ids, **options)
    assert torch.equal(adapt(model).generate(ids, **options), want)


def test_the_kernels_run_a_whole_model_too(device):
    with liger_fn.using("triton"):
        got = check_adapter(zoo.build("llama").to(device), on(device, zoo.batch("llama", t=5)))
    assert got.grad_error <= 1e-5
