"""Whether a comparison's answer is known, so that `--until-sure` may stop."""

from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.report.answer import LOOKS, UNKNOWN, reach_answer
from hvdtrain.report.comparisons import split_into_comparisons
from hvdtrain.report.contenders import Margins
from hvdtrain.runs.read import find_runs

MOST_REPEATS = 20  # where --repeats is not given


def is_settled(folder: Path, repeat: int, margins: Margins) -> bool:
    """Whether the answer of every comparison in the folder is known after so many repeats."""
    if repeat not in LOOKS:
        return False
    try:
        comparisons = split_into_comparisons(find_runs([folder]))
    except UsageError:  # none has finished; or they cannot be compared, and the report will say why
        return False
    return bool(comparisons) and all(reach_answer(one.runs, margins).word != UNKNOWN for one in comparisons)
