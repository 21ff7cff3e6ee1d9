"""rope against rotation matrices in float64, numbers by hand, and the functions of Hugging Face."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_fn.ops.rope
from liger_fn import rope, using
from tests.tolerance import (
    assert_exact_as,
    assert_pure_and_close,
    assert_pure_and_exact,
    far_apart,
    home,
    results,
    same_bits,
)

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
LAYOUTS = ["half", "interleaved"]
both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def llama(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb of Llama; with the casts of OLMo-2, whose angles stay float32."""

    def rotate_half(x: Tensor) -> Tensor:
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)

    r, cos, sin = (
        cos.shape[-1],
        cos.unsqueeze(-3),
        sin.unsqueeze(-3),
    )  # partial: as GPT-NeoX and Phi
    q_rot, k_rot = q[..., :r], k[..., :r]
    q_rot = ((q_rot * cos) + (rotate_half(q_rot) * sin)).to(q.dtype)
    k_rot = ((k_rot * cos) + (rotate_half(k_rot) * sin)).to(k.dtype)
    return torch.cat((q_rot, q[..., r:]), -1), torch.cat((k_rot, k[..., r:]), -1)


def glm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb of GLM."""

    def rotate_half(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)

    r, cos, sin = cos.shape[-1], cos.unsqueeze(-3), sin.unsqueeze(-3)
    cos = cos[..., : r // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : r // 2].repeat_interleave(2, dim=-1)
    q_rot, k_rot = q[..., :r], k[..., :r]
    q_rot = ((q_rot * cos) + (rotate_half(q_rot) * sin)).to(q.dtype)
    k_rot = ((k_rot * cos) + (rotate_half(k_rot) * sin)).to(k.dtype)
    return torch.cat((q_rot, q[..., r:]), -1), torch.cat((k_rot, k[..., r:]), -1)


PLAIN = {"half": llama, "interleaved": glm}


def exact(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: str) -> tuple[Tensor, ...]:
    """Rows of the rotation matrix: entry i is x_i * cos + sign * x_partner * sin of its column."""
    r = cos.shape[-1]
    at = torch.arange(r, device=q.device)
    if layout == "half":
        partner, first, column = (at + r // 2) % max(r, 1), at < r // 2, at
    else:
        partner, first, column = at ^ 1, at % 2 == 0, at // 2
    sign = torch.where(first, -1.0, 1.0)
    c, s = (a.index_select(-1, column).unsqueeze(-3) for a in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        head = x[..., :r]
        head = head * c + head.index_select(-1, partner) * sign * s
        return torch.cat((head, x[..., r:]), -1)

    return turned(q), turned(k)


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def angles(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Columns all differ, also between the halves: each layout must read its own."""
    a = 2 * torch.pi * torch.rand(shape, dtype=torch.float64)
    return a.cos().to(device, dtype), a.sin().to(device, dtype)


def hold(layout: str, *args: Tensor) -> None:
    oracle = functools.partial(exact, layout=layout)
    assert_pure_and_exact(functools.partial(rope, layout=layout), PLAIN[layout], oracle, *args)


def hold_shape(layout: str, *args: Tensor, dys: tuple[Tensor, ...] = ()) -> None:
    oracle = functools.partial(exact, layout=layout)
    assert_pure_and_close(functools.partial(rope, layout=layout), oracle, *args, dys=dys)


# -- numbers by hand


def close(got: Tensor, wanted: list[float]) -> None:
    want = torch.tensor(wanted, dtype=torch.float64, device=got.device)
    torch.testing.assert_close(got.flatten(), want, rtol=1e-15, atol=1e-15)


def by_hand(x: list[float], degrees: list[float], device: torch.device, layout: str) -> Tensor:
    q = torch.tensor(x, dtype=torch.float64, device=device).view(1, 1, -1)
    angle = [math.radians(d) for d in degrees]
    cos, sin = (
        torch.tensor([f(a) for a in angle], dtype=torch.float64, device=device).view(1, -1)
        for f in (math.cos, math.sin)
    )
    return rope(q, q, cos, sin, layout=layout)[0]


@both_layouts
def test_thirty_degrees_turn_2_0_into_root_3_1(backend, device, layout):
    close(by_hand([2.0, 0.0], [30.0, 30.0], device, layout), [math.sqrt(3), 1.0])


