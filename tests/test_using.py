"""using(): which backend serves a call, where the choice holds, and life without triton."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import liger_fn
import liger_fn.ops._gated
from liger_fn import _launch, using
from tests.table import ROWS, Row

Ran = Callable[[], str]
LAST = {row.covers: row for row in ROWS}.values()  # one row for each function
every_row = pytest.mark.parametrize("row", LAST, ids=lambda row: row.id)
ROOT = Path(__file__).parents[1]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The kernels that swiglu has launched."""
    seen: list[object] = []
    launch = liger_fn.ops._gated.launch

    def spy(kernel: object, *a: object, **kw: object) -> None:
        seen.append(kernel)
        launch(kernel, *a, **kw)

    monkeypatch.setattr(liger_fn.ops._gated, "launch", spy)
    return seen


@pytest.fixture
def ran(launches: list[object], device: torch.device) -> Ran:
    """Call a function of the library; name the backend that served it."""
    one = torch.ones(1, device=device)

    def call() -> str:
        before = len(launches)
        liger_fn.swiglu(one, one)
        return "triton" if len(launches) > before else "reference"

    return call


# -- which backend


def test_without_a_choice_the_device_decides(ran, monkeypatch):
    assert ran() == "triton"  # a GPU, or TRITON_INTERPRET on a CPU
    monkeypatch.setattr(_launch, "_TRITON_DEVICES", set())
    assert ran() == "reference"


@pytest.mark.parametrize("asked", ["reference", "triton"])
def test_the_asked_for_backend_serves_the_block(ran, asked):
    with using(asked):
        assert ran() == asked
        assert ran() == asked
    assert ran() == "triton"


def test_blocks_nest_and_each_restores_the_one_around_it(ran):
    with using("reference"):
        with using("triton"):
            with using("reference"):
                assert ran() == "reference"
            assert ran() == "triton"
        assert ran() == "reference"
        with using("reference"):
            assert ran() == "reference"
        assert ran() == "reference"
    assert ran() == "triton"


def test_an_exception_restores_the_choice_and_passes_through(ran):
    with using("triton"):
        with pytest.raises(ZeroDivisionError), using("reference"):
            raise ZeroDivisionError
        assert ran() == "triton"
    with pytest.raises(KeyError), using("reference"):
        raise KeyError
    assert ran() == "triton"


@pytest.mark.parametrize("name", ["cuda", "", "Triton", None, 0])
def test_another_name_is_refused_before_the_block_runs(ran, name):
    entered = []
    message = f"using: backend must be 'reference' or 'triton', got {name!r}"
    with using("reference"):
        with pytest.raises(ValueError, match=message), using(name):
            entered.append(name)
        assert not entered
        assert ran() == "reference"


@pytest.mark.parametrize("asked", ["reference", "triton"])
def test_backward_inside_the_block_runs_on_its_backend(launches, device, asked):
    # on a GPU autograd runs backward in a thread of its own
    x = torch.ones(2, device=device, requires_grad=True)
    with using(asked):
        y = liger_fn.swiglu(x, x)
        forward = len(launches)
        y.sum().backward()
    assert forward == len(launches) - forward == (1 if asked == "triton" else 0)


# -- where the choice holds


def in_thread(f: Ran) -> str:
    out: list[str] = []
    thread = threading.Thread(target=lambda: out.append(f()))
    thread.start()
    thread.join()
    return out[0]


def test_another_thread_does_not_see_the_choice(ran):
    with using("reference"):
        assert in_thread(ran) == "triton"
        assert ran() == "reference"


def test_a_choice_in_another_thread_does_not_reach_this_one(ran):
    entered, leave = threading.Event(), threading.Event()
    inside: list[str] = []

    def other() -> None:
        with using("reference"):
            inside.append(ran())
            entered.set()
            leave.wait()
            inside.append(ran())

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    assert ran() == "triton"
    with using("triton"):
        assert ran() == "triton"
        leave.set()
        thread.join()
    assert inside == ["reference", "reference"]
    assert ran() == "triton"


def test_tasks_that_interleave_keep_their_own_choices(ran):
    seen: dict[str, list[str]] = {"reference": [], "triton": [], "none": []}

    async def main() -> None:
        turns = [asyncio.Event() for _ in range(3)]

        async def choose(name: str, mine: asyncio.Event, after: asyncio.Event) -> None:
            with nullcontext() if name == "none" else using(name):
                for _ in range(2):
                    await mine.wait()
                    mine.clear()
                    seen[name].append(ran())
                    after.set()

        turns[0].set()
        await asyncio.gather(
            *(choose(name, turns[i], turns[(i + 1) % 3]) for i, name in enumerate(seen))
        )

    asyncio.run(main())
    assert seen == {
        "reference": ["reference"] * 2,
        "triton": ["triton"] * 2,
        "none": ["triton"] * 2,
    }


