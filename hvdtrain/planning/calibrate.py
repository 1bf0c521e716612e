"""Makes a calibration: measures this machine, and corrects that by finished runs."""

import os
import socket
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import NamedTuple

from hvdtrain.base.config.run_config import WIRES, RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.system.cgroups import usable_cores
from hvdtrain.base.system.memory import keep_memory
from hvdtrain.base.system.own_code import short
from hvdtrain.base.world.network import WIRE_KEY, new_wire_key
from hvdtrain.planning import probe
from hvdtrain.planning.calibration import Calibration, Quantity
from hvdtrain.planning.from_runs import (
    EFFICIENCIES,
    SINGLE,
    efficiency_around,
    from_runs,
    transport_name,
    with_computing,
)
from hvdtrain.planning.predict import simulate
from hvdtrain.planning.scenario import BUCKET_BYTES, Layer, Scenario, Transport
from hvdtrain.planning.sprints import LONGEST_STEP_S, sprints
from hvdtrain.runs.read import Run

# A calibration takes about a minute. Messages are measured until so many seconds after its
# beginning, links until so many, and computing takes so many, or twice as many beside other work.
MESSAGES_S = 26.0
LINKS_S = 36.0
PROFILE_S = 8.0
# The costs of a transport that could not be measured in time: a two-core EPYC machine's, with wide
# ranges. The efficiency is the share of a link's bandwidth that payload reaches. It was
# measured for both kinds of transport (tests/benchmarks/README.md).
UNKNOWN = {
    "message_us": Quantity(500, 100, 1500),
    "operation_us": Quantity(1500, 300, 5000),
    "send_s_per_gb": Quantity(0.7, 0.3, 2),
    "receive_s_per_gb": Quantity(0.7, 0.3, 2),
    "server_send_s_per_gb": Quantity(0.5, 0.2, 1.5),
    "server_receive_s_per_gb": Quantity(0.5, 0.2, 1.5),
    "efficiency": Quantity(0.94, 0.85, 0.96),
}
Costs = dict[str, Quantity]


class MeasuredHost(NamedTuple):
    """The hosts that a calibration is for.

    Attributes:
        cores: of a host; None: as many as are here.
        threads: that a worker is measured with.
        asked_threads: those that were asked for; 0: a worker's share of its host's cores.
        workers: on a host.
    """

    cores: float | None
    threads: int
    asked_threads: int
    workers: int


def measured_host(cores: float | None, threads: int | None, workers: int) -> MeasuredHost:
    """Returns what is measured for hosts of so many cores.

    Raises:
        UsageError: so many threads cannot be measured here.
    """
    here = usable_cores()
    if threads and threads > max(1.0, here):
        raise UsageError(
            f"--threads {threads}: {with_noun(here, 'core')} are here, on which so many cannot be "
            "measured; calibrate on such a host, or ask predict about --cores"
        )
    share = max(1, int(min(here, cores or here) / workers))
    return MeasuredHost(cores, threads or share, threads or 0, workers)


