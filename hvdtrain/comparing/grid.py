"""The contenders of `hvdtrain compare`. All are planned and checked before the first run begins."""

import dataclasses
import itertools
import math
import random
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.base import modes
from hvdtrain.base.config import recipes
from hvdtrain.base.config.option_types import EQUAL
from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.config.run_config import LENGTHS, OF_LOCAL_STEPS, RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.numerics.compression import parse
from hvdtrain.base.numerics.slowdown import among_workers
from hvdtrain.base.system import own_code
from hvdtrain.base.system.cgroups import usable_cores
from hvdtrain.launch.hosts import Host, allocate, hosts_of_ranks
from hvdtrain.runs.launched import Launched, job_command
from hvdtrain.runs.live import warm_up_s
from hvdtrain.runs.request import CHOICES, check, check_workers, for_mode

# The variant of one process with the threads of one worker.
SCALING = "-scaling"
# Options that define a task. Runs of different tasks are not compared with each other.
TASK = ("model", "batch_size", "slow")
# Options that make another contender of the same task.
SETTINGS = (
    "staleness",
    "backup",
    "wire",
    "compression",
    "shares",
    "wait_for",
    "ring_transport",
    "bucket_mb",
    "local_steps",
)
SPANNED = (*TASK, *SETTINGS)
# The largest value of --seed.
LARGEST_SEED = 2**32 - 1
# Options of which the value alone stands in a run's name.
_VALUE_SPEAKS = ("model", "wire", "compression", "shares", "wait_for", "ring_transport")
# What stands before the value in a run's name, if that is not the option's name.
_SHORT = {"batch_size": "b", "slow": "slow-", "bucket_mb": "mb", "local_steps": "h"}


@dataclass(frozen=True)
class Axes:
    """What a grid spans. Every combination of values is a contender.

    A mode has only values that it can have: one machine has one worker, and rings have no servers.

    Attributes:
        modes: the modes.
        workers: numbers of workers.
        servers: numbers of servers. EQUAL stands for as many as there are workers.
        options: the values of each option of SPANNED, and of threads. Batches are as --batch-size,
            which with --per-worker is the batch of one worker. One machine is made slow where the
            first worker is. A mode that has no use for another option, or for none of its values,
            has the option as it is by default.
        unnamed: options of which a contender's name says nothing if they are as by default.
        on_one_host: numbers of workers of rings on the first of several hosts. If one process is
            compared, these rings stand for one machine too: `ddp` and the rings of `modes`.
        are_on_one_host: whether all runs of the grid are on the first host.
    """

    modes: Sequence[str]
    workers: Sequence[int] = (2,)
    servers: Sequence[int | str] = (1,)
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    unnamed: Collection[str] = ()
    on_one_host: Sequence[int] = ()
    are_on_one_host: bool = False


