"""Of Parquet files that are damaged, or lie, no more is believed than may be: each is refused in a
line.
"""

import os
import random
import re
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import psutil
import pyarrow as pa
import pytest
from helpers import archives
from helpers.packed_sets import IN_A_FILE, contents, first_row, refused, theirs
from helpers.servers import serving

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data import parquet_files, parquet_process
from hvdtrain.data.check import check
from hvdtrain.data.find import find_dataset
from hvdtrain.data.sampling import packing_order

EXAMPLES = int(os.environ.get("HVDTRAIN_EXAMPLES", "0"))
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_damaged_file_is_told(out, folder):
    file = out / "data" / "train-00001-of-00004.parquet"
    content = bytearray(file.read_bytes())
    for size in (2000, 7, len(content) - 1):
        file.write_bytes(content[:size])
        assert "train-00001-of-00004.parquet cannot be read as a data set's" in refused(out)
    content[700] ^= 1
    file.write_bytes(content)
    image = find_dataset(str(out)).train[packing_order(24)[IN_A_FILE]][0]
    with pytest.raises(
        Failure, match=r"cannot read image 0 of row group 0 of .*train-00001-of-00004.*: .*CRC"
    ) as told:
        image.read_bytes()
    assert "\n" not in str(told.value)


def test_check_says_of_a_damaged_page_once_what_is_wrong_with_all_its_images(out):
    file = out / "data" / "train-00001-of-00004.parquet"
    content = bytearray(file.read_bytes())
    content[700] ^= 1
    file.write_bytes(content)
    _, problems, _ = check(find_dataset(str(out)))
    [line] = problems
    assert re.fullmatch(
        r"cannot read the 3 images of row group 0 of \S+train-00001-of-00004.parquet: .*CRC.*", line
    )


def test_a_spoiled_footer_is_read_or_is_a_line(out):
    file, rng = out / "data" / "train-00001-of-00004.parquet", random.Random(0)
    content = file.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    for _ in range(EXAMPLES or 8):
        spoiled = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 4))):
            spoiled[rng.randrange(len(content) - 8 - length, len(content) - 4)] = rng.randrange(256)
        file.write_bytes(spoiled)
        try:
            contents(find_dataset(str(out)).train)
        except (UsageError, Failure) as error:
            assert "\n" not in str(error)


def test_a_footer_for_which_pyarrow_ends_the_process_is_a_line(out):
    file = out / "data" / "train-00001-of-00004.parquet"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[-8:-4], "little")
    content[len(content) - 8 - length + 209] = (
        86  # pyarrow 26.0.1 asks for a column outside of any handler
    )
    file.write_bytes(content)
    assert (
        "packed cannot be read as Parquet: a file is damaged, and has ended what read it (SIGABRT)"
        in refused(out)
    )


READ = """
import os, resource, sys
from hvdtrain.data.find import find_dataset
dataset = find_dataset(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    dataset.validation[0][0].read_bytes()
except Exception as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(dataset.train.groups.reader._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_unpacks_to_much_takes_no_memory_here_and_who_reads_it_ends_with_us(
    tmp_path, monkeypatch
):
    """A file of some 10 kB with an image of 300 MB."""
    image = pa.array([{"bytes": bytes(300_000_000)}], pa.struct({"bytes": pa.binary()}))
    label = pa.array([0])
    (
        theirs(tmp_path),
        theirs(tmp_path, "validation", image=image, label=label, rows=1, compression="zstd"),
    )
    assert (tmp_path / "data" / "validation.parquet").stat().st_size < 100_000
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=100
    )
    said, more_kb, pid = done.stdout.splitlines()
    assert "cannot read image 0 of row group 0 of " in said
    assert said.endswith("an image has 300,000,000 bytes, too many for an image")
    assert int(more_kb) < 50_000
    deadline = time.monotonic() + 30
    while psutil.pid_exists(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    monkeypatch.setattr(parquet_process, "MEMORY", 2**28)
    with pytest.raises(Failure, match="it unpacks to more memory than reading may take"):
        find_dataset(str(tmp_path)).validation[0][0].read_bytes()


def test_of_a_server_that_sends_other_than_was_asked_for_little_is_read(out):
    files = {
        f"/{path.relative_to(out)}": bytes(50_000_000) + path.read_bytes()
        for path in out.rglob("*.parquet")
    }
    with serving(files, ranges=False) as server:
        assert "its server sends no parts of files (then copy the data set to a disk)" in refused(
            server.url
        )
        assert server.sent < 200_000_000  # of 400 MB, what was on its way
    with serving(files) as server:
        server.more = 50_000_000
        assert re.search(
            "more than the [0-9,]+ bytes come that were asked for", refused(server.url)
        )
        assert server.sent < 200_000_000


PATHS = pa.array([{"path": "/etc/passwd"}] * 4, pa.struct({"path": pa.string()}))
NULLS = pa.array(
    [{"bytes": b"x"}, None, {"bytes": None}, {"bytes": b"x"}], pa.struct({"bytes": pa.binary()})
)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"label": pa.array([0, 1, 2, 0])}, "a label is 2, and there may be 2 classes"),
        ({"label": pa.array([0, 1, -1, 0])}, "a label is -1"),
        ({"label": pa.array([0, 1, 2**40, 0])}, "a label is 1099511627776"),
        (
            {"label": pa.array([0, 2**40, 0, 1]), "features": False},
            "and there may be 100,000 classes",
        ),
        (
            {"label": pa.array([0, None, 0, None])},
            "2 of 4 rows have no label (null) in column `label`, row 1 first: take these rows out",
        ),
        ({"label": pa.array([0.0, 1.0, 0.0, 1.0])}, "`label` is double, neither integers nor text"),
        (
            {"label": pa.array(["a", None, "a", "b"]), "features": False},
            "1 of 4 rows have no label (null)",
        ),
        ({"label": pa.array(["a"] * 4), "features": False}, "fewer than two classes"),
        ({"label": pa.array([0] * 4), "names": ["a"]}, "fewer than two classes"),
        ({"names": ["a"] * 2}, "of one name"),
        ({"names": [1, 2]}, "Expected `str`, got `int`"),
        ({"names": {"a": 0}}, "Expected `array`"),
        ({"label": None}, "it has no column `label` but image"),
        ({"image": None}, "it has no column `image` but label"),
        ({"image": PATHS}, "`image` is struct<path: string>: neither {bytes, path} nor bytes"),
        ({"image": pa.array(range(4))}, "`image` is int64"),
        ({"label": pa.array([], pa.int64()), "image": NULLS[:0]}, "has no rows"),
        ({"names": ["b", "a"]}, "have other columns or classes"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns, why, tmp_path):
    same = {} if columns.get("names") == ["b", "a"] else columns
    theirs(tmp_path, "validation", **same)
    assert why in refused(theirs(tmp_path, **columns))


def test_an_image_that_is_missing_has_no_bytes_and_its_row_group_is_read(tmp_path):
    theirs(tmp_path, image=NULLS), theirs(tmp_path, "validation")
    found = find_dataset(str(tmp_path))
    assert sorted(image for image, _ in contents(found.train)) == [b"", b"", b"x", b"x"]


def test_a_file_of_paths_alone_is_told(tmp_path):
    theirs(tmp_path, image=pa.array([None] * 4, NULLS.type)), theirs(tmp_path, "validation")
    with pytest.raises(
        Failure, match="none of 2 images of a row group has bytes, as where .*paths"
    ):
        first_row(find_dataset(str(tmp_path))).read_bytes()


def varint(number):
    """As Parquet's footers have numbers: zigzag, 7 bits a byte."""
    number, encoded = 2 * number, b""
    while number > 127:
        number, encoded = number >> 7, encoded + bytes([number & 127 | 128])
    return encoded + bytes([number])


