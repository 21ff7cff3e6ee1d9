"""An adapted model in use: options of a call, copies, compilation, other libraries on top."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import liger_fn
from liger_fn import nn
from liger_fn.nn import adapters
from liger_fn.nn.adapters import (
    AdapterError,
    DeferredLogits,
    adapt,
    adapted,
    check_adapter,
    restore,
)
from tests import zoo
from tests.adapted import ALL, gradients, nodes, on, same_gradients

pytestmark = pytest.mark.usefixtures("plain")


# -- switches


@pytest.mark.parametrize("was", [{}, {"layer_norm": False}])
def test_a_block_leaves_an_adapted_model_as_it_was(was):
    model = adapt(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)), **was)
    before = [dict(m.__dict__) for m in model.modules()]
    with adapted(model) as inner, adapted(inner, layer_norm=False):
        assert "forward" not in model[0].__dict__
    assert [dict(m.__dict__) for m in model.modules()] == before


def test_a_switch_is_true_false_or_none():
    with pytest.raises(ValueError, match=r"^adapt: rms_norm must be True, False or None, got 'no'"):
        adapt(torch.nn.LayerNorm(8), rms_norm="no")


class Gated(torch.nn.Module):
    """As the norms of Mamba: an rms_norm, unless there is a gate."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.rand(8)), 1e-5

    def forward(self, x, gate=None):
        x = x if gate is None else x * torch.nn.functional.silu(gate)
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def test_a_norm_that_takes_more_than_one_tensor_is_left_alone(device):
    norm = Gated().to(device)
    x, gate = torch.randn(2, 3, 8, device=device)
    want = norm(x, gate)
    assert "forward" not in adapt(norm).__dict__
    assert torch.equal(norm(x, gate), want)


def test_what_is_called_by_keyword_runs_its_own_forward(device):
    layer, x = torch.nn.LayerNorm(8, device=device), torch.randn(3, 8, device=device)
    want = layer(x)
    assert "forward" in adapt(layer).__dict__
    torch.testing.assert_close(layer(input=x), want)


def test_a_model_without_a_head_or_a_loss_is_told_so(llama, batch):
    labels = batch.pop("labels")
    body = adapt(llama.model)
    with pytest.raises(AdapterError, match=r"^token_logprobs: no head of LlamaModel is adapted: "):
        adapters.token_logprobs(body, labels=labels, **batch)
    with pytest.raises(AdapterError, match=r"^check_adapter: LlamaModel gives no loss for this "):
        check_adapter(body, batch)


@pytest.mark.parametrize(
    ("switch", "left"), [("rms_norm", 5), ("rope", 8), ("glu", 8), ("fused_linear_ce", 10)]
)
def test_a_switch_off_leaves_its_modules(llama, batch, switch, left):
    assert nodes(adapt(llama, **{switch: False})(**batch).loss) == left


def test_without_the_fused_head_the_loss_is_of_real_logits(llama, batch):
    out = adapt(llama, fused_linear_ce=False)(**batch)
    assert isinstance(out.logits, Tensor)
    same_gradients(llama, batch, fused_linear_ce=False)
    out = adapt(llama, fused_linear_ce=False, cross_entropy=False)(**batch)
    assert nodes(out.loss) == ALL - 1


def test_a_switch_that_matches_nothing_raises_and_changes_nothing(llama, batch):
    message = "^adapt: layer_norm=True, but nothing in LlamaForCausalLM matches$"
    adapt(llama)
    with pytest.raises(AdapterError, match=message):
        adapt(llama, layer_norm=True)
    assert nodes(llama(**batch).loss) == ALL


def test_the_error_names_what_came_near(device):
    layer = torch.nn.ModuleList([torch.nn.MultiheadAttention(4, 2), torch.nn.LayerNorm((2, 4))])
    with pytest.raises(
        AdapterError, match=r"\(MultiheadAttention: calls no rotation that is rope\)"
    ):
        adapt(layer, rope=True)
    with pytest.raises(AdapterError, match=r"\(LayerNorm: is not over one last axis\)"):
        adapt(layer, layer_norm=True)


def test_a_model_with_kernels_of_the_hub_is_refused(llama):
    llama._use_kernels = True
    with pytest.raises(AdapterError, match=r"^adapt: the model runs kernels from the hub"):
        adapt(llama)


