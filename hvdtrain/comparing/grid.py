"""The contenders of `hvdtrain compare`: each planned and checked before the first run begins."""

import dataclasses
import itertools
import random
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import modes
from hvdtrain.config import recipes
from hvdtrain.config.option_types import EQUAL
from hvdtrain.config.recipes import Launcher
from hvdtrain.config.run_config import LENGTHS, OF_LOCAL_STEPS, RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host, allocate
from hvdtrain.numerics.compression import parse
from hvdtrain.numerics.slowdown import among_workers
from hvdtrain.runs.launched import Launched, job_command
from hvdtrain.runs.request import CHOICES, check, check_workers, for_mode
from hvdtrain.system import own_code
from hvdtrain.system.cgroups import usable_cores

TASK = ("model", "batch_size", "slow")  # what differs in these is compared for itself
SPANNED = (
    *TASK, "staleness", "backup", "wire", "compression", "shares", "wait_for", "ring_transport", "bucket_mb",
    "local_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Axes:
    """What a grid spans; every combination is a contender, but that one machine has one worker, and rings no servers.

    Attributes:
        servers: EQUAL stands for as many as there are workers.
        options: of SPANNED, each with its values. Batches are as --batch-size, so of a worker with --per-worker; one
            process is made slow where that names no other worker than its own; a mode that has no use for one of the
            others, or for none of its values, has it as it is by default.
    """

    modes: Sequence[str]
    workers: Sequence[int] = (2,)
    servers: Sequence[int | str] = (1,)
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """One run of the grid; as `plan` makes it, a contender's first whole one.

    Attributes:
        config: of its own global batch and learning rate, whatever they were given as.
        where: the task, as far as the grid spans several: `vgg16-b64-` or empty.
        hosts: with the slots that it takes; empty on this machine.
        variant: likewise of other options: `-backup1-zmq` or empty.
        after_sprints: it is a whole run where others are sprints.
    """

    config: RunConfig
    workers: int
    launcher: Launcher
    where: str = ""
    hosts: tuple[Host, ...] = ()
    variant: str = ""
    after_sprints: bool = False

    @property
    def family(self) -> str:
        return modes.declared(self.config.mode).family

    @property
    def side(self) -> str:
        """The name that its rivals share: on the same task, with as many workers, of the same family."""
        return f"{self.where}{self.family}-w{self.workers}"

    @property
    def contender(self) -> str:
        """The name that its repeats share."""
        servers = f"-s{self.config.servers}" if self.config.servers else ""
        return f"{self.where}{self.config.mode}-w{self.workers}{servers}{self.variant}"

    @property
    def name(self) -> str:
        return f"{self.contender}{'-t' if self.after_sprints else ''}-r{self.config.repeat}"

    def command(self, out: Path, secrets: Collection[str] = ()) -> str:
        """What a shell does the same run with; secrets: the names of variables that its ranks are given."""
        launched = Launched(self.launcher.option, tuple(map(str, self.hosts)))
        return shlex.join(job_command(self.config, self.workers, launched, out, secrets))

    def with_options(self, **options: Any) -> "Planned":
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **options))

    def as_repeat(self, repeat: int) -> "Planned":
        """The same as the repeat of this number, with its seed."""
        return self.with_options(repeat=repeat, seed=self.config.seed + repeat - self.config.repeat)

    def sprint(self, seconds: float) -> "Planned":
        """The same as a sprint."""
        return self.with_options(**dict.fromkeys(LENGTHS, 0) | {"sprint": seconds, "record": False})


