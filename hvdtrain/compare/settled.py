"""Whether a comparison's verdict is known, so that `--until-sure` may stop."""

from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.report.comparisons import split_into_comparisons
from hvdtrain.report.paired import LEAST_REPEATS as LEAST_REPEATS
from hvdtrain.report.paired import estimate, log_ratios
from hvdtrain.report.verdict import UNKNOWN, WINNER, Margins, reach_answers, speed
from hvdtrain.runs.read import Run, find_runs, finished_by_kind

MOST_REPEATS = 20  # where --repeats is not given


def is_settled(folder: Path, repeat: int, most: int, margins: Margins) -> bool:
    """Whether the verdict of every comparison in the folder is known after so many repeats of at most so many.

    Who looks after each repeat, and stops when a winner shows, names one by chance more often than who looks once. So a
    winner has to be clearer here than in the report: the error that its interval allows is shared out over all looks
    (Bonferroni).
    """
    if repeat < LEAST_REPEATS:
        return False
    looks = most - LEAST_REPEATS + 1
    try:
        comparisons = split_into_comparisons(find_runs([folder]))
    except UsageError:  # none has finished; or they cannot be compared, and the report will say why
        return False
    return bool(comparisons) and all(_is_known(one.runs, margins, looks) for one in comparisons)


def _is_known(runs: list[Run], margins: Margins, looks: int) -> bool:
    by_kind = finished_by_kind(runs)
    answers = reach_answers(by_kind, margins)
    if not answers or answers[0].outcome == UNKNOWN:
        return False
    if answers[0].outcome != WINNER:
        return True
    first = answers[0]
    logs = log_ratios(by_kind[first.faster], by_kind[first.slower], speed)
    return bool(estimate(logs, 1 - (1 - first.confidence) / looks).low > 0)
