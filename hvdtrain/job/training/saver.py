"""Snapshots to go on from, and the best model so far, which the worker that leads writes."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hvdtrain.base.numerics.flat import trained
from hvdtrain.base.numerics.slowdown import Slowdown
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import Synchroniser
from hvdtrain.job.recording.metrics import Recorder, Tally
from hvdtrain.job.recording.snapshot import BEST, WorkerFile, save, save_own, write_tensors
from hvdtrain.job.training.history import History

MANIFEST = "manifest.json"
# What each snapshot holds of the manifest.
FACTS = ("dataset_hash", "model_hash", "initial_weights", "parts")


class Saver:
    """Saves snapshots and the best model into the run folder.

    Args:
        job: the job.
        model: the model.
        sync: connects this worker to the others.
        recorder: has this worker's tally.
        last: the step of the snapshot that training goes on from, or 0.
        keeps_best: whether to keep the best model so far.
        report: called with a line if something could not be saved.
        slowdown: has the seconds that this worker has computed and slept.

    Attributes:
        last: the step of the last snapshot, or 0.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        sync: Synchroniser,
        recorder: Recorder,
        last: int,
        keeps_best: bool,
        report: Callable[[str], None],
        slowdown: Slowdown,
    ) -> None:
        self.job = job
        self.model = model
        self.sync = sync
        self.recorder = recorder
        self.last = last
        self.keeps_best = keeps_best
        self.report = report
        self.slowdown = slowdown

    def snapshot(self, history: History) -> None:
        """Saves a snapshot. All workers call this together, between two steps."""
        folder = self.job.folder
        worker = self.job.world.worker
        elements = sum(parameter.numel() for parameter in trained(self.model))
        file = save_own(folder, history.step, worker, self.sync.own_parts(), elements)
        own = {
            "worker": worker,
            "slowed": [self.slowdown.computed_s, self.slowdown.slept_s],
            "tally": dataclasses.asdict(self.recorder.tally),
            "file": file,
        }
        rows = list(self.sync.group.gather_to_first(own).values())
        optimizer = self.sync.optimizer_parts()
        if not self.sync.group.leads:
            _exhaust(optimizer)
            return
        state = self._state(history, rows)
        files = [WorkerFile(*row["file"]) for row in rows]
        try:
            save(
                folder,
                history.step,
                self.model.state_dict(),
                optimizer,
                elements,
                state,
                self.job.config.keep_snapshots,
                files,
            )
            self.last = history.step
        except OSError as error:
            _exhaust(optimizer)
            self.report(
                f"the snapshot of step {history.step} could not be saved: {error.strerror or error}"
            )

    def _state(self, history: History, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the state that a snapshot holds beside tensors.

        Args:
            history: the results of training so far.
            rows: what each worker has told of itself.
        """
        tally = Tally.of([Tally(**row["tally"]) for row in rows])
        # Seconds are means over the workers: the next start may have more or fewer.
        tally.scale_seconds(1 / len(rows))
        manifest = json.loads((self.job.folder / MANIFEST).read_text(encoding="utf-8"))
        facts = {name: manifest[name] for name in FACTS}
        return {
            "config": dataclasses.asdict(self.job.config),
            "workers": self.job.world.workers,
            "history": dataclasses.asdict(history),
            "tally": dataclasses.asdict(tally),
            **facts,
            "slowed": {str(row["worker"]): row["slowed"] for row in rows},
        }

    def best(self) -> None:
        """Saves the model as the best so far, if that is to be kept."""
        if not (self.keeps_best and self.sync.group.leads):
            return
        try:
            write_tensors(self.job.folder / "snapshots" / BEST, self.model.state_dict())
        except OSError as error:
            self.report(
                f"the best model so far could not be saved, and {BEST} is an earlier one: "
                f"{error.strerror or error}"
            )


def _exhaust(parts: Iterable[Any]) -> None:
    """Goes through the parts, which the workers may have to bring together one by one."""
    for _ in parts:
        pass
