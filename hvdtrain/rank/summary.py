"""What a finished run came to: summary.json."""

import dataclasses
import socket
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.membership_log import LEFT
from hvdtrain.coordination.synchroniser import Rounds, Synchroniser
from hvdtrain.numerics.clock import PARTS, WAITS
from hvdtrain.numerics.durations import percentile
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.metrics import Recorder, Tally
from hvdtrain.system.memory import peak_rss_mb
from hvdtrain.training.cost import ProcessorTime
from hvdtrain.training.history import History
from hvdtrain.world.load import HostLoad, by_host, spent_by_host


def summarise(
    job: Job, sync: Synchroniser, recorder: Recorder, history: History, first_step: int, processor_s: Sequence[float],
    beside: "HostLoads",
) -> dict[str, Any]:  # fmt: skip
    """The summary of a run over all workers; all call it together, and the one that leads gets it, the others nothing.

    Args:
        first_step: the step of the snapshot that this job went on from, or 0.
        beside: begun before training.
        processor_s: this process's processor seconds, then each server's.
    """
    load = beside.collect()
    workers, all_steps = job.world.workers, history.step - first_step
    own = _own_process(job, sync, recorder.samples, all_steps, processor_s[0])
    counted = {"process": own, "wall_s": history.wall_s, "tally": dataclasses.asdict(recorder.tally)}
    if sync.rounds:
        counted["rounds"] = sync.rounds._replace(distances=_mean(sync.rounds.distances))
    of_workers = sync.group.gather_to_first(counted)
    if not sync.group.leads:
        return {}
    rows = [*of_workers.values()]
    processes = _processes(sync, [row["process"] for row in rows], processor_s[1:])
    lives: list[dict[str, Any]] = next(iter(sync.ask_servers("lives")), [])  # the first server's
    wall = max(row["wall_s"] for row in rows) - history.warm_s
    tally = Tally.of([Tally(**row["tally"]) for row in rows])
    steps, samples = history.step - history.warm_steps, history.samples or tally.samples  # of no evaluation
    last, best = ({} if row is None else row for row in (history.last, history.best))
    sent = sum(process["bytes_sent"] for process in processes)
    reached = [e["train_s"] for e in history.evaluations if e["val_accuracy"] >= job.config.target_accuracy]
    return {
        "status": "done",
        "sprint": job.config.sprint,
        "steps": steps,
        "samples": samples,
        "wall_s": wall,
        "samples_per_s": samples / wall,
        "val_accuracy": last.get("val_accuracy"),
        "val_loss": last.get("val_loss"),
        "best_val_loss": best.get("val_loss"),
        "best_val_accuracy": best.get("val_accuracy"),
        "best_step": best.get("step"),
        "target_accuracy": job.config.target_accuracy,
        "time_to_target_s": reached[0] if reached else None,
        "bytes_sent_per_step": sent / all_steps if all_steps else None,
        **_of_rounds([Rounds(*row["rounds"]) for row in rows if "rounds" in row], sent),
        "peak_rss_mb": sum(process["peak_rss_mb"] for process in processes),
        **_of_steps(tally, len(rows), steps, job.world.size == 1),
        "processes": processes,
        "load": load,
        "workers": workers,
        "lost_workers": sorted({life["rank"] for life in lives if life["why"] not in ("", LEFT)}),  # ranks
        "membership": lives,
        "returned_servers": [back for of_server in sync.ask_servers("returns") for back in of_server],
        "snapshots": history.snapshots,
        "snapshot_s": history.snapshot_s,
        "evaluations": history.evaluations,
    }


