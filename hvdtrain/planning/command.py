"""`hvdtrain plan`: its commands."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from hvdtrain.base import modes
from hvdtrain.base.config.command_line import given_options
from hvdtrain.base.config.option_types import FileToWrite, Real, Several
from hvdtrain.base.config.run_config import WIRES, RunConfig
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import some_of, with_noun
from hvdtrain.base.system.preempt import ended_by_signals
from hvdtrain.planning.calibration import Calibration, Quantity, load
from hvdtrain.planning.scenario import MODES, RING_MODES, SERVER_MODES, Scenario
from hvdtrain.planning.units import BANDWIDTH, LATENCY, Counts, SlowRules
from hvdtrain.runs.request import check, train_options

FOLDER = click.Path(path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
NEW_FILE = FileToWrite()
PLACEMENT = click.Choice(["dedicated", "shared"])
SHARE = Real(0, 1, True, True)
BANDWIDTHS = Several(BANDWIDTH, "bandwidths")
NAMES = Several(click.Choice(MODES))
DEFAULTS = {"show_default": True}
CORES = Real(0, 4096, True)
THREADS = click.IntRange(1, 4096)
GPUS_PER_HOST = click.IntRange(1, 64)
# The options of `predict` that nothing has a use for without servers, and those that --hosts
# answers itself.
OF_SERVERS = ("servers", "server_gbit", "wire", "placement")
ANSWERED_BY_HOSTS = ("workers", "servers", "placement")
# The options of training that decide what a step costs.
MEASURED = {
    "model",
    "width",
    "dataset",
    "image_size",
    "optimizer",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def plan() -> None:
    """The answer for a cluster you do not have yet.

    `calibrate` measures this machine for a minute. Then `predict` simulates layers, links and
    processors of a cluster, and says what a step would take there in each mode, with an interval.
    """


@plan.command()
@train_options(*({field.name for field in fields(RunConfig)} - MEASURED))
@click.option(
    "--batch-size",
    "-b",
    type=click.IntRange(1, 65536),
    default=16,
    show_default=True,
    help="Samples of a worker in a step.",
)
@click.option("--cores", type=CORES, help="Cores of each host of the cluster  [default: as here].")
@click.option(
    "--threads",
    type=THREADS,
    help="Threads of a worker  [default: its share of the cores that are here].",
)
@click.option(
    "--gpus-per-host", type=GPUS_PER_HOST, default=1, show_default=True, help="Workers on a host."
)
@click.option(
    "--from",
    "runs",
    multiple=True,
    type=FOLDER,
    help="Finished runs of this model that correct the calibration; can be repeated.",
)
@click.option("--bandwidth", type=BANDWIDTH, help="Bandwidth of the links of these runs' hosts.")
@click.option(
    "--out",
    type=NEW_FILE,
    required=True,
    help="The file to write the calibration to: JSON, in which the keys name the units.",
)
@ended_by_signals
def calibrate(
    batch_size: int,
    cores: float | None,
    threads: int | None,
    gpus_per_host: int,
    runs: tuple[Path, ...],
    bandwidth: float | None,
    out: Path,
    **measured: Any,
) -> None:
    """Measure, for about a minute, what a step and its messages cost here.

    \b
    hvdtrain plan calibrate --model vgg16 --width 0.5 --from runs/ring --bandwidth 1gbit --out c.json
    """
    from hvdtrain.planning import calibrate as measuring
    from hvdtrain.planning.check import finished

    if bandwidth and not runs:
        raise UsageError("--bandwidth is for the hosts of --from, and changes nothing without it")
    finished_runs = [finished(run) for run in runs]
    config = check(RunConfig(**measured))
    host = measuring.measured_host(cores, threads, gpus_per_host)
    say = partial(click.echo, err=True)
    calibration = measuring.calibrate(config, batch_size, host, say, finished_runs, bandwidth)
    calibration.save(out)
    alone = calibration.with_costs(Scenario("single"))
    click.echo(
        f"{with_noun(len(calibration.layers), 'layer')}, {alone.bytes / 1e6:,.1f} MB of gradients; "
        f"computing a step of {batch_size} takes {1e3 * alone.computing_s:,.1f} ms; wrote {out}"
    )


@plan.command(context_settings=DEFAULTS)
@click.argument("calibration", type=FILE)
@click.option(
    "--workers",
    "-n",
    type=Counts(),
    default="1-64",
    help="Numbers of workers: `2,8`; `1-64` is 1, 2, 4 … 64.",
)
@click.option(
    "--servers",
    "-s",
    type=Counts(equal=True),
    default="1,equal",
    help="Numbers of servers: `1,2,equal`; `equal` is as many as workers.",
)
@click.option(
    "--bandwidth",
    "bandwidths",
    type=BANDWIDTHS,
    default="1gbit,10gbit",
    help="Bandwidths of each host's link.",
)
@click.option(
    "--server-bandwidth",
    "server_gbit",
    type=BANDWIDTH,
    help="Bandwidth of hosts that have only servers  [default: as of all hosts].",
)
@click.option(
    "--latency",
    type=LATENCY,
    help="Latency of the network, one way, `50us`  [default: the calibration's].",
)
@click.option(
    "--modes", "names", type=NAMES, default=",".join(MODES), help="Modes to predict, by commas."
)
@click.option(
    "--compression",
    default="none",
    help="How gradients are compressed: a codec that the calibration has measured.",
)
@click.option(
    "--wire",
    type=click.Choice(WIRES),
    help="How servers exchange messages  [default: rpc; the map tries all that were measured].",
)
@click.option(
    "--batch-size",
    "-b",
    type=click.IntRange(1, 65536),
    help="Samples that each worker computes in a step  [default: the calibration's].",
)
@click.option(
    "--placement",
    type=PLACEMENT,
    default="dedicated",
    help="Where servers are: on hosts that have only servers, or on the workers' hosts.",
)
@click.option("--cores", type=CORES, help="Cores of each host  [default: the calibration's].")
@click.option(
    "--threads", type=THREADS, help="Threads of a worker  [default: its share of the cores]."
)
@click.option(
    "--gpus-per-host", type=GPUS_PER_HOST, help="Workers on a host  [default: the calibration's]."
)
@click.option(
    "--local-steps",
    type=Counts(),
    default="1",
    help="Steps of a worker from one exchange to the next.",
)
@click.option(
    "--staleness",
    type=click.IntRange(0, 1000),
    default=2,
    help="In ps-ssp: how many steps a worker may be ahead of the slowest.",
)
@click.option(
    "--slow",
    type=SlowRules(),
    default="none",
    help="Slow workers: `1:4x`, `random:6x:p=0.1`, joined by `+`.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of all random draws."
)
@click.option("--json", "file", type=NEW_FILE, help="Write all rows to this file.")
@click.option(
    "--plot", type=NEW_FILE, help="Draw samples/s over workers and who wins where, as SVG."
)
@click.option(
    "--hosts",
    type=click.IntRange(2, 1024),
    help="Find the best use of this many hosts, in place of --workers and --servers.",
)
@click.option(
    "--price-host",
    type=Real(0, 1e6, True),
    default=1.0,
    help="With --hosts: the price of a worker's host for an hour.",
)
@click.option(
    "--price-server",
    type=Real(0, 1e6),
    help="With --hosts: the price of a server's host for an hour; 0 is free  [default: the same].",
)
@click.option(
    "--to-target",
    type=FOLDER,
    help="Also predict the time to a target, by the trainings of this comparison. "
    "Workers share the comparison's global batch, unless --batch-size is given.",
)
def predict(
    calibration: Path,
    workers: list[Any],
    servers: list[Any],
    bandwidths: list[float],
    latency: float | None,
    names: list[str],
    batch_size: int | None,
    cores: float | None,
    threads: int | None,
    gpus_per_host: int | None,
    local_steps: list[Any],
    file: Path | None,
    plot: Path | None,
    hosts: int | None,
    price_host: float,
    price_server: float | None,
    wire: str | None,
    to_target: Path | None,
    **more: Any,
) -> dict[str, Any]:
    """Predict seconds a step for every mode, number of workers and servers, and bandwidth.

    \b
    hvdtrain plan predict c.json --workers 1-64 --servers 1,equal --bandwidth 1gbit --plot plan.svg
    hvdtrain plan predict c.json --hosts 16 --price-host 3 --price-server 0.5 --bandwidth 10gbit
    hvdtrain plan predict c.json --workers 2-16 --bandwidth 1gbit --to-target runs/compared
    """
    from hvdtrain.planning import best, parallel, show, time_to_target
    from hvdtrain.planning import predict as prediction

    _check_used(names, bool(hosts))
    loaded = _loaded(calibration, batch_size, latency, wire)
    measured = loaded
    loaded = _on_asked_hosts(measured, cores, threads, gpus_per_host)
    workers_per_host = loaded.workers_per_host
    template = Scenario(MODES[0], workers_per_host=workers_per_host, wire=loaded.wires[0], **more)
    title = ""
    found: dict[str, Any] = {"calibration": str(calibration), "model": loaded.model}
    if hosts:
        _check_one_network(bandwidths, local_steps)
        title = f"Best use of {hosts} hosts, or of {hosts * price_host:,.4g} an hour"
        prediction.check_slow(template, hosts * workers_per_host)
        template = replace(template, bandwidth_gbit=bandwidths[0], local_steps=local_steps[0])
        contest = best.Contest(loaded, template, names)
        prices = best.Prices(price_host, price_host if price_server is None else price_server)
        rows = contest.splits(hosts, prices)
        places = [contest.place(hosts, prices)]
    else:
        if price_server is not None or price_host != 1.0:
            raise UsageError("--price-host and --price-server need --hosts")
        race = best.Contest(loaded, template, names)
        alone = workers
        if to_target:
            race = time_to_target.contest(to_target, loaded, template, names, batch_size)
            workers, alone = race.sharing(workers)
            found["to_target"] = race.data
        jobs = prediction.scenarios(template, names, workers, servers, bandwidths, local_steps)
        jobs += [best.one_machine(template, n) for n in alone]
        rows = parallel.each(race.predicted, jobs)
        places = race.map(workers, bandwidths, local_steps)
    show.predictions(rows, title)
    if places:
        show.show(show.map_table(places, show.SOONEST if to_target else show.MAP))
        for line in show.notes_of_map(places):
            click.echo(line)
    found |= {"rows": rows, "map": places}
    if file:
        write_whole(file, json.dumps(found, indent=1) + "\n")
    if plot:
        steps = {1, local_steps[0]}
        drawn_rows = [row for row in rows if row["local_steps"] in steps]
        drawn_places = [place for place in places if place["local_steps"] in steps]
        show.plot(plot, drawn_rows, drawn_places)
    notes = [*_scaled(measured, loaded), *_warnings(loaded, template, rows)]
    if to_target:
        notes += time_to_target.notes(found["to_target"], rows, places)
    for line in notes:
        click.echo(line)
    return found


def _check_used(names: Sequence[str], is_about_hosts: bool) -> None:
    """Refuses options on the command line that change nothing.

    Raises:
        UsageError: the first of them.
    """
    context = click.get_current_context()
    given = sorted(given_options(context, context.params))
    option_of = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    if is_about_hosts:
        for name in given:
            if name in ANSWERED_BY_HOSTS:
                raise UsageError(
                    f"{option_of[name]} is what --hosts finds out: give one of the two"
                )
        if "to_target" in given:
            raise UsageError(
                "--to-target is about --workers, and not about --hosts: give one of them"
            )
    if not set(names) & set(SERVER_MODES):
        for name in given:
            if name in OF_SERVERS:
                raise UsageError(
                    f"{option_of[name]} changes nothing: no mode of --modes {','.join(names)} has "
                    "servers"
                )
    if "staleness" in given and not any(map(_bounds_staleness, names)):
        raise UsageError("--staleness changes nothing: ps-ssp is not in --modes")


def _bounds_staleness(name: str) -> bool:
    return "staleness" in modes.declared(name).options


def _on_asked_hosts(
    calibration: Calibration, cores: float | None, threads: int | None, workers_per_host: int | None
) -> Calibration:
    """Returns the calibration for the hosts that options ask about.

    Raises:
        UsageError: a worker has more threads than its host has cores, or is a GPU.
    """
    cores = cores or calibration.cores_per_host
    workers_per_host = workers_per_host or calibration.workers_per_host
    if threads and calibration.device != "cpu":
        raise UsageError("--threads changes nothing: this calibration's workers compute on GPUs")
    speedup = calibration.machine_speedup
    has_all_cores = calibration.threads_per_worker >= int(calibration.cores_per_host)
    if calibration.device == "cpu" and speedup and speedup.value > 1 and has_all_cores:
        raise UsageError(
            f"the calibration's machine_speedup is {speedup.value:g}, though a worker's "
            f"{with_noun(calibration.threads_per_worker, 'thread')} are all cores of its host: "
            "make it null"
        )
    if threads and threads > max(1.0, cores):
        raise UsageError(
            f"--threads {threads}: a host has {with_noun(cores, 'core')}; give more --cores"
        )
    return calibration.on_hosts(cores, workers_per_host, threads or 0)


def _scaled(measured: Calibration, asked: Calibration) -> Iterator[str]:
    """Yields what of the asked hosts was not measured, but scaled."""
    if asked.threads_per_worker != measured.threads_per_worker:
        speedup = measured.speedup_of_threads(asked.threads_per_worker)
        yield (
            f"Computing was measured with {with_noun(measured.threads_per_worker, 'thread')}; with "
            f"{asked.threads_per_worker} a worker is taken to be {speedup.value:.2g} times as fast "
            f"({speedup.low:.2g} to {speedup.high:.2g}): calibrate on such a host."
        )
    if asked.cores_per_host > measured.cores_per_host:
        yield (
            f"Messages were measured on a host of {with_noun(measured.cores_per_host, 'core')}; on "
            f"{asked.cores_per_host:g} they are taken to cost as much, with wider intervals."
        )
    computing = asked.workers_per_host * asked.threads_per_worker
    if asked.device == "cpu" and computing > max(1.0, asked.cores_per_host):
        yield (
            f"{with_noun(computing, 'thread')} of {with_noun(asked.workers_per_host, 'worker')} "
            f"share {with_noun(asked.cores_per_host, 'core')} of a host."
        )


def _check_one_network(bandwidths: Sequence[float], local_steps: Sequence[int]) -> None:
    if len(bandwidths) != 1 or len(local_steps) != 1:
        raise UsageError(
            "--hosts asks about one network: give one --bandwidth, and one number of --local-steps"
        )


def _loaded(
    path: Path, batch_size: int | None, latency_us: float | None, wire: str | None
) -> Calibration:
    """Returns a calibration with what options change of it."""
    calibration = load(path)
    if batch_size:
        calibration = calibration.with_batch(batch_size)
    if latency_us is not None:
        calibration = replace(calibration, latency_us=Quantity.exactly(latency_us))
    if wire:
        calibration = replace(calibration, wires=(wire,))
    return calibration


@plan.command(context_settings=DEFAULTS)
@click.argument("calibration", type=FILE)
@click.option(
    "--workers",
    "-n",
    type=Counts(),
    default="4",
    help="Numbers of workers: `2,8`; `1-64` is 1, 2, 4 … 64.",
)
@click.option(
    "--servers",
    "-s",
    type=Counts(equal=True),
    default="equal",
    help="Numbers of servers, on the workers' hosts.",
)
@click.option("--modes", "names", type=NAMES, default="allreduce,ps-sync", help="Modes, by commas.")
@click.option(
    "--local-steps",
    type=Counts(),
    default="1,16",
    help="Steps of a worker from one exchange to the next.",
)
@click.option(
    "--efficiency",
    type=SHARE,
    default=0.8,
    help="Share of the samples/s that the same workers would reach if they never waited.",
)
@click.option("--json", "file", type=NEW_FILE, help="Write all rows to this file.")
def needs(
    calibration: Path,
    workers: list[Any],
    servers: list[Any],
    names: list[str],
    local_steps: list[Any],
    efficiency: float,
    file: Path | None,
) -> None:
    """Print the bandwidth that each mode needs, with and without local steps.

    \b
    hvdtrain plan needs cal.json --workers 4 --efficiency 0.8
    """
    from hvdtrain.planning import predict, show

    template = Scenario(MODES[0], placement="shared")
    jobs = predict.scenarios(template, names, workers, servers, [1.0], local_steps)
    measured = load(calibration)
    loaded = _on_asked_hosts(measured, None, None, 1)
    rows = predict.needs(loaded, jobs, efficiency)
    if file:
        write_whole(file, json.dumps({"rows": rows}, indent=1) + "\n")
    show.needs(rows)
    for line in itertools.chain(_scaled(measured, loaded), _disturbed(loaded)):
        click.echo(line)


@plan.command()
@click.argument("case", type=FILE)
@click.option("--json", "file", type=NEW_FILE, help="Write the cells to this file.")
def case(case: Path, file: Path | None) -> None:
    """Predict a published table: fit what is unknown on some of its cells, and say how far off the
    others are.
    """
    from hvdtrain.planning import cases, show

    table = cases.load(case)
    rows, fitted = cases.predict(table)
    if file:
        found = {"title": table.title, "source": table.source, "fitted": fitted, "cells": rows}
        write_whole(file, json.dumps(found, indent=1) + "\n")
    show.case(table.title, table.source, rows, fitted)


def _disturbed(calibration: Calibration) -> Iterator[str]:
    """Yields what other work made of the calibration."""
    others = calibration.others_share
    if others:
        yield (
            f"The machine did other work: {others:.0%} of it, while it was calibrated. Intervals are "
            "wider: calibrate again when it is quiet."
        )
    if calibration.made.get("jitter") == "guessed":
        jitter = calibration.step_jitter
        yield f"Fewer than eight steps were undisturbed: jitter is taken to be {jitter:g}."


def _warnings(calibration: Calibration, template: Scenario, rows: Sequence[Any]) -> Iterator[str]:
    """Yields what the calibration says little about, and what of the question is not in all
    rows.
    """
    from hvdtrain.planning.predict import WIDER_PER_DOUBLED_BANDWIDTH, WIDER_PER_DOUBLING

    if any(row["beyond"] for row in rows):
        workers = with_noun(calibration.most_workers, "worker")
        servers = with_noun(calibration.most_servers, "server")
        network = "over no network"
        if calibration.bandwidth_gbit:
            network = f"at {calibration.bandwidth_gbit:g} Gbit/s"
        yield (
            f"The calibration was made with {workers} and {servers}, {network}; intervals beyond "
            f"are wider by {WIDER_PER_DOUBLING:.0%} for each doubling, of bandwidth by "
            f"{WIDER_PER_DOUBLED_BANDWIDTH:.1%}, and by twice as much where predictions were hardly "
            "ever compared with measurements."
        )
    biases = {mode: bias for mode, bias in calibration.bias.items() if abs(bias - 1) > 0.01}
    shown = {row["mode"] for row in rows}
    for mode in sorted(shown & biases.keys()):
        bias = biases[mode]
        told = f"{bias:.2f} times too long" if bias > 1 else f"{1 / bias:.2f} times too short"
        yield f"{mode}: the steps of its runs were predicted {told}, which is corrected."
    # 0.1.0 did not write its version down.
    made_with = calibration.made.get("hvdtrain", "0.1.0")
    if made_with != version("hvdtrain"):
        yield (
            f"The calibration was made with hvdtrain {made_with}, not {version('hvdtrain')}. Steps may "
            "take more or less time now: calibrate again."
        )
    yield from _disturbed(calibration)
    codec = template.compression
    sent_by_rings = {row["compression"] for row in rows if row["mode"] in RING_MODES}
    if codec != "none" and sent_by_rings == {"none"}:
        yield f"Rings send uncompressed gradients here; only servers use {codec}."
    for slow in sorted(template.slow.workers):
        without = sorted({row["workers"] for row in rows if 1 < row["workers"] <= slow})
        if without:
            yield (
                f"--slow: nobody is slow where there is no worker {slow}, "
                f"with {some_of(map(str, without))} workers."
            )
