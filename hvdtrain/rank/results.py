"""What a job leaves when its training is over: weights, summary, what the manifest lacked, and a trace."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import nn

from hvdtrain.coordination.group import Group
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.synchroniser import Synchroniser
from hvdtrain.data.loader import Batches
from hvdtrain.rank.summary import HostLoads, summarise
from hvdtrain.runs.folder import write_json
from hvdtrain.runs.snapshot import BEST, write_tensors
from hvdtrain.runs.trace_file import RankTrace, merge_traces, write_rank_trace
from hvdtrain.system import trace
from hvdtrain.training.clocks import compare_clocks
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.loop import Training
from hvdtrain.training.progress import TrainingProgress
from hvdtrain.training.saver import MANIFEST

WEIGHTS = "snapshots/final.safetensors"
ANSWERS = "answers.bin"  # a bit for each validation image, in their order: whether the last model answered it rightly


def finish(
    training: Training, processor_s: Sequence[float], beside: HostLoads, first_step: int, test: Batches | None
) -> None:
    """Write the results of training that is over, and leave the others. All workers call it together.

    Args:
        processor_s, beside, first_step: as summary.summarise.
        test: test images, where there are some.
    """
    group = training.sync.group
    group.retry_if_first_lost(lambda: _write_weights(training))
    group.retry_if_first_lost(lambda: _write_results(training, processor_s, beside, first_step, test))
    if group.leads:
        training.progress.lead()
        training.progress.print(f"wrote {training.job.folder}")
    group.close()


def _write_weights(training: Training) -> None:
    """Before tests, for which the model takes others."""
    job = training.job
    if training.sync.group.leads and job.config.saves("final"):
        write_tensors(job.folder / WEIGHTS, training.model.state_dict())


def _write_results(
    training: Training, processor_s: Sequence[float], beside: HostLoads, first_step: int, test: Batches | None
) -> None:
    """Write the summary, and what the manifest lacks. All workers call it together."""
    job, sync, progress = training.job, training.sync, training.progress
    summary = summarise(job, sync, training.recorder, training.history, first_step, processor_s, beside)
    if test:
        tested = _test_best(job, sync.group, training.model, test, progress)
        summary |= tested if summary else {}  # it is empty where another led when it was made
    factors = sync.group.gather_to_first([job.world.worker, training.slowdown.achieved()])
    own = training.recorder.answers
    answers = sync.group.gather_to_first("" if own is None else "".join(map(str, own.int().tolist())))
    if job.config.trace:
        finish_trace(job, sync, progress)
    if sync.group.leads and summary:
        achieved = {str(worker): factor for worker, factor in factors.values()}
        _add_to_manifest(job.folder, slow={"asked": job.config.slow, "achieved": achieved})
        if not job.config.saves("best"):
            (job.folder / "snapshots" / BEST).unlink(missing_ok=True)
        if all(answers.values()):  # `1` for each that was right, where all workers have evaluated
            bits = [int(answer) for _, of_worker in sorted(answers.items()) for answer in of_worker]
            (job.folder / ANSWERS).write_bytes(np.packbits(bits).tobytes())
        write_json(job.folder / "summary.json", summary)
        if not math.isfinite(summary["val_loss"] or 0):
            progress.print(f"training diverged: the validation loss is {summary['val_loss']}; try a lower --lr")


def finish_trace(job: Job, sync: Synchroniser, progress: TrainingProgress) -> None:
    """Put what all ranks recorded into one file, on the worker that leads, and into the manifest, by rank, how far its
    clock was ahead, and how far that may be off. All workers call it together.
    """
    world, problem = job.world, None
    clocks = compare_clocks(job, sync)
    try:
        write_rank_trace(job.folder, RankTrace(world.rank, "worker", trace.spans, trace.counts))
        if sync.group.leads:
            for rank, recorded in enumerate(sync.ask_servers("traced")):
                write_rank_trace(job.folder, RankTrace(rank, "server", **recorded))
    except OSError as error:  # a full disk, say: the others are at the barrier
        problem = error
    sync.group.barrier()
    if problem:
        raise problem
    if not sync.group.leads:
        return
    if not merge_traces(job.folder, {rank: offset for rank, (offset, _) in clocks.items()}):
        progress.print(f"no step was traced: none of --trace-steps {job.config.trace_steps} was taken since the start")
        return
    _add_to_manifest(job.folder, clocks={
        str(rank): {"ahead_us": 1e6 * offset, "uncertainty_us": 1e6 * uncertainty}
        for rank, (offset, uncertainty) in sorted(clocks.items())
    })  # fmt: skip


def _add_to_manifest(folder: Path, **entries: Any) -> None:
    write_json(folder / MANIFEST, json.loads((folder / MANIFEST).read_text()) | entries)


def _test_best(
    job: Job, group: Group, model: nn.Module, loader: Batches, progress: TrainingProgress
) -> dict[str, float]:
    """Loss and accuracy of the best model over the test images; all workers call it together. The model changes."""
    best = job.folder / "snapshots" / BEST
    if group.any(not best.is_file()):
        progress.print(
            f"{best} is not on storage that all workers share: `hvdtrain evaluate --split test` does it later"
        )
        return {}
    model.load_state_dict(load_file(best, device=str(job.device)))
    loss, accuracy, _ = evaluate(job, model, group, loader)
    return {"test_loss": loss, "test_accuracy": accuracy}
