"""Tiny random models of every family that the adapters name: two layers, width 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCAB = 131
IMAGE = 130  # the token that stands for a piece of an image
OURS = range(3, 120)  # tokens that mean nothing special anywhere

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {"head_dim": 16}
GEMMA = HEAD | {"query_pre_attn_scalar": 16, "sliding_window": 8}
GEMMA3 = GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_experts_per_tok": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
OLD = hf.__version__.startswith("4.")
ROPE_KEY = "rope_scaling" if OLD else "rope_parameters"
PARTIAL = {"partial_rotary_factor": 0.5}


def text(family: str, config: str = "", **changed: Any) -> Callable[[], hf.PreTrainedModel]:
    """A family of language models by the stem of its names."""
    config = config or f"{family}Config"
    return lambda: getattr(hf, f"{family}ForCausalLM")(getattr(hf, config)(**TEXT | changed))


def seeing(family: str, texts: dict[str, Any], vision: dict[str, Any], **more: Any) -> Callable:
    """A family of models for text and images."""

    def make() -> hf.PreTrainedModel:
        config = getattr(hf, f"{family}Config")(text_config=texts, vision_config=vision, **more)
        return getattr(hf, f"{family}ForConditionalGeneration")(config)

    return make


QWEN_TEXT = TEXT | {ROPE_KEY: ROPE | {"type": "default", "mrope_section": [1, 1, 2]}}
QWEN = {
    "image_token_id": IMAGE, "video_token_id": 127, "vision_start_token_id": 126,
    "vision_end_token_id": 125, "vocab_size": VOCAB,
}  # fmt: skip
PATCH = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
MLLAMA_TEXT = TEXT | {"cross_attention_layers": [1], "num_hidden_layers": 3, ROPE_KEY: ROPE}
MLLAMA_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
    "attention_heads": 2, "image_size": 28, "patch_size": 14, "max_num_tiles": 2,
    "vision_output_dim": 64, "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
}  # fmt: skip
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip

FAMILIES: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": text("Llama"),
    "llama3": text("Llama", tie_word_embeddings=True, **{ROPE_KEY: LLAMA3}),
    "mistral": text("Mistral", sliding_window=8),
    "mixtral": text("Mixtral", **MOE, num_local_experts=4),
    "mixtral_aux": text(
        "Mixtral", **MOE, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1
    ),
    "gemma": text("Gemma", **HEAD),
    "gemma2": text("Gemma2", **GEMMA, final_logit_softcapping=3.0, attn_logit_softcapping=20.0),
    "gemma3": text("Gemma3", "Gemma3TextConfig", **GEMMA3),
    "gemma3_mm": seeing(
        "Gemma3", TEXT | GEMMA3, SIGLIP, mm_tokens_per_image=4, image_token_index=IMAGE,
        boi_token_index=128, eoi_token_index=129,
    ),
    "qwen2": text("Qwen2"),
    "qwen2_vl": seeing(
        "Qwen2VL", QWEN_TEXT,
        PATCH | {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        **QWEN,
    ),
    "qwen2_5_vl": seeing(
        "Qwen2_5_VL", QWEN_TEXT,
        PATCH | {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32,
                 "num_heads": 2, "window_size": 56, "fullatt_block_indexes": [0]},
        **QWEN,
    ),
    "qwen3": text("Qwen3", **HEAD),
    "qwen3_moe": text(
        "Qwen3Moe", **HEAD, **MOE, num_experts=4, moe_intermediate_size=24, decoder_sparse_step=1,
        mlp_only_layers=[0],
    ),
    "phi3": text("Phi3"),
    "phi3_partial": text("Phi3", **(PARTIAL if OLD else {ROPE_KEY: ROPE | PARTIAL})),
    "granite": text(
        "Granite", logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5,
        attention_multiplier=0.25,
    ),
    "olmo2": text("Olmo2"),
    "glm4": text("Glm4", **HEAD, attention_bias=True),
    "mllama": seeing("Mllama", MLLAMA_TEXT, MLLAMA_VISION, image_token_index=IMAGE),
    "mllama_text": lambda: hf.MllamaForCausalLM(
        hf.models.mllama.configuration_mllama.MllamaTextConfig(**MLLAMA_TEXT)
    ),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32) -> hf.PreTrainedModel:
    """A model in training mode, its gains off their start and its logits sharp."""
    torch.manual_seed(0)
    model = FAMILIES[name]().to(dtype)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.dim() == 1 and "norm" in key and key.endswith("weight"):
                p.add_(0.2 * torch.randn_like(p))
            elif "lm_head" in key or "embed_tokens" in key:
                p.mul_(8)
    return model.train()


def batch(name: str, b: int = 2, t: int = 12) -> dict[str, Tensor]:
    """Keyword arguments of a training step; labels are ignored in part, the second row padded."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(OURS.start, OURS.stop, (b, t), generator=g)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    made = {"input_ids": ids, "attention_mask": mask}
    if name == "gemma3_mm":
        ids[:, 1:7] = torch.tensor([128, IMAGE, IMAGE, IMAGE, IMAGE, 129])
        made["pixel_values"] = torch.randn(b, 3, 28, 28, generator=g)
        made["token_type_ids"] = (ids == IMAGE).long()
    if name in ("qwen2_vl", "qwen2_5_vl"):
        ids[:, 1:4] = torch.tensor([126, IMAGE, 125])
        made["image_grid_thw"] = torch.tensor([[1, 2, 2]] * b)
        made["pixel_values"] = torch.randn(b * 4, 3 * 2 * 14 * 14, generator=g)
        if not OLD:
            made["mm_token_type_ids"] = (ids == IMAGE).long()
    if name == "mllama":
        made["pixel_values"] = torch.randn(b, 1, 2, 3, 28, 28, generator=g)
        made["aspect_ratio_ids"] = torch.ones(b, 1, dtype=torch.long)
        made["aspect_ratio_mask"] = torch.ones(b, 1, 2, dtype=torch.long)
        made["cross_attention_mask"] = torch.ones(b, t, 1, 2, dtype=torch.long)
    ignored = (mask == 0) | (ids >= OURS.stop) | (torch.arange(t) < 2)
    return made | {"labels": ids.masked_fill(ignored, -100)}
