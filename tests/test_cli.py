"""The command line as a person meets it: help that costs nothing, and bad input that ends in one
line.
"""

import dataclasses
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from PIL import Image

from hvdtrain.base import modes
from hvdtrain.base.config.command_line import FIRST, GROUPS
from hvdtrain.base.config.option_types import RunFolder
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.place import World
from hvdtrain.cli import COMMANDS, cli, main
from hvdtrain.job.rank.process import _advice
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.processes import local_job

pytestmark = pytest.mark.timeout(60)


def make_folder(root, classes=("cat", "dog")):
    for part in ("TrainData", "ValidationData"):
        for number, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (32, 32), (60 * number, 20 * i, 0)).save(
                    root / part / name / f"{i}.png"
                )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a good image folder `data`, several bad ones, and a run folder that
    is in use.
    """
    make_folder(tmp_path / "data")
    make_folder(tmp_path / "one", classes=["cat"])
    (tmp_path / "file").write_text("not weights, not images, not a folder\n")
    (tmp_path / "worse.toml").write_text('model = "written"\nimage_size = 16\n')
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    (tmp_path / "comparison" / "runs").mkdir(parents=True)
    (tmp_path / "comparison" / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    # What a rank sets for itself is not meant for the next test.
    before, threads = dict(os.environ), torch.get_num_threads()
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(threads)


def contents(root):
    """{path: bytes, or None for a folder} of all that a folder holds."""
    return {
        str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")
    }


def run(args, monkeypatch, capfd):
    """(exit code, stdout, stderr) of a command in this process; any exception but SystemExit fails
    the test.
    """
    monkeypatch.setattr(sys, "argv", ["hvdtrain", *args])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code, *capfd.readouterr()


# Help

HELP = """
import contextlib, io, sys
import click
from hvdtrain.cli import cli

def every(command, path):
    yield path, command
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                yield from every(command.get_command(context, name), [*path, name])

for path, command in list(every(cli, [])):
    for parameter in command.params:
        default = parameter.get_default(click.Context(command))
        if isinstance(default, str | int | float):  # click has a value of its own for none
            parameter.type_cast_value(click.Context(command), default)
    try:
        cli.main([*path, "--help"], standalone_mode=True)
    except SystemExit as left:
        print("EXIT", left.code, *path)
