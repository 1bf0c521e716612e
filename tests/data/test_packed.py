"""Data sets packed into Parquet files, and such files of others, at several kinds of URL."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from helpers import archives
from helpers.jobs import SMALL, hvdtrain, make_images
from helpers.packed_sets import IN_A_GROUP, contents, first_row, pack, refused, theirs
from helpers.reader_threads import read_by_threads
from helpers.servers import serving

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data import kept_files, packing, row_groups
from hvdtrain.data.commands import data
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import content_hash, scan
from hvdtrain.data.image_side import native_side
from hvdtrain.data.loader import Loader
from hvdtrain.data.parquet_process import ParquetReader
from hvdtrain.data.sampling import BatchSampler, packing_order

pytestmark = pytest.mark.usefixtures("one_thread")
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.fixture(autouse=True)
def by_threads(monkeypatch):
    """How a process reads is told by test_packed_hostile.py, and jobs have processes here too."""
    read_by_threads(monkeypatch)


def contents_of(out):
    return {f"/{path.relative_to(out)}": path.read_bytes() for path in out.rglob("*.parquet")}


@pytest.fixture(params=["folder", "file", "http", "simplecache::http"])
def url(request, out):
    with serving(contents_of(out)) as server:
        yield {"folder": str(out), "file": f"file://{out}"}.get(
            request.param
        ) or request.param.replace("http", server.url)


def epoch(dataset, block=0):
    plan = BatchSampler(len(dataset.train), 5, seed=3, worker=0, workers=1, block=block)
    return list(Loader(dataset.train, 32, threads=2).batches(plan.epoch(1)))


@pytest.mark.parametrize("cached", [True, False])
def test_samples_and_their_order_are_those_of_the_folder(url, folder, cached, monkeypatch):
    if not cached:
        monkeypatch.setattr("hvdtrain.data.loader.CACHE_BYTES", 0)
    remote, local = find_dataset(url), scan(folder)
    assert remote.classes == local.classes
    assert remote.known_hash == content_hash(local) and remote.image_size == 36
    for block in (0, IN_A_GROUP):
        batches = zip(epoch(remote, block), epoch(local, block), strict=True)
        for (share, (images, labels)), (expected, (pixels, classes)) in batches:
            assert share == expected
            assert torch.equal(images, pixels) and torch.equal(labels, classes)
    assert contents(remote.validation) == contents(local.validation)


THEIRS = """
import sys, datasets
packed, cache, theirs = sys.argv[1:]
read = datasets.load_dataset(packed, cache_dir=cache)
assert list(read) == ["train", "validation"], read
assert isinstance(read["train"].features["image"], datasets.Image)
assert read["train"].features["label"] == datasets.ClassLabel(names=["cat", "dog"])
assert read["train"][0]["image"].size == (40, 36)
for part, rows in read.items():
    rows.to_parquet(f"{theirs}/data/{part}-00000-of-00001.parquet")
