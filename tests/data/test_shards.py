"""Data sets packed into shards, at several kinds of URL."""

import errno
import io
import json
import os
import re
import shutil
import tarfile
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers import archives
from helpers.jobs import SMALL, hvdtrain, make_images
from helpers.servers import serving
from msgspec import structs
from PIL import Image

from hvdtrain.data import shard_cache, shards
from hvdtrain.data.commands import data
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import content_hash, scan
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import BatchSampler, packing_order
from hvdtrain.data.sharded import ROW, Index, Part, Shard, parse_index
from hvdtrain.errors import Failure, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")
IN_A_SHARD = 7  # images of the folder, packed into shards of 15,000 bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    for part, first in (("TrainData", 0), ("ValidationData", 100)):
        for i, name in enumerate(("cat", "dog")):
            files = {f"{k}.{k}.png": archives.picture(first + 20 * i + k, (40, 36)) for k in range(12)}
            archives.lay_out(root / part / name, files)
    return root


def pack(folder, url, shard_bytes=15_000, force=False):
    return shards.pack(scan(folder), url, shard_bytes, force, lambda *_: None)


@pytest.fixture
def packed(folder, tmp_path, monkeypatch):
    """{path: bytes} of what packing in small shards writes; with an empty cache."""
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    assert pack(folder, f"file://{tmp_path}/packed") == IN_A_SHARD
    return {f"/{path.name}": path.read_bytes() for path in (tmp_path / "packed").iterdir()}


@pytest.fixture(params=["file", "http", "simplecache::http"])
def url(request, packed, tmp_path):
    with serving(packed) as server:
        yield f"file://{tmp_path}/packed" if request.param == "file" else request.param.replace("http", server.url)


def epoch(dataset, block=0):
    plan = BatchSampler(len(dataset.train), 5, seed=3, worker=0, workers=1, block=block)
    return list(Loader(dataset.train, 32, threads=2).batches(plan.epoch(1)))


def contents(dataset):
    return [image.read_bytes() for image, _ in dataset.train]


@pytest.mark.parametrize("cached", [True, False])
def test_samples_and_their_order_are_those_of_the_folder(url, folder, cached, monkeypatch):
    if not cached:
        monkeypatch.setattr("hvdtrain.data.loader.CACHE_BYTES", 0)
    remote, local = find_dataset(url), scan(folder)
    assert remote.classes == local.classes
    assert remote.known_hash == content_hash(local) and remote.image_size == 36
    for block in (0, IN_A_SHARD):
        batches = zip(epoch(remote, block), epoch(local, block), strict=True)
        for (share, (images, labels)), (expected, (pixels, classes)) in batches:
            assert share == expected
            assert torch.equal(images, pixels) and torch.equal(labels, classes)


def test_shards_have_the_layout_of_webdataset(packed, folder):
    index = json.loads(packed["/index.json"])
    images = scan(folder)
    order = [images.train[i] for i in packing_order(24)] + [images.validation[i] for i in packing_order(24)]
    seen = []
    for shard in index["shards"]:
        assert len(packed[f"/{shard['name']}"]) == shard["bytes"]
        with tarfile.open(fileobj=io.BytesIO(packed[f"/{shard['name']}"])) as tar:
            members = tar.getmembers()
            for image, label in zip(members[::2], members[1::2], strict=True):
                assert image.name.split(".") == [label.name.split(".")[0], "png"]
                path, number = order[len(seen)]
                assert tar.extractfile(image).read() == path.read_bytes()
                assert int(tar.extractfile(label).read()) == number
                seen.append(shard["name"])
    assert sorted(Counter(seen).values()) == sorted(2 * [IN_A_SHARD] * (24 // IN_A_SHARD) + 2 * [24 % IN_A_SHARD])


def test_packing_twice_gives_the_same_bytes_and_touches_nothing(folder, packed, tmp_path):
    out = tmp_path / "packed"
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert pack(folder, f"file://{out}") == IN_A_SHARD
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    pack(folder, f"file://{out}", force=True)
    assert {f"/{path.name}": path.read_bytes() for path in out.iterdir()} == packed


def test_something_else_is_not_replaced_unless_told_to(folder, small, packed, tmp_path):
    url = f"file://{tmp_path}/packed"
    tested = shutil.copytree(folder, tmp_path / "more")
    for name in ("cat", "dog"):
        archives.lay_out(tested / "TestData" / name, {"1.png": archives.picture(900 + len(name))})
    for other in (small, tested):
        with pytest.raises(UsageError, match="holds something else.*--force"):
            pack(other, url)
        pack(other, url, 10**6, force=True)
        assert find_dataset(url).known_hash == content_hash(scan(other))
    left = sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "packed").iterdir())
    assert left == ["index.json", *(f"{part}-000000000" for part in ("test", "train", "validation"))]


