"""Snapshots on disk: what is saved comes back, what is damaged is not believed, and what was there
is not lost.
"""

import json
import signal
import time
import weakref
import zlib
from pathlib import Path

import pytest
import torch
from helpers.forked import Forked
from helpers.jobs import hvdtrain, until
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.numerics.optimizers import make_optimizer, restore_state, state_of
from hvdtrain.job.recording import snapshot
from hvdtrain.job.recording.snapshot import (
    BEST,
    WorkerFile,
    latest,
    mapped,
    roll_back,
    save,
    save_own,
    write_tensors,
)


def worker_parts(worker: int) -> list:
    """What a worker alone has, of 15 elements."""
    return [
        (0, {"left_out": torch.full((5,), float(worker))}),
        (5, {"left_out": torch.full((10,), float(worker))}),
    ]


def make(run: Path, step: int, keep: int = 3, workers: tuple[int, ...] = (0, 1)) -> None:
    (run / "snapshots").mkdir(exist_ok=True)
    files = [save_own(run, step, worker, worker_parts(worker), 15) for worker in workers]
    weights = {"layer.weight": torch.full((3, 4), float(step)), "layer.bias": torch.arange(3.0)}
    parts = [(0, torch.ones(5) * step, 1.0), (5, torch.ones(10) * step, 2.0)]
    optimizer = [
        (start, {"exp_avg": values, "step": torch.tensor([count])})
        for start, values, count in parts
    ]
    save(run, step, weights, optimizer, 15, {"history": {}}, keep, files)


def test_what_is_saved_comes_back_and_the_last_few_are_kept(tmp_path):
    assert latest(tmp_path, pytest.fail) is None
    for step in (5, 40, 300, 2000):
        make(tmp_path, step)
    assert sorted(p.name for p in (tmp_path / "snapshots").iterdir()) == [
        "step-00000040",
        "step-00000300",
        "step-00002000",
    ]
    found = latest(tmp_path, pytest.fail)
    assert (found.step, found.state["history"]) == (2000, {})
    assert found.weights["layer.weight"].eq(2000).all() and found.weights[
        "layer.bias"
    ].tolist() == [0, 1, 2]
    assert found.optimizer["exp_avg"].eq(2000).all() and found.optimizer["step"].tolist() == [2.0]


def test_of_the_optimizers_parts_only_one_is_held_while_they_are_written(tmp_path):
    """They come in any order, from servers that have not all taken a step yet."""
    alive = []

    def parts():
        for start in (8, 0, 4):
            values = torch.arange(start, start + 4.0)
            alive.append(weakref.ref(values))
            yield start, {"momentum_buffer": values} if start else {"exp_avg": values}
            del values
            assert sum(tensor() is not None for tensor in alive) <= 1

    (tmp_path / "snapshots").mkdir()
    file = save_own(tmp_path, 1, 0, parts(), 12)
    save(tmp_path, 1, {}, parts(), 12, {}, 1, [file])
    found = latest(tmp_path, pytest.fail)
    for vectors in found.optimizer, found.own_state(0, check=True).tensors:
        assert vectors["momentum_buffer"].tolist() == [0, 0, 0, 0, *range(4, 12)]
        assert vectors["exp_avg"].tolist() == [0, 1, 2, 3, *[0] * 8]


