"""A worker whose loop is the user's own script: it connects to the others, runs it, and leaves the
results.
"""

import contextlib
import dataclasses
import hashlib
import json
import runpy
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.distributed import Store

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.numerics.optimizers import put_together
from hvdtrain.base.numerics.slowdown import Slowdown
from hvdtrain.base.system.deadline import end_process
from hvdtrain.base.system.own_code import described, is_of, line_in
from hvdtrain.base.system.terminal import Terminal
from hvdtrain.job.buckets.local_rounds import LocalRounds
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.rank.alike import own_host, write_manifest
from hvdtrain.job.rank.results import finish
from hvdtrain.job.rank.summary import HostLoads, Measured
from hvdtrain.job.recording.manifest import weights_hash
from hvdtrain.job.recording.metrics import Recorder
from hvdtrain.job.recording.snapshot import write_tensors
from hvdtrain.job.script import handle
from hvdtrain.job.script.gradients import (
    Averaged,
    Bucketed,
    Carried,
    Gradients,
    InBackward,
    InRounds,
    buckets_for_averages,
    call_through,
)
from hvdtrain.job.script.optimizer import HandedIn, take_over
from hvdtrain.job.script.sampler import WorkerSampler
from hvdtrain.job.script.steps import IN_FUNCTION, ScriptStopped, Steps
from hvdtrain.job.training import device
from hvdtrain.job.training.evaluation import average_buffers
from hvdtrain.job.training.loop import Training
from hvdtrain.job.training.progress import TrainingProgress
from hvdtrain.job.training.saver import Saver
from hvdtrain.job.wire.heartbeat import wait_for_ranks, while_served
from hvdtrain.runs.live import warm_up_s
from hvdtrain.runs.scripts import hash_of_script

INITIAL = "snapshots/initial.safetensors"  # of the run folder
METRICS_EVERY_S = 0.5  # between two times at which a worker writes the metrics of its steps
LOOK_EVERY_S = 0.5  # between two looks for workers that have ended


def run_as_worker(job: Job, terminal: Terminal) -> None:
    """Runs the script as a worker. The worker that leads writes the manifest and the summary.

    Raises:
        Failure: the script failed, or did not train.
    """
    session = WorkerSession(job, terminal)
    handle.open_session(session)
    try:
        with _on_screen(terminal) if job.world.is_chief else contextlib.nullcontext():
            _run(job.config, terminal)
    finally:
        session.write_metrics()
    if not session.sync:
        raise Failure(f"{job.config.script} never called hvdtrain.init")
    if not session.steps:
        raise Failure(f"{job.config.script} never called prepare: it trained nothing")
    if not session.steps.taken:
        raise Failure(f"{job.config.script} never called optimizer.step: it trained nothing")
    session.leave_results()


def _run(config: RunConfig, terminal: Terminal) -> None:
    """Runs the script until it ends, or is stopped.

    Raises:
        Failure: it raised, or ended with an exit code; the line says where.
    """
    script = Path(config.script)
    sys.argv = [config.script, *shlex.split(config.script_args)]
    sys.path.insert(0, str(script.parent.absolute()))
    try:
        runpy.run_path(config.script, run_name="__main__")
    except ScriptStopped:
        return
    except SystemExit as error:
        failure = _failure_of_exit(script, error.code)
        if failure:
            raise failure from None
    except (Failure, UsageError) as error:
        raise Failure(f"{script.name}{_line_in(script, error)}: {error}") from error
    except Exception as error:
        _show_traceback(script, error, terminal.err)
        raise Failure(
            f"{script.name}{_line_in(script, error)} raised {described(error)}"
        ) from error


def _failure_of_exit(script: Path, code: Any) -> Failure | None:
    """Returns what the script's sys.exit(code) stands for; None where it has not failed.

    As Python does it, the process ends with a number as its exit code, and else with 1.
    """
    if code in (None, 0):
        return None
    if not isinstance(code, int):
        return Failure(f"{script.name} ended: {code}")
    failure = Failure(f"{script.name} ended with exit code {code}")
    failure.exit_code = code % 256 or 1
    return failure


