"""Hugging Face models on liger_fn: adopt it in one line, undo it in one line.

    model = adapt(AutoModelForCausalLM.from_pretrained(name))
    restore(model)

Nothing global changes: no class, function or module of torch or transformers, no other model. What
a module computes is found by running it, not by its name: see `report`.
"""

from typing import Any

from liger_fn.nn.adapters.adapt import AdapterError as AdapterError
from liger_fn.nn.adapters.adapt import adapt as adapt
from liger_fn.nn.adapters.adapt import adapted as adapted
from liger_fn.nn.adapters.adapt import restore as restore
from liger_fn.nn.adapters.head import DeferredLogits as DeferredLogits
from liger_fn.nn.adapters.logprobs import token_logprobs as token_logprobs
from liger_fn.nn.adapters.survey import Report as Report
from liger_fn.nn.adapters.survey import report as report
from liger_fn.nn.adapters.verify import CheckResult as CheckResult
from liger_fn.nn.adapters.verify import check_adapter as check_adapter

__all__ = [
    "AdaptCallback",
    "AdapterError",
    "AutoModelForCausalLM",
    "CheckResult",
    "DeferredLogits",
    "Report",
    "adapt",
    "adapted",
    "check_adapter",
    "report",
    "restore",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    """Import transformers only when a name is asked for that needs it."""
    if name in ("AdaptCallback", "AutoModelForCausalLM"):
        from liger_fn.nn.adapters import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