"""


def test_hugging_face_reads_what_is_packed_and_training_reads_what_hugging_face_writes(
    out, folder, tmp_path
):
    (tmp_path / "theirs" / "data").mkdir(parents=True)
    words = [
        sys.executable,
        "-c",
        THEIRS,
        str(out),
        str(tmp_path / "hub"),
        str(tmp_path / "theirs"),
    ]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    theirs, ours = find_dataset(str(tmp_path / "theirs")), scan(folder)
    assert theirs.classes == ours.classes and native_side(theirs) == 36
    assert theirs.known_hash.startswith("parquet:")
    assert contents(theirs.train) == contents(ours.train)
    assert contents(theirs.validation) == contents(ours.validation)


def test_files_have_the_layout_of_hugging_face(out, folder):
    images, files = scan(folder), sorted((out / "data").iterdir())
    names = [
        f"data/{part}-{n:05d}-of-00004.parquet"
        for part in ("train", "validation")
        for n in range(4)
    ]
    assert [str(path.relative_to(out)) for path in files] == names
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    order = [images.train[i] for i in packing_order(24)] + [*images.validation]
    assert rows == [
        {"image": {"bytes": path.read_bytes(), "path": path.name}, "label": label}
        for path, label in order
    ]
    for path in files:
        metadata = pq.read_metadata(path)
        assert [metadata.row_group(n).num_rows for n in range(2)] == [IN_A_GROUP, IN_A_GROUP]
        features = json.loads(metadata.metadata[b"huggingface"])["info"]["features"]
        assert features == {
            "image": {"_type": "Image"},
            "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
        }


def test_packing_twice_gives_the_same_bytes_and_touches_nothing(folder, out):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    written = contents_of(out)
    assert pack(folder, out) == IN_A_GROUP
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    pack(folder, out, force=True)
    assert contents_of(out) == written


def test_something_else_is_not_replaced_unless_told_to(folder, small, out, tmp_path):
    tested = shutil.copytree(folder, tmp_path / "more")
    for name in ("cat", "dog"):
        archives.lay_out(tested / "TestData" / name, {"1.png": archives.picture(900 + len(name))})
    for other in (small, tested):
        with pytest.raises(UsageError, match="holds something else.*--force"):
            pack(other, out)
        pack(other, out, force=True)
        assert find_dataset(str(out)).known_hash == content_hash(scan(other))
    assert contents(find_dataset(str(out)).test) == contents(scan(tested).test)
    shutil.copy(out / "data" / "test-00000-of-00001.parquet", out / "mine.parquet")
    with pytest.raises(
        UsageError, match=r"holds other Parquet files .mine.parquet.: give another URL"
    ):
        pack(folder, out, force=True)


def test_a_packed_set_is_packed_anew_but_not_onto_itself(out, folder, tmp_path):
    invoke = CliRunner().invoke
    packed_again = invoke(data, ["pack", str(out), str(tmp_path / "again")])
    assert packed_again.exit_code == 0, packed_again
    again = find_dataset(str(tmp_path / "again"))
    assert contents(again.train) == contents(
        scan(folder).train
    ) and again.known_hash == content_hash(scan(folder))
    assert "is what is to be packed" in str(
        invoke(data, ["pack", "--force", str(out), f"file://{out}"]).exception
    )
    said = str(invoke(data, ["pack", "--force", str(folder), str(folder)]).exception)
    assert (
        "holds something else too (TrainData, ValidationData" in said
        and not (folder / "data").exists()
    )
    assert "nothing to pack" in str(
        invoke(data, ["pack", "synthetic", str(tmp_path / "noise")]).exception
    )
    assert len(find_dataset(str(out)).train) == 24


def test_packing_writes_through_no_link_that_lies_where_it_writes(folder, few_rows, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("somebody's")
    (tmp_path / "packed" / "data").mkdir(parents=True)
    (tmp_path / "packed" / "data" / f"train-00000-of-00004.parquet{packing.UNFINISHED}").symlink_to(
        theirs
    )
    pack(folder, tmp_path / "packed")
    assert theirs.read_text() == "somebody's"
    assert len(find_dataset(str(tmp_path / "packed")).train) == 24


def test_packing_says_how_many_images_a_row_group_has(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "GROUP_BYTES", 2_000)
    monkeypatch.setattr(packing, "GROUP_ROWS", range(2, 1025))
    make_images(tmp_path / "set", train=40, validation=4, side=32)
    done = CliRunner().invoke(data, ["pack", str(tmp_path / "set"), str(tmp_path / "out")])
    [number] = re.findall(
        r"(\d+) images a row group: `train --shuffle-block \1` reads few of them", done.output
    )
    assert pq.read_metadata(next((tmp_path / "out").rglob("train-*"))).row_group(0).num_rows == int(
        number
    )


def test_files_of_two_packings_are_told_apart(folder, small, out, tmp_path):
    """As where two are packed to one URL at a time, or one is read while it is replaced."""
    (out / "data" / "train-00003-of-00004.parquet").unlink()
    assert "has 3 of the 4 files /data/train-*.parquet" in refused(out)
    changed = shutil.copytree(folder, tmp_path / "changed")
    (changed / "TrainData" / "cat" / "0.0.png").write_bytes(archives.picture(999))
    pack(changed, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "data" / "train-00003-of-00004.parquet", out / "data")
    assert "files of two packings" in refused(out)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_what_others_write_is_read(compression, tmp_path):
    """Compressed, with a dictionary, without paths; a test part stands for validation, and one
    without labels is none.
    """
    theirs(tmp_path, compression=compression)
    theirs(tmp_path, "test", label=pa.array([1, 1, 1, 0], pa.uint8()), compression=compression)
    found = find_dataset(str(tmp_path))
    assert (found.classes, len(found.validation), found.test) == (("a", "b"), 4, ())
    assert contents(found.validation) == [
        (archives.picture(1, (40, 36)), label) for label in (1, 1, 1, 0)
    ]
    theirs(tmp_path, "validation")
    assert len(find_dataset(str(tmp_path)).test) == 4
    theirs(tmp_path, "test", label=pa.array([-1] * 4))
    assert find_dataset(str(tmp_path)).test == ()


def test_columns_are_known_by_their_kinds_whatever_they_are_called(tmp_path):
    png = archives.picture(2, (40, 36))
    columns = {
        "image": None,
        "img": pa.array([{"bytes": png}] * 4, pa.struct({"bytes": pa.binary()})),
        "label": None,
        "fine": pa.array([1, 1, 0, 1]),
    }
    theirs(tmp_path, **columns), theirs(tmp_path, "val", **columns)
    assert contents(find_dataset(str(tmp_path)).validation) == [
        (png, 1),
        (png, 1),
        (png, 0),
        (png, 1),
    ]


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_of_a_row_group_on_a_disk_that_is_not_compressed_images_are_read_one_by_one(
    compression, tmp_path, monkeypatch
):
    """Some have pages of their own, and some share one."""
    noise = np.random.default_rng(0)
    images = [noise.bytes(size) for size in (1_100_000, 1_100_000, 1_100_000, 9, 5)] + [b"x", b"x"]
    image = pa.array([{"bytes": one} for one in images], pa.struct({"bytes": pa.binary()}))
    label = pa.array([0, 1] * 3 + [0])
    theirs(tmp_path, image=image, label=label, rows=7, compression=compression)
    theirs(tmp_path, "val", image=image, label=label, rows=7, compression=compression)
    dataset = find_dataset(str(tmp_path))
    assert contents(dataset.validation) == list(zip(images, label.to_pylist(), strict=True))
    monkeypatch.setattr(ParquetReader, "read", None)
    assert [one for one, _ in contents(dataset.validation)] == images
    assert bool(dataset.validation.groups.sizes) == (compression == "snappy")


def test_without_features_columns_are_known_by_name_and_classes_by_number(tmp_path):
    theirs(tmp_path, features=False, label=pa.array([0, 1, 2, 0]))
    theirs(tmp_path, "validation", features=False)
    assert find_dataset(str(tmp_path)).classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("train-00000-of-00001-0a1b2c3d", "train"),
        ("mnist/test", "test"),
        ("default/my_train", "train"),
        ("validation/0000", "validation"),
        ("training.old", "train"),
        ("dev", "validation"),
        ("eval 2", "test"),
        ("trains", None),
        ("latest", None),
    ],
)
def test_parts_are_known_by_hugging_faces_words(name, part, tmp_path):
    for other in {"train", "test", "validation"} - {part}:
        theirs(tmp_path, other)
    theirs(tmp_path, "moved", label=pa.array([0, 0, 0, 1]))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "data" / "moved.parquet").rename(tmp_path / f"{name}.parquet")
    found = find_dataset(str(tmp_path))
    assert [p for p in ("train", "validation", "test") if sum(getattr(found, p).labels()) == 1] == [
        part
    ] * bool(part)


def test_a_job_trains_from_a_packed_set_as_it_does_from_the_folder(folder, tmp_path):
    weights = []
    packed = CliRunner().invoke(data, ["pack", str(folder), str(tmp_path / "packed")])
    assert (packed.exit_code, packed.stdout) == (0, f"{tmp_path}/packed holds {folder}\n")
    checked = CliRunner().invoke(data, ["check", str(tmp_path / "packed")])
    assert (checked.exit_code, "is in one part only" in checked.stdout) == (0, True), checked.output
    for number, dataset in enumerate((folder, tmp_path / "packed")):
        out = tmp_path / str(number)
        done = hvdtrain(
            "train",
            *SMALL,
            "--batch-size",
            "8",
            "--dataset",
            dataset,
            "--deterministic",
            "--out",
            out,
        )
        assert done.returncode == 0, done.stdout
        weights.append((out / "snapshots" / "final.safetensors").read_bytes())
        assert json.loads((out / "manifest.json").read_text())["dataset_hash"] == content_hash(
            scan(folder)
        )
    assert weights[0] == weights[1]


def test_in_blocks_each_row_group_comes_once_and_few_are_kept(out, monkeypatch):
    with serving(contents_of(out)) as server:
        dataset = find_dataset(server.url)
        monkeypatch.setattr("hvdtrain.data.loader.CACHE_BYTES", 0)
        groups = dataset.train.groups
        sizes = [groups.files[file].groups[group].unpacked for file, group in dataset.train.places]
        monkeypatch.setattr(row_groups, "KEPT_BYTES", 6 * max(sizes))
        before, most = len(server.asked), 0
        plan = BatchSampler(24, 4, seed=3, worker=0, workers=1, block=IN_A_GROUP)
        for share in plan.epoch(1):
            contents(dataset.train[index] for index in share.indices)
            most = max(most, sum(groups.sizes.values()))
        assert len(server.asked) - before < 2 * len(sizes)  # each once, or a few of them twice
        assert max(sizes) < most <= 6 * max(sizes)


def test_the_cache_leaves_room_on_the_disk_and_the_rest_is_read_by_range(
    out, folder, tmp_path, monkeypatch
):
    """On a disk that has room for two of four files, a tenth of it aside."""
    largest = max(path.stat().st_size for path in (out / "data").iterdir())

    def kept():
        return list((tmp_path / "cache" / "parquet").glob("*/*.parquet"))

    def usage(_):
        used = sum(path.stat().st_size for path in kept())
        return SimpleNamespace(total=23 * largest // 10, free=23 * largest // 10 - used)

    monkeypatch.setattr(kept_files.shutil, "disk_usage", usage)
    with serving(contents_of(out)) as server:
        dataset = find_dataset(f"simplecache::{server.url}")
        assert contents(dataset.train) == contents(scan(folder).train)
        assert len(kept()) == 2
        before = len(server.asked)
        assert contents(dataset.train) == contents(scan(folder).train)
        assert len(server.asked) == before  # kept on the disk, or in memory
        for file in kept():  # somebody empties the cache
            file.unlink()
        assert contents(dataset.train) == contents(scan(folder).train)


def test_no_more_of_a_file_is_kept_than_it_had_at_the_start(out, tmp_path):
    with serving(contents_of(out)) as server:
        dataset = find_dataset(f"simplecache::{server.url}")
        server.files = {name: content + bytes(50_000_000) for name, content in server.files.items()}
        with pytest.raises(
            Failure, match=r"cannot read image 0 .*\.parquet: more than [\d,]+ bytes come$"
        ):
            first_row(dataset).read_bytes()
        assert server.sent < 40_000_000
    assert [
        path
        for path in (tmp_path / "cache").rglob("*")
        if path.is_file() and "lock" not in path.name
    ] == []


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_where_a_file_has_no_room_after_all_it_is_not_kept(reason, tmp_path):
    (tmp_path / "kept").mkdir()

    def get_file(*_, **__):
        raise OSError(reason, os.strerror(reason))

    assert (
        kept_files.kept(tmp_path / "kept" / "a", SimpleNamespace(get_file=get_file), "a", 1) is None
    )


# As other people have it


def fine_and_coarse(folder, part, rows=4, **more):
    """A file as CIFAR-100's on the Hub: two columns of classes, in one of which they are text."""
    columns = {
        "img": pa.array([archives.picture(k, (40, 36)) for k in range(rows)]),
        "fine_label": pa.array([k % 4 for k in range(rows)]),
        "coarse_label": pa.array([("tree", "fish")[k % 2] for k in range(rows)]),
    }
    (folder / "data").mkdir(parents=True, exist_ok=True)
    name = folder / "data" / f"{part}-00000-of-00001.parquet"
    pq.write_table(pa.table(columns | more), name, row_group_size=3)
    return folder