def test_packing_says_how_many_images_a_shard_has(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (48, 256, 256, 3), np.uint8)  # as large compressed
    make_images(tmp_path / "large", train=8, validation=4, side=256)
    for pixels, path in zip(noise, (tmp_path / "large").rglob("*.png"), strict=False):
        Image.fromarray(pixels).save(path)
    done = CliRunner().invoke(data, ["pack", "--shard-mb", "1", str(tmp_path / "large"), f"file://{tmp_path}/out"])
    [number] = re.findall(r"(\d+) images a shard: `train --shuffle-block \1` reads few shards", done.output)
    assert len(list((tmp_path / "out").glob("train-*.tar"))) == -(-16 // int(number)) > 1


def test_two_data_sets_packed_to_one_url_at_once_do_not_mix(folder, small, tmp_path, monkeypatch):
    """The one whose index is last is there, whole."""
    url, make = f"file://{tmp_path}/packed", shards._make_tar
    others = [small]

    def made(members, first):
        if others:
            pack(others.pop(), url)
        return make(members, first)

    monkeypatch.setattr(shards, "_make_tar", made)
    pack(folder, url)
    assert find_dataset(url).known_hash == content_hash(scan(folder))
    assert contents(find_dataset(url)) == contents(scan(folder))


def test_a_changed_shard_is_told_from_what_was_packed(packed, tmp_path):
    [shard] = (tmp_path / "packed").glob("train-000000000-*.tar")
    content = bytearray(packed[f"/{shard.name}"])
    content[700] ^= 1
    shard.write_bytes(content)
    first = find_dataset(f"file://{tmp_path}/packed").train[packing_order(24)[0]][0]
    with pytest.raises(Failure, match="is not what was packed: its checksum differs"):
        first.read_bytes()
    shard.unlink()
    with pytest.raises(Failure, match=rf"cannot read {re.escape(first.name)} in .*train-000000000-.*tar"):
        first.read_bytes()


@pytest.fixture
def index(packed):
    return msgspec.json.decode(packed["/index.json"], type=Index)


def refused(index, tmp_path):
    """What is said of a packed data set with this index."""
    (tmp_path / "packed" / "index.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(UsageError, match="index.json cannot be read as a data set's") as refusal:
        find_dataset(f"file://{tmp_path}/packed")
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("made_by", "me", "Invalid enum value 'me'"), ("format", 1, "Invalid enum value 1"),
        ("classes", ["one"], "Expected `array` of length >= 2"), ("classes", 7, "Expected `array`, got `int`"),
        ("train", {"rows": "", "names": ""}, "no images to train"), ("shards", [{"name": "x.tar"}], "field `bytes`"),
        ("train", {"rows": "AAAA", "names": ""}, "as many names as rows"), ("shards", [], "does not lie in a shard"),
    ],
)  # fmt: skip
def test_an_index_that_cannot_be_is_refused(name, value, why, index, tmp_path):
    assert why in refused(msgspec.to_builtins(index) | {name: value}, tmp_path)
    assert "Expected `object`, got `array`" in refused([], tmp_path)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"name": "../../etc/passwd.tar"}, "matching regex"), ({"name": "a.tar\n"}, "matching regex"),
        ({"name": "x" * 252 + ".tar"}, "matching regex"), ({"name": "second"}, "is listed twice"),
        ({"bytes": -1}, "Expected `int` >= 1"), ({"bytes": 10**15}, "Expected `int` <= 17179869184"),
        ({"bytes": 2000}, "has no class, or does not lie in a shard"),
    ],
)  # fmt: skip
def test_a_shard_that_cannot_be_is_refused(changed, why, index, tmp_path):
    changed = {"name": index.shards[1].name} if changed == {"name": "second"} else changed
    index.shards[0] = structs.replace(index.shards[0], **changed)
    assert why in refused(index, tmp_path)


