"""What says that two runs had the same images, without reading a large data set: `dataset_hash` in a manifest.

datasets/README.md says what it stands for.
"""

import hashlib

from hvdtrain.data import image
from hvdtrain.data.folder import Files, ImageFolder, Samples, content_hash, read_manifest
from hvdtrain.data.storage import on_all_cores

SAMPLE = 100  # images whose contents stand for all, where not all are read
# A data set is read if it has no more than this: the loader will, too.
READ_FILES, READ_BYTES = 20_000, 256 * 2**20


def identity(folder: ImageFolder) -> str:
    """What a manifest has as `dataset_hash`: `sha256:` and the content_hash, or of a large folder that `data build` has
    not made `sample:` and the sample_hash. Failure where an image cannot be read.
    """
    if folder.known_hash:
        return folder.known_hash
    is_small = len(folder.train) + len(folder.validation) <= READ_FILES
    if is_small and sum(path.stat().st_size for path in folder.images) <= READ_BYTES:
        return content_hash(folder)
    sample = sample_hash(folder.train, folder.validation)
    built = read_manifest(folder.root).get("content", {})
    return str(built["hash"]) if "hash" in built and built.get("sample") == sample else f"sample:{sample}"


def sample_hash(*parts: Samples) -> str:
    """A hash of the paths of all images in these parts of a folder, and of the contents of SAMPLE in each, evenly over
    it; 64 hex digits. A copy of the folder has it too. Failure where one of them cannot be read.
    """
    total = hashlib.sha256()
    for part in filter(None, parts):
        assert isinstance(part, Files)
        for column in (b"\0".join(part.classes), part.names, part.starts.tobytes(), part.ends.tobytes()):
            total.update(b"%d\0" % len(column))
            total.update(column)
        count = min(SAMPLE, len(part))
        paths = [part[i * len(part) // count][0] for i in range(count)]
        for _, content in on_all_cores(image.read, paths):
            total.update(hashlib.sha256(content).digest())
    return total.hexdigest()
