"""Train the Llama of train_llama.py on several processes: FSDP2, sequence and vocabulary parallel.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py     # 1 x 2, gloo on a CPU
    torchrun --standalone --nproc-per-node 4 examples/train_fsdp2.py     # 2 x 2
    torchrun --standalone --nproc-per-node 8 examples/train_fsdp2.py     # 4 x 2, NCCL if 8 GPUs
    ... --tensor 4                                                       # 2 x 4
    ... --resume                                                         # also on other ranks

The ranks form a mesh (data, tensor). Over "tensor" a layer is cut by heads and by inner width,
norms and residuals by position, embedding and head by the vocabulary; over "data" everything is cut
by FSDP2. Batches, first weights and schedule are those of train_llama.py, and so is the loss of
each step, but for rounding. No collective is written by hand: the plans below say it all.
"""

import argparse
import json
import os
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from train_llama import (
    CPU,
    GPU,
    SAVE_EVERY,
    VOCAB,
    Config,
    adamw,
    batch_at,
    corpus,
    init,
    rope_table,
    schedule,
    shapes,
)

import liger_fn
from liger_fn.nn import LMHead, RMSNorm, VocabParallelHead

# -- the model: modules, so that plans can name them -----------------------------------------------


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, self.width = config.width, config.head_width
        self.wq, self.wo = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.wk, self.wv = nn.Linear(d, d // 2, bias=False), nn.Linear(d, d // 2, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for f in (self.wq, self.wk, self.wv)
        )  # (b, h, t, k), of a rank's heads
        q, k = liger_fn.rope(q, k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(o.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.down = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(liger_fn.swiglu(self.gate(x), self.up(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.width
        self.norm_attention, self.norm_mlp = RMSNorm(d), RMSNorm(d)
        self.attention, self.mlp = Attention(config), MLP(d, shapes(config)["0.gate"][0])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), cos, sin)
        return x + self.mlp(self.norm_mlp(x))


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, d = config, config.width
        self.embedding, self.norm = nn.Embedding(VOCAB, d), RMSNorm(d)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = LMHead(d, VOCAB, bias=False)

    def forward(self, tokens: Tensor, y: Tensor) -> Tensor:
        cos, sin = rope_table(tokens.shape[1], self.config.head_width, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x), y)


def built(config: Config) -> Llama:
    """The parameters that train_llama.py starts from."""
    model, params = Llama(config), init(config, torch.Generator().manual_seed(config.seed))
    names = {"embedding": "embedding.weight", "norm": "norm.weight", "head": "head.weight"}
    for i in range(config.layers):
        for name in ("wq", "wk", "wv", "wo", "gate", "up", "down", "norm_attention", "norm_mlp"):
            inner = "attention." if name[0] == "w" else "" if "norm" in name else "mlp."
            names[f"{i}.{name}"] = f"blocks.{i}.{inner}{name}.weight"
    model.load_state_dict({names[k]: p for k, p in params.items()})
    return model


# -- what is cut along what ------------------------------------------------------------------------


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Residuals and norms by position; heads, inner width and vocabulary within layers."""
    whole = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    layer = {
        "norm_attention": SequenceParallel(), "attention": whole,
        "attention.wq": columns, "attention.wk": columns, "attention.wv": columns,
        "attention.wo": rows,
        "norm_mlp": SequenceParallel(), "mlp": gathered,
        "mlp.gate": columns, "mlp.up": columns, "mlp.down": rows,
    }  # fmt: skip
    for block in model.blocks:
        parallelize_module(block, mesh, layer)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": VocabParallelHead(input_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, ends)


def sharded(config: Config, mesh: DeviceMesh, device: torch.device) -> Llama:
    model = built(config).to(device)
    if mesh["tensor"].size() > 1:
        tensor_parallel(model, mesh["tensor"])
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else None
    options: dict[str, Any] = {"mesh": mesh["data"], **({"mp_policy": half} if half else {})}
    for part in (*model.blocks, model.head, model):
        fully_shard(part, **options)
    return model


# -- training --------------------------------------------------------------------------------------


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]
) -> None:
    """Write a new folder, then name it, then drop the one before it."""
    new = f"step-{len(losses)}"
    parts, moments = get_state_dict(model, optimizer)
    dcp.save({"model": parts, "optimizer": moments}, checkpoint_id=folder / new)
    if dist.get_rank() == 0:
        latest = folder / "latest.json"
        before = json.loads(latest.read_text())["name"] if latest.exists() else new
        partial = folder / "latest.partial"
        partial.write_text(json.dumps({"name": new, "losses": losses}))
        partial.replace(latest)
        if before != new:
            shutil.rmtree(folder / before, ignore_errors=True)
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Read what any number of ranks has written; return the losses so far."""
    try:
        latest = json.loads((folder / "latest.json").read_text())
    except FileNotFoundError:
        raise SystemExit(f"{folder} holds no checkpoint: start without --resume") from None
    parts, moments = get_state_dict(model, optimizer)
    state = {"model": parts, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder / latest["name"])
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    losses: list[float] = latest["losses"]
    return losses


def train(config: Config, mesh: DeviceMesh, device: torch.device, out: Path, resume: bool) -> None:
    model, (text, _), first = sharded(config, mesh, device), corpus(), dist.get_rank() == 0
    optimizer = adamw(dict(model.named_parameters()), config)
    losses = load(out, model, optimizer) if resume else []
    share = config.batch // mesh["data"].size()
    rows = slice(mesh["data"].get_local_rank() * share, (mesh["data"].get_local_rank() + 1) * share)
    for step in range(len(losses), config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * schedule(step, config.steps)
        batch = batch_at(text, step, config, device)[rows]
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, group=mesh["data"].get_group())
        losses.append(mean.item() / mesh["data"].size())
        if first and (step % 20 == 0 or step + 1 == config.steps):
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == config.steps:
            save(out, model, optimizer, losses)


# -- command line ----------------------------------------------------------------------------------


def parse(world: int, gpu: bool) -> tuple[argparse.Namespace, Config]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ("steps", "batch", "context", "width", "layers", "seed")
    for name in names:
        parser.add_argument(f"--{name}", type=int, metavar="N")
    parser.add_argument(
        "--tensor", type=int, default=2, metavar="N", help="ranks of a tensor group"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"), help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in OUT")
    args = parser.parse_args()
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    config, n = replace(GPU if gpu else CPU, **given), args.tensor
    heads = config.width // 2 // config.head_width  # of keys and values
    if world % n or heads % n or config.context % n or config.batch % (world // n):
        parser.error(
            f"--tensor {n} must divide {world} ranks, {heads} heads of keys and a context of "
            f"{config.context}, and {world} / {n} a batch of {config.batch}"
        )
    return args, config


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit(f"start it with torchrun --standalone --nproc-per-node 2 {__file__}")
    rank, world, here = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    args, config = parse(world, gpu)
    device = torch.device("cuda", here) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=5))
    mesh = init_device_mesh(
        device.type, (world // args.tensor, args.tensor), mesh_dim_names=("data", "tensor")
    )
    mesh._flatten("all")  # so that the norm of all gradients is one all-reduce
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        print(
            f"{world // args.tensor} x {args.tensor} ranks on {device.type}, {config}", flush=True
        )
    dist.barrier()
    train(config, mesh, device, args.out, args.resume)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
