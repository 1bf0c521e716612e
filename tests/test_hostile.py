"""Whatever stands in files and names that a command reads: it does its work, or says in one line
what is wrong.

Each example spoils one file (or name) at random and calls the command line. HVDTRAIN_EXAMPLES=10000
tries so many, and others each time:

    HVDTRAIN_EXAMPLES=10000 pytest -n 0 --timeout 0 tests/test_hostile.py
"""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path

import psutil
import pytest
from helpers import archives, hostile
from helpers.foretold import foretell_little
from helpers.jobs import run as run_job
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdtrain
from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.cli import main
from hvdtrain.data import packing
from hvdtrain.data.folder import scan
from hvdtrain.runs.folder import claim

pytestmark = pytest.mark.xdist_group("hostile")  # one job for all, which one process starts
EXAMPLES = int(os.environ.get("HVDTRAIN_EXAMPLES", "0"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of each thing that commands read. Not to be changed."""
    root = tmp_path_factory.mktemp("hostile")
    train = [
        "--mode",
        "ps-async",
        "--servers",
        "1",
        "--steps",
        "2",
        "--width",
        "0.0625",
        "--threads",
        "1",
        "--record",
    ]
    done = run_job("forked", 3, *train, "--out", str(root / "run" / "run"))
    assert done.returncode == 0, done.stdout
    (root / "run" / "run.launch").mkdir()
    (root / "run" / "run.launch" / "log").write_text(
        "[0]<stdout>: a line\n[1]<stderr>: hvdtrain: another\n"
    )
    running = {
        "launcher": "local",
        "pid": 4194305,
        "started": "never 1",
        "host": os.uname().nodename,
    }
    (root / "run" / "run.launch" / "running.json").write_text(json.dumps(running))
    for kind in recipes.WHAT:
        shutil.copytree(
            recipes._folder(kind),
            root / "recipes" / kind,
            ignore=shutil.ignore_patterns("*.py", "__*"),
        )
    (root / "plan").mkdir()
    shutil.copy(
        Path(hvdtrain.__file__).parent / "planning/cases/mxnet-alexnet.toml",
        root / "plan" / "case.toml",
    )
    images = tmp_path_factory.mktemp("images")
    for part in ("TrainData", "ValidationData"):
        for name in ("cat", "dog"):
            archives.lay_out(
                images / part / name, {f"{k}.png": archives.picture(k, (40, 36)) for k in range(3)}
            )
    assert packing.pack(scan(images), f"{root}/packed", 3000, False, lambda *_: None)
    return root


CONFIG_READERS = ["launch --resume --out run --dry-run", "train --config run/config.toml --out run"]
# What is read -> the files of its folder that are spoiled, and the command lines that read them.
READERS = {
    "run": (
        [
            "run/config.toml",
            "run/manifest.json",
            "run/summary.json",
            "run/metrics.rank1.jsonl",
            "run/metrics.rank2.jsonl",
            "run/metrics.server0.jsonl",
            "run/ledger.server0.csv",
            "run/leases.csv",
            "run/snapshots/final.safetensors",
            "run.launch/log",
            "run.launch/running.json",
        ],
        [
            "report run",
            "report .",
            "status run",
            "explain run",
            "replay run",
            "evaluate run --out there",
            "stop run",
            *CONFIG_READERS,
        ],
    ),
    "recipes": (
        [
            "launchers/slurm.toml",
            "launchers/kubernetes.toml",
            "launchers/mpi.toml",
            "presets/cnn-mnist.toml",
            "datasets/turntable.toml",
        ],
        [
            "launch -n 2 --dry-run --launcher slurm",
            "launch -n 2 --dry-run --launcher kubernetes",
            "launch -n 2 --dry-run --launcher mpi -H a:2",
            "compare --dry-run --preset cnn-mnist",
            "compare --help",
            "data list",
            "train --dataset turntable --width nan",
        ],
    ),
    "plan": (["case.toml"], ["plan predict --case case.toml"]),
    "packed": (
        ["data/train-*.parquet"],
        ["data check {here}", "data show file://{here} --out x"],
    ),
}


def calls(here, words, what):
    """One line on stderr unless it succeeds, and nothing changed but what the command is to make."""
    before = hostile.tree(here.parent)
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        patch.chdir(here)
        foretell_little(patch)
        patch.setattr(sys, "argv", ["hvdtrain", *words])
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main()
        err.seek(0)
        said = err.read()
        out.seek(0)
        printed = said + out.read()
    obeyed = hostile.CONTROL.search(printed)
    assert not obeyed, (
        f"{words}, {what}: {printed[max(0, obeyed.start() - 100) : obeyed.end() + 50]!r}"
    )
    code = ended.value.code
    assert code in (0, 1, 2), f"{words}, {what}: exit code {code}"
    lines = [line for line in said.splitlines() if not line.startswith("checking: ")]
    if code:
        assert len(lines) == 1 and lines[0].startswith("hvdtrain: "), f"{words}, {what}: {said}"
    after = hostile.tree(here.parent)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    made = {name for name in changed if not name.startswith(("here/there", "here/x"))}
    if words[0] == "stop":
        made.discard("here/run.launch/running.json")
    assert not made, f"{words}, {what}: changed {made}"
    return code, printed


@settings(max_examples=EXAMPLES or 50)
@given(st.sampled_from(sorted(READERS)), st.integers(0, 2**32))
def test_a_spoiled_file_is_read_or_is_a_line(base, one_thread, kind, seed):
    """Spoil one file of a copy, and let a command read it."""
    rng = random.Random(seed)  # several draws by hypothesis would cost more than most examples
    files, commands = READERS[kind]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        here = Path(folder).resolve() / "here"
        hostile.copy(base / kind, here)
        name = rng.choice(files)
        hostile.spoil(next(here.glob(name)), rng)
        words = rng.choice(commands).format(here=here).split()
        if kind == "recipes":
            patch.setattr(recipes, "_folder", lambda kind: here / kind)
            recipes.load.cache_clear()
        calls(here, words, f"{name} spoiled by {seed}")
    if kind == "recipes":
        recipes.load.cache_clear()


def test_no_text_of_a_strangers_folder_becomes_a_path_or_a_command_or_is_obeyed(
    base, one_thread, tmp_path
):
    """In each string of the manifest and of running.json by itself, and in all of them that are
    taken together.
    """
    here, sign = tmp_path / "here", hostile.SIGN
    hostile.copy(base / "run", here)
    manifest, record = here / "run" / "manifest.json", here / "run.launch" / "running.json"
    launched = {"launcher": "ssh", "hosts": ["a:1", "b:1"], "interface": "eth0", "folder": "/x"}
    known = json.loads(manifest.read_text()) | {"launch": launched}
    begun = json.loads(record.read_text())
    named = {"job": "mpijob.kubeflow.org/a", "name": "hvdtrain-a", "context": "a", "namespace": "b"}
    cheap = [
        "status run",
        "stop run",
        "launch --resume --out run --dry-run",
        "launch --out run -n 1 --dry-run",
    ]
    for file, content in (
        (manifest, known),
        (record, begun),
        (record, {"launcher": "kubernetes"} | named),
    ):
        for at in hostile.strings(content):
            file.unlink(missing_ok=True)
            file.write_text(json.dumps(hostile.planted(content, [at], sign)))
            for words in cheap:
                with hostile.nothing_done_with_the_sign():
                    calls(here, words.split(), f"{file.name} {at}")
        file.unlink(missing_ok=True)
        file.write_text(json.dumps(known if file == manifest else begun))
    (here / "run.launch" / "log").unlink()
    (here / "run.launch" / "log").write_text(f"[0]<stdout>: {sign}\n")
    classes = [at for at in hostile.strings(known) if at[0] == "class_names"]
    manifest.unlink()
    manifest.write_text(json.dumps(hostile.planted(known, classes, sign)))
    with hostile.nothing_done_with_the_sign():
        code, printed = calls(here, ["evaluate", "run"], "class names")
    assert code == 2 and printed.startswith("hvdtrain: the model knows the classes ../--hostile")
    taken = [
        at
        for at in hostile.strings(known)
        if at[0] not in ("mode", "class_names") and hostile.is_read(known, at, sign)
    ]
    assert len(taken) > 40
    manifest.unlink()
    manifest.write_text(json.dumps(hostile.planted(known, taken, sign)))
    for words in (
        "report run --out there/report",
        "evaluate run --out there/evaluated",
        "status run",
    ):
        with hostile.nothing_done_with_the_sign():
            code, printed = calls(here, words.split(), "all at once")
        assert code == 0, (words, printed)
    # as text
    assert "last line: [0]<stdout>: ../--hostile\\x1b]0;x\\x07\\u202e<script>[bold red]" in printed
    for file in (here / "there").rglob("*"):
        if file.suffix in (".md", ".html", ".csv", ".svg", ".tex", ".json"):
            assert not (obeyed := hostile.CONTROL.search(file.read_text())), (file, obeyed)
            assert "<script>[" not in file.read_text() or file.suffix not in (".html", ".svg"), file


# A kind of thing, the file of it that is written, its content, and the command lines that read it.
# What each took of time or memory grew with the square of its length, or with a number in it: some
# 100 kB took minutes.
ENDLESS = [
    ("run", "run/manifest.json", {"workers": 10**9}, ["report run", "status run", "explain run"]),
    ("run", "run/manifest.json", {"servers": 10**9}, ["report run", "explain run"]),
    ("run", "run/config.toml", ".".join("a" * 40_000) + " = 1", CONFIG_READERS),
    ("run", "run/config.toml", "[" + ".".join("a" * 40_000) + "]", CONFIG_READERS),
    ("run", "run/config.toml", "slow = '" + "9" * 5000 + ":2x'", CONFIG_READERS),
    ("run", "run/config.toml", f"dataset = 'x://{':' * 60_000}'", CONFIG_READERS),
    ("run", "run/config.toml", f"dataset = '{'://' * 20_000}'", CONFIG_READERS),
    ("run", "run.launch/log", "[1]<stderr>: " * 20_000, ["status run"]),
    ("run", "run.launch/log", "Process name: [a," * 20_000, ["status run"]),
    ("run", "run.launch/log", "Warning: " * 40_000, ["status run"]),
    ("run", "run.launch/log", "[" + "1" * 5000 + "]<stdout>: x", ["status run"]),
    ("run", "run/metrics.rank1.jsonl", "[" * 2_000_000, ["report run", "status run"]),
    ("run", "run/metrics.rank1.jsonl", "\n" * 2_000_000, ["report run", "status run"]),
    (
        "plan",
        "case.toml",
        "x = {" + " . ".join('"a"' for _ in range(40_000)) + " = 1}",
        ["plan predict --case case.toml"],
    ),
    ("plan", "hosts", "a:" + "9" * 5000, ["launch -n 2 --dry-run -H hosts"]),
    (
        "plan",
        "hosts",
        "".join(f"h{n} slots=4096\n" for n in range(20_000)),
        ["launch -n 2 --dry-run -H hosts"],
    ),
]


@pytest.mark.parametrize(
    ("kind", "file", "content", "commands"), ENDLESS, ids=map(str, range(len(ENDLESS)))
)
def test_what_is_small_takes_little_time_and_memory(
    base, one_thread, tmp_path, kind, file, content, commands
):
    here = tmp_path / "here"
    hostile.copy(base / kind, here)
    written = here / file
    if isinstance(content, dict):
        content = json.dumps(json.loads(written.read_text()) | content)
    written.unlink(missing_ok=True)
    written.write_text(content)
    if file == "run.launch/log":  # it is asked why the job failed
        (here / "run" / "summary.json").unlink()
    began = time.process_time()
    with little_memory(2**30):
        for command in commands:
            calls(here, command.split(), file)
    assert time.process_time() - began < 10


@contextlib.contextmanager
def little_memory(more):
    """This process may take so many bytes more."""
    taken = psutil.Process().memory_info().data
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@settings(max_examples=EXAMPLES or 20)
@given(st.integers(0, 2**32))
def test_hosts_and_urls_of_any_letters_are_read_or_are_a_line(seed):
    rng = random.Random(seed)
    text = hostile.hosts(rng)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder).resolve() / "here"
        here.mkdir()
        scheme = rng.choice(
            [
                "file://",
                "memory://",
                "http://127.0.0.1:1/",
                "nosuch://",
                "file:",
                "zip://",
                "::",
                "s3://",
            ]
        )
        command = rng.choice(
            [
                ["launch", "-n", "2", "--dry-run", "--launcher", "mpi", "-H", text],
                ["data", "check", scheme + text],
                ["train", "--dataset", scheme + text, "--out", "run"],
            ]
        )
        calls(here, command, seed)


@pytest.mark.parametrize(
    "link", ["run/metrics.rank1.jsonl", "run/logs/more", "run.launch/log", "run/logs/fifo"]
)
def test_a_run_with_a_symbolic_link_or_a_fifo_is_not_gone_on_with(base, tmp_path, link):
    """What is written in it would be written where a stranger has the link point, or wait for a
    reader.
    """
    here, mine = tmp_path / "here", tmp_path / "mine"
    hostile.copy(base / "run", here)
    mine.write_text("mine")
    (here / link).unlink(missing_ok=True)
    if link.endswith("fifo"):
        os.mkfifo(here / link)
    else:
        (here / link).symlink_to(mine)
    said = "is (a symbolic link|no regular file), which no run has"
    code, printed = calls(
        here, ["launch", "--resume", "-n", "1", "--out", "run", "--", "--steps", "4"], link
    )
    assert code == 2 and re.search(said, printed)
    with pytest.raises(UsageError, match=said):
        claim(here / "run", RunConfig(), 1, "job", False, resuming=True)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", [*READERS["run"][0], "run/trace.pftrace", "run/membership.jsonl"])
def test_what_is_no_regular_file_is_not_read(base, one_thread, tmp_path, name):
    """A FIFO would be waited for, and a device may have no end."""
    words = [
        "status run",
        "explain run",
        "explain run --timeline there.svg",
        "replay run",
        "stop run",
        *CONFIG_READERS,
    ]
    if name.startswith("run/snapshots"):
        words = ["evaluate run --out there"]
    here = tmp_path / "here"
    hostile.copy(base / "run", here)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (here / name).unlink(missing_ok=True)
        make(here / name)
        for command in words:
            calls(here, command.split(), name)


@settings(max_examples=EXAMPLES or 20)
@given(st.integers(0, 2**32))
def test_a_spoiled_snapshot_is_gone_on_from_or_is_a_line(base, one_thread, seed):
    """Its checksums are right, as a hostile hand would make them."""
    import torch

    from hvdtrain.base.config.file import read_config
    from hvdtrain.data.find import find_dataset
    from hvdtrain.job.training import resume

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        hostile.copy(base / "run" / "run", run)
        config = RunConfig(**read_config(run / "config.toml"))
        saved = run / "snapshots" / "step-00000002"
        name = rng.choice(
            ["state.json", "state.json", "weights.safetensors", "optimizer.safetensors"]
        )
        hostile.spoil(saved / name, rng)
        sign(saved, rng)
        before = hostile.tree(run)
        data = find_dataset(config.dataset)
        with contextlib.suppress(UsageError):
            found = resume.find(run, config, data, True)
            assert found is None or found.step >= 0
        assert hostile.tree(run) == before
    assert torch.get_num_threads() == 1


def sign(saved, rng):
    """Write the checksums that the files have now, where they can be, mostly."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        state = json.loads((saved / "state.json").read_text().splitlines()[0])
        for name in list(state["checksums"]):
            state["checksums"][name] = f"crc32:{zlib.crc32((saved / name).read_bytes()):08x}"
        text = json.dumps(state)
        (saved / "state.json").write_text(f"{text}\ncrc32:{zlib.crc32(text.encode()):08x}\n")
