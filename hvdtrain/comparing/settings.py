"""Which settings of each side a search can try before a comparison.

A setting is a contender with a value for each option that changes no result, such as the wire or
the size of a bucket. Both sides get equally many settings.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from hvdtrain.base import modes
from hvdtrain.base.config.option_types import EQUAL
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.comparing.grid import SCALING, Axes, Planned
from hvdtrain.job.buckets.send_queue import with_used_buckets
from hvdtrain.launch.forking import may_have_gpus
from hvdtrain.launch.hosts import Host
from hvdtrain.runs.read import grouped

# Options that change no result, with the values that are tried. The default is the first.
SPACE: Mapping[str, Sequence[Any]] = {
    "wait_for": ("auto", "layer", "step"),
    "bucket_mb": (4.0, 1.0, 16.0),
    # All cores of a worker, or one left free for messages or a server.
    "threads": (0, -1),
}
# A ring's other transport. The launcher's is MPI on this machine, and Gloo over hosts.
TRANSPORT_HERE: Mapping[str, Sequence[Any]] = {"ring_transport": ("auto", "gloo")}
TRANSPORT_OVER_HOSTS: Mapping[str, Sequence[Any]] = {"ring_transport": ("auto", "mpi")}
# What settings differ in. What is likely to matter most is first.
VARIED = (
    "wire",
    "ring_transport",
    "mode",
    "wait_for",
    "servers",
    "threads",
    "bucket_mb",
)


def widen(
    axes: Axes,
    plan_of: Callable[[Axes], list[Planned]],
    hosts: Sequence[Host] = (),
    given: Collection[str] = (),
) -> list[Planned]:
    """Returns a contender for each setting of each side, varying the options that were not given.

    If a ring is compared, all rings and both transports are tried. If servers are, one server and
    as many as workers. The values in SPACE are tried for both sides.

    Args:
        axes: what was asked for.
        plan_of: plans axes. If it refuses a value, since no model of this job could be trained so,
            the option is not varied.
        hosts: where runs go.
        given: options on the command line. They are not varied, even if they are as by default.
    """
    contenders = plan_of(axes)
    for change in _widenings(axes, hosts, given):
        with contextlib.suppress(UsageError):
            wider_axes = change(axes)
            contenders = plan_of(wider_axes)
            axes = wider_axes
    return contenders


def _widenings(
    axes: Axes, hosts: Sequence[Host], given: Collection[str]
) -> Iterator[Callable[[Axes], Axes]]:
    """Yields each way to widen axes."""
    rings = [name for name in modes.names() if modes.declared(name).family == modes.RING]
    if "modes" not in given and any(name in rings for name in axes.modes):
        yield partial(_with_modes, names=rings)
    if "servers" not in given and list(axes.servers) == [1]:
        yield _with_equal_servers
    transports = TRANSPORT_OVER_HOSTS if hosts else TRANSPORT_HERE
    # A launcher that was given decides over hosts.
    if hosts and "launcher" in given:
        transports = {}
    for name, values in {**SPACE, **transports}.items():
        usual = [getattr(RunConfig, name)]
        if name not in given and list(axes.options.get(name, usual)) == usual:
            yield partial(_with_values, name=name, values=values)


def _with_modes(axes: Axes, names: Sequence[str]) -> Axes:
    """Returns the axes with more modes."""
    return dataclasses.replace(axes, modes=list(dict.fromkeys([*axes.modes, *names])))


def _with_equal_servers(axes: Axes) -> Axes:
    """Returns the axes with one server and with as many servers as workers."""
    return dataclasses.replace(axes, servers=[1, EQUAL])


def _with_values(axes: Axes, name: str, values: Sequence[Any]) -> Axes:
    """Returns the axes with these values of an option. Contenders' names leave out the default."""
    options = {**axes.options, name: values}
    return dataclasses.replace(axes, options=options, unnamed={*axes.unnamed, name})


def sides(contenders: Sequence[Planned]) -> dict[str, list[Planned]]:
    """Returns the distributed contenders by side: rings, and servers, of each task and size."""
    distributed = [run for run in contenders if is_distributed(run)]
    return grouped(distributed, lambda run: run.side)


def sides_by_task(contenders: Sequence[Planned]) -> list[dict[str, list[Planned]]]:
    """Returns the sides of each task and number of workers."""
    by_task: dict[Hashable, dict[str, list[Planned]]] = {}
    for side, settings in sides(contenders).items():
        task = (settings[0].where, settings[0].workers)
        by_task.setdefault(task, {})[side] = settings
    return list(by_task.values())


