"""Pure, fused functions for training language models."""

from liger_fn._launch import using as using
from liger_fn._vjp import custom_vjp as custom_vjp
from liger_fn.ops.rms_norm import rms_norm as rms_norm

__all__ = ["custom_vjp", "rms_norm", "using"]
