"""Ring all-reduce or a parameter server, on evidence. What one calls from Python is in `api.py`."""

from typing import Any

__all__ = ["Failure", "Result", "UsageError", "compare", "explain", "plan", "read"]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: importing hvdtrain takes no time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvdtrain import api

    return getattr(api, name)
