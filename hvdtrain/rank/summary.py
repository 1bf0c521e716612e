"""What a finished run came to: summary.json."""

import resource
from typing import Any

from hvdtrain.modes._synchroniser import Synchroniser
from hvdtrain.numerics.clock import PHASES
from hvdtrain.runs.metrics import Recorder, Tally
from hvdtrain.training.history import History
from hvdtrain.world.job import Job


def summarise(job: Job, sync: Synchroniser, recorder: Recorder, history: History) -> dict[str, Any]:
    """The summary of a run over all workers; every worker calls it together, and gets the same."""
    workers = job.world.workers
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    there, rows = sync.group.gather([rss, history.wall_s, *recorder.tally.row()])
    rss_mb, wall = rows[:, :2].T
    tally = Tally.of(rows[:, 2:].tolist())
    seconds = [spent / tally.steps for spent in tally.seconds]
    counts = {str(i): n for i, n in enumerate(tally.staleness) if n}
    last, best = history.evaluations[-1], history.best
    assert best is not None
    reached = [e["train_s"] for e in history.evaluations if e["val_accuracy"] >= job.config.target_accuracy]
    return {
        "status": "done",
        "steps": history.step,
        "left_out_share": tally.left_out / tally.steps,  # of all workers' steps
        "samples": history.samples,
        "wall_s": wall.max().item(),
        "samples_per_s": history.samples / wall.max().item(),
        "val_accuracy": last["val_accuracy"],
        "val_loss": last["val_loss"],
        "best_val_loss": best["val_loss"],
        "best_val_accuracy": best["val_accuracy"],
        "best_step": best["step"],
        "target_accuracy": job.config.target_accuracy,
        "time_to_target_s": reached[0] if reached else None,
        "exposed_comm_fraction": seconds[PHASES.index("comm")] / sum(seconds),
        "bytes_sent_per_step": sync.bytes_per_step,
        "staleness_mean": tally.stale_sum / sum(counts.values()) if counts else None,
        "staleness_max": tally.stale_max if counts else None,
        "staleness_histogram": counts,
        "peak_rss_mb": rss_mb.sum().item() + sum(memory for _, memory in sync.servers()),
        "samples_digest": f"{tally.digest:012x}",
        "step_seconds": dict(zip(PHASES, seconds, strict=True)),
        "workers": workers,
        "lost_workers": [job.world.servers + worker for worker in range(workers) if worker not in there],  # ranks
        "snapshots": history.snapshots,
        "snapshot_s": history.snapshot_s,
        "evaluations": history.evaluations,
    }
