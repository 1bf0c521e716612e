"""One module a mode: `ps_async.py` is `--mode ps-async`, and adding a mode is adding a file.

A mode's module holds `connect(job) -> Sync`, called once by every worker, and where its ranks are split into
workers and servers `serve(job)`, called once by every server. Its docstring's first line is the mode's help.
"""

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from hvdtrain.errors import unknown

if TYPE_CHECKING:
    import torch
    from torch import nn

_FOLDER = Path(__file__).parent


class Sync(Protocol):
    """What a mode does for one worker: keep its model in step with the others'.

    Attributes:
        backend: what carries the bytes, for the manifest: `none`, `horovod-mpi`, `gloo`, `rpc` …
        lockstep: whether all workers are at the same step at the same time.
        bytes_per_step: payload bytes sent in one step by all processes of the job together.
        version_read, staleness: of the last push, in the parameter-server modes; None elsewhere.
    """

    backend: str
    lockstep: bool
    bytes_per_step: float
    version_read: int | None
    staleness: int | None

    def prepare(self, model: "nn.Module") -> "nn.Module":
        """Give every worker the first worker's weights, and return the module to call forward on."""

    def wait(self, step: int, lr: float) -> None:
        """After backward: return when this worker holds what the step waits for. The exposed communication."""

    def update(self) -> None:
        """Apply the optimizer, where it runs on the worker."""

    def refresh(self) -> None:
        """Hold the newest weights (before an evaluation or a snapshot). All workers call it together."""

    def sum(self, values: "torch.Tensor") -> "torch.Tensor":
        """The elementwise sum over the workers of a small CPU tensor, on every worker. A barrier too."""

    def servers_rss_mb(self) -> float:
        """The servers' peak resident memory in MiB, added up."""

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


def load(mode: str) -> ModuleType:
    """The mode's module. UsageError, listing the modes, where there is none of that name."""
    if mode not in names():
        raise unknown("mode", mode, names())
    return importlib.import_module(f"hvdtrain.modes.{mode.replace('-', '_')}")
