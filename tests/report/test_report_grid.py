"""Several comparisons: runs that differ in model, batch, learning rate or --slow; and tables like a
reference's.
"""

import csv
import json
import math
import re

import pytest
from click.testing import CliRunner
from helpers.foretold import foretell_little
from helpers.page import Page
from helpers.report_runs import BATCH, EPOCHS, PER_EPOCH, run, write, write_report

from hvdtrain.base.config import recipes
from hvdtrain.base.errors import UsageError
from hvdtrain.comparing.report_command import report
from hvdtrain.reporting import plots, reference_tables, results
from hvdtrain.reporting.answer import reach_answer
from hvdtrain.reporting.comparisons import split_into_comparisons
from hvdtrain.reporting.content import collect
from hvdtrain.reporting.fairness import check
from hvdtrain.runs.read import find_runs

SAMPLES = BATCH * PER_EPOCH
PUBLISHED = [name for name in recipes.names("presets") if "table" in recipes.load("presets", name)]


def of_batch(batch, *kind, **more):
    change = {"global_batch": batch, "threads_per_worker": 1} | more.pop("change", {})
    return run(*kind, change=change, **more)


def weak():
    """Three numbers of workers, 32 samples each a step, and learning rates that grow with their
    root.
    """
    kinds = [("single", 1), ("allreduce", 2), ("ps-sync", 2, 1), ("allreduce", 4)]
    return [
        of_batch(32 * n, *kind, change={"lr": 0.1 * math.sqrt(n)}, speed=90.0 * n)
        for kind in kinds
        for n in kind[1:2]
    ]


# Which runs may be in one report, and in one table


def test_runs_of_each_batch_are_a_part():
    batches = [
        of_batch(batch, *kind) for batch in (64, 16) for kind in (("single",), ("allreduce", 2))
    ]
    parts = split_into_comparisons(batches)
    assert [part.title for part in parts] == ["global batch 16", "global batch 64"]
    assert [[r.kind.mode for r in part.runs] for part in parts] == [["single", "allreduce"]] * 2
    [one] = split_into_comparisons(batches[:2])
    assert (one.title, one.runs) == ("", batches[:2])


def test_runs_whose_workers_were_made_slow_are_a_part():
    kinds = [(slow, kind) for slow in ("1:4x", "none") for kind in (("single",), ("allreduce", 2))]
    runs = [
        run(*kind, change={"slow": {"asked": slow}})
        for slow, kind in kinds
        if slow == "none" or kind[1:]
    ]
    # the last of a version that made nobody slow
    parts = split_into_comparisons([*runs, run("ddp", 2)])
    assert [(part.title, len(part.runs)) for part in parts] == [
        ("slow: none", 3),
        ("slow: 1:4x", 2),
    ]


def test_models_are_parts_of_their_own_with_weights_of_their_own():
    other = {"model": "vgg16", "parameters": 7, "initial_weights": "others"}
    parts = split_into_comparisons(
        [run(), run("allreduce", 2), run(change=other), run("allreduce", 2, change=other)]
    )
    assert [part.title for part in parts] == ["vgg16", "vggf"]
    with pytest.raises(
        UsageError, match="initial_weights differs among runs of the same repeat and model"
    ):
        check([run(), of_batch(32, "allreduce", 2, change={"initial_weights": "others"})])


@pytest.mark.parametrize(
    "change, said",
    [
        ({"width": 0.5}, "width differs"),
        ({"precision": "bf16"}, "precision differs"),
        (
            {"hardware": {"cpu": "B", "cores": 2, "hosts": ["one"], "gpus": []}},
            "hardware.cpu differs",
        ),
        ({"seed": 7}, "seed differs among runs of the same repeat"),
        ({"backend": "x"}, "backend differs among runs of the same mode, workers and servers"),
    ],
)
def test_in_a_grid_nothing_else_may_differ(change, said):
    with pytest.raises(UsageError, match=said):
        check([of_batch(32), of_batch(32, "allreduce", 2), of_batch(64, change=change)])


