"""What a call costs the host, counted in calls of our own Python functions: a clock would flake.

In the sizes of decoding a call takes as long as its Python does. What the kernels' own launch costs
is Triton's, and left out; fused heads wait for their products instead.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_fn
from liger_fn import ops, using
from tests.table import Row, losses, norms_and_gates

HOME = str(Path(liger_fn.__file__).parent)
# functions entered by forward without gradients, by forward with them, by forward and backward.
# From Python 3.12 on a list comprehension is no call, so that there are fewer
MOST = {
    "rms_norm": (25, 31, 55),
    "add_rms_norm": (29, 35, 62),
    "layer_norm": (26, 32, 59),
    "group_norm": (26, 32, 63),
    "dyt": (27, 33, 61),
    "swiglu": (24, 30, 53),
    "swiglu_packed": (23, 29, 52),
    "geglu": (25, 31, 54),
    "geglu_packed": (24, 30, 53),
    "relu2": (20, 26, 47),
    "rope": (42, 48, 86),
    "mrope": (45, 51, 89),
    "softmax": (19, 25, 44),
    "sparsemax": (21, 27, 46),
    "kl_div": (39, 45, 68),
    "jsd": (39, 45, 68),
    "tvd": (39, 45, 68),
    "cross_entropy": (43, 49, 73),
    "cross_entropy_with_stats": (45, 51, 75),
}


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do not run: nobody reads what they would write."""
    names = [f.name for f in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}.")]
    for module in map(importlib.import_module, ["liger_fn._math", *names]):
        if hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", lambda *_, **__: None)


def entered(f: Callable[[], Any]) -> list[str]:
    """Name the functions of the library that a call enters when all is warm."""
    f()
    names: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize(
    "row", [r for r in (*norms_and_gates.ROWS, *losses.ROWS) if r.ops], ids=lambda row: row.id
)
def test_a_call_enters_no_more_functions_than_it_needs(row: Row, device: torch.device):
    args = row.arguments(device)

    def forward() -> torch.Tensor:
        y = row.fn(*args.values())
        return y[0] if isinstance(y, tuple) else y

    with using("triton"):
        found = [entered(forward)]
        leaves = [args[name].requires_grad_() for name in row.differentiable]
        d = torch.ones_like(forward())
        found.append(entered(forward))
        # on a GPU backward runs in a thread of its own, which is not seen here
        found.append(entered(lambda: torch.autograd.grad(forward(), leaves, d, allow_unused=True)))
    for names, most in zip(found, MOST[row.covers], strict=True):
        assert 0 < len(names) <= most, names
