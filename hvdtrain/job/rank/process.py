"""One rank of a job, from its configuration to its exit code.

Torch is imported when everything that can be checked without it has been checked.
"""

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.system.appending import NO_ROOM
from hvdtrain.base.system.cgroups import usable_cores
from hvdtrain.base.system.locks import unlock_all
from hvdtrain.base.system.memory import importing, keep_memory
from hvdtrain.base.system.own_code import described, own_line
from hvdtrain.base.system.parent import end_with_starter
from hvdtrain.base.system.preempt import EXIT_CODE, Terminated
from hvdtrain.base.system.terminal import Terminal, end_at_once, open_logs
from hvdtrain.base.world.network import use_one_interface
from hvdtrain.base.world.place import (
    World,
    check_is_started,
    naming_left_over,
    read_world,
    workers_on_this_host,
)
from hvdtrain.job.rank.hosts_check import check_hosts
from hvdtrain.job.wire.descriptors import allow_descriptors
from hvdtrain.runs.folder import (
    CONFIG,
    check_free,
    check_writable,
    claim,
    how_to_go_on,
    is_begun,
    last_saved_step,
    wait_for_claim,
)
from hvdtrain.runs.launched import read_launched
from hvdtrain.runs.request import check, check_workers, with_absolute_paths

INTERRUPTED_S = 2.0  # how long an interrupted process has to end in order
# How long ranks that have met wait until they see the first worker's claim, which is there by then.
CLAIM_S = 30.0


def run_rank(config: RunConfig, out: str, resuming: bool = False) -> None:
    """Trains or serves as the rank that the environment names, and leaves a run folder.

    Args:
        config: the configuration of the run.
        out: the run folder; if empty, a folder under runs/, named after the mode and the job.
        resuming: whether to go on with the run in the folder, or to begin it if there is none.

    Raises:
        UsageError: the job cannot run. Nothing was touched.
    """
    here = read_world()
    end_with_starter(here.starter, by_recipe=bool(read_launched()))
    try:
        world = read_world(check(config).servers)
        check_is_started(world)
        use_one_interface(world)
        # The run records the width that is trained.
        config = dataclasses.replace(
            config.for_workers(world.workers), width=config.effective_width
        )
        with naming_left_over(world):
            check_workers(config, world.workers)
        job = _job_id(world)
        folder = Path(out or f"runs/{config.mode}-{job}")
        resumes = resuming and is_begun(folder)
        if world.is_chief and not resumes:
            _check_usable(folder, world, resuming)
        run = _begin(config, world, folder, job, resumes)
    except UsageError:
        # Every rank on a host finds the same fault, and one line is enough. The first rank reports
        # the fault, and its end ends the others. Servers need less than workers do: the first
        # worker reports what servers do not miss. So the first worker waits longer than the first
        # rank, and other workers longer still.
        if here.is_local:
            time.sleep((here.rank > 0) + (here.rank > config.servers))
        raise
    if not run:
        return
    if resuming and not resumes and here.starter == "alone":
        print(f"{folder} has no run to go on with: this begins one", flush=True)
    advice = _advice(config.mode, world)
    if world.is_chief and advice:
        print(advice, flush=True)
    run_to_its_end(run, folder, world)


def _check_usable(folder: Path, world: World, resuming: bool) -> None:
    """Checks that a run can begin in the folder.

    Args:
        folder: the run folder.
        world: where this rank is.
        resuming: whether a run was to go on there.

    Raises:
        UsageError: the folder is in use, or cannot be written.
    """
    try:
        check_free(folder, others_log=not world.is_local)
    except UsageError:
        if resuming and folder.is_dir():
            raise UsageError(
                f"--out {folder} is not a run to go on with: it has no {CONFIG}"
            ) from None
        raise
    check_writable(folder)


def _begin(
    config: RunConfig, world: World, folder: Path, job: str, resumes: bool
) -> Callable[[Terminal], None] | None:
    """Meets the other ranks, finds every fault, and claims the run folder.

    Args:
        config: the configuration of the run.
        world: where this rank is.
        folder: the run folder.
        job: the name of the job: see _job_id.
        resumes: whether the run in the folder goes on.

    Returns:
        What serves or trains; None if the run has finished already.
    """
    allow_descriptors(config, world)
    # A server answers from several threads, and each would start OpenMP threads.
    threads = 1 if world.is_server else _threads_of_worker(config, world)
    set_threads(threads, world.is_server)
    hide_gpus(config, world.is_server)
    keep_memory()  # in all modes alike: see tests/benchmarks/README.md
    with importing():
        from hvdtrain.job.coordination.meeting import Meeting
        from hvdtrain.job.rank.prepare import prepare  # imports torch
        from hvdtrain.job.training import resume

    meeting = None
    store = None
    joins_horovod = (
        world.starts_horovod and modes.declared(config.mode).joins_horovod and not world.elastic
    )
    if world.size > 1 and not joins_horovod:
        with naming_left_over(world):
            meeting = Meeting(world, config.timeout)
        store = meeting.store
        if read_launched() and not world.is_local:
            check_hosts(config, world, folder, store)
    prepared = prepare(config, world, folder, threads, resumes, store)
    if prepared.finished:
        if world.is_chief:
            print(f"{folder} has finished: there is nothing left to do")
        return None
    # The first worker has found every fault that there is, and writes the results.
    if world.is_chief:
        claim(folder, with_absolute_paths(config), world.workers, job, not world.is_local, resumes)
        if resumes:
            resume.prepare_folder(folder, prepared.resumed, range(world.servers, world.size))
    if meeting:
        with naming_left_over(world):
            meeting.wait_until_all_are_ready()
    if world.is_local and not world.is_chief:
        wait_for_claim(folder, job, CLAIM_S if meeting else math.inf)
    return prepared.run


