"""Print docs/families.md: what `report` says of a tiny model of each family.

python -m tests.families > docs/families.md
"""

from __future__ import annotations

from liger_fn.nn.adapters import adapt, report
from liger_fn.nn.adapters.fingerprint import Affine, Gate, Glu, Norm, Rope, Spec
from tests import zoo

HEAD = """\
# Families of Hugging Face models

<!-- python -m tests.families > docs/families.md, with transformers 5; a test holds it to that -->

`adapt(model)` has no list of families: it runs each module beside the functions of liger_fn, and
replaces what computes the same. This page says what it finds in the models that the tests hold to
their plain selves, loss and gradients. In any other model it replaces what it finds there:
`print(report(model))` says what, and why not the rest.

| model | norms | gated layers | rotation | loss without logits | left as it is |
|---|---|---|---|---|---|
"""
LOSS = "`fused_linear_ce`"


def function(spec: Spec) -> str:
    """The call that takes the place of a module."""
    match spec:
        case Norm():
            offset = f"offset={spec.offset}, " if spec.offset else ""
            return f'`rms_norm({offset}casting="{spec.casting}")`'
        case Affine():
            return "`layer_norm`"
        case Glu() | Gate():
            packed = isinstance(spec, Gate) or len(spec.parts) == 2
            name = {"silu": "swiglu", "gelu_tanh": "geglu", "gelu": "geglu"}[spec.act]
            of = " of experts" if isinstance(spec, Gate) else ""
            return f"`{name}{'_packed' if packed else ''}`{of}"
        case Rope():
            return f"`rope`, {spec.layout}"


def line(name: str) -> str:
    """The row of one family."""
    model = zoo.build(name)
    found, columns = report(model), ("layer_norm", "rms_norm", "glu", "rope")
    cells = {switch: list[str]() for switch in columns}
    for row in found.rows:
        if not isinstance(row.spec, str) and function(row.spec) not in cells[row.switch]:
            cells[row.switch].append(function(row.spec))
    scale, cap = adapt(model)(**zoo.batch(name)).logits.form()
    loss = [LOSS, *(["scale"] if scale != 1.0 else []), *(["soft cap"] if cap is not None else [])]
    norms = cells["rms_norm"] + cells["layer_norm"]
    left = sorted({row.name for row in found.skipped})
    parts = (norms, cells["glu"], cells["rope"], loss, left)
    return f"| {type(model).__name__} | {' | '.join(', '.join(part) for part in parts)} |"


def page() -> str:
    """The whole page; variants of one model that come out alike are one row."""
    lines = dict.fromkeys(line(name) for name in zoo.FAMILIES)
    return HEAD + "\n".join(lines)


if __name__ == "__main__":
    print(page())