@pytest.mark.parametrize(
    ("claimed", "why"),
    [
        (2**40, "row group 0 has 1,099,511,627,776 rows"),
        (2**62, "row group 0 has"),
        (5000, "777 labels of 5,000 rows"),
    ],
)
def test_rows_that_are_only_claimed_are_refused(claimed, why, tmp_path):
    png = archives.picture(1)
    image = pa.array([{"bytes": png}] * 777, pa.struct({"bytes": pa.binary()}))
    (
        theirs(tmp_path, image=image, label=pa.array([0] * 777), rows=777),
        theirs(tmp_path, "validation"),
    )
    file = tmp_path / "data" / "train.parquet"
    content = file.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length : -8].replace(varint(777), varint(claimed))
    file.write_bytes(content[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    assert re.search(why, refused(tmp_path))


@pytest.mark.parametrize(
    ("limit", "most", "why"),
    [
        ("MAX_FILE_BYTES", 99, "it has [0-9,]+ bytes"),
        ("MAX_ROWS", 5, "and 6 rows"),
        ("MAX_FOOTER_BYTES", 99, "its footer has [0-9,]+ bytes"),
        ("MAX_FOOTERS_BYTES", 99, "bytes of footers"),
        ("MAX_FILE_ROWS", 2, "has 3 rows"),
        ("MAX_GROUP_BYTES", 99, "row group 0 has [0-9,]+ bytes of a column"),
    ],
)
def test_no_more_than_is_believed_of_a_stranger_is_read(limit, most, why, out, monkeypatch):
    monkeypatch.setattr(parquet_files, limit, most)
    with pytest.raises(UsageError, match=why):
        parquet_files.list_dataset(str(out))


def test_one_long_image_that_stands_for_many_rows_is_not_unpacked(tmp_path, monkeypatch):
    image = pa.array([{"bytes": bytes(50_000)}] * 400, pa.struct({"bytes": pa.binary()}))
    (
        theirs(tmp_path, image=image, label=pa.array([0, 1] * 200), rows=400),
        theirs(tmp_path, "validation"),
    )
    monkeypatch.setattr(parquet_files, "MAX_GROUP_BYTES", 2**22)
    _, [file, _] = parquet_files.list_dataset(str(tmp_path))
    with pytest.raises(ValueError, match="more than 4,194,304 bytes of images in a row group"):
        file.read(0, file.open())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///nosuch/folder", "cannot be used: .*No such file"),
        (
            f"file://{os.path.dirname(__file__)}",
            "holds no data set: there is no data/train-00000-of-00001.parquet",
        ),
        ("nosuch://x", "Protocol not known"),
        ("s3://bucket/x", "s3fs"),
        ("http://127.0.0.1:1/x", "cannot be used"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_in_a_line(url, words):
    assert re.search(words, refused(url))


def test_tar_shards_of_before_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "index.json").write_text('{"made_by": "hvdtrain data pack", "format": 3}')
    assert "pack the folder again, `hvdtrain data pack FOLDER file://" in refused(
        f"file://{tmp_path}"
    )


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
