"""The state of a comparison, in its folder: what was asked, tried, left out and set aside."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, structs, to_builtins

from hvdtrain.base.config.untrusted import LARGEST_DOCUMENT, parse_json, read_whole
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import three_digits, with_noun
from hvdtrain.comparing.grid import SETTINGS, Planned
from hvdtrain.reporting.conduct import (
    BY_SPEED,
    BY_TIME_TO_TARGET,
    Conduct,
    FoundRate,
    LeftOut,
    Tried,
    TriedRate,
)

# The number of training images until the images were looked at.
GUESSED_SAMPLES = 1500
# The key in `experiment` of the measure that decides.
DECIDE_BY = "--decide-by"


class ComparisonState:
    """What is known of a comparison beside its runs: comparison.json.

    Args:
        folder: the comparison's folder. Without a readable comparison.json the state is empty.

    Attributes:
        path: comparison.json.
        experiment: what all runs have in common, by option. The file calls it `asked`.
        contenders: an entry for each contender, by name. An entry may have
            `family`: the family of its mode,
            `samples_per_s`: the speed of its fastest run,
            `around_s`: the seconds that its last run took besides training,
            `samples_to_target`: the samples of its last run, if that ends at the target,
            `tried`: how it sprinted in searches,
            `left_out`: why a search left it out; empty if it stays. The key is missing until a
            search has decided on the contender.
        disturbed: why each sprint was set aside that ran beside other work.
        rates: the learning rates that were found.
        given: the values of the options that say what is compared (`modes`, `wire` …), as words;
            empty for an option that was not given. None if calls differed in more than added modes,
            or if the options do not say it all: with a preset, with --tune, and with several tasks.
        samples: the number of training images. It is not in the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "comparison.json"
        self.samples = GUESSED_SAMPLES
        self.experiment: dict[str, Any]
        self.contenders: dict[str, dict[str, Any]]
        self.disturbed: list[str]
        self.rates: list[FoundRate]
        self.given: dict[str, str] | None
        try:
            content = parse_json(read_whole(self.path, LARGEST_DOCUMENT))
            # 0.1.0 did not write its version down.
            self.experiment = {"hvdtrain": "0.1.0"} | dict(content["asked"])
            self.contenders = convert(content["contenders"], dict[str, dict[str, Any]])
            self.disturbed = list(content.get("disturbed", []))
            self.rates = convert(content.get("rates", []), list[FoundRate])
            self.given = convert(content.get("given"), dict[str, str] | None)
        # There is no file yet, or somebody else has written it.
        except (OSError, ValueError, LookupError, TypeError, ValidationError):
            self._clear()

    def _clear(self) -> None:
        self.experiment = {}
        self.contenders = {}
        self.disturbed = []
        self.rates = []
        self.given = None

    def save(self) -> None:
        """Writes comparison.json."""
        content: dict[str, Any] = {"asked": self.experiment, "contenders": self.contenders}
        if self.disturbed:
            content["disturbed"] = self.disturbed
        if self.rates:
            content["rates"] = to_builtins(self.rates)
        if self.given is not None:
            content["given"] = self.given
        write_whole(self.path, json.dumps(content, indent=2) + "\n")

    # What all runs have in common

    def set_experiment(self, experiment: Mapping[str, Any], nothing_counts: bool = False) -> None:
        """Adds what all runs are to have in common.

        Args:
            experiment: the values by option.
            nothing_counts: no run has finished. A state of another experiment is cleared then.

        Raises:
            UsageError: the folder's runs were made in another way, so that they could not be
                compared.
        """
        changed = []
        for name, value in experiment.items():
            if self.experiment.get(name, value) != value:
                changed.append(f"{name} {self.experiment[name]}, not {value}")
        if changed and nothing_counts:
            self._clear()
        elif changed:
            raise UsageError(
                f"--out {self.path.parent} has runs that could not be compared: "
                f"they were made with {'; '.join(changed)}: "
                "name another folder, or repeat what they were made with"
            )
        self.experiment |= experiment

    def note_given(self, given: dict[str, str] | None, begins: bool) -> None:
        """Notes the options that say what is compared: see `given`.

        Args:
            given: the values of this call.
            begins: whether no run has finished.
        """
        if begins or _adds_modes(self.given, given):
            self.given = given
        else:
            self.given = None

    # What is known of contenders

    def speed(self, run: Planned) -> float:
        """Returns the samples/s of a run's contender; 0 if the contender has not run."""
        speed = self._find(run).get("samples_per_s", 0)
        return float(speed) if isinstance(speed, int | float) else 0.0

    def left_out(self, run: Planned) -> str:
        """Returns why a run's contender was left out; empty if it was not."""
        return str(self._find(run).get("left_out", ""))

    @property
    def has_speeds(self) -> bool:
        """Whether the speed of any contender is known."""
        return any("samples_per_s" in entry for entry in self.contenders.values())

    def was_tried(self, run: Planned) -> bool:
        """Returns whether a search has decided on a run's contender."""
        return "left_out" in self._find(run)

    def found_rate(self, run: Planned) -> FoundRate | None:
        """Returns the learning rate that was found for a run's contender; None if none was."""
        return next((rate for rate in self.rates if run.contender in rate.of), None)

    def rounds(self) -> int:
        """Returns how many rounds of sprints searches have had in this folder."""
        numbers = [0]
        for entry in self.contenders.values():
            sprints = _read_sprints(entry)
            if sprints:
                numbers.append(len(sprints.samples_per_s))
        return max(numbers)

    def _find(self, run: Planned) -> dict[str, Any]:
        """Returns the entry of a run's contender; an empty one if there is none."""
        return self.contenders.get(run.contender, {})

    def _entry(self, run: Planned) -> dict[str, Any]:
        """Returns the entry of a run's contender, and makes it if there is none."""
        return self.contenders.setdefault(run.contender, {})

    # What happens

    def leave_out(self, run: Planned, why: str) -> None:
        """Notes that a search leaves out a run's contender."""
        self._entry(run)["left_out"] = why

    def keep(self, run: Planned) -> None:
        """Notes that a search keeps a run's contender, unless it has been left out."""
        self._entry(run).setdefault("left_out", "")

    def forget_contenders(self) -> None:
        """Forgets what is known of all contenders, and saves the state."""
        self.contenders.clear()
        self.save()

    def note_rate(self, rate: FoundRate) -> None:
        """Notes a learning rate that was found, and saves the state."""
        self.rates.append(rate)
        self.save()

    def share_rate(self, rate: FoundRate, names: Sequence[str]) -> None:
        """Notes that these contenders share a rate that was found, and saves the state."""
        of = list(dict.fromkeys([*rate.of, *names]))
        self.rates[self.rates.index(rate)] = structs.replace(rate, of=of)
        self.save()

    def note_sprint(self, run: Planned, samples_per_s: float, seconds: float) -> None:
        """Notes a sprint of a search.

        Args:
            run: the sprint.
            samples_per_s: its speed.
            seconds: how long its steady steps lasted.
        """
        no_sprints = {"side": run.side, "samples_per_s": [], "seconds": 0.0}
        tried = self._entry(run).setdefault("tried", no_sprints)
        tried["samples_per_s"].append(samples_per_s)
        tried["seconds"] += seconds

    def note_finished(
        self, run: Planned, samples_per_s: float, took_s: float, samples: float = 0.0
    ) -> None:
        """Notes what a run came to, and saves the state.

        Args:
            run: the run.
            samples_per_s: its speed.
            took_s: how long it took in all.
            samples: how many samples it trained on.
        """
        entry = self._entry(run)
        entry["family"] = run.family
        entry["samples_per_s"] = max(samples_per_s, entry.get("samples_per_s", 0.0))
        training_s = run.training_seconds(self.samples, entry["samples_per_s"])
        if run.ends_at_target and samples and samples_per_s:
            entry["samples_to_target"] = samples
            training_s = samples / samples_per_s
        entry["around_s"] = max(0.0, took_s - training_s)
        self.save()

    def note_disturbed(self, run: Planned, work: str) -> int:
        """Notes that a sprint is set aside, and saves the state.

        Args:
            run: the sprint.
            work: what else its hosts did meanwhile.

        Returns:
            How many sprints have been set aside in this folder.
        """
        self.disturbed.append(f"{run.name}: {work}")
        self.save()
        return len(self.disturbed)


