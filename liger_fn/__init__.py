"""Pure, fused functions for training language models."""

from liger_fn._launch import using as using
from liger_fn._vjp import custom_vjp as custom_vjp
from liger_fn.ops._ce import CEStats as CEStats
from liger_fn.ops._grpo import GRPOMetrics as GRPOMetrics
from liger_fn.ops.add_rms_norm import AddNorm as AddNorm
from liger_fn.ops.add_rms_norm import add_rms_norm as add_rms_norm
from liger_fn.ops.cross_entropy import cross_entropy as cross_entropy
from liger_fn.ops.cross_entropy import cross_entropy_with_stats as cross_entropy_with_stats
from liger_fn.ops.dyt import dyt as dyt
from liger_fn.ops.fused_linear_ce import fused_linear_ce as fused_linear_ce
from liger_fn.ops.fused_linear_ce import fused_linear_ce_with_stats as fused_linear_ce_with_stats
from liger_fn.ops.fused_linear_cosine import fused_linear_cosine as fused_linear_cosine
from liger_fn.ops.fused_linear_jsd import fused_linear_jsd as fused_linear_jsd
from liger_fn.ops.fused_linear_kl import fused_linear_kl as fused_linear_kl
from liger_fn.ops.fused_linear_logp import LogpStats as LogpStats
from liger_fn.ops.fused_linear_logp import fused_linear_logp as fused_linear_logp
from liger_fn.ops.fused_linear_logp import (
    fused_linear_logp_with_stats as fused_linear_logp_with_stats,
)
from liger_fn.ops.fused_linear_tvd import fused_linear_tvd as fused_linear_tvd
from liger_fn.ops.geglu import geglu as geglu
from liger_fn.ops.geglu import geglu_packed as geglu_packed
from liger_fn.ops.group_norm import group_norm as group_norm
from liger_fn.ops.grpo import grpo_from_logp as grpo_from_logp
from liger_fn.ops.grpo import grpo_loss as grpo_loss
from liger_fn.ops.grpo import grpo_loss_with_metrics as grpo_loss_with_metrics
from liger_fn.ops.jsd import jsd as jsd
from liger_fn.ops.kl_div import kl_div as kl_div
from liger_fn.ops.layer_norm import layer_norm as layer_norm
from liger_fn.ops.mrope import mrope as mrope
from liger_fn.ops.preference._kto import KTOMetrics as KTOMetrics
from liger_fn.ops.preference._pairs import PairMetrics as PairMetrics
from liger_fn.ops.preference.cpo import cpo_from_logp as cpo_from_logp
from liger_fn.ops.preference.cpo import cpo_loss as cpo_loss
from liger_fn.ops.preference.cpo import cpo_loss_with_metrics as cpo_loss_with_metrics
from liger_fn.ops.preference.dpo import dpo_from_logp as dpo_from_logp
from liger_fn.ops.preference.dpo import dpo_loss as dpo_loss
from liger_fn.ops.preference.dpo import dpo_loss_with_metrics as dpo_loss_with_metrics
from liger_fn.ops.preference.kto import kto_from_logp as kto_from_logp
from liger_fn.ops.preference.kto import kto_loss as kto_loss
from liger_fn.ops.preference.kto import kto_loss_with_metrics as kto_loss_with_metrics
from liger_fn.ops.preference.orpo import orpo_from_logp as orpo_from_logp
from liger_fn.ops.preference.orpo import orpo_loss as orpo_loss
from liger_fn.ops.preference.orpo import orpo_loss_with_metrics as orpo_loss_with_metrics
from liger_fn.ops.preference.simpo import simpo_from_logp as simpo_from_logp
from liger_fn.ops.preference.simpo import simpo_loss as simpo_loss
from liger_fn.ops.preference.simpo import simpo_loss_with_metrics as simpo_loss_with_metrics
from liger_fn.ops.relu2 import relu2 as relu2
from liger_fn.ops.rms_norm import rms_norm as rms_norm
from liger_fn.ops.rope import rope as rope
from liger_fn.ops.softmax import softmax as softmax
from liger_fn.ops.sparsemax import sparsemax as sparsemax
from liger_fn.ops.swiglu import swiglu as swiglu
from liger_fn.ops.swiglu import swiglu_packed as swiglu_packed
from liger_fn.ops.tvd import tvd as tvd

__all__ = [
    "AddNorm",
    "CEStats",
    "GRPOMetrics",
    "KTOMetrics",
    "LogpStats",
    "PairMetrics",
    "add_rms_norm",
    "cpo_from_logp",
    "cpo_loss",
    "cpo_loss_with_metrics",
    "cross_entropy",
    "cross_entropy_with_stats",
    "custom_vjp",
    "dpo_from_logp",
    "dpo_loss",
    "dpo_loss_with_metrics",
    "dyt",
    "fused_linear_ce",
    "fused_linear_ce_with_stats",
    "fused_linear_cosine",
    "fused_linear_jsd",
    "fused_linear_kl",
    "fused_linear_logp",
    "fused_linear_logp_with_stats",
    "fused_linear_tvd",
    "geglu",
    "geglu_packed",
    "group_norm",
    "grpo_from_logp",
    "grpo_loss",
    "grpo_loss_with_metrics",
    "jsd",
    "kl_div",
    "kto_from_logp",
    "kto_loss",
    "kto_loss_with_metrics",
    "layer_norm",
    "mrope",
    "orpo_from_logp",
    "orpo_loss",
    "orpo_loss_with_metrics",
    "relu2",
    "rms_norm",
    "rope",
    "simpo_from_logp",
    "simpo_loss",
    "simpo_loss_with_metrics",
    "softmax",
    "sparsemax",
    "swiglu",
    "swiglu_packed",
    "tvd",
    "using",
]
