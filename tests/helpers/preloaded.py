"""What forked ranks find loaded: the process that forks them imports this."""

import atexit
import importlib
import os

import hvdtrain.checks.replay  # noqa: F401
from hvdtrain.system.memory import importing

# What ranks import on their way in every mode. None of it starts a thread, which a fork would not have.
MODULES = (
    "hvdtrain.cli", "hvdtrain.rank.command", "hvdtrain.rank.process", "hvdtrain.rank.work", "hvdtrain.modes.single",
    "hvdtrain.modes.allreduce", "hvdtrain.modes.ddp", "hvdtrain.modes.ps_sync", "hvdtrain.modes.ps_async",
    "hvdtrain.modes.ps_ssp", "hvdtrain.wire.zeromq", "torch.utils.tensorboard", "torch.nested._internal.nested_tensor",
    "PIL.PngImagePlugin", "PIL.JpegImagePlugin", "numpy.random", "platformdirs", "tomli_w", "rich._emoji_codes",
    "torch._dynamo",
)  # fmt: skip
with importing():
    for name in MODULES:
        importlib.import_module(name)
atexit.register(os._exit, 0)  # its own end; ranks are told not to call it, and end by themselves
