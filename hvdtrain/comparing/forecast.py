"""How long a comparison will take, as far as its folder tells."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.comparing.grid import Planned
from hvdtrain.config.untrusted import parse_json, read_whole
from hvdtrain.errors import UsageError
from hvdtrain.formatting import in_minutes
from hvdtrain.runs.live import warm_up_s

GUESS, GUESSED_AROUND_S = 1000.0, 5.0  # samples/s, and what is around training, of what has never run
GUESSED_SAMPLES = 1500


class Record:
    """comparison.json: what was `asked` of all runs; by contender, the `samples_per_s` of its fastest run, the
    seconds `around_s` its last training, and why it was `left_out` after the pilot, empty where it was not; and by side
    how it was `tuned`.

    Attributes:
        samples: training images, as far as that is known.
    """

    samples = GUESSED_SAMPLES

    def __init__(self, folder: Path) -> None:
        self.path = folder / "comparison.json"
        try:
            read = parse_json(read_whole(self.path))
            self.asked: dict[str, Any] = dict(read["asked"])
            self.contenders: dict[str, dict[str, Any]] = dict(read["contenders"])
            self.tuned: dict[str, dict[str, Any]] = dict(read.get("tuned", {}))
        except (OSError, ValueError, LookupError, TypeError):  # none yet, or not as it was written
            self.asked, self.contenders, self.tuned = {}, {}, {}

    def ask(self, asked: Mapping[str, Any]) -> None:
        """UsageError where runs that are there were made otherwise, so that they could not be compared."""
        changed = {name: value for name, value in asked.items() if self.asked.get(name, value) != value}
        if changed:
            were = "; ".join(f"{name} {self.asked[name]}, not {value}" for name, value in changed.items())
            raise UsageError(
                f"--out {self.path.parent} has runs that could not be compared: they were made with {were}: name "
                "another folder, or repeat what they were made with"
            )
        self.asked |= asked

    def speed(self, run: Planned) -> float:
        """Samples/s of its contender, 0 where it has not run."""
        return float(self.contenders.get(run.contender, {}).get("samples_per_s", 0))

    def left_out(self, run: Planned) -> str:
        """Why its contender is, or empty."""
        return str(self.contenders.get(run.contender, {}).get("left_out", ""))

    def finished(self, run: Planned, samples_per_s: float, took_s: float) -> None:
        known = self.contenders.setdefault(run.contender, {})
        known["samples_per_s"] = max(samples_per_s, known.get("samples_per_s", 0.0))
        known["around_s"] = max(0.0, took_s - self._training_s(run, known))
        self.save()

    def save(self) -> None:
        tuned = {"tuned": self.tuned} if self.tuned else {}
        kept = {"asked": self.asked, "contenders": self.contenders} | tuned
        self.path.write_text(json.dumps(kept, indent=2) + "\n")

    def seconds(self, run: Planned) -> float:
        """About how long the run takes: as its contender's last one, or with what is around another's."""
        another = next(iter(self.contenders.values()), {})
        known = self.contenders.get(run.contender) or another | {"samples_per_s": GUESS}
        return float(known.get("around_s", GUESSED_AROUND_S)) + self._training_s(run, known)

    def _training_s(self, run: Planned, known: Mapping[str, float]) -> float:
        config, steps = run.config, run.config.total_steps(self.samples)
        if steps is None:
            return config.time_budget or config.sprint + warm_up_s(config.sprint)
        return steps * config.batch_size / known["samples_per_s"]


def forecast(runs: Sequence[Planned], perhaps: Sequence[Planned], kept: Collection[str], record: Record) -> str:
    """How long all runs together take.

    Args:
        perhaps: pilots, which will leave out some of the others, and what is run only where the answer hangs on it.
        kept: names of runs that are finished.
    """
    to_do = [run for run in runs if run.name not in kept]
    kept_words = f" ({len(kept)} are there already, and stay)" if kept else ""
    known = "" if record.contenders else ", which is a guess: nothing has run yet"
    all_runs = [*to_do, *(run for run in perhaps if run.name not in kept)]
    takes = ("at most " if perhaps else "") + f"about {in_minutes(sum(map(record.seconds, all_runs)))}"
    return f"forecast: {len(to_do)} runs to do{kept_words} take {takes}{known}"