def test_a_cosine_may_end_at_another_step():
    spans = [
        of_batch(batch, change={"schedule": f"cosine over {960 // batch} steps"})
        for batch in (32, 64)
    ]
    assert check(spans)


def test_learning_rates_may_grow_with_the_batch_and_are_one_for_each():
    assert check(weak())
    with pytest.raises(
        UsageError, match="lr differs among runs of the same global batch and model: '0.001' in"
    ):
        check([of_batch(64), of_batch(64, "allreduce", 2, change={"lr": 0.002}), of_batch(32)])


def test_scaling_is_weak_where_the_batch_grows_with_the_workers():
    found = {
        (r["mode"], r["workers"]): r["scaling_efficiency"] for r in results.result_rows(weak())
    }
    assert found == {
        ("single", 1): 1.0,
        ("allreduce", 2): 1.0,
        ("ps-sync", 2): 1.0,
        ("allreduce", 4): 1.0,
    }


def test_scaling_is_strong_within_each_batch_of_a_grid():
    runs = [
        of_batch(batch, *kind, speed=speed * batch)
        for batch in (16, 32, 64)
        for kind, speed in ((("single",), 1.0), (("allreduce", 2), 1.5))
    ]
    assert [r["scaling_efficiency"] for r in results.result_rows(runs)] == [1.0] * 3 + [0.75] * 3
    part = split_into_comparisons(runs)[2]
    assert [r["scaling_efficiency"] for r in results.result_rows(part.runs)] == [1.0, 0.75]


# Figures


def test_figures_of_epochs_follow_from_samples_and_time():
    [row] = results.result_rows([of_batch(50, speed=80.0, test_loss=0.3, test_accuracy=0.9)])
    assert row["epochs"] == EPOCHS and row["steps_per_epoch"] == 7  # 320 samples in batches of 50
    assert row["epoch_s"] == SAMPLES / 80.0
    assert row["best_val_loss"] == pytest.approx(2.3 * math.exp(-EPOCHS))
    assert (row["test_loss"], row["test_accuracy"]) == (0.3, 0.9)
    [row] = results.result_rows([run("allreduce", 4, speed=80.0)])
    assert row["worker_samples_per_s"] == 20.0


# Tables as a reference has them


def made(down, figures, runs, **reference):
    table = {"down": down, "figures": figures, "note": "A note.", "reference": reference}
    return reference_tables.build_table(
        {"reference": "a paper", "options": {}, "table": table}, runs
    )


def texts(table):
    return [(label, [cell.text for cell in cells]) for label, cells in table.rows]


def test_a_table_by_batch_has_the_runs_and_the_reference_beside_each_other():
    runs = [
        of_batch(b, *kind, speed=b * 1.0)
        for b in (16, 32)
        for kind in (("single",), ("allreduce", 2))
    ]
    theirs = [{"global_batch": 32, "wall_s": 980, "val_accuracy": 0.9819}]
    table = made("global_batch", ["wall_s", "val_accuracy"], runs, **{"1 VM": theirs})
    assert table.headings == ["training time", "validation accuracy"]
    assert texts(table) == [
        ("one process, 1 of 2 cores, global batch 16", ["120 s", "98.00%"]),
        ("allreduce ×2, global batch 16", ["120 s", "98.00%"]),
        ("one process, 1 of 2 cores, global batch 32", ["60.0 s", "98.00%"]),
        ("allreduce ×2, global batch 32", ["60.0 s", "98.00%"]),
        ("reference: 1 VM, global batch 32", ["980 s", "98.19%"]),
    ]


def test_a_table_of_runs_names_the_model_where_there_are_several():
    other = {"model": "resnet8", "parameters": 7, "initial_weights": "others"}
    runs = [run(speed=10.0), run(speed=30.0, change=other)]
    table = made(
        "run", ["worker_samples_per_s"], runs, **{"4 GPUs": [{"worker_samples_per_s": 7.5}]}
    )
    one = "one process, 2 cores"
    assert texts(table) == [
        (f"{one}, resnet8", ["30.0"]),
        (f"{one}, vggf", ["10.0"]),
        ("reference: 4 GPUs", ["7.50"]),
    ]


