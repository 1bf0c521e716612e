"""Data sets from files that people have, in every layout that they come in."""

import gzip
import hashlib
import pickle
import struct
import tomllib
from collections import Counter

import numpy as np
import pytest
from helpers import archives
from PIL import Image

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data.build import build
from hvdtrain.data.folder import scan
from hvdtrain.data.recipe import Recipe

LABELS = archives.wnids(6)


def counts(folder):
    """{class: (training, validation, test images)}"""
    data = scan(folder)
    parts = [
        Counter(label for _, label in part) for part in (data.train, data.validation, data.test)
    ]
    return {name: tuple(part[label] for part in parts) for label, name in enumerate(data.classes)}


def contents(folder, names="*.*"):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob(names)}


# COIL-100


@pytest.fixture(scope="module")
def coil(tmp_path_factory):
    file = tmp_path_factory.mktemp("coil") / "coil-100.zip"
    file.write_bytes(archives.zipped(archives.coil()))
    return file


def test_coil_has_the_three_classes_of_its_reference(coil, tmp_path):
    out = build("coil100", tmp_path / "out", images_from=coil)
    made = counts(out)
    assert {name: sum(parts) for name, parts in made.items()} == {
        "edible": 1296,
        "other": 4464,
        "toy": 1440,
    }
    assert {name: parts[1] for name, parts in made.items()} == {
        "edible": 259,
        "other": 893,
        "toy": 288,
    }
    said = tomllib.loads((out / "dataset.toml").read_text())
    assert said["input"]["sha256"] == hashlib.sha256(coil.read_bytes()).hexdigest()
    assert "near duplicates" in said["split"]
    assert len(list(out.glob("*/edible/obj2__0.png"))) == 1


def test_coil_from_a_folder_gives_the_same_images_and_can_be_linked(coil, tmp_path):
    options = {"classes": "objects", "split": "by-angle"}
    folder = archives.lay_out(tmp_path / "in", archives.coil())
    zipped = build("coil100", tmp_path / "zipped", images_from=coil, **options)
    linked = build("coil100", tmp_path / "linked", images_from=folder, link="symlink", **options)
    assert len(scan(zipped).classes) == 100 and "obj100" in scan(zipped).classes
    assert contents(zipped, "*.png") == contents(linked, "*.png")
    assert all(path.is_symlink() for path in linked.rglob("*.png"))
    assert (
        "ends have near duplicates" in tomllib.loads((zipped / "dataset.toml").read_text())["split"]
    )


def test_coils_objects_are_held_out_whole(coil, tmp_path):
    data = scan(build("coil100", tmp_path / "out", images_from=coil, split="by-object"))
    seen, held = (
        {path.name.split("__")[0] for path, _ in part} for part in (data.train, data.validation)
    )
    assert not seen & held
    assert len(held) == round(0.2 * 18) + round(0.2 * 20) + round(0.2 * 62)
    with pytest.raises(Failure, match="has 1 object: a split needs at least two"):
        build("coil100", tmp_path / "other", images_from=coil, split="by-object", classes="objects")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (archives.coil(objects=99), "7,128 of the 7,200 images: is it whole"),
        ({"a.txt": b"x"}, "no file with a name such as the recipe describes"),
    ],
)
def test_what_is_not_coil_is_refused(files, words, tmp_path):
    (tmp_path / "x.zip").write_bytes(archives.zipped(files))
    with pytest.raises((Failure, UsageError), match=words):
        build("coil100", tmp_path / "out", images_from=tmp_path / "x.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["x.zip"]


# ImageNet


def put(tmp_path, files, kind="folder"):
    """The files as a folder or an archive; where it is."""
    if kind == "folder":
        return archives.lay_out(tmp_path / "in", files)
    place = tmp_path / f"in.{kind}"
    place.write_bytes(
        archives.zipped(files)
        if kind == "zip"
        else archives.tarred(files, {"tgz": "w:gz"}.get(kind, "w"))
    )
    return place


@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "tgz"])
@pytest.mark.parametrize(
    "layout", [archives.imagenet100, archives.kaggle, archives.plain, archives.tiny]
)
def test_every_layout_gives_the_same_classes(layout, kind, tmp_path):
    place = put(tmp_path, layout(LABELS, 10, 3), kind)
    for name in ("imagenet-slice", "folder"):
        out = build(name, tmp_path / name, images_from=place)
        assert counts(out) == dict.fromkeys(LABELS, (10, 3, 0))
        shown = {path.read_bytes() for path in (out / "ValidationData" / LABELS[4]).iterdir()}
        first = 4010 if layout is archives.plain else 4500
        assert shown == {archives.picture(first + k, kind="JPEG") for k in range(3)}


