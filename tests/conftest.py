"""Where the suite runs: on a GPU natively, else on the CPU with kernels in Triton's interpreter."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when kernels are defined: before liger_fn is imported
    )

# no test reaches for the network, nor does a trainer report that it ran; read at import too
os.environ["HF_HUB_OFFLINE"] = "1"

import liger_fn
from liger_fn import _launch

if _launch._INTERPRET:
    from tests import interpreter

    interpreter.round_to_nearest_even()
    interpreter.stay_patched()
    interpreter.remember_types()

from tests.table import Row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on one backend, then on the other."""
    with liger_fn.using(request.param):
        yield request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run algebra in plain torch once, and leave to the slow tests what may be left to them.

    That is, in the interpreter, the kernels of rows that are composed of those of others;
    compilations of rows that only have other options than the row of their function; compiled
    Hessians of composed rows.
    """
    kept = []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        row = params.get("row")
        if isinstance(row, Row) and params.get("backend") == "triton":
            if not row.ops:
                continue
            if row.composed and _launch._INTERPRET:
                item.add_marker(pytest.mark.slow)
        if isinstance(row, Row) and "compil" in item.originalname:
            deep = row.composed and params.get("what") == "hessian"
            if row.id != row.covers or deep:
                item.add_marker(pytest.mark.slow)
        kept.append(item)
    items[:] = kept


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def plain(device: torch.device) -> Iterator[None]:
    """Run whole models on a CPU without the interpreter."""
    with liger_fn.using("reference") if device.type == "cpu" else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give kernels the longest block that a row of the table asks for."""
    row = request.getfixturevalue("row") if "row" in request.fixturenames else None
    if row is not None and row.block is not None:
        monkeypatch.setattr(_launch, "_MAX_BLOCK", row.block)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Fixed seeds, fresh compilations, and NaN in all memory left empty."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def llama(device: torch.device) -> Any:
    """A tiny Llama of transformers."""
    from tests import zoo

    return zoo.build("llama").to(device)


@pytest.fixture
def batch(device: torch.device) -> Any:
    """What such a Llama is called with."""
    from tests import zoo
    from tests.adapted import on

    return on(device, zoo.batch("llama"))
