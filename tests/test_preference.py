"""dpo, orpo, cpo, simpo, kto: against the papers' formulas, in float64 and pair by pair."""

import math
import re

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

import liger_fn
from liger_fn import (
    cpo_from_logp,
    dpo_from_logp,
    kto_from_logp,
    orpo_from_logp,
    simpo_from_logp,
)
from tests.table.heads import logp_oracle

BETA, S = 0.7, 0.15
LENGTHS = ((4, 2), (1, 3), (2, 2))  # of chosen and rejected


def tokens(dtype=torch.float64, lengths=LENGTHS, t=5):
    """logp, y, ref_logp, log_sum_sq of pairs with these numbers of tokens, at random places."""
    n = [c for c, _ in lengths] + [r for _, r in lengths]
    y = torch.full((len(n), t), -100)
    for row, k in enumerate(n):
        y[row, torch.randperm(t)[:k]] = torch.randint(9, (k,))
    logp, ref, square = (-torch.rand(len(n), t, dtype=torch.float64) * 2 for _ in range(3))
    return logp.to(dtype), y, ref.to(dtype), square.to(dtype)


def sums(logp: Tensor, y: Tensor) -> list[float]:
    return [
        sum(p for p, k in zip(ps, ks, strict=True) if k != -100)
        for ps, ks in zip(logp.tolist(), y.tolist(), strict=True)
    ]