@dataclass(frozen=True)
class Planned:
    """One run that is to be done. `plan` makes the first whole run of each contender.

    A run that has finished is a runs.read.Run.

    Attributes:
        config: the run's configuration. Its global batch and learning rate are computed, however
            they were given.
        workers: the number of workers.
        launcher: starts the ranks.
        where: the task in the contender's name, as far as the grid spans several tasks:
            `vgg16-b64-` or empty.
        hosts: with the slots that the run takes; empty on this machine.
        variant: other options in the contender's name, as far as the grid spans several values:
            `-backup1-zmq` or empty.
        after_sprints: whether it is a whole run in a comparison of sprints.
        is_extra: whether a search added it, and nobody asked for it.
        one_machine: whether it is a ring on one host that stands for one machine, while others use
            several hosts.
    """

    config: RunConfig
    workers: int
    launcher: Launcher
    where: str = ""
    hosts: tuple[Host, ...] = ()
    variant: str = ""
    after_sprints: bool = False
    is_extra: bool = False
    one_machine: bool = False

    @property
    def family(self) -> str:
        """The family for which the run competes."""
        return modes.ONE_MACHINE if self.one_machine else modes.declared(self.config.mode).family

    @property
    def is_one_process(self) -> bool:
        """Whether the run competes as one process with its machine to itself."""
        is_machine = modes.declared(self.config.mode).family == modes.ONE_MACHINE
        return is_machine and self.variant != SCALING

    @property
    def side(self) -> str:
        """The name that rivals share.

        Rivals have the same task and family and, if they are distributed, as many workers. The
        baseline of scaling has no rivals.
        """
        if self.variant == SCALING:
            return f"{self.where}{SCALING}"
        size = "" if self.family == modes.ONE_MACHINE else f"-w{self.workers}"
        return f"{self.where}{self.family}{size}"

    @property
    def contender(self) -> str:
        """The name that repeats of the run share."""
        servers = f"-s{self.config.servers}" if self.config.servers else ""
        place = "-one-host" if self.one_machine else ""
        return f"{self.where}{self.config.mode}-w{self.workers}{servers}{place}{self.variant}"

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        whole = "-t" if self.after_sprints else ""
        return f"{self.contender}{whole}-r{self.config.repeat}"

    def command(self, out: Path, secrets: Collection[str] = ()) -> str:
        """Returns the shell command that does the same run.

        Args:
            out: the folder that the command names.
            secrets: names of variables that the ranks are given.
        """
        hosts = tuple(map(str, self.hosts))
        launched = Launched(self.launcher.option, hosts)
        return shlex.join(job_command(self.config, self.workers, launched, out, secrets))

    @property
    def ends_at_target(self) -> bool:
        """Whether the run may end before its length, because it has reached the target."""
        return self.config.stop_at_target and not self.config.sprint

    def training_seconds(self, samples: int, samples_per_s: float) -> float:
        """Returns about how long the run's steps take.

        Args:
            samples: the number of training images.
            samples_per_s: the speed.
        """
        config = self.config
        steps = config.total_steps(samples)
        if steps is not None:
            return steps * config.batch_size / samples_per_s
        return config.time_budget or config.sprint + warm_up_s(config.sprint)

    def with_options(self, **options: Any) -> "Planned":
        """Returns the run with other values of these options."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **options))

    def with_variant(self, variant: str) -> "Planned":
        """Returns the run with another variant in its name."""
        return dataclasses.replace(self, variant=variant)

    def as_repeat(self, repeat: int) -> "Planned":
        """Returns the run as the repeat of this number, with the repeat's seed."""
        return self.with_options(repeat=repeat, seed=self.config.seed + repeat - self.config.repeat)

    def sprint(self, seconds: float) -> "Planned":
        """Returns the run as a sprint."""
        no_lengths: dict[str, Any] = dict.fromkeys(LENGTHS, 0)
        return self.with_options(**no_lengths | {"sprint": seconds, "record": False})


def plan(
    config: RunConfig,
    axes: Axes,
    hosts: Sequence[Host] = (),
    launcher: Launcher | None = None,
    cores: Mapping[str, float] | None = None,
    scaling: bool = False,
    device_alone: str = "",
) -> list[Planned]:
    """Returns the contenders.

    Each contender uses all cores of its hosts, whoever else is compared: a worker computes with an
    equal share of its host's cores, and one machine with all cores of a host. --threads is about
    workers only.

    Args:
        config: what all contenders have in common.
        axes: what the grid spans.
        hosts: where runs go, also runs of one machine, since the launching host may be another.
        launcher: starts ranks on the hosts.
        cores: the cores that ranks may use on each host. If they are not known, or workers have
            unlike shares, each rank finds the share of its host.
        scaling: also plan one process with the threads of the worker that has least, if that is
            less than a whole machine.
        device_alone: --device of one machine, if workers have another.

    Raises:
        UsageError: a run could not be carried out.
    """
    runs = _plan_grid(config, axes, hosts, launcher)
    if len(hosts) > 1:
        runs += _plan_grid(config, _rings_on_one_host(config, axes), hosts, launcher)
    with_threads = [(run, _threads_of_workers(run, cores)) for run in runs]
    least_threads = _least_threads(with_threads, config.threads)
    contenders = []
    for run, threads in with_threads:
        is_machine = run.family == modes.ONE_MACHINE
        is_one_process = is_machine and not run.one_machine
        if scaling and is_one_process and 0 < least_threads < min(threads):
            baseline = run.with_options(threads=least_threads)
            contenders.append(dataclasses.replace(baseline, variant=SCALING))
        threads_of_all = min(threads) if len(threads) == 1 else 0
        device = device_alone if device_alone and is_machine else run.config.device
        contenders.append(run.with_options(threads=threads_of_all, device=device))
    return contenders


