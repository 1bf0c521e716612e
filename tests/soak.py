"""Trains for a while under random faults, and proves that nothing was lost, doubled or left behind.

    python tests/soak.py --mode ps-async --seconds 600 --kills 20 --seed 1

Ranks, their starter and `launch` are killed and stopped for some seconds; as root the disk is full
for a while, and the network that carries gradients is cut. The seed decides which, when and for how
long. In ps-async and ps-ssp ranks, servers too, come back while the job goes on; a job that ends
goes on with `hvdtrain launch --resume`. Then it trains to the end of the epoch undisturbed, and
this is proved:

- every sample of every epoch counts once, and no push is applied twice: in ps-async and ps-ssp by
  the ledgers of what servers applied, elsewhere by each worker's steps and the samples' digest;
- the weights are those of a run without faults, bit for bit, in the synchronous modes; in the
  others the validation accuracy of the last epochs is within MARGIN of it;
- what is left is the run folder: no process, socket, shared memory, network namespace or temporary
  file.

As root it runs in namespaces of its own, of processes, mounts and network: what is left in there is
the job's.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import psutil
from helpers.counted import Counts, of_pushes, of_steps
from helpers.faults import Fault, begin, plan, processes_of

MARGIN = 0.03  # of the validation accuracy in the modes whose weights depend on who comes first; one of 360 is 0.003
MODES = {"allreduce": 0, "ddp": 0, "ps-sync": 1, "ps-ssp": 1, "ps-async": 1}  # with so many servers
WORKERS = 2
DISK = "160m"  # of the file system that the run folder is on: a dozen snapshots
LAST_EPOCHS = 5  # of which accuracy is the mean
LEAST_EPOCHS = 12  # after which accuracy hardly depends on how far a run is
STALLED_S = 90.0  # without a step and without a fault: something hangs
BACK_S = 10.0  # a fault whose target has not come back for so long is left out
GONE_S = 20.0  # until nothing of a job is left that has ended
INSIDE = "HVDTRAIN_SOAK_INSIDE"
OWN_NAMESPACES = [
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--net",
    "--ipc",
]


@dataclass
class Soak:
    """One run under faults.

    Args:
        run: the folder it makes, on a file system that may be filled.
        train: options of the job.
        options: of launch.
        report: shows a line.
    """

    run: Path
    mode: str
    train: list[str]
    options: list[str]
    report: Callable[[str], None]
    job: subprocess.Popen[bytes] | None = None
    starts: int = 0
    least_written: int = 0  # bytes of metrics, since it was last started: going on cuts them
    parts: list[Path] = field(default_factory=list)  # with the ledgers of each start
    began: float = field(default_factory=time.monotonic)
    late: float = (
        0.0  # seconds by which faults come later than planned: the job took so long to start
    )
    done: dict[str, int] = field(default_factory=dict)  # faults by kind
    wrong: list[str] = field(default_factory=list)

    def begin(self, train: list[str]) -> None:
        """Start the job, or go on with it."""
        self.starts += 1
        self.least_written = self.written()
        self._keep_ledgers()
        resume = ["--resume"] if self.starts > 1 else []
        servers = ["-s", str(MODES[self.mode])] if MODES[self.mode] else []
        words = [
            sys.executable,
            "-m",
            "hvdtrain",
            "launch",
            "-n",
            str(WORKERS),
            *servers,
            *resume,
            *self.options,
        ]
        words += ["--out", str(self.run), "--", *self.train, *train]
        with self.log().open("wb") as log:
            self.job = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def wait(self, epochs: int, what: str) -> None:
        """For the end of so many epochs, which nothing disturbs."""
        assert self.job is not None
        try:
            if self.job.wait(60 + 30 * epochs):
                self.wrong.append(f"{what} failed: {self.said()}")
        except subprocess.TimeoutExpired:
            self.wrong.append(f"{what} does not end")
            self.end()

    def log(self) -> Path:
        return self.run.parent.with_name(f"{self.run.parent.name}.start-{self.starts}.log")

    def said(self) -> str:
        lines = self.log().read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.startswith("hvdtrain: ")), "nothing")

    def _keep_ledgers(self) -> None:
        if found := [*self.run.glob("ledger*.csv"), *self.run.glob("leases*.csv")]:
            part = self.run.parent.parent / f"part-{len(self.parts)}"
            part.mkdir()
            for path in found:
                shutil.move(path, part / path.name)
            self.parts.append(part)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def under(self, faults: list[Fault], seconds: float) -> None:  # noqa: C901
        """Train for so long, or until the run is done, while these faults come; all are over when
        this returns.
        """
        coming, going = list(faults), list[tuple[float, Fault, Callable[[], None]]]()
        last, stepped, missing_since = 0, time.monotonic(), 0.0
        while self.seconds() < seconds + self.late or coming or going:
            for over, fault, undo in [entry for entry in going if entry[0] <= self.seconds()]:
                undo()
                going.remove((over, fault, undo))
            is_full = any(fault.kind == "full" for _, fault, _ in going)
            if self.job is not None and self.job.poll() is not None:
                for entry in [
                    entry for entry in going if entry[1].kind != "full" or self.has_finished()
                ]:
                    entry[2]()  # a process that is stopped cannot end
                    going.remove(entry)
                if self.has_finished():
                    return
                self.report(
                    f"{self.seconds():6.1f} s  ended with exit code {self.job.returncode}: {self.said()}"
                )
                self.gone()
                self.job = None
            if self.job is None and not is_full:  # a person would make room first
                self.begin([])
            while coming and self._is_time(coming[0]) and (undo := begin(coming[0], self.run)):
                fault = coming.pop(0)
                self.late = max(self.late, self.seconds() - fault.at)
                self.report(str(replace(fault, at=self.seconds())))
                self.done[fault.kind] = self.done.get(fault.kind, 0) + 1
                if fault.seconds:
                    going.append((self.seconds() + fault.seconds, fault, undo))
            is_missing = bool(coming) and self._is_time(replace(coming[0], at_start=False))
            missing_since = (missing_since or self.seconds()) if is_missing else 0.0
            if missing_since and self.seconds() - missing_since > BACK_S:
                self.report(
                    f"{self.seconds():6.1f} s  its target is gone for good: left out {coming.pop(0)}"
                )
                missing_since = 0.0
            size = self.written()
            self.least_written = min(self.least_written, size)
            if size != last or going:
                last, stepped = size, time.monotonic()
            if time.monotonic() - stepped > STALLED_S:
                self.wrong.append(
                    f"no step for {STALLED_S:.0f} s at {self.seconds():.0f} s: {self.said()}"
                )
                self.end()
                return
            time.sleep(0.05)

    def _is_time(self, fault: Fault) -> bool:
        """Most faults wait until the job has taken a step since it was started: it might get
        nowhere otherwise.
        """
        return fault.at + self.late <= self.seconds() and (
            fault.at_start or self.written() > self.least_written
        )

    def written(self) -> int:
        return sum(path.stat().st_size for path in self.run.glob("metrics.rank*.jsonl"))

    def has_finished(self) -> bool:
        return (self.run / "summary.json").is_file()

    def stop(self) -> None:
        """Have the job save and leave."""
        assert self.job is not None
        self.job.send_signal(signal.SIGTERM)
        try:
            if (code := self.job.wait(90)) != 143 and not self.has_finished():
                self.report(
                    f"{self.seconds():6.1f} s  asked to leave, it ended with exit code {code}: {self.said()}"
                )
        except subprocess.TimeoutExpired:
            self.wrong.append("still running 90 s after SIGTERM")
            self.end()
        self.gone()

    def finish(self, least: int) -> None:
        """Train to the end of an epoch, of these at the least, undisturbed."""
        epochs = max(1 + last_epoch(self.run), least)
        self.begin(["--epochs", str(epochs)])
        self.wait(epochs, "going on undisturbed")
        self.gone()

    def gone(self) -> None:
        """Nothing of the job is left within GONE_S of its end."""
        deadline = time.monotonic() + GONE_S
        while (left := processes_of(self.run)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            self.wrong.append(
                f"{len(left)} processes left: {[' '.join(p.cmdline()[:6]) for p in left]}"
            )
            self.end()

    def end(self) -> None:
        for process in processes_of(self.run):
            process.kill()
        if self.job:
            self.job.wait()


def last_epoch(run: Path) -> int:
    steps = run / f"metrics.rank{len(list(run.glob('metrics.server*')))}.jsonl"
    lines = steps.read_text().split("\n")[:-1] if steps.is_file() else []
    return json.loads(lines[-1])["epoch"] if lines else 0


def reference(soak: Soak, folder: Path, epochs: int) -> Path:
    """The same run without faults."""
    undisturbed = Soak(folder / "undisturbed" / "run", soak.mode, soak.train, [], soak.report)
    undisturbed.run.parent.mkdir()
    undisturbed.begin(["--epochs", str(epochs)])
    undisturbed.wait(epochs, "the run without faults")
    soak.wrong += undisturbed.wrong
    return undisturbed.run


def accuracy(run: Path) -> float:
    """Of the validation images, the mean over the last epochs: one alone may be 0.02 off."""
    evaluations = json.loads((run / "summary.json").read_text())["evaluations"][-LAST_EPOCHS:]
    return sum(row["val_accuracy"] for row in evaluations) / len(evaluations)


def compare(soak: Soak, other: Path) -> str:
    """How the run's result differs from that of the run without faults, in words."""
    ours, theirs = accuracy(soak.run), accuracy(other)
    said = f"accuracy {ours:.3f} ({theirs:.3f} undisturbed)"
    if soak.mode in ("ps-ssp", "ps-async"):
        if abs(ours - theirs) > MARGIN:
            soak.wrong.append(f"{said} is not within {MARGIN}")
        return said
    from safetensors.torch import load_file

    mine, its = (load_file(run / "snapshots" / "final.safetensors") for run in (soak.run, other))
    if different := sum(int((mine[name] != its[name]).sum()) for name in its):
        soak.wrong.append(f"{different:,} weights differ from those of the run without faults")
    return f"{said}, the same weights" if not different else said


