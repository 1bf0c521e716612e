"""The grid that `hvdtrain compare` runs, presets, and `--dry-run`."""

import csv
import itertools
import json
import os
import shlex
import subprocess
import sys
from collections import Counter

import click
import pytest
from click.testing import CliRunner
from helpers.foretold import BESIDE_TESTS
from helpers.forked_jobs import forks_first
from helpers.jobs import hvdtrain, short_pilots
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.comparing.command import _ring_sizes, compare
from hvdtrain.comparing.comparison_state import ComparisonState
from hvdtrain.comparing.grid import Axes, crowded, in_rounds, plan
from hvdtrain.comparing.search import Search
from hvdtrain.comparing.selection import contenders_to_repeat
from hvdtrain.job.rank.command import train
from hvdtrain.launch.hosts import Host, hosts_of_ranks

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
    return [line for line in lines if line.startswith("[")], [
        line.strip() for line in lines if line.startswith(" ")
    ]


# The grid


def test_each_number_of_servers_is_a_contender_in_the_modes_that_have_servers():
    runs = plan(RunConfig(), Axes(["single", "allreduce", "ps-async"], [1, 2], [1, 3]))
    assert [run.name for run in runs] == [
        "single-w1-r1",
        "allreduce-w1-r1",
        "allreduce-w2-r1",
        "ps-async-w1-s1-r1",
        "ps-async-w1-s3-r1",
        "ps-async-w2-s1-r1",
        "ps-async-w2-s3-r1",
    ]
    assert [run.config.servers for run in runs] == [0, 0, 0, 1, 3, 1, 3]


def test_models_and_batches_and_wires_are_contenders_of_their_own():
    spanned = {"model": ["vggf", "vgg11"], "batch_size": [16, 32], "wire": ["rpc", "zmq"]}
    runs = plan(RunConfig(), Axes(["ddp", "ps-sync"], options=spanned))
    assert [run.contender for run in runs[:3]] == [
        "vggf-b16-ddp-w2",
        "vggf-b16-ps-sync-w2-s1-rpc",
        "vggf-b16-ps-sync-w2-s1-zmq",
    ]
    assert len({run.name for run in runs}) == len(runs) == 12