def test_a_snapshot_of_another_format_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "FORMAT", 1)
    make(tmp_path, 1)
    monkeypatch.undo()
    said = []
    with pytest.raises(
        UsageError, match="none of the 1 snapshots in .* is whole: train anew elsewhere"
    ):
        latest(tmp_path, said.append)
    assert len(said) == 1 and "it is of format 1, which this version does not read" in said[0]


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "worker1.safetensors", "state.json"]
)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_snapshot_is_told_and_the_one_before_it_is_used(name, damage, tmp_path):
    make(tmp_path, 1)
    make(tmp_path, 2)
    file = tmp_path / "snapshots/step-00000002" / name
    content = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        # a flipped digit of a text may stay a text
        content[len(content) // 2] ^= 1 if name != "state.json" else 0x80
        file.write_bytes(content)
    told = []
    assert latest(tmp_path, told.append).step == 1
    assert len(told) == 1 and "step-00000002 is damaged" in told[0]


def test_each_worker_has_what_it_saved_and_a_new_one_what_another_did(tmp_path):
    make(tmp_path, 1, workers=(0, 1, 3))
    found = latest(tmp_path, pytest.fail)
    for worker, owner in ((0, 0), (1, 1), (2, 3), (3, 3), (4, 1)):
        state = found.own_state(worker, check=True)
        assert (state.tensors["left_out"].tolist(), state.is_own) == (
            [float(owner)] * 15,
            worker == owner,
        )
    nothing = save_own(tmp_path / "nowhere", 2, 0, [], 15)
    assert nothing == WorkerFile(0)
    save(tmp_path, 2, {}, [], 15, {}, 2, [nothing])
    assert not latest(tmp_path, pytest.fail).own_state(0, check=True).tensors
    assert not list((tmp_path / "snapshots/step-00000002").glob("worker*"))


def test_a_worker_that_could_not_write_its_file_leaves_no_snapshot(tmp_path):
    make(tmp_path, 1)
    written = save_own(tmp_path, 2, 0, worker_parts(0), 15)
    (
        tmp_path / "snapshots/step-00000002.part/worker1.safetensors"
    ).mkdir()  # so that it cannot be opened
    failed = save_own(tmp_path, 2, 1, worker_parts(1), 15)
    with pytest.raises(OSError, match="worker 1: Is a directory"):
        save(tmp_path, 2, {}, [], 15, {}, 2, [written, failed])
    assert [p.name for p in (tmp_path / "snapshots").iterdir()] == ["step-00000001"]


def test_a_worker_that_does_not_see_the_run_folder_says_so(tmp_path):
    failed = save_own(tmp_path, 2, 1, worker_parts(1), 15)
    assert failed.problem.endswith(
        "snapshots is not there: a run folder is on storage that all workers share"
    )


def test_what_a_lost_worker_had_begun_is_in_no_snapshot(tmp_path):
    (tmp_path / "snapshots").mkdir()
    kept = save_own(tmp_path, 1, 1, worker_parts(1), 15)
    save_own(tmp_path, 1, 0, worker_parts(0), 15)  # of which the worker that leads does not hear
    save(tmp_path, 1, {}, [], 15, {}, 1, [kept])
    assert not (tmp_path / "snapshots/step-00000001/worker0.safetensors").exists()
    assert not latest(tmp_path, pytest.fail).own_state(0, check=True).is_own


def test_a_workers_file_is_read_by_who_needs_it(tmp_path):
    """Not by all: the first worker of another host looks at what all need, and each worker at its
    part.
    """
    make(tmp_path, 1)
    file = tmp_path / "snapshots/step-00000001/worker1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = mapped(tmp_path, 1, check=True)
    assert found.own_state(0, check=True).is_own
    with pytest.raises(
        Failure, match="worker1.safetensors cannot be resumed from: it is not what was written"
    ):
        found.own_state(1, check=True)


def test_a_workers_file_that_is_none_is_a_line(tmp_path):
    """Its checksum is right, as a hostile hand would make it."""
    make(tmp_path, 1)
    file = tmp_path / "snapshots/step-00000001/worker0.safetensors"
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(Failure, match="worker0.safetensors cannot be resumed from"):
        mapped(tmp_path, 1, check=True).own_state(0, check=False)


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/dev/zero", "worker-1.safetensors", "worker01.safetensors"]
)
def test_a_state_that_names_other_files_is_refused(name, tmp_path):
    make(tmp_path, 1)
    file = tmp_path / "snapshots/step-00000001/state.json"
    state = json.loads(file.read_text().splitlines()[0])
    state["checksums"][name] = "crc32:00000000"
    text = json.dumps(state)
    file.write_text(f"{text}\ncrc32:{zlib.crc32(text.encode()):08x}\n")
    said = []
    with pytest.raises(UsageError, match="none of the 1 snapshots"):
        latest(tmp_path, said.append)
    assert said[0].endswith("state.json names a file that no snapshot has")


