"""What the two cross entropies share: the loss of a row in plain torch, its options, the reduction.

z    = softcap * tanh(logit_scale * logits / softcap)         (logit_scale * logits without a cap)
lse  = log(sum(exp(z)))
nll  = (1 - s) * c[y] * (lse - z[y]) + s / v * sum(c * (lse - z))  s label_smoothing, c class_weight
zsq  = c[y] * lse**2                                              weighed by the option z_loss
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_fn._check import (
    check_choice,
    check_count,
    check_least,
    check_numbers,
    check_positive,
    check_same_shape,
    check_share,
    check_tensors,
)
from liger_fn._math import tanh_slope_ref, wide


class CEStats(NamedTuple):
    """What a cross entropy knows beside its loss.

    The losses are reduced alike, the counts over the batch.
    """

    loss: Tensor
    nll: Tensor
    z_loss: Tensor
    n_valid: Tensor
    n_correct: Tensor


class Row(NamedTuple):
    """Options that give one row its loss. Static: they reach the kernels as constants."""

    ignore_index: int
    label_smoothing: float
    logit_scale: float
    softcap: float | None

    @property
    def cap(self) -> float:
        return 0.0 if self.softcap is None else float(self.softcap)


def row_losses(
    logits: Tensor, y: Tensor, class_weight: Tensor | None, row: Row
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Plain torch: nll, zsq, whether y is the argmax, the maximum, lse - maximum.

    Each is shaped as y.
    """
    valid = y != row.ignore_index
    # masked before exp and log: what an ignored row holds, NaN included, reaches neither value nor
    # gradient
    z = torch.where(valid[..., None], transformed(logits, row), 0.0)
    bad, at = out_of_range(y, z.shape[-1], valid)
    z = z - (top := z.detach().amax(-1, keepdim=True))
    logsum = z.exp().sum(-1).log()
    weight = None if class_weight is None else class_weight.to(z.dtype)
    own = 1.0 if weight is None else weight[at]
    nll = (1 - row.label_smoothing) * own * (logsum - z.gather(-1, at[..., None])[..., 0])
    if row.label_smoothing:
        gap = logsum[..., None] - z
        spread = (gap if weight is None else weight * gap).sum(-1)
        nll = nll + row.label_smoothing / z.shape[-1] * spread
    top = top[..., 0]
    zsq = own * (top + logsum) ** 2
    correct = valid & (z.argmax(-1) == y)
    nll, zsq = (torch.where(valid, t.masked_fill(bad, torch.nan), 0.0) for t in (nll, zsq))
    return nll, zsq, correct, top, logsum


def row_pullback(
    d_nll: Tensor | None, d_zsq: Tensor | None, logits: Tensor, y: Tensor,
    class_weight: Tensor | None, top: Tensor, logsum: Tensor, row: Row,
) -> Tensor:  # fmt: skip
    """Plain torch: the cotangent of logits in the dtype of statistics; 0 where a row is ignored."""
    s, valid = row.label_smoothing, y != row.ignore_index
    z = torch.where(valid[..., None], transformed(logits, row), 0.0)
    bad, at = out_of_range(y, z.shape[-1], valid)
    weight = z.new_ones(z.shape[-1]) if class_weight is None else class_weight.to(z.dtype)
    own, p = weight[at], (z - top[..., None] - logsum[..., None]).exp()
    g = torch.zeros_like(z)
    if d_nll is not None:
        g = p * (d_nll * ((1 - s) * own + s / z.shape[-1] * weight.sum()))[..., None]
        g = g.scatter_add(-1, at[..., None], -(d_nll * (1 - s) * own)[..., None])
        if s:
            g = g - (d_nll * (s / z.shape[-1]))[..., None] * weight
    if d_zsq is not None:
        g = g + p * (d_zsq * 2 * own * (top + logsum))[..., None]
    g = (g * slope(logits, row, valid)).masked_fill(bad[..., None], torch.nan)
    return torch.where(valid[..., None], g, 0.0)


def transformed(logits: Tensor, row: Row) -> Tensor:
    """Logits after scale and soft cap, in the dtype of statistics."""
    z = _scaled(logits, row)
    return z if row.softcap is None else row.softcap * torch.tanh(z / row.softcap)


def slope(logits: Tensor, row: Row, valid: Tensor) -> Tensor | float:
    """The derivative of `transformed`."""
    if row.softcap is None:
        return row.logit_scale
    z = torch.where(valid[..., None], _scaled(logits, row), 0.0)
    return tanh_slope_ref(z / row.softcap) * row.logit_scale


def _scaled(logits: Tensor, row: Row) -> Tensor:
    return wide(logits) if row.logit_scale == 1.0 else wide(logits) * row.logit_scale


