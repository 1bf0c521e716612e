"""What all tests share."""

import pytest
from hypothesis import HealthCheck, settings

# On a machine that does other work too, an example may take any time: pytest's timeout is limit enough.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.fixture(scope="module")
def one_thread():
    """Let torch compute with one thread: two that wait for each other are slow where cores are busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
