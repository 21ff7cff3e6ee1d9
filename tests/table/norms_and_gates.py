"""Rows of norms, gates, positions and softmaxes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from tests.table import shapes
from tests.table.row import COLUMNS, LEADS, ROWS_OF, Bench, Draw, Row, bound, tanh
from tests.table.shapes import NORMS, SMALL, elements, gates, some


def rms_norm(x: Tensor, w: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], None, eps)
    return y if w is None else y * (w + offset)


def rms_norm_step_by_step(x: Tensor) -> Tensor:
    """Every step in the dtype of x, as casting "none" means it."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)


def rows(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return {"x": draw.normal(*lead, n)}


def rows_and_gain(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return {"x": draw.normal(*lead, n), "w": draw.normal(n)}


def add_rms_norm(
    x: Tensor, residual: Tensor, w: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return rms_norm(x + residual, w, eps), x + residual


def terms_and_gain(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return {"x": draw.normal(*lead, n), "residual": draw.normal(*lead, n), "w": draw.normal(n)}


def terms(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return {"x": draw.normal(*lead, n), "residual": draw.normal(*lead, n)}


def layer_norm(x: Tensor, w: Tensor | float, b: Tensor, eps: float) -> Tensor:
    # from the paper: torch 2.13 gives F.layer_norm wrong second derivatives in x and w together
    d = x - x.mean(-1, keepdim=True)
    return d / (d.square().mean(-1, keepdim=True) + eps).sqrt() * w + b


def rows_gain_and_bias(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return {**rows_and_gain(draw, lead, n), "b": draw.normal(n)}


def group_norm(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
    rows = x.reshape(x.shape[0], groups, x.shape[1:].numel() // groups)
    y = layer_norm(rows, 1.0, torch.zeros_like(b[0]), eps).reshape(x.shape)
    each = (-1, *(1,) * (x.dim() - 2))
    return y * w.reshape(each) + b.reshape(each)


def images(
    draw: Draw, b: int, per_group: int, at: tuple[int, ...], groups: int = 2
) -> dict[str, Tensor]:
    """Groups of channels, of the positions `at`."""
    c = groups * per_group
    return {"x": draw.normal(b, c, *at), "w": draw.normal(c), "b": draw.normal(c)}


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    # 1 + tanh(u) cancels far below 0: F.gelu gives 0 there, in float64 too
    u = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(2 * u) * up


def swiglu_packed(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def halves(draw: Draw, lead: tuple[int, ...], n: int) -> dict[str, Tensor]:
    return dict(zip(("gate", "up"), draw.normal(*lead, 2 * n).chunk(2, -1), strict=True))


def rope_oracle(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, pairs: bool
) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    c1, c2, s1, s2 = cos[..., :half], cos[..., half:], sin[..., :half], sin[..., half:]
    if pairs:
        c2, s2 = c1, s1

    def one(x: Tensor) -> Tensor:
        head, tail = x[..., : 2 * half], x[..., 2 * half :]
        a, b = (head[..., ::2], head[..., 1::2]) if pairs else head.chunk(2, -1)
        a, b = a * c1 - b * s1, b * c2 + a * s2
        turned = torch.stack((a, b), -1).flatten(-2) if pairs else torch.cat((a, b), -1)
        return torch.cat((turned, tail), -1)

    return one(q), one(k)


def rope_arguments(
    draw: Draw, lead: tuple[int, ...], t: int, h: int, hk: int, pairs: int, tail: int = 0,
    own: str = "shared", equal: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Heads as attention holds them, (b, t, h, k) in memory; halves of cos alike if `equal`."""
    first = {"shared": (), "own": lead, "ones": (1,) * len(lead)}[own]
    q, k = (draw.normal(*lead, t, heads, 2 * pairs + tail).transpose(-3, -2) for heads in (h, hk))
    angle = draw.normal(*first, t, pairs)
    angle = torch.cat((angle, angle if equal else draw.normal(*first, t, pairs)), -1)
    return {"q": q, "k": k, "cos": angle.cos(), "sin": angle.sin()}


def mrope_arguments(
    draw: Draw, lead: tuple[int, ...], t: int, h: int, hk: int, tail: int = 0,
    pairs: int = 4, equal: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    made = rope_arguments(draw, lead, t, h, hk, pairs, tail)
    angle = draw.normal(3, *lead, t, pairs)
    angle = torch.cat((angle, angle if equal else draw.normal(*angle.shape)), -1)
    return {"q": made["q"], "k": made["k"], "cos": angle.cos(), "sin": angle.sin()}


SECTIONS = (1, 1, 2)
QWEN_SECTIONS = (16, 24, 24)


def mrope_by_parts(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(t.split(QWEN_SECTIONS * 2, -1))], -1)
        for t in (cos, sin)
    )
    return rope_oracle(q, k, cos, sin, pairs=False)


def mrope_oracle(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    kind = torch.arange(3, device=cos.device).repeat_interleave(
        torch.tensor(SECTIONS, device=cos.device), output_size=4
    )
    at = kind.repeat(2).expand(1, *cos.shape[1:])
    return rope_oracle(q, k, cos.gather(0, at)[0], sin.gather(0, at)[0], pairs=False)


def sparsemax(x: Tensor) -> Tensor:
    """Algorithm 1 of Martins and Astudillo, 2016; halves in float32, where a sum of them fits."""
    h = x if x.dtype == torch.float64 else x.float()
    z = h.sort(-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=h.dtype)
    size = (1 + k * z > z.cumsum(-1)).sum(-1, keepdim=True).detach()
    tau = (z.cumsum(-1).gather(-1, size - 1) - 1) / size
    return torch.relu(h - tau).to(x.dtype)  # an entry at the threshold is outside: no gradient


CENTRED = {"lead": LEADS, "n": COLUMNS[1:]}  # of one column nothing is left but rounding
TABLES = {
    "lead": [(), (2,), (1, 2), (0,)], "t": range(4), "h": range(1, 4), "hk": range(1, 4),
    "pairs": range(1, 5), "tail": range(4), "own": ["shared", "own", "ones"],
}  # fmt: skip
GATED = "read gate and up, write y; backward reads gate, up, dy, writes dgate, dup"
ROWED = "read x, write y; backward reads x and dy, writes dx"
TURNED = "read and write q and k; backward the same for their gradients"
SHARED = {"own": "ones", "equal": True}  # cos and sin as a model shares them among sequences


ROWS = [
    Row("rms_norm", bound(liger_fn.rms_norm, eps=1e-3), bound(rms_norm, eps=1e-3), rows_and_gain,
        ("x", "w"), {"lead": (2, 3), "n": 5}, ROWS_OF, ("w",),
        plain=lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-3),
        bench=Bench(elements(2, 5), ROWED, NORMS, SMALL)),
    Row("rms_norm-gemma", bound(liger_fn.rms_norm, eps=0.1, offset=1.0, casting="gemma"),
        bound(rms_norm, eps=0.1, offset=1.0), rows_and_gain, ("x", "w"),
        {"lead": (3,), "n": 6}, ROWS_OF, ("w",), block=4),
    Row("rms_norm-no-gain", lambda x: liger_fn.rms_norm(x, None, 0.1, casting="none"),
        lambda x: rms_norm(x, None, 0.1), rows, ("x",), {"lead": (3,), "n": 5}, ROWS_OF,
        plain=rms_norm_step_by_step),
    Row("add_rms_norm", bound(liger_fn.add_rms_norm, eps=1e-3), bound(add_rms_norm, eps=1e-3),
        terms_and_gain, ("x", "residual", "w"), {"lead": (2, 3), "n": 5}, ROWS_OF, ("w",),
        bench=Bench(elements(4, 8), "read x and residual, write y and the sum; backward reads dy, "
                    "ds and the sum, writes the gradient of both",
                    some(NORMS, "llama-3-8b", "long rows"), SMALL)),
    Row("add_rms_norm-gemma",
        lambda x, r: liger_fn.add_rms_norm(x, r, None, 0.1, offset=1.0, casting="gemma"),
        bound(add_rms_norm, w=None, eps=0.1), terms, ("x", "residual"), {"lead": (3,), "n": 6},
        ROWS_OF, block=4),
    Row("layer_norm", bound(liger_fn.layer_norm, eps=1e-3), bound(layer_norm, eps=1e-3),
        rows_gain_and_bias, ("x", "w", "b"), {"lead": (2, 3), "n": 5}, CENTRED, ("w", "b"),
        plain=lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-3),
        bench=Bench(elements(2, 5), ROWED, some(NORMS, "llama-3-8b", "short rows", "long rows"),
                    SMALL)),
    Row("layer_norm-no-gain", lambda x, b: liger_fn.layer_norm(x, None, b, 0.1),
        lambda x, b: layer_norm(x, 1.0, b, 0.1),
        lambda draw, lead, n: {"x": draw.normal(*lead, n), "b": draw.normal(n)}, ("x", "b"),
        {"lead": (3,), "n": 6}, CENTRED, block=4),
    Row("group_norm", bound(liger_fn.group_norm, groups=2, eps=0.1),
        bound(group_norm, groups=2, eps=0.1), images, ("x", "w", "b"),
        {"b": 2, "per_group": 2, "at": (2, 1)},
        {"b": range(4), "per_group": range(1, 4), "at": [(2,), (7,), (3, 2), (17,), (1, 2, 3)]},
        ("w", "b"), plain=lambda x, w, b: F.group_norm(x, 2, w, b, 0.1),
        bench=Bench(shapes.images, ROWED,
                    {"stable-diffusion": {"b": 16, "per_group": 10, "at": (64, 64), "groups": 32}},
                    {"b": 2, "per_group": 2, "at": (4, 4), "groups": 32},
                    fn=bound(liger_fn.group_norm, groups=32, eps=1e-5),
                    plain=lambda x, w, b: F.group_norm(x, 32, w, b, 1e-5))),
    Row("dyt", liger_fn.dyt, lambda x, alpha, w, b: tanh(alpha * x) * w + b,
        lambda draw, lead, n: {"x": draw.normal(*lead, n), "alpha": draw.normal(1),
                               "w": draw.normal(n), "b": draw.normal(n)},
        ("x", "alpha", "w", "b"), {"lead": (2, 2), "n": 3}, ROWS_OF, ("w", "b"),
        bench=Bench(elements(2, 5), ROWED, some(NORMS, "llama-3-8b"), SMALL)),
    Row("swiglu", liger_fn.swiglu, lambda gate, up: F.silu(gate) * up, halves, ("gate", "up"),
        {"lead": (2, 3), "n": 5}, ROWS_OF,
        bench=Bench(elements(3, 8), GATED,
                    {**gates("llama-3-8b", "qwen-2.5-7b"), **some(NORMS, "tiny")}, SMALL)),
    Row("geglu", liger_fn.geglu, geglu, halves, ("gate", "up"), {"lead": (2, 3), "n": 5}, ROWS_OF,
        plain=lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        bench=Bench(elements(3, 8), GATED, gates("gemma-2-9b"), SMALL)),
    Row("geglu_packed", bound(liger_fn.geglu_packed, approximate="none"),
        lambda gate_up: F.gelu(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1],
        lambda draw, lead, n: {"gate_up": draw.normal(*lead, 2 * n)}, ("gate_up",),
        {"lead": (2, 3), "n": 5}, ROWS_OF, block=4,
        bench=Bench(elements(3, 8), GATED, gates("gemma-2-9b"), SMALL)),
    Row("relu2", liger_fn.relu2, lambda x: F.relu(x).square(), rows, ("x",),
        {"lead": (2, 3), "n": 5}, ROWS_OF,
        bench=Bench(elements(2, 5), ROWED, gates("llama-3-8b"), SMALL)),
    Row("swiglu_packed", liger_fn.swiglu_packed, swiglu_packed,
        lambda draw, lead, n: {"gate_up": draw.normal(*lead, 2 * n)}, ("gate_up",),
        {"lead": (2, 3), "n": 5}, ROWS_OF, block=4,
        bench=Bench(elements(3, 8), GATED, gates("llama-3-8b"), SMALL)),
    Row("rope", liger_fn.rope, bound(rope_oracle, pairs=False), rope_arguments,
        ("q", "k", "cos", "sin"), {"lead": (2,), "t": 2, "h": 2, "hk": 1, "pairs": 2}, TABLES,
        bench=Bench(shapes.turned, TURNED,
                    {"llama-3-8b": shapes.positions("llama-3-8b", pairs=64, **SHARED),
                     "gemma-2-9b": shapes.positions("gemma-2-9b", pairs=128, **SHARED)},
                    {"lead": (1,), "t": 16, "h": 4, "hk": 2, "pairs": 16, **SHARED},
                    wanted=("q", "k"))),
    Row("rope-fixed", liger_fn.rope, bound(rope_oracle, pairs=False), rope_arguments, ("q", "k"),
        {"lead": (2,), "t": 2, "h": 2, "hk": 1, "pairs": 2, "tail": 1}, TABLES),
    Row("rope-interleaved-partial", bound(liger_fn.rope, layout="interleaved"),
        bound(rope_oracle, pairs=True), rope_arguments, ("q", "k", "cos", "sin"),
        {"lead": (2,), "t": 2, "h": 2, "hk": 1, "pairs": 1, "tail": 2, "own": "own"}, TABLES,
        composed=True),
    Row("mrope", bound(liger_fn.mrope, sections=SECTIONS), mrope_oracle, mrope_arguments,
        ("q", "k", "cos", "sin"), {"lead": (2,), "t": 3, "h": 2, "hk": 1},
        {name: TABLES[name] for name in ("lead", "t", "h", "hk", "tail")}, composed=True,
        bench=Bench(shapes.turned, TURNED,
                    {"qwen-2-vl-7b": shapes.positions("qwen-2.5-7b", pairs=64, equal=True)},
                    {"lead": (1,), "t": 16, "h": 4, "hk": 2, "pairs": 64, "equal": True},
                    wanted=("q", "k"), fn=bound(liger_fn.mrope, sections=QWEN_SECTIONS),
                    plain=mrope_by_parts)),
    Row("softmax", liger_fn.softmax, bound(torch.softmax, dim=-1), rows, ("x",),
        {"lead": (2, 3), "n": 7}, ROWS_OF,
        bench=Bench(elements(2, 5), "read x, write y; backward reads y and dy, writes dx",
                    some(NORMS, "llama-3-8b", "long rows"), SMALL)),
    Row("softmax-long", liger_fn.softmax, bound(torch.softmax, dim=-1), rows, ("x",),
        {"lead": (3,), "n": 7}, ROWS_OF, block=4),
    Row("sparsemax", liger_fn.sparsemax, sparsemax, rows, ("x",), {"lead": (2, 3), "n": 7}, ROWS_OF,
        bench=Bench(elements(2, 5), "read x, write y; backward reads y and dy, writes dx",
                    some(NORMS, "llama-3-8b"), SMALL)),
    Row("sparsemax-long", liger_fn.sparsemax, sparsemax, rows, ("x",), {"lead": (3,), "n": 7},
        ROWS_OF, block=4),
]  # fmt: skip
