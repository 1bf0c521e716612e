"""Predictions on several processes: the same, in the same order, and only where it is safe."""

import json
import subprocess
import sys

import pytest

IN_PARALLEL = """
import json, os, sys, threading
from hvdtrain.base.errors import UsageError
from hvdtrain.planning import parallel

parallel.usable_cores = lambda: 2.0

def work(item):
    if item < 0:
        raise UsageError("it is negative")
    return item, os.getpid() == main

main = os.getpid()
event = threading.Event()
if "threads" in sys.argv:
    threading.Thread(target=event.wait).start()
found = parallel.each(work, list(range(8)))
event.set()
try:
    parallel.each(work, [1, 2, 3, -1])
    refused = ""
except UsageError as error:
    refused = str(error)
print(json.dumps([found, refused]))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", [[], ["threads"]])
def test_each_keeps_order_and_forks_only_a_process_of_one_thread(words):
    done = subprocess.run(
        [sys.executable, "-c", IN_PARALLEL, *words],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
        encoding="utf-8",
    )
    found, refused = json.loads(done.stdout)
    assert found == [[item, bool(words)] for item in range(8)]
    assert refused == "it is negative"
