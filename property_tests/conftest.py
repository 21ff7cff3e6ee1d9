"""The fixtures of tests/, and how many examples hypothesis draws for each law."""

import os

from hypothesis import HealthCheck, Phase, settings

# first of all: it chooses Triton's interpreter where there is no GPU
from tests.conftest import _block as _block
from tests.conftest import _clean as _clean
from tests.conftest import backend as backend

# fixtures choose a backend and patch modules: every example of a test is to see the same. And the
# first draws load what they use, on a machine that others may share.
UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

# the first counterexample will do: in the interpreter a smaller one takes minutes. "deep" finds it.
settings.register_profile(
    "ci",
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=UNCHECKED,
)
settings.register_profile("deep", max_examples=1000, deadline=None, suppress_health_check=UNCHECKED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
