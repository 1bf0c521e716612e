"""Of Parquet files that are damaged, or lie, no more is believed than may be: each is refused in a line."""

import os
import random
import re

import pyarrow as pa
import pytest
from helpers import archives
from helpers.packed_sets import IN_A_FILE, contents, first_row, refused, theirs

from hvdtrain.data import packed, parquet_footer, row_groups
from hvdtrain.data.find import find_dataset
from hvdtrain.data.sampling import packing_order
from hvdtrain.errors import Failure, UsageError

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


PATHS = pa.array([{"path": "/etc/passwd"}] * 4, pa.struct({"path": pa.string()}))
NULLS = pa.array([{"bytes": b"x"}, None, {"bytes": None}, {"bytes": b"x"}], pa.struct({"bytes": pa.binary()}))


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"label": pa.array([0, 1, 2, 0])}, "a label is 2, and there may be 2 classes"),
        ({"label": pa.array([0, 1, -1, 0])}, "a label is -1"),
        ({"label": pa.array([0, 1, 2**40, 0])}, "a label is 1099511627776"),
        ({"label": pa.array([0, 2**40, 0, 1]), "features": False}, "and there may be 100,000 classes"),
        ({"label": pa.array([0, None, 0, 1])}, "3 labels of 4 rows"),
        ({"label": pa.array(["a", "b", "a", "b"])}, "`label` is string and not an integer"),
        ({"label": pa.array([0] * 4), "names": ["a"]}, "fewer than two classes"), ({"names": ["a"] * 2}, "of one name"),
        ({"names": [1, 2]}, "Expected `str`, got `int`"), ({"names": {"a": 0}}, "Expected `array`"),
        ({"label": None}, "it has no column `label` but image"),
        ({"image": None}, "it has no column `image` but label"),
        ({"image": pa.array([b"x"] * 4)}, "`image` is binary and not {bytes, path}"),
        ({"image": PATHS}, "`image` is struct<path: string> and not {bytes, path}"),
        ({"image": pa.array(range(4))}, "`image` is int64"),
        ({"label": pa.array([], pa.int64()), "image": NULLS[:0]}, "has no rows"),
        ({"names": ["b", "a"]}, "have other columns or classes"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_are_refused(columns, why, tmp_path):
    same = {} if columns.get("names") == ["b", "a"] else columns
    theirs(tmp_path, "validation", **same)
    assert why in refused(theirs(tmp_path, **columns))


def test_an_image_that_is_missing_is_told_when_it_is_read(tmp_path):
    theirs(tmp_path, image=NULLS), theirs(tmp_path, "validation")
    with pytest.raises(
        Failure, match="cannot read image . of row group 0 of .*: 1 of 2 images of a row group have no bytes"
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
