"""Training images from an object store, beside litdata: images/s, and bytes that came over the wire
for each image.

    uv run --with litdata --with "s3fs[boto3]" --with "moto[server,s3]" python
    tests/benchmarks/remote.py --rounds 3

The store is moto's S3 server, one process on this machine. Photographs of 341 x 256 are decoded to
224 px, in batches of 32, by as many threads or processes as there are cores. Every reading is one
epoch from an empty cache, and takes turns with the others; the rate is from its first batch to its
last. litdata's own shuffling is on; `blocks` is --shuffle-block with the images of a row group.
Without it a row group that is no longer in memory comes again.
"""

import argparse
import io
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from data import CORES, photographs
from PIL import Image

from hvdtrain.data import loader as loaders
from hvdtrain.data import packing
from hvdtrain.data.build import build
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import scan
from hvdtrain.data.sampling import BatchSampler

BATCH, SIDE = 32, 224
KEYS = {
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def store() -> Iterator[str]:
    """The URL of an S3 server that ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as there:
                if there.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def received() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


def decoded(content: bytes) -> "object":
    """As our loader does, with PIL."""
    import numpy as np
    import torch

    with Image.open(io.BytesIO(content)) as image:
        shorter = min(image.size)
        left, upper = (image.width - shorter) // 2, (image.height - shorter) // 2
        box = (left, upper, left + shorter, upper + shorter)
        fitted = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
        return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()


def sample(path: str) -> dict[str, object]:
    return {"image": Path(path).read_bytes(), "label": 0}


def transformed(stored: dict[str, object]) -> object:
    return decoded(stored["image"])


def litdata_reader(
    built: Path, folder: Path, endpoint: str, chunk_bytes: int
) -> Callable[[], Iterator[float]]:
    """Writes chunks with litdata, and returns how it reads them: a moment for each batch."""
    import litdata
    import s3fs
    from litdata.streaming import downloader

    downloader._OBSTORE_AVAILABLE = False  # it speaks to https alone, and litdata has boto3 besides
    paths = [str(path) for path, _ in scan(built).train]
    litdata.optimize(
        sample, paths, str(folder / "chunks"), chunk_bytes=chunk_bytes, num_workers=1, verbose=False
    )
    s3fs.S3FileSystem().put(f"{folder}/chunks/", "bucket/chunks/", recursive=True)
    options = {
        "endpoint_url": endpoint,
        **{name.lower(): value for name, value in KEYS.items() if "KEY" in name},
    }

    def read() -> Iterator[float]:
        cache = folder / "litdata-cache"
        shutil.rmtree(cache, ignore_errors=True)
        data = litdata.StreamingDataset(
            "s3://bucket/chunks",
            str(cache),
            shuffle=True,
            storage_options=options,
            transform=transformed,
        )
        for _ in litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=len(CORES)):
            yield time.perf_counter()

    return read


def our_reader(dataset: str, block: int, folder: Path) -> Callable[[], Iterator[float]]:
    def read() -> Iterator[float]:
        shutil.rmtree(folder / "hvdtrain-cache", ignore_errors=True)
        data = find_dataset(dataset)
        loaded = loaders.Loader(data.train, SIDE, len(CORES))
        for _ in loaded.batches(BatchSampler(len(data.train), BATCH, 0, 0, 1, block).epoch(1)):
            yield time.perf_counter()

    return read


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=2400)
    parser.add_argument("--shard-mb", type=int, default=2)
    parser.add_argument("--group-mb", type=int, default=1)
    args = parser.parse_args()
    loaders.CACHE_BYTES = 0
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as name, store() as endpoint:
        folder = Path(name)
        os.environ |= KEYS | {
            "AWS_ENDPOINT_URL": endpoint,
            "HVDTRAIN_CACHE": str(folder / "hvdtrain-cache"),
        }
        import s3fs
        import torch

        torch.set_num_threads(1)
        s3fs.S3FileSystem().mkdir("bucket")
        built = build(
            "imagenet-slice",
            folder / "built",
            images_from=photographs(folder, args.images),
            resize=256,
        )
        packing.GROUP_BYTES = args.group_mb * 2**20
        block = packing.pack(
            scan(built), "s3://bucket/packed", args.shard_mb * 2**20, False, lambda *_: None
        )
        images = len(scan(built).train)
        print(f"{images} images, {block} a row group")
        readers = {
            "litdata": litdata_reader(built, folder, endpoint, args.shard_mb * 2**20),
            "row groups": our_reader("s3://bucket/packed", 0, folder),
            "row groups, blocks": our_reader("s3://bucket/packed", block, folder),
            "files": our_reader("simplecache::s3://bucket/packed", 0, folder),
            "files, blocks": our_reader("simplecache::s3://bucket/packed", block, folder),
        }
        measured: dict[str, list[tuple[float, ...]]] = {reader: [] for reader in readers}
        for _ in range(args.rounds):
            for reader, read in readers.items():
                before, began = received(), time.perf_counter()
                batches = read()
                first, at_first = next(batches), received() - before
                rate = (images - BATCH) / (list(batches)[-1] - first)
                measured[reader].append(
                    (rate, first - began, at_first / 1e6, (received() - before) / images / 1e3)
                )
        for reader, rows in measured.items():
            rates, firsts, at_first, sizes = zip(*rows, strict=True)
            print(
                f"{reader:18} {statistics.median(rates):6.0f} images/s ({min(rates):.0f} to {max(rates):.0f}, "
                f"n={len(rates)})  first batch after {statistics.median(firsts):.2f} s and "
                f"{statistics.median(at_first):.1f} MB  "
                f"{statistics.median(sizes):.1f} kB an image"
            )


if __name__ == "__main__":
    main()