def _adds_modes(before: Mapping[str, str] | None, now: Mapping[str, str] | None) -> bool:
    """Returns whether the options are the same, but perhaps for further modes."""
    if before is None or now is None or before.keys() != now.keys():
        return False
    others = before.keys() - {"modes"}
    if any(before[name] != now[name] for name in others):
        return False
    if before["modes"] and now["modes"]:
        return set(before["modes"].split(",")) <= set(now["modes"].split(","))
    return before["modes"] == now["modes"]


class _Sprints(Struct):
    """How a contender sprinted in searches: `tried` in comparison.json."""

    side: str
    samples_per_s: list[float]
    seconds: float


def _read_sprints(entry: Mapping[str, Any]) -> _Sprints | None:
    """Returns the sprints of a contender; None if there are none, or none that can be read."""
    with contextlib.suppress(ValidationError):
        return convert(entry.get("tried"), _Sprints)
    return None


# What reports say of it


def conducted(folders: Sequence[Path]) -> Conduct:
    """Returns how the comparisons in these folders were conducted."""
    left_out = []
    disturbed = 0
    measures = set()
    given_threads = set()
    rates: list[FoundRate] = []
    tried: dict[str, Tried] = {}
    states = [ComparisonState(folder) for folder in folders]
    for state in states:
        disturbed += len(state.disturbed)
        rates += state.rates
        measures.add(str(state.experiment.get(DECIDE_BY)))
        threads = state.experiment.get("--threads")
        given_threads.add(threads if type(threads) is int else 0)
        for name, entry in state.contenders.items():
            why = entry.get("left_out")
            if why:
                left_out.append(LeftOut(str(name), str(why)))
            sprints = _read_sprints(entry)
            if sprints:
                family = str(entry.get("family"))
                before = tried.get(family, Tried(0, 0.0))
                tried[family] = Tried(before.settings + 1, before.seconds + sprints.seconds)
    decided_by = BY_TIME_TO_TARGET if measures == {BY_TIME_TO_TARGET} else BY_SPEED
    threads = given_threads.pop() if len(given_threads) == 1 else 0
    given = _plain(states[0].given) if len(states) == 1 else None
    return Conduct(
        left_out, disturbed, dict(sorted(tried.items())), rates, decided_by, threads, given
    )


