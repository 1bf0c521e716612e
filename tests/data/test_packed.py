"""Data sets packed into Parquet files, and such files of others, at several kinds of URL."""

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from helpers import archives
from helpers.jobs import SMALL, hvdtrain, make_images
from helpers.servers import serving

from hvdtrain.data import kept_files, packed, packing, parquet_footer, row_groups
from hvdtrain.data.commands import data
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import content_hash, scan
from hvdtrain.data.image import native_side
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import BatchSampler, packing_order
from hvdtrain.errors import Failure, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")
IN_A_GROUP, IN_A_FILE = 3, 6  # images
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    for part, first in (("TrainData", 0), ("ValidationData", 100)):
        for i, name in enumerate(("cat", "dog")):
            files = {f"{k}.{k}.png": archives.picture(first + 20 * i + k, (40, 36)) for k in range(12)}
            archives.lay_out(root / part / name, files)
    return root


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(packing, "GROUP_ROWS", range(IN_A_GROUP, IN_A_GROUP + 1))


def pack(folder, url, force=False):
    images = scan(folder)
    mean = sum(path.stat().st_size for path in images.images) // len(list(images.images))
    return packing.pack(images, str(url), IN_A_FILE * mean, force, lambda *_: None)


@pytest.fixture
def out(folder, tmp_path, monkeypatch, few_rows):
    """A folder that was packed in small files; with an empty cache."""
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    assert pack(folder, tmp_path / "packed") == IN_A_GROUP
    return tmp_path / "packed"


def contents_of(out):
    return {f"/{path.relative_to(out)}": path.read_bytes() for path in out.rglob("*.parquet")}


@pytest.fixture(params=["folder", "file", "http", "simplecache::http"])
def url(request, out):
    with serving(contents_of(out)) as server:
        yield {"folder": str(out), "file": f"file://{out}"}.get(request.param) or request.param.replace(
            "http", server.url
        )


def epoch(dataset, block=0):
    plan = BatchSampler(len(dataset.train), 5, seed=3, worker=0, workers=1, block=block)
    return list(Loader(dataset.train, 32, threads=2).batches(plan.epoch(1)))


def contents(samples):
    return [(image.read_bytes(), label) for image, label in samples]


def first_row(dataset):
    return dataset.train[packing_order(len(dataset.train))[0]][0]


def refused(url):
    """What is said of a data set that cannot be."""
    with pytest.raises(UsageError) as refusal:
        find_dataset(str(url))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


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


def test_hugging_face_reads_what_is_packed_and_training_reads_what_hugging_face_writes(out, folder, tmp_path):
    (tmp_path / "theirs" / "data").mkdir(parents=True)
    words = [sys.executable, "-c", THEIRS, str(out), str(tmp_path / "hub"), str(tmp_path / "theirs")]
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
    names = [f"data/{part}-{n:05d}-of-00004.parquet" for part in ("train", "validation") for n in range(4)]
    assert [str(path.relative_to(out)) for path in files] == names
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    order = [images.train[i] for i in packing_order(24)] + [*images.validation]
    assert rows == [{"image": {"bytes": path.read_bytes(), "path": path.name}, "label": label} for path, label in order]
    for path in files:
        metadata = pq.read_metadata(path)
        assert [metadata.row_group(n).num_rows for n in range(2)] == [IN_A_GROUP, IN_A_GROUP]
        features = json.loads(metadata.metadata[b"huggingface"])["info"]["features"]
        assert features == {
            "image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}
        }  # fmt: skip


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
    with pytest.raises(UsageError, match=r"holds other Parquet files .mine.parquet.: give another URL"):
        pack(folder, out, force=True)


