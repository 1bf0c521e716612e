"""Starting jobs as a user would, and looking at what they leave."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
from PIL import Image
from safetensors.torch import load_file

from helpers.forked import Forked

BIN = Path(sys.executable).parent
HVDTRAIN = str(BIN / "hvdtrain")
STARTERS = {
    "alone": [HVDTRAIN],
    "horovodrun": [str(BIN / "horovodrun"), "-np", "{ranks}", HVDTRAIN],
    "mpirun": [str(BIN / "mpirun"), "--oversubscribe", "-np", "{ranks}", HVDTRAIN],
    "torchrun": [
        str(BIN / "torchrun"),
        "--standalone",
        "--nproc-per-node",
        "{ranks}",
        "-m",
        "hvdtrain",
    ],
}
# An epoch. Tests with these options are beside_digits.
SMALL = "--width 0.0625 --steps 6 --batch-size 32 --threads 1 --dataset some".split()
JOB = [*SMALL, "--snapshot-every", "never"]
ENV = os.environ | {
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
SETTINGS = dict(
    env=ENV, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
)
# What a forked rank runs first, so that it ends where much goes through the store of all ranks:
# what workers tell each other between steps is small.
LITTLE = """
from hvdtrain.job.coordination.store_group import StoreGroup
give = StoreGroup._give
def give_little(self, message):
    assert len(message) < 2**12, f"{len(message)} bytes go through the store"
    return give(self, message)
StoreGroup._give = give_little
"""


def words(starter: str, ranks: int, *options: str) -> list[str]:
    return [*(word.format(ranks=ranks) for word in STARTERS[starter]), "train", *options]


def run(starter: str, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    """A job of `hvdtrain train`, from its start to its end."""
    if starter == "forked":
        return hvdtrain("train", *options, ranks=ranks)
    return subprocess.run(words(starter, ranks, *options), **SETTINGS, timeout=120)


def start(starter: str, ranks: int, *options: str, **more) -> "subprocess.Popen[str] | Forked":
    """A job that goes on.

    Args:
        more: what a forked job may be given besides.
    """
    if starter == "forked":
        return Forked(ranks, ["train", *options], **more)
    return subprocess.Popen(words(starter, ranks, *options), **SETTINGS, start_new_session=True)


@contextlib.contextmanager
def started(starter: str, ranks: int, *options: str, **more):
    """A job that goes on, of which nothing is left afterwards; see `start`."""
    job = start(starter, ranks, *options, **more)
    try:
        yield job
    finally:
        finish(job)


def hvdtrain(
    *words: str, ranks: int = 1, timeout: float = 120, **more
) -> subprocess.CompletedProcess[str]:
    """A command, from its start to its end, in a forked process; see `Forked`."""
    job = Forked(ranks, list(map(str, words)), **more)
    try:
        printed, _ = job.communicate(timeout)
    finally:
        job.close()
    return subprocess.CompletedProcess(words, job.returncode, printed)


def slow_evaluations(seconds: float) -> str:
    """What a forked rank runs first, so that each evaluation takes so much longer."""
    return f"""
import time
from hvdtrain.job.training import loop
evaluate = loop.evaluate
def slowly(*arguments):
    time.sleep({seconds})
    return evaluate(*arguments)
loop.evaluate = slowly
"""


def holds_tests_until(file: Path) -> str:
    """What a forked rank runs first, so that it tests its last model on test images when the file
    is there, and not before.
    """
    return f"""
import time
from pathlib import Path
from hvdtrain.job.rank import results
evaluate = results.evaluate
def when_told(*arguments):
    while not Path({str(file)!r}).exists():
        time.sleep(0.02)
    return evaluate(*arguments)
results.evaluate = when_told
"""


def short_pilots(seconds: float) -> str:
    """What a comparison runs first, so that the sprints of its search last so long."""
    return f"""
