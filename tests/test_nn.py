"""Modules: they stand for those of torch (and, in test_adapters, of Hugging Face) name by name."""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import io
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from liger_fn import nn
from tests.tolerance import assert_exact_as, cotangents, same_bits

D, V = 8, 13
LOSS = nn.FusedLinearCrossEntropyLoss(softcap=3.0, logit_scale=0.5, label_smoothing=0.1)

# name: (the module, what it stands for or None, shape of x)
MODULES: dict[str, tuple[Callable[..., torch.nn.Module], Callable | None, tuple[int, ...]]] = {
    "rms": (
        lambda **kw: nn.RMSNorm(D, 1e-5, casting="gemma", **kw),
        lambda **kw: torch.nn.RMSNorm(D, 1e-5, **kw),
        (3, 5, D),
    ),
    "rms-axes": (
        lambda **kw: nn.RMSNorm([5, D], None, casting="gemma", **kw),
        lambda **kw: torch.nn.RMSNorm([5, D], None, **kw),
        (3, 5, D),
    ),
    "rms-plain": (
        lambda **kw: nn.RMSNorm(D, 1e-5, elementwise_affine=False, **kw),
        lambda **kw: torch.nn.RMSNorm(D, 1e-5, elementwise_affine=False, **kw),
        (3, D),
    ),
    "layer": (
        lambda **kw: nn.LayerNorm(D, **kw),
        lambda **kw: torch.nn.LayerNorm(D, **kw),
        (3, 5, D),
    ),
    "layer-axes": (
        lambda **kw: nn.LayerNorm((5, D), 1e-3, bias=False, **kw),
        lambda **kw: torch.nn.LayerNorm((5, D), 1e-3, bias=False, **kw),
        (3, 5, D),
    ),
    "group": (
        lambda **kw: nn.GroupNorm(2, 4, **kw),
        lambda **kw: torch.nn.GroupNorm(2, 4, **kw),
        (3, 4, 5, 2),
    ),
    "dyt": (lambda **kw: nn.DyT(D, **kw), None, (3, D)),
    "swiglu": (lambda **kw: nn.SwiGLUMLP(D, 6, **kw), None, (3, D)),
    "geglu": (lambda **kw: nn.GEGLUMLP(D, 6, bias=True, approximate="none", **kw), None, (3, D)),
    "head": (
        lambda **kw: nn.LMHead(D, V, **kw),
        lambda **kw: torch.nn.Linear(D, V, **kw),
        (3, 5, D),
    ),
}
every = pytest.mark.parametrize("name", MODULES)
standing = pytest.mark.parametrize("name", [k for k, m in MODULES.items() if m[1] is not None])


def made(name: str, device: torch.device, **kw) -> torch.nn.Module:
    """The module, with parameters that are not at their start."""
    module = MODULES[name][0](device=device, **kw)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) / 4)
    return module