def plan(
    config: RunConfig, axes: Axes, hosts: Sequence[Host] = (), launcher: Launcher | None = None,
    cores: Mapping[str, float] | None = None, scaling: bool = False,
) -> list[Planned]:  # fmt: skip
    """The contenders.

    All workers of rings and of servers compute with as many threads as those can that have least room; one machine
    with all of its cores.

    Args:
        hosts: where runs go, those of one machine too: the launching one may be another.
        launcher: by which they go there.
        cores: that ranks may use on each host. Where nobody knows them, each rank finds its own share.
        scaling: also one process with the threads of a worker, as far as that is not a whole machine.

    Raises:
        UsageError: a run that could not be carried out.
    """
    runs = []
    for mode, workers, servers, options in _combinations(axes):
        asked = dataclasses.replace(for_mode(config, mode, servers), **options)
        if not asked.local_steps:
            asked = dataclasses.replace(asked, **{name: getattr(RunConfig, name) for name in OF_LOCAL_STEPS})
        resolved = check(asked).for_workers(workers)
        check_workers(resolved, workers)
        words = {name: _word(name, value) for name, value in options.items() if len(axes.options[name]) > 1}
        where = "".join(f"{word}-" for name, word in words.items() if name in TASK)
        variant = "".join(
            f"-{word}" for name, word in words.items() if name not in TASK and word not in ("auto", "none")
        )
        used = tuple(allocate(hosts, workers, resolved.servers)) if hosts else ()
        by = launcher if launcher and used else recipes.launcher("local")
        runs.append(Planned(resolved, workers, by, where, used, variant))
    room = []  # of each, how many threads a worker can have to itself; 0 where nobody knows
    for run in runs:
        if run.hosts:
            room.append(min(max(1, int(cores[host.name] // host.slots)) for host in run.hosts) if cores else 0)
        else:
            room.append(max(1, int(usable_cores() // run.workers)))
    shared = [most for run, most in zip(runs, room, strict=True) if run.family != modes.ONE_MACHINE]
    threads = config.threads or min(shared, default=max(room))
    contenders = []
    for run, most in zip(runs, room, strict=True):
        if run.family != modes.ONE_MACHINE:
            most = threads
        elif scaling and threads < most:
            contenders.append(dataclasses.replace(run.with_options(threads=threads), variant="-scaling"))
        contenders.append(run.with_options(threads=most))
    return contenders


def in_rounds(contenders: Sequence[Planned], repeats: int) -> list[list[Planned]]:
    """The runs of each repeat, shuffled by the seed: none has always the same neighbour.

    Raises:
        UsageError: there are not so many seeds.
    """
    seed = contenders[0].config.seed
    if seed + repeats > 2**32:
        raise UsageError(f"--seed {seed} with {repeats} repeats goes beyond {2**32 - 1}, the largest seed")
    return [
        random.Random(f"{seed} {repeat}").sample([run.as_repeat(repeat) for run in contenders], len(contenders))
        for repeat in range(1, repeats + 1)
    ]


def _combinations(axes: Axes) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Mode, workers, servers, options; each once."""
    seen = set()
    tasks = [name for name in TASK if name in axes.options]
    for *task, mode in itertools.product(*(axes.options[name] for name in tasks), axes.modes):
        used = {name: found for name in axes.options if name not in TASK and (found := _values(axes, name, mode))}
        for (workers, servers), *values in itertools.product(_sizes(axes, mode), *used.values()):
            options = dict(zip([*tasks, *used], [*task, *values], strict=True))
            if modes.declared(mode).max_workers == 1 and "slow" in options:
                options["slow"] = among_workers(options["slow"], 1)
            run = mode, workers, servers, options
            if str(run) not in seen:
                yield run
            seen.add(str(run))


def _values(axes: Axes, name: str, mode: str) -> list[Any]:
    """Those of an option's values that the mode can have; none where it has no use for any. Where one is asked for that
    it cannot have, that is found when it is checked.
    """
    declared, values = modes.declared(mode), list(axes.options[name])
    if name in CHOICES:
        return [value for value in values if value in ("auto", *getattr(declared, name))]
    if name == "compression":
        return [value for value in values if len(values) == 1 or declared.can_send(parse(value)[0])]
    return values if name in declared.options else []


def _sizes(axes: Axes, mode: str) -> list[tuple[int, int]]:
    """Numbers of workers and of servers."""
    declared = modes.declared(mode)
    workers = [declared.max_workers] if declared.max_workers else axes.workers
    servers = axes.servers if declared.has_servers else [0]
    return list(dict.fromkeys((n, n if s == EQUAL else int(s)) for n in workers for s in servers))


def _word(name: str, value: Any) -> str:
    """What stands for an option's value in a run's name."""
    speaks = "model", "wire", "compression", "shares", "wait_for", "ring_transport"  # the value alone does
    if name == "model":
        value = own_code.short(value)
    short = {"batch_size": "b", "slow": "slow-", "bucket_mb": "mb", "local_steps": "h"}.get(name, name)
    return ("" if name in speaks else short) + re.sub("[^0-9a-z.]+", "_", str(value))


def dry_run_lines(runs: Sequence[Planned], folder: Path, secrets: Collection[str] = ()) -> list[str]:
    """For --dry-run: each run, and the command that does it alone.

    Args:
        secrets: as Planned.command.
    """
    lines = [(run.name, run.command(folder / "runs" / run.name, secrets)) for run in runs]
    return [f"[{number}/{len(runs)}] {name}\n    {command}" for number, (name, command) in enumerate(lines, 1)]