def test_a_task_inherits_the_choice_it_starts_under_and_keeps_its_own_to_itself(ran):
    seen: list[str] = []

    async def child() -> None:
        seen.append(ran())
        with using("triton"):
            seen.append(ran())

    async def main() -> None:
        with using("reference"):
            await asyncio.create_task(child())
            seen.append(ran())
        seen.append(ran())

    asyncio.run(main())
    assert seen == ["reference", "triton", "reference", "triton"]


# -- where a backend cannot run


@every_row
def test_every_function_refuses_triton_where_it_cannot_run(row):
    if not row.ops:
        pytest.skip("algebra in plain torch")
    args = row.arguments("meta").values()
    message = r"triton backend cannot run on meta tensors; .*use 'reference'"
    with using("triton"), pytest.raises(NotImplementedError, match=message):
        row.fn(*args)


@every_row
def test_every_function_runs_its_reference_on_meta_tensors_unasked(row, device):
    with using("reference"):
        wanted = row.fn(*row.arguments(device).values())
    got = row.fn(*row.arguments("meta").values())
    wanted, got = (t if isinstance(t, tuple) else (t,) for t in (wanted, got))
    for w, g in zip(wanted, got, strict=True):
        assert g.device.type == "meta"
        assert (g.shape, g.dtype) == (w.shape, w.dtype)


@pytest.mark.parametrize(
    ("has_triton", "cure"),
    [(True, "set TRITON_INTERPRET=1 before import"), (False, "install triton")],
)
def test_the_refusal_says_what_would_help(launches, device, monkeypatch, has_triton, cure):
    monkeypatch.setattr(_launch, "_TRITON_DEVICES", set())
    monkeypatch.setattr(_launch, "HAS_TRITON", has_triton)
    one = torch.ones(1, device=device)
    message = f"the triton backend cannot run on {device.type} tensors; {cure}, or use 'reference'"
    with using("triton"), pytest.raises(NotImplementedError, match=message):
        liger_fn.swiglu(one, one)
    assert not launches
    with using("reference"):
        liger_fn.swiglu(one, one)


WITHOUT_TRITON = """
    import importlib.abc
    import sys
    import warnings


    class Blocker(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "triton" or name.startswith("triton."):
                raise ImportError(f"{name} is blocked")
            return None


    sys.meta_path.insert(0, Blocker())

    import torch

    warnings.simplefilter("error")
    import liger_fn

    assert "triton" not in sys.modules
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    y = liger_fn.rms_norm(x, torch.ones(2), 0.0)
    torch.testing.assert_close(y, torch.tensor([0.6, 0.8]) * 2**0.5)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([0.16, -0.12]) * 2**0.5 / 5)
    try:
        with liger_fn.using("triton"):
            liger_fn.rms_norm(x, None)
    except NotImplementedError as error:
        assert "install triton" in str(error), error
    else:
        raise AssertionError("triton is not there")
"""


def test_the_library_works_where_triton_cannot_be_imported():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_TRITON)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout


# -- what is global stays as it is


@pytest.fixture
def _default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def float32_results(row: Row, device: torch.device) -> tuple[torch.Tensor, ...]:
    args = {n: t.float() if t.is_floating_point() else t for n, t in row.arguments(device).items()}
    leaves = [args[n].requires_grad_() for n in row.differentiable]
    y = row.fn(*args.values())
    ys = y if isinstance(y, tuple) else (y,)
    return (*ys, *torch.autograd.grad(ys, leaves, [torch.ones_like(y) for y in ys]))


@every_row
@pytest.mark.usefixtures("_default_float64")
def test_the_default_dtype_changes_no_result_and_is_not_changed(backend, row, device):
    got = float32_results(row, device)
    assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32)
    wanted = float32_results(row, device)
    assert torch.get_default_dtype() == torch.float32
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == w.dtype
        assert torch.equal(g, w)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_device_of_their_tensors():
    one = torch.ones(3, device="cuda:1", requires_grad=True)
    with torch.cuda.device(0), using("triton"):
        y = liger_fn.swiglu(one, one)
        y.sum().backward()
        assert torch.cuda.current_device() == 0
    assert y.device == one.grad.device == one.device
    torch.testing.assert_close(y, torch.nn.functional.silu(one) * one)
