"""grpo: every loss_type against its paper, token by token in float64."""

import math

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

import liger_fn
from liger_fn import grpo_from_logp
from tests.table.heads import logp_oracle

LOW, HIGH, DELTA = 0.1, 0.3, 1.6
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
OPTIONS = {
    **{name: {"eps_low": LOW, "eps_high": HIGH} for name in CLIPPED},
    "cispo": {"eps_high": HIGH + 1}, "sapo": {"sapo_temperatures": (0.9, 1.3)},
    "vespo": {"vespo_k": (1.5, 2.5), "vespo_lambda": (2.5, 1.5)},
}  # fmt: skip


def batch(dtype=torch.float64, b=4, t=5):
    """logp, y, advantages, old_logp, ref_logp; numbers of tokens 5, 1, 3, 2."""
    y = torch.full((b, t), -100)
    for row, k in enumerate((5, 1, 3, 2)[:b]):
        y[row, torch.randperm(t)[:k]] = 7
    logp = -torch.rand(b, t, dtype=torch.float64) * 2
    old, ref = (logp + 0.5 * torch.randn(b, t, dtype=torch.float64) for _ in range(2))
    a = torch.tensor([0.8, -1.1, -0.4, 1.3][:b], dtype=torch.float64)
    return [t if t is y else t.to(dtype) for t in (logp, y, a, old, ref)]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def by_hand(name, logp, y, a, old, ref, *, sequence=False, delta=None, beta=0.0) -> float:
    b, t = logp.shape
    sums, counts = [], []
    for i in range(b):
        at = [j for j in range(t) if y[i, j] != -100]
        u = [(logp[i, j] - old[i, j]).item() for j in at]
        whole = math.exp(sum(u))
        terms = []
        for j, step in zip(at, u, strict=True):
            r = math.exp(sum(u) / len(u)) if sequence else math.exp(step)
            adv, p = (a[i, j] if a.dim() == 2 else a[i]).item(), logp[i, j].item()
            if name == "cispo":
                term = -min(r, HIGH + 1) * adv * p
            elif name == "sapo":
                heat = 0.9 if adv > 0 else 1.3
                term = -4 / heat / (1 + math.exp(-heat * (r - 1))) * adv
            elif name == "vespo":
                k, rate = (1.5, 2.5) if adv >= 0 else (2.5, 1.5)
                term = -(whole**k) * math.exp(rate * (1 - whole)) * adv * p
            else:
                held = r if delta is None else min(r, delta)
                term = -min(held * adv, clip(r, 1 - LOW, 1 + HIGH) * adv)
            v = (ref[i, j] - logp[i, j]).item()
            terms.append(term + beta * (math.exp(v) - v - 1))
        sums.append(sum(terms))
        counts.append(len(at))
    if name in ("grpo", "sapo"):
        return sum(s / n for s, n in zip(sums, counts, strict=True)) / b
    return sum(sums) / {"dr_grpo": b * t, "luspo": b}.get(name, sum(counts))


def close(got, want):
    assert got.dtype == torch.float64
    assert got.dim() == 0
    assert got.item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_loss_is_the_formula_of_the_paper(name, sequence, per_token):
    if sequence and name == "vespo":
        return
    logp, y, a, old, ref = batch()
    a = a[:, None] + 0.1 * torch.arange(5) if per_token else a
    for k in ({}, {"beta": 0.3}, {"delta": DELTA}):
        if "delta" in k and name not in CLIPPED:
            continue
        got = grpo_from_logp(
            logp, y, a, old_logp=old, ref_logp=ref if "beta" in k else None, loss_type=name,
            importance="sequence" if sequence else "token", **OPTIONS[name], **k,
        )  # fmt: skip
        close(got, by_hand(name, logp, y, a, old, ref, sequence=sequence, **k))


def test_defaults_are_those_of_the_papers():
    logp, y, a, old, _ = batch()
    logp = logp + torch.linspace(-2.0, 2.0, 5)

    def run(**k):
        return grpo_from_logp(logp, y, a, old_logp=old, **k)

    assert run().equal(run(eps_low=0.2, eps_high=0.2))
    assert run(eps_low=0.1).equal(run(eps_low=0.1, eps_high=0.1))
    assert run(loss_type="cispo").equal(run(loss_type="cispo", eps_high=5.0))
    assert run(loss_type="sapo").equal(run(loss_type="sapo", sapo_temperatures=(1.0, 1.05)))
    assert run(loss_type="vespo").equal(
        run(loss_type="vespo", vespo_k=(2.0, 3.0), vespo_lambda=(3.0, 2.0))
    )