def calibrate(
    config: RunConfig,
    batch: int,
    host: MeasuredHost,
    say: Callable[[str], None],
    runs: Sequence[Run] = (),
    bandwidth: float | None = None,
) -> Calibration:
    """Measures a model and what messages cost on this machine.

    Args:
        config: has the model, width, dataset, optimizer and image size.
        batch: of a worker.
        host: that workers are on.
        say: shows the user a line.
        runs, bandwidth: as from_runs has them.
    """
    from hvdtrain.data.find import find_dataset_of

    # zmq encrypts, as between hosts.
    os.environ |= probe.ENVIRONMENT | {WIRE_KEY: new_wire_key()}
    keep_memory()  # as ranks do; forked processes inherit it
    # After the environment is set, which torch reads.
    import torch

    torch.set_num_threads(1)
    data = find_dataset_of(config)
    # Before anything computes: see probe.
    began = time.monotonic()
    measured = probe.measure(began + MESSAGES_S, say)
    over_links = probe.measure_links(began + LINKS_S, say)
    from hvdtrain.job.training.model import image_side
    from hvdtrain.planning import profile

    side = image_side(config, data)
    profiled = profile.profile(config, batch, data, side, host.threads, PROFILE_S, say)
    computing = profiled.computing
    parameters = round(sum(layer.gradient_megabytes for layer in computing["layers"]) * 250_000)
    guessed = [name for name in probe.TRANSPORTS if not _is_measured(name, measured)]
    costs = transports(measured)
    efficiencies = _efficiencies(costs, over_links)
    others = max([profiled.others, *(seconds.disturbed_by for seconds in measured.values())])
    calibration = Calibration(
        model={
            "name": short(config.model),
            "width": config.effective_width,
            "classes": len(data.classes),
            "image_size": side,
            "optimizer": config.optimizer,
            "parameters": parameters,
        },
        **computing,
        transports={
            name: of_transport | efficiencies.get(name, {}) for name, of_transport in costs.items()
        },
        cores_per_host=usable_cores(),
        workers_per_host=host.workers,
        wires=_wires(guessed) or WIRES[:1],
        most_workers=probe.WORKERS,
        made={
            "hvdtrain": version("hvdtrain"),
            "on": socket.gethostname(),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "how": "measured",
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "guessed": guessed,
            "efficiency_measured": list(efficiencies),
            "others_share": round(others, 3),
            "jitter": "measured" if profiled.jitter_is_known else "guessed",
        },
    )
    is_told = any(transport_name(run) == SINGLE for run in runs)
    if not (is_told or others):
        calibration = _with_training(calibration, config, say)
    if runs:
        calibration = from_runs(calibration, runs, bandwidth)
    if host.cores:
        calibration = calibration.on_hosts(host.cores, host.workers, host.asked_threads)
    if others:
        say(
            f"the machine did other work: {others:.0%} of it; disturbed measurements were repeated, and "
            "what is still disturbed has a wide range; calibrate again when the machine is quiet"
        )
    for run in runs:
        if run.manifest.hvdtrain != version("hvdtrain"):
            say(
                f"{run.name} was run with hvdtrain {run.manifest.hvdtrain}, not "
                f"{version('hvdtrain')}: its steps may have taken more or less time than today's"
            )
    for name in calibration.made.get("left_nothing", []):
        say(
            f"{name} does not show what messages cost: its processor time leaves nothing for them "
            "beside computing"
        )
    for name in calibration.made["guessed"]:
        say(f"{name} could not be measured in time: its costs are guesses, with wide ranges")
    return calibration


def _with_training(
    calibration: Calibration, config: RunConfig, say: Callable[[str], None]
) -> Calibration:
    """Returns the calibration with what training takes beside its layers, if steps are short."""
    step_s = simulate(calibration.with_costs(Scenario(SINGLE))).step_s
    if step_s > LONGEST_STEP_S:
        return calibration
    threads = [calibration.threads_per_worker]
    cores = int(usable_cores())
    if cores > threads[0]:
        threads.append(cores)
    with sprints(config, calibration.batch_per_worker, threads, say) as runs:
        if not runs:
            return calibration
        try:
            trained = with_computing(calibration, runs)
        except UsageError as error:  # of too few steps, say
            say(f"the trainings are left out: {error}")
            return calibration
        counted = [run.manifest.threads_per_worker for run in runs]
    return replace(trained, made=calibration.made | {"trained_threads": counted})


def _is_measured(name: str, measured: probe.Measured) -> bool:
    """Returns whether a transport was measured with both sizes of blocks."""
    return (name, probe.LARGE) in measured and (name, probe.SMALL) in measured


def _wires(guessed: Collection[str]) -> tuple[str, ...]:
    """Returns the wires of servers that were measured."""
    wires = []
    for name, transport in probe.TRANSPORTS.items():
        if transport.servers and name not in guessed:
            wires.append(transport.wire)
    return tuple(wires)


def transports(measured: probe.Measured) -> dict[str, Costs]:
    """Returns what messages cost, for each transport.

    Where other work disturbed, the range is wider.

    Args:
        measured: by transport and size of blocks. What is missing is guessed.
    """
    all_costs = {}
    for name, transport in probe.TRANSPORTS.items():
        costs = dict(UNKNOWN)
        has_servers = transport.servers > 0
        small = measured.get((name, probe.SMALL))
        if small:
            costs |= _wider(_costs_of_messages(small, has_servers), small)
        large = measured.get((name, probe.LARGE))
        if large:
            costs |= _wider(_costs_of_bytes(large, has_servers, costs), large)
        all_costs[name] = costs
    return all_costs


def _wider(costs: Costs, seconds: probe.StepSeconds) -> Costs:
    """Returns costs with the range that other work leaves of them."""
    factor = 1 + seconds.disturbed_by
    return {name: cost.give_or_take(factor) for name, cost in costs.items()}