def test_the_loop_of_the_head_takes_its_chunk_and_the_dtype_of_its_sums(llama, batch):
    w, labels = llama.lm_head.weight, batch.pop("labels")
    loop = {"chunk": 2, "accum_dtype": torch.bfloat16}
    x = adapt(llama, **loop).model(**batch).last_hidden_state.detach()
    y = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    losses = {
        liger_fn.fused_linear_ce: lambda: llama(**batch, labels=labels).loss,
        liger_fn.fused_linear_logp: lambda: adapters.token_logprobs(
            llama, labels=labels, **batch
        ).sum(),
    }
    for f, ours in losses.items():
        (got,) = torch.autograd.grad(ours(), w)
        want, wide = (torch.autograd.grad(f(w, x, y, **o).sum(), w)[0] for o in (loop, {}))
        assert torch.equal(got, want)
        assert not torch.equal(got, wide)


def test_a_loop_that_is_none_is_refused(llama):
    with pytest.raises(ValueError, match=r"^adapt: chunk must be an integer above 0, got 0$"):
        adapt(llama, chunk=0)
    message = r"^adapt: accum_dtype must be float32 or bfloat16, got torch.float16$"
    with pytest.raises(ValueError, match=message):
        adapt(llama, accum_dtype=torch.float16)


@pytest.mark.parametrize("around", [False, True], ids=["", "checkpointed"])
def test_feed_forward_layers_in_tiles_have_the_gradients_of_whole_ones(llama, batch, around):
    llama, tokens = llama.double().train(), []
    want = gradients(adapt(llama), batch)
    if around:
        llama.gradient_checkpointing_enable({"use_reentrant": False})
    adapt(llama, mlp_chunk=3)
    gate = llama.model.layers[0].mlp.gate_proj
    gate.register_forward_hook(lambda m, args, y: tokens.append(y.shape[:-1].numel()))
    for got, whole in zip(gradients(llama, batch)[1], want[1], strict=True):
        torch.testing.assert_close(got, whole, rtol=1e-10, atol=1e-12)
    assert max(tokens) <= max(
        3, batch["input_ids"].shape[0]
    )  # a tile has one of each row, at least
    assert sum(tokens) >= 2 * batch["input_ids"].numel()  # backward forms them again


def test_tiles_without_a_layer_for_them_are_refused(llama, device):
    message = r"^adapt: mlp_chunk is given, but no gated feed-forward layer is adapted$"
    for model, more in ((llama, {"glu": False}), (torch.nn.LayerNorm(8), {})):
        with pytest.raises(AdapterError, match=message):
            adapt(model, mlp_chunk=4, **more)
    with pytest.raises(ValueError, match=r"^adapt: mlp_chunk must be an integer above 0, got 0$"):
        adapt(llama, mlp_chunk=0)


def test_torch_modules_need_no_transformers(device):
    model = torch.nn.Sequential(torch.nn.RMSNorm(8, eps=1e-5), torch.nn.LayerNorm(8)).to(device)
    want = model(x := torch.randn(3, 8, device=device))
    with adapted(model, rms_norm=True, layer_norm=True):
        assert nodes(model(x)) == 2
        torch.testing.assert_close(model(x), want)
    assert nodes(model(x)) == 0


# -- what is not what it seems