def out_of_range(y: Tensor, v: int, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Where y names no column although it is not ignored, and an index that is safe everywhere."""
    bad = valid & ((y < 0) | (y >= v))
    return bad, torch.where(valid & ~bad, y, 0).long()


def check_rows(
    op: str, y: Tensor | None, name: str = "y", each: str = "target", **rows: Tensor
) -> None:
    """Hold y, or another tensor by its name, to one entry for each row of a tensor (..., n)."""
    ((of, t),) = rows.items()
    if y is not None and y.shape != t.shape[:-1]:
        raise ValueError(
            f"{op}: {name} must have shape {tuple(t.shape[:-1])}, one {each} for each row of {of}, "
            f"got {tuple(y.shape)}"
        )


def check_reduction(
    op: str, columns: int, reduction: str, n_valid: float | Tensor | None, **home: Tensor
) -> None:
    """Hold a loss of rows to columns, and how it is reduced to its meaning."""
    if columns == 0:
        raise ValueError(f"{op}: axis v must not be empty")
    check_choice(op, "reduction", reduction, ("mean", "sum", "none"))
    if n_valid is None:
        return
    if reduction != "mean":
        raise ValueError(f"{op}: n_valid is for reduction 'mean', got reduction {reduction!r}")
    check_count(op, "n_valid", n_valid, **home)


def check_options(
    op: str, y: Tensor, columns: int, row: Row, reduction: str, z_loss: float,
    token_weight: Tensor | None, n_valid: float | Tensor | None,
) -> None:  # fmt: skip
    """Hold the options that every cross entropy has to their meaning."""
    check_numbers(op, logit_scale=row.logit_scale, ignore_index=row.ignore_index)
    check_share(op, "label_smoothing", row.label_smoothing)
    check_least(op, "z_loss", z_loss)
    check_positive(op, "softcap", row.softcap, optional=True)
    check_tensors(op, y=(y, "int ..."), token_weight=(token_weight, "? ..."))
    check_same_shape(op, y=y, token_weight=token_weight)
    check_reduction(op, columns, reduction, n_valid, y=y)


def normaliser(
    y: Tensor, class_weight: Tensor | None, ignore_index: int, reduction: str,
    n_valid: float | Tensor | None, dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """What a mean divides by, or None."""
    if reduction != "mean":
        return None
    if n_valid is None:
        valid = y != ignore_index
        if class_weight is None:  # a count: two operations less than a divisor of any size
            return valid.sum().clamp(min=1).to(dtype)
        _, at = out_of_range(y, class_weight.shape[0], valid)
        n_valid = torch.where(valid, class_weight.detach()[at].to(dtype), 0.0).sum()
    return divisor(n_valid, y.device, dtype)


def divisor(n_valid: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A count to divide by; at least something: all rows ignored is loss 0, not 0/0."""
    if isinstance(n_valid, Tensor):
        n = n_valid.detach().to(device, dtype)
    else:
        n = torch.full((), n_valid, device=device, dtype=dtype)
    return torch.where(n == 0, 1.0, n)


def live_weight(token_weight: Tensor, y: Tensor, ignore_index: int) -> Tensor:
    """0 where a row does not count, where 1 / its number of tokens may be infinite."""
    return torch.where(y == ignore_index, 0.0, token_weight)


def reduce_rows(
    loss: Tensor, token_weight: Tensor | None, reduction: str, n: Tensor | None
) -> Tensor:
    """Weigh the losses of rows and reduce them; plain torch, so it differentiates by itself."""
    if token_weight is not None:
        loss = loss * token_weight.to(loss.dtype)
    if reduction != "none":
        loss = loss.sum()
    return loss if n is None else loss / n


def reduced_loss(
    nll: Tensor, zsq: Tensor, correct: Tensor, y: Tensor, class_weight: Tensor | None, row: Row,
    z_loss: float, reduction: str, n_valid: float | Tensor | None, token_weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """The loss alone, of the operations that it takes."""
    n = normaliser(y, class_weight, row.ignore_index, reduction, n_valid, nll.dtype)
    loss = reduce_rows(nll, token_weight, reduction, n)
    return loss + reduce_rows(z_loss * zsq, token_weight, reduction, n) if z_loss else loss


def reduced(
    nll: Tensor, zsq: Tensor, correct: Tensor, y: Tensor, class_weight: Tensor | None, row: Row,
    z_loss: float, reduction: str, n_valid: float | Tensor | None, token_weight: Tensor | None,
) -> CEStats:  # fmt: skip
    """The losses of rows and their counts as CEStats."""
    n = normaliser(y, class_weight, row.ignore_index, reduction, n_valid, nll.dtype)
    nll, zsq = (reduce_rows(t, token_weight, reduction, n) for t in (nll, z_loss * zsq))
    return CEStats(nll + zsq, nll, zsq, (y != row.ignore_index).sum(), correct.sum())
