"""A worker's metrics: a JSON line for each step, and TensorBoard events on the first worker."""

import contextlib
import json
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.base.config.untrusted import parse_json
from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.clock import PARTS
from hvdtrain.base.numerics.durations import BINS, bin_of
from hvdtrain.base.numerics.split import DIGESTS
from hvdtrain.base.system.appending import AppendedFile
from hvdtrain.job.wire.messages import PushStatus
from hvdtrain.runs.live import WARM_UP, metrics_file

if TYPE_CHECKING:
    import torch

STALENESS_BINS = 64
# The parts of a step's time. `refresh` is between steps.
STEP_PARTS = tuple(part for part in PARTS if part != "refresh")
# What a step's line has in seconds: the parts, and the processor time of computing.
STEP_SECONDS = (*(f"{part}_s" for part in STEP_PARTS), "computing_cpu_seconds")


@dataclass
class Tally:
    """The counts of one worker, or the counts of all workers together.

    Attributes:
        steps: how many steps were taken, added up over the workers.
        digest: the sum over the samples of a hash of (step, index), modulo 2**48. Equal sums over
            all workers mean equal samples at equal steps.
        loss: the sum of the losses of the samples since the last evaluation.
        correct: how many of these samples were classified correctly.
        samples: how many samples were trained on since the last evaluation.
        seconds: the seconds in each of PARTS, added up over the workers.
        computing_cpu_seconds: the processor seconds of computing, as Clock has them, added up over
            the workers.
        durations: how many steps were in each bin of numerics.durations.
        first_steps: how many steps were in the warm-up; they are not in `durations`.
        first_s: the seconds of these steps.
        staleness: how many pushes of a bucket had each staleness. The last bin has all that are
            staler.
        stale_sum: the sum of the staleness of all pushes.
        stale_max: the largest staleness.
    """

    steps: int = 0
    digest: int = 0
    loss: float = 0.0
    correct: float = 0.0
    samples: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    computing_cpu_seconds: float = 0.0
    durations: list[int] = field(default_factory=lambda: [0] * BINS)
    first_steps: int = 0
    first_s: float = 0.0
    staleness: list[int] = field(default_factory=lambda: [0] * STALENESS_BINS)
    stale_sum: int = 0
    stale_max: int = 0

    @classmethod
    def of(cls, workers: Sequence["Tally"]) -> "Tally":
        """Returns the counts of all workers together."""
        together = cls()
        for count in fields(cls):
            values = [getattr(tally, count.name) for tally in workers]
            if isinstance(values[0], list):
                total: Any = [sum(column) for column in zip(*values, strict=True)]
            else:
                total = sum(values)
            setattr(together, count.name, total)
        together.digest %= DIGESTS
        together.stale_max = max(tally.stale_max for tally in workers)
        return together

    def scale_seconds(self, factor: float) -> None:
        """Multiplies the seconds: a snapshot has means over the workers, and training has sums."""
        self.seconds = [spent * factor for spent in self.seconds]
        self.computing_cpu_seconds *= factor


