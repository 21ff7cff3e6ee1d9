"""The one loop over chunks of tokens behind every fused_linear_* function.

    for each chunk: z = x w^T + b, then one row pass (losses, and z turned into its gradient dz),
        then dx = dz w,    dw += dz^T x,    db += sum of dz

No (m, v) tensor beyond one chunk exists, unless logits are held for backward. Three matrix products
a chunk with gradients, one without.
Sums over tokens are kept in `accum_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_fn._check import check_tensors
from liger_fn._math import wide
from liger_fn._vjp import tracked
from liger_fn.ops import _products
from liger_fn.ops._ce import check_rows
from liger_fn.ops._products import dx_dtype, logits_dtype, operand_dtype

# bytes of one chunk of logits: enough rows on a GPU to keep its products at full speed; on a CPU a
# chunk is held a few times over (logits, exponentials, gradient) and gains nothing from more rows
_BUDGET = {"cpu": 16 << 20}
_BUDGET_GPU = 1 << 30

Rows = Callable[..., tuple[tuple[Tensor, ...], Tensor | None]]
Chunk = tuple[slice, ...]  # rows of x that go through the loop together


def check_head(
    op: str, w: Tensor, x: Tensor, y: Tensor, b: Tensor | None, chunk: int | None,
    accum_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Hold the tensors of a head together."""
    check_tensors(op, w=(w, "v d"), x=(x, "... d"), y=(y, "int ..."), b=(b, "? v"))
    check_rows(op, y, x=x)
    check_loop(op, chunk, accum_dtype)


def check_chunk(op: str, chunk: int | None, name: str = "chunk") -> None:
    """Hold a number of tokens to its meaning."""
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"{op}: {name} must be an integer above 0, got {chunk!r}")


def check_loop(op: str, chunk: int | None, accum_dtype: torch.dtype) -> None:
    """Hold how the loop goes to its meaning."""
    check_chunk(op, chunk)
    if accum_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{op}: accum_dtype must be float32 or bfloat16, got {accum_dtype}")


