"""Every command in every README runs; those that need more than this machine have options that
exist.
"""

import contextlib
import csv
import dataclasses
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from helpers.fenced import joined, run_here
from helpers.foretold import BESIDE_TESTS, OF_SMALL_MODELS, SMALL_MODELS
from helpers.fork_proxy import FIRST
from helpers.forked_jobs import env_with_forks, forks_first
from helpers.jobs import ENV, SETTINGS, check_run_folder, hvdtrain

from hvdtrain.base import modes
from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.cli import cli

ROOT = Path(__file__).parent.parent
FOLDERS = ("datasets", "hvdtrain", "launchers", "tests")
TUTORIALS = sorted((ROOT / "hvdtrain" / "tutorials").glob("[a-z]*.md"))
READMES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        ROOT / "README.md",
        *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("README.md")),
        *TUTORIALS,
        ROOT / "hvdtrain" / "planning" / "gallery.md",
    ]
}
# Commands in ```bash blocks that do not run here, and why.
ELSEWHERE = {
    ".uv/bin/uv run pytest": "this is it",
    "pip install --target .uv uv && .uv/bin/uv run hvdtrain compare": "some minutes: see test_the_main_job",
    "hvdtrain verify --modes ps-sync --workers 2": "checks/test_verify.py runs it",
}
# Runs of 20 steps in README.md: of each starter, in each kind of mode.
STARTED = [
    ("single", "single", 1, 0),
    ("ring", "allreduce", 2, 0),
    ("ring-mpi", "allreduce", 2, 0),
    ("ddp", "ddp", 2, 0),
    ("launched", "ps-async", 2, 1),
    ("ps-sync", "ps-sync", 2, 1),
    ("ps-async", "ps-async", 2, 1),
]
# Scripts that READMEs name and that are not here.
ELSEWHERE_MODULES = (
    "FILE.py",
    "distributedVggf.py",
    "hvdtrain/job/modes/ps_half.py",
    "launch.py",
    "mnist_dist_demo.py",
    "job/modes/NAME.py",
    "my_text.py",
    "my_model.py",
    "test/parallel/test_torch.py",
    "train.py",
    "train_cifar10.py",
    "who.py",
)
# Options that READMEs name in their text and that are not hvdtrain's.
FOREIGN = {
    "--allow-run-as-root": "mpirun",
    "--bind-to": "mpirun",
    "--check-build": "horovodrun",
    "--disp-batches": "MXNet",
    "--gloo": "horovodrun",
    "--help": "every command",
    "--kv-store": "MXNet",
    "--lr-step-epochs": "MXNet",
    "--model-prefix": "MXNet",
    "--no-python": "torchrun",
    "--nodes": "Slurm",
    "--ntasks": "Slurm",
    "--reinstall-package": "uv",
    "--gpus-per-task": "Slurm",
    "--runtime-options": "mpirun",
}
# Values of options that are names.
NAMES = {
    "launcher": recipes.names("launchers"),
    "mode": modes.names(),
    "modes": [*modes.names(), "ps-half"],  # which a reader of a tutorial adds
    "preset": recipes.names("presets"),
    "reference": recipes.names("presets"),
}


