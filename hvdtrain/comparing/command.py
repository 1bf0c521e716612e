"""`hvdtrain compare`: trains the same model on the same samples in several modes, and answers."""

import dataclasses
import itertools
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.base.config import recipes
from hvdtrain.base.config.command_line import (
    MODES,
    NUM_SERVERS,
    NUM_WORKERS,
    SCRIPT_WORDS,
    GroupedCommand,
    given_options,
    with_script_words,
)
from hvdtrain.base.config.file import read_config, started_workers
from hvdtrain.base.config.option_types import (
    DURATION,
    EQUAL,
    NUMBERS,
    SERVER_NUMBERS,
    RunFolder,
    Several,
)
from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.config.run_config import DEFAULT_EPOCHS, LENGTHS, WIRES, RunConfig, in_words
from hvdtrain.base.config.untrusted import is_url
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import printable, with_noun
from hvdtrain.base.system.own_code import file_of, is_code
from hvdtrain.base.world.host import differences
from hvdtrain.comparing.comparison_state import (
    DECIDE_BY,
    ComparisonState,
    conducted,
    tried_lines,
)
from hvdtrain.comparing.earlier import claimed, experiment, find_finished
from hvdtrain.comparing.elimination import ROUNDS
from hvdtrain.comparing.forecast import expected_seconds, forecast
from hvdtrain.comparing.grid import (
    LARGEST_SEED,
    SETTINGS,
    SPANNED,
    TASK,
    Axes,
    Planned,
    check_used,
    crowded,
    dry_run_lines,
    plan,
)
from hvdtrain.comparing.report_command import content_of, deciding_options, draw_report
from hvdtrain.comparing.running import Comparison
from hvdtrain.comparing.search import SPRINT_S, Search
from hvdtrain.comparing.settings import on_equal_terms, sides, widen, with_fewer_threads
from hvdtrain.launch.allocation import allocated_cores, hosts_or_here
from hvdtrain.launch.forking import may_have_gpus
from hvdtrain.launch.hosts import Host, host_options, launcher_option, secrets_option
from hvdtrain.launch.preflight import describe_hosts
from hvdtrain.models import is_own
from hvdtrain.reporting.conduct import BY_SPEED, BY_TIME_TO_TARGET
from hvdtrain.reporting.contenders import Margins
from hvdtrain.reporting.rule import LOOKS
from hvdtrain.runs.read import find_runs, grouped
from hvdtrain.runs.request import (
    check_functions,
    check_length,
    check_trusted,
    train_options,
    with_absolute_paths,
)
from hvdtrain.runs.scripts import check_script, hash_of_script

if TYPE_CHECKING:
    from hvdtrain.data.folder import ImageFolder
    from hvdtrain.reporting.content import Content

# Numbers of workers of rings that stand for one machine.
RINGS_ON_ONE_HOST = (2, 4)
# The most repeats of --until-sure if --repeats is not given.
MOST_REPEATS = 20
# How often contenders are repeated at most without --repeats, if that takes little time.
MORE_REPEATS = LOOKS[2]
# Options that give the length of a whole run.
WHOLE = LENGTHS - {"sprint"}
TITLES = {name: recipes.load("presets", name)["title"] for name in recipes.names("presets")}
# The end of the help.
PRESETS = "\b\nPresets:\n" + "\n".join(f"  {name:<18}{title}" for name, title in TITLES.items())


# Presets


def _use_preset(ctx: click.Context, param: click.Parameter, name: str) -> str:
    """Makes the preset's options the defaults, so that options on the command line win."""
    if _is_file(name):
        ctx.default_map = _tuned_options(Path(name))
    elif name:
        ctx.default_map = recipes.load("presets", name)["options"]
    return name


def _is_file(preset: str) -> bool:
    """Returns whether --preset is a file, such as --tune leaves, instead of a name."""
    return preset.endswith(".toml")


def _tuned_options(file: Path) -> dict[str, Any]:
    """Returns the options of a config.toml, such as --tune leaves, as a preset's options."""
    values = read_config(file)
    # `compare` decides these, or has options of another type for them.
    left_out = {"repeat", "seed", "threads", "sprint", "mode", "servers"}
    left_out |= {name for name in WHOLE if not values.get(name)}
    if values.get("epochs") == DEFAULT_EPOCHS:
        left_out.add("epochs")
    options = {name: value for name, value in values.items() if name not in left_out}
    for name, number in (("workers", started_workers(file)), ("servers", values.get("servers"))):
        if number:
            options[name] = [number]
    return options | {"modes": [values["mode"]]}


