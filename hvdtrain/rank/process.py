"""One rank of a job, from its configuration to its exit code. Torch is imported when all that can be checked is."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hvdtrain import modes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.rank.hosts_check import check_hosts
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
from hvdtrain.system.appending import NO_ROOM
from hvdtrain.system.cgroups import usable_cores
from hvdtrain.system.locks import unlock_all
from hvdtrain.system.memory import importing, keep_memory
from hvdtrain.system.parent import end_with_starter
from hvdtrain.system.preempt import EXIT_CODE, Terminated
from hvdtrain.system.terminal import Terminal, end_at_once, open_logs
from hvdtrain.world.network import use_one_interface
from hvdtrain.world.place import World, read_world

INTERRUPTED_S = 2.0  # that an interrupted process has to leave in order


def run_rank(config: RunConfig, out: str, resuming: bool = False) -> None:
    """Train as the rank that the environment says, and leave a run folder.

    Args:
        out: the run folder; by default one under runs/, named after the mode and the job.
        resuming: go on with the run that is there, or begin it where there is none.

    Raises:
        UsageError: before anything was touched.
    """
    here = read_world()
    end_with_starter(here.starter, by_recipe=bool(read_launched()))
    try:
        world = read_world(check(config).servers)
        use_one_interface(world)
        config = dataclasses.replace(config.for_workers(world.workers), width=config.taken_width)  # which is recorded
        check_workers(config, world.workers)
        job = _job_id(world)
        folder = Path(out or f"runs/{config.mode}-{job}")
        resumes = resuming and is_begun(folder)
        if world.is_chief and not resumes:
            _check_usable(folder, world, resuming)
        run = _begin(config, world, folder, job, resumes)
    except UsageError:
        # Every rank on a host finds the same fault, and one line is enough: the first rank's, whose end is the end
        # of the others. Servers need less than workers do; what they do not miss, the first worker reports.
        if here.is_local:
            time.sleep((here.rank > 0) + (here.rank > config.servers))
        raise
    if not run:
        return
    if resuming and not resumes and here.starter == "alone":
        print(f"{folder} has no run to go on with: this begins one", flush=True)
    if world.is_chief and (advice := _advice(config.mode, world)):
        print(advice, flush=True)
    run_to_its_end(run, folder, world)


def _check_usable(folder: Path, world: World, resuming: bool) -> None:
    """UsageError where no run can begin in the folder.

    Args:
        resuming: one was to go on.
    """
    try:
        check_free(folder, others_log=not world.is_local)
    except UsageError:
        if resuming and folder.is_dir():
            raise UsageError(f"--out {folder} is not a run to go on with: it has no {CONFIG}") from None
        raise
    check_writable(folder)


def _begin(config: RunConfig, world: World, folder: Path, job: str, resumes: bool) -> Callable[[Terminal], None] | None:
    """Meet the other ranks, find every fault, and claim the run folder; what is to be done then, if anything is."""
    # A server answers from several threads, each of which would open an OpenMP team of its own.
    threads = 1 if world.is_server else config.threads or _share_of_cores(world)
    set_threads(threads, world.is_server)
    if world.servers:  # a ring's steps became 1.06 to 1.17 times as long: VGG-F at width 0.5, two workers, n = 3
        keep_memory()
    with importing():
        from hvdtrain.coordination.meeting import Meeting
        from hvdtrain.rank import work  # imports torch
        from hvdtrain.training import resume

    meeting = None
    joins_horovod = world.starts_horovod and modes.declared(config.mode).joins_horovod and not world.elastic
    if world.size > 1 and not joins_horovod:
        meeting = Meeting(world, config.timeout)
        if read_launched() and not world.is_local:
            check_hosts(config, world, folder, meeting.store)
    prepared = work.prepare(config, world, folder, threads, resumes, meeting.store if meeting else None)
    if prepared.finished:
        if world.is_chief:
            print(f"{folder} has finished: there is nothing left to do")
        return None
    if world.is_chief:  # which finds every fault there is, and writes the results
        claim(folder, with_absolute_paths(config), world.workers, job, not world.is_local, resumes)
        if resumes:
            resume.prepare_folder(folder, prepared.resumed, range(world.servers, world.size))
    if meeting:
        meeting.wait_until_all_are_ready()
    if world.is_local and not world.is_chief:
        wait_for_claim(folder, job, config.timeout)
    return prepared.run


def set_threads(threads: int, is_server: bool) -> None:
    """Set what torch reads when it is imported."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    if "OMP_WAIT_POLICY" not in os.environ:
        # Before a thread of libgomp sleeps that waits for others it spins, 300,000 times by default: where other work
        # has one of the cores, the thread that spins keeps the one that is waited for from the other.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if not is_server:  # it has large tensors; a server has buckets, which huge pages would leave gaps between
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def run_to_its_end(run: Callable[[Terminal], None], folder: Path, world: World) -> None:
    """Serve or train, with logs in the run folder, and end this process as that came out."""
    terminal = open_logs(folder, world.rank)
    alone = world.starter == "alone"  # otherwise the starter's end is the user's to act on

    def end(message: str, code: int) -> NoReturn:
        with contextlib.suppress(OSError):
            print(f"hvdtrain: {message}", file=terminal.err, flush=True)
        unlock_all()
        # Not sys.exit: leaving politely means waiting for ranks that may never come.
        os._exit(code)

    def end_interrupted() -> NoReturn:
        end(f"interrupted: {how_to_go_on(folder, 'train')}" if alone else "interrupted", 130)

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
        said = error.strerror if isinstance(error, OSError) and not error.errno and error.strerror else str(error)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            said = f"{error.strerror}: make room on the disk of {error.filename or folder}"
        line = said.strip().split("\n")[0] or type(error).__name__
        message = f"rank {world.rank} failed: {line} (see {folder / 'logs' / f'rank.{world.rank}.err'})"
        if isinstance(error, SystemExit):  # rich's, when it cannot print
            message = f"rank {world.rank} ended: nobody reads what it prints"
        elif alone and last_saved_step(folder) is not None:
            message += f"; {how_to_go_on(folder, 'train')}"
        end(message, getattr(error, "exit_code", 1))
    unlock_all()
    end_at_once()