from hvdtrain.comparing import search
search.SPRINT_S = {seconds}
"""


ENDS_WHEN_TOLD = ["--time-budget", "1h"]  # what a job of until_told is started with


def until_told(file: Path) -> str:
    """What a forked rank runs first, so that the time budget of its job is spent when the file is
    there.
    """
    return f"""
from pathlib import Path
from hvdtrain.job.training.barrier import StepBarrier
wants = StepBarrier._wants
def wants_or_was_told(self, elapsed):
    over, leaves, snapshot = wants(self, elapsed)
    return over or Path({str(file)!r}).exists(), leaves, snapshot
StepBarrier._wants = wants_or_was_told
"""


def slow_steps(seconds: float, after: int = 0, before: float = 0.0) -> str:
    """What a forked rank runs first, so that each step takes so much longer: time to stop it amid
    its steps.

    Args:
        after: so many steps of this rank's, which take `before` longer.
    """
    return f"""
import itertools
import time
from hvdtrain.job.training import step
backward, numbers = step.backward, itertools.count(1)
def slowly(*arguments):
    time.sleep({seconds} if next(numbers) > {after} else {before})
    return backward(*arguments)
step.backward = slowly
"""


def slow_steps_until(file: Path, seconds: float) -> str:
    """What a forked rank runs first, so that each step takes so much longer until the file is
    there.
    """
    return f"""
import time
from pathlib import Path
from hvdtrain.job.training import step
backward = step.backward
def slowly(*arguments):
    if not Path({str(file)!r}).exists():
        time.sleep({seconds})
    return backward(*arguments)
