"""What tests of predictions share."""

import pytest

from hvdtrain.planning import best, predict


@pytest.fixture
def few_draws(monkeypatch):
    """Each prediction draws the calibration three times: for tests of what is predicted, and not of
    how sure it is.
    """
    for module in (predict, best):
        monkeypatch.setattr(module, "DRAWS", 3)
