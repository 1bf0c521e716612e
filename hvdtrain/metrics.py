"""What one worker writes down while it trains: a JSON line a step, and TensorBoard events on the first worker."""

import json
from collections import Counter, deque
from pathlib import Path
from typing import Any

from hvdtrain.modes import Pushed

PHASES = ("data", "forward", "backward", "comm", "optimizer")


def metrics_file(folder: Path, rank: int) -> Path:
    return folder / f"metrics.rank{rank}.jsonl"


class Recorder:
    """Writes metrics.rank{r}.jsonl, and events on the chief; keeps the sums that the summary needs.

    Attributes:
        seconds: time spent in each of PHASES so far.
        staleness: how often each staleness was seen.
        samples: samples trained on so far.
    """

    def __init__(self, folder: Path, rank: int, is_chief: bool) -> None:
        self.file = metrics_file(folder, rank).open("x", buffering=1)
        self.held: deque[tuple[dict[str, Any], Pushed | None]] = deque()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.staleness: Counter[int] = Counter()
        self.samples = 0
        self.steps = 0
        self.events = None
        if is_chief:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(folder))

    def step(self, row: dict[str, Any], seconds: dict[str, float], pushed: Pushed | None) -> None:
        """Record one step: its row, the seconds of each phase, and its push, which may be on its way still."""
        for phase, spent in seconds.items():
            self.seconds[phase] += spent
        self.samples += row["samples"]
        self.steps += 1
        self.held.append((row | {f"{phase}_s": round(spent, 6) for phase, spent in seconds.items()}, pushed))
        self.flush()
        if self.events and row["loss"] is not None:
            self.events.add_scalar("train/loss", row["loss"], row["step"])
            self.events.add_scalar("train/accuracy", row["accuracy"], row["step"])

    def flush(self) -> None:
        """Write the steps whose pushes have been answered."""
        while self.held and not (self.held[0][1] and self.held[0][1].waiting):
            row, pushed = self.held.popleft()
            if pushed:
                self.staleness[pushed.staleness] += 1
                row |= {"version_read": pushed.version_read, "staleness": pushed.staleness}
            self.file.write(json.dumps(row) + "\n")

    def evaluation(self, step: int, loss: float, accuracy: float, samples_per_s: float) -> None:
        if self.events:
            self.events.add_scalar("val/loss", loss, step)
            self.events.add_scalar("val/accuracy", accuracy, step)
            self.events.add_scalar("perf/samples_per_s", samples_per_s, step)

    def close(self) -> None:
        self.file.close()
        if self.events:
            self.events.close()


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write whole or not at all: readers may look at any moment."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values, indent=2) + "\n")
    part.replace(path)