def test_the_tars_of_ilsvrc_give_the_classes_that_are_wanted(tmp_path):
    place = archives.ilsvrc(tmp_path / "in", LABELS, 10, 3)
    out = build(
        "imagenet-slice", tmp_path / "out", images_from=place, classes=f"thing 4,{LABELS[1]}"
    )
    assert counts(out) == dict.fromkeys([LABELS[1], LABELS[4]], (10, 3, 0))
    shown = {path.read_bytes() for path in (out / "ValidationData" / LABELS[4]).iterdir()}
    assert shown == {archives.picture(4500 + k, kind="JPEG") for k in range(3)}
    alone = build(
        "imagenet-slice",
        tmp_path / "alone",
        images_from=place / "ILSVRC2012_img_train.tar",
        num_classes=2,
    )
    assert list(counts(alone).values()) == [(10, 3, 0)] * 2
    (place / "ILSVRC2012_img_val.tar").unlink()
    drawn = build("imagenet-slice", tmp_path / "drawn", images_from=place, num_classes=2)
    assert list(counts(drawn).values()) == [(8, 2, 0)] * 2


@pytest.mark.parametrize(
    ("kit", "words"),
    [
        (lambda: None, "img_val.tar' needs ILSVRC2012_devkit_t12.tar.gz in the same folder"),
        (
            lambda: archives.tarred({"meta.mat": b""}, "w:gz"),
            "holds no meta.mat, or no ground truth",
        ),
        (
            lambda: archives.ilsvrc_kit(archives.nested_mat(10**5), [1] * 6),
            "meta.mat has no table of classes",
        ),
        (
            lambda: archives.ilsvrc_kit(archives.meta_mat([(1, "n1", "x")] * 2), [7] * 6),
            "1.JPEG, for which",
        ),
    ],
)
def test_a_development_kit_that_cannot_be_right_is_a_line(kit, words, tmp_path):
    place = archives.ilsvrc(tmp_path / "in", LABELS, 1, 1)
    file = place / "ILSVRC2012_devkit_t12.tar.gz"
    file.unlink()
    if content := kit():
        file.write_bytes(content)
    with pytest.raises((Failure, UsageError), match=words):
        build("imagenet-slice", tmp_path / "out", images_from=place)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layout", "name"), [(archives.imagenet100, "other thing 0"), (archives.kaggle, "Thing 0")]
)
def test_classes_are_chosen_by_name_too(layout, name, tmp_path):
    place = put(tmp_path, layout(LABELS, 4, 2))
    out = build(
        "imagenet-slice", tmp_path / "out", images_from=place, classes=f"{LABELS[3]}, {name}"
    )
    assert list(counts(out)) == [LABELS[0], LABELS[3]]


@pytest.mark.parametrize("kind", ["folder", "zip"])
@pytest.mark.parametrize(
    ("above", "split"),
    [
        ("", (9, 2, 0)),
        ("photos/mine/", (9, 2, 0)),
        ("train/", (11, 5, 0)),
        ("test/imagenet/train/", (11, 5, 0)),
    ],
)
def test_what_lies_deeper_belongs_to_the_class_of_the_first_level(above, split, kind, tmp_path):
    files = {
        f"{above}{name}": content
        for name, content in archives.class_folders(["cat", "dog"], 8).items()
    }
    for i, name in enumerate(("cat", "dog")):
        deeper = (f"{name}/more/deep/0.png", f"{name}/more/0.png", f"{name}/test/old/0.png")
        files |= {
            f"{above}{path}": archives.picture(500 + 10 * i + k) for k, path in enumerate(deeper)
        }
    if above.endswith("train/"):
        files |= {
            f"{above.replace('train', 'val')}{name}/deep/er/{k}.png": archives.picture(700 + k)
            for name in ("cat", "dog")
            for k in range(5)
        }
    if above:
        # which is in no class's folder
        files[f"{above.split('/')[0]}/logo.png"] = archives.picture(900)
    out = build("imagenet-slice", tmp_path / "out", images_from=put(tmp_path, files, kind))
    assert counts(out) == {"cat": split, "dog": split}
    names = {path.name for path in out.glob("*/cat/*")}
    assert {"0.png", "more_deep_0.png", "more_0.png", "test_old_0.png"} <= names