def test_a_table_of_epochs_reads_every_evaluation():
    evaluations = [
        {
            "epoch": n,
            "samples": 320 * n,
            "train_s": 3.0 * n,
            "val_loss": 1,
            "val_accuracy": 0.5,
            "train_loss": 2.0 / n,
        }
        for n in (1, 2)
    ]
    # a quarter of an epoch more
    evaluations.append(evaluations[1] | {"epoch": 3, "samples": 720, "train_s": 7.0})
    theirs = [{"epoch": 3, "train_loss": 0.0798, "epoch_s": 0.718}]
    figures = ["train_loss", "train_accuracy", "epoch_s"]
    table = made("epoch", figures, [run(evaluations=evaluations)], **{"4 GPUs": theirs})
    assert table.headings == ["training loss", "time of an epoch"]
    assert texts(table) == [
        ("one process, 2 cores, epoch 1", ["2.0000", "3.00 s"]),
        ("one process, 2 cores, epoch 2", ["1.0000", "3.00 s"]),
        ("one process, 2 cores, epoch 3", ["1.0000", "4.00 s"]),
        ("reference: 4 GPUs, epoch 3", ["0.0798", "0.718 s"]),
    ]


def test_repeats_are_a_mean_and_a_range():
    table = made(
        "run", ["wall_s"], [run(repeat=r, speed=s) for r, s in ((1, 100.0), (2, 200.0), (3, 160.0))]
    )
    [(_, [cell])] = table.rows
    assert (cell.text, cell.detail) == ("13.0 s", "9.60–19.2")
    assert table.notes[1].startswith("Repeats with their range: means,")


def test_what_is_not_as_in_the_preset_is_said():
    preset = reference_tables.load_preset("vggf-coil100")
    table = reference_tables.build_table(preset, [run(change={"pretrained": "imagenet"})])
    [told] = [note for note in table.notes if "brackets" in note]
    assert "dataset digits (coil100)" in told and "width 0.25 (1)" in told
    assert "pretrained" not in told and "model" not in told and "epochs 6 (5)" in told


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_preset_has_a_table_that_runs_can_stand_in(name):
    preset = reference_tables.load_preset(name)
    table = reference_tables.build_table(preset, weak())
    assert any(label.startswith("reference: ") for label, _ in table.rows)
    assert texts(table) and table.notes[0].startswith("The reference")
    records = [record for records in preset["table"]["reference"].values() for record in records]
    assert set().union(*records) - {preset["table"]["down"]} <= set(preset["table"]["figures"])


# The files


