"""mrope: which position turns which column. The turning itself: test_rope."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from liger_fn import mrope, rope
from tests.tolerance import assert_pure_and_exact, results, same_bits


def turns(device: torch.device, *angles: float) -> tuple[Tensor, Tensor]:
    """Tables (3, 1, 6) whose three positions turn by these angles."""
    a = torch.tensor(angles, dtype=torch.float64, device=device)[:, None, None].expand(3, 1, 6)
    return a.cos(), a.sin()


def test_each_section_turns_by_its_own_position(backend, device):
    q = torch.tensor([[[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]]], dtype=torch.float64, device=device)
    cos, sin = turns(device, 0.0, math.pi / 2, math.pi)
    got, _ = mrope(q, q, cos, sin, (1, 1, 1))
    want = torch.tensor([1.0, 0.0, -1.0, 0.0, 1.0, 0.0], dtype=torch.float64, device=device)
    torch.testing.assert_close(got[0, 0], want, rtol=0, atol=1e-15)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_one_section_is_rope_of_that_position(backend, device, i):
    q, k = torch.randn(2, 3, 4, 8, device=device), torch.randn(2, 1, 4, 8, device=device)
    angle = torch.randn(3, 2, 4, 6, device=device)
    sections = [3 if j == i else 0 for j in range(3)]
    got = mrope(q, k, angle.cos(), angle.sin(), sections)
    want = rope(q, k, angle[i].cos(), angle[i].sin())
    assert all(map(same_bits, got, want))
    assert same_bits(got[0][..., 6:], q[..., 6:])


def hugging_face(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen2-VL of Hugging Face: sections of a whole row, the i-th from position i mod 3."""
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(c.split([2, 1, 1] * 2, -1))], -1)[:, None]
        for c in (cos, sin)
    )

    def one(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return x * cos + torch.cat((-x2, x1), -1) * sin

    return one(q), one(k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_hugging_face(backend, device, dtype):
    q = torch.randn(2, 5, 3, 8, device=device).to(dtype).transpose(1, 2)
    k, angle = torch.randn(2, 1, 5, 8, device=device).to(dtype), torch.randn(3, 2, 5, 4)
    angle = torch.cat((angle, angle), -1).to(device)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    assert_pure_and_exact(
        lambda *a: mrope(*a, sections=(2, 1, 1)), hugging_face, hugging_face, q, k, cos, sin
    )


def test_gradients_of_unread_columns_are_zero(backend, device):
    q, angle = torch.randn(1, 2, 3, 6, device=device), torch.randn(3, 1, 3, 6, device=device)
    _, (dcos,) = results(lambda c: mrope(q, q, c, angle.sin(), (1, 2, 0)), (angle.cos(),))
    assert dcos[2].eq(0).all()
    assert dcos[0][..., [1, 2, 4, 5]].eq(0).all()
    assert dcos[0][..., [0, 3]].ne(0).any()


@pytest.mark.parametrize("sections", [(1, 1), (1, 1, 2), (4, -1, 0), (1, 1, 1, 0)])
def test_sections_that_do_not_fit(sections):
    x, table = torch.ones(1, 2, 6), torch.ones(3, 2, 6)
    with pytest.raises(
        ValueError, match=r"^mrope: sections must be three counts that add up to 3, "
    ):
        mrope(x, x, table, table, sections)


def test_tables_that_do_not_fit():
    x = torch.ones(1, 2, 6)
    for table in (torch.ones(2, 6), torch.ones(2, 2, 6)):
        with pytest.raises(
            ValueError, match=r"^mrope: cos must have shape \(3, \.\.\., t, r\), got"
        ):
            mrope(x, x, table, table, (1, 1, 1))
    with pytest.raises(ValueError, match=r"^mrope: axis t is 1 in sin but 2 in q"):
        mrope(x, x, torch.ones(3, 2, 6), torch.ones(3, 1, 6), (1, 1, 1))
