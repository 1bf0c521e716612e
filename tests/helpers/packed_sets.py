"""Small data sets in Parquet: packed here, or as others write them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import archives
from hvdtrain.base.errors import UsageError
from hvdtrain.data import packing
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import scan
from hvdtrain.data.sampling import packing_order

IN_A_GROUP, IN_A_FILE = 3, 6  # images


def pack(folder, url, force=False):
    images = scan(folder)
    mean = sum(path.stat().st_size for path in images.images) // len(list(images.images))
    return packing.pack(images, str(url), IN_A_FILE * mean, force, lambda *_: None)


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


def theirs(
    folder, part="train", features=True, names=("a", "b"), rows=2, compression="snappy", **columns
):
    """Write a file of four images, with these columns in place of those that are right; with a
    dictionary too where it is compressed.
    """
    png = archives.picture(1, (40, 36))
    right = {
        "image": pa.array([{"bytes": png}] * 4, pa.struct({"bytes": pa.binary()})),
        "label": pa.array([0, 1, 0, 1]),
    }
    table = {name: column for name, column in (right | columns).items() if column is not None}
    image, label = {"_type": "Image"}, {"_type": "ClassLabel", "names": names}
    kinds = {"image": image, "img": image, "label": label, "fine": label}
    told = {"info": {"features": {name: kinds[name] for name in table}}}
    (folder / "data").mkdir(parents=True, exist_ok=True)
    written = pa.table(table).replace_schema_metadata(
        {"huggingface": json.dumps(told)} if features else None
    )
    options = {
        "row_group_size": rows,
        "compression": compression,
        "use_dictionary": compression != "none",
    }
    pq.write_table(written, folder / "data" / f"{part}.parquet", **options)
    return folder
