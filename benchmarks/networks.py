"""Models of Hugging Face in the sizes of real ones, with random weights, on one process or more.

A parameter is drawn whole, by a seed of its own, and each rank keeps its shard: the weights are the
same in each variant and on any number of ranks, and no rank ever holds the whole model. Attention
is torch's, which leaves out the soft cap that Gemma 2 has there; that of its logits stays.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("LlamaConfig", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "rope_theta": 5e5, "max_position_embeddings": 131072,
    }),
    "llama-3.2-1b": ("LlamaConfig", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "rope_theta": 5e5, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    }),
    "qwen-2.5-7b": ("Qwen2Config", {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "rope_theta": 1e6, "max_position_embeddings": 131072,
    }),
    "gemma-2-9b": ("Gemma2Config", {
        "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "vocab_size": 256000, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 256, "max_position_embeddings": 131072,
    }),
    "tiny": ("LlamaConfig", {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    }),
    "tiny-gemma": ("Gemma2Config", {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
        "query_pre_attn_scalar": 16,
    }),
}  # fmt: skip
VOCAB_PARALLEL = "vocab parallel"
TILES = "feed-forward in tiles"
MLP_CHUNK = 4096  # tokens of a tile


def build(
    shape: str, variant: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """A model to train, checkpointed, in one of the variants; sharded where there are ranks."""
    import transformers as hf
    from accelerate import init_empty_weights

    kind, options = SHAPES[shape]
    whose, *how = variant.split(", ")
    if whose == "Liger-Kernel":
        from liger_kernel.transformers import _apply_liger_kernel

        _apply_liger_kernel(kind.removesuffix("Config").lower())
    config = getattr(hf, kind)(**options, use_cache=False, attn_implementation="sdpa")
    with init_empty_weights():
        model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if dist.is_initialized():
        shard(model, device, dtype, VOCAB_PARALLEL in how)
    fill(model, device)
    if whose == "liger_fn":
        from liger_fn.nn.adapters import adapt

        options: dict[str, Any] = {"accum_dtype": torch.bfloat16} if "bf16 sums" in how else {}
        adapt(model, **options, mlp_chunk=MLP_CHUNK if TILES in how else None)
    if "compile" in how:
        for layer in model.model.layers:
            layer.compile(fullgraph=True)  # inside what checkpoints it
    return model.train()


def shard(model: Any, device: torch.device, dtype: torch.dtype, vocab_parallel: bool) -> None:
    """FSDP2 of each layer and the rest; or of all but the head, which is cut by columns."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard, init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from liger_fn.nn import LMHead, VocabParallelHead

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if not vocab_parallel:
        fully_shard(model, **options)
        return
    if model.config.tie_word_embeddings or getattr(model.config, "final_logit_softcapping", None):
        raise ValueError(f"{VOCAB_PARALLEL}: for a head of its own, without a soft cap")
    v, d = model.lm_head.weight.shape
    model.lm_head = LMHead(d, v, bias=False, device="meta", dtype=dtype)
    # each rank has tokens of its own: gathered for the head, their gradient cut again
    parallelize_module(model, mesh, {"lm_head": VocabParallelHead(input_layouts=Shard(0))})
    fully_shard(model.model, **options)
    for part in (model.model, *model.model.layers):
        part.set_gradient_divide_factor(1.0)  # the loss is that of all ranks, no mean to be taken
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other


@torch.no_grad()
def fill(model: nn.Module, device: torch.device) -> None:
    """Give parameters memory and values, and bring buffers to the device."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    config: Any = model.config
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    model.to_empty(device=device)
    for name, b in model.named_buffers():
        b.copy_(buffers[name])
    if config.tie_word_embeddings:
        model.tie_weights()  # type: ignore[operator]  # Module says Tensor
    gain = 0.0 if config.model_type.startswith("gemma") else 1.0  # Gemma adds 1 to it
    for seed, (name, p) in enumerate(model.named_parameters()):
        whole = torch.empty(p.shape, dtype=p.dtype, device=device)
        if p.dim() > 1:
            whole.normal_(0, 0.02, generator=torch.Generator(device).manual_seed(seed))
        else:
            whole.fill_(gain if name.endswith("weight") else 0.0)
        if isinstance(p, DTensor):
            whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
        p.copy_(whole)


def loss_of(model: Any, ids: Tensor, variant: str) -> Tensor:
    """Mean over the tokens of this rank; of all ranks where the head has the tokens of all."""
    if VOCAB_PARALLEL not in variant:
        return model(input_ids=ids, labels=ids).loss
    from torch.distributed._functional_collectives import all_gather_tensor

    x = model.model(input_ids=ids).last_hidden_state
    y = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    return model.lm_head(x, all_gather_tensor(y, 0, dist.group.WORLD))


def over_ranks(x: Tensor | float, device: torch.device, op: Any = dist.ReduceOp.SUM) -> float:
    t = torch.as_tensor(x, dtype=torch.float64, device=device).clone()
    if dist.is_initialized():
        dist.all_reduce(t, op)
    return t.item()


@torch.no_grad()
def norm_of_gradient(model: Any) -> float:
    """2-norm of all gradients, the same on any number of ranks."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    mine = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in mine if g.numel()]
    return over_ranks(torch.stack(norms).square().sum(), mine[0].device) ** 0.5