def S_(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_s(x: float) -> float:
    return -math.log1p(math.exp(-x))


def smooth(x: float) -> float:
    return -(1 - S) * log_s(x) - S * log_s(-x)


# loss of a pair from its log-ratios and lengths, as the papers have it
PAPERS = {
    "sigmoid": lambda c, r, n, m: smooth(BETA * (c - r)),
    "robust": lambda c, r, n, m: (
        (-(1 - S) * log_s(BETA * (c - r)) + S * log_s(-BETA * (c - r))) / (1 - 2 * S)
    ),
    "hinge": lambda c, r, n, m: max(0.0, 1 - BETA * (c - r)),
    "ipo": lambda c, r, n, m: (c / n - r / m - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda c, r, n, m: (
        S_(BETA * (c - r)) * math.log(S_(BETA * (c - r)) / (1 - S))
        + S_(BETA * (r - c)) * math.log(S_(BETA * (r - c)) / S)
    ),
    "nca_pair": lambda c, r, n, m: (
        -log_s(BETA * c) - 0.5 * log_s(-BETA * c) - 0.5 * log_s(-BETA * r)
    ),
    "sppo_hard": lambda c, r, n, m: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r, n, m: 1 - S_(BETA * c) + S_(BETA * r),
    "apo_down": lambda c, r, n, m: S_(BETA * c) + 1 - S_(BETA * (c - r)),
    "discopop": lambda c, r, n, m: (
        -(1 - S_(BETA * (c - r) / 0.3)) * log_s(BETA * (c - r))
        + S_(BETA * (c - r) / 0.3) * math.exp(-BETA * (c - r))
    ),
    "bco_pair": lambda c, r, n, m: -log_s(BETA * c) - log_s(-BETA * r),
    "sigmoid_norm": lambda c, r, n, m: smooth(BETA * (c / n - r / m)),
}
SMOOTHED = {"sigmoid", "robust", "exo_pair", "sigmoid_norm", "aot", "aot_unpaired"}
OPTIONS = {
    name: ({"label_smoothing": S} if name in SMOOTHED else {})
    | ({"discopop_tau": 0.3} if name == "discopop" else {})
    for name in (*PAPERS, "aot", "aot_unpaired", "sft")
}


def by_hand(name: str, ratios: list[float], lengths=LENGTHS) -> float:
    b = len(lengths)
    terms = [
        PAPERS[name](c, r, n, m)
        for c, r, (n, m) in zip(ratios[:b], ratios[b:], lengths, strict=True)
    ]
    return sum(terms) / b


def log_ratios(logp: Tensor, ref: Tensor, y: Tensor) -> list[float]:
    return [p - q for p, q in zip(sums(logp, y), sums(ref, y), strict=True)]


def close(got: Tensor, want: float) -> None:
    assert got.dtype == torch.float64
    assert got.dim() == 0
    assert got.item() == pytest.approx(want, rel=1e-12, abs=1e-13)


# -- dpo: every loss_type and option ---------------------------------------------------------------


@pytest.mark.parametrize("name", PAPERS)
def test_dpo_is_the_formula_of_the_paper(name):
    logp, y, ref, _ = tokens()
    got = dpo_from_logp(logp, y, ref, loss_type=name, beta=BETA, **OPTIONS[name])
    close(got, by_hand(name, log_ratios(logp, ref, y)))
    if name not in ("ipo", "sigmoid_norm"):
        whole = (torch.tensor(sums(t, y), dtype=torch.float64) for t in (logp, ref))
        policy, reference = whole
        options = {"loss_type": name, "beta": BETA, **OPTIONS[name]}
        close(dpo_from_logp(policy, None, reference, **options), got.item())
        close(dpo_from_logp(logp, y, reference, **options), got.item())


def test_aot_matches_sorted_ratios():
    logp, y, ref, _ = tokens()
    p, q = sums(logp, y), sums(ref, y)
    options = {"beta": BETA, "label_smoothing": S}
    policy = sorted(p[i] - p[i + 3] for i in range(3))
    base = sorted(q[i] - q[i + 3] for i in range(3))
    want = sum(smooth(BETA * (a - b)) for a, b in zip(policy, base, strict=True)) / 3
    close(dpo_from_logp(logp, y, ref, loss_type="aot", **options), want)
    u = log_ratios(logp, ref, y)
    want = (
        sum(smooth(BETA * (a - b)) for a, b in zip(sorted(u[:3]), sorted(u[3:]), strict=True)) / 3
    )
    close(dpo_from_logp(logp, y, ref, loss_type="aot_unpaired", **options), want)


def test_sft_is_the_mean_over_chosen_tokens_and_so_is_the_nll_term():
    logp, y, ref, _ = tokens()
    nll = -sum(sums(logp[:3], y[:3])) / 7
    close(dpo_from_logp(logp, y, loss_type="sft"), nll)
    close(dpo_from_logp(logp, y, loss_type="sft", nll_n_valid=10), nll * 7 / 10)
    base = dpo_from_logp(logp, y, ref)
    close(dpo_from_logp(logp, y, ref, nll_weight=0.5), base.item() + 0.5 * nll)
    both = dpo_from_logp(logp, y, ref, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5])
    close(both, base.item() + 0.5 * nll)


SCORES = {
    "forward_kl": lambda u: 1 - math.exp(-u),
    "js": lambda u: math.log(2 * math.exp(u) / (math.exp(u) + 1)),
    "alpha": lambda u: (math.exp(u * (0.3 - 1)) - 1) / (0.3 - 1),
}


@pytest.mark.parametrize("divergence", SCORES)
@pytest.mark.parametrize(
    "name", ["sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm"]
)
def test_f_divergences_take_the_place_of_the_log_ratio(divergence, name):
    logp, y, ref, _ = tokens()
    more = {"f_alpha": 0.3} if divergence == "alpha" else {}
    got = dpo_from_logp(
        logp, y, ref, loss_type=name, beta=BETA, f_divergence=divergence, **OPTIONS[name], **more
    )
    close(got, by_hand(name, [SCORES[divergence](u) for u in log_ratios(logp, ref, y)]))


def test_alpha_of_one_is_reverse_kl_and_of_zero_forward_kl():
    logp, y, ref, _ = tokens()
    for alpha, same in ((1.0, "reverse_kl"), (0.0, "forward_kl")):
        got = dpo_from_logp(logp, y, ref, f_divergence="alpha", f_alpha=alpha)
        close(got, dpo_from_logp(logp, y, ref, f_divergence=same).item())


def test_ld_alpha_weighs_the_tokens_past_the_shorter_sequence():
    logp, y, ref, _ = tokens()
    shorter = [min(pair) for pair in LENGTHS] * 2

    def weighed(t: Tensor) -> list[float]:
        out = []
        for row, keys, n in zip(t.tolist(), y.tolist(), shorter, strict=True):
            live = [p for p, k in zip(row, keys, strict=True) if k != -100]
            out.append(sum(live[:n]) + 0.4 * sum(live[n:]))
        return out

    ratios = [p - q for p, q in zip(weighed(logp), weighed(ref), strict=True)]
    got = dpo_from_logp(logp, y, ref, beta=BETA, label_smoothing=S, ld_alpha=0.4)
    close(got, by_hand("sigmoid", ratios))
    close(dpo_from_logp(logp, y, ref, ld_alpha=1.0), dpo_from_logp(logp, y, ref).item())


def test_wpo_weighs_pairs_by_their_own_likelihood_without_a_gradient():
    logp, y, ref, square = tokens()
    n = [c for c, _ in LENGTHS] + [r for _, r in LENGTHS]
    mean = [
        math.exp((p - s) / k) for p, s, k in zip(sums(logp, y), sums(square, y), n, strict=True)
    ]
    trust = [mean[i] * mean[i + 3] for i in range(3)]
    u = log_ratios(logp, ref, y)
    want = sum(w * smooth(BETA * (u[i] - u[i + 3])) for i, w in enumerate(trust)) / 3
    options = {"beta": BETA, "label_smoothing": S}
    close(dpo_from_logp(logp, y, ref, square, **options), want)

    def weighted(p):
        pairs = [dpo_from_logp(p[i::3], y[i::3], ref[i::3], **options) for i in range(3)]
        return sum(w * loss for w, loss in zip(trust, pairs, strict=True)) / 3

    got = grad(lambda p: dpo_from_logp(p, y, ref, square, **options))(logp)
    torch.testing.assert_close(got, grad(weighted)(logp))


def test_average_logp_divides_by_lengths():
    logp, y, ref, _ = tokens()
    got = dpo_from_logp(logp, y, ref, average_logp=True, beta=BETA, label_smoothing=S)
    close(got, by_hand("sigmoid_norm", log_ratios(logp, ref, y)))


def test_a_list_of_losses_adds_up():
    logp, y, ref, _ = tokens()
    one = [dpo_from_logp(logp, y, ref, loss_type=t) for t in ("sigmoid", "bco_pair")]
    both = dpo_from_logp(logp, y, ref, loss_type=("sigmoid", "bco_pair"), loss_weights=(0.8, 0.2))
    close(both, (0.8 * one[0] + 0.2 * one[1]).item())
    close(dpo_from_logp(logp, y, ref, loss_type=["sigmoid", "bco_pair"]), sum(one).item())


# -- the others ------------------------------------------------------------------------------------


def test_orpo_is_the_formula_of_the_paper():
    logp, y, _, _ = tokens()
    p = [math.exp(s / n) for s, n in zip(sums(logp, y), (4, 1, 2, 2, 3, 2), strict=True)]
    odds = [q / (1 - q) for q in p]
    nll = -sum(sums(logp[:3], y[:3])) / 7
    want = nll - BETA * sum(log_s(math.log(odds[i] / odds[i + 3])) for i in range(3)) / 3
    close(orpo_from_logp(logp, y, beta=BETA), want)


def test_cpo_and_simpo_are_the_formulas_of_the_papers():
    logp, y, _, _ = tokens()
    u = sums(logp, y)
    nll = -sum(u[:3]) / 7
    want = by_hand("sigmoid", u)
    close(cpo_from_logp(logp, y, beta=BETA, label_smoothing=S), want + nll)
    flat = torch.tensor(u, dtype=torch.float64)
    close(cpo_from_logp(flat, beta=BETA, label_smoothing=S, nll_weight=0.0), want)
    a = [s / n for s, n in zip(u, (4, 1, 2, 2, 3, 2), strict=True)]
    want = -sum(log_s(2.5 * (a[i] - a[i + 3]) - 0.4 * 2.5) for i in range(3)) / 3
    close(simpo_from_logp(logp, y, beta=2.5, gamma_beta_ratio=0.4), want)
    flat = torch.tensor(a, dtype=torch.float64)
    close(simpo_from_logp(flat, beta=2.5, gamma_beta_ratio=0.4), want)


GOOD = torch.tensor([True, False, True, True, False, False])


def test_kto_is_the_formula_of_the_paper():
    logp, y, ref, square = tokens()
    u = log_ratios(logp, ref, y)

    def want(kl: float) -> float:
        return sum(
            0.8 * (1 - S_(BETA * (r - kl))) if good else 1.3 * (1 - S_(BETA * (kl - r)))
            for r, good in zip(u, GOOD.tolist(), strict=True)
        ) / len(u)

    options = {"beta": BETA, "desirable_weight": 0.8, "undesirable_weight": 1.3}
    close(kto_from_logp(logp, y, GOOD, ref, kl=0.3, **options), want(0.3))
    for below in (-2.0, torch.tensor(-2.0)):  # as an estimate often is
        close(kto_from_logp(logp, y, GOOD, ref, kl=below, **options), want(0.0))
    got = kto_from_logp(logp, y, GOOD, ref, kl_logp=square + 2, kl_ref_logp=ref, kl_y=y, **options)
    kl = sum(p + 2 * n - q for p, q, n in
             zip(sums(square, y), sums(ref, y), (4, 1, 2, 2, 3, 2), strict=True)) / 6  # fmt: skip
    close(got, want(kl))


# -- what holds for all of them --------------------------------------------------------------------


def kto(logp, y, ref, square, **options):
    good = torch.tensor([i % 2 == 0 for i in range(logp.shape[0])], dtype=torch.bool)
    return kto_from_logp(logp, y, good, ref, kl=0.2, **options)


ALL = {
    **{
        f"dpo-{name}": lambda p, y, r, s, o=OPTIONS[name], name=name, **k: dpo_from_logp(
            p, y, None if name == "sft" else r, loss_type=name, beta=BETA, **o, **k
        )
        for name in OPTIONS
    },
    "dpo-wpo": lambda p, y, r, s, **k: dpo_from_logp(p, y, r, s, nll_weight=0.3, **k),
    "dpo-ld": lambda p, y, r, s, **k: dpo_from_logp(p, y, r, ld_alpha=0.4, **k),
    "dpo-average": lambda p, y, r, s, **k: dpo_from_logp(p, y, r, average_logp=True, **k),
    "dpo-js": lambda p, y, r, s, **k: dpo_from_logp(p, y, r, f_divergence="js", **k),
    "dpo-alpha": lambda p, y, r, s, **k: dpo_from_logp(p, y, r, f_divergence="alpha", **k),
    "orpo": lambda p, y, r, s, **k: orpo_from_logp(p, y, **k),
    "cpo": lambda p, y, r, s, **k: cpo_from_logp(p, y, label_smoothing=S, **k),
    "simpo": lambda p, y, r, s, **k: simpo_from_logp(p, y, **k),
    "kto": kto,
}
every = pytest.mark.parametrize("loss", ALL.values(), ids=ALL)


@every
def test_gradients_are_those_of_the_value(loss):
    logp, y, ref, square = tokens()

    def f(p):
        return loss(p, y, ref, square)

    if loss is not ALL["dpo-wpo"]:  # whose weights are constants to the gradient
        assert torch.autograd.gradcheck(f, logp.requires_grad_(), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(f, logp)
    p, v = logp.detach(), torch.rand_like(logp)
    torch.testing.assert_close(jvp(f, (p,), (v,))[1], (grad(f)(p) * v).sum())
    h = hessian(f)(p).reshape(p.numel(), p.numel())
    torch.testing.assert_close(h, h.T)
    torch.testing.assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(p), f(p))


@every
def test_each_pair_has_its_own_gradient_under_vmap(loss):
    made = [tokens(lengths=(pair,)) for pair in LENGTHS]
    stacks = [torch.stack(t) for t in zip(*made, strict=True)]
    got = vmap(grad(loss))(*stacks)
    torch.testing.assert_close(got, torch.stack([grad(loss)(*m) for m in made]))
    if loss in (ALL["dpo-aot"], ALL["dpo-ld"], kto):
        got = torch.compile(vmap(grad(loss)), backend="aot_eager", fullgraph=True)(*stacks)
        torch.testing.assert_close(got, torch.stack([grad(loss)(*m) for m in made]))


@every
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -400.0])
def test_what_an_ignored_token_holds_changes_nothing(loss, poison):
    made = tokens(torch.float32)
    y = made[1]

    def both(fill):
        a = [t if t is y else torch.where(y == -100, fill, t) for t in made]
        p = a[0].requires_grad_()
        value = loss(p, *a[1:])
        return value, *torch.autograd.grad(value, p)

    (value, g), (poisoned, h) = both(-1.0), both(poison)
    assert value.equal(poisoned)
    assert g.equal(h)
    assert not g[y == -100].any()
    assert value.dtype == torch.float32


