"""What forked ranks find loaded: the process that forks them imports this."""

import atexit
import os

import hvdtrain.checks.replay  # noqa: F401
from hvdtrain.rank import preload

preload.load("ddp")
atexit.register(os._exit, 0)  # its own end; ranks are told not to call it, and end by themselves