def test_a_column_of_classes_is_named_and_text_is_sorted_into_classes(tmp_path):
    fine_and_coarse(tmp_path, "train", 8), fine_and_coarse(tmp_path, "test", 4)
    said = refused(tmp_path)
    assert "no column `label` but img, fine_label, coarse_label: name the one of" in said
    assert "--label" in said
    fine = find_dataset(str(tmp_path), label="fine_label")
    coarse = find_dataset(str(tmp_path), label="coarse_label")
    assert (fine.classes, coarse.classes) == (("0", "1", "2", "3"), ("fish", "tree"))
    pictures = [archives.picture(k, (40, 36)) for k in range(4)]
    assert contents(fine.validation) == list(zip(pictures, [0, 1, 2, 3], strict=True))
    assert contents(coarse.validation) == list(zip(pictures, [1, 0, 1, 0], strict=True))
    assert fine.known_hash != coarse.known_hash
    for label, words in (("nosuch", "no column `nosuch` but img"), ("img", "is binary, neither")):
        with pytest.raises(UsageError, match=words):
            find_dataset(str(tmp_path), label=label)


def test_text_means_the_same_class_in_every_file(tmp_path):
    fine_and_coarse(tmp_path, "train")
    other = pa.array(["tree", "ape", "tree", "fish"]).dictionary_encode()
    fine_and_coarse(tmp_path, "validation", coarse_label=other)
    found = find_dataset(str(tmp_path), label="coarse_label")
    assert found.classes == ("ape", "fish", "tree")
    assert found.train.labels().tolist() != [] and found.validation.labels().tolist() == [
        2,
        0,
        2,
        1,
    ]
    assert sorted(found.train.labels().tolist()) == [1, 1, 2, 2]


