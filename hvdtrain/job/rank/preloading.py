"""What processes load from which ranks are forked: see fork_server.py and respawn.py."""

import importlib
import os
from collections.abc import Iterable

from hvdtrain.base.errors import Failure
from hvdtrain.base.system.memory import importing
from hvdtrain.job.rank.process import set_threads

# What ranks of parameter servers import on their way, and workers that join a job. None of it
# starts a thread.
JOINING = (
    "hvdtrain.job.rank.prepare",
    "hvdtrain.job.ps.serve",
    "hvdtrain.job.ps.worker",
    "hvdtrain.job.wire.zeromq",
    "torch.utils.tensorboard",
    "torch.nested._internal.nested_tensor",
    "PIL.PngImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.PpmImagePlugin",
    "numpy.random",
    "numpy.ma",  # for numpy.unique
    "platformdirs",
)
# What ranks of all modes import.
TRAINING = (
    *JOINING,
    "hvdtrain.cli",
    "hvdtrain.job.rank.command",
    "hvdtrain.job.rank.process",
    "hvdtrain.job.coordination.meeting",
    "hvdtrain.job.rings.allreduce",
    "hvdtrain.job.rings.ddp",
    "hvdtrain.job.rings.sharded",
    "hvdtrain.data.packed",
    "encodings.idna",  # for socket.getaddrinfo
    "tomli_w",
    "rich._emoji_codes",
)


def preload(modules: Iterable[str]) -> None:
    """Imports modules into this process, which is to fork ranks.

    Call it before torch or numpy is imported, since both read how many threads they may start.

    Raises:
        Failure: an import has started a thread, which forks would lack.
    """
    set_threads(1, is_server=True)  # until a rank knows better
    with importing():
        for name in modules:
            importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise Failure(f"imports have started {threads - 1} threads, which forked ranks would lack")
