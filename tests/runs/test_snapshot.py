"""Snapshots on disk: what is saved comes back, what is damaged is not believed, and what was there is not lost."""

import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
from helpers.forked import Forked
from helpers.jobs import hvdtrain, until
from torch import nn

from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.numerics.optimizers import make_optimizer, restore_state, state_of
from hvdtrain.runs import snapshot
from hvdtrain.runs.snapshot import BEST, latest, roll_back, save, write_tensors


def make(run: Path, step: int, keep: int = 3) -> None:
    (run / "snapshots").mkdir(exist_ok=True)
    weights = {"layer.weight": torch.full((3, 4), float(step)), "layer.bias": torch.arange(3.0)}
    parts = [(0, torch.ones(5) * step, 1.0), (5, torch.ones(10) * step, 2.0)]
    optimizer = [(start, {"exp_avg": values, "step": torch.tensor([count])}) for start, values, count in parts]
    save(run, step, weights, optimizer, 15, {"history": {}}, keep)


def test_what_is_saved_comes_back_and_the_last_few_are_kept(tmp_path):
    assert latest(tmp_path, pytest.fail) is None
    for step in (5, 40, 300, 2000):
        make(tmp_path, step)
    assert sorted(p.name for p in (tmp_path / "snapshots").iterdir()) == [
        "step-00000040", "step-00000300", "step-00002000",
    ]  # fmt: skip
    found = latest(tmp_path, pytest.fail)
    assert (found.step, found.state["history"]) == (2000, {})
    assert found.weights["layer.weight"].eq(2000).all() and found.weights["layer.bias"].tolist() == [0, 1, 2]
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
    save(tmp_path, 1, {}, parts(), 12, {}, 1)
    optimizer = latest(tmp_path, pytest.fail).optimizer
    assert optimizer["momentum_buffer"].tolist() == [0, 0, 0, 0, *range(4, 12)]
    assert optimizer["exp_avg"].tolist() == [0, 1, 2, 3, *[0] * 8]


def test_a_snapshot_of_another_format_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "FORMAT", 1)
    make(tmp_path, 1)
    monkeypatch.undo()
    said = []
    with pytest.raises(UsageError, match="none of the 1 snapshots in .* is whole: train anew elsewhere"):
        latest(tmp_path, said.append)
    assert len(said) == 1 and "it is of format 1, which this version does not read" in said[0]


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
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
        content[len(content) // 2] ^= 1 if name != "state.json" else 0x80  # a flipped digit of a text may stay a text
        file.write_bytes(content)
    told = []
    assert latest(tmp_path, told.append).step == 1
    assert len(told) == 1 and "step-00000002 is damaged" in told[0]


def test_a_full_disk_leaves_what_was_there(tmp_path):
    """A process that may write no file beyond 256 KiB, as on a disk that is full then."""
    make(tmp_path, 1)
    code = """if True:
        import resource, signal, sys, torch
        from pathlib import Path
        from hvdtrain.runs.snapshot import save
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
        for weights, momenta in (2**20, 1), (1, 2**20):
            try:
                parts = [(0, {"m": torch.zeros(momenta)})]
                save(Path(sys.argv[1]), 2, {"w": torch.zeros(weights)}, parts, momenta, {}, 3)
            except OSError as error:
                print("refused:", error, flush=True)
        sys.exit()
    """
    done = hvdtrain(tmp_path, first=code)
    assert done.stdout.count("refused:") == 2, done.stdout
    assert [p.name for p in (tmp_path / "snapshots").iterdir()] == ["step-00000001"]
    assert latest(tmp_path, pytest.fail).step == 1


@pytest.mark.timeout(90)
def test_a_process_killed_while_saving_leaves_a_whole_snapshot(tmp_path):
    """Killed at any moment of one save after the other: there is always one that can be read."""
    code = """if True:
        import sys, torch
        from pathlib import Path
        from hvdtrain.runs.snapshot import save
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
    RunConfig(optimizer="sgd", momentum=0.9), RunConfig(optimizer="sgd", momentum=0.0),
    RunConfig(optimizer="adam"), RunConfig(optimizer="adamw", weight_decay=0.1),
]  # fmt: skip


@pytest.mark.parametrize("config", OPTIMIZERS)
def test_an_optimizer_goes_on_however_its_weights_are_cut(config):
    """Parameters of 6 and 4 elements, then the same cut elsewhere, as servers hold them: the same updates."""
    gradients = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))

    def steps(gradients, weights, sizes, state):
        parameters = [nn.Parameter(part.clone()) for part in weights.split(sizes)]
        optimizer = make_optimizer(config, parameters)
        restore_state(optimizer, parameters, {name: torch.tensor(values) for name, values in state.items()})
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