def test_a_packed_set_is_packed_anew_but_not_onto_itself(out, folder, tmp_path):
    invoke = CliRunner().invoke
    packed_again = invoke(data, ["pack", str(out), str(tmp_path / "again")])
    assert packed_again.exit_code == 0, packed_again
    again = find_dataset(str(tmp_path / "again"))
    assert contents(again.train) == contents(scan(folder).train) and again.known_hash == content_hash(scan(folder))
    assert "is what is to be packed" in str(invoke(data, ["pack", "--force", str(out), f"file://{out}"]).exception)
    assert "nothing to pack" in str(invoke(data, ["pack", "synthetic", str(tmp_path / "noise")]).exception)
    assert len(find_dataset(str(out)).train) == 24


def test_packing_says_how_many_images_a_row_group_has(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "GROUP_BYTES", 2_000)
    monkeypatch.setattr(packing, "GROUP_ROWS", range(2, 1025))
    make_images(tmp_path / "set", train=40, validation=4, side=32)
    done = CliRunner().invoke(data, ["pack", str(tmp_path / "set"), str(tmp_path / "out")])
    [number] = re.findall(r"(\d+) images a row group: `train --shuffle-block \1` reads few of them", done.output)
    assert pq.read_metadata(next((tmp_path / "out").rglob("train-*"))).row_group(0).num_rows == int(number)


def test_files_of_two_packings_are_told_apart(folder, small, out, tmp_path):
    """As where two are packed to one URL at a time, or one is read while it is replaced."""
    (out / "data" / "train-00003-of-00004.parquet").unlink()
    assert "has 3 of the 4 files /data/train-*.parquet" in refused(out)
    changed = shutil.copytree(folder, tmp_path / "changed")
    (changed / "TrainData" / "cat" / "0.0.png").write_bytes(archives.picture(999))
    pack(changed, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "data" / "train-00003-of-00004.parquet", out / "data")
    assert "files of two packings" in refused(out)


def test_a_damaged_file_is_told(out, folder):
    file = out / "data" / "train-00001-of-00004.parquet"
    content = bytearray(file.read_bytes())
    for size in (2000, 7, len(content) - 1):
        file.write_bytes(content[:size])
        assert "train-00001-of-00004.parquet cannot be read as a data set's" in refused(out)
    content[700] ^= 1
    file.write_bytes(content)
    image = find_dataset(str(out)).train[packing_order(24)[IN_A_FILE]][0]
    with pytest.raises(Failure, match=r"cannot read image 0 of row group 0 of .*train-00001-of-00004.*: .*CRC") as told:
        image.read_bytes()
    assert "\n" not in str(told.value)


def test_a_spoiled_footer_is_read_or_is_a_line(out):
    """pyarrow would end the process for some of these, where it is asked for a column of a row group."""
    file, rng = out / "data" / "train-00001-of-00004.parquet", random.Random(0)
    content = file.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    for _ in range(300):
        spoiled = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 4))):
            spoiled[rng.randrange(len(content) - 8 - length, len(content) - 4)] = rng.randrange(256)
        file.write_bytes(spoiled)
        try:
            contents(find_dataset(str(out)).train)
        except (UsageError, Failure) as error:
            assert "\n" not in str(error)


