"""Gradient norm of every preference pair in one call: which pairs teach the model most?

    python examples/per_sample_gradients.py        # two CPU cores: about a minute

`vmap(grad(loss))` over the pairs of dpo_loop.py, through the whole model: norms run one kernel for
all pairs, the fused head runs once per pair and never holds the logits of a sequence.

Needs `pip install -e ".[examples]"` in the checkout.
"""

import argparse
from collections.abc import Sequence

import torch
from dpo_loop import MODEL, Params, count, make_pairs, pretrained
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_llama import hidden

import liger_fn


def pair_loss(params: Params, tokens: Tensor, y: Tensor, ref_logp: Tensor) -> Tensor:
    """DPO loss of one pair: tokens and y (2, t), ref_logp (2, t)."""
    return liger_fn.dpo_loss(params["head"], hidden(params, tokens, MODEL), y, ref_logp=ref_logp)


def main(argv: Sequence[str] | None = None) -> Tensor:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--warmup", type=int, default=60, help="steps of language model")
    parser.add_argument("--pairs", type=count, default=24)
    args = parser.parse_args(argv)
    pairs = make_pairs().take(torch.arange(args.pairs))
    params = pretrained(args.warmup)
    with torch.no_grad():  # the reference is the model itself: each loss is log 2, not its gradient
        x = hidden(params, pairs.tokens, MODEL)
        ref = liger_fn.fused_linear_logp(params["head"], x, pairs.y)
    tokens, y, ref_logp = (torch.stack(t.chunk(2), 1) for t in (*pairs, ref))  # (b, 2, t)
    with sdpa_kernel(SDPBackend.MATH):  # torch maps no other attention
        each = vmap(grad(pair_loss), (None, 0, 0, 0))(params, tokens, y, ref_logp)
    norms = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
    for i in norms.argsort(descending=True)[:5].tolist():
        chosen, rejected = (bytes(t[t > 0].tolist()).decode().strip() for t in tokens[i])
        print(f"{norms[i]:.3f}  {chosen}\n       not  {rejected}")
    print(f"norms of {args.pairs} pairs: {norms.min():.3f} to {norms.max():.3f}")
    return norms


if __name__ == "__main__":
    main()
