"""How much wider an interval of `hvdtrain plan` has to be for each doubling away from what its
calibration measured.

    python tests/benchmarks/widening.py

Reads plan_cells.csv: the jobs of plan.py, measured and predicted, with a calibration of two hosts at
300 Mbit/s and one server. (They are read off .readme/plan-check.svg, which plan.py has drawn.) The
logarithm of predicted over measured is taken to be normal, with a standard deviation that grows by
so much for each doubling. Each slope is estimated with all jobs, and with the jobs farthest away
left out: those at 1 Gbit/s, and those on four hosts. Then it is counted how many of these lie in the
intervals that the others' slope gives them. Prints the slopes as an interval of 90 % has them.
"""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from hvdtrain.planning.calibration import Z90
from hvdtrain.planning.predict import doublings_of_count

CELLS = Path(__file__).with_name("plan_cells.csv")
# What the calibration was made with.
CALIBRATED_GBIT = 0.3
CALIBRATED_HOSTS = 2
CALIBRATED_SERVERS = 1
LEAST_ERROR = 1e-3
RESAMPLED = 400


class Job(NamedTuple):
    """A predicted job.

    Attributes:
        error: the logarithm of predicted over measured seconds.
        of_bandwidth, of_size: how often bandwidth, and hosts and servers, were doubled or halved.
    """

    hosts: int
    gbit: float
    error: float
    of_bandwidth: float
    of_size: float


def read_jobs() -> list[Job]:
    jobs = []
    with CELLS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            hosts = int(row["hosts"])
            servers = int(row["servers"])
            gbit = float(row["mbit"]) / 1e3
            size = doublings_of_count(hosts, CALIBRATED_HOSTS)
            size += doublings_of_count(servers, CALIBRATED_SERVERS)
            error = math.log(float(row["predicted_s"]) / float(row["measured_s"]))
            jobs.append(Job(hosts, gbit, error, abs(math.log2(gbit / CALIBRATED_GBIT)), size))
    return jobs


def fit(jobs: Sequence[Job], distance: Callable[[Job], float]) -> tuple[float, float]:
    """Returns the error at no distance, and what each doubling adds: the likeliest ones."""
    errors = np.array([job.error for job in jobs])
    distances = np.array([distance(job) for job in jobs])

    def unlikelihood(of: Sequence[float]) -> float:
        spread = of[0] + of[1] * distances
        return float(np.sum(np.log(spread) + errors**2 / (2 * spread**2)))

    bounds = [(LEAST_ERROR, 1.0), (0.0, 1.0)]
    found = minimize(unlikelihood, [0.05, 0.01], bounds=bounds)
    least, slope = map(float, found.x)
    return least, slope


def show(
    name: str,
    jobs: Sequence[Job],
    distance: Callable[[Job], float],
    is_far: Callable[[Job], bool],
) -> None:
    near = [job for job in jobs if not is_far(job)]
    far = [job for job in jobs if is_far(job)]
    _, of_all = fit(jobs, distance)
    least, of_near = fit(near, distance)
    draw = np.random.default_rng(0)
    again = []
    for _ in range(RESAMPLED):
        sample = [jobs[number] for number in draw.integers(0, len(jobs), len(jobs))]
        again.append(fit(sample, distance)[1])
    inside = [abs(job.error) <= Z90 * (least + of_near * distance(job)) for job in far]
    rms_near, rms_far = (
        math.sqrt(sum(job.error**2 for job in group) / len(group)) for group in (near, far)
    )
    low, high = np.quantile(again, [0.05, 0.95])
    print(
        f"{name}: {Z90 * of_all:.1%} a doubling ({Z90 * low:.1%} to {Z90 * high:.1%}) with all "
        f"{len(jobs)} jobs; without the {len(far)} farthest {Z90 * of_near:.1%}, and {sum(inside)} "
        f"of these lie in their intervals; errors {rms_near:.1%} near, {rms_far:.1%} far"
    )


def main() -> None:
    jobs = [job for job in read_jobs() if job.hosts <= 4]
    show("bandwidth", jobs, lambda job: job.of_bandwidth, lambda job: job.gbit == 1)
    show("hosts and servers", jobs, lambda job: job.of_size, lambda job: job.hosts == 4)
    for job in read_jobs():
        if job.hosts > 4:
            print(
                f"{job.hosts} hosts, {job.of_size:.0f} doublings: off by {math.expm1(job.error):+.1%}"
            )


if __name__ == "__main__":
    main()
