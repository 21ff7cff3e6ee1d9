"""Pure, fused functions for training language models."""

from liger_fn._launch import using as using
from liger_fn._vjp import custom_vjp as custom_vjp
from liger_fn.ops._ce import CEStats as CEStats
from liger_fn.ops.add_rms_norm import AddNorm as AddNorm
from liger_fn.ops.add_rms_norm import add_rms_norm as add_rms_norm
from liger_fn.ops.cross_entropy import cross_entropy as cross_entropy
from liger_fn.ops.cross_entropy import cross_entropy_with_stats as cross_entropy_with_stats
from liger_fn.ops.dyt import dyt as dyt
from liger_fn.ops.fused_linear_ce import fused_linear_ce as fused_linear_ce
from liger_fn.ops.fused_linear_ce import fused_linear_ce_with_stats as fused_linear_ce_with_stats
from liger_fn.ops.fused_linear_logp import LogpStats as LogpStats
from liger_fn.ops.fused_linear_logp import fused_linear_logp as fused_linear_logp
from liger_fn.ops.fused_linear_logp import (
    fused_linear_logp_with_stats as fused_linear_logp_with_stats,
)
from liger_fn.ops.geglu import geglu as geglu
from liger_fn.ops.geglu import geglu_packed as geglu_packed
from liger_fn.ops.group_norm import group_norm as group_norm
from liger_fn.ops.jsd import jsd as jsd
from liger_fn.ops.kl_div import kl_div as kl_div
from liger_fn.ops.layer_norm import layer_norm as layer_norm
from liger_fn.ops.mrope import mrope as mrope
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
    "LogpStats",
    "add_rms_norm",
    "cross_entropy",
    "cross_entropy_with_stats",
    "custom_vjp",
    "dyt",
    "fused_linear_ce",
    "fused_linear_ce_with_stats",
    "fused_linear_logp",
    "fused_linear_logp_with_stats",
    "geglu",
    "geglu_packed",
    "group_norm",
    "jsd",
    "kl_div",
    "layer_norm",
    "mrope",
    "relu2",
    "rms_norm",
    "rope",
    "softmax",
    "sparsemax",
    "swiglu",
    "swiglu_packed",
    "tvd",
    "using",
]