@pytest.mark.parametrize("name", TYPES)
def test_on_policy_the_ratio_is_one_with_the_gradient_of_logp(name):
    logp, y, a, _, _ = batch(torch.float32)

    def f(p, old=None):
        return grpo_from_logp(p, y, a, loss_type=name, old_logp=old)

    value, same = f(logp), f(logp, logp)
    assert value.equal(same)
    assert grad(f)(logp).equal(grad(f)(logp, logp))
    n = (y != -100).sum(-1, keepdim=True)
    share = {"grpo": 4 * n, "sapo": 4 * n, "dr_grpo": 20, "luspo": 4}.get(name, n.sum())
    torch.testing.assert_close(grad(f)(logp), torch.where(y == -100, 0.0, -a[:, None] / share))


def test_by_hand():
    logp = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    y = torch.tensor([[0, 0], [0, -100]])
    a = torch.tensor([1.0, -2.0])
    old = logp - torch.tensor([[math.log(1.1), math.log(3.0)], [math.log(4.0), math.nan]])

    def run(**k):
        return grpo_from_logp(logp, y, a, old_logp=old, **k).item()

    assert run() == pytest.approx((-(1.1 + 1.2) / 2 + 8) / 2)
    assert run(delta=2.5) == pytest.approx((-(1.1 + 1.2) / 2 + 5) / 2)
    assert run(loss_type="dapo") == pytest.approx((-1.1 - 1.2 + 8) / 3)
    assert run(loss_type="cispo", eps_high=2.0) == pytest.approx((1.1 + 2 - 4) / 3)


RUNS = {
    **{name: {"loss_type": name} for name in TYPES},
    **{f"{name}-sequence": {"loss_type": name, "importance": "sequence"} for name in TYPES[:-1]},
    "delta": {"delta": DELTA}, "kl": {"beta": 0.2}, "luspo-kl": {"loss_type": "luspo", "beta": 0.1},
}  # fmt: skip
every = pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)


def runner(options, **more):
    def f(logp, y, a, old, ref):
        ref = ref if options.get("beta") else None
        return grpo_from_logp(logp, y, a, old_logp=old, ref_logp=ref, **options, **more)

    return f


@every
def test_transforms(options):
    args = batch()
    run = runner(options)

    def f(p):
        return run(p, *args[1:])

    p = args[0]
    if options.get("loss_type") not in ("cispo", "vespo"):  # whose weights are constants
        assert torch.autograd.gradcheck(f, p.clone().requires_grad_(), check_forward_ad=True)
    v = torch.rand_like(p)
    torch.testing.assert_close(jvp(f, (p,), (v,))[1], (grad(f)(p) * v).sum())
    h = hessian(f)(p).reshape(p.numel(), p.numel())
    torch.testing.assert_close(h, h.T)
    torch.testing.assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(p), f(p))
    each = [t[:, None] for t in args]
    got = vmap(grad(run))(*each)
    torch.testing.assert_close(got, torch.stack([grad(run)(*a) for a in zip(*each, strict=True)]))


@every
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -400.0])
def test_what_an_ignored_token_holds_changes_nothing(options, poison):
    made = batch(torch.float32)
    y, run = made[1], runner(options)
    a = made[2][:, None].expand(y.shape)

    def both(fill):
        args = [t if t is y else torch.where(y == -100, fill, t)
                for t in (made[0], y, a, *made[3:])]  # fmt: skip
        return run(*args), grad(run)(*args)

    (value, g), (poisoned, h) = both(-1.0), both(poison)
    assert value.equal(poisoned)
    assert g.equal(h)
    assert not g[y == -100].any()


@every
def test_an_ignored_sequence_adds_nothing_and_nothing_adds_nothing(options):
    logp, y, a, old, ref = batch()
    y[2] = -100
    run, keep = runner(options), [0, 1, 3]
    a[2] = math.nan
    value, g = run(logp, y, a, old, ref), grad(run)(logp, y, a, old, ref)
    assert not g[2].any()
    rest = [t[keep] for t in (logp, y, a, old, ref)]
    per_token = options.get("loss_type", "grpo") in ("bnpo", "dapo", "cispo", "vespo")
    torch.testing.assert_close(value, run(*rest) * (1 if per_token else 3 / 4))
    y = torch.full_like(y, -100)
    assert run(logp, y, a, old, ref).item() == 0
    assert not grad(run)(logp, y, a, old, ref).any()
    assert run(*(t[:0] for t in (logp, y, a, old, ref))).item() == 0


@every
def test_n_valid_replaces_what_the_sum_is_divided_by(options):
    args = batch()
    name = options.get("loss_type", "grpo")
    own = {"grpo": 4, "sapo": 4, "luspo": 4, "dr_grpo": 20}.get(name, 11)
    got = runner(options, n_valid=torch.tensor(3.0))(*args)
    torch.testing.assert_close(got, runner(options)(*args) * own / 3)


