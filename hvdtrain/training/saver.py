"""What is saved in training: snapshots to go on from, and the best model so far. The worker that leads writes."""

import dataclasses
import json
from collections.abc import Callable

from torch import nn

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.synchroniser import Synchroniser
from hvdtrain.numerics.flat import trained
from hvdtrain.numerics.slowdown import Slowdown
from hvdtrain.runs.metrics import Recorder, Tally
from hvdtrain.runs.snapshot import BEST, save, write_tensors
from hvdtrain.training.history import History

MANIFEST = "manifest.json"
FACTS = ("dataset_hash", "model_hash", "initial_weights", "parts")  # of the manifest, which each snapshot holds too


class Saver:
    """Saves into the run folder.

    Args:
        last: the step of the snapshot that training goes on from, or 0.
        keeps_best: whether the best model so far is to be there.
        report: called with a line where a snapshot could not be saved.
        slowdown: this worker's, of which the snapshot has for how long it has computed and slept.
    """

    def __init__(
        self, job: Job, model: nn.Module, sync: Synchroniser, recorder: Recorder, last: int, keeps_best: bool,
        report: Callable[[str], None], slowdown: Slowdown,
    ) -> None:  # fmt: skip
        self.job, self.model, self.sync, self.recorder = job, model, sync, recorder
        self.last, self.keeps_best, self.report, self.slowdown = last, keeps_best, report, slowdown

    def snapshot(self, history: History) -> None:
        """Save a snapshot; all workers call it together, between two steps."""
        config, world = self.job.config, self.job.world
        slowed = [self.slowdown.computed_s, self.slowdown.slept_s]
        own = {"worker": world.worker, "slowed": slowed, "tally": dataclasses.asdict(self.recorder.tally)}
        rows = self.sync.group.gather_to_first(own).values()
        optimizer = self.sync.optimizer_parts()
        if not self.sync.group.leads:
            for _ in optimizer:
                pass
            return
        tally = Tally.of([Tally(**row["tally"]) for row in rows])
        tally.seconds = [spent / len(rows) for spent in tally.seconds]  # the next start may have more or fewer
        manifest = json.loads((self.job.folder / MANIFEST).read_text())  # the first worker wrote it
        state = {
            "config": dataclasses.asdict(config), "workers": world.workers, "history": dataclasses.asdict(history),
            "tally": dataclasses.asdict(tally), **{name: manifest[name] for name in FACTS},
            "slowed": {str(row["worker"]): row["slowed"] for row in rows},
        }  # fmt: skip
        try:
            save(
                self.job.folder, history.step, self.model.state_dict(), optimizer,
                sum(p.numel() for p in trained(self.model)), state, config.keep_snapshots,
            )  # fmt: skip
            self.last = history.step
        except OSError as error:
            for _ in optimizer:  # whose other parts workers give together
                pass
            self.report(f"the snapshot of step {history.step} could not be saved: {error.strerror or error}")

    def best(self) -> None:
        """Save the model as the best so far, where that is wanted."""
        if self.keeps_best and self.sync.group.leads:
            try:
                write_tensors(self.job.folder / "snapshots" / BEST, self.model.state_dict())
            except OSError as error:
                self.report(
                    f"the best model so far could not be saved, and {BEST} is an earlier one: {error.strerror or error}"
                )
