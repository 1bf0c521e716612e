"""The summary of a finished run: summary.json."""

import dataclasses
import socket
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.clock import PARTS, WAITS
from hvdtrain.base.numerics.durations import percentile
from hvdtrain.base.system.memory import peak_rss_mb
from hvdtrain.base.world.load import HostLoad, by_host, spent_by_host
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import Rounds, Synchroniser
from hvdtrain.job.recording.metrics import Recorder, Tally
from hvdtrain.job.training.cost import ProcessorTime
from hvdtrain.job.training.history import History
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.membership_log import LEFT


class HostLoads:
    """The load of a job's hosts from now on, evaluations included, beside the job's processes."""

    def __init__(self, sync: Synchroniser) -> None:
        self._sync = sync
        self._host = HostLoad()
        self._processor = ProcessorTime(sync)

    def collect(self) -> dict[str, dict[str, Any]]:
        """Returns the load by host, as world.load.by_host; empty on workers that do not lead.

        All workers call this together. The measurement ends before they wait for each other: a
        worker that waits spends processor time that the other workers' measurements do not have.
        """
        own = {
            "host": socket.gethostname(),
            "load": self._host.since(),
            "spent": self._processor.seconds(),
        }
        workers = self._sync.group.gather_to_first(own)
        if not workers:
            return {}
        processes = [*self._sync.ask_servers("cost"), *workers.values()]
        # Every worker has its own seconds, and then each server's.
        _, *servers_s = workers[min(workers)]["spent"]
        workers_s = [row["spent"][0] for row in workers.values()]
        spent = spent_by_host(processes, [*servers_s, *workers_s])
        loads = {row["host"]: row["load"] for row in workers.values()}
        return by_host(loads, spent)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements around training, for the summary.

    Attributes:
        first_step: the step of the snapshot that this job went on from, or 0.
        processor_s: processor seconds of this process, and then of each server, while it trained.
        host_loads: the load of the hosts, measured from before training.
    """

    first_step: int
    processor_s: Sequence[float]
    host_loads: HostLoads


def summarise(
    job: Job, sync: Synchroniser, recorder: Recorder, history: History, measured: Measured
) -> dict[str, Any]:
    """Returns the summary of a run over all workers; empty on workers that do not lead.

    All workers call this together.
    """
    load = measured.host_loads.collect()
    steps_taken = history.step - measured.first_step
    own_cpu_s, *servers_cpu_s = measured.processor_s
    own: dict[str, Any] = {
        "process": _own_process(job, sync, recorder.samples, steps_taken, own_cpu_s),
        "wall_s": history.wall_s,
        "tally": dataclasses.asdict(recorder.tally),
    }
    if sync.rounds:
        own["rounds"] = sync.rounds._replace(distances=_mean(sync.rounds.distances))
    of_workers = sync.group.gather_to_first(own)
    if not sync.group.leads:
        return {}
    rows = list(of_workers.values())
    processes = _processes(sync, [row["process"] for row in rows], servers_cpu_s)
    bytes_sent = sum(process["bytes_sent"] for process in processes)
    tally = Tally.of([Tally(**row["tally"]) for row in rows])
    rounds = [Rounds(*row["rounds"]) for row in rows if "rounds" in row]
    steps = history.step - history.warm_steps
    # Where there was no evaluation, the history has no samples.
    samples = history.samples or tally.samples
    wall_s = max(row["wall_s"] for row in rows) - history.warm_s
    return {
        "status": "done",
        "sprint": job.config.sprint,
        "steps": steps,
        "samples": samples,
        "wall_s": wall_s,
        "samples_per_s": samples / wall_s,
        **_of_evaluations(history, job.config),
        "bytes_sent_per_step": bytes_sent / steps_taken if steps_taken else None,
        **_of_rounds(rounds, bytes_sent),
        "peak_rss_mb": sum(process["peak_rss_mb"] for process in processes),
        **_of_steps(tally, len(rows), steps, job.world.size == 1),
        "processes": processes,
        "load": load,
        "workers": job.world.workers,
        **_of_membership(sync),
        "snapshots": history.snapshots,
        "snapshot_s": history.snapshot_s,
        "evaluations": history.evaluations or history.reports,
    }


def _of_evaluations(history: History, config: RunConfig) -> dict[str, Any]:
    """Returns the last and the best validation results, and when the target was reached."""
    last = history.last or {}
    best = history.best or {}
    rows = history.evaluations or history.reports
    reached_s = [
        row["train_s"]
        for row in rows
        if config.reaches_target(row["val_accuracy"], row["val_loss"])
    ]
    return {
        "val_accuracy": last.get("val_accuracy", history.reported.get("accuracy")),
        "val_loss": last.get("val_loss", history.reported.get("loss")),
        "best_val_loss": best.get("val_loss"),
        "best_val_accuracy": best.get("val_accuracy"),
        "best_step": best.get("step"),
        "target_accuracy": None if config.target_loss else config.target_accuracy,
        "target_loss": config.target_loss or None,
        "time_to_target_s": reached_s[0] if reached_s else None,
    }


def _of_steps(tally: Tally, workers: int, steps: int, is_alone: bool) -> dict[str, Any]:
    """Returns the time, staleness and samples of the steps of all workers.

    Args:
        tally: the counts of all workers together.
        workers: how many workers there are at the end.
        steps: how many steps the job has taken.
        is_alone: whether the job has one rank, so that no step waits.
    """
    # The mean over the workers for one step of the job, however many steps each worker took: the
    # parts add up to wall time.
    seconds = {
        part: spent / workers / steps for part, spent in zip(PARTS, tally.seconds, strict=True)
    }
    waits = 0.0 if is_alone else sum(seconds[part] for part in WAITS)
    counts = {str(i): n for i, n in enumerate(tally.staleness) if n}
    percentiles = {
        f"p{percent}_s": percentile(tally.durations, percent / 100) for percent in (50, 95, 99)
    }
    return {
        "exposed_comm_fraction": waits / sum(seconds.values()) if tally.steps else None,
        "staleness_mean": tally.stale_sum / sum(counts.values()) if counts else None,
        "staleness_max": tally.stale_max if counts else None,
        "staleness_histogram": counts,
        "samples_digest": f"{tally.digest:012x}",
        "step_seconds": seconds,
        "computing_cpu_seconds": tally.computing_cpu_seconds / workers / steps or None,
        "step_time": {
            "skipped": WARM_UP,
            "skipped_mean_s": tally.first_s / tally.first_steps if tally.first_steps else None,
            **percentiles,
        },
    }


def _of_rounds(workers: Sequence[Rounds], bytes_sent: int) -> dict[str, Any]:
    """Returns the results of local steps; empty without --local-steps.

    They are the mean number of rounds of a worker, the bytes of the largest exchange of a step, and
    the mean distance of the workers from the outer weights.

    Args:
        workers: the rounds of each worker.
        bytes_sent: bytes that all processes have sent.
    """
    if not workers:
        return {}
    rounds = fmean(worker.number for worker in workers)
    distances = [fmean(worker.distances) for worker in workers if worker.distances]
    return {
        "rounds": rounds,
        "peak_bytes_per_step": bytes_sent / rounds * workers[0].largest if rounds else None,
        "worker_distance": fmean(distances) if distances else None,
    }


def _mean(values: Sequence[float]) -> list[float]:
    """Returns a list of the mean; empty if there are no values."""
    return [fmean(values)] if values else []


def _of_membership(sync: Synchroniser) -> dict[str, Any]:
    """Returns which workers were lost, and which servers were killed and came back."""
    lives_by_server = sync.ask_servers("lives")
    # The first server knows the lives of all workers.
    lives: list[dict[str, Any]] = lives_by_server[0] if lives_by_server else []
    returned: list[dict[str, Any]] = []
    for returns_of_server in sync.ask_servers("returns"):
        returned += returns_of_server
    return {
        "lost_workers": sorted({life["rank"] for life in lives if life["why"] not in ("", LEFT)}),
        "membership": lives,
        "returned_servers": returned,
    }


def _own_process(
    job: Job, sync: Synchroniser, samples: int, steps: int, cpu_s: float
) -> dict[str, Any]:
    """Returns the row of this worker's process in `processes` of summary.json.

    The bytes are the payload that Synchroniser.traffic counts, and batch norm's statistics.

    Args:
        samples: how many samples this worker has trained on since it began.
        steps: how many steps the job has taken since.
        cpu_s: processor seconds of training.
    """
    sent, received = sync.traffic(steps)
    statistics_bytes = sync.group.statistics_bytes
    return {
        "rank": job.world.rank,
        "role": "worker",
        "host": socket.gethostname(),
        "samples": samples,
        "cpu_s": cpu_s,
        "peak_rss_mb": peak_rss_mb(),
        "bytes_sent": sent + statistics_bytes,
        "bytes_received": received + statistics_bytes,
    }


def _processes(
    sync: Synchroniser, of_workers: Sequence[dict[str, Any]], servers_cpu_s: Sequence[float]
) -> list[dict[str, Any]]:
    """Returns a row for each rank, servers first. Workers that were lost have none.

    Where a run was resumed, rows are of its last start alone.

    Args:
        of_workers: the rows of the workers, as _own_process returns them.
        servers_cpu_s: processor seconds of each server.
    """
    rows: list[dict[str, Any]] = []
    costs = sync.ask_servers("cost")
    for rank, (cost, cpu_s) in enumerate(zip(costs, servers_cpu_s, strict=True)):
        rows.append({"rank": rank, "role": "server", "samples": None} | cost | {"cpu_s": cpu_s})
    rows += sorted(of_workers, key=lambda row: row["rank"])
    for row in rows:
        row["cpu_s"] = round(row["cpu_s"], 3)
        row["peak_rss_mb"] = round(row["peak_rss_mb"], 3)
    return rows
