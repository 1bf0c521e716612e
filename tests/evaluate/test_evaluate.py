"""`hvdtrain evaluate`: what a saved model says of held-out images, checked against training's own
evaluation.
"""

import csv
import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from helpers import archives
from helpers.jobs import hvdtrain
from PIL import Image
from safetensors.torch import load_file, save_file

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.data.find import find_dataset
from hvdtrain.job.rank.results import WEIGHTS
from hvdtrain.job.recording.snapshot import BEST
from hvdtrain.job.training.feed import Normalise
from hvdtrain.job.training.model import initial_model
from hvdtrain.runs.request import read_run_config
from hvdtrain.tools.evaluate import command, files
from hvdtrain.tools.evaluate.predictions import predict

# A group: one run, which one process makes.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("evaluate")]


def evaluate(run, *words):
    """What a command that succeeds prints, and its figures."""
    done = CliRunner().invoke(command.evaluate, [str(run), *map(str, words)])
    assert done.exception is None, done.exception
    out = re.search("^wrote (.*): ", done.stdout, re.MULTILINE)[1]
    return done.output, json.loads((Path(out) / "evaluation.json").read_text())


def refused(*words):
    """The one line with which it refuses."""
    done = CliRunner().invoke(command.evaluate, [str(word) for word in words])
    assert isinstance(done.exception, UsageError) and done.stdout == ""
    assert "\n" not in str(done.exception)
    return str(done.exception)


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a residual network on digits that makes some mistakes. Not to be changed."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    options = "--model resnet8 --width 0.5 --lr 3e-3 --threads 1 --steps 30 --schedule constant"
    done = hvdtrain("train", *options.split(), "--out", out)
    assert done.returncode == 0, done.stdout
    return out


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "digits")


@pytest.fixture
def three(small, tmp_path):
    """A run on three classes that has not learned anything."""
    config = RunConfig(model="cnn", dataset=str(small), width=0.1, threads=1)
    (tmp_path / "three" / "snapshots").mkdir(parents=True)
    config.write(tmp_path / "three" / "config.toml")
    save_file(initial_model(config, 3).state_dict(), tmp_path / "three" / WEIGHTS)
    return tmp_path / "three"


def test_files_and_screen_agree_with_the_evaluation_at_the_end_of_training(run):
    shown, figures = evaluate(run)
    made = contents(run / "evaluation-validation")
    assert set(map(str, made)) == {"evaluation.json", "confusion.csv", "mistakes.csv"}
    summary = json.loads((run / "summary.json").read_text())
    assert figures["top1"] == pytest.approx(summary["val_accuracy"], abs=1e-12)
    assert figures["loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
    assert 0.2 < figures["top1"] < figures["top5"] <= 1  # or this run shows nothing
    images = f"{figures['images']} validation images by {WEIGHTS}"
    assert (
        f"{images}: loss {figures['loss']:.4f}, top-1 accuracy {figures['top1']:.4f}, top-5 "
        in shown
    )
    assert evaluate(run)[1] == figures and contents(run / "evaluation-validation") == made
    out, data = run / "evaluation-validation", find_dataset("digits")
    counts = np.array(figures["confusion"])
    assert counts.sum() == figures["images"] == len(data.validation)
    assert counts.sum(1).tolist() == np.bincount([label for _, label in data.validation]).tolist()
    assert np.trace(counts) / counts.sum() == pytest.approx(figures["top1"])
    header, *rows = csv.reader((out / "confusion.csv").read_text().splitlines())
    assert header == ["true", *figures["classes"]]
    assert [name for name, *_ in rows] == figures["classes"]
    assert [list(map(int, row)) for _, *row in rows] == figures["confusion"]
    mistakes = list(csv.DictReader((out / "mistakes.csv").read_text().splitlines()))
    assert len(mistakes) == counts.sum() - np.trace(counts)
    sure = [float(row["confidence"]) for row in mistakes]
    assert sure == sorted(sure, reverse=True) and 0 < sure[-1] and sure[0] <= 1
    for row in mistakes:
        assert (Path(data.root) / "ValidationData" / row["image"]).is_file()
        assert row["image"].split("/")[0] == row["true"] != row["predicted"]


def test_each_answer_is_that_of_the_model_on_the_image_alone(run):
    config, data = read_run_config(run), find_dataset("digits")
    samples = data.validation[::40]
    done = []
    answers = predict(config, run / WEIGHTS, data, samples, lambda now, of: done.append((now, of)))
    assert done[-1] == (len(samples), len(samples))
    model = initial_model(config, 10)
    model.load_state_dict(load_file(run / WEIGHTS))
    model.eval()
    normalise = Normalise(RunConfig(), torch.device("cpu"))
    losses, in_top5 = [], []
    for i, (path, label) in enumerate(samples):
        with Image.open(path) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]
        with torch.inference_mode():
            shares = model(normalise(pixels)).softmax(1)[0]
        order = shares.argsort(descending=True).tolist()
        assert (answers.labels[i], answers.predicted[i]) == (label, order[0])
        assert answers.confidence[i] == pytest.approx(shares.max().item(), rel=1e-4)
        losses.append(-shares[label].log().item())
        in_top5.append(label in order[:5])
    assert answers.loss == pytest.approx(np.mean(losses), rel=1e-3)
    assert answers.top5 == np.mean(in_top5)


