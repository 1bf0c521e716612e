"""Parameter server, asynchronous: pushes are taken as they come, and nobody waits; staleness is unbounded."""

from functools import partial

from hvdtrain.modes.ps_ssp import StaleSynchronous
from hvdtrain.ps.serve import serve as serve_with
from hvdtrain.ps.worker import PushPull

FAMILY = "servers"
ORDER = 6
COLOUR = "#893e88"
MARKER = "P"
LOCKSTEP = False
SURVIVES_LOST_WORKER = True
WAIT_FOR = ("layer", "step")
OPTIONS = (
    "local_steps", "outer", "outer_lr", "outer_momentum",
    "push_scale", "look_ahead", "delay_compensation", "staleness_lr", "wire", "bucket_mb", "record",
)  # fmt: skip
COMPRESSIONS = ("any",)
SHARES = ("leased", "equal")

connect = PushPull
make_policy = partial(StaleSynchronous, staleness=None)
serve = partial(serve_with, make_policy=make_policy, lets_join=True)
