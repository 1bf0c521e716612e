"""Measuring messages: over links of two rates, and again beside other work."""

import subprocess
import sys

import pytest
from planning.test_calibration import make

from hvdtrain.planning import calibrate, probe
from hvdtrain.planning.calibration import Quantity
from hvdtrain.planning.probe import LARGE, RATES, SMALL, ProbedJob, StepSeconds

JOB = ProbedJob(probe.TRANSPORTS["ps"], SMALL)


def measured_beside(monkeypatch, *shares):
    """Returns what a measurement comes to, and how many were made, if other work had these shares
    of the machine during the first, the second, and so on.
    """
    made = []

    def measure_job(job, limit_s):
        made.append(StepSeconds([float(len(made))], [0.0], [0.0]))
        return made[-1]

    monkeypatch.setattr(probe, "_measure_job", measure_job)
    monkeypatch.setattr(probe.Watch, "others", lambda watch: shares[len(made) - 1])
    return probe._measure_undisturbed(JOB, deadline=float("inf")), len(made)


@pytest.mark.parametrize(
    ("shares", "kept", "number"),
    [([0.04], 0, 1), ([0.4, 0.01], 1, 2), ([0.4, 0.6], 0, 2), ([0.6, 0.4], 1, 2)],
)
def test_a_disturbed_measurement_is_made_once_more_and_the_less_disturbed_one_counts(
    monkeypatch, shares, kept, number
):
    found, made = measured_beside(monkeypatch, *shares)
    assert made == number and found.worker_s == [float(kept)] and found.others == shares[kept]


def test_what_is_still_disturbed_has_a_wider_range():
    quiet, busy = (StepSeconds([0.01, 0.012], [0.02, 0.03], [1.0], each) for each in (0.04, 0.5))
    widths = []
    for seconds in (quiet, busy):
        found = calibrate.transports({("ps", SMALL): seconds, ("ps", LARGE): seconds})["ps"]
        widths.append([found[key].high / found[key].low for key in ("message_us", "send_s_per_gb")])
    assert widths[1] == pytest.approx([1.5**2 * width for width in widths[0]])


@pytest.mark.parametrize("name", ["allreduce", "ddp", "ps", "ps-zmq"])
def test_two_rates_tell_the_share_of_a_link_from_what_messages_cost(name):
    """Whatever a step takes at both rates, the difference is the link's."""
    costs = make().transports["allreduce"]
    for reached, beside_s in ((0.9, 0.0), (0.7, 0.2)):
        steps = []
        for gbit in RATES:
            step_s = calibrate._step_over_link_s(name, costs, reached, gbit) + beside_s
            steps.append(StepSeconds([], [], [0.99 * step_s, step_s, 1.01 * step_s]))
        found = calibrate.efficiency_of(name, costs, *steps)
        assert found.value == pytest.approx(reached, abs=0.021)
        assert found.low < reached < found.high


def test_no_efficiency_is_told_where_other_work_or_noise_hides_it():
    costs = {"allreduce": make().transports["allreduce"]}
    slow, fast = (StepSeconds([], [], [wall_s]) for wall_s in (0.5, 0.2))
    of_both = {("allreduce", gbit): each for gbit, each in zip(RATES, (slow, fast), strict=True)}
    assert isinstance(calibrate._efficiencies(costs, of_both)["allreduce"]["efficiency"], Quantity)
    busy = fast._replace(others=0.3)
    assert not calibrate._efficiencies(costs, of_both | {("allreduce", RATES[1]): busy})
    assert not calibrate._efficiencies(costs, {("allreduce", RATES[0]): slow})
    noisy = StepSeconds([], [], [0.2, 0.6])
    assert not calibrate._efficiencies(costs, of_both | {("allreduce", RATES[1]): noisy})


MEASURES_A_LINK = """
seconds = probe._measure_job(probe.ProbedJob(probe.TRANSPORTS["ddp"], probe.LINKED, 0.2), 30.0)
print(seconds.wall_s[0] if seconds else 0)
"""


def seconds_over_a_link(prepared):
    """Returns the seconds of a step over a link, measured in a process with this code before."""
    code = f"from hvdtrain.planning import probe\n{prepared}{MEASURES_A_LINK}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=80, check=True, encoding="utf-8"
    )
    wall_s = float(done.stdout)
    if not wall_s:
        pytest.skip("this user may not make a private network with links")
    return wall_s


A_REAL_RANK = """
import os
from hvdtrain.base.world.network import WIRE_KEY, new_wire_key
os.environ |= probe.ENVIRONMENT | {WIRE_KEY: new_wire_key()}
import torch
import hvdtrain.job.rings.ddp
torch.set_num_threads(1)
probe.LINKED_SAMPLES = 1
"""


@pytest.mark.timeout(90)
def test_ranks_send_over_a_link_of_the_rate_that_is_asked_for():
    """Not faster than it carries the gradients; slower where other work delays them."""
    wall_s = seconds_over_a_link(A_REAL_RANK)
    megabits = 8 * probe.BLOCKS * probe.LINKED / 1e6
    assert megabits / 200 < 1.02 * wall_s < 10


A_RANK_THAT_IS_KILLED_AMID_PUT = """
import time
from multiprocessing.reduction import ForkingPickler

def run_rank(rank, probed, port, folder, enter_link, results):
    enter_link(rank)
    if rank == 0:
        results._wlock.acquire()
        results._writer.send_bytes(ForkingPickler.dumps(probe.StepSeconds([], [], [7.0])))
    time.sleep(60)

probe._run_rank = run_rank
"""


@pytest.mark.timeout(90)
def test_a_worker_may_be_killed_while_it_hands_over_what_it_has_measured():
    """Its result can be read before it has released the queue's lock."""
    assert seconds_over_a_link(A_RANK_THAT_IS_KILLED_AMID_PUT) == 7.0