@pytest.mark.parametrize(
    "modes", [["single", "ddp", "ps-sync", "ps-async"], ["single", "allreduce", "ps-sync"], ["ddp"]]
)
@pytest.mark.parametrize("seed", [0, 3])
def test_each_contender_is_as_often_in_each_place_and_after_each_other(modes, seed):
    contenders, n = plan(RunConfig(seed=seed), Axes(modes)), len(modes)
    rows = n if n % 2 == 0 else 2 * n
    rounds = in_rounds(contenders, rows)
    assert rounds == in_rounds(contenders, rows + 3)[:rows]
    names = [[run.contender for run in runs] for runs in rounds]
    places = Counter((name, place) for row in names for place, name in enumerate(row))
    assert len(places) == n * n and set(places.values()) == {rows // n}
    followed = Counter(pair for row in names for pair in itertools.pairwise(row))
    assert len(followed) == n * (n - 1) and len(set(followed.values())) <= 1
    for row in itertools.combinations(names[:n], 2):
        assert all(one != other for one, other in zip(*row, strict=True)), "twice in the same place"


def test_each_repeat_has_its_seed():
    contenders = plan(RunConfig(seed=3), Axes(["single", "ddp", "ps-sync", "ps-async"]))
    rounds = in_rounds(contenders, 10)
    assert {(run.config.seed, run.config.repeat) for run in rounds[4]} == {(7, 5)}
    assert all(
        sorted(run.contender for run in runs) == sorted(run.contender for run in contenders)
        for runs in rounds
    )
    with pytest.raises(UsageError, match="goes beyond 4294967295, the largest seed"):
        in_rounds(plan(RunConfig(seed=2**32 - 3), Axes(["single"])), 4)


def test_each_contender_uses_all_cores_of_its_hosts(monkeypatch):
    monkeypatch.setattr("hvdtrain.comparing.grid.usable_cores", lambda: 64.0)
    axes, two = Axes(["single", "allreduce", "ps-sync"], [2]), [Host("a", 1), Host("b", 1)]

    def threads(given=0, hosts=two, cores=None, axes=axes):
        return [
            run.config.threads for run in plan(RunConfig(threads=given), axes, hosts, cores=cores)
        ]

    assert threads(cores={"a": 8.0, "b": 8.0}) == [8, 8, 8]  # beside the server too
    # each rank takes the share of its host
    assert threads(cores={"a": 8.0, "b": 64.0}) == [
        8,
        0,
        0,
    ]
    assert threads(5, cores={"a": 8.0, "b": 64.0}) == [8, 5, 5]
    assert threads() == [0, 0, 0]  # nobody has asked: each rank looks at its own host
    assert threads(hosts=[]) == [64, 32, 32]
    six = [Host("a", 4), Host("b", 2)]
    four = Axes(["allreduce", "ps-sync"], [4], [2], {"wire": ["zmq"]})
    # of ps-sync three workers are on a
    assert threads(hosts=six, cores={"a": 8.0, "b": 8.0}, axes=four) == [
        4,
        0,
    ]
    assert [(run.contender, run.config.threads) for run in plan(RunConfig(), axes, scaling=True)][
        :2
    ] == [
        ("single-w1-scaling", 32),
        ("single-w1", 64),
    ]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 64)), min_size=1, max_size=5),
    st.lists(
        st.sampled_from(["single", "allreduce", "ddp", "sharded", "ps-sync", "ps-async"]),
        min_size=2,
        unique=True,
    ),
    st.data(),
)
def test_adding_a_contender_changes_no_other(slots_and_cores, modes, data):
    hosts = [Host(f"n{number}", slots) for number, (slots, _) in enumerate(slots_and_cores)]
    cores = {f"n{number}": float(of_host) for number, (_, of_host) in enumerate(slots_and_cores)}
    workers = data.draw(st.integers(1, sum(host.slots for host in hosts)))
    on_one_host = data.draw(st.lists(st.integers(2, 8), max_size=2, unique=True))

    def planned(modes, on_one_host):
        axes = Axes(modes, [workers], [1, "equal"], {"wire": ["zmq"]}, on_one_host=on_one_host)
        runs = plan(RunConfig(batch_size=64), axes, hosts, recipes.launcher("mpi"), cores)
        assert len({run.contender for run in runs}) == len(runs)
        return {
            run.contender: (run.config, run.hosts, hosts_of_ranks(run.hosts, run.config.servers))
            for run in runs
        }

    more = planned(modes, on_one_host)
    assert planned(modes[:-1], on_one_host).items() <= more.items()
    assert planned(modes, on_one_host[:-1]).items() <= more.items()
    for config, used, order in more.values():
        for host in used:
            there = order[config.servers :].count(host.name)
            if there and config.threads:
                assert config.threads == max(1, int(cores[host.name] // there))


def test_one_machine_is_one_process_or_a_ring_on_one_of_several_hosts():
    two, cores = [Host("a", 1), Host("b", 1)], {"a": 8.0, "b": 8.0}

    def machines(modes, hosts=two, batch_size=32, **options):
        axes = Axes(modes, [sum(host.slots for host in hosts)], [1], options, on_one_host=[2, 4])
        runs = plan(RunConfig(batch_size=batch_size), axes, hosts, recipes.launcher("ssh"), cores)
        return {run.contender: run for run in runs if run.family == "one machine"}

    found = machines(["single", "allreduce", "ps-sync"])
    assert list(found) == [
        "single-w1",
        "ddp-w2-one-host",
        "ddp-w4-one-host",
        "allreduce-w2-one-host",
        "allreduce-w4-one-host",
    ]
    assert [run.config.threads for run in found.values()] == [8, 4, 2, 4, 2]
    assert {str(host) for run in found.values() for host in run.hosts} == {"a:1", "a:2", "a:4"}
    assert len({run.side for run in found.values()}) == 1, "they are rivals of each other"
    ring = plan(RunConfig(), Axes(["allreduce"]), two, recipes.launcher("ssh"), cores)[0]
    assert (ring.contender, ring.family) == ("allreduce-w2", "ring")
    assert list(machines(["single", "ps-sync"], batch_size=3)) == ["single-w1", "ddp-w2-one-host"]
    assert list(machines(["single", "ps-sync"], [Host("a", 4)])) == ["single-w1"], (
        "a host alone is one machine"
    )
    assert not machines(["allreduce", "ps-sync"]), "nobody asks about one machine"
    slow = machines(["single", "allreduce"], slow=["1:4x"]).values()
    assert {run.config.slow for run in slow} == {"none"}, "the second worker is on another host"


def test_a_ring_on_one_host_has_as_many_workers_as_slots_or_gpus_or_two_and_four():
    def sizes(slots=1, named=True, cores=8.0, gpus=0, device="auto"):
        return _ring_sizes(Host("a", slots), named, device, cores and {"a": cores}, gpus)

    assert sizes() == sizes(cores=None) == [2, 4]
    assert sizes(cores=2.0) == [2] and sizes(cores=1.0) == []
    assert sizes(slots=8) == sizes(slots=8, gpus=4) == sizes(slots=8, named=False) == [8]
    assert sizes(gpus=8) == [8] and sizes(gpus=1) == [] and sizes(gpus=8, device="cpu") == [2, 4]
    assert sizes(named=False) == [], "an allocation starts no more ranks than it has slots"


def test_more_workers_than_cores_are_remarked_upon(monkeypatch):
    monkeypatch.setattr("hvdtrain.comparing.grid.usable_cores", lambda: 2.0)
    said = invoke("--modes", "single,allreduce", "--workers", "2,32", "--dry-run")
    assert "note: 32 workers share 2 cores here: they wait for each other" in said
    assert "note:" not in invoke("--modes", "single,allreduce", "--workers", "2", "--dry-run")
    hosts = [Host("a", 4), Host("b", 4)]
    runs = plan(RunConfig(), Axes(["ddp"], [8]), hosts, recipes.launcher("ssh"), {"a": 4, "b": 1})
    [said] = crowded(runs, {"a": 4.0, "b": 1.0})
    assert said.startswith("4 workers share 1 core on b")
    assert crowded(runs, None) == []
    many = plan(RunConfig(threads=4), Axes(["allreduce"], [2]), [Host("a", 1), Host("b", 1)])
    [said] = crowded(many, {"a": 4.0, "b": 1.0})
    assert said.startswith("--threads 4 with 1 core on b: a worker")


def test_the_baseline_of_scaling_is_no_rival_of_one_machine(tmp_path, monkeypatch):
    """A search would leave it out, as half of a machine is slower than a whole one."""
    monkeypatch.setattr("hvdtrain.comparing.grid.usable_cores", lambda: 4.0)
    contenders = plan(RunConfig(), Axes(["single", "allreduce"]), scaling=True)
    assert Search().settings_to_try(contenders, ComparisonState(tmp_path)) == {}


def test_a_search_chooses_among_rings_on_one_host_and_keeps_one_process(tmp_path):
    axes = Axes(["single", "allreduce"], options={}, on_one_host=[2])
    hosts = [Host("a", 1), Host("b", 1)]
    contenders = plan(RunConfig(), axes, hosts, recipes.launcher("ssh"), {"a": 8.0, "b": 8.0})
    speeds = {"single-w1": 10.0, "ddp-w2-one-host": 100.0, "allreduce-w2-one-host": 80.0}
    sprints = []

    def sprint(runs, place):
        sprints.append({run.contender for run in runs})
        noise = 1 + 0.01 * (len(sprints) % 2)
        return {run.contender: speeds[run.contender] * noise for run in runs}

    state = ComparisonState(tmp_path)
    told, line = Search().run(contenders, state, sprint)
    assert sprints[0] == set(speeds) and "3 settings of one machine" in told
    assert line.startswith(
        "left out: allreduce-w2-one-host: 0.80 times the samples/s of ddp-w2-one-host"
    )
    staying = {run.contender for run in contenders_to_repeat(contenders, state)}
    assert staying == {"single-w1", "ddp-w2-one-host", "allreduce-w2"}
    assert Search().settings_to_try(contenders, state) == {}, "all were tried"


def test_a_run_that_could_not_be_carried_out_stops_the_grid_before_it_begins():
    with pytest.raises(
        UsageError, match="global batch of 3 leaves 1 of 4 workers without a sample: "
    ):
        plan(RunConfig(), Axes(["single", "allreduce"], [4], options={"batch_size": [32, 3]}))
    with pytest.raises(UsageError, match="--launcher is for hosts: give -H or --hostfile"):
        invoke("--launcher", "mpi", "--dry-run")
    with pytest.raises(UsageError, match="--lr-scaling is for --per-worker"):
        plan(RunConfig(lr_scaling="linear"), Axes(["single"]))


def test_one_process_has_the_gpu_that_is_too_few_for_workers(monkeypatch):
    monkeypatch.setattr("hvdtrain.comparing.grid.usable_cores", lambda: 16.0)
    axes = Axes(["single", "allreduce", "ps-sync"])
    contenders = plan(RunConfig(device="cpu"), axes, scaling=True, device_alone="auto")
    assert {run.contender: run.config.device for run in contenders} == {
        "single-w1": "auto",
        "single-w1-scaling": "cpu",
        "allreduce-w2": "cpu",
        "ps-sync-w2-s1": "cpu",
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "--modes sharded --local-steps 8",
            "--local-steps is not for --mode sharded, where each rank has",
        ),
        (
            "--modes sharded,single --staleness 1",
            "--staleness does nothing in --mode sharded: it is for ps-ssp",
        ),
        (
            "--modes ddp --wait-for layer",
            "--wait-for layer is not for --mode ddp: it is for allreduce",
        ),
        (
            "--modes ddp --compression none,int8",
            "--compression int8 is not for --mode ddp, which takes none",
        ),
        (
            "--modes ddp --outer-lr 0.5",
            "--outer, --outer-lr and --outer-momentum are for --local-steps",
        ),
    ],
)
def test_what_no_contender_has_a_use_for_is_refused_as_train_does(given, words):
    with pytest.raises(UsageError, match=words):
        invoke(*given.split(), "--dry-run")


