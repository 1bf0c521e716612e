"""A reader of meta.mat in ILSVRC2012's development kit, in a process apart.

The file may come from anybody. scipy's reader follows nested tables to any depth, which can end the
process, and unpacks compressed parts to any size.
"""

import io
import json
import os
import resource
import subprocess
import sys

import msgspec

LIMITS = {
    resource.RLIMIT_AS: 2 * 2**30,  # bytes
    resource.RLIMIT_CPU: 60,  # seconds
    resource.RLIMIT_CORE: 0,  # bytes
}


def read_synsets(content: bytes) -> list[tuple[int, str, str]]:
    """Returns ILSVRC's number, the wnid and the names, comma-separated, of each class.

    Raises:
        ValueError: The file has no table of classes.
    """
    done = subprocess.run([sys.executable, "-Pm", __name__], input=content, capture_output=True)
    if done.returncode:
        raise ValueError("meta.mat has no table of classes that can be read")
    return msgspec.json.decode(done.stdout, type=list[tuple[int, str, str]])


def _main() -> None:
    """Reads the file from stdin, and writes its table to stdout as JSON."""
    # Each thread takes address space, which is limited.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for kind, limit in LIMITS.items():
        resource.setrlimit(kind, (limit, limit))
    from scipy.io import loadmat

    synsets = loadmat(io.BytesIO(sys.stdin.buffer.read()), squeeze_me=True)["synsets"]
    rows = [[int(row["ILSVRC2012_ID"]), str(row["WNID"]), str(row["words"])] for row in synsets]
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    _main()
