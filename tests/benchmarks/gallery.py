"""Ring, servers or one machine: the answers for ten models on 2 to 16 hosts and three networks.

    python tests/benchmarks/gallery.py predict --out gallery
    sudo python tests/benchmarks/gallery.py measure cnn vggf --out gallery
    python tests/benchmarks/gallery.py page --out gallery > hvdtrain/planning/gallery.md

predict   calibrates each model on this machine, in about a minute each, and predicts all answers
measure   compares on two hosts of `hvdtrain hosts`, which the script makes and removes. This takes some minutes for
          each batch and network of a model. It needs root, and a core for each of the two hosts
page      prints the page in Markdown, from what is in OUT

Each host has one core. So two hosts can be made of a machine with two cores. `predict` and `measure` need a machine
that does nothing else. What OUT already has is not made again. Name models to make only these. `--links` and
`--batches` measure only some cells.
"""

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from two_hosts import hvdtrain, two_hosts

from hvdtrain.planning import show
from hvdtrain.reporting import rule

PREFIX = "gallery"
HOSTS = (2, 4, 8, 16)
LINKS = {"100mbit": 0.1, "1gbit": 1.0, "10gbit": 10.0}
# At 10 Gbit/s the cores of this machine would carry the messages, and not its links.
MEASURED_LINKS = ("100mbit", "1gbit")
BATCHES = (8, 64)
MODES = "allreduce,ps-sync,ps-async"
# The sides, as keys of a prediction have them and as the answer of a comparison has them.
SIDES = {"ring": "ring", "servers": "servers", "one_machine": "one machine"}
SHORT = {"p_ring": "RING", "p_servers": "SERVERS", "p_one_machine": "ONE"}


class Model(NamedTuple):
    """A model of the gallery.

    Attributes:
        words: the options that name it.
        note: what a reader should know about it.
    """

    words: Sequence[str]
    note: str


def _vgg(name: str) -> Model:
    return Model(("--model", name, "--width", "1", "--image-size", "64"), "64 pixels")


MODELS = {
    "cnn": Model(("--model", "cnn", "--image-size", "32"), "two convolutions, 32 pixels"),
    "vggf": Model(
        ("--model", "vggf", "--width", "0.125", "--image-size", "32"),
        "at an eighth of its width, 32 pixels",
    ),
    "resnet20": Model(("--model", "resnet20", "--image-size", "32"), "32 pixels"),
    "transformer": Model(
        ("--model", "tests/benchmarks/gallery_model.py:transformer", "--image-size", "64"),
        "six layers of 256 channels, 64 patches an image",
    ),
    "resnet18": Model(
        ("--model", "torchvision.models:resnet18", "--image-size", "64"), "torchvision's, 64 pixels"
    ),
    "resnet50": Model(
        ("--model", "torchvision.models:resnet50", "--image-size", "64"), "torchvision's, 64 pixels"
    ),
    "vgg11": _vgg("vgg11"),
    "vgg13": _vgg("vgg13"),
    "vgg16": _vgg("vgg16"),
    "vgg19": _vgg("vgg19"),
}


def calibrate_words(name: str, file: str) -> list[str]:
    words = ["plan", "calibrate", *MODELS[name].words]
    return [*words, "--batch-size", "8", "--cores", "1", "--threads", "1", "--out", file]


def predict_words(calibration: str, batch: int) -> list[str]:
    hosts = ",".join(map(str, HOSTS))
    words = ["plan", "predict", calibration, "--batch-size", str(batch), "--workers", hosts]
    return [*words, "--bandwidth", ",".join(LINKS), "--modes", MODES]