@every
def test_an_ignored_sequence_takes_its_pair_out_and_stays_in_the_count(loss):
    lengths = ((2, 3), (3, 1), (2, 2))
    logp, y, ref, square = tokens(lengths=lengths)
    y[4] = -100  # rejected of the second pair
    keep = [0, 2, 3, 5]
    ref[4] = math.nan

    def f(p):
        return loss(p, y, ref, square)

    value, g = f(logp), grad(f)(logp)
    assert not g[4].any()
    assert g[[0, 2]].any()
    rest = [t[keep] for t in (logp, y, ref, square)]
    if loss in (ALL["dpo-sft"], ALL["dpo-wpo"], ALL["orpo"], ALL["cpo"], ALL["kto"]):
        assert value.isfinite()
        assert g.isfinite().all()
        return  # chosen tokens, or single sequences, of the second pair still count
    torch.testing.assert_close(value, loss(*rest) * 2 / 3)
    torch.testing.assert_close(g[keep], grad(loss)(*rest) * 2 / 3)
    assert not g[1].any()


@every
@pytest.mark.parametrize("poison", [math.nan, -1.0])
def test_nothing_counts(loss, poison):
    logp, y, ref, square = (torch.full_like(t, poison) if t.is_floating_point() else t
                            for t in tokens(torch.float32))  # fmt: skip
    y = torch.full_like(y, -100)
    value, g = loss(logp, y, ref, square), grad(loss)(logp, y, ref, square)
    assert value.item() == 0
    assert not g.any()
    empty = [t[:0] for t in (logp, y, ref, square)]
    assert loss(*empty).item() == 0


