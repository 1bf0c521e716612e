"""`hvdtrain plan`: its commands."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from hvdtrain.base.config.option_types import FileToWrite, Real, Several
from hvdtrain.base.config.run_config import WIRES, RunConfig
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import some_of, with_noun
from hvdtrain.planning.calibration import Calibration, Quantity, load
from hvdtrain.planning.scenario import MODES, RING_MODES, Scenario
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

    A minute of measuring here; then a simulation of layers, links and processors says what a step
    would take elsewhere, in which mode, with an interval.
    """


@plan.command()
@train_options(*({field.name for field in fields(RunConfig)} - MEASURED))
@click.option(
    "--batch-size",
    "-b",
    type=click.IntRange(1, 65536),
    default=16,
    show_default=True,
    help="Of a worker.",
)
@click.option(
    "--from",
    "runs",
    multiple=True,
    type=FOLDER,
    help="Finished runs of this model, to correct it by.",
)
@click.option("--bandwidth", type=BANDWIDTH, help="Of the links of those runs' hosts.")
@click.option(
    "--out",
    type=NEW_FILE,
    required=True,
    help="File of the calibration, JSON with units in its names.",
)
def calibrate(
    batch_size: int, runs: tuple[Path, ...], bandwidth: float | None, out: Path, **measured: Any
) -> None:
    """Measure, for about a minute, what a step and its messages cost here.

    \b
    hvdtrain plan calibrate --model vgg16 --width 0.5 --from runs/ring --bandwidth 1gbit --out c.json
    """
    from hvdtrain.planning import calibrate as measuring
    from hvdtrain.planning.check import finished

    finished_runs = [finished(run) for run in runs]
    config = check(RunConfig(**measured))
    say = partial(click.echo, err=True)
    calibration = measuring.calibrate(config, batch_size, say, finished_runs, bandwidth)
    calibration.save(out)
    alone = calibration.with_costs(Scenario("single"))
    click.echo(
        f"{with_noun(len(calibration.layers), 'layer')}, {alone.bytes / 1e6:,.1f} MB of gradients; "
        f"computing a step of {batch_size} takes {1e3 * alone.computing_s:,.1f} ms; wrote {out}"
    )