@pytest.mark.parametrize(
    "row",
    [(2, 0, 9, 0, 0), (0, -1, 9, 0, 0), (0, 0, 0, 0, 0), (0, 2**63 - 1, 9, 0, 0), (0, 32, 9, 0, 0), (0, 0, 9, 0, 2)],
)  # fmt: skip
def test_an_image_that_lies_in_no_shard_or_class_is_refused(row, index, tmp_path):
    index.shards, index.validation = [Shard("a.tar", 40), Shard("b.tar", 40)], Part(b"", b"")
    index.train = index.validation = Part(np.array([(1, 31, 9, 0, 1)], ROW).tobytes(), b"x\0")
    assert parse_index(msgspec.json.encode(index)).train == index.train
    index.train = Part(np.array([row], ROW).tobytes(), b"x\0")
    assert "an image has no class, or does not lie in a shard" in refused(index, tmp_path)


def test_no_more_of_an_index_is_read_than_may_be(url, packed, monkeypatch):
    monkeypatch.setattr(shards, "MAX_INDEX_BYTES", len(packed["/index.json"]))
    assert len(find_dataset(url).train) == 24
    monkeypatch.setattr(shards, "MAX_INDEX_BYTES", len(packed["/index.json"]) - 1)
    with pytest.raises(UsageError, match=r"index.json cannot be read as a data set's .more than [\d,]+ bytes come"):
        find_dataset(url)


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_no_more_of_a_shard_is_kept_than_its_index_says(scheme, packed, tmp_path):
    longer = packed | {name: content + bytes(50_000_000) for name, content in packed.items() if name.startswith("/tr")}
    for name, content in longer.items():
        (tmp_path / "packed" / name[1:]).write_bytes(content)
    with serving(longer) as server:
        url = server.url if scheme == "http" else f"file://{tmp_path}/packed"
        image = find_dataset(f"simplecache::{url}").train[0][0]
        with pytest.raises(Failure, match=r"cannot read .*\.png in .*\.tar: more than [\d,]+ bytes come$"):
            image.read_bytes()
        assert server.sent < 40_000_000
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "lock" not in path.name] == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///nosuch/folder", "holds no data set: there is no index.json"),
        ("nosuch://x", "Protocol not known"),
        ("s3://bucket/x", "s3fs"),
        ("http://127.0.0.1:1/x", "cannot be used"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_in_a_line(url, words):
    with pytest.raises(UsageError, match=words) as refused:
        find_dataset(url)
    assert "\n" not in str(refused.value)


def test_a_job_trains_from_shards_as_it_does_from_the_folder(folder, tmp_path):
    weights = []
    url = f"file://{tmp_path}/packed"
    packed = CliRunner().invoke(data, ["pack", str(folder), url])
    assert (packed.exit_code, packed.stdout) == (0, f"{url} holds {folder}\n")
    checked = CliRunner().invoke(data, ["check", url])
    assert (checked.exit_code, "is in one part only" in checked.stdout) == (0, True), checked.output
    for number, dataset in enumerate((folder, url)):
        out = tmp_path / str(number)
        done = hvdtrain("train", *SMALL, "--batch-size", "8", "--dataset", dataset, "--deterministic", "--out", out)
        assert done.returncode == 0, done.stdout
        weights.append((out / "snapshots" / "final.safetensors").read_bytes())
        assert json.loads((out / "manifest.json").read_text())["dataset_hash"] == content_hash(scan(folder))
    assert weights[0] == weights[1]


def test_a_folder_is_packed_to_a_url_only(folder):
    refused = CliRunner().invoke(data, ["pack", str(folder), "here"])
    assert "'here' is not a URL" in str(refused.exception)


def test_a_server_without_ranges_is_named_and_simplecache_helps(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_cache.shutil, "disk_usage", lambda _: SimpleNamespace(total=10**12, free=10**12))
    with serving(packed, ranges=False) as server:
        with pytest.raises(Failure, match="where a server sends no parts of files, use simplecache::URL"):
            find_dataset(server.url).train[0][0].read_bytes()
        kept = find_dataset(f"simplecache::{server.url}").train[0][0]
        whole = kept.read_bytes()
        for shard in (tmp_path / "cache" / "shards").glob("*/*.tar"):
            shard.write_bytes(b"damaged")
        assert kept.read_bytes() == whole


def test_the_cache_leaves_room_on_the_disk_and_the_rest_is_read_by_range(packed, folder, tmp_path, monkeypatch):
    """On a disk that has room for two of four shards, a tenth of it aside."""
    shard = max(len(content) for name, content in packed.items() if name.endswith(".tar"))
    assert len([name for name in packed if name.startswith("/train")]) == 4

    def kept():
        return list((tmp_path / "cache" / "shards").glob("*/*.tar"))

    def usage(_):
        used = sum(path.stat().st_size for path in kept())
        return SimpleNamespace(total=23 * shard // 10, free=23 * shard // 10 - used)

    monkeypatch.setattr(shard_cache.shutil, "disk_usage", usage)
    with serving(packed) as server:
        dataset = find_dataset(f"simplecache::{server.url}")
        assert contents(dataset) == contents(scan(folder))
        assert len(kept()) == 2
        assert any(asked for asked in server.asked)
        before = len(server.asked)
        dataset.train[0][0].read_bytes()  # the first shards are those that were kept
        assert len(server.asked) == before


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_where_a_shard_has_no_room_after_all_its_images_are_read_by_range(reason, tmp_path):
    (tmp_path / "kept").mkdir()

    def get_file(*_, **__):
        raise OSError(reason, os.strerror(reason))

    local = tmp_path / "kept" / "a.tar"
    assert shard_cache.read_kept(local, SimpleNamespace(get_file=get_file), "a.tar", 1, 0, 1) is None


def test_a_million_images_take_little_memory(index, tmp_path):
    """Here 20,000, twice: less than an object, a path and a tuple for each would take."""
    names = [f"TrainData/cat/{i:06d}.png".encode() for i in range(20_000)]
    names[5_000:8_000:1000] = [b'"],["', "é".encode(), b"\xff\n"]
    rows = [(i % 3, 5 * i, 5, 2**32 - 1, i % 2) for i in range(20_000)]
    index.shards = [Shard(f"{k}.tar", 10**6) for k in range(3)]
    index.train = index.validation = Part(np.array(rows, ROW).tobytes(), b"".join(name + b"\0" for name in names))
    (tmp_path / "index.json").write_bytes(msgspec.json.encode(index))
    tracemalloc.start()
    dataset = find_dataset(f"file://{tmp_path}")
    taken, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 2 * 80 * len(rows) and peak < 24_000_000
    assert [(int(i.shard.name[0]), i.offset, i.size, i.crc, label) for i, label in dataset.train] == rows
    assert [os.fsencode(image.name) for image, _ in dataset.train] == names
