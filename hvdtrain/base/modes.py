"""Modes and their declarations.

Each file of `hvdtrain/job/modes/` is a mode: `ps_async.py` is `--mode ps-async`. It has:

- `MODE`, a `Mode`, and a docstring. The first paragraph is the mode's help. Commands that do not
  train import the file too, so it imports torch, and modules that need torch, within functions.
- `connect(job) -> Synchroniser`, which every worker calls once.
- with servers, `serve(job, report)`, which every server calls once, and
  `make_policy(workers, config)`, which returns the `ps.policy.Policy` that decides when a server
  applies a push.

A mode that is `elastic`, or has "leased" in `shares`, gets the Arrival of a worker that joins
(`connect(job, arrival=None)`). With leased shares `connect` returns a synchroniser that is a
`coordination.synchroniser.LeasesShares` too, and `serve` gets the memory of a killed server
(`serve(job, report, killed=None)`), in which the plain attributes of a policy and its `sum` survive.
"""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import ModuleType
from typing import Protocol

from hvdtrain.base.errors import unknown
from hvdtrain.base.numerics.compression import CODECS

RING, SERVERS, ONE_MACHINE = "ring", "servers", "one machine"
# Options of a mode that can take local steps. Lockstep has `fragments` too.
LOCAL_STEPS = ("local_steps", "outer", "outer_lr", "outer_momentum")
_PACKAGE = "hvdtrain.job.modes"


class EffectiveOptions(Protocol):
    """What a run recorded of the options that its mode decides if they are not given."""

    @property
    def push_scale(self) -> str | None: ...

    @property
    def look_ahead(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The declaration of a mode.

    Attributes:
        name: the name of the mode's file, with hyphens.
        help: the first paragraph of the file's docstring.
        family: RING, SERVERS or ONE_MACHINE, for which the mode competes in an answer. In a mode of
            SERVERS the first ranks are parameter servers, the others workers.
        order: the mode's place in tables and legends.
        colour, marker: the mode's look in plots. Any two colours are at least 20 CIE76 units apart,
            also with protanopia, deuteranopia or tritanopia (simulated after Machado et al., 2009).
            Rings are blue.
        lockstep: whether all workers are at the same step at the same time, and every push counts.
            Then `verify` compares the weights with one process's, and the training of one such
            mode stands for all in a comparison. Leaving pushes out is an option, as ps-sync's
            backup. Without lockstep a policy has to answer `idle`, or workers would wait for ever
            for a worker that pushes nothing for now.
        survives_lost_worker: whether other workers go on when one dies.
        elastic: whether they do with `launch --elastic`.
        options: the fields of RunConfig that this mode uses, and not every mode does.
        compressions: the codecs in which the mode can send gradients; ("any",) for all codecs that
            each worker can apply alone.
        max_workers: the most workers that the mode can have; None for any number.
        joins_horovod: whether the ranks find each other through Horovod alone if the starter knows
            it. Then their number has no limit.
        shares: the ways in which the samples of a global batch can be shared out, the default
            first: `equal`, `measured`, `leased`.
        wait_for: what can wait for fresh weights, the default first: the next forward of each
            `layer`, or the next `step`. Empty if neither applies.
        shards_optimizer: whether each worker updates a part of the weights alone, for all. Else
            each worker of a ring updates all of them.
        step_words: returns what a report says of how pushes become a step, if anything, given what
            a run recorded.
    """

    family: str
    order: int
    colour: str
    marker: str
    name: str = ""
    help: str = ""
    lockstep: bool = True
    survives_lost_worker: bool = False
    elastic: bool = False
    options: tuple[str, ...] = ()
    compressions: tuple[str, ...] = ("none",)
    max_workers: int | None = None
    shares: tuple[str, ...] = ("equal",)
    wait_for: tuple[str, ...] = ()
    joins_horovod: bool = False
    shards_optimizer: bool = False
    step_words: Callable[[EffectiveOptions], str] | None = None

    @property
    def has_servers(self) -> bool:
        return self.family == SERVERS

    def can_send(self, codec: str) -> bool:
        if codec in self.compressions:
            return True
        spec = CODECS.get(codec)
        return "any" in self.compressions and spec is not None and spec.encode is not None


@cache
def _declared() -> dict[str, Mode]:
    """Returns all modes by name, in the order of tables."""
    package = importlib.import_module(_PACKAGE)
    modes = [_read(module.name) for module in pkgutil.iter_modules(package.__path__)]
    return {mode.name: mode for mode in sorted(modes, key=lambda mode: (mode.order, mode.name))}


def _read(stem: str) -> Mode:
    module = _module(stem)
    declared: Mode = module.MODE
    summary = inspect.cleandoc(module.__doc__ or "").split("\n\n")[0]
    name = stem.replace("_", "-")
    return dataclasses.replace(declared, name=name, help=summary.replace("\n", " "))


def _module(stem: str) -> ModuleType:
    return importlib.import_module(f"{_PACKAGE}.{stem}")


def names() -> list[str]:
    """Returns every mode's name, in the order of tables."""
    return list(_declared())


def optional() -> list[str]:
    """Returns the options that not every mode uses, each once."""
    return list(dict.fromkeys(chain.from_iterable(mode.options for mode in _declared().values())))


def declared(name: str) -> Mode:
    """Returns what the mode declares.

    Raises:
        UsageError: there is no such mode. The message lists the modes.
    """
    declared_modes = _declared()
    if name not in declared_modes:
        raise unknown("mode", name, list(declared_modes))
    return declared_modes[name]


def load(name: str) -> ModuleType:
    """Returns the mode's module.

    Raises:
        UsageError: there is no such mode. The message lists the modes.
    """
    return _module(declared(name).name.replace("-", "_"))