def test_who_cannot_send_with_a_codec_sends_as_by_default_and_what_next_says_is_taken():
    words = [
        "--modes",
        "single,allreduce,ps-sync",
        "--wire",
        "zmq",
        "--compression",
        "int8",
        "--steps",
        "9",
    ]
    _, commands = dry(*words)
    with_codec = [command for command in commands if "--compression int8" in command]
    assert len(commands) == 3 and len(with_codec) == 1 and "--mode ps-sync" in with_codec[0]


def test_how_servers_would_be_compared_may_be_said_where_there_are_none():
    told, _ = dry("--modes", "allreduce", "--wire", "zmq", "--servers", "1", "--steps", "9")
    assert [line.split()[1] for line in told] == ["allreduce-w2-r1"]


def test_what_some_contenders_have_a_use_for_others_have_as_it_is_by_default():
    _, commands = dry(
        "--modes", "sharded,ddp", "--local-steps", "8", "--bucket-mb", "2", "--repeats", "1"
    )
    of_ddp, of_sharded = (
        next(command for command in commands if f"--mode {mode}" in command)
        for mode in ("ddp", "sharded")
    )
    assert "--local-steps 8" in of_ddp and "--bucket-mb" not in of_ddp
    assert "--bucket-mb 2" in of_sharded and "--local-steps" not in of_sharded


