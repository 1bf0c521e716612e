"""How long it takes to measure what a step computes, whatever the model, and what other work on
the machine does to it.
"""

import os
import subprocess
import sys

import pytest
from helpers.own import written

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.data.find import find_dataset
from hvdtrain.planning.profile import UNKNOWN_JITTER, profile

IMAGE_S = 0.05
SLOW = f"""
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

class Slow(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.out = nn.Linear(4, classes)

    def forward(self, x):
        with Path(__file__).with_name("seen").open("a") as file:
            print(len(x), file=file)
        time.sleep({IMAGE_S} * len(x))
        return self.out(x)

def build(classes): return Slow(classes)
def data():
    samples = TensorDataset(torch.rand(64, 4), torch.arange(64) % 2)
    return samples, samples
"""


@pytest.mark.timeout(60)
def test_a_batch_that_would_take_too_long_is_measured_smaller_and_told_of(tmp_path):
    mine, told, budget_s = written(tmp_path, SLOW), [], 1.0
    config = RunConfig(model=f"{mine}:build", dataset=f"{mine}:data")
    found = profile(config, 64, find_dataset(config.dataset), 0, 1, budget_s, told.append).computing
    assert found["batch_per_worker"] == 64
    assert any("2 of 64 images a step are measured" in line for line in told)
    images = sum(int(line) for line in (tmp_path / "seen").read_text().splitlines())
    of_all_cores = 2 * 4 * 2
    beside_other_work = 2
    assert images * IMAGE_S < (1 + beside_other_work) * budget_s + of_all_cores * IMAGE_S


BUSY = "while True: pass"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("threads", [1, 2])
def test_steps_beside_other_work_are_told_and_are_no_jitter(threads):
    """Each core has another process: then jitter is a guess, computing is the processor time of one
    thread with a wide range, and what more cores add is not known.
    """
    config = RunConfig(model="vggf", width=0.0625, dataset="digits")
    data = find_dataset(config.dataset)
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        found = profile(config, 4, data, 32, threads, 1.0, lambda line: None)
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert found.others > 0.1 and not found.jitter_is_known
    assert found.computing["step_jitter"] == UNKNOWN_JITTER
    assert found.computing["threads_per_worker"] == 1
    assert found.computing["of_more_cores"] is found.computing["machine_speedup"] is None
    forward_ms = found.computing["layers"][0].forward_ms
    assert forward_ms.high > (1 + found.others) * forward_ms.value * 0.99