def gradients(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    (dy,) = cotangents((y,))
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


# -- what they stand for


@standing
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_module_computes_what_it_stands_for(device, name, dtype):
    _, twin, shape = MODULES[name]
    ours, theirs = made(name, device, dtype=dtype), twin(device=device, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape, device=device, dtype=dtype)
    exact = copy.deepcopy(theirs).double()
    if name == "rms-axes":
        exact.eps = torch.finfo(dtype).eps
    every = gradients(ours, x), gradients(theirs, x), gradients(exact, x.double())
    for got, plain, want in zip(*every, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        else:
            assert_exact_as(got, plain, want)


@standing
def test_a_module_is_one_of_those_it_stands_for_and_starts_alike(device, name):
    _, twin, _ = MODULES[name]
    torch.manual_seed(1)
    ours = MODULES[name][0](device=device)
    torch.manual_seed(1)
    theirs = twin(device=device)
    assert isinstance(ours, type(theirs))
    assert all(hasattr(ours, k) for k in vars(theirs))
    for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same_bits(got.detach(), want.detach())
    theirs_in = list(inspect.signature(type(theirs).__init__).parameters)
    assert list(inspect.signature(type(ours).__init__).parameters)[: len(theirs_in)] == theirs_in


def test_gains_of_gemma_start_at_zero_and_count_from_one(device):
    norm = nn.RMSNorm(2, eps=0.0, offset=1.0, casting="gemma", device=device)
    assert norm.weight.tolist() == [0.0, 0.0]
    x = torch.tensor([3.0, 4.0], device=device)
    torch.testing.assert_close(norm(x), nn.RMSNorm(2, eps=0.0, device=device)(x))
    assert norm.variance_epsilon == norm.eps == 0.0


@pytest.mark.parametrize(
    ("mlp", "act"),
    [
        (nn.SwiGLUMLP(D, 6), F.silu),
        (nn.GEGLUMLP(D, 6, bias=True), lambda g: F.gelu(g, approximate="tanh")),
        (nn.GEGLUMLP(D, 6, approximate="none"), F.gelu),
    ],
)
def test_a_gated_layer_is_its_formula(device, mlp, act):
    mlp, x = mlp.to(device).double(), torch.randn(3, D, device=device, dtype=torch.float64)
    want = mlp.down_proj(act(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), want)
    names = {k.rsplit(".", 1)[0] for k in mlp.state_dict()}
    assert names == {"gate_proj", "up_proj", "down_proj"}


def test_dyt_is_its_formula(device):
    dyt, x = made("dyt", device), torch.randn(3, D, device=device)
    torch.testing.assert_close(dyt(x), torch.tanh(dyt.alpha * x) * dyt.weight + dyt.bias)
    assert list(dyt.state_dict()) == ["alpha", "weight", "bias"]


# -- rotary


def test_angles_are_positions_times_powers_of_the_base(device):
    cos, sin = nn.RotaryEmbedding(4, base=100.0, device=device)(
        torch.ones((), device=device, dtype=torch.float64), torch.tensor([[0, 3]], device=device)
    )
    angles = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [3.0, 0.3, 3.0, 0.3]]], device=device)
    torch.testing.assert_close(cos, angles.double().cos(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sin, angles.double().sin(), rtol=1e-6, atol=1e-6)


def test_frequencies_stay_float32_and_out_of_the_state_dict(device):
    rotary = nn.RotaryEmbedding(6, device=device)
    want = rotary.inv_freq.clone()
    model = torch.nn.Sequential(rotary).to(torch.bfloat16)
    assert same_bits(model[0].inv_freq, want)
    assert not model.state_dict()
    cos, _ = rotary(
        torch.ones(1, dtype=torch.bfloat16, device=device), torch.arange(3, device=device)[None]
    )
    assert cos.dtype == torch.bfloat16


def test_a_model_made_on_meta_gets_its_frequencies_back(device):
    rotary = nn.RotaryEmbedding(6, device="meta").to_empty(device=device)
    rotary.reset_parameters()
    assert same_bits(rotary.inv_freq, nn.RotaryEmbedding(6, device=device).inv_freq)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match=r"^RotaryEmbedding: dim must be even and above 0, got 3$"):
        nn.RotaryEmbedding(3)


# -- losses


