"""Where the time of a worker's step went."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.base import modes
from hvdtrain.reporting.explaining.timeline import (
    BACKWARD,
    BETWEEN,
    COMPUTED,
    FORWARD,
    HIDDEN,
    WAITED,
    Timeline,
)
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.network_bound import link_seconds
from hvdtrain.runs.read import Run
from hvdtrain.runs.schema import read_server_loads

# The parts of a step, in the order in which time is given to them, and what each is.
PARTS = {
    "computing": "loading data, forward, backward, the worker's optimizer, and writing metrics",
    "waiting_for_slowest": (
        "until the slowest worker has computed too; in ps-ssp until a worker far behind has; "
        "at an epoch's end until all have"
    ),
    "links": (
        "the time of a step's bytes on the measured links, pushes and then their answers, "
        "without what computing could have hidden"
    ),
    "server": (
        "the time of the busiest server's optimizer for the pushes of a step, "
        "without what computing could have hidden"
    ),
    "messages": (
        "processor time of sending and receiving, beyond computing, "
        "without what computing could have hidden"
    ),
    "queueing": (
        "waiting of pushes at the busiest server, for a thread or for a bucket that another push "
        "holds"
    ),
    "lost_overlap": (
        "links, server and messages that a step waited for though computing could have hidden them"
    ),
    "other_waiting": "latency, and all other time",
}
COMMUNICATION = ("links", "server", "messages")
NO_SERVER_METRICS = "there are no metrics of servers"


@dataclass(frozen=True)
class Account:
    """The mean step of a run, divided into parts.

    Attributes:
        step_s: mean seconds of all steps that workers took: the sum of the parts.
        parts: seconds of each of PARTS.
        unknown: why this run does not tell a part, by part. Such a part is 0.
        needed_s: seconds that each of COMMUNICATION takes in a step, waited for or not; 0 if that
            is unknown.
        exposed_s: seconds that a step waited for each of COMMUNICATION: its part, and its share of
            the lost overlap.
    """

    step_s: float
    parts: dict[str, float]
    unknown: dict[str, str]
    needed_s: dict[str, float]
    exposed_s: dict[str, float]

    def parts_of_round(self, steps: int, has_servers: bool) -> dict[str, float]:
        """Returns the seconds of each part of a round of local steps.

        Args:
            steps: how many local steps a round has.
            has_servers: whether servers take the outer step. In a ring workers do, and it is among
                the local steps.
        """
        computing = self.parts["computing"]
        slowest = self.parts["waiting_for_slowest"]
        outer = self.exposed_s["server"] if has_servers else 0.0
        parts_of_step = {
            "local_steps": computing,
            "waiting_for_slowest": slowest,
            "exchange": self.step_s - computing - slowest - outer,
        }
        if has_servers:
            parts_of_step["outer_step"] = outer
        return {name: steps * seconds for name, seconds in parts_of_step.items()}


def account(run: Run, timeline: Timeline) -> Account:
    """Divides the mean step of a run into parts.

    The time that a step waited is given to the causes that are known, in this order, until nothing
    is left:

    1. waiting for the slowest worker;
    2. communication that no overlap could have hidden: what it needs beyond the computing that it
       may go on beside;
    3. queueing, which is measured;
    4. lost overlap: the rest of what communication needs;
    5. other waiting.
    """
    means = timeline.means[:, [COMPUTED, WAITED]]
    computing, waited = np.average(means, axis=0, weights=timeline.rates).tolist()
    slowest = _waiting_for_slowest(run, timeline)
    waited_otherwise = max(0.0, waited - slowest)
    known, unknown = _causes(run, timeline, waited_otherwise)
    needed_s = {name: known[name] for name in COMMUNICATION}
    needed = sum(needed_s.values())
    if not needed and any(name in unknown for name in COMMUNICATION):
        unknown["lost_overlap"] = "what communication needs is not known"

    cannot_hide = min(waited_otherwise, max(0.0, needed - _may_hide(run, timeline)))
    after_exposed = waited_otherwise - cannot_hide
    queueing = min(after_exposed, known["queueing"])
    after_queueing = after_exposed - queueing
    lost_overlap = min(after_queueing, needed - cannot_hide)
    parts = dict.fromkeys(PARTS, 0.0) | {
        "computing": computing,
        "waiting_for_slowest": slowest,
        "queueing": queueing,
        "lost_overlap": lost_overlap,
        "other_waiting": after_queueing - lost_overlap,
    }
    parts |= _in_order(cannot_hide, needed_s)
    exposed_s = _in_order(cannot_hide + lost_overlap, needed_s)
    return Account(sum(parts.values()), parts, unknown, needed_s, exposed_s)


def _causes(
    run: Run, timeline: Timeline, waited_s: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the seconds of each cause of waiting, and why some of them are not known.

    A cause that is not known has 0 seconds.

    Args:
        run: the run.
        timeline: its steps.
        waited_s: seconds of a mean step in which a worker waited, but not for slower workers.
    """
    server, queueing = _server(run)
    found = {
        "links": seconds_on_links(run, timeline),
        "server": server,
        "messages": _messages(run, timeline),
        "queueing": queueing,
    }
    known = dict.fromkeys(found, 0.0)
    unknown = {}
    for name, seconds_or_why in found.items():
        if isinstance(seconds_or_why, str):
            unknown[name] = seconds_or_why
        else:
            known[name] = seconds_or_why
    # How far answers come behind pushes is an estimate: at most what was waited counts.
    waited_beyond_links = max(0.0, waited_s - known["links"])
    known["links"] += min(_answers_after_pushes(run, known["links"]), waited_beyond_links)
    return known, unknown