def _least_threads(with_threads: Sequence[tuple[Planned, set[int]]], default: int) -> int:
    """Returns the threads of the distributed worker that has least.

    Args:
        with_threads: the runs, each with the numbers of threads that its workers have.
        default: what is returned if no run is distributed.
    """
    distributed = [threads for run, threads in with_threads if run.family != modes.ONE_MACHINE]
    return min(itertools.chain.from_iterable(distributed), default=default)


def _plan_grid(
    config: RunConfig, axes: Axes, hosts: Sequence[Host], launcher: Launcher | None
) -> list[Planned]:
    """Returns the runs of a grid, with threads and device as in the configuration.

    Raises:
        UsageError: a run could not be carried out.
    """
    return [
        _plan_run(config, axes, combination, hosts, launcher) for combination in _combinations(axes)
    ]


class Combination(NamedTuple):
    """One of the combinations that a grid spans.

    Attributes:
        mode: the mode.
        workers: the number of workers.
        servers: the number of servers.
        options: the values of the options that the mode has a use for.
    """

    mode: str
    workers: int
    servers: int
    options: dict[str, Any]


def _plan_run(
    config: RunConfig,
    axes: Axes,
    combination: Combination,
    hosts: Sequence[Host],
    launcher: Launcher | None,
) -> Planned:
    """Returns the run of a combination.

    Raises:
        UsageError: it could not be carried out.
    """
    mode, workers, servers, options = combination
    requested = dataclasses.replace(for_mode(config, mode, servers), **options)
    if not requested.local_steps:
        defaults = {name: getattr(RunConfig, name) for name in OF_LOCAL_STEPS}
        requested = dataclasses.replace(requested, **defaults)
    resolved = check(requested).for_workers(workers)
    check_workers(resolved, workers)
    where, variant = _name_parts(axes, options)
    available = [Host(hosts[0].name, workers)] if axes.are_on_one_host else hosts
    used = tuple(allocate(available, workers, resolved.servers)) if available else ()
    if launcher and used:
        launcher_of_run = _launcher_of(resolved, launcher)
    else:
        launcher_of_run = recipes.launcher("local")
    is_ring = modes.declared(mode).family == modes.RING
    return Planned(
        resolved,
        workers,
        launcher_of_run,
        where,
        used,
        variant,
        is_extra=axes.are_on_one_host,
        one_machine=is_ring and len(used) == 1 and len(hosts) > 1,
    )


def _name_parts(axes: Axes, options: Mapping[str, Any]) -> tuple[str, str]:
    """Returns `where` and `variant` of a run that has these options."""
    where = ""
    variant = ""
    for name, value in options.items():
        is_varied = len(axes.options[name]) > 1
        is_usual = name in axes.unnamed and value == getattr(RunConfig, name)
        if not is_varied or is_usual:
            continue
        word = _word(name, value)
        if name in TASK:
            where += f"{word}-"
        elif word not in ("auto", "none"):
            variant += f"-{word}"
    return where, variant


def _launcher_of(config: RunConfig, launcher: Launcher) -> Launcher:
    """Returns the launcher of a run over hosts: MPI's ranks are started by mpirun, not over ssh."""
    if config.ring_transport == "mpi" and launcher.name == "ssh":
        return recipes.launcher("mpi")
    return launcher


def _rings_on_one_host(config: RunConfig, axes: Axes) -> Axes:
    """Returns the grid of the rings that stand for one machine beside one process.

    Their options are as by default. The grid is empty if one process is not compared.
    """
    families = {name: modes.declared(name).family for name in axes.modes}
    rings: list[str] = []
    if modes.ONE_MACHINE in families.values():
        asked_rings = [name for name in axes.modes if families[name] == modes.RING]
        rings = list(dict.fromkeys(["ddp", *asked_rings]))
    tasks = {name: values for name, values in axes.options.items() if name in TASK}
    batches = axes.options.get("batch_size", [config.batch_size])
    least_batch = min(batches) // config.accumulate
    sizes = [n for n in axes.on_one_host if config.per_worker or n <= least_batch]
    return Axes(rings, sizes, options=tasks, are_on_one_host=True)


