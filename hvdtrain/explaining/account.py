"""Where the time of a worker's step went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.explaining.timeline import BACKWARD, BETWEEN, COMPUTED, FORWARD, WAITED, Timeline
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.network_bound import link_seconds
from hvdtrain.runs.read import Run
from hvdtrain.runs.schema import read_server_loads

# The parts of a step, in the order in which they are told from each other, and what each is.
PARTS = {
    "computing": "data, forward, backward, optimizer and writing down what the step came to",
    "waiting_for_slowest": "until the slowest worker had computed too, or one far behind, or all at an epoch's end",
    "wire": "what the bytes of a step take on the measured links, as far as computing could not have hidden it",
    "server": "what the busiest server's optimizer takes for the pushes of a step, as far as that could not be hidden",
    "messages": "processor time of sending and receiving, beyond computing, as far as that could not be hidden",
    "queueing": "what a push waited at the busiest server for a thread, and for its bucket, which another's was in",
    "lost_overlap": "wire, server and messages that a step waited for though computing could have hidden them",
    "other_waiting": "latency, and what nothing above tells",
}
COMMUNICATION = ("wire", "server", "messages")
NO_SERVER_METRICS = "there are no metrics of servers"


@dataclass(frozen=True)
class Account:
    """
    Attributes:
        step_s: mean seconds of all steps that workers took, which is that of the job's steps too; the sum of the parts.
        parts: seconds of each of PARTS.
        unknown: parts that this run does not tell, which are 0, and why.
        needed_s: seconds that each of COMMUNICATION takes in a step, waited for or not; 0 where that is unknown.
        exposed_s: seconds that a step waited for each of them: its part, and its share in the lost overlap.
    """

    step_s: float
    parts: dict[str, float]
    unknown: dict[str, str]
    needed_s: dict[str, float]
    exposed_s: dict[str, float]

    def of_round(self, steps: int, has_servers: bool) -> dict[str, float]:
        """Seconds of a round of so many local steps. In a ring the outer step is a part of the exchange."""
        step, slowest = self.parts["computing"], self.parts["waiting_for_slowest"]
        outer = {"outer_step": self.exposed_s["server"]} if has_servers else {}
        exchange = self.step_s - step - slowest - sum(outer.values())
        told = {"local_steps": step, "waiting_for_slowest": slowest, "exchange": exchange, **outer}
        return {name: steps * seconds for name, seconds in told.items()}


def account(run: Run, timeline: Timeline) -> Account:
    """Divide the mean step. What it waited is given to the causes that are known, as far as it goes.

    Behind waiting for the slowest comes communication that no overlap could have hidden, which is what it needs beyond
    the computing that it may go on beside; then queueing, which is measured; and of what is left then, as much as
    communication needs is lost overlap.
    """
    both = np.average(timeline.means[:, [COMPUTED, WAITED]], axis=0, weights=timeline.rates)
    computing, waited = both.tolist()
    slowest = 0.0
    if timeline.in_step:
        computed_s = _each_exchange(run, timeline.computed_s)
        behind = (computed_s.max(0) - computed_s).mean(1)
        slowest = float(np.minimum(behind, timeline.waited_s.mean(1)).mean())
    elif len(timeline.ranks) > 1:
        slowest = float(np.average(waits_for_others(timeline), weights=timeline.rates))
    parts = dict.fromkeys(PARTS, 0.0) | {"computing": computing, "waiting_for_slowest": slowest}

    server, queueing = _server(run)
    told = {"wire": wire(run, timeline), "server": server, "messages": _messages(run, timeline), "queueing": queueing}
    unknown = {name: why for name, why in told.items() if isinstance(why, str)}
    known = {name: 0.0 if isinstance(seconds, str) else seconds for name, seconds in told.items()}
    needed_s = {name: known[name] for name in COMMUNICATION}
    needed = sum(needed_s.values())
    left = max(0.0, waited - slowest)
    cannot_hide = min(left, max(0.0, needed - _may_hide(run, timeline)))
    left -= cannot_hide
    parts["queueing"] = min(left, known["queueing"])
    left -= parts["queueing"]
    if not needed and any(name in unknown for name in COMMUNICATION):
        unknown["lost_overlap"] = "what communication needs is not known"
    parts["lost_overlap"] = min(left, needed - cannot_hide)
    parts["other_waiting"] = left - parts["lost_overlap"]
    parts |= _in_order(cannot_hide, needed_s)
    exposed_s = _in_order(cannot_hide + parts["lost_overlap"], needed_s)
    return Account(sum(parts.values()), parts, unknown, needed_s, exposed_s)


def _each_exchange(run: Run, computed_s: np.ndarray) -> np.ndarray:
    """[workers, rounds] of [workers, steps]: the mean step of each round, at whose end alone workers wait."""
    every = run.local_steps
    first = -WARM_UP % every  # of a round
    whole = (computed_s.shape[1] - first) // every
    if not whole:
        return computed_s
    return computed_s[:, first : first + whole * every].reshape(len(computed_s), whole, every).mean(2)


def _in_order(seconds: float, needed_s: Mapping[str, float]) -> dict[str, float]:
    """These seconds, given to the first as far as it needs them, then to the next."""
    given = {}
    for name, needed in needed_s.items():
        given[name] = min(seconds, needed)
        seconds -= given[name]
    return given


def _may_hide(run: Run, timeline: Timeline) -> float:
    """Seconds of a mean step's computing that its communication may go on beside: of backward, in which gradients
    leave as they are made, and with servers of the next forward too, which waits for weights layer by layer. What a
    worker slept between the two hides nothing: no message of it is under way then. With --local-steps nothing is hidden
    but what a fragment takes, beside one step.
    """
    if run.local_steps > 1:
        computed = np.average(timeline.means[:, COMPUTED], weights=timeline.rates)
        return float(computed) * run.fragments / run.local_steps if run.fragments > 1 else 0.0
    forward, backward = timeline.means[:, [FORWARD, BACKWARD]].T
    hides = np.maximum(0.0, backward - _slept_s(run, timeline)) + (forward if run.kind.servers else 0.0)
    return float(np.average(hides, weights=timeline.rates))


def made_slow(run: Run) -> dict[int, float]:
    """By rank, how many times as long as it can a worker computed, of those that are known to have been made slow."""
    return {run.kind.servers + int(worker): factor for worker, factor in run.manifest.slow.achieved.items()}


def _slept_s(run: Run, timeline: Timeline) -> np.ndarray:
    """[workers] mean seconds of a step that each slept, of those that were made slow: see numerics.slowdown."""
    slowed = made_slow(run)
    factors = np.array([max(1.0, slowed.get(rank, 1.0)) for rank in timeline.ranks])
    return timeline.means[:, [FORWARD, BACKWARD]].sum(1) * (1 - 1 / factors)


def waits_for_others(timeline: Timeline) -> np.ndarray:
    """[workers] seconds of a step that each waited for others, of workers that are not in step: at the end of an epoch
    for their last shares and, where staleness has a bound, as long as it waited beyond the one that waited least, which
    is behind and never held back.
    """
    between = timeline.means[:, BETWEEN]
    waits = timeline.means[:, WAITED] - between
    return between + (0.0 if timeline.bound is None else waits - waits.min())


def wire(run: Run, timeline: Timeline, more_servers: Sequence[str] = ()) -> float | str:
    """Seconds of a mean step that its bytes take on the busiest link, with more_servers as network_bound has them.
    Workers that wait for each other all wait for it, others only where they use it.
    """
    if (run.kind.workers == 1 and not run.kind.servers) or len(run.manifest.hosts) == 1:
        return 0.0
    busy, taken = np.array(link_seconds(run, more_servers)), timeline.rates
    if not busy.size:
        return "the network between the hosts was not measured"
    users = len(taken) if timeline.in_step or timeline.bound is not None else (busy > 0).sum(1)
    return float((users * (busy @ taken)).max() / taken.sum())


def _server(run: Run) -> tuple[float | str, float | str]:
    """Seconds of a mean step that the busiest server's optimizer takes, and the mean seconds that a push waits in the
    server where that is longest.

    Pushes of a step are under way at the same time, and wait at the same time: where every answer comes later by so
    much, the step ends later by so much, however many there are. It is an estimate: the last of many that come at once
    waits for longer than their mean, and of a model so large that some pushes only leave when others are answered, a
    step waits more than once.
    """
    if not run.kind.servers:
        return 0.0, 0.0
    every = [read_server_loads(run.folder, rank) for rank in range(run.kind.servers)]
    totals = [loads[-1] for loads in every if loads]  # what each has counted in all
    if not totals:
        return NO_SERVER_METRICS, NO_SERVER_METRICS
    steps, queued = _steps_of_last_start(run), max(load.queued_s / max(1, load.pushes) for load in totals)
    return max(load.applying_s for load in totals) / steps if steps else NO_SERVER_METRICS, queued


def _steps_of_last_start(run: Run) -> int:
    """In which processes counted what they cost, and servers what they did."""
    before = run.manifest.parts[-1].after_step if run.manifest.parts else 0
    return max(0, (run.summary.steps or 0) - before)


def _messages(run: Run, timeline: Timeline) -> float | str:
    if run.kind.workers == 1 and not run.kind.servers:
        return 0.0
    threads, steps = run.manifest.threads_per_worker, _steps_of_last_start(run)
    workers = [process for process in run.summary.processes if process.role == "worker"]
    if threads != 1 or not workers or not steps:
        return "processor time tells computing from messages only where a worker computes with one thread"
    if field_value(run, "slow.asked") != "none" and len(made_slow(run)) < run.kind.workers:
        return "a worker that is made slow by --slow sleeps, and this run does not tell how long"
    spent = sum(process.cpu_s for process in workers) / run.kind.workers / steps
    awake = timeline.means[:, COMPUTED] - _slept_s(run, timeline)
    # As processes have spent it: a worker that is not in step counts by how many steps it took.
    computing_s = np.average(awake, weights=list(map(len, timeline.each_step)))
    return max(0.0, spent - float(computing_s))