@every
def test_other_normalisers(loss):
    logp, y, ref, square = tokens()
    b = 6 if loss is kto else 3
    base = loss(logp, y, ref, square)
    if loss in (ALL["dpo-sft"], ALL["dpo-wpo"], ALL["orpo"], ALL["cpo"]):
        name = "nll_n_valid"
        lower, upper = loss(logp, y, ref, square, nll_n_valid=14), base
        assert 0 < (upper - lower).item() < upper.item()
        base, b = lower, 14
        assert loss(logp, y, ref, square, nll_n_valid=torch.tensor(14)).equal(base)
    else:
        name = "n_valid"
        torch.testing.assert_close(loss(logp, y, ref, square, n_valid=2 * b), base / 2)
        got = loss(logp, y, ref, square, n_valid=torch.tensor(2 * b))
        torch.testing.assert_close(got, base / 2)
    for bad, says in ((-1, "be at least 0, got -1"), (torch.ones(2), "have shape (), got (2,)")):
        with pytest.raises(ValueError, match=re.escape(f"{name} must {says}")):
            loss(logp, y, ref, square, **{name: bad})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every
def test_halves_are_widened(loss, dtype):
    made = tokens(dtype)
    wide = [t.float() if t.is_floating_point() else t for t in made]
    value = loss(*made)
    assert value.dtype == torch.float32
    assert value.equal(loss(*wide))
    assert grad(loss)(*made).dtype == dtype