def test_a_slice_is_chosen_limited_held_out_and_shrunk(tmp_path):
    place = put(tmp_path, archives.imagenet100(LABELS, 20, 5))
    limits = {"train_per_class": 9, "val_per_class": 4}
    options = limits | {"num_classes": 3, "seed": 1, "test_fraction": 0.25, "resize": 10}
    out = build("imagenet-slice", tmp_path / "out", images_from=place, **options)
    assert list(counts(out).values()) == [(9, 4, 5)] * 3
    for path in out.rglob("*.JPEG"):
        with Image.open(path) as image:
            assert (image.size, image.format) == ((12, 10), "JPEG")
    second = build("imagenet-slice", tmp_path / "second", images_from=place, **options)
    assert contents(second) == contents(out)
    other = build("imagenet-slice", tmp_path / "other", images_from=place, **options | {"seed": 2})
    assert set(counts(other)) != set(counts(out)) or contents(other) != contents(out)


def test_the_named_slice_has_the_sizes_of_its_reference():
    """650 steps of 32 in an epoch: 20 classes of 1,040 training images, of the 1,300 that a class
    has.
    """
    options = Recipe.load("imagenet20").options
    assert 20 * (1300 - round(options["test_fraction"] * 1300)) == 650 * 32 == 20_800
    assert (options["num_classes"], options["resize"]) == (20, 256)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": "dog"}, "unknown class 'dog': choose from n0"),
        ({"num_classes": 7}, "7 classes were asked for, and there are 6"),
        ({"classes": LABELS[0]}, "1 class would be left"),
        ({"classes": LABELS[0], "num_classes": 2}, "exclude each other"),
        ({"link": "hard", "resize": 8}, "does not go with --resize"),
        ({"link": "hard"}, "needs images that lie in a folder"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(options, words, tmp_path):
    place = put(tmp_path, archives.plain(LABELS, 3, 1), "zip")
    with pytest.raises(UsageError, match=words):
        build("imagenet-slice", tmp_path / "out", images_from=place, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in.zip"]


# CIFAR-10 and MNIST, with checksums of made files in place of the published ones


def md5(content):
    return hashlib.md5(content).hexdigest()


def test_cifar_is_read_by_torchvision(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
    batch = pickle.dumps({"data": pixels, "labels": [i % 10 for i in range(20)]})
    meta = pickle.dumps({"label_names": list("abcdefghij")})
    files = {"cifar-10-batches-py/batches.meta": meta}
    for part in ("train_list", "test_list"):
        names = [name for name, _ in getattr(CIFAR10, part)]
        files |= {f"cifar-10-batches-py/{name}": batch for name in names}
        monkeypatch.setattr(CIFAR10, part, [[name, md5(batch)] for name in names])
    archive = tmp_path / "in" / "cifar-10-python.tar.gz"
    archives.lay_out(tmp_path, {"in/cifar-10-python.tar.gz": archives.tarred(files, "w:gz")})
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(archive.read_bytes()))
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5(meta)})
    out = build("cifar10", tmp_path / "out", images_from=archive)
    assert counts(out) == {letter: (10, 2, 0) for letter in "abcdefghij"}
    with Image.open(out / "TrainData" / "b" / "train_00001.png") as image:
        assert np.array_equal(np.asarray(image), pixels[1].reshape(3, 32, 32).transpose(1, 2, 0))
    limited = build(
        "cifar10", tmp_path / "few", images_from=tmp_path / "in", train_per_class=3, val_per_class=1
    )
    assert set(counts(limited).values()) == {(3, 1, 0)}
    archive.write_bytes(archive.read_bytes() + b"\0")
    with pytest.raises(Failure, match="is not CIFAR10's cifar-10-python.tar.gz: its MD5 is not"):
        build("cifar10", tmp_path / "wrong", images_from=archive)
    with pytest.raises(UsageError, match="has no train-images-idx3-ubyte.gz"):
        build("mnist", tmp_path / "wrong", images_from=tmp_path / "in")


def test_mnist_is_read_by_torchvision(tmp_path, monkeypatch):
    from torchvision.datasets import MNIST

    files = {}
    for file, _ in MNIST.resources:
        n = 40 if file.startswith("train") else 20
        head = (
            struct.pack(">IIII", 2051, n, 28, 28)
            if "images" in file
            else struct.pack(">II", 2049, n)
        )
        body = (
            bytes(i % 251 for i in range(n * 784))
            if "images" in file
            else bytes(i % 10 for i in range(n))
        )
        files[file] = gzip.compress(head + body)
    monkeypatch.setattr(
        MNIST, "resources", [(file, md5(content)) for file, content in files.items()]
    )
    out = build("mnist", tmp_path / "out", images_from=put(tmp_path, files))
    assert counts(out) == {str(digit): (4, 2, 0) for digit in range(10)}
    with Image.open(out / "TrainData" / "0" / "train_00000.png") as image:
        assert (image.size, image.mode, image.getpixel((1, 0))) == ((28, 28), "L", 1)


# What a build must not do


