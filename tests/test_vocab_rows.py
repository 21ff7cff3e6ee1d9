"""The row passes over a shard: kernels and plain torch alike, in rows longer than a block too."""

import pytest
import torch
from torch import Tensor

from liger_fn.ops._ce import Row
from liger_fn.ops._vocab_rows import (
    gradient_ref,
    gradient_triton,
    statistics_ref,
    statistics_triton,
)

WIDTHS = (1, 7, 8, 2049, 8200)  # of a row by itself and of several blocks, whole lanes and not


def shard(v: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows with their largest entry twice, with none but -inf, far from 0; the last is ignored."""
    z = torch.randn(6, v, dtype=dtype)
    z[0, v // 3] = z[0, -1] = 9.0
    z[1, 0] = z[1, v // 2] = 9.0
    z[2] = -torch.inf
    z[3, ::2] = -torch.inf
    z[4] += 1e4
    z[5] = torch.nan
    at = torch.tensor([v // 2, -1, 0, v - 1, -1, -2])
    return z.to(device), at.to(device)


@pytest.mark.parametrize("v", WIDTHS)
@pytest.mark.parametrize("stats", [False, True])
def test_statistics(v, stats, device):
    z, at = shard(v, torch.float64, device)
    c = torch.rand(v, dtype=torch.float64, device=device)
    for row, weight in (
        (Row(-100, 0.0, 1.0, None), None),
        (Row(-100, 0.2, 1.0, None), None),
        (Row(-100, 0.2, -0.5, 3.0), c),
    ):
        got, want = (
            f(z, at, weight, 5, row, 0.7, stats) for f in (statistics_triton, statistics_ref)
        )
        live = at != -2
        if not row.label_smoothing:  # columns that nobody reads
            got[:, 4:6] = want[:, 4:6] = 0.0
        # 1e4 / 0.7 has an ulp of 2e-12, which a shift of the maximum puts into an exponent, twice
        torch.testing.assert_close(got[live], want[live], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("v", WIDTHS)
def test_gradient(v, device):
    z, at = shard(v, torch.float64, device)
    z = z.nan_to_num(neginf=-50.0)
    factors = torch.randn(6, 7, dtype=torch.float64, device=device)
    factors[:, 0] = torch.where(at == -2, 0.0, z.amax(1))
    factors[:, 1] = factors[:, 1].abs()
    c = torch.rand(v, dtype=torch.float64, device=device)
    row = Row(-100, 0.2, 0.5, 3.0)
    want = gradient_ref(z, at, c, factors, row, 0.7)
    got = gradient_triton(z, at, c, factors, row, 0.7, torch.empty_like(z))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
