"""What one worker writes down while it trains: a JSON line a step, and TensorBoard events on the first worker."""

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.untrusted import parse_json
from hvdtrain.errors import Failure
from hvdtrain.numerics.clock import PARTS
from hvdtrain.numerics.durations import BINS, bin_of
from hvdtrain.numerics.split import DIGESTS
from hvdtrain.runs.live import WARM_UP, metrics_file
from hvdtrain.system.appending import AppendedFile
from hvdtrain.wire.messages import PushStatus

if TYPE_CHECKING:
    import torch

STALENESS_BINS = 64
STEP_PARTS = tuple(part for part in PARTS if part != "refresh")  # of a step's line; no step refreshes


@dataclass
class Tally:
    """What one worker counts, or all of them together.

    Attributes:
        steps: that were taken; of all workers together, added up.
        digest: sum over the samples of a hash of (step, index), modulo 2**48: equal sums over all workers mean equal
            samples at equal steps.
        loss, correct, samples: sums over the samples trained on since the last evaluation.
        seconds: spent in each of PARTS; of all workers together, added up.
        durations: of steps, how many were in each bin of numerics.durations.
        first_steps, first_s: steps of the warm-up, which are not in `durations`, and how long they took together.
        staleness: how often each was seen by the push of a bucket; the last bin holds all that is staler.
        stale_sum, stale_max: of the staleness itself.
    """

    steps: int = 0
    digest: int = 0
    loss: float = 0.0
    correct: float = 0.0
    samples: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    durations: list[int] = field(default_factory=lambda: [0] * BINS)
    first_steps: int = 0
    first_s: float = 0.0
    staleness: list[int] = field(default_factory=lambda: [0] * STALENESS_BINS)
    stale_sum: int = 0
    stale_max: int = 0

    @classmethod
    def of(cls, workers: Sequence["Tally"]) -> "Tally":
        """All workers together, from each one's."""
        columns = {count.name: [getattr(tally, count.name) for tally in workers] for count in fields(cls)}
        sums: dict[str, Any] = {
            name: [*map(sum, zip(*values, strict=True))] if isinstance(values[0], list) else sum(values)
            for name, values in columns.items()
        }
        return cls(**sums | {"digest": sums["digest"] % DIGESTS, "stale_max": max(columns["stale_max"])})


class StepLines:
    """A worker's metrics file: a line for each step, as JSON.

    Where shares are leased, a worker trains on one share of a step's batch, on several or on none. Its line of that
    step says how many, and what they came to together: seconds and samples are sums, loss, accuracy and staleness means
    over the shares. A share that another worker had lost counts in the line that is being made when it comes.

    Args:
        leased: shares are. Otherwise each row is a line, written at once.
        after: the step before the first line; None where that is not known before the first row.
    """

    def __init__(self, path: Path, leased: bool, after: int | None) -> None:
        self.file = AppendedFile(path)
        self.leased, self.last, self.time = leased, after, 0.0
        self.shares: list[dict[str, Any]] = []  # of the step whose line is being made

    def add(self, row: dict[str, Any]) -> None:
        """What a share came to, or a step where shares are not leased."""
        if not self.leased:
            self._write(row)
            return
        if self.shares and row["step"] > self.shares[0]["step"]:
            self._end_line()
        if not self.shares:
            if self.last is None:
                self.last = row["step"] - 1
            row = row | {"step": max(row["step"], self.last + 1)}
            self._fill(row["step"] - 1, row["epoch"])
        self.shares.append(row)

    def reach(self, step: int, epoch: int) -> None:
        """All workers are through this step: whatever lines are missing up to it have no share of this worker."""
        self._end_line()
        self._fill(step, epoch)

    def close(self) -> None:
        self._end_line()
        self.file.close()

    def _fill(self, step: int, epoch: int) -> None:
        """Write lines without a share up to this step."""
        if not self.leased or self.last is None:
            return
        nothing = {"samples": 0, "loss": None, "accuracy": None, **{f"{part}_s": 0.0 for part in STEP_PARTS}}
        for missing in range(self.last + 1, step + 1):
            self._write({"step": missing, "epoch": epoch, **nothing, "time": self.time, "shares": 0})

    def _end_line(self) -> None:
        if self.shares:
            self._write(_together(self.shares))
            self.shares = []

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.last, self.time = line["step"], line["time"]


