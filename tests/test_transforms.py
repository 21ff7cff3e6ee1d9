"""Every transform on every row of the table, against plain torch. Nothing op-specific."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from liger_fn import _launch
from tests.table import ROWS, Row, bind

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
pytestmark = every_row
F = Callable[..., Any]


def point(row: Row, args: dict[str, Tensor], *, leaf: bool = False) -> tuple[Tensor, ...]:
    made = (args[name].clone() for name in row.differentiable)
    return tuple(t.requires_grad_() if leaf else t for t in made)


def scalar(out: Any) -> Tensor:
    """A smooth function of every output, so that no upstream gradient is 1 or 0."""
    return sum((0.3 * t).sin().sum() for t in tree_leaves(out))  # type: ignore[return-value]  # never empty


def down(f: F) -> F:
    return lambda *a: scalar(f(*a))


def every(a: tuple) -> tuple[int, ...]:
    return tuple(range(len(a)))


def tangents(a: tuple) -> tuple[Tensor, ...]:
    return tuple(t.cos() for t in a)


def along(f: F, a: tuple) -> F:
    """The derivative of a scalar function along fixed tangents, by reverse mode."""
    return lambda *b: sum(
        (g * t).sum() for g, t in zip(grad(f, every(a))(*b), tangents(a), strict=True)
    )


def same(got: Any, want: Any, **tolerance: float) -> None:
    for p, q in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(p, q, check_stride=False, **tolerance)


TRANSFORMS: dict[str, Callable[[F, tuple], Any]] = {
    "value": lambda f, a: f(*a),
    "grad": lambda f, a: grad(down(f), every(a))(*a),
    "vjp": lambda f, a: vjp(f, *a)[1](tree_map(torch.cos, f(*a))),
    "jvp": lambda f, a: jvp(f, a, tangents(a)),
    "linearize": lambda f, a: linearize(down(f), *a)[1](*tangents(a)),
    "jacrev": lambda f, a: jacrev(f, every(a))(*a),
    "jacfwd": lambda f, a: jacfwd(f, every(a))(*a),
    "jacfwd(jacrev)": lambda f, a: jacfwd(jacrev(down(f), every(a)), every(a))(*a),
    "jacrev(jacrev)": lambda f, a: jacrev(jacrev(down(f), every(a)), every(a))(*a),
    "jacrev(jacfwd)": lambda f, a: jacrev(jacfwd(down(f), every(a)), every(a))(*a),
    "jacfwd(jacfwd)": lambda f, a: jacfwd(jacfwd(down(f), every(a)), every(a))(*a),
    "third order": lambda f, a: grad(along(along(down(f), a), a), every(a))(*a),
    "jvp(vjp)": lambda f, a: jvp(
        vjp(down(f), *a)[1], (scalar(f(*a)).cos(),), (scalar(f(*a)).sin(),)
    ),
    "vmap(jvp)": lambda f, a: vmap(lambda s: jvp(f, a, tuple(s * t for t in tangents(a)))[1])(
        torch.arange(1.0, 4.0, dtype=a[0].dtype, device=a[0].device)
    ),
}


@pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr:UserWarning"
)  # linearize, of any constant
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform_equals_that_of_plain_torch(
    row: Row, transform: str, backend: str, device: torch.device
) -> None:
    if transform == "jacfwd(jacfwd)" and backend == "triton":
        pytest.skip("forward mode runs the reference whatever the backend: covered there")
    args = row.arguments(device)
    a, run = point(row, args), TRANSFORMS[transform]
    same(run(bind(row.fn, row, args), a), run(bind(row.oracle, row, args), a))


# -- vmap: each argument, each axis, all together, nested, and around or under reverse mode --------


def stacked(name: str, t: Tensor, dim: int, size: int = 3) -> Tensor:
    """`size` different values of an argument, along a new axis."""
    if not t.is_floating_point():  # targets: in range, ignored ones in other places
        return torch.stack([t.roll(i, -1) for i in range(size)], dim)
    return torch.stack([t * (1 + 0.1 * i) for i in range(size)], dim)


def loop(f: F, dims: tuple, a: tuple, size: int = 3) -> Any:
    outs = [
        f(*(t if d is None else t.select(d, i) for t, d in zip(a, dims, strict=True)))
        for i in range(size)
    ]
    return tree_map(lambda *t: torch.stack(t), *outs)


def mappings(row: Row, args: dict[str, Tensor]) -> list[dict[str, int]]:
    one = [{name: dim} for name, t in args.items() for dim in {0, min(1, t.dim()), -1}]
    return [*one, dict.fromkeys(args, 0), dict.fromkeys(row.differentiable, -1)]


def test_vmap_over_each_argument_and_axis_equals_a_loop(
    row: Row, backend: str, device: torch.device
) -> None:
    args = row.arguments(device)
    for mapped in mappings(row, args):
        a = tuple(stacked(n, t, mapped[n]) if n in mapped else t for n, t in args.items())
        dims = tuple(mapped.get(n) for n in args)
        same(vmap(row.fn, dims)(*a), loop(row.oracle, dims, a))


def test_per_sample_gradients_equal_a_loop(row: Row, backend: str, device: torch.device) -> None:
    args = row.arguments(device)
    at = tuple(i for i, n in enumerate(args) if n in row.differentiable)
    for mapped in mappings(row, args):
        a = tuple(stacked(n, t, mapped[n]) if n in mapped else t for n, t in args.items())
        dims = tuple(mapped.get(n) for n in args)
        got, want = grad(down(row.fn), at), grad(down(row.oracle), at)
        same(vmap(got, dims)(*a), loop(want, dims, a))


def test_gradient_of_vmap_and_nested_vmap(row: Row, backend: str, device: torch.device) -> None:
    args = row.arguments(device)
    names = list(args)
    at = tuple(i for i, n in enumerate(args) if n in row.differentiable)
    pairs = [(n, n) for n in names] + list(zip(names, names[1:] + names[:1], strict=True))
    if in_interpreter(backend):
        pairs = pairs[::2]
    for outer, inner in dict.fromkeys(pairs):
        a = dict(args)
        a[inner] = stacked(inner, a[inner], 0, 2)
        a[outer] = stacked(outer, a[outer], 0, 2)
        dims = [tuple(0 if n == who else None for n in names) for who in (inner, outer)]

        def nested(fn: F, dims: list = dims) -> F:
            return vmap(vmap(fn, dims[0]), dims[1])

        for use in (
            nested,
            lambda fn, nested=nested: nested(grad(down(fn), at)),
            lambda fn, nested=nested: grad(down(nested(fn)), at),
        ):
            same(use(row.fn)(*a.values()), use(row.oracle)(*a.values()))


def test_hessian_of_each_sample(row: Row, backend: str, device: torch.device) -> None:
    args = row.arguments(device)
    name = row.differentiable[0]
    i = list(args).index(name)
    a = {**args, name: stacked(name, args[name], 0, 2)}
    dims = tuple(0 if n == name else None for n in args)
    for order in (lambda f: jacrev(jacrev(f, i), i), lambda f: jacfwd(jacrev(f, i), i)):
        same(
            vmap(order(down(row.fn)), dims)(*a.values()),
            vmap(order(down(row.oracle)), dims)(*a.values()),
        )


# -- torch.autograd --------------------------------------------------------------------------------


def in_interpreter(backend: str) -> bool:
    """Kernels are slow there: half of the pairs, one random direction, not each axis."""
    return backend == "triton" and _launch._INTERPRET


def test_gradcheck_with_batched_and_forward_gradients(
    row: Row, backend: str, device: torch.device
) -> None:
    args = row.arguments(device)
    f, a = bind(row.fn, row, args), point(row, args, leaf=True)
    assert torch.autograd.gradcheck(
        f, a, check_batched_grad=True, check_forward_ad=True, fast_mode=in_interpreter(backend)
    )


def test_gradgradcheck(row: Row, backend: str, device: torch.device) -> None:
    args = row.arguments(device)
    f, a = bind(row.fn, row, args), point(row, args, leaf=True)
    assert torch.autograd.gradgradcheck(f, a, fast_mode=in_interpreter(backend))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_equals_plain(
    row: Row, reentrant: bool, backend: str, device: torch.device
) -> None:
    args = row.arguments(device)
    f, a = bind(row.fn, row, args), point(row, args, leaf=True)
    scalar(checkpoint(f, *a, use_reentrant=reentrant)).backward()
    same([t.grad for t in a], grad(down(bind(row.oracle, row, args)), every(a))(*point(row, args)))


def test_two_backwards_with_different_upstream_gradients(
    row: Row, backend: str, device: torch.device
) -> None:
    args = row.arguments(device)
    a, b = point(row, args, leaf=True), point(row, args, leaf=True)
    got = tree_leaves(bind(row.fn, row, args)(*a))
    want = tree_leaves(bind(row.oracle, row, args)(*b))
    upstream = (
        [t.detach().cos() for t in want],
        [t.new_full((), 3.0).expand(t.shape) for t in want],
        [t.detach().sin().flip(-1) if t.dim() else t.detach().sin() for t in want],
    )  # fmt: skip
    for up in upstream:
        kept = [u.clone() for u in up]
        same(
            torch.autograd.grad(got, a, up, retain_graph=True),
            torch.autograd.grad(want, b, up, retain_graph=True),
        )
        same(up, kept, rtol=0, atol=0)


def test_each_subset_of_wanted_gradients(row: Row, backend: str, device: torch.device) -> None:
    args = row.arguments(device)
    want = grad(down(bind(row.oracle, row, args)), every(row.differentiable))(*point(row, args))
    for bits in range(1, 2 ** len(row.differentiable)):
        a = point(row, args)
        for i, t in enumerate(a):
            t.requires_grad_(bool(bits >> i & 1))
        scalar(bind(row.fn, row, args)(*a)).backward()
        for t, g in zip(a, want, strict=True):
            same(t.grad, g) if t.requires_grad else same(t.grad is None, True)


def test_each_output_used_alone(row: Row, backend: str, device: torch.device) -> None:
    args = row.arguments(device)
    for i in range(len(tree_leaves(row.oracle(*args.values())))):
        a, b = point(row, args, leaf=True), point(row, args, leaf=True)
        for fn, leaves in ((row.fn, a), (row.oracle, b)):
            scalar(tree_leaves(bind(fn, row, args)(*leaves))[i]).backward()
        for p, q in zip(a, b, strict=True):
            same(torch.zeros_like(p) if p.grad is None else p.grad,
                 torch.zeros_like(q) if q.grad is None else q.grad)  # fmt: skip


class Tied(torch.nn.Module):
    """Applies fn twice to parameters that are registered under two names each."""

    def __init__(self, row: Row, args: dict[str, Tensor], fn: F) -> None:
        super().__init__()
        self.f = bind(fn, row, args)
        for name in row.differentiable:
            self.register_parameter("one_" + name, torch.nn.Parameter(args[name].clone()))
            self.register_parameter("two_" + name, getattr(self, "one_" + name))
        self.names = row.differentiable

    def forward(self) -> Tensor:
        one, two = ([getattr(self, p + n) for n in self.names] for p in ("one_", "two_"))
        return scalar(self.f(*one)) + scalar(self.f(*two)) ** 2


def test_functional_call_with_tied_weights(row: Row, backend: str, device: torch.device) -> None:
    args = row.arguments(device)
    given = {"one_" + n: 1.1 * args[n] for n in row.differentiable}

    def gradients(fn: F) -> dict[str, Tensor]:
        module = Tied(row, args, fn)
        return grad(lambda p: functional_call(module, p, ()))(given)

    got, want = gradients(row.fn), gradients(row.oracle)
    same(got, want)


# -- what must not change, and what must repeat ----------------------------------------------------


def test_nothing_of_the_callers_is_written_and_nothing_aliases(
    row: Row, backend: str, device: torch.device
) -> None:
    args = row.arguments(device)
    a = point(row, args, leaf=True)
    before = {n: t.clone() for n, t in args.items()}
    kept = [t.detach().clone() for t in a]
    out = tree_leaves(bind(row.fn, row, args)(*a))
    values = [t.detach().clone() for t in out]
    up = [t.detach().cos() for t in out]
    cotangents = [t.clone() for t in up]
    for order in ({"create_graph": True}, {"retain_graph": True}, {}):
        torch.autograd.grad(out, a, up, **order)
    same([args, list(a), out, up], [before, kept, values, cotangents], rtol=0, atol=0)
    storages = {t.untyped_storage().data_ptr() for t in (*args.values(), *a)}
    assert not storages & {t.untyped_storage().data_ptr() for t in out if t.numel()}


def test_two_runs_are_bit_equal(row: Row, backend: str, device: torch.device) -> None:
    args = row.arguments(device)
    run = functools.partial(TRANSFORMS["grad"], bind(row.fn, row, args), point(row, args))
    same(run(), run(), rtol=0, atol=0)


def test_autocast_is_no_worse_than_plain_torch(
    row: Row, backend: str, device: torch.device
) -> None:
    exact = row.arguments(device)
    args = {n: t.float() if t.is_floating_point() else t for n, t in exact.items()}
    want = grad(down(bind(row.oracle, row, exact)), every(row.differentiable))(*point(row, exact))

    def gradients(fn: F) -> tuple[Tensor, ...]:
        a = point(row, args, leaf=True)
        with torch.autocast(device.type, torch.bfloat16):
            out = scalar(bind(fn, row, args)(*a))
        return torch.autograd.grad(out, a)

    for got, plain, true in zip(gradients(row.fn), gradients(row.oracle), want, strict=True):
        assert got.dtype == torch.float32
        error, allowed = ((t.double() - true).norm() for t in (got, plain))
        assert error <= 2 * allowed + 2**-8 * true.norm()


# -- tracing: fake tensors, counters, policies, opcheck --------------------------------------------


class Seen(TorchDispatchMode):
    """Records the registered ops that pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "liger_fn":
            self.calls.append((func, args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def seen(row: Row, device: torch.device) -> list[tuple[Any, tuple, dict]]:
    args = row.arguments(device)
    a = point(row, args, leaf=True)
    with Seen() as mode:
        scalar(bind(row.fn, row, args)(*a)).backward()
    return mode.calls


def test_dispatch_modes_see_registered_ops_that_pass_opcheck(
    row: Row, backend: str, device: torch.device
) -> None:
    if not row.ops:
        pytest.skip("algebra in plain torch")
    calls = seen(row, device)
    assert [c[0].name().endswith(("_fwd", "_bwd")) for c in calls] == [True, True]
    for func, args, kwargs in calls:
        torch.library.opcheck(
            func, tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, args), kwargs,
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(
    row: Row, backend: str, device: torch.device
) -> None:
    args = row.arguments(device)
    a = point(row, args, leaf=True)
    real = bind(row.fn, row, args)(*a)
    real = (*tree_leaves(real), *torch.autograd.grad(scalar(real), a))
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) for n, t in args.items()}
        b = tuple(fakes[n].detach().requires_grad_() for n in row.differentiable)
        out = bind(row.fn, row, fakes)(*b)
        fake = (*tree_leaves(out), *torch.autograd.grad(scalar(out), b))
    for p, q in zip(real, fake, strict=True):
        assert (p.shape, p.dtype, p.stride()) == (q.shape, q.dtype, q.stride())


