"""Comparisons beside other tests, of small models, and reports in which little is foretold: each
place of the map of where the answer flips is simulated many times.
"""

import pytest

from helpers.fork_proxy import FIRST
from hvdtrain.planning import flips

TRIED = ("BANDWIDTHS", "WORKERS", "SLOW", "BATCHES", "LOCAL_STEPS")
# What a command runs first, so that its reports foretell of the measured place alone.
FORETELLS_LITTLE = "".join(
    f"from hvdtrain.planning import flips; flips.{name} = ()\n" for name in TRIED
)
# What a forked rank runs first, so that a sprint has next to no warm-up.
WARMS_UP_SHORTLY = (
    "from hvdtrain.job.training import sprint; from hvdtrain.runs import live; "
    "live.WARM_UP_S = sprint.WARM_UP_S = 0.1"  # `sprint` has its own name for it, for slow steps
)
# What a comparison runs first, so that its sprints are short, are not repeated because other tests
# run beside them, and little is foretold.
BESIDE_TESTS = (
    f"{FORETELLS_LITTLE}"
    f"import os; os.environ[{FIRST!r}] = {WARMS_UP_SHORTLY!r}\n"
    "from hvdtrain.comparing import running; running.beside_others = lambda load: []\n"
)


# What each process runs first, so that families' models are of an eighth of the width that is asked
# for: commands are to be carried out, whatever is computed.
SMALL_MODELS = """
from hvdtrain import models
build = models._build
models._build = lambda name, classes, width, dropout: build(name, classes, width / 8, dropout)
"""
# The same for a command and for the ranks that it starts, after BESIDE_TESTS.
OF_SMALL_MODELS = f"{SMALL_MODELS}\nimport os; os.environ[{FIRST!r}] += {SMALL_MODELS!r}\n"


def foretell_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has reports of this process foretell of the measured place alone, in this test."""
    for name in TRIED:
        monkeypatch.setattr(flips, name, ())