def left_behind(soak: Soak, temporary: Path, is_alone: bool) -> list[str]:
    """What is left of the job that should not be, a few words each.

    Args:
        is_alone: this process is in namespaces of its own: what is there is the job's.
    """
    found = [f"process {' '.join(process.cmdline()[:5])}" for process in processes_of(soak.run)]
    kept = "torchinductor_"  # torch's own cache, which it keeps on purpose
    found += [
        f"temporary file {path}" for path in temporary.iterdir() if not path.name.startswith(kept)
    ]
    launched = soak.run.with_name(f"{soak.run.name}.launch")
    found += [
        f"file {path}"
        for path in launched.iterdir()
        if not path.name.startswith("log") or path.is_dir()
    ]
    if is_alone:
        others = [
            p
            for p in psutil.process_iter()
            if p.pid != os.getpid() and p.status() != psutil.STATUS_ZOMBIE
        ]
        found += [f"process {' '.join(process.cmdline()[:5])}" for process in others]
        found += [f"shared memory {path}" for path in Path("/dev/shm").iterdir()]
        found += [
            f"System V memory {line}"
            for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        ]
        for kind in ("tcp", "tcp6", "udp", "udp6", "unix"):
            sockets = Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
            found += [f"socket {kind} {line.strip()}" for line in sockets]
    return sorted(set(found))


