"""Ring all-reduce or a parameter server, on evidence.

From Python:

    compare(modes=["allreduce", "ps-sync"], workers=2)   train in several modes, and compare
    read("runs/first")                                   finished runs, compared
    explain("runs/first/runs/allreduce-w2-r1")           who was waited for, where time went
    plan("c.json", hosts=16)                             clusters that are not here
    init(batch_size=64)                                  in a training script of your own: its job

Each has its own help: `help(hvdtrain.compare)`. What they return is a `Result`, or documented with
them. `UsageError` and `Failure` are raised with the commands' sentences.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors, which run nothing
    from hvdtrain.api import Failure, Result, UsageError, compare, explain, init, plan, read

# In the order in which a new user needs them.
__all__ = ["compare", "read", "explain", "plan", "init", "Result", "UsageError", "Failure"]  # noqa: RUF022


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: importing hvdtrain takes no time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvdtrain import api

    return getattr(api, name)


def __dir__() -> list[str]:
    """What `dir` and completion show: what one calls, and not the rooms of the package."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