def test_selective_checkpointing_sees_and_keeps_the_ops(
    row: Row, backend: str, device: torch.device
) -> None:
    args = row.arguments(device)
    names: list[str] = []

    def policy(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        names.append(str(op))
        ours = "liger_fn" in str(op)
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    a = point(row, args, leaf=True)
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(bind(row.fn, row, args), *a, use_reentrant=False, context_fn=context)
    scalar(out).backward()
    assert any(name.startswith("liger_fn.") for name in names) == row.ops
    same([t.grad for t in a], grad(down(bind(row.oracle, row, args)), every(a))(*point(row, args)))


def test_flop_counter_agrees_with_plain_torch_up_to_recomputation(
    row: Row, backend: str, device: torch.device
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    args = row.arguments(device)
    counts = []
    for fn in (row.fn, row.oracle):
        with FlopCounterMode(display=False) as counter:
            scalar(bind(fn, row, args)(*point(row, args, leaf=True))).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == pytest.approx(row.flops * counts[1])


# -- torch.compile ---------------------------------------------------------------------------------

COMPILED: dict[str, Callable[[F, tuple], Any]] = {
    "function": lambda f, a: f,
    "func.grad": lambda f, a: grad(down(f), every(a)),
    "vmap(grad)": lambda f, a: vmap(grad(down(f), every(a)), (0,) + (None,) * (len(a) - 1)),
    "jvp": lambda f, a: lambda *b: jvp(f, b, tangents(a)),
    "hessian": lambda f, a: jacfwd(jacrev(down(f))),
}


def check_compiled(row: Row, what: str, compiler: str, device: torch.device) -> None:
    args = row.arguments(device)
    a = point(row, args)
    if what == "vmap(grad)":
        a = (stacked(row.differentiable[0], a[0], 0, 2), *a[1:])
    got, want = (COMPILED[what](bind(fn, row, args), a) for fn in (row.fn, row.oracle))
    same(torch.compile(got, fullgraph=True, backend=compiler)(*a), want(*a))


def check_compiled_backward(row: Row, compiler: str, device: torch.device) -> None:
    args = row.arguments(device)
    a = point(row, args, leaf=True)
    torch.compile(down(bind(row.fn, row, args)), fullgraph=True, backend=compiler)(*a).backward()
    same([t.grad for t in a], grad(down(bind(row.oracle, row, args)), every(a))(*point(row, args)))


@pytest.mark.parametrize("what", COMPILED)
def test_compiled_equals_eager(row: Row, what: str, backend: str, device: torch.device) -> None:
    if what != "function" and backend == "triton":
        pytest.skip("a compiled transform runs the reference whatever the backend: covered there")
    check_compiled(row, what, "aot_eager", device)


def test_compiled_backward_equals_eager(row: Row, backend: str, device: torch.device) -> None:
    check_compiled_backward(row, "aot_eager", device)


@pytest.mark.slow
@pytest.mark.parametrize("what", COMPILED)
def test_inductor_equals_eager(row: Row, what: str, backend: str, device: torch.device) -> None:
    check_compiled(row, what, "inductor", device)


@pytest.mark.slow
def test_inductor_backward_equals_eager(row: Row, backend: str, device: torch.device) -> None:
    check_compiled_backward(row, "inductor", device)


def test_compilations_do_not_grow_with_the_number_of_lengths(
    row: Row, backend: str, device: torch.device
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(lambda *a: down(row.fn)(*a), fullgraph=True, backend=counter)
    for size in range(4, 10):
        a = row.longer(size).arguments(device)
        f(*(t.requires_grad_(n in row.differentiable) for n, t in a.items()))
    assert counter.frame_count <= 2