@pytest.mark.parametrize("shape", [(V,), (4, V), (4, V, 3), (2, V, 3, 2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_that_of_torch_with_classes_on_its_axis(device, shape, reduction):
    weight = torch.rand(V, device=device, dtype=torch.float64)
    options = {"weight": weight, "ignore_index": 2, "label_smoothing": 0.1, "reduction": reduction}
    logits = torch.randn(shape, device=device, dtype=torch.float64)
    y = torch.randint(V, (*shape[:1], *shape[2:]) if len(shape) > 1 else (), device=device)
    ours, theirs = nn.CrossEntropyLoss(**options), torch.nn.CrossEntropyLoss(**options)
    want = theirs(logits.cpu(), y.cpu()).to(device)  # on CUDA torch has no deterministic one
    torch.testing.assert_close(ours(logits, y), want)
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]


def test_a_head_gives_logits_or_the_loss_of_these_logits(device):
    head = nn.LMHead(D, V, device=device, dtype=torch.float64, loss=copy.deepcopy(LOSS))
    x, y = torch.randn(2, 5, D, device=device).double(), torch.randint(V, (2, 5), device=device)
    z = head(x)
    torch.testing.assert_close(z, 3.0 * torch.tanh(F.linear(x, head.weight, head.bias) / 6.0))
    want = F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(head(x, y), want)
    torch.testing.assert_close(head(x, y, n_valid=5.0), 2 * want)
    torch.testing.assert_close(head(x, y, token_weight=torch.ones_like(x[..., 0]) / 2), want / 2)
    torch.testing.assert_close(LOSS(head.weight, x, y, head.bias), want)


def test_hooks_around_a_head_see_the_call_that_forms_the_loss(device):
    head, seen = nn.LMHead(D, V, bias=False, device=device), []
    head.register_forward_pre_hook(lambda *a: seen.append("before"))
    head.register_forward_hook(lambda *a: seen.append("after"))
    head(torch.randn(3, D, device=device), torch.arange(3, device=device)).backward()
    assert seen == ["before", "after"]
    assert list(head.state_dict()) == ["weight"]


# -- life of a module


@every
def test_a_copy_and_a_pickle_compute_the_same(device, name):
    module, x = made(name, device), torch.randn(MODULES[name][2], device=device)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    again = pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False)
    for other in (copy.deepcopy(module), *again):
        assert same_bits(other(x).detach(), module(x).detach())
        assert not {id(p) for p in other.parameters()} & {id(p) for p in module.parameters()}


@every
def test_parameters_come_back_after_meta(device, name):
    module = MODULES[name][0](device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
    module.to_empty(device=device).reset_parameters()
    assert all(p.isfinite().all() for p in module.parameters())


@every
def test_a_module_can_be_exported_and_compiled(device, name):
    module, x = made(name, device), torch.randn(MODULES[name][2], device=device)
    want = module(x)
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), want)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), want)


def test_a_rotary_embedding_and_a_loss_can_be_exported(device):
    x, at = torch.randn(2, 3, D, device=device), torch.arange(3, device=device)[None]
    rotary = nn.RotaryEmbedding(4, device=device)
    torch.testing.assert_close(torch.export.export(rotary, (x, at)).module()(x, at), rotary(x, at))
    head, y = made("head", device), torch.randint(V, (2, 3), device=device)
    program = torch.export.export(head, (x, y)).module()
    torch.testing.assert_close(program(x, y), head(x, y))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            nn.RMSNorm(8, offset=1.0),
            "RMSNorm((8,), eps=1e-06, elementwise_affine=True, offset=1.0, casting='llama')",
        ),
        (nn.DyT(8), "DyT(8, alpha=0.5)"),
        (nn.RotaryEmbedding(4), "RotaryEmbedding(4, base=10000.0)"),
        (nn.CrossEntropyLoss(), "CrossEntropyLoss()"),
        (LOSS, f"{type(LOSS).__name__}(label_smoothing=0.1, softcap=3.0, logit_scale=0.5)"),
    ],
)
def test_a_module_names_its_options(module, text):
    assert repr(module) == text


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("shape", [(4,), (2, 1), ()])
def test_a_norm_refuses_rows_of_another_width(kind, shape):
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: x must have shape \(\.\.\., 2, 4\)"):
        kind((2, 4))(torch.ones(shape))


def test_an_unknown_gelu_is_refused():
    with pytest.raises(ValueError, match=r"^GEGLUMLP: approximate must be one of"):
        nn.GEGLUMLP(4, 8, approximate="fast")


# -- the package


def test_every_name_is_exported_and_every_example_runs():
    names = ("norms", "gates", "rotary", "losses", "adapters.survey", "adapters.adapt")
    for name in names:
        module = importlib.import_module(f"liger_fn.nn.{name}")
        found = doctest.testmod(module, extraglobs={"torch": torch, "liger_fn": liger_fn})
        assert found.attempted
        assert not found.failed
    assert nn.__all__ == sorted(nn.__all__, key=lambda n: (not n.isupper(), n))


def test_liger_fn_imports_no_module_and_no_module_imports_transformers():
    code = (
        "import sys, liger_fn; assert 'liger_fn.nn' not in sys.modules; "
        "import liger_fn.nn.adapters; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