def crowded(runs: Sequence[Planned], cores: Mapping[str, float] | None) -> list[str]:
    """Returns a sentence for each host with more workers in one run, or more threads in one worker,
    than it has cores.

    Args:
        cores: the cores that ranks may use on each host; None: they are not known.
    """
    most_by_host: dict[str, int] = {}
    most_threads = 0
    for run in runs:
        if run.config.device.startswith("cuda"):
            continue
        if run.family != modes.ONE_MACHINE:  # that has the threads of its host's cores
            most_threads = max(most_threads, run.config.threads)
        workers = {"": run.workers}
        if run.hosts:
            servers = run.config.servers
            workers = Counter(hosts_of_ranks(run.hosts, servers)[servers:])
        for host, number in workers.items():
            most_by_host[host] = max(number, most_by_host.get(host, 0))
    known = {"": usable_cores(), **(cores or {})}
    sentences = []
    for host, number in most_by_host.items():
        most = max(1.0, known.get(host, math.inf))
        where = f"on {host}" if host else "here"
        if most_threads > most:
            sentences.append(
                f"--threads {most_threads} with {with_noun(known[host], 'core')} {where}: a worker's "
                "threads wait for each other"
            )
        if number > most:
            sentences.append(
                f"{number} workers share {with_noun(known[host], 'core')} {where}: they wait for "
                "each other as workers on hosts of their own do not"
            )
    return sentences


def _threads_of_workers(run: Planned, cores: Mapping[str, float] | None) -> set[int]:
    """Returns the numbers of threads that workers of a run compute with, each once.

    If the cores of hosts are not known, it is the number that was asked for, as each rank knows the
    cores of its host. --threads is about workers; one machine has all cores of its host.
    """
    config = run.config
    if run.family == modes.ONE_MACHINE:
        config = dataclasses.replace(config, threads=0)
    if config.threads > 0:
        return {config.threads}
    if not run.hosts:
        shares = {usable_cores() / run.workers}
    elif cores:
        servers = run.config.servers
        hosts_of_workers = hosts_of_ranks(run.hosts, servers)[servers:]
        workers = Counter(hosts_of_workers)
        shares = {cores[host] / number for host, number in workers.items()}
    else:
        return {config.threads}
    return {config.threads_of(share) for share in shares}


def check_used(
    contenders: Sequence[Planned], given: Collection[str], config: RunConfig, axes: Axes
) -> None:
    """Refuses options on the command line that no contender has a use for.

    An option that only some contenders have a use for is as by default in the others; see Axes.
    --servers and --wire say how servers are compared if there are any, so that a command whose
    --modes is changed may keep them.

    Args:
        contenders: the contenders.
        given: the options on the command line.
        config: as `plan` was given it.
        axes: as `plan` was given them.

    Raises:
        UsageError: no contender has an option that was given, or one of its values. The message is
            the one of `train`.
    """
    for name in [*modes.optional(), "compression", *CHOICES]:
        if name not in given or name == "wire":
            continue
        values = axes.options.get(name, [getattr(config, name)])
        values_of_contenders = [getattr(run.config, name) for run in contenders]
        for value in values:
            if value not in values_of_contenders:
                check(dataclasses.replace(contenders[0].config, **{name: value}))


def in_rounds(contenders: Sequence[Planned], repeats: int) -> list[list[Planned]]:
    """Returns the runs of each repeat, in the order of a Williams design (1949) drawn by the seed.

    In n repeats of n contenders each contender is once in each place, and once directly after each
    other contender. For odd n this takes 2n repeats, and it is twice each. So neither warmth nor
    the run before favours a contender. In fewer repeats than contenders none is twice in a place.

    Raises:
        UsageError: there are not enough seeds.
    """
    seed = contenders[0].config.seed
    if seed + repeats - 1 > LARGEST_SEED:
        raise UsageError(
            f"--seed {seed} with {repeats} repeats goes beyond {LARGEST_SEED}, the largest seed"
        )
    draw = random.Random(seed)
    drawn = draw.sample(contenders, len(contenders))
    orders = _williams_design(draw.sample(range(len(drawn)), len(drawn)))
    rounds = []
    for repeat in range(1, repeats + 1):
        order = orders[(repeat - 1) % len(orders)]
        rounds.append([drawn[place].as_repeat(repeat) for place in order])
    return rounds


