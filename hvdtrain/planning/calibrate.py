"""Measures this machine, or reads finished runs, and makes a calibration of it."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from hvdtrain.config.run_config import RunConfig
from hvdtrain.planning import probe
from hvdtrain.planning.calibration import Calibration, Quantity
from hvdtrain.system.cgroups import usable_cores
from hvdtrain.system.own_code import short

if TYPE_CHECKING:
    from hvdtrain.runs.read import Run

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
FLOOR = 1e-9  # of a cost that noise hides


def calibrate(
    config: RunConfig, batch: int, say: Callable[[str], None], runs: "Sequence[Run]" = (),
    bandwidth: float | None = None,
) -> Calibration:  # fmt: skip
    """Measure the model and the modes on this machine.

    Args:
        config: model, width, dataset, optimizer, image_size.
        say: shows the user a line.
        runs, bandwidth: see from_runs.
    """
    from hvdtrain.data.find import find_dataset

    os.environ |= probe.ENVIRONMENT
    import torch

    torch.set_num_threads(1)
    data = find_dataset(config.dataset)
    say("messages: two workers and a server here, over TCP …")
    measured = probe.measure(time.monotonic() + BUDGET_S - PROFILE_S)
    say("layers: forward and backward …")
    from hvdtrain.planning import profile
    from hvdtrain.rank.work import image_side

    classes, side = len(data.classes), image_side(config, data)
    computing = profile.profile(config, batch, data, side, PROFILE_S)
    parameters = round(sum(layer.gradient_megabytes for layer in computing["layers"]) * 250_000)
    missing = [kind for kind in probe.OF_KIND if (kind, probe.LARGE) not in measured]
    made = Calibration(
        model={
            "name": short(config.model), "width": config.taken_width, "classes": classes, "image_size": side,
            "optimizer": config.optimizer, "parameters": parameters,
        },
        **computing, optimizer_ms_per_mb=profile.optimizer_ms_per_mb(config), codecs=profile.codec_costs(),
        transports=transports(measured), cores_per_host=usable_cores(), most_workers=probe.WORKERS,
        made={
            "on": socket.gethostname(), "at": datetime.now(UTC).isoformat(timespec="seconds"), "how": "measured",
            "load_average": [round(load, 2) for load in os.getloadavg()], "guessed": missing,
        },
    )  # fmt: skip
    if runs:
        from hvdtrain.planning.from_runs import from_runs

        made = from_runs(made, runs, bandwidth)
    for kind in made.made["guessed"]:
        say(f"{kind} could not be measured in time: its costs are guesses, with wide ranges")
    return made


def transports(measured: Mapping[tuple[str, int], probe.Measured]) -> dict[str, dict[str, Quantity]]:
    """What messages cost, of each kind, from steps of small and of large blocks."""
    costs: dict[str, dict[str, Quantity]] = {}
    for kind in probe.OF_KIND:
        costs[kind] = dict(UNKNOWN)
        if small := measured.get((kind, probe.SMALL)):
            costs[kind] |= _message_costs(kind, small)
        if large := measured.get((kind, probe.LARGE)):
            costs[kind] |= _byte_costs(kind, large, costs[kind])
    return costs


def _message_costs(kind: str, small: probe.Measured) -> dict[str, Quantity]:
    """A step of small blocks is one message, or one collective."""
    seconds = _beyond_computing(small)
    if kind == "ps":  # a push and an answer at the worker, and as many at the server for each worker
        seconds += [cpu / probe.WORKERS for cpu in small["together"]["server_cpu_s"]]
        return {"message_us": Quantity.of(seconds).times(1e6 / 2), "operation_us": Quantity.exactly(0.0)}
    # Of a ring of two: two hops, and what comes before them. Nobody knows which is how much: half each.
    return {"operation_us": Quantity.of(seconds).times(1e6 / 2), "message_us": Quantity.of(seconds).times(1e6 / 4)}


def _byte_costs(kind: str, large: probe.Measured, known: Mapping[str, Quantity]) -> dict[str, Quantity]:
    """Processor seconds of a GB, half of them for sending and half for receiving: together they were measured."""
    size = probe.BLOCKS * probe.LARGE
    message_s = known["message_us"].value / 1e6
    of_messages, of_server = known["operation_us"].value / 1e6 + 2 * message_s, 0.0
    if kind == "ps":
        of_messages = 2 * size / RunConfig.bucket_mb / 2**20 * message_s
        of_server = probe.WORKERS * of_messages
    worker = [max(FLOOR, cpu - of_messages) for cpu in _beyond_computing(large)]
    server = [max(FLOOR, cpu - of_server) / probe.WORKERS for cpu in large["together"]["server_cpu_s"]]
    per_gb, server_per_gb = (Quantity.of(seconds).times(1e9 / size / 2) for seconds in (worker, server))
    return {
        "send_s_per_gb": per_gb, "receive_s_per_gb": per_gb, "server_send_s_per_gb": server_per_gb,
        "server_receive_s_per_gb": server_per_gb,
    }  # fmt: skip


def _beyond_computing(measured: probe.Measured) -> list[float]:
    """Processor seconds of a worker's steps, less those of a step alone."""
    alone = min(measured["alone"]["cpu_s"])
    return [max(FLOOR, cpu - alone) for cpu in measured["together"]["cpu_s"]]