def _waiting_for_slowest(run: Run, timeline: Timeline) -> float:
    """Returns mean seconds of a step in which a worker waited for slower workers."""
    if timeline.in_step:
        computed_s = _mean_steps_of_rounds(run, timeline.computed_s)
        behind_s = (computed_s.max(0) - computed_s).mean(1)
        return float(np.minimum(behind_s, timeline.waited_s.mean(1)).mean())
    if len(timeline.ranks) > 1:
        return float(np.average(waits_for_others(timeline), weights=timeline.rates))
    return 0.0


def _mean_steps_of_rounds(run: Run, computed_s: np.ndarray) -> np.ndarray:
    """Returns the mean step of each round of local steps, [workers, rounds].

    Workers wait only at the end of a round.

    Args:
        run: the run.
        computed_s: [workers, steps].
    """
    local_steps = run.local_steps
    # The first step after warm-up that begins a round.
    first = -WARM_UP % local_steps
    rounds = (computed_s.shape[1] - first) // local_steps
    if not rounds:
        return computed_s
    whole = computed_s[:, first : first + rounds * local_steps]
    return whole.reshape(len(computed_s), rounds, local_steps).mean(2)


def _in_order(seconds: float, needed_s: Mapping[str, float]) -> dict[str, float]:
    """Divides seconds: gives the first what it needs, then the next, until nothing is left."""
    given = {}
    for name, needed in needed_s.items():
        given[name] = min(seconds, needed)
        seconds -= given[name]
    return given


def _may_hide(run: Run, timeline: Timeline) -> float:
    """Returns the seconds of a mean step's computing that its communication may go on beside.

    Gradients leave during backward, as they are computed. With --wait-for layer, weights arrive
    during the next forward too. The time that a worker slept between the two hides nothing, since
    none of its messages is under way then. With --local-steps and fragments, a fragment is hidden
    beside one step; without fragments nothing is hidden.
    """
    if run.local_steps > 1:
        if run.fragments <= 1:
            return 0.0
        computed = np.average(timeline.means[:, COMPUTED], weights=timeline.rates)
        return float(computed) * run.fragments / run.local_steps
    hides = np.maximum(0.0, timeline.means[:, BACKWARD] - _slept_s(run, timeline))
    if run.waits_for_layers:
        hides += timeline.means[:, FORWARD]
    return float(np.average(hides, weights=timeline.rates))


def made_slow(run: Run) -> dict[int, float]:
    """Returns by which factor each worker that was made slow computed longer than it can, by rank.

    Workers whose factor is not known are left out.
    """
    achieved = run.manifest.slow.achieved
    return {run.kind.servers + int(worker): factor for worker, factor in achieved.items()}


def _slept_s(run: Run, timeline: Timeline) -> np.ndarray:
    """Returns mean seconds of a step that each worker slept because it was made slow, [workers].

    See numerics.slowdown.
    """
    slowed = made_slow(run)
    factors = np.array([max(1.0, slowed.get(rank, 1.0)) for rank in timeline.ranks])
    return timeline.means[:, [FORWARD, BACKWARD]].sum(1) * (1 - 1 / factors)


def waits_for_others(timeline: Timeline) -> np.ndarray:
    """Returns seconds of a step that each worker waited for others, [workers].

    This is for workers that are not in step. At the end of an epoch a worker waits for the others'
    last shares. If staleness has a bound, a worker that is ahead waits too. The worker that waited
    least is behind and never held back, so what others waited beyond it was for others.
    """
    between = timeline.means[:, BETWEEN]
    if timeline.bound is None:
        return between
    waits = timeline.means[:, WAITED] - between
    beyond_least = waits - waits.min()
    return between + beyond_least


