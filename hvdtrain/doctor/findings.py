"""What `hvdtrain doctor` says about one thing that it looked at."""

from dataclasses import dataclass

OK, WARNING, MISSING = "ok", "warning", "missing"


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        status: ok; warning: there, but slow or not enough for everything; missing: not there, or does not work.
        found: what there is.
        advice: what to do, in one line; empty where the status is ok.
    """

    status: str
    found: str
    advice: str = ""
