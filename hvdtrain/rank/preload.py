"""What a rank imports on its way, in nearly every mode, for a process that loads it once and forks ranks."""

import importlib

from hvdtrain.world.memory import importing

# None of this starts a thread, which a fork would not have.
MODULES = (
    "hvdtrain.cli", "hvdtrain.rank.command", "hvdtrain.rank.process", "hvdtrain.rank.work", "hvdtrain.modes.single",
    "hvdtrain.modes.allreduce", "hvdtrain.modes.ddp", "hvdtrain.modes.ps_sync", "hvdtrain.modes.ps_async",
    "hvdtrain.modes.ps_ssp", "hvdtrain.ps.zeromq", "torch.utils.tensorboard", "torch.nested._internal.nested_tensor",
    "PIL.PngImagePlugin", "PIL.JpegImagePlugin", "numpy.random", "platformdirs", "tomli_w", "rich._emoji_codes",
)  # fmt: skip
OF_MODE = {"ddp": ("torch._dynamo",)}  # which takes as long as all the others together


def load(mode: str = "") -> None:
    """Import it all, with what that mode needs besides. The garbage collector keeps off it: forks share its memory as
    long as nobody writes there.
    """
    with importing():
        for name in (*MODULES, *OF_MODE.get(mode, ())):
            importlib.import_module(name)
