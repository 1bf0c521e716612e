"""What a run remembers of its launch: from the launcher to the ranks, into the manifest, and back."""

import json

import pytest
from helpers.report_runs import manifest

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.prepare import TrainingJob, prepare
from hvdtrain.runs.command_lines import with_placeholders
from hvdtrain.runs.launched import Launched, job_command, read_launched
from hvdtrain.runs.read import last_launch

PAIR = {"from": "a", "to": "b.example", "gbit_s": 0.9551}


@pytest.mark.parametrize(
    "launched",
    [
        Launched("local"),
        Launched(
            "ssh", ("a:2", "b.example:1"), "eth0", "/tmp/a copy", (PAIR, PAIR | {"from": "c"})
        ),
    ],
)
def test_ranks_read_what_the_launcher_told(launched):
    assert read_launched(launched.variables()) == launched
    assert read_launched({"PATH": "/bin"}) is None


@pytest.mark.parametrize("launcher", ["mpi", "ssh", "local"])
def test_ranks_are_told_in_their_environment(launcher, tmp_path):
    hosts = [] if launcher == "local" else [Host("a", 1), Host("b", 1)]
    recipe, config = recipes.launcher(launcher), RunConfig(mode="allreduce")
    command = prepare(
        recipe, TrainingJob(config, 2, hosts, tmp_path / "run", interface="ib0"), check=False
    )
    told = read_launched(command.environment)
    assert told == Launched(launcher, tuple(map(str, hosts)), "ib0", recipe=recipe.digest)
    assert launcher != "mpi" or {"HVDTRAIN_LAUNCHER", "HVDTRAIN_HOSTS"} < set(command.argv)


@pytest.mark.parametrize("launcher", ["sge", "yarn", "kubernetes", "slurm"])
def test_a_schedulers_ranks_are_told_where_it_passes_no_environment_on(launcher, tmp_path):
    [text] = prepare(
        recipes.launcher(launcher),
        TrainingJob(RunConfig(mode="allreduce"), 2, [], tmp_path / "run"),
    ).files.values()
    assert f"HVDTRAIN_LAUNCHER={launcher}@{recipes.launcher(launcher).digest}" in text


def test_the_command_that_repeats_a_run_has_its_launcher_and_hosts():
    config = RunConfig(mode="ps-sync", servers=1, steps=5)
    words = job_command(config, 2, Launched("ssh", ("a:2", "b:1"), "eth0"), "x")
    place = "hvdtrain launch -n 2 -s 1 --launcher ssh -H a:2,b:1 --network-interface eth0 --out x"
    assert words == [*place.split(), "--", "--mode", "ps-sync", "--steps", "5"]
    alone = job_command(RunConfig(), 1, Launched("local"), "x")
    assert alone == "hvdtrain train --out x".split()


def test_a_manifest_that_does_not_say_is_none(tmp_path):
    assert last_launch(tmp_path) is None
    for text in (
        "{",
        "[]",
        "{}",
        json.dumps(manifest() | {"launch": None}),
        json.dumps(manifest() | {"launch": {}}),
    ):
        (tmp_path / "manifest.json").write_text(text)
        assert last_launch(tmp_path) is None
    launch = {"launcher": "mpi", "hosts": ["a:1"], "interface": "ib0", "folder": ""}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest() | {"launch": launch}))
    assert last_launch(tmp_path) == Launched("mpi", ("a:1",), "ib0")


def test_what_a_stranger_would_have_run_is_a_placeholder_in_a_command_that_is_pasted():
    theirs = "hvdtrain launch -n 2 --launcher skypilot -H evil.example:1 --sync-dst-dir /x --network-interface e -- "
    theirs += "--model /their/m.py:build --dataset s3://their/bucket --steps 9"
    ours = "hvdtrain launch -n 2 --launcher LAUNCHER -H HOSTS --sync-dst-dir DIR --network-interface NAME -- "
    assert with_placeholders(theirs) == ours + "--model FILE.py:FUNCTION --dataset URL --steps 9"
    several = (
        "hvdtrain compare --modes ddp,single --model vgg16,a.b:make --dataset digits --out 'a b'"
    )
    assert with_placeholders(several) == several.replace("a.b:make", "FILE.py:FUNCTION")
