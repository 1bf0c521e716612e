"""The result of one of `hvdtrain doctor`'s checks."""

from dataclasses import dataclass

OK, WARNING, MISSING = "ok", "warning", "missing"


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        status: `ok`; `warning`: it exists, but is slow or not enough for everything; `missing`: it does not exist or
            does not work.
        found: what was found.
        advice: what to do about it, in one line; empty where the status is ok.
    """

    status: str
    found: str
    advice: str = ""