# --dry-run


def test_a_dry_run_tells_each_run_and_the_command_that_repeats_it(monkeypatch):
    monkeypatch.setattr("hvdtrain.comparing.grid.usable_cores", lambda: 2.0)
    words = ["--modes", "single,ps-sync", "--wire", "rpc", "--batch-size", "16,32", "--steps", "9"]
    told, commands = dry(*words)
    assert sorted(line.split()[1] for line in told) == [
        "b16-ps-sync-w2-s1-r1",
        "b16-single-w1-r1",
        "b32-ps-sync-w2-s1-r1",
        "b32-single-w1-r1",
    ]
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
    assert sum("--sprint 3.0" in command for command in commands) == 2 * 2
    assert [line.split()[1] for line in told[4:]] == [f"single-w1-t-r{n}" for n in (1, 2, 3)]
    told, commands = dry("--modes", "single,ps-sync", "--epochs", "2", "--repeats", "2")
    assert len(told) == 4 and all(
        "--epochs 2" in command and "--sprint" not in command for command in commands
    )
    told, commands = dry("--modes", "single", "--epochs", "2", "--trainings", "1", "--sprint", "2s")
    assert ["--sprint 2.0" in command for command in commands] == [True] * 5 + [False]
    assert "--epochs 2" in commands[-1]


def test_a_dry_run_names_the_variables_that_ranks_are_given(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "t0ken")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    words = ["--env", "MY_TOKEN", "--env", "HTTPS_PROXY"]
    _, commands = dry("--modes", "ps-sync", "--steps", "9", "-H", "a:1,b:1", *words)
    assert f" {shlex.join(words)} --out " in commands[0] and "t0ken" not in commands[0]


