"""One module a mode: `ps_async.py` is `--mode ps-async`, and adding a mode is adding a file.

A mode's module says what it is in plain constants, read here without importing it (see Mode), and its docstring's
first line is the mode's help. It holds `connect(job) -> Synchroniser`, called once by every worker, and where it has
servers `serve(job, report)`, called once by every server, and `make_policy(workers, config)`, whose ps.bucket.Policy
decides when a server applies a push. A mode whose SHARES has "leased", or that is ELASTIC, takes the Arrival of a
worker that joins (`connect(job, arrival=None)`). The former connects to a ps.worker.PushPull, and takes the memory of a
killed server (`serve(job, report, killed=None)`): whatever its policy knows then survives, in plain attributes and in
`sum`. Constants are literals, and any other name in capitals is an error, unless it begins with an underscore, as the
names of shared modules do, which are no modes.
"""

import ast
import dataclasses
import importlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from hvdtrain.errors import unknown

RING, SERVERS, ONE_MACHINE = "ring", "servers", "one machine"
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Mode:
    """What a mode's module declares: each field but the first two is a constant of that name in capitals.

    Attributes:
        family: RING, SERVERS or ONE_MACHINE: which answer it stands for. In a mode of SERVERS the first ranks are
            parameter servers, the others workers.
        order: its place in tables and legends.
        colour, marker: in plots. Any two colours are at least 20 CIE76 units apart, also with protanopia, deuteranopia
            or tritanopia (simulated after Machado et al., 2009): blues for rings.
        lockstep: all workers are at the same step at the same time, and every push counts: `verify` holds the weights
            to those of one process, and a training of one such mode stands for all in a comparison. To leave pushes out
            is an option, as ps-sync's backup. Without lockstep a policy has to answer `idle`: who waits for a worker
            that pushes nothing for now would go on waiting.
        survives_lost_worker: the others go on when a worker dies.
        elastic: they do with `launch --elastic`.
        options: those of RunConfig's fields that not every mode uses and this one does.
        compressions: the codecs that it can send gradients with; ("any",) for all that need one worker alone.
        max_workers: None for any number.
        joins_horovod: where the starter knows Horovod, the ranks find each other through that alone: without limit.
        shares: how the samples of a global batch can be shared out, the default first: `equal`, `measured`,
            `leased`.
        wait_for: what can wait for fresh weights, the default first: the next forward of each `layer`, or the next
            `step`; nothing where neither is known.
    """

    name: str
    help: str
    family: str
    order: int
    colour: str
    marker: str
    lockstep: bool = True
    survives_lost_worker: bool = False
    elastic: bool = False
    options: tuple[str, ...] = ()
    compressions: tuple[str, ...] = ("none",)
    max_workers: int | None = None
    shares: tuple[str, ...] = ("equal",)
    wait_for: tuple[str, ...] = ()
    joins_horovod: bool = False

    @property
    def has_servers(self) -> bool:
        return self.family == SERVERS

    def can_send(self, codec: str) -> bool:
        return codec in self.compressions or ("any" in self.compressions and codec != "powersgd")


@cache
def _declared() -> dict[str, Mode]:
    """All modes by name, in their order."""
    modes = [_read(path) for path in _FOLDER.glob("[!_]*.py")]
    return {mode.name: mode for mode in sorted(modes, key=lambda mode: (mode.order, mode.name))}


def names() -> list[str]:
    """Every mode's name, in the order of tables."""
    return list(_declared())


def declared(name: str) -> Mode:
    """What the mode's module says that it is, without importing it. UsageError where there is no such mode."""
    if name not in _declared():
        raise unknown("mode", name, names())
    return _declared()[name]


def _read(path: Path) -> Mode:
    tree = ast.parse(path.read_text())
    constants = {
        node.targets[0].id.lower(): ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.isupper()
        and not node.targets[0].id.startswith("_")
    }
    fields = {field.name for field in dataclasses.fields(Mode)}
    if others := constants.keys() - fields:
        raise ValueError(f"{path} declares {', '.join(sorted(others))}, of which nobody knows")
    return Mode(path.stem.replace("_", "-"), help=(ast.get_docstring(tree) or "").split("\n")[0], **constants)


def load(name: str) -> ModuleType:
    """The mode's module. UsageError, listing the modes, where there is none of that name."""
    return importlib.import_module(f"hvdtrain.modes.{declared(name).name.replace('-', '_')}")
