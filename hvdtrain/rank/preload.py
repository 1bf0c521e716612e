"""What a rank imports on its way, whatever its mode, for a process that loads it once and forks ranks."""

import gc
import importlib

# None of this starts a thread, which a fork would not have.
MODULES = (
    "hvdtrain.cli", "hvdtrain.rank.command", "hvdtrain.rank.process", "hvdtrain.rank.work", "hvdtrain.modes.single",
    "hvdtrain.modes.allreduce", "hvdtrain.modes.ddp", "hvdtrain.modes.ps_sync", "hvdtrain.modes.ps_async",
    "hvdtrain.modes.ps_ssp", "hvdtrain.ps.zeromq", "torch.utils.tensorboard", "torch._dynamo", "PIL.PngImagePlugin",
    "PIL.JpegImagePlugin", "numpy.random", "platformdirs", "tomli_w", "rich._emoji_codes",
)  # fmt: skip


def load() -> None:
    """Import it all, and keep the garbage collector from it: forks share its memory as long as nobody writes there."""
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