def test_over_hosts_one_server_and_as_many_as_workers_are_compared():
    words = ["--modes", "ps-sync", "--wire", "zmq", "--steps", "9", "-H", "a:1,b:1,c:1"]
    told, _ = dry(*words)
    assert [line.split()[1] for line in told] == ["ps-sync-w3-s1-r1"]
    # and the other, where that is faster
    tried = "tried first, of servers-w3: 2 settings: ps-sync-w3-s1, ps-sync-w3-s3\n"
    assert tried in invoke(*words, "--repeats", "2", "--dry-run")
    once = invoke(*words, "--dry-run")
    assert "tried first" not in once and "no settings are searched" in once
    told, commands = dry(*words, "-n", "2", "-s", "1")
    assert [line.split()[1] for line in told] == [
        "ps-sync-w2-s1-r1"
    ] and "-H a:1,b:1,c:1" in commands[0]


def test_a_dry_run_counts_samples_without_torch_and_leaves_nothing_behind(tmp_path, monkeypatch):
    options = ["--dataset", ".", "--epochs", "100", "--modes", "single", "--dry-run", "--out", "o"]
    code = (
        "import sys; from hvdtrain.comparing.command import compare\n"
        f"compare.main({options}, standalone_mode=False)\n"
        "print({'torch', 'matplotlib', 'rich'} & set(sys.modules))"
    )
    for folder, images in (("train/a", 1200), ("train/b", 1200), ("val/a", 1), ("val/b", 1)):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(images):
            (tmp_path / folder / f"{number}.png").touch()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    forecast, imported = done.stdout.splitlines()[-2:]
    assert (done.returncode, imported) == (0, "set()"), done.stderr
    # 100 epochs of 2,400 samples, at the 1,000 samples/s that are assumed
    assert forecast.startswith("forecast: 1 run to do, about 4 min"), forecast
    assert sorted(os.listdir(tmp_path)) == ["train", "val"]
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match="has no folder train"):
        invoke("--dataset", str(tmp_path / "nothing"), "--dry-run")
    with pytest.raises(UsageError, match="^--dataset ./nosuch: there is no such folder"):
        invoke("--dataset", "./nosuch", "--dry-run")
    for words in ("--model ./nosuch.py:build", "--dataset ./nosuch.py:data", "--pretrained no.pt"):
        with pytest.raises(UsageError, match=f"^{words}: there is no such file"):
            invoke(*words.split(), "--dry-run")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "weights.pt").touch()
    invoke("--pretrained", "~/weights.pt", "--dry-run")


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
            values = {
                key: value
                for key, value in context.params.items()
                if key not in ("file", "out", "resume")
            }
        assert values["dataset"] == options["dataset"] and values["lr"] >= options["lr"]
        assert values["model"] in options["model"]


def test_what_is_given_on_the_command_line_wins_over_the_preset():
    told, commands = dry(
        "--preset",
        "cnn-mnist",
        "--modes",
        "allreduce",
        "--workers",
        "2",
        "--no-per-worker",
        "--steps",
        "6",
        "--dataset",
        "digits",
        "--model",
        "vggf",
        "--width",
        "0.1",
        "--image-size",
        "0",
    )
    assert told == ["[1/1] allreduce-w2-r1"]
    assert (
        "--batch-size 64" in commands[0]
        and "--steps 6" in commands[0]
        and "--epochs" not in commands[0]
    )
    assert (
        "--dataset" not in commands[0]
        and "--model" not in commands[0]
        and "--width 0.1" in commands[0]
    )


def test_an_unknown_preset_lists_the_valid_ones_and_help_lists_them_too():
    with pytest.raises(
        UsageError, match=f"unknown preset 'nosuch': choose from {', '.join(PRESETS)}"
    ):
        invoke("--preset", "nosuch", "--dry-run")
    shown = invoke("--help")
    for name in PRESETS:
        assert f"{name} " in shown and recipes.load("presets", name)["title"] in shown


# A grid, run


