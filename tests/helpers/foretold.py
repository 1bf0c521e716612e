"""Reports in which little is foretold: each place of the map of where the answer flips is simulated
many times.
"""

import pytest

from hvdtrain.planning import flips

TRIED = ("BANDWIDTHS", "WORKERS", "SLOW", "BATCHES", "LOCAL_STEPS")
# What a command runs first, so that its reports foretell of the measured place alone.
FORETELLS_LITTLE = "".join(
    f"from hvdtrain.planning import flips; flips.{name} = ()\n" for name in TRIED
)


def foretell_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has reports of this process foretell of the measured place alone, in this test."""
    for name in TRIED:
        monkeypatch.setattr(flips, name, ())