def _together(shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The line of a step of which a worker had these shares."""
    line = shares[-1] | {"step": shares[0]["step"], "shares": len(shares)}
    if len(shares) == 1:
        return line
    for name in ("samples", *(f"{part}_s" for part in STEP_PARTS)):
        line[name] = round(sum(row[name] for row in shares), 6)
    counted = [row for row in shares if row["samples"]]
    for name in ("loss", "accuracy"):
        total = sum(row["samples"] * row[name] for row in counted)
        line[name] = total / line["samples"] if counted else None
    for name, digits in (("staleness", 3), ("distance", 9)):
        if values := [row[name] for row in shares if name in row]:
            line[name] = round(sum(values) / len(values), digits)
    return line


class Recorder:
    """Writes metrics.rank{r}.jsonl, and events on the chief, and keeps the tally.

    Args:
        after: the step of the snapshot that training goes on from: what was written of later ones is removed.
        appends: go on after what was written, of the steps of a worker that was lost.
        tally: what was counted up to there, on the first worker; on the others none.
        leased: shares are; see StepLines.

    Attributes:
        samples: that this worker has trained on since it began.
        answers: which validation images of this worker's part were answered rightly when last asked: [part] bool.
    """

    def __init__(
        self, folder: Path, rank: int, is_chief: bool, after: int = 0, tally: Tally | None = None,
        appends: bool = False, leased: bool = False,
    ) -> None:  # fmt: skip
        path = metrics_file(folder, rank)
        cut_after(path, math.inf if appends else after)
        self.lines = StepLines(path, leased, None if appends else after)
        self.held: deque[tuple[dict[str, Any], PushStatus | None]] = deque()
        self.tally = tally or Tally()
        self.samples = 0
        self.answers: torch.Tensor | None = None
        self.to_warm_up = WARM_UP
        self.events: Any = None
        self.leads = False
        self.folder, self.after = folder, after
        if is_chief:
            self.lead()

    def lead(self) -> None:
        """Write events from now on: the worker that did is lost, or is this one."""
        self.leads = True
        if not self.events:
            from torch.utils.tensorboard import SummaryWriter

            with contextlib.suppress(OSError):
                self.events = SummaryWriter(str(self.folder), purge_step=self.after + 1 if self.after else None)

    def step(self, row: dict[str, Any], seconds: dict[str, float], digest: int, push: PushStatus | None) -> None:
        """Record one step, or one share of it: its row, the seconds of each part since the one before, and its push,
        which may still be on its way.
        """
        tally, samples = self.tally, row["samples"]
        tally.steps += 1
        tally.digest = (tally.digest + digest) % DIGESTS
        self.spend(seconds)
        self.samples += samples
        duration = sum(seconds.values())
        if self.to_warm_up:
            self.to_warm_up -= 1
            tally.first_steps += 1
            tally.first_s += duration
        else:
            tally.durations[bin_of(duration)] += 1
        if samples:
            tally.samples += samples
            tally.loss += samples * row["loss"]
            tally.correct += samples * row["accuracy"]
        self.held.append((row | {f"{part}_s": round(seconds[part], 6) for part in STEP_PARTS}, push))
        self.flush()
        if row["loss"] is not None:
            self._add_event(row["step"], {"train/loss": row["loss"], "train/accuracy": row["accuracy"]})

    def begin_again(self) -> None:
        """Count from here on: what was before was a warm-up."""
        self.tally, self.samples, self.to_warm_up = Tally(), 0, 0

    def spend(self, seconds: dict[str, float]) -> None:
        """Count these seconds of each part of training time."""
        self.tally.seconds = [spent + seconds[part] for part, spent in zip(PARTS, self.tally.seconds, strict=True)]

    def flush(self) -> None:
        """Take the steps whose pushes have been answered as written."""
        while self.held and not (self.held[0][1] and self.held[0][1].pending):
            row, push = self.held.popleft()
            if push:
                for updates in push.seen:
                    self.tally.staleness[min(updates, STALENESS_BINS - 1)] += 1
                self.tally.stale_sum += sum(push.seen)
                self.tally.stale_max = max(self.tally.stale_max, push.staleness)
                row |= {"version_read": push.version_read, "staleness": push.staleness}
                if push.dropped:
                    row["dropped"] = push.dropped
            self.lines.add(row)

    def reach(self, step: int, epoch: int) -> None:
        """Write the lines up to this step, which all workers are through."""
        self.flush()
        self.lines.reach(step, epoch)

    def counted(self) -> None:
        """What was trained since the last evaluation has been reported."""
        self.tally.loss = self.tally.correct = 0.0
        self.tally.samples = 0

    def evaluation(self, step: int, loss: float, accuracy: float, samples_per_s: float) -> None:
        if self.leads and not self.events:
            self.lead()
        self._add_event(step, {"val/loss": loss, "val/accuracy": accuracy, "perf/samples_per_s": samples_per_s})

    def close(self) -> None:
        self.lines.close()
        if self.events:
            with contextlib.suppress(OSError):
                self.events.close()

    def _add_event(self, step: int, values: dict[str, float]) -> None:
        """On a full disk what TensorBoard is shown has a gap, until the next evaluation."""
        try:
            for name, value in values.items():
                if self.events:
                    self.events.add_scalar(name, value, step)
        except OSError:
            self.events = None


def cut_after(path: Path, step: float) -> None:
    """Remove the lines of later steps from a metrics file, and a last line that a crash left unfinished.

    Raises:
        Failure: a line before that cannot be read.
    """
    if not path.exists():
        return
    kept = 0  # bytes
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                if parse_json(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                raise Failure(
                    f"{path}, line {number} is no step: remove the line, or what comes after it too"
                ) from None
            kept += len(line)
    os.truncate(path, kept)  # written anew, it would be lost on a full disk, or to a kill at that moment