def test_a_share_of_each_class_is_held_out_where_there_is_a_training_part_alone(tmp_path):
    fine_and_coarse(tmp_path, "train", 40)
    with pytest.raises(UsageError, match=r"to train on alone.* --validation 0.2"):
        find_dataset(str(tmp_path), label="fine_label")
    found, again = (
        find_dataset(str(tmp_path), label="fine_label", validation=0.25) for _ in range(2)
    )
    assert np.bincount(found.train.labels()).tolist() == [8, 8, 8, 8]
    assert np.bincount(found.validation.labels()).tolist() == [2, 2, 2, 2]
    seen = {image for image, _ in contents(found.train)}
    held_out = {image for image, _ in contents(found.validation)}
    assert len(seen) == 32 and len(held_out) == 8 and not seen & held_out
    assert contents(found.validation) == contents(again.validation)
    other = find_dataset(str(tmp_path), label="fine_label", validation=0.5)
    assert len({found.known_hash, other.known_hash}) == 2
    rows = [found.train[index][0].row for index in packing_order(len(found.train))]
    assert rows == sorted(rows)  # what --shuffle-block keeps together lies together
    assert found.notes == ("8 training images are held out to validate on",)
    fine_and_coarse(tmp_path, "validation")
    [note] = find_dataset(str(tmp_path), label="fine_label", validation=0.25).notes
    assert "has images to validate on: --validation holds none out" in note