# -- extremes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("p", [0.0, 1e-7, -1e-7, -100.0, -60000.0])
@pytest.mark.parametrize("q", [0.0, -1e-7, -100.0])
def test_orpo_is_finite_at_certainty_and_far_from_it(dtype, p, q):
    logp = torch.tensor([[p], [q]], dtype=dtype)
    y = torch.zeros(2, 1, dtype=torch.int64)
    value, g = orpo_from_logp(logp, y), grad(orpo_from_logp)(logp, y)
    assert value.isfinite()
    assert g.isfinite().all()


def test_orpo_near_certainty_is_that_of_more_digits():
    y = torch.zeros(2, 1, dtype=torch.int64)
    g = grad(lambda t: orpo_from_logp(t, y, beta=1.0))
    for p in (-1e-2, -1e-4, -1e-6):
        logp = torch.tensor([[p], [-0.5]])
        want = orpo_from_logp(logp.double(), y, beta=1.0)
        odds = math.exp(-0.5) / -math.expm1(-0.5)  # of rejected
        x = logp[0, 0].double().item()
        exact = -x + math.log1p(odds * -math.expm1(x) / math.exp(x))
        assert want.item() == pytest.approx(exact, rel=1e-9)
        got = orpo_from_logp(logp, y, beta=1.0)
        assert got.item() == pytest.approx(exact, rel=1e-4)
        torch.testing.assert_close(g(logp).double(), g(logp.double()), rtol=1e-3, atol=1e-6)


@every
@pytest.mark.parametrize("gap", [200.0, -200.0, 1e4, -1e4])
def test_far_from_the_reference_all_is_finite(loss, gap):
    logp, y, ref, square = tokens(torch.float32)
    sign = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])[:, None]
    p = logp - 1e4 + gap * sign

    def f(p):
        return loss(p, y, ref - 1e4, square)

    assert f(p).isfinite()
    assert grad(f)(p).isfinite().all()


# -- fused -----------------------------------------------------------------------------------------

REF = {"dpo": True, "orpo": False, "cpo": False, "simpo": False, "kto": True}
HEAD = {"temperature": 1.3, "softcap": 4.0, "logit_scale": 0.8}


def head(b=2, t=3, d=4, v=5):
    make = {"dtype": torch.float64}
    w, x, bias = torch.randn(v, d, **make), torch.randn(2 * b, t, d, **make), torch.randn(v, **make)
    rw, rx, rb = torch.randn(v, 3, **make), torch.randn(2 * b, t, 3, **make), torch.randn(v, **make)
    y = torch.randint(v, (2 * b, t))
    y[0, 1] = y[-1, 0] = -100
    return (w, x, y, bias), {"ref_w": rw, "ref_x": rx, "ref_b": rb}


def both(name: str):
    """The fused loss with a reference, and its algebra on plain torch's log-probabilities."""
    more = (torch.tensor([True, False, False, True]),) if name == "kto" else ()
    options = {"kl": 0.1} if name == "kto" else {}

    def fused(w, x, y, bias, ref, suffix="", **k):
        loss = getattr(liger_fn, f"{name}_loss{suffix}")
        return loss(w, x, y, *more, b=bias, chunk=2, **(ref if REF[name] else {}), **options, **k)

    def plain(w, x, y, bias, ref, **k):
        head = {o: k.pop(o) for o in list(k) if o in HEAD}
        logp = logp_oracle(w, x, y, bias, **head)[0]
        args = (logp_oracle(ref["ref_w"], ref["ref_x"], y, ref["ref_b"], **head)[0],)
        from_logp = getattr(liger_fn, f"{name}_from_logp")
        return from_logp(logp, y, *more, *(args if REF[name] else ()), **options, **k)

    return fused, plain


@pytest.mark.parametrize("name", REF)
def test_the_fused_loss_is_the_algebra_on_the_heads_log_probabilities(name):
    fused, plain = both(name)
    (w, x, y, bias), ref = head()
    for suffix, k in (("", HEAD), ("_with_metrics", {}), ("", {"n_valid": 7, "beta": 0.4})):

        def f(w, x, bias, suffix=suffix, k=k):
            out = fused(w, x, y, bias, ref, suffix, **k)
            return out if suffix == "" else out.loss

        def g(w, x, bias, k=k):
            return plain(w, x, y, bias, ref, **k)

        torch.testing.assert_close(f(w, x, bias), g(w, x, bias))
        for p, q in zip(
            grad(f, (0, 1, 2))(w, x, bias), grad(g, (0, 1, 2))(w, x, bias), strict=True
        ):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", ["dpo", "orpo", "cpo", "simpo"])
def test_gradients_of_each_pair_in_one_call(name):
    fused, _ = both(name)
    made = [head(b=1) for _ in range(3)]
    (w, _, _, bias), ref = made[0]
    x, y = (torch.stack([m[0][i] for m in made]) for i in (1, 2))

    def f(w, x, y):
        return fused(w, x, y, bias, {**ref})

    got = vmap(grad(f), (None, 0, 0))(w, x, y)
    torch.testing.assert_close(got, torch.stack([grad(f)(w, *a) for a in zip(x, y, strict=True)]))


@pytest.mark.parametrize("name", REF)
def test_a_target_outside_the_vocabulary_is_never_a_plausible_number(name):
    fused, _ = both(name)
    (w, x, y, bias), ref = head()
    y[0, 0] = 5
    assert fused(w, x, y, bias, ref).isnan()