def theirs(folder, part="train", features=True, names=("a", "b"), rows=2, compression="snappy", **columns):
    """Write a file of four images, with these columns in place of those that are right; with a dictionary too where it
    is compressed.
    """
    png = archives.picture(1, (40, 36))
    right = {
        "image": pa.array([{"bytes": png}] * 4, pa.struct({"bytes": pa.binary()})), "label": pa.array([0, 1, 0, 1])
    }  # fmt: skip
    table = {name: column for name, column in (right | columns).items() if column is not None}
    image, label = {"_type": "Image"}, {"_type": "ClassLabel", "names": names}
    kinds = {"image": image, "img": image, "label": label, "fine": label}
    told = {"info": {"features": {name: kinds[name] for name in table}}}
    (folder / "data").mkdir(parents=True, exist_ok=True)
    written = pa.table(table).replace_schema_metadata({"huggingface": json.dumps(told)} if features else None)
    options = {"row_group_size": rows, "compression": compression, "use_dictionary": compression != "none"}
    pq.write_table(written, folder / "data" / f"{part}.parquet", **options)
    return folder


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_what_others_write_is_read(compression, tmp_path):
    """Compressed, with a dictionary, without paths; a test part stands for validation, and one without labels is
    none.
    """
    theirs(tmp_path, compression=compression)
    theirs(tmp_path, "test", label=pa.array([1, 1, 1, 0], pa.uint8()), compression=compression)
    found = find_dataset(str(tmp_path))
    assert (found.classes, len(found.validation), found.test) == (("a", "b"), 4, ())
    assert contents(found.validation) == [(archives.picture(1, (40, 36)), label) for label in (1, 1, 1, 0)]
    theirs(tmp_path, "validation")
    assert len(find_dataset(str(tmp_path)).test) == 4
    theirs(tmp_path, "test", label=pa.array([-1] * 4))
    assert find_dataset(str(tmp_path)).test == ()


def test_columns_are_known_by_their_kinds_whatever_they_are_called(tmp_path):
    png = archives.picture(2, (40, 36))
    columns = {
        "image": None, "img": pa.array([{"bytes": png}] * 4, pa.struct({"bytes": pa.binary()})),
        "label": None, "fine": pa.array([1, 1, 0, 1]),
    }  # fmt: skip
    theirs(tmp_path, **columns), theirs(tmp_path, "val", **columns)
    assert contents(find_dataset(str(tmp_path)).validation) == [(png, 1), (png, 1), (png, 0), (png, 1)]


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_of_a_row_group_on_a_disk_that_is_not_compressed_images_are_read_one_by_one(compression, tmp_path, monkeypatch):
    """Some have pages of their own, and some share one."""
    noise = np.random.default_rng(0)
    images = [noise.bytes(size) for size in (1_100_000, 1_100_000, 1_100_000, 9, 5)] + [b"x", b"x"]
    image = pa.array([{"bytes": one} for one in images], pa.struct({"bytes": pa.binary()}))
    label = pa.array([0, 1] * 3 + [0])
    theirs(tmp_path, image=image, label=label, rows=7, compression=compression)
    theirs(tmp_path, "val", image=image, label=label, rows=7, compression=compression)
    dataset = find_dataset(str(tmp_path))
    assert contents(dataset.validation) == list(zip(images, label.to_pylist(), strict=True))
    monkeypatch.setattr(row_groups.ParquetFile, "read", None)
    assert [one for one, _ in contents(dataset.validation)] == images
    assert bool(dataset.validation.groups.sizes) == (compression == "snappy")


def test_without_features_columns_are_known_by_name_and_classes_by_number(tmp_path):
    theirs(tmp_path, features=False, label=pa.array([0, 1, 2, 0]))
    theirs(tmp_path, "validation", features=False)
    assert find_dataset(str(tmp_path)).classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("train-00000-of-00001-0a1b2c3d", "train"), ("mnist/test", "test"), ("default/my_train", "train"),
        ("validation/0000", "validation"), ("training.old", "train"), ("dev", "validation"), ("eval 2", "test"),
        ("trains", None), ("latest", None),
    ],
)  # fmt: skip
def test_parts_are_known_by_hugging_faces_words(name, part, tmp_path):
    for other in {"train", "test", "validation"} - {part}:
        theirs(tmp_path, other)
    theirs(tmp_path, "moved", label=pa.array([0, 0, 0, 1]))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "data" / "moved.parquet").rename(tmp_path / f"{name}.parquet")
    found = find_dataset(str(tmp_path))
    assert [p for p in ("train", "validation", "test") if sum(getattr(found, p).labels()) == 1] == [part] * bool(part)


