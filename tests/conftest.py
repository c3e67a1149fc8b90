import os

# One thread per process: the matrices of the tests are small, and two pools of threads on a busy machine wait for each
# other a hundred times longer than they work. Set before torch is loaded, and passed on to subprocesses.
os.environ["OMP_NUM_THREADS"] = "1"

import jaxtyping
import pytest


@pytest.fixture
def unchecked_types():
    """Annotations are checked in tests; a test of our own error messages must get past that check."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
