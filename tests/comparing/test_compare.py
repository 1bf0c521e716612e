"""The grid that `hvdtrain compare` runs, presets, and `--dry-run`."""

import csv
import json
import shlex
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from helpers.forked_jobs import forks_first
from helpers.jobs import hvdtrain

from hvdtrain.comparing.command import compare
from hvdtrain.comparing.grid import Axes, in_rounds, plan
from hvdtrain.config import recipes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host
from hvdtrain.rank.command import train

PRESETS = recipes.names("presets")


def invoke(*words):
    result = CliRunner().invoke(compare, list(words))
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def dry(*words):
    """The lines of --dry-run: those that tell runs, and the commands."""
    lines = invoke(*words, "--dry-run").splitlines()
    return [line for line in lines if line.startswith("[")], [line.strip() for line in lines if line.startswith(" ")]


# The grid


def test_each_number_of_servers_is_a_contender_in_the_modes_that_have_servers():
    runs = plan(RunConfig(), Axes(["single", "allreduce", "ps-async"], [1, 2], [1, 3]))
    assert [run.name for run in runs] == [
        "single-w1-r1", "allreduce-w1-r1", "allreduce-w2-r1",
        "ps-async-w1-s1-r1", "ps-async-w1-s3-r1", "ps-async-w2-s1-r1", "ps-async-w2-s3-r1",
    ]  # fmt: skip
    assert [run.config.servers for run in runs] == [0, 0, 0, 1, 3, 1, 3]


def test_models_and_batches_and_wires_are_contenders_of_their_own():
    spanned = {"model": ["vggf", "vgg11"], "batch_size": [16, 32], "wire": ["rpc", "zmq"]}
    runs = plan(RunConfig(), Axes(["ddp", "ps-sync"], options=spanned))
    assert [run.contender for run in runs[:3]] == ["vggf-b16-ddp-w2", "vggf-b16-ps-sync-w2-s1-rpc",
                                                   "vggf-b16-ps-sync-w2-s1-zmq"]  # fmt: skip
    assert len({run.name for run in runs}) == len(runs) == 12


def test_each_repeat_has_its_seed_and_an_order_of_its_own():
    contenders = plan(RunConfig(seed=3), Axes(["single", "ddp", "ps-sync", "ps-async"]))
    rounds = in_rounds(contenders, 10)
    assert {(run.config.seed, run.config.repeat) for run in rounds[4]} == {(7, 5)}
    assert all(sorted(run.contender for run in runs) == sorted(run.contender for run in contenders) for runs in rounds)
    assert len({tuple(run.config.mode for run in runs) for runs in rounds}) > 5 and rounds == in_rounds(contenders, 10)
    with pytest.raises(UsageError, match="goes beyond 4294967295, the largest seed"):
        in_rounds(plan(RunConfig(seed=2**32 - 3), Axes(["single"])), 4)


def test_workers_share_the_fullest_host_and_one_machine_has_all_its_cores(monkeypatch):
    monkeypatch.setattr("hvdtrain.comparing.grid.usable_cores", lambda: 64.0)
    axes, hosts = Axes(["single", "allreduce", "ps-sync"], [4]), [Host("a", 4), Host("b", 2)]

    def threads(given=0, hosts=hosts, cores=None):
        single, *others = (run.config.threads for run in plan(RunConfig(threads=given), axes, hosts, cores=cores))
        assert len(set(others)) == 1
        return single, others[0]

    assert threads(cores={"a": 8.0, "b": 64.0}) == (8, 2)  # three ranks of ps-sync are on a
    assert threads(cores={"a": 64.0, "b": 7.5}) == (64, 3)  # two on b
    assert threads(5, cores={"a": 8.0, "b": 64.0}) == (8, 5)
    assert threads() == (0, 0)  # nobody has asked: each rank looks at its own host
    assert threads(hosts=[]) == (64, 16)
    assert [(run.contender, run.config.threads) for run in plan(RunConfig(), axes, scaling=True)][:2] == [
        ("single-w1-scaling", 16), ("single-w1", 64),
    ]  # fmt: skip