def test_with_few_classes_there_is_no_top5(three, tmp_path):
    shown, figures = evaluate(three, "--out", tmp_path / "results")
    assert ", no top-5 of so few classes\n" in shown and figures["top5"] is None
    assert not (three / "evaluation-validation").exists()


def test_a_run_of_somebody_else_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    # root may write anywhere
    monkeypatch.setattr("os.access", lambda path, *_, **__: path != tmp_path)
    with pytest.raises(
        UsageError, match=f"cannot write in {tmp_path}: name another folder with --out"
    ):
        files.check_out(tmp_path / "evaluation-validation")


def test_what_no_evaluation_has_made_is_not_overwritten(three, tmp_path):
    evaluate(three, "--out", tmp_path / "earlier")
    (tmp_path / "earlier" / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    said = refused(three, "--out", tmp_path / "earlier")
    assert "holds what `hvdtrain evaluate` has not put there (notes.txt)" in said
    assert "was not made by `hvdtrain evaluate`: name another folder" in refused(
        three, "--out", three
    )
    assert contents(tmp_path) == before


def test_test_images_where_the_data_set_has_some(three, small, tmp_path):
    assert f"the data set {small} has no test images: use --split validation" in refused(
        three, "--split", "test"
    )
    with_test = shutil.copytree(small, tmp_path / "with test!")
    shutil.copytree(small / "TrainData", with_test / "TestData")
    _, figures = evaluate(three, "--split", "test", "--dataset", with_test)
    assert (three / "evaluation-test-of-with-test-").is_dir()
    assert (figures["split"], figures["dataset"]) == ("test", str(with_test))
    assert (
        figures["images"]
        == len(find_dataset(str(small)).train)
        != len(find_dataset(str(small)).validation)
    )


def test_it_says_where_the_images_are_not_those_that_it_was_trained_on(run, tmp_path):
    def said(*words):
        shown, figures = evaluate(run, *words)
        return figures["same_data"], "are not those that" in shown

    assert said() == (True, False)
    copy = shutil.copytree(find_dataset("digits").root, tmp_path / "copy")
    assert said("--dataset", copy) == (True, False)
    next((copy / "TrainData" / "3").iterdir()).unlink()
    assert said("--dataset", copy) == (False, True)
    (run / "manifest.json").unlink()
    assert said("--dataset", copy) == (None, False)


def test_the_data_of_training_may_be_gone(run, tmp_path):
    """The classes come from the run."""
    copy = shutil.copytree(find_dataset("digits").root, tmp_path / "copy")
    config = dataclasses.replace(read_run_config(run), dataset=str(tmp_path / "gone"))
    config.write(run / "config.toml")
    assert "there is no folder" in refused(run)
    _, figures = evaluate(run, "--dataset", copy)
    assert figures["same_data"] and figures["classes"] == [str(digit) for digit in range(10)]
    for part in ("TrainData", "ValidationData"):
        (copy / part / "3").rename(copy / part / "three")
    said = refused(run, "--dataset", copy)
    assert "the model knows the classes 0, 1, 2, 3, 4 and 5 more; " in said


def test_parquet_files_are_tested_by_a_column_and_without_damaged_images(three, small, tmp_path):
    """The options of training are those of an evaluation too: small has three classes."""
    names = find_dataset(str(small)).classes
    columns = {
        "image": pa.array([archives.picture(k, (40, 36)) for k in range(5)] + [b"cut off"]),
        "kind": pa.array([*names, *names]),
        "colour": pa.array(["red"] * 6),
    }
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "set" / "test.parquet")
    pq.write_table(pa.table(columns), tmp_path / "set" / "train.parquet")
    assert "name the one of classes with --label" in refused(three, "--dataset", tmp_path / "set")
    options = ["--dataset", tmp_path / "set", "--label", "kind"]
    done = CliRunner().invoke(command.evaluate, [str(three), *map(str, options)])
    assert "--skip-bad leaves such images out" in str(done.exception)
    shown, figures = evaluate(three, *options, "--skip-bad")
    assert figures["images"] == 5 and "note: there is no validation part: the part `test`" in shown
    assert "--skip-bad left out 2 damaged images:\n  image 5 of row group 0 of " in shown
    alone = ["--dataset", tmp_path / "set" / "train.parquet", "--label", "kind"]
    assert "as with --validation 0.2; or name the folder" in refused(three, *alone)
    assert "one image: none can be held out" in refused(
        three, *alone, "--validation", 0.5, "--skip-bad"
    )