def compare_words(name: str, batch: int) -> list[str]:
    hosts = f"{PREFIX}1:1,{PREFIX}2:1"
    words = ["compare", "-H", hosts, *MODELS[name].words, "--batch-size", str(2 * batch)]
    # Predictions choose fp16 for nearly every cell that can be measured.
    words += ["--compression", "fp16"]
    # Without these the search would try more settings, which takes some minutes longer.
    words += ["--wire", "zmq", "--ring-transport", "gloo", "--wait-for", "step", "--bucket-mb", "4"]
    words += ["--modes", f"single,{MODES}", "--repeats", "5"]
    return [*words, "--sprint", "1s", "--trainings", "0"]


def predict(names: Sequence[str], out: Path) -> None:
    for name in names:
        calibration = out / f"{name}.json"
        if not calibration.exists():
            hvdtrain(*calibrate_words(name, str(calibration)))
        for batch in BATCHES:
            file = out / f"{name}-{batch}-predicted.json"
            if not file.exists():
                hvdtrain(*predict_words(str(calibration), batch), "--json", str(file))


def measure(names: Sequence[str], out: Path, links: Sequence[str], batches: Sequence[int]) -> None:
    for link in links:
        with two_hosts(PREFIX, link):
            for name in names:
                for batch in batches:
                    folder = out / f"{name}-{batch}-{link}"
                    if not (folder / "verdict.json").exists():
                        hvdtrain(*compare_words(name, batch), "--out", str(folder))


class Cell(NamedTuple):
    """An answer of the gallery.

    Attributes:
        short: the answer, for a narrow column.
        sides: samples/s of each of SIDES, with an interval, in words.
    """

    short: str
    sides: Sequence[str]


class Measured(NamedTuple):
    """What a comparison has measured.

    Attributes:
        answer: its answer by samples/s.
        rates: samples/s of the fastest contender of each of SIDES: the mean, the lowest and the
            highest; None if the side has none.
    """

    answer: str
    rates: dict[str, tuple[float, float, float] | None]


def measured(folder: Path) -> Measured | None:
    """What a comparison has measured; None if it was not made."""
    file = folder / "verdict.json"
    if not file.exists():
        return None
    verdict = json.loads(file.read_text(encoding="utf-8"))
    rates = {}
    for side, family in SIDES.items():
        of_side = [row for row in verdict["runs"] if row["family"] == family]
        timed = [row for row in of_side if row["samples_per_s"]]
        fastest = max(timed, key=itemgetter("samples_per_s"), default=None)
        rates[side] = fastest and itemgetter("samples_per_s", "least", "most")(fastest)
    return Measured(answer_by_speed(verdict), rates)


def answer_by_speed(verdict: dict[str, Any]) -> str:
    """Which of ONE, RING and SERVERS is shown to do the most samples/s; `?` if none is.

    ONE also stands for a distributed job that is not faster by the margin. The answer of the
    comparison names no side, since with fp16 the sides do not compute the same, and nothing was
    trained.
    """
    if verdict["answer"] == "ONE MACHINE":
        return "ONE"
    beside_machine = verdict["one_machine"]
    ring = verdict["speed"]
    if not beside_machine or not ring:
        return "?"
    margin = verdict["margin"]
    if rule.judge_distribution(lead_of(beside_machine), margin) != rule.AHEAD:
        return "?"
    answers = {rule.AHEAD: "RING", rule.BEHIND: "SERVERS"}
    return answers.get(int(rule.judge(lead_of(ring), margin)), "?")


def lead_of(race: dict[str, Any]) -> rule.Lead:
    low = -math.inf if race["ci_low"] is None else math.log(race["ci_low"])
    high = math.inf if race["ci_high"] is None else math.log(race["ci_high"])
    return rule.Lead(math.log(race["ratio"]), low, high, math.nan, race["n"])


def measured_cell(found: Measured) -> Cell:
    sides = [f"**{in_words(*rate)}**" if rate else "–" for rate in found.rates.values()]
    return Cell(f"**{found.answer}**", sides)


def predicted_rate(place: dict[str, Any], side: str) -> tuple[float, float, float]:
    """Samples/s of a side, with the interval."""
    middle, low, high = (place[f"{side}_samples_per_s{end}"] for end in ("", "_low", "_high"))
    return middle, low, high