# The command


@click.command(cls=GroupedCommand, epilog=PRESETS)
@click.option(
    "--preset",
    default="",
    is_eager=True,
    callback=_use_preset,
    metavar="NAME",
    help="Take the options of a published experiment as defaults; `hvdtrain compare --help` "
    "ends with the names. The report then shows the authors' figures too, if there are any. NAME can also be a "
    "file: one that --tune has left, or a run's config.toml.",
)
@click.option(
    *MODES,
    type=Several(),
    default="single,allreduce,ddp,ps-sync,ps-async",
    show_default=True,
    help="Modes to compare, by commas; see `hvdtrain modes`.",
)
@click.option(
    *NUM_WORKERS,
    type=NUMBERS,
    default="2",
    show_default="2; with -H: one for each slot",
    help="Numbers of workers, by commas.",
)
@click.option(
    *NUM_SERVERS,
    type=SERVER_NUMBERS,
    default="1",
    show_default="1; with -H: 1 and equal",
    help="Numbers of servers of the ps- modes, by commas; `equal` is as many as workers.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=5,
    show_default="5 sprints; 1 where whole runs measure speed",
    help="How often each contender is measured. All contenders of a repeat have the same seed, and "
    "the next repeat has the next one. An answer needs five repeats. Without this option up to five "
    "more sprints of each follow where the answer is not known, as long as they take less than 90 s.",
)
@click.option(
    "--trainings",
    type=click.IntRange(0, 1000),
    show_default="1, and a second where the answer depends on it; 0 with --script",
    help="How many whole trainings follow the sprints, to measure accuracy. One process and all "
    "synchronous modes compute the same weights: of these the fastest is trained.",
)
@click.option(
    "--tune",
    type=DURATION,
    default=None,
    help="Search for each side's fastest settings for this long in all, in place of the short search "
    "of two rounds. It tries more settings of options that are not given: all rings, their "
    "transports, wires, --bucket-mb 1, 4 and 16, --wait-for layer and step, more servers. "
    "OUT/tuned-….toml has the options of each side's fastest, for --preset and train --config.",
)
@click.option(
    "--until-sure",
    is_flag=True,
    help="Repeat until the answer is known, at most --repeats times "
    f"(here {MOST_REPEATS} by default).",
)
@click.option(
    "--scaling",
    is_flag=True,
    help="Also run one process with the threads of one worker, which is the baseline of scaling "
    "efficiency.",
)
@host_options
@launcher_option
@secrets_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the runs, the command that repeats each, and how long they will take; run nothing.",
)
@train_options(
    "mode",
    "servers",
    "repeat",
    several=SPANNED,
    hidden=("lr_around", "lr_trainings", "looked_for"),  # which this command sets itself
    snapshot_every="never",
    sprint=3.0,
    wire=",".join(WIRES),
)
@deciding_options
@click.option(
    "--out",
    default="",
    type=RunFolder(),
    help="Folder for runs and report: new or empty, or the folder of an earlier comparison of the "
    "same experiment, whose finished runs stay and count  [default: runs/compare-TIME].",
)
@SCRIPT_WORDS
@click.pass_context
def compare(
    ctx: click.Context,
    preset: str,
    modes: list[str],
    workers: list[int],
    servers: list[int | str],
    repeats: int,
    trainings: int | None,
    tune: float | None,
    until_sure: bool,
    scaling: bool,
    hosts: str | None,
    hostfile: Path | None,
    launcher: Launcher,
    secrets: dict[str, str],
    dry_run: bool,
    decide_by: str | None,
    margin: float,
    accuracy_margin: float,
    out: str,
    script_words: tuple[str, ...],
    **options: Any,
) -> "Content | None":
    """Ring, servers or one machine? Measure how fast each is and what it learns, here or over
    hosts, and answer.

    \b
    hvdtrain compare
    hvdtrain compare --modes allreduce,ddp,ps-sync --workers 2,4 --repeats 10
    hvdtrain compare --dataset FOLDER --model vgg16 --batch-size 64
    hvdtrain compare --modes single,allreduce,ps-async --epochs 5 --repeats 5
    hvdtrain compare --modes allreduce,ps-async --decide-by target --target-accuracy 0.9
    hvdtrain compare --model vgg11,vgg16 --batch-size 16,64 --dry-run
    hvdtrain compare --preset cnn-mnist --dataset digits --workers 2
    hvdtrain compare -H node1:2,node2:2
    hvdtrain compare --script train.py --modes single,allreduce,ps-sync -- --my-option 3

    A contender is a mode with its number of workers and servers and its settings. Speed is measured
    in sprints, which are short runs: each contender makes --repeats of them. Shorter sprints come
    first, and do not count. They try settings, such as other transports, wires and numbers of
    servers: as many of rings as of servers, in the same time. An option that is given is not
    varied. Settings that are shown to be slower are left out. Then whole trainings measure
    accuracy: one for all modes that compute the same weights, by the fastest of them, and one for
    each asynchronous mode that is not far too slow. A second one follows if the answer depends on
    it. If a length is given, such as --epochs 5, whole trainings measure speed. With --trainings or
    --sprint too, sprints measure speed, and the length is that of the whole trainings.

    With --decide-by target the time to --target-accuracy decides: every repeat is a whole training
    of each contender. It ends when the target is reached, or after all epochs.

    Each contender may use all cores of its hosts, whatever else is compared: workers share the
    cores of their host, and `single` is one machine with all of them. Over several hosts, rings on
    one of them stand for one machine too. With no options it takes some minutes on two cores. A
    comparison that was interrupted goes on with the same command and --out. More repeats or another
    mode are added in the same way.

    With --script your own training loop is compared. A sprint ends between two steps of the loop.
    With --trainings the whole script runs too, and job.report says what it has learned.
    """
    options = with_script_words(options, script_words)
    decided_by = _what_decides(ctx, options)
    sprint_s = _sprint_length(ctx, options, decided_by)
    repeats = _number_of_repeats(ctx, repeats, until_sure, decided_by == BY_SPEED and not sprint_s)
    listed = hosts_or_here(ctx)
    if listed and not _is_chosen(ctx, "workers"):
        workers = [sum(host.slots for host in listed)]
    if listed and not _is_chosen(ctx, "servers"):
        # One server for many workers is a bottleneck, and no answer about servers.
        servers = [1, EQUAL]
    folder = _folder(out, dry_run)
    axes = Axes(modes, workers, servers, {name: options.pop(name) for name in SPANNED})
    config = RunConfig(**options)
    device_alone = config.device
    if not listed and not dry_run:
        config = _with_device(config, max(workers))
    cores, gpus = _look_at_hosts(listed, launcher) if listed and not dry_run else (None, 0)
    if listed:
        is_named = bool(hosts or hostfile)
        sizes = _ring_sizes(listed[0], is_named, config.device, cores, gpus)
        axes = dataclasses.replace(axes, on_one_host=sizes)
    given = {*given_options(ctx, ctx.params), *(ctx.default_map or ())}
    if config.script:
        check_script(config)
        given.add("wait_for")  # a script has no choice of it
        trainings = trainings or 0  # it is trained as a whole only where that is asked for
    if _is_file(preset):
        _check_trusted(ctx, preset, axes.options["model"], config.dataset)
    check_functions(axes.options["model"], config.dataset)

    def plan_of(axes: Axes) -> list[Planned]:
        return plan(config, axes, listed, launcher, cores, scaling, device_alone)

    requested = plan_of(axes)
    check_used(requested, given_options(ctx, ctx.params), config, axes)
    earlier = find_finished(folder)
    state = ComparisonState(folder)
    has_rate = "lr" in given or bool(config.script)  # a script has its own
    looks_for_rates = decided_by == BY_TIME_TO_TARGET and not has_rate
    asked = experiment(config, sprint_s, requested) | {
        DECIDE_BY: decided_by,
        "learning rates": "looked for" if looks_for_rates else "as given",
    }
    state.set_experiment(asked, nothing_counts=not earlier)
    search = Search(_compared_options(axes, given), tune or 0.0, before_whole_runs=not sprint_s)
    # One whole run of each answers nothing, and a search would take several times as long.
    may_answer = repeats > 1 or bool(sprint_s)
    was_searched = any(map(state.was_tried, requested))
    is_searched = bool(may_answer or tune or was_searched)
    if is_searched:
        wider = widen(axes, plan_of, listed, _not_varied(given, sprint_s))
        contenders = on_equal_terms(requested, wider, _most_settings(requested, tune, state))
        contenders += with_fewer_threads(contenders, given)
    else:
        contenders = _first_settings(search, requested, state)
    number_of_trainings = trainings if sprint_s else 0
    is_fixed = until_sure or "repeats" in given
    most_repeats = repeats if is_fixed else _more_repeats(config.seed, sprint_s)
    job = Comparison(
        folder,
        contenders,
        earlier,
        state,
        sprint_s,
        repeats,
        number_of_trainings,
        search if is_searched else None,
        decided_by,
        looks_for_rates=looks_for_rates,
        given=given,
        most_repeats=most_repeats,
    )
    _note_crowds([] if gpus else crowded(requested, cores))
    if dry_run:
        _check_files(axes.options["model"], config)
        _count_samples(config, state)
        _print_plan(job, secrets)
        return None
    only_sprints = bool(sprint_s) and trainings == 0
    identity = _look_at_data(contenders, state, only_sprints)
    with claimed(folder):
        # The images, or the script's content, are a part of the experiment too.
        state.set_experiment(asked | identity, nothing_counts=not earlier)
        state.note_given(_given_in_words(ctx, axes, listed, tune), begins=not earlier)
        return _run(job, preset, secrets, Margins(margin, accuracy_margin), until_sure)