def seconds_on_links(run: Run, timeline: Timeline, more_servers: Sequence[str] = ()) -> float | str:
    """Returns seconds of a mean step that its bytes take on the busiest link, or why not known.

    Workers that wait for each other all wait for that link. Other workers wait only if they use it.

    Args:
        run: the run.
        timeline: the steps of the run.
        more_servers: hosts with one more server each, as network_bound has them.
    """
    if (run.kind.workers == 1 and not run.kind.servers) or len(run.manifest.hosts) == 1:
        return 0.0
    # [links and directions, workers] of a step of each worker
    busy_s = np.array(link_seconds(run, more_servers))
    if not busy_s.size:
        return "the network between the hosts was not measured"
    busy_s = busy_s[:, [rank - run.kind.servers for rank in timeline.ranks]]
    rates = timeline.rates
    wait_for_each_other = timeline.in_step or timeline.bound is not None
    users = len(rates) if wait_for_each_other else (busy_s > 0).sum(1)
    return float((users * (busy_s @ rates)).max() / rates.sum())


def _answers_after_pushes(run: Run, links_s: float) -> float:
    """Returns how much longer than with all bytes going both ways at once the links take, at most.

    In lockstep with servers, the answers of a bucket leave when its last push has come. If a server
    has K buckets of one size, the last bucket's answers come behind all pushes: 1/K of the link's
    time. It is less if a worker that was answered first pushes beside the others' answers.

    Args:
        run: the run.
        links_s: seconds of a step on the links, if all bytes went both ways at once.
    """
    weights = run.manifest.trained_parameters or run.manifest.parameters
    bucket_mb = run.manifest.bucket_mb
    is_lockstep = run.kind.mode in modes.names() and modes.declared(run.kind.mode).lockstep
    if not (run.kind.servers and is_lockstep and weights and bucket_mb):
        return 0.0
    bytes_at_once = 4 * weights / run.kind.servers / run.fragments
    buckets = math.ceil(bytes_at_once / (bucket_mb * 2**20))
    return links_s / max(1, buckets)


def _server(run: Run) -> tuple[float | str, float | str]:
    """Returns what a mean step waits at servers, each in seconds or why it is not known.

    The pushes of a step are under way at the same time, and wait at the same time. If every answer
    comes later by so much, the step ends later by so much, however many pushes there are. This is
    an estimate: the last of many pushes that come at once waits for longer than their mean. And of
    a model so large that some pushes only leave when others are answered, a step waits more than
    once.

    Returns:
        The time of a step in the busiest server's optimizer, and the mean time that a push waits in
        the server where that is longest.
    """
    if not run.kind.servers:
        return 0.0, 0.0
    loads_by_server = [read_server_loads(run.folder, rank) for rank in range(run.kind.servers)]
    # The last line of a server has what it has counted since it began.
    totals = [loads[-1] for loads in loads_by_server if loads]
    if not totals:
        return NO_SERVER_METRICS, NO_SERVER_METRICS
    queued_s = max(load.queued_s / max(1, load.pushes) for load in totals)
    steps = _steps_of_last_start(run)
    if not steps:
        return NO_SERVER_METRICS, queued_s
    return max(load.applying_s for load in totals) / steps, queued_s


def _steps_of_last_start(run: Run) -> int:
    """Returns the steps in which processes and servers have counted: those of the last start."""
    before = run.manifest.parts[-1].after_step if run.manifest.parts else 0
    return max(0, (run.summary.steps or 0) - before)


def _messages(run: Run, timeline: Timeline) -> float | str:
    """Returns processor seconds of a mean step beyond computing, or why they are not known."""
    if run.kind.workers == 1 and not run.kind.servers:
        return 0.0
    if run.spins:
        return (
            "over MPI processes spin while they wait, "
            "so that processor time tells nothing of messages"
        )
    if run.summary.lost_workers:
        return "workers were lost, and with them how much processor time they took"
    steps = _steps_of_last_start(run)
    workers = [process for process in run.summary.processes if process.role == "worker"]
    if run.manifest.threads_per_worker != 1 or not workers or not steps:
        return (
            "not known: messages can be told from computing only if each worker computes with one "
            "thread (--threads 1)"
        )
    if field_value(run, "slow.asked") != "none" and len(made_slow(run)) < run.kind.workers:
        return "a worker that is made slow by --slow sleeps, and this run does not tell how long"
    spent_s = sum(process.cpu_s for process in workers) / run.kind.workers / steps
    awake_s = timeline.means[:, COMPUTED] + timeline.means[:, HIDDEN] - _slept_s(run, timeline)
    # A worker that is not in step counts by how many steps it took, as it does in `spent_s`.
    steps_of_workers = [len(table) for table in timeline.each_step]
    computing_s = np.average(awake_s, weights=steps_of_workers)
    return max(0.0, spent_s - float(computing_s))