def test_a_class_without_images_has_none_in_the_confusion(run, tmp_path):
    copy = shutil.copytree(find_dataset("digits").root, tmp_path / "copy")
    shutil.rmtree(copy / "ValidationData" / "3")
    _, figures = evaluate(run, "--dataset", copy)
    assert [sum(row) == 0 for row in figures["confusion"]] == [k == 3 for k in range(10)]


def test_images_are_as_large_as_in_training_whatever_the_folder_says_now(run, monkeypatch):
    facts = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(facts | {"image_size": 40}))
    seen = []

    def stop(config, *_):
        seen.append(config.image_size)
        raise UsageError("stopped")

    monkeypatch.setattr("hvdtrain.tools.evaluate.predictions.predict", stop)
    refused(run)
    assert seen == [40]


def test_other_classes_and_other_weights_are_refused(run, small):
    assert "the model knows the classes 0, 1, 2, " in refused(run, "--dataset", small)
    weights = load_file(run / WEIGHTS)
    save_file(
        {name: tensor for name, tensor in weights.items() if "bn1" not in name}, run / WEIGHTS
    )
    assert f"{WEIGHTS} cannot be read as the weights of resnet8: " in refused(run)
    (run / WEIGHTS).write_bytes(b"not weights")
    assert f"{WEIGHTS} cannot be read as the weights of resnet8: " in refused(run)
    assert not (run / "evaluation-validation").exists()
    assert "is not a run folder" in refused(run.parent)


def test_a_model_that_diverged_has_no_loss(run):
    save_file(
        {
            name: torch.full_like(t, torch.nan) if t.is_floating_point() else t
            for name, t in load_file(run / WEIGHTS).items()
        },
        run / WEIGHTS,
    )
    shown, figures = evaluate(run)
    assert ": loss nan, top-1 accuracy 0." in shown and figures["loss"] is None


def test_of_a_run_that_has_not_finished_the_last_snapshot_is_tested_and_named(run):
    def tested():
        shown, figures = evaluate(run)
        name = str(Path(figures["weights"]).relative_to(run))
        assert f" by {name}: loss " in shown
        return name

    assert tested() == WEIGHTS
    (run / "summary.json").unlink()  # the final weights are those of an earlier end then
    snapshots = sorted((run / "snapshots").glob("step-*"))
    assert tested() == f"snapshots/{snapshots[-1].name}/weights.safetensors"
    for snapshot in snapshots:
        shutil.rmtree(snapshot)
    assert tested() == WEIGHTS
    (run / WEIGHTS).unlink()
    assert tested() == f"snapshots/{BEST}"
    (run / "snapshots" / BEST).unlink()
    assert "was trained with --save all: there is no model to test" in refused(run)


def test_what_a_run_did_not_keep_is_said_and_its_best_model_stands_in(three):
    config = dataclasses.replace(read_run_config(three), save="best")
    (three / WEIGHTS).rename(three / "snapshots" / BEST)
    config.write(three / "config.toml")
    assert evaluate(three)[1]["weights"].endswith(BEST)
    (three / "snapshots" / BEST).unlink()
    dataclasses.replace(config, save="none").write(three / "config.toml")
    assert "was trained with --save none: there is no model to test" in refused(three)
