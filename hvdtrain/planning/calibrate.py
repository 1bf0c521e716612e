"""Measures this machine, or reads finished runs, and makes a calibration of it."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from hvdtrain.config.run_config import WIRES, RunConfig
from hvdtrain.planning import probe
from hvdtrain.planning.calibration import Calibration, Quantity
from hvdtrain.planning.from_runs import from_runs
from hvdtrain.planning.scenario import BUCKET_BYTES
from hvdtrain.runs.read import Run
from hvdtrain.system.cgroups import usable_cores
from hvdtrain.system.own_code import short
from hvdtrain.world.network import WIRE_KEY, new_wire_key

BUDGET_S = 50.0  # of a calibration that is to take 60 s at most
PROFILE_S = 8.0
# Where a kind could not be measured in time: what a two-core EPYC machine had, with a wide range. Share of a link's
# bandwidth that payload reaches: 0.94 and 0.95 of 1 Gbit/s were measured of both kinds of transport
# (tests/benchmarks/README.md), of 100 Mbit/s less.
UNKNOWN = {
    "message_us": Quantity(500, 100, 1500), "operation_us": Quantity(1500, 300, 5000),
    "send_s_per_gb": Quantity(0.7, 0.3, 2), "receive_s_per_gb": Quantity(0.7, 0.3, 2),
    "server_send_s_per_gb": Quantity(0.5, 0.2, 1.5), "server_receive_s_per_gb": Quantity(0.5, 0.2, 1.5),
    "efficiency": Quantity(0.94, 0.85, 0.96),
}  # fmt: skip


def calibrate(
    config: RunConfig, batch: int, say: Callable[[str], None], runs: Sequence[Run] = (), bandwidth: float | None = None
) -> Calibration:
    """Measure the model, width, dataset, optimizer and image size of the config, and the modes, on this machine; `runs`
    and `bandwidth` as from_runs has them. `say` shows the user a line.
    """
    from hvdtrain.data.find import find_dataset

    os.environ |= probe.ENVIRONMENT | {WIRE_KEY: new_wire_key()}  # zmq encrypts, as between hosts
    import torch

    torch.set_num_threads(1)
    data = find_dataset(config.dataset)
    say("messages: two workers and a server here, over TCP …")
    measured = probe.measure(time.monotonic() + BUDGET_S - PROFILE_S)
    say("layers: forward and backward …")
    from hvdtrain.planning import profile
    from hvdtrain.rank.work import image_side

    side = image_side(config, data)
    computing = profile.profile(config, batch, data, side, PROFILE_S)
    parameters = round(sum(layer.gradient_megabytes for layer in computing["layers"]) * 250_000)
    missing = [kind for kind in probe.OF_KIND if not {(kind, probe.LARGE), (kind, probe.SMALL)} <= measured.keys()]
    made = Calibration(
        model={
            "name": short(config.model), "width": config.taken_width, "classes": len(data.classes), "image_size": side,
            "optimizer": config.optimizer, "parameters": parameters,
        },
        **computing, transports=transports(measured), cores_per_host=usable_cores(),
        wires=tuple(w for kind, (_, k, w) in probe.OF_KIND.items() if k and kind not in missing) or WIRES[:1],
        most_workers=probe.WORKERS, made={
            "on": socket.gethostname(), "at": datetime.now(UTC).isoformat(timespec="seconds"), "how": "measured",
            "load_average": [round(load, 2) for load in os.getloadavg()], "guessed": missing,
        },
    )  # fmt: skip
    if runs:
        made = from_runs(made, runs, bandwidth)
    for kind in made.made["guessed"]:
        say(f"{kind} could not be measured in time: its costs are guesses, with wide ranges")
    return made


def transports(measured: Mapping[tuple[str, int], probe.Measured]) -> dict[str, dict[str, Quantity]]:
    """What messages cost, of each kind, from steps of small and of large blocks."""
    size, costs = probe.BLOCKS * probe.LARGE, {}
    for kind, (_, servers, _) in probe.OF_KIND.items():
        costs[kind] = known = dict(UNKNOWN)
        small, large = (measured.get((kind, block)) for block in (probe.SMALL, probe.LARGE))
        if small and servers:  # a push and an answer at the worker, and as many at the server for each worker
            seconds = Quantity.of([*small.worker_s, *(s / probe.WORKERS for s in small.server_s)])
            known |= {"message_us": seconds.times(1e6 / 2), "operation_us": Quantity.exactly(0.0)}
        elif small:  # Two hops, and what comes before them. Nobody knows which is how much: half each.
            seconds = Quantity.of(small.worker_s)
            known |= {"message_us": seconds.times(1e6 / 4), "operation_us": seconds.times(1e6 / 2)}
        if not large:
            continue
        message_s = 1e-6 * known["message_us"].value
        of_worker, of_server = 1e-6 * known["operation_us"].value + 2 * message_s, 0.0
        if servers:
            of_worker = 2 * size / BUCKET_BYTES * message_s
            of_server = probe.WORKERS * of_worker
        # Sending and receiving were measured together: half of the processor seconds of a GB each.
        worker = Quantity.of([max(probe.FLOOR, s - of_worker) for s in large.worker_s]).times(1e9 / size / 2)
        server = Quantity.of([max(probe.FLOOR, s - of_server) for s in large.server_s]).times(1e9 / size / 2)
        server = server.times(1 / probe.WORKERS)
        known |= {"send_s_per_gb": worker, "receive_s_per_gb": worker}
        known |= {"server_send_s_per_gb": server, "server_receive_s_per_gb": server}
    return costs
