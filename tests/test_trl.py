"""The losses on log-probabilities against TRL's own, where it is installed (written for 1.16).

TRL's losses are methods of trainers: they run here on stand-ins that hold options and outputs.
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import liger_fn
from tests.test_grpo import RUNS
from tests.test_preference import GOOD, S, tokens

pytest.importorskip("trl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import DPOTrainer, GRPOTrainer, KTOTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer


def trainer(**options):
    """What a loss reads of a trainer; one process."""
    made = MagicMock(
        aux_loss_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)), _tp_size=1,
        _total_train_tokens=0, **options,
    )  # fmt: skip
    made.accelerator.device = torch.device("cpu")
    for name in ("gather", "gather_for_metrics"):
        getattr(made.accelerator, name).side_effect = lambda t: t
    made.accelerator.reduce.side_effect = lambda t, reduction: t
    return made


def outputs(logp, y, square):
    zero = torch.zeros_like(logp)
    return lambda **_: SimpleNamespace(
        log_probs=torch.where(y == -100, 0.0, logp), log_sum_sq_probs=square, entropy=zero,
        mean_logits=zero, is_top1=zero.bool(),
    )  # fmt: skip


def with_prompt(y):
    """The mask and the ids of prompt and completion: one token more, which nothing predicts."""
    mask = torch.cat((torch.zeros_like(y[:, :1]), (y != -100).long()), 1)
    return {"completion_mask": mask, "input_ids": mask, "attention_mask": mask}


def sums(t, y):
    return torch.where(y == -100, 0.0, t).sum(-1)


def trl_dpo(logp, y, ref, square, **options):
    base = sums(ref, y)
    o = {
        "loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None,
        "f_divergence": "reverse_kl", "f_alpha": 0.5, "discopop_tau": 0.05, "wpo": False,
    }  # fmt: skip
    o |= options
    names = [o["loss_type"]] if isinstance(o["loss_type"], str) else o["loss_type"]
    me = trainer(
        beta=o["beta"], label_smoothing=o["label_smoothing"], ld_alpha=o["ld_alpha"],
        loss_types=names, loss_weights=[1.0] * len(names), use_weighting=o["wpo"],
        f_divergence_type={"js": "js_divergence", "alpha": "alpha_divergence"}.get(
            o["f_divergence"], o["f_divergence"]
        ),
        f_alpha_divergence_coef=o["f_alpha"], precompute_ref_logps=True,
        args=SimpleNamespace(discopop_tau=o["discopop_tau"]),
    )  # fmt: skip
    b = len(base) // 2
    inputs = {**with_prompt(y), "ref_chosen_logps": base[:b], "ref_rejected_logps": base[b:]}
    loss = DPOTrainer._compute_loss(me, outputs(logp, y, square), inputs, False)
    logged = {k: v[0] for k, v in me._metrics["train"].items() if k != "num_tokens"}
    return loss, logged


DPO = [
    *({"loss_type": t} for t in ("sigmoid", "hinge", "ipo", "nca_pair", "sppo_hard", "aot",
                                 "aot_unpaired", "apo_zero", "apo_down", "discopop", "bco_pair",
                                 "sigmoid_norm", "sft")),
    *({"loss_type": t, "label_smoothing": S} for t in ("robust", "exo_pair", "aot")),
    *({"f_divergence": f} for f in ("forward_kl", "js", "alpha")),
    {"f_divergence": "alpha", "f_alpha": 0.2, "loss_type": "ipo"},
    {"loss_type": ["sigmoid", "bco_pair", "sft"]}, {"wpo": True}, {"ld_alpha": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("options", DPO, ids=str)
def test_dpo(options):
    logp, y, ref, square = tokens(torch.float32)
    p, q = (logp.clone().requires_grad_() for _ in range(2))
    ours = {k: v for k, v in options.items() if k != "wpo"}
    # TRL takes no reference per token beside ld_alpha, but the sums of all tokens
    base = None if options.get("loss_type") == "sft" else sums(ref, y)
    got = liger_fn.dpo_from_logp(p, y, base, square if options.get("wpo") else None, **ours)
    want, _ = trl_dpo(q, y, ref, square, **options)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(t, s)[0] for t, s in ((got, p), (want, q))))


def test_metrics_of_dpo():
    logp, y, ref, square = tokens(torch.float32)
    _, logged = trl_dpo(logp, y, ref, square)
    z = torch.stack((logp, (-logp.expm1()).log()), -1)  # logits whose softmax they are
    y = torch.where(y == -100, -100, 0)
    m = liger_fn.dpo_loss_with_metrics(torch.eye(2), z, y, ref_logp=ref)
    for name, theirs in (
        ("chosen_logp", "logps/chosen"), ("rejected_logp", "logps/rejected"),
        ("chosen_reward", "rewards/chosen"), ("rejected_reward", "rewards/rejected"),
        ("margin", "rewards/margins"), ("accuracy", "rewards/accuracies"),
    ):  # fmt: skip
        assert getattr(m, name).item() == pytest.approx(logged[theirs], rel=1e-5)


@pytest.mark.parametrize("kl", [-0.5, 0.7])
def test_kto(kl):
    logp, y, ref, square = tokens(torch.float32)
    me = trainer(
        beta=0.2, desirable_weight=1.2, undesirable_weight=0.7, loss_type="kto", calculate_KL=True,
        precompute_ref_logps=True,
    )  # fmt: skip
    me._compute_kl_logps.side_effect = lambda *_: sums(ref, y) + kl
    inputs = {
        **with_prompt(y), "label": GOOD, "ref_logps": sums(ref, y), "ref_KL_logps": sums(ref, y),
    }  # fmt: skip
    want = KTOTrainer._compute_loss(me, outputs(logp, y, square), inputs, False)
    got = liger_fn.kto_from_logp(
        logp, y, GOOD, ref, kl_logp=sums(ref, y) + kl, kl_ref_logp=sums(ref, y), beta=0.2,
        desirable_weight=1.2, undesirable_weight=0.7,
    )  # fmt: skip
    torch.testing.assert_close(got, want)


def test_orpo_cpo_simpo():
    logp, y, _, _ = tokens(torch.float32)
    whole = sums(logp, y)
    means = whole / (y != -100).sum(-1)
    nll = -whole[:3].sum() / (y[:3] != -100).sum()
    odds = ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), means[:3], means[3:])[0]
    torch.testing.assert_close(liger_fn.orpo_from_logp(logp, y, beta=0.3), nll - odds.mean())
    me = trainer(beta=0.3, alpha=0.0, loss_type="sigmoid", label_smoothing=S)
    want = CPOTrainer.cpo_loss(me, whole[:3], whole[3:])[0].mean() + 0.5 * nll
    got = liger_fn.cpo_from_logp(logp, y, beta=0.3, label_smoothing=S, nll_weight=0.5)
    torch.testing.assert_close(got, want)
    me = trainer(beta=2.0, alpha=0.0, loss_type="simpo", label_smoothing=0.0, simpo_gamma=0.8)
    want = CPOTrainer.cpo_loss(me, means[:3], means[3:])[0].mean()
    got = liger_fn.simpo_from_logp(logp, y, beta=2.0, gamma_beta_ratio=0.4)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("on_policy", [False, True])
def test_grpo(options, on_policy):
    from tests.test_grpo import batch

    logp, y, a, old, ref = batch(torch.float32)
    name, mask = options.get("loss_type", "grpo"), (y != -100).long()
    me = trainer(
        loss_type=name, importance_sampling_level=options.get("importance", "token"),
        epsilon_low=0.2, epsilon_high=5.0 if name == "cispo" else 0.2, use_vllm=False,
        beta=options.get("beta", 0.0), top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        max_completion_length=y.shape[1], current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(
            delta=options.get("delta"), use_bias_correction_kl=False, sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
            vespo_lambda_neg=2.0, steps_per_generation=1,
        ),
    )  # fmt: skip
    me.accelerator.num_processes = 1
    me.get_gamma_weights.side_effect = GRPOTrainer.get_gamma_weights
    p, q = (logp.clone().requires_grad_() for _ in range(2))
    me._get_per_token_logps_and_entropies.side_effect = lambda *_, **__: (q, logp, None)
    inputs = {
        "prompt_ids": y[:, :1], "prompt_mask": mask[:, :1], "completion_ids": y,
        "completion_mask": mask, "advantages": a, "ref_per_token_logps": ref,
        "old_per_token_logps": None if on_policy else old, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    want = GRPOTrainer._compute_loss(me, None, inputs)
    got = liger_fn.grpo_from_logp(
        p, y, a, old_logp=None if on_policy else old, ref_logp=ref if "beta" in options else None,
        **options,
    )  # fmt: skip
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(t, s)[0] for t, s in ((got, p), (want, q))))
