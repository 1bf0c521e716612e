"""Builders and loaders beside their peers, alternating in one run. Median and range over the
repeats.

    python tests/benchmarks/data.py coil|slice|loader|decode [REPEATS]

coil    7,200 PNGs of 128 x 128 from a zip into class folders, beside `unzip` and moving the files
slice   resizing photographs on one core and on all
loader  images/s from a folder and packed, beside torchvision's ImageFolder and Hugging Face's
        datasets, both with torch's DataLoader and, where it is installed (`uv run --with spdl`, and
        FFmpeg's libraries), SPDL
decode  what threads that decode cost the step beside them, in each mode: images/s of a worker while
        it does not wait for images, of which those that are flipped were decoded once, and those
        that are cropped are each time. The workers sleep three quarters of the time they compute,
        so that there are cores for both
"""

import importlib.util
import io
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hvdtrain.base.config.recipes import load
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.data import loader as loaders
from hvdtrain.data.build import build
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import scan
from hvdtrain.data.packing import pack
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.processes import local_job
from hvdtrain.launch.recipe import train_program
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.read import load_run

CORES = sorted(os.sched_getaffinity(0))


def main() -> None:
    what, repeats = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        alternate(
            {"coil": coil, "slice": slice_, "loader": loader, "decode": decode}[what](Path(folder)),
            repeats,
        )


def alternate(rivals: dict[str, Callable[[], float]], repeats: int) -> None:
    """Each in turn, so that a drifting machine drifts for all; higher is better."""
    rates: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, act in rivals.items():
            os.sync()  # what one leaves to be written, the next would wait for
            rates[name].append(act())
    first = statistics.median(next(iter(rates.values())))
    for name, measured in rates.items():
        middle = statistics.median(measured)
        spread = f"({min(measured):.0f} - {max(measured):.0f}, n = {repeats})"
        print(f"{name:<28} {middle:9.0f} images/s {spread}  {middle / first:.2f}")


def photograph(rng: random.Random, width: int, height: int) -> Image.Image:
    """Something that compresses as photographs do: smooth, with some noise."""
    coarse = Image.frombytes("RGB", (16, 12), rng.randbytes(16 * 12 * 3))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    noise = np.random.default_rng(rng.randrange(2**32)).integers(0, 12, (height, width, 3))
    return Image.fromarray((smooth * 0.95 + noise).astype(np.uint8))


def coil(folder: Path) -> dict[str, Callable[[], float]]:
    rng = random.Random(0)
    archive = folder / "coil-100.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for number in range(1, 101):
            image = photograph(rng, 128, 128)
            for angle in range(0, 360, 5):
                buffer = io.BytesIO()
                image.rotate(angle).save(buffer, "PNG", compress_level=1)
                made.writestr(
                    f"coil-100/obj{number}__{angle}.png", buffer.getvalue(), zipfile.ZIP_DEFLATED
                )
    classes = load("datasets", "coil100")["classes"]["edible-toy-other"]
    class_of = {n: name for name, numbers in classes.items() if numbers != "rest" for n in numbers}

    def ours() -> float:
        began = time.perf_counter()
        build("coil100", folder / "ours", images_from=archive)
        took = time.perf_counter() - began
        shutil.rmtree(folder / "ours")
        return 7200 / took

    def peer() -> float:
        out = folder / "peer"
        began = time.perf_counter()
        subprocess.run(["unzip", "-q", str(archive), "-d", str(out)], check=True)
        for part in ("TrainData", "ValidationData"):
            for name in classes:
                (out / part / name).mkdir(parents=True)
        for i, path in enumerate(sorted((out / "coil-100").iterdir())):
            name = class_of.get(int(path.name[3:].split("__")[0]), "other")
            path.rename(out / ("ValidationData" if i % 5 == 0 else "TrainData") / name / path.name)
        took = time.perf_counter() - began
        shutil.rmtree(out)
        return 7200 / took

    return {"unzip and move": peer, "hvdtrain data build coil100": ours}


def photographs(folder: Path, images: int) -> Path:
    rng = random.Random(1)
    for i in range(images):
        path = folder / "in" / f"class{i % 4}" / f"{i}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(rng, 500, 375).save(path, quality=90)
    return folder / "in"


