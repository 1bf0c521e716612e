"""The `dataset_hash` of a manifest, which tells whether two runs had the same images.

Of a large data set only a sample is read. datasets/README.md describes the hash.
"""

import hashlib

from hvdtrain.data import image
from hvdtrain.data.folder import Files, ImageFolder, Samples, content_hash, read_manifest
from hvdtrain.data.storage import on_all_cores

SAMPLE = 100  # images whose contents stand for all, where not all are read
# A data set of no more than this is read as a whole. The loader will read it, too.
READ_FILES = 20_000
READ_BYTES = 256 * 2**20


def identity(folder: ImageFolder) -> str:
    """Returns the `dataset_hash` of a manifest.

    It is `sha256:` and the content_hash; of a large folder that `data build` has not made, it is
    `sample:` and the sample_hash.

    Raises:
        Failure: An image cannot be read.
    """
    if folder.known_hash:
        return folder.known_hash
    is_small = len(folder.train) + len(folder.validation) <= READ_FILES
    if is_small and sum(path.stat().st_size for path in folder.images) <= READ_BYTES:
        return content_hash(folder)
    sample = sample_hash(folder.train, folder.validation)
    built = read_manifest(folder.root).get("content", {})
    if "hash" in built and built.get("sample") == sample:
        return str(built["hash"])
    return f"sample:{sample}"


def sample_hash(*parts: Samples) -> str:
    """Returns a hash of all paths in these parts of a folder, and of a sample's contents.

    The sample is SAMPLE images of each part, evenly over it. A copy of the folder has the same
    hash, 64 hex digits.

    Raises:
        Failure: An image of the sample cannot be read.
    """
    total = hashlib.sha256()
    for part in filter(None, parts):
        assert isinstance(part, Files)
        classes = b"\0".join(part.folders)
        for column in (classes, part.names, part.starts.tobytes(), part.ends.tobytes()):
            total.update(b"%d\0" % len(column))
            total.update(column)
        count = min(SAMPLE, len(part))
        paths = [part[i * len(part) // count][0] for i in range(count)]
        for _, content in on_all_cores(image.read, paths):
            total.update(hashlib.sha256(content).digest())
    return total.hexdigest()