def set_threads(threads: int, is_server: bool) -> None:
    """Sets the environment variables that torch reads when it is imported."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["MKL_NUM_THREADS"] = str(threads)
    if "OMP_WAIT_POLICY" not in os.environ:
        # A thread of libgomp that waits for other threads spins before it sleeps, 300,000 times by
        # default. Where other work has one of the cores, the spinning thread keeps the last core
        # from the thread that it waits for.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Huge pages suit a worker's large tensors. Between a server's buckets they would leave gaps.
    if not is_server:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def hide_gpus(config: RunConfig, is_server: bool) -> None:
    """Hides all GPUs from a rank that computes on the CPU.

    This must be called before torch is asked for GPUs, since torch keeps the answer.

    Torch may use a GPU just because there is one. PowerSGD's hook waits for a GPU after each step,
    wherever its tensors are, and a question for a GPU's name takes memory on the GPU.
    """
    if is_server or config.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def run_to_its_end(run: Callable[[Terminal], None], folder: Path, world: World) -> None:
    """Serves or trains, with logs in the run folder, and ends this process.

    Args:
        run: serves or trains.
        folder: the run folder.
        world: where this rank is.
    """
    terminal = open_logs(folder, world.rank)
    # Only a process without a starter tells the user how to go on: a starter tells it for its job.
    is_alone = world.starter == "alone"

    def end(message: str, code: int) -> NoReturn:
        with contextlib.suppress(OSError):
            print(f"hvdtrain: {message}", file=terminal.err, flush=True)
        unlock_all()
        # Not sys.exit: an orderly exit waits for ranks that may never come.
        os._exit(code)

    def end_interrupted() -> NoReturn:
        advice = f": {how_to_go_on(folder, 'train')}" if is_alone else ""
        end(f"interrupted{advice}", 130)

    try:
        _end_when_interrupted(end_interrupted)
        run(terminal)
    except Terminated:
        unlock_all()
        os._exit(EXIT_CODE)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk, which may be what went wrong
            traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            end_interrupted()
        if isinstance(error, SystemExit) and not own_line(error):  # rich's, when it cannot print
            message = f"rank {world.rank} ended: nobody reads what it prints"
        else:
            log = folder / "logs" / f"rank.{world.rank}.err"
            message = f"rank {world.rank} failed: {_reason(error, folder)} (see {log})"
            if is_alone and last_saved_step(folder) is not None:
                message += f"; {how_to_go_on(folder, 'train')}"
        end(message, getattr(error, "exit_code", 1))
    unlock_all()
    end_at_once()


def _reason(error: BaseException, folder: Path) -> str:
    """Returns the reason of an error, in one line.

    Args:
        error: what was raised.
        folder: the run folder, to be named if a disk is full and the error names no file.
    """
    line = own_line(error)
    if line:
        return f"{line} raised {described(error)}"
    reason = str(error)
    if isinstance(error, OSError):
        if error.errno in NO_ROOM:
            reason = f"{error.strerror}: make room on the disk of {error.filename or folder}"
        elif not error.errno and error.strerror:
            reason = error.strerror
    first_line = reason.strip().split("\n")[0]
    return first_line or type(error).__name__


def _end_when_interrupted(end: Callable[[], NoReturn]) -> None:
    """Lets Ctrl-C end this process within INTERRUPTED_S.

    A KeyboardInterrupt alone may not end it. Python drops a KeyboardInterrupt that is raised in a
    callback, such as an import's for its locks. And TensorBoard's writer, if it is interrupted
    while it hands something to its thread, is then waited for without end.

    Args:
        end: ends the process at once.
    """
    # In the background of a shell SIGINT is ignored.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def interrupt(*_: object) -> NoReturn:
        late = threading.Timer(INTERRUPTED_S, end)
        late.daemon = True
        late.start()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def _advice(mode: str, world: World) -> str:
    """Returns advice for a user who started ranks this way; empty if there is none."""
    if mode != "single" and world.starter == "alone":
        return f"one worker: `hvdtrain launch -n 2 -- --mode {mode} …` and horovodrun start several"
    if mode == "allreduce" and world.starter == "mpirun" and not world.is_local:
        return (
            "MPI carries the messages between hosts: over TCP Gloo is faster, "
            "which `horovodrun --gloo` takes"
        )
    return ""


def _threads_of_worker(config: RunConfig, world: World) -> int:
    """Returns how many threads a worker on this host computes with.

    By default the workers of a host share its cores evenly. No cores are set aside for servers:
    their processor time is a cost of their mode.
    """
    workers = max(1, workers_on_this_host(world))
    return config.threads_of(usable_cores() / workers)


def _job_id(world: World) -> str:
    """Returns a name for the job that all its ranks know without having met."""
    env = os.environ
    match world.starter:
        case "alone":
            return time.strftime("%Y%m%d-%H%M%S")
        case "mpirun":
            namespace, *_ = env.get("PMIX_NAMESPACE", "").split("@")
            return namespace.split("-")[-1]
        case "horovodrun":
            return env.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
        case "srun":
            return f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
        case "env":
            return env.get("MASTER_PORT", "")
        case _:
            return str(os.getppid())