@pytest.mark.parametrize("out", ["in", "in/inside", "."])
def test_a_build_never_goes_over_what_it_reads(out, tmp_path):
    place = put(tmp_path, archives.class_folders(["cat", "dog"], 4))
    with pytest.raises(UsageError, match="inside the other"):
        build("imagenet-slice", tmp_path / out, images_from=place, force=True)
    assert len(list(place.rglob("*.png"))) == 8


def test_changed_images_of_unchanged_size_are_built_anew(tmp_path):
    place = put(tmp_path, archives.class_folders(["cat", "dog"], 4))
    out = build("imagenet-slice", tmp_path / "out", images_from=place)
    image = place / "cat" / "0.png"
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    with pytest.raises(UsageError, match="other images.*--force"):
        build("imagenet-slice", out, images_from=place)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"val/cat/0.png": 0, "test/cat/1.png": 1, "val/dog/2.png": 2}, "none called train"),
        (
            {"train/cat/0.png": 0, "train/dog/1.png": 1, "val/2.png": 2},
            "no LOC_val_solution.csv or val_annotations.txt",
        ),
    ],
)
def test_a_layout_that_cannot_be_read_whole_is_refused(files, words, tmp_path):
    place = put(tmp_path, {name: archives.picture(number) for name, number in files.items()})
    for name in ("imagenet-slice", "folder"):
        with pytest.raises(UsageError, match=words):
            build(name, tmp_path / "out", images_from=place)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"val_0.JPEG n01 0 0",
            "val_annotations.txt cannot be read: line 1, .*, is not a name and a class with a tab",
        ),
        (
            b"val_0.JPEG\tn01\nval_\xe9.JPEG\tn02\n",
            "val_annotations.txt, line 2, is not UTF-8: save it as UTF-8$",
        ),
    ],
)
def test_a_table_of_classes_that_cannot_be_read_is_a_line(content, words, tmp_path):
    files = archives.tiny(LABELS, 3, 1)
    files["tiny-imagenet-200/val/val_annotations.txt"] = content
    with pytest.raises(Failure, match=words):
        build("folder", tmp_path / "out", images_from=put(tmp_path, files))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (None, UsageError, r"the images in .*/val/images/ of .* there is no .* or val_annotations"),
        (
            lambda lines: lines[:-1],
            Failure,
            "no class for 1 of the 2 .*/val/images/val_1.JPEG first",
        ),
        (lambda lines: [], Failure, "no class for 2 of the 2 .*/val/images/val_0.JPEG first"),
        (
            lambda lines: [lines[0], lines[1].replace(LABELS[1], "n99")],
            Failure,
            "has 'n99' as the class of .*/val_1.JPEG, and there are no training images of it: so of 1",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_table_of_classes_that_lacks_something_is_named(change, error, words, kind, tmp_path):
    table = "tiny-imagenet-200/val/val_annotations.txt"
    files = archives.tiny(LABELS[:2], 3, 1)
    lines = files.pop(table).decode().splitlines()
    if change:
        files[table] = "\n".join(change(lines)).encode()
    place = put(tmp_path, files, kind)
    for name in ("folder", "imagenet-slice"):
        with pytest.raises(error, match=words):
            build(name, tmp_path / "out", images_from=place)


def test_linked_folders_are_read_and_hidden_files_are_not(tmp_path):
    place = put(tmp_path, archives.class_folders(["cat", "dog"], 5))
    archives.lay_out(
        tmp_path / "elsewhere", {f"{k}.png": archives.picture(70 + k) for k in range(5)}
    )
    (place / "fox").symlink_to(tmp_path / "elsewhere")
    assert list(counts(build("imagenet-slice", tmp_path / "linked", images_from=place))) == [
        "cat",
        "dog",
        "fox",
    ]
    (place / "dog" / "loop").symlink_to(place)
    with pytest.raises(Failure, match="is a link to a folder that it is in"):
        build("imagenet-slice", tmp_path / "loop", images_from=place)
    hidden = dict.fromkeys(["__MACOSX/cat/._0.png", ".cache/x.png", "cat/.h.png"], b"x")
    hidden |= archives.class_folders(["cat", "dog"], 5)
    zipped = build("imagenet-slice", tmp_path / "zipped", images_from=put(tmp_path, hidden, "zip"))
    assert counts(zipped) == {"cat": (4, 1, 0), "dog": (4, 1, 0)}


def test_generated_images_come_from_nowhere_else(tmp_path):
    with pytest.raises(UsageError, match="digits takes no images from elsewhere"):
        build(
            "digits",
            tmp_path / "out",
            images_from=put(tmp_path, archives.class_folders(["a", "b"], 2)),
        )