def without_fenced(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def shown(text: str) -> list[str]:
    """The commands in blocks that are indented by four spaces."""
    lines = joined(re.sub(r"\\\n\s*", "\\\n", without_fenced(text)))
    return [line.strip() for line in lines if line.startswith("    ")]


def quoted(text: str) -> list[str]:
    """What stands between backticks, in the text and in tables."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_fenced(text))]


def ours(line: str) -> list[str]:
    """What follows `hvdtrain` in a command, whoever starts it; nothing where it is not in there."""
    words = shlex.split(line, comments=True)
    if "hvdtrain" not in words or words[0] == "import":
        return []
    after = words[words.index("hvdtrain") + 1 :]
    command = itertools.takewhile(lambda word: word not in ("|", "&", "&&"), after)
    return [word for word in command if word != "…"]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "name",
    [name for name, text in READMES.items() if run_here(text) and ROOT / name not in TUTORIALS],
)
def test_every_command_runs(name, tmp_path):
    """In one folder and in order: later commands use what earlier ones made."""
    commands = [command for command in run_here(READMES[name]) if command not in ELSEWHERE]
    env = env_with_forks() | {FIRST: SMALL_MODELS}
    for command in commands:
        run_in(tmp_path, command, env, forks_first() + BESIDE_TESTS + OF_SMALL_MODELS)
    if name == "README.md":
        for folder, mode, workers, servers in STARTED:
            check_run_folder(tmp_path / "runs" / folder, mode, workers, servers, 20)
        check_bench_rows(json.loads((tmp_path / "rows.json").read_text()))


def run_in(folder: Path, command: str, env: dict[str, str] = ENV, first: str = "") -> None:
    """What begins with `hvdtrain` runs in a forked process; starters are started. See
    helpers/forked_jobs.py.
    """
    words = shlex.split(command)
    if words[0] == "hvdtrain":
        with contextlib.chdir(folder):
            done = hvdtrain(*words[1:], env=ENV, first=first, timeout=600)
    else:
        done = subprocess.run(words, cwd=folder, timeout=600, **SETTINGS | {"env": env})
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    assert "Traceback" not in done.stdout, f"{command}\n{done.stdout}"


@pytest.mark.main_job
@pytest.mark.xdist_group("ray")  # one after the other
@pytest.mark.timeout(1200)
def test_the_main_job(tmp_path):
    """What README's first command promises: `hvdtrain compare` with no options."""
    first = run_here(READMES["README.md"])[0]
    run_in(tmp_path, first.removeprefix("pip install --target .uv uv && .uv/bin/uv run "))
    out = next((tmp_path / "runs").glob("compare-*"))
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    # and of servers those that are not far behind
    assert {"single", "allreduce"} < {row["mode"] for row in rows}
    assert all(float(row["samples_per_s"]) > 0 for row in rows)
    # one in step, one asynchronous, where these are fast enough
    trained = [row for row in rows if row["val_accuracy"]]
    assert len({row["mode"] for row in trained}) == len(trained)
    one_machine = max(float(row["samples_per_s"]) for row in rows if row["mode"] == "single")
    assert trained or all(
        float(row["samples_per_s"]) < one_machine / 2 for row in rows if row["mode"] != "single"
    )
    for row in trained:
        # In ps-async the order of pushes is chance: of 359 images some more or fewer are right each
        # time.
        assert float(row["val_accuracy"]) >= (0.92 if row["mode"] == "ps-async" else 0.95), row
    for name in ("report.md", "report.html", "plots/learning.svg"):
        assert (out / name).stat().st_size > 1000


def check_bench_rows(rows: list[dict]) -> None:
    assert {(row["op"], row["backend"]) for row in rows} >= {
        ("allreduce", "horovod"),
        ("pushpull", "rpc"),
    }
    for row in rows:
        assert 0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds_median"] / 1e9)
        assert row["payload_gb_per_s"] == pytest.approx(row["workers"] * row["gb_per_s"])
        if row["backend"] == "rpc":
            assert (row["mode"], row["bucket_mb"]) == ("ps-async", 4)
            assert row["server_mb"] > 100 and row["server_cpu_ms_per_push"] > 0


def test_no_command_is_missed():
    assert {"README.md", "datasets/README.md", "launchers/README.md"} < set(READMES)
    assert len(run_here(READMES["README.md"])) > 12
    assert (
        len(
            [line for text in READMES.values() for line in shown(text) + quoted(text) if ours(line)]
        )
        > 60
    )
    assert set(ELSEWHERE) <= {line for text in READMES.values() for line in run_here(text)}


@pytest.mark.parametrize("name", READMES)
def test_every_command_has_these_options(name):
    text = READMES[name]
    for line in [*run_here(text), *shown(text), *quoted(text)]:
        if words := ours(line):
            try:
                parse(cli, words)
            except click.ClickException as error:
                pytest.fail(f"{line}\n{error.format_message()}")


def parse(command: click.Command, words: Sequence[str]) -> None:
    """Raises UsageError for a command, an option or a value that there is not."""
    interspersed = command.context_settings.get(
        "allow_interspersed_args", command.allow_interspersed_args
    )
    context = click.Context(command, allow_interspersed_args=interspersed)
    if isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        if not found:
            raise click.UsageError(f"no command {words[0]}")
        return parse(found, words[1:])
    if command.name == "launch" and "--" in words:
        at = list(words).index("--")
        parse_launched(words[at + 1 :])
        words = words[:at]
    values, left, _ = command.make_parser(context).parse_args(list(words))
    if left:
        raise click.UsageError(f"more arguments than it takes: {left}")
    for parameter in command.params:
        value = values.get(parameter.name)
        # a flag; to be replaced
        if not isinstance(value, str) or re.fullmatch(r"[A-Z]+|\./site\.toml", value):
            continue
        parameter.type_cast_value(context, value)
        for word in value.split(",") if parameter.name in NAMES else ():
            if word not in NAMES[parameter.name]:
                raise click.UsageError(f"{parameter.name}: {word}")


def parse_launched(words: Sequence[str]) -> None:
    """Raises UsageError for what `launch` does not take after --: it has --out and others itself."""
    train = cli.get_command(click.Context(cli), "train")
    assert train
    fields = {field.name for field in dataclasses.fields(RunConfig)} - {"servers"}
    of_train_alone = [parameter for parameter in train.params if parameter.name not in fields]
    for option in itertools.chain(*(parameter.opts for parameter in of_train_alone)):
        if option in words:
            raise click.UsageError(f"launch takes no {option} after --")
    parse(train, words)


@pytest.mark.parametrize(
    "line",
    [
        "hvdtrain lunch",
        "hvdtrain launch --frob 1",
        "hvdtrain launch -n 2 -- --frob 1",
        "hvdtrain launch -n 2 -- --config tuned.toml",
        "mpirun -np 2 hvdtrain train --mode ring",
        "hvdtrain stop a b",
        "hvdtrain data biuld x",
    ],
)
def test_a_command_that_there_is_not_is_found(line):
    with pytest.raises(click.ClickException):
        parse(cli, ours(line))


@pytest.mark.parametrize("name", READMES)
def test_every_option_that_is_named_exists(name):
    named = {
        option
        for span in quoted(READMES[name])
        if span.startswith(("-", "launch "))
        for option in flags(span)
    }
    assert named - set(options(cli)) - set(FOREIGN) == set()


def flags(text: str) -> list[str]:
    return re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", text)


def options(command: click.Command) -> Iterator[str]:
    """The options of a command and of those below it."""
    for parameter in command.params:
        yield from [*parameter.opts, *parameter.secondary_opts]
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found
            yield from options(found)


@pytest.mark.parametrize("name", READMES)
def test_every_module_that_is_named_is_there(name):
    modules = [
        str(path)
        for folder in ("hvdtrain", "tests", "launchers")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for named in re.findall(r"(?<![\w.-])[\w/-]+\.py\b", READMES[name]):
        assert named in ELSEWHERE_MODULES or any(path.endswith(f"/{named}") for path in modules), (
            named
        )


@pytest.mark.parametrize("name", READMES)
def test_every_benchmark_is_there_and_has_these_options(name):
    for line in shown(READMES[name]):
        if script := re.match(r"python (tests/benchmarks/\w+\.py)(?: ([a-z|]+))?", line):
            source = (ROOT / script[1]).read_text()
            for option in flags(line):
                assert f'"{option}"' in source, line
            for what in (script[2] or "").split("|"):
                assert what in source, line


@pytest.mark.parametrize("name", READMES)
def test_every_link_leads_somewhere(name):
    for place, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", READMES[name]):
        target = (ROOT / name).parent / place if place else ROOT / name
        assert target.exists(), place
        if heading:
            titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
            assert heading in [
                re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles
            ]


def over_hosts(text: str) -> list[str]:
    """The commands that would run on other machines: they can be tried dry, each with its own
    hosts.
    """
    lines = dict.fromkeys([*run_here(text), *shown(text), *quoted(text)])
    return [
        line
        for line in lines
        if ours(line)[:1] in (["compare"], ["launch"]) and {"-H", "--hostfile"} & {*ours(line)}
    ]


@pytest.mark.parametrize("line", [line for text in READMES.values() for line in over_hosts(text)])
def test_a_command_for_several_hosts_fits_them(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data_set, part, name in itertools.product(("coil", "slice"), ("train", "val"), "ab"):
        of_class = Path(data_set, part, name)
        of_class.mkdir(parents=True)
        (of_class / "1.png").touch()
    Path("train.py").touch()
    Path("tests").symlink_to(ROOT / "tests")
    for file in ("hosts", "host_file"):
        Path(file).write_text("".join(f"node{number} slots=2\n" for number in range(4)))
    words = ours(line)
    at = words.index("--") if "--" in words else len(words)
    done = CliRunner().invoke(cli, [*words[:at], "--dry-run", *words[at:]])
    assert done.exit_code == 0, f"{line}\n{done.output}{done.exception}"
    assert "hvdtrain" in done.output