def _end_when_interrupted(end: Callable[[], NoReturn]) -> None:
    """Have Ctrl-C end this process within INTERRUPTED_S. A KeyboardInterrupt alone may not: Python drops one that is
    raised in a callback, as those that an import leaves for its locks, and TensorBoard's writer, interrupted as it
    hands something on, is then waited for without end.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, in the background of a shell
        return

    def interrupt(*_: object) -> NoReturn:
        late = threading.Timer(INTERRUPTED_S, end)
        late.daemon = True
        late.start()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def _advice(mode: str, world: World) -> str:
    """What a user who started ranks in this way may not know, or empty."""
    if mode != "single" and world.starter == "alone":
        return f"one worker: `hvdtrain launch -n 2 -- --mode {mode} …` and horovodrun start several"
    if mode == "allreduce" and world.starter == "mpirun" and not world.is_local:
        return "MPI carries the messages between hosts: over TCP Gloo is faster, which `horovodrun --gloo` takes"
    return ""


def _share_of_cores(world: World) -> int:
    """As many threads as let all workers of this host have their own cores. On several hosts nobody knows which of the
    ranks here are servers, and all count as workers.
    """
    workers_here = world.local_size - (world.servers if world.is_local else 0)
    return max(1, int(usable_cores() // max(1, workers_here)))


def _job_id(world: World) -> str:
    """A name for the job that all its ranks know without having met."""
    env = os.environ.get
    if world.starter == "alone":
        return time.strftime("%Y%m%d-%H%M%S")
    return {
        "mpirun": env("PMIX_NAMESPACE", "").split("@")[0].split("-")[-1],
        "horovodrun": env("HOROVOD_GLOO_RENDEZVOUS_PORT", ""),
        "srun": f"{env('SLURM_JOB_ID')}.{env('SLURM_STEP_ID')}",
        "env": env("MASTER_PORT", ""),
    }.get(world.starter, str(os.getppid()))