def test_a_run_that_could_not_be_carried_out_stops_the_grid_before_it_begins():
    with pytest.raises(UsageError, match="global batch of 3 leaves 1 of 4 workers without a sample: "):
        plan(RunConfig(), Axes(["single", "allreduce"], [4], options={"batch_size": [32, 3]}))
    with pytest.raises(UsageError, match="--launcher is for hosts: give -H or --hostfile"):
        invoke("--launcher", "mpi", "--dry-run")
    with pytest.raises(UsageError, match="--lr-scaling is for --per-worker"):
        plan(RunConfig(lr_scaling="linear"), Axes(["single"]))


# --dry-run


def test_a_dry_run_tells_each_run_and_the_command_that_repeats_it(monkeypatch):
    monkeypatch.setattr("hvdtrain.comparing.grid.usable_cores", lambda: 2.0)
    words = ["--modes", "single,ps-sync", "--wire", "rpc", "--batch-size", "16,32", "--steps", "9"]
    told, commands = dry(*words)
    assert sorted(line.split()[1] for line in told) == [
        "b16-ps-sync-w2-s1-r1", "b16-single-w1-r1", "b32-ps-sync-w2-s1-r1", "b32-single-w1-r1",
    ]  # fmt: skip
    assert (
        "hvdtrain train --batch-size 16 --steps 9 --threads 2 --snapshot-every never "
        "--out runs/compare/runs/b16-single-w1-r1"
    ) in commands
    assert (
        "hvdtrain launch -n 2 -s 1 --out runs/compare/runs/b16-ps-sync-w2-s1-r1 -- "
        "--mode ps-sync --batch-size 16 --steps 9 --threads 1 --snapshot-every never"
    ) in commands


def test_speed_is_measured_in_sprints_unless_a_length_is_given():
    told, commands = dry("--modes", "single,ps-sync", "--repeats", "2", "--trainings", "3")
    assert sum("--sprint 3.0" in command for command in commands) == 2 * 3
    assert [line.split()[1] for line in told[6:]] == [f"ps-sync-w2-s1-rpc-t-r{n}" for n in (1, 2, 3)]
    told, commands = dry("--modes", "single,ps-sync", "--epochs", "2", "--repeats", "2")
    assert len(told) == 6 and all("--epochs 2" in command and "--sprint" not in command for command in commands)
    told, commands = dry("--modes", "single", "--epochs", "2", "--trainings", "1", "--sprint", "2s")
    assert ["--sprint 2.0" in command for command in commands] == [True] * 5 + [False]
    assert "--epochs 2" in commands[-1]


def test_a_dry_run_names_the_variables_that_ranks_are_given(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "t0ken")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    words = ["--env", "MY_TOKEN", "--env", "HTTPS_PROXY"]
    _, commands = dry("--modes", "ps-sync", "--steps", "9", "-H", "a:1,b:1", *words)
    assert f" {shlex.join(words)} --out " in commands[0] and "t0ken" not in commands[0]


def test_a_dry_run_needs_a_folder_but_no_torch_and_leaves_nothing_behind(tmp_path):
    code = (
        "import sys; from hvdtrain.comparing.command import compare\n"
        "compare.main(['--dataset', '.', '--dry-run', '--out', 'out'], standalone_mode=False)\n"
        "print({'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "set()"), done.stderr
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="^--dataset ./nosuch: there is no such folder"):
        invoke("--dataset", "./nosuch", "--dry-run")


# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_nothing_but_defaults_of_options_and_its_commands_are_whole(name):
    options = recipes.load("presets", name)["options"]
    assert set(options) <= {parameter.name for parameter in compare.params}
    told, commands = dry("--preset", name)
    assert len(told) == len(commands) > 2
    for command in commands:  # each is what `hvdtrain train` takes
        words = shlex.split(command)
        arguments = words[words.index("--") + 1 :] if "--" in words else words[2:]
        with click.Context(train) as context:
            train.parse_args(context, arguments)
            values = {key: value for key, value in context.params.items() if key not in ("file", "out", "resume")}
        assert values["dataset"] == options["dataset"] and values["lr"] >= options["lr"]
        assert values["model"] in options["model"]


def test_what_is_given_on_the_command_line_wins_over_the_preset():
    told, commands = dry(
        "--preset", "cnn-mnist", "--modes", "allreduce", "--workers", "2", "--no-per-worker", "--steps", "6",
        "--dataset", "digits", "--model", "vggf", "--width", "0.1", "--image-size", "0",
    )  # fmt: skip
    assert told == ["[1/1] allreduce-w2-r1"]
    assert "--batch-size 64" in commands[0] and "--steps 6" in commands[0] and "--epochs" not in commands[0]
    assert "--dataset" not in commands[0] and "--model" not in commands[0] and "--width 0.1" in commands[0]


