"""Two hosts on this machine, for benchmarks that compare on them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def hvdtrain(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "hvdtrain", *words], check=True)


@contextmanager
def two_hosts(prefix: str, rate: str, cores: float = 1) -> Iterator[None]:
    """Two hosts, joined by that rate, which end with the block.

    Args:
        prefix: the hosts are called PREFIX1 and PREFIX2.
        cores: of each host.
    """
    cpus = f"{cores},{cores}"
    hvdtrain("hosts", "up", "--count", "2", "--rate", rate, "--cpus", cpus, "--prefix", prefix)
    try:
        yield
    finally:
        hvdtrain("hosts", "down", "--prefix", prefix)