def soak_run(
    folder: Path,
    mode: str,
    seconds: float,
    seed: int,
    counts: dict[str, int],
    compares: bool,
    is_alone: bool,
    report: Callable[[str], None],
) -> tuple[Soak, Counts, str]:
    from hvdtrain.data.find import find_dataset
    from hvdtrain.data.sampling import BatchSampler

    leased = mode in ("ps-ssp", "ps-async")
    train = [
        "--mode",
        mode,
        "--threads",
        "1",
        "--width",
        "0.0625",
        "--epochs",
        "100000",
        "--schedule",
        "constant",
    ]
    train += ["--deterministic", "--timeout", "20s", "--seed", str(seed)]
    train += ["--record"] if leased else ["--snapshot-every", "1s"]
    if leased:  # a rank that is killed comes back, which needs that wire
        train += ["--wire", "zmq"]
        options = ["--respawn"]
    else:
        options = ["--retries", str(min(2, max(0, counts["kill"] - 1)))]
    (folder / "disk").mkdir(exist_ok=True)
    soak = Soak(folder / "disk" / "run", mode, train, options, report)
    ranks = WORKERS + MODES[mode]
    faults = plan(seed, seconds, counts, ranks)
    for fault in faults:
        report(f"planned: {fault}")
    try:
        soak.begin([])
        soak.under(faults, seconds)
        if not soak.wrong:
            soak.stop()
            soak.finish(LEAST_EPOCHS if compares else 1)
        soak._keep_ledgers()
    finally:
        soak.end()
    if not soak.has_finished():
        soak.wrong.append("no summary")
        return soak, Counts(), "no result"
    evaluations = json.loads((soak.run / "summary.json").read_text())["evaluations"]
    digits = find_dataset("digits").train
    sampler = BatchSampler(len(digits), 32, seed, 0, WORKERS)
    if leased:
        counted = of_pushes(soak.parts, soak.run, sampler)
    else:
        counted = of_steps(soak.run, sampler, range(MODES[mode], ranks))
    result = f"accuracy {accuracy(soak.run):.3f}"
    if compares:
        result = compare(soak, reference(soak, folder, evaluations[-1]["epoch"]))
    soak.wrong += counted.faults
    return soak, counted, result


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--mode", type=click.Choice(list(MODES)), required=True)
@click.option(
    "--seconds",
    type=click.FloatRange(5),
    default=600,
    show_default=True,
    help="How long faults come.",
)
# Half as many SIGSTOPs come too, and a fifth as many full disks and cut networks.
@click.option(
    "--kills",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="SIGKILL of a random process.",
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--undisturbed/--no-undisturbed",
    "compares",
    default=True,
    help="Compare with a run without faults.",
)
def main(mode: str, seconds: float, kills: int, seed: int, compares: bool) -> None:
    is_root = os.geteuid() == 0
    if is_root and INSIDE not in os.environ:
        os.execvpe(
            OWN_NAMESPACES[0],
            [*OWN_NAMESPACES, sys.executable, *sys.argv],
            os.environ | {INSIDE: "1"},
        )
    few = -(-kills // 5)
    counts = {"kill": kills, "stop": -(-kills // 2)}
    if is_root:
        counts |= {"full": few} if mode == "allreduce" else {"full": few, "cut": few}
    else:
        click.echo(
            "not root: no full disk, no network cut, and what is left of sockets is not looked at"
        )
    if mode == "allreduce":
        click.echo(
            "links are not among the faults: on one machine Horovod's gradients go through shared memory"
        )
    folder = Path(tempfile.mkdtemp(prefix="hvdtrain-soak-"))
    temporary = folder / "tmp"
    temporary.mkdir()
    # In the ps- modes gradients are to go over the network that is cut, not from process to
    # process.
    os.environ |= {"TMPDIR": str(temporary), "HVDTRAIN_OVER_TCP": "1"}
    if is_root:
        (folder / "disk").mkdir()
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder / "disk")],
            check=True,
        )
    soak, counted, result = soak_run(
        folder, mode, seconds, seed, counts, compares, is_root, click.echo
    )
    soak.wrong += [f"left behind: {what}" for what in left_behind(soak, temporary, is_root)]
    for line in soak.wrong:
        click.echo(f"WRONG: {line}")
    if soak.wrong or counted.lost or counted.doubled or counted.pushed_twice:
        shutil.copytree(soak.run.parent, folder / "kept")
        click.echo(f"{folder} is kept")
    if is_root:
        subprocess.run(["umount", str(folder / "disk")], check=True)
    words = {"kill": "kills", "stop": "stops", "full": "times a full disk", "cut": "cuts"}
    came = ", ".join(f"{soak.done.get(kind, 0)} {words[kind]}" for kind in counts)
    click.echo(
        f"soak {mode}: {seconds:.0f} s, {came}, {soak.starts} starts, {counted.samples:,} samples counted, "
        f"{counted.lost} lost, {counted.doubled} doubled, {counted.pushed_twice} pushes applied twice, "
        f"{result}, {len(soak.wrong)} faults found"
    )
    held = not (soak.wrong or counted.lost or counted.doubled or counted.pushed_twice)
    if held:
        shutil.rmtree(folder)
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