PATHS = pa.array([{"path": "/etc/passwd"}] * 4, pa.struct({"path": pa.string()}))
NULLS = pa.array([{"bytes": b"x"}, None, {"bytes": None}, {"bytes": b"x"}], pa.struct({"bytes": pa.binary()}))


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"label": pa.array([0, 1, 2, 0])}, "a label is 2, and there are 2 classes"),
        ({"label": pa.array([0, 1, -1, 0])}, "a label is -1"),
        ({"label": pa.array([0, 1, 2**40, 0])}, "a label is 1099511627776"),
        ({"label": pa.array([0, 2**40, 0, 1]), "features": False}, "and there are 100000 classes"),
        ({"label": pa.array([0, None, 0, 1])}, "3 labels of 4 rows"),
        ({"label": pa.array(["a", "b", "a", "b"])}, "`label` is string and not an integer"),
        ({"label": pa.array([0] * 4), "names": ["a"]}, "fewer than two classes"), ({"names": ["a"] * 2}, "of one name"),
        ({"names": [1, 2]}, "Expected `str`, got `int`"), ({"names": {"a": 0}}, "Expected `array`"),
        ({"label": None}, "it has no column `label` but image"),
        ({"image": None}, "it has no column `image` but label"),
        ({"image": pa.array([b"x"] * 4)}, "`image` is binary and not {bytes, path}"),
        ({"image": PATHS}, "`image` is struct<path: string> and not {bytes, path}"),
        ({"image": pa.array(range(4))}, "`image` is int64"),
        ({"names": ["b", "a"]}, "have other columns or classes"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_are_refused(columns, why, tmp_path):
    same = {} if columns.get("names") == ["b", "a"] else columns
    theirs(tmp_path, "validation", **same)
    assert why in refused(theirs(tmp_path, **columns))


def test_an_image_that_is_missing_is_told_when_it_is_read(tmp_path):
    theirs(tmp_path, image=NULLS), theirs(tmp_path, "validation")
    with pytest.raises(Failure, match="cannot read image . of row group 0 of .*: 1 images in a row group of 2"):
        first_row(find_dataset(str(tmp_path))).read_bytes()


def varint(number):
    """As Parquet's footers have numbers: zigzag, 7 bits a byte."""
    number, encoded = 2 * number, b""
    while number > 127:
        number, encoded = number >> 7, encoded + bytes([number & 127 | 128])
    return encoded + bytes([number])


@pytest.mark.parametrize(
    ("claimed", "why"),
    [(2**40, "row group 0 has 1,099,511,627,776 rows"), (2**62, "row group 0 has"), (5000, "777 labels of 5,000 rows")],
)
def test_rows_that_are_only_claimed_are_refused(claimed, why, tmp_path):
    png = archives.picture(1)
    image = pa.array([{"bytes": png}] * 777, pa.struct({"bytes": pa.binary()}))
    theirs(tmp_path, image=image, label=pa.array([0] * 777), rows=777), theirs(tmp_path, "validation")
    file = tmp_path / "data" / "train.parquet"
    content = file.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length : -8].replace(varint(777), varint(claimed))
    file.write_bytes(content[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    assert re.search(why, refused(tmp_path))


@pytest.mark.parametrize(
    ("module", "limit", "most", "why"),
    [
        (packed, "MAX_FILE_BYTES", 99, "it has [0-9,]+ bytes"), (packed, "MAX_ROWS", 5, "and 6 rows"),
        (packed, "MAX_FOOTER_BYTES", 99, "its footer has [0-9,]+ bytes"),
        (packed, "MAX_FOOTERS_BYTES", 99, "bytes of footers"), (parquet_footer, "MAX_FILE_ROWS", 2, "has 3 rows"),
        (parquet_footer, "MAX_GROUP_BYTES", 99, "row group 0 has [0-9,]+ bytes of a column"),
    ],
)  # fmt: skip
def test_no_more_than_is_believed_of_a_stranger_is_read(module, limit, most, why, out, monkeypatch):
    monkeypatch.setattr(module, limit, most)
    assert re.search(why, refused(out))


def test_one_long_image_that_stands_for_many_rows_is_not_unpacked(tmp_path, monkeypatch):
    image = pa.array([{"bytes": bytes(50_000)}] * 400, pa.struct({"bytes": pa.binary()}))
    theirs(tmp_path, image=image, label=pa.array([0, 1] * 200), rows=400), theirs(tmp_path, "validation")
    monkeypatch.setattr(row_groups, "MAX_GROUP_BYTES", 2**22)
    with pytest.raises(Failure, match="more than 4,194,304 bytes of images in a row group"):
        first_row(find_dataset(str(tmp_path))).read_bytes()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///nosuch/folder", "cannot be used: .*No such file"),
        (f"file://{os.path.dirname(__file__)}", "holds no data set: there is no data/train-00000-of-00001.parquet"),
        ("nosuch://x", "Protocol not known"),
        ("s3://bucket/x", "s3fs"),
        ("http://127.0.0.1:1/x", "cannot be used"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_in_a_line(url, words):
    assert re.search(words, refused(url))


def test_tar_shards_of_before_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "index.json").write_text('{"made_by": "hvdtrain data pack", "format": 3}')
    assert "pack the folder again, `hvdtrain data pack FOLDER file://" in refused(f"file://{tmp_path}")


def test_a_job_trains_from_a_packed_set_as_it_does_from_the_folder(folder, tmp_path):
    weights = []
    packed = CliRunner().invoke(data, ["pack", str(folder), str(tmp_path / "packed")])
    assert (packed.exit_code, packed.stdout) == (0, f"{tmp_path}/packed holds {folder}\n")
    checked = CliRunner().invoke(data, ["check", str(tmp_path / "packed")])
    assert (checked.exit_code, "is in one part only" in checked.stdout) == (0, True), checked.output
    for number, dataset in enumerate((folder, tmp_path / "packed")):
        out = tmp_path / str(number)
        done = hvdtrain("train", *SMALL, "--batch-size", "8", "--dataset", dataset, "--deterministic", "--out", out)
        assert done.returncode == 0, done.stdout
        weights.append((out / "snapshots" / "final.safetensors").read_bytes())
        assert json.loads((out / "manifest.json").read_text())["dataset_hash"] == content_hash(scan(folder))
    assert weights[0] == weights[1]


def test_a_server_without_ranges_is_named(out):
    with serving(contents_of(out), ranges=False) as server:
        assert "its server sends no parts of files (then copy the data set to a disk)" in refused(server.url)


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


def test_the_cache_leaves_room_on_the_disk_and_the_rest_is_read_by_range(out, folder, tmp_path, monkeypatch):
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
        with pytest.raises(Failure, match=r"cannot read image 0 .*\.parquet: more than [\d,]+ bytes come$"):
            first_row(dataset).read_bytes()
        assert server.sent < 40_000_000
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "lock" not in path.name] == []


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_where_a_file_has_no_room_after_all_it_is_not_kept(reason, tmp_path):
    (tmp_path / "kept").mkdir()

    def get_file(*_, **__):
        raise OSError(reason, os.strerror(reason))

    assert kept_files.kept(tmp_path / "kept" / "a", SimpleNamespace(get_file=get_file), "a", 1) is None


def test_a_million_images_take_little_memory(tmp_path):
    """Here 50,000: less than an object, a path and a tuple for each would take."""
    rows = 50_000
    png, label = archives.picture(1, (8, 8)), np.arange(rows) % 2
    image = pa.array([{"bytes": png}] * rows, pa.struct({"bytes": pa.binary()}))
    theirs(tmp_path, image=image, label=pa.array(label), rows=1000), theirs(tmp_path, "validation")
    find_dataset(str(tmp_path))  # what is imported is not counted
    tracemalloc.start()
    dataset = find_dataset(str(tmp_path))
    taken, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 20 * rows and peak < 60 * rows
    assert dataset.train.labels()[packing_order(rows)].tolist() == label.tolist()