def test_an_option_of_weight_zero_costs_nothing():
    logp, y, ref, _ = tokens()
    logp[:, 0], y[:, 0] = -math.inf, 1  # impossible tokens: the preference alone may survive them
    assert cpo_from_logp(logp[:, 1:], y[:, 1:], nll_weight=0.0).isfinite()
    nll = dpo_from_logp(logp, y, ref, loss_type="apo_zero")
    assert not nll.isnan()


def test_the_reference_has_no_gradient():
    (w, x, y, bias), ref = head()
    leaves = [t.requires_grad_() for t in (w, x, *ref.values())]
    liger_fn.dpo_loss(w, x, y, b=bias, **ref).backward()
    assert [t.grad is None for t in leaves] == [False, False, True, True, True]


def test_wpo_takes_its_weights_from_the_same_head():
    (w, x, y, bias), ref = head()
    logp, _, square, _ = logp_oracle(w, x, y, bias, **HEAD)
    base = logp_oracle(ref["ref_w"], ref["ref_x"], y, ref["ref_b"], **HEAD)[0]
    got = liger_fn.dpo_loss(w, x, y, b=bias, wpo=True, **ref, **HEAD)
    torch.testing.assert_close(got, dpo_from_logp(logp, y, base, square))


@pytest.mark.parametrize("below", [-0.5, torch.tensor(-0.5)], ids=["number", "tensor"])
def test_a_point_of_reference_below_0_counts_as_0(below):
    w, x, y = torch.randn(7, 5), torch.randn(4, 3, 5), torch.randint(7, (4, 3))
    ref, good = torch.randn(4), torch.tensor([True, False, True, False])
    want = liger_fn.kto_loss_with_metrics(w, x, y, good, ref_logp=ref, kl=0.0)
    got = liger_fn.kto_loss_with_metrics(w, x, y, good, ref_logp=ref, kl=below)
    assert torch.equal(torch.stack(got), torch.stack(want))


def test_kto_reads_its_point_of_reference_from_mismatched_rows():
    (w, x, y, bias), ref = head()
    (_, kx, ky, _), kref = head(b=3)
    good = torch.tensor([True, False, False, True])
    logp = logp_oracle(w, x, y, bias)[0]
    base = logp_oracle(ref["ref_w"], ref["ref_x"], y, ref["ref_b"])[0]
    kl_logp = logp_oracle(w, kx, ky, bias)[0]
    kl_ref = logp_oracle(ref["ref_w"], kref["ref_x"], ky, ref["ref_b"])[0] - 3
    want = kto_from_logp(logp, y, good, base, kl_logp=kl_logp, kl_ref_logp=kl_ref, kl_y=ky)
    got = liger_fn.kto_loss(w, x, y, good, b=bias, **ref, kl_x=kx, kl_y=ky, kl_ref_logp=kl_ref)
    torch.testing.assert_close(got, want)
    own = liger_fn.kto_loss_with_metrics(
        w, x, y, good, b=bias, **ref, kl_x=kx, kl_y=ky, kl_ref_x=kref["ref_x"]
    )
    want = (kl_logp - kl_ref - 3).sum(-1).mean().clamp(min=0)
    torch.testing.assert_close(own.kl, want)


def test_metrics_of_pairs():
    logp = torch.tensor([[-0.5, -1.0], [-2.0, -0.5], [-1.0, -1.0], [-1.0, -0.25]])
    z = torch.stack((logp, (-logp.expm1()).log()), -1)  # logits whose softmax they are
    y = torch.tensor([[0, 0], [0, 0], [0, -100], [0, 0]])
    ref = torch.tensor([-1.0, -1.0, -2.0, -1.0])
    w = torch.eye(2)
    m = liger_fn.dpo_loss_with_metrics(w, z, y, ref_logp=ref, beta=0.5)
    want = {
        "loss": -sum(log_s(0.5 * d) for d in (-1.5, -1.25)) / 2,
        "chosen_logp": -2.0, "rejected_logp": -1.125, "chosen_reward": -0.5,
        "rejected_reward": 0.1875, "margin": -0.6875, "accuracy": 0.0, "nll": 1.0,
    }  # fmt: skip
    assert m._fields == tuple(want)
    for name, value in want.items():
        assert getattr(m, name).item() == pytest.approx(value, abs=1e-6), name
    w.requires_grad_()
    m = liger_fn.orpo_loss_with_metrics(w, z, y)
    assert [t.requires_grad for t in m] == [True] + [False] * 7
    assert m.accuracy.item() == 0.5
    y[2] = -100
    m = liger_fn.cpo_loss_with_metrics(w, z, y)
    assert m.chosen_logp.item() == pytest.approx(-2.5, abs=1e-6)  # of the other pair
    m = liger_fn.simpo_loss_with_metrics(w, z, torch.full_like(y, -100))
    assert [t.item() for t in m] == [0] * 8