def test_half_pairs_an_entry_with_the_one_half_a_head_on(backend, device):
    y = by_hand([1.0, 2.0, 3.0, 4.0], [90.0, 0.0, 90.0, 0.0], device, "half")
    close(y, [-3.0, 2.0, 1.0, 4.0])


def test_interleaved_pairs_neighbours_and_reads_the_first_half_of_the_angles(backend, device):
    y = by_hand([1.0, 2.0, 3.0, 4.0], [90.0, 0.0, 45.0, 45.0], device, "interleaved")
    close(y, [-2.0, 1.0, 3.0, 4.0])


def test_gradients_by_hand(backend, device):
    # a quarter turn takes (1, 2) to (-2, 1), and dy = (3, 5) back to (5, -3)
    q = torch.tensor([[[1.0, 2.0]]], dtype=torch.float64, device=device)
    cos, sin = torch.zeros_like(q[0]), torch.ones_like(q[0])
    dy = torch.tensor([[[3.0, 5.0]]], dtype=torch.float64, device=device)
    ys, (dq, dk, dcos, dsin) = results(rope, (q, q, cos, sin), (dy, 2 * dy))
    close(ys[0], [-2.0, 1.0])
    close(dq, [5.0, -3.0])
    close(dk, [10.0, -6.0])
    close(dcos, [9.0, 30.0])  # (1 + 2) * dy * x
    close(dsin, [-18.0, 15.0])  # (1 + 2) * dy * (-2, 1)


