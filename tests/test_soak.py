"""A short part of tests/soak.py, which README.md tells how to run for longer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import SETTINGS


@pytest.mark.hosts
@pytest.mark.timeout(240)
def test_a_run_that_is_killed_and_stopped_counts_every_sample_once_and_leaves_nothing():
    words = [
        "--mode",
        "allreduce",
        "--seconds",
        "5",
        "--kills",
        "1",
        "--seed",
        "7",
        "--no-undisturbed",
    ]
    script = Path(__file__).with_name("soak.py")
    done = subprocess.run([sys.executable, str(script), *words], **SETTINGS, timeout=220)
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert re.search(
        r"1 kills, .* [1-9][0-9,]* samples counted, 0 lost, 0 doubled, .* 0 faults found", last
    ), last
