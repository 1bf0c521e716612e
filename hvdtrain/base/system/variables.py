"""Numbers in environment variables, which a starter or a person has set."""

import math
from collections.abc import Mapping

from hvdtrain.base.errors import UsageError


def whole_number(env: Mapping[str, str], name: str, default: str = "", most: int = 10**9) -> int:
    """Returns the variable as a whole number from 0.

    Raises:
        UsageError: it is no such number, or larger than `most`.
    """
    text = env.get(name, default)
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
    if not 0 <= number <= most:
        raise UsageError(
            f"{name}={text!a} in the environment is not a whole number from 0 to {most}: mend or "
            "unset it"
        )
    return number


def seconds(env: Mapping[str, str], name: str, default: str = "0") -> float:
    """Returns the variable as seconds.

    Raises:
        UsageError: it is no finite number from 0.
    """
    text = env.get(name, default)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(
            f"{name}={text!a} in the environment is not a number of seconds: mend or unset it"
        )
    return number