def _costs_of_messages(small: probe.StepSeconds, has_servers: bool) -> Costs:
    """Returns what messages cost as such, from steps of small blocks."""
    if has_servers:
        # A step is a push and an answer at the worker, and as many at the server for each worker.
        at_server = [server_s / probe.WORKERS for server_s in small.server_s]
        step = Quantity.of([*small.worker_s, *at_server])
        return {"message_us": step.times(1e6 / 2), "operation_us": Quantity.exactly(0.0)}
    # A step is two hops, and what comes before them. Nobody knows which is how much: half each.
    step = Quantity.of(small.worker_s)
    return {"message_us": step.times(1e6 / 4), "operation_us": step.times(1e6 / 2)}


def _costs_of_bytes(large: probe.StepSeconds, has_servers: bool, costs: Costs) -> Costs:
    """Returns what bytes cost, from steps of large blocks.

    Sending and receiving were measured together. Each has half of the processor seconds.

    Args:
        costs: of messages as such.
    """
    size = probe.BLOCKS * probe.LARGE
    message_s = 1e-6 * costs["message_us"].value
    if has_servers:
        messages_of_worker_s = 2 * size / BUCKET_BYTES * message_s
        messages_of_server_s = probe.WORKERS * messages_of_worker_s
    else:
        messages_of_worker_s = 1e-6 * costs["operation_us"].value + 2 * message_s
        messages_of_server_s = 0.0
    worker = _per_gb(large.worker_s, messages_of_worker_s, size)
    server = _per_gb(large.server_s, messages_of_server_s, size).times(1 / probe.WORKERS)
    return {
        "send_s_per_gb": worker,
        "receive_s_per_gb": worker,
        "server_send_s_per_gb": server,
        "server_receive_s_per_gb": server,
    }


def _per_gb(steps_s: Sequence[float], messages_s: float, size: int) -> Quantity:
    """Returns processor seconds for sending, or for receiving, a GB.

    Args:
        steps_s: processor seconds of steps that send and receive `size` bytes.
        messages_s: the part of them that messages cost as such.
    """
    of_bytes = [max(probe.FLOOR, step_s - messages_s) for step_s in steps_s]
    return Quantity.of(of_bytes).times(1e9 / size / 2)


def _efficiencies(costs: Mapping[str, Costs], over_links: probe.Measured) -> dict[str, Costs]:
    """Returns the `efficiency` of each transport that was measured undisturbed at both rates."""
    found = {}
    for name, of_transport in costs.items():
        seconds = [over_links.get((name, gbit)) for gbit in probe.RATES]
        undisturbed = [each for each in seconds if each and each.others <= probe.LINKED_OTHERS]
        if len(undisturbed) == len(probe.RATES):
            efficiency = efficiency_of(name, of_transport, *undisturbed)
            if efficiency:
                found[name] = {"efficiency": efficiency}
    return found


def efficiency_of(
    name: str, costs: Costs, at_slow: probe.StepSeconds, at_fast: probe.StepSeconds
) -> Quantity | None:
    """Returns the share of a link that payload reaches, from steps at the two probe.RATES.

    What messages cost the processors is the same at both rates. So the difference of two steps is
    the link's alone, and the efficiency is the one with which simulated steps differ as much.

    Returns:
        None where noise hides the difference.
    """
    most_s = max(at_slow.wall_s) - min(at_fast.wall_s)
    least_s = min(at_slow.wall_s) - max(at_fast.wall_s)
    middle_s = statistics.median(at_slow.wall_s) - statistics.median(at_fast.wall_s)
    if least_s <= 0:
        return None

    def less_s(share: float) -> float:
        """Returns by how much a simulated step is shorter at the slower rate, a negative number."""
        slow_s, fast_s = (_step_over_link_s(name, costs, share, gbit) for gbit in probe.RATES)
        return fast_s - slow_s

    last = len(EFFICIENCIES) - 1
    share = EFFICIENCIES[bisect_left(EFFICIENCIES, -middle_s, hi=last, key=less_s)]
    around = efficiency_around(share)
    low = min(around.low, share * middle_s / most_s)
    high = max(around.high, share * middle_s / least_s)
    return Quantity(share, low, min(1.0, high))


def _step_over_link_s(name: str, costs: Costs, efficiency: float, gbit: float) -> float:
    """Returns the seconds of a simulated step of the job that is measured over links."""
    probed = probe.TRANSPORTS[name]
    figures = {key: cost.value for key, cost in costs.items()} | {"efficiency": efficiency}
    ranks = probe.WORKERS + probed.servers
    job = Scenario(
        probed.mode,
        (Layer(probe.LINKED // 4, 0.0, 1e-9),) * probe.BLOCKS,
        probe.WORKERS,
        probed.servers,
        gbit,
        transport=Transport(**figures),
        cores=usable_cores() / ranks,
        wire=probed.wire,
        wait_for="step",
    )
    return simulate(job).step_s