class StepLines:
    """A worker's metrics file: a JSON line for each step.

    Where shares are leased, a worker trains on one share of a step's batch, on several, or on none.
    The step's line says on how many. Its seconds and samples are sums over the shares; its loss,
    accuracy and staleness are means. A share that another worker has lost may come late: it counts
    in the line that is being made then.

    Args:
        path: the file.
        leased: whether shares are leased. If not, each row is a line.
        after: the step before the first line; None if it is not known before the first row.
        at_once: whether a line is written when it is added. If not, it waits until someone calls
            `write`, from any thread: that costs a step less.
    """

    def __init__(self, path: Path, leased: bool, after: int | None, at_once: bool = True) -> None:
        self.file = AppendedFile(path)
        self.at_once = at_once
        self._waiting: list[dict[str, Any]] = []  # lines that are not written
        self._lock = threading.Lock()
        self._process = os.getpid()
        self.leased = leased
        self.last = after  # the step of the last line
        self.time = 0.0  # of the last line
        self.shares: list[dict[str, Any]] = []  # rows of the line that is being made

    def add(self, row: dict[str, Any]) -> None:
        """Adds the row of a share, or of a step if shares are not leased."""
        if not self.leased:
            self._add_line(row)
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
        """Writes the lines up to a step that all workers have ended.

        In lines that are still missing, this worker had no share.
        """
        self._end_line()
        self._fill(step, epoch)
        self.write()

    def write(self) -> None:
        """Writes the lines that wait. A process that was forked from this one writes none."""
        if os.getpid() != self._process:  # asked before the lock, which may have been forked locked
            return
        with self._lock:
            waiting = self._waiting
            self._waiting = []
            self.file.write("".join(json.dumps(line) + "\n" for line in waiting))

    def close(self) -> None:
        """Writes the last line, and closes the file."""
        self._end_line()
        self.write()
        self.file.close()

    def _fill(self, step: int, epoch: int) -> None:
        """Writes lines without a share up to this step."""
        if not self.leased or self.last is None:
            return
        seconds = dict.fromkeys(STEP_SECONDS, 0.0)
        nothing = {"samples": 0, "loss": None, "accuracy": None, **seconds}
        for missing in range(self.last + 1, step + 1):
            place = {"step": missing, "epoch": epoch}
            self._add_line({**place, **nothing, "time": self.time, "shares": 0})

    def _end_line(self) -> None:
        if self.shares:
            self._add_line(_together(self.shares))
            self.shares = []

    def _add_line(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._waiting.append(line)
        self.last = line["step"]
        self.time = line["time"]
        if self.at_once:
            self.write()


def _together(shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the line of a step from the rows of its shares."""
    line = shares[-1] | {"step": shares[0]["step"], "shares": len(shares)}
    if len(shares) == 1:
        return line
    for name in ("samples", *STEP_SECONDS):
        line[name] = round(sum(row.get(name, 0.0) for row in shares), 6)
    counted = [row for row in shares if row["samples"]]
    for name in ("loss", "accuracy"):
        total = sum(row["samples"] * row[name] for row in counted)
        line[name] = total / line["samples"] if counted else None
    for name, digits in (("staleness", 3), ("distance", 9)):
        values = [row[name] for row in shares if name in row]
        if values:
            line[name] = round(sum(values) / len(values), digits)
    return line


class Recorder:
    """Writes metrics.rank{r}.jsonl, and events on the worker that leads, and keeps the tally.

    Args:
        folder: the run folder.
        rank: the rank of this worker.
        is_chief: whether this worker writes events from the beginning.
        after: the step of the snapshot that training goes on from. Lines of later steps are
            removed.
        tally: the counts of all workers up to the snapshot, on the first worker; None on the
            others.
        appends: whether to keep all lines, which a worker has written that was lost.
        leased: whether shares are leased: see StepLines.
        at_once: whether a step's line is written at once: see StepLines.

    Attributes:
        samples: how many samples this worker has trained on since it began.
        answers: whether the model, at the last evaluation, classified each validation image of this
            worker's part correctly: [part] bool.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        is_chief: bool,
        after: int = 0,
        tally: Tally | None = None,
        appends: bool = False,
        leased: bool = False,
        at_once: bool = True,
    ) -> None:
        path = metrics_file(folder, rank)
        cut_after(path, math.inf if appends else after)
        self.lines = StepLines(path, leased, None if appends else after, at_once)
        # Rows whose pushes, or whose predecessors' pushes, have not been answered.
        self.held: deque[tuple[dict[str, Any], PushStatus | None]] = deque()
        self.tally = tally or Tally()
        self.samples = 0
        self.answers: torch.Tensor | None = None
        self.to_warm_up = WARM_UP  # how many steps the warm-up has left
        self.events: Any = None
        self.leads = False
        self.folder = folder
        self.after = after
        if is_chief:
            self.lead()

    def lead(self) -> None:
        """Writes events from now on, on the worker that leads now."""
        self.leads = True
        if self.events:
            return
        from torch.utils.tensorboard import SummaryWriter

        purge_step = self.after + 1 if self.after else None
        with contextlib.suppress(OSError):
            self.events = SummaryWriter(str(self.folder), purge_step=purge_step)

    def step(
        self, row: dict[str, Any], seconds: dict[str, float], digest: int, push: PushStatus | None
    ) -> None:
        """Records a step, or a leased share.

        Args:
            row: the metrics.
            seconds: the seconds of each of PARTS since the last step.
            digest: see training.step.digest.
            push: the step's push, which may not be answered yet; None where nothing is pushed.
        """
        tally = self.tally
        samples = row["samples"]
        tally.steps += 1
        tally.computing_cpu_seconds += row.get("computing_cpu_seconds", 0.0)
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
        if samples and row["loss"] is None:  # of a script, which keeps its loss to itself
            tally.samples += samples
        elif samples:
            tally.samples += samples
            tally.loss += samples * row["loss"]
            tally.correct += samples * row["accuracy"]
        rounded = {f"{part}_s": round(seconds[part], 6) for part in STEP_PARTS}
        self.held.append((row | rounded, push))
        self.flush()
        if row["loss"] is not None:
            shown = {"train/loss": row["loss"], "train/accuracy": row["accuracy"]}
            self._add_event(row["step"], shown)

    def begin_again(self) -> None:
        """Forgets all counts, at the end of a sprint's warm-up."""
        self.tally = Tally()
        self.samples = 0
        self.to_warm_up = 0

    def spend(self, seconds: dict[str, float]) -> None:
        """Counts seconds of each of PARTS."""
        self.tally.seconds = [
            spent + seconds[part] for part, spent in zip(PARTS, self.tally.seconds, strict=True)
        ]

    def flush(self) -> None:
        """Adds the rows whose pushes have been answered to the lines, in order."""
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
        """Writes the lines up to a step that all workers have ended."""
        self.flush()
        self.lines.reach(step, epoch)

    def counted(self) -> None:
        """Begins anew to count loss, answers and samples, which an evaluation has reported."""
        self.tally.loss = 0.0
        self.tally.correct = 0.0
        self.tally.samples = 0

    def evaluation(self, step: int, loss: float, accuracy: float, samples_per_s: float) -> None:
        """Shows an evaluation in TensorBoard, on the worker that leads."""
        if self.leads and not self.events:
            self.lead()
        shown = {"val/loss": loss, "val/accuracy": accuracy, "perf/samples_per_s": samples_per_s}
        self._add_event(step, shown)

    def close(self) -> None:
        """Writes the last line, and closes the files."""
        self.lines.close()
        if self.events:
            with contextlib.suppress(OSError):
                self.events.close()

    def _add_event(self, step: int, values: dict[str, float]) -> None:
        """Writes values for TensorBoard. On a full disk they are missing until an evaluation."""
        try:
            for name, value in values.items():
                if self.events:
                    self.events.add_scalar(name, value, step)
        except OSError:
            self.events = None


def cut_after(path: Path, step: float) -> None:
    """Removes the lines of later steps from a metrics file, and a last line without an end.

    Args:
        path: the file, which may be missing.
        step: the last step to keep.

    Raises:
        Failure: a line that is to be kept cannot be read.
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
                    f"{path}, line {number} is no step: remove this line, or this line and all after "
                    "it"
                ) from None
            kept += len(line)
    # A file that is written anew could be lost on a full disk, or by a kill.
    os.truncate(path, kept)
