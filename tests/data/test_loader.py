"""From image files to batches of tensors."""

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import archives
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.data import image, loader
from hvdtrain.data.augment import Augment
from hvdtrain.data.build import build
from hvdtrain.data.folder import ImageFolder, scan
from hvdtrain.data.image_side import native_side
from hvdtrain.data.loader import AHEAD, Loader
from hvdtrain.data.sampling import Share
from hvdtrain.job.training.model import evaluation_resize

PRETRAINED = RunConfig(model="vgg16", pretrained="imagenet")
pytestmark = pytest.mark.usefixtures("one_thread")

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
WHITE = (255, 255, 255)


def share(*indices):
    return Share(1, 1, list(indices), 1.0, len(indices))


def one(path, side=32, augment="none", **options):
    """The pixels, [3, side, side], of a single file."""
    [(_, (images, _))] = Loader([(path, 0)], side, 1, Augment(augment, 5), **options).batches(
        [share(0)]
    )
    assert images.dtype == torch.uint8 and images.shape == (1, 3, side, side)
    return images[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """24 images of two classes, of many sizes and kinds; the red of sample i's middle is 10 i."""
    root = tmp_path_factory.mktemp("images")
    number = 0
    for part in ("TrainData", "ValidationData"):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for i in range(6):
                size = [(32, 32), (48, 32), (32, 50), (80, 70), (20, 24), (33, 33)][i]
                suffix = ["png", "jpg", "png", "bmp", "webp", "JPEG"][i]
                Image.new("RGB", size, (10 * number, 0, 99)).save(
                    root / part / name / f"{i}.{suffix}"
                )
                number += 1
    return scan(root)


def reds(images):
    return [round(image[0, 16, 16].item() / 10) for image in images]


@pytest.mark.parametrize("side", [32, 40])
def test_images_and_labels_are_those_of_the_indices_in_order_kept_or_not(folder, side, monkeypatch):
    kept = Loader(folder.train, side, threads=3)
    monkeypatch.setattr(loader, "CACHE_BYTES", 0)
    decoded = Loader(folder.train, side, threads=3)
    assert kept.cache is not None and decoded.cache is None
    shares = [share(11, 0, 5), share(6), share(7, 7), share(1, 2, 3, 4), share(8, 9, 10)]
    batches = list(kept.batches(shares))
    assert [s for s, _ in batches] == shares
    for (s, (images, labels)), (_, (others, _)) in zip(
        batches, decoded.batches(shares), strict=True
    ):
        assert images.shape == (len(s.indices), 3, side, side) and images.dtype == torch.uint8
        assert torch.equal(images, others)
        assert labels.dtype == torch.int64
        assert reds(images) == s.indices
        assert (
            labels.tolist()
            == [folder.train[i][1] for i in s.indices]
            == [int(i >= 6) for i in s.indices]
        )


@pytest.mark.parametrize("soon", [(), [3, 4, 3], range(12)])
def test_what_is_not_decoded_at_once_is_decoded_when_it_is_asked_for(folder, soon, monkeypatch):
    decoded = []
    decode = Loader._decode
    monkeypatch.setattr(
        Loader,
        "_decode",
        lambda self, index, *rest: (decoded.append(index), decode(self, index, *rest))[1],
    )
    loaded = Loader(folder.train, 32, threads=2, soon=soon)
    assert sorted(decoded) == sorted(set(soon))
    for wanted in (share(3, 7), share(7, 11, 0)):
        [(_, (images, _))] = loaded.batches([wanted])
        assert reds(images) == wanted.indices
    assert sorted(decoded) == sorted({*soon, 0, 3, 7, 11})


def test_images_are_kept_only_if_all_fit(folder, monkeypatch):
    monkeypatch.setattr(loader, "CACHE_BYTES", 12 * 3 * 32 * 32)
    assert Loader(folder.train, 32, 1).cache is not None
    assert Loader(folder.train, 33, 1).cache is None


def test_few_batches_are_decoded_ahead(folder, monkeypatch):
    """However long the epoch, memory holds the batch in hand and AHEAD more."""
    monkeypatch.setattr(loader, "CACHE_BYTES", 0)
    taken = []

    def shares():
        for i in range(12):
            taken.append(i)
            yield share(i)

    for look_ahead in (True, False):
        taken.clear()
        batches = Loader(folder.train, 32, 2).batches(shares(), look_ahead)
        for done in range(1, 5):
            next(batches)
            assert len(taken) == done + (AHEAD if look_ahead else 0)


# Size


def three_squares(side):
    """A red, a green and a blue square from left to right."""
    image = Image.new("RGB", (3 * side, side))
    for i, colour in enumerate((RED, GREEN, BLUE)):
        image.paste(colour, (i * side, 0, (i + 1) * side, side))
    return image


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("side", [16, 32, 64])
def test_the_middle_of_an_image_that_is_not_square_is_kept(tmp_path, side, is_wide):
    image = three_squares(side)
    (image if is_wide else image.transpose(Image.Transpose.ROTATE_90)).save(tmp_path / "i.png")
    pixels = one(tmp_path / "i.png")
    inner = pixels[:, 4:-4, 4:-4]  # interpolation blends a few pixels at the borders
    assert (inner == torch.tensor(GREEN, dtype=torch.uint8).view(3, 1, 1)).all()
    assert (pixels[1] > 100).all()


def test_shrinking_averages(tmp_path):
    """Without antialiasing, a board of single black and white pixels would come out black or white."""
    board = np.indices((96, 96)).sum(0) % 2 * 255
    Image.fromarray(board.astype(np.uint8)).save(tmp_path / "i.png")
    assert ((one(tmp_path / "i.png").int() - 127).abs() < 20).all()


@pytest.mark.parametrize(
    ("size", "side"), [((8, 8), 32), ((32, 32), 32), ((100, 60), 60), ((999, 500), 224)]
)
def test_native_side_is_that_of_most_images_and_not_of_the_first(tmp_path, size, side):
    samples = [(tmp_path / f"{number}.png", 0) for number in range(8)]
    for path, _ in samples:
        Image.new("RGB", size).save(path)
    Image.new("RGB", (150, 40)).save(samples[0][0])
    assert native_side(ImageFolder(tmp_path, ("a", "b"), samples, [])) == side


def test_the_size_that_a_build_found_is_taken_and_none_is_opened(small, monkeypatch):
    monkeypatch.setattr(image, "open_image", None)
    assert native_side(scan(small)) == 128


# Photographs


def photograph(size, orientation=1):
    """A smooth picture with the four quarters of its upright self in four colours, stored as a
    camera does.
    """
    upright = Image.new("RGB", (2, 2))
    upright.putdata([(200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40)])
    upright = upright.resize(size, Image.Resampling.NEAREST)
    undo = {
        1: None,
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_90,
        8: Image.Transpose.ROTATE_270,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        5: Image.Transpose.TRANSPOSE,
    }[orientation]
    stored = upright.transpose(undo) if undo is not None else upright
    exif = stored.getexif()
    exif[0x0112] = orientation
    return stored, exif


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
@pytest.mark.parametrize("orientation", [2, 3, 5, 6, 8])
def test_an_image_is_trained_on_as_its_camera_was_held(tmp_path, orientation, kind, augment):
    shown = []
    for how in (1, orientation):
        stored, exif = photograph((96, 72), how)
        stored.save(
            tmp_path / f"{how}.{kind}", exif=exif, **({"quality": 95} if kind != "png" else {})
        )
        shown.append(one(tmp_path / f"{how}.{kind}", 36, augment).int())
    assert (shown[0] - shown[1]).abs().float().mean() < 4


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_an_orientation_that_cannot_be_read_is_none(tmp_path):
    stored, _ = photograph((64, 64))
    stored.save(tmp_path / "i.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12")
    assert one(tmp_path / "i.jpg").shape == (3, 32, 32)


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_a_jpeg_that_is_much_larger_is_decoded_smaller_and_looks_the_same(
    tmp_path, augment, monkeypatch
):
    coarse = np.random.default_rng(3).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((1600, 1200), Image.Resampling.BICUBIC).save(
        tmp_path / "i.jpg", quality=95
    )
    decoded = []

    def sizes_of(picture):
        decoded.append(picture.size)
        return picture.convert("RGB")

    monkeypatch.setattr(loader, "in_rgb", sizes_of)
    shown = []
    for smaller in (loader.decode_smaller, lambda picture, factor: None):
        monkeypatch.setattr(loader, "decode_smaller", smaller)
        shown.append(one(tmp_path / "i.jpg", 64, augment).int())
    assert decoded[0][0] < 1600 == decoded[-1][0]
    assert min(decoded[0]) >= 2 * 64
    assert (shown[0] - shown[1]).abs().float().mean() < 2


def test_pretrained_weights_are_tested_as_torchvision_does_it(tmp_path):
    from torchvision.models import VGG16_Weights
    from torchvision.transforms.v2 import functional

    preset = VGG16_Weights.IMAGENET1K_V1.transforms()
    for number, size in enumerate([(500, 375), (375, 500), (256, 256), (301, 999), (230, 260)]):
        noise = np.random.default_rng(number).integers(
            0, 256, (size[1], size[0], 3), dtype=np.uint8
        )
        Image.fromarray(noise).save(tmp_path / "i.jpg")
        with Image.open(tmp_path / "i.jpg") as picture:
            scaled = functional.resize(
                picture, preset.resize_size, interpolation=preset.interpolation, antialias=True
            )
            expected = functional.pil_to_tensor(functional.center_crop(scaled, preset.crop_size))
        found = one(tmp_path / "i.jpg", 224, resize=evaluation_resize(PRETRAINED, 224))
        assert (found.int() - expected.int()).abs().max() <= 1  # of 255: rounded otherwise
    assert evaluation_resize(PRETRAINED, 64) == evaluation_resize(RunConfig(), 224) == 0


NARROW = """
import resource, sys
from pathlib import Path
from hvdtrain.data.loader import Loader
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pixels = Loader([(Path(sys.argv[1]), 0)], 224, 1, resize=256).cache[0]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, *pixels[0, [0, -1], 0].tolist())
"""


@pytest.mark.parametrize("size", [(1, 30_000), (30_000, 1)])
def test_of_a_narrow_image_no_more_is_scaled_than_is_seen(size, tmp_path):
    """All of it with a shorter side of 256 would be 256 x 7,680,000 pixels: 5.9 GB."""
    long = np.linspace(0, 255, 30_000).astype(np.uint8).reshape(size[::-1])
    Image.fromarray(long).save(tmp_path / "i.png")
    command = [sys.executable, "-c", NARROW, str(tmp_path / "i.png")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    more_kb, first, last = map(int, done.stdout.split())
    assert more_kb < 100_000 and first in (126, 127, 128) and last in (126, 127, 128)


# Kinds of pixels


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("L", 100, (100, 100, 100)),
        ("LA", (100, 51), (224, 224, 224)),
        ("1", 1, (255, 255, 255)),
        ("RGBA", (10, 20, 30, 51), (206, 208, 210)),
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("I;16", 0x8000, (128,) * 3),
    ],
    ids=str,
)
def test_every_kind_of_pixel_becomes_three_channels(tmp_path, mode, colour, expected):
    image = Image.new(mode, (32, 32), colour)
    image.save(tmp_path / "i.png")
    with Image.open(tmp_path / "i.png") as saved:
        assert saved.mode == mode
    assert one(tmp_path / "i.png")[:, 5, 5].tolist() == list(expected)