one_report = pytest.mark.xdist_group("report grid")  # which one process makes, for all tests of it


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A weak-scaling grid of three batches, with its report and the table of a reference; one run
    failed. One process, which has the batch of a worker, is beside each.
    """
    root = tmp_path_factory.mktemp("grid")
    kinds = (
        (("single", 1), 100.0),
        (("allreduce", 2), 170.0),
        (("ps-sync", 2, 1), 150.0),
        (("sharded", 4), 260.0),
    )
    for kind, speed in kinds:
        change = {
            "global_batch": 32 * kind[1],
            "lr": 0.001 * math.sqrt(kind[1]),
            "threads_per_worker": 1,
        }
        write(root / "runs", *kind, speed=speed, change=change)
    write(root / "runs", "allreduce", 4, change={"global_batch": 128, "lr": 0.002}, status="failed")
    write_report([root], root, "vgg19-imagenet20")
    return root


@one_report
def test_several_comparisons_have_one_report_of_all_runs(grid):
    assert {p.stem for p in (grid / "plots").iterdir()} == {"ratios", "step-time", "learning"}
    rows = list(csv.DictReader((grid / "results.csv").read_text().splitlines()))
    assert [(row["mode"], row["global_batch"]) for row in rows] == [
        ("single", "32"),
        ("allreduce", "64"),
        ("sharded", "128"),
        ("ps-sync", "64"),
    ]
    # Over the baseline, which is in another comparison.
    assert [float(row["scaling_efficiency"]) for row in rows] == [1.0, 0.85, 0.65, 0.75]


@one_report
def test_each_comparison_has_an_answer(grid):
    across = json.loads((grid / "verdict.json").read_text())["comparisons"]
    assert [of.pop("comparison").split(",")[0] for of in across] == [
        "global batch 64",
        "global batch 128",
    ]
    said = reach_answer([run for run in find_runs([grid]) if run.manifest.global_batch in (32, 64)])
    assert (
        across[0] == json.loads(json.dumps(said.data))
        and across[0]["speed"]["run"] == "allreduce ×2"
    )


@one_report
def test_pages_say_what_differs_and_have_it_in_a_column(grid):
    parsed = Page((grid / "report.html").read_text())
    markdown = (grid / "report.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", markdown):
        assert (grid / link).is_file()
    for said in (parsed.text, markdown):
        assert "2 comparisons" in said and "global batch 64, learning rate 0.001414" in said
        assert "allreduce-w4-s0-r1: left out, the run ended with status" in said
        assert "reference: 8 nodes" in said and "87.50%" in said
        assert "allreduce ×2 did 1.13 times the samples/s of ps-sync ×2+1" in said
    assert "| ps-sync ×2+1, global batch 64, learning rate 0.001414 | 1 | 50.0 |" in markdown
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_names_from_files_are_neither_mathematics_nor_orders_to_a_terminal(tmp_path, monkeypatch):
    foretell_little(monkeypatch)
    for model in ("$\\frac{\x1b[2J", "vggf"):
        for kind in (("single",), ("allreduce", 2)):
            change = {"model": model, "initial_weights": model, "backend": "\x1b[31m"}
            write(tmp_path / "x", *kind, change=change).rename(tmp_path / f"{kind[0]}-{model[:3]}")
    (tmp_path / "x").rmdir()
    done = CliRunner().invoke(report, [str(tmp_path)])
    assert done.exit_code == 0 and "\x1b" not in done.output and "$\\frac{\\x1b[2J" in done.output
    assert all(plot.svg for plot in plots.draw(collect(find_runs([tmp_path])).comparisons)[0])


@one_report
def test_the_reference_is_written_as_csv(grid):
    rows = {
        row["run"]: row for row in csv.DictReader((grid / "reference.csv").read_text().splitlines())
    }
    assert list(rows) == [
        "one process, 1 of 2 cores",
        "allreduce ×2",
        "ps-sync ×2+1",
        "sharded ×4",
        "reference: 1 node",
        "reference: 2 nodes",
        "reference: 4 nodes",
        "reference: 8 nodes",
    ]
    assert [row["scaling efficiency"] for row in rows.values()][:5] == [
        "1.0",
        "0.85",
        "0.75",
        "0.65",
        "1.0",
    ]
    assert rows["reference: 8 nodes"]["test accuracy (top-1)"] == "0.875"


@one_report
def test_the_command_prints_the_grid_and_the_reference(grid, tmp_path, monkeypatch):
    foretell_little(monkeypatch)
    monkeypatch.setattr(plots, "draw", lambda answered: ([], []))
    done = CliRunner().invoke(
        report, [str(grid), "--reference", "vgg19-imagenet20", "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    assert "global batch 64, learning rate 0.001414\n" in done.output
    assert (
        "reference: 1 node" in done.output
        and "These runs are not as the preset has them" in done.output
    )
    assert (tmp_path / "out" / "reference.csv").is_file()
    refused = CliRunner().invoke(report, [str(grid), "--reference", "nosuch"])
    assert "unknown preset 'nosuch': choose from cnn-mnist, " in str(refused.exception)