def test_metrics_of_kto():
    logp = torch.tensor([[-0.5, -1.0], [-2.0, -0.5], [-1.0, -1.0]])
    z = torch.stack((logp, (-logp.expm1()).log()), -1)
    y = torch.tensor([[0, 0], [0, 0], [0, -100]])
    m = liger_fn.kto_loss_with_metrics(
        torch.eye(2), z, y, torch.tensor([True, False, True]), beta=0.5, kl=0.25,
        ref_logp=torch.tensor([-1.0, -1.0, -2.0]),
    )  # fmt: skip
    want = {
        "loss": (S_(0.375) + S_(-0.875) + S_(-0.375)) / 3, "kl": 0.25, "chosen_logp": -1.25,
        "rejected_logp": -2.5, "chosen_reward": 0.125, "rejected_reward": -0.75, "margin": 0.875,
    }  # fmt: skip
    assert m._fields == tuple(want)
    for name, value in want.items():
        assert getattr(m, name).item() == pytest.approx(value, abs=1e-6), name


# -- errors ----------------------------------------------------------------------------------------

P, Y = torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.int64)
X, W = torch.zeros(4, 3, 2), torch.zeros(5, 2)
FLAGS = torch.ones(4, dtype=torch.bool)
BAD = {
    "loss_type must be one of .*, got 'dpo'": lambda: dpo_from_logp(P, Y, P, loss_type="dpo"),
    "loss_type must be a name or different names": lambda: dpo_from_logp(P, Y, P, loss_type=[]),
    "loss_weights must be as many as": lambda: dpo_from_logp(P, Y, P, loss_weights=[1.0]),
    "f_divergence must be one of": lambda: dpo_from_logp(P, Y, P, f_divergence="kl"),
    "label_smoothing must lie in .0, 1.": lambda: cpo_from_logp(P, Y, label_smoothing=1.0),
    "label_smoothing must be above 0 with 'exo_pair'": lambda: dpo_from_logp(
        P, Y, P, loss_type="exo_pair"
    ),
    "label_smoothing must be below 0.5 with 'robust', got 0.5": lambda: dpo_from_logp(
        P, Y, P, loss_type="robust", label_smoothing=0.5
    ),
    "label_smoothing cannot be used with loss_type 'ipo'": lambda: dpo_from_logp(
        P, Y, P, loss_type="ipo", label_smoothing=0.1
    ),
    "f_divergence cannot be used with loss_type 'aot'": lambda: dpo_from_logp(
        P, Y, P, loss_type="aot", f_divergence="js"
    ),
    "f_alpha cannot be used with f_divergence 'js'": lambda: dpo_from_logp(
        P, Y, P, f_divergence="js", f_alpha=0.5
    ),
    "discopop_tau cannot be used": lambda: dpo_from_logp(P, Y, P, discopop_tau=0.1),
    "ld_alpha must lie in": lambda: dpo_from_logp(P, Y, P, ld_alpha=2.0),
    "ld_alpha cannot be used": lambda: dpo_from_logp(P, Y, loss_type="sft", ld_alpha=0.5),
    "average_logp cannot be used with loss_type 'ipo'": lambda: dpo_from_logp(
        P, Y, P, loss_type="ipo", average_logp=True
    ),
    "wpo cannot be used with loss_type 'aot'": lambda: dpo_from_logp(P, Y, P, P, loss_type="aot"),
    "beta must be above 0, got 0": lambda: simpo_from_logp(P, Y, beta=0),
    "nll_weight must be at least 0": lambda: cpo_from_logp(P, Y, nll_weight=-1.0),
    "nll_n_valid is for the nll term": lambda: dpo_from_logp(P, Y, P, nll_n_valid=3),
    "ref_logp .*got NoneType: it is for 'hinge'": lambda: dpo_from_logp(P, Y, loss_type="hinge"),
    "n_valid is for a mean over pairs": lambda: dpo_from_logp(P, Y, loss_type="sft", n_valid=3),
    "ref_logp cannot be used with 'sft'": lambda: dpo_from_logp(P, Y, P, loss_type="sft"),
    "logp must have an even first axis.*, got .3, 3.": lambda: orpo_from_logp(P[:3], Y[:3]),
    "axis t is 2 in y but 3 in logp": lambda: simpo_from_logp(P, Y[:, :2]),
    "axis 2b is 2 in ref_logp but 4 in logp": lambda: dpo_from_logp(P, Y, P[:2]),
    "y .*got NoneType: the nll term": lambda: orpo_from_logp(P, None),
    "y .*got NoneType: 'sft'": lambda: dpo_from_logp(P, loss_type="sft"),
    "y .*got NoneType: nll_weight": lambda: cpo_from_logp(P[:, 0]),
    "y .*got NoneType: average_logp": lambda: cpo_from_logp(
        P[:, 0], nll_weight=0.0, average_logp=True
    ),
    "y .*got NoneType: 'ipo'": lambda: dpo_from_logp(P[:, 0], None, P[:, 0], loss_type="ipo"),
    "y .*got NoneType: ld_alpha": lambda: dpo_from_logp(P[:, 0], None, P[:, 0], ld_alpha=0.5),
    "y .*got NoneType: log_sum_sq": lambda: dpo_from_logp(P[:, 0], None, P[:, 0], P),
    "y .*got NoneType: logp is per token": lambda: simpo_from_logp(P),
    "logp must have shape .2b, t., got .4,": lambda: simpo_from_logp(P[:, 0], Y),
    "desirable must have shape .4,., one for each": lambda: kto_from_logp(P, Y, FLAGS[:3], P, kl=0),
    "one of kl and kl_logp must be given, got nothing": lambda: kto_from_logp(P, Y, FLAGS, P),
    "one of kl and kl_logp must be given, got both": lambda: kto_from_logp(
        P, Y, FLAGS, P, kl=0, kl_logp=P, kl_ref_logp=P
    ),
    "kl_logp and kl_ref_logp must be given together": lambda: kto_from_logp(
        P, Y, FLAGS, P, kl_logp=P, kl_y=Y
    ),
    "kl_y is for kl_logp": lambda: kto_from_logp(P, Y, FLAGS, P, kl=0, kl_y=Y),
    "kl must have shape .., got .4, 3.": lambda: kto_from_logp(P, Y, FLAGS, P, kl=P),
    "undesirable_weight must be at least 0": lambda: kto_from_logp(
        P, Y, FLAGS, P, kl=0, undesirable_weight=-1
    ),
    "x must have an even first axis": lambda: liger_fn.cpo_loss(W, X[:3], Y[:3]),
    "x must have shape .2b, t, d.": lambda: liger_fn.simpo_loss(W, X[0], Y[0]),
    "ref_logp and ref_w, ref_x cannot be given together": lambda: liger_fn.dpo_loss(
        W, X, Y, ref_logp=P, ref_w=W, ref_x=X
    ),
    "ref_w and ref_x must be given together": lambda: liger_fn.dpo_loss(W, X, Y, ref_w=W),
    "axis 2b is 3 in ref_x but 4 in x": lambda: liger_fn.dpo_loss(W, X, Y, ref_w=W, ref_x=X[:3]),
    "ref_w cannot be used with 'sft'": lambda: liger_fn.dpo_loss(
        W, X, Y, ref_w=W, ref_x=X, loss_type="sft"
    ),
    "^dpo_loss: ref_logp must be a tensor": lambda: liger_fn.dpo_loss(W, X, Y),
    "^kto_loss: ref_logp must be a tensor": lambda: liger_fn.kto_loss(W, X, Y, FLAGS, kl=0),
    "one of kl and kl_x must be given, got nothing": lambda: liger_fn.kto_loss(
        W, X, Y, FLAGS, ref_logp=P
    ),
    "one of kl and kl_x must be given, got both": lambda: liger_fn.kto_loss(
        W, X, Y, FLAGS, ref_logp=P, kl=0, kl_x=X
    ),
    "kl_ref_x is for kl_x": lambda: liger_fn.kto_loss(
        W, X, Y, FLAGS, ref_logp=P, kl=0, kl_ref_x=X
    ),
    "kl_x must come with kl_ref_logp, or": lambda: liger_fn.kto_loss(
        W, X, Y, FLAGS, ref_logp=P, kl_x=X, kl_y=Y, kl_ref_x=X
    ),
    "^orpo_loss_with_metrics: temperature must be above 0": lambda: liger_fn.orpo_loss_with_metrics(
        W, X, Y, temperature=0
    ),
    "chunk must be an integer above 0": lambda: liger_fn.orpo_loss(W, X, Y, chunk=0),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_is_refused(message):
    kind = TypeError if "a tensor" in message or "NoneType" in message else ValueError
    with pytest.raises(kind, match=message):
        BAD[message]()


def test_kinds_are_held_to():
    with pytest.raises(TypeError, match=r"^kto_from_logp: desirable must hold booleans, got torch"):
        kto_from_logp(P, Y, FLAGS.long(), P, kl=0)
    with pytest.raises(TypeError, match=r"^kto_from_logp: desirable must be a tensor, got list"):
        kto_from_logp(P, Y, [True] * 4, P, kl=0)
    with pytest.raises(TypeError, match=r"^kto_from_logp: ref_logp must be a tensor, got NoneType"):
        kto_from_logp(P, Y, FLAGS, None, kl=0)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'gamma'"):
        simpo_from_logp(P, Y, gamma=1.0)


@pytest.mark.parametrize("name", ["dpo", "kto"])
@pytest.mark.parametrize("chunk", [3, 8, 12, None])
def test_a_policy_is_its_own_reference_bit_for_bit(backend, device, name, chunk):
    w, x = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((37, 5), (6, 4, 5)))
    y = torch.randint(37, (6, 4), device=device)
    own = {"ref_w": w.clone(), "ref_x": x.clone(), "chunk": chunk}
    if name == "dpo":
        found = liger_fn.dpo_loss_with_metrics(w.requires_grad_(), x, y, **own)
        assert not found.margin
    else:
        good = torch.arange(6, device=device) % 2 == 0
        found = liger_fn.kto_loss_with_metrics(w.requires_grad_(), x, y, good, kl=0.0, **own)
        assert not found.chosen_reward
        assert not found.rejected_reward