def test_an_unknown_preset_lists_the_valid_ones_and_help_lists_them_too():
    with pytest.raises(UsageError, match=f"unknown preset 'nosuch': choose from {', '.join(PRESETS)}"):
        invoke("--preset", "nosuch", "--dry-run")
    shown = invoke("--help")
    for name in PRESETS:
        assert f"{name} " in shown and recipes.load("presets", name)["title"] in shown


# A grid, run


@pytest.mark.timeout(110)
def test_a_preset_at_a_small_size_runs_and_ends_with_the_references_table(tmp_path):
    out = tmp_path / "out"
    words = ["--preset", "cnn-mnist", "--dataset", "digits", "--modes", "single,allreduce", "--workers", "2"]
    done = hvdtrain("compare", *words, "--steps", "4", "--out", out, first=forks_first())
    assert done.returncode == 0, done.stdout
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["mode"], row["global_batch"], row["steps"]) for row in rows] == [
        ("single", "64", "4"), ("allreduce", "128", "4"),
    ]  # fmt: skip
    with (out / "reference.csv").open() as file:
        table = {row["run"]: row for row in csv.DictReader(file)}
    assert 0 < float(table["allreduce ×2, epoch 1"]["training accuracy"]) < 1
    assert table["reference: 4 GPUs, epoch 1"]["training loss"] == "0.7193"
    assert "reference: 1 GPU" in (out / "report.html").read_text()


@pytest.mark.timeout(110)
def test_sprints_after_a_pilot_and_a_training_end_with_an_answer(tmp_path):
    out = tmp_path / "out"
    words = ["--modes", "single,ps-sync", "--width", "0.0625", "--sprint", "0.3s", "--repeats", "1", "--epochs", "1"]
    done = hvdtrain("compare", *words, "--out", out, first=forks_first())
    assert done.returncode == 0, done.stdout
    one, *others = sorted(path.name for path in (out / "runs").iterdir())
    assert one in ("ps-sync-w2-s1-rpc-r1", "ps-sync-w2-s1-zmq-r1") and "single-w1-r1" in others
    assert len(others) == 2 and sum((path / "answers.bin").exists() for path in (out / "runs").iterdir()) == 1
    assert len(list((out / "pilot").iterdir())) == 2 and "left out: ps-sync-w2-s1-" in done.stdout
    assert json.loads((out / "verdict.json").read_text())["answer"]


def test_as_many_servers_as_workers():
    runs = plan(RunConfig(), Axes(["single", "ps-sync"], [1, 2, 4], ["equal", 1]))
    assert [(run.workers, run.config.servers) for run in runs] == [(1, 0), (1, 1), (2, 2), (2, 1), (4, 4), (4, 1)]
    _, commands = dry("--modes", "ps-sync", "-n", "3", "-s", "equal", "-H", "a:2,b:1")
    assert commands[0].startswith("hvdtrain launch -n 3 -s 3 --launcher ssh -H a:4,b:2 --out ")


def test_flags_of_the_field_are_the_same_as_ours():
    words = ["--mode", "ps-sync,allreduce", "--num-workers", "2,4", "--num-servers", "2"]
    assert dry(*words) == dry("--modes", "ps-sync,allreduce", "--workers", "2,4", "--servers", "2")


def test_a_grid_over_slow_workers_has_one_baseline_and_runs_of_each_that_are_compared_for_themselves():
    runs = plan(
        RunConfig(), Axes(["single", "allreduce"], options={"slow": ["none", "1:4x", "0:2x@step3-4", "all:2x+1:4x"]})
    )
    assert [(run.name, run.config.slow) for run in runs] == [
        ("slow-none-single-w1-r1", "none"), ("slow-none-allreduce-w2-r1", "none"),
        ("slow-1_4x-allreduce-w2-r1", "1:4x"),
        ("slow-0_2x_step3_4-single-w1-r1", "0:2x@step3-4"), ("slow-0_2x_step3_4-allreduce-w2-r1", "0:2x@step3-4"),
        ("slow-all_2x-single-w1-r1", "all:2x"), ("slow-all_2x_1_4x-allreduce-w2-r1", "all:2x+1:4x"),
    ]  # fmt: skip