def slice_(folder: Path) -> dict[str, Callable[[], float]]:
    images = 1200
    source = photographs(folder, images)

    def on(cores: list[int]) -> float:
        os.sched_setaffinity(0, cores)
        began = time.perf_counter()
        build("imagenet-slice", folder / "out", images_from=source, resize=256)
        took = time.perf_counter() - began
        os.sched_setaffinity(0, CORES)
        shutil.rmtree(folder / "out")
        return images / took

    return {"one core": lambda: on(CORES[:1]), f"{len(CORES)} cores": lambda: on(CORES)}


def loader(folder: Path) -> dict[str, Callable[[], float]]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    import datasets

    loaders.CACHE_BYTES = 0
    images, side, batch = 1200, 224, 32
    built = build(
        "imagenet-slice", folder / "built", images_from=photographs(folder, images), resize=256
    )
    pack(scan(built), f"{folder}/packed", 128 * 2**20, False, lambda *_: None)
    torch.set_num_threads(1)

    def ours(dataset: str) -> float:
        data = find_dataset(dataset)
        loaded = loaders.Loader(data.train, side, len(CORES))
        began = time.perf_counter()
        for _ in loaded.batches(BatchSampler(len(data.train), batch, 0, 0, 1).epoch(1)):
            pass
        return len(data.train) / (time.perf_counter() - began)

    steps = v2.Compose([v2.Resize(side), v2.CenterCrop(side), v2.PILToTensor()])

    def peer(data: Any) -> float:
        loaded = iter(
            torch.utils.data.DataLoader(
                data, batch, shuffle=True, num_workers=len(CORES), prefetch_factor=2
            )
        )
        began = time.perf_counter()
        for _ in loaded:
            pass
        return len(data) / (time.perf_counter() - began)

    def transformed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return rows | {"image": [steps(image.convert("RGB")) for image in rows["image"]]}

    theirs = datasets.load_dataset(f"{folder}/packed", cache_dir=f"{folder}/hub", split="train")

    def spdl() -> float:
        import spdl.io
        from spdl.pipeline import PipelineBuilder

        paths = [str(path) for path, _ in scan(built).train]
        scaled = spdl.io.get_video_filter_desc(
            scale_width=side, scale_height=side, scale_algo="bilinear", scale_mode="crop"
        )

        def decode(path: str) -> object:
            return spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=scaled)

        def together(frames: list[object]) -> torch.Tensor:
            return spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2).contiguous()

        random.shuffle(paths)
        steps = (
            PipelineBuilder()
            .add_source(paths)
            .pipe(decode, concurrency=len(CORES))
            .aggregate(batch)
        )
        pipeline = steps.pipe(together).add_sink(4).build(num_threads=len(CORES))
        began = time.perf_counter()
        with pipeline.auto_stop():
            for _ in pipeline:
                pass
        return len(paths) / (time.perf_counter() - began)

    return {
        "ImageFolder and DataLoader": lambda: peer(ImageFolder(str(built / "TrainData"), steps)),
        "datasets and DataLoader": lambda: peer(theirs.with_transform(transformed)),
        **({"SPDL": spdl} if importlib.util.find_spec("spdl") else {}),
        "hvdtrain, folder": lambda: ours(str(built)),
        "hvdtrain, packed": lambda: ours(f"{folder}/packed"),
    }


def decode(folder: Path) -> dict[str, Callable[[], float]]:
    built = build(
        "imagenet-slice", folder / "built", images_from=photographs(folder, 1200), resize=256
    )

    def trained(mode: str, servers: int, augment: str) -> float:
        config = RunConfig(
            mode=mode,
            servers=servers,
            steps=60,
            threads=1,
            batch_size=32,
            dataset=str(built),
            image_size=64,
            augment=augment,
            slow="all:4x",
            snapshot_every="never",
            save="none",
        )
        run, log = folder / "run", folder / "log"
        with local_job(2 + servers, train_program(config, run), log) as job:
            code = job.wait()
        if code:
            raise SystemExit(failure_reason(log, code))
        ranks, _ = load_run(run).read_steps()
        steps = [step for rank in ranks.values() for step in rank[WARM_UP:] if step.shares]
        shutil.rmtree(run)
        return 16 / statistics.median((step.seconds - step.data_s) / step.shares for step in steps)

    modes = {"allreduce": 0, "ddp": 0, "ps-sync": 1, "ps-async": 1}
    return {
        f"{mode}, {augment}": partial(trained, mode, servers, augment)
        for mode, servers in modes.items()
        for augment in ("flip", "crop-flip")
    }


if __name__ == "__main__":
    main()