@every
@pytest.mark.parametrize("gap", [100.0, -100.0, 1e4, -1e4])
def test_far_off_policy_all_is_finite(options, gap):
    logp, y, a, old, ref = batch(torch.float32)
    run = runner(options)
    for args in ((logp - gap, y, a, old - 2 * gap, ref), (logp, y, a, old, ref + gap)):
        assert run(*args).isfinite()
        assert grad(run)(*args).isfinite().all()


def test_the_gradient_is_linear_in_the_ratio():
    logp = torch.full((2, 16), -2.0 + math.log(0.01))
    old, a = torch.full((2, 16), -2.0), torch.tensor([-1.0, 1.0])
    g = grad(lambda p: grpo_from_logp(p, None, a, old_logp=old, eps_low=0.999))(logp)
    torch.testing.assert_close(g[1], torch.full((16,), -0.01 / 32), rtol=1e-5, atol=0)


def test_halves_are_widened_and_y_may_be_absent():
    for dtype in (torch.bfloat16, torch.float16):
        logp, y, a, old, ref = batch(dtype)
        got = grpo_from_logp(logp, None, a, old_logp=old, ref_logp=ref, beta=0.1)
        want = grpo_from_logp(
            logp.float(), torch.zeros_like(y), a.float(), old_logp=old.float(),
            ref_logp=ref.float(), beta=0.1,
        )  # fmt: skip
        assert got.dtype == torch.float32
        assert got.equal(want)


# -- fused -----------------------------------------------------------------------------------------


def head(b=4, t=5, d=3, v=6):
    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64)

    ref = {"ref_w": normal(v, 2), "ref_x": normal(b, t, 2), "ref_b": normal(v)}
    return normal(v, d), normal(b, t, d), normal(v), ref


HOT = {"temperature": 1.3, "softcap": 4.0, "logit_scale": 0.8}


def test_the_fused_loss_is_the_algebra_on_the_heads_log_probabilities():
    (w, x, bias, ref), (_, y, a, _, _) = head(), batch()
    y = torch.where(y == -100, -100, torch.randint(6, y.shape))
    base = logp_oracle(ref["ref_w"], ref["ref_x"], y, ref["ref_b"], **HOT)[0]
    now = logp_oracle(w, x, y, bias, **HOT)[0]
    old = now + 0.3 * torch.randn_like(base)

    def fused(w, x, bias, of=liger_fn.grpo_loss):
        return of(w, x, y, a, b=bias, old_logp=old, beta=0.2, chunk=3, **ref, **HOT)

    def plain(w, x, bias):
        logp = logp_oracle(w, x, y, bias, **HOT)[0]
        return grpo_from_logp(logp, y, a, old_logp=old, ref_logp=base, beta=0.2)

    args = w, x, bias
    torch.testing.assert_close(fused(*args), plain(*args))
    m = fused(*args, of=liger_fn.grpo_loss_with_metrics)
    torch.testing.assert_close(m.loss, plain(*args))
    live = y != -100
    torch.testing.assert_close(m.entropy, logp_oracle(w, x, y, bias, **HOT)[1][live].mean())
    u, v = (now - old)[live], (base - now)[live]
    torch.testing.assert_close(m.ratio, u.exp().mean())
    torch.testing.assert_close(m.kl, (v.exp() - v - 1).mean())
    per_token = a[:, None].expand(y.shape)[live]
    low, high = (u.exp() < 0.8) & (per_token < 0), (u.exp() > 1.2) & (per_token > 0)
    torch.testing.assert_close(m.clip_low, low.double().mean())
    torch.testing.assert_close(m.clip_high, high.double().mean())
    for g, h in zip(grad(fused, (0, 1, 2))(*args), grad(plain, (0, 1, 2))(*args), strict=True):
        torch.testing.assert_close(g, h)


def test_metrics_of_every_loss_type():
    (w, x, bias, _), (_, y, a, _, _) = head(), batch()
    y = torch.where(y == -100, -100, 0)
    w.requires_grad_()
    for options in RUNS.values():
        options = {k: v for k, v in options.items() if k != "beta"}
        m = liger_fn.grpo_loss_with_metrics(w, x, y, a, b=bias, **options)
        assert m.ratio.item() == 1
        assert (m.kl, m.clip_low, m.clip_high) == (0, 0, 0)
        assert [t.requires_grad for t in m] == [True] + [False] * 5
    old = logp_oracle(w, x, y, bias)[0].detach() - torch.where(y == -100, 0.0, a.sign()[:, None])
    m = liger_fn.grpo_loss_with_metrics(w, x, y, a, b=bias, old_logp=old, importance="sequence")
    assert [round(m[i].item(), 6) for i in (4, 5)] == [0.5, 0.5]
    m = liger_fn.grpo_loss_with_metrics(w, x, y, a, b=bias, old_logp=old)
    assert m.clip_high.item() == pytest.approx(7 / 11)
    m = liger_fn.grpo_loss_with_metrics(
        w, x, y, a, b=bias, old_logp=old, loss_type="cispo", eps_high=2.0
    )
    assert m.clip_high.item() == pytest.approx(7 / 11)
    assert m.clip_low.item() == 0


