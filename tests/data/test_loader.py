"""From image files to batches of tensors."""

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import archives
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hvdtrain.config.run_config import RunConfig
from hvdtrain.data import image, loader
from hvdtrain.data.augment import Augment
from hvdtrain.data.build import build
from hvdtrain.data.folder import ImageFolder, scan
from hvdtrain.data.image import native_side
from hvdtrain.data.loader import AHEAD, Loader
from hvdtrain.data.sampling import Share
from hvdtrain.errors import Failure
from hvdtrain.rank.work import evaluation_resize

PRETRAINED = RunConfig(model="vgg16", pretrained="imagenet")
pytestmark = pytest.mark.usefixtures("one_thread")

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def share(*indices):
    return Share(1, 1, list(indices), 1.0, len(indices))


def one(path, side=32, augment="none", **options):
    """The pixels, [3, side, side], of a single file."""
    [(_, (images, _))] = Loader([(path, 0)], side, 1, Augment(augment, 5), **options).batches([share(0)])
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
                Image.new("RGB", size, (10 * number, 0, 99)).save(root / part / name / f"{i}.{suffix}")
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
    for (s, (images, labels)), (_, (others, _)) in zip(batches, decoded.batches(shares), strict=True):
        assert images.shape == (len(s.indices), 3, side, side) and images.dtype == torch.uint8
        assert torch.equal(images, others)
        assert labels.dtype == torch.int64
        assert reds(images) == s.indices
        assert labels.tolist() == [folder.train[i][1] for i in s.indices] == [int(i >= 6) for i in s.indices]


@pytest.mark.parametrize("soon", [(), [3, 4, 3], range(12)])
def test_what_is_not_decoded_at_once_is_decoded_when_it_is_asked_for(folder, soon, monkeypatch):
    decoded = []
    decode = Loader._decode
    monkeypatch.setattr(
        Loader, "_decode", lambda self, index, *rest: (decoded.append(index), decode(self, index, *rest))[1]
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


@pytest.mark.parametrize(("size", "side"), [((8, 8), 32), ((32, 32), 32), ((100, 60), 60), ((999, 500), 224)])
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
    """A smooth picture with the four quarters of its upright self in four colours, stored as a camera does."""
    upright = Image.new("RGB", (2, 2))
    upright.putdata([(200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40)])
    upright = upright.resize(size, Image.Resampling.NEAREST)
    undo = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270,
            2: Image.Transpose.FLIP_LEFT_RIGHT, 5: Image.Transpose.TRANSPOSE}[orientation]  # fmt: skip
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
        stored.save(tmp_path / f"{how}.{kind}", exif=exif, **({"quality": 95} if kind != "png" else {}))
        shown.append(one(tmp_path / f"{how}.{kind}", 36, augment).int())
    assert (shown[0] - shown[1]).abs().float().mean() < 4


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_an_orientation_that_cannot_be_read_is_none(tmp_path):
    stored, _ = photograph((64, 64))
    stored.save(tmp_path / "i.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12")
    assert one(tmp_path / "i.jpg").shape == (3, 32, 32)


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_a_jpeg_that_is_much_larger_is_decoded_smaller_and_looks_the_same(tmp_path, augment, monkeypatch):
    coarse = np.random.default_rng(3).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((1600, 1200), Image.Resampling.BICUBIC).save(tmp_path / "i.jpg", quality=95)
    decoded = []

    def sizes_of(picture):
        decoded.append(picture.size)
        return picture.convert("RGB")

    monkeypatch.setattr(loader, "_rgb", sizes_of)
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
        noise = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "i.jpg")
        with Image.open(tmp_path / "i.jpg") as picture:
            scaled = functional.resize(picture, preset.resize_size, interpolation=preset.interpolation, antialias=True)
            expected = functional.pil_to_tensor(functional.center_crop(scaled, preset.crop_size))
        assert torch.equal(one(tmp_path / "i.jpg", 224, resize=evaluation_resize(PRETRAINED, 224)), expected)
    assert evaluation_resize(PRETRAINED, 64) == evaluation_resize(RunConfig(), 224) == 0


# Kinds of pixels


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("L", 100, (100, 100, 100)), ("LA", (100, 7), (100, 100, 100)), ("1", 1, (255, 255, 255)),
        ("RGBA", (10, 20, 30, 7), (10, 20, 30)), ("RGB", (10, 20, 30), (10, 20, 30)), ("I;16", 0x8000, (128,) * 3),
    ],
    ids=str,
)  # fmt: skip
def test_every_kind_of_pixel_becomes_three_channels(tmp_path, mode, colour, expected):
    image = Image.new(mode, (32, 32), colour)
    image.save(tmp_path / "i.png")
    with Image.open(tmp_path / "i.png") as saved:
        assert saved.mode == mode
    assert one(tmp_path / "i.png")[:, 5, 5].tolist() == list(expected)


def test_a_palette_becomes_its_colours(tmp_path):
    picture = three_squares(32).convert("P", palette=Image.Palette.ADAPTIVE)
    for options in ({}, {"transparency": bytes(3)}):
        picture.save(tmp_path / "i.png", **options)
        assert one(tmp_path / "i.png")[:, 16, 16].tolist() == list(GREEN)


# Broken images


def encoded(picture, kind):
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (encoded(Image.new("1", (8001, 8001)), "PNG"), "has 8,001 x 8,001 pixels, more than 64,000,000 in all"),
        (encoded(Image.new("1", (14_000, 14_000)), "PNG"), "has 14,000 x 14,000 pixels, more than 64,000,000 in all"),
        (encoded(Image.new("1", (32, 32)), "TIFF"), "is not an image that can be read: it is no PNG, JPEG, BMP, WEBP"),
        (b"x" * 30_000, "has 30,000 bytes, too many for an image"),
    ],
    ids=["pixels", "many pixels", "tiff", "bytes"],
)
def test_training_and_building_refuse_the_same_with_the_same_words(content, what, tmp_path, monkeypatch):
    monkeypatch.setattr(image, "MAX_BYTES", 25_000)
    path = archives.lay_out(tmp_path / "in", archives.class_folders("ab", 3)) / "a" / "0.png"
    path.write_bytes(content)
    for read in (lambda: one(path), lambda: native_side(ImageFolder(tmp_path, ("a", "b"), [(path, 0)], []))):
        with pytest.raises(Failure, match=f"^{path} {what}"):
            read()
    with pytest.raises(Failure, match=f"a/0.png {what}"):
        build("imagenet-slice", tmp_path / "out", images_from=tmp_path / "in")


def test_a_missing_image_is_a_failure_that_names_the_file(tmp_path):
    path = tmp_path / "gone.png"
    for read in (lambda: one(path), lambda: native_side(ImageFolder(tmp_path, ("a", "b"), [(path, 0)], []))):
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
