"""Parameter server, asynchronous: each push is applied at once, in the order of arrival; staleness is unbounded."""

from functools import partial

from hvdtrain.modes.ps_ssp import StaleSynchronous
from hvdtrain.ps import client

connect = partial(client.connect, lockstep=False)
policy = partial(StaleSynchronous, staleness=None)
serve = partial(client.serve, make_policy=policy)