def chunk_size(v: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens per chunk that keep its logits within the byte budget of the device."""
    rows = _BUDGET.get(device.type, _BUDGET_GPU) // max(1, v * logits_dtype(dtype, device).itemsize)
    return max(16, rows // 128 * 128 if rows >= 128 else rows)


def plan(
    m: int, w: Tensor, heads: int, chunk: int, compute: torch.dtype, accum_dtype: torch.dtype,
    dw: bool,
) -> tuple[int, torch.dtype, bool]:  # fmt: skip
    """Tokens per step, the dtype of dw, and whether there is a single step, whose dz may be kept.

    `chunk` 0: as many tokens as fit the budget, or all, where dz (of so many heads) and dw in
    bfloat16 take at most an eighth more memory than a chunk and float32 sums of dw would, or those
    sums and dw. float16 has no room for x times an upstream gradient: its dz is not kept.
    """
    v, d = w.shape
    halves = compute == torch.bfloat16 and w.device.type != "cpu"
    at_once = chunk or chunk_size(heads * v, compute, w.device)
    if dw and halves and not chunk and accum_dtype == torch.float32:
        chunked = max(heads * at_once + 2 * d, 3 * d)
        at_once = max(at_once, m if 8 * (heads * m + d) <= 9 * chunked else 0)
    if compute == torch.float64 or (halves and m <= at_once):
        accum_dtype = compute
    return at_once, accum_dtype, dw and 0 < m <= at_once and v > 0 and compute != torch.float16


def head_loop(
    rows: Rows, w: Tensor, x: Tensor, b: Tensor | None, y: Tensor,
    row_args: tuple[Tensor | None, ...], *,
    ignore_index: int, chunk: int, compute: torch.dtype, accum_dtype: torch.dtype,
    wanted: tuple[bool, bool, bool], heads: int = 1,
    chunks: Callable[[int], Sequence[Chunk]] | None = None, keep: bool = False,
    hold: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Run `rows` on the logits of each chunk of x (m, d).

    Args:
        rows: row pass: (z, y, *row_args of the chunk, gradient) to (results per row, dz or None).
        w: projection (v, d).
        x: activations (m, d).
        b: bias (v,).
        y: targets (m,).
        row_args: more tensors (m,), passed on by chunk.
        ignore_index: target of rows that do not count: whatever x holds there, NaN included, is
            read as 0.
        chunk: tokens per step, at most; 0: see `plan`.
        compute: dtype of the operands of the products.
        accum_dtype: dtype of the sums dw.
        wanted: whether dw, dx and db are to be formed.
        heads: buffers of logits that a step holds.
        chunks: from tokens per step to the rows of each, all rows once; default: as they come.
        keep: a single step leaves the products to `settled`, if `plan` allows it.
        hold: the logits of all steps are returned; nothing else is wanted.

    Returns:
        Results per row, each (m,), then dw (v, d), dx (m, d) and db (v,), or None where not wanted.
        Of a single step that is kept dz (m v,) in place of dw, and no dx. Held logits (m v,) in
        place of dw.
    """
    m, zdtype = x.shape[0], logits_dtype(compute, x.device)
    operand = operand_dtype(compute, x.device)
    formed = dx_dtype(x, compute)
    # values round to `compute` first, also where the products run wider
    w, x = w.to(compute).to(operand), x.to(compute).to(operand)
    b = None if b is None else b.to(compute)
    own = not tracked()  # nobody differentiates this loop: it may reuse its own buffers
    # whoever names chunks gets the same ones with and without gradients
    grown = wanted[0] or chunks is not None
    at_once, accum, single = plan(m, w, heads, chunk, compute, accum_dtype, grown)
    keep = keep and single and wanted[0]
    steps = chunks(at_once) if chunks else _even(m, at_once)
    most = max(sum(s.stop - s.start for s in at) for at in steps)
    buffer = x.new_empty(m if hold else most, w.shape[0], dtype=zdtype) if own else None
    dx = x.new_empty(x.shape, dtype=formed) if own and wanted[1] and not keep else None
    dw = db = None
    parts, dxs, held = [], [], []
    with _products.autocast_off(x.device.type):
        for at in steps:
            yc = _take(y, at)
            xc = torch.where((yc != ignore_index)[:, None], _take(x, at), 0.0)
            place = buffer if buffer is None else buffer[at[0] if hold else slice(xc.shape[0])]
            z = _products.mm(xc, w.t(), zdtype, place, b)
            held += [z] if hold else []
            args = (a if a is None else _take(a, at) for a in row_args)
            part, dz = rows(z, yc, *args, any(wanted))
            parts.append(part)
            if dz is None:
                continue
            if wanted[2]:
                d = _products.over_tokens(dz)
                db = d if db is None else db + d
            dz = dz.to(operand)
            if keep:
                dw = dz.reshape(-1)
                continue
            if wanted[1]:
                place = dx[at[0]] if dx is not None and len(at) == 1 else None
                dxc = _products.mm(dz, w, formed, place)
                if dx is None:
                    dxs.append(dxc)
                elif len(at) > 1:
                    for s, g in zip(at, _apart(dxc, at), strict=True):
                        dx[s] = g
            if wanted[0]:
                dw = _products.accumulate(dw, dz.t(), xc, accum, own)
    if hold:
        dw = (torch.cat(held) if buffer is None else buffer).reshape(-1)
    db = None if db is None else db.to(wide(compute))
    if wanted[1] and dx is None and not keep:
        dx = _join(steps, dxs)
    return tuple(_join(steps, part) for part in zip(*parts, strict=True)), dw, dx, db


def _even(m: int, chunk: int) -> list[Chunk]:
    """Chunks of about as many rows each."""
    step = -(-m // max(1, -(-m // chunk)))
    size = max(1, min(chunk, -(-step // 16) * 16))
    return [(slice(i, min(i + size, m)),) for i in range(0, max(m, 1), size)]


def _take(t: Tensor, at: Chunk) -> Tensor:
    return t[at[0]] if len(at) == 1 else torch.cat([t[s] for s in at])


def _apart(t: Tensor, at: Chunk) -> Sequence[Tensor]:
    return t.split([s.stop - s.start for s in at])


def _join(chunks: Sequence[Chunk], parts: Sequence[Tensor]) -> Tensor:
    """All rows in their order, from the chunks in theirs."""
    pieces = [
        (s.start, piece)
        for at, part in zip(chunks, parts, strict=True)
        for s, piece in zip(at, _apart(part, at), strict=True)
    ]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda p: p[0])])
