"""Modules: each holds parameters and calls one function of `liger_fn`.

Constructors, attributes and state dicts are those of the torch or Hugging Face module that each
stands for, so that checkpoints load either way. Import it by name: `import liger_fn.nn`.
"""

from typing import TYPE_CHECKING, Any

from liger_fn.nn.gates import GEGLUMLP as GEGLUMLP
from liger_fn.nn.gates import SwiGLUMLP as SwiGLUMLP
from liger_fn.nn.losses import CrossEntropyLoss as CrossEntropyLoss
from liger_fn.nn.losses import FusedLinearCrossEntropyLoss as FusedLinearCrossEntropyLoss
from liger_fn.nn.losses import LMHead as LMHead
from liger_fn.nn.norms import DyT as DyT
from liger_fn.nn.norms import GroupNorm as GroupNorm
from liger_fn.nn.norms import LayerNorm as LayerNorm
from liger_fn.nn.norms import RMSNorm as RMSNorm
from liger_fn.nn.preference import CPOLoss as CPOLoss
from liger_fn.nn.preference import DPOLoss as DPOLoss
from liger_fn.nn.preference import GRPOLoss as GRPOLoss
from liger_fn.nn.preference import JSDLoss as JSDLoss
from liger_fn.nn.preference import KTOLoss as KTOLoss
from liger_fn.nn.preference import ORPOLoss as ORPOLoss
from liger_fn.nn.preference import SimPOLoss as SimPOLoss
from liger_fn.nn.rotary import RotaryEmbedding as RotaryEmbedding

if TYPE_CHECKING:
    from liger_fn.nn.parallel import VocabParallelHead as VocabParallelHead


def __getattr__(name: str) -> Any:
    """Import what needs DTensor when it is asked for: that takes a second."""
    if name == "VocabParallelHead":
        from liger_fn.nn.parallel import VocabParallelHead

        return VocabParallelHead
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "GEGLUMLP",
    "CPOLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DyT",
    "FusedLinearCrossEntropyLoss",
    "GRPOLoss",
    "GroupNorm",
    "JSDLoss",
    "KTOLoss",
    "LMHead",
    "LayerNorm",
    "ORPOLoss",
    "RMSNorm",
    "RotaryEmbedding",
    "SimPOLoss",
    "SwiGLUMLP",
    "VocabParallelHead",
]