def _not_varied(given: set[str], sprint_s: float) -> set[str]:
    """Returns the options of which a search tries no other values than those that were given.

    Before whole runs only modes are tried that were asked for.
    """
    return given if sprint_s else {*given, "modes"}


def _first_settings(
    search: Search, requested: list[Planned], state: ComparisonState
) -> list[Planned]:
    """Returns the first setting of each group, and tells the user that no others are tried."""
    contenders = search.expected_to_stay(requested, state)
    if len(contenders) < len(requested):
        click.echo(
            "note: one run of each mode gives no answer, so no settings are searched: each mode has "
            "its first setting. With --repeats 2 or more the other settings are tried too",
            err=True,
        )
    return contenders


def _note_crowds(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        click.echo(f"note: {sentence}", err=True)


def _print_plan(job: Comparison, secrets: Collection[str]) -> None:
    """Prints the runs, the command that repeats each, and how long they will take."""
    sprints = job.sprints_left()
    lines = []
    for side, sprints_of_side in grouped(sprints, lambda run: run.side).items():
        names = list(dict.fromkeys(run.contender for run in sprints_of_side))
        number = with_noun(len(names), "setting")
        lines.append(f"tried first, of {side}: {number}: {', '.join(names)}")
    requested_runs = [run for run in job.runs() if not run.is_extra]
    lines += dry_run_lines(requested_runs, job.folder, secrets)
    trials = job.trials_left()
    for name, of_contender in grouped(trials, lambda run: run.config.mode).items():
        rates = sorted({run.config.lr for run in of_contender})
        numbers = ", ".join(f"{rate:g}" for rate in rates)
        lines.append(f"tried first, in {len(of_contender)} trainings of {name}: --lr {numbers}")
    possible = [*sprints, *trials, *job.possible_whole_runs(), *job.possible_repeats()]
    lines.append(forecast(requested_runs, possible, job.progress.kept, job.state))
    click.echo("\n".join(lines))


def _run(
    job: Comparison, preset: str, secrets: dict[str, str], margins: Margins, until_sure: bool
) -> "Content | None":
    """Does the runs, and writes and prints the report.

    Returns:
        What the report says; None if no run has finished.

    Raises:
        Failure: some runs failed.
    """
    folder = job.folder
    resume = f"the same command with --out {shlex.quote(str(folder))}"
    try:
        failed = job.run(secrets, margins, until_sure)
    except (KeyboardInterrupt, SystemExit):
        click.echo(_how_to_go_on(job, resume), err=True)
        raise
    content = _report(folder, preset, margins) if find_finished(folder) else None
    shared_reason = job.progress.shared_reason
    if shared_reason:
        raise Failure(
            f"{failed[0]} and {failed[1]} failed alike before any run worked: {shared_reason}"
        )
    if failed:
        raise Failure(
            f"{with_noun(len(failed), 'run')} failed: {', '.join(failed)}; "
            f"logs are in {folder / 'logs'}; {resume} tries them again"
        )
    return content


def _how_to_go_on(job: Comparison, resume: str) -> str:
    """Returns what an interrupted comparison has, and how to go on."""
    if job.has_search_left:
        return f"the search before the comparison was not over: {resume} begins it again"
    return f"finished runs stay: {resume} goes on"


def _report(folder: Path, preset: str, margins: Margins) -> "Content":
    """Prints the report of the finished runs, and writes it to the comparison's folder."""
    # The figures of a preset's authors stand beside, if there is a table of them.
    has_table = preset and not _is_file(preset) and "table" in recipes.load("presets", preset)
    reference = preset if has_table else ""
    runs = find_runs([folder])
    content = content_of(runs, margins, reference, conducted([folder]), are_ours=True)
    content.show()
    draw_report(content, folder, folded=tried_lines(folder))
    return content


# Options


def _is_chosen(ctx: click.Context, name: str) -> bool:
    """Returns whether an option is given on the command line or by a preset."""
    return bool(given_options(ctx, [name])) or name in (ctx.default_map or ())


def _folder(out: str, dry_run: bool) -> Path:
    """Returns the comparison's folder."""
    if out:
        return Path(out)
    if dry_run:
        return Path("runs/compare")
    return Path(f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}")


def _check_trusted(ctx: click.Context, preset: str, models: Sequence[str], dataset: str) -> None:
    """Refuses a preset's file that names code which nobody named on the command line."""
    for model in models:
        named = {"model": model, "dataset": dataset}
        check_trusted(named, given_options(ctx, named), False, Path(preset))


def _given_in_words(
    ctx: click.Context, axes: Axes, listed: Sequence[Host], tune: float | None
) -> dict[str, str] | None:
    """Returns the options that say what is compared, for ComparisonState.note_given.

    None if they do not say it all: a preset has further ones, --tune tries other settings, and with
    several tasks a contender's name has the task.
    """
    if ctx.default_map or tune or any(len(axes.options[name]) > 1 for name in TASK):
        return None
    given = given_options(ctx, ctx.params)
    if listed:
        given |= {"workers"}  # the slots of the hosts; `next` has more of them, for servers
    values: dict[str, Sequence[Any]] = {
        "modes": axes.modes,
        "workers": axes.workers,
        "servers": axes.servers,
    }
    for field in dataclasses.fields(RunConfig):
        if field.name in SETTINGS:
            values[field.name] = [in_words(field, value) for value in axes.options[field.name]]
    words = {}
    for name, values_of_option in values.items():
        words[name] = ",".join(map(str, values_of_option)) if name in given else ""
    return words


def _compared_options(axes: Axes, given: Collection[str]) -> set[str]:
    """Returns the options of which several values were given.

    Each of these values is a contender, and not a setting of another contender.
    """
    compared = {name for name, values in axes.options.items() if len(values) > 1}
    if len(axes.servers) > 1:
        compared.add("servers")
    return compared & set(given)


def _most_settings(
    requested: Sequence[Planned], seconds: float | None, state: ComparisonState
) -> int | None:
    """Returns how many settings a side may have in a long search; None for a short search.

    With so many, the first rounds take half of the time.

    Args:
        requested: the contenders that were asked for.
        seconds: the time of the search; None or 0 for a short search.
        state: knows how long a sprint takes.

    Raises:
        UsageError: there are no rings and no servers.
    """
    if not seconds:
        return None
    settings_by_side = sides(requested)
    if not settings_by_side:
        raise UsageError("--tune needs rings or servers: name some in --modes")
    settings = list(itertools.chain(*settings_by_side.values()))
    seconds_of_sprint = max(expected_seconds(run.sprint(SPRINT_S), state) for run in settings)
    seconds_of_side = seconds / len(settings_by_side)
    return max(1, int(seconds_of_side / 2 / ROUNDS / seconds_of_sprint))


def _check_files(models: Sequence[str], config: RunConfig) -> None:
    """Checks that the files that options name exist. A comparison would open them.

    Raises:
        UsageError: a file does not exist.
    """
    files = [("--model", model, file_of(model)) for model in models]
    files.append(("--dataset", config.dataset, file_of(config.dataset)))
    if config.pretrained not in ("", "imagenet"):
        weights = Path(with_absolute_paths(config).pretrained)
        files.append(("--pretrained", config.pretrained, weights))
    for option, name, file in files:
        if file and not file.exists():
            raise UsageError(f"{option} {name}: there is no such file")


def _count_samples(config: RunConfig, state: ComparisonState) -> None:
    """Notes how many training samples there are, if a dry run can know.

    Raises:
        UsageError: --dataset names a folder that does not exist, or that has no images to train on.
    """
    if config.script:
        return
    from hvdtrain.data.find import count_training_samples, is_name, locate_folder

    dataset = config.dataset
    is_folder = not (is_name(dataset) or is_url(dataset) or is_code(dataset))
    if is_folder and not locate_folder(dataset).exists():
        raise UsageError(f"--dataset {dataset}: there is no such folder")
    state.samples = count_training_samples(config) or state.samples


def _with_device(config: RunConfig, workers: int) -> RunConfig:
    """Returns the configuration with the device that all workers here have."""
    is_without_gpu = config.device == "auto" and not may_have_gpus()
    if config.device == "cpu" or is_without_gpu:
        return config
    from hvdtrain.job.training.device import choose_for_all

    return dataclasses.replace(config, device=choose_for_all(config, workers, click.echo))


def _number_of_repeats(ctx: click.Context, repeats: int, until_sure: bool, once: bool) -> int:
    """Returns how often contenders are repeated at most.

    Args:
        ctx: of the command.
        repeats: --repeats.
        until_sure: --until-sure.
        once: whether one repeat is the default, as of whole runs that speed decides on.

    Raises:
        UsageError: with so few repeats no answer could be known.
    """
    if not given_options(ctx, ["repeats"]):
        if until_sure:
            repeats = MOST_REPEATS
        elif once:
            repeats = 1
    if until_sure and repeats < LOOKS[0]:
        raise UsageError(
            f"--until-sure with --repeats {repeats}: no answer is known before {LOOKS[0]}"
        )
    return repeats


def _more_repeats(seed: int, sprint_s: float) -> int:
    """Returns how often contenders are repeated at most where the answer is not known.

    Whole runs are not repeated more often than asked for. Each repeat has the next seed.
    """
    seeds = LARGEST_SEED - seed + 1
    return MORE_REPEATS if sprint_s and seeds >= MORE_REPEATS else 0


def _sprint_length(ctx: click.Context, options: dict[str, Any], decided_by: str) -> float:
    """Returns how long a sprint lasts; 0 if all contenders are trained as a whole.

    Args:
        ctx: of the command.
        options: the options of RunConfig. The sprint is taken out, and one length of whole runs
            stays.
        decided_by: what decides. By the time to the target, all runs are whole runs.

    Raises:
        UsageError: --tune is given, and there are no sprints.
    """
    sprint_s = options.pop("sprint")
    given = given_options(ctx, WHOLE)
    # Lengths exclude each other. A length on the command line wins over the preset's.
    if given:
        for name in WHOLE - given:
            options[name] = getattr(RunConfig, name)
    if not any(options[name] for name in WHOLE) and not options["script"]:
        options["epochs"] = DEFAULT_EPOCHS
    if decided_by == BY_TIME_TO_TARGET:
        return 0.0
    has_length = given or WHOLE & set(ctx.default_map or ())
    if has_length and not given_options(ctx, ["trainings", "sprint"]):
        sprint_s = 0.0
    if ctx.params["tune"] and not sprint_s:
        raise UsageError(
            "--tune searches by sprints, and whole trainings have none: add --trainings"
        )
    return sprint_s


def _what_decides(ctx: click.Context, options: dict[str, Any]) -> str:
    """Returns what decides. Where the time to the target does, all trainings end there.

    Args:
        ctx: of the command.
        options: the options of RunConfig.

    Raises:
        UsageError: an option was given that --decide-by target has no use for.
    """
    decided_by = ctx.params["decide_by"] or BY_SPEED
    if decided_by == BY_SPEED:
        return BY_SPEED
    for name in ("trainings", "sprint"):
        if given_options(ctx, [name]):
            raise UsageError(
                f"--{name} is for --decide-by speed: to the target, each of the --repeats is a "
                "whole training"
            )
    options["stop_at_target"] = True
    return BY_TIME_TO_TARGET


# What is there


def _look_at_hosts(hosts: list[Host], launcher: Launcher) -> tuple[dict[str, float], int]:
    """Looks at hosts, and prints what they differ in.

    Returns:
        The cores that ranks may use on each host, and how many GPUs the first host has.
    """
    if launcher.hosts_from == "slurm":
        return allocated_cores(), 0
    described = describe_hosts(hosts)
    for line in differences(described):
        click.echo(f"hosts differ: {line}")
    cores = {name: facts["cores_usable"] for name, facts in described.items()}
    return cores, described[hosts[0].name]["gpus"]


def _ring_sizes(
    host: Host, is_named: bool, device: str, cores: Mapping[str, float] | None, gpus: int
) -> list[int]:
    """Returns the numbers of workers of rings that stand for one machine.

    They are as many as the host has slots if it has several, else as it has GPUs, else 2 and 4.

    Args:
        host: the first host.
        is_named: whether the user named the host. A host of an allocation starts no more ranks than
            it has slots.
        device: --device.
        cores: the cores of each host; None if nobody has looked.
        gpus: how many GPUs the host has.
    """
    if host.slots > 1:
        return [host.slots]
    if not is_named:
        return []
    if gpus and device != "cpu":
        return [gpus] if gpus > 1 else []
    return [workers for workers in RINGS_ON_ONE_HOST if not cores or workers <= cores[host.name]]


def _look_at_data(
    contenders: Sequence[Planned], state: ComparisonState, only_sprints: bool
) -> dict[str, Any]:
    """Looks at what runs train on, so that what would fail later fails now.

    Returns:
        What identifies it, for ComparisonState.set_experiment.

    Raises:
        UsageError: a run could not be carried out.
    """
    config = contenders[0].config
    if config.script:
        return {"script's content": hash_of_script(config)}
    images, state.samples = _look_at_images(contenders, only_sprints)
    return {"images": images}


def _look_at_images(contenders: Sequence[Planned], only_sprints: bool) -> tuple[str, int]:
    """Looks at the images and at models that may not fit, so that what would fail later fails now.

    Args:
        contenders: the contenders.
        only_sprints: whether nothing is trained as a whole.

    Returns:
        The identity of the images, and how many there are to train on.

    Raises:
        UsageError: a run could not be carried out.
    """
    from hvdtrain.data.bad_images import lines_of_bad
    from hvdtrain.data.find import find_dataset_of
    from hvdtrain.data.identity import identity

    first = contenders[0].config
    data = find_dataset_of(first)
    notes = [f"note: {note}" for note in data.notes]
    for line in [*notes, *lines_of_bad(data.bad)]:
        click.echo(printable(line))
    for run in contenders:
        check_length(run.config, len(data.train))
    has_weights_of_user = first.pretrained not in ("", "imagenet")
    for model, runs in grouped(contenders, lambda run: run.config.model).items():
        if is_own(model) or is_code(first.dataset) or has_weights_of_user:
            _try_model(runs, data, only_sprints)
    return identity(data), len(data.train)


def _try_model(runs: Sequence[Planned], data: "ImageFolder", only_sprints: bool) -> None:
    """Finds what a model cannot be trained on.

    Args:
        runs: the contenders that train the model.
        data: the images.
        only_sprints: whether nothing is trained as a whole.

    Raises:
        UsageError: it is not a model for these samples, some batch is too small for it, or its
            pretrained weights do not fit.
    """
    from hvdtrain.job.training.lone_samples import check_lone_samples
    from hvdtrain.job.training.model import initial_model, load_weights, trial_inputs

    config = runs[0].config
    inputs = trial_inputs(config, data)
    model = initial_model(config, len(data.classes), inputs)
    if config.pretrained:
        load_weights(model, config)
    if inputs is None:
        return
    for runs_of_batch in grouped(runs, lambda run: run.config.batch_size).values():
        config = runs_of_batch[0].config
        if only_sprints:
            config = dataclasses.replace(config, sprint=1.0)
        workers = sorted({run.workers for run in runs_of_batch})
        check_lone_samples(config, workers, len(data.train), model, inputs[:1])
