"""A user's own model and data in jobs; and a run folder's code, which nobody imports unasked."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.foretold import FORETELLS_LITTLE
from helpers.jobs import hvdtrain, steps
from helpers.own import MODELS, TEXT, written
from safetensors.torch import load_file

pytestmark = pytest.mark.xdist_group("own code")  # one run, which one process makes
LENGTH = ("--steps", "8", "--batch-size", "20", "--threads", "1", "--snapshot-every", "epoch")
MARKED = "from pathlib import Path\nPath(__file__).with_name('imported').write_text('yes')\n" + TEXT


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished ring of two on a user's own text, whose file leaves a mark when it is imported."""
    folder = tmp_path_factory.mktemp("own")
    mine = written(folder, MARKED)
    done = hvdtrain(
        "train",
        "--mode",
        "allreduce",
        *LENGTH,
        "--model",
        f"{mine}:build",
        "--dataset",
        f"{mine}:data",
        "--out",
        folder / "run",
        ranks=2,
    )
    assert done.returncode == 0, done.stdout
    return folder / "run"


@pytest.fixture
def mark(run):
    """What is there once the run's code has been imported."""
    found = run.with_name("imported")
    found.unlink(missing_ok=True)
    return found


def test_a_ring_trains_on_each_sample_once_and_says_what_it_was(run):
    manifest, summary = (
        json.loads((run / f"{name}.json").read_text()) for name in ("manifest", "summary")
    )
    assert (manifest["model"], manifest["dataset"]) == ("mine.py:build", "mine.py:data")
    assert manifest["model_hash"].startswith("sha256:") and manifest["dataset_hash"].startswith(
        "sha256:"
    )
    assert (manifest["train_samples"], manifest["validation_samples"], manifest["classes"]) == (
        250,
        50,
        3,
    )
    assert manifest["parameters"] == 50 * 16 + 16 * 3 + 3 and summary["samples"] == 160
    assert sum(row["samples"] for rank in (0, 1) for row in steps(run, rank)) == 160
    assert set(load_file(run / "snapshots/final.safetensors")) == {
        "words.weight",
        "out.weight",
        "out.bias",
    }


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate",),
        ("replay",),
        ("train", "--resume", "--out"),
        ("train", "--config"),
        ("launch", "--resume", "-n", "2", "--out"),
    ],
)
def test_no_command_imports_what_a_run_folder_names_unasked(run, mark, command, tmp_path):
    place = run / "config.toml" if command[-1] == "--config" else run
    done = hvdtrain(
        *command, place, *(("--out", tmp_path / "new") if command[-1] == "--config" else ())
    )
    assert done.returncode == 2 and "Traceback" not in done.stdout and not mark.exists(), (
        done.stdout
    )
    if command[0] != "replay":  # this run was not recorded
        assert "names code for --model" in done.stdout and "--trust-model" in done.stdout


@pytest.mark.parametrize("command", [("status",), ("report",), ("explain",)])
def test_what_only_reads_imports_nothing(run, mark, command, tmp_path):
    words = [*command, run, *(("--out", tmp_path / "report") if command[0] == "report" else ())]
    hvdtrain(*words, first=FORETELLS_LITTLE)
    assert not mark.exists()


def test_it_is_imported_when_asked_or_named_again(run, mark, tmp_path):
    done = hvdtrain("evaluate", run, "--trust-model", "--out", tmp_path / "one")
    assert done.returncode == 0 and mark.exists() and "note:" not in done.stdout, done.stdout
    other = written(tmp_path, TEXT + "# another file\n", "other.py")
    again = ("--model", f"{other}:build", "--dataset", f"{other}:data")
    mark.unlink()
    # The manifest names the classes, so that the code of training is not imported.
    done = hvdtrain("evaluate", run, *again, "--out", tmp_path / "two")
    assert done.returncode == 0 and "is not the code that" in done.stdout, done.stdout
    assert not mark.exists()
    earlier = shutil.copytree(run, tmp_path / "earlier")  # by a version that named no classes
    manifest = json.loads((earlier / "manifest.json").read_text())
    del manifest["class_names"]
    (earlier / "manifest.json").write_text(json.dumps(manifest))
    done = hvdtrain("evaluate", earlier, *again, "--out", tmp_path / "three")
    assert done.returncode == 2 and "names code for --dataset" in done.stdout
    one, two = (
        json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("one", "two")
    )
    assert (one["top1"], one["loss"]) == (two["top1"], two["loss"]) and one["same_data"] is True


def test_it_goes_on_with_the_same_code_alone(run, tmp_path):
    mine = run.with_name("mine.py")
    elsewhere = written(tmp_path, MARKED, "moved.py")
    begun = (
        "train",
        *LENGTH,
        "--model",
        f"{mine}:build",
        "--dataset",
        f"{mine}:data",
        "--out",
        tmp_path / "run",
    )
    assert hvdtrain(*begun).returncode == 0
    more = (
        "train",
        "--resume",
        "--out",
        tmp_path / "run",
        "--steps",
        "10",
        "--dataset",
        f"{mine}:data",
        "--model",
    )
    changed = written(tmp_path, MARKED + "# changed\n", "changed.py")
    done = hvdtrain(*more, f"{changed}:build")
    assert done.returncode == 2 and "is other code than" in done.stdout, done.stdout
    done = hvdtrain(*more, f"{elsewhere}:build")
    assert done.returncode == 0 and "going on after step 8" in done.stdout, done.stdout


def test_what_reads_weights_early_shares_them_or_has_integers_is_trained(tmp_path):
    mine = written(tmp_path, MODELS + TEXT)
    rows = mine.read_text().replace(
        "torch.randint(0, 50, (300, 12), generator=g)", "torch.rand(300, 12, generator=g)"
    )
    mine.write_text(rows.replace("x < 10", "x < 0.2"))
    for name, mode, wait_for in (
        ("attention", "ps-sync", "step"),
        ("shared", "ps-sync", "layer"),
        ("integers", "allreduce", "step"),
    ):
        out, servers = tmp_path / name, ("--servers", "1") if mode == "ps-sync" else ()
        done = hvdtrain(
            "train",
            "--mode",
            mode,
            *servers,
            *LENGTH,
            "--model",
            f"{mine}:{name}",
            "--dataset",
            f"{mine}:data",
            "--out",
            out,
            ranks=2,
        )
        assert done.returncode == 0, done.stdout
        assert json.loads((out / "manifest.json").read_text())["wait_for"] == wait_for
        weights = load_file(out / "snapshots/final.safetensors")
        assert name != "integers" or (
            int(weights["calls"]) == 7 and weights["mask"].dtype == torch.bool
        )


def test_config_toml_names_a_file_from_any_folder(run):
    assert (
        f'model = "{Path(run.with_name("mine.py")).resolve()}:build"'
        in (run / "config.toml").read_text()
    )
