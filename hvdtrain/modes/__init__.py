"""One module a mode: `ps_async.py` is `--mode ps-async`, and adding a mode is adding a file.

A mode's module holds `connect(job) -> Sync`, called once by every worker, and where its ranks are split into
workers and servers `serve(job, say)`, called once by every server, and `policy(workers, config)`, which decides when
that applies a push. Its docstring's first line is the mode's help. `ps-` in its name means that it has servers; unless
`-sync` ends it, the job goes on without a worker that dies.
"""

import ast
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from hvdtrain.errors import unknown

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hvdtrain.precision import LossScale

_FOLDER = Path(__file__).parent


class Pushed:
    """What is known of the push of one step: complete when every bucket's answer is there.

    Attributes:
        waiting: answers still to come.
        version_read: the oldest version that the gradients were computed from.
        staleness: the largest number of updates that the weights saw in between.
    """

    def __init__(self, buckets: int) -> None:
        self.waiting = buckets
        self.version_read: int | None = None
        self.staleness = 0

    def read(self, version: int) -> None:
        """A bucket is pushed that was computed from this version."""
        self.version_read = version if self.version_read is None else min(version, self.version_read)

    def answered(self, staleness: int) -> None:
        """A bucket's answer is there."""
        self.waiting -= 1
        self.staleness = max(self.staleness, staleness)


class Sync(Protocol):
    """What a mode does for one worker: keep its model in step with the others'.

    Attributes:
        backend: what carries the bytes, for the manifest: `none`, `horovod-mpi`, `gloo`, `rpc` …
        lockstep: whether all workers are at the same step at the same time.
        bytes_per_step: payload bytes sent in one step by all processes of the job together.
        pushed: what is known of this step's push, now or later; None where nothing is pushed.
        waited_s: seconds that forward waited for weights in this step.
    """

    backend: str
    lockstep: bool

    @property
    def bytes_per_step(self) -> float: ...

    @property
    def pushed(self) -> Pushed | None: ...

    @property
    def waited_s(self) -> float: ...

    def prepare(self, model: "nn.Module") -> "nn.Module":
        """Give every worker the first worker's weights, and return the module to call forward on."""

    def restore(self, step: int, state: "Mapping[str, torch.Tensor]") -> None:
        """Go on after this step of a snapshot, with the optimizer's state: see optimizer_state. Called by every worker
        after prepare, with what the same snapshot holds.
        """

    def optimizer_state(self) -> "dict[str, torch.Tensor]":
        """What the optimizer remembers of all trained parameters, as optim.state_of gives it, while nobody trains."""

    def more_to_come(self, more: bool) -> None:
        """Before forward: whether another pass belongs to the same step, so that nothing is sent after this one's."""

    def begin(self, step: int, lr: float) -> None:
        """Before forward: the number of the step, from 1, and its learning rate."""

    def wait(self) -> None:
        """After backward: return when this worker may go on. Exposed communication, as forward's waiting is."""

    def update(self, loss_scale: "LossScale") -> None:
        """Apply the optimizer, where it runs on the worker; what the gradients overflowed in is left out."""

    def refresh(self) -> None:
        """Hold the newest weights (before an evaluation or a snapshot). All workers call it together."""

    def rest(self) -> None:
        """Where workers are not in lockstep: let nobody wait for this one until it pushes again."""

    def call(self, meeting: int) -> None:
        """Where workers are not in lockstep: ask all of them to the meeting of this number."""

    def is_called(self, meeting: int) -> bool:
        """Whether a worker did."""

    def sum(self, values: "torch.Tensor") -> "torch.Tensor":
        """The elementwise sum over the workers of a small CPU tensor, on every worker. A barrier too."""

    def servers_rss_mb(self) -> float:
        """The servers' peak resident memory in MiB, added up."""

    def server_hosts(self) -> list[str]:
        """The names of the servers' hosts."""

    def close(self) -> None:
        """Part from the others in order. Called once, when all went well."""


def names() -> list[str]:
    """Every mode's name, the baseline first."""
    found = sorted(p.stem.replace("_", "-") for p in _FOLDER.glob("*.py") if p.stem != "__init__")
    return sorted(found, key=lambda name: name != "single")


def help_line(mode: str) -> str:
    """The first line of the mode's docstring, read without importing it."""
    tree = ast.parse((_FOLDER / f"{mode.replace('-', '_')}.py").read_text())
    return (ast.get_docstring(tree) or "").split("\n")[0]


def has_servers(mode: str) -> bool:
    """Whether the mode splits its ranks into workers and parameter servers."""
    return mode.startswith("ps-")


def survives(mode: str) -> bool:
    """Whether the job goes on when a worker dies."""
    return has_servers(mode) and not mode.endswith("-sync")


def load(mode: str) -> ModuleType:
    """The mode's module. UsageError, listing the modes, where there is none of that name."""
    if mode not in names():
        raise unknown("mode", mode, names())
    return importlib.import_module(f"hvdtrain.modes.{mode.replace('-', '_')}")
