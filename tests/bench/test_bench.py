"""`hvdtrain bench`: what it takes and what it refuses. The README's command shows that it measures."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.tools.bench import command
from hvdtrain.tools.bench.command import SIZE, bench


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4", 4),
        ("1M", 2**20),
        ("16m", 2**24),
        (" 64K", 2**16),
        ("2G", 2**31),
        ("553648128", 553648128),
        ("1.5M", 1.5 * 2**20),
        ("16.8M", 16.8 * 2**20),
    ],
)
def test_sizes_are_bytes_with_units_of_1024(text, size):
    assert SIZE.convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "3", "1T", "-1", "1.5.2M", ".M", "65G", "9" * 30])
def test_other_sizes_are_refused(text):
    with pytest.raises(click.BadParameter, match="is not a size from 4 bytes to 64G"):
        SIZE.convert(text, None, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--op nosuch", "'nosuch' is not one of 'allreduce', 'pushpull', 'push'"),
        ("--backend nosuch", "'nosuch' is not one of 'horovod', 'gloo', 'rpc', 'zmq'"),
        ("--op pushpull --backend gloo", "none of gloo carries pushpull"),
        ("-n 2,65", "65 is not in the range 1<=x<=64"),
        ("-n 5 -s 3 -H a:2,b:2", "5 workers need 5 slots, and there are 2 on a + 2 on b"),
        ("--launcher mpi", "--launcher is for hosts: give -H or --hostfile"),
        ("--json nosuch/rows.json", "there is no folder nosuch to write rows.json in"),
    ],
)
def test_what_cannot_be_timed_is_refused(arguments, words):
    result = CliRunner().invoke(bench, arguments.split())
    assert isinstance(result.exception, UsageError | SystemExit)
    assert words in f"{result.exception} {' '.join(result.output.replace('│', '').split())}"


def test_ranks_on_hosts_are_given_variables_by_a_file_in_the_current_folder(tmp_path, monkeypatch):
    """Which the hosts share, and are asked whether they do."""

    def stop(made, log):
        raise Failure(
            made.secrets_file.relative_to(tmp_path).parts[-1] + made.files[made.secrets_file]
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", "t0ken")
    monkeypatch.setattr(command, "launched_job", stop)
    words = [
        "--op",
        "allreduce",
        "--backend",
        "gloo",
        "--bytes",
        "1K",
        "-H",
        "localhost:2",
        "--env",
        "MY_TOKEN",
    ]
    assert str(CliRunner().invoke(bench, words).exception).startswith(
        "environmentexport MY_TOKEN=t0ken\n"
    )
    monkeypatch.setattr(command, "prepare_program", stop_at_requirements)
    assert str(CliRunner().invoke(bench, words).exception) == f"hosts are asked for {tmp_path}"
    assert list(tmp_path.iterdir()) == []


def stop_at_requirements(launcher, spec, requirements):
    [folder] = requirements.files
    raise Failure(f"hosts are asked for {Path(folder).parent}")


def test_sizes_are_shown_in_the_unit_in_which_they_are_given(monkeypatch):
    """As whole float32 numbers."""

    def measured(series, launcher, secrets):
        timed = {"seconds": 0.01, "server_cpu_s": 0.1, "server_mb": 300.0}
        return {backend: [[timed] for size in series.sizes] for backend in series.backends}

    monkeypatch.setattr(command, "_measure", measured)
    done = CliRunner().invoke(
        bench, ["--op", "pushpull", "--backend", "rpc", "--bytes", "16.8M,1M"]
    )
    assert done.exit_code == 0, done.output
    assert re.search(r"MiB +.*server MiB", done.output), done.output
    rows = [
        line.split() for line in done.output.splitlines() if line.strip().startswith("pushpull rpc")
    ]
    assert [row[4] for row in rows] == ["16.8", "1"] and rows[1][-1] == "300"