class Clipped(torch.nn.Module):
    """Looks like the norm of Llama in every name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * rstd).clamp(max=2.0).to(x.dtype)


def test_a_look_alike_is_left(llama):
    assert adapters.report(Clipped()).rows == ()
    mlp = llama.model.layers[0].mlp
    mlp.act_fn = torch.nn.ReLU()
    mlp.down_proj = torch.nn.Sequential(torch.nn.Dropout(0.1), mlp.down_proj)
    reasons = {(r.count, r.spec) for r in adapters.report(llama).skipped}
    assert reasons == {(1, "is no gate of silu or gelu")}


def test_modules_of_ours_are_nothing_to_replace(device):
    made = (nn.RMSNorm(8), nn.LayerNorm(8), nn.SwiGLUMLP(8, 4), nn.LMHead(8, 4))
    assert adapters.report(torch.nn.ModuleList(made)) == adapters.Report((), ())


def test_a_forward_that_others_put_on_one_module_is_left(llama, batch):
    norm = llama.model.norm
    norm.forward = lambda x: x
    assert nodes(adapt(llama)(**batch).loss) == ALL - 1
    restore(llama)
    assert "forward" in vars(norm)


def test_a_forward_that_others_put_on_the_model_keeps_its_loss(llama, batch):
    inner = llama.forward
    llama.forward = lambda *args, **kw: inner(*args, **kw)
    assert nodes(adapt(llama)(**batch).loss) == ALL - 1
    reasons = {r.spec for r in adapters.report(llama).skipped}
    assert reasons == {"its forward was replaced by others"}
    same_gradients(llama, batch)


def test_a_wrapper_around_an_adapted_model_does_not_outlive_restore(llama, batch):
    inner = adapt(llama).forward
    llama.forward = lambda *args, **kw: inner(*args, **kw)
    assert nodes(llama(**batch).loss) == ALL
    assert nodes(restore(llama)(**batch).loss) == 0


def test_a_loss_of_the_user_gets_real_logits(llama, batch):
    llama.loss_function = lambda logits, labels, vocab_size, **kw: logits.square().mean()
    want = llama(**batch).loss
    torch.testing.assert_close(adapt(llama)(**batch).loss, want)
    restore(llama)
    del llama._loss_function
    adapt(llama)
    llama.loss_function = lambda logits, labels, vocab_size, **kw: logits.square().mean()
    torch.testing.assert_close(llama(**batch).loss, want)


# -- options of a call


@pytest.mark.parametrize(
    "more",
    [
        {"return_dict": False}, {"output_hidden_states": True}, {"use_cache": False},
        {"num_items_in_batch": 5}, {"logits_to_keep": 12},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_the_forward_keep_their_meaning(llama, batch, more):
    want = llama(**batch, **more)
    got = adapt(llama)(**batch, **more)
    assert type(got) is type(want)
    assert len(got) == len(want)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(operator.add(got[1], 0), want[1], rtol=1e-4, atol=1e-4)


def test_labels_that_are_shifted_already_stay(llama, batch):
    shift_labels = torch.randint(3, 9, batch["labels"].shape, device=batch["labels"].device)
    want = llama(**batch, shift_labels=shift_labels).loss
    torch.testing.assert_close(adapt(llama)(**batch, shift_labels=shift_labels).loss, want)


def test_labels_that_do_not_fit_the_logits_raise_as_they_did(llama, batch):
    errors = []
    for model in (llama, adapt(copy.deepcopy(llama))):
        with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever the plain model raises
            model(**batch, logits_to_keep=3)
        errors.append(type(caught.value))
    assert errors[0] is errors[1]


def test_all_labels_ignored_is_a_loss_of_zero(llama, batch):
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = adapt(llama)(**batch).loss
    loss.backward()
    assert loss.item() == 0.0
    assert not any(p.grad.any() for p in llama.parameters() if p.grad is not None)


def test_token_logprobs_take_a_temperature_and_want_an_adapted_model(llama, batch):
    labels = batch.pop("labels")
    with pytest.raises(
        AdapterError, match=r"^token_logprobs: no head of LlamaForCausalLM is adapted"
    ):
        adapters.token_logprobs(llama, labels=labels, **batch)
    z = llama(**batch).logits[:, :-1] / 0.7
    want = z.log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    want = want.masked_fill(labels[:, 1:] == -100, 0.0)
    for fused in (None, False):
        adapt(llama, fused_linear_ce=fused)
        got = adapters.token_logprobs(llama, labels=labels, temperature=0.7, **batch)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# -- deferred logits


def test_deferred_logits_are_the_real_ones_when_read(llama, batch):
    want = llama(**batch).logits
    z = adapt(llama)(**batch).logits
    assert (z.shape, z.dtype, z.device, len(z)) == (want.shape, want.dtype, want.device, len(want))
    torch.testing.assert_close(z.argmax(-1), want.argmax(-1))
    torch.testing.assert_close(torch.stack([z, z * 2])[0], want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(z[:, -1], want[:, -1], rtol=1e-4, atol=1e-4)
    z.sum().backward()
    assert llama.lm_head.weight.grad is not None
    assert not hasattr(z, "no_such_thing")


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda z: 1 + z + z,
    "difference": lambda z: 1 - z - 2 * z,
    "quotient": lambda z: 1 / (z // 0.5 % 3 + 9),
    "power": lambda z: z**2 + 2**z,
    "product": lambda z: z @ z.mT,
    "sign": lambda z: abs(-z),
    "order": lambda z: torch.stack([z > 0, z >= 0, z < 0, z <= 0]),
    "equal": lambda z: z == 0,
    "unequal": lambda z: z != z,
    "item": lambda z: [z[0, 0, 0], *z][0],
    "number": lambda z: torch.tensor(float(z.detach()[:1, :1, :1])),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_read_deferred_logits_as_real_ones(llama, batch, name):
    f = OPERATORS[name]
    want = f(llama(**batch).logits)
    torch.testing.assert_close(f(adapt(llama)(**batch).logits), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("return_dict", [True, False])
def test_logits_read_after_the_weight_has_changed_are_an_error(llama, batch, return_dict):
    logits = adapt(llama)(**batch, return_dict=return_dict)[1]
    with torch.no_grad():
        llama.lm_head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"^these logits were deferred and the weight"):
        logits.sum()


@pytest.mark.parametrize(
    ("steps", "form"),
    [
        (lambda z: z, (1.0, None)),
        (lambda z: z.float() / 4.0 * 3, (0.75, None)),
        (lambda z: 30.0 * torch.tanh(z / 30.0), (1.0, 30.0)),
        (lambda z: (2 * z / 5.0).tanh() * 5.0 * 2.0, (4.0, 10.0)),
        (lambda z: z.tanh().tanh(), None),
    ],
)
def test_steps_amount_to_a_scale_and_a_soft_cap(device, steps, form):
    head = torch.nn.Linear(4, 7, bias=False, device=device)
    x = torch.randn(3, 4, device=device)
    got = steps(DeferredLogits(x, head))
    assert isinstance(got, DeferredLogits)
    torch.testing.assert_close(got.value(), steps(head(x)))
    assert got.form() == (None if form is None else pytest.approx(form))
    if form is not None and form[1] is not None:
        scale, cap = form
        torch.testing.assert_close(cap * torch.tanh(scale * head(x) / cap), got.value())


# -- life of a model


def test_a_copy_is_adapted_and_independent(llama, batch):
    other = copy.deepcopy(adapt(llama))
    assert nodes(other(**batch).loss) == ALL
    other(**batch).loss.backward()
    assert all(p.grad is None for p in llama.parameters())
    restore(llama)
    assert nodes(other(**batch).loss) == ALL
    assert nodes(llama(**batch).loss) == 0


def test_a_pickle_loads_as_the_plain_model(llama, batch):
    saved = io.BytesIO()
    torch.save(adapt(llama), saved)
    saved.seek(0)
    for other in (pickle.loads(pickle.dumps(llama)), torch.load(saved, weights_only=False)):
        torch.testing.assert_close(other(**batch).loss, llama(**batch).loss)
        assert nodes(other(**batch).loss) == 0
        with pytest.raises(AdapterError, match=r"^token_logprobs: LlamaForCausalLM was adapted"):
            adapters.token_logprobs(other, **batch)
        assert nodes(adapt(other)(**batch).loss) == ALL


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(llama, batch, reentrant):
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    llama.enable_input_require_grads()
    same_gradients(llama, batch)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gemma2", "granite", "glm4", "phi3", "olmo2", "qwen3")
        ),
    ],
)
def test_an_adapted_model_compiles_into_one_graph(device, name):
    model, batch = adapt(zoo.build(name).to(device)), on(device, zoo.batch(name))
    want, wanted = gradients(model, batch)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    got, grads = gradients(model, batch, call=whole)
    torch.testing.assert_close(got, want)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        restore(model)
        torch.testing.assert_close(whole(**batch).loss, want)


def test_under_autocast_the_loss_is_that_of_the_plain_model(llama, batch):
    with torch.autocast(batch["labels"].device.type, torch.bfloat16):
        want, wanted = gradients(llama, batch)
        got, grads = gradients(adapt(llama), batch)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
    for a, b in zip(grads, wanted, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()


def test_check_adapter_reports_and_refuses(llama, batch):
    before = {n: set(vars(m)) for n, m in llama.named_modules()}
    got = check_adapter(llama, batch, rms_norm=False)
    assert got.worst_parameter in dict(llama.named_parameters())
    with pytest.raises(
        AdapterError, match=r"^check_adapter: wanted errors of at most 0.0, got Check"
    ):
        check_adapter(llama, batch, rtol=0.0)
    assert {n: set(vars(m)) for n, m in llama.named_modules()} == before
