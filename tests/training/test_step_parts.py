"""What a step's seconds are called: the same in every mode, whichever thread the optimizer runs in."""

import json
import statistics

import pytest
from helpers.jobs import JOB, adds_up, hvdtrain, steps

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("beside_digits")]

# Much longer than what a busy machine does between two instructions: that much of the optimizer is
# hidden.
SLOW_S = 0.25
# What a rank runs first, so that each step of the optimizer of what workers exchange takes so much
# longer.
SLOW_OPTIMIZER = f"""
import time
from hvdtrain.job.rings import local_update, ring
make = ring.make_exchange_optimizer
def make_slow(*arguments):
    optimizer = make(*arguments)
    step = optimizer.step
    optimizer.step = lambda: (time.sleep({SLOW_S}), step())
    return optimizer
ring.make_exchange_optimizer = local_update.make_exchange_optimizer = make_slow
"""


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("allreduce", []),
        ("sharded", ["--wait-for", "layer"]),
        ("allreduce", ["--local-steps", "2"]),
        ("ddp", ["--local-steps", "2"]),
    ],
)
def test_what_a_step_waits_for_the_optimizer_is_the_optimizer_in_every_mode(
    mode, options, tmp_path
):
    """Also where another thread takes its step while this one waits: after backward, before a
    layer, before a round.
    """
    out = tmp_path / "run"
    done = hvdtrain(
        "train", "--mode", mode, *JOB, *options, "--out", out, ranks=2, first=SLOW_OPTIMIZER
    )
    assert done.returncode == 0, done.stdout
    every = 2 if "--local-steps" in options else 1
    for rank in (0, 1):
        rows = steps(out, rank)[every::every]  # which begin with what the steps before came to
        assert statistics.median(row["optimizer_s"] for row in rows) > 0.5 * SLOW_S
    assert adds_up(json.loads((out / "summary.json").read_text()))


# What a rank runs first, so that each step begins with a wait for weights, which takes longer than
# computing does.
LATE_WEIGHTS = """
import time
from hvdtrain.job.rings.local_update import LocalUpdate
def begin(self, step, lr):
    began = self.stopwatch.now()
    time.sleep(0.1)
    self.waits = [(began, self.stopwatch.now())]
LocalUpdate.begin = begin
"""


def test_what_a_step_waits_before_forward_makes_no_worker_less_slow(tmp_path):
    out = tmp_path / "run"
    options = ["--mode", "single", "--slow", "0:4x", "--out", out]
    done = hvdtrain("train", *JOB, *options, first=LATE_WEIGHTS)
    assert done.returncode == 0, done.stdout
    assert json.loads((out / "manifest.json").read_text())["slow"]["achieved"]["0"] > 3