# -- as exact as plain torch


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
@both_layouts
def test_error_is_at_most_twice_that_of_plain_torch(backend, device, layout, dtype, scale):
    q = scale * drawn(6, 2, 20, device=device, dtype=dtype)
    k = scale * drawn(2, 2, 20, device=device, dtype=dtype)
    hold(layout, q, k, *angles(2, 16, device=device, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "angle_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
@both_layouts
def test_angles_may_have_another_dtype(backend, device, layout, dtype, angle_dtype):
    q, k = (drawn(2, h, 2, 12, device=device, dtype=dtype) for h in (3, 1))
    hold(layout, q, k, *angles(2, 2, 8, device=device, dtype=angle_dtype))


@both_layouts
def test_float64_angles_keep_the_dtype_of_q(backend, device, layout):
    q, k = (drawn(3, 2, 8, device=device, dtype=torch.float32) for _ in range(2))
    hold(layout, q, k, *angles(2, 8, device=device))


@pytest.mark.parametrize("angle_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("r", [16, 8])
@both_layouts
def test_equals_the_function_of_hugging_face(backend, device, layout, dtype, angle_dtype, r):
    q, k = (drawn(2, 3, h, 16, device=device, dtype=dtype).transpose(1, 2) for h in (4, 2))
    cos, sin = angles(2, 3, r, device=device, dtype=angle_dtype or dtype)
    ours, theirs = rope(q, k, cos, sin, layout=layout), PLAIN[layout](q, k, cos, sin)
    exact = PLAIN[layout](*(t.double() for t in (q, k, cos, sin)))
    for got, want, true in zip(ours, theirs, exact, strict=True):
        if backend == "reference":
            assert same_bits(got, want)
        else:  # one rounding where theirs has three
            assert_exact_as(got, want, true)


@both_layouts
def test_transposed_turn_undoes_a_turn(backend, device, layout):
    q, k = drawn(3, 4, 8, device=device), drawn(3, 4, 8, device=device)
    cos, sin = angles(4, 4, device=device)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    there = rope(q, k, cos, sin, layout=layout)
    back = rope(*there, cos, -sin, layout=layout)
    torch.testing.assert_close(back, (q, k), rtol=1e-14, atol=1e-14)


# -- the tail


@pytest.mark.parametrize(("width", "r"), [(128, 32), (80, 20), (16, 8), (7, 4), (6, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both_layouts
def test_entries_beyond_r_pass_through_bit_for_bit(backend, device, layout, dtype, width, r):
    q, k = (drawn(h, 2, width, device=device, dtype=dtype) for h in (2, 1))
    q[0, 0, -1], q[0, 1, -1], k[0, 1, -1] = math.inf, math.nan, -0.0
    cos, sin = angles(2, r, device=device, dtype=torch.float32)
    dys = tuple(torch.randn_like(t) for t in (q, k))
    ys, grads = results(lambda q, k: rope(q, k, cos, sin, layout=layout), (q, k), dys)
    for y, x, dx, dy in zip(ys, (q, k), grads, dys, strict=True):
        assert same_bits(y[..., r:], x[..., r:])
        assert same_bits(dx[..., r:], dy[..., r:])
        assert y[..., :r].isfinite().all()


@both_layouts
def test_a_turn_by_nothing_gives_the_same_numbers(backend, device, layout):
    q, k = (drawn(2, 2, 3, 8, device=device, dtype=torch.bfloat16) for _ in range(2))
    one, zero = torch.ones(3, 4, device=device), torch.zeros(3, 4, device=device)
    for y, x in zip(rope(q, k, one, zero, layout=layout), (q, k), strict=True):
        assert torch.equal(y, x)


# -- shapes


@pytest.mark.parametrize("r", [2, 4, 6, 8, 10, 14, 16, 18, 30, 32, 34, 64])
@both_layouts
def test_widths_about_powers_of_two(backend, device, layout, r):
    q, k = drawn(2, 2, r, device=device), drawn(1, 2, r, device=device)
    hold_shape(layout, q, k, *angles(2, r, device=device))


@pytest.mark.parametrize(("h", "hk"), [(1, 1), (4, 1), (1, 4), (3, 3), (7, 5), (33, 2)])
@both_layouts
def test_any_numbers_of_heads(backend, device, layout, h, hk):
    q, k = drawn(h, 2, 6, device=device), drawn(hk, 2, 6, device=device)
    hold_shape(layout, q, k, *angles(2, 4, device=device))


def test_more_heads_than_one_program_takes(backend, device):
    q, k = drawn(1, 67, 1, 130, device=device), drawn(1, 1, 1, 130, device=device)
    hold_shape("half", q, k, *angles(1, 128, device=device))


@pytest.mark.parametrize("t", [1, 7, 8, 9])
def test_any_number_of_tokens(backend, device, t):
    q, k = drawn(1, 2, t, 4, device=device), drawn(1, 1, t, 4, device=device)
    hold_shape("half", q, k, *angles(t, 4, device=device))


@pytest.mark.parametrize(
    ("lead", "own"),
    [
        ((), ()),
        ((3,), ()),
        ((3,), (1,)),
        ((3,), (3,)),
        ((1,), (1,)),
        ((2, 3), ()),
        ((2, 3), (3,)),
        ((2, 3), (1, 3)),
        ((2, 3), (2, 1)),
        ((2, 2), (1, 1)),
        ((2, 2), (2, 2)),
        ((2, 1, 2), (2, 1, 1)),
    ],
)
def test_leading_axes_of_the_angles_broadcast(backend, device, lead, own):
    q, k = drawn(*lead, 2, 2, 6, device=device), drawn(*lead, 1, 2, 6, device=device)
    hold_shape("half", q, k, *angles(*own, 2, 4, device=device))


@both_layouts
def test_every_row_of_a_batch_may_have_its_own_positions(backend, device, layout):
    q, k = drawn(2, 3, 4, 8, device=device), drawn(2, 1, 4, 8, device=device)
    cos, sin = angles(2, 4, 8, device=device)
    ys = rope(q, k, cos, sin, layout=layout)
    for i in range(2):
        for y, alone in zip(ys, rope(q[i], k[i], cos[i], sin[i], layout=layout), strict=True):
            assert same_bits(y[i], alone)


@pytest.mark.parametrize(
    ("q_shape", "own"),
    [
        ((0, 2, 3, 4), (3, 4)),
        ((0, 2, 3, 4), (1, 3, 4)),
        ((0, 2, 3, 4), (0, 3, 4)),
        ((2, 0, 2, 3, 4), (3, 4)),
        ((2, 0, 2, 3, 4), (2, 1, 3, 4)),
        ((2, 2, 0, 4), (0, 4)),
        ((2, 2, 0, 4), (2, 0, 4)),
        ((2, 0, 4), (0, 4)),
        ((0, 3, 4), (3, 4)),
    ],
)
@both_layouts
def test_nothing_in_gives_nothing_out(backend, device, layout, q_shape, own):
    q, k = drawn(*q_shape, device=device), drawn(*q_shape, device=device)
    cos, sin = angles(*own, device=device)
    ys, grads = results(functools.partial(rope, layout=layout), (q, k, cos, sin))
    assert all(t.shape == q_shape for t in (*ys, *grads[:2]))
    assert all(t.shape == own for t in grads[2:])
    assert all(t.eq(0).all() for t in grads[2:])


# -- strides

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {  # of (2, 4, 2, 6) to (..., h, t, k)
    "heads beside tokens, as Hugging Face has it": lambda t: t.transpose(1, 2),
    "a slice of packed q, k and v": lambda t: t.transpose(1, 2)[:, 1:3],
    "columns of a wider head": lambda t: t[..., 2:6],
    "every other column": lambda t: t[..., ::2],
    "every other token": lambda t: t[:, :, ::2],
    "head width not innermost": lambda t: t.transpose(-1, -2)[..., :2],
    "head width not innermost, dense": lambda t: t[0].transpose(-1, -2),
    "batch not outermost": lambda t: t.transpose(0, 1),
    "all axes reversed": lambda t: t[:, :2].permute(3, 2, 1, 0),
    "one head expanded": lambda t: t[:, :1].expand(2, 2, 2, 6),
    "one row of the batch expanded": lambda t: t[:1].expand(3, 4, 2, 6),
    "one token expanded": lambda t: t[:, :, :1].expand(2, 4, 3, 6),
    "one number expanded": lambda t: t[:1, :1, :1, :1].expand(2, 3, 2, 4),
    "no leading axis": lambda t: t[0].transpose(0, 1),
    "two leading axes, heads beside tokens": lambda t: t.view(2, 2, 2, 2, 6).transpose(2, 3),
    "two leading axes in the other order": lambda t: t.view(2, 4, 1, 2, 6).transpose(0, 1),
    "three leading axes shuffled": lambda t: t.view(2, 2, 2, 2, 1, 6).permute(1, 0, 2, 3, 4, 5),
}
view = pytest.mark.parametrize("of", VIEWS.values(), ids=VIEWS.keys())


def beside(t: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A dense tensor shaped like t, and angles for both."""
    return drawn(*t.shape, device=device), *angles(t.shape[-2], t.shape[-1] // 2 * 2, device=device)


@view
def test_q_and_k_may_have_any_strides(backend, device, of):
    q, k = (of(drawn(2, 4, 2, 6, device=device)) for _ in range(2))
    _, cos, sin = beside(q, device)
    hold_shape("half", q, k[..., -1:, :, :], cos, sin)


@view
def test_upstream_gradients_may_have_any_strides(backend, device, of):
    dy = of(drawn(2, 4, 2, 6, device=device))
    dense, cos, sin = beside(dy, device)
    one = dense[..., :1, :, :].clone()
    hold_shape("interleaved", dense, one, cos, sin, dys=(dy, torch.ones_like(one)))


@pytest.mark.parametrize(
    "of",
    [
        lambda t: t.transpose(-1, -2)[:, :2],
        lambda t: t[:, ::2],
        lambda t: t[..., ::2],
        lambda t: t[:1].expand(2, 2, 4),
        lambda t: t[0].expand(2, 2, 4),
        lambda t: t[:, :1].expand(2, 3, 4),
        lambda t: t[:1, :, :2],
    ],
)
@both_layouts
def test_angles_may_have_any_strides(backend, device, layout, of):
    cos, sin = (of(a) for a in angles(2, 2, 4, device=device))
    q, k = (drawn(2, h, cos.shape[-2], 8, device=device) for h in (2, 1))
    hold_shape(layout, q, k, cos, sin)


def test_kernels_read_the_layout_of_hugging_face_in_place(device, monkeypatch):
    read: list[int] = []
    ops = liger_fn.ops.rope
    launch = ops.launch

    def spy(kernel: Any, grid: tuple[int, ...], x: Tensor, *a: Any, **kw: Any) -> None:
        read.append(x.data_ptr())
        launch(kernel, grid, x, *a, **kw)

    monkeypatch.setattr(ops, "launch", spy)
    q, k = (drawn(2, 5, h, 8, device=device).transpose(1, 2) for h in (3, 1))
    dys = tuple(drawn(2, 5, h, 8, device=device).transpose(1, 2) for h in (3, 1))
    cos, sin = angles(5, 8, device=device)
    with using("triton"):
        results(lambda q, k: rope(q, k, cos, sin), (q, k), dys)
    assert read == [t.data_ptr() for t in (q, k, *dys)]


@pytest.mark.parametrize("axis", ["batch", "heads", "tokens"])
def test_entries_may_lie_beyond_2_to_the_31_elements(backend, device, tmp_path, axis):
    far = far_apart(device, tmp_path, 2, 2, 4)
    q = {"batch": far, "heads": far.transpose(0, 1), "tokens": far.permute(2, 1, 0, 3)}[axis]
    hold("half", q, q[:, :1], *angles(q.shape[-2], 4, device=device, dtype=torch.bfloat16))


# -- purity


@pytest.mark.parametrize("frozen", ["q", "k", "cos", "sin"])
def test_frozen_arguments_get_no_gradient_and_change_no_other(backend, device, frozen):
    args = {
        "q": drawn(2, 3, 2, 8, device=device),
        "k": drawn(2, 1, 2, 8, device=device),
        **dict(zip(("cos", "sin"), angles(2, 6, device=device), strict=True)),
    }
    leaves = {name: t.clone().requires_grad_(name != frozen) for name, t in args.items()}
    ys = rope(*leaves.values())
    dys = tuple(torch.randn_like(y) for y in ys)
    _, grads = results(rope, tuple(args.values()), dys)
    full = dict(zip(args, grads, strict=True))
    torch.autograd.backward(ys, dys)
    assert leaves.pop(frozen).grad is None
    assert all(same_bits(leaf.grad, full[name]) for name, leaf in leaves.items())


def test_tables_of_angles_that_need_no_gradient_leave_only_dq_and_dk(backend, device):
    q, k = drawn(2, 3, 4, 8, device=device).requires_grad_(), drawn(2, 1, 4, 8, device=device)
    cos, sin = angles(4, 8, device=device)
    y, z = rope(q, k, cos, sin)
    (y.sum() + z.sum()).backward()
    assert q.grad is not None
    assert k.grad is cos.grad is sin.grad is None
    assert not rope(q.detach(), k, cos, sin)[0].requires_grad


@pytest.mark.parametrize("used", [0, 1])
@both_layouts
def test_one_output_alone_is_differentiable(backend, device, layout, used):
    args = (drawn(2, 3, 2, 8, device=device), drawn(2, 1, 2, 8, device=device))
    args = (*args, *angles(2, 2, 6, device=device))
    leaves = [t.clone().requires_grad_() for t in args]
    y = rope(*leaves, layout=layout)[used]
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    leaves = [t.clone().requires_grad_() for t in args]
    want = torch.autograd.grad(exact(*leaves, layout=layout)[used], leaves, dy, allow_unused=True)
    for g, w, t in zip(got, want, args, strict=True):
        zero = torch.zeros_like(t)
        pair = (zero if g is None else g, zero if w is None else w)
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)


def test_one_tensor_as_both_q_and_k(backend, device):
    q = drawn(2, 3, 4, 8, device=device)
    cos, sin = angles(4, 8, device=device)

    def twice(f: Callable[..., Any]) -> Callable[[Tensor], Any]:
        return lambda q: f(q, q, cos, sin)

    _, (got,) = results(twice(rope), (q,))
    _, (want,) = results(twice(functools.partial(exact, layout="half")), (q,))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_second_backward_gives_the_same_gradients(backend, device):
    leaves = [drawn(3, 4, 8, device=device).requires_grad_() for _ in range(2)]
    y, z = rope(*leaves, *angles(4, 8, device=device))
    dys = (torch.randn_like(y), torch.randn_like(z))
    first = torch.autograd.grad((y, z), leaves, dys, retain_graph=True)
    second = torch.autograd.grad((y, z), leaves, dys)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_of_fixed_angles_backward_keeps_no_argument(device):
    q, k = (torch.randn(1, 2, 3, 4, device=device, requires_grad=True) for _ in "qk")
    cos, sin = torch.randn(2, 3, 4, device=device)

    def kept(*args):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(home(t)), lambda _: _):
            out = rope(q, k, *args)
        return set(saved), {home(t) for t in out}

    saved, results = kept(cos, sin)
    assert saved == results | {home(cos), home(sin)}
    saved, _ = kept(cos.requires_grad_(), sin)
    assert {home(q), home(k)} <= saved