def machines_by_side(contenders: Sequence[Planned]) -> dict[str, list[Planned]]:
    """Returns the contenders that stand for one machine, by side. Each task has one such side."""
    machines = []
    for run in contenders:
        if run.family == modes.ONE_MACHINE and run.variant != SCALING:
            machines.append(run)
    return grouped(machines, lambda run: run.side)


def on_equal_terms(
    requested: Sequence[Planned], wide: Sequence[Planned], most: int | None = None
) -> list[Planned]:
    """Returns the contenders that were asked for, and more that make both sides equal.

    On each task, with as many workers, there are as many settings of rings as of servers, as far as
    `wide` has so many.

    Args:
        requested: the contenders that were asked for.
        wide: the contenders of widened axes. The settings that differ least from what was asked for
            are taken first.
        most: the most settings of a side in a long search, which draws settings by the seed.
    """
    extras = [dataclasses.replace(run, is_extra=True) for run in _others(requested, wide)]
    extras.sort(key=lambda run: _distance(run, requested))
    if most:
        random.Random(requested[0].config.seed).shuffle(extras)
    chosen = list(requested)
    for sides_of_task in sides_by_task(requested):
        # In the short search there is nothing to make equal if there is one side.
        if len(sides_of_task) < 2 and not most:
            continue
        extras_by_side = {
            side: [run for run in extras if run.side == side] for side in sides_of_task
        }
        number = max(len(settings) for settings in sides_of_task.values())
        if most:
            available = [
                len(settings) + len(extras_by_side[side])
                for side, settings in sides_of_task.items()
            ]
            number = max(number, min(most, *available))
        for side, settings in sides_of_task.items():
            missing = max(0, number - len(settings))
            chosen += extras_by_side[side][:missing]
    return chosen


def with_fewer_threads(contenders: Sequence[Planned], given: Collection[str] = ()) -> list[Planned]:
    """Returns one process with half of its threads, with a quarter of them, and so on.

    The threads of a small model wait for each other at each layer, so that fewer may be faster. One
    process has no more settings than a side, so that all have an equal chance.

    Args:
        contenders: the contenders, on equal terms.
        given: options on the command line. Threads that were given are not varied.
    """
    if "threads" in given:
        return []
    most = max((len(settings) for settings in sides(contenders).values()), default=1)
    taken = {_what_it_does(run) for run in contenders}
    extras = []
    for run in contenders:
        threads = run.config.threads
        if not run.is_one_process or _computes_on_gpu(run.config):
            continue
        for _ in range(most - 1):
            threads //= 2
            extra = run.with_options(threads=threads).with_variant(f"{run.variant}-t{threads}")
            if threads and _what_it_does(extra) not in taken:
                extras.append(dataclasses.replace(extra, is_extra=True))
    return extras


def _computes_on_gpu(config: RunConfig) -> bool:
    """Returns whether one process on this machine would use a GPU."""
    return config.device == "cuda" or (config.device == "auto" and may_have_gpus())


def _others(requested: Sequence[Planned], wide: Sequence[Planned]) -> list[Planned]:
    """Returns the runs of `wide` that do something else than `requested` and than each other."""
    names = {run.contender for run in requested}
    seen = {_what_it_does(run) for run in requested}
    others = []
    for run in wide:
        if run.contender in names or _says_default(run) or _what_it_does(run) in seen:
            continue
        seen.add(_what_it_does(run))
        others.append(run)
    return others


def _what_it_does(run: Planned) -> Hashable:
    """Returns a key that is the same for runs that do the same."""
    config = with_used_buckets(run.config, run.workers)
    return config, run.workers, run.hosts, run.launcher.name


def _says_default(run: Planned) -> bool:
    """Returns whether --wait-for names the mode's default, which `auto` stands for too."""
    return run.config.wait_for in modes.declared(run.config.mode).wait_for[:1]


def _distance(run: Planned, requested: Sequence[Planned]) -> tuple[int, list[int]]:
    """Returns a key that sorts settings by how many options nobody asked for, and by which."""
    differing = [
        name
        for name in ("wait_for", "bucket_mb", "ring_transport")
        if getattr(run.config, name) != getattr(RunConfig, name)
    ]
    requested_threads = {other.config.threads for other in requested if other.side == run.side}
    if run.config.threads not in requested_threads:
        differing.append("threads")
    for name in ("mode", "servers"):
        requested_values = {getattr(other.config, name) for other in requested}
        if getattr(run.config, name) not in requested_values:
            differing.append(name)
    return len(differing), sorted(VARIED.index(name) for name in differing)


def is_distributed(run: Planned) -> bool:
    return run.family != modes.ONE_MACHINE
