"""Reads meta.mat of ILSVRC2012's development kit, which may come from anybody, in a separate process.

scipy's reader follows nested tables as deep as they go, which can end the process, and unpacks what is packed in the
file to any size.
"""

import io
import json
import os
import resource
import subprocess
import sys

import msgspec

LIMITS = {resource.RLIMIT_AS: 2 * 2**30, resource.RLIMIT_CPU: 60, resource.RLIMIT_CORE: 0}  # bytes, seconds, bytes


def read_synsets(content: bytes) -> list[tuple[int, str, str]]:
    """ILSVRC's class number, the wnid and the names, comma-separated, of each class. ValueError where it has none."""
    done = subprocess.run([sys.executable, "-Pm", __name__], input=content, capture_output=True)
    if done.returncode:
        raise ValueError("meta.mat has no table of classes that can be read")
    return msgspec.json.decode(done.stdout, type=list[tuple[int, str, str]])


def _main() -> None:
    """Write the table of the file on stdin to stdout, as JSON."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread takes address space, of which there is a limit
    for kind, limit in LIMITS.items():
        resource.setrlimit(kind, (limit, limit))
    from scipy.io import loadmat

    synsets = loadmat(io.BytesIO(sys.stdin.buffer.read()), squeeze_me=True)["synsets"]
    json.dump([[int(s["ILSVRC2012_ID"]), str(s["WNID"]), str(s["words"])] for s in synsets], sys.stdout)


if __name__ == "__main__":
    _main()
