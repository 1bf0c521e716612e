"""Which GPU the threads of a worker compute on. There is none here: what is asked of CUDA is looked
at.
"""

import threading
from queue import SimpleQueue

import pytest
import torch

from hvdtrain.base.numerics.threads import compute_on
from hvdtrain.job.rings.ring import Collectives


@pytest.fixture
def chosen(monkeypatch):
    """The thread that chose a GPU, and which."""
    queue = SimpleQueue()

    def set_device(device):
        queue.put((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return queue


def test_the_rings_thread_updates_weights_on_its_workers_gpu(chosen):
    Collectives(torch.device("cuda", 1))
    assert chosen.get(timeout=30) == ("ring", torch.device("cuda", 1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_is_no_certain_gpu_is_not_chosen(device, chosen):
    compute_on(torch.device(device))
    assert chosen.empty()
