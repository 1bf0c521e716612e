"""What a step takes is known from below before it is taken."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.jobs import hvdtrain

from hvdtrain import models
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.training.memory import check_memory, needed_bytes


@pytest.mark.parametrize(
    ("name", "width"), [("vggf", 0.125), ("vgg11_bn", 0.25), ("resnet8", 1.0), ("cnn", 1.0)]
)
@pytest.mark.parametrize("side", [33, 64])
def test_a_step_keeps_as_much_as_is_said_and_a_few_times_as_much_at_most(
    name, width, side, one_thread
):
    model, images, kept = models.make(name, 10, width), torch.zeros(4, 3, side, side), {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t
    ):
        model(images)
    weights = {p.data_ptr() for p in model.parameters()}
    measured = sum(size for at, size in kept.items() if at not in weights)
    said = needed_bytes(model, images[:1], len(images), 0, "fp32")
    assert measured / 4 < said <= measured
    model.features.requires_grad_(False)
    assert needed_bytes(model, images[:1], len(images), 0, "bf16") < said / 2


def test_images_that_no_memory_holds_are_refused_in_a_line_and_nothing_is_left(tmp_path):
    done = hvdtrain("train", "--image-size", "100000", "--out", str(tmp_path / "run"))
    assert done.returncode == 2, done.stdout
    assert done.stdout.startswith("hvdtrain: images of 100000 pixels are too large: a worker needs")
    assert done.stdout.count("\n") == 1 and not (tmp_path / "run").exists()
    done = hvdtrain(
        "train",
        "--mode",
        "allreduce",
        "--image-size",
        "100000",
        "--out",
        str(tmp_path / "run"),
        ranks=2,
    )
    assert done.returncode == 2 and "2 workers need" in done.stdout, done.stdout


@pytest.mark.parametrize(("workers", "share"), [(1, True), (4, False), (4, True)])
def test_workers_that_share_a_gpu_need_its_memory_together(workers, share, monkeypatch):
    """Of two GPUs. This machine need not have any."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda number: SimpleNamespace(total_memory=1.5 * 2**30),
    )
    with torch.device("meta"):  # to draw 129 million weights takes a second
        model = models.make("vgg11", 10, 1.0)
    sample = torch.zeros(1, 3, 224, 224)
    config = RunConfig(batch_size=48 * workers, share_gpu=share)
    assert 2**29 < needed_bytes(model, sample, 48, 0, "fp32") < 1.5 * 2**30
    world = World("mpirun", 0, workers, 0, workers)
    job = Job(config, world, Path(), torch.device("cuda"), threads=1)
    if workers < 4 or not share:
        check_memory(job, model, sample, 0)
        return
    with pytest.raises(
        UsageError, match="too large: 2 workers need 3 GiB at least, and a GPU here has 1.5 GiB"
    ):
        check_memory(job, model, sample, 0)
