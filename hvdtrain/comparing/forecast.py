"""How long the runs of a comparison will take."""

from collections.abc import Collection, Iterable, Sequence

from hvdtrain.base.formatting import in_minutes, with_noun
from hvdtrain.comparing.comparison_state import ComparisonState
from hvdtrain.comparing.grid import Planned

# What is expected while nothing has run: the speed, and the seconds besides training.
GUESSED_SAMPLES_PER_S = 1000.0
GUESSED_AROUND_S = 5.0


def expected_seconds(run: Planned, state: ComparisonState) -> float:
    """Returns about how long a run takes.

    That is as long as runs of its contender took before. If there are none, it is the mean over
    other contenders of its family, or else over all contenders.
    """
    around_s = _expected_figure("around_s", run, state) or GUESSED_AROUND_S
    speed = _expected_figure("samples_per_s", run, state) or GUESSED_SAMPLES_PER_S
    training_s = run.training_seconds(state.samples, speed)
    if run.ends_at_target:
        until_target = _expected_figure("samples_to_target", run, state)
        training_s = min(training_s, until_target / speed) if until_target else training_s
    return around_s + training_s


def total_seconds(runs: Iterable[Planned], state: ComparisonState) -> float:
    """Returns about how long runs take, one after the other."""
    return sum(expected_seconds(run, state) for run in runs)


def _expected_figure(name: str, run: Planned, state: ComparisonState) -> float:
    """Returns a figure of a run as its contender or others had it; 0 if nobody had it."""
    own = state.contenders.get(run.contender, {}).get(name)
    if own:
        return float(own)
    measured = [entry for entry in state.contenders.values() if entry.get(name)]
    of_family = [entry for entry in measured if entry.get("family") == run.family]
    figures = [float(entry[name]) for entry in of_family or measured]
    return sum(figures) / len(figures) if figures else 0.0


def forecast(
    runs: Sequence[Planned],
    possible: Sequence[Planned],
    kept: Collection[str],
    state: ComparisonState,
) -> str:
    """Returns how long all runs together take, in a sentence.

    Args:
        runs: the runs that are planned, finished ones too.
        possible: runs that may be added. A search's sprints are among them, because the search
            leaves out some of `runs`.
        kept: names of finished runs.
        state: knows how long runs took before.
    """
    to_do = [run for run in runs if run.name not in kept]
    possible_to_do = [run for run in possible if run.name not in kept]
    kept_words = f" (finished already: {len(kept)})" if kept else ""
    may_end_early = any(run.ends_at_target for run in to_do)
    at_most = "at most " if possible or may_end_early else ""
    duration = in_minutes(total_seconds([*to_do, *possible_to_do], state))
    guess = "" if state.contenders else ", which is a guess: nothing has run yet"
    runs_to_do = f"{with_noun(len(to_do), 'run')} to do{kept_words}"
    return f"forecast: {runs_to_do}, {at_most}about {duration}{guess}"