step.backward = slowly
"""


def read_rows(file: Path) -> list[dict]:
    """The lines of a file that may grow: its last may be half written."""
    whole, _, _ = file.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def steps(folder: Path, rank: int) -> list[dict]:
    return read_rows(folder / f"metrics.rank{rank}.jsonl")


def check_run_folder(out: Path, mode: str, workers: int, servers: int, taken: int) -> None:
    """What a finished job of so many steps, of 32 samples each, leaves."""
    manifest, summary = (
        json.loads((out / f"{name}.json").read_text()) for name in ("manifest", "summary")
    )
    assert (manifest["workers"], manifest["servers"], manifest["processes"]) == (
        workers,
        servers,
        workers + servers,
    )
    assert (summary["status"], summary["steps"], summary["samples"]) == ("done", taken, taken * 32)
    ranks = range(servers, servers + workers)
    rows = [row for rank in ranks for row in steps(out, rank)]
    assert len(rows) == workers * taken
    shares = [row.get("shares", 1) for row in rows]  # any number where shares are leased
    assert [row["samples"] for row in rows] == [number * 32 // workers for number in shares]
    assert sum(shares) == workers * taken
    assert {"staleness" in row for row, number in zip(rows, shares, strict=True) if number} == {
        servers > 0
    }
    assert any(row["comm_s"] for row in rows) == (workers + servers > 1)
    for rank in range(workers + servers):
        assert (out / "logs" / f"rank.{rank}.out").is_file()
        # as triton's library has it at the end
        assert "leaked" not in (out / "logs" / f"rank.{rank}.err").read_text()
    assert (out / "snapshots" / "final.safetensors").is_file()
    assert list(out.glob("events.out.tfevents.*"))
    assert tomllib.loads((out / "config.toml").read_text())["mode"] == mode
    _check_costs(out, manifest, summary, servers)
    assert adds_up(summary) and 0 < summary["step_time"]["p50_s"] <= summary["step_time"]["p99_s"]


def _check_costs(out: Path, manifest: dict, summary: dict, servers: int) -> None:
    """Of each process of a job on this host."""
    rows, ranks = summary["processes"], range(manifest["processes"])
    assert [(row["rank"], row["role"]) for row in rows] == [
        (rank, "server" if rank < servers else "worker") for rank in ranks
    ]
    assert all(row["cpu_s"] > 0 and row["peak_rss_mb"] > 50 for row in rows)
    assert sum(row["samples"] or 0 for row in rows) == summary["samples"]
    sent, received = (sum(row[name] for row in rows) for name in ("bytes_sent", "bytes_received"))
    assert sent == received and (sent > 0) == (len(ranks) > 1)
    assert summary["bytes_sent_per_step"] == sent / summary["steps"]
    _check_floors(manifest, summary, servers)
    [(host, known)] = manifest["hosts"].items()
    assert {row["host"] for row in rows} == {host} and known["ranks"] == list(ranks)
    assert known["threads_per_worker"] == manifest["threads_per_worker"]
    assert known["versions"]["torch"] == manifest["versions"]["torch"]
    assert manifest["environment"]["OMP_NUM_THREADS"] == str(manifest["threads_per_worker"])
    assert ("HOROVOD_FUSION_THRESHOLD" in manifest["environment"]) == manifest[
        "backend"
    ].startswith("horovod")
    assert [own["OMP_NUM_THREADS"] for own in manifest["server_environment"]] == ["1"] * servers
    assert len(list(out.glob("metrics.server*.jsonl"))) == servers
    for row in rows[:servers]:
        last = json.loads((out / f"metrics.server{row['rank']}.jsonl").read_text().splitlines()[-1])
        assert (last["queue"], last["waiting"], last["bytes_sent"]) == (0, 0, row["bytes_sent"])


def _check_floors(manifest: dict, summary: dict, servers: int) -> None:
    """No process sends more than its algorithm has to: a worker of a ring 2(n-1)/n of the weights
    in a step (Patarasuk and Yuan, 2009), workers with servers each gradient once, and servers the
    weights once to each of them.
    """
    weights, workers, taken = 4 * manifest["parameters"], manifest["workers"], summary["steps"]
    sent = [row["bytes_sent"] for row in summary["processes"]]
    if not servers:
        assert sent == [2 * (workers - 1) * weights * taken // workers] * workers
        return
    pushed, whole = sum(sent[servers:]), weights * workers * taken
    assert pushed == whole if manifest["compression"] == "none" else 0 < pushed < whole
    # before the first step, and where they may be stale, to be evaluated
    others = 1 + len(summary["evaluations"])
    assert (
        weights * workers * (taken + 1)
        <= sum(sent[:servers])
        <= weights * workers * (taken + others)
    )


def adds_up(summary: dict) -> bool:
    """Whether the parts of a step are its wall time."""
    return (
        abs(sum(summary["step_seconds"].values()) * summary["steps"] / summary["wall_s"] - 1) < 0.01
    )


def until(condition, seconds: float = 100.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


def family(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def ranks_of(process: "subprocess.Popen | Forked") -> dict[int, psutil.Process]:
    if isinstance(process, Forked):
        return process.ranks()
    found = {}
    for child in family(process):
        try:
            rank = child.environ().get("OMPI_COMM_WORLD_RANK")
        except psutil.Error:
            continue
        if rank is not None:
            found[int(rank)] = child
    return found


def make_images(folder: Path, train: int, validation: int, side: int) -> None:
    """An image folder of two classes, so many images in each part of each."""
    for part, images in (("TrainData", train), ("ValidationData", validation)):
        for name in ("a", "b"):
            (folder / part / name).mkdir(parents=True)
            for n in range(images):
                Image.new("RGB", (side, side), (n % 256, 0, 0)).save(
                    folder / part / name / f"{n}.png"
                )


def finish(job: "subprocess.Popen | Forked") -> None:
    """Whatever a test's outcome, nothing of its job is left."""
    if isinstance(job, Forked):
        job.close()
        return
    left = family(job) if job.poll() is None else []
    if job.poll() is None:
        job.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(left, timeout=10)
    kill(alive)
    job.communicate(timeout=20)


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def final_weights(starter, ranks, out, *options):
    done = run(starter, ranks, *JOB, *options, "--out", str(out))
    assert done.returncode == 0, done.stdout
    return load_file(out / "snapshots" / "final.safetensors")