def _williams_design(shifts: Sequence[int]) -> list[list[int]]:
    """Returns orders of n treatments, a row each.

    There are n rows. For odd n the same rows follow reversed. Each treatment follows each other one
    equally often (Williams, Australian Journal of Scientific Research A 2, 1949).

    Args:
        shifts: the numbers 0 … n − 1, in the order in which the rows are wanted.
    """
    n = len(shifts)
    # 0, 1, n - 1, 2, n - 2, …
    zigzag = []
    for place in range(n):
        if place % 2:
            zigzag.append((place + 1) // 2)
        else:
            zigzag.append((n - place // 2) % n)
    square = [[(treatment + shift) % n for treatment in zigzag] for shift in shifts]
    if n % 2 == 0:
        return square
    return square + [row[::-1] for row in square]


def _combinations(axes: Axes) -> Iterator[Combination]:
    """Yields each combination that the axes span once."""
    seen = set()
    for combination in _repeating_combinations(axes):
        if str(combination) not in seen:
            seen.add(str(combination))
            yield combination


def _repeating_combinations(axes: Axes) -> Iterator[Combination]:
    """Yields the combinations that the axes span, some of them several times.

    So it is if several values of --slow are the same for one machine.
    """
    task_names = [name for name in TASK if name in axes.options]
    task_values = [axes.options[name] for name in task_names]
    for *task, mode in itertools.product(*task_values, axes.modes):
        task_options = dict(zip(task_names, task, strict=True))
        if axes.are_on_one_host or modes.declared(mode).max_workers == 1:
            _keep_slow_of_first_worker(task_options)
        values_by_name = _usable_options(axes, mode)
        sizes = _sizes(axes, mode)
        for (workers, servers), *values in itertools.product(sizes, *values_by_name.values()):
            options = task_options | dict(zip(values_by_name, values, strict=True))
            yield Combination(mode, workers, servers, options)


def _keep_slow_of_first_worker(options: dict[str, Any]) -> None:
    """Changes --slow to what it says of the first worker, which is what one machine has."""
    if "slow" in options:
        options["slow"] = among_workers(options["slow"], 1)


def _usable_options(axes: Axes, mode: str) -> dict[str, list[Any]]:
    """Returns the options that a mode uses, with the values it can have.

    Options of the task are left out.
    """
    usable = {}
    for name in axes.options:
        values = [] if name in TASK else _usable_values(axes, name, mode)
        if values:
            usable[name] = values
    return usable


def _usable_values(axes: Axes, name: str, mode: str) -> list[Any]:
    """Returns the values of an option that a mode can have.

    If there are none, the mode has the option as it is by default. `check_used` finds a value that
    no mode can have.
    """
    declared = modes.declared(mode)
    values = list(axes.options[name])
    if name == "threads":
        return [] if declared.max_workers == 1 else values
    if name in CHOICES:
        choices = ("auto", *getattr(declared, name))
        return [value for value in values if value in choices]
    if name == "compression":
        return [value for value in values if declared.can_send(parse(value)[0])]
    return values if name in declared.options else []


def _sizes(axes: Axes, mode: str) -> list[tuple[int, int]]:
    """Returns the numbers of workers and of servers that a mode has, each pair once."""
    declared = modes.declared(mode)
    numbers_of_workers = [declared.max_workers] if declared.max_workers else axes.workers
    numbers_of_servers = axes.servers if declared.has_servers else [0]
    sizes = []
    for workers, servers in itertools.product(numbers_of_workers, numbers_of_servers):
        sizes.append((workers, workers if servers == EQUAL else int(servers)))
    return list(dict.fromkeys(sizes))


def _word(name: str, value: Any) -> str:
    """Returns what stands for an option's value in a run's name."""
    if name == "threads":
        return f"spare{-value}"
    if name == "model":
        value = own_code.short(value)
    prefix = "" if name in _VALUE_SPEAKS else _SHORT.get(name, name)
    return prefix + re.sub("[^0-9a-z.]+", "_", str(value))


def dry_run_lines(
    runs: Sequence[Planned], folder: Path, secrets: Collection[str] = ()
) -> list[str]:
    """Returns the lines of --dry-run: for each run its name, and the command that does it alone.

    Args:
        runs: the runs.
        folder: the comparison's folder.
        secrets: see Planned.command.
    """
    lines = []
    for number, run in enumerate(runs, 1):
        command = run.command(folder / "runs" / run.name, secrets)
        lines.append(f"[{number}/{len(runs)}] {run.name}\n    {command}")
    return lines
