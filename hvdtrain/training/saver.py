"""What a worker saves while it trains: snapshots to go on from, and the best model so far. The first one writes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hvdtrain.modes._synchroniser import Synchroniser
from hvdtrain.numerics.flat import trained
from hvdtrain.runs.metrics import Recorder, Tally
from hvdtrain.runs.snapshot import BEST, save, write_tensors
from hvdtrain.training.history import History
from hvdtrain.world.job import Job


class Saver:
    """Saves into the run folder.

    Args:
        facts: what each snapshot holds beside what changes: dataset_hash, initial_weights, parts.
        last: the step of the snapshot that training goes on from, or 0.
        keeps_best: whether the best model so far is to be there.
        report: called with a line where a snapshot could not be saved.
    """

    def __init__(
        self, job: Job, model: nn.Module, sync: Synchroniser, recorder: Recorder, facts: Mapping[str, Any], last: int,
        keeps_best: bool, report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.job, self.model, self.sync, self.recorder = job, model, sync, recorder
        self.facts, self.last, self.keeps_best, self.report = facts, last, keeps_best, report

    def snapshot(self, history: History) -> None:
        """Save a snapshot; all workers call it together, between two steps."""
        config, world = self.job.config, self.job.world
        there, rows = self.sync.group.gather(self.recorder.tally.row())
        if not world.is_chief:
            return
        tally = Tally.of(rows.tolist())
        tally.seconds = [spent / len(there) for spent in tally.seconds]  # the next start may have more or fewer
        state = {
            "config": dataclasses.asdict(config), "workers": world.workers, "history": dataclasses.asdict(history),
            "tally": dataclasses.asdict(tally), **self.facts,
        }  # fmt: skip
        try:
            save(
                self.job.folder, history.step, self.model.state_dict(), self.sync.optimizer_parts(),
                sum(p.numel() for p in trained(self.model)), state, config.keep_snapshots,
            )  # fmt: skip
            self.last = history.step
        except OSError as error:
            self.report(f"the snapshot of step {history.step} could not be saved: {error.strerror or error}")

    def best(self) -> None:
        """Save the model as the best so far, where that is wanted."""
        if self.keeps_best and self.job.world.is_chief:
            write_tensors(self.job.folder / "snapshots" / BEST, self.model.state_dict())