@pytest.mark.parametrize(("chunk", "products"), [(20, 3), (5, 3), (4, 4)])
@pytest.mark.parametrize("of", [liger_fn.grpo_loss, liger_fn.grpo_loss_with_metrics])
def test_three_products_while_a_sequence_fits_a_chunk(of, chunk, products):
    (w, x, bias, _), (_, y, a, old, _) = head(), batch()
    y = torch.where(y == -100, -100, 1)
    w.requires_grad_()
    x.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        out = of(w, x, y, a, b=bias, old_logp=old, chunk=chunk)
        (out if of is liger_fn.grpo_loss else out.loss).backward()
    assert counter.get_total_flops() == products * 2 * x.numel() * w.shape[0]


def test_gradients_of_each_sequence_in_one_call():
    (w, x, _, ref), (_, y, a, old, _) = head(), batch()
    y = torch.where(y == -100, -100, 1)

    def f(w, x, y, a, old, rx):
        return liger_fn.grpo_loss(
            w, x[None], y[None], a[None], old_logp=old[None], ref_w=ref["ref_w"], ref_x=rx[None],
            beta=0.1,
        )  # fmt: skip

    rows = x, y, a, old, ref["ref_x"]
    got = vmap(grad(f), (None, 0, 0, 0, 0, 0))(w, *rows)
    torch.testing.assert_close(got, torch.stack([grad(f)(w, *r) for r in zip(*rows, strict=True)]))


# -- errors ----------------------------------------------------------------------------------------

P, Y, A = torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4)
X, W = torch.zeros(4, 3, 2), torch.zeros(5, 2)
BAD = {
    "^grpo_from_logp: loss_type must be one of .*, got 'gspo'": {"loss_type": "gspo"},
    "importance must be one of 'token', 'sequence', got 'group'": {"importance": "group"},
    "eps_low cannot be used with loss_type 'cispo'": {"loss_type": "cispo", "eps_low": 0.2},
    "eps_high cannot be used with loss_type 'sapo'": {"loss_type": "sapo", "eps_high": 0.2},
    "delta cannot be used with loss_type 'vespo'": {"loss_type": "vespo", "delta": 2.0},
    "sapo_temperatures cannot be used with loss_type 'grpo'": {"sapo_temperatures": (1.0, 1.0)},
    "vespo_k cannot be used": {"vespo_k": (1.0, 1.0)},
    "vespo_lambda must be above 0": {"loss_type": "vespo", "vespo_lambda": (1.0, -1.0)},
    "importance 'sequence' cannot be used with loss_type 'vespo'": {
        "loss_type": "vespo", "importance": "sequence",
    },
    "eps_low must be above 0, got -0.1": {"eps_low": -0.1},
    "beta must be at least 0": {"beta": -0.1},
    "ref_logp must be a tensor, got NoneType: beta is 0.1": {"beta": 0.1},
    "ref_logp cannot be used with beta 0": {"ref_logp": P},
    "axis t is 2 in old_logp but 3 in logp": {"old_logp": P[:, :2]},
    "axis b is 2 in advantages but 4 in logp": {"advantages": A[:2]},
    "n_valid must be at least 0": {"n_valid": -1},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_is_refused(message):
    options = dict(BAD[message])
    a = options.pop("advantages", A)
    kind = TypeError if "must be a tensor" in message else ValueError
    with pytest.raises(kind, match=message):
        grpo_from_logp(P, Y, a, **options)
    message = message.replace("_from_logp", "_loss").replace("but 4 in logp", "but 4 in x")
    with pytest.raises(kind, match=message.replace("but 3 in logp", "but 3 in x")):
        liger_fn.grpo_loss(W, X, Y, a, **options)


def test_shapes_of_the_head_are_held_to():
    for message, options in (
        ("ref_logp and ref_w, ref_x cannot be given together", {"ref_logp": P, "ref_w": W}),
        ("ref_w and ref_x must be given together", {"ref_x": X, "beta": 0.1}),
        ("ref_w cannot be used with beta 0", {"ref_w": W, "ref_x": X}),
        (r"ref_logp must have shape \(b, t\), got \(4,\)", {"ref_logp": A, "beta": 0.1}),
        ("^grpo_loss: softcap must be above 0", {"softcap": 0.0}),
    ):
        with pytest.raises(ValueError, match=message):
            liger_fn.grpo_loss(W, X, Y, A, **options)
    with pytest.raises(TypeError, match="advantages must be a tensor, got list"):
        liger_fn.grpo_loss(W, X, Y, [1.0])