def _plain(given: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Returns the options, of a file that may be anybody's, if all are known and plain words."""
    if given is None or given.keys() != {"modes", "workers", "servers", *SETTINGS}:
        return None
    are_plain = all(re.fullmatch(r"(\w[\w.,:+-]*)?", value) for value in given.values())
    return given if are_plain else None


def tried_lines(folder: Path) -> dict[str, list[str]]:
    """Returns what a report says of the search of a comparison.

    Returns:
        The lines by title; empty if there was no search.
    """
    by_side: dict[str, list[tuple[str, list[float]]]] = {}
    state = ComparisonState(folder)
    for name, entry in state.contenders.items():
        sprints = _read_sprints(entry)
        if sprints:
            by_side.setdefault(sprints.side, []).append((name, sprints.samples_per_s))
    told = _lines_of_rates(state.rates)
    if not by_side:
        return told
    lines = []
    for side, settings in sorted(by_side.items()):
        settings.sort(key=lambda setting: -max(setting[1], default=0.0))
        each = [f"{name} {', '.join(map(three_digits, speeds))}" for name, speeds in settings]
        number = with_noun(len(settings), "setting")
        lines.append(f"{side}: {number}; samples/s of each sprint: {'; '.join(each)}")
    return {f"What was tried: {', '.join(sorted(by_side))}": lines} | told


def _lines_of_rates(rates: Sequence[FoundRate]) -> dict[str, list[str]]:
    """Returns what each learning rate came to, by title; empty if none was looked for."""
    if not rates:
        return {}
    lines = []
    for rate in rates:
        by_rate = sorted(rate.tried, key=lambda tried: tried.lr)
        each = "; ".join(map(_rate_words, by_rate))
        lines.append(f"{', '.join(rate.of)}, by trainings of {rate.trained}: {each}")
    return {"Which learning rates were tried": lines}


def _rate_words(tried: TriedRate) -> str:
    """Returns `0.0003: 3 of 3 reached the target, after 4,120 samples, accuracy 0.910`."""
    rate = " ".join(filter(None, [f"{tried.lr:.4g}", tried.settings]))
    words = f"{rate}: {tried.reached} of {tried.trainings} reached the target"
    if tried.samples is not None:
        words += f", after {tried.samples:,.0f} samples"
    if tried.accuracy is not None:
        words += f", accuracy {tried.accuracy:.3f}"
    return words
