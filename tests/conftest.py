"""What all tests share."""

import atexit
import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter

# Without bytecode each worker of pytest-xdist takes 10 s to rewrite assertions, of which those of
# hypothesis, which is a plugin, are a part, and each rank compiles all of hvdtrain.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import pytest  # noqa: E402
from helpers.forked import share_fork_server  # noqa: E402
from helpers.processes import SMALL_TURNTABLE  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# On a machine that does other work too, an example may take any time: pytest's timeout is limit
# enough. A test that passed passes the same examples the next time; HVDTRAIN_EXAMPLES asks for so
# many others (test_hostile.py).
derandomize = "HVDTRAIN_EXAMPLES" not in os.environ
examples = int(os.environ.get("HVDTRAIN_EXAMPLES", "0")) or 40
tolerant = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile(
    "shared machine", derandomize=derandomize, max_examples=examples, **tolerant
)
settings.load_profile("shared machine")

# What commands in this process have kept from the garbage collector is garbage when it ends, or
# triton's library prints a list of it below the summary.
atexit.register(gc.unfreeze)
# What imports and collecting make stays: there is no garbage to look for until tests run.
gc.disable()
# What a killed mpirun leaves in the temporary folder ends the next one that is given its process
# number.
STARTERS = tempfile.mkdtemp(prefix="hvdtrain-tests-")
os.environ["PRTE_MCA_prte_tmpdir_base"] = STARTERS
atexit.register(shutil.rmtree, STARTERS, ignore_errors=True)
# Tests run beside each other. A team of OpenMP threads that has fewer cores than threads waits
# spinning, unless it is told not to: 40 steps of one process with two threads then took 47 s in
# place of 10.
os.environ["OMP_WAIT_POLICY"] = "passive"


def pytest_configure(config):
    # A shell lets what a script starts in the background ignore SIGINT, and so would the jobs that
    # tests interrupt, and the process that forks their ranks.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if config.getoption("numprocesses", None) and not is_worker:
        share_fork_server()


def pytest_collection_modifyitems(items):
    """What may take longest begins first, or nothing else would be left to do beside it: tests of a
    group add up, also those without a limit of their own.
    """

    def marked(item, name, otherwise):
        marker = item.get_closest_marker(name)
        return marker.args[0] if marker else otherwise

    limits = Counter()
    for item in items:
        limits[marked(item, "xdist_group", item.nodeid)] += marked(item, "timeout", 2)
    items.sort(key=lambda item: limits[marked(item, "xdist_group", item.nodeid)], reverse=True)
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_environment():
    """What a test, or the code that it calls, sets in the environment is gone when it ends:
    libraries' interfaces are set there, and the next test would find them.
    """
    environment = os.environ
    before = dict(environment)
    yield
    for name in set(environment) - set(before):
        del environment[name]
    environment.update(before)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of a turntable data set of SMALL_TURNTABLE. Not to be changed."""
    from hvdtrain.data.build import build

    return build("turntable", tmp_path_factory.mktemp("built") / "small", **SMALL_TURNTABLE)


# Data sets of real digits: how many there are to train with, and to validate.
DIGITS = {"few": (92, 20), "some": (192, 40)}


@pytest.fixture(scope="session")
def digit_sets(tmp_path_factory):
    """The folder of the data sets of DIGITS. Not to be changed."""
    from hvdtrain.data.find import find_dataset

    root, digits = tmp_path_factory.mktemp("built"), find_dataset("digits")
    for set_name, (train, validation) in DIGITS.items():
        parts = {
            "TrainData": (digits.train, train),
            "ValidationData": (digits.validation, validation),
        }
        for part, (samples, most) in parts.items():
            for label, name in enumerate(digits.classes):
                number = -(-(most - label) // len(digits.classes))
                images = [path for path, own in samples[:] if own == label][:number]
                folder = root / set_name / part / name
                folder.mkdir(parents=True)
                for image in images:
                    shutil.copy(image, folder)
    return root


@pytest.fixture(scope="session")
def few_digits(digit_sets):
    return digit_sets / "few"


@pytest.fixture(scope="module")
def beside_digits(digit_sets):
    """In the folder where those data sets are."""
    with contextlib.chdir(digit_sets):
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Let torch compute with one thread: two that wait for each other are slow where cores are
    busy.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
