"""`hvdtrain compare`: the same model on the same samples under several modes, one after the other, and an answer."""

import dataclasses
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.comparing.earlier import asked, claimed, find_finished
from hvdtrain.comparing.forecast import Record, forecast
from hvdtrain.comparing.grid import SPANNED, Axes, dry_run_lines, plan
from hvdtrain.comparing.pilot import but_for_the_wire, of_a_side
from hvdtrain.comparing.reporting import content_of, draw_report, margin_options
from hvdtrain.comparing.running import Comparison
from hvdtrain.comparing.tune import sides, told, widen
from hvdtrain.config import recipes
from hvdtrain.config.command_line import MODES, NUM_SERVERS, NUM_WORKERS, GroupedCommand, given_options
from hvdtrain.config.file import read_config, started_workers
from hvdtrain.config.option_types import DURATION, NUMBERS, SERVER_NUMBERS, Folder, Several
from hvdtrain.config.recipes import Launcher
from hvdtrain.config.run_config import DEFAULT_EPOCHS, LENGTHS, WIRES, RunConfig
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.launch.allocation import allocated_cores, hosts_or_here
from hvdtrain.launch.hosts import Host, host_options, launcher_option, secrets_option
from hvdtrain.launch.preflight import describe_hosts
from hvdtrain.models import is_own
from hvdtrain.report.contenders import Margins
from hvdtrain.report.rule import LOOKS
from hvdtrain.runs.read import find_runs
from hvdtrain.runs.request import check_length, check_trusted, train_options
from hvdtrain.system.own_code import is_code
from hvdtrain.world.host import differences

if TYPE_CHECKING:
    from hvdtrain.report.content import Content

MOST_REPEATS = 20  # of --until-sure, where --repeats is not given
WHOLE = LENGTHS - {"sprint"}
TITLES = {name: recipes.load("presets", name)["title"] for name in recipes.names("presets")}
PRESETS = "\b\nPresets:\n" + "\n".join(f"  {name:<18}{title}" for name, title in TITLES.items())  # to end the help


def _use_preset(ctx: click.Context, param: click.Parameter, name: str) -> str:
    """The preset's options are defaults: what stands on the command line wins."""
    if name:
        ctx.default_map = _tuned_options(Path(name)) if _is_file(name) else recipes.load("presets", name)["options"]
    return name


def _is_file(preset: str) -> bool:
    """Whether it is a user's, such as --tune leaves, and no name."""
    return preset.endswith(".toml")


def _tuned_options(file: Path) -> dict[str, Any]:
    """The options of a config.toml, such as --tune leaves, as a preset's."""
    found = read_config(file)
    workers = started_workers(file)
    decided = {"repeat", "seed", "threads", "sprint", *(name for name in WHOLE if not found.get(name))}
    options = {name: value for name, value in found.items() if name not in decided | {"mode", "servers"}}
    if options.get("epochs") == DEFAULT_EPOCHS:
        del options["epochs"]
    sizes = {name: [value] for name, value in (("workers", workers), ("servers", found.get("servers"))) if value}
    return options | sizes | {"modes": [found["mode"]]}


