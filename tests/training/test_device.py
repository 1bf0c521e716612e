"""Which GPU a worker takes, told from what each of them sees. The machines of these tests need not
have one.
"""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.rank.process import hide_gpus
from hvdtrain.job.rings import ddp
from hvdtrain.job.training import device
from hvdtrain.job.training.device import assign_gpus, choose_device, choose_for_all, memory_format


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.booleans())
def test_every_worker_has_a_gpu_of_its_own_that_it_sees(hosts, share):
    """Hosts with as many workers as GPUs, or one fewer; a worker sees all GPUs of its host."""
    visible = [
        [100 * host + n for n in range(gpus)]
        for host, gpus in enumerate(hosts)
        for _ in range(gpus)
    ]
    places = assign_gpus(visible, share)
    assert places == [n for gpus in hosts for n in range(gpus)]
    assert len({gpus[place] for gpus, place in zip(visible, places, strict=True)}) == len(visible)


def test_more_workers_than_gpus_is_an_error_that_says_what_to_do():
    with pytest.raises(UsageError, match="worker 2 of 3 finds no GPU .* each needs its own"):
        assign_gpus([[1, 2]] * 3, share=False)
    with pytest.raises(UsageError, match="worker 2 of 3 finds no GPU .* --share-gpu"):
        assign_gpus([[1], [5], [1]], share=False)


@given(st.integers(1, 4), st.integers(1, 12))
def test_shared_gpus_have_workers_that_differ_by_one_at_most(gpus, workers):
    places = assign_gpus([list(range(gpus))] * workers, share=True)
    counts = [places.count(n) for n in range(gpus)]
    assert max(counts) - min(counts) <= 1


@pytest.fixture
def with_gpus(monkeypatch):
    def count(gpus):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return count


def local(workers, servers=0, rank=None):
    size = workers + servers
    rank = servers if rank is None else rank
    return World("mpirun", rank, size, rank, size, servers)


def test_gpus_of_the_host_that_a_job_was_not_given_are_told_once(
    with_gpus, tmp_path, monkeypatch, capsys
):
    """As a scheduler has it where a job asks for none."""
    with_gpus(0)
    monkeypatch.setattr(device, "GPUS_OF_HOST", tmp_path)
    assert choose_device(RunConfig(), local(2)).type == "cpu"
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    for quiet in (local(2, rank=1), local(2, servers=1, rank=0)):
        choose_device(RunConfig(), quiet)
    choose_device(RunConfig(device="cpu"), local(2))
    assert capsys.readouterr().err == ""
    assert choose_device(RunConfig(), local(2)).type == "cpu"
    said = capsys.readouterr().err
    assert said.startswith(
        "hvdtrain: this host has 2 GPUs, and this job sees none: it computes on the CPU; ask the sch"
    )
    assert said.count("\n") == 1


def test_too_few_gpus_on_one_host_are_found_before_anything_starts(with_gpus, monkeypatch):
    with_gpus(2)
    assert choose_device(RunConfig(), local(2, servers=3)).type == "cuda"
    with pytest.raises(UsageError, match="3 workers are more than the GPUs of this host, 2"):
        choose_device(RunConfig(), local(3))
    assert choose_device(RunConfig(share_gpu=True), local(3)).type == "cuda"
    assert choose_device(RunConfig(device="cpu"), local(3)).type == "cpu"
    with_gpus(1)
    # one each, as a scheduler gives them: they will tell each other
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert choose_device(RunConfig(), local(3)).type == "cuda"


def test_servers_and_machines_without_a_gpu_use_the_cpu(with_gpus):
    with_gpus(8)
    assert choose_device(RunConfig(device="cuda"), local(1, servers=1, rank=0)).type == "cpu"
    with_gpus(0)
    assert choose_device(RunConfig(), local(4)).type == "cpu"
    with pytest.raises(UsageError, match="--device cuda: torch sees no GPU here"):
        choose_device(RunConfig(device="cuda"), local(1))
    with pytest.raises(UsageError, match="--precision tf32 is for GPUs"):
        choose_device(RunConfig(precision="tf32"), local(1))


def test_images_lie_channels_last_where_tensor_cores_compute():
    def layout(precision, device):
        return memory_format(RunConfig(precision=precision), torch.device(device))

    assert [layout(p, "cuda") for p in ("tf32", "bf16")] == [torch.channels_last] * 2
    assert layout("fp32", "cuda") == layout("bf16", "cpu") == torch.contiguous_format


def test_workers_of_several_hosts_may_be_in_any_order():
    here, there = [1, 2], [3, 4]
    assert assign_gpus([here, there, here, there], share=False) == [0, 0, 1, 1]


# Where runs compute. This machine need not have a GPU: how many torch sees is what decides.


@pytest.mark.parametrize(
    ("gpus", "workers", "options", "device"),
    [
        (0, 2, {}, "auto"),
        (2, 2, {}, "auto"),
        (1, 2, {}, "cpu"),
        (1, 2, {"share_gpu": True}, "auto"),
        (4, 3, {"device": "cuda"}, "cuda"),
    ],
)
def test_all_workers_compute_alike_with_gpus_for_all_or_none(
    gpus, workers, options, device, monkeypatch, capsys
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert choose_for_all(RunConfig(**options), workers, print) == device
    assert ("one process has the GPU, and workers the processor" in capsys.readouterr().out) == (
        gpus == 1 and not options
    )


@pytest.mark.parametrize(
    ("options", "is_server", "hidden"),
    [
        ({"device": "cpu"}, False, True),
        ({"device": "auto"}, False, False),
        ({"device": "cuda"}, False, False),
        ({"device": "cuda"}, True, True),
    ],
)
def test_a_rank_that_computes_on_the_processor_sees_no_gpu(options, is_server, hidden, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    hide_gpus(RunConfig(**options), is_server)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "2")


def test_workers_that_share_a_gpu_have_gloo_which_takes_one_bucket_of_powersgd(tmp_path):
    """Over Gloo the hook's messages of two buckets would mix, whatever device the gradients are on."""
    assert ddp.backend_for(torch.device("cuda", 0), share_gpu=False) == "cpu:gloo,cuda:nccl"
    assert ddp.backend_for(torch.device("cuda", 0), share_gpu=True) == "gloo"
    assert ddp.backend_for(torch.device("cpu"), share_gpu=False) == "gloo"
    config = RunConfig(mode="ddp", compression="powersgd")
    sync = ddp.join(Job(config, World(), tmp_path, torch.device("cpu"), 1))
    try:
        found = {}
        for backend in ("gloo", "cpu:gloo,cuda:nccl"):
            sync.backend = backend
            sync.prepare(torch.nn.Linear(2, 2))
            found[backend] = sync.is_one_bucket
    finally:
        sync.group.close()
    assert found == {"gloo": True, "cpu:gloo,cuda:nccl": False}
