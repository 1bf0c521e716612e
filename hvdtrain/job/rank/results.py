"""The results of a job when its training is over: weights, summary, answers and a trace."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.system import trace
from hvdtrain.data.loader import Batches
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import Synchroniser
from hvdtrain.job.rank.summary import Measured, summarise
from hvdtrain.job.recording.snapshot import BEST, write_tensors
from hvdtrain.job.recording.trace_file import RankTrace, merge_traces, write_rank_trace
from hvdtrain.job.training.clocks import compare_clocks
from hvdtrain.job.training.evaluation import evaluate
from hvdtrain.job.training.loop import Training
from hvdtrain.job.training.progress import TrainingProgress
from hvdtrain.job.training.saver import MANIFEST
from hvdtrain.runs.folder import write_json

WEIGHTS = "snapshots/final.safetensors"
# A bit for each validation image, in order: 1 if the last model classified the image correctly.
ANSWERS = "answers.bin"


def finish(training: Training, measured: Measured, test: Batches | None) -> None:
    """Writes the results of training that is over, and leaves the job.

    All workers call this together.

    Args:
        training: the training that is over.
        measured: measurements around training.
        test: test images, if there are any.
    """
    group = training.sync.group
    group.retry_if_first_lost(lambda: _write_weights(training))
    group.retry_if_first_lost(lambda: _write_results(training, measured, test))
    if group.leads:
        training.progress.lead()
        training.progress.print(f"wrote {training.job.folder}")
    group.close()


def _write_weights(training: Training) -> None:
    """Writes the last weights, before a test loads the best weights into the model."""
    job = training.job
    if training.sync.group.leads and job.config.saves("final"):
        write_tensors(job.folder / WEIGHTS, training.model.state_dict())


def _write_results(training: Training, measured: Measured, test: Batches | None) -> None:
    """Writes the summary, and completes the manifest. All workers call this together."""
    job = training.job
    sync = training.sync
    progress = training.progress
    summary = summarise(job, sync, training.recorder, training.history, measured)
    if test:
        tested = _test_best(training, test)
        # It is empty if another worker led when it was made.
        if summary:
            summary |= tested
    factors = sync.group.gather_to_first([job.world.worker, training.slowdown.achieved()])
    answers = sync.group.gather_to_first(_own_answers(training))
    if job.config.trace:
        finish_trace(job, sync, progress)
    if not (sync.group.leads and summary):
        return
    achieved = {str(worker): factor for worker, factor in factors.values()}
    _add_to_manifest(job.folder, slow={"asked": job.config.slow, "achieved": achieved})
    if not job.config.saves("best"):
        (job.folder / "snapshots" / BEST).unlink(missing_ok=True)
    if all(answers.values()):  # all workers have evaluated
        in_order = "".join(answers[worker] for worker in sorted(answers))
        bits = [int(bit) for bit in in_order]
        write_whole(job.folder / ANSWERS, np.packbits(bits).tobytes())
    write_json(job.folder / "summary.json", summary)
    if not math.isfinite(summary["val_loss"] or 0):
        remedy = "a lower learning rate" if job.config.script else "a lower --lr"
        progress.print(
            f"training diverged: the validation loss is {summary['val_loss']}; try {remedy}"
        )


def _own_answers(training: Training) -> str:
    """Returns a `1` for each validation image that this worker classified correctly, else a `0`.

    Empty if this worker has not evaluated.
    """
    answers = training.recorder.answers
    if answers is None:
        return ""
    return "".join(str(bit) for bit in answers.int().tolist())


def finish_trace(job: Job, sync: Synchroniser, progress: TrainingProgress) -> None:
    """Writes the trace of all ranks into one file, and the ranks' clocks into the manifest.

    All workers call this together. The worker that leads writes the file. The manifest gets how far
    each rank's clock was ahead, and the uncertainty of that.

    Raises:
        OSError: this rank's part cannot be written.
    """
    problem = None
    clocks = compare_clocks(job, sync)
    own_trace = RankTrace(job.world.rank, "worker", trace.spans, trace.counts)
    try:
        write_rank_trace(job.folder, own_trace)
        if sync.group.leads:
            for rank, recorded in enumerate(sync.ask_servers("traced")):
                write_rank_trace(job.folder, RankTrace(rank, "server", **recorded))
    except OSError as error:  # a full disk, say: the other workers wait at the barrier
        problem = error
    sync.group.barrier()
    if problem:
        raise problem
    if not sync.group.leads:
        return
    offsets = {rank: offset for rank, (offset, _) in clocks.items()}
    if not merge_traces(job.folder, offsets):
        progress.print(
            f"no step was traced: none of --trace-steps {job.config.trace_steps} "
            "was taken since the start"
        )
        return
    by_rank = {
        str(rank): {"ahead_us": 1e6 * offset, "uncertainty_us": 1e6 * uncertainty}
        for rank, (offset, uncertainty) in sorted(clocks.items())
    }
    _add_to_manifest(job.folder, clocks=by_rank)


def _add_to_manifest(folder: Path, **entries: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    write_json(folder / MANIFEST, manifest | entries)


def _test_best(training: Training, test: Batches) -> dict[str, float]:
    """Returns the loss and accuracy of the best model over the test images.

    All workers call this together. The model gets the best model's weights.
    """
    job = training.job
    best = job.folder / "snapshots" / BEST
    if training.sync.group.any(not best.is_file()):
        training.progress.print(
            f"{best} is not on storage that all workers share: "
            "`hvdtrain evaluate --split test` does it later"
        )
        return {}
    training.model.load_state_dict(load_file(best, device=str(job.device)))
    loss, accuracy, _ = evaluate(job, training.model, training.sync, test)
    return {"test_loss": loss, "test_accuracy": accuracy}
