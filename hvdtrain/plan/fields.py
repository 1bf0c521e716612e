"""Reading what people have written into a calibration or a case."""

from typing import Any


class WrongField(Exception):
    """What is wrong with the file, without its name."""


def number(of: Any, path: str, least: float = 0, most: float = 1e9) -> float:
    """The number at the last word of `path`, as in `cluster.latency_us`, in the table `of`.

    Raises:
        WrongField: there is none from `least` to `most`.
    """
    value = of.get(path.rpartition(".")[2]) if isinstance(of, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise WrongField(f"{path} is {value!r}, not a number from {least:g} to {most:g}")
    return float(value)
