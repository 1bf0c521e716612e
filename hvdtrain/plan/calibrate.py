"""Measures this machine, or reads finished runs, and makes a calibration of it."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import Failure
from hvdtrain.launch.hosts import Host
from hvdtrain.plan import probe
from hvdtrain.plan.calibration import Calibration, Quantity
from hvdtrain.system.cgroups import usable_cores

BUDGET_S = 50.0  # of a calibration that is to take 60 s at most
PROFILE_S = 8.0
LEAST_RUN_S, GRACE_S = 8.0, 10.0  # a job is not begun with less time, and is ended so long after it
# Share of a link's bandwidth that payload reaches: 0.94 and 0.95 of 1 Gbit/s were measured of both kinds of transport
# (tests/benchmarks/README.md), of 100 Mbit/s less.
EFFICIENCY = Quantity(0.94, 0.85, 0.96)
# Where a kind could not be measured in time: what a two-core EPYC machine had, with a wide range.
UNKNOWN = {
    "message_us": Quantity(500, 100, 1500), "operation_us": Quantity(1500, 300, 5000),
    "send_s_per_gb": Quantity(0.7, 0.3, 2), "receive_s_per_gb": Quantity(0.7, 0.3, 2),
    "server_send_s_per_gb": Quantity(0.5, 0.2, 1.5), "server_receive_s_per_gb": Quantity(0.5, 0.2, 1.5),
}  # fmt: skip
FLOOR = 1e-9  # of a cost that noise hides


def calibrate(
    config: RunConfig, batch: int, say: Callable[[str], None], hosts: Sequence[Host] = (),
    runs: Sequence[Path] = (), bandwidth: float | None = None,
) -> Calibration:  # fmt: skip
    """Measure the model and the modes on this machine.

    Args:
        config: model, width, dataset, optimizer, image_size.
        say: shows the user a line.
        hosts: run a short job of each kind there too, as far as there is time.
        runs, bandwidth: see from_runs.
    """
    deadline = time.monotonic() + BUDGET_S
    os.environ |= probe.ENVIRONMENT
    import torch

    torch.set_num_threads(1)
    classes, side = _classes_and_side(config)
    measured: dict[tuple[str, int], probe.Measured] = {}
    if not hosts:  # there, real jobs say it
        say("messages: two workers and a server here, over TCP …")
        measured = probe.measure(deadline - PROFILE_S)
    say("layers: forward and backward …")
    from hvdtrain.plan import profile

    optimizer = profile.optimizer_ms_per_mb(config)
    codecs = profile.codec_costs()
    found = profile.profile(config, batch, classes, side, PROFILE_S)
    missing = [kind for kind in probe.OF_KIND if (kind, probe.LARGE) not in measured]
    made = Calibration(
        model={
            "name": config.model, "width": config.taken_width, "classes": classes, "image_size": side,
            "optimizer": config.optimizer,
            "parameters": round(sum(layer.gradient_megabytes for layer in found.layers) * 250_000),
        },
        batch_per_worker=batch, layers=found.layers, fixed_ms=found.fixed_ms, optimizer_ms_per_mb=optimizer,
        transports=transports(measured), codecs=codecs, batch_fixed_share=round(found.batch_fixed_share, 4),
        step_jitter=round(found.jitter, 4), cores_per_host=usable_cores(), most_workers=probe.WORKERS,
        made={
            "on": socket.gethostname(), "at": datetime.now(UTC).isoformat(timespec="seconds"), "how": "measured",
            "load_average": [round(load, 2) for load in os.getloadavg()], "guessed": missing,
        },
    )  # fmt: skip
    if hosts or runs:
        from hvdtrain.plan.from_runs import from_runs

        with tempfile.TemporaryDirectory(prefix="hvdtrain-plan-") as folder:
            short = _short_runs(config, batch, hosts, Path(folder), deadline, say) if hosts else []
            made = from_runs(made, [*runs, *short], bandwidth)
    for kind in made.made["guessed"]:
        say(f"{kind} could not be measured in time: its costs are guesses, with wide ranges")
    return made


def _short_runs(
    config: RunConfig, batch: int, hosts: Sequence[Host], folder: Path, deadline: float, say: Callable[[str], None]
) -> list[Path]:
    """Real jobs of a few steps on these hosts, a worker on each and one server."""
    where = ", ".join(host.name for host in hosts)
    found: list[Path] = []
    for mode, servers in (("ps-sync", 1), ("allreduce", 0), ("ddp", 0)):
        left = deadline - time.monotonic()
        if left < LEAST_RUN_S:
            say(f"no time is left to run {mode} on {where}")
            continue
        say(f"{mode} on {where} …")
        out = folder / mode
        slots = ",".join(f"{host.name}:{2 if servers and not number else 1}" for number, host in enumerate(hosts))
        command = [
            sys.executable, "-Pm", "hvdtrain", "launch", "--launcher", "ssh", "-n", str(len(hosts)),
            "-s", str(servers), "-H", slots, "--out", str(out), "--", "--mode", mode,
            *_options(config, batch * len(hosts)),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left + GRACE_S
            )
        except subprocess.TimeoutExpired:
            say(f"{mode} on {where} took too long and was ended")
            continue
        if done.returncode:
            raise Failure(f"{mode} on {where} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        found.append(out)
    return found


def _options(config: RunConfig, batch: int) -> list[str]:
    return [
        "--model", config.model, "--width", str(config.taken_width), "--dataset", config.dataset,
        "--image-size", str(config.image_size), "--optimizer", config.optimizer, "--batch-size", str(batch),
        "--steps", "8", "--snapshot-every", "never", "--threads", "1", "--schedule", "constant",
    ]  # fmt: skip


def transports(measured: Mapping[tuple[str, int], probe.Measured]) -> dict[str, dict[str, Quantity]]:
    """What messages cost, of each kind, from steps of small and of large blocks."""
    found: dict[str, dict[str, Quantity]] = {}
    for kind in probe.OF_KIND:
        small, large = measured.get((kind, probe.SMALL)), measured.get((kind, probe.LARGE))
        of = dict(UNKNOWN)
        if small:
            of |= _message_costs(kind, small)
        if large:
            of |= _byte_costs(kind, large, of)
        found[kind] = of | {"efficiency": EFFICIENCY}
    return found


def _message_costs(kind: str, small: probe.Measured) -> dict[str, Quantity]:
    """A step of small blocks is one message, or one collective."""
    alone = min(small["alone"]["cpu_s"])
    own = [max(FLOOR, cpu - alone) for cpu in small["together"]["cpu_s"]]
    if kind == "ps":  # a push and an answer at the worker, and as many at the server for each worker
        both = own + [cpu / probe.WORKERS for cpu in small["together"]["server_cpu_s"]]
        return {"message_us": Quantity.of([cpu / 2 * 1e6 for cpu in both]), "operation_us": Quantity.of([0.0])}
    # Of a ring of two: two hops, and what comes before them. Nobody knows which is how much: half each.
    return {
        "operation_us": Quantity.of([cpu / 2 * 1e6 for cpu in own]),
        "message_us": Quantity.of([cpu / 4 * 1e6 for cpu in own]),
    }


def _byte_costs(kind: str, large: probe.Measured, of: Mapping[str, Quantity]) -> dict[str, Quantity]:
    """Processor seconds of a GB, half of them for sending and half for receiving: together they were measured."""
    gigabytes = probe.BLOCKS * probe.LARGE / 1e9
    alone = min(large["alone"]["cpu_s"])
    pieces = probe.BLOCKS * probe.LARGE / RunConfig.bucket_mb / 2**20
    message = of["message_us"].value / 1e6
    if kind == "ps":
        known, of_server = 2 * pieces * message, 2 * pieces * message * probe.WORKERS
    else:
        known, of_server = of["operation_us"].value / 1e6 + 2 * message, 0.0
    own = Quantity.of([max(FLOOR, cpu - alone - known) / gigabytes / 2 for cpu in large["together"]["cpu_s"]])
    theirs = Quantity.of([
        max(FLOOR, cpu - of_server) / gigabytes / probe.WORKERS / 2 for cpu in large["together"]["server_cpu_s"]
    ])  # fmt: skip
    return {
        "send_s_per_gb": own, "receive_s_per_gb": own, "server_send_s_per_gb": theirs,
        "server_receive_s_per_gb": theirs,
    }  # fmt: skip


def _classes_and_side(config: RunConfig) -> tuple[int, int]:
    """How many classes the data set has, and the side of images in pixels."""
    from hvdtrain.data.find import find_dataset
    from hvdtrain.data.image import native_side

    data = find_dataset(config.dataset)
    return len(data.classes), config.image_size or native_side(data)