def test_a_palette_becomes_its_colours(tmp_path):
    picture = three_squares(32).convert("P", palette=Image.Palette.ADAPTIVE)
    for options, expected in (({}, GREEN), ({"transparency": bytes(3)}, WHITE)):
        picture.save(tmp_path / "i.png", **options)
        assert one(tmp_path / "i.png")[:, 16, 16].tolist() == list(expected)


def see_through(mode):
    """Hidden black on the left, and red or grey on the right."""
    image = Image.new("RGBA", (96, 72), (0, 0, 0, 0))
    image.paste((200, 40, 40, 255), (48, 0, 96, 72))
    if mode == "P":
        image = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    return image.convert(mode)


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGBA", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "WEBP")]
)
def test_transparency_shows_the_same_ground_in_a_shrunk_image_and_a_whole_one(mode, kind, tmp_path):
    content = encoded(see_through(mode), kind)
    shown = []
    for number, bytes_ in enumerate((content, image.shrink(content, 36, "it"))):
        (tmp_path / f"{number}.png").write_bytes(bytes_)
        shown.append(one(tmp_path / f"{number}.png").int())
    for pixels in shown:
        assert pixels[:, 16, 4].tolist() == list(WHITE) and pixels[1, 16, 28] < 120
    assert (shown[0] - shown[1]).abs().float().mean() < 4