@click.command(cls=GroupedCommand, epilog=PRESETS)
@click.option(
    "--preset", default="", is_eager=True, callback=_use_preset, metavar="NAME",
    help="Repeat a published experiment, at its size: its options are the defaults of all others here, and the report "
    "has its authors' table with their figures, if there is one. The names are below; a file is what --tune has "
    "left, or a run's config.toml.",
)  # fmt: skip
@click.option(
    *MODES, type=Several(), default="single,allreduce,ps-sync,ps-async", show_default=True,
    help="Modes to compare, by commas; see `hvdtrain modes`.",
)  # fmt: skip
@click.option(
    *NUM_WORKERS, type=NUMBERS, default="2", show_default="2, on hosts as many as they take",
    help="Numbers of workers, by commas.",
)  # fmt: skip
@click.option(
    *NUM_SERVERS, type=SERVER_NUMBERS, default="1", show_default=True,
    help="Numbers of servers of the ps- modes, by commas; `equal` is as many as workers.",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(1), default=5, show_default="5, of whole runs 1",
    help="How often each is measured, each time with the next seed; an answer needs five.",
)  # fmt: skip
@click.option(
    "--trainings", type=click.IntRange(0), show_default="1, and a second where the answer hangs on it",
    help="How many whole runs follow the sprints, of one of those that do the same mathematics: for what is learned.",
)  # fmt: skip
@click.option(
    "--tune", type=DURATION, default=None,
    help="First look for the fastest setting of rings and of servers, for so long in all: all rings, their transports, "
    "wires, --bucket-mb 1, 4 and 16, --wait-for layer and step, more servers, as far as they are not given. "
    "The best of each is compared, in other runs; OUT/tuned-….toml has its options, for --preset and train --config.",
)  # fmt: skip
@click.option(
    "--until-sure", is_flag=True,
    help=f"Repeat until the answer is known, at most --repeats times (here {MOST_REPEATS} by default).",
)  # fmt: skip
@click.option(
    "--scaling", is_flag=True,
    help="Also one process with the threads of one worker, of which scaling efficiency is a multiple.",
)  # fmt: skip
@host_options
@launcher_option
@secrets_option
@click.option(
    "--dry-run", is_flag=True,
    help="Print the runs, the command that repeats each, and what they will take; run nothing.",
)  # fmt: skip
@train_options("mode", "servers", "repeat", several=SPANNED, snapshot_every="never", sprint=3.0, wire=",".join(WIRES))
@margin_options
@click.option(
    "--out", default="", type=Folder(),
    help="Folder for runs and report: new or empty, or that of an earlier comparison of the same experiment, whose "
    "finished runs stay and count  [default: runs/compare-TIME].",
)  # fmt: skip
@click.pass_context
def compare(
    ctx: click.Context, preset: str, modes: list[str], workers: list[int], servers: list[int | str], repeats: int,
    trainings: int | None, tune: float | None, until_sure: bool, scaling: bool, hosts: str | None,
    hostfile: Path | None, launcher: Launcher, secrets: dict[str, str], dry_run: bool, margin: float,
    accuracy_margin: float, out: str, **options: Any,
) -> "Content | None":  # fmt: skip
    """Ring, servers or one machine? Measure how fast each is and what it learns, here or over hosts, and answer.

    \b
    hvdtrain compare
    hvdtrain compare --modes allreduce,ddp,ps-sync --workers 2,4 --repeats 10
    hvdtrain compare --dataset FOLDER --model vgg16 --batch-size 64
    hvdtrain compare --modes single,allreduce,ps-async --epochs 5 --repeats 5
    hvdtrain compare --model vgg11,vgg16 --batch-size 16,64 --dry-run
    hvdtrain compare --preset cnn-mnist --dataset digits --workers 2
    hvdtrain compare -H node1:2,node2:2 --modes allreduce,ps-sync,ps-async

    Speed is measured in sprints: some seconds of steady steps, --repeats of each contender. A shorter one of each comes
    first, and what is far behind there is left out. Then one of each mathematics is trained as a whole, twice where the
    answer hangs on it. With a length, as --epochs 5, all are trained instead, or, with --trainings, after sprints;
    servers over the wire that was the faster in a pilot, unless --wire is given.

    `single` is one machine with all its cores. Workers of all others compute with as many threads as each other.
    With no options it takes some minutes on two cores. A comparison that was interrupted goes on with the same command
    and --out, and so more repeats or another mode are added.
    """
    sprint_s = _length(ctx, options)
    repeats = _number_of_repeats(ctx, repeats, until_sure, sprint_s)
    listed = hosts_or_here(ctx)
    if listed and not given_options(ctx, ["workers"]) and "workers" not in (ctx.default_map or ()):
        workers = [sum(host.slots for host in listed)]
    folder = Path(out or (f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}" if not dry_run else "runs/compare"))
    axes = Axes(modes, workers, servers, {name: options.pop(name) for name in SPANNED})
    axes, config = widen(axes, listed, given_options(ctx, ctx.params)) if tune else axes, RunConfig(**options)
    if not listed and not dry_run:
        config = _with_device(config, max(workers))
    cores = _look_at_hosts(listed, launcher) if listed and not dry_run else None
    if _is_file(preset):
        for model in axes.options["model"]:
            named = {"model": model, "dataset": config.dataset}
            check_trusted(named, given_options(ctx, named), False, Path(preset))
    contenders = plan(config, axes, listed, launcher, cores, scaling)
    earlier, record = find_finished(folder), Record(folder)
    record.ask(asked(config, sprint_s, contenders))
    rivalry = of_a_side if sprint_s else None if given_options(ctx, ["wire"]) else but_for_the_wire
    wholes = trainings if sprint_s else 0
    job = Comparison(folder, contenders, earlier, record, sprint_s, repeats, wholes, rivalry, tune or 0.0)
    if dry_run:
        _check_folder(config.dataset)
        lines = [
            f"tuning {side}: {with_noun(len(settings), 'setting')}; the best of them runs as the first does below"
            for side, settings in (sides(contenders) if tune else {}).items()
        ]
        lines += dry_run_lines(job.runs(), folder, secrets)
        click.echo("\n".join([*lines, forecast(job.runs(), [*job.pilots(), *job.spare_trainings()], job.kept, record)]))
        return None
    images, record.samples = _look([run.config for run in contenders])
    with claimed(folder):
        record.ask({"images": images})
        return _run(job, preset, secrets, Margins(margin, accuracy_margin), until_sure)


def _run(job: Comparison, preset: str, secrets: dict[str, str], margins: Margins, until_sure: bool) -> "Content | None":
    """Do the runs, and report; Failure where some failed."""
    folder, content = job.folder, None
    resume = f"the same command with --out {shlex.quote(str(folder))}"
    try:
        failed = job.run(secrets, margins, until_sure)
    except (KeyboardInterrupt, SystemExit):
        click.echo(f"finished runs stay: {resume} goes on", err=True)
        raise
    if find_finished(folder):
        # Where the preset has a table of its authors' figures, that stands beside.
        has_table = preset and not _is_file(preset) and "table" in recipes.load("presets", preset)
        content = content_of(find_runs([folder]), margins, preset if has_table else "")
        content.show()
        draw_report(content, folder, folded=told(folder))
    if failed:
        raise Failure(f"{with_noun(len(failed), 'run')} failed: {', '.join(failed)}; logs are in {folder / 'logs'}; "
                      f"{resume} tries them again")  # fmt: skip
    return content


def _check_folder(dataset: str) -> None:
    """UsageError where --dataset is to be a folder, and is none."""
    from hvdtrain.data.find import is_name, is_url, locate_folder

    is_folder = not (is_name(dataset) or is_url(dataset) or is_code(dataset))
    if is_folder and not locate_folder(dataset).is_dir():
        raise UsageError(f"--dataset {dataset}: there is no such folder")


def _with_device(config: RunConfig, workers: int) -> RunConfig:
    """With the device that all runs here have."""
    if config.device == "cpu":  # asking torch takes seconds
        return config
    from hvdtrain.training.device import choose_for_all

    return dataclasses.replace(config, device=choose_for_all(config, workers, click.echo))


def _number_of_repeats(ctx: click.Context, repeats: int, until_sure: bool, sprint_s: float) -> int:
    """How often at most: of whole runs once, unless it is said. UsageError where no answer could be known."""
    if not given_options(ctx, ["repeats"]):
        repeats = MOST_REPEATS if until_sure else repeats if sprint_s else 1
    if until_sure and repeats < LOOKS[0]:
        raise UsageError(f"--until-sure with --repeats {repeats}: no answer is known before {LOOKS[0]}")
    return repeats


def _length(ctx: click.Context, options: dict[str, Any]) -> float:
    """How long a sprint lasts, 0 where all are trained as a whole; of the options, only one length stays."""
    sprint_s, given = options.pop("sprint"), given_options(ctx, WHOLE)
    for name in WHOLE - given if given else ():  # they exclude each other: the preset's gives way
        options[name] = getattr(RunConfig, name)
    if not any(options[name] for name in WHOLE):
        options["epochs"] = DEFAULT_EPOCHS
    is_whole = given or WHOLE & set(ctx.default_map or ())
    if is_whole and not given_options(ctx, ["trainings", "sprint"]):
        sprint_s = 0.0
    if ctx.params["tune"] and not sprint_s:
        raise UsageError("--tune looks for the best by sprints: give --trainings too, for whole runs after them")
    return sprint_s


def _look_at_hosts(hosts: list[Host], launcher: Launcher) -> dict[str, float] | None:
    """The cores that ranks may use on each host; in what hosts differ is told."""
    if launcher.hosts_from == "slurm":
        return allocated_cores()
    described = describe_hosts(hosts)
    for line in differences(described):
        click.echo(f"hosts differ: {line}")
    return {name: facts["cores_usable"] for name, facts in described.items()}


def _look(configs: list[RunConfig]) -> tuple[str, int]:
    """Find what would fail later; the identity of the images, and how many there are to train on."""
    from hvdtrain.data.find import find_dataset
    from hvdtrain.data.identity import identity

    first = configs[0]
    if first.pretrained not in ("", "imagenet") and not Path(first.pretrained).is_file():
        raise UsageError(f"--pretrained {first.pretrained}: no such file")
    data = find_dataset(first.dataset, first.skip_bad)
    for config in configs:
        check_length(config, len(data.train))
    tried = {config.model: config for config in configs if is_own(config.model) or is_code(config.dataset)}
    for config in tried.values():
        from hvdtrain.rank.work import initial_model, trial_inputs

        initial_model(config, len(data.classes), trial_inputs(config, data))
    return identity(data), len(data.train)