@plan.command(context_settings=DEFAULTS)
@click.argument("calibration", type=FILE)
@click.option(
    "--workers", "-n", type=Counts(), default="1-64", help="`2,8`; `1-64` is 1, 2, 4 … 64."
)
@click.option(
    "--servers", "-s", type=Counts(equal=True), default="1,equal", help="`1,2,equal`: as workers."
)
@click.option(
    "--bandwidth",
    "bandwidths",
    type=BANDWIDTHS,
    default="1gbit,10gbit",
    help="Of each host's link.",
)
@click.option(
    "--server-bandwidth",
    "server_gbit",
    type=BANDWIDTH,
    help="Of hosts of servers alone  [default: as all].",
)
@click.option("--latency", type=LATENCY, help="One way, `50us`  [default: the calibration's].")
@click.option("--modes", "names", type=NAMES, default=",".join(MODES))
@click.option("--compression", default="none", help="Of gradients: a codec of the calibration.")
@click.option(
    "--wire",
    type=click.Choice(WIRES),
    help="Of servers  [default: rpc; the map tries all measured].",
)
@click.option(
    "--batch-size",
    "-b",
    type=click.IntRange(1, 65536),
    help="Of each worker  [default: the calibration's].",
)
@click.option(
    "--placement",
    type=PLACEMENT,
    default="dedicated",
    help="Servers' hosts: of their own, or the workers'.",
)
@click.option("--gpus-per-host", type=click.IntRange(1, 64), default=1, help="Workers on a host.")
@click.option(
    "--local-steps", type=Counts(), default="1", help="Of a worker, from an exchange to the next."
)
@click.option("--staleness", type=click.IntRange(0, 1000), default=2, help="Bound of ps-ssp.")
@click.option(
    "--slow", type=SlowRules(), default="none", help="`1:4x`, `random:6x:p=0.1`, joined by `+`."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Of what is drawn.")
@click.option("--json", "file", type=NEW_FILE, help="Write all rows to this file.")
@click.option(
    "--plot", type=NEW_FILE, help="Draw samples/s over workers and who wins where, as SVG."
)
@click.option(
    "--hosts", type=click.IntRange(2, 1024), help="Not --workers, --servers: the best use of these."
)
@click.option(
    "--price-host",
    type=Real(0, 1e6, True),
    default=1.0,
    help="Of a worker's host, an hour, for --hosts.",
)
@click.option(
    "--price-server", type=Real(0, 1e6), help="Of a server's host; 0: free  [default: the same]."
)
def predict(
    calibration: Path,
    workers: list[Any],
    servers: list[Any],
    bandwidths: list[float],
    latency: float | None,
    names: list[str],
    batch_size: int | None,
    gpus_per_host: int,
    local_steps: list[Any],
    file: Path | None,
    plot: Path | None,
    hosts: int | None,
    price_host: float,
    price_server: float | None,
    wire: str | None,
    **more: Any,
) -> dict[str, Any]:
    """Predict seconds a step for every mode, number of workers and servers, and bandwidth.

    \b
    hvdtrain plan predict c.json --workers 1-64 --servers 1,equal --bandwidth 1gbit --plot plan.svg
    hvdtrain plan predict c.json --hosts 16 --price-host 3 --price-server 0.5 --bandwidth 10gbit
    """
    from hvdtrain.planning import best, show
    from hvdtrain.planning import predict as prediction

    loaded = _loaded(calibration, batch_size, latency, wire)
    template = Scenario(MODES[0], workers_per_host=gpus_per_host, wire=loaded.wires[0], **more)
    title = ""
    if hosts:
        _check_one_network(bandwidths, local_steps)
        title = f"Best use of {hosts} hosts, or of {hosts * price_host:,.4g} an hour"
        prediction.check_slow(template, hosts * gpus_per_host)
        template = replace(template, bandwidth_gbit=bandwidths[0], local_steps=local_steps[0])
        contest = best.Contest(loaded, template, names)
        prices = best.Prices(price_host, price_host if price_server is None else price_server)
        rows = contest.splits(hosts, prices)
        places = [contest.place(hosts, prices)]
    else:
        if price_server is not None or price_host != 1.0:
            raise UsageError(
                "prices are what --hosts asks about: give the number of hosts, or no price"
            )
        jobs = prediction.scenarios(template, names, workers, servers, bandwidths, local_steps)
        jobs += [best.one_machine(template, n) for n in workers]
        rows = [prediction.row(loaded, job) for job in jobs]
        places = best.Contest(loaded, template, names).map(workers, bandwidths, local_steps)
    show.predictions(rows, title)
    if places:
        show.show(show.map_table(places))
    found = {"calibration": str(calibration), "model": loaded.model, "rows": rows, "map": places}
    if file:
        write_whole(file, json.dumps(found, indent=1) + "\n")
    if plot:
        steps = {1, local_steps[0]}
        drawn_rows = [row for row in rows if row["local_steps"] in steps]
        drawn_places = [place for place in places if place["local_steps"] in steps]
        show.plot(plot, drawn_rows, drawn_places)
    for line in _warnings(loaded, template, rows):
        click.echo(line)
    return found


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
@click.option("--workers", "-n", type=Counts(), default="4", help="`2,8`; `1-64` is 1, 2, 4 … 64.")
@click.option(
    "--servers", "-s", type=Counts(equal=True), default="equal", help="On workers' hosts."
)
@click.option("--modes", "names", type=NAMES, default="allreduce,ps-sync")
@click.option("--local-steps", type=Counts(), default="1,16", help="From an exchange to the next.")
@click.option(
    "--efficiency",
    type=SHARE,
    default=0.8,
    help="Of what as many workers would do that never wait.",
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
    """Print the bandwidth that each mode needs, and with local steps.

    \b
    hvdtrain plan needs cal.json --workers 4 --efficiency 0.8
    """
    from hvdtrain.planning import predict, show

    template = Scenario(MODES[0], placement="shared")
    jobs = predict.scenarios(template, names, workers, servers, [1.0], local_steps)
    rows = predict.needs(load(calibration), jobs, efficiency)
    if file:
        write_whole(file, json.dumps({"rows": rows}, indent=1) + "\n")
    show.needs(rows)


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


def _warnings(calibration: Calibration, template: Scenario, rows: Sequence[Any]) -> Iterator[str]:
    """Yields what the calibration says little about, and what of the question is not in all
    rows.
    """
    if any(row["beyond"] for row in rows):
        workers = with_noun(calibration.most_workers, "worker")
        servers = with_noun(calibration.most_servers, "server")
        yield (
            f"The calibration was made with {workers} and {servers}; "
            "intervals beyond are wider by 2 % for each doubling, which is a guess."
        )
    codec = template.compression
    sent_by_rings = {row["compression"] for row in rows if row["mode"] in RING_MODES}
    if codec != "none" and sent_by_rings == {"none"}:
        yield f"No ring here sends {codec}: servers do, beside a ring of plain gradients."
    for slow in sorted(template.slow.workers):
        without = sorted({row["workers"] for row in rows if 1 < row["workers"] <= slow})
        if without:
            yield (
                f"--slow: nobody is slow where there is no worker {slow}, "
                f"with {some_of(map(str, without))} workers."
            )
