"""The names that import transformers: a callback for its Trainer and a one-line loader."""

from __future__ import annotations

from typing import Any

import transformers

from liger_fn.nn.adapters.adapt import adapt


class AdaptCallback(transformers.TrainerCallback):
    """Adapt the model of a Trainer once it has one: for trainers that load it from a name.

    Args:
        switches: as in `adapt`.
    """

    def __init__(self, **switches: Any) -> None:
        self.switches = switches

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kw: Any
    ) -> None:
        """Adapt the model."""
        adapt(model, **self.switches)


class AutoModelForCausalLM:
    """`transformers.AutoModelForCausalLM` whose models come adapted."""

    @staticmethod
    def from_pretrained(*args: Any, **kw: Any) -> Any:
        """Load a model as transformers does, then `adapt` it."""
        return adapt(transformers.AutoModelForCausalLM.from_pretrained(*args, **kw))

    @staticmethod
    def from_config(*args: Any, **kw: Any) -> Any:
        """Make a model as transformers does, then `adapt` it."""
        return adapt(transformers.AutoModelForCausalLM.from_config(*args, **kw))