def _line_in(script: Path, error: BaseException) -> str:
    """Returns the last line of the script in the traceback, as `, line 7`."""
    number = line_in(script, error)
    return f", line {number}" if number else ""


def _show_traceback(script: Path, error: Exception, out: TextIO) -> None:
    """Prints the traceback from the script's own frames on.

    Of a script that could not be compiled there are none, and the error alone is shown.
    """
    frames = error.__traceback__
    while frames and not is_of(script, frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames, file=out)
    out.flush()


@contextlib.contextmanager
def _on_screen(terminal: Terminal) -> Iterator[None]:
    """Shows what is printed in the block on the user's terminal too, beside the logs."""
    both: Any = (_Both(sys.stdout, terminal.out), _Both(sys.stderr, terminal.err))
    with contextlib.redirect_stdout(both[0]), contextlib.redirect_stderr(both[1]):
        yield


def uneven_batch(batch_size: int, workers: int) -> str:
    """Returns a line for a global batch that the workers cannot share evenly."""
    equal = batch_size // workers
    fitting = f"batch_size={equal * workers or workers} divides evenly"
    return (
        f"hvdtrain.init(batch_size={batch_size}) is not a multiple of {workers} workers: each step "
        f"counts as {batch_size} samples, also if every worker trains on {equal}; {fitting}"
    )