def test_a_job_trains_on_a_part_that_it_holds_out_of(tmp_path):
    fine_and_coarse(tmp_path / "set", "train", 40)
    options = ["--dataset", tmp_path / "set", "--label", "coarse_label", "--validation", "0.25"]
    done = hvdtrain("train", *SMALL, "--batch-size", "8", *options, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stdout
    assert "note: 10 training images are held out to validate on" in done.stdout
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["train_samples"], manifest["validation_samples"]) == (30, 10)
    assert manifest["class_names"] == ["fish", "tree"]
    packed = CliRunner().invoke(data, ["pack", *map(str, options[1:]), str(tmp_path / "packed")])
    assert packed.exit_code == 0, packed.output
    assert find_dataset(str(tmp_path / "packed")).classes == ("fish", "tree")


def test_the_options_of_parquet_files_are_refused_for_a_folder(folder):
    for options, words in (
        ({"label": "x"}, "--label names a column of Parquet files"),
        ({"validation": 0.2}, "--validation is for Parquet files, .* `hvdtrain data build folder"),
    ):
        with pytest.raises(UsageError, match=words):
            find_dataset(str(folder), **options)


def damaged(folder, *rows, part="train"):
    """Four images, of which those in these rows are cut off, and one of them is missing."""
    png = archives.picture(1, (40, 36))
    images = [{"bytes": archives.picture(k, (40, 36))} for k in range(4)]
    for row in rows:
        images[row] = {"bytes": png[:60]}
    images[rows[-1]] = None
    return theirs(folder, part, image=pa.array(images, pa.struct({"bytes": pa.binary()})))