def predicted_cell(place: dict[str, Any]) -> Cell:
    sides = []
    for side in SIDES:
        rate = predicted_rate(place, side)
        sides.append(in_words(*rate) if rate[0] else "–")
    if place["not_validated"]:
        likely = [name for key, name in SHORT.items() if place[key] >= show.SURE]
        return Cell("".join(f"{name}?" for name in likely) or "?", sides)
    best = max(SHORT, key=place.__getitem__)
    return Cell(f"{SHORT[best]} {place[best]:.0%}", sides)


def in_words(middle: float, low: float, high: float) -> str:
    return f"{rate_in_words(middle)} ({rate_in_words(low)} to {rate_in_words(high)})"


def rate_in_words(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def places(name: str, batch: int, out: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The predictions for a model and batch, by hosts and link."""
    predicted = json.loads((out / f"{name}-{batch}-predicted.json").read_text(encoding="utf-8"))
    link_of = {gbit: link for link, gbit in LINKS.items()}
    return {(place["hosts"], link_of[place["bandwidth_gbit"]]): place for place in predicted["map"]}


def cells(name: str, batch: int, out: Path) -> dict[tuple[int, str], Cell]:
    """The answers for a model and batch, by hosts and link."""
    of_places = places(name, batch, out)
    answers = {at: predicted_cell(place) for at, place in of_places.items()}
    for link in MEASURED_LINKS:
        found = measured(out / f"{name}-{batch}-{link}")
        if found:
            answers[2, link] = measured_cell(found)
    return answers


def measured_beside_predicted(names: Sequence[str], out: Path) -> list[str]:
    """The lines of a table of the cells that were measured, which are also predicted."""
    rows = []
    for name, batch, link in itertools.product(names, BATCHES, MEASURED_LINKS):
        found = measured(out / f"{name}-{batch}-{link}")
        if not found:
            continue
        place = places(name, batch, out)[2, link]
        row = [f"`{name}`", str(batch), link, found.answer, predicted_cell(place).short]
        for side, rate in found.rates.items():
            middle, low, high = predicted_rate(place, side)
            if not rate:
                row.append("–")
                continue
            ratio = f"{middle / rate[0]:.2f}"
            row.append(ratio if low <= rate[0] <= high else f"{ratio}, outside")
        rows.append(row)
    headings = ["model", "batch", "link", "measured", "predicted", *SIDES.values()]
    return ["", BESIDE, "", *table(headings, rows)] if rows else []


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(line)} |" for line in (headings, *rows)]
    return [lines[0], f"|{'---|' * len(headings)}", *lines[1:]]


def page(names: Sequence[str], out: Path) -> str:
    every = [(hosts, link) for hosts in HOSTS for link in LINKS]
    headings = ["model, MB of weights", "batch", *(f"{n} × {link}" for n, link in every)]
    overview = []
    details = []
    for name in names:
        calibration = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        megabytes = 4 * calibration["model"]["parameters"] / 1e6
        lines = []
        for batch in BATCHES:
            of_batch = cells(name, batch, out)
            shorts = [of_batch[at].short for at in every]
            overview.append([f"`{name}`, {megabytes:,.3g}", str(batch), *shorts])
            for (hosts, link), cell in of_batch.items():
                lines.append([str(batch), str(hosts), link, cell.short, *cell.sides])
        details += [
            "",
            f"### {name}",
            "",
            f"{MODELS[name].note}; {megabytes:,.3g} MB of weights.",
            "",
        ]
        details += commands(name)
        columns = ["batch", "hosts", "link", "answer", *SIDES.values()]
        details += [
            "",
            *table(columns, sorted(lines, key=lambda line: [int(line[0]), int(line[1])])),
        ]
    made = [datetime.fromtimestamp((out / f"{name}.json").stat().st_mtime, UTC) for name in names]
    beside = measured_beside_predicted(names, out)
    legend = MEASURED if beside else ""
    intro = INTRODUCTION.format(date=f"{max(made):%d %B %Y}".lstrip("0"), measured=legend)
    return "\n".join([intro, *table(headings, overview), *beside, "", DETAILS, *details, ""])


def commands(name: str) -> list[str]:
    file = f"{name}.json"
    return [
        f"    hvdtrain {' '.join(calibrate_words(name, file))}",
        f"    hvdtrain {' '.join(predict_words(file, BATCHES[0]))}",
        f"    hvdtrain {' '.join(compare_words(name, BATCHES[0]))}",
    ]


INTRODUCTION = """\
# A gallery of answers

Ring, servers or one machine? Here are answers for ten models, two batches, 2 to 16 hosts and three networks, each from
the commands below. `tests/benchmarks/gallery.py` makes this page. It was made on {date}, on two cores of an AMD EPYC.
The calibrations of `resnet18` and of the models below it are from the day before. They computed without [memory that is
kept](../../tests/benchmarks/README.md#what-a-ranks-memory-is-kept-for), so their samples/s may be too low by some per
cent, for all sides alike.

Each host has one core and one worker, and the batch is the batch of a worker. With faster hosts, messages take a larger
part of a step. So if your hosts are eight times as fast, and the batch of your workers is 64, read the rows of batch 8.
The images are `digits`. Predictions also try gradients in fp16.

| in a cell | meaning |
|---|---|
{measured}| RING 97% | predicted by `plan predict`: the ring is the fastest with a probability of 97 % |
| RING 65% | the same. Below 80 % no side is sure: the most likely one is shown |
| RING? | predicted, without a probability, since such predictions were [hardly compared](README.md#the-map) with runs |
| ? | the same, and no side is likely enough |
| ONE | one machine, with the same global batch |
"""
MEASURED = (
    "| **RING** | measured by `compare` on two hosts of `hvdtrain hosts`: the ring does the most "
    "samples/s (what is learned with fp16 was not measured). In the tables below, the figures of "
    "such rows are the mean of five repeats, the lowest and the highest |\n"
    "| **?** | measured: after five repeats no side is shown to do the most samples/s |\n"
)
BESIDE = """\
## Measured beside predicted

The cells that were measured. The last three columns have the predicted samples/s of a side divided by the measured
samples/s; `outside`: the measured mean is not in the predicted interval. The comparisons send fp16, as nearly all
predictions for these cells do.

The calibrations were made within half an hour of the comparisons. They have no run of a ring or of servers, and
most predictions of these two are too fast for batches of 8. Calibrations also train with one process for some seconds.
Before they did so, predictions for the first three models were 1.12 to 1.61 times too fast."""
DETAILS = """\
## Samples/s and commands

Predictions have intervals of 90 %. Commands are for a batch of 8. The first two commands of a model predict its
answers. The last one measures the answer for two hosts. Before that, make these hosts, as root: `hvdtrain hosts up
--count 2 --rate 1gbit --cpus 1,1 --prefix gallery`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["predict", "measure", "page"])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"Of {', '.join(MODELS)}; all.")
    parser.add_argument("--out", type=Path, default=Path("gallery"))
    parser.add_argument("--links", nargs="+", choices=MEASURED_LINKS, default=MEASURED_LINKS)
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=BATCHES)
    asked = parser.parse_args()
    unknown = set(asked.models) - MODELS.keys()
    if unknown:
        parser.error(f"no model {sorted(unknown)[0]}: {', '.join(MODELS)}")
    names = asked.models or list(MODELS)
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.part == "page":
        print(page(names, asked.out), end="")
        return
    if asked.part == "predict":
        predict(names, asked.out)
        return
    measure(names, asked.out, asked.links, asked.batches)


if __name__ == "__main__":
    main()