def test_a_full_disk_leaves_what_was_there(tmp_path):
    """A process that may write no file beyond 256 KiB, as on a disk that is full then."""
    make(tmp_path, 1)
    code = """if True:
        import resource, signal, sys, torch
        from pathlib import Path
        from hvdtrain.job.recording.snapshot import save, save_own
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
        for weights, momenta in (2**20, 1), (1, 2**20):
            try:
                parts = [(0, {"m": torch.zeros(momenta)})]
                save(Path(sys.argv[1]), 2, {"w": torch.zeros(weights)}, parts, momenta, {}, 3)
            except OSError as error:
                print("refused:", error, flush=True)
        file = save_own(Path(sys.argv[1]), 2, 1, [(0, {"m": torch.zeros(2**20)})], 2**20)
        try:
            save(Path(sys.argv[1]), 2, {}, [], 1, {}, 3, [file])
        except OSError as error:
            print("refused:", error, flush=True)
        sys.exit()
    """
    done = hvdtrain(tmp_path, first=code)
    assert done.stdout.count("refused:") == 3 and "worker 1: File too large" in done.stdout, (
        done.stdout
    )
    assert [p.name for p in (tmp_path / "snapshots").iterdir()] == ["step-00000001"]
    assert latest(tmp_path, pytest.fail).step == 1


@pytest.mark.timeout(90)
def test_a_process_killed_while_saving_leaves_a_whole_snapshot(tmp_path):
    """Killed at any moment of one save after the other: there is always one that can be read."""
    code = """if True:
        import sys, torch
        from pathlib import Path
        from hvdtrain.job.recording.snapshot import save
        run = Path(sys.argv[1])
        (run / "snapshots").mkdir(parents=True)
        for step in range(1, 10**6):
            save(run, step, {"w": torch.full((2**18,), float(step))}, [(0, {"m": torch.zeros(2**18)})], 2**18, {}, 2)
            print(step, flush=True)
    """
    for number in range(4):
        run = tmp_path / str(number)
        process = Forked(1, [str(run)], first=code)
        try:
            until(lambda process=process: len(process.printed.read_text().splitlines()) > 2)
            time.sleep(0.003 * number)
            process.send_signal(signal.SIGKILL)
            *_, last = map(int, process.communicate()[0].split())
        finally:
            process.close()
        found = latest(run, pytest.fail)
        assert found.step >= last
        assert found.weights["w"].eq(found.step).all()
        roll_back(run, found)
        assert not list((run / "snapshots").glob("*.part"))


def test_going_back_takes_the_best_model_of_then(tmp_path):
    (tmp_path / "snapshots").mkdir()
    best = tmp_path / "snapshots" / BEST
    write_tensors(best, {"w": torch.ones(1)})
    make(tmp_path, 1)
    write_tensors(best, {"w": torch.ones(1) * 2})
    make(tmp_path, 2)
    (tmp_path / "snapshots/step-00000002/state.json").unlink()
    roll_back(tmp_path, latest(tmp_path, lambda line: None))
    from safetensors.torch import load_file

    assert load_file(best)["w"].item() == 1
    assert [p.name for p in (tmp_path / "snapshots").glob("step-*")] == ["step-00000001"]


OPTIMIZERS = [
    RunConfig(optimizer="sgd", momentum=0.9),
    RunConfig(optimizer="sgd", momentum=0.0),
    RunConfig(optimizer="adam"),
    RunConfig(optimizer="adamw", weight_decay=0.1),
]


@pytest.mark.parametrize("config", OPTIMIZERS)
def test_an_optimizer_goes_on_however_its_weights_are_cut(config):
    """Parameters of 6 and 4 elements, then the same cut elsewhere, as servers hold them: the same
    updates.
    """
    gradients = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))

    def steps(gradients, weights, sizes, state):
        parameters = [nn.Parameter(part.clone()) for part in weights.split(sizes)]
        optimizer = make_optimizer(config, parameters)
        restore_state(
            optimizer, parameters, {name: torch.tensor(values) for name, values in state.items()}
        )
        for gradient in gradients:
            for parameter, part in zip(parameters, gradient.split(sizes), strict=True):
                parameter.grad = part.clone()
            optimizer.step()
        state = {name: values.tolist() for name, values in state_of(optimizer, parameters).items()}
        return torch.cat([parameter.detach() for parameter in parameters]), state

    weights, state = steps(gradients[:2], torch.zeros(10), [6, 4], {})
    whole, _ = steps(gradients[2:], weights, [6, 4], state)
    moved, _ = steps(gradients[2:], weights, [3, 3, 4], state)
    # To rounding: a kernel takes what does not fill a vector register another way.
    torch.testing.assert_close(whole, moved)