@pytest.mark.timeout(110)
def test_a_preset_at_a_small_size_runs_and_ends_with_the_references_table(tmp_path):
    out = tmp_path / "out"
    words = [
        "--preset",
        "cnn-mnist",
        "--dataset",
        "digits",
        "--modes",
        "single,allreduce",
        "--workers",
        "2",
    ]
    first = forks_first() + BESIDE_TESTS
    done = hvdtrain("compare", *words, "--steps", "4", "--out", out, first=first)
    assert done.returncode == 0, done.stdout
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["mode"], row["global_batch"], row["steps"]) for row in rows] == [
        ("single", "64", "4"),
        ("allreduce", "128", "4"),
    ]
    with (out / "reference.csv").open() as file:
        table = {row["run"]: row for row in csv.DictReader(file)}
    assert 0 < float(table["allreduce ×2, epoch 1"]["training accuracy"]) < 1
    assert table["reference: 4 GPUs, epoch 1"]["training loss"] == "0.7193"
    assert "reference: 1 GPU" in (out / "report.html").read_text()


PILOT_S = 0.1


@pytest.mark.timeout(400)
def test_sprints_after_a_pilot_and_a_training_end_with_an_answer(tmp_path, few_digits):
    out = tmp_path / "out"
    words = f"--modes single,ps-sync --width 0.0625 --dataset {few_digits} --batch-size 12"
    sprints = f"--sprint {PILOT_S}s --repeats 1 --epochs 1 --threads 1"  # so that none are varied
    first = f"{forks_first()}{BESIDE_TESTS}{short_pilots(PILOT_S)}"
    words = [*words.split(), *sprints.split(), "--out", out]
    done = hvdtrain("compare", *words, first=first, timeout=380)
    assert done.returncode == 0, done.stdout
    names = [path.name for path in (out / "runs").iterdir()]
    assert "single-w1-r1" in names and any(name.startswith("ps-sync-w2-s1-") for name in names)
    assert sum((path / "answers.bin").exists() for path in (out / "runs").iterdir()) == 1
    assert sorted(len(list(path.iterdir())) for path in (out / "pilot").iterdir()) == [2] * 4
    verdict = json.loads((out / "verdict.json").read_text())
    assert verdict["answer"] and verdict["tried"]["servers"]["settings"] == 2
    assert verdict["tried"]["servers"]["seconds"] > 2 * 4 * PILOT_S / 2
    assert (
        "settings tried first, in sprints that do not count: 2 of servers; left out: "
        in done.stdout
    )
    for of in verdict["left_out"]:
        assert (
            f"left out: {of['run']}: {of['why']}" in done.stdout
            and of["run"] in (out / "report.md").read_text()
        )


def test_as_many_servers_as_workers():
    runs = plan(RunConfig(), Axes(["single", "ps-sync"], [1, 2, 4], ["equal", 1]))
    assert [(run.workers, run.config.servers) for run in runs] == [
        (1, 0),
        (1, 1),
        (2, 2),
        (2, 1),
        (4, 4),
        (4, 1),
    ]
    _, commands = dry("--modes", "ps-sync", "-n", "3", "-s", "equal", "-H", "a:2,b:1")
    assert commands[0].startswith("hvdtrain launch -n 3 -s 3 --launcher ssh -H a:4,b:2 --out ")


def test_flags_of_the_field_are_the_same_as_ours():
    words = ["--mode", "ps-sync,allreduce", "--num-workers", "2,4", "--num-servers", "2"]
    assert dry(*words) == dry("--modes", "ps-sync,allreduce", "--workers", "2,4", "--servers", "2")


def test_a_grid_over_slow_workers_has_one_baseline_and_runs_of_each_that_are_compared_for_themselves():
    runs = plan(
        RunConfig(),
        Axes(
            ["single", "allreduce"],
            options={"slow": ["none", "1:4x", "0:2x@step3-4", "all:2x+1:4x"]},
        ),
    )
    assert [(run.name, run.config.slow) for run in runs] == [
        ("slow-none-single-w1-r1", "none"),
        ("slow-none-allreduce-w2-r1", "none"),
        ("slow-1_4x-allreduce-w2-r1", "1:4x"),
        ("slow-0_2x_step3_4-single-w1-r1", "0:2x@step3-4"),
        ("slow-0_2x_step3_4-allreduce-w2-r1", "0:2x@step3-4"),
        ("slow-all_2x-single-w1-r1", "all:2x"),
        ("slow-all_2x_1_4x-allreduce-w2-r1", "all:2x+1:4x"),
    ]
