"""Small folders and archives in the shapes that data sets come in."""

import io
import json
import random
import struct
import tarfile
import zipfile
from pathlib import Path

from PIL import Image


def picture(number: int, size: tuple[int, int] = (24, 20), kind: str = "PNG") -> bytes:
    """An image that no other number has."""
    pixels = random.Random(number).randbytes(3 * 6 * 5)
    buffer = io.BytesIO()
    Image.frombytes("RGB", (6, 5), pixels).resize(size, Image.Resampling.NEAREST).save(buffer, kind)
    return buffer.getvalue()


def coil(objects: int = 100, step: int = 5) -> dict[str, bytes]:
    """COIL-100's names, with the strays that its archive has."""
    strays = {
        "coil-100/convertGroupppm2png.pl": b"#!/usr/bin/perl\n",
        "coil-100/convertGroupppm2png.pl~": b"x",
    }
    small = picture(0)
    return strays | {
        f"coil-100/obj{o}__{a}.png": small
        for o in range(1, objects + 1)
        for a in range(0, 360, step)
    }


def wnids(count: int) -> list[str]:
    return [f"n{1000000 + 7 * i:08d}" for i in range(count)]


def imagenet100(labels: list[str], train: int, validation: int) -> dict[str, bytes]:
    """Kaggle's imagenet100: four folders of classes."""
    files = {
        "Labels.json": json.dumps(
            {w: f"thing {i}, other thing {i}" for i, w in enumerate(labels)}
        ).encode()
    }
    for i, w in enumerate(labels):
        for k in range(train):
            files[f"train.X{i % 4 + 1}/{w}/{w}_{k}.JPEG"] = picture(1000 * i + k, kind="JPEG")
        for k in range(validation):
            files[f"val.X/{w}/{w}_{k}.JPEG"] = picture(1000 * i + 500 + k, kind="JPEG")
    return files


def kaggle(labels: list[str], train: int, validation: int) -> dict[str, bytes]:
    """Kaggle's ILSVRC tree: validation images in one folder, their classes in a table."""
    root = "ILSVRC/Data/CLS-LOC"
    rows, files = ["ImageId,PredictionString"], {}
    for i, w in enumerate(labels):
        files |= {
            f"{root}/train/{w}/{w}_{k}.JPEG": picture(1000 * i + k, kind="JPEG")
            for k in range(train)
        }
        for k in range(validation):
            name = f"ILSVRC2012_val_{len(rows):08d}"
            files[f"{root}/val/{name}.JPEG"] = picture(1000 * i + 500 + k, kind="JPEG")
            rows.append(f"{name},{w} 10 20 30 40 ")
    files[f"{root}/test/ILSVRC2012_test_00000001.JPEG"] = picture(7, kind="JPEG")
    files["LOC_val_solution.csv"] = "\n".join(rows).encode()
    files["LOC_synset_mapping.txt"] = "\n".join(
        f"{w} thing {i}, it" for i, w in enumerate(labels)
    ).encode()
    return files


def tiny(labels: list[str], train: int, validation: int) -> dict[str, bytes]:
    """Tiny ImageNet: the validation images in one folder, and a table beside it."""
    root = "tiny-imagenet-200"
    rows, files = [], {f"{root}/wnids.txt": "\n".join(labels).encode()}
    for i, w in enumerate(labels):
        folder = f"{root}/train/{w}"
        files[f"{folder}/{w}_boxes.txt"] = b"x\t0\t0\t9\t9"
        for k in range(train):
            files[f"{folder}/images/{w}_{k}.JPEG"] = picture(1000 * i + k, kind="JPEG")
        for k in range(validation):
            name = f"val_{len(rows)}.JPEG"
            files[f"{root}/val/images/{name}"] = picture(1000 * i + 500 + k, kind="JPEG")
            rows.append(f"{name}\t{w}\t0\t32\t44\t62")
    files[f"{root}/val/val_annotations.txt"] = "\n".join(rows).encode()
    files[f"{root}/test/images/test_0.JPEG"] = picture(7, kind="JPEG")
    return files


def plain(labels: list[str], train: int, validation: int) -> dict[str, bytes]:
    """As Imagenette and an extracted ILSVRC2012 have it."""
    return {
        f"imagenette2-160/{part}/{w}/{w}_{k}.JPEG": picture(1000 * i + k, kind="JPEG")
        for i, w in enumerate(labels)
        for part, begin, end in (("train", 0, train), ("val", train, train + validation))
        for k in range(begin, end)
    }


def class_folders(labels: list[str], images: int, _: int = 0) -> dict[str, bytes]:
    return {
        f"{w}/{k}.png": picture(1000 * i + k) for i, w in enumerate(labels) for k in range(images)
    }


def tarred(files: dict[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def ilsvrc(folder: Path, labels: list[str], train: int, validation: int) -> Path:
    """The three files of ILSVRC2012, whose class numbers are not in the order of wnids."""
    inner = {}
    for i, w in enumerate(labels):
        inner[f"{w}.tar"] = tarred(
            {f"{w}_{k}.JPEG": picture(1000 * i + k, kind="JPEG") for k in range(train)}
        )
    numbers = range(len(labels), 0, -1)
    truth, images = [], {}
    for k in range(validation):
        for i, number in enumerate(numbers):
            truth.append(number)
            images[f"ILSVRC2012_val_{len(truth):08d}.JPEG"] = picture(
                1000 * i + 500 + k, kind="JPEG"
            )
    synsets = [
        (number, w, f"thing {i}, it")
        for i, (number, w) in enumerate(zip(numbers, labels, strict=True))
    ]
    return lay_out(
        folder,
        {
            "ILSVRC2012_img_train.tar": tarred(inner),
            "ILSVRC2012_img_val.tar": tarred(images),
            "ILSVRC2012_devkit_t12.tar.gz": ilsvrc_kit(meta_mat(synsets), truth),
        },
    )


def meta_mat(synsets: list[tuple[int, str, str]]) -> bytes:
    import numpy as np
    from scipy.io import savemat

    buffer = io.BytesIO()
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O")]
    savemat(buffer, {"synsets": np.array(synsets, dtype=kinds)})
    return buffer.getvalue()


def nested_mat(depth: int) -> bytes:
    """A MATLAB file of so many cells, one in another."""
    shape = bytes.fromhex("0600000008000000 0100000000000000 0500000008000000 0100000001000000")
    no_name, name = struct.pack("<II", 1, 0), struct.pack("<II8s", 1, 7, b"synsets")
    cells = (
        struct.pack("<II", 14, 48 * left - 8) + shape + no_name for left in range(depth, 0, -1)
    )
    body = shape + name + b"".join(cells)
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + struct.pack("<II", 14, len(body)) + body


def ilsvrc_kit(meta: bytes, truth: list[int]) -> bytes:
    data, text = "ILSVRC2012_devkit_t12/data", "".join(f"{number}\n" for number in truth)
    files = {"meta.mat": meta, "ILSVRC2012_validation_ground_truth.txt": text.encode()}
    return tarred({f"{data}/{name}": content for name, content in files.items()}, "w:gz")


def lay_out(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