print("HEAVY", *({"torch", "numpy", "matplotlib", "rich", "PIL", "sklearn", "horovod"} & sys.modules.keys()))
"""


def test_every_commands_help_works_and_its_defaults_are_taken_and_nothing_heavy_is_imported():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", HELP], capture_output=True, text=True, timeout=30
    )
    assert done.stderr == "" and done.returncode == 0
    lines = done.stdout.splitlines()
    ends = [line for line in lines if line.startswith("EXIT")]
    assert {f"EXIT 0 {name}" for name in COMMANDS} < set(ends)
    assert all(line.startswith("EXIT 0") for line in ends)
    assert lines[-1] == "HEAVY"
    assert done.stdout.count("Usage:") == len(ends)


@pytest.mark.parametrize("name", ["train", "compare", "launch"])
def test_help_groups_options_and_loses_none(name, monkeypatch, capfd):
    code, out, _ = run([name, "--help"], monkeypatch, capfd)
    command = cli.get_command(click.Context(cli), name)
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", out, re.MULTILINE)
    assert code == 0 and sorted(shown) == sorted(
        [
            *(
                next(o for o in p.opts if o.startswith("--"))
                for p in command.params
                if isinstance(p, click.Option) and not p.hidden
            ),
            "--help",
        ]
    )
    titles = re.findall(r"^([A-Z][\w ]+):$", out, re.MULTILINE)
    assert titles == [title for title in GROUPS if title in titles] and titles[0] == FIRST
    if name == "train":
        assert titles == [title for title in GROUPS if title != "Hosts"]


def test_every_option_of_a_job_is_under_a_heading():
    listed = [name for names in GROUPS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert {field.name for field in dataclasses.fields(RunConfig)} <= set(listed)


def test_no_line_of_the_help_is_cut_off(monkeypatch, capfd):
    for words in ([], ["data"], ["hosts"]):
        assert "...\n" not in run([*words, "--help"], monkeypatch, capfd)[1].partition("\n")[2]
    assert "..." not in run(["--help"], monkeypatch, capfd)[1]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("workers", {"--num-workers", "-n", "--workers"}),
        ("servers", {"--num-servers", "-s", "--servers"}),
        ("batch_size", {"--batch-size", "-b"}),
        ("hosts", {"--hosts", "-H"}),
        ("hostfile", {"--hostfile"}),
    ],
)
def test_a_flag_means_the_same_in_every_command(name, flags):
    having = 0
    for command in (cli.get_command(click.Context(cli), name) for name in COMMANDS):
        for parameter in command.params:
            if parameter.name == name or flags & set(parameter.opts):
                assert (parameter.name, set(parameter.opts)) == (name, flags), command.name
                having += 1
    assert having >= 2


SCRIPT = str(Path(sys.executable).with_name("hvdtrain"))


def test_no_command_at_all_shows_the_help_as_it_is_laid_out(monkeypatch, capfd):
    code, out, err = run([], monkeypatch, capfd)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: ") and "\n  compare " in err


def test_modes_lists_every_mode_with_what_it_does(monkeypatch, capfd):
    code, out, err = run(["modes"], monkeypatch, capfd)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == modes.names()
    assert all(len(line.split()) > 4 for line in out.splitlines())


def test_version(monkeypatch, capfd):
    code, out, _ = run(["--version"], monkeypatch, capfd)
    assert code == 0 and out.startswith("hvdtrain, version ")


# Bad input: one line on stderr, exit code 2, nothing left behind

LONG = "x" * 300
REFUSED = [
    ("", "bogus", "unknown command 'bogus': choose from compare, train, "),
    ("", "comapre", "did you mean compare?"),
    ("train", "--bogus", "No such option '--bogus'"),
    (
        "train",
        "-n 2",
        "No such option '-n': train is one rank of a job, and `hvdtrain launch -n 2 -- …` starts",
    ),
    # as torchrun, Lightning, timm and torch.distributed.launch have it
    (
        "train",
        "--nproc_per_node 2",
        "No such option '--nproc_per_node': train is one rank of a job",
    ),
    ("train", "--gpus=2", "`hvdtrain launch -n 2 -- …` starts several"),
    ("train", "--local-rank=0", "start them by torchrun in place of torch.distributed.launch"),
    ("train", "--learning-rate 0.1", "No such option '--learning-rate': here it is --lr"),
    ("train", "--output_dir x", "No such option '--output_dir': here it is --out"),
    ("compare", "--data-path x", "No such option '--data-path': here it is --dataset"),
    ("train", "--batch_size 4", "No such option '--batch_size'. Did you mean '--batch-size'?"),
    ("train", "--mode nosuch", f"unknown mode 'nosuch': choose from {', '.join(modes.names())}"),
    ("train", "--model a\nb", "--model 'a\\nb' has a control character"),
    (
        "train",
        "--dataset nosuch",
        "unknown data set 'nosuch': choose from cifar10, coil100, digits,",
    ),
    ("train", "--dataset ./nosuch", "there is no folder"),
    (
        "train",
        "--mode ps-sync --servers 1",
        "1 servers of 1 ranks leave 0 workers: start at least 2 ranks",
    ),
    ("train", "--mode ps-sync --servers equal", "half of the ranks serve, so start 2, 4, 6"),
    # Of a file and an option the option wins, even where it says what is the default.
    ("train", "--config worse.toml", "unknown model 'written'"),
    ("train", "--config worse.toml --model given", "unknown model 'given'"),
    ("train", "--config worse.toml --model vggf", "--image-size 16 is too small"),
    *(
        (command, "--out bad\udcff", r"--out 'bad\udcff' is not valid UTF-8: choose another name")
        for command in ("train", "compare")
    ),
    ("train", "--out used", "--out used is not empty: choose another folder"),
    (
        "train",
        "--out run",
        "--out run holds a run, which --resume goes on with: choose another folder",
    ),
    (
        "train",
        "--out comparison",
        "--out comparison holds a comparison, which `hvdtrain report comparison` shows",
    ),
    ("train", "--steps 2.5", "'2.5' is not a whole number"),
    ("train", "--lr 1e-5x", "'1e-5x' is not a number"),
    (
        "train",
        "--freeze features",
        "trains the head on layers that have learned nothing: add --pretrained",
    ),
    (
        "compare",
        "--workers 2 4",
        "extra argument (4): numbers and names are listed by commas, `2,4`",
    ),
    ("train", "--out file/run", "--out file/run cannot be "),
    ("train", f"--out {LONG}", "cannot be used: File name too long"),
    ("compare", "--workers 0", "0 is not in the range x>=1"),
    ("compare", "--workers 33", "a global batch of 32 leaves 1 of 33 workers without a sample: "),
    ("compare", "--dataset ./one", "has one class only, 'cat'"),
    ("compare", f"--seed {2**32 - 1} --repeats 2", "goes beyond 4294967295, the largest seed"),
]


def test_as_many_servers_as_workers_are_half_of_the_ranks(here, monkeypatch, capfd):
    started = []
    monkeypatch.setattr(
        "hvdtrain.job.rank.process.run_rank", lambda config, *_: started.append(config.servers)
    )
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    assert run(["train", "--mode", "ps-sync", "-s", "equal"], monkeypatch, capfd)[0] == 0
    assert started == [2]


@pytest.mark.parametrize(
    ("command", "args", "words"), REFUSED, ids=[f"{c} {a:.40}" for c, a, _ in REFUSED]
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(
    here, monkeypatch, capfd, command, args, words
):
    """Exit code 2, and not a byte changed. What is not given is all right."""
    good = [command, "--dataset", "./data", "--out", "new", "--device", "cpu"] if command else []
    before = contents(here)
    code, out, err = run([*good, *args.split(" ")], monkeypatch, capfd)
    assert (code, out) == (2, "")
    assert err.startswith("hvdtrain: ") and err.endswith("\n") and err.count("\n") == 1
    assert words in err
    assert contents(here) == before


@pytest.mark.parametrize(
    ("output", "line"), [("/dev/full", "hvdtrain: No space left on device\n"), ("a pipe", "")]
)
def test_output_that_cannot_be_written_ends_it_quietly(output, line):
    reader, writer = os.pipe()
    os.close(reader)
    if output == "/dev/full":
        writer = os.open(output, os.O_WRONLY)
    done = subprocess.run(
        [SCRIPT, "modes"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=30
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, line)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_a_shell_may_close_a_stream(closed):
    done = subprocess.run(
        f"{SCRIPT} modes {closed}", shell=True, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed != ">&-")


# Under a starter: one line for all ranks


def test_a_message_is_one_write_for_ranks_share_a_stream():
    """Read from a socket on which each write is a message."""
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with reading, writing:
        subprocess.run([SCRIPT, "report", "nowhere"], stderr=writing, timeout=30, env=env)
        assert re.fullmatch(rb"hvdtrain: .*nowhere.*\n", reading.recv(2**16))


@pytest.mark.parametrize(
    ("ranks", "args", "line"),
    [
        (
            3,
            "--mode allreduce --batch-size 2 --out new",
            "a global batch of 2 leaves 1 of 3 workers without a sample",
        ),
        # The first rank is a server: it does not look at what the first worker claims, and finds no
        # fault.
        (
            3,
            "--mode ps-sync --servers 1 --out used",
            "--out used is not empty: choose another folder",
        ),
    ],
)
def test_what_is_wrong_for_all_ranks_is_said_once(here, ranks, args, line):
    before, log = contents(here), here.parent / f"{here.name}.log"
    program = [sys.executable, "-m", "hvdtrain", "train", "--dataset", "./data", *args.split()]
    with local_job(ranks, program, log) as job:
        assert job.wait(timeout=40) == 2
    assert contents(here) == before
    printed = log.read_text()
    assert "Traceback" not in printed
    assert printed.count("hvdtrain: ") == 1
    assert failure_reason(log, 2).startswith(line)


@pytest.mark.parametrize(
    ("mode", "world", "advice"),
    [
        (
            "allreduce",
            World(),
            "one worker: `hvdtrain launch -n 2 -- --mode allreduce …` and horovodrun start several",
        ),
        (
            "allreduce",
            World("mpirun", 0, 4, 0, 2),
            "MPI carries the messages between hosts: over TCP Gloo is faster, ",
        ),
        ("allreduce", World("mpirun", 0, 2, 0, 2), ""),
        ("allreduce", World("horovodrun", 0, 4, 0, 2), ""),
        ("single", World(), ""),
    ],
)
def test_what_a_starter_does_in_silence_is_said(mode, world, advice):
    assert _advice(mode, world).startswith(advice) and bool(_advice(mode, world)) == bool(advice)


# A comparison of which nothing could be run


def test_a_comparison_whose_runs_all_fail_says_why_and_where_to_look(here, monkeypatch, capfd):
    source = "import os\nfrom torch import nn\ndef build(n):\n"
    source += "    if 'OMPI_COMM_WORLD_RANK' in os.environ: raise RuntimeError('not in ranks')\n"
    source += "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(n))\n"
    (here / "mine.py").write_text(source)
    args = "compare --modes single --dataset ./data --model ./mine.py:build --out new"
    code, out, err = run(args.split(), monkeypatch, capfd)
    assert code == 1
    assert err == (
        "hvdtrain: 1 run failed: single-w1-r1; logs are in new/logs; the same command with --out new tries them again\n"
    )
    assert "failed to build: RuntimeError: not in ranks" in out
    assert contents(here / "new" / "runs") == {}


def test_a_comparison_finds_bad_weights_before_it_begins(here, monkeypatch, capfd):
    args = "compare --modes single --dataset ./data --pretrained file --out new"
    code, _, err = run(args.split(), monkeypatch, capfd)
    assert code == 2 and "--pretrained file is no file that torch.save or safetensors writes" in err
    assert not (here / "new").exists()


INTERRUPTED = """
import atexit, os, signal, sys
from hvdtrain import cli
def interrupted(**_):
    raise KeyboardInterrupt
cli.cli.main = interrupted
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
cli.main()
"""


def test_a_second_interrupt_changes_neither_the_line_nor_the_exit_code():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hvdtrain: interrupted\n")


@pytest.mark.parametrize("rate", ["0mbit", "1", "1gbit;id", "-1mbit"])
def test_a_rate_of_hosts_is_a_number_and_a_unit(rate):
    with pytest.raises(UsageError, match=f"--rate {rate} is not a rate such as 1gbit"):
        cli.main(["hosts", "up", "--rate", rate], standalone_mode=False)


def test_the_home_folder_in_out_is_meant_where_a_shell_leaves_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder().convert("~/runs", None, None) == f"{tmp_path}/runs"
