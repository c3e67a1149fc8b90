import jaxtyping
import pytest


@pytest.fixture
def unchecked_types():
    """Annotations are checked in tests; a test of our own error messages must get past that check."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
