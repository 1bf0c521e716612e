"""Two hosts of a core each on this machine, for benchmarks that compare on them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def hvdtrain(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "hvdtrain", *words], check=True)


@contextmanager
def two_hosts(prefix: str, rate: str) -> Iterator[None]:
    """Two hosts of a core each, joined by that rate, which end with the block.

    Args:
        prefix: the hosts are called PREFIX1 and PREFIX2.
    """
    hvdtrain("hosts", "up", "--count", "2", "--rate", rate, "--cpus", "1,1", "--prefix", prefix)
    try:
        yield
    finally:
        hvdtrain("hosts", "down", "--prefix", prefix)
