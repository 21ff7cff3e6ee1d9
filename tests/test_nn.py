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

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_fn
from liger_fn import nn
from tests.memory import held
from tests.modules import LAYERS, MODULES, D, inputs, made
from tests.tolerance import assert_exact_as, cotangents, same_bits

every = pytest.mark.parametrize("name", MODULES)
layers = pytest.mark.parametrize("name", LAYERS)
standing = pytest.mark.parametrize("name", [k for k, m in LAYERS.items() if m.twin is not None])


def gradients(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    (dy,) = cotangents((y,))
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


# -- what they stand for


@standing
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_module_computes_what_it_stands_for(device, name, dtype):
    twin = LAYERS[name].twin
    ours, theirs = made(name, device, dtype=dtype), twin(device=device, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    (x,), _ = inputs(name, device)
    x, exact = x.to(dtype), copy.deepcopy(theirs).double()
    if name == "rms-axes":
        exact.eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    every = gradients(ours, x), gradients(theirs, x), gradients(exact, x.double())
    for got, plain, want in zip(*every, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        else:
            assert_exact_as(got, plain, want)


def test_a_norm_knows_its_castings_when_it_is_made():
    with pytest.raises(ValueError, match=r"^RMSNorm: casting must be one of 'llama', 'gemma', "):
        nn.RMSNorm(8, casting="half")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_without_eps_a_norm_of_small_numbers_is_that_of_torch(device, dtype):
    x = (1e-3 * torch.randn(4, D, dtype=torch.float64)).to(device, dtype)
    got = nn.RMSNorm(D, None, casting="gemma", device=device, dtype=dtype)(x)
    want = torch.nn.RMSNorm(D, None, device=device, dtype=dtype)(x)
    torch.testing.assert_close(got, want)


@standing
def test_a_module_is_one_of_those_it_stands_for_and_starts_alike(device, name):
    torch.manual_seed(1)
    ours = LAYERS[name].make(device=device)
    torch.manual_seed(1)
    theirs = LAYERS[name].twin(device=device)
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


@pytest.mark.parametrize("shape", [(D,), (7, D), (2, 5, D), (2, 0, D), (3, 2, 4, D)])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_gated_layer_in_tiles_is_that_layer(device, shape, chunk):
    mlp = nn.GEGLUMLP(D, 6, bias=True, device=device, dtype=torch.float64)
    x = torch.randn(shape, device=device, dtype=torch.float64)
    want = gradients(mlp, x)
    mlp.chunk = chunk
    for got, whole in zip(gradients(mlp, x), want, strict=True):
        torch.testing.assert_close(got, whole)
    rows = torch.func.grad(lambda x: mlp(x).square().sum())(x)
    torch.testing.assert_close(
        rows, torch.autograd.grad(mlp(at := x.clone().requires_grad_()).square().sum(), at)[0]
    )


def test_a_gated_layer_in_tiles_holds_the_activations_of_one(plain, device, tmp_path):
    x = torch.randn(256, 4, device=device, requires_grad=True)

    def peak(chunk):
        mlp = nn.SwiGLUMLP(4, 512, chunk=chunk, device=device)

        def step():
            torch.autograd.grad(mlp(x).sum(), [x, *mlp.parameters()])

        step()  # the first checkpoint of a process allocates what is nobody's
        return held(step, device, tmp_path)

    between = 256 * 512 * 4  # bytes of gate of all tokens, of up likewise
    whole, tiles = peak(None), peak(16)
    assert whole > 4 * between
    assert tiles < between, f"{tiles} bytes, {tiles / between:.2f} of one such tensor"


@pytest.mark.parametrize("frozen", [False, True])
def test_tiles_are_formed_again_by_the_parameters_of_their_forward_pass(device, frozen):
    mlp = nn.SwiGLUMLP(D, 6, device=device, dtype=torch.float64).requires_grad_(not frozen)
    x = torch.randn(5, D, device=device, dtype=torch.float64, requires_grad=True)
    given = {n: torch.randn_like(p, requires_grad=True) for n, p in mlp.named_parameters()}

    def call():  # backward comes when the parameters of the module are back
        y = torch.func.functional_call(mlp, given, (x,))
        return torch.autograd.grad(y.square().sum(), [x, *given.values()])

    want = call()
    mlp.chunk = 2
    for got, whole in zip(call(), want, strict=True):
        torch.testing.assert_close(got, whole)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_parameter_modified_before_backward_is_an_error(device, chunk):
    mlp = nn.SwiGLUMLP(D, 6, chunk=chunk, device=device)
    y = mlp(torch.randn(5, D, device=device)).sum()
    with torch.no_grad():
        mlp.down_proj.weight.mul_(2)
    name = "SwiGLUMLP: a parameter was " if chunk else ""
    with pytest.raises(RuntimeError, match=f"{name}modified"):
        y.backward()


@pytest.mark.parametrize("how", ["none", "tanh"])
def test_a_layer_in_tiles_compiles_for_sizes_that_vary(plain, device, how):
    mlp = nn.GEGLUMLP(D, 6, approximate=how, chunk=4, device=device)
    x = torch.randn(2, 5, D, device=device)
    want = gradients(mlp, x)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    for got, eager in zip(gradients(compiled, x), want, strict=True):
        torch.testing.assert_close(got, eager)


@pytest.mark.parametrize("kind", [nn.SwiGLUMLP, nn.GEGLUMLP])
def test_a_chunk_that_is_none_is_refused(kind):
    with pytest.raises(
        ValueError, match=rf"^{kind.__name__}: chunk must be an integer above 0, got 0"
    ):
        kind(4, 8, chunk=0)


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


# -- life of a module


def test_the_list_holds_every_module():
    modules = {name for name in nn.__all__ if issubclass(getattr(nn, name), torch.nn.Module)}
    assert {type(made(name, torch.device("cpu"))).__name__ for name in MODULES} == modules


@every
def test_a_copy_and_a_pickle_compute_the_same(device, name):
    module, (args, kw) = made(name, device), inputs(name, device)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    again = pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False)
    for other in (copy.deepcopy(module), *again):
        torch.testing.assert_close(other(*args, **kw), module(*args, **kw), rtol=0, atol=0)
        assert repr(other) == repr(module)
        assert not {id(p) for p in other.parameters()} & {id(p) for p in module.parameters()}


@layers
def test_parameters_come_back_after_meta(device, name):
    module = LAYERS[name].make(device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
    module.to_empty(device=device).reset_parameters()
    assert all(p.isfinite().all() for p in module.parameters())


def test_what_is_no_layer_holds_no_parameter(device):
    assert not any([*made(name, device).parameters()] for name in MODULES if name not in LAYERS)


@every
def test_a_module_can_be_exported_and_compiled(device, name):
    module, (args, kw) = made(name, device), inputs(name, device)
    want = module(*args, **kw)
    program = torch.export.export(module, args, kw)
    torch.testing.assert_close(program.module()(*args, **kw), want)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args, **kw), want)


@every
def test_a_module_names_its_options(device, name):
    assert repr(made(name, device)).startswith(MODULES[name].text)


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
    names = (
        "norms",
        "gates",
        "rotary",
        "losses",
        "preference",
        "adapters.survey",
        "adapters.adapt",
    )
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