def test_damaged_images_of_parquet_files_are_left_out_on_demand(tmp_path):
    damaged(tmp_path, 0, 3), damaged(tmp_path, 1, part="validation")
    whole = find_dataset(str(tmp_path))
    with pytest.raises(Failure, match=r"image \d of row group \d of .*; --skip-bad leaves such"):
        epoch(whole)
    found, again = (find_dataset(str(tmp_path), skip_bad=True) for _ in range(2))
    assert (len(found.train), len(found.validation)) == (2, 3)
    assert [name.partition(" of ")[0] for name in found.bad] == ["image 0", "image 1", "image 1"]
    assert found.bad == again.bad and len(epoch(found)) == 1
    assert found.known_hash == again.known_hash != whole.known_hash
    moved = shutil.copytree(tmp_path, tmp_path.with_name("moved"))
    assert find_dataset(str(moved), skip_bad=True).known_hash == found.known_hash
    rows = [found.train[index][0].row for index in packing_order(len(found.train))]
    assert rows == [1, 2]
    with pytest.raises(UsageError, match="class 'b' has one image: none can be held out"):
        find_dataset(str(damaged(tmp_path / "alone", 3)), validation=0.3, skip_bad=True)


def test_a_file_that_cannot_be_read_is_not_taken_for_damaged_images(out):
    with serving(contents_of(out)) as server:
        found = find_dataset(server.url)
        server.files = {}
        with pytest.raises(Failure, match="cannot read image .*Not Found") as refused_to_read:
            epoch(found)
        assert "--skip-bad" not in str(refused_to_read.value)


def test_what_is_true_or_false_is_two_classes(tmp_path):
    for part in ("train", "validation"):
        theirs(tmp_path, part, features=False, label=pa.array([True, False, True, False]))
    found = find_dataset(str(tmp_path))
    assert found.classes == ("false", "true") and found.validation.labels().tolist() == [1, 0, 1, 0]


def test_files_that_lie_too_deep_are_found_for_the_message(tmp_path):
    theirs(tmp_path / "a" / "b" / "c")
    assert "train.parquet' lies deeper than Parquet files are looked for: give" in refused(tmp_path)


def test_one_file_is_a_training_part_and_so_are_files_of_any_name(tmp_path, monkeypatch):
    theirs(tmp_path), theirs(tmp_path, "validation")
    file = tmp_path / "data" / "train.parquet"
    folder = tmp_path / "data"
    said = refused(file)
    assert said.endswith(
        f"as with --validation 0.2; or name the folder that has a validation part too, {folder}"
    )
    monkeypatch.chdir(folder)
    for name in (str(file), "train.parquet", f"file://{file}"):
        found = find_dataset(name, validation=0.5)
        assert (found.classes, len(found.train), len(found.validation)) == (("a", "b"), 2, 2)
    file.rename(folder / "train-00000-of-00002.parquet")
    said = refused(folder / "train-00000-of-00002.parquet")
    assert said.endswith(f"is one of 2 files of a data set: name their folder, {folder}")
    theirs(tmp_path / "any", "part-0"), theirs(tmp_path / "any", "part-1")
    found = find_dataset(str(tmp_path / "any"), validation=0.5)
    assert (len(found.train), len(found.validation)) == (4, 4)


def test_classes_without_validation_images_and_a_test_part_in_their_place_are_told(tmp_path):
    theirs(tmp_path, names=("a", "b", "c"), label=pa.array([0, 1, 2, 2]))
    theirs(tmp_path, "test", names=("a", "b", "c"))
    stands_in, lacking = find_dataset(str(tmp_path)).notes
    assert stands_in.startswith("there is no validation part: the part `test` stands for it")
    assert lacking == (
        "validation has no images of 1 of the 3 classes: c; accuracy is that of the others"
    )
    theirs(tmp_path, names=("a", "b", "c"))
    told = "train has no images of 1 of the 3 classes: c; nothing can be learned of them"
    assert told in find_dataset(str(tmp_path)).notes


@pytest.mark.parametrize("name", ["a::b", "c#", "100%", "x?y", "[1]", "simplecache::x", "s3:"])
def test_a_folder_may_have_any_name(name, tmp_path, monkeypatch):
    """As `c#` in huggingface/datasets#5099, and `%` in voxel51/fiftyone#861."""
    theirs(tmp_path / name), theirs(tmp_path / name, "validation")
    monkeypatch.chdir(tmp_path)
    for place in (f"{tmp_path}/{name}", f"./{name}"):
        assert len(contents(find_dataset(place).train)) == 4


def test_what_systems_leave_beside_files_is_not_read(out):
    before = contents(find_dataset(str(out)).train)
    for name in ("._train-00000-of-00004.parquet", "__MACOSX/train.parquet"):
        (out / "data" / name).parent.mkdir(exist_ok=True)
        (out / "data" / name).write_bytes(b"\0\5\x16\7")
    assert contents(find_dataset(str(out)).train) == before