@pytest.mark.parametrize(("mode", "colour"), [("RGB", (1, 2, 3)), ("L", 9)])
def test_a_colour_that_stands_for_transparency_shows_the_ground(mode, colour, tmp_path):
    content = io.BytesIO()
    Image.new(mode, (96, 72), colour).save(content, "PNG", transparency=colour)
    for number, bytes_ in enumerate(
        (content.getvalue(), image.shrink(content.getvalue(), 36, "it"))
    ):
        (tmp_path / f"{number}.png").write_bytes(bytes_)
        assert one(tmp_path / f"{number}.png")[:, 16, 16].tolist() == list(WHITE)


# Large images

LARGE = """
import resource, sys
from pathlib import Path
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from hvdtrain.data import image
from hvdtrain.data.loader import Loader
path, resize = Path(sys.argv[1]), int(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
image.decode(path.read_bytes(), "it")
small = image.shrink(path.read_bytes(), 256, "it")
pixels = Loader([(path, 0)], 64, 1, resize=resize).cache[0]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, pixels[0, 32, 32].item())
"""


@pytest.mark.parametrize(("resize", "most_kb"), [(0, 60_000), (72, 300_000)])
def test_a_photo_of_108_megapixels_is_decoded_smaller_within_a_limit_of_memory(
    resize, most_kb, tmp_path
):
    """In RGB it would take 432 MB."""
    Image.new("L", (12_000, 9_000), 77).save(tmp_path / "i.jpg", quality=30)
    command = [sys.executable, "-c", LARGE, str(tmp_path / "i.jpg"), str(resize)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    more_kb, pixel = map(int, done.stdout.split())
    assert more_kb < most_kb and abs(pixel - 77) <= 2


def test_a_jpeg_beyond_the_limit_is_decoded_smaller_only_as_far_as_it_must(monkeypatch, tmp_path):
    monkeypatch.setattr(image, "MAX_PIXELS", 40_000)
    decoded = []
    monkeypatch.setattr(
        loader, "in_rgb", lambda picture: decoded.append(picture.size) or picture.convert("RGB")
    )
    for size, expected in (
        ((200, 200), (200, 200)),
        ((401, 399), (201, 200)),
        ((799, 199), (400, 100)),
    ):
        Image.new("RGB", size).save(tmp_path / "i.jpg")
        one(tmp_path / "i.jpg", 32, resize=36)
        assert decoded[-1] == expected, size
    with pytest.raises(Failure, match="more than 40,000 in all"):
        Image.new("RGB", (401, 399)).save(tmp_path / "i.png")
        one(tmp_path / "i.png")


@pytest.mark.parametrize(
    ("options", "is_read"),
    [({}, True), ({"progressive": True}, False), ({"progressive": True, "subsampling": 2}, True)],
    ids=str,
)
def test_a_jpeg_whose_coefficients_would_all_be_in_memory_is_refused(options, is_read, monkeypatch):
    content = io.BytesIO()
    Image.new("RGB", (200, 100)).save(content, "JPEG", **({"subsampling": 0} | options))
    monkeypatch.setattr(image, "MAX_COEFFICIENT_BYTES", 200 * 100 * 2 * 2)
    if is_read:
        assert image.open_image(content.getvalue(), "it").size == (200, 100)
        return
    with pytest.raises(Failure, match="in several scans, as progressive JPEGs have"):
        image.open_image(content.getvalue(), "it")


# What people call images


def test_a_format_is_known_by_content_whatever_the_name(tmp_path):
    for kind, name in (("PNG", "a.jpg"), ("JPEG", "b.png"), ("WEBP", "c.bmp"), ("BMP", "d.jpe")):
        (tmp_path / name).write_bytes(encoded(Image.new("RGB", (40, 40), RED), kind))
        assert (one(tmp_path / name)[:, 16, 16] - torch.tensor(RED)).abs().max() <= 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GIF89a" + bytes(30), "it is a GIF, and no PNG, JPEG, BMP, WEBP"),
        (b"\0\0\0\x20ftypheic" + bytes(30), "it is a HEIC, and no"),
        (b"\0\0\0\x20ftypavif" + bytes(30), "it is an AVIF, and no"),
        (b"\n<!DOCTYPE html><html>", "it is an HTML page, and no"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "it is a Git LFS pointer, which `git"),
        (b"PK\3\4" + bytes(30), "it is a zip, and no"),
        (b"\xff\xd8\xff\xe0", "it begins as a JPEG, and is damaged or cut off"),
        (b"", "the file is empty"),
        (b"hello", "it is no PNG, JPEG, BMP, WEBP;"),
    ],
    ids=str,
)
def test_the_real_format_is_named_where_it_is_none_of_ours(content, words, tmp_path):
    (tmp_path / "i.jpg").write_bytes(content)
    with pytest.raises(Failure, match=re.escape(words)):
        one(tmp_path / "i.jpg")