class _Both:
    """A stream that writes to two."""

    def __init__(self, log: TextIO, screen: TextIO) -> None:
        self._log = log
        self._screen = screen

    def write(self, text: str) -> int:
        self._screen.write(text)
        return self._log.write(text)

    def flush(self) -> None:
        self._screen.flush()
        self._log.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class WorkerSession:
    """A worker, as the script's ScriptJob knows it: see job.script.handle.Session.

    Args:
        job: the job as this rank knows it.
        terminal: the user's.
    """

    def __init__(self, job: Job, terminal: Terminal) -> None:
        self.job = job
        self.terminal = terminal
        world = job.world
        self.worker = world.worker
        self.workers = world.workers
        self.local_rank = world.worker if world.is_local else world.local_rank
        self.mode = job.config.mode
        self.seed = job.config.seed
        self.device = job.device
        self.sync: Any = None
        self.steps: Steps | None = None
        self._models: list[nn.Module] = []
        self._samplers: list[tuple[WorkerSampler, int]] = []  # each, and what was counted of it
        self._has_finished = False
        self._functions = 0  # how many functions that all workers call together were called
        self._is_in_function = False
        self._counted = 0.0

    # What the script calls

    def connect(self, batch_size: int | None, early: bool) -> None:
        self.batch_size = batch_size
        self.early = early
        self.sync = modes.load(self.mode).connect(self.job)
        self.device = device.take_gpu(self.job, self.sync.group)
        self.job = dataclasses.replace(self.job, device=self.device)
        self.in_lockstep = modes.declared(self.mode).lockstep
        if batch_size and batch_size % self.workers:
            self.tell(uneven_batch(batch_size, self.workers))
        if self.in_lockstep and self.workers > 1:
            threading.Thread(target=self._watch, daemon=True, name="ends").start()

    def prepare(self, models: list[nn.Module], handed_in: HandedIn) -> None:
        self._models = models
        self._handed_in = handed_in
        names = _names(models, handed_in)
        for name, parameter in zip(names, handed_in.parameters, strict=True):
            _check_parameter(name, parameter, self.device)
        self._check_alike(handed_in, names)
        config = dataclasses.replace(self.job.config, **handed_in.options())
        self.job = dataclasses.replace(self.job, config=config)
        holder = nn.ParameterList(handed_in.parameters)
        state = handed_in.state()
        gradients = self._exchange(models, handed_in, holder, names)
        if state and not gradients.updates_here:
            self.sync.restore(0, state)
        gradients.own_step = take_over(handed_in.optimizer, self._step, self._synchronize)
        if self.job.config.deterministic and self.worker == 0:  # for `verify`, to compare with
            initial = self.job.folder / INITIAL
            write_tensors(initial, self._whole_model().state_dict())
        self._begin(gradients)

    def _whole_model(self) -> nn.Module:
        return self._models[0] if len(self._models) == 1 else nn.ModuleList(self._models)

    def _exchange(
        self,
        models: list[nn.Module],
        handed_in: HandedIn,
        holder: nn.ParameterList,
        names: list[str],
    ) -> Gradients:
        """Connects models and optimizer with the mode's exchange."""
        sync = self.sync
        outside = _outside(models, handed_in)
        everything = nn.ModuleList([*models, outside])
        if isinstance(sync, LocalRounds):
            sync.inner.share_weights(everything)
            in_rounds = InRounds(sync)
            sync.prepare(holder)
            self._share_buffers(everything)
            return in_rounds
        if self.mode == "ddp":
            _check_for_ddp(models, outside)
        sync.share_weights(everything)
        config = self.job.config
        borders = handed_in.borders()
        if self.mode == "allreduce":
            config, borders = buckets_for_averages(config, handed_in)
        sync.exchange_for(config, borders)
        if self.mode == "ddp":
            call_through(models[0], sync.prepare(models[0]))
            return InBackward(sync)
        if self.mode == "single":
            sync.prepare(everything)
            return InBackward(sync)
        kind: type[Bucketed] = Averaged if self.mode == "allreduce" else Carried
        gradients = kind(sync, holder, names, handed_in, self.tell)
        gradients.may_be_early = self.early
        self._share_buffers(everything)
        return gradients

    def _share_buffers(self, everything: nn.Module) -> None:
        """Gives all workers the first one's buffers, and what is not trained, which servers lack."""
        if not modes.declared(self.mode).has_servers:  # workers have shared all that there is
            return
        trained = {id(p) for p in self._handed_in.parameters}
        tensors = [
            tensor
            for tensor in (*everything.parameters(), *everything.buffers())
            if id(tensor) not in trained
        ]
        if not tensors:
            return
        own = torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])
        shared = self.sync.group.sum(own if self.worker == 0 else torch.zeros_like(own))
        parts = shared.split([tensor.numel() for tensor in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _check_alike(self, handed_in: HandedIn, names: list[str]) -> None:
        """Checks that all workers have the same parameters, in the same order.

        Raises:
            Failure: some have others than the first worker.
        """
        group = self.sync.group
        shapes = [
            f"{name} {list(p.shape)}" for name, p in zip(names, handed_in.parameters, strict=True)
        ]
        own = {"shapes": shapes, "groups": handed_in.borders()}
        digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
        of_workers = group.gather_to_first(digest)
        if not group.any(len(set(of_workers.values())) > 1):
            return
        of_workers = group.gather_to_first(own)
        problems = []
        if of_workers:
            first = of_workers[min(of_workers)]
            problems = [_difference(worker, first, its) for worker, its in of_workers.items()]
        raise Failure(group.sentence(next(filter(None, problems), "")))

    def _begin(self, gradients: Gradients) -> None:
        job, config = self.job, self.job.config
        self._write_manifest()
        self.recorder = Recorder(job.folder, job.world.rank, False, at_once=False)
        self.slowdown = Slowdown(config.slow, job.world.worker, config.seed)
        # Without a bar, which the script's own output would break.
        self.progress = TrainingProgress(self.terminal.out, job.steps, False, 0, self.workers)
        if job.world.is_chief:
            self.progress.lead()
        self.sync.report = self.progress.print
        outside = _outside(self._models, self._handed_in)
        trained = nn.ModuleList([*self._models, outside]) if len(outside) else self._whole_model()
        self.steps = Steps(
            job, self.sync, gradients, trained, self.recorder, self.slowdown, self._count_samples
        )
        for model in self._models:
            self.steps.watch(model)
        self.host_loads = HostLoads(self.sync)
        threading.Thread(target=self._write_regularly, daemon=True, name="metrics").start()
        self.steps.begin()

    def _write_manifest(self) -> None:
        """Has the first worker write the manifest, if all have the same script and weights."""
        job, config = self.job, self.job.config
        script = Path(config.script)
        everything = nn.ModuleList(self._models)
        found = {
            "code": hash_of_script(config),
            "weights": weights_hash(everything),
            "images": None,
            "host": own_host(job),
        }
        seen = {
            "dataset_hash": None,
            "image_size": 0,
            "classes": 0,
            "train_samples": 0,
            "validation_samples": 0,
            "initial_weights": f"blake2b:{found['weights']}",
            "model_hash": found["code"],
            "bad_images": None,
        }
        told = {
            "model": script.name,
            "dataset": "its own data",
            "script": script.name,
            "script_args": config.script_args,
            "global_batch": self.batch_size or 0,
            "schedule": "the script's",
            "augment": "the script's",
        }
        write_manifest(job, self.sync, everything, found, seen, self.terminal, told=told)

    def set_accumulating(self, accumulating: bool) -> None:
        if self.steps:
            self.steps.gradients.set_accumulating(accumulating)

    def _step(self) -> None:
        assert self.steps
        self._handed_in.check_unchanged()
        self.steps.take()

    def _synchronize(self) -> None:
        assert self.steps
        self.steps.synchronize()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        with self._together():
            return self.sync.group.sum(values)  # type: ignore[no-any-return]

    def gather(self, value: Any) -> list[Any]:
        with self._together():
            of_workers = self.sync.group.gather_to_first(value)
        return [of_workers[worker] for worker in sorted(of_workers)]

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Has the block, a function that all workers call together, begin on all of them.

        In lockstep the function itself waits for the others, and `_watch` notices if one of them
        will not come.
        """
        if not self.steps or self.workers == 1:
            yield
            return
        self._functions += 1
        if self.in_lockstep:
            with while_served():
                waiting = f"{self._functions} {self.steps.begun}"
                self.sync.group.store.set(_waiting_of(self.worker), waiting)
        self._is_in_function = True
        self.steps.wait_in_function()
        yield
        self._is_in_function = False

    def average_buffers(self) -> None:
        with self._together():
            average_buffers(nn.ModuleList(self._models), self.sync)

    def refresh(self) -> None:
        if not self.steps:
            return
        if self.in_lockstep:  # where it mostly waits for nobody
            self.sync.refresh()
            return
        with self._together():
            self.sync.refresh()

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        assert self.steps
        if self.steps.gradients.updates_here:
            return self._handed_in.state()
        elements = sum(p.numel() for p in self._handed_in.parameters)
        return put_together(self.sync.optimizer_parts(), elements)

    def note_sampler(self, sampler: WorkerSampler) -> None:
        self._samplers.append((sampler, 0))

    def _count_samples(self) -> int:
        """Returns how many samples this worker has trained on since the last call."""
        if self.batch_size:
            before = int(self._counted)
            self._counted += self.batch_size / self.workers
            return int(self._counted) - before
        counted = sum(sampler.taken - before for sampler, before in self._samplers)
        self._samplers = [(sampler, sampler.taken) for sampler, _ in self._samplers]
        if not self._samplers and self.job.config.sprint:
            raise Failure(
                "samples/s need the samples of a step: give hvdtrain.init(batch_size=N), over all "
                "workers, or use job.sampler(dataset)"
            )
        return counted

    def report(self, figures: dict[str, float]) -> None:
        if not self.steps:
            return
        if not self.steps.may_stop_at(figures):
            self.steps.report(figures)
            return
        with self._together():
            self.steps.report(figures)

    def finish(self) -> None:
        if self._has_finished or not self.steps:
            return
        if self.job.config.sprint and not self.in_lockstep:
            self.steps.stop_all()
        self._end_training()
        if self.steps.is_stopped:
            raise ScriptStopped

    def _end_training(self) -> None:
        """Has all workers end training together, with the newest weights."""
        assert self.steps
        self._has_finished = True
        self._agree_on_end()
        self.steps.end()
        self.sync.refresh()
        self.recorder.flush()  # of the last pushes, which are answered now
        self.steps.is_over = True
        self.processor_s = self.steps.processor.seconds()

    # Ends of scripts

    def _agree_on_end(self) -> None:
        """Checks in lockstep that all workers have taken as many steps.

        Raises:
            Failure: they have not.
        """
        assert self.steps
        if not self.in_lockstep or self.workers == 1:
            return
        store = self.sync.group.store
        with while_served():
            store.set(_end_of(self.worker), f"{self._functions} {self.steps.taken}")
        first = self.job.world.servers
        keys = {first + worker: _end_of(worker) for worker in range(self.workers)}
        wait_for_ranks(store, keys, self.job.config.timeout, self.job.world.rank)
        taken = [_read_pair(store, key)[1] for key in keys.values()]
        if len(set(taken)) > 1:
            raise Failure(_unequal(taken.index(min(taken)), min(taken), max(taken)))

    def _watch(self) -> None:
        """Ends this process when it waits for a step of a worker that will not take it."""
        store = self.sync.group.store.clone()
        others = [worker for worker in range(self.workers) if worker != self.worker]
        with contextlib.suppress(RuntimeError):  # nobody serves the store any more
            while not self._has_finished:
                time.sleep(LOOK_EVERY_S)
                for worker in others:
                    why = self._why_left_alone(store, worker)
                    if why:
                        self.write_metrics()
                        end_process(f"rank {self.job.world.rank} failed: {why}")

    def _why_left_alone(self, store: Store, worker: int) -> str:
        """Returns why another worker does not come to where this one waits; empty if it may come."""
        if not self.steps:
            return ""
        end = _end_of(worker)
        has_ended = store.check([end])
        functions, taken = _read_pair(store, end) if has_ended else (0, 0)
        if has_ended and self._is_in_function and functions < self._functions:
            return _ended(worker, taken)
        if not self.steps.is_within_step:
            return ""
        begun = self.steps.begun
        if has_ended and taken < begun:
            return _unequal(worker, taken, begun)
        waiting = _waiting_of(worker)
        if isinstance(self.steps.gradients, InRounds) or not store.check([waiting]):
            return ""
        function, begun_there = _read_pair(store, waiting)
        # The other worker is still in that function, since this one has not called it yet.
        if begun_there < begun and function > self._functions:
            return _not_called(worker, begun_there, begun)
        return ""

    def _write_regularly(self) -> None:
        """Writes metrics now and then, so that they are there where a script hangs or is killed."""
        try:
            while True:
                time.sleep(METRICS_EVERY_S)
                self.write_metrics()
        except OSError:  # which the script's thread meets with its next line
            self.recorder.lines.at_once = True

    def write_metrics(self) -> None:
        """Writes the metrics of all steps so far, however the script has ended."""
        if self.steps:
            try:
                self.steps.record()
            finally:
                self.recorder.lines.write()

    def tell(self, line: str) -> None:
        """Shows the user a line, where this is the worker that leads."""
        if self.sync.group.leads:
            print(f"hvdtrain: {line}", file=self.terminal.err, flush=True)

    def leave_results(self) -> None:
        """Writes what the script came to, and leaves the others. All workers call this together."""
        assert self.steps
        if self.job.config.sprint:
            self._end_sprint()
        else:
            if not self._has_finished:
                self._end_training()
            self._check_reported()
        self.progress.close()
        self.recorder.close()
        model = self._whole_model()
        saver = Saver(self.job, model, self.sync, self.recorder, 0, False, self.tell, self.slowdown)
        training = Training(
            self.job,
            model,
            model,
            self.sync,
            self.recorder,
            self.progress,
            saver,
            self.steps.history,
            self.slowdown,
        )
        finish(training, Measured(0, self.processor_s, self.host_loads), None)

    def _end_sprint(self) -> None:
        """Ends a sprint whose script was stopped, or has ended.

        Raises:
            Failure: the script ended before its speed was measured.
        """
        assert self.steps
        if not self.in_lockstep and not self._has_finished:
            self.steps.end()
        self._check_measured()
        self._has_finished = True
        self.processor_s = self.steps.processor.seconds()

    def _check_measured(self) -> None:
        """Checks that the script went on after the warm-up of its sprint.

        Raises:
            Failure: it did not.
        """
        assert self.steps
        config = self.job.config
        history = self.steps.history
        if not history.warm_steps or history.wall_s <= history.warm_s:
            least_s = warm_up_s(config.sprint) + config.sprint
            raise Failure(
                f"{Path(config.script).name} ended before its speed was measured: have it train for "
                f"{least_s:.1f} s or longer, with more epochs for example, or give a shorter --sprint"
            )

    def _check_reported(self) -> None:
        """Checks that the script has reported what it is to reach.

        Raises:
            Failure: it has not.
        """
        assert self.steps
        config = self.job.config
        if config.stop_at_target and not self.steps.history.reports:
            other = "accuracy" if config.target_loss else "loss"
            raise Failure(
                f"{Path(config.script).name} never called job.report({config.target_of}=…), whose target is "
                f"awaited: call it in the loop, on all workers, or give --target-{other}"
            )


def _names(models: list[nn.Module], handed_in: HandedIn) -> list[str]:
    """Returns a name for each parameter of the optimizer."""
    found: dict[int, str] = {}
    for number, model in enumerate(models):
        prefix = f"model {number}: " if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            found.setdefault(id(parameter), prefix + name)
    return [
        found.get(id(parameter), f"parameter {number} of the optimizer")
        for number, parameter in enumerate(handed_in.parameters)
    ]


def _outside(models: list[nn.Module], handed_in: HandedIn) -> nn.ParameterList:
    """Returns the optimizer's parameters that are in none of the models."""
    inside = {id(parameter) for model in models for parameter in model.parameters()}
    return nn.ParameterList([p for p in handed_in.parameters if id(p) not in inside])


def _check_for_ddp(models: list[nn.Module], outside: nn.ParameterList) -> None:
    """Checks that torch's wrapper of one model averages all gradients.

    Raises:
        Failure: it would not.
    """
    if len(models) > 1:
        raise Failure("--mode ddp takes one model: torch wraps each by itself")
    if len(outside):
        raise Failure(
            "--mode ddp: the optimizer has a parameter that is in no model, and torch averages "
            "the gradients of the model alone"
        )


def _check_parameter(name: str, parameter: torch.Tensor, on: torch.device) -> None:
    """Checks that a parameter can be exchanged.

    Raises:
        Failure: it cannot.
    """
    if parameter.dtype != torch.float32:
        kind = str(parameter.dtype).removeprefix("torch.")
        raise Failure(f"{name} is {kind}: weights are float32 here, and autocast computes in bf16")
    if parameter.layout != torch.strided:
        raise Failure(f"{name} is no dense tensor")
    if parameter.device.type != on.type:
        raise Failure(
            f"{name} is on {parameter.device}, and this worker computes on {on}: move the model "
            "with model.to(job.device) before its optimizer is made"
        )


def _difference(worker: int, first: dict[str, Any], own: dict[str, Any]) -> str:
    """Returns how a worker's parameters differ from the first one's; empty where they do not."""
    ours, theirs = first["shapes"], own["shapes"]
    if len(ours) != len(theirs):
        return (
            f"worker {worker} has {with_noun(len(theirs), 'parameter')} to train, and the first "
            f"one {len(ours)}: all workers train the same model"
        )
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            return (
                f"parameter {place} of worker {worker} is {other}, and of the first one {one}: "
                "all workers need the same parameters in the same order"
            )
    if first["groups"] != own["groups"]:
        return f"worker {worker} has other parameter groups than the first one"
    return ""


def _end_of(worker: int) -> str:
    """Returns the key of a worker whose script has ended.

    Its value is how many functions that all call together it had called, and how many steps it had
    taken.
    """
    return f"script/ended/{worker}"


def _waiting_of(worker: int) -> str:
    """Returns the key of a worker's last call of a function that all workers call together.

    Its value is the call's number, and how many steps the worker had begun.
    """
    return f"script/waiting/{worker}"


def _read_pair(store: Store, key: str) -> tuple[int, int]:
    """Returns the two numbers of a key's value."""
    first, second = store.get(key).split()
    return int(first), int(second)


def _ended(worker: int, steps: int) -> str:
    return (
        f"worker {worker} has ended after {with_noun(steps, 'step')}, and this worker waits for it "
        f"{IN_FUNCTION}"
    )


def _not_called(worker: int, steps: int, begun: int) -> str:
    return (
        f"after {with_noun(steps, 'step')} worker {worker} waits {IN_FUNCTION}, and this worker is "
        f"at step {begun}: have all call it after as many steps"
    )


def _unequal(worker: int, steps: int, others: int) -> str:
    return (
        f"worker {worker} ended after {with_noun(steps, 'step')}, and another one is at step "
        f"{others}: in lockstep all take as many, so give all as many batches (job.sampler does)"
    )
