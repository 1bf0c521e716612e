"""The result of one of `hvdtrain doctor`'s checks."""

from dataclasses import dataclass

OK = "ok"
WARNING = "warning"
MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        status: `ok`; `warning`, if the thing is there, but slow or not enough for everything; or
            `missing`, if it is not there or does not work.
        found: What was found.
        advice: What to do about it, in one line; empty if the status is `ok`.
    """

    status: str
    found: str
    advice: str = ""