def test_a_png_with_a_long_text_or_colour_profile_is_an_image(tmp_path):
    text = PngInfo()
    text.add_text("parameters", "x" * 2_000_000, zip=True)
    profile = bytes(range(256)) * 8000
    for options in ({"pnginfo": text}, {"icc_profile": profile}):
        Image.new("RGB", (40, 40), RED).save(tmp_path / "i.png", **options)
        assert one(tmp_path / "i.png")[:, 16, 16].tolist() == list(RED)


# Broken images


def encoded(picture, kind):
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (
            lambda: encoded(Image.new("1", (8001, 8001)), "PNG"),
            "has 8,001 x 8,001 pixels, more than 64,000,000 in all",
        ),
        (
            lambda: encoded(Image.new("1", (14_000, 14_000)), "PNG"),
            "has 14,000 x 14,000 pixels, more than 64,000,000 in all",
        ),
        (
            lambda: encoded(Image.new("1", (32, 32)), "TIFF"),
            "is not an image that can be read: it is a TIFF, and no PNG, JPEG, BMP, WEBP",
        ),
        (lambda: b"x" * 30_000, "has 30,000 bytes, too many for an image"),
    ],
    ids=["pixels", "many pixels", "tiff", "bytes"],
)
def test_training_and_building_refuse_the_same_with_the_same_words(
    content, what, tmp_path, monkeypatch
):
    monkeypatch.setattr(image, "MAX_BYTES", 25_000)
    path = archives.lay_out(tmp_path / "in", archives.class_folders("ab", 3)) / "a" / "0.png"
    path.write_bytes(content())
    for read in (
        lambda: one(path),
        lambda: native_side(ImageFolder(tmp_path, ("a", "b"), [(path, 0)], [])),
    ):
        with pytest.raises(Failure, match=f"^{path} {what}"):
            read()
    with pytest.raises(Failure, match=f"a/0.png {what}"):
        build("imagenet-slice", tmp_path / "out", images_from=tmp_path / "in")


def test_a_missing_image_is_a_failure_that_names_the_file(tmp_path):
    path = tmp_path / "gone.png"
    for read in (
        lambda: one(path),
        lambda: native_side(ImageFolder(tmp_path, ("a", "b"), [(path, 0)], [])),
    ):
        with pytest.raises(Failure, match=f"^{path} cannot be read: No such file"):
            read()


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 36, 3), dtype=np.uint8))


@given(st.sampled_from(["png", "jpeg", "bmp", "webp"]), st.data())
def test_whatever_happened_to_a_file_it_is_an_image_or_a_failure(kind, data):
    content = bytearray(encoded(NOISE, kind))
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"i.{kind}"
        path.write_bytes(content[:cut])
        try:
            one(path)
        except Failure as failure:
            assert str(failure).startswith(f"{path} ")