def _of_steps(tally: Tally, workers: int, steps: int, is_alone: bool) -> dict[str, Any]:
    """What the steps of all workers came to.

    Args:
        steps: of the job.
        is_alone: no step waits for anybody.
    """
    # The mean over the workers for one step of the job, whatever number of its own each took: it adds up to wall time.
    seconds = {part: spent / workers / steps for part, spent in zip(PARTS, tally.seconds, strict=True)}
    waits = 0.0 if is_alone else sum(seconds[part] for part in WAITS)
    counts = {str(i): n for i, n in enumerate(tally.staleness) if n}
    return {
        "exposed_comm_fraction": waits / sum(seconds.values()) if tally.steps else None,
        "staleness_mean": tally.stale_sum / sum(counts.values()) if counts else None,
        "staleness_max": tally.stale_max if counts else None,
        "staleness_histogram": counts,
        "samples_digest": f"{tally.digest:012x}",
        "step_seconds": seconds,
        "step_time": {
            "skipped": WARM_UP,
            "skipped_mean_s": tally.first_s / tally.first_steps if tally.first_steps else None,
            **{f"p{share}_s": percentile(tally.durations, share / 100) for share in (50, 95, 99)},
        },
    }


def _of_rounds(workers: Sequence[Rounds], sent: int) -> dict[str, Any]:
    """What local steps came to: how many rounds a worker had, what the largest exchange of a step sends, and how far
    workers were from the outer weights, both on average.

    Args:
        sent: bytes, by all processes.
    """
    if not workers:
        return {}
    rounds = fmean(each.number for each in workers)
    distances = _mean([distance for each in workers for distance in each.distances])
    return {
        "rounds": rounds,
        "peak_bytes_per_step": sent / rounds * workers[0].largest if rounds else None,
        "worker_distance": distances[0] if distances else None,
    }


def _mean(values: Sequence[float]) -> list[float]:
    """As a list, empty where there are none."""
    return [fmean(values)] if values else []


class HostLoads:
    """What the hosts of a job do while it trains, evaluations included, beside its own processes."""

    def __init__(self, sync: Synchroniser) -> None:
        self.sync, self.host, self.processor = sync, HostLoad(), ProcessorTime(sync)

    def collect(self) -> dict[str, dict[str, Any]]:
        """By host, see world.load.by_host; on the worker that leads. All workers call it together, and wait for
        nobody in between: who waits spends processor time that others' windows do not have.
        """
        own = {"host": socket.gethostname(), "load": self.host.since(), "spent": self.processor.seconds()}
        workers = self.sync.group.gather_to_first(own)
        if not workers:
            return {}
        rows = [*self.sync.ask_servers("cost"), *workers.values()]
        first = workers[min(workers)]["spent"]  # the first worker's, then each server's
        seconds = [*first[1:], *(row["spent"][0] for row in workers.values())]
        return by_host({row["host"]: row["load"] for row in workers.values()}, spent_by_host(rows, seconds))


def _own_process(job: Job, sync: Synchroniser, samples: int, steps: int, cpu_s: float) -> dict[str, Any]:
    """What this worker has cost since it began: `samples` that it trained on, `cpu_s` of training, `peak_rss_mb` of its
    whole life, and payload `bytes_sent` and `bytes_received`, see Synchroniser.traffic.
    """
    sent, received = sync.traffic(steps)
    return {
        "rank": job.world.rank, "role": "worker", "host": socket.gethostname(), "samples": samples,
        "cpu_s": cpu_s, "peak_rss_mb": peak_rss_mb(), "bytes_sent": sent, "bytes_received": received,
    }  # fmt: skip


def _processes(
    sync: Synchroniser, of_workers: Sequence[dict[str, Any]], servers_s: Sequence[float]
) -> list[dict[str, Any]]:
    """A row as _own_process's for each rank but workers that were lost; `samples` is None of a server. Where a run was
    resumed, rows are of its last start alone.

    Args:
        servers_s: processor seconds of each server.
    """
    rows: list[dict[str, Any]] = [
        {"rank": rank, "role": "server", "samples": None} | cost | {"cpu_s": spent}
        for rank, (cost, spent) in enumerate(zip(sync.ask_servers("cost"), servers_s, strict=True))
    ]
    rows += sorted(of_workers, key=lambda row: row["rank"])
    return [row | {name: round(row[name], 3) for name in ("cpu_s", "peak_rss_mb")} for row in rows]
