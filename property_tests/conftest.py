"""The fixtures of tests/, and how many examples hypothesis draws for each law."""

import os

from hypothesis import HealthCheck, settings

# first of all: it chooses Triton's interpreter where there is no GPU
from tests.conftest import _block as _block
from tests.conftest import _clean as _clean
from tests.conftest import backend as backend

# the fixtures choose a backend and patch modules: once a test is right, every example sees the same.
# A draw takes a millisecond, but the first one loads kernels, on a machine that others may share.
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

settings.register_profile(
    "ci", max_examples=15, deadline=None, derandomize=True, suppress_health_check=SUPPRESSED
)
settings.register_profile(
    "deep", max_examples=1000, deadline=None, suppress_health_check=SUPPRESSED
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
