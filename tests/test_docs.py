"""What the documentation says runs, and names everything that is public."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

import liger_fn

ROOT = Path(liger_fn.__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
FUNCTIONS = [name for name in liger_fn.__all__ if not isinstance(getattr(liger_fn, name), type)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_docstring_gives_what_it_says(name):
    scope = {"torch": torch, "liger_fn": liger_fn, **vars(liger_fn)}
    found = doctest.DocTestFinder(recurse=False).find(getattr(liger_fn, name), name, globs=scope)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    with liger_fn.using("reference"):
        for test in found:
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in ("custom_vjp", "using")])
def test_every_function_documents_itself(name):
    doc = getattr(liger_fn, name).__doc__
    assert re.match(r"[A-Z].*\.\n\n", doc), "one line, then a blank one"
    for part in ("Returns:", "Raises:", "Example:")[: 2 if "with_metrics" in name else 3]:
        assert part in doc


@pytest.mark.parametrize("name", liger_fn.__all__)
def test_the_readme_names_everything_public(name):
    assert re.search(rf"`[^`]*\b{name}\b", README)


def test_the_first_lines_of_the_readme_run():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    scope: dict[str, object] = {}
    with liger_fn.using("reference"):
        exec(code[1], scope)
    assert scope["each"]["head"].shape == (8, 1000, 64)  # type: ignore[index]  # a dict


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_readme_links_to_every_page_and_its_code_runs(page):
    assert f"(docs/{page.name})" in README
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        if "transformers" in code:
            pytest.importorskip("transformers")
        with liger_fn.using("reference"):
            exec(code, {})


# Mllama calls its own layers by the old name
@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")
@pytest.mark.usefixtures("plain")
def test_the_page_of_families_is_what_report_says():
    pytest.importorskip("transformers")
    from tests import families, zoo

    if zoo.OLD:
        pytest.skip("the page is printed with transformers 5")
    assert (ROOT / "docs/families.md").read_text() == families.page() + "\n"
